"""`python -m kvbackend.doctor`."""

import sys

from kvbackend.doctor.command import main, parse

if __name__ == "__main__":
    sys.exit(main(parse()))
