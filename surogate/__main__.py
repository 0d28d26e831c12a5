"""``python -m surogate``: the command line."""

from __future__ import annotations

import sys

from surogate_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
