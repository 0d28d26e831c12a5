"""A fake GPU for code that asks whether there is one."""

from __future__ import annotations

import pytest
import torch


def a_gpu_is_there(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], packages: bool = True) -> None:
    """Make torch report a GPU; `packages`: whether every package counts as installed."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if packages else None)
