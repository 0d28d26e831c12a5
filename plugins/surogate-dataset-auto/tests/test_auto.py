"""The format `auto`: which type the rows show, with which fields and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import surogate_dataset_auto as plugin
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.plugin import RowError, UserError, bundles
from surogate_core.service.config import RunConfig
from surogate_core.service.data import prepare
from surogate_testing.chat_templates import byte_tokenizer

FORMAT: Any = plugin.surogate_dataset()
OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
PREFERENCE = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"}
TEXT = {"text": "Rome."}
USER, HELLO = OPENAI["messages"][0], OPENAI["messages"][1:]


@pytest.mark.parametrize(
    ("row", "type_name", "fields"),
    [
        (OPENAI, "conversation", {"messages_field": "messages"}),
        ({"messages": json.dumps(OPENAI["messages"])}, "conversation", {"messages_field": "messages"}),
        ({"messages": "[1", "text": "x"}, "text", {"text_field": "text"}),
        ({**OPENAI, "text": "x", "prompt": "x"}, "conversation", {"messages_field": "messages"}),
        (
            {**OPENAI, "system": "x", "tools": "[]"},
            "conversation",
            {"messages_field": "messages", "system_field": "system", "tools_field": "tools"},
        ),
        (
            {"messages": [{"role": "system", "content": "x"}], "system_prompt": "x"},
            "conversation",
            {"messages_field": "messages", "system_field": "system_prompt"},
        ),
        (ALPACA, "instruction", {"instruction_field": "instruction", "output_field": "output", "input_field": "input"}),
        ({"question": "x", "answer": "y"}, "instruction", {"instruction_field": "question", "output_field": "answer"}),
        (
            {"prompt": "x", "completion": "y", "system": "z"},
            "instruction",
            {
                "instruction_field": "prompt",
                "output_field": "completion",
                "system_prompt_type": "field",
                "system_prompt_field": "system",
            },
        ),
        (
            PREFERENCE,
            "preference",
            {"prompt_field": "prompt", "chosen_field": "chosen", "rejected_field": "rejected"},
        ),
        (
            {"prompt": "Hi", "chosen": HELLO, "rejected": HELLO},
            "preference",
            {"prompt_field": "prompt", "chosen_field": "chosen", "rejected_field": "rejected"},
        ),
        (
            {"chosen": [USER, *HELLO], "rejected": json.dumps([USER, *HELLO])},
            "preference",
            {"chosen_field": "chosen", "rejected_field": "rejected"},
        ),
        ({"prompt": "Hi", "completion": "Go", "label": False}, "unpaired", {}),
        ({"prompt": "Hi", "completion": HELLO, "label": True}, "unpaired", {}),
        (TEXT, "text", {"text_field": "text"}),
        ({"content": "x", "id": 3}, "text", {"text_field": "content"}),
    ],
)
def test_the_rows_show_the_type(row: Any, type_name: str, fields: Any) -> None:
    choice = FORMAT.choose([row, row, row], bundles.NoOptions())
    assert (choice.type, dict(choice.fields)) == (type_name, fields)
    assert choice.reason.startswith("3 of 3 sampled rows ")


def test_sharegpt_maps_properties_and_roles() -> None:
    choice = FORMAT.choose([SHAREGPT], bundles.NoOptions())
    assert choice.type == "conversation"
    assert choice.fields["message_property_mappings"] == {"role": "from", "content": "value"}
    assert choice.fields["role_mappings"]["gpt"] == "assistant"
    assert "'from' in 'conversations' (ShareGPT)" in choice.reason


def test_most_rows_decide() -> None:
    assert FORMAT.choose([TEXT, ALPACA, ALPACA], bundles.NoOptions()).type == "instruction"
    with pytest.raises(RowError, match="no type fits the 2 sampled rows, whose fields are 'instruction'"):
        FORMAT.choose([ALPACA, {"text": 3}], bundles.NoOptions())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "from", "x"]), inner),
    max_leaves=6,
)
ROW = st.dictionaries(st.sampled_from([*OPENAI, *SHAREGPT, *ALPACA, *PREFERENCE, *TEXT, "system", "tools"]), JSON)


@given(rows=st.lists(ROW, min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_rows_have_a_type_or_a_reason(rows: Any) -> None:
    try:
        choice = FORMAT.choose(rows, bundles.NoOptions())
    except RowError:
        return
    assert isinstance(choice, bundles.FormatChoice)


def test_a_type_that_is_not_installed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(TEXT))
    entry = {"path": str(path), "type": "auto"}
    config = RunConfig(datasets=[entry], data_cache_dir=str(tmp_path / "cache"), validation_split_ratio=0.0)
    with pytest.raises(UserError, match=r"looks like type text: 1 of 1 sampled rows.*No installed plugin offers"):
        prepare(config, byte_tokenizer(), {"auto": FORMAT})
