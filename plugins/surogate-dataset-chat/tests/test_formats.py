"""The formats `conversation` and `text`: their options, and reasons for bad rows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import surogate_dataset_chat as plugin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from surogate_dataset_chat.conversation import ConversationOptions
from surogate_dataset_chat.text import TextOptions

from surogate_core.plugin import IGNORE_LABEL, EncodeContext, Encoded, RowError, UserError

FORMATS = {f.name: f for f in plugin.surogate_dataset()}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


@pytest.fixture
def context(tokenizer: Any) -> EncodeContext:
    """With the embedded tokenizer."""
    return EncodeContext(tokenizer=tokenizer, sequence_len=64)


def conversation(row: Any, context: EncodeContext, **options: Any) -> Any:
    return FORMATS["conversation"].encode(row, ConversationOptions(**options), context)


def test_the_plugin_offers_two_formats_and_its_config() -> None:
    assert set(FORMATS) == {"conversation", "text"}
    assert plugin.surogate_config_path() == "pkg://surogate_dataset_chat.conf"


def test_importing_the_plugin_is_cheap() -> None:
    heavy = ("torch", "transformers", "numpy", "datasets")
    code = f"import surogate_dataset_chat, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_text_is_trained_whole_and_ends(context: EncodeContext) -> None:
    document = FORMATS["text"].encode(
        {"body": "The capital of Italy is Rome."}, TextOptions(text_field="body"), context
    )
    assert context.tokenizer.decode(document.input_ids) == "The capital of Italy is Rome.<|im_end|>"
    assert document.labels.tolist() == document.input_ids.tolist()
    again = FORMATS["text"].encode({"text": "Rome.<|im_end|>"}, TextOptions(), context)
    assert again.input_ids.tolist().count(context.tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "field 'text' is missing, the row has no fields"),
        ({"texts": "x"}, "did you mean 'texts'?"),
        ({"text": None}, "field 'text' is null"),
        ({"text": 3}, "must be a string, this is int"),
        ({"text": " \n"}, "is empty"),
    ],
)
def test_bad_text_rows_have_a_reason(context: EncodeContext, row: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        FORMATS["text"].encode(row, TextOptions(), context)
    assert reason in str(caught.value)


def test_fields_and_properties_can_be_renamed(context: EncodeContext) -> None:
    plain = conversation({"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]}, context)
    renamed = conversation(
        {
            "chat": [{"from": "user", "value": "Hi", "id": None}, {"from": "assistant", "value": "Hello", "id": None}],
            "sys": "Be brief.",
        },
        context,
        messages_field="chat",
        system_field="sys",
        message_property_mappings={"role": "from", "content": "value"},
    )
    assert renamed.input_ids.tolist() == plain.input_ids.tolist()
    assert renamed.labels.tolist() == plain.labels.tolist()
    trained = [t for t in plain.labels.tolist() if t != IGNORE_LABEL]
    assert context.tokenizer.decode(trained) == "Hello<|im_end|>"


def test_roles_can_be_renamed(context: EncodeContext) -> None:
    row = {"messages": [{**USER, "role": "human"}, {**ASSISTANT, "role": "gpt"}]}
    renamed = conversation(row, context, role_mappings={"human": "user", "gpt": "assistant"})
    plain = conversation({"messages": [USER, ASSISTANT]}, context)
    assert renamed.labels.tolist() == plain.labels.tolist()


def test_a_row_without_a_system_prompt_is_fine(context: EncodeContext) -> None:
    for system in (None, ""):
        document = conversation({"messages": [USER, ASSISTANT], "sys": system}, context, system_field="sys")
        assert "system" not in context.tokenizer.decode(document.input_ids)


def test_tools_reach_the_template(templated: Any) -> None:
    tokenizer, _ = templated("qwen3")
    context = EncodeContext(tokenizer=tokenizer, sequence_len=64)
    for tools in ([{"name": "clock"}], '[{"name": "clock"}]'):
        document = conversation({"messages": [USER, ASSISTANT], "tools": tools}, context, tools_field="tools")
        assert '"clock"' in tokenizer.decode(document.input_ids)
    bare = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    document = conversation({"messages": [USER, bare]}, context)
    assert '{"name": "clock", "arguments": {}}' in tokenizer.decode(document.input_ids)


def test_tools_and_system_are_read_unless_told_otherwise(templated: Any) -> None:
    context = EncodeContext(tokenizer=templated("chatml")[0], sequence_len=64)
    row = {"messages": [USER, ASSISTANT], "tools": [{"name": "clock"}], "system": "Be brief."}
    text = context.tokenizer.decode(conversation(row, context).input_ids)
    assert '"clock"' in text
    assert "Be brief." in text
    bare = conversation({"messages": [USER, ASSISTANT]}, context)
    assert equal(conversation(row, context, tools_field=None, system_field=None), bare)
    # Nobody asked for a system prompt by name, so a field of nearly that name is no mistake.
    assert equal(conversation({**row, "tools": None, "system": None, "systems": "x"}, context), bare)
    assert equal(conversation({"messages": [USER, ASSISTANT], "tools": "null", "systems": "x"}, context), bare)


def test_a_system_prompt_may_be_in_two_places_if_it_is_one(context: EncodeContext) -> None:
    row = {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]}
    assert equal(conversation({**row, "system": "Be brief.\n"}, context), conversation(row, context))
    assert equal(conversation({**row, "system": "x"}, context, system_field=None), conversation(row, context))


def test_properties_are_left_out_on_purpose_only(context: EncodeContext) -> None:
    row = {"messages": [{**USER, "mood": "calm"}, {**ASSISTANT, "reasoning_content": "Hm.", "id": "x1", "score": 3}]}
    with pytest.raises(RowError, match=r"drops mood of message 1 \(user\), reasoning_content of message 2"):
        conversation(row, context)
    found = conversation(row, context, ignored_properties=["mood", "reasoning_content"])
    assert equal(found, conversation({"messages": [USER, ASSISTANT]}, context))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"message_property_mappings": {"role": "from", "content": "from"}}, "takes two properties from 'from'"),
        (
            {"message_property_mappings": {"content": "value"}, "ignored_properties": ["value"]},
            "takes 'value', which ignored_properties leaves out",
        ),
    ],
)
def test_options_that_contradict_each_other(options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ConversationOptions(**options)


def part(type_: str, **values: Any) -> Any:
    return {"role": "user", "content": [{"type": type_, **values}]}


def calls(value: Any) -> Any:
    return {"role": "assistant", "content": "", "tool_calls": value}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "field 'messages' is missing, the row has no fields"),
        ({"message": [USER]}, "did you mean 'message'?"),
        ({"messages": "Hi"}, "must be a list of messages, this is text that is not JSON: Expecting"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [USER, "Hello"]}, "message 2 must be an object, this is str"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "did you mean 'assistant'?"),
        ({"messages": [USER, {"role": "gpt", "content": "x"}]}, "message 2 has role 'gpt', known are system"),
        ({"messages": [{"from": "user", "value": "x"}]}, "no property 'role', it has 'from', 'value'"),
        ({"messages": [USER, {"role": ["assistant"], "content": "x"}]}, "has role ['assistant']"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2 (assistant) has no content"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 (assistant) has no content"),
        ({"messages": [{"role": "user", "content": " "}, ASSISTANT]}, "message 1 (user): content is blank"),
        ({"messages": [{"role": "user", "content": 7}, ASSISTANT]}, "content must be a string, this is int"),
        (
            {"messages": [{"role": "user", "content": ["a"]}, ASSISTANT]},
            "content part 1 must be an object, this is str",
        ),
        ({"messages": "3"}, "must be a list of messages, this is int"),
        ({"messages": "[" * 100000}, "is not JSON that can be read"),
        ({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}, "an object has the name 'content' twice"),
        ({"messages": [{"role": "user", "content": {"a": 1}}, ASSISTANT]}, "must be a string, this is dict"),
        (
            {"messages": [part("image_url", image_url="x"), ASSISTANT]},
            "part 1 is of type 'image_url'; only text",
        ),
        ({"messages": [part("text", text=None), ASSISTANT]}, "content part 1 has no text"),
        ({"messages": [part("text", text=" "), ASSISTANT]}, "content is blank"),
        ({"messages": [{"role": "user", "content": []}, ASSISTANT]}, "message 1 (user) has no content"),
        ({"messages": [USER, calls("{")]}, "tool_calls must be a list of objects, this is text that is not JSON"),
        ({"messages": [USER, calls(3)]}, "tool_calls must be a list of objects"),
        ({"messages": [USER, calls(["x"])]}, "tool_calls must be a list of objects"),
        ({"messages": [USER, calls([])]}, "message 2 (assistant) has no content"),
        ({"messages": [USER, calls([{"name": "x", "arguments": "{"}])]}, "arguments of tool call 1: is not JSON"),
        ({"messages": [USER, calls([{"function": {"arguments": "3"}}])]}, "arguments of tool call 1 must be an object"),
        ({"messages": [USER, {**ASSISTANT, "train": "no"}]}, "message 2 (assistant): train must be true or false"),
        ({"messages": [USER, {**ASSISTANT, "weight": -1}]}, "message 2 (assistant): weight must be from 0"),
        ({"messages": [USER, ASSISTANT], "sys": 3}, "field 'sys' must be a string"),
        ({"messages": [{"role": "system", "content": "a"}, ASSISTANT], "sys": "b"}, "have different system prompts"),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, "field 'tools' is not JSON"),
        ({"messages": [USER, ASSISTANT], "images": ["a.png"]}, "field 'images' has something other than text"),
        ({"messages": [{**USER, "images": ["a.png"]}, ASSISTANT]}, "drops images of message 1 (user)"),
        (
            {"messages": [part("input_audio", input_audio={"data": "AA"}), ASSISTANT]},
            "of type 'input_audio'; only text",
        ),
        ({"messages": [USER, ASSISTANT], "tools": "3"}, "must be a list of objects"),
    ],
)
def test_bad_conversations_have_a_reason(context: EncodeContext, row: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        conversation(row, context, system_field="sys", tools_field="tools")
    assert reason in str(caught.value)


def equal(a: Encoded, b: Encoded) -> bool:
    return a.input_ids.tolist() == b.input_ids.tolist() and a.labels.tolist() == b.labels.tolist()


def test_two_properties_do_not_become_one(context: EncodeContext) -> None:
    row = {"messages": [{"role": "user", "content": "Hi", "value": "Ho"}, {**ASSISTANT, "value": None}]}
    mapped = {"message_property_mappings": {"content": "value"}}
    with pytest.raises(RowError, match="message 1 has both 'value' and 'content', which message_property_mappings"):
        conversation(row, context, **mapped)
    found = conversation(
        {"messages": [row["messages"][0], {"role": "assistant", "value": "Hello"}]},
        context,
        ignored_properties=["content"],
        **mapped,
    )
    assert equal(found, conversation({"messages": [{"role": "user", "content": "Ho"}, ASSISTANT]}, context))


def test_messages_may_be_json_text_and_contents_parts(context: EncodeContext) -> None:
    plain = conversation({"messages": [USER, ASSISTANT]}, context)
    assert equal(conversation({"messages": json.dumps([USER, ASSISTANT])}, context), plain)
    parts = [{"type": "text", "text": "H", "image_url": None}, {"type": "text", "text": "i"}]
    assert equal(conversation({"messages": [{"role": "user", "content": parts}, ASSISTANT]}, context), plain)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "chatml-marked"])
def test_arguments_are_the_same_as_text_and_as_an_object(templated: Any, name: str) -> None:
    context = EncodeContext(tokenizer=templated(name)[0], sequence_len=64)
    found = [
        conversation({"messages": [USER, calls(value), {"role": "tool", "content": "12"}, ASSISTANT]}, context)
        for value in (
            [{"function": {"name": "clock", "arguments": {"zone": "CET", "at": [1, 2.5]}}}],
            [{"function": {"name": "clock", "arguments": '{"zone":"CET", "at":[1,2.5]}'}}],
            [{"id": None, "function": {"name": "clock", "arguments": {"zone": "CET", "at": [1, 2.5]}}}],
            '[{"function": {"name": "clock", "arguments": "{\\"zone\\": \\"CET\\", \\"at\\": [1, 2.5]}"}}]',
        )
    ]
    assert all(equal(document, found[0]) for document in found)
    assert '"zone": "CET", "at": [1, 2.5]' in context.tokenizer.decode(found[0].input_ids)


def test_nulls_that_a_row_writes_stay(templated: Any) -> None:
    context = EncodeContext(tokenizer=templated("qwen3")[0], sequence_len=64)
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"default": None}}},
    }
    tools = [{"type": "function", "function": function}]
    for arguments in ({"city": None, "q": {"a": None}}, '{"city": null, "q": {"a": null}}'):
        for written in (tools, json.dumps(tools)):
            messages = [USER, calls([{"function": {"name": "f", "arguments": arguments}}]), ASSISTANT]
            text = context.tokenizer.decode(conversation({"messages": messages, "tools": written}, context).input_ids)
            assert '{"city": null, "q": {"a": null}}' in text
            assert '{"a": {"default": null}}' in text


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "chatml", "chatml-short"])
def test_rows_of_agents_may_have_empty_texts(templated: Any, name: str) -> None:
    context = EncodeContext(tokenizer=templated(name)[0], sequence_len=64)
    empty = {"role": "system", "content": ""}
    for system in (empty, {**empty, "content": " \n"}, {"role": "system"}):
        found = conversation({"messages": [system, USER, ASSISTANT]}, context)
        assert context.tokenizer.decode(found.input_ids[found.labels >= 0]).endswith(
            "Hello" + context.tokenizer.eos_token
        )
    if name == "chatml-short":
        return
    for arguments, content in (("", ""), (" ", "\n"), ({}, None)):
        call = calls([{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}])
        row = {"messages": [USER, call, {"role": "tool", "tool_call_id": "c1", "content": content}, ASSISTANT]}
        text = context.tokenizer.decode(conversation(row, context).input_ids)
        assert '"f", "parameters": {}' in text or '"f", "arguments": {}' in text


def test_an_empty_system_prompt_gives_way_to_that_of_the_field(context: EncodeContext) -> None:
    row = {"messages": [{"role": "system", "content": ""}, USER, ASSISTANT], "system": "Be brief."}
    plain = {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]}
    assert equal(conversation(row, context), conversation(plain, context))


def test_a_struct_of_lists_is_a_list_of_messages(context: EncodeContext) -> None:
    row = {"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}}
    assert equal(conversation(row, context), conversation({"messages": [USER, ASSISTANT]}, context))
    with pytest.raises(RowError, match="must be a list of messages, this is dict"):
        conversation({"messages": {"role": ["user", "assistant"], "content": ["Hi"]}}, context)


def test_nulls_of_columns_are_left_out(context: EncodeContext) -> None:
    nulls = {"name": None, "tool_calls": None, "tool_call_id": None, "train": None, "weight": None}
    row = {"messages": [{**USER, **nulls}, {**ASSISTANT, **nulls}], "sys": None, "tools": None}
    found = conversation(row, context, system_field="sys", tools_field="tools")
    assert equal(found, conversation({"messages": [USER, ASSISTANT]}, context))


def test_messages_say_whether_they_are_trained(context: EncodeContext) -> None:
    again = {"role": "user", "content": "Bye"}
    row = {"messages": [USER, {**ASSISTANT, "train": False}, again, {**ASSISTANT, "weight": 0.5}]}
    document = conversation(row, context)
    assert context.tokenizer.decode(document.input_ids[document.labels >= 0]) == "Hello<|im_end|>"
    assert document.weights is not None
    assert set(document.weights.tolist()) == {0, 0.5}
    assert "train" not in context.tokenizer.decode(document.input_ids)


def test_the_configuration_scales_and_says_who_the_assistant_is(context: EncodeContext) -> None:
    row = {"messages": [USER, ASSISTANT, USER, ASSISTANT]}
    last = conversation(row, replace(context, loss_scale="last_round"))
    assert last.label_tokens < conversation(row, context).label_tokens
    with_system = replace(context, system="Be kind.")
    asked = [{"role": "system", "content": "Be kind."}, USER, ASSISTANT]
    assert equal(conversation({"messages": asked[1:]}, with_system), conversation({"messages": asked}, context))
    own = {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]}
    assert equal(conversation(own, with_system), conversation(own, context))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mistral-pairs", "Only user and assistant roles"), ("deaf", "drops system prompts, so `system` would")],
)
def test_a_template_that_takes_no_system_turn(templated: Any, name: str, reason: str) -> None:
    tokenizer, _ = templated(name)
    if name == "deaf":
        tokenizer.chat_template = (
            "{% for m in messages if m.role != 'system' %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
        )
    context = EncodeContext(tokenizer=tokenizer, sequence_len=64, system="Be kind.")
    with pytest.raises(RowError, match=reason):
        conversation({"messages": [USER, ASSISTANT]}, context)


def test_without_templates_conversations_are_refused(context: EncodeContext) -> None:
    with pytest.raises(UserError, match=r"use_chat_template is false, but .* Fix: use_chat_template: true"):
        conversation({"messages": [USER, ASSISTANT]}, replace(context, use_chat_template=False))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PROPERTY = st.sampled_from(["user", "assistant", "system", "x", "\ud800"]) | JSON
MESSAGE = (
    st.fixed_dictionaries(
        {}, optional={"role": PROPERTY, "content": PROPERTY, "tool_calls": JSON, "train": JSON, "weight": JSON}
    )
    | JSON
)
ROW = st.fixed_dictionaries(
    {}, optional={"messages": st.lists(MESSAGE, max_size=4) | JSON, "text": PROPERTY, "sys": PROPERTY, "tools": JSON}
)


@given(row=ROW)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["own", "qwen3"])
def test_any_row_is_encoded_or_has_a_reason(templated: Any, name: str, row: Any) -> None:
    context = EncodeContext(tokenizer=templated(name)[0], sequence_len=64)
    for format_, options in (
        (FORMATS["conversation"], ConversationOptions(system_field="sys", tools_field="tools")),
        (FORMATS["text"], TextOptions()),
    ):
        try:
            document = format_.encode(row, options, context)
        except RowError:
            continue
        assert isinstance(document, Encoded)
