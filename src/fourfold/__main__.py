"""`python -m fourfold`: the same as the `fourfold` command."""

import sys

from fourfold.cli import main

if __name__ == "__main__":
    sys.exit(main())
