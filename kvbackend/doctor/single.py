"""Pack the doctor into one file that any Python 3.9 or newer runs alone: `python -m kvbackend.doctor.single doctor.py`.

The file is a zip that Python executes, so it can be copied to a host that has neither kvbackend nor pip.
"""

from __future__ import annotations

import os
import sys
import zipfile

_MAIN = "import sys\nfrom kvbackend.doctor.command import main, parse\nsys.exit(main(parse()))\n"


def pack(path: str) -> None:
    """Write the file."""
    import kvbackend

    here = os.path.dirname(os.path.abspath(kvbackend.__file__))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        archive.writestr("kvbackend/__init__.py", f"__version__ = {kvbackend.__version__!r}\n")
        for part in ("doctor", "compat"):
            for folder, _, names in sorted(os.walk(os.path.join(here, part))):
                for name in sorted(n for n in names if n.endswith((".py", ".json"))):
                    full = os.path.join(folder, name)
                    archive.write(full, os.path.join("kvbackend", os.path.relpath(full, here)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"got {len(sys.argv) - 1} arguments; one is allowed, the file to write: give a name such as doctor.py")
    pack(sys.argv[1])
