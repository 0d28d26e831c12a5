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
from surogate_core.hf.lora_files import LoraAdapter, open_stack
from surogate_core.hf.weights import ModelDir
from surogate_core.setup.trained import open_trained

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
        if "lora_" in name or "modules_to_save" in name:
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


def test_ranks_of_their_own_and_whole_weights_are_merged(
    tmp_path: Path, model_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"rank_pattern": {"q_proj": 2, "v_proj": 6}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 9}}
    expected = peft_adapter(model_copy, tmp_path / "adapter", modules_to_save=["embed_tokens", "lm_head"], **own)
    assert merge(model_copy, tmp_path / "adapter", tmp_path / "merged") == 0
    assert torch.equal(logits(tmp_path / "merged"), expected)
    variant(model_copy, dtype=torch.float32, tied=True, sharded=False)
    retensored(damaged(tmp_path / "adapter", modules_to_save=["embed_tokens"]), lambda t: t.pop(HEAD))
    assert merge(model_copy, tmp_path / "adapter", tmp_path / "merged") == 2
    assert "model.embed_tokens.weight: a whole weight, which the base uses for its head too" in capsys.readouterr().err


HEAD = "base_model.model.lm_head.weight"


def damaged(adapter: Path, **keys: Any) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return adapter


def retensored(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


WHOLE = "base_model.model.model.norm.weight"
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (lambda a: damaged(a, use_dora=True), "use_dora is true: not supported"),
    "bias": (lambda a: damaged(a, bias="all"), "bias is 'all'"),
    "nothing saved": (lambda a: damaged(a, modules_to_save=["gate"]), "modules_to_save has gate, and adapter_model"),
    "modules_to_save": (lambda a: damaged(a, modules_to_save="gate"), "modules_to_save is 'gate', not a list"),
    "whole weight": (
        lambda a: retensored(damaged(a, modules_to_save=["norm"]), lambda t: t.update({WHOLE: torch.zeros(3)})),
        "model.norm.weight: a whole weight of [3], the base has [32]",
    ),
    "rank_pattern": (lambda a: damaged(a, rank_pattern={"q_proj": 2}), "which is not of rank 2"),
    "no rank pattern": (lambda a: damaged(a, rank_pattern={"q": 0, "(": 2}), "rank_pattern: q is 0, not a positive"),
    "no pattern": (lambda a: damaged(a, alpha_pattern=["q"]), "alpha_pattern is ['q'], not a mapping"),
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
    damaged(tmp_path / "adapter", use_dora=True, bias="all", rank_pattern={"q": -2})
    with pytest.raises(UserError) as caught:
        open_stack(tmp_path / "adapter")
    assert all(word in str(caught.value) for word in ("use_dora", "bias", "rank_pattern"))


def test_an_adapter_of_another_base(tmp_path: Path, model_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft_adapter(model_copy, tmp_path / "adapter", target_modules=["lm_head", "up_proj"])
    variant(model_copy, dtype=torch.float32, tied=True, sharded=False)
    assert merge(model_copy, tmp_path / "adapter", tmp_path / "merged") == 2
    message = capsys.readouterr().err
    assert "its head is tied to the embedding" in message
    assert "own base" not in message
    assert f"RUN {tmp_path / 'adapter'}: " in message


def test_a_copy_of_a_base_weight_must_be_that_of_the_base(
    tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    expected = peft_adapter(hf_dir, adapter, target_modules=["lm_head", "up_proj"])
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in load_file(adapter / "adapter_model.safetensors")
    assert merge(hf_dir, adapter, tmp_path / "merged") == 0
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)
    retensored(adapter, lambda t: t.update({copy: t[copy].bfloat16()}))
    assert merge(hf_dir, adapter, tmp_path / "rounded") == 0  # PEFT saves in the dtype in which it had loaded the base
    retensored(adapter, lambda t: t.update({copy: t[copy] + 0.5}))
    assert merge(hf_dir, adapter, tmp_path / "other") == 2
    assert f"{copy}: a copy of a base weight, which has other values" in capsys.readouterr().err


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
        ([], "no run is named and there is no runs/latest"),
        (["x"], "--output missing, and x is no run"),
        (["x", "y"], "given twice (x, y)"),
        (["x", "--output="], "--output: the value is empty"),
        (["--base_model", "x"], "Fix: --base-model"),
        (["--output"], "a value must follow"),
        (["--output", "x", "--output=y"], "given twice"),
        (["--base-model", "/no/where", "--checkpoint-dir", "x", "--output", "y"], "no such directory"),
    ],
)
def test_bad_arguments(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
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


# -------------------------------------------------------------------------------- in a run

KEYS = ("lora_rank=4", "lora_alpha=6", "lora_target_modules=[q_proj,v_proj,down_proj]", "lora_dropout=0.1")
Runs = tuple[Path, list[str], Callable[..., int]]


@pytest.fixture
def runs(hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: Callable[..., int]) -> Runs:
    """The base, the overrides of a run on it, and what starts one."""
    return hf_dir, [*base_on(hf_dir), *KEYS, "learning_rate=1e-2", "max_steps=3", "eval_steps=0"], run_here


def tensors_of(directory: Path, name: str = "adapter_model") -> dict[str, torch.Tensor]:
    return load_file(directory / f"{name}.safetensors")


@pytest.mark.slow
def test_stacked_lora_merged_is_the_base_and_both_deltas(tmp_path: Path, runs: Runs) -> None:
    hf_dir, keys, run_here = runs
    peft_adapter(hf_dir, tmp_path / "first", use_rslora=True)
    second = ["lora_rank=2", "lora_alpha=5", "lora_target_modules=[all]", f"adapter_path={tmp_path / 'first'}"]
    assert run_here(tmp_path / "run", *keys, *second, "merge_adapter=true") == 0
    stack = open_stack(tmp_path / "run")
    assert [(a.rank, a.scale) for a in stack] == [(4, 3.0), (2, 2.5)]
    base = tensors_of(hf_dir, "model")
    expected = {n: t.double() for n, t in base.items()}
    for adapter in stack:
        for module in adapter.modules:
            a, b = (adapter.get(f"{module}.lora_{side}.weight").double() for side in "AB")
            expected[f"{module}.weight"] += adapter.scale * (b @ a)
    assert float(stack[1].delta("model.layers.0.mlp.up_proj").abs().max()) > 1e-3
    # The run's own merge, and that of the command from the adapter, the run and a checkpoint.
    merged = [tensors_of(tmp_path / "run" / "model", "model")]
    for number, source in enumerate(("", "adapter", "checkpoint-3")):
        assert merge(hf_dir, tmp_path / "run" / source, tmp_path / f"m{number}") == 0
        merged.append(tensors_of(tmp_path / f"m{number}", "model"))
    for one in merged:
        assert one.keys() == expected.keys()
        assert max(float((one[n].double() - expected[n]).abs().max()) for n in one) < 1e-6
        assert all(torch.equal(one[n], merged[0][n]) for n in one)
    assert "stacked_on" in (tmp_path / "run" / "adapter" / "README.md").read_text()


@pytest.mark.slow
def test_folding_while_loading_is_training_on_the_merged_model(
    tmp_path: Path, runs: Runs, history: Callable[[Path], Any], base_on: Callable[[Path], list[str]]
) -> None:
    hf_dir, keys, run_here = runs
    peft_adapter(hf_dir, tmp_path / "first")
    merge(hf_dir, tmp_path / "first", tmp_path / "merged")
    run_here(tmp_path / "a", *keys, f"adapter_path={tmp_path / 'first'}")
    run_here(tmp_path / "b", *keys, *base_on(tmp_path / "merged")[-3:])
    assert history(tmp_path / "a") == history(tmp_path / "b")


def test_a_peft_adapter_goes_on_and_out_again(
    tmp_path: Path, runs: Runs, records: Callable[..., list[dict[str, Any]]], base_on: Callable[[Path], list[str]]
) -> None:
    hf_dir, keys, run_here = runs
    peft_adapter(hf_dir, tmp_path / "first")
    go_on = [*keys, f"adapter_path={tmp_path / 'first'}", "adapter_init_mode=trainable", "lora_dropout=0"]
    # A rate of 0 leaves it as it is: PEFT → ours → PEFT.
    run_here(tmp_path / "still", *go_on, "learning_rate=0")
    first, still = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "still" / "adapter")
    assert first.keys() == still.keys()
    assert all(torch.equal(first[name], still[name]) for name in first)
    assert len(open_stack(tmp_path / "still")) == 1
    # The first loss is that of the model that PEFT's adapter makes.
    merge(hf_dir, tmp_path / "first", tmp_path / "merged")
    run_here(tmp_path / "merged-run", *keys, *base_on(tmp_path / "merged")[-3:], "lora_dropout=0")
    run_here(tmp_path / "on", *go_on)
    for event in ("eval_end", "step_end"):
        losses = [records(tmp_path / run, event)[0]["loss"] for run in ("on", "merged-run")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # Our own adapter goes on exactly where it stopped.
    run_here(tmp_path / "on-2", *go_on, f"adapter_path={tmp_path / 'on'}")
    assert records(tmp_path / "on-2", "eval_end")[0]["loss"] == records(tmp_path / "on", "eval_end")[-1]["loss"]


def test_trainable_must_agree_and_says_all_differences(tmp_path: Path, runs: Runs) -> None:
    hf_dir, keys, run_here = runs
    peft_adapter(hf_dir, tmp_path / "first", use_rslora=True)
    given = [f"adapter_path={tmp_path / 'first'}", "adapter_init_mode=trainable"]
    with pytest.raises(UserError) as caught:
        run_here(tmp_path / "out", *keys, *given, "lora_rank=8", "lora_target_modules=[q_proj]")
    for part in ("lora_rank is 8, the adapter's is 4", "lora_alpha is 6, the adapter's is 12 (6 with rsLoRA)"):
        assert part in str(caught.value)
    assert "lora_target_modules is q_proj, the adapter's is down_proj, q_proj, v_proj" in str(caught.value)
    for half in "AB":
        retensored(tmp_path / "first", lambda t, h=half: t.pop(NAME.replace("lora_A", f"lora_{h}")))
    with pytest.raises(UserError, match="only one of the two is on model"):
        run_here(tmp_path / "out", *keys, *given, "lora_alpha=12")


@pytest.mark.slow
def test_the_adapter_is_part_of_a_checkpoints_identity(tmp_path: Path, runs: Runs) -> None:
    hf_dir, keys, run_here = runs
    peft_adapter(hf_dir, tmp_path / "first")
    given = f"adapter_path={tmp_path / 'first'}"
    run_here(tmp_path / "out", *keys, given, "max_steps=1")
    run_here(tmp_path / "out", *keys, given, "max_steps=2")
    for other in ([], [given, "adapter_init_mode=trainable"]):
        with pytest.raises(UserError, match="adapter: "):
            run_here(tmp_path / "out", *keys, *other)
    retensored(tmp_path / "first", lambda t: t[NAME].mul_(2))
    with pytest.raises(UserError, match="adapter: "):
        run_here(tmp_path / "out", *keys, given)
    with pytest.raises(UserError, match="has changed since"):
        open_trained(tmp_path / "out" / "checkpoint-2")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["adapter_path=x", "lora=false"], "adapter_path"),
        (["adapter_path=x", "from_scratch=true"], "adapter_path"),
        (["adapter_init_mode=trainable"], "adapter_init_mode"),
        (["merge_adapter=true", "lora=false"], "merge_adapter"),
        (["adapter_path=/no/where"], "adapter_path /no/where: there is no such directory"),
        (["adapter_init_mode=fold"], "adapter_init_mode"),
    ],
)
def test_contradictions(keys: list[str], expected: str, tmp_path: Path, runs: Runs) -> None:
    _, base, run_here = runs
    with pytest.raises(UserError) as caught:
        run_here(tmp_path / "out", *base, *keys)
    assert str(caught.value).startswith(expected)


def test_no_adapter_on_random_weights(tmp_path: Path, base: list[str], run_here: Callable[..., int]) -> None:
    with pytest.raises(UserError, match="belongs to trained weights"):
        run_here(tmp_path / "out", *base, *KEYS, "lora=true", "adapter_path=x")
    # But a whole model of random weights and its adapter can be exported.
    assert run_here(tmp_path / "out", *base, *KEYS, "lora=true", "merge_adapter=true", "max_steps=1") == 0
    assert logits(tmp_path / "out" / "model").isfinite().all()
