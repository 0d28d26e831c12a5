"""``python -m surogate_core``: the command line; ``python -I -m`` keeps variables and the user's directory out."""

from __future__ import annotations

import sys

from surogate_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
