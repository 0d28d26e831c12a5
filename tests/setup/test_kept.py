"""Figures of the cache are those that would be found, or are found again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.plugins.registry import Registry
from surogate_core.setup import kept as module
from surogate_core.setup.kept import NotKeptError, file_facts, kept, plain

Figure = Callable[..., int]


@pytest.fixture
def config(installed: Registry, tmp_path: Path) -> RunConfig:
    return load_run_config([f"data_cache_dir={tmp_path / 'cache'}"], registry=installed)


@pytest.fixture
def figure(config: RunConfig, installed: Registry, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """A figure that is 1 the first time that it is found, then 2, and so on."""
    monkeypatch.setattr(module, "_code", lambda registry: "the code")
    found = iter(range(1, 100))

    def get(depends: Any = None, **keys: Any) -> int:
        return kept(
            "figures",
            replace(config, **keys),
            installed,
            lambda: depends,
            find=lambda: next(found),
            write=lambda figure: {"figure": figure},
            read=lambda facts: int(facts["figure"]),
        )

    return get


def test_it_is_found_once_for_all_that_it_depends_on(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [figure(), figure()] == [1, 1]
    assert [figure("other"), figure(sequence_len=77), figure()] == [2, 3, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert figure() == 4
    monkeypatch.setattr(module, "_code", lambda registry: "other code")
    assert [figure(), figure()] == [5, 5]


def test_a_torn_or_foreign_figure_is_found_again(figure: Figure, tmp_path: Path) -> None:
    figure()
    (meta,) = (tmp_path / "cache" / "figures").glob("*/meta.json")
    meta.write_bytes(meta.read_bytes()[:-20])
    assert [figure(), figure()] == [2, 2]
    meta.write_text('{"files": {}, "facts": {"number": 3}}')
    assert figure() == 3


def test_what_cannot_be_kept_is_found_each_time(figure: Figure, tmp_path: Path) -> None:
    assert [figure(object()), figure(object())] == [1, 2]
    (tmp_path / "cache").write_text("not a directory")
    assert [figure(), figure()] == [3, 4]


def test_values_are_equal_in_every_process() -> None:
    assert plain({"b": {"y", "x"}, "a": (torch.bfloat16, None, 1.5)}) == [
        ["b", ["x", "y"]],
        ["a", ["torch.bfloat16", None, 1.5]],
    ]
    with pytest.raises(NotKeptError):
        plain([lambda: 1])


def test_a_file_that_may_still_change_is_not_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "package" / "module.py"
    file.parent.mkdir()
    file.touch()
    with pytest.raises(NotKeptError):
        file_facts(file)
    monkeypatch.setattr(module, "_SETTLED_NS", 0)
    before = file_facts(tmp_path)
    assert [Path(path).name for path, *_ in before] == ["module.py"]
    os.utime(file, (1, 1))
    assert file_facts(tmp_path) != before
