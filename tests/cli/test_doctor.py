"""What the doctor says about several GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surogate_core.bundles import Kernel, KernelPack, ModelFamily
from surogate_core.cli.doctor import _kernels, _together
from surogate_core.kernels import ops


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Three GPUs, of which 0 and 1 reach each other."""
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    return [{"model": "H200"} for _ in range(3)]


def test_links_and_models_of_several_gpus(three: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _together(three) == {
        "NCCL": "2.30.7",
        "peer access": "all but 0 and 2, 1 and 2; without it data goes through host memory, which is slower",
        "models": "H200",
    }
    assert _together(three[:2])["peer access"] == "all"
    assert _together([three[1], {"model": "L4"}])["models"] == "H200, L4: equal bits are not promised"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert _together(three)["NCCL"] == "none: only gpus=1 can run"


def test_one_gpu_needs_no_links(three: list[dict[str, Any]]) -> None:
    assert _together(three[:1]) == {}


class Offers:
    """A registry with these bundles."""

    def __init__(self, **kinds: list[Any]):
        self._kinds = kinds

    def all(self, kind: str) -> dict[str, Any]:
        return {bundle.name: bundle for bundle in self._kinds.get(kind, [])}


def test_kernels_of_an_op_without_a_definition_are_listed_as_left_out() -> None:
    def kernel(op: str) -> Kernel:
        return Kernel(op=op, name="fast", function=ops.swiglu, supports=lambda device, dtype: True)

    made = KernelPack(
        name="acme", kernels=lambda: [kernel("swiglu"), kernel("acme_scan")], serves=frozenset({"acme_scan"})
    )
    devices = [{"name": "cpu", "device": torch.device("cpu")}]
    rows, faults = _kernels(Offers(kernels=[made]), devices)  # type: ignore[arg-type]
    assert rows == [
        {"op": "swiglu", "cpu float32": "acme/fast", "cpu bfloat16": "acme/fast"},
        {"op": "acme_scan", "left out": "acme has kernels, no installed plugin defines the op"},
    ]
    assert faults == []
    family = ModelFamily(name="acme", hf_model_types=(), build=lambda config: None, ops=("acme_missing",))  # type: ignore
    rows, (fault,) = _kernels(Offers(kernels=[made], model=[family]), devices)  # type: ignore[arg-type]
    assert "model family acme: the module acme_missing of its ops: ModuleNotFoundError" in fault
