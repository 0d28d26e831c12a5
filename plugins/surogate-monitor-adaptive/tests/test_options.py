"""The option of the adaptive monitor."""

from __future__ import annotations

from importlib import resources

import pytest
import surogate_monitor_adaptive

from surogate_core.plugin import events
from surogate_testing.run_events import START


def test_the_option_has_the_defaults() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_adaptive.surogate_monitor()
    yaml = resources.files("surogate_monitor_adaptive.conf.monitor").joinpath("adaptive.yaml").read_text()
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == spec.name == "adaptive"
    assert spec.options(**values) == spec.options()


@pytest.mark.parametrize("advice", [True, False])
def test_advice_can_be_turned_off(advice: bool) -> None:
    spec = surogate_monitor_adaptive.surogate_monitor()
    info = events.RunInfo(run_name="r", output_dir="o", task="pt", config={}, interactive=False)
    monitor = spec.build(spec.options(advice=advice), info)
    control = monitor.on_event(START)
    assert [type(event) for event in control.events] == [events.Notice] if advice else control is None


def test_state_of_another_version_is_refused() -> None:
    spec = surogate_monitor_adaptive.surogate_monitor()
    info = events.RunInfo(run_name="r", output_dir="o", task="sft", config={}, interactive=False)
    monitor = spec.build(spec.options(), info)
    state = monitor.state()
    monitor.load_state(state)
    state["guard"] = {"losses": []}
    with pytest.raises(ValueError, match="LossGuard: the state has other fields"):
        monitor.load_state(state)
