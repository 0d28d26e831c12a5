"""Finding the answer in a reply, and comparing it with the right one."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s?/\s?\d+(?![\d.]))?|[-+\u2212]?\.\d+")
_LONGEST_NUMBER = 400
"""Characters of a number; a longer one is no answer."""
_LATEX = (
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\(?:text|mathrm|mathbf|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:left|right|displaystyle|[,;:! ])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
)
"""What mathematics is written with in LaTeX, and what it means."""
_LOOSE = re.compile(r"[\s.,;:!?\"'`*$]+")


def visible(text: str) -> str:
    """The reply without its thinking, ``<think>…</think>``; empty if the thinking has no end."""
    _, found, rest = text.rpartition("</think>")
    if found:
        return rest
    return "" if "<think>" in text else text


def numbers(text: str) -> list[Fraction]:
    """The numbers of a text, in their order: ``1,234``, ``-0.5``, ``3/4``."""
    found = []
    for match in _NUMBER.finditer(text):
        start = match.start()
        shown = match[0]
        if shown[0] in "-+\u2212" and start and (text[start - 1].isalnum() or text[start - 1] in ")]"):
            shown = shown[1:]  # 7-3 is a subtraction, not 7 and -3
        if (value := _number(shown)) is not None:
            found.append(value)
    return found


def last_number(text: str) -> Fraction | None:
    """The last number of a text, or None."""
    found = numbers(text)
    return found[-1] if found else None


def boxed(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` holds, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    first = start + len("\\boxed{")
    depth = 1
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[first:place].strip()
    return None


def tagged(text: str, tag: str = "answer") -> str | None:
    """What the last ``<tag>…</tag>`` holds, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def marked(text: str, mark: str = "####") -> str | None:
    """The rest of the line after the last mark, as GSM8K writes its answers, or None."""
    _, found, rest = text.rpartition(mark)
    return rest.strip().partition("\n")[0].strip() if found else None


def answer_of(text: str) -> str | None:
    r"""The answer of a reply: in ``<answer>`` tags, in ``\boxed{}``, after ``####``, or its last number."""
    shown = visible(text)
    for found in (tagged(shown), boxed(shown), marked(shown)):
        if found is not None:
            return found
    last = last_number(shown)
    return str(last) if last is not None else None


def without_latex(text: str) -> str:
    r"""The text without the LaTeX around numbers: ``\frac{1}{2}`` is ``1/2``, ``1{,}000`` is ``1,000``."""
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text


def same_answer(found: str | None, right: str) -> bool:
    """Whether an answer is the right one: equal as numbers, or as texts apart from case, spaces and punctuation."""
    if found is None:
        return False
    found, right = without_latex(found), without_latex(right)
    a, b = numbers(found), numbers(right)
    if b and len(b) == 1 and _is_number(right):
        return len(a) >= 1 and a[-1] == b[0]
    return _plain(found) == _plain(right)


def _is_number(text: str) -> bool:
    return not re.search(r"[^\W\d]", _NUMBER.sub("", text))


def _plain(text: str) -> str:
    return _LOOSE.sub(" ", text).strip().casefold()


def _number(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    plain = text.replace(",", "").replace("\u2212", "-").replace(" ", "")
    try:
        above, slash, below = plain.partition("/")
        return Fraction(above) / Fraction(below) if slash else Fraction(above)
    except (ValueError, ZeroDivisionError):
        return None
