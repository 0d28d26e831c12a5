"""The conformance kit catches fabrics that break a rule, and names ranks that hang."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import odd_fabrics
import pytest

from surogate_core import bundles
from surogate_core.mesh.offers import FABRICS
from surogate_testing import fabrics
from surogate_testing.check import NotApplicable
from surogate_testing.suites import bundle_checks

GROUPS = fabrics.connects_groups_of_neighbouring_ranks


@pytest.mark.slow
def test_fabrics_that_break_a_rule_are_caught() -> None:
    spec = bundles.FabricSpec(name="x", build=odd_fabrics.Careless, unequal=True)
    fabrics.opens_between_processes(spec)
    for check in set(fabrics.CHECKS[1:]) - {GROUPS}:
        with pytest.raises(AssertionError, match=r"rank|of its memory are not zeros"):
            check(spec)
    with pytest.raises(AssertionError, match=r"ends with 1: .*MachineError: there is no cable"):
        fabrics.opens_between_processes(bundles.FabricSpec(name="x", build=odd_fabrics.Unplugged))


@pytest.mark.slow
def test_a_fabric_that_another_one_replaces_conforms() -> None:
    spec = bundles.FabricSpec(name="x", build=odd_fabrics.second_choice, groups=True)
    for check in fabrics.CHECKS:
        check(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (odd_fabrics.Strided, "rank 0 of 4 is number 0 of 2, which are ranks 0 to 2, not number 0 of 2, .* 0 to 1"),
        (odd_fabrics.Mixed, "rank 0 of 4 is number 0 of 2, which are ranks 0 to 3, not number 0 of 2, .* 0 to 1"),
        (odd_fabrics.Numbered, "rank 2 of 4 is number 2 of 2, which are ranks 2 to 3, not number 0 of 2, .* 2 to 3"),
        (odd_fabrics.Turned, "in its group of 2, rank 0 of 4 has wrong values of `exchange` for 1 elements"),
        (odd_fabrics.InStep, r"rank \d of 4 ends with "),
        (odd_fabrics.Promising, "AssertionError: it has no `within`, and its spec says groups=True"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_groups_that_break_a_rule_are_named(build: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        GROUPS(bundles.FabricSpec(name="x", build=build, groups=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            odd_fabrics.Near,
            "in its group across 2, rank 0 of 4 is number 0 of 2, .* 0 to 1, not number 0 of 2, .* 0 to 2",
        ),
        (odd_fabrics.Bounded, "AssertionError: it has no `across`, and its spec says across=True"),
        (odd_fabrics.Aborting, "AssertionError: it has no `across`, and its spec says across=True"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_groups_of_distant_ranks_that_break_a_rule_are_named(build: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        GROUPS(bundles.FabricSpec(name="x", build=build, groups=True, across=True))


@pytest.mark.slow
def test_groups_conform_and_need_not_be_there() -> None:
    GROUPS(bundles.FabricSpec(name="x", build=odd_fabrics.Sound, groups=True))
    GROUPS(bundles.FabricSpec(name="x", build=odd_fabrics.Sound, groups=True, across=True, unequal=True))
    with pytest.raises(NotApplicable, match="its spec does not say groups=True"):
        GROUPS(bundles.FabricSpec(name="x", build=odd_fabrics.Strided))


@pytest.mark.slow
def test_unequal_lengths_need_not_be_there_and_a_spec_that_promises_them_keeps_its_word() -> None:
    unequal = fabrics.exchanges_parts_of_unequal_lengths
    with pytest.raises(NotApplicable, match="its spec does not say unequal=True"):
        unequal(bundles.FabricSpec(name="x", build=odd_fabrics.Bounded))
    with pytest.raises(AssertionError, match="it has no `exchange_unequal`, and its spec says unequal=True"):
        unequal(bundles.FabricSpec(name="x", build=odd_fabrics.Equal, unequal=True))


def test_a_fabric_that_other_processes_cannot_find_is_named() -> None:
    def build(options: Any, context: Any) -> Any:
        raise AssertionError

    for hidden in (build, lambda options, context: None):
        with pytest.raises(AssertionError, match="`build` must be a function or class of a module"):
            fabrics.opens_between_processes(bundles.FabricSpec(name="x", build=hidden))


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabrics, "SECONDS", 0.1)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert "the ranks hang: they are not done after 0.1 s" in fabrics._wait([process], tmp_path)
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("spec", FABRICS, ids=lambda spec: spec.name)
def test_the_cores_fabrics_conform(spec: bundles.FabricSpec) -> None:
    """On CPUs; tests/mesh/test_gpu.py has those of GPUs."""
    for check in bundle_checks("fabric", spec):
        try:
            check.run()
        except NotApplicable as reason:
            pytest.skip(str(reason))
