"""The commands of the accuracy table: ``python benchmarks/accuracy COMMAND --out DIR [--tiny]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COMMANDS = {
    "data": "collect text, generate problems, train a tokenizer",
    "pretrain": "train the base model for some minutes, from where the last call stopped",
    "finetune": "train and measure the cells of the table that have no result yet",
    "anchor": "the same fine-tuning by TRL",
    "reinforce": "GRPO on the generated problems, beside TRL",
    "curves": "the runs of `reinforce` as a table and a picture",
    "rounding": "which operands' rounding costs how much loss, without training",
    "table": "write the table and its picture",
    "parcel": "split a directory into parts of a size, or join them",
}


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="accuracy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in COMMANDS.items():
        module = importlib.import_module(f"accuracy.{name}")
        own = commands.add_parser(name, help=what, description=module.__doc__)
        own.add_argument("--out", type=Path, required=True, help="directory of everything that the commands write")
        own.add_argument("--tiny", action="store_true", help="sizes for a trial on a CPU")
        module.add_options(own)
        own.set_defaults(module=module)
    given = parser.parse_args()
    module = given.module
    if given.tiny:
        defaults = parser.parse_args([given.command, "--out", str(given.out)])
        for key, value in module.TINY.items():
            if getattr(given, key) == getattr(defaults, key):
                setattr(given, key, value)
    module.run(given)


if __name__ == "__main__":
    main()
