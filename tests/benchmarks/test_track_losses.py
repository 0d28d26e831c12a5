"""benchmarks/track_losses.py: its starts, its bounds, and a short run on a CPU."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import track_losses
from track_losses import Rounded, Run

from surogate_core.batch import IGNORE_LABEL
from surogate_core.dsl.declare import TensorSpec


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(*losses: float) -> Run:
    return Run(losses=list(losses), norms=[1.0] * len(losses), kernels={})


RUNS = {
    "reference": run(4.0, 3.0, 2.0),
    "reference again": run(4.0, 3.0, 2.0),
    "rounded 1": run(4.5, 3.25, 2.0),
    "rounded 2": run(4.0, 3.0, 3.0),
}


def test_the_bound_is_the_largest_distance_so_far() -> None:
    assert track_losses.bound(RUNS) == [1.0, 1.0, 2.0]
    with_fp32 = {**RUNS, "fp32": run(3.0, 3.0, 3.0)}
    assert track_losses.bound(with_fp32, "fp32") == [3.0, 3.0, 3.0], "the reference run counts too"
    assert track_losses.outside([0.5, 1.5, math.nan], [1.0, 1.0, 2.0]) == [2, 3]


@pytest.mark.parametrize(
    ("fast", "tracks"),
    [(run(4.5, 3.0, 2.5), True), (run(4.5, 4.5, 2.5), False), (run(4.0, math.nan, 2.0), False)],
    ids=["near", "far", "nan"],
)
def test_the_verdict(fast: Run, tracks: bool) -> None:
    found = {**RUNS, "control": run(4.0, 3.0, 9.0), "fast": fast, "fp32": run(4.0, 3.0, 2.0)}
    verdict = track_losses.judge(found, {})
    assert verdict["tracks"] is tracks
    assert verdict["judged"]["control to reference"]["outside"] == [3]
    assert not track_losses.judge(found, {"a run": "failed"})["tracks"]
    assert not track_losses.judge({**found, "control": RUNS["reference"]}, {})["tracks"], "the fault is not seen"
    assert not track_losses.judge(RUNS, {})["tracks"], "nothing is said of a path that did not run"
    ElementTree.fromstring(track_losses.plot(found, verdict))


def test_perturbed_starts_are_roundings_of_one_model() -> None:
    spec = TensorSpec(name="w", hf_name="w", shape=(256, 64), init="normal", role="weight", trainable=False)
    cpu = torch.device("cpu")
    drawn, nearest = Rounded(cpu).draw(spec), Rounded(cpu)(spec)
    assert torch.equal(nearest, drawn.bfloat16().float())
    every = Rounded(cpu, seed=1, share=1.0)(spec)
    assert torch.equal(every, every.bfloat16().float())
    step = torch.finfo(torch.bfloat16).eps * drawn.abs()
    assert ((every - drawn).abs() <= step).all()
    error = ((every - drawn) / step).mean()
    assert abs(error) < 0.02, "without bias"
    assert 0.2 < (every != nearest).float().mean() < 0.3, "a quarter in the mean: the farther neighbour is the rarer"
    few = Rounded(cpu, seed=1, share=1 / 16)(spec)
    assert 0 < (few != nearest).float().mean() < 1 / 16


def test_batches_are_the_text_in_its_order() -> None:
    options = track_losses.make_parser().parse_args(["--device", "cpu", "--tiny", "--steps", "3"])
    batches = [b for step in track_losses.make_batches(track_losses.setting_of(options)) for b in step]
    text = torch.cat([b.input_ids for b in batches])
    assert text.tolist() == track_losses.tokens_of_text(512, text.numel())
    for batch in batches:
        trained = batch.labels != IGNORE_LABEL
        assert int(trained.sum()) == batch.label_tokens
        assert torch.equal(batch.labels[:-1][trained[:-1]], batch.input_ids[1:][trained[:-1]])
        starts = batch.cu_seqlens[:-1][batch.cu_seqlens[:-1] < batch.tokens].long()
        assert torch.equal((batch.positions == 0).nonzero()[:, 0], starts)


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """The fault is seen from farther away than the fast path is."""
    options = ["--device", "cpu", "--tiny", "--steps", "8", "--perturbed", "2", "--out", str(tmp_path)]
    verdict = track_losses.track(track_losses.make_parser().parse_args(options))
    assert not verdict["errors"]
    assert verdict["repeats"]
    judged = verdict["judged"]
    assert judged["control to fp32"]["outside"]
    assert judged["control to fp32"]["share_of_bound"] > 3 * judged["fast to fp32"]["share_of_bound"]
    found = json.loads((tmp_path / "track_losses.json").read_text())["runs"]
    assert len(found) == 7
    assert found["fast"]["losses"][-1] < 0.98 * found["fast"]["losses"][0]
    assert found["fast"]["losses"] != found["reference"]["losses"]
    ElementTree.parse(tmp_path / "track_losses.svg")
    assert "| rounded 2 |" in (tmp_path / "track_losses.md").read_text()
