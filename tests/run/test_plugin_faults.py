"""Faults of a plugin in a run: the name in the message, and the exit code of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main

DATASET = """
SUROGATE_API = ">=2,<3"
import numpy as np
from surogate_core import bundles, hookimpl
from surogate_core.data.encoded import Encoded

def encode(row, options, context):
    ids = np.arange(5, 10, dtype=np.int32)
    return {made}

@hookimpl
def surogate_dataset():
    return bundles.DatasetFormat(name="odd", options=bundles.NoOptions, encode=encode)
"""

RECIPE = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl

class Made(bundles.Recipe):
    name = "odd"
    def linear(self, x, w, slot):
        return (x @ w.t()) * float("nan")

@hookimpl
def surogate_recipe():
    return bundles.RecipeSpec(name="odd", build=lambda options, context: Made())
"""

KERNELS = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl

def kernels():
    yield bundles.Kernel(op="rms_nrom", name="k", function=print, supports=lambda device, dtype: True)

@hookimpl
def surogate_kernel_pack():
    return bundles.KernelPack(name="odd", kernels=kernels)
"""

MONITOR = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl

class Odd:
    def on_event(self, event):
        return "stop" if event.name == "step_end" else None
    def state(self):
        return {}
    def load_state(self, state):
        pass
    def close(self):
        raise RuntimeError("at close")

@hookimpl
def surogate_monitor():
    return bundles.MonitorSpec(name="odd", build=lambda options, info: Odd())
"""


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        ("Encoded(input_ids=ids, labels=ids[:4])", "ValueError: input_ids has shape (5,) and labels (4,): want equal"),
        ("Encoded.from_mask([5, 70000])", "an id is not in the vocabulary: 70000 of"),
        ("Encoded(input_ids=ids, labels=np.roll(ids, -1))", "a label is not its own token: labels are not shifted"),
        ("[1, 2, 3]", "encode returned list, not Encoded"),
    ],
)
def test_a_data_set_plugin_is_named_for_what_it_gives_back(
    made: str, fault: str, install_plugin: Any, base: list[str], tmp_path: Path, capsys: Any
) -> None:
    install_plugin("dataset-odd", DATASET.replace("{made}", made))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' * 4)
    data = f"datasets=[{{path: '{tmp_path}/rows.jsonl', type: odd}}]"
    keys = [word for word in base if not word.startswith(("datasets=", "validation_datasets="))]
    assert main(["pt", *keys, data, f"output_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err
    assert "plugin dataset-odd (distribution dist-dataset-odd 1.2.3), data set type 'odd'" in said
    assert fault in said
    assert ".." not in said.replace("../", "")


def test_a_recipe_is_suspected_of_what_is_not_finite(
    install_plugin: Any, base: list[str], tmp_path: Path, capsys: Any
) -> None:
    install_plugin("recipe-odd", RECIPE)
    assert main(["pt", *base, "recipe=odd", f"output_dir={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert "recipe odd may also be the cause: recipe=bf16 shows whether it is" in said


def test_a_kernel_of_no_op_ends_the_run(install_plugin: Any, base: list[str], tmp_path: Path, capsys: Any) -> None:
    install_plugin("kernels-odd", KERNELS)
    assert main(["pt", *base, f"output_dir={tmp_path}/run"]) == 2
    assert "kernel pack odd: kernel k: there is no op 'rms_nrom'" in capsys.readouterr().err


def test_a_monitor_that_answers_with_text_is_left_out(
    install_plugin: Any, base: list[str], tmp_path: Path, records: Any
) -> None:
    install_plugin("monitor-odd", MONITOR)
    words = [word for word in base if not word.startswith(("monitor=", "max_steps="))]
    assert main(["pt", *words, "monitor=[jsonl,odd]", "max_steps=2", f"output_dir={tmp_path}/run"]) == 0
    notices = [line["message"] for line in records(tmp_path / "run", "notice")]
    assert [m for m in notices if "monitor odd failed at event step_end and is disabled" in m and "not a Control" in m]
    assert records(tmp_path / "run", "run_end")[0]["reason"] == "finished"


def test_a_record_that_cannot_be_written_is_told_at_the_end(
    base: list[str], run_here: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from surogate_core.files import metrics

    line = metrics.json_line

    def full(event: Any, *, at: float) -> str:
        if event.name == "eval_end" and event.step:
            raise OSError(28, "No space left on device")
        return line(event, at=at)

    monkeypatch.setattr(metrics, "json_line", full)
    words = [word for word in base if not word.startswith(("monitor=", "max_steps="))]
    assert run_here(tmp_path / "run", *words, "monitor=[console,jsonl]", "max_steps=2", "eval_steps=1") == 0
    said = capsys.readouterr().out
    end = " ".join(said[said.index("Finished after 2 steps") :].split())
    assert "monitor jsonl failed at event eval_end" in end
    assert "No space left on device" in end
