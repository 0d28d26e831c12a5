"""What is compiled ahead is what the launches compile: their keys are in Triton's cache."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from surogate_core.kernels import ahead
from surogate_core.testing.triton_programs import empty

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
FIRST = """
import torch
from torch._inductor.async_compile import AsyncCompile
from triton import knobs
from surogate_core.dsl import inductor
from surogate_core.dsl.trace import Signature, without_gradients
from surogate_kernels_triton import swiglu

inductor.start_workers()
AsyncCompile.wait_pool_ready()
signature = Signature((512, 208), torch.bfloat16, torch.device("cuda", 0))
call = without_gradients(torch.ops.surogate_triton.swiglu_backward, [signature] * 3, compiler="inductor")
found = []
knobs.compilation.listener = lambda *, src, cache_hit, **rest: found.append((src.name, cache_hit))
call([torch.ones(512, 208, dtype=torch.bfloat16, device="cuda")] * 3)
print(*(hit for name, hit in found if name == "swiglu_backward"))
"""
"""A start with empty caches: whether the launch of a kernel found it compiled."""
N = 512


def _norm() -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import norm

    x, weight, inverse = empty(N, 96), empty(96), empty(N, 1, dtype=torch.float32)
    return norm._backward, [x, x, weight, inverse, None]


def _swiglu() -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import swiglu

    both = empty(N, 2 * 208)
    return swiglu._backward, [empty(N, 208), both[:, :208], both[:, 208:]]


def _adapted(p: float) -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import adapters

    panel, seed = empty(3 * 64 + 48, 176 + 48), empty(2, dtype=torch.int32)
    return adapters._forward_in_place, [empty(N, 176 + 128), panel, seed, 176, [64, 64, 64], 16, p, [0, 1, 2]]


def _gradients(p: float) -> tuple[Callable[..., Any], list[Any]]:
    """Through the op that runs the op in place, because there is no room behind dy."""
    from surogate_kernels_triton import adapters

    x, panel, u = empty(N, 176 + 128), empty(80, 176 + 16), empty(N, 16)
    return adapters._backward, [empty(N, 64), x, u, panel, empty(2, dtype=torch.int32), 176, [64], 16, 1.0, p, [3]]


CASES = {
    "norm": _norm,
    "swiglu": _swiglu,
    "adapted": lambda: _adapted(0.0),
    "adapted, dropout": lambda: _adapted(0.1),
    "gradients": lambda: _gradients(0.0),
    "gradients, dropout": lambda: _gradients(0.1),
}


class _Driver:
    """That of a Hopper that is not here."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    from triton import knobs
    from triton.runtime.driver import driver

    monkeypatch.setattr(type(driver), "active", property(lambda self: _Driver()))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def _nodes(op: Any, arguments: list[Any]) -> list[fx.Node]:
    """A graph's only node, whose tensors are fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph, mode = fx.Graph(), FakeTensorMode()
    found: list[Any] = []
    for value in arguments:
        found.append(value)
        if isinstance(value, torch.Tensor):
            found[-1] = graph.placeholder("x")
            found[-1].meta["val"] = mode.from_tensor(value)
    return [graph.call_function(op._opoverload, tuple(found))]


@contextmanager
def _compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """Inside, programs are compiled and not launched: (name, whether the cache had it) of each."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, bool]] = []
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **named)

    def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        found.append((src.name, cache_hit))

    with monkeypatch.context() as patch, knobs.compilation.scope():
        patch.setattr(JITFunction, "run", run)
        knobs.compilation.listener = listen
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("hopper")
def test_launches_find_what_was_compiled_ahead(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_native import adapters
    from triton.runtime.jit import JITFunction

    op, arguments = case()
    nodes, launch = _nodes(op, arguments), JITFunction.run
    notes = ahead._launches_of(nodes)
    assert notes.programs
    assert JITFunction.run is launch
    kept = [*adapters._salts.values(), *adapters._zeros.values()]
    assert all(type(tensor) is torch.Tensor for tensor in kept), "fake tensors are of no use to a launch"
    for program in notes.programs.values():
        program.compile()
    assert not ahead._launches_of(nodes).programs, "all are in the cache"
    with _compiled(monkeypatch) as found:
        op._init_fn(*arguments)
    assert len(found) == len(notes.programs)
    assert all(hit for _, hit in found), found


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_nothing_is_launched_by_a_triton_that_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        assert not ahead._launches_of(_nodes(*_norm())).programs


@pytest.mark.gpu
@pytest.mark.parametrize(("switch", "ahead_of_launch"), [("1", "True"), ("0", "False")])
def test_the_processes_of_inductor_compile_for_this_process(switch: str, ahead_of_launch: str, tmp_path: Path) -> None:
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    environment = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "4", ahead.SWITCH: switch}
    found = subprocess.check_output([sys.executable, "-c", FIRST], env=environment, text=True)
    assert found.split()[-1] == ahead_of_launch
