"""Where the computation of a step waits: the gaps between its kernels, and what ran in them.

Kernels that move or add what GPUs send each other run beside the computation. A gap is a time in which only those run,
or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

BESIDE = ("memcpy", "memset", "add_tree_sum", "cudafunctor_add<float>, std::array<char*, 3ul>", "fillfunctor", "nccl")
"""Parts of the names of kernels that run beside the computation."""
SHORTEST = 5.0
"""Microseconds of a gap that counts: one kernel after another takes less."""
SHOWN = 20
"""Kinds of gaps that are kept, those with the longest time first."""

Span = tuple[str, float, float]
"""(name of a kernel, its begin, its end), in microseconds."""


def is_beside(name: str) -> bool:
    """Whether a kernel runs beside the computation."""
    return any(part in name.lower() for part in BESIDE)


def gaps(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """(the kernel before, the one after) of every gap in the computation."""
    computing = sorted((s for s in spans if not is_beside(s[0])), key=lambda span: span[1])
    found = []
    last = computing[0] if computing else ("", 0.0, 0.0)
    for span in computing[1:]:
        if span[1] - last[2] > SHORTEST:
            found.append((last, span))
        if span[2] > last[2]:
            last = span
    return found


def waits(spans: Sequence[Span], steps: int) -> list[dict[str, Any]]:
    """The gaps of a step by the kernels around them: milliseconds, number, and milliseconds of what ran in them."""
    beside = sorted((s for s in spans if is_beside(s[0])), key=lambda span: span[1])
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    filled: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    first = 0
    for before, after in gaps(spans):
        key, start, stop = (before[0][:60], after[0][:60]), before[2], after[1]
        times[key].append(stop - start)
        # A kernel that ended before this gap may not be in a later one.
        while first < len(beside) and beside[first][2] <= start:
            first += 1
        for name, begin, end in beside[first:]:
            if begin >= stop:
                break
            filled[key][name[:60]] += max(0.0, min(end, stop) - max(begin, start))
    order = sorted(times, key=lambda key: -sum(times[key]))
    return [
        {
            "before": key[0],
            "after": key[1],
            "milliseconds": round(sum(times[key]) / steps / 1e3, 3),
            "gaps": len(times[key]) / steps,
            "beside": {name: round(us / steps / 1e3, 3) for name, us in filled[key].items() if us},
        }
        for key in order[:SHOWN]
    ]
