"""`python -m nybble`: the command line where no script is installed."""

import sys

from nybble.cli import main

if __name__ == "__main__":
    sys.exit(main())
