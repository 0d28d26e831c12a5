"""What comparisons with TRL share: a tiny model whose words are tokens, our engine of it, and a clean process.

On the path of pytest (`pythonpath` in pyproject.toml): ``from trl_parity import save_model``. The fixtures are in
tests/run/conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from surogate_model_qwen3.model import build
from tiny_qwen3 import ADAMW, BF16, tiny_config
from torch import Tensor

from surogate_core.bundles import Objective
from surogate_core.engine.engine import Engine
from surogate_testing import tiny

END, PAD, WORDS = 59, 60, 61


def save_model(directory: Path) -> Path:
    """A model and a tokenizer whose word ``wN`` is token N."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_config(initializer_range=0.2, eos_token_id=END, pad_token_id=PAD)))
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))  # type: ignore[call-arg]
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}", pad_token=f"w{PAD}")
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def same_environment() -> Iterator[None]:
    """Accelerate keeps its state in the process and in variables of the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def distance(start: Mapping[str, Tensor], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> float:
    """The squared distance of two final weights, as a share of the squared way from the start to the first."""
    moved = sum((theirs[name] - start[name]).double().square().sum().item() for name in ours)
    apart = sum((theirs[name] - value).double().square().sum().item() for name, value in ours.items())
    return apart / moved


def engine_of(
    directory: Path, objective: Objective, *, tokens: int, borders: int, max_grad_norm: float, **changes: Any
) -> Engine:
    """An engine that trains the model of a directory as TRL does; `changes` are those of `tiny.engine`."""
    config = changes.pop("config", None) or tiny_config()
    return tiny.engine(
        config,
        source=tiny.tensor_source(load_file(directory / "model.safetensors")),
        build=build,
        recipe=BF16,
        optimizer=ADAMW,
        objective=objective,
        tokens=tokens,
        borders=borders,
        max_grad_norm=max_grad_norm,
        weight_decay=0.0,
        **{"columns": objective.columns, **changes},
    )
