"""The cells of the table: base format × recipe × seed, and the ways out for a recipe that loses accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

BASES = ("bf16", "nf4", "fp8", "nvfp4")
"""How the frozen weights are stored: as they are, or in a weight format."""
RECIPES = ("bf16", "fp8-hybrid", "nvfp4")
SEEDS = (1, 2, 3)
GROUPS = ("lora", "full", "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fine-tuning."""

    row: str
    """The line of the table; the seeds of a line differ in nothing else."""
    group: str
    seed: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run, apart from those that all cells share."""

    @property
    def name(self) -> str:
        """Name of the cell's files."""
        return f"{self.row.replace(' ', '_').replace(',', '')}-s{self.seed}"


SEARCHED: Mapping[str, Any] = {"name": "nvfp4", "frozen_blocks": "1x16", "search_scales": True}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16 nvfp4, first 2 and last 2 layers in bf16": {
        "recipe": "nvfp4", "skip_quant_first_layers": 2, "skip_quant_last_layers": 2,
    },
    "bf16 nvfp4, blocks of 1x16": {"recipe": {"name": "nvfp4", "frozen_blocks": "1x16"}},
    "bf16 nvfp4, blocks of 1x16, searched": {"recipe": SEARCHED},
    "bf16 nvfp4, LoftQ": {"recipe": "nvfp4", "lora_init": "loftq"},
    "bf16 nvfp4, blocks of 1x16, searched, LoftQ": {"recipe": SEARCHED, "lora_init": "loftq"},
    "nf4 bf16, LoftQ": {"recipe": "bf16", "qlora_format": "nf4", "lora_init": "loftq"},
    "nvfp4 bf16, searched": {"recipe": "bf16", "qlora_format": "nvfp4", "qlora_search_scales": True},
    "nvfp4 bf16, searched, LoftQ": {
        "recipe": "bf16", "qlora_format": "nvfp4", "qlora_search_scales": True, "lora_init": "loftq",
    },
}  # fmt: skip
"""Ways to lose less: line of the table → its keys."""


def cells(groups: Sequence[str] = GROUPS, seeds: Sequence[int] = SEEDS) -> Iterator[Cell]:
    """The cells, the seeds last, so that every line has a figure early."""
    for seed in seeds:
        if "lora" in groups:
            for recipe, base in product(RECIPES, BASES):
                keys: dict[str, Any] = {"recipe": recipe} | ({} if base == "bf16" else {"qlora_format": base})
                yield Cell(row=f"{base} {recipe}", group="lora", seed=seed, keys=keys)
        if "options" in groups:
            for row, own in OPTIONS.items():
                yield Cell(row=row, group="options", seed=seed, keys=own)
        if "full" in groups:
            for recipe in RECIPES:
                yield Cell(row=f"full {recipe}", group="full", seed=seed, keys={"recipe": recipe, "lora": False})
