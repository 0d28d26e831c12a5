"""How many optimizer steps a run has, for `surogate plan`: from its data, tokenised as the run would, or its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.conf_paths import expanded
from surogate_core.errors import SurogateError

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.assemble import ResolvedModel

SMALL = 16 * 2**20
"""Bytes of local files up to which the data is tokenised; the run finds the result in the cache."""
BYTES_PER_TOKEN = 4.5
"""Bytes of a data file for a token, assumed: English text with the names of its JSON fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The optimizer steps of a run."""

    steps: int | None
    """None if the size of the data is not known here."""
    data: str
    """What is known of the data, as words."""
    estimated: bool = False


def length_of(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> Length:
    """The steps, without reading more than a few megabytes."""
    sizes = [_bytes(entry) for entry in config.datasets]
    if any(size is None for size in sizes):
        known = config.max_steps if config.max_steps > 0 else None
        return Length(steps=known, data="the size of the data is not known before it is downloaded")
    nbytes = sum(size for size in sizes if size is not None)
    if nbytes > SMALL:
        return _estimated(config, nbytes)
    try:
        return _counted(config, registry, resolved)
    except SurogateError as error:
        first = str(error).splitlines()[0]
        return Length(steps=config.max_steps if config.max_steps > 0 else None, data=f"the data: {first}")


def _bytes(entry: Mapping[str, Any]) -> int | None:
    """Bytes of the files of a data set; None if it is no local one."""
    path = str(entry.get("path", ""))
    if path.startswith("pkg://"):
        return 0
    local = Path(expanded(path))
    if local.is_file():
        return local.stat().st_size
    if local.is_dir():
        return sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    return None


def _estimated(config: RunConfig, nbytes: int) -> Length:
    tokens = nbytes / BYTES_PER_TOKEN * (1 - config.validation_split_ratio)
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    steps = (
        config.max_steps if config.max_steps > 0 else math.ceil(config.num_epochs * tokens / config.sequence_len / rows)
    )
    return Length(
        steps=steps, data=f"about {tokens / 1e6:,.0f} million tokens, by the size of the files", estimated=True
    )


def _counted(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> Length:
    from surogate_core.data.pipeline import prepare
    from surogate_core.run.tokenizer_of_run import tokenizer_of_run
    from surogate_core.train.loop import total_steps

    pretrained = config.model.path is not None and not config.from_scratch
    tokenizer, _ = tokenizer_of_run(config, vocab_size=resolved.model.vocab_size, pretrained=pretrained)
    spec = registry.get("task", config.task)
    data = prepare(config, tokenizer, registry.all("dataset"), trains_prompts=spec.trains_prompts)
    train = data.report.train
    words = f"{train.documents:,} documents, {train.tokens:,} tokens in {len(data.train):,} rows"
    return Length(steps=total_steps(config, spec.build(config, data).steps(), done=0), data=words)
