"""`surogate export`: to a directory, and to a hub that is a fake on 127.0.0.1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import TOKEN, FakeHub
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surogate_core.cli.main import main
from surogate_core.hf.card import CardFacts
from surogate_core.hf.export import export_adapter, export_full

CARD = CardFacts(title="tiny", base_model="acme/base", configuration={"model": {"path": "/home/me/base"}})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with an adapter."""
    directory = tmp_path / "run"
    tensors = {"q_proj.lora_A.weight": torch.ones(2, 8), "q_proj.lora_B.weight": torch.ones(8, 2)}
    export_adapter(
        directory / "adapter",
        tensors.items(),
        rank=2,
        alpha=4,
        dropout=0.0,
        base_model="acme/base",
        card=CARD,
        tokenizer=NoTokenizer(),
    )
    (directory / "run.json").write_text("{}")
    return directory


class NoTokenizer:
    name_or_path = ""

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "tokenizer_config.json").write_text("{}")


def test_a_push_is_private_and_has_the_card_and_every_file(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--to", "hub://me/tiny"]) == 0
    sent = hub.repositories["me/tiny"]
    assert sent["private"] is True
    assert sent["messages"] == ["Upload adapter with Surogate"]
    assert sent["files"].keys() == {p.name for p in (run / "adapter").iterdir()}
    assert sent["files"]["adapter_model.safetensors"] == (run / "adapter/adapter_model.safetensors").read_bytes()
    assert b'place = "me/tiny"' in sent["files"]["README.md"]
    assert b"/home/me" not in b"".join(sent["files"].values()), "a path of this machine"
    assert f"Uploaded to {hub.endpoint}/me/tiny" in capsys.readouterr().out
    # A later version of the same goes to the same place.
    assert main(["export", str(run), "--to=hub://me/tiny", "--message", "again"]) == 0
    assert sent["messages"][-1] == "again"


def test_public_must_be_said(hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", "hub://me/open", "--public"]) == 0
    assert hub.repositories["me/open"]["private"] is False
    assert main(["export", str(run), "--to", "hub://me/open"]) == 2
    assert "is public. Fix: add --public" in capsys.readouterr().err
    assert len(hub.repositories["me/open"]["messages"]) == 1


def test_public_makes_a_private_repository_public(hub: FakeHub, run: Path) -> None:
    assert main(["export", str(run), "--to", "hub://me/tiny"]) == 0
    assert main(["export", str(run), "--to", "hub://me/tiny", "--public"]) == 0
    assert hub.repositories["me/tiny"]["private"] is False


def test_what_an_earlier_export_left_is_not_loaded_beside_a_later_one(hub: FakeHub, run: Path) -> None:
    """An adapter_config.json beside a merged model would put the old adapter on top of it."""
    assert main(["export", str(run), "--to", "hub://me/tiny"]) == 0
    files = hub.repositories["me/tiny"]["files"]
    files |= {"model-00001-of-00002.safetensors": b"", "stacked_on/0/adapter_model.safetensors": b"", "mine.txt": b"x"}
    merged = run.parent / "merged"
    export_full(
        merged,
        {"w": torch.ones(2)}.items(),
        config={"model_type": "x", "architectures": ["X"]},
        card=CARD,
        tokenizer=NoTokenizer(),
    )
    assert main(["export", str(merged), "--to", "hub://me/tiny"]) == 0
    sent = {p.relative_to(merged).as_posix() for p in merged.rglob("*") if p.is_file()}
    assert {name for name in files if name.endswith((".safetensors", "config.json"))} <= sent
    assert files["mine.txt"] == b"x"


def test_a_name_that_is_taken_is_not_written_to(hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["me/other"] = {"private": True, "files": {"model.gguf": b""}, "messages": []}
    assert main(["export", str(run), "--to", "hub://me/other"]) == 2
    assert "the name is taken" in capsys.readouterr().err
    assert hub.repositories["me/other"]["messages"] == []
    assert main(["export", str(run), "--to", "hub://me/other", "--overwrite"]) == 0


def test_a_dry_run_sends_nothing(hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", "hub://me/tiny", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "Would upload" in printed
    assert "adapter_model.safetensors" in printed
    assert hub.requests == []
    assert main(["export", str(run), "--to", str(run.parent / "copy"), "--dry-run"]) == 0
    assert not (run.parent / "copy").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--to", "hub://me/a/b"], "must be hub://USER/NAME"),
        (["--to", "s3://me/a"], "only hub:// and directories"),
        (["--to", "x", "--public"], "--public is for the hub"),
    ],
)
def test_mistakes(run: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [(401, 2, "does not accept the token"), (403, 2, "may not write there"), (500, 3, "answered 500")],
)
def test_what_the_hub_refuses(
    hub: FakeHub, run: Path, status: int, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail = status
    assert main(["export", str(run), "--to", "hub://me/tiny"]) == code
    assert text in capsys.readouterr().err


def test_without_a_token_or_a_network(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    push = ["export", str(run), "--to", "hub://me/tiny"]
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.get_token", lambda: None)
        assert main(push) == 2
        assert "Fix: hf auth login, or set HF_TOKEN" in capsys.readouterr().err
        assert hub.requests == []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(push) == 3
    assert "cannot be reached" in capsys.readouterr().err


def test_an_adapter_on_a_base_of_this_machine_needs_the_name_of_its_base(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "/home/me/base"}))
    push = ["export", str(run), "--to", "hub://me/tiny"]
    assert main(push) == 2
    assert "Fix: --base-model HUB_ID" in capsys.readouterr().err
    assert main([*push, "--base-model", "acme/base"]) == 0
    assert (
        json.loads(hub.repositories["me/tiny"]["files"]["adapter_config.json"])["base_model_name_or_path"]
        == "acme/base"
    )


def test_secrets_and_paths_are_not_sent(hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = run / "adapter/README.md"
    text = card.read_text()
    card.write_text(f"{text}\nhttps://me:password@host/data\n")
    assert main(["export", str(run), "--to", "hub://me/tiny"]) == 0
    assert b"password" not in hub.repositories["me/tiny"]["files"]["README.md"]
    card.write_text(f"{text}\n{Path.cwd()}/secret\n")
    assert main(["export", str(run), "--to", "hub://me/tiny"]) == 2
    assert "a path of this machine" in capsys.readouterr().err


def test_a_copy_and_what_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy/adapter_model.safetensors").is_file()
    # The whole model, where there is one, and what is named.
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    card = replace(CARD, title="whole")
    export_full(run / "model", [("w", torch.ones(2))], config=config, tokenizer=None, card=card)
    assert main(["export", str(run), "--to", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy/model.safetensors").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    assert main(["export", str(run), "--to", str(tmp_path / "mine")]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "mine"), "--to", "x"]) == 2
    assert "the run has not finished. Fix: run its command again" in capsys.readouterr().err


def test_latest_is_the_default(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["export", "--to", "copy"]) == 2
    Path("runs").mkdir()
    Path("runs/latest").symlink_to("../run")
    assert main(["export", "--to", "copy"]) == 0


# ------------------------------------------------------------------------- other programs' files


def test_a_gguf_file_continues_as_the_model(hf_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(hf_dir), "--to", str(tmp_path / "a.gguf"), "--ollama"]
    assert main([*words, str(tmp_path / "ollama" / "Modelfile")]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "a.gguf") in out
    text = (tmp_path / "ollama" / "Modelfile").read_text()
    assert "\nFROM ../a.gguf\n" in text
    assert "<|im_start|>user\n{{ .Content }}<|im_end|>\n" in text
    assert main(["generate", str(hf_dir), "--prompt", "The chain", "--temperature=0", "--max-new-tokens=8"]) == 0
    expected = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", config=AutoConfig.from_pretrained(hf_dir), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    given = tokenizer("The chain", return_tensors="pt")
    found = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(found, skip_special_tokens=True) + "\n" == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "guf", "--to", "a.gguf"], "--format guf: there is no such export; known: gguf. Fix: gguf"),
        (["--format"], "export --format: a value must follow"),
        (["--to", "a.gguf", "--type", "q4"], "--type: must be one of auto, f32, f16, bf16, q8_0"),
        (["--to", "a.gguf", "plugins.block=[export-gguf]"], "offers it but is"),
        (["--format=gguf"], "export --format gguf: --to missing. Fix: --to FILE.gguf"),
        (["--format=gguf", "--to", "hub://me/a"], "only files and directories are known"),
        (["--format=gguf", "--to", "a.bin"], "--to a.bin: is no .gguf file. Fix: --to a.bin.gguf"),
        (["--format=gguf", "--to", "a.gguf", "--type", "q4"], "--type: must be one of auto, f32, f16, bf16, q8_0"),
        (["--format=gguf", "--to", "a.gguf", "--public"], "export --format gguf: --public is not known"),
        (["--format=gguf", "--to", "a.gguf", "another"], "one at a time"),
        (["--format=gguf", "--to", "a.gguf", "--ollama", "mine"], "--ollama mine: this was not written by"),
        (["--format=hf", "--to", "there"], "there is no export in it"),
    ],
)
def test_bad_words_for_a_format(
    words: list[str], message: str, hf_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("FROM llama3\n")
    assert main(["export", str(hf_dir), *words]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
