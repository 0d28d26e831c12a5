"""Models for generation: what a word names, adapters on their base, stop tokens and sampling of the files."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixture import save_qwen3_moe
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from surogate_core.bundles import RolloutSettings, Sampling
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.errors import MachineError, UserError
from surogate_core.generate import room
from surogate_core.inference import texts
from surogate_core.inference.generation import PreparedModel, named, on_its_base, prepare, quantised_note, with_adapter
from surogate_core.plugins.registry import Registry
from surogate_core.setup.trained import _of_checkpoint
from surogate_core.train.checkpoint import Checkpoint

Run = Callable[..., int]
Open = Callable[..., PreparedModel]
TEXT = "The chain of the bike slips when"


@pytest.fixture(scope="session")
def opening(installed: Registry) -> Open:
    def start(word: Path, *overrides: str) -> PreparedModel:
        found = named(str(word))
        config = load_run_config([*found.overrides, "device=cpu", *overrides], registry=installed)
        return prepare(found, config, installed)

    return start


def completed(opened: PreparedModel, installed: Registry, *prompts: str, **wanted: Any) -> list[texts.Text]:
    given = [texts.prompt_of_text(opened.tokenizer, text, name="a prompt") for text in prompts]
    values = {"max_new_tokens": 12, "sampling": Sampling(temperature=0), "ignore_eos": True, **wanted}
    asked = texts.PromptOptions(**values)
    requests, _ = texts.requests_of(opened, given, asked)
    weights = opened.load(installed)
    engine = installed.get("rollout", "native").open(weights, texts.settings_of(weights, requests))
    return texts.generate_texts(engine, opened.tokenizer, requests, asked.stop)


def theirs(model: Any, directory: Path, text: str, new: int = 12) -> list[int]:
    given = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt")
    found = model.eval().generate(**given, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(found[0, given["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module")
def adapter(hf_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter that changes the base much, with rsLoRA."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(hf_dir)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(hf_dir)
    directory = tmp_path_factory.mktemp("peft")
    model.save_pretrained(directory)
    return directory


def test_a_directory_continues_as_transformers_does(hf_dir: Path, opening: Open, installed: Registry) -> None:
    found = completed(opening(hf_dir), installed, TEXT, "A")
    model = AutoModelForCausalLM.from_pretrained(hf_dir)
    assert [list(one.ids) for one in found] == [theirs(model, hf_dir, text) for text in (TEXT, "A")]
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    assert found[0].text == tokenizer.decode(found[0].ids, skip_special_tokens=True)


def test_an_adapter_is_multiplied_beside_its_base(
    adapter: Path, hf_dir: Path, opening: Open, installed: Registry
) -> None:
    opened = opening(adapter)
    assert opened.lora.targets == {"q_proj", "down_proj"}
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_dir), str(adapter))
    (found,) = completed(opened, installed, TEXT)
    assert list(found.ids) == theirs(adapted, hf_dir, TEXT)
    assert list(found.ids) != theirs(AutoModelForCausalLM.from_pretrained(hf_dir), hf_dir, TEXT)


def test_an_adapter_on_a_base_that_is_named(
    adapter: Path, model_copy: Path, hf_dir: Path, installed: Registry, call_chat: Any
) -> None:
    found = with_adapter(str(model_copy), str(adapter))
    assert "names" in found.notes[0]
    assert str(hf_dir) in found.notes[0]
    config = load_run_config([*found.overrides, "device=cpu"], registry=installed)
    (one,) = completed(prepare(found, config, installed), installed, TEXT)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_dir), str(adapter))
    assert list(one.ids) == theirs(adapted, hf_dir, TEXT)
    assert with_adapter(str(hf_dir), str(adapter)).notes == ()
    with pytest.raises(UserError, match="is an adapter too"):
        with_adapter(str(adapter), str(adapter))
    out = call_chat(str(hf_dir), "--adapter", str(adapter)).splitlines()
    assert len(out) == 1
    assert out[0] != call_chat(str(hf_dir)).splitlines()[0]


@pytest.fixture
def call_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The answers of a chat to one message."""

    def start(*words: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        assert main(["chat", *words, "device=cpu", "--max-new-tokens=6", "--temperature=0"]) == 0
        return capsys.readouterr().out

    return start


def test_an_adapter_on_some_layers_is_folded_in(
    hf_dir: Path, tmp_path: Path, opening: Open, installed: Registry
) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(hf_dir), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path)
    opened = opening(tmp_path)
    assert any("folded into the weights" in note for note in opened.notes)
    assert list(completed(opened, installed, TEXT)[0].ids) == theirs(model, hf_dir, TEXT)


def test_runs_and_checkpoints(
    tmp_path: Path, hf_dir: Path, base_on: Any, run_here: Run, opening: Open, installed: Registry
) -> None:
    keys = ("lora_rank=4", "max_steps=2", "save_steps=2", "learning_rate=0.05", "merge_adapter=false")
    run_here(tmp_path / "run", *base_on(hf_dir), *keys)
    ids = {
        word: completed(opening(tmp_path / "run" / word), installed, TEXT)[0].ids
        for word in ("", "adapter", "checkpoint-2")
    }
    assert len(set(ids.values())) == 1
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_dir), str(tmp_path / "run/adapter"))
    assert list(ids[""]) == theirs(adapted, hf_dir, TEXT)
    (quantised,) = completed(opening(tmp_path / "run", "qlora_bnb=true"), installed, TEXT)
    assert quantised.logprobs != completed(opening(tmp_path / "run"), installed, TEXT)[0].logprobs


@pytest.mark.parametrize("word", ["no/such/place", "./gone"])
def test_a_word_that_names_nothing(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no such directory"):
        named(word)


def test_an_adapter_without_a_base_names_the_command(adapter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(UserError, match=f"Fix: surogate generate BASE --adapter {copy}, with its base as BASE"):
        named(str(copy))
    with pytest.raises(UserError, match=f"Fix: surogate chat BASE --adapter {copy}, with its base as BASE"):
        named(str(copy), fix=on_its_base("surogate chat"))


def test_a_checkpoint_of_full_training_is_no_adapter(tmp_path: Path) -> None:
    checkpoint = Checkpoint(path=tmp_path, step=2, state={"essential": {"lora": False}}, groups=())
    for key, message in {
        "model": "a checkpoint of full training has no exported model. Fix: name the run's directory, after it has",
        "--adapter": "has no adapter, all weights were trained. Fix: name it as MODEL.",
        "--checkpoint-dir": "nothing to merge. Fix: let the run end, which writes the whole model",
    }.items():
        with pytest.raises(UserError, match=f"my-run: .*{message}"):
            _of_checkpoint(checkpoint, key, Path("my-run"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    ended = replace(checkpoint, path=tmp_path / "checkpoint-2")
    with pytest.raises(UserError, match=f"my-run: .*nothing to merge. Fix: use {tmp_path / 'model'}, the whole model"):
        _of_checkpoint(ended, "--checkpoint-dir", Path("my-run"))


def test_a_run_that_is_not_there_is_not_sought_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "mine" / "first"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for word in ("latest", "runs/latest", "mine/frist"):
        with pytest.raises(UserError, match=f"{word}: there is no such run. Fix: name the output_dir of a run."):
            named(word)
    assert named("owner/latest").overrides == ("model='owner/latest'",)


def test_an_adapter_of_a_quantised_base_is_noted(
    adapter: Path, opening: Open, installed: Registry, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "config.yaml").write_text("qlora_bnb: true\n")
    word = str(tmp_path / "adapter")
    found, opened = named(word), opening(Path(word))
    (note,) = quantised_note(word, found, opened, installed)
    assert note.startswith("The adapter was trained on a base in nf4, and this base is not quantised.")
    quantised = opening(Path(word), note.split()[-1].rstrip("."))
    assert quantised_note(word, found, quantised, installed) == []
    (tmp_path / "config.yaml").write_text("lora: true\n")
    assert quantised_note(word, found, opened, installed) == []


def test_stop_tokens_and_sampling_are_those_of_the_files(model_copy: Path, opening: Open) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_copy)
    plain = opening(model_copy)
    assert plain.sampling == Sampling(temperature=0)
    assert tokenizer.eos_token_id in plain.stop_ids
    values = {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (model_copy / "generation_config.json").write_text(json.dumps(values))
    opened = opening(model_copy)
    assert opened.stop_ids >= {5, 6, tokenizer.eos_token_id}
    assert opened.sampling == Sampling(temperature=0.6, top_p=0.9, top_k=50)
    (model_copy / "generation_config.json").write_text(json.dumps({**values, "top_p": 7}))
    with pytest.raises(UserError, match=r"generation_config.json: top_p is 7"):
        _ = opening(model_copy).sampling


def test_stop_texts_are_cut_off(hf_dir: Path, opening: Open, installed: Registry) -> None:
    opened = opening(hf_dir)
    (free,) = completed(opened, installed, TEXT)
    stop = free.text[4:7]
    (found,) = completed(opened, installed, TEXT, stop=(stop,))
    assert found.text == free.text[: free.text.index(stop)]
    assert found.reason == "stop"
    assert len(found.ids) < len(free.ids)
    (never,) = completed(opened, installed, TEXT, stop=("\x00 never",))
    assert never == free


def test_lengths(hf_dir: Path, opening: Open, installed: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opening(hf_dir)
    weights = opened.load(installed)
    prompt = texts.Prompt(name="row 3", ids=(5,) * 250)
    requests, notes = texts.requests_of(opened, [prompt], texts.PromptOptions(max_new_tokens=20))
    assert requests[0].max_new_tokens == 6
    assert "row 3" in notes[0]
    with pytest.raises(UserError, match=r"row 4: has 256 tokens, and the model's positions end at 256"):
        texts.requests_of(opened, [texts.Prompt(name="row 4", ids=(5,) * 256)], texts.PromptOptions())
    many = [requests[0]] * 40
    assert texts.settings_of(weights, many).slots == texts.MOST_SLOTS["cpu"]
    # 2 layers · (K + V) · 1 head · 16 features · 4 bytes
    one = 256 * 2 * 2 * 16 * 4
    monkeypatch.setattr(room, "free_memory", lambda device: int(one * 6 / room.SHARE) + 1)
    assert texts.settings_of(weights, many).slots == 5
    with pytest.raises(MachineError, match="Fix: fewer --slots"):
        texts.settings_of(weights, many, slots=6)
    monkeypatch.setattr(room, "free_memory", lambda device: one)
    with pytest.raises(MachineError, match="256 tokens need"):
        texts.settings_of(weights, many)


def test_the_memory_of_generation_is_said(hf_dir: Path, opening: Open, installed: Registry) -> None:
    weights = opening(hf_dir).load(installed)
    assert texts.memory_notes(weights, RolloutSettings(slots=4, context=64)) == []
    # 256 tokens are 2 layers · (K + V) · 1 head · 16 features · 4 bytes each, and one more slot takes idle rows.
    slots = 2**30 // (256 * 2 * 2 * 16 * 4)
    (note,) = texts.memory_notes(weights, RolloutSettings(slots=slots, context=256))
    assert note == f"keys, values and working memory of {slots} sequences of 256 tokens: 1 GiB."
    # A slot has whole segments of 16 tokens.
    assert room.needed_bytes(weights, 257)(1) == room.needed_bytes(weights, 272)(1)


def test_prompts(hf_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    with pytest.raises(UserError, match="row 1: is empty"):
        texts.prompt_of_text(tokenizer, "", name="row 1")
    with pytest.raises(UserError, match="row 1: has no message"):
        texts.prompt_of_messages(tokenizer, [], name="row 1")
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(texts.prompt_of_messages(tokenizer, messages, name="row").ids) == ids
    # A control token that a message spells out stays text.
    token = str(tokenizer.eos_token)
    spelt = texts.prompt_of_messages(tokenizer, [{"role": "user", "content": f"Say {token}"}], name="row").ids
    assert spelt.count(tokenizer.eos_token_id) == ids.count(tokenizer.eos_token_id)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"row 2: the chat template refuses .* roles must alternate"):
        texts.prompt_of_messages(tokenizer, messages, name="row 2")
    assert texts.stop_token(tokenizer, "7") == 7
    assert texts.stop_token(tokenizer, token) == tokenizer.eos_token_id
    for word in ("<|nothing|>", "99999"):
        with pytest.raises(UserError, match="the tokenizer has no such token"):
            texts.stop_token(tokenizer, word)


def test_an_adapter_with_trained_routers_and_a_rank_of_experts(
    tmp_path: Path, base_on: Any, run_here: Run, opening: Open, installed: Registry, hf_dir: Path
) -> None:
    """The whole weights of routers are used, and adapters of experts have their own rank."""
    save_qwen3_moe(tmp_path / "base", dense_layers=[])
    keys = ("lora_rank=4", "lora_expert_rank=2", "train_router=true", "max_steps=3", "learning_rate=0.05")
    run_here(tmp_path / "run", *base_on(tmp_path / "base"), *keys, "merge_adapter=true")
    opened = opening(tmp_path / "run" / "adapter")
    assert opened.lora.expert_rank == 2
    assert opened.notes == ()
    found, merged = (completed(opening(tmp_path / "run" / place), installed, TEXT)[0] for place in ("adapter", "model"))
    assert found.logprobs == pytest.approx(merged.logprobs, abs=1e-4)
    assert found.ids != completed(opening(tmp_path / "base"), installed, TEXT)[0].ids
