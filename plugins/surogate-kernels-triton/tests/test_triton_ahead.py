"""What is compiled ahead is what the launches compile: their keys are in Triton's cache."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from surogate_core.service.kernels import ahead
from surogate_testing.triton_programs import empty

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
FIRST = """
import torch
import triton.runtime.build
from torch._inductor.async_compile import AsyncCompile
from triton import knobs
from surogate_core.dsl import inductor
from surogate_core.dsl.trace import Signature, without_gradients
from surogate_kernels_triton import swiglu

inductor.start_workers()
AsyncCompile.wait_pool_ready()
signature = Signature((512, 208), torch.bfloat16, torch.device("cuda", 0))
call = without_gradients(torch.ops.surogate_triton.swiglu_backward, [signature] * 3, compiler="inductor")
found, built, build = [], [], triton.runtime.build._build
triton.runtime.build._build = lambda name, *rest: (built.append(name), build(name, *rest))[1]
knobs.compilation.listener = lambda *, src, cache_hit, **rest: found.append((src.name, cache_hit))
call([torch.ones(512, 208, dtype=torch.bfloat16, device="cuda")] * 3)
print(*(hit for name, hit in found if name == "swiglu_backward"), "__triton_launcher" not in built)
"""
"""A start with empty caches: whether the launch of a kernel found it, and the library that launches it, compiled."""
N = 512


def _norm() -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import norm

    x, weight, inverse = empty(N, 96), empty(96), empty(N, 1, dtype=torch.float32)
    return norm._backward, [x, x, weight, inverse, None]


def _swiglu() -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import swiglu

    both = empty(N, 2 * 208)
    return swiglu._backward, [empty(N, 208), both[:, :208], both[:, 208:]]


def _swiglu_of_experts() -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import swiglu

    return swiglu._of_experts_backward, [*[empty(N, 208)] * 3, empty(8, dtype=torch.int32)]


def _adapted(p: float) -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import adapters

    panel, seed = empty(3 * 64 + 48, 176 + 48), empty(2, dtype=torch.int32)
    return adapters._forward_in_place, [empty(N, 176 + 128), panel, seed, 176, [64, 64, 64], 16, p, [0, 1, 2]]


def _gradients(p: float) -> tuple[Callable[..., Any], list[Any]]:
    """Through the op that runs the op in place, because there is no room behind dy."""
    from surogate_kernels_triton import adapters

    x, panel, u = empty(N, 176 + 128), empty(80, 176 + 16), empty(N, 16)
    return adapters._backward, [empty(N, 64), x, u, panel, empty(2, dtype=torch.int32), 176, [64], 16, 1.0, p, [3]]


def _attention(**named: Any) -> tuple[Any, list[Any]]:
    """The op is one of `packed_attention`, whose functions are found by its name."""
    import surogate_kernels_triton.attention

    assert surogate_kernels_triton.attention.kernel().knows >= named.keys()
    op = torch.ops.surogate_triton.attention.default
    rows = [empty(N, heads, 64) for heads in (4, 2, 2)]
    arguments = [*rows, empty(3, dtype=torch.int32), 0.1, *named.values()]
    return SimpleNamespace(_opoverload=op, _init_fn=ahead.launching[op]), arguments


def _scan(delta: bool) -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import scans

    q, v, decay = empty(N, 2, 64), empty(N, 4, 64), empty(N, 4, dtype=torch.float32)
    return scans._backward, [v, None, q, q, v, decay, decay, empty(4, dtype=torch.int32), None, delta]


def _convolution() -> tuple[Callable[..., Any], list[Any]]:
    from surogate_kernels_triton import convolutions

    x = empty(N, 176)
    return convolutions._backward, [x, x, empty(176, 4), empty(4, dtype=torch.int32), False]


CASES = {
    "causal_convolution": _convolution,
    "ssd": lambda: _scan(delta=False),
    "gated_delta": lambda: _scan(delta=True),
    "attention": _attention,
    "attention, window and sinks": lambda: _attention(window=64, softcap=0.0, sinks=empty(4)),
    "norm": _norm,
    "swiglu": _swiglu,
    "swiglu of experts": _swiglu_of_experts,
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


def _graph(op: Any, arguments: list[Any]) -> fx.Graph:
    """A graph with one node, whose tensors are fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph, mode = fx.Graph(), FakeTensorMode()
    found: list[Any] = []
    for value in arguments:
        found.append(value)
        if isinstance(value, torch.Tensor):
            found[-1] = graph.placeholder("x")
            found[-1].meta["val"] = mode.from_tensor(value)
    graph.call_function(op._opoverload, tuple(found))
    return graph


def _notes(op: Any, arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> ahead._Notes:
    """What is to be compiled for a graph."""
    found: list[ahead._Notes] = []
    monkeypatch.setattr(ahead, "Compiling", lambda notes=None: found.append(notes))
    ahead.compiling(_graph(op, arguments))
    return found[0]


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
    launch, made = JITFunction.run, []
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", lambda source, metadata: made.append(source.name))
    notes = _notes(op, arguments, monkeypatch)
    assert notes.programs
    assert JITFunction.run is launch
    kept = [*adapters._salts.values(), *adapters._zeros.values()]
    assert all(type(tensor) is torch.Tensor for tensor in kept), "fake tensors are of no use to a launch"
    for key, program in notes.programs.items():
        program.compile(key)
    assert made == [program.name for program in notes.programs.values()]
    assert not _notes(op, arguments, monkeypatch).programs, "all are in the cache"
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
        assert not _notes(*_norm(), monkeypatch).programs


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_a_program_with_another_key_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another ptxas would be used: the launch would not find it."""
    op, arguments = _swiglu()
    # In this dtype no other test has it in Triton's memory.
    (program,) = _notes(op, [x.half() for x in arguments], monkeypatch).programs.values()
    with pytest.raises(RuntimeError, match=r"swiglu_backward has the key \w+ here, and other where it is launched"):
        program.compile("other")


@pytest.mark.gpu
@pytest.mark.parametrize(("switch", "found_both"), [("1", ["True", "True"]), ("0", ["False", "False"])])
def test_the_processes_of_inductor_compile_for_this_process(switch: str, found_both: list[str], tmp_path: Path) -> None:
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    environment = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "4", ahead.SWITCH: switch}
    found = subprocess.check_output([sys.executable, "-c", FIRST], env=environment, text=True)
    assert found.split()[-2:] == found_both
