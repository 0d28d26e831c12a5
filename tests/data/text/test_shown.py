"""A text that a chat template drops from a conversation is an error of the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from surogate_core.data.encoded import RowError
from surogate_core.data.text import shown
from surogate_core.data.text.chat import Chat, chat_of
from surogate_core.data.text.labels import tokenize_conversation

USER = {"role": "user", "content": "How warm is it in Rome?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "content": "20 degrees", "tool_call_id": "c1", "name": "weather"}
ANSWER = {"role": "assistant", "content": "It is 20 degrees."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells the weather of a city."}}]
THOUGHT = {"role": "assistant", "content": "<think>\nRome is warm.\n</think>\n\n20 degrees."}
REASONED = {**ANSWER, "reasoning_content": "Rome is warm."}

BODY = "{{- m.role + ': ' + BODY + '<|im_end|>\\n' }}{% endfor %}"
PLAIN = "{% for m in messages %}" + BODY.replace("BODY", "m.content")
STRIPPED = "{% for m in messages %}" + BODY.replace("BODY", "m.content.split('</think>')[-1]")
NO_RESULTS = "{% for m in messages if m.role != 'tool' %}" + BODY.replace("BODY", "m.content")
FIRST_CALL = "{% for m in messages %}" + BODY.replace(
    "BODY", "m.content + (m.tool_calls[0].function | tojson if m.tool_calls else '')"
)
CALL_OR_CONTENT = "{% for m in messages %}" + BODY.replace(
    "BODY", "(m.tool_calls[0].function | tojson if m.tool_calls else m.content)"
)
NAMED_TOOLS = "{% for t in tools or [] %}{{ t.name }}{% endfor %}" + PLAIN
BARE_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + PLAIN


@pytest.fixture
def use(templated: Callable[..., Any]) -> Iterator[Callable[[str], Any]]:
    """The embedded tokenizer with a template: one of the tests' or a text."""
    put: list[tuple[Any, Any]] = []

    def tokenizer(template: str) -> Any:
        if "{" not in template:
            return templated(template)[0]
        found = templated("chatml")[0]
        put.append((found, found.chat_template))
        found.chat_template = template
        return found

    yield tokenizer
    for found, before in reversed(put):
        found.chat_template = before


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        ("own", [USER, CALL, RESULT, ANSWER], None, "tool_calls of message 2 (assistant)"),
        ("own", [USER, ANSWER], TOOLS, "the tools;"),
        ("own", [USER, REASONED], None, "reasoning_content of message 2 (assistant)"),
        ("own", [{**USER, "name": "Ada"}, ANSWER], None, "name of message 1 (user)"),
        ("own", [USER, {**ANSWER, "thinking": "Hm."}], None, "thinking of message 2 (assistant)"),
        ("own", [USER, {**ANSWER, "audio": {"data": "AAAA"}}], None, "audio of message 2 (assistant)"),
        ("own", [USER, {**ANSWER, "function_call": {"name": "f"}}], None, "function_call of message 2"),
        ("chatml", [USER, REASONED], None, "reasoning_content of message 2 (assistant)"),
        ("llama3", [USER, REASONED], None, "reasoning_content of message 2 (assistant)"),
        ("chatml", [USER, CALL, {**RESULT, "name": "clock"}, ANSWER], TOOLS, "name of message 3 (tool)"),
        ("gemma", [USER, REASONED], None, "reasoning_content of message 2 (assistant)"),
        (STRIPPED, [USER, THOUGHT], None, "the thought of message 2 (assistant)"),
        (NO_RESULTS, [USER, ANSWER, RESULT, ANSWER], None, "message 3 (tool)"),
        (FIRST_CALL, [USER, {**CALL, "tool_calls": CALLS * 2}, RESULT, ANSWER], None, "tool_calls of message 2"),
        (CALL_OR_CONTENT, [USER, {**CALL, "content": "Let me look."}, RESULT, ANSWER], None, "message 2 (assistant);"),
        (NAMED_TOOLS, [USER, ANSWER], TOOLS, "the tools;"),
        (BARE_TOOLS, [USER, ANSWER], TOOLS, "the tools;"),
    ],
)
def test_what_is_left_out_is_named(use: Any, template: str, messages: Any, tools: Any, lost: str) -> None:
    with pytest.raises(RowError) as caught:
        tokenize_conversation(use(template), messages, tools)
    assert f"the chat template drops {lost}" in str(caught.value)
    assert "key `template`" in str(caught.value)


def test_the_reason_says_how_to_leave_it_out_on_purpose(use: Any) -> None:
    with pytest.raises(RowError) as caught:
        tokenize_conversation(use("own"), [USER, {**REASONED, "mood": "calm", **CALL, "content": "Hm."}], TOOLS)
    assert str(caught.value) == (
        "the chat template drops the tools, reasoning_content of message 2 (assistant), mood of message 2 "
        "(assistant) and 1 more; use a chat template that shows it (key `template`), or leave it out on purpose with "
        "ignored_properties: [mood, reasoning_content, tool_calls], or leave the tools out on purpose with "
        "tools_field: null"
    )


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        ("chatml", [SYSTEM, USER, CALL, RESULT, ANSWER], TOOLS),
        ("qwen3", [USER, {**CALL, "content": "Let me look."}, RESULT, REASONED], TOOLS),
        ("llama3", [SYSTEM, USER, CALL, RESULT, ANSWER], TOOLS),
        ("mistral", [SYSTEM, USER, CALL, RESULT, ANSWER], TOOLS),
        ("own", [USER, THOUGHT, USER, THOUGHT], None),
        # Qwen3 shows the thoughts behind the last question only, whether they are in the content or beside it.
        ("qwen3", [USER, THOUGHT, USER, THOUGHT], None),
        ("qwen3", [USER, REASONED, USER, REASONED], None),
        # Nothing is lost: empty, a number, a flag, a place, a time.
        ("own", [USER, {**ANSWER, "tool_calls": [], "name": " ", "reasoning_content": ""}], None),
        ("own", [USER, {**ANSWER, "score": 3, "prefix": False, "rank": [1, 2.5]}], None),
        ("own", [{**USER, "id": "x", "message_id": "a", "createdAt": "1970", "timestamp": "now"}, ANSWER], None),
    ],
)
def test_what_is_shown_or_is_no_text_passes(use: Any, template: str, messages: Any, tools: Any) -> None:
    assert tokenize_conversation(use(template), messages, tools).label_tokens > 0


def test_the_wishes_of_a_template_are_respected(use: Any) -> None:
    strict = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.function.name not in ('weather', 'clock') %}{{ raise_exception('unknown') }}{% endif %}"
        "{{ c.function | tojson }}{% endfor %}" + PLAIN.removeprefix("{% for m in messages %}")
    )
    assert tokenize_conversation(use(strict), [USER, CALL, RESULT, ANSWER]).label_tokens > 0
    with pytest.raises(RowError, match=r"drops name of message 1 \(user\)"):
        tokenize_conversation(use(strict), [{**USER, "name": "Ada"}, CALL, RESULT, ANSWER])


def test_one_rendering_serves_all_rows_of_a_shape(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = use("qwen3")
    chat_of(tokenizer).verdicts.clear()
    rendered: list[Any] = []
    render = Chat.render

    def counted(self: Chat, *args: Any, **options: Any) -> str:
        rendered.append(args)
        return render(self, *args, **options)

    monkeypatch.setattr(Chat, "render", counted)
    tokenize_conversation(tokenizer, [SYSTEM, USER, CALL, RESULT, ANSWER], TOOLS)
    first = len(rendered)
    tokenize_conversation(tokenizer, [SYSTEM, {**USER, "content": "?"}, CALL, RESULT, REASONED | {"x": 1}], TOOLS)
    second = len(rendered)
    tokenize_conversation(tokenizer, [SYSTEM, {**USER, "content": "And now?"}, CALL, RESULT, ANSWER], TOOLS)
    assert len(rendered) - second < first
    assert len(rendered) - second < second - first


def test_shapes_are_forgotten_in_time(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "KEPT_VERDICTS", 2)
    tokenizer = use("chatml")
    chat_of(tokenizer).verdicts.clear()
    for turns in (1, 2, 3, 4, 1):
        tokenize_conversation(tokenizer, [USER, ANSWER] * turns)
        assert 1 <= len(chat_of(tokenizer).verdicts) <= 2


MARKED = (
    "{% for m in messages %}{{- m.role + ': ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{- m.content }}{% endgeneration %}"
    "{% for c in m.tool_calls or [] %}{{- c.function | tojson }}{% endfor %}"
    "{% generation %}{{- '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{- m.content + '<|im_end|>' }}{% endif %}{{- '\\n' }}{% endfor %}"
)


def test_a_turn_of_which_only_the_end_would_be_trained_is_refused(use: Any) -> None:
    tokenizer = use(MARKED)
    assert tokenize_conversation(tokenizer, [USER, {**CALL, "content": "Let me look."}]).label_tokens > 1
    with pytest.raises(RowError, match=r"only control tokens of message 2 \(assistant\) would be trained"):
        tokenize_conversation(tokenizer, [USER, CALL])


# ------------------------------------------------------------------------ words inside of texts


def body(shown: str) -> str:
    return "{% for m in messages %}" + BODY.replace("BODY", shown)


def thought_out(opening: str, closing: str, *, last: str) -> str:
    """A template that takes contents apart at tags and shows the thought under a condition."""
    return (
        "{% for m in messages %}{%- set c = m.content %}{%- set t = '' %}"
        f"{{%- if m.role == 'assistant' and '{closing}' in c %}}"
        f"{{%- set t = c.split('{closing}')[0].split('{opening}')[-1] %}}{{%- set c = c.split('{closing}')[-1] %}}"
        "{%- endif %}{{- m.role + ': ' }}"
        f"{{%- if t and {last} %}}{{{{- '{opening}' + t + '{closing}' }}}}{{%- endif %}}"
        "{{- c + '<|im_end|>\\n' }}{% endfor %}"
    )


THINK, MAGISTRAL = (
    thought_out("<think>", "</think>", last="loop.last"),
    thought_out("[THINK]", "[/THINK]", last="loop.last"),
)
CUT, SEPARATED = body("m.content[:40]"), body("m.content.split('###')[0]")
FIRST_LINE = body("(m.content.split('\\n')[0] if m.role == 'user' else m.content)")
UNASKED = body("('' if m.content.startswith('/') and not loop.last else m.content)")
ARGUMENTS = body(
    "m.content + (m.tool_calls[0].function.name + m.tool_calls[0].function.arguments.items() "
    "| selectattr('1', 'string') | map('join', '=') | join(' ') if m.tool_calls else '')"
)
SHORT_NAMES = "{% for t in tools or [] %}{{ t.function.name + t.function.description[:20] }}{% endfor %}" + PLAIN
BRIEF_THOUGHTS = body("(m.reasoning_content or '')[:20] + m.content")


def says(text: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": text}


def calls(arguments: Any) -> dict[str, Any]:
    return {**CALL, "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        (THINK, [USER, says("ALPHA first. <think>hm</think> Four.")], None, "message 2 (assistant) (such as 'ALPHA')"),
        (THINK, [USER, says("<think>one</think> BRAVO. <think>two</think> End.")], None, "'BRAVO.'"),
        (THINK, [USER, says("CHARLIE </think> and on."), USER, ANSWER], None, "'CHARLIE'"),
        (MAGISTRAL, [USER, says("DELTA [THINK]hm[/THINK] Four.")], None, "'DELTA'"),
        (CUT, [says("Word " * 9, "user"), ANSWER], None, "message 1 (user)"),
        (SEPARATED, [SYSTEM | {"content": "Be brief. ### ECHO"}, USER, ANSWER], None, "message 1 (system)"),
        (FIRST_LINE, [says("One\nFOXTROT", "user"), ANSWER], None, "'FOXTROT'"),
        (UNASKED, [says("/x", "user"), ANSWER, says("/x", "user"), says("GOLF /x")], None, "message 3 (user)"),
        (UNASKED, [says("/x", "user"), ANSWER, says("/x", "user"), says("GOLF \\n /x")], None, "message 3 (user)"),
        (ARGUMENTS, [USER, calls({"city": "Rome", "days": 7301}), RESULT, ANSWER], None, "tool_calls of message 2"),
        (SHORT_NAMES, [USER, ANSWER], TOOLS, "the tools"),
        (
            BRIEF_THOUGHTS,
            [USER, {**ANSWER, "reasoning_content": "Rome is warm, since INDIA."}],
            None,
            "reasoning_content",
        ),
    ],
)
def test_a_template_that_drops_words_is_named(use: Any, template: str, messages: Any, tools: Any, lost: str) -> None:
    with pytest.raises(RowError, match="looks into the text and drops words of") as caught:
        tokenize_conversation(use(template), messages, tools)
    assert lost in str(caught.value)
    assert "key `template`" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (THINK, [USER, says("<think>one</think> Two."), USER, says("<think>one</think> Two.")], None),
        (MAGISTRAL, [USER, says("[THINK]one[/THINK] Two."), USER, says("[THINK]one[/THINK] Two.")], None),
        ("qwen3", [USER, says("ALPHA <think>hm</think> Four."), USER, says("BRAVO <think>hm</think> Four.")], None),
        (
            "qwen3",
            [USER, says("<think>a</think> B. <think>c</think> D."), USER, says("Close it with </think> now.")],
            None,
        ),
        ("qwen3", [USER, says("Close it with </think> now."), USER, says("Hm.\n</think>\n\nYes.")], None),
        # White space, escapes of JSON and texts in another place are no loss.
        ("llama3", [SYSTEM | {"content": " A\n\n b "}, says(" a  \n b\t", "user"), says("\n\nc\n")], None),
        ("mistral", [SYSTEM, USER, CALL, {**RESULT, "content": 'He said "é\n\\x"'}, ANSWER], TOOLS),
        (
            "chatml",
            [USER, calls({"q": 'a "b" \n é', "n": [1, 2.5], "o": {"k": None, "t": True}}), RESULT, ANSWER],
            TOOLS,
        ),
        ("gemma", [SYSTEM, USER, ANSWER, SYSTEM | {"role": "user"}, ANSWER], None),
        (body("m.content | indent(2)"), [says("a\nb\nc", "user"), ANSWER], None),
        (body("(m.content | string | tojson)"), [says('"a"', "user"), says("é\n'b'")], None),
        # Escapes of a trimmed text, of some characters, and of HTML, which a text may have before.
        (body("(m.content | trim | tojson)"), [says('"a"\nb\n', "user"), says("é\n'b' \n")], None),
        (body("m.content | replace('\"', '\\\\\"')"), [says('"a"\nb\n', "user"), says('C:\\new "é"')], None),
        (body("m.content | e"), [says("1 < 2 &amp; 'x'", "user"), says("&lt;b> & é")], None),
        (body("m.content | replace('<', '&lt;')"), [says("1 < 2 &amp; 'x'", "user"), says("&lt;b> & é")], None),
        (body("m.content"), [says("Ok", "user"), says("Ok"), says("Ok", "user"), says("Ok Ok")], None),
        (body("m.content"), [says("Say <|im_end|> now", "user"), ANSWER], None),
    ],
)
def test_words_that_are_shown_pass(use: Any, template: str, messages: Any, tools: Any) -> None:
    assert tokenize_conversation(use(template), messages, tools).label_tokens > 0


def test_the_template_of_qwen3_keeps_what_is_around_a_thought(use: Any) -> None:
    tokenizer = use("qwen3")
    for content, expected in (
        ("<think>a</think> B. <think>c</think> D.", "<think>\na\n</think>\n\n B. <think>c</think> D."),
        ("A <think>b</think> C.", "<think>\n\n</think>\n\nA <think>b</think> C."),
        ("b\n</think>\n\nC.", "<think>\nb\n</think>\n\nC."),
    ):
        document = tokenize_conversation(tokenizer, [USER, says(content)])
        assert tokenizer.decode(document.input_ids[document.labels >= 0]) == f"{expected}<|im_end|>"


def test_an_empty_text_has_another_shape_than_a_text(use: Any) -> None:
    silent = "{% for m in messages if m.role != 'tool' %}" + BODY.replace("BODY", "m.content")
    tokenizer = use(silent)
    called = [USER, says("Let me look."), says("\n", "tool"), ANSWER]
    assert tokenize_conversation(tokenizer, called).label_tokens > 0
    with pytest.raises(RowError, match=r"drops message 3 \(tool\)"):
        tokenize_conversation(tokenizer, [*called[:2], says("20 degrees", "tool"), ANSWER])
