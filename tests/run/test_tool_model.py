"""A model that is trained on a few tool calls answers with them: in files, from Python, in a chat, over the server."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import surogate
from surogate_core.cli.main import main
from surogate_core.files.paths import resolve_package_path
from surogate_testing.chat_templates import template_text

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("order", "price")]


def call(name: str, n: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"n": n}}}


def said(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


ROWS: list[dict[str, Any]] = [
    {"tools": TOOLS, "messages": [user("Where is 4?"), said("", call("order", 4))]},
    {"tools": TOOLS, "messages": [user("Two?"), said("One moment.", call("order", 1), call("price", 2))]},
    {"tools": TOOLS, "messages": [user("Hello"), said("Hi there.")]},
    {
        "tools": TOOLS,
        "messages": [
            user("Where is 4?"),
            said("", call("order", 4)),
            {"role": "tool", "name": "order", "content": "Rome"},
            said("It is in Rome."),
        ],
    },
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tool-rows") / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("tool-model")
    base = directory / "base"
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(base)
    shutil.copytree(resolve_package_path("pkg://surogate_dataset_chat/embedded/tokenizer"), base, dirs_exist_ok=True)
    (base / "chat_template.jinja").write_text(template_text("chatml"))
    return surogate.sft(
        model=str(base),
        datasets=[{"path": str(data), "type": "conversation"}],
        output_dir=str(directory / "run"),
        lora=False,
        device="cpu",
        sequence_len=512,
        learning_rate=5e-3,
        warmup_steps=5,
        max_steps=100,
        validation_split_ratio=0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        quiet=True,
    )


def calls(found: Any) -> list[tuple[str, Any]]:
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found]


def test_the_training_file_is_answered(trained: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = ["--file", str(data), "--temperature=0", "--max-new-tokens=120", "device=cpu"]
    assert main(["generate", str(trained.path), *words]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [calls(row.get("tool_calls", ())) for row in rows] == [
        [("order", {"n": 4})],
        [("order", {"n": 1}), ("price", {"n": 2})],
        [],
        [],
    ]
    assert [row["text"] for row in rows] == ["", "One moment.", "Hi there.", "It is in Rome."]
    assert "4 rows end with an assistant's turn, which is left out" in err


def test_from_python(trained: Any) -> None:
    keys: dict[str, Any] = {"sampling": {"temperature": 0}, "device": "cpu"}
    (one,) = trained.generate("Where is 4?", chat=True, tools=TOOLS, **keys)
    assert [(made.name, json.loads(made.arguments)) for made in one.calls] == [("order", {"n": 4})]
    (row,) = trained.generate({"messages": [user("Hello")], "tools": TOOLS}, **keys)
    assert (row.text, row.calls) == ("Hi there.", ())


def test_a_chat_asks_for_the_result(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "chat.jsonl"
    tools.write_text(json.dumps(TOOLS))
    lines = ("Where is 4?", "Rome", f"/save {saved}", "Where is 4?", "", "/undo", "/reset", "Hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    capsys.readouterr()
    assert main(["chat", str(trained.path), "--tools", str(tools), "--temperature=0", "device=cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ['[call] order({"n": 4})', "It is in Rome."]
    assert out[-1] == "Hi there."
    row = json.loads(saved.read_text())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][2]["tool_call_id"] == row["messages"][1]["tool_calls"][0]["id"]
    assert row["tools"] == TOOLS


@pytest.fixture(scope="module")
def client(trained: Any) -> Iterator[Any]:
    with surogate.serve(trained.path, name="tiny", device="cpu", sampling={"temperature": 0}) as server:
        yield openai.OpenAI(base_url=server.url, api_key=server.token, max_retries=0)


def test_openais_client_calls_tools_and_gets_the_answer(client: Any) -> None:
    messages: list[Any] = [user("Where is 4?")]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    (made,) = first.message.tool_calls
    assert (made.type, made.function.name, json.loads(made.function.arguments)) == ("function", "order", {"n": 4})
    messages += [first.message, {"role": "tool", "tool_call_id": made.id, "content": "Rome"}]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It is in Rome.")


def test_openais_client_reads_streamed_calls(client: Any) -> None:
    values = {"model": "tiny", "messages": [user("Two?")], "tools": TOOLS}
    with client.chat.completions.stream(**values) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "One moment.")
    found = [(one.function.name, json.loads(one.function.arguments)) for one in final.message.tool_calls]
    assert found == [("order", {"n": 1}), ("price", {"n": 2})]
    one = client.chat.completions.create(**values, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in one.message.tool_calls] == ["order"]
    assert one.finish_reason == "tool_calls"


def test_openais_client_forces_and_forbids_calls(client: Any) -> None:
    values = {"model": "tiny", "messages": [user("Hello")], "tools": TOOLS}
    assert client.chat.completions.create(**values).choices[0].message.content == "Hi there."
    named = {"type": "function", "function": {"name": "price"}}
    made = client.chat.completions.create(**values, tool_choice=named).choices[0].message.tool_calls
    assert [call.function.name for call in made] == ["price"]
    assert isinstance(json.loads(made[0].function.arguments)["n"], int)
    none = client.chat.completions.create(
        model="tiny", messages=[user("Where is 4?")], tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert none.choices[0].message.tool_calls is None


def test_openais_client_gets_json_and_errors(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=[user("Hello")], response_format=form).choices[0]
    assert isinstance(json.loads(answer.message.content)["sure"], bool)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objct"}}}
    with pytest.raises(openai.BadRequestError, match="response_format") as refused:
        client.chat.completions.create(model="tiny", messages=[user("Hello")], response_format=form)
    assert refused.value.param == "response_format"
    tool = {"type": "function", "function": {"name": "a b"}}
    with pytest.raises(openai.BadRequestError, match="must be 1 to 64") as refused:
        client.chat.completions.create(model="tiny", messages=[user("Hello")], tools=[tool])
    assert refused.value.param == "tools[0].function.name"
