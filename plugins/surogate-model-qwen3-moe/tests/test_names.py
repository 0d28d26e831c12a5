"""The names and shapes of exported tensors, as lists: those of the published files, which vLLM and SGLang read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surogate_model_qwen3_moe.model import build
from surogate_model_qwen3_moe.presets import PRESETS

from surogate_core.plugin import CardFacts, ModelDir, TensorFile, export_adapter
from surogate_core.service.engine import Engine
from surogate_core.service.files import export_full
from surogate_testing import tiny

CONFIG = {**PRESETS["tiny"], "num_hidden_layers": 2, "hidden_size": 32, "num_experts": 3, "tie_word_embeddings": False}
D, Q, KV, F, I = 32, 4 * 32, 2 * 32, 384, 128  # noqa: E741
ATTENTION = {"q_proj": (Q, D), "k_proj": (KV, D), "v_proj": (KV, D), "o_proj": (D, Q)}


def mlp(features: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (features, D), "up_proj": (features, D), "down_proj": (D, features)}


PROJECTIONS = {
    **{f"model.layers.{i}.self_attn.{name}": shape for i in (0, 1) for name, shape in ATTENTION.items()},
    **{f"model.layers.0.mlp.{name}": shape for name, shape in mlp(F).items()},
    **{f"model.layers.1.mlp.experts.{e}.{name}": shape for e in range(3) for name, shape in mlp(I).items()},
}
ROUTER = "model.layers.1.mlp.gate.weight"
OTHERS = {
    "model.embed_tokens.weight": (1024, D),
    "lm_head.weight": (1024, D),
    "model.norm.weight": (D,),
    ROUTER: (3, D),
    **{
        f"model.layers.{i}.{name}.weight": (D,)
        for i in (0, 1)
        for name in ("input_layernorm", "post_attention_layernorm")
    },
    **{f"model.layers.{i}.self_attn.{name}.weight": (32,) for i in (0, 1) for name in ("q_norm", "k_norm")},
}


def engine(**changes: object) -> Engine:
    return tiny.engine(config=CONFIG, build=build, **changes)


def shapes(file: TensorFile) -> Mapping[str, tuple[int, ...]]:
    return {name: info.shape for name, info in file.infos.items()}


def test_a_model_has_the_names_of_the_published_files(tmp_path: Path) -> None:
    tensors = engine().parameters.base_tensors()
    out = export_full(
        tmp_path / "m", tensors, config=CONFIG, tokenizer=None, card=CardFacts(title="names"), max_shard_bytes=40_000
    )
    opened = ModelDir.open(out)
    assert len(opened.files) > 3
    found = {name: shape for file in opened.files.values() for name, shape in shapes(file).items()}
    assert found == {**OTHERS, **{f"{name}.weight": shape for name, shape in PROJECTIONS.items()}}


def test_an_adapter_has_two_matrices_for_each_expert(tmp_path: Path) -> None:
    """vLLM and SGLang load 2-D tensors per expert; one tensor of all experts they drop or refuse."""
    parameters = engine(lora=tiny.lora(rank=4, expert_rank=2, train_router=True)).parameters
    out = export_adapter(
        tmp_path / "a",
        parameters.adapter_tensors(),
        rank=4,
        alpha=8,
        dropout=0.1,
        base_model=None,
        card=CardFacts(title="names"),
    )
    expected: dict[str, tuple[int, ...]] = {f"base_model.model.{ROUTER}": (3, D)}
    for name, (outputs, inputs) in PROJECTIONS.items():
        rank = 2 if ".experts." in name else 4
        expected[f"base_model.model.{name}.lora_A.weight"] = (rank, inputs)
        expected[f"base_model.model.{name}.lora_B.weight"] = (outputs, rank)
    assert shapes(TensorFile(out / "adapter_model.safetensors")) == expected
