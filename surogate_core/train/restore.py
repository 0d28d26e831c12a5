"""A checkpoint's tensors, back into the engine of a run."""

from __future__ import annotations

from surogate_core.engine.engine import Engine
from surogate_core.errors import UserError, printable
from surogate_core.train.checkpoint import Checkpoint


def load_tensors(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load all tensors; every rank reads what it keeps. Raises `UserError` where they are not those of the engine."""
    tensors = {group: checkpoint.tensors(group) for group in checkpoint.groups}
    live = {f"{group}: {name}": t for group, named in engine.state().items() for name, t in named.items()}
    kept = {f"{group}: {name}": i for group, file in tensors.items() for name, i in file.infos.items()}
    differing = [
        name
        for name in sorted(live.keys() | kept.keys())
        if name not in live
        or name not in kept
        or (tuple(live[name].shape), live[name].dtype) != (kept[name].shape, kept[name].torch_dtype)
    ]
    if differing:
        first = printable(", ".join(differing[:5]))
        raise UserError(
            f"{checkpoint.path}: {len(differing)} tensors are not those of this run: {first}"
            f"{', …' if len(differing) > 5 else ''}. Fix: restore the settings of the model, its adapters and the "
            f"optimizer, or start anew with resume_from_checkpoint=false."
        )
    engine.load_state(tensors)
