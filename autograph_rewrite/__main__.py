"""`python -m autograph_rewrite`: the command line, where `autograph-rewrite` is not on the PATH."""

import sys

from autograph_rewrite.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
