"""Grammars of completions: what they allow, where they end, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from surogate_core.bundles import Constraint
from surogate_core.errors import UserError
from surogate_core.generate.constraints import MOST_SCHEMA_BYTES, Grammars, grammars_of
from surogate_testing.chat_templates import byte_tokenizer, templated

TOKENIZER = byte_tokenizer()
END, OTHER_END = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
SIZE = len(TOKENIZER)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def made() -> Grammars:
    return Grammars(TOKENIZER, frozenset({END, OTHER_END, 10**9}), SIZE + 5)


def allowed(constraint: Constraint) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def written(constraint: Constraint, text: str) -> set[int]:
    """What may follow a text, each of whose tokens is allowed."""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert token in allowed(constraint), text
        constraint.take(token)
    return allowed(constraint)


def test_the_end_is_allowed_exactly_where_the_text_is_whole(made: Grammars) -> None:
    constraint = made.of_schema(SCHEMA).begin()
    before = '{"n": 12'
    for place in range(1, len(before) + 1):
        fresh = made.of_schema(SCHEMA).begin()
        assert not {END, OTHER_END} & written(fresh, before[:place])
    assert written(constraint, before + "}") == {END, OTHER_END}


def test_completions_of_a_grammar_do_not_share_their_state(made: Grammars) -> None:
    grammar = made.of_schema(SCHEMA)
    first, second = grammar.begin(), grammar.begin()
    written(first, "{")
    assert allowed(second) == allowed(grammar.begin())
    assert allowed(first) != allowed(second)


def test_white_space_has_an_end(made: Grammars) -> None:
    constraint = made.of_schema(SCHEMA).begin()
    (blank,) = TOKENIZER.encode(" ", add_special_tokens=False)
    assert blank not in written(constraint, "{" + " " * 20)


def test_special_tokens_are_no_text_but_tags_may_be_tokens(made: Grammars) -> None:
    assert not allowed(made.of_schema({"type": "string"}).begin()) & {END, OTHER_END}
    tokenizer, end = templated("mistral")
    mistral = Grammars(tokenizer, frozenset({tokenizer.convert_tokens_to_ids(end)}), len(tokenizer))
    tag = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert (mistral.tag("[TOOL_CALLS]"), mistral.tag("<call>")) == (f"<[{tag}]>", '"<call>"')
    assert allowed(mistral.of_rules(f'start: {mistral.tag("[TOOL_CALLS]")} "x"').begin()) == {tag}


def test_a_grammar_that_becomes_too_complex_ends_and_says_why(made: Grammars) -> None:
    names = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(700)]
    grammar = made.of_schema({"anyOf": names})
    constraint = grammar.begin()
    draw = np.random.default_rng(0)
    for _ in range(60):
        token = int(draw.choice(sorted(allowed(constraint))))
        if token in (END, OTHER_END):
            break
        constraint.take(token)
    assert grammar.failure is not None
    assert "\n" not in grammar.failure
    assert allowed(constraint) == {END, OTHER_END}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objct"}, "Invalid type: objct."),
        ({"not": {}}, "not"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "greater than maximum"),
        ({"title": "é" * MOST_SCHEMA_BYTES}, "too long: at most 65,536 bytes"),
        (json.loads('{"items":' * 65 + "{}" + "}" * 65), "nested too deeply: at most 64"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf 999983: has too many digits. Fix: at most 10,000"),
        ({"items": {"multipleOf": 1e-7}}, "multipleOf 1e-07: has too many digits"),
        ({"multipleOf": 10**300}, "has too many digits"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    ],
)
def test_schemas_that_are_refused(made: Grammars, schema: Any, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        made.of_schema(schema)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_models_that_no_grammar_can_hold() -> None:
    with pytest.raises(UserError, match="no end token"):
        Grammars(TOKENIZER, frozenset(), SIZE)
    assert grammars_of(TOKENIZER, frozenset({END}), SIZE) is grammars_of(TOKENIZER, frozenset({END}), SIZE)


def test_schemas_in_rules_are_checked_too(made: Grammars) -> None:
    schema = {"type": "integer", "multipleOf": 999_983}
    with pytest.raises(UserError, match="multipleOf 999983"):
        made.of_rules(f"start: %json {json.dumps(schema)}", [schema])
    assert written(made.of_schema({"type": "integer", "multipleOf": 0.25}).begin(), "1")
