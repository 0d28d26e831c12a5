"""Local benchmarks: rows of JSON with a prompt and an answer, checked before a model is loaded, and what an answer is.

A completion is right if what is extracted from it equals an accepted answer. Texts are compared in Unicode's form NFC,
without white space around them and with single spaces inside.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Literal, get_args

from surogate_core.plugin import UserError
from surogate_core.service.files import parsed_line

Match = Literal["exact", "number", "regex", "choice"]
MATCHES: tuple[Match, ...] = get_args(Match)

NUMBER = r"(?<![\d.])([-−]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+))"
"""The pattern of `number`: thousands may have commas, and a dollar sign may stand before the digits."""
LISTED = 5
"""Mistakes that are listed of a file."""
BETWEEN = "\n\n"
"""Between two solved examples of a text prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """Defaults of a benchmark file's rows, and how many are used."""

    match: Match | None = None
    """None: `choice` for rows with choices, `regex` with a pattern, `exact` for the others."""
    pattern: str | None = None
    prompt: str | None = None
    """Template of the prompt, with the row's keys in braces; None is ``{prompt}``, or the row's messages."""
    shots: int = 0
    """First rows of the file that are shown as solved examples and are not scored."""
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.match is not None and self.match not in MATCHES:
            raise UserError(f"match {self.match!r}: is not known. Fix: choose from {', '.join(MATCHES)}")
        if self.pattern is not None:
            pattern_of(self.pattern, "pattern")
            if self.match not in (None, "regex"):
                raise UserError(f"pattern: match {self.match} reads no pattern. Fix: match regex, or no pattern")
        if not isinstance(self.shots, int) or isinstance(self.shots, bool) or self.shots < 0:
            raise UserError(f"shots {self.shots!r}: must be a whole number of at least 0. Fix: shots 4")
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 1):
            raise UserError(f"limit {self.limit!r}: must be a whole number of at least 1. Fix: limit 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question."""

    name: str
    """``FILE:LINE``."""
    prompt: str | None
    messages: tuple[Mapping[str, Any], ...]
    """Instead of a prompt."""
    answers: tuple[str, ...]
    """Accepted texts, the first one shown in examples; of a choice the right one."""
    choices: tuple[str, ...]
    right: int
    """The number of the right choice."""
    match: Match
    pattern: str | None

    @property
    def shown(self) -> str:
        """Its answer as an example shows it."""
        return self.choices[self.right] if self.match == "choice" else self.answers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBenchmark:
    """The rows of a file."""

    name: str
    shots: tuple[Question, ...]
    rows: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a completion is right."""

    right: bool
    extracted: str | None
    """What was compared; None if the pattern finds nothing."""


# ------------------------------------------------------------------------------------ answers


def pattern_of(pattern: str, name: str) -> re.Pattern[str]:
    """The compiled pattern; raises `UserError`."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name}: {pattern!r} is not a regular expression: {error}. Fix: correct it.") from error


def judged(row: Question, text: str) -> Verdict:
    """Compare a completion with the row's answers."""
    extracted = _extracted(row, text)
    if extracted is None:
        return Verdict(right=False, extracted=None)
    accepted = {_extracted(row, answer) or _compared(row, answer) for answer in row.answers}
    return Verdict(right=extracted in accepted, extracted=extracted)


def _extracted(row: Question, text: str) -> str | None:
    if row.match == "exact":
        return _compared(row, text)
    if row.match == "number":
        found = _last(NUMBER, text)
        return None if found is None else _number(found)
    found = _last(row.pattern or "", text)
    return None if found is None else _compared(row, found)


def _compared(row: Question, text: str) -> str:
    """The text as it is compared; a pattern that ignores case makes the comparison ignore it."""
    folds = row.pattern is not None and re.compile(row.pattern).flags & re.IGNORECASE
    return plain_text(text).casefold() if folds else plain_text(text)


def _last(pattern: str, text: str) -> str | None:
    """The first group that took part in the last match, or the whole match."""
    last = next(iter(deque(re.finditer(pattern, text), maxlen=1)), None)
    if last is None:
        return None
    return next((group for group in last.groups() if group is not None), last.group())


def _number(text: str) -> str:
    """One text for each value: ``1,000.50`` is ``1000.5``."""
    value = Decimal(re.sub(r"[$,]", "", text).replace("−", "-"))
    return format(value.normalize(Context(prec=len(text))), "f") if value else "0"


def plain_text(text: str) -> str:
    """Unicode's form NFC, no white space around the text, single spaces inside."""
    return " ".join(unicodedata.normalize("NFC", text).split())


# --------------------------------------------------------------------------------------- rows


def read_benchmarks(files: Sequence[str], options: BenchmarkOptions) -> list[LocalBenchmark]:
    """The benchmarks of files; raises `UserError` with the mistakes of the first file that has some."""
    stems = [Path(file).stem for file in files]
    return [
        _task(file, stem if stems.count(stem) == 1 else file, options) for file, stem in zip(files, stems, strict=True)
    ]


def _task(file: str, name: str, options: BenchmarkOptions) -> LocalBenchmark:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UserError(f"--tasks {file}: cannot be read: {reason}. Fix: name a file of JSON lines.") from error
    rows, wrong = [], []
    for place, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(f"{file}:{place}", line, options))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        more = f"\nand {len(wrong) - LISTED:,} more" if len(wrong) > LISTED else ""
        raise UserError("\n".join(wrong[:LISTED]) + more)
    if len(rows) <= options.shots:
        has = f"has {len(rows)} rows, and the first {options.shots} are examples" if rows else "has no row"
        fix = "fewer --shots" if rows else 'one object a line, such as {"prompt": "…", "answer": "…"}'
        raise UserError(f"--tasks {file}: {has}. Fix: {fix}")
    end = None if options.limit is None else options.shots + options.limit
    return LocalBenchmark(name=name, shots=tuple(rows[: options.shots]), rows=tuple(rows[options.shots : end]))


def _row(name: str, line: str, options: BenchmarkOptions) -> Question:
    row = parsed_line(line, name)
    if not isinstance(row, dict):
        raise UserError(f'{name}: is no object. Fix: {{"prompt": "…", "answer": "…"}}')
    prompt, messages = _prompt(name, row, options.prompt)
    pattern = row.get("pattern", options.pattern)
    usual = "choice" if "choices" in row else "exact" if pattern is None else "regex"
    match = row.get("match", options.match or usual)
    if match not in MATCHES:
        raise UserError(f"{name}: `match`: {match!r} is not known. Fix: choose from {', '.join(MATCHES)}")
    if match == "regex":
        if not isinstance(pattern, str):
            raise UserError(
                f'{name}: match regex needs a `pattern`. Fix: "pattern": "answer is (\\\\w+)", or --pattern'
            )
        pattern_of(pattern, f"{name}: `pattern`")
    elif "pattern" in row:
        raise UserError(f'{name}: `pattern` is for match regex, not for {match}. Fix: "match": "regex"')
    choices, right = _choices(name, row, match)
    return Question(
        name=name,
        prompt=prompt,
        messages=messages,
        answers=() if match == "choice" else _answers(name, row, match),
        choices=choices,
        right=right,
        match=match,
        pattern=pattern if match == "regex" else None,
    )


def _prompt(
    name: str, row: Mapping[str, Any], template: str | None
) -> tuple[str | None, tuple[Mapping[str, Any], ...]]:
    if template is not None:
        try:
            text = template.format_map(
                {key: value if isinstance(value, str) else str(value) for key, value in row.items()}
            )
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            what = f"the row has no key {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{name}: --prompt {template!r}: {what}. Fix: use keys that every row has.") from error
    elif "messages" in row:
        if "prompt" in row:
            raise UserError(f'{name}: has both "prompt" and "messages". Fix: keep one.')
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages) or not messages:
            raise UserError(f'{name}: `messages` is no list of messages. Fix: [{{"role": "user", "content": "…"}}]')
        return None, tuple(messages)
    elif isinstance(row.get("prompt"), str):
        text = row["prompt"]
    else:
        keys = ", ".join(map(repr, row)) or "none"
        raise UserError(
            f'{name}: has neither a text "prompt" nor a list "messages"; its keys: {keys}. Fix: add one, or '
            f"--prompt 'Question: {{question}}'"
        )
    if not text.strip():
        raise UserError(f"{name}: the prompt is empty. Fix: give the text to continue.")
    return text, ()


def _choices(name: str, row: Mapping[str, Any], match: Match) -> tuple[tuple[str, ...], int]:
    if match != "choice":
        return (), -1
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise UserError(f'{name}: `choices` is no list of two texts or more. Fix: "choices": ["Paris", "Rome"]')
    if isinstance(answer, str) and choices.count(answer) == 1:
        return tuple(choices), choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        end = len(choices) - 1
        raise UserError(
            f"{name}: `answer`: {answer!r} is no choice. Fix: the number of the right one, from 0 to {end}, or its text"
        )
    return tuple(choices), answer


def _answers(name: str, row: Mapping[str, Any], match: Match) -> tuple[str, ...]:
    if "answer" not in row:
        raise UserError(f'{name}: has no `answer`. Fix: "answer": "42", or a list of accepted texts')
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    found = []
    for one in given:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise UserError(f'{name}: `answer`: {one!r} is no text or number. Fix: "answer": "42"')
        found.append(str(one))
        if match == "number" and _last(NUMBER, found[-1]) is None:
            raise UserError(f'{name}: `answer`: {one!r} has no number. Fix: "answer": "42", or another match')
    if not all(text.strip() for text in found) or not found:
        raise UserError(f'{name}: `answer` is empty. Fix: "answer": "42"')
    return tuple(found)
