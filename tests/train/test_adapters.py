"""Adapters in and out: reading PEFT directories, folding, `surogate merge`, stacked and continued LoRA."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surogate_core.cli.main import main
from surogate_core.errors import UserError
from surogate_core.train.adapters import LoraAdapter, open_stack
from surogate_core.train.weights import ModelDir

IDS = torch.arange(40).reshape(2, 20)
TARGETS = ["q_proj", "v_proj", "down_proj"]


def peft_adapter(base: Path, out: Path, *, dtype: torch.dtype = torch.float32, **keys: Any) -> torch.Tensor:
    """A random PEFT adapter of `base` in `out`; the logits of the model that PEFT merges."""
    import peft
    import transformers

    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **keys})
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(out)
    # Through files: a model made in memory has rotary tables that loading does not give.
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype), out
    ).merge_and_unload()
    with torch.no_grad():
        return loaded.eval()(IDS).logits


def logits(directory: Path) -> torch.Tensor:
    import transformers

    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()(IDS).logits


def merge(base: Path, trained: Path, output: Path) -> int:
    return main(["merge", "--base-model", str(base), f"--checkpoint-dir={trained}", "--output", str(output)])


def variant(base: Path, *, dtype: torch.dtype, tied: bool, sharded: bool) -> None:
    """Write the model of a directory again in another form."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="100KB" if sharded else "5GB")


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tied", "sharded"),
    [(torch.float32, False, False), (torch.float32, True, True), (torch.bfloat16, True, False)],
    ids=["fp32", "fp32-tied-sharded", "bf16-tied"],
)
def test_merge_gives_the_logits_of_peft(
    tmp_path: Path, model_copy: Path, dtype: torch.dtype, tied: bool, sharded: bool, rslora: bool
) -> None:
    (model_copy / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    variant(model_copy, dtype=dtype, tied=tied, sharded=sharded)
    expected = peft_adapter(model_copy, tmp_path / "adapter", dtype=dtype, use_rslora=rslora)
    assert merge(model_copy, tmp_path / "adapter", tmp_path / "merged") == 0
    assert torch.equal(logits(tmp_path / "merged"), expected)
    assert not torch.allclose(logits(model_copy), expected, atol=1e-3)
    before, after = ModelDir.open(model_copy), ModelDir.open(tmp_path / "merged")
    assert {n: before.header(n) for n in before.names()} == {n: after.header(n) for n in after.names()}
    # The tokenizer goes along as it is.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (model_copy / name).read_bytes()
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["do_sample"] is True


def damaged(adapter: Path, **keys: Any) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return adapter


def retensored(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (lambda a: damaged(a, use_dora=True), "use_dora is true: not supported"),
    "bias": (lambda a: damaged(a, bias="all"), "bias is 'all'"),
    "modules_to_save": (lambda a: damaged(a, modules_to_save=["lm_head"]), 'modules_to_save is ["lm_head"]'),
    "rank_pattern": (lambda a: damaged(a, rank_pattern={"q": 2}), 'rank_pattern is {"q": 2}'),
    "alpha_pattern": (lambda a: damaged(a, alpha_pattern={"q": 2}), 'alpha_pattern is {"q": 2}'),
    "of the future": (lambda a: damaged(a, use_quantum=True), "use_quantum is true: not supported"),
    "pissa": (lambda a: damaged(a, init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "not lora": (lambda a: damaged(a, peft_type="IA3"), "peft_type is 'IA3'"),
    "no rank": (lambda a: damaged(a, r=None), "r is None"),
    "other rank": (lambda a: damaged(a, r=8), "which is not of rank 8"),
    "no alpha": (lambda a: damaged(a, lora_alpha="x"), "lora_alpha is 'x'"),
    "half": (lambda a: retensored(a, lambda t: t.pop(NAME)), f"its other half {NAME} is missing"),
    "strange name": (lambda a: retensored(a, lambda t: t.update(x=torch.zeros(2))), "x: not the name of a LoRA"),
    "shape": (lambda a: retensored(a, lambda t: t.update({NAME: torch.zeros(4, 7)})), "made for [32, 7]"),
    "int": (lambda a: retensored(a, lambda t: t.update({NAME: t[NAME].int()})), "is I32, not a float"),
    "nan": (lambda a: retensored(a, lambda t: t[NAME].fill_(float("nan"))), "is not finite with"),
    "cut short": (lambda a: (a / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a whole safetensors file"),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
    "no json": (lambda a: (a / "adapter_config.json").write_text("{"), "not valid JSON"),
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "neither an adapter"),
    "gone": (shutil.rmtree, "there is no such directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_have_one_clear_message(
    case: str, tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft_adapter(hf_dir, tmp_path / "adapter")
    change, expected = BAD[case]
    change(tmp_path / "adapter")
    assert merge(hf_dir, tmp_path / "adapter", tmp_path / "merged") == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("surogate: ") == 1
    assert "Fix: " in message
    assert not [p for p in tmp_path.iterdir() if "merged" in p.name]


def test_everything_wrong_is_in_one_message(tmp_path: Path, hf_dir: Path) -> None:
    peft_adapter(hf_dir, tmp_path / "adapter")
    damaged(tmp_path / "adapter", use_dora=True, bias="all", rank_pattern={"q": 2})
    with pytest.raises(UserError) as caught:
        open_stack(tmp_path / "adapter")
    assert all(word in str(caught.value) for word in ("use_dora", "bias", "rank_pattern"))


def test_an_adapter_of_another_base(tmp_path: Path, model_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft_adapter(model_copy, tmp_path / "adapter", target_modules=["lm_head", "up_proj"])
    variant(model_copy, dtype=torch.float32, tied=True, sharded=False)
    assert merge(model_copy, tmp_path / "adapter", tmp_path / "merged") == 2
    assert "lm_head.base_layer.weight: a copy of a base layer, which is not read" in capsys.readouterr().err
    retensored(tmp_path / "adapter", lambda t: t.pop("base_model.model.lm_head.base_layer.weight"))
    assert merge(model_copy, tmp_path / "adapter", tmp_path / "merged") == 2
    assert "lm_head: the base has no such linear layer: its head is tied" in capsys.readouterr().err


def test_merge_never_replaces_what_it_reads_or_a_stranger(
    tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft_adapter(hf_dir, tmp_path / "adapter")
    assert merge(hf_dir, tmp_path / "adapter", tmp_path / "adapter") == 2
    assert "not an export" in capsys.readouterr().err
    assert merge(hf_dir, tmp_path / "adapter", tmp_path / "merged") == 0
    assert merge(tmp_path / "merged", tmp_path / "adapter", tmp_path / "merged") == 2
    assert "which is read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--base-model, --checkpoint-dir, --output missing"),
        (["--base-model", "x", "--output", "y"], "--checkpoint-dir missing"),
        (["--base_model", "x"], "Fix: --base-model"),
        (["--output"], "a value must follow"),
        (["--output", "x", "--output=y"], "given twice"),
        (["--base-model", "/no/where", "--checkpoint-dir", "x", "--output", "y"], "no such directory"),
    ],
)
def test_bad_arguments(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_checkpoint_merges_as_its_adapter_does(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: Callable[..., int]
) -> None:
    run_here(tmp_path / "run", *base_on(hf_dir), "lora_rank=4", "learning_rate=1e-2")
    merged = []
    for number, source in enumerate(("", "adapter", "checkpoint-6")):
        assert merge(hf_dir, tmp_path / "run" / source, tmp_path / f"merged-{number}") == 0
        merged.append(load_file(tmp_path / f"merged-{number}" / "model.safetensors"))
    assert all(torch.equal(merged[0][name], other[name]) for other in merged for name in merged[0])
    own = LoraAdapter.open(tmp_path / "run" / "adapter")
    base = load_file(hf_dir / "model.safetensors")
    for module in own.modules:
        assert torch.equal(merged[0][f"{module}.weight"], base[f"{module}.weight"] + own.delta(module))
