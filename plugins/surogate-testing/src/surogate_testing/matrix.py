"""Checks which installed plugins can be combined: every pair of choices trains a step together, or is refused by name.

The choices are model family × recipe × optimizer × offloader × mode. All combinations would be too many; a design
covers every pair of choices (the pairwise design of software testing). A refused combination covers nothing: the pair
that causes the refusal is found, and the other pairs are tried in other combinations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from surogate_core.plugin import SurogateError, load_run_config
from surogate_core.service.plugins import Registry
from surogate_core.service.setup import build_engine, resolve_device, resolve_lora, resolve_model, resolve_recipe
from surogate_testing import tiny

Combination = Mapping[str, str]
"""Factor → the chosen value."""

Pair = frozenset[tuple[str, str]]
"""Two (factor, value)."""

MODES: Mapping[str, Sequence[str]] = {
    "full": ("lora=false",),
    "full-kept": ("lora=false", "recompute=false"),
    "lora": ("lora=true", "lora_rank=4"),
    "lora-kept": ("lora=true", "lora_rank=4", "recompute=false"),
    "pt": ("task=pt", "lora=false"),
}
"""Mode → its overrides; ``kept``: residuals are kept instead of computed again."""

_COMMON = (
    f"sequence_len={tiny.TOKENS}", "per_device_train_batch_size=1", "from_scratch=true", "device=cpu",
    "model.preset=tiny", "compiler=fx",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a combination."""

    combination: Combination
    result: Literal["trained", "refused", "crashed"]
    text: str
    """The loss, the reason or the error."""

    def __str__(self) -> str:
        return f"{self.result:<8} {' '.join(self.combination.values())}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The results of a design."""

    outcomes: Sequence[Outcome]
    trained: frozenset[Pair]
    """Pairs that were trained together."""
    refused: frozenset[Pair]
    """Pairs that are refused themselves."""
    missed: frozenset[Pair]
    """Pairs that were neither: they crashed, or the refusal has no pair as its cause."""

    def count(self, result: str) -> int:
        """Number of combinations with this outcome."""
        return sum(o.result == result for o in self.outcomes)

    def __str__(self) -> str:
        results = ", ".join(f"{self.count(r)} {r}" for r in ("trained", "refused", "crashed"))
        pairs = len(self.trained) + len(self.refused) + len(self.missed)
        return (
            f"{len(self.outcomes)} combinations: {results}\n"
            f"{pairs} pairs of choices: {len(self.trained)} trained together, {len(self.refused)} refused by name, "
            f"{len(self.missed)} neither"
        )


def factors_of(registry: Registry) -> dict[str, list[str]]:
    """Factor → its values: every installed bundle; of model families those with a preset ``tiny``."""
    families = [name for name, family in registry.all("model").items() if "tiny" in family.presets]
    kinds = {kind: registry.names(kind) for kind in ("recipe", "optimizer", "offload")}
    return {"model": families, **kinds, "mode": list(MODES)}


def run_matrix(registry: Registry, seen: Callable[[Outcome], None] = lambda outcome: None) -> Matrix:
    """Try a design over everything installed, on a CPU; `seen` is shown each outcome."""

    def attempt(combination: Combination) -> Outcome:
        outcome = try_combination(combination, registry)
        seen(outcome)
        return outcome

    return cover(factors_of(registry), attempt, lambda combination: refusal(combination, registry) is not None)


def cover(
    factors: Mapping[str, Sequence[str]],
    attempt: Callable[[Combination], Outcome],
    refuses: Callable[[Combination], bool],
) -> Matrix:
    """Combinations until every pair of values was in one that trained, or is known to be refused.

    `refuses` answers without training. The design is greedy and deterministic: each combination begins with the first
    open pair and takes from every other factor the value that adds the most open pairs. A pair is the cause of a
    refusal if it is also refused in the first combination that trained.
    """
    choices = [(factor, value) for factor, values in factors.items() for value in values]
    open_pairs = {frozenset(p): None for p in combinations(choices, 2) if p[0][0] != p[1][0]}
    put_off: set[Pair] = set()
    trained: set[Pair] = set()
    refused: set[Pair] = set()
    missed: set[Pair] = set()
    tried: dict[tuple[str, ...], Outcome] = {}
    baseline: Combination = {}
    while open_pairs:
        first = next(iter(open_pairs))
        combination = _extended(first, factors, open_pairs, refused)
        if combination is None:
            # Every completion contains a refused pair, perhaps because one of its values is always refused.
            del open_pairs[first]
            (refused if refuses({**baseline, **dict(first)}) else missed).add(first)
            continue
        values = tuple(combination.values())
        outcome = tried[values] = tried.get(values) or attempt(combination)
        pairs = set(_pairs(combination.items()))
        if outcome.result == "refused" and not baseline and first not in put_off:
            # Nothing has trained yet to compare with.
            put_off.add(first)
            open_pairs[first] = open_pairs.pop(first)
            continue
        if outcome.result == "refused":
            guilty = {p for p in pairs & open_pairs.keys() if baseline and refuses({**baseline, **dict(p)})}
            refused |= guilty
            missed |= set() if guilty else {first}
            done = guilty or {first}
        else:
            baseline = baseline or (combination if outcome.result == "trained" else {})
            done = pairs & open_pairs.keys()
            trained |= done if outcome.result == "trained" else set()
            missed |= done if outcome.result == "crashed" else set()
        for pair in done:
            del open_pairs[pair]
    return Matrix(
        outcomes=tuple(tried.values()),
        trained=frozenset(trained),
        refused=frozenset(refused),
        missed=frozenset(missed - trained),
    )


def _extended(
    first: Pair, factors: Mapping[str, Sequence[str]], open_pairs: Mapping[Pair, None], refused: Iterable[Pair]
) -> dict[str, str] | None:
    chosen, barred = dict(first), set(refused)
    for factor, values in factors.items():
        if factor in chosen:
            continue
        best = None
        for value in values:
            added = {frozenset({(factor, value), other}) for other in chosen.items()}
            gain = len(added & open_pairs.keys())
            if not added & barred and (best is None or gain > best[0]):
                best = (gain, value)
        if best is None:
            return None
        chosen[factor] = best[1]
    return {factor: chosen[factor] for factor in factors}


def _pairs(items: Iterable[tuple[str, str]]) -> list[Pair]:
    return [frozenset(pair) for pair in combinations(items, 2)]


# ----------------------------------------------------------------------------- one combination


def refusal(combination: Combination, registry: Registry) -> SurogateError | None:
    """The reason why the combination is refused before anything is loaded, or None."""
    try:
        _prepared(combination, registry)
    except SurogateError as error:
        return error
    return None


def try_combination(combination: Combination, registry: Registry) -> Outcome:
    """Check it as a run does, and train one step of the family's smallest shape on random tokens."""

    def outcome(result: Literal["trained", "refused", "crashed"], text: str) -> Outcome:
        return Outcome(combination=combination, result=result, text=" ".join(text.split()))

    try:
        config, resolved = _prepared(combination, registry)
    except SurogateError as error:
        words = (value.partition("-")[0] if factor == "mode" else value for factor, value in combination.items())
        named = any(re.search(rf"\b{re.escape(word)}\b", str(error)) for word in words)
        return outcome("refused" if named else "crashed", str(error) if named else f"refused without a name: {error}")
    except Exception as error:
        return outcome("crashed", f"{type(error).__name__}: {error}")
    try:
        vocabulary = min(resolved.model.vocab_size, tiny.VOCABULARY)
        batch = tiny.batch(tiny.documents(vocabulary=vocabulary))
        engine = build_engine(config, registry, resolved, sample=batch, progress=lambda task, done, total: None)
        loss = engine.train_step([batch], step=0, lr=1e-3).read()[0]
    except Exception as error:
        return outcome("crashed", f"{type(error).__name__}: {error}")
    return outcome("trained" if math.isfinite(loss) else "crashed", f"loss {loss:.4f}")


def _prepared(combination: Combination, registry: Registry) -> tuple[Any, Any]:
    """The steps of a run before it loads: the configuration, the model's shape, the adapters, the recipe."""
    groups = [f"{kind}={combination[kind]}" for kind in ("recipe", "optimizer", "offload")]
    overrides = [*_COMMON, f"model.name={combination['model']}", *groups, *MODES[combination["mode"]]]
    config = load_run_config(overrides, registry=registry)
    resolved = resolve_model(config, registry)
    resolve_lora(config, resolved.model)
    resolve_recipe(config, registry, resolve_device(config))
    return config, resolved
