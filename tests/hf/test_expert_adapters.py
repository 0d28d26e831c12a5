"""PEFT's adapters of one tensor of all experts, taken apart: every expert's product, in both layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from surogate_core.dsl.experts import Fused
from surogate_core.files.tensorfile import TensorFile
from surogate_core.hf.expert_adapters import OfAllExperts, is_of_all_experts
from surogate_core.hf.fused import adapters_joined

COUNT, RANK, PLACE = 3, 2, "m.experts"


def fused(name: str, outputs: dict[str, int], inputs: int) -> dict[str, Fused]:
    parts = tuple((f"{PLACE}.{e}.{n}.weight", (rows, inputs)) for e in range(COUNT) for n, rows in outputs.items())
    return {f"{PLACE}.{name}": Fused(shape=(COUNT, sum(outputs.values()), inputs), parts=parts)}


def opened(
    path: Path,
    tensors: dict[str, Tensor],
    version: str | None = None,
    kind: Callable[[str], tuple[int, float]] = lambda name: (RANK, 1.5),
) -> OfAllExperts:
    save_file({f"p.{name}": tensor for name, tensor in tensors.items()}, path / "a.safetensors")
    file = TensorFile(path / "a.safetensors")
    return OfAllExperts(file=file, prefix="p.", version=version, kind=kind)


def factors(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(A [E, r, columns], B [E, rows, r])."""
    return torch.randn(COUNT, RANK, columns), torch.randn(COUNT, rows, RANK)


def stored(a: Tensor, b: Tensor, *, old: bool) -> tuple[Tensor, Tensor]:
    """The factors as PEFT stores them; `old`: with inputs and outputs exchanged, as up to 0.18."""
    if old:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.reshape(-1, a.shape[2]).contiguous(), b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()


@pytest.mark.parametrize("old", [False, True], ids=["0.19", "0.18"])
def test_each_expert_has_its_product(tmp_path: Path, old: bool) -> None:
    torch.manual_seed(0)
    base = fused("gate_up_proj", {"gate_proj": 6, "up_proj": 4}, 8) | fused("down_proj", {"down_proj": 8}, 5)
    (a1, b1), (a2, b2) = factors(10, 8), factors(8, 5)
    tensors = {}
    for module, a, b in ((f"{PLACE}.base_layer", a1, b1), (PLACE, a2, b2)):
        for side, tensor in zip("AB", stored(a, b, old=old), strict=True):
            tensors[f"{module}.lora_{side}.weight"] = tensor
    other = torch.randn(2, 8)
    found, scales, problems = opened(tmp_path, {**tensors, "q.lora_A.weight": other}).apart(base)
    assert not problems
    assert not any(map(is_of_all_experts, found))
    assert torch.equal(found["p.q.lora_A.weight"], other)
    assert set(scales.values()) == {1.5}
    assert len(scales) == 3 * COUNT
    for e in range(COUNT):
        spans = {"gate_proj": (a1, b1[:, :6]), "up_proj": (a1, b1[:, 6:]), "down_proj": (a2, b2)}
        for name, (a, b) in spans.items():
            sides = [found[f"p.{PLACE}.{e}.{name}.lora_{side}.weight"] for side in "AB"]
            assert torch.equal(sides[0], a[e])
            assert torch.equal(sides[1], b[e])
            shapes = [found.infos[f"p.{PLACE}.{e}.{name}.lora_{side}.weight"].shape for side in "AB"]
            assert shapes == [tuple(side.shape) for side in sides]


@pytest.mark.parametrize("changed", [False, True], ids=["as joined", "trained on by PEFT"])
def test_adapters_of_their_own_come_back_from_one_of_all_experts(tmp_path: Path, changed: bool) -> None:
    """A block of B for each projection; one with values elsewhere is of an adapter that both share."""
    torch.manual_seed(0)
    sizes = {"gate_proj": 6, "up_proj": 4}
    base = {n: replace(one, adapted=True) for n, one in fused("gate_up_proj", sizes, 8).items()}
    own = {}
    for e in range(COUNT):
        for name, rows in sizes.items():
            own[f"{PLACE}.{e}.{name}.lora_A.weight"] = torch.randn(RANK, 8)
            own[f"{PLACE}.{e}.{name}.lora_B.weight"] = torch.randn(rows, RANK)
    joined, targets = adapters_joined({**own, "q.lora_A.weight": torch.randn(2, 8)}, base)
    assert targets == {f"{PLACE}.gate_up_proj": 2 * RANK}
    assert sorted(joined) == [f"{PLACE}.lora_A.weight", f"{PLACE}.lora_B.weight", "q.lora_A.weight"]
    a, b = (joined[f"{PLACE}.lora_{side}.weight"] for side in "AB")
    if changed:
        b[0, -1] = 1.0
    found, scales, problems = opened(tmp_path, joined, kind=lambda name: (2 * RANK, 1.5)).apart(base)
    assert not problems
    assert set(scales.values()) == {1.5}
    for name, tensor in own.items():
        shape = found.infos[f"p.{name}"].shape
        assert shape == tuple(found[f"p.{name}"].shape)
        assert changed or torch.equal(found[f"p.{name}"], tensor)
    for e in range(COUNT):
        product = b.view(10, -1, COUNT)[:, :, e] @ a.view(COUNT, -1, 8)[e]
        sides = [[found[f"p.{PLACE}.{e}.{n}.lora_{side}.weight"] for side in "BA"] for n in sizes]
        torch.testing.assert_close(torch.cat([up @ down for up, down in sides]), product)


def test_a_projection_without_an_adapter_has_rows_of_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {n: replace(one, adapted=True) for n, one in fused("gate_up_proj", {"gate": 6, "up": 4}, 8).items()}
    own = {f"{PLACE}.{e}.up.lora_A.weight": torch.randn(RANK, 8) for e in range(COUNT)}
    own |= {f"{PLACE}.{e}.up.lora_B.weight": torch.randn(4, RANK) for e in range(COUNT)}
    joined, targets = adapters_joined(own, base)
    assert targets == {f"{PLACE}.gate_up_proj": RANK}
    assert not joined[f"{PLACE}.lora_B.weight"][:6].any()
    found, _, _ = opened(tmp_path, joined).apart(base)
    assert all(torch.equal(found[f"p.{name}"], tensor) for name, tensor in own.items())


@pytest.mark.parametrize(
    ("version", "old"), [("0.18.1", True), ("0.19.0", False), ("0.21.2.dev0", False), (None, None)]
)
def test_equal_sizes_need_the_version_of_peft(tmp_path: Path, version: str | None, old: bool | None) -> None:
    torch.manual_seed(0)
    a, b = factors(8, 8)
    sides = stored(a, b, old=bool(old))
    named = {f"{PLACE}.lora_{side}.weight": tensor for side, tensor in zip("AB", sides, strict=True)}
    found, _, problems = opened(tmp_path, named, version).apart(fused("gate_up_proj", {"up_proj": 8}, 8))
    if version is None:
        assert "may be of PEFT up to 0.18" in problems[0]
        return
    assert not problems
    assert torch.equal(found[f"p.{PLACE}.1.up_proj.lora_A.weight"], a[1])
    assert torch.equal(found[f"p.{PLACE}.1.up_proj.lora_B.weight"], b[1])


def test_another_shape_or_rank_is_a_problem(tmp_path: Path) -> None:
    base = fused("up_proj", {"up_proj": 6}, 8)
    for shapes, said in (
        (((6, 7), (6, 6)), "fit no tensor of all experts"),
        (((7, 8), (6, 7)), "fit no tensor of all experts"),
        (((9, 8), (6, 9)), "is of rank 3, not 2"),
        (((6, 8), None), "fit no tensor of all experts"),
    ):
        named = {f"{PLACE}.lora_{s}.weight": torch.zeros(size) for s, size in zip("AB", shapes, strict=True) if size}
        _, _, (problem,) = opened(tmp_path, named).apart(base)
        assert said in problem
