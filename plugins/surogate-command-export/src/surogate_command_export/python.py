"""`export` and `merge` from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surogate_core.service.app import contained, plain


def export(
    model: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    format: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a model as one file, with its adapters folded in: ``surogate.export(run.path, "shop.gguf", type="q8_0")``.

    `model`: a directory, a run, a checkpoint, an adapter or a hub id. `to`: the file, or a directory to write it in.
    `format`: without it the one whose files end as `to` does.
    `adapter`: an adapter, a run or a checkpoint to fold in, where that is not part of `model`. `keys`: keys of the
    configuration, such as ``{"rope_scaling": "yarn"}``. `options`: those of the format. Returns the file. Raises
    `UserError` or `MachineError`.
    """
    with contained():
        from surogate_command_export.conversion import convert, format_by_suffix, format_of, options_of, place_of
        from surogate_core.service.app import Arguments, registry_for
        from surogate_core.service.config import with_keywords

        source = with_keywords(None, {key: plain(value) for key, value in (keys or {}).items()})
        registry = registry_for(Arguments(config_file=source))
        spec = format_of(registry, format) if format is not None else format_by_suffix(registry, Path(to))
        word = os.fspath(model)
        chosen = options_of(spec, {name: plain(value) for name, value in options.items()})
        place = place_of(os.fspath(to), spec, word)
        top = None if adapter is None else os.fspath(adapter)
        return convert(word, spec, chosen, place, registry, adapter=top, config_file=source).file


def merge(run: Path, output: Path, *, base_model: str | None = None, parts: str = "text") -> Path:
    """Fold a run's adapter into its base model; returns the new model's directory, `output`.

    `base_model`: where the base is now, if it has moved. `parts`: of a base of several parts, "text" writes its
    language model alone and "all" the others too, as they are. Raises `UserError` or `MachineError`.
    """
    from surogate_command_export.merge import merge as fold
    from surogate_core.service.plugins import model_families

    fold(base_model, run, output, parts=parts, families=model_families)
    return output
