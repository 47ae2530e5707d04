#!/bin/bash
# Run a command with CANN's environment, which lies in either of two places, and the host's driver.
for folder in cann ascend-toolkit; do
    if [ -f "/usr/local/Ascend/$folder/set_env.sh" ]; then
        # shellcheck disable=SC1090
        . "/usr/local/Ascend/$folder/set_env.sh"
        break
    fi
done
driver=/usr/local/Ascend/driver/lib64
export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver:$LD_LIBRARY_PATH"
exec "$@"
