"""Samples during training: they change no bit, are the texts of the weights of their step, and survive a resume."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mixture import save_qwen3_moe
from rank_world import World
from run_fixtures import EMBEDDED, KILLER, LORA
from surogate_command_generate.python import generate

from surogate_core.bundles import Completion, Request, RolloutEngineSpec
from surogate_core.config.schema import RunConfig
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import MachineError, UserError
from surogate_core.events import Notice, Samples
from surogate_core.plugins.registry import Registry, load_plugins
from surogate_core.run import samples

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]

PROMPTS = '["What is a learning rate?", {prompt: The chain}]'
SAMPLED = (f"sample_prompts={PROMPTS}", "sample_max_new_tokens=6", "eval_steps=2")


@pytest.fixture(scope="module")
def base_model(hf_dir: Path, data_cache: Path, base: list[str]) -> list[str]:
    """Overrides of a short run on a random model."""
    quick = [key for key in base if not key.startswith(("model", "tokenizer"))]
    return [*quick, f"model={hf_dir}", *LORA, "max_steps=4", "save_steps=2", "eval_steps=2"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, base_model: list[str], run_here: RunHere) -> Path:
    """A run without samples."""
    run = tmp_path_factory.mktemp("plain") / "run"
    assert run_here(run, *base_model) == 0
    return run


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, base_model: list[str], run_here: RunHere) -> Path:
    """The same run with samples."""
    run = tmp_path_factory.mktemp("sampled") / "run"
    assert run_here(run, *base_model, *SAMPLED) == 0
    return run


def taken(records: Records, run: Path) -> list[tuple[int, tuple[str, ...]]]:
    return [(one["step"], tuple(one["texts"])) for one in records(run, "samples")]


def test_samples_change_no_bit_and_are_the_texts_of_their_step(
    plain: Path, sampled: Path, records: Records, history: Any, digests: Digests
) -> None:
    from surogate_core import api

    assert api.load(plain).samples == []
    assert api.load(sampled).samples[1] == (0, "The chain", taken(records, sampled)[0][1][1])
    assert history(sampled) == history(plain)
    for directory in ("checkpoint-2", "checkpoint-4", "adapter"):
        assert digests(sampled / directory) == digests(plain / directory)
    found = records(sampled, "samples")
    assert [one["step"] for one in found] == [0, 2, 4]
    order = [line["event"] for line in records(sampled) if line["event"] in ("eval_end", "samples")]
    assert order == ["eval_end", "samples"] * 3
    assert found[0]["prompts"] == ["What is a learning rate?", "The chain"]
    assert all(one["tokens"] <= 12 and len(one["ended"]) == 2 for one in found)
    chat = [{"role": "user", "content": "What is a learning rate?"}]
    for step, run in ((2, sampled / "checkpoint-2"), (4, sampled)):
        texts = generate(run, [chat, "The chain"], max_new_tokens=6, sampling={"temperature": 0}, device="cpu")
        assert dict(taken(records, sampled))[step] == tuple(text.text for text in texts)


def test_a_resumed_run_keeps_the_samples_and_takes_the_next_ones(
    sampled: Path, tmp_path: Path, base_model: list[str], run_here: RunHere, records: Records
) -> None:
    run = Path(shutil.copytree(sampled, tmp_path / "run"))
    shutil.rmtree(run / "checkpoint-4")
    assert run_here(run, *base_model, *SAMPLED) == 0
    assert taken(records, run) == taken(records, sampled)


@pytest.mark.slow
def test_samples_without_held_out_rows_have_steps_of_their_own(
    tmp_path: Path, base_model: list[str], run_here: RunHere, records: Records
) -> None:
    keys = ("validation_datasets=[]", "validation_split_ratio=0", "sample_steps=3", "sample_temperature=1.5")
    assert run_here(tmp_path / "run", *base_model, *SAMPLED, *keys) == 0
    assert [step for step, _ in taken(records, tmp_path / "run")] == [0, 3, 4]
    assert records(tmp_path / "run", "eval_end") == []


def no_room(*_: Any, **__: Any) -> Any:
    raise MachineError("The keys and values need more than is free.")


def test_no_error_of_samples_ends_a_run(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice says what is wrong; `tests/train/test_loop.py` shows that the loop goes on."""

    def broken(weights: Any, settings: Any) -> Any:
        raise ZeroDivisionError("a bug")

    spec = RolloutEngineSpec(name="broken", open=broken)
    monkeypatch.setattr(samples, "Weights", mock.MagicMock())
    requests = [Request(prompt=(1,), max_new_tokens=1)]
    sampler = samples.Sampler(shown=("a",), requests=requests, spec=spec, tokenizer=tokenizer, show=lambda event: None)
    for fitting, why in ((no_room, "The keys and values need"), (mock.MagicMock(), "ZeroDivisionError('a bug')")):
        monkeypatch.setattr(samples, "fitting_slots", fitting)
        notice = sampler(mock.MagicMock(), 4, lambda: False)
        assert isinstance(notice, Notice)
        assert f"no samples from step 4 on, and the run goes on without them: {why}" in notice.message


class Speaks:
    """A rollout engine that always says the same token."""

    def generate(self, requests: Any, *, on_token: Any = None) -> list[Completion]:
        found = []
        for number, request in enumerate(requests):
            for _ in range(request.max_new_tokens):
                on_token(number, 7)
            ids = (7,) * request.max_new_tokens
            found.append(Completion(ids=ids, logprobs=(0.0,) * len(ids), reason="length"))
        return found


def test_progress_is_shown_now_and_then_and_a_signal_ends_the_samples(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    spec = RolloutEngineSpec(name="speaks", open=lambda weights, settings: Speaks())
    requests = [Request(prompt=(1,), max_new_tokens=100, number=number) for number in range(2)]
    monkeypatch.setattr(samples, "Weights", mock.MagicMock())
    monkeypatch.setattr(samples, "fitting_slots", lambda *_, **__: 2)
    sampler = samples.Sampler(shown=("a", "b"), requests=requests, spec=spec, tokenizer=tokenizer, show=shown.append)
    found = sampler(mock.MagicMock(), 4, lambda: False)
    assert isinstance(found, Samples)
    assert (found.step, found.prompts, found.ended, found.tokens) == (4, ("a", "b"), (False, False), 200)
    assert found.texts == (tokenizer.decode([7] * 100),) * 2
    assert [(one.done, one.total) for one in shown] == [(done, 200) for done in range(10, 201, 10)]
    shown.clear()
    assert sampler(mock.MagicMock(), 5, lambda: len(shown) >= 3) is None
    assert len(shown) == 3


@pytest.mark.slow
def test_a_run_goes_on_without_samples_if_their_cache_has_no_room(
    plain: Path,
    tmp_path: Path,
    base_model: list[str],
    run_here: RunHere,
    records: Records,
    digests: Digests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "fitting_slots", no_room)
    run = tmp_path / "run"
    assert run_here(run, *base_model, *SAMPLED) == 0
    assert digests(run / "adapter") == digests(plain / "adapter")
    (notice,) = [one for one in records(run, "notice") if one["level"] == "warning"]
    assert "no samples from step 0 on, and the run goes on without them: The keys and values" in notice["message"]
    assert records(run, "samples") == []


@pytest.mark.slow
def test_a_signal_ends_the_samples_and_the_resumed_run_takes_them(
    sampled: Path,
    install_plugin: Callable[..., Path],
    tmp_path: Path,
    base_model: list[str],
    run_here: RunHere,
    records: Records,
    digests: Digests,
) -> None:
    import signal
    import sys

    install_plugin("monitor-killer", KILLER)
    registry = load_plugins()
    monitor = sys.modules["plugin_monitor_killer"].Killer
    run, keys = tmp_path / "run", [*base_model, *SAMPLED, "monitor=[jsonl,killer]", "sample_max_new_tokens=40"]
    steps = []

    def at(event: Any) -> bool:
        if event.name == "eval_end":
            steps.append(event.step)
        return bool(event.name == "progress" and event.task == "generating samples" and 2 in steps)

    monitor.at, monitor.number = at, signal.SIGTERM
    assert run_here(run, *keys, registry=registry) == 143
    assert [step for step, _ in taken(records, run)] == [0]
    assert run_here(run, *keys, registry=registry) == 0
    assert [step for step, _ in taken(records, run)] == [0, 2, 4]
    assert digests(run / "adapter") == digests(sampled / "adapter")


MODES: dict[str, tuple[str, ...]] = {
    "full": ("lora=false", "optimizer=adamw", "master_dtype=bf16"),
    "nf4": ("qlora_bnb=true", "recompute=true"),
    "offloaded": ("qlora_fp8=true", "persistent_quants=true", "offload_quants=true", "offload_residual=true"),
    "cpu-training": ("cpu_training=true", "lora=false"),
    "fp8-hybrid": ("recipe=fp8-hybrid", "skip_quant_first_layers=1"),
    "experts": ("router_aux_loss_coef=0.01", "train_router=true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_samples_change_no_bit_in_any_mode(
    mode: str,
    tmp_path: Path,
    base_model: list[str],
    run_here: RunHere,
    records: Records,
    history: Any,
    digests: Digests,
) -> None:
    keys = [*base_model, *MODES[mode]]
    if mode == "experts":
        keys.append(f"model={save_qwen3_moe(tmp_path / 'experts')}")
    for name, own in (("plain", ()), ("sampled", SAMPLED)):
        assert run_here(tmp_path / name, *keys, *own) == 0
    assert len(taken(records, tmp_path / "sampled")) == 3
    assert history(tmp_path / "sampled") == history(tmp_path / "plain")
    for step in (2, 4):
        assert digests(tmp_path / "sampled" / f"checkpoint-{step}") == digests(
            tmp_path / "plain" / f"checkpoint-{step}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [("lora=true",), ("lora=true", "qlora_bnb=true"), ("lora=false",)], ids=str)
def test_samples_change_no_bit_on_a_gpu(
    mode: tuple[str, ...],
    tmp_path: Path,
    base_model: list[str],
    run_here: RunHere,
    records: Records,
    history: Any,
    digests: Digests,
) -> None:
    keys = [*base_model, *mode, "device=cuda"]
    for name, own in (("plain", ()), ("sampled", SAMPLED)):
        assert run_here(tmp_path / name, *keys, *own) == 0
    found = records(tmp_path / "sampled", "samples")
    assert [one["step"] for one in found] == [0, 2, 4]
    assert all(one["tokens"] > 0 for one in found)
    assert history(tmp_path / "sampled") == history(tmp_path / "plain")
    for name in ("checkpoint-2", "checkpoint-4"):
        assert digests(tmp_path / "sampled" / name) == digests(tmp_path / "plain" / name)


# ------------------------------------------------------------------------------ the prompts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(f"{EMBEDDED}/tokenizer", revision=None)


def decoded(tokenizer: Any, config: RunConfig, *, trains_prompts: bool = False) -> list[str]:
    return [tokenizer.decode(p.ids) for p in samples.prompts_of(config, tokenizer, trains_prompts=trains_prompts)]


def test_a_text_is_a_users_message_where_the_data_has_a_template(tokenizer: Any) -> None:
    config = RunConfig(sample_prompts=["Why?"])
    (asked,) = decoded(tokenizer, config)
    assert "Why?" in asked
    assert "user" in asked
    assert asked.rstrip().endswith("assistant")
    assert decoded(tokenizer, config, trains_prompts=True) == ["Why?"]
    assert decoded(tokenizer, replace(config, use_chat_template=False)) == ["Why?"]
    assert decoded(tokenizer, replace(config, sample_prompts=[{"prompt": "Why?"}])) == ["Why?"]
    (with_system,) = decoded(tokenizer, replace(config, system="Be brief."))
    assert "Be brief." in with_system
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Why?"}]
    (kept,) = decoded(tokenizer, replace(config, system="Be brief.", sample_prompts=[{"messages": own}]))
    assert "Be long." in kept
    assert "Be brief." not in kept


def test_messages_without_a_template_are_refused(tokenizer: Any) -> None:
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    assert decoded(plain, RunConfig(sample_prompts=["Why?"])) == ["Why?"]
    asked = [{"messages": [{"role": "user", "content": "Why?"}]}]
    with pytest.raises(UserError, match="has no chat template, which conversations need"):
        decoded(plain, RunConfig(sample_prompts=asked))


def test_prompts_come_from_files_too(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"One?"\n\n{"prompt": "Two"}\n{"messages": [{"role": "user", "content": "Three?"}]}\n')
    config = RunConfig(sample_prompts=[str(file), "Four?"])
    assert [samples.shown(row) for _, row in samples.rows_of(config)] == ["One?", "Two", "Three?", "Four?"]
    assert [name for name, _ in samples.rows_of(config)][1:] == [f"{file}:3", f"{file}:4", "sample_prompts.1"]
    assert decoded(tokenizer, config)[1] == "Two"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompt"),
        ('{"prompt": ', "prompts.jsonl:1: not valid JSON"),
        ('"a"\n{"text": "b"}', 'prompts.jsonl:2: has neither a text "prompt" nor a list "messages"'),
        ('{"messages": []}', "prompts.jsonl:1: has no message"),
        (None, "sample_prompts .*prompts.jsonl: cannot be read: No such file"),
    ],
)
def test_a_wrong_file_names_its_line(tokenizer: Any, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        decoded(tokenizer, RunConfig(sample_prompts=[str(file)]))


def test_a_prompt_past_the_models_positions_is_refused_before_the_weights_are_loaded(
    tmp_path: Path, base_model: list[str], run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surogate_core.run.run.build_engine", None)
    with pytest.raises(UserError, match=r"sample_prompts\.0: has .* tokens, and the model's positions end at 256"):
        run_here(tmp_path / "run", *base_model, f"sample_prompts=['{'word ' * 300}']")


# --------------------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def ranks(installed: Registry) -> Iterator[World]:
    with World(installed) as world:
        yield world


@pytest.mark.slow
def test_the_samples_of_two_ranks_that_share_out_the_weights_are_those_of_one(
    sampled: Path, tmp_path: Path, base_model: list[str], ranks: World, records: Records, digests: Digests
) -> None:
    keys = [*base_model, *SAMPLED, "gradient_accumulation_steps=1", "shard_weights=true"]
    assert ranks.run(2, tmp_path / "two", *keys) == (0, [0])
    assert digests(tmp_path / "two" / "adapter") == digests(sampled / "adapter")
    assert taken(records, tmp_path / "two") == taken(records, sampled)
    facts = json.loads((tmp_path / "two" / "run.json").read_text())
    assert facts["gpus"] == 2
