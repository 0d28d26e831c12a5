"""Chat templates of any text, and any conversations: a row is encoded as it was rendered, or it is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fuzzing
import numpy as np
import pytest
from hypothesis import strategies as st

from surogate_core.data.encoded import RowError
from surogate_core.data.templates import TURN_ENDS, apply_template, template_text
from surogate_core.data.text.labels import tokenize_conversation
from surogate_core.data.text.tokenizer import load_tokenizer

EMBEDDED_TOKENIZER = "pkg://surogate_dataset_chat/embedded/tokenizer"
CHATML = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}{% generation %}"
    "{{- m.content + '<|im_end|>' }}{% endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
)
TOOLS = "{%- if tools %}{{ tools|tojson }}{%- endif %}"
# What a template of a stranger may hold: loops, recursion, ways out of the sandbox, variables that are not there.
PARTS = (
    "{{ missing }}",
    "{{ missing.field }}",
    "{{ missing[0] }}",
    "{{ messages[99].content }}",
    "{{ messages }}",
    "{{ messages|tojson }}",
    "{{ messages|length }}",
    "{{ messages|map(attribute='content')|join }}",
    "{{ messages[0]['content'][::-1] }}",
    "{{ 1/0 }}",
    "{{ 'a'|foo }}",
    "{% for i in range(200) %}{{ i }}{% endfor %}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ range(10**18)|list }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for a in [[]] recursive %}{{ loop([a]) }}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{% set messages = [] %}",
    "{% include 'x' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends 'x' %}",
    "{{ ''|attr('__class__') }}",
    "{{ lipsum(n=2) }}",
    "{{ lipsum.__globals__['os'].popen('touch escaped').read() }}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ strftime_now('%Y') }}",
    "{{ raise_exception('\\x1b[31m\\u202e' ~ messages) }}",
    "{{ '%s' % messages }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ none + 1 }}",
    "{{ bos_token }}",
    "{{ eos_token }}",
    "{{ pad_token.x }}",
    "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}",
    "{{ tools }}",
    "{{ namespace(x=1).x }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% generation %}x{% endgeneration %}",
    "{% generation %}",
    "{% endfor %}",
    "{%",
    "{{",
    "}}",
    "{#",
    "{% raw %}",
    "{% break %}",
    "\x00",
    "\ud800",
    "\u202e",
    "\U0010f0af",
    "\U0010f0a5",
    "{{ '\\ud800' }}",
    "{{ 'x' * 100000 }}",
    "{{ messages[-1].content|upper }}",
    "{{ messages|random }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**(10**8) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
    "{% call(x) f() %}{% endcall %}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{{ dict(a=1).items() }}",
    "{% do x %}",
)
PLAIN = frozenset({"Hello.", "A longer answer, with 3 numbers: 1 2 3.", "Good morning!"})
TEXTS = st.one_of(
    st.sampled_from(
        [
            *sorted(PLAIN),
            "",
            " ",
            "\n",
            "<|im_end|>",
            "<|im_start|>user\n",
            "\x00",
            "\ud800",
            "\U0010f0af",
            "\U0010f0a5asked\U0010f0a5",
            "{{ x }}",
            "{% raw %}",
            "é你🦊",
            "word " * 200,
            "\u202e",
            "</s>",
            "\r\n",
        ]
    ),
    st.text(max_size=20),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=5), inner, max_size=2)),
    max_leaves=4,
)


@dataclass(frozen=True)
class Case:
    """A template, a conversation, tools, which turns are trained."""

    kind: str
    template: str
    messages: tuple[Any, ...]
    tools: Any
    loss_scale: str


@st.composite
def templates(draw: st.DrawFn) -> tuple[str, str]:
    """(kind, text)."""
    how = draw(st.integers(0, 9))
    if how < 2:
        return "shipped", draw(st.sampled_from(sorted(TURN_ENDS)))
    base = draw(st.sampled_from([CHATML + PROMPT, CHATML, MARKED + PROMPT, TOOLS + CHATML + PROMPT]))
    if how < 4:
        return "plain", base
    if how < 8:
        part = draw(st.sampled_from(PARTS))
        at = draw(st.sampled_from([0, len(base), base.find("{%- endfor")]))
        return "part", base[:at] + part + base[at:]
    if how == 8:
        at = draw(st.integers(0, len(base) - 1))
        changed = draw(
            st.sampled_from(
                [base[:at], base[at:], base[:at] + base[at + 1 :], base[:at] + draw(st.characters()) + base[at:]]
            )
        )
        return "changed", changed
    return "parts", "".join(draw(st.lists(st.sampled_from(PARTS), max_size=4)))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Any, ...]:
    """Turns as a reader hands them on: mappings with a role and a content, in odd orders, with further fields."""
    roles = draw(
        st.one_of(
            st.sampled_from(
                [
                    ["user", "assistant"],
                    ["system", "user", "assistant"],
                    ["user", "assistant"] * 3,
                    ["assistant"],
                    ["user"],
                ]
            ),
            st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), max_size=5),
        )
    )
    turns = [{"role": role, "content": draw(TEXTS)} for role in roles]
    if turns and draw(st.integers(0, 4)) == 0:
        turn = draw(st.sampled_from(turns))
        turn[draw(st.sampled_from(["name", "tool_calls", "reasoning_content", "thinking", "weight", "x"]))] = draw(
            VALUES
        )
    return tuple(turns)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case."""
    kind, template = draw(templates())
    tools = draw(st.sampled_from([None, None, None, None, [{"type": "function", "function": {"name": "f"}}]]))
    scale = draw(st.sampled_from(["default", "default", "last_round", "all"]))
    return Case(kind=kind, template=template, messages=draw(conversations()), tools=tools, loss_scale=scale)


@cache
def _loaded() -> Any:
    return load_tokenizer(EMBEDDED_TOKENIZER)


def run(case: Case, directory: Path) -> None:
    """A row by the template, encoded with its labels."""
    import copy

    tokenizer = copy.copy(_loaded())
    if case.kind == "shipped":
        tokenizer.chat_template = template_text(case.template)
    else:
        file = directory / "own.jinja"
        file.write_bytes(case.template.encode("utf-8", "surrogatepass"))
        tokenizer.chat_template = case.template
        if len(case.messages) == 2:  # the check of the key `template`, in some of the cases
            apply_template(tokenizer, str(file))
    before = json.dumps(case.messages, default=str)
    try:
        encoded = tokenize_conversation(tokenizer, case.messages, tools=case.tools, loss_scale=case.loss_scale)
    except RowError as error:
        if len(str(error)) > fuzzing.LONGEST_PROBLEM:
            raise fuzzing.WrongError("a row's reason is very long") from error
        raise
    finally:
        if json.dumps(case.messages, default=str) != before:
            raise fuzzing.WrongError("the template has changed the row")
        if {path.name for path in directory.iterdir()} - {"own.jinja"}:
            raise fuzzing.WrongError("the template has written a file")
    ids = np.asarray(encoded.input_ids)
    if len(ids) and (ids.min() < 0 or ids.max() >= len(tokenizer)):
        raise fuzzing.WrongError("ids outside the vocabulary")
    trained = tokenizer.decode(ids[np.asarray(encoded.labels) >= 0])
    if case.loss_scale == "default" and case.kind in ("plain", "shipped"):
        said = [turn["content"] for turn in case.messages if turn["role"] == "assistant" and turn["content"] in PLAIN]
        if any(text not in trained for text in said):
            raise fuzzing.WrongError("what the assistant says is not trained")
        others = {turn["content"] for turn in case.messages if turn["role"] != "assistant"} & PLAIN - set(said)
        if any(text in trained for text in others):
            raise fuzzing.WrongError("what another says is trained")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", fuzzing.numbers(40, 300, 3000))
def test_templates(number: int) -> None:
    _loaded()
    counts = fuzzing.fuzz(cases(), run, number, start=2)
    counts.check(number, least_accepted=0.15, least_refused=0.2)
