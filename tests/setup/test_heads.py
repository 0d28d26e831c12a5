"""Which head the model of a run has: the one of its task, and a head of its files where config.json ties it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import EMBEDDED
from safetensors.torch import load_file, save_file
from surogate_command_export.conversion import convert
from transformers import AutoConfig, AutoModelForCausalLM

from surogate_core.bundles import Exported, ExportFormat, ExportJob, ModelFamily
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.dsl import ScoreHead
from surogate_core.errors import ConfigError
from surogate_core.files.paths import resolve_package_path
from surogate_core.inference.generation import named, prepare
from surogate_core.plugins import load_plugins
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import resolve_model
from surogate_core.setup.heads import built_for, check_head
from surogate_testing import tiny

Run = Callable[..., int]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TEXTS = ("The train to Rome leaves at nine.", "Where is my order?")
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def tied(directory: Path, family: str, *, own: bool = True, **keys: Any) -> Path:
    """A model whose head is said to be tied. `own`: whether the head of its files is another one than the embedding."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **(MOE if "moe" in family else {}), tie_word_embeddings=True, **keys)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    shutil.copytree(resolve_package_path(f"{EMBEDDED}/tokenizer"), directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    assert HEAD not in tensors
    tensors[HEAD] = torch.randn_like(tensors[EMBEDDING]) * 0.2 if own else tensors[EMBEDDING].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tied(tmp_path_factory.mktemp("own") / "base", "qwen3")


def loss_of_transformers(directory: Path) -> float:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), load_tokenizer(str(directory))
    losses = []
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            losses += torch.nn.functional.cross_entropy(
                model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
            ).tolist()
    return sum(losses) / len(losses)


@pytest.fixture
def loss_here(tmp_path: Path, data_cache: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], float]:
    """The loss of a model as `surogate eval` measures it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    keys = [f"datasets=[{{path: '{rows}', type: text}}]", "sequence_len=64", f"data_cache_dir={data_cache}"]

    def measure(model: Path) -> float:
        capsys.readouterr()
        assert main(["eval", str(model), "--json", *keys, "device=cpu"]) == 0
        return float(json.loads(capsys.readouterr().out)[0]["loss"])

    return measure


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_head_of_its_own_is_the_models(family: str, tmp_path: Path, loss_here: Callable[[Path], float]) -> None:
    base = tied(tmp_path / family, family)
    assert loss_here(base) == pytest.approx(loss_of_transformers(base), rel=1e-5)


def test_training_and_its_exports_keep_the_head(
    own: Path, tmp_path: Path, base_on: Callable[[Path], list[str]], run_here: Run, records: Any, loss_here: Any
) -> None:
    keys = (*base_on(own), "lora_rank=4", "learning_rate=0.02", "max_steps=3", "merge_adapter=true")
    run_here(tmp_path / "run", *keys)
    (note,) = [n for n in records(tmp_path / "run", "run_start")[0]["notes"] if "tie_word_embeddings" in n]
    assert "a head with other values than the embedding" in note
    assert main(["merge", str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    head, expected = load_file(own / "model.safetensors")[HEAD], loss_here(tmp_path / "run" / "adapter")
    assert expected != pytest.approx(loss_of_transformers(own), rel=1e-3), "it learned something"
    for place in (tmp_path / "run" / "model", tmp_path / "merged"):
        assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is False
        assert torch.equal(load_file(place / "model.safetensors")[HEAD], head)
        assert loss_of_transformers(place) == pytest.approx(expected, rel=1e-5)


def test_full_training_trains_the_head(
    own: Path, tmp_path: Path, base_on: Callable[[Path], list[str]], run_here: Run, loss_here: Any
) -> None:
    run_here(tmp_path / "run", *base_on(own), "lora=false", "max_steps=2", "learning_rate=0.01")
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is False
    tensors, before = load_file(model / "model.safetensors"), load_file(own / "model.safetensors")
    for name in (HEAD, EMBEDDING):
        assert not torch.equal(tensors[name], before[name])
        assert (tensors[name] - before[name]).abs().mean() < 0.05
    assert loss_of_transformers(model) == pytest.approx(loss_here(model), rel=1e-5)


def test_an_equal_copy_is_left_out(
    tmp_path: Path, base_on: Callable[[Path], list[str]], run_here: Run, records: Any, loss_here: Any
) -> None:
    base = tied(tmp_path / "base", "qwen3", own=False)
    run_here(tmp_path / "run", *base_on(base), "lora_rank=4", "max_steps=2", "merge_adapter=true")
    assert not [n for n in records(tmp_path / "run", "run_start")[0]["notes"] if "tie_word_embeddings" in n]
    assert main(["merge", str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    for place in (tmp_path / "run" / "model", tmp_path / "merged"):
        assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is True
        assert HEAD not in load_file(place / "model.safetensors")
        assert loss_of_transformers(place) == pytest.approx(loss_here(place), rel=1e-5)


def test_every_reader_of_a_model_agrees(own: Path, tmp_path: Path, installed: Registry) -> None:
    config = load_run_config([f"model={own}", "device=cpu"], registry=installed)
    planned = resolve_model(config, installed, weights_needed=False).model
    assert not planned.tied, "a plan knows what the files at hand say"
    scratch = load_run_config([f"model={own}", "from_scratch=true", "device=cpu"], registry=installed)
    assert resolve_model(scratch, installed).model.tied, "random weights have no head that says otherwise"
    opened = prepare(named(str(own)), config, installed)
    assert [note for note in opened.notes if "tie_word_embeddings" in note]
    weights = opened.load(installed)
    assert torch.equal(weights.parameters.inputs(weights.plan.head)[1], load_file(own / "model.safetensors")[HEAD])
    written: list[ExportJob] = []

    def write(job: ExportJob, options: Any) -> Exported:
        written.append(job)
        job.file.write_bytes(b"")
        return Exported()

    spec = ExportFormat(name="x", summary="tests", suffix=".x", write=write)
    convert(str(own), spec, None, tmp_path / "a.x", installed)
    assert written[0].config["tie_word_embeddings"] is False
    assert written[0].shapes[HEAD] == (1024, 32)


@pytest.mark.slow
def test_rollouts_teachers_and_references_have_the_head(
    own: Path, tmp_path: Path, base_on: Callable[[Path], list[str]], grpo_keys: list[str], run_here: Run, records: Any
) -> None:
    short = ("max_steps=1", "eval_steps=0", "lora_rank=2")
    run_here(tmp_path / "grpo", *grpo_keys, f"model={own}", *short)
    assert records(tmp_path / "grpo", "step_end")[0]["figures"]["logprob_gap/max"] < 1e-4
    keys = ("task=distill", f"distill_teacher={own}", "distill_top_k=8", "distill_kd_weight=1")
    run_here(tmp_path / "distill", *base_on(own), *keys, *short)
    assert records(tmp_path / "distill", "step_end")[0]["figures"]["kl"] < 1e-6


def test_an_adapter_of_the_head_is_merged(own: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(own), LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "--base-model", str(own), "--output", str(tmp_path / "m")]) == 0
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        merged, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "m")(ids).logits, model.eval()(ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)


def test_the_task_decides_and_a_model_that_has_another_keeps_it() -> None:
    registry = load_plugins()
    family = ModelFamily(name="small", hf_model_types=("small",), build=tiny.SmallModel)
    sft, reward = registry.get("task", "sft"), registry.get("task", "reward")
    plain = dict(tiny.SMALL_CONFIG)
    assert built_for(family, plain, sft)[0] is plain
    values, scored = built_for(family, plain, reward)
    assert isinstance(scored.head, ScoreHead)
    assert built_for(family, values, sft)[0] is values
    check_head(RunConfig(task="reward"), registry, scored, "MODEL")
    with pytest.raises(
        ConfigError, match="MODEL is a reward model, whose head gives scores; task sft needs logits"
    ) as said:
        check_head(RunConfig(task="sft"), registry, scored, "MODEL")
    assert said.value.problems[0].fix == "task=reward, or name another model."


def test_a_family_without_the_head_of_a_task_is_refused() -> None:
    class Texts(tiny.SmallModel):
        heads = ()

    family = ModelFamily(name="texts", hf_model_types=("texts",), build=Texts)
    reward = load_plugins().get("task", "reward")
    with pytest.raises(ConfigError, match="reward trains a head of kind scores, and models of family texts have log"):
        built_for(family, dict(tiny.SMALL_CONFIG), reward)
