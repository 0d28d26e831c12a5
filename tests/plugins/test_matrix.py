"""The composability matrix: every pair of choices is covered, and what is installed trains or is refused by name."""

from __future__ import annotations

import re
from itertools import combinations, product
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.plugins import Registry, import_policy, load_plugins
from surogate_testing import matrix
from surogate_testing.matrix import Combination, Matrix, Outcome, cover, factors_of, run_matrix, try_combination

FACTORS = {"a": ["1", "2", "3"], "b": ["4", "5", "6"], "c": ["7", "8"], "d": ["9", "10", "11", "12"]}

OFFLOADER = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl


class HostStore(bundles.Store):
    def __init__(self, kind):
        self.kind, self.held = kind, {}

    def put(self, key, tensors):
        self.held[key] = [tensor.clone() for tensor in tensors]

    def prefetch(self, key):
        pass

    def fetch(self, key):
        return self.held[key]

    def release(self, key):
        if self.kind == "residuals":
            self.held.pop(key, None)

    def nbytes(self):
        return {"device": 0, "host": 0, "disk": 0}


class Stores(bundles.Stores):
    def store(self, kind):
        return HostStore(kind)


@hookimpl
def surogate_offloader():
    kinds = frozenset({"weights", "residuals"})
    return bundles.OffloaderSpec(name="copying", kinds=kinds, place="host", build=lambda *a: Stores())
"""


def pairs_of(factors: Any) -> set[Any]:
    single = [(f, v) for f, values in factors.items() for v in values]
    return {frozenset(p) for p in combinations(single, 2) if p[0][0] != p[1][0]}


def design(refused: Any = lambda c: False, crashes: Any = lambda c: False) -> Matrix:
    def attempt(combination: Combination) -> Outcome:
        result = "refused" if refused(combination) else "crashed" if crashes(combination) else "trained"
        return Outcome(combination=combination, result=result, text="")  # type: ignore[arg-type]

    return cover(FACTORS, attempt, refused)


def test_every_pair_is_in_a_combination_and_there_are_few() -> None:
    found = design()
    assert found.trained == pairs_of(FACTORS)
    seen = {frozenset(p) for o in found.outcomes for p in combinations(o.combination.items(), 2)}
    assert seen == pairs_of(FACTORS)
    assert 12 <= len(found.outcomes) <= 16  # 72 in all; no design has fewer than 3 × 4
    assert [o.combination for o in found.outcomes] == [o.combination for o in design().outcomes]


def test_a_refused_pair_hides_no_other() -> None:
    found = design(refused=lambda c: c["a"] == "2" and c["d"] == "11")
    guilty = frozenset({("a", "2"), ("d", "11")})
    assert found.refused == {guilty}
    assert found.trained == pairs_of(FACTORS) - {guilty}
    assert not found.missed
    assert found.count("refused") == 1


def test_a_value_that_is_always_refused_is_told_by_its_pairs() -> None:
    for factor, value in (("b", "6"), ("a", "1"), ("d", "9")):
        found = design(refused=lambda c, factor=factor, value=value: c[factor] == value)
        assert found.refused == {p for p in pairs_of(FACTORS) if (factor, value) in p}
        assert not found.missed


def test_where_nothing_trains_nothing_is_passed_over() -> None:
    found = design(refused=lambda c: True)
    assert found.missed == pairs_of(FACTORS)
    assert not found.trained | found.refused


def test_what_three_choices_refuse_together_and_what_crashes_is_not_passed_over() -> None:
    found = design(refused=lambda c: (c["a"], c["b"], c["c"]) == ("2", "5", "8"))
    assert found.trained | found.missed == pairs_of(FACTORS)
    assert len(found.missed) <= 1
    found = design(crashes=lambda c: c["a"] == "1" and c["b"] == "4")
    assert frozenset({("a", "1"), ("b", "4")}) in found.missed
    assert found.count("crashed") >= 1
    assert found.trained | found.missed == pairs_of(FACTORS)
    assert "neither" in str(found)


# ------------------------------------------------------------------------- what is installed


@pytest.fixture
def registry(install_plugin: Any) -> Registry:
    """The installed plugins, and a second offloader."""
    install_plugin("copying", OFFLOADER)
    return load_plugins(import_policy(None, {}))


def check(found: Matrix) -> None:
    assert found.count("crashed") == 0, [str(o) for o in found.outcomes if o.result == "crashed"]
    assert not found.missed
    for outcome in found.outcomes:
        if outcome.result == "refused":
            assert outcome.combination["optimizer"] in outcome.text
            assert "Fix: " in outcome.text


@pytest.mark.slow
def test_few_of_what_is_installed(registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    few = {
        "model": ["llama", "qwen3"],
        "recipe": ["bf16"],
        "optimizer": ["adamw", "normuon"],
        "offload": ["none", "copying"],
        "mode": ["full", "lora"],
    }
    assert all(set(values) <= set(factors_of(registry)[factor]) for factor, values in few.items())
    monkeypatch.setattr(matrix, "factors_of", lambda registry: few)
    found = run_matrix(registry)
    check(found)
    assert found.refused == {frozenset({("optimizer", "normuon"), ("mode", "lora")})}
    assert len(found.trained) == len(pairs_of(few)) - 1
    trained = {tuple(o.combination.values()) for o in found.outcomes if o.result == "trained"}
    assert trained <= set(product(*few.values()))


def test_the_command_fails_on_what_is_neither(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    bad = design(crashes=lambda c: c["a"] == "1")
    monkeypatch.setattr(matrix, "run_matrix", lambda registry, seen: bad)
    assert main(["plugins", "check", "--matrix"]) == 1
    assert "neither trained nor refused: 1 with 4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_that_is_installed(install_plugin: Any, capsys: Any) -> None:
    install_plugin("copying", OFFLOADER)
    assert main(["plugins", "check", "--matrix"]) == 0
    printed = capsys.readouterr().out
    registry = load_plugins(import_policy(None, {}))
    counts = re.search(r"(\d+) pairs of choices: (\d+) trained together, (\d+) refused by name, 0 neither", printed)
    assert counts is not None
    assert int(counts[1]) == len(pairs_of(factors_of(registry))) == int(counts[2]) + int(counts[3])
    assert re.search(r"^\d+ combinations: \d+ trained, \d+ refused, 0 crashed$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"recipe": "absent"}, "refused"),
        ({"offload": "broken"}, "crashed"),
    ],
)
def test_a_combination_that_cannot_be_is_refused_and_one_that_fails_is_a_crash(
    install_plugin: Any, change: dict[str, str], text: str
) -> None:
    install_plugin("broken", OFFLOADER.replace('"copying"', '"broken"').replace("return self.held[key]", "1 / 0"))
    registry = load_plugins(import_policy(None, {}))
    base = {"model": "llama", "recipe": "bf16", "optimizer": "adamw", "offload": "none", "mode": "lora"}
    found = try_combination(base | change, registry)
    assert found.result == text
    assert ("absent" if text == "refused" else "ZeroDivisionError") in found.text
