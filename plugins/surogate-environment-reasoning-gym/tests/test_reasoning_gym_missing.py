"""Without the package that it wraps, the environment says what to install."""

import sys

import pytest
from surogate_environment_reasoning_gym import surogate_environment

from surogate_core.plugin import MachineError


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    spec = surogate_environment()
    with pytest.raises(MachineError, match="the package reasoning_gym is not installed") as caught:
        spec.build(spec.options())
    assert "Fix: pip install 'surogate-environment-reasoning-gym[gym]'" in str(caught.value)
