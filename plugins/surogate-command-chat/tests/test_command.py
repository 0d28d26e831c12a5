"""`surogate chat`: turns, commands, several models, and bad input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from surogate_command_chat import command as chat
from surogate_command_chat.command import Partner, _answers, _command

from surogate_core.plugin import UserError, inference
from surogate_core.plugin import surogate as main
from surogate_testing.pretrained import random_adapter

SUROGATE_PLUGIN = "command-chat"
Call = Callable[..., tuple[str, str]]
WORDS = ("device=cpu", "--max-new-tokens=5", "--temperature=0")


@pytest.fixture
def call(hf_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Types lines into a chat with a small model; (standard output, standard error)."""

    def start(*lines: str, words: tuple[str, ...] = (), models: tuple[Path, ...] = (hf_dir,)) -> tuple[str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", *map(str, models), *WORDS, *words]) == 0
        return capsys.readouterr()

    return start


def test_conformance(surogate_check: Any) -> None:
    surogate_check.run()


def test_turns_and_commands(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "chat.jsonl"
    lines = ("Hello", "", "Why?", f"/save {saved}", "/undo", "Why?", "/reset", "Hello", "/help", "/quit", "not read")
    out, err = call(*lines)
    first, second, again, fresh = out.splitlines()
    assert second == again
    assert first == fresh
    assert first != second
    (row,) = map(json.loads, saved.read_text().splitlines())
    assert row["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": second},
    ]
    assert "/undo" in err
    generated = call("Hello", words=("--system", "Be brief."))[0]
    assert call("/system Be brief.", "Hello")[0] == generated
    assert call("Hello")[0] == f"{first}\n"


def test_a_mistake_does_not_end_the_chat(call: Call) -> None:
    out, err = call("/sav x", "/save", "word " * 400, "Hello", words=("--context", "64"))
    assert "/sav: there is no such command. Fix: /save" in err
    assert "/save: names no file" in err
    assert "there is room for 64. Fix: /reset, or --context N" in err
    assert len(out.splitlines()) == 1


def test_several_models_answer_in_turn(call: Call, hf_dir: Path, model_copy: Path) -> None:
    out, _ = call("Hello", models=(hf_dir, model_copy))
    answer = call("Hello")[0].rstrip("\n")
    assert out.splitlines() == [f"[{hf_dir}]", answer, f"[{model_copy}]", answer]


def test_adapters_side_by_side_share_their_base(
    call: Call, hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (random_adapter(hf_dir, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    alone = [call("Hello", "Why?", words=("--adapter", str(path)))[0].splitlines() for path in (one, two)]
    loads: list[str] = []
    load = inference.PreparedModel.load
    monkeypatch.setattr(
        inference.PreparedModel, "load", lambda *args, **values: loads.append("") or load(*args, **values)
    )
    out, _ = call("Hello", "Why?", words=("--adapter", str(one), "--adapter", str(two)))
    assert len(loads) == 1
    turns = [[f"[{one}]", alone[0][n], f"[{two}]", alone[1][n]] for n in range(2)]
    assert out.splitlines() == [*turns[0], *turns[1]]
    (two / "stacked_on").mkdir()
    for file in one.iterdir():
        (two / "stacked_on" / file.name).write_bytes(file.read_bytes())
    loads.clear()
    out, _ = call("Hello", words=("--adapter", str(one), "--adapter", str(two)))
    assert len(loads) == 2, "an adapter on top of another one has a base of its own"
    assert out.splitlines()[:2] == [f"[{one}]", alone[0][0]]


def test_a_turn_that_one_model_cannot_take_is_taken_back_for_all(
    call: Call, hf_dir: Path, model_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = chat.Partner.answer

    def failing(self, text, *, most, shown):
        if text == "Fail" and self.name == str(model_copy):
            raise UserError("no room")
        return answer(self, text, most=most, shown=shown)

    monkeypatch.setattr(chat.Partner, "answer", failing)
    saved = tmp_path / "chat.jsonl"
    _, err = call("Hello", "Fail", f"/save {saved}", "/undo", "/undo", "/system Be kind.", models=(hf_dir, model_copy))
    for row in map(json.loads, saved.read_text().splitlines()):
        assert [message["content"] for message in row["messages"]][::2] == ["Hello"]
        assert len(row["messages"]) == 2
    assert f"note: {model_copy} cannot answer, so the message is taken back for all." in err
    said = ["The last message is taken back.", "There is no message.", "A new conversation with the system message"]
    assert all(one in err for one in said)


def test_a_stop_text_ends_an_answer(call: Call) -> None:
    whole = call("Hello")[0].rstrip("\n")
    stop = whole.strip()[2:4]
    assert call("Hello", words=("--stop", stop))[0].rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")


def test_the_beginning_of_a_conversation_is_kept(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    prefill = inference.NativeEngine._prefill

    def noted(self, fills):
        starts.extend(fill.start for fill in fills)
        return prefill(self, fills)

    monkeypatch.setattr(inference.NativeEngine, "_prefill", noted)
    call("one two three four five six seven eight nine ten eleven twelve", "Why?")
    warm_up, first, second = starts
    assert warm_up == first == 0
    assert second >= 16
    assert second % 16 == 0


def test_ctrl_c_ends_an_answer(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call("Hello", "Why?")[0].splitlines()
    take, count = chat.Partner.answer, [0]

    def interrupted(self, text, *, most, shown):
        def stop(part):
            count[0] += 1
            shown(part)
            if count[0] == 2:
                raise KeyboardInterrupt

        return take(self, text, most=most, shown=stop)

    monkeypatch.setattr(chat.Partner, "answer", interrupted)
    first, second = call("Hello", "Why?")[0].splitlines()
    assert first.endswith(" …")
    assert whole[0].startswith(first.removesuffix(" …"))
    assert second


def test_bad_input_is_one_clear_message(
    hf_dir: Path, model_copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = model_copy / file
        if path.suffix == ".json":
            values = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
            path.write_text(json.dumps(values))
        else:
            path.unlink(missing_ok=True)
    for words, message in {
        (): "no model is named",
        (hf_dir, hf_dir): "is named twice",
        (hf_dir, "--sytem", "x"): "--sytem is not known. Fix: --system",
        (hf_dir, "--system"): "a value must follow",
        (hf_dir, "--temperature", "-2"): "out of range",
        (hf_dir, "--stop", ""): "--stop: is empty",
        (tmp_path / "gone",): "there is no such directory",
        (model_copy,): "has no chat template",
    }.items():
        assert main(["chat", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err


def test_an_empty_answer_and_a_system_message_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Silent(Partner):
        def answer(self, text: str, *, most: int, shown: Callable[[str], None]) -> str:
            return ""

    nothing: Any = None
    partner = Silent(name="a", prepared=nothing, engine=nothing, sampling=nothing, context=8)
    _answers([partner], "Hello", 1)
    assert capsys.readouterr().err == "note: the answer is empty.\n"
    assert _command("/system Be kind.", [partner], None) == "Be kind."
    assert capsys.readouterr().err == "A new conversation with the system message: Be kind.\n"


def test_ctrl_c_at_the_prompt_keeps_the_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Any] = ["Hello", KeyboardInterrupt(), "Why?", EOFError()]

    def line(prompt: str) -> str:
        one = typed.pop(0)
        if isinstance(one, BaseException):
            raise one
        return str(one)

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert list(chat._lines()) == ["Hello", "Why?"]
    assert "/quit or Ctrl-D ends the chat." in capsys.readouterr().err
