"""`surogate generate`: what it prints, and how it answers bad input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from surogate_command_generate.command import _show

from surogate_commands.words import Words
from surogate_core.plugin import inference
from surogate_core.plugin import surogate as main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command on a small model; (exit code, standard output, standard error)."""

    def start(*words: str, model: str | None = None, new: int = 4) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["generate", model or str(hf_dir), f"--max-new-tokens={new}", "device=cpu", *words])
        return code, *capsys.readouterr()

    return start


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_completion_alone_is_printed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call("--prompt", "The chain", "--temperature", "0")
    assert code == 0
    (row,) = lines(call("--prompt", "The chain", "--temperature=0", "--logprobs")[1])
    assert out == row["text"] + "\n"
    assert row.keys() == {"prompt", "sample", "text", "reason", "tokens", "ids", "logprobs"}
    assert row["tokens"] == len(row["ids"]) == len(row["logprobs"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("The chain"))
    assert call("--prompt", "-", "--temperature", "0")[1] == out


def test_files_of_prompts(call: Call, tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    file.write_text("\n".join([json.dumps({"prompt": "The"}), "", json.dumps({"messages": messages}), '"A text"']))
    words = ("--file", str(file), "--samples", "2", "--seed", "3")
    _, out, _ = call(*words, "--output", str(output))
    assert out == f"Written: {output}\n"
    rows = lines(output.read_text())
    assert [(row["prompt"], row["sample"]) for row in rows] == [(p, s) for p in range(3) for s in range(2)]
    assert len({row["text"] for row in rows}) == 6
    assert lines(call(*words, "--slots", "1")[1]) == rows, "slots change nothing"
    assert lines(call(*words, "--seed", "4")[1]) != rows
    chat = lines(call("--chat", "--prompt", "Hello", "--temperature", "0", "--json")[1])
    assert chat == lines(call("--chat", "--prompt=Hello", "--temperature=0", "--json", "--engine", "native")[1])


TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


def test_rows_keep_their_tools_and_lose_the_answer_at_their_end(call: Call, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": "{}"}}]}
    rows: list[dict[str, Any]] = [
        {"messages": asked},
        {"messages": [*asked, answer], "tools": [TOOL]},
        {"messages": asked, "tools": json.dumps([TOOL])},
        {"messages": [*asked, answer, {"role": "tool", "content": "x"}], "tools": [TOOL["function"]]},
    ]
    file, tools = tmp_path / "prompts.jsonl", tmp_path / "tools.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools.write_text(json.dumps([TOOL]))
    words = ("--temperature=0", "--json", "template=chatml")
    _, out, err = call("--file", str(file), *words)
    plain, given, parsed, last = (row["text"] for row in lines(out))
    assert plain != given == parsed != last
    assert "note: 1 row ends with an assistant's turn, which is left out" in err
    chat = call("--chat", "--prompt=Hello", "--tools", str(tools), *words)[1]
    assert lines(chat)[0]["text"] == given
    # Its own template has no place for tools.
    assert "the chat template lists no tools" in call("--file", str(file))[2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}], "tool": []},
            "has 'tool', which is no key of a prompt. Fix: tools",
        ),
        ({"messages": [], "sytem": "x"}, "has 'sytem', which is no key of a prompt. Fix: leave it out"),
        ({"prompt": "a", "completion": "b"}, "has 'completion', which is no key"),
        ({"prompt": "a", "tools": [TOOL]}, "has tools without messages"),
        ({"messages": [], "tools": {}}, "tools: must be a list of tools"),
        ({"messages": [], "tools": "["}, "tools: is text that is not JSON"),
        ({"messages": [], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: must be 1 to 64"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "has no message before the assistant's"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": "x"},
                    {"role": "user", "content": "a"},
                ]
            },
            "tool_calls must be a list",
        ),
    ],
)
def test_rows_that_are_refused(call: Call, tmp_path: Path, row: Any, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row))
    code, _, err = call("--file", str(file))
    assert code == 2
    assert f"{file}:1: " in err
    assert message in err


def test_what_is_done_is_kept_when_it_is_interrupted(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    words = ("--prompt", "The chain", "--samples=3", "--seed=3", "--slots=1", "--ignore-eos", f"--output={output}")
    assert call(*words)[0] == 0
    whole = lines(output.read_text())
    assert not partial.exists()
    output.unlink()
    take, tokens = inference.GrowingText.take, [0]

    def interrupted(self: inference.GrowingText, token: int) -> bool:
        tokens[0] += 1
        if tokens[0] == 10:
            raise KeyboardInterrupt
        return take(self, token)

    monkeypatch.setattr(inference.GrowingText, "take", interrupted)
    with suppress(KeyboardInterrupt):
        assert call(*words)[0] != 0
    assert lines(partial.read_text()) == whole[:2]
    assert not output.exists()


def test_weights_that_are_not_numbers_are_named(call: Call, model_copy: Path) -> None:
    (file,) = model_copy.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    code, _, err = call("--prompt", "a", model=str(model_copy))
    assert code == 2
    assert f"{model_copy}: the model's logits are not numbers: model.norm.weight has NaN or infinity." in err


def test_random_weights_are_noted(call: Call) -> None:
    code, _, err = call("--prompt", "a", model="qwen3", new=1)
    assert code == 0
    assert "note: The weights of qwen3 tiny are random. A directory or a hub id has trained ones." in err


def test_a_completion_at_the_last_position_is_noted(call: Call) -> None:
    _, _, err = call("--prompt", "word " * 84, "--temperature", "0", new=200)
    assert "note: --prompt: the completion ends at the model's last position, 256." in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is nothing to continue. Fix: --prompt TEXT"),
        (("--prompt", "a", "--file", "b"), "both --prompt and --file are given"),
        (("--prompt", ""), "--prompt: is empty. Fix: give the text to continue."),
        (("--prompt", "a\udcff"), "--prompt: is not Unicode text at character 1. Fix: give text in UTF-8."),
        (("--chat", "--prompt", ""), "--prompt: is empty. Fix: give the message to answer."),
        (("--prompt", "word " * 400), "positions end at 256. Fix: shorten it"),
        (("--prompt", "a", "--stop", ""), "--stop: is empty"),
        (("--prompt", "a", "--output", "/"), "--output /: is a directory. Fix: name a file"),
        (("--prompt", "a", "--json=false"), "--json: is a switch and takes no value"),
        (("--file", "b", "--chat"), "--chat: it is for --prompt, not for --file"),
        (("--file", "b", "--tools", "c"), "--tools: it is for --prompt, not for --file"),
        (("--prompt", "a", "--tools", "c"), "only a chat has tools. Fix: add --chat"),
        (("--chat", "--prompt", "a", "--tools", "gone.json"), "--tools gone.json: cannot be read"),
        (("--prompt", "a", "--tool-parser", "herms"), "--tool-parser herms: there is no such parser. Fix: hermes"),
        (("--file", "b", "--system", "c"), "--system: it is for --prompt, not for --file"),
        (("--prompt", "a", "--stop-token", "<nothing>"), "the tokenizer has no such token"),
        (("--prompt", "a", "--system", "b"), "only a chat has a system message. Fix: add --chat"),
        (("--prompt", "a", "--temperature", "warm"), "--temperature warm: is not a number"),
        (("--prompt", "a", "--temperature", "-1"), "--temperature -1.0: is out of range. Fix: a number from 0"),
        (("--prompt", "a", "--top-p", "2"), "--top-p 2.0: is out of range"),
        (("--prompt", "a", "--samples", "0"), "--samples 0: must be at least 1"),
        (("--prompt", "a", "--top-q", "1"), "--top-q is not known. Fix: --top-"),
        (("--prompt",), "--prompt: a value must follow"),
        (("--prompt", "a", "b"), "one model at a time"),
        (("--file", "gone.jsonl"), "--file gone.jsonl: cannot be read: No such file"),
        (
            ("--prompt", "a", "--engine", "nativ"),
            "--engine nativ: there is no such rollout; known: dedicated, native",
        ),
        (
            ("--prompt", "a", "--engine", "sglang"),
            "--engine sglang: there is no such rollout; known: dedicated, native",
        ),
        (("--prompt", "a", "devise=cpu"), "devise"),
    ],
)
def test_bad_input_is_one_clear_message(call: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = call(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_bad_rows_are_named_by_their_line(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for text, message in {
        '{"prompt": "a"}\n{"prompt": ': f"{file}:2: not valid JSON",
        '{"prompt": "a"}\n\n{"text": "b"}': f'{file}:3: has neither a text "prompt" nor a list "messages"',
        '{"prompt": ""}': f"{file}:1: is empty",
        '{"messages": []}': f"{file}:1: has no message",
        '{"messages": ["x"]}': f'{file}:1: messages[0] is text. Fix: each message is {{"role": …, "content": …}}',
        '{"messages": [{"content": "x"}]}': f"{file}:1: messages[0] has no role",
        '{"prompt": 5, "messages": [{"role": "user", "content": "a"}]}': f'{file}:1: has both "prompt" and "messages"',
        '{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}': f"{file}:1: has both",
        '{"prompt": 5}': f'{file}:1: has neither a text "prompt"',
        "\n": "has no prompt",
    }.items():
        file.write_text(text)
        code, _, err = call("--file", str(file))
        assert code == 2
        assert message in err


def test_a_line_ends_at_a_line_feed_only(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('{"prompt": "The\u2028chain\x85"}\r\n{"prompt": "A"}'.encode())
    code, out, _ = call("--file", str(file), "--temperature=0")
    assert code == 0
    assert [json.loads(line)["prompt"] for line in out.split("\n") if line] == [0, 1]


@pytest.mark.parametrize(
    ("text", "ids", "note"),
    [
        ("", (3,), "note: the model ended the completion at its first token.\n"),
        ("", (3, 3), "note: the model wrote 2 tokens that have no text.\n"),
        ("a", (3,), ""),
    ],
)
def test_an_empty_answer_says_why(
    text: str, ids: tuple[int, ...], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(
        Words(),
        [inference.Text(prompt=0, sample=0, text=text, ids=ids, logprobs=(0.0,) * len(ids), reason="stop")],
        None,
    )
    assert capsys.readouterr() == (f"{text}\n", note)


def test_a_model_that_is_not_there(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such directory" in call("--prompt", "a", model=str(tmp_path / "gone"))[2]
    (tmp_path / "empty").mkdir()
    assert "neither an adapter" in call("--prompt", "a", model=str(tmp_path / "empty"))[2]
    assert main(["generate", "--prompt", "a"]) == 2
    assert "no model is named" in capsys.readouterr().err
