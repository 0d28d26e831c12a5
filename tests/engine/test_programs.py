"""The programs of a model's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_qwen3 import make_engine, tiny_config

from surogate_core.engine.planning.pieces import Piece
from surogate_core.engine.programs import ProgramBuilder
from surogate_testing import tiny


def test_a_layer_finds_its_program_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step works out no signature: its hash covers every tensor and slot of the layer."""
    engine = make_engine(tiny_config(num_hidden_layers=3))
    batch = tiny.batch(tiny.documents([20, 9]), padding_id=60)
    engine.train_step([batch], step=0, lr=1e-3)
    engine.evaluate([batch])
    asked: list[str] = []
    signature = ProgramBuilder.signature

    def counted(self: ProgramBuilder, piece: Piece) -> Any:
        asked.append(piece.key)
        return signature(self, piece)

    monkeypatch.setattr(ProgramBuilder, "signature", counted)
    engine.train_step([batch], step=1, lr=1e-3)
    engine.evaluate([batch])
    assert not asked
    first = next(iter(engine.plan.layers))
    other = replace(first, key="another")
    assert engine.programs.layer(other) is engine.programs.layer(first)
    assert asked == ["another"], "a layer of a known signature shares its program"
