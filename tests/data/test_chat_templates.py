"""Chat templates in the shapes of six families: what is rendered and what of it is trained, written by hand.

⟦…⟧ stands around what is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from surogate_dataset_chat import EMBEDDED_TOKENIZER

from surogate_core.config.schema import RunConfig
from surogate_core.data.encoded import Encoded, RowError
from surogate_core.data.templates import TURN_ENDS, apply_template
from surogate_core.data.text import labels
from surogate_core.data.text.labels import Override, tokenize_conversation
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import UserError
from surogate_core.setup.tokenizer_of_run import tokenizer_of_run
from surogate_testing.chat_templates import ENDS, SHIPPED, TEMPLATES

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello!"}
USER2 = {"role": "user", "content": "Who are you?"}
ASSISTANT2 = {"role": "assistant", "content": "Ada.\nAnd you?"}
TOOLS = [{"name": "clock"}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "function": {"name": "clock", "arguments": {"zone": "CET"}}}],
}
RESULT = {"role": "tool", "content": "12:00", "tool_call_id": "c1"}
NOON = {"role": "assistant", "content": "It is noon."}
THOUGHT = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"}
REASONED = {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hello!"}

CASES: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "single": ([USER, ASSISTANT], None),
    "multi": ([USER, ASSISTANT, USER2, ASSISTANT2], None),
    "system": ([SYSTEM, USER, ASSISTANT, USER2, ASSISTANT2], None),
    "tools": ([USER, CALL, RESULT, RESULT, NOON], TOOLS),
    "thought": ([USER, THOUGHT, USER2, THOUGHT], None),
    "reasoned": ([USER, REASONED], None),
}

IM = "<|im_start|>"
H, E = "<|start_header_id|>", "<|end_header_id|>\n\n"
EXPECTED = {
    "chatml": {
        "single": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n",
        "multi": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\nWho are you?<|im_end|>\n{IM}assistant\n⟦Ada.\nAnd you?<|im_end|>⟧\n",
        "system": f"{IM}system\nBe brief.<|im_end|>\n{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\nWho are you?<|im_end|>\n{IM}assistant\n⟦Ada.\nAnd you?<|im_end|>⟧\n",
        "tools": f"{IM}system\nFunctions you can call, one JSON description a line:\n"
        '<tools>\n{"name": "clock"}\n</tools>\n'
        "To call one, write its name and arguments as JSON between <tool_call> and </tool_call>.<|im_end|>\n"
        f"{IM}user\nHi<|im_end|>\n"
        f'{IM}assistant\n⟦<tool_call>\n{{"name": "clock", "arguments": {{"zone": "CET"}}}}\n</tool_call><|im_end|>⟧\n'
        + f"{IM}tool\n<tool_response>\n12:00\n</tool_response><|im_end|>\n" * 2
        + f"{IM}assistant\n⟦It is noon.<|im_end|>⟧\n",
        "thought": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦<think>\nA greeting.\n</think>\n\nHello!<|im_end|>⟧\n"
        f"{IM}user\nWho are you?<|im_end|>\n"
        f"{IM}assistant\n⟦<think>\nA greeting.\n</think>\n\nHello!<|im_end|>⟧\n",
    },
    "qwen3": {
        "single": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦<think>\n\n</think>\n\nHello!<|im_end|>⟧\n",
        "multi": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\nWho are you?<|im_end|>\n{IM}assistant\n⟦<think>\n\n</think>\n\nAda.\nAnd you?<|im_end|>⟧\n",
        "system": f"{IM}system\nBe brief.<|im_end|>\n{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\nWho are you?<|im_end|>\n{IM}assistant\n⟦<think>\n\n</think>\n\nAda.\nAnd you?<|im_end|>⟧\n",
        "tools": f"{IM}system\n# Tools\n\nFunctions you can call, one JSON description a line:\n"
        '<tools>\n{"name": "clock"}\n</tools>\n\n'
        "To call one, write its name and arguments as JSON:\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'
        f"{IM}user\nHi<|im_end|>\n"
        f'{IM}assistant\n⟦<tool_call>\n{{"name": "clock", "arguments": {{"zone": "CET"}}}}\n</tool_call><|im_end|>⟧\n'
        f"{IM}user" + "\n<tool_response>\n12:00\n</tool_response>" * 2 + "<|im_end|>\n"
        f"{IM}assistant\n⟦<think>\n\n</think>\n\nIt is noon.<|im_end|>⟧\n",
        "thought": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\nWho are you?<|im_end|>\n"
        f"{IM}assistant\n⟦<think>\nA greeting.\n</think>\n\nHello!<|im_end|>⟧\n",
        "reasoned": f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦<think>\nA greeting.\n</think>\n\nHello!<|im_end|>⟧\n",
    },
    "llama3": {
        "single": f"<s>{H}user{E}Hi<|eot_id|>{H}assistant{E}⟦Hello!<|eot_id|>⟧",
        "multi": f"<s>{H}user{E}Hi<|eot_id|>{H}assistant{E}⟦Hello!<|eot_id|>⟧"
        f"{H}user{E}Who are you?<|eot_id|>{H}assistant{E}⟦Ada.\nAnd you?<|eot_id|>⟧",
        "system": f"<s>{H}system{E}Be brief.<|eot_id|>{H}user{E}Hi<|eot_id|>{H}assistant{E}⟦Hello!<|eot_id|>⟧"
        f"{H}user{E}Who are you?<|eot_id|>{H}assistant{E}⟦Ada.\nAnd you?<|eot_id|>⟧",
        "tools": f"<s>{H}system{E}Environment: ipython\n\nFunctions you can call, as JSON descriptions:\n\n"
        '{\n    "name": "clock"\n}\n\n'
        'To call one, answer with {"name": NAME, "parameters": OBJECT} and nothing else.\n\n<|eot_id|>'
        f"{H}user{E}Hi<|eot_id|>"
        f'{H}assistant{E}⟦{{"name": "clock", "parameters": {{"zone": "CET"}}}}<|eot_id|>⟧'
        + f"{H}ipython{E}12:00<|eot_id|>" * 2
        + f"{H}assistant{E}⟦It is noon.<|eot_id|>⟧",
    },
    "mistral": {
        "single": "<s>[INST] Hi[/INST]⟦ Hello!</s>⟧",
        "multi": "<s>[INST] Hi[/INST]⟦ Hello!</s>⟧[INST] Who are you?[/INST]⟦ Ada.\nAnd you?</s>⟧",
        "system": "<s>[INST] Hi[/INST]⟦ Hello!</s>⟧[INST] Be brief.\n\nWho are you?[/INST]⟦ Ada.\nAnd you?</s>⟧",
        "tools": '<s>[AVAILABLE_TOOLS] [{"name": "clock"}][/AVAILABLE_TOOLS][INST] Hi[/INST]'
        '⟦[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "CET"}, "id": "c1"}]</s>⟧'
        + '[TOOL_RESULTS] {"content": "12:00", "call_id": "c1"}[/TOOL_RESULTS]' * 2
        + "⟦ It is noon.</s>⟧",
    },
    "gemma": {
        "single": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n",
        "multi": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n⟦Ada.\nAnd you?<end_of_turn>⟧\n",
        "system": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n⟦Ada.\nAnd you?<end_of_turn>⟧\n",
    },
    "phi": {
        "single": "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n",
        "multi": "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n"
        "<|user|>\nWho are you?<|end|>\n<|assistant|>\n⟦Ada.\nAnd you?<|end|>⟧\n",
        "system": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n"
        "<|user|>\nWho are you?<|end|>\n<|assistant|>\n⟦Ada.\nAnd you?<|end|>⟧\n",
    },
    "phi4": {
        "single": f"{IM}user<|im_sep|>Hi<|im_end|>{IM}assistant<|im_sep|>⟦Hello!<|im_end|>⟧",
        "multi": f"{IM}user<|im_sep|>Hi<|im_end|>{IM}assistant<|im_sep|>⟦Hello!<|im_end|>⟧"
        f"{IM}user<|im_sep|>Who are you?<|im_end|>{IM}assistant<|im_sep|>⟦Ada.\nAnd you?<|im_end|>⟧",
        "system": f"{IM}system<|im_sep|>Be brief.<|im_end|>"
        f"{IM}user<|im_sep|>Hi<|im_end|>{IM}assistant<|im_sep|>⟦Hello!<|im_end|>⟧"
        f"{IM}user<|im_sep|>Who are you?<|im_end|>{IM}assistant<|im_sep|>⟦Ada.\nAnd you?<|im_end|>⟧",
    },
}
EXPECTED["phi-closed"] = {name: f"{text}<|endoftext|>" for name, text in EXPECTED["phi"].items()}


def bracketed(tokenizer: Any, document: Encoded) -> str:
    """The decoded document with brackets around what is trained."""
    pairs = zip(document.input_ids.tolist(), (document.labels >= 0).tolist(), strict=True)
    runs = [(mine, tokenizer.decode([i for i, _ in run])) for mine, run in groupby(pairs, key=lambda pair: pair[1])]
    return "".join(f"⟦{text}⟧" if mine else text for mine, text in runs)


@pytest.fixture(params=["all at once", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to find turns in templates without generation blocks."""
    if request.param == "one by one":
        monkeypatch.setattr(labels, "_all_at_once", lambda *args: None)
    return str(request.param)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (n + kind, c)
        for n, cases in EXPECTED.items()
        for kind in ("", "-marked")
        for c in cases
        if n + kind in TEMPLATES
    ],
)
def test_the_trained_part_is_what_is_expected(templated: Callable[..., Any], way: str, name: str, case: str) -> None:
    tokenizer, _ = templated(name)
    messages, tools = CASES[case]
    found = bracketed(tokenizer, tokenize_conversation(tokenizer, messages, tools))
    assert found == EXPECTED[name.removesuffix("-marked")][case]


SMOLLM3 = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- else %}{% generation %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Blocks that begin with the header of a turn and end behind its end, as SmolLM3's."""
GLM4 = (
    "<s>{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""The token of the next role ends a turn, as GLM-4's."""
HEADERS = {
    "smollm3": (
        SMOLLM3,
        f"{IM}user\nHi<|im_end|>\n⟦{IM}assistant\nHello!<|im_end|>\n⟧"
        f"{IM}user\nWho are you?<|im_end|>\n⟦{IM}assistant\nAda.\nAnd you?<|im_end|>\n⟧",
    ),
    "glm4": (
        GLM4,
        "<s><|user|>\nHi<|assistant|>⟦\nHello!<|user|>⟧\nWho are you?<|assistant|>⟦\nAda.\nAnd you?⟧",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_token_that_begins_the_next_turn_is_trained_only_where_it_ends_this_one(
    templated: Callable[..., Any], name: str
) -> None:
    tokenizer, (template, expected) = copy.deepcopy(templated("chatml")[0]), HEADERS[name]
    tokenizer.chat_template = template
    assert bracketed(tokenizer, tokenize_conversation(tokenizer, *CASES["multi"])) == expected


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "gemma", "phi", "phi4", "qwen3", "phi-closed"])
def test_one_rendering_is_enough_for_common_rows(
    templated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(labels, "_one_by_one", lambda *args: pytest.fail("one by one"))
    tokenizer, _ = templated(name)
    cases = ["single", "multi", "system"] + (["thought", "reasoned"] if name == "qwen3" else [])
    for case in cases:
        tokenize_conversation(tokenizer, *CASES[case])


@pytest.mark.parametrize("name", ["gemma", "phi", "phi4"])
def test_tools_are_refused_where_there_is_no_form_for_them(templated: Callable[..., Any], name: str) -> None:
    with pytest.raises(RowError, match="takes no tools"):
        tokenize_conversation(templated(name)[0], *CASES["tools"])


# ---------------------------------------------------------------------------- random conversations

CONTROL = """
<|im_end|> <|im_start|>assistant\\n [INST] [/INST] <|eot_id|> </s> <s> <end_of_turn> <|end|> <|assistant|>\\n
<|start_header_id|>assistant<|end_header_id|>\\n\\n <start_of_turn>model\\n <tool_call> {%generation%} <| |> < | [ {{x}}
"""
PIECES = st.sampled_from(
    [piece.replace("\\n", "\n") for piece in CONTROL.split()]
    + ["a", "B c", " ", "  ", "\n", "\n\n", "\t", "é", "漢", "😀", "e\u0301", "\u200d", "\u00a0", "user", '{"a": 1}']
)
TEXT = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(lambda text: text.strip())
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)
STRIPPED = ("llama3", "mistral", "gemma")
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def conversation(turns: list[tuple[str, str]], system: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def trained_texts(tokenizer: Any, document: Encoded) -> list[str]:
    pairs = zip(document.input_ids.tolist(), (document.labels >= 0).tolist(), strict=True)
    return [tokenizer.decode([i for i, _ in run]) for mine, run in groupby(pairs, key=lambda pair: pair[1]) if mine]


@given(turns=TURNS, system=st.none() | TEXT)
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@pytest.mark.parametrize("kind", ["", "-marked"])
@pytest.mark.parametrize("name", SHIPPED)
def test_trained_tokens_are_the_answers_and_their_ends(
    templated: Callable[..., Any], name: str, kind: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    tokenizer, end = templated(name + kind)
    expected = []
    for place, (_, answer) in enumerate(turns):
        text = answer.strip() if name in STRIPPED else answer
        if name == "qwen3" and place == len(turns) - 1:
            text = f"<think>\n\n</think>\n\n{text.lstrip(chr(10))}"
        # The space before an answer of Mistral's belongs to its first token, where that token takes one.
        expected.append((" " if name == "mistral" else "") + text + end)
    document = tokenize_conversation(tokenizer, conversation(turns, system))
    found = trained_texts(tokenizer, document)
    if name == "mistral" and not kind:
        found = [text if text.startswith(" ") else f" {text}" for text in found]
    assert found == expected
    # What a text spells out is not a control token.
    harmless = conversation([("Q", "A")] * len(turns), "S" if system else None)
    rendered = tokenizer.apply_chat_template(harmless, tokenize=False)
    assert document.input_ids.tolist().count(tokenizer.convert_tokens_to_ids(end)) == rendered.count(end)


@given(turns=TURNS, system=st.none() | TEXT, tail=st.none() | TEXT)
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@pytest.mark.parametrize("name", [*SHIPPED, "phi-closed", "unprompted", "chatml-short"])
def test_both_ways_agree(
    templated: Callable[..., Any], name: str, turns: list[tuple[str, str]], system: str | None, tail: str | None
) -> None:
    tokenizer, _ = templated(name)
    messages = conversation(turns, system)
    if tail:
        messages.append({"role": "user", "content": tail})
    fast = tokenize_conversation(tokenizer, messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "_all_at_once", lambda *args: None)
        slow = tokenize_conversation(tokenizer, messages)
    assert fast.input_ids.tolist() == slow.input_ids.tolist()
    assert fast.labels.tolist() == slow.labels.tolist()


def result_of(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [call, RESULT] if "tool_calls" in call else [call]


CALLS = st.builds(
    lambda content, name, value: {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": name, "arguments": {"x": value}}}],
    },
    st.just("") | TEXT,
    TEXT,
    TEXT,
)
ANSWERS = st.one_of(
    TEXT.map(lambda text: {"role": "assistant", "content": text}),
    st.tuples(TEXT, TEXT, st.sampled_from(["", "\n", "\n\n"])).map(
        lambda parts: {"role": "assistant", "content": f"<think>{parts[2]}{parts[0]}\n</think>{parts[2]}{parts[1]}"}
    ),
    st.tuples(TEXT, TEXT).map(lambda p: {"role": "assistant", "reasoning_content": p[0], "content": p[1]}),
    CALLS,
)
OVERRIDES = st.builds(Override, st.none() | st.booleans(), st.none() | st.sampled_from([0.0, 0.5, 1.0]))


@given(turns=st.lists(st.tuples(TEXT, ANSWERS), min_size=1, max_size=3), data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral", "phi-closed", "unprompted"])
def test_both_ways_agree_on_calls_thoughts_and_weights(
    templated: Callable[..., Any], name: str, turns: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    tokenizer, _ = templated(name)
    messages: list[dict[str, Any]] = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, *result_of(answer)]
    overrides = data.draw(st.none() | st.lists(OVERRIDES, min_size=len(messages), max_size=len(messages)))
    scale = data.draw(st.sampled_from(["default", "last_round", "all"]))

    def found() -> Any:
        try:
            document = tokenize_conversation(tokenizer, messages, loss_scale=scale, overrides=overrides)
        except RowError as error:
            return str(error)
        weights = document.weights.tolist() if document.weights is not None else None
        return document.input_ids.tolist(), document.labels.tolist(), weights

    fast = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "_all_at_once", lambda *args: None)
        slow = found()
    assert fast == slow


@given(turns=TURNS, system=st.none() | TEXT)
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "mistral"])
def test_marks_and_prefixes_agree(
    templated: Callable[..., Any], name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    # Not Mistral's: without a generation prompt, prefixes cannot tell that the space before an answer is its.
    messages = conversation(turns, system)
    marked = tokenize_conversation(templated(f"{name}-marked")[0], messages)
    plain = tokenize_conversation(templated(name)[0], messages)
    assert marked.input_ids.tolist() == plain.input_ids.tolist()
    assert marked.labels.tolist() == plain.labels.tolist()


# ------------------------------------------------------------------------------ the key `template`


def test_auto_leaves_the_tokenizers_own() -> None:
    tokenizer = load_tokenizer(EMBEDDED_TOKENIZER)
    before = tokenizer.chat_template
    apply_template(tokenizer, "auto")
    assert tokenizer.chat_template == before


def test_a_shipped_one_replaces_it_and_ends_the_text(templated: Callable[..., Any]) -> None:
    tokenizer = load_tokenizer(EMBEDDED_TOKENIZER)
    tokenizer.eos_token = "<|endoftext|>"
    apply_template(tokenizer, "qwen3")
    assert "<think>" in tokenizer.chat_template
    assert tokenizer.eos_token == "<|im_end|>"
    assert set(TURN_ENDS) == set(SHIPPED) <= set(ENDS)


def test_a_run_has_the_template_that_is_asked_for() -> None:
    config = RunConfig(tokenizer=EMBEDDED_TOKENIZER, template="chatml")
    tokenizer, _ = tokenizer_of_run(config, vocab_size=None, pretrained=False)
    assert tokenizer.chat_template == TEMPLATES["chatml-marked"]


def test_a_file_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(
        "\ufeff{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}", encoding="utf-8"
    )
    tokenizer = load_tokenizer(EMBEDDED_TOKENIZER)
    apply_template(tokenizer, str(path))
    assert bracketed(tokenizer, tokenize_conversation(tokenizer, [USER, ASSISTANT])).endswith("Hello!<|im_end|>⟧")
    assert tokenizer.chat_template.startswith("{% for")


@pytest.mark.parametrize(
    ("template", "text", "reason"),
    [
        ("chatmlx", None, r"neither such a template nor such a file\. Fix: did you mean chatml\?"),
        ("x.jinja", "", "the file is empty"),
        ("x.jinja", "{% for m in messages %}\n{{ m.content }", "line 2: the chat template refuses"),
        ("x.jinja", "{{ raise_exception('no') }}", "refuses the conversation: no"),
        ("x.jinja", "{{ messages[0].content }}", "drops the text of the user or of the assistant"),
        ("x.jinja", "<|nope|>", r"lacks special tokens that it needs: <\|nope\|>\."),
        ("llama3", None, r"lacks special tokens that it needs: <\|start_header_id\|>, .*bos_token\. Fix: take"),
        ("mistral", None, r"\[INST\], \[/INST\]"),
        (".", None, "neither such a template"),
    ],
)
def test_templates_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, text: str | None, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(template).write_text(text)
    with pytest.raises(UserError, match=reason):
        apply_template(load_tokenizer(EMBEDDED_TOKENIZER), template)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        apply_template(load_tokenizer(EMBEDDED_TOKENIZER), str(tmp_path / "x.jinja"))
