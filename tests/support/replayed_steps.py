"""Decoding steps that are captured and replayed as on a GPU: a replay runs the step."""

from __future__ import annotations

import pytest

from surogate_core.generate.decoding import StepKind, SteppedRunner
from surogate_core.generate.native import NativeEngine


def replays(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[SteppedRunner, list[StepKind]]:
    """(the engine's runner, the kinds of steps that it will have replayed). A capture loses the rows of the buffers."""
    runner, used = engine._runner, list[StepKind]()
    assert isinstance(runner, SteppedRunner)

    class Graph:
        def __init__(self, kind: StepKind):
            self.kind = kind

        def replay(self) -> None:
            used.append(self.kind)
            runner.step(self.kind)

    def capture(kind: StepKind) -> None:
        runner._state.clear()
        runner._graphs[kind] = Graph(kind)  # type: ignore[assignment]

    monkeypatch.setattr(SteppedRunner, "_capture", lambda self, kind: capture(kind))
    runner.eager = None
    return runner, used
