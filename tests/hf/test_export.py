"""Exports load in transformers and PEFT with equal tensors and logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from surogate_core.errors import UserError
from surogate_core.hf.export import CardFacts, export_adapter, export_full
from surogate_core.hf.weights import ModelDir

CARD = CardFacts(
    title="tiny", figures={"held-out loss": 1.25, "bad": float("nan"), "none": None}, settings={"lora_rank": 4}
)
IDS = torch.arange(12).reshape(2, 6)


def tiny(*, tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
    )
    return Qwen3ForCausalLM(config).eval()


def tensors_of(model: Qwen3ForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    return ((n, p) for n, p in model.state_dict().items() if not (model.config.tie_word_embeddings and "lm_head" in n))


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"t{i}": i for i in range(32)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "t0")), eos_token="t1")


@pytest.mark.parametrize("max_shard_bytes", [5e9, 4000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_loads_in_transformers(tmp_path: Path, max_shard_bytes: float, tied: bool, dtype: torch.dtype) -> None:
    model = tiny(tied=tied).to(dtype)
    out = export_full(
        tmp_path / "model",
        tensors_of(model),
        config=model.config.to_dict(),
        tokenizer=tokenizer(),
        card=CARD,
        max_shard_bytes=max_shard_bytes,
    )
    assert (out / "model.safetensors").exists() == (max_shard_bytes == 5e9)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    # Through transformers' own directory: model.to(bfloat16) also rounds its rotary frequencies.
    model.save_pretrained(tmp_path / "reference")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "reference")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, reference(IDS).logits)
    assert loaded.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(out).vocab_size == 32
    assert set(ModelDir.open(out).names()) == {name for name, _ in tensors_of(model)}
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "reference"]


def test_shards_respect_the_limit(tmp_path: Path) -> None:
    model = tiny()
    out = export_full(
        tmp_path / "m",
        tensors_of(model),
        config=model.config.to_dict(),
        tokenizer=None,
        card=CARD,
        max_shard_bytes=4000,
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for _, t in tensors_of(model))
    shards: dict[str, int] = {}
    for name, tensor in tensors_of(model):
        shard = index["weight_map"][name]
        shards[shard] = shards.get(shard, 0) + tensor.numel() * 4
    assert len(shards) > 3
    assert max(shards.values()) <= 4000


def test_shards_of_many_small_tensors_are_few(tmp_path: Path) -> None:
    """A layer of experts has hundreds of names; a header of fixed size would cut a model into hundreds of files."""
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(10) for e in range(500)]
    tensors = ((name, torch.full((2,), float(number))) for number, name in enumerate(names))
    config = {"model_type": "x", "architectures": ["X"]}
    out = export_full(tmp_path / "m", tensors, config=config, tokenizer=None, card=CARD)
    assert len(list(out.glob("*.safetensors"))) == 3
    opened = ModelDir.open(out)
    assert sorted(opened.names()) == sorted(names)
    assert opened.get(names[4321]).tolist() == [4321.0, 4321.0]
    assert len(safetensors.torch.load_file(out / "model-00002-of-00003.safetensors")) > 2000


def test_adapter_loads_in_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    tiny().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trained = get_peft_model(tiny(), config).eval()
    named = {}
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
            named[name.removeprefix("base_model.model.").replace(".default", "")] = parameter
    out = export_adapter(
        tmp_path / "adapter",
        named.items(),
        rank=4,
        alpha=8.0,
        dropout=0.05,
        base_model=str(tmp_path / "base"),
        card=CARD,
        tokenizer=tokenizer(),
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        before = base(IDS).logits
        loaded = PeftModel.from_pretrained(base, out).eval()
        assert not torch.allclose(loaded(IDS).logits, before, atol=1e-3)
        assert torch.equal(loaded(IDS).logits, trained(IDS).logits)
    for name, parameter in trained.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], parameter), name
    written = json.loads((out / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["peft_type"]) == (4, 8, "LORA")
    auto = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        assert torch.allclose(auto(IDS).logits, trained(IDS).logits)


def adapter(directory: Path, value: float) -> Path:
    tensors = [("m.q_proj.lora_A.weight", torch.full((2, 4), value)), ("m.q_proj.lora_B.weight", torch.zeros(3, 2))]
    return export_adapter(
        directory,
        tensors,
        rank=2,
        alpha=3.5,
        dropout=0.0,
        base_model="Qwen/Qwen3-0.6B",
        card=replace(CARD, base_model="Qwen/Qwen3-0.6B"),
    )


def test_card(tmp_path: Path) -> None:
    text = (adapter(tmp_path / "a", 1.0) / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: peft\n")
    assert 'base_model: "Qwen/Qwen3-0.6B"\n---' in text
    assert "| held-out loss | 1.25 |" in text
    assert "| lora_rank | 4 |" in text
    assert "none" not in text
    marker = json.loads((tmp_path / "a" / "surogate_export.json").read_text())
    assert marker["figures"] == {"held-out loss": 1.25, "none": None}


def test_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    adapter(tmp_path / "a", 1.0)
    adapter(tmp_path / "a", 2.0)
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert loaded["base_model.model.m.q_proj.lora_A.weight"][0, 0] == 2.0
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("x")
    with pytest.raises(UserError, match="not an export of Surogate"):
        adapter(tmp_path / "thesis", 1.0)
    (tmp_path / "empty").mkdir()
    adapter(tmp_path / "empty", 1.0)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter"]


def test_a_failure_leaves_the_former_export(tmp_path: Path) -> None:
    model = tiny()

    def export(tensors) -> None:
        export_full(tmp_path / "m", tensors, config=model.config.to_dict(), tokenizer=None, card=CARD)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        for count, item in enumerate(tensors_of(model)):
            if count == 5:
                raise RuntimeError("out of memory")
            yield item

    with pytest.raises(RuntimeError):
        export(failing())
    assert list(tmp_path.iterdir()) == []
    export(tensors_of(model))
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "m").iterdir())
    with pytest.raises(RuntimeError):
        export(failing())
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "m").iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
