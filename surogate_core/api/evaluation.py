"""`evaluate`: held-out loss and perplexity of models from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api.process import contained, plain
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from surogate_core.run.evaluation import Evaluation

Name = str | os.PathLike[str]


def evaluate(models: Name | Sequence[Name], **keys: Any) -> list[Evaluation]:
    """Measure models on held-out rows: ``surogate.evaluate([run.path, "a/base"])``.

    `models`: directories, runs, checkpoints, adapters or hub ids; each is compared with the first. `keys`: keys of the
    configuration for all of them, such as ``datasets=[{"path": "test.jsonl"}]``; without rows those that the first run
    held out. Raises `UserError` or `MachineError`.
    """
    names = [os.fspath(one) for one in ([models] if isinstance(models, str | os.PathLike) else models)]
    if not names or len(set(names)) < len(names):
        raise UserError("evaluate: no model is named, or one is named twice. Fix: name each model once.")
    with contained():
        from surogate_core.cli.evaluate import prepared_models
        from surogate_core.config.grammar import encode
        from surogate_core.run.evaluation import evaluate_all

        words = [f"{key}={encode(plain(value))}" for key, value in keys.items()]
        return evaluate_all(*prepared_models(names, words, None))
