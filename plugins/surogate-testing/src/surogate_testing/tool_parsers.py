"""Checks of tool parsers, on texts that their own grammars allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from surogate_core.plugin import bundles
from surogate_core.service.inference import CallReader, Grammars
from surogate_testing.chat_templates import byte_tokenizer
from surogate_testing.check import ensure

FUNCTIONS: tuple[Mapping[str, Any], ...] = (
    {
        "name": "get_order",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["a b", '"<']}},
            "required": ["number", "kind"],
            "additionalProperties": False,
        },
    },
    {"name": "stop"},
)
LENGTHS = (1, 3, 1000)
"""Characters of the pieces that a completion is fed in."""
TEXTS = (
    "Hello",
    " Two lines.\n\nAnd {braces}, [brackets] <tags> and </tags>.\n",
    '{"n": [1, 2]}',
    '{"name": "get_order"',
    "",
)
"""Completions that are no calls."""


def _parts(spec: bundles.ToolParserSpec, text: str, length: int) -> list[bundles.ToolPart]:
    parser = spec.open(FUNCTIONS)
    found: list[bundles.ToolPart] = []
    for start in range(0, len(text), length):
        found += parser.feed(text[start : start + length])
    return [*found, *parser.close()]


def _read(spec: bundles.ToolParserSpec, text: str, length: int) -> CallReader:
    reader = CallReader(spec, FUNCTIONS)
    for start in range(0, len(text), length):
        reader.feed(text[start : start + length])
    reader.close()
    return reader


def written(spec: bundles.ToolParserSpec, *, several: bool, seed: int) -> str:
    """A random text that the grammar of the form allows."""
    tokenizer = byte_tokenizer()
    end = int(tokenizer.eos_token_id)
    grammars = Grammars(tokenizer, frozenset({end}), len(tokenizer))
    constraint = grammars.of_rules(spec.grammar(FUNCTIONS, several, grammars.tag)).begin()
    draw, ids = np.random.default_rng(seed), list[int]()
    while True:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little"))
        ensure(len(ids) < 4000, "a text that the grammar allows has no end")
        token = int(draw.choice(allowed))
        if token == end or (end in allowed and len(ids) > 400):
            return str(tokenizer.decode(ids))
        ids.append(token)
        constraint.take(token)


def reads_what_its_grammar_allows(spec: bundles.ToolParserSpec) -> None:
    """Every text of the grammar is calls of the functions and nothing else, however it is cut into pieces."""
    for seed in range(4):
        for several in (False, True):
            text = written(spec, several=several, seed=seed)
            for length in LENGTHS:
                reader = _read(spec, text, length)
                ensure(bool(reader.calls) and not reader.content, f"{text!r} is read as content {reader.content!r}")
                ensure(several or len(reader.calls) == 1, f"{text!r} has {len(reader.calls)} calls")
                for call in reader.calls:
                    arguments = json.loads(call.arguments)
                    if call.name == "stop":
                        ensure(arguments == {}, f"{text!r} has the arguments {call.arguments}")
                        continue
                    ensure(1 <= arguments.get("number", 0) <= 99, f"{text!r} has the arguments {call.arguments}")
                    ensure(arguments.get("kind") in ("a b", '"<'), f"{text!r} has the arguments {call.arguments}")


def leaves_other_texts_as_they_are(spec: bundles.ToolParserSpec) -> None:
    """A completion without a call is content, to the last character; so is a call that is cut or of no function."""
    whole = written(spec, several=False, seed=0)
    cut = [whole[:end] for end in range(1, max(2, len(whole) - 20), 7)]
    other = whole.replace("get_order", "no_order").replace("stop", "go")
    for text in (*TEXTS, *cut, other):
        for length in LENGTHS:
            reader = _read(spec, text, length)
            ensure(reader.content == text and not reader.calls, f"{text!r} is read as {reader.content!r}")


def gives_every_character_once(spec: bundles.ToolParserSpec) -> None:
    """The texts of the parts are the completion."""
    whole = written(spec, several=True, seed=1)
    for text in (*TEXTS, whole, f"Well.\n{whole}", whole[: len(whole) // 2]):
        for length in LENGTHS:
            found = "".join(part.text for part in _parts(spec, text, length))
            ensure(found == text, f"the parts of {text!r} are {found!r}")


def _order(parts: Sequence[bundles.ToolPart]) -> str:
    return "".join({"content": "c", "name": "n", "arguments": "a", "end": "e", "broken": "b"}[p.kind] for p in parts)


def begins_a_call_with_its_name(spec: bundles.ToolParserSpec) -> None:
    """Arguments follow a name, and an end follows them."""
    for length in LENGTHS:
        kinds = _order(_parts(spec, written(spec, several=True, seed=2), length)).replace("c", "")
        calls = [call for call in kinds.split("e") if call]
        ensure(all(call[0] == "n" and set(call[1:]) == {"a"} for call in calls), f"the parts are {kinds}")


CHECKS = (
    reads_what_its_grammar_allows,
    leaves_other_texts_as_they_are,
    gives_every_character_once,
    begins_a_call_with_its_name,
)
