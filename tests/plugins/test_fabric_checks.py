"""The conformance kit catches fabrics that break a rule, and names ranks that hang."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import odd_fabrics
import pytest

from surogate_core import bundles
from surogate_core.mesh.offers import FABRICS
from surogate_core.testing import fabrics
from surogate_core.testing.check import NotApplicable
from surogate_core.testing.suites import bundle_checks


@pytest.mark.slow
def test_fabrics_that_break_a_rule_are_caught() -> None:
    spec = bundles.FabricSpec(name="x", build=odd_fabrics.Careless)
    fabrics.opens_between_processes(spec)
    for check in fabrics.CHECKS[1:]:
        with pytest.raises(AssertionError, match=r"rank|of its memory are not zeros"):
            check(spec)
    with pytest.raises(AssertionError, match=r"ends with 1: .*MachineError: there is no cable"):
        fabrics.opens_between_processes(bundles.FabricSpec(name="x", build=odd_fabrics.Unplugged))


@pytest.mark.slow
def test_a_fabric_that_another_one_replaces_conforms() -> None:
    spec = bundles.FabricSpec(name="x", build=odd_fabrics.second_choice)
    for check in fabrics.CHECKS:
        check(spec)


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
