"""Stacked LoRA from end to end: base, adapter A (r=8), a run on A folded in that gives B, and their merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from surogate_core.batch import MicroBatch
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.engine.engine import Engine
from surogate_core.hf.lora_files import LoraAdapter, open_stack
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import check_weights, resolve_lora, resolve_model
from surogate_core.setup.build import build_engine

Run = Callable[..., int]
Record = Callable[[str, object], None]
TOKENS = 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are."""
    return tmp_path_factory.mktemp("stacked")


@pytest.fixture
def trained(place: Path, base: list[str], base_on: Callable[[Path], list[str]], run_here: Run) -> Path:
    """A base trained from random weights, A on it, B on both; each from the former one's files."""
    if not (place / "b").exists():
        quick = ("max_steps=6", "eval_steps=0", "learning_rate=1e-2")
        run_here(place / "pretrain", *base, *quick, "lora=false", "learning_rate=2e-3")
        keys = [*base_on(place / "pretrain" / "model"), *quick, "lora_rank=8", "lora_alpha=16", "lora_dropout=0"]
        run_here(place / "a", *keys, "lora_target_modules=[q_proj,v_proj,down_proj]")
        run_here(place / "b", *keys, f"adapter_path={place / 'a'}", "adapter_init_mode=merge", "lora_alpha=12")
    return place


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of equal sets of tensors."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.slow
def test_merged_is_the_base_and_both_deltas(trained: Path, tmp_path: Path, record_testsuite_property: Record) -> None:
    base = trained / "pretrain" / "model"
    arguments = [
        "--base-model",
        str(base),
        "--checkpoint-dir",
        str(trained / "b"),
        "--output",
        str(tmp_path / "merged"),
    ]
    assert main(["merge", *arguments]) == 0
    stack = open_stack(trained / "b")
    assert [(adapter.rank, adapter.scale) for adapter in stack] == [(8, 2.0), (8, 1.5)]
    expected = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    sizes = []
    for adapter in stack:
        deltas = {}
        for module in adapter.modules:
            a, b = (adapter.get(f"{module}.lora_{side}.weight").double() for side in "AB")
            deltas[module] = adapter.scale * (b @ a)
            expected[f"{module}.weight"] += deltas[module]
        sizes.append(max(float(delta.abs().max()) for delta in deltas.values()))
    error = largest(load_file(tmp_path / "merged" / "model.safetensors"), expected)
    record_testsuite_property("merged against base + both deltas in fp64, max abs error", f"{error:.2e}")
    record_testsuite_property("largest entry of each delta", " ".join(f"{size:.2e}" for size in sizes))
    assert min(sizes) > 1e-3, "both adapters must matter"
    assert error <= 1e-6

    # In transformers, against the two adapters by PEFT on the base.
    ids = torch.arange(TOKENS)[None]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
        below = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(trained / "a" / "adapter"))
        both = PeftModel.from_pretrained(below.merge_and_unload(), str(trained / "b" / "adapter")).eval()
        unmerged = both(ids).logits
        folded = both.merge_and_unload()(ids).logits
    errors = [float((loaded - other).abs().max()) for other in (folded, unmerged)]
    record_testsuite_property(
        "logits against PEFT merged, and not merged, max abs error", f"{errors[0]:.2e} {errors[1]:.2e}"
    )
    assert errors[0] == 0.0
    assert errors[1] <= 1e-5


def engine_of(registry: Registry, *overrides: str) -> Engine:
    """The engine of a run before its first step."""
    config = load_run_config(list(overrides), registry=registry)
    resolved = resolve_model(config, registry)
    check_weights(config, resolved, resolve_lora(config, resolved.model))
    return build_engine(config, registry, resolved, sample=sample(), progress=lambda task, done, total: None)


def sample() -> MicroBatch:
    """One document that fills a row."""
    ids = torch.arange(TOKENS)
    return MicroBatch(
        input_ids=ids,
        labels=ids.roll(-1),
        positions=torch.arange(TOKENS, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        max_seqlen=TOKENS,
        tokens=TOKENS,
        label_tokens=TOKENS,
    )


@pytest.mark.slow
def test_trainable_begins_at_the_logits_of_the_adapter(
    trained: Path,
    tmp_path: Path,
    base_on: Callable[[Path], list[str]],
    installed: Registry,
    record_testsuite_property: Record,
) -> None:
    base = trained / "pretrain" / "model"
    torch.manual_seed(3)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(trained / "a" / "adapter"), is_trainable=True
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    # PEFT wrote it, not this trainer.
    model.save_pretrained(tmp_path / "peft")
    with torch.no_grad():
        expected = model.eval()(sample().input_ids[None]).logits[0]
        plain = AutoModelForCausalLM.from_pretrained(base).eval()(sample().input_ids[None]).logits[0]
    keys = [*base_on(base), "lora_rank=8", "lora_alpha=16", "lora_target_modules=[q_proj,v_proj,down_proj]"]
    keys += ["per_device_train_batch_size=1", f"adapter_path={tmp_path / 'peft'}", "adapter_init_mode=trainable"]
    engine = engine_of(installed, *{key.partition("=")[0]: key for key in keys}.values())
    error = float((engine.logits(sample()) - expected).abs().max())
    record_testsuite_property("trainable, logits before the first step against PEFT, max abs error", f"{error:.2e}")
    assert float((plain - expected).abs().max()) > 100 * error, "the adapter must matter"
    assert error <= 1e-5


@pytest.mark.slow
def test_peft_to_ours_to_peft_is_bit_identical(
    trained: Path,
    tmp_path: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Run,
    record_testsuite_property: Record,
) -> None:
    base = trained / "pretrain" / "model"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(trained / "a" / "adapter"))
    model.save_pretrained(tmp_path / "peft")
    keys = [*base_on(base), "lora_rank=8", "lora_alpha=16", "lora_target_modules=[q_proj,v_proj,down_proj]"]
    keys += [f"adapter_path={tmp_path / 'peft'}", "adapter_init_mode=trainable", "learning_rate=0", "max_steps=1"]
    run_here(tmp_path / "ours", *keys)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "ours" / "adapter"))
    again.save_pretrained(tmp_path / "again")
    files = [tmp_path / "peft", tmp_path / "ours" / "adapter", tmp_path / "again"]
    tensors = [load_file(directory / "adapter_model.safetensors") for directory in files]
    assert all(one.keys() == tensors[0].keys() for one in tensors)
    assert all(torch.equal(one[name], tensors[0][name]) for one in tensors for name in one)
    assert LoraAdapter.open(tmp_path / "again").scale == LoraAdapter.open(tmp_path / "peft").scale == 2.0
    record_testsuite_property("PEFT to ours to PEFT, tensors equal bit for bit", len(tensors[0]))
