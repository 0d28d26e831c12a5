"""Tasksets of verifiers 0.4; without that line of the package these tests are skipped."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1")

from surogate_environment_verifiers.loading import load
from surogate_environment_verifiers.options import VerifiersOptions

from surogate_core.plugin import UserError, bundles
from surogate_testing import NotApplicable, environments

MODULE = """
from itertools import count
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return 1.0
@EXTRA@

class Config(vf.TasksetConfig):
    largest: int = 5


class Sums(vf.Taskset[Sum, Config]):
    INFINITE = @INFINITE@

    def load(self):
        for a in count() if self.INFINITE else range(self.config.largest):
            yield Sum(Data(prompt=f"{a} + 1?", answer=str(a + 1), system_prompt="Calculate."), self.config.task)


__all__ = ["Sums"]
"""
RUNTIME = """
    @vf.reward
    async def boxed(self, trace, runtime) -> float:
        return 0.0
"""
SETUP = """
    async def setup(self, trace, runtime):
        return None
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, extra: str = "", *, infinite: bool = False, exports: str = '["Sums"]') -> str:
        text = MODULE.replace("@EXTRA@", extra).replace("@INFINITE@", str(infinite))
        (tmp_path / f"{name}.py").write_text(text.replace('["Sums"]', exports))
        return name

    return write


def test_a_taskset_of_one_turn(written: Any) -> None:
    options = VerifiersOptions(module=written("v1_sums"), args={"largest": 3})
    environment = load(options)
    assert environment.size == 3
    task = environment.problem(1, seed=0)
    assert task.messages == ({"role": "system", "content": "Calculate."}, {"role": "user", "content": "1 + 1?"})
    for text, reward in (("2", 2.0), ("3", 0.0)):
        episode = environment.start(task)
        assert episode.reply(text).done
        assert episode.rewards() == {"right": reward}
    spec = bundles.EnvironmentSpec(name="verifiers", build=lambda _: load(options), options=VerifiersOptions)
    for check in environments.CHECKS:
        with suppress(NotApplicable):
            check(spec)


def test_a_taskset_without_an_end_is_read_up_to_a_number(written: Any) -> None:
    assert load(VerifiersOptions(module=written("v1_endless", infinite=True), tasks=7)).size == 7


@pytest.mark.parametrize(
    ("name", "extra", "exports", "args", "message"),
    [
        ("v1_runtime", RUNTIME, '["Sums"]', {}, "has the reward boxed, which reads a sandbox"),
        ("v1_setup", SETUP, '["Sums"]', {}, "prepares a sandbox for each task"),
        ("v1_none", "", "[]", {}, "exports 0 tasksets in __all__"),
        ("v1_args", "", '["Sums"]', {"smallest": 1}, "v1_args cannot be loaded: ValidationError"),
        ("v1_empty", "", '["Sums"]', {"largest": 0}, "has no task"),
    ],
)
def test_what_a_run_does_not_have_is_refused(
    written: Any, name: str, extra: str, exports: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(VerifiersOptions(module=written(name, extra, exports=exports), args=args))
