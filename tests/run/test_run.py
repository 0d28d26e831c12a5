"""Whole runs: the same twice, what they write, schedules, evaluations, checkpoints, monitors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surogate_core.bundles import ReportSpec
from surogate_core.config.schema import RunConfig
from surogate_core.errors import UserError
from surogate_core.plugins.discovery import core_plugin
from surogate_core.plugins.registry import Offered, Registry, load_plugins

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lora_target_modules=[all]")


@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("mode", [(), LORA], ids=["full", "lora"])
def test_two_runs_are_bit_identical(
    mode: tuple[str, ...], tmp_path: Path, base: list[str], run_here: RunHere, history: History, digests: Digests
) -> None:
    for name in ("a", "b"):
        assert run_here(tmp_path / name, *base, *mode) == 0
    assert len(history(tmp_path / "a")) == 6 + 2
    assert history(tmp_path / "a") == history(tmp_path / "b")
    for directory in ("checkpoint-6", "adapter" if mode else "model"):
        assert digests(tmp_path / "a" / directory) == digests(tmp_path / "b" / directory)
    assert run_here(tmp_path / "c", *base, *mode, "train_seed=7", "max_steps=1") == 0
    assert history(tmp_path / "c")[0] != history(tmp_path / "a")[0]


def test_held_out_loss_falls_on_the_embedded_default(
    tmp_path: Path, data_cache: Path, run_here: RunHere, records: Records
) -> None:
    # The shape, rows and rates of conf/, on fewer of them.
    data = "pkg://surogate_dataset_chat/embedded"
    keys = [
        f"datasets=[{{path: '{data}/train.jsonl', type: conversation, samples: 1000}}]",
        f"validation_datasets=[{{path: '{data}/validation.jsonl', type: conversation, samples: 60}}]",
        f"tokenizer='{data}/tokenizer'",
        "max_steps=30",
        "eval_steps=0",
        "monitor=[jsonl]",
        "device=cpu",
        f"data_cache_dir={data_cache}",
    ]
    run_here(tmp_path, *keys, "model.config.num_hidden_layers=2", "model.config.hidden_size=64")
    first, last = (line["loss"] for line in records(tmp_path, "eval_end"))
    assert first == pytest.approx(math.log(1024), abs=0.2)
    assert last < first - 2


# ------------------------------------------------------------------------- what is written


def test_metrics_are_strict_json_with_every_figure(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path, *base, "eval_steps=3", "save_steps=4")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    lines = records(tmp_path)
    step, evaluation, saved = "step_end", "eval_end", "checkpoint_saved"
    events = [line["event"] for line in lines]
    assert events[:5] == ["run_start", evaluation, step, step, step]
    assert events[5:] == [evaluation, step, saved, step, step, evaluation, saved, "run_end"]
    steps = records(tmp_path, "step_end")
    figures = {"step", "loss", "grad_norm", "lr", "epoch", "tokens", "seconds", "tokens_per_second", "eta_seconds"}
    assert all(figures | {"label_tokens", "total_tokens", "peak_memory_bytes"} <= line.keys() for line in steps)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["total_tokens"] == sum(line["tokens"] for line in steps)
    assert all(0 < line["label_tokens"] < line["tokens"] <= 4 * 64 for line in steps)
    evals = records(tmp_path, "eval_end")
    assert [line["step"] for line in evals] == [0, 3, 6]
    assert evals[0]["gap"] is None
    for line, first in ((evals[1], 0), (evals[2], 3)):
        mean = sum(step["loss"] for step in steps[first : first + 3]) / 3
        assert line["gap"] == pytest.approx(line["loss"] - mean)
    end = records(tmp_path, "run_end")[0]
    assert (end["reason"], end["step"]) == ("finished", 6)
    assert (end["first_eval_loss"], end["last_eval_loss"]) == (evals[0]["loss"], evals[2]["loss"])


def test_the_gap_is_over_the_last_twenty_steps(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path, *base, "max_steps=25", "eval_steps=0")
    steps, last = records(tmp_path, "step_end"), records(tmp_path, "eval_end")[-1]
    assert last["gap"] == pytest.approx(last["loss"] - sum(step["loss"] for step in steps[-20:]) / 20)


def test_config_yaml_repeats_the_run(
    tmp_path: Path, base: list[str], run_here: RunHere, history: History, digests: Digests
) -> None:
    run_here(tmp_path / "a", *base, *LORA, "learning_rate=1e-3", "run_name='a ü'")
    text = (tmp_path / "a" / "config.yaml").read_text()
    assert "`surogate sft`" in text
    run_here(tmp_path / "b", config_file=tmp_path / "a" / "config.yaml")
    assert history(tmp_path / "a") == history(tmp_path / "b")
    assert digests(tmp_path / "a" / "adapter") == digests(tmp_path / "b" / "adapter")
    # The second run's file differs in its own directory alone.
    assert (tmp_path / "b" / "config.yaml").read_text() == text.replace(str(tmp_path / "a"), str(tmp_path / "b"))


def test_run_json_holds_plugins_versions_and_seeds(
    tmp_path: Path, base: list[str], run_here: RunHere, installed: Registry
) -> None:
    run_here(tmp_path, *base, "max_steps=1", "train_seed=5", "eval_seed=6")
    facts = json.loads((tmp_path / "run.json").read_text())
    digests = [plugin.pop("sha256") for plugin in facts["plugins"]]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert facts["plugins"] == installed.plugin_set()
    assert all(plugin["version"] for plugin in facts["plugins"])
    assert facts["plugins_in_use"] == ["core", "model-qwen3", "optimizer-adamw-8bit", "recipe-bf16"]
    assert facts["seeds"] == {"train_seed": 5, "eval_seed": 6}
    assert (facts["torch"], facts["essential"]["lora"]) == (torch.__version__, False)


def test_run_json_shows_what_is_trained(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    run_here(tmp_path, *base, "max_steps=1")
    report = json.loads((tmp_path / "run.json").read_text())["data_report"]
    assert report["trained_share"] == report["train"]["label_tokens"] / report["train"]["tokens"]
    assert 0.1 < report["trained_share"] < 0.9
    assert [set(example) for example in report["examples"]] == [
        {"row", "document", "tokens", "trained_tokens", "text"}
    ] * 3
    for example in report["examples"]:
        assert example["tokens"] <= report["longest_document"] <= 64
        trained = re.findall("⟦(.*?)⟧", example["text"], re.DOTALL)
        assert trained
        assert all(text.endswith("«<|im_end|>»") and len(text) > len("«<|im_end|>»") for text in trained)
        assert example["text"].startswith("«<|im_start|>»")
    share = f"| training: share of the tokens that are trained | {report['trained_share']:.1%} |"
    assert share in (tmp_path / "report.md").read_text()


def test_full_export_loads_in_transformers(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    import transformers

    run_here(tmp_path, *base, "lora=false")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    masters = load_file(tmp_path / "checkpoint-6" / "trainable.safetensors")
    assert torch.equal(model.model.embed_tokens.weight, masters["model.embed_tokens.weight"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    assert (tmp_path / "metrics.jsonl").exists()
    assert records(tmp_path, "run_end")[0]["export_path"] == str(tmp_path / "model")


def test_lora_on_a_directory_and_its_adapter_in_peft(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: RunHere, records: Records
) -> None:
    import peft
    import transformers

    overrides = [*base_on(hf_dir), *LORA, "learning_rate=1e-2"]
    run_here(tmp_path, *overrides)
    start = records(tmp_path, "run_start")[0]
    assert start["trainable_parameters"] < start["parameters"]
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    ids = torch.arange(20)[None]
    before = model(ids).logits
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert not torch.allclose(adapted(ids).logits, before, atol=1e-3)
    masters = load_file(tmp_path / "checkpoint-6" / "trainable.safetensors")
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    loaded = dict(adapted.named_parameters())["base_model." + "model." + name.replace(".weight", ".default.weight")]
    assert torch.equal(loaded, masters[name])
    assert adapted.peft_config["default"].base_model_name_or_path == str(hf_dir)


def test_full_finetune_of_a_directory_keeps_its_generation_config(
    tmp_path: Path, model_copy: Path, base_on: Callable[[Path], list[str]], run_here: RunHere
) -> None:
    (model_copy / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    run_here(tmp_path / "out", *base_on(model_copy), "lora=false", "max_steps=1")
    saved = json.loads((tmp_path / "out" / "model" / "generation_config.json").read_text())
    assert saved["temperature"] == 0.25


# ---------------------------------------------------------------------- length and schedule


@pytest.mark.slow_cases("constant", "linear", "cosine")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("lr_scheduler_type=constant",), [1, 1, 1, 1, 1, 1]),
        (("lr_scheduler_type=linear", "warmup_steps=2"), [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (("lr_scheduler_type=wsd", "cooldown_steps=2"), [1, 1, 1, 1, 1, 0.5]),
        (
            ("lr_scheduler_type=cosine", "final_lr_fraction=0.1"),
            [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s / 6)) for s in range(6)],
        ),
    ],
    ids=["constant", "linear", "wsd", "cosine"],
)
def test_learning_rates_of_a_run(
    keys: tuple[str, ...], expected: list[float], tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path, *base, "learning_rate=1e-3", "save_steps=0", *keys)
    rates = [line["lr"] for line in records(tmp_path, "step_end")]
    assert rates == pytest.approx([1e-3 * share for share in expected])


def test_max_steps_wins_over_epochs_and_epochs_count_rows(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path / "steps", *base, "max_steps=2", "num_epochs=50", "warmup_steps=2")
    assert len(records(tmp_path / "steps", "step_end")) == 2
    assert any(
        "Every step of this run (2) is warm-up" in note for note in records(tmp_path / "steps", "run_start")[0]["notes"]
    )
    run_here(tmp_path / "epochs", *base, "max_steps=-1", "num_epochs=0.5", "save_steps=0")
    start, last = records(tmp_path / "epochs", "run_start")[0], records(tmp_path / "epochs", "step_end")[-1]
    assert last["step"] == start["steps"]
    rows_of_a_step = 4
    rows = round(rows_of_a_step * last["step"] / last["epoch"])
    assert last["step"] == math.ceil(rows / 2 / rows_of_a_step)


def test_total_steps_is_whole_in_spite_of_floats() -> None:
    from surogate_core.train.loop import total_steps

    class Loader:
        epoch = 0.0
        steps_per_epoch = 10.0

    assert total_steps(RunConfig(num_epochs=1.1), Loader(), done=0) == 11  # type: ignore[arg-type]
    assert total_steps(RunConfig(num_epochs=1.11), Loader(), done=0) == 12  # type: ignore[arg-type]
    Loader.epoch = 0.5
    assert total_steps(RunConfig(num_epochs=1), Loader(), done=5) == 10  # type: ignore[arg-type]
    assert total_steps(RunConfig(num_epochs=1), Loader(), done=20) == 25  # type: ignore[arg-type]


def test_accumulation_gives_the_loss_of_one_big_batch(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    # Packed rows have ragged label counts: a mean of micro-batch means would differ in the first digits.
    run_here(tmp_path / "four", *base, "per_device_train_batch_size=1", "gradient_accumulation_steps=4")
    run_here(tmp_path / "one", *base, "per_device_train_batch_size=4", "gradient_accumulation_steps=1")
    four, one = records(tmp_path / "four", "step_end"), records(tmp_path / "one", "step_end")
    assert [line["label_tokens"] for line in four] == [line["label_tokens"] for line in one]
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[key] for line in four] == pytest.approx([line[key] for line in one], rel=tolerance)


# ------------------------------------------------------------- checkpoints and evaluations


def test_save_total_limit_and_no_saves(tmp_path: Path, base: list[str], run_here: RunHere, records: Records) -> None:
    run_here(tmp_path / "two", *base, "save_steps=1", "save_total_limit=2", "eval_steps=0")
    assert sorted(path.name for path in (tmp_path / "two").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert [line["step"] for line in records(tmp_path / "two", "eval_end")] == [0, 6]
    run_here(tmp_path / "end", *base, "save_steps=0")
    assert [path.name for path in (tmp_path / "end").glob("checkpoint-*")] == ["checkpoint-6"]
    saved = records(tmp_path / "end", "checkpoint_saved")
    assert [(line["step"], line["reason"]) for line in saved] == [(6, "end")]


def test_checkpoints_on_another_disk(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    elsewhere = f"checkpoint_dir={tmp_path / 'elsewhere'}"
    run_here(tmp_path / "out", *base, elsewhere, "max_steps=2")
    assert (tmp_path / "elsewhere" / "checkpoint-2").is_dir()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_nothing_held_out(tmp_path: Path, base: list[str], run_here: RunHere, records: Records) -> None:
    run_here(tmp_path, *base, "validation_datasets=[]", "validation_split_ratio=0", "eval_steps=1")
    assert records(tmp_path, "eval_end") == []
    assert records(tmp_path, "run_end")[0]["last_eval_loss"] is None


# --------------------------------------------------------------------------------- monitors

FAKE = """
from surogate_core import bundles, hookimpl
from surogate_core.events import Control

class Fake:
    seen, answers, loaded, kept = [], {}, [], {"n": 1}

    def on_event(self, event):
        Fake.seen.append(event)
        answer = Fake.answers.get((event.name, getattr(event, "step", None)))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def state(self):
        return Fake.kept

    def load_state(self, state):
        Fake.loaded.append(state)

    def close(self):
        Fake.seen.append("closed")

def build(options, info):
    if Fake.answers.get("build"):
        raise Fake.answers["build"]
    return Fake()

@hookimpl
def surogate_monitor():
    return bundles.MonitorSpec(name="fake", build=build)
"""


@pytest.fixture
def fake(install_plugin: Callable[..., Path]) -> tuple[Any, Registry]:
    """A monitor that answers what it is told to, and the registry that has it."""
    import sys

    install_plugin("monitor-fake", FAKE)
    registry = load_plugins()
    return sys.modules["plugin_monitor_fake"].Fake, registry


def test_controls_are_obeyed(
    fake: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    from surogate_core.events import Control

    monitor, registry = fake
    monitor.answers = {
        ("step_end", 2): Control(lr_scale=0.5, reason="too fast"),
        ("step_end", 3): Control(save=True),
        ("step_end", 5): Control(stop=True, reason="enough"),
        ("step_end", 1): Control(lr_scale=float("nan")),
    }
    keys = ("monitor=[jsonl,fake]", "learning_rate=1e-3", "lr_scheduler_type=constant", "max_steps=20")
    assert run_here(tmp_path, *base, *keys, registry=registry) == 0
    assert [line["lr"] for line in records(tmp_path, "step_end")] == [1e-3, 1e-3, 5e-4, 5e-4, 5e-4]
    saved = [(line["step"], line["reason"]) for line in records(tmp_path, "checkpoint_saved")]
    assert saved == [(3, "control"), (5, "control")]
    notices = [line["message"] for line in records(tmp_path, "notice")]
    assert notices == [
        "learning rate × nan: not obeyed (asked by a monitor)",
        "learning rate × 0.5: too fast",
        "save now: asked by a monitor",
        "stop: enough",
    ]
    # A stopped run is evaluated and exported.
    assert [line["step"] for line in records(tmp_path, "eval_end")] == [0, 5]
    end = records(tmp_path, "run_end")[0]
    assert (end["reason"], end["step"], end["message"]) == ("stopped", 5, "Stopped: enough.")
    assert (tmp_path / "model" / "config.json").exists()
    assert monitor.seen[-1] == "closed"
    # The scale and the monitor's own state come back with the checkpoint.
    monitor.answers = {}
    run_here(tmp_path, *base, *keys, "max_steps=7", registry=registry)
    assert [line["lr"] for line in records(tmp_path, "step_end")][5:] == [5e-4, 5e-4]
    assert monitor.loaded == [{"n": 1}]


@pytest.mark.slow_cases("eval_end", "checkpoint_saved")
@pytest.mark.parametrize("event", ["run_start", "eval_end", "checkpoint_saved"])
def test_stop_is_obeyed_from_any_event(
    event: str, fake: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    from surogate_core.events import Control

    monitor, registry = fake
    at = {"run_start": None, "eval_end": 2, "checkpoint_saved": 2}[event]
    monitor.answers = {(event, at): Control(stop=True)}
    keys = ("monitor=[jsonl,fake]", "eval_steps=2", "save_steps=2")
    run_here(tmp_path, *base, *keys, registry=registry)
    end = records(tmp_path, "run_end")[0]
    assert (end["reason"], end["step"]) == ("stopped", 0 if event == "run_start" else 2)
    assert len({line["step"] for line in records(tmp_path, "eval_end")}) == len(records(tmp_path, "eval_end"))


def test_a_raising_monitor_does_not_stop_the_run(
    fake: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    monitor, registry = fake
    monitor.answers = {("step_end", 2): RuntimeError("boom")}
    assert run_here(tmp_path / "a", *base, "monitor=[jsonl,fake]", registry=registry) == 0
    assert len(records(tmp_path / "a", "step_end")) == 6
    (notice,) = records(tmp_path / "a", "notice")
    assert "monitor fake failed at event step_end" in notice["message"]
    # Neither does a state that JSON cannot hold.
    monitor.answers, monitor.kept = {}, {"n": object()}
    assert run_here(tmp_path / "b", *base, "monitor=[jsonl,fake]", registry=registry) == 0
    (notice,) = records(tmp_path / "b", "notice")
    assert "saving its state" in notice["message"]


def test_a_monitor_that_cannot_be_built_is_named_and_no_report_is_missed(
    fake: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, registry = fake
    spec = ReportSpec(name="never", write=lambda runs: pytest.fail("there is no record"))
    monkeypatch.setitem(registry._offers, "report", {"never": Offered(bundle=spec, plugin=core_plugin())})
    monitor.answers = {"build": KeyError("token")}
    with pytest.raises(UserError, match=r"monitor fake of plugin monitor-fake cannot be built: KeyError: 'token'"):
        run_here(tmp_path, *base, "monitor=[jsonl,fake]", registry=registry)


def test_every_path_ends_in_a_run_end(
    fake: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere
) -> None:
    monitor, registry = fake
    with pytest.raises(UserError, match="tokenizer"):
        run_here(tmp_path, *base, "monitor=[fake]", "tokenizer=/nowhere", registry=registry)
    (end,) = [event for event in monitor.seen if getattr(event, "name", "") == "run_end"]
    assert end.reason == "failed"
    assert re.search("tokenizer /nowhere: no such directory", end.message)
    assert monitor.seen[-1] == "closed"


def test_long_work_is_shown(fake: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    monitor, registry = fake
    keys = ("monitor=[fake]", f"data_cache_dir={tmp_path / 'cache'}", "max_steps=1")
    run_here(tmp_path, *base, *keys, registry=registry)
    events = [event for event in monitor.seen if getattr(event, "name", "") == "progress"]
    tasks = {event.task for event in events}
    assert {
        "fetching the model",
        "verifying the checkpoint",
        "loading the tokenizer",
        "loading weights",
        "differentiating Qwen3Block",
        "evaluating",
        "exporting the model",
        "pack",
    } <= tasks
    assert "saving a checkpoint" in tasks
    assert any(task.startswith("tokenise ") for task in tasks)
    last = {event.task: event for event in events}
    assert all(event.done == event.total for event in last.values() if event.total)
    # Not only that it begins and ends.
    for task in ("loading weights", "exporting the model"):
        dones = [event.done for event in events if event.task == task]
        assert dones == sorted(dones)
        assert len(set(dones)) > 5


def test_progress_of_a_save_is_told_by_the_mebibyte() -> None:
    from surogate_core.train.measures import Mebibytes

    told: list[tuple[int, int]] = []
    progress = Mebibytes(lambda event: told.append((event.done, event.total)), "t")  # type: ignore[attr-defined]
    for done in range(0, 5 * 2**20 // 2 + 1, 2**18):
        progress.told(done, 5 * 2**20 // 2)
    progress.over()
    assert told == [(0, 1), (1, 3), (2, 3), (3, 3)]


def test_one_run_at_a_time(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    from filelock import FileLock

    for key in ("output_dir", "checkpoint_dir"):
        directory = tmp_path / key
        directory.mkdir()
        output = directory if key == "output_dir" else tmp_path / "out"
        keys = [*base, "max_steps=1", f"checkpoint_dir={directory}"]
        with FileLock(directory / ".lock"), pytest.raises(UserError, match=f"{key} .*another run is writing there"):
            run_here(output, *keys)
        assert run_here(output, *keys) == 0
