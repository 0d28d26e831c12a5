"""Writes a trained model as a file for another program, in a format that a plugin offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surogate_command_export.merge import merge_warnings
from surogate_core.plugin import (
    ConfigError,
    Problem,
    UserError,
    atomic,
    bundles,
    inference,
    load_run_config,
    run_directory,
)
from surogate_core.service.config import Builder
from surogate_core.service.engine import distinct, pieces
from surogate_core.service.files import fold
from surogate_core.service.inference import Named, named, on_its_base, prepare, with_adapter
from surogate_core.service.model import expanded
from surogate_core.service.plugins import field_types

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.service.config import Source
    from surogate_core.service.plugins import Registry

PARTS = ("model", "adapter", "merged")
"""Directories of a run's result: the run's name says more than theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of `convert`."""

    file: Path
    others: tuple[Path, ...]
    """Text files that belong to it."""
    notes: tuple[str, ...]


def format_of(registry: Registry, name: str) -> bundles.ExportFormat:
    """The export format of a name; raises `UserError` if there is none."""
    known = registry.names("export")
    if name not in known:
        missing = registry.explain_missing("export", name, known)
        raise UserError(f"--format {name}: {missing.message} Fix: {missing.fix or 'hf, or a format of a plugin'}")
    found: bundles.ExportFormat = registry.get("export", name)
    return found


def formats_by_suffix(registry: Registry, file: Path) -> list[bundles.ExportFormat]:
    """The export formats whose files end as a file's name does."""
    known: Mapping[str, bundles.ExportFormat] = registry.all("export")
    return [spec for spec in known.values() if spec.suffix == file.suffix]


def format_by_suffix(registry: Registry, file: Path) -> bundles.ExportFormat:
    """The one of them; raises `UserError` if there is none, or several."""
    known, found = registry.all("export"), formats_by_suffix(registry, file)
    if len(found) != 1:
        names = ", ".join(f'"{name}" ({spec.suffix})' for name, spec in known.items()) or "none is installed"
        raise UserError(f"{file}: does not tell the format. Fix: set `format`: {names}")
    return found[0]


def options_of(spec: bundles.ExportFormat, values: Mapping[str, Any], *, prefix: str = "") -> Any:
    """An instance of the format's options; raises `ConfigError`, whose keys begin with `prefix`."""
    known = [f"{prefix}{name}" for name in field_types(spec.options)]

    def unknown(key: str, names: Iterable[str]) -> Problem:
        near = get_close_matches(key, known, n=1)
        return Problem(key=key, message=f"is no option of {spec.name}.", fix=near[0] if near else ", ".join(known))

    builder = Builder(lambda key: "", unknown)
    found = builder.dataclass(spec.options, values, prefix)
    if found is None:
        raise ConfigError(builder.problems)
    return found


def title_of(word: str) -> str:
    """A model's name, from the word that a user has for it."""
    path = run_directory(word)
    if not path.is_dir():
        return word.partition("@")[0].rsplit("/", 1)[-1]
    path = path.resolve()
    return path.parent.name if path.name in PARTS else path.name


def place_of(target: str, spec: bundles.ExportFormat, word: str) -> Path:
    """The file to write; raises `UserError` for a target of another kind."""
    place = Path(target).expanduser()
    if place.is_dir() or target.endswith("/"):
        return place / f"{title_of(word)}{spec.suffix}"
    if place.suffix != spec.suffix:
        raise UserError(f"--to {target}: is no {spec.suffix} file. Fix: --to {place}{spec.suffix}, or a directory")
    return place


def convert(
    word: str,
    spec: bundles.ExportFormat,
    options: Any,
    place: Path,
    registry: Registry,
    *,
    adapter: str | None = None,
    overrides: Sequence[str] = (),
    config_file: Source | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write the model that a word names, with its adapters folded in, as the file `place`.

    A former file stays until the new one is complete. `overrides` and `config_file`: keys of a run, as for
    `surogate generate`. `progress` receives the bytes written and in total. Raises `UserError` or `MachineError`.
    """
    if adapter is not None:
        found = with_adapter(word, adapter)
    else:
        found = named(word, fix=on_its_base("surogate export"))
    prepared = prepare(
        found, load_run_config([*found.overrides, *overrides], config_file=config_file, registry=registry), registry
    )
    with atomic.replaced_file(place, what="--to", fix="choose another place") as file:
        job = _job(prepared, spec, name=title_of(adapter or word), file=file, place=place, progress=progress)
        done = spec.write(job, options)
    for path, text in done.texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(path, text.encode(), key=str(path.parent))
    notes = (*found.notes, *_warnings(prepared, found, adapter or word), *done.notes)
    return Converted(file=place, others=tuple(done.texts), notes=notes)


def _job(
    prepared: inference.PreparedModel,
    spec: bundles.ExportFormat,
    *,
    name: str,
    file: Path,
    place: Path,
    progress: Callable[[int, int], None],
) -> bundles.ExportJob:
    model, weights, adapter = prepared.model, prepared.resolved.weights, prepared.resolved.adapter
    assert weights is not None, "a word names a model that has weights"
    stack = adapter.stack if adapter is not None else ()
    specs = distinct(pieces(model, lora=None, max_seqlen=1))
    shapes = {name: tuple(shape) for s in specs for name, shape in expanded(s.hf_name, s.shape).items()}

    def get(name: str) -> Tensor:
        return fold(name, weights.get(name), stack)

    describe, config = prepared.resolved.family.exports.get(spec.name), model.complete_config()
    return bundles.ExportJob(
        name=name,
        config={**config, "tie_word_embeddings": model.tied},
        shapes=shapes,
        dtypes={n: torch.bfloat16 if weights.is_quantised(n) else weights.header(n)[1] for n in shapes},
        get=get,
        tokenizer=prepared.tokenizer,
        stop_ids=prepared.stop_ids,
        sampling=prepared.sampling,
        generation_config=prepared.generation_config,
        family=describe(config) if describe is not None else {},
        file=file,
        place=place,
        progress=progress,
    )


def _warnings(prepared: inference.PreparedModel, found: Named, word: str) -> tuple[str, ...]:
    if not found.stack or found.files is None or prepared.resolved.weights is None:
        return ()
    base = str(prepared.config.model.path)
    return merge_warnings(base, prepared.resolved.weights, found.stack[-1], found.files, run_directory(word))
