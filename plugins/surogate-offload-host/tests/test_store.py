"""What comes back is what was put, bit for bit and stride for stride; what is locked, live and forgotten."""

from __future__ import annotations

import pytest
import torch
from surogate_offload_host import surogate_offloader
from surogate_offload_host.memory import HostBlock
from surogate_offload_host.store import HostWeightStore, ResidualStore
from torch import Tensor

from surogate_testing import offloaders

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(device: str, seed: int = 0) -> list[Tensor]:
    """Dtypes, orders of dimensions, special values, a broadcast tensor, an empty one."""
    generator = torch.Generator().manual_seed(seed)
    values = [
        torch.randn(5, 7, generator=generator),
        torch.randn(4, 6, 3, generator=generator).bfloat16().permute(2, 0, 1),
        torch.tensor([torch.nan, -0.0, torch.inf], dtype=torch.bfloat16),
        torch.randint(0, 255, (33,), generator=generator, dtype=torch.uint8),
        torch.randn(1, 1, generator=generator).to(torch.float8_e4m3fn),
        torch.randn(3, 1, generator=generator),
        torch.randn(9, generator=generator)[2:5],
        torch.zeros(0, 4),
        torch.tensor(3),
    ]
    return [v.to(device) for v in values] + [torch.randn(3, 1, generator=generator).to(device).expand(3, 4)]


def same(found: Tensor, put: Tensor, *, strides: bool = True) -> bool:
    def data(t: Tensor) -> Tensor:
        return t.contiguous().flatten().view(torch.uint8).cpu()

    return (
        found.device == put.device
        and (found.dtype, found.shape) == (put.dtype, put.shape)
        and (not strides or found.stride() == put.stride())
        and torch.equal(data(found), data(put))
    )


@pytest.mark.parametrize("device", DEVICES)
def test_residuals_come_back_and_are_forgotten(device: str) -> None:
    store = ResidualStore(torch.device(device))
    for micro_step in range(2):
        given = {f"layer {i}": tensors(device, 10 * micro_step + i) for i in range(3)}
        for key, values in given.items():
            store.put(key, [v.clone() if v.stride()[-1:] != (0,) else v for v in values])
        keys = list(given)[::-1]
        broadcast = 3 * 4  # bytes of the one tensor that stays, of each key
        on_their_way = sum(t.nbytes for t in given["layer 2"][:-1])
        assert store.nbytes()["device"] == len(given) * broadcast + on_their_way
        for key, following in zip(keys, [*keys[1:], None], strict=True):
            if following:
                store.prefetch(following)
            assert all(map(same, store.fetch(key), given[key]))
            assert store.fetch(key)[0] is store.fetch(key)[0]
            store.release(key)
        assert store.nbytes()["device"] == 0
        assert store.nbytes()["host"] > 0
        with pytest.raises(KeyError):
            store.fetch("layer 0")


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_back_as_often_as_they_are_asked_for(device: str) -> None:
    store = HostWeightStore(torch.device(device))
    given = tensors(device)
    store.put("embed", given)
    expected = [g.clone() for g in given]
    given[0].zero_() if device == "cuda" else None
    for _ in range(3):
        store.prefetch("embed")
        assert all(map(same, store.fetch("embed")[:-1], expected[:-1]))
        assert same(store.fetch("embed")[-1], expected[-1], strides=False), "a broadcast weight is filled in"
        store.release("embed")
        store.release("embed")
    assert store.nbytes()["device"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_in_locked_memory_stays_there_and_is_live(device: str) -> None:
    block = HostBlock(64, torch.device(device))
    assert block.on_host.nbytes == block.on_device.nbytes == 64
    assert block.on_device.device.type == device
    assert not block.on_host.any()
    store = HostWeightStore(torch.device(device))
    weight = block.on_host.view(torch.float32)
    store.put("layer 0", [weight])
    assert store.nbytes()["host"] == 0
    block.on_device.view(torch.float32).fill_(2.5)
    (found,) = store.fetch("layer 0")
    assert (found == 2.5).all()
    assert (weight == 2.5).all()
    store.release("layer 0")
    weight.fill_(-1)
    assert (store.fetch("layer 0")[0] == -1).all()


@pytest.mark.gpu
def test_a_tied_weight_is_on_the_host_once() -> None:
    store = HostWeightStore(torch.device("cuda"))
    tied = torch.randn(16, 16, device="cuda")
    store.put("embed", [tied])
    store.put("head", [torch.ones(16, device="cuda"), tied])
    assert store.nbytes()["host"] == 16 * 16 * 4 + 16 * 4
    assert torch.equal(store.fetch("head")[1], tied)


@pytest.mark.parametrize("check", offloaders.CHECKS)
def test_conforms(check: object) -> None:
    assert callable(check)
    check(surogate_offloader())
