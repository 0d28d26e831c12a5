"""Files of the family: names, shapes and dtypes of exports and adapters, and files that lack a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from surogate_model_nemotron_h.model import build
from surogate_model_nemotron_h.presets import PRESETS

from surogate_core.plugin import CardFacts, ModelDir, TensorFile, UserError, export_adapter
from surogate_core.service.engine import Engine
from surogate_core.service.files import export_full
from surogate_testing import tiny

CONFIG = {**PRESETS["tiny"], "hidden_size": 32, "n_routed_experts": 3, "vocab_size": 61}
D, INNER, CHANNELS, F, I, SHARED = 32, 8 * 32, 8 * 32 + 2 * 2 * 16, 384, 96, 192  # noqa: E741
SCAN = {
    "A_log": (8,),
    "D": (8,),
    "dt_bias": (8,),
    "conv1d.bias": (CHANNELS,),
    "conv1d.weight": (CHANNELS, 1, 4),
    "in_proj.weight": (INNER + CHANNELS + 8, D),
    "norm.weight": (INNER,),
    "out_proj.weight": (D, INNER),
}
EXPERTS = {
    "gate.weight": (3, D),
    "gate.e_score_correction_bias": (3,),
    "shared_experts.up_proj.weight": (SHARED, D),
    "shared_experts.down_proj.weight": (D, SHARED),
    **{f"experts.{e}.up_proj.weight": (I, D) for e in range(3)},
    **{f"experts.{e}.down_proj.weight": (D, I) for e in range(3)},
}
ATTENTION = {
    "q_proj.weight": (4 * 32, D),
    "k_proj.weight": (2 * 32, D),
    "v_proj.weight": (2 * 32, D),
    "o_proj.weight": (D, 4 * 32),
}
MLP = {"up_proj.weight": (F, D), "down_proj.weight": (D, F)}
LAYERS: Sequence[Mapping[str, tuple[int, ...]]] = (SCAN, EXPERTS, ATTENTION, SCAN, MLP)
MIXERS: Mapping[str, tuple[int, ...]] = {
    f"backbone.layers.{number}.mixer.{name}": shape
    for number, mixer in enumerate(LAYERS)
    for name, shape in mixer.items()
}
SHAPES = {
    "backbone.embeddings.weight": (61, D),
    "backbone.norm_f.weight": (D,),
    "lm_head.weight": (61, D),
    **{f"backbone.layers.{number}.norm.weight": (D,) for number in range(5)},
    **MIXERS,
}
WIDE = ("A_log", ".D", "dt_bias", "gate.weight", "e_score_correction_bias")
"""Ends of the names of tensors that are in fp32 whatever the model's dtype."""


@pytest.fixture(scope="module")
def made() -> Engine:
    return tiny.engine(config=CONFIG, build=build, dtype=torch.bfloat16, lora=tiny.lora(rank=4, expert_rank=2))


def exported(directory: Path, made: Engine, without: str = "") -> ModelDir:
    tensors = ((name, tensor) for name, tensor in made.parameters.base_tensors() if name != without)
    card = CardFacts(title="names")
    return ModelDir.open(
        export_full(directory, tensors, config=CONFIG, tokenizer=None, card=card, fused=made.model.fused_tensors())
    )


def infos(files: ModelDir) -> Mapping[str, tuple[tuple[int, ...], str]]:
    return {name: (info.shape, info.dtype) for file in files.files.values() for name, info in file.infos.items()}


def test_an_export_has_the_names_of_the_published_files_and_keeps_fp32(made: Engine, tmp_path: Path) -> None:
    found = infos(exported(tmp_path / "m", made))
    assert {name: shape for name, (shape, _) in found.items()} == SHAPES
    assert {name: dtype for name, (_, dtype) in found.items()} == {
        name: "F32" if name.endswith(WIDE) else "BF16" for name in SHAPES
    }


def test_files_without_a_decay_are_refused(made: Engine, tmp_path: Path) -> None:
    name = "backbone.layers.3.mixer.A_log"
    files = exported(tmp_path / "m", made, without=name)
    with pytest.raises(UserError, match=rf"{name} is missing"):
        files.check(SHAPES)


def test_tensors_that_predict_further_tokens_are_named_apart() -> None:
    assert build(CONFIG).carried == ("mtp.",)


def test_an_adapter_has_two_matrices_for_each_projection_and_expert(made: Engine, tmp_path: Path) -> None:
    out = export_adapter(
        tmp_path / "a",
        made.parameters.adapter_tensors(),
        rank=4,
        alpha=8,
        dropout=0.0,
        base_model=None,
        card=CardFacts(title="names"),
        model=made.model,
    )
    found = {name: info.shape for name, info in TensorFile(out / "adapter_model.safetensors").infos.items()}
    expected = {}
    for name, shape in MIXERS.items():
        if not name.endswith("proj.weight"):
            continue
        rank, module = 2 if ".experts." in name else 4, f"base_model.model.{name.removesuffix('.weight')}"
        expected[f"{module}.lora_A.weight"] = (rank, shape[1])
        expected[f"{module}.lora_B.weight"] = (shape[0], rank)
    assert found == expected
