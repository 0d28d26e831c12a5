"""`surogate.generate`: the texts of the command line, from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from surogate_command_generate.python import generate

from surogate_core.plugin import ConfigError, UserError
from surogate_core.plugin import surogate as main
from surogate_core.service.app import Run

KEYS: dict[str, Any] = {"max_new_tokens": 4, "device": "cpu"}
CHAT = [{"role": "user", "content": "Hello"}]


def test_it_is_what_the_command_prints(hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = generate(hf_dir, "The chain", sampling={"temperature": 0}, **KEYS)
    words = ["--prompt", "The chain", "--temperature=0", "--max-new-tokens=4", "--logprobs", "device=cpu"]
    capsys.readouterr()
    assert main(["generate", str(hf_dir), *words]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (one.text, list(one.ids), list(one.logprobs)) == (row["text"], row["ids"], row["logprobs"])


def test_several_prompts_and_samples(hf_dir: Path) -> None:
    found = generate(hf_dir, ["The chain", CHAT], samples=2, sampling={"seed": 3}, **KEYS)
    assert [(one.prompt, one.sample) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({one.ids for one in found}) == 4
    (alone,) = generate(hf_dir, CHAT, sampling={"temperature": 0}, **KEYS)
    assert Run(hf_dir).generate([CHAT], sampling={"temperature": 0}, **KEYS) == [alone]


TOOLS = [{"type": "function", "function": {"name": "get"}}]


@pytest.mark.slow
def test_a_text_as_a_message_and_rows_with_tools(hf_dir: Path) -> None:
    keys: dict[str, Any] = {**KEYS, "sampling": {"temperature": 0}, "template": "chatml"}
    messages, row = generate(hf_dir, [CHAT, {"messages": CHAT, "tools": TOOLS}], **keys)
    (text,) = generate(hf_dir, "Hello", chat=True, **keys)
    (with_tools,) = generate(hf_dir, "Hello", chat=True, tools=TOOLS, **keys)
    assert text == messages
    assert with_tools.ids == row.ids != messages.ids


def test_no_prompts_have_no_texts(hf_dir: Path) -> None:
    assert generate(hf_dir, [], **KEYS) == []


@pytest.mark.slow
def test_a_stop_text_is_one_text(hf_dir: Path) -> None:
    (whole,) = generate(hf_dir, "The chain", sampling={"temperature": 0}, device="cpu", max_new_tokens=12)
    stop = whole.text.strip()[2:5]
    (text,) = generate(hf_dir, "The chain", stop=stop, sampling={"temperature": 0}, device="cpu", max_new_tokens=12)
    assert text.text == whole.text[: whole.text.index(stop)]


def test_bad_input(hf_dir: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((hf_dir, ["a", ""]), "prompt 1: is empty"),
        ((hf_dir, [[*CHAT, {"role": "assistant", "content": "Hi"}]]), "prompt 0: ends with an assistant's turn"),
        ((hf_dir, {"messages": CHAT, "tool": []}), "no key of a prompt. Fix: tools"),
        ((tmp_path / "gone", "a"), "there is no such directory"),
    ):
        with pytest.raises(UserError, match=message):
            generate(*arguments, **KEYS)
    with pytest.raises(UserError, match=r'has tools without messages\. Fix: "messages"'):
        generate(hf_dir, {"prompt": "a"}, tools=TOOLS, **KEYS)
    for values, message in (
        ({"max_new_tokens": 0}, "max_new_tokens 0: must be a whole number of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens 2.5: must be"),
        ({"samples": 0}, "samples 0: must be"),
        ({"slots": 0}, "slots 0: must be"),
        ({"stop": ""}, "stop: is empty"),
        ({"stop": ["a", ""]}, "stop: is empty"),
        ({"stop": [1]}, "stop: is not text"),
    ):
        with pytest.raises(UserError, match=message):
            generate(hf_dir, "a", **(KEYS | values))
    for prompts in (5, None, b"a", ["a", 5]):
        with pytest.raises(UserError, match="prompts: is neither text nor messages"):
            generate(hf_dir, prompts, **KEYS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"--top-p 3\.0: is out of range"):
        generate(hf_dir, "a", sampling={"top_p": 3}, **KEYS)
    with pytest.raises(UserError, match=r"there is no .temprature.. Fix: choose from temperature, top_k"):
        generate(hf_dir, "a", sampling={"temprature": 3}, **KEYS)
    with pytest.raises(UserError, match="--temperature warm: is not a number"):
        generate(hf_dir, "a", sampling={"temperature": "warm"}, **KEYS)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="devise"):
        generate(hf_dir, "a", devise="cpu")
