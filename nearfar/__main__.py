"""`python -m nearfar` is the `nearfar` command."""

import sys

from nearfar.cli import main

if __name__ == "__main__":
    sys.exit(main())
