"""How many optimizer steps a run has, for `surogate plan`: from its data, tokenised as the run would, or its size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import SurogateError
from surogate_core.service.config import expanded
from surogate_core.service.data import FileKind, kind_of, list_directory
from surogate_core.service.files import PACKAGE_SCHEME, resolve_package_path

if TYPE_CHECKING:
    from surogate_core.service.config import RunConfig
    from surogate_core.service.plugins import Registry
    from surogate_core.service.setup import ResolvedModel

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
    sampled: bool = False
    """Whether the task samples its steps from the model, so that their size is not known."""


def length_of(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> Length:
    """The steps, without reading more than a few megabytes."""
    known = config.max_steps if config.max_steps > 0 else None
    if not registry.get("task", config.task).needs_data:
        return Length(steps=known, data="the task makes its data while it trains", sampled=True)
    try:
        found = [_files(entry) for entry in config.datasets]
        if any(files is None for files in found):
            return Length(steps=known, data="the size of the data is not known before it is downloaded")
        sizes = [sum(file.stat().st_size for file in files or ()) for files in found]
        if sum(sizes) <= SMALL:
            return _counted(config, registry, resolved)
    except SurogateError as error:
        return Length(steps=known, data=f"the data: {str(error).splitlines()[0]}")
    if not all(_by_size(entry, files or []) for entry, files in zip(config.datasets, found, strict=True)):
        return Length(steps=known, data="the number of tokens is not known without reading the data")
    return _estimated(config, sum(n * entry.get("weight", 1) for n, entry in zip(sizes, config.datasets, strict=True)))


def _files(entry: Mapping[str, Any]) -> list[Path] | None:
    """The files that are read for a data set; None if it is no local one."""
    path = str(entry.get("path", ""))
    if path.startswith(PACKAGE_SCHEME):
        return []
    local = Path(expanded(path))
    if local.is_dir():
        splits = list_directory(local).splits
        return splits.get(str(entry.get("split") or "train")) or [file for files in splits.values() for file in files]
    return [local] if local.is_file() else None


def _by_size(entry: Mapping[str, Any], files: Sequence[Path]) -> bool:
    """Whether the sizes of the files say how much text is trained on."""
    kinds = [kind_of(file.name) for file in files]
    text = all(isinstance(kind, FileKind) and kind.compression is None and kind.suffix != ".parquet" for kind in kinds)
    whole = entry.get("split") in (None, "train") and not any(entry.get(key) for key in ("samples", "subset"))
    return text and whole


def _estimated(config: RunConfig, nbytes: float) -> Length:
    """The steps for text of the size, counted as often as an epoch takes it."""
    from surogate_core.service.setup import tokens_per_step

    held_out = 0 if config.validation_datasets else config.validation_split_ratio
    tokens = nbytes / BYTES_PER_TOKEN * (1 - held_out)
    steps = (
        config.max_steps if config.max_steps > 0 else math.ceil(config.num_epochs * tokens / tokens_per_step(config))
    )
    return Length(
        steps=steps, data=f"about {tokens / 1e6:,.0f} million tokens, by the size of the files", estimated=True
    )


def _counted(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> Length:
    from surogate_core.service.setup import kept

    return kept(
        "lengths",
        config,
        registry,
        lambda: _depends(config, resolved),
        find=lambda: _tokenised(config, registry, resolved),
        write=asdict,
        read=lambda facts: Length(**facts),
    )


def _depends(config: RunConfig, resolved: ResolvedModel) -> list[Any]:
    own = config.tokenizer in (None, config.model.path) and resolved.commit is not None
    return [resolved.commit, resolved.model.vocab_size, *local_data(config, but_tokenizer=own)]


def local_data(config: RunConfig, *, but_tokenizer: bool = False) -> list[Any]:
    """What the tokens of a run depend on besides its keys: the files of data, template and tokenizer, and the date,
    which a chat template may write. Raises `NotKeptError` if data or a tokenizer is not on this machine.
    """
    from surogate_core.service.setup import NotKeptError, file_facts

    entries = [*config.datasets, *config.validation_datasets]
    needed = [str(entry.get("path", "")) for entry in entries]
    if not but_tokenizer:
        needed.append(config.tokenizer or config.model.path or "")
    named = [value for entry in entries for value in entry.values() if isinstance(value, str)]
    files = {word: Path(expanded(resolve_package_path(word))) for word in [*needed, *named, config.template] if word}
    if any(word not in files or not files[word].exists() for word in needed):
        raise NotKeptError("data or tokenizer elsewhere")
    facts = [file_facts(path) for _, path in sorted(files.items()) if path.exists()]
    return [date.today().isoformat(), str(Path.cwd()), facts]


def _tokenised(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> Length:
    from surogate_core.plugin import total_steps
    from surogate_core.service.data import prepare
    from surogate_core.service.setup import on_one_gpu, tokenizer_of_run

    pretrained = config.model.path is not None and not config.from_scratch
    tokenizer, _ = tokenizer_of_run(config, vocab_size=resolved.model.vocab_size, pretrained=pretrained)
    # The rows of a step of all GPUs are those of one that has all micro-batches.
    config = on_one_gpu(config)
    spec = registry.get("task", config.task)
    data = prepare(config, tokenizer, registry.all("dataset"), trains_prompts=spec.trains_prompts, group=spec.group)
    train = data.report.train
    words = f"{train.documents:,} documents, {train.tokens:,} tokens in {len(data.train):,} rows"
    return Length(steps=total_steps(config, spec.task_of(config, data).steps(), done=0), data=words)
