"""Reference log-probabilities on several ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from surogate_core.config.schema import RunConfig
from surogate_core.data.cache import CacheEntry, DataCache
from surogate_core.run.reference import _Reader


class Ranks:
    """What the ranks tell each other: rank 0 records its words, and another rank hears them."""

    def __init__(self, words: list[Any], *, leads: bool):
        self.words, self.leads, self.said = words, leads, 0

    def gather(self, value: Any) -> list[Any]:
        if self.leads:
            self.words.append(value)
        self.said += 1
        return [self.words[self.said - 1]]


@pytest.mark.parametrize("is_there_meanwhile", [True, False])
def test_ranks_agree_whether_another_run_has_computed_the_values_meanwhile(
    is_there_meanwhile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, words, forwards = np.arange(8, dtype=np.float32).reshape(2, 4), list[Any](), list[int]()
    (tmp_path / "logprobs").write_bytes(values.tobytes() if is_there_meanwhile else b"")

    def get_or_build(self: DataCache, key: str, build: Any, **_: Any) -> CacheEntry:
        if not is_there_meanwhile:
            build(tmp_path)
        return CacheEntry(path=tmp_path, facts={})

    monkeypatch.setattr(DataCache, "get", lambda self, key: None)
    monkeypatch.setattr(DataCache, "get_or_build", get_or_build)

    def read(*, leads: bool) -> Any:
        def logprobs(batch: list[int]) -> torch.Tensor:
            forwards.append(batch[0])
            return torch.from_numpy(values[batch].copy())

        engine = SimpleNamespace(mesh=Ranks(words, leads=leads), logprobs=logprobs)
        task = SimpleNamespace(unreferenced=lambda rows, indices: list(indices))
        config = RunConfig(per_device_train_batch_size=1, data_cache_dir=str(tmp_path))
        rows = SimpleNamespace(digest="d", sequence_len=4)
        reader = _Reader(config, *cast(Any, (engine, task, rows)), np.arange(2), lambda progress: None)
        found = reader.read({})
        assert engine.mesh.said == len(words)
        return found

    for leads in (True, False):
        assert (read(leads=leads).logprobs_RL == values).all()
    assert forwards == ([0, 0] if is_there_meanwhile else [0, 0, 1, 0, 0, 1])
