"""Completions that are held to a grammar: JSON schemas and rules, by llguidance.

A grammar is compiled once for each request, by the thread that prepares it. Each of its completions has a state, which
gives the mask of the next token. The library's limits bound the work of each: it gives up instead of going on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from surogate_core.bundles import Constraint
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MOST_SCHEMA_BYTES = 64 << 10
"""Largest grammar, as JSON."""
DEEPEST = 64
"""Objects and lists inside each other in a schema."""
MOST_MULTIPLE = 10_000
"""Largest `multipleOf`, and most of them in 1: the automaton of remainders has as many states, and the library limits
their number only when it is made.
"""
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
"""What a grammar may cost; see `llguidance.LLParserLimits`. A step of a token takes some milliseconds at most."""
WHITE_SPACE = {"whitespace_pattern": r"[ \n\t]{0,20}"}
"""White space between the parts of JSON. Without a limit a model may write nothing else."""


class MatcherGrammar:
    """A `Grammar` that a matcher holds a completion to."""

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int], size: int):
        self._matcher, self._size = matcher, size
        bits_V = np.zeros(-(-size // 8) * 8, np.uint8)
        bits_V[[token for token in stop_ids if token < size]] = 1
        self.stops = np.packbits(bits_V, bitorder="little").tobytes()
        """The mask that allows the end alone."""
        self.failure: str | None = None

    def begin(self) -> Constraint:
        """See `Grammar`."""
        return _Matching(self, self._matcher.deep_copy())

    def mask_of(self, matcher: LLMatcher) -> bytes:
        """The mask of a state; the end where there is none, which `failure` says."""
        found: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            self.failure = self.failure or reason_of(matcher)
            return self.stops
        found = found[: len(self.stops)]
        if not any(found):
            self.failure = self.failure or "the tokenizer cannot write what it asks for."
            return self.stops
        return found


class _Matching:
    def __init__(self, grammar: MatcherGrammar, matcher: LLMatcher):
        self._grammar, self._matcher = grammar, matcher

    def mask(self) -> bytes:
        return self._grammar.mask_of(self._matcher)

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(token) and self._grammar.failure is None:
            self._grammar.failure = reason_of(self._matcher)


class Grammars:
    """Makes the grammars for a tokenizer and its stop tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], size: int):
        """`size`: tokens of the model's vocabulary. Raises `UserError` for a tokenizer whose tokens are not known."""
        from llguidance import LLTokenizer

        if not tokenizer.is_fast:
            raise UserError("the tokenizer has no tokenizer.json, which constrained answers need.")
        if not (stops := sorted(token for token in stop_ids if token < size)):
            raise UserError("the model has no end token, which constrained answers need.")
        backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        self._special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._stop_ids, self._size = frozenset(stops), size
        most = max(size, 1 + max(tokenizer.get_vocab().values()))
        self._tokenizer: LLTokenizer = LLTokenizer(backend.to_str(), n_vocab=most, eos_token=stops)

    def of_schema(self, schema: Mapping[str, Any]) -> MatcherGrammar:
        """JSON that a schema describes; raises `UserError` with the reason."""
        from llguidance import LLMatcher

        _check_size(schema)
        own = {key: value for key, value in schema.items() if key != "x-guidance"}
        return self._of(LLMatcher.grammar_from_json_schema(own, overrides=WHITE_SPACE))  # type: ignore[arg-type]

    def of_rules(self, rules: str, schemas: Sequence[Mapping[str, Any]] = ()) -> MatcherGrammar:
        """Texts that rules describe, in llguidance's dialect of Lark; raises `UserError` with the reason.

        `schemas`: those that clients wrote into the rules.
        """
        from llguidance import LLMatcher

        for schema in schemas:
            _check_size(schema)
        return self._of(LLMatcher.grammar_from_lark(rules))

    def tag(self, text: str) -> str:
        """See `bundles.Tag`."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text, ensure_ascii=False)

    def _of(self, grammar: str) -> MatcherGrammar:
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar.encode()) > 2 * MOST_SCHEMA_BYTES:
            raise UserError(f"is too long: at most {MOST_SCHEMA_BYTES:,} bytes.")
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(reason_of(matcher))
        found = MatcherGrammar(matcher, self._stop_ids, self._size)
        found.mask_of(matcher)  # most of the work is that for the first token
        if found.failure is not None:
            raise UserError(found.failure)
        return found


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher gave up, in one line."""
    lines = [line.strip() for line in str(matcher.get_error()).splitlines() if line.strip(" ^")]
    text = re.sub(r"\s+", " ", " ".join(lines))[:300].rstrip(".")
    return f"{text or 'it is too complex'}."


def _check_size(schema: Any) -> None:
    """Raises `UserError` for a schema that is too long or too deep."""
    if len(json.dumps(schema, ensure_ascii=False).encode()) > MOST_SCHEMA_BYTES:
        raise UserError(f"is too long: at most {MOST_SCHEMA_BYTES:,} bytes.")
    level = [schema]
    for _ in range(DEEPEST):
        for one in level:
            multiple = one.get("multipleOf") if isinstance(one, Mapping) else None
            if isinstance(multiple, int | float) and not _is_cheap(multiple):
                raise UserError(f"multipleOf {multiple}: has too many digits. Fix: at most {MOST_MULTIPLE:,}.")
        level = [inner for one in level for inner in (one.values() if isinstance(one, Mapping) else one)]
        level = [one for one in level if isinstance(one, Mapping | list)]
        if not level:
            return
    raise UserError(f"is nested too deeply: at most {DEEPEST} objects and lists inside each other.")


def _is_cheap(multiple: float) -> bool:
    value = Decimal(str(multiple))
    if not value.is_finite() or not value:
        return True  # the library says what is wrong
    _, digits, exponent = value.normalize().as_tuple()
    scale = int(exponent)
    if abs(scale) > len(str(MOST_MULTIPLE)):
        return False
    coefficient = int("".join(map(str, digits)))
    return coefficient * 10 ** max(scale, 0) <= MOST_MULTIPLE and 10 ** max(-scale, 0) <= MOST_MULTIPLE


_LOCK = Lock()
_MADE: WeakKeyDictionary[Any, dict[tuple[frozenset[int], int], Grammars]] = WeakKeyDictionary()


def grammars_of(tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], size: int) -> Grammars:
    """The grammars of a tokenizer; the first call reads its vocabulary, about a second for a large one."""
    with _LOCK:
        made = _MADE.setdefault(tokenizer, {})
        if (stop_ids, size) not in made:
            made[stop_ids, size] = Grammars(tokenizer, stop_ids, size)
        return made[stop_ids, size]
