"""What the shipped model families say to the shipped export formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from surogate_export_gguf.architectures import Architecture

from surogate_core.bundles import ExportJob, ModelFamily, Sampling
from surogate_core.dsl.experts import expanded
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.errors import UserError
from surogate_core.plugins.registry import model_families

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3-moe": "qwen3moe", "gemma3": "gemma3"}
ARCHITECTURES |= {"mistral": "llama", "smollm3": "smollm3", "granite": "granite"}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"mlp_only_layers": []},  # llama.cpp has experts in every layer
    "gemma3": {"sliding_window_pattern": 6},
    "mistral": {"sliding_window": None},
}


def described(family: ModelFamily, **changes: Any) -> Architecture:
    """A preset's model as the family describes it."""
    config = {"model_type": family.hf_model_types[0], **family.presets["tiny"], **changes}
    specs = distinct(pieces(family.build(config), lora=None, max_seqlen=1))
    shapes = {name: tuple(shape) for s in specs for name, shape in expanded(s.hf_name, s.shape).items()}
    job: Any = ExportJob(
        name="tiny",
        config=config,
        shapes=shapes,
        dtypes={},
        get=lambda name: pytest.fail("no tensor is read"),
        tokenizer=None,  # type: ignore[arg-type]
        stop_ids=frozenset(),
        sampling=Sampling(temperature=1.0),
        family=family.exports["gguf"](config),
        file=Path("tiny.gguf"),
        place=Path("tiny.gguf"),
    )
    return Architecture(job)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_a_shipped_family_has_a_place_in_a_gguf_file(name: str) -> None:
    found = described(model_families()[name], **CHANGES.get(name, {}))
    assert found.name == ARCHITECTURES[name]
    assert len({tensor.name for tensor in found.tensors}) == len(found.tensors) > 10


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}, "`norm_topk_prob` is false; qwen3moe always divides"),
        ("qwen2", {"head_dim": 96}, "`head_dim` is another width of attention than hidden_size, which qwen2 lacks"),
        ("mistral", {"sliding_window": 64}, "`sliding_window` is 64, and llama.cpp lets every token"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "`no_rope_layers` is not every fourth layer"),
        ("smollm3", {"use_sliding_window": True}, "`use_sliding_window`: llama.cpp computes this model without"),
    ],
)
def test_a_family_refuses_what_the_reader_of_the_file_lacks(name: str, changes: dict[str, Any], reason: str) -> None:
    family = model_families()[name]
    with pytest.raises(UserError, match=reason):
        family.exports["gguf"]({**family.presets["tiny"], **changes})
