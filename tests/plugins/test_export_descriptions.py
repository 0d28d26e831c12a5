"""What the shipped model families say to the shipped export formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import MODEL_TENSORS, TENSOR_NAMES
from surogate_export_gguf import surogate_export_format
from surogate_export_gguf.options import GgufOptions
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from surogate_core.bundles import Exported, ExportJob, ModelFamily, Sampling
from surogate_core.dsl.experts import expanded
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.errors import UserError
from surogate_core.plugins.registry import model_families
from surogate_testing import models, tiny

VOCABULARY = 320
SHORT, LONG = [1.0 + i / 10 for i in range(12)], [2.0 + i for i in range(12)]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 1.0}
QUERIES = {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
QKV, BIASES = ("attn_q", "attn_k", "attn_v"), ("attn_q.bias", "attn_k.bias", "attn_v.bias")
EXPERT_BIASES = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_output")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family."""

    arch: str
    family: str | None = None
    """By default the case's name."""
    changes: Mapping[str, Any] | None = None
    """Keys of the preset ``tiny``."""
    absent: tuple[str, ...] = ()
    """Tensors of a layer that the architecture lists and such a model lacks."""
    beside: tuple[str, ...] = ()
    """Tensors of a layer beside weights of the architecture's list."""
    whole: tuple[str, ...] = ("token_embd", "output_norm")
    permuted: bool = False
    """Whether rows of queries and keys are in another order."""


CASES = {
    "llama": Case(arch="llama", permuted=True),
    "mistral": Case(arch="llama", permuted=True, changes={"sliding_window": None}),
    "ministral3": Case(
        arch="mistral3", permuted=True, changes={"sliding_window": None, "rope_parameters": {**YARN, **QUERIES}}
    ),
    "smollm3": Case(arch="smollm3", permuted=True),
    "granite": Case(arch="granite", permuted=True),
    "qwen2": Case(arch="qwen2", beside=BIASES),
    "qwen3": Case(arch="qwen3"),
    # llama.cpp has experts in every layer.
    "qwen3-moe": Case(arch="qwen3moe", changes={"mlp_only_layers": []}),
    "phi3": Case(arch="phi3", absent=QKV, changes={"sliding_window": None}),
    "phi3 with longrope": Case(
        arch="phi3",
        family="phi3",
        absent=QKV,
        changes={"sliding_window": None, "original_max_position_embeddings": 64, "rope_scaling": LONGROPE},
        whole=("token_embd", "output_norm", "rope_factors_long", "rope_factors_short"),
    ),
    "olmo2": Case(
        arch="olmo2",
        family="olmo3",
        changes={
            "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "layer_types": None, "sliding_window": None,
            "rope_scaling": None, "rope_theta": 5e5, "tie_word_embeddings": False,
        },
        whole=("token_embd", "output_norm", "output"),
    ),
    "olmo3": Case(
        arch="olmo2",
        changes={"sliding_window": 8, "rope_scaling": {**YARN, "attention_factor": 1.3}, "tie_word_embeddings": False},
        whole=("token_embd", "output_norm", "output"),
    ),
    "glm4": Case(arch="glm4", absent=("attn_qkv",), beside=BIASES),
    "gemma3": Case(
        arch="gemma3", changes={"sliding_window_pattern": 6, "sliding_window": 8, "num_hidden_layers": 6}
    ),
    "gemma4": Case(
        arch="gemma4",
        beside=("ffn_gate_inp.scale", "ffn_down_exps.scale"),
        changes={"sliding_window": 8, "attention_k_eq_v": False},
        whole=("token_embd", "output_norm", "rope_freqs"),
    ),
    "gemma4 without experts": Case(
        arch="gemma4",
        family="gemma4",
        changes={"sliding_window": 8, "enable_moe_block": False, "attention_k_eq_v": False, "global_head_dim": 64},
        absent=(
            *("ffn_gate_inp", "ffn_gate_up_exps", "ffn_down_exps"),
            *("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"),
        ),
        whole=("token_embd", "output_norm", "rope_freqs"),
    ),
    "gpt-oss": Case(
        arch="gpt-oss",
        beside=(*BIASES, *(f"{name}.bias" for name in EXPERT_BIASES)),
        changes={"sliding_window": 8, "rope_scaling": YARN, "tie_word_embeddings": False},
        whole=("token_embd", "output_norm", "output"),
    ),
}  # fmt: skip
NEVER = ("attn_rot_embd", "inp_gate", "proj", "post_norm", "nextn")
"""Names that no file has: for inputs of each layer, for layers that predict further tokens, and from older files."""


def family_of(name: str) -> ModelFamily:
    return model_families()[CASES[name].family or name]


def config_of(name: str, **more: Any) -> dict[str, Any]:
    """The configuration of a case, with what `surogate export` fills in."""
    family = family_of(name)
    config = {"model_type": family.hf_model_types[0], **family.presets["tiny"], "vocab_size": VOCABULARY}
    model = family.build({**config, "max_position_embeddings": 512, **(CASES[name].changes or {}), **more})
    return {**model.complete_config(), "tie_word_embeddings": model.tied}


def shapes_of(name: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    specs = distinct(pieces(family_of(name).build(config), lora=None, max_seqlen=1))
    return {one: tuple(shape) for s in specs for one, shape in expanded(s.hf_name, s.shape).items()}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, without which llama.cpp reads no file."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the chain slips when it is worn, and so on and on"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def written(name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: Path) -> Exported:
    shapes = shapes_of(name, config)
    job = ExportJob(
        name="tiny",
        config=config,
        shapes=shapes,
        dtypes=dict.fromkeys(shapes, torch.float32),
        get=tensors.__getitem__,
        tokenizer=tokenizer(),
        stop_ids=frozenset(),
        sampling=Sampling(temperature=1.0),
        family=family_of(name).exports["gguf"](config),
        file=file,
        place=file,
    )
    return surogate_export_format().write(job, GgufOptions())


def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def listed(case: Case, layers: int) -> set[str]:
    """The tensors that llama.cpp's architecture lists, but for those that such a model lacks."""
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    names = [TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[arch]]
    own = [name.removeprefix("blk.{bid}.") for name in names if name.startswith("blk.")]
    assert {*case.absent, *(one.partition(".")[0] for one in case.beside)} <= {*own}
    assert {*case.whole} <= {*names}
    experts = {one for one in own if one.endswith("_exps") or one == "ffn_gate_inp"} if case.arch in DENSE else set()
    kept = [one for one in own if one.split(".")[0] not in {*case.absent, *NEVER, *experts}]
    layered = {f"blk.{n}.{one}" for n in range(layers) for one in (*(f"{one}.weight" for one in kept), *case.beside)}
    return {*layered, *(f"{one}.weight" for one in case.whole)}


DENSE = ("llama", "mistral3")
"""Architectures whose models may have experts, while the families here have none."""


@pytest.mark.parametrize("name", CASES)
def test_the_file_of_a_family_has_the_tensors_of_its_architecture(name: str, tmp_path: Path) -> None:
    case, config = CASES[name], config_of(name)
    tensors = random(shapes_of(name, config))
    written(name, config, tensors, tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert reader.fields["general.architecture"].contents() == case.arch
    found = {one.name: torch.from_numpy(one.data.copy()) for one in reader.tensors}
    layers = config["num_hidden_layers"]
    assert found.keys() == listed(case, layers)
    own = {key: value for key, value in found.items() if not key.startswith("rope_")}
    # Each value of the model is in the file once, in a place that its name and its shape say.
    assert sum(value.numel() for value in own.values()) == sum(value.numel() for value in tensors.values())
    for place, value in own.items():
        expected = expected_of(case, place, tensors, config)
        assert value.shape == expected.shape, place
        assert torch.equal(value, expected), place


def expected_of(case: Case, place: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of a place, from the names that checkpoints have."""
    number, _, rest = place.removeprefix("blk.").partition(".") if place.startswith("blk.") else ("", "", place)
    module, _, suffix = rest.rpartition(".")
    if suffix == "scale":  # of Gemma 4's router
        return tensors[f"model.layers.{number}.router.{'per_expert_scale' if module == 'ffn_down_exps' else 'scale'}"]
    name = NAMES.get((case.arch, module), NAMES.get(("", module), ""))
    whole = f"model.layers.{number}.{name}" if number else name
    if module.endswith("_exps") and suffix == "weight":
        count = config.get("num_local_experts") or config["num_experts"]
        parts = [tensors[f"{whole.replace('experts', f'experts.{e}')}.weight"] for e in range(count)]
        found = torch.stack(parts)
    else:
        keys = (f"{whole}.{suffix}", f"{whole}_{suffix}", whole)
        found = tensors[next(key for key in keys if key in tensors)]
    if case.arch == "gpt-oss" and module in ("ffn_gate_exps", "ffn_up_exps"):
        first = module == "ffn_up_exps"
        found = found[:, first::2] if suffix == "weight" else found[..., first::2]
    if case.arch == "gemma3" and module.endswith("norm"):
        found = found + 1
    if case.permuted and module in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
        size = len(found) // heads
        # The file orders the features of a head as 0, E/2, 1, E/2 + 1, …
        order = [h * size + i + half for h in range(heads) for i in range(size // 2) for half in (0, size // 2)]
        found = found[order]
    return found


NAMES = {
    ("", "token_embd"): "model.embed_tokens",
    ("", "output_norm"): "model.norm",
    ("", "output"): "lm_head",
    ("", "attn_norm"): "input_layernorm",
    ("", "ffn_norm"): "post_attention_layernorm",
    ("", "attn_q"): "self_attn.q_proj",
    ("", "attn_k"): "self_attn.k_proj",
    ("", "attn_v"): "self_attn.v_proj",
    ("", "attn_qkv"): "self_attn.qkv_proj",
    ("", "attn_output"): "self_attn.o_proj",
    ("", "attn_q_norm"): "self_attn.q_norm",
    ("", "attn_k_norm"): "self_attn.k_norm",
    ("", "attn_sinks"): "self_attn.sinks",
    ("", "ffn_gate"): "mlp.gate_proj",
    ("", "ffn_up"): "mlp.up_proj",
    ("", "ffn_down"): "mlp.down_proj",
    ("phi3", "ffn_up"): "mlp.gate_up_proj",
    ("glm4", "ffn_up"): "mlp.gate_up_proj",
    ("", "post_attention_norm"): "post_attention_layernorm",
    ("", "post_ffw_norm"): "post_feedforward_layernorm",
    ("glm4", "post_attention_norm"): "post_self_attn_layernorm",
    ("glm4", "post_ffw_norm"): "post_mlp_layernorm",
    ("gemma3", "ffn_norm"): "pre_feedforward_layernorm",
    ("gemma4", "ffn_norm"): "pre_feedforward_layernorm",
    ("gemma4", "post_ffw_norm_1"): "post_feedforward_layernorm_1",
    ("gemma4", "post_ffw_norm_2"): "post_feedforward_layernorm_2",
    ("gemma4", "pre_ffw_norm_2"): "pre_feedforward_layernorm_2",
    ("gemma4", "layer_output_scale"): "layer_scalar",
    ("gemma4", "ffn_gate_inp"): "router.proj",
    ("gemma4", "ffn_gate_up_exps"): "experts.gate_up_proj",
    ("gemma4", "ffn_down_exps"): "experts.down_proj",
    ("qwen3moe", "ffn_gate_inp"): "mlp.gate",
    ("qwen3moe", "ffn_gate_exps"): "mlp.experts.gate_proj",
    ("qwen3moe", "ffn_up_exps"): "mlp.experts.up_proj",
    ("qwen3moe", "ffn_down_exps"): "mlp.experts.down_proj",
    ("gpt-oss", "ffn_gate_inp"): "mlp.router",
    ("gpt-oss", "ffn_gate_exps"): "mlp.experts.gate_up_proj",
    ("gpt-oss", "ffn_up_exps"): "mlp.experts.gate_up_proj",
    ("gpt-oss", "ffn_down_exps"): "mlp.experts.down_proj",
}
"""(architecture, tensor of the file) → module of checkpoints."""


FIGURES: dict[str, dict[str, Any]] = {
    "phi3": {"attention.sliding_window": 0, "rope.dimension_count": 24},
    "phi3 with longrope": {
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": (1 + 3 / 6) ** 0.5,  # 512 positions are eight times 64
        "rope.dimension_count": 24,
    },
    "olmo2": {"attention.sliding_window": None},
    "olmo3": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.scaling.type": "yarn",
        "rope.freq_base": 5e5,
    },
    "glm4": {"rope.dimension_count": 16, "attention.key_length": 32},
    "ministral3": {
        "attention.temperature_scale": 0.4,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.original_context_length": 32,
    },
    "gpt-oss": {
        "attention.sliding_window": 8,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 128,
        "rope.scaling.factor": 4.0,
    },
    "gemma4": {
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.head_count_kv": [2, 2, 2, 2],
        "attention.key_length_swa": 32,
        "expert_used_count": 2,
    },
    "gemma4 without experts": {
        "attention.key_length": 64,
        "attention.key_length_swa": 32,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "rope.freq_base_swa": 1e4,
        "expert_count": None,
    },
    "granite": {"attention.scale": 1 / 32, "residual_scale": 0.22},
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_file_has_the_figures_that_its_reader_needs(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    written(name, config, random(shapes_of(name, config)), tmp_path / "tiny.gguf")
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    for key, value in FIGURES[name].items():
        field = fields.get(f"{CASES[name].arch}.{key}")
        found = None if field is None else field.contents()
        assert found == (pytest.approx(value) if isinstance(value, float) else value), key


def test_what_llama_cpp_computes_otherwise_is_said(tmp_path: Path) -> None:
    for name, changes, expected in (
        ("gpt-oss", {"rope_scaling": {**YARN, "truncate": False}}, "llama.cpp rounds the ends of YaRN's ramp"),
        ("gpt-oss", {}, ""),
        ("phi3 with longrope", {}, "with more than 64 positions every text has the long ones"),
    ):
        config = config_of(name, **changes)
        notes = written(name, config, random(shapes_of(name, config)), tmp_path / "tiny.gguf").notes
        assert any(expected in note for note in notes) if expected else not any("YaRN" in note for note in notes)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-moe", {"norm_topk_prob": False}, "`norm_topk_prob` is false; qwen3moe always divides"),
    ("qwen2", {"head_dim": 96}, "`head_dim` is another width of attention than hidden_size, which qwen2 lacks"),
    ("mistral", {"sliding_window": 64}, "`sliding_window` is 64, and llama.cpp lets every token"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "`no_rope_layers` is not every fourth layer"),
    ("smollm3", {"use_sliding_window": True}, "`use_sliding_window`: llama.cpp computes this model without"),
    ("phi3", {"sliding_window": 64}, "`sliding_window` has a value that llama.cpp's phi3 does not compute"),
    ("phi3", {"head_dim": 16}, "`head_dim` has a value that llama.cpp's phi3"),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "`layer_types` has .* llama.cpp's olmo2"),
    ("olmo3", {"tie_word_embeddings": True}, "`tie_word_embeddings` has a value that llama.cpp's olmo2"),
    ("ministral3", {"sliding_window": 8}, "`sliding_window` has a value that llama.cpp's mistral3"),
    ("ministral3", {"rope_parameters": {**YARN, **QUERIES, "mscale": 0.7}}, "`rope_parameters` has .* mistral3"),
    ("gpt-oss", {"swiglu_limit": 5.0}, "`swiglu_limit` has a value that llama.cpp's gpt-oss"),
    ("gpt-oss", {"attention_bias": False}, "`attention_bias` has a value that llama.cpp's gpt-oss"),
    ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "`layer_types` has .* llama.cpp's gpt"),
    (
        "gemma4",
        {"rope_parameters": {"sliding_attention": YARN, "full_attention": {"rope_type": "default"}}},
        "`rope_parameters` has a value that llama.cpp's gemma4",
    ),
    (
        "gemma4",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 1024},
        "`hidden_size_per_layer_input` is 8, and inputs of layers and shared layers are not written as GGUF",
    ),
    ("gemma4", {"num_kv_shared_layers": 2}, "`num_kv_shared_layers` is 2, and inputs of layers and shared layers"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_a_family_refuses_what_the_reader_of_the_file_lacks(name: str, changes: dict[str, Any], reason: str) -> None:
    family = family_of(name)
    config = {**family.presets["tiny"], **(CASES[name].changes or {}), **changes}
    with pytest.raises(UserError, match=reason):
        family.exports["gguf"](config)


HALF = {"gemma3", "gemma4", "gemma4 without experts"}
"""Models with GELU, which llama.cpp reads from a table in half precision."""


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_as_transformers_does(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    family = family_of(name)
    reference = models.reference(family, config_of(name))
    model = family.build(reference.config.to_dict())
    config = {**model.complete_config(), "tie_word_embeddings": model.tied}
    state = {n: t.detach() for n, t in reference.state_dict().items() if not (model.tied and "lm_head" in n)}
    written(name, config, tiny.in_files(state, model), tmp_path / "tiny.gguf")
    (ids,) = tiny.documents((120,), vocabulary=VOCABULARY)
    llama = llama_cpp.Llama(str(tmp_path / "tiny.gguf"), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    llama.eval(ids)
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), -1)
    found = torch.log_softmax(torch.from_numpy(llama.scores[: len(ids)].copy()).double(), -1)
    # A window of one position more gives 1 and more, RoPE of another base too.
    assert (found - expected).abs().max() < (5e-2 if name in HALF else 2e-3)
