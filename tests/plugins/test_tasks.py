"""The task hook: the core's tasks pass the kit, tasks that break a rule do not, and a stranger's task trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surogate_core import builtin
from surogate_core.bundles import TaskSpec
from surogate_core.cli.main import main
from surogate_core.data.sampler import PackedTask, StepLoader
from surogate_testing import tasks

CORE = {spec.name: spec for spec in builtin.surogate_task()}


@pytest.mark.parametrize("check", tasks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CORE)
def test_the_cores_tasks_pass(name: str, check: Callable[[TaskSpec], None]) -> None:
    check(CORE[name])


class Forgetful(StepLoader):
    def load_state(self, state: Any) -> None:
        """Forgets a row."""
        super().load_state({**state, "rows_taken": max(0, state["rows_taken"] - 1)})


class Trusting(StepLoader):
    def load_state(self, state: Any) -> None:
        """Takes any state."""
        self._taken = state["rows_taken"]


class Shrinking(StepLoader):
    def next_step(self) -> Any:
        """The second step has one micro-batch of one row."""
        if self._taken == 4:
            self._rows_per_micro_batch = 1
        return super().next_step()


class Miscounting(StepLoader):
    def next_share(self, own: Any) -> Any:
        """Knows nothing of the rows of other ranks."""
        made = super().next_share(own)
        return [batch if number in own else replace(batch, tokens=0) for number, batch in enumerate(made)]


class Unending(StepLoader):
    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        """Another order in every stream."""
        Unending.made += 1
        super().__init__(*args, **{**options, "seed": Unending.made})


def broken(steps: type[StepLoader]) -> TaskSpec:
    class Task(PackedTask):
        def steps(self) -> Any:
            rows = {"rows_per_micro_batch": 2, "micro_batches": 2, "seed": 0}
            return steps(self._data.train, **rows)  # type: ignore[arg-type]

    return TaskSpec(name="broken", build=Task)


@pytest.mark.parametrize(
    ("steps", "check", "message"),
    [
        (Forgetful, tasks.resumes_where_it_was, "resumed after 1 steps: epoch is"),
        (Trusting, tasks.refuses_the_state_of_other_data, "takes the state of other data"),
        (Miscounting, tasks.shares_its_steps, "micro-batch 0 of step 0, where a rank runs .*: its counts are"),
        (Shrinking, tasks.has_one_shape, "a micro-batch has"),
        (Unending, tasks.gives_equal_steps, "the same data again: micro-batch 0 of step 0 differs in input_ids"),
    ],
)
def test_tasks_that_break_a_rule_are_caught(steps: type[StepLoader], check: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(broken(steps))


STRANGER = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl

@hookimpl
def surogate_config_path():
    return "file://CONF"

@hookimpl
def surogate_task():
    return bundles.TaskSpec(name="longest", build=build, adapters=False)

def build(config, data):
    from surogate_core.data.sampler import PackedTask

    class Task(PackedTask):
        def steps(self):
            steps = super().steps()
            one_step = steps.next_step
            steps.next_step = lambda: sorted(one_step(), key=lambda batch: -batch.tokens)
            return steps

    return Task(config, data)
"""


def test_a_strangers_task_is_a_command_and_a_value(
    install_plugin: Any, base: list[str], tmp_path: Path, capsys: Any, records: Any
) -> None:
    option = tmp_path / "conf" / "task" / "longest.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# @package _global_\ntask: longest\nlora: false\n")
    install_plugin("task-longest", STRANGER.replace("CONF", str(tmp_path / "conf")))
    words = [word for word in base if not word.startswith("max_steps")]
    assert main(["longest", *words, "max_steps=1", f"output_dir={tmp_path}/run"]) == 0
    assert "task: longest" in (tmp_path / "run" / "config.yaml").read_text()
    assert len(records(tmp_path / "run", "step_end")) == 1
    file = tmp_path / "run.yaml"
    file.write_text("task: longest\n")
    assert main(["longest", str(file), "--cfg", "job"]) == 0
    assert "task: longest" in capsys.readouterr().out
    assert main(["sft", str(file), "--cfg", "job"]) == 2
    assert "`surogate sft` was called, but the file says longest" in capsys.readouterr().err
    assert main(["longest", *words, "lora=true", f"output_dir={tmp_path}/run"]) == 2
    assert "must be false in task longest" in " ".join(capsys.readouterr().err.split())
    assert main(["longst"]) == 2
    assert "there is no such command" in capsys.readouterr().err
