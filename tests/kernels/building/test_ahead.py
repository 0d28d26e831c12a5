"""Launches of a graph's ops are noted on fake tensors, and compiled while the body runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Timer
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from surogate_core.kernels.building import ahead

CPU = torch.device("cpu")


class Kernel:
    """A source whose compilation is counted."""

    def __init__(self, error: Exception | None = None) -> None:
        self.compiled: list[torch.device] = []
        self.launches, self.error = 0, error

    def compile(self, device: torch.device) -> None:
        if self.error is not None:
            raise self.error
        self.compiled.append(device)

    def launch(self, x: Tensor) -> None:
        if not ahead.noted(self, x.device):
            self.launches += 1


DOUBLED, ADDED = Kernel(), Kernel()
SEEN: list[tuple[bool, bool, int]] = []
"""For each call: are launches noted, is the argument fake, and its address, counted in elements."""


@ahead.compiled_ahead
@torch.library.custom_op("surogate_test_ahead::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    SEEN.append((ahead.noting(), isinstance(x, FakeTensor), x.data_ptr() // x.itemsize if ahead.noting() else 0))
    DOUBLED.launch(x)
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@ahead.compiled_ahead
@torch.library.custom_op("surogate_test_ahead::doubled_sum", mutates_args=())
def doubled_sum(x: Tensor, y: Tensor) -> Tensor:
    ADDED.launch(x)
    return doubled(x) + y


@doubled_sum.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@ahead.compiled_ahead
@torch.library.custom_op("surogate_test_ahead::reading", mutates_args=())
def reading(x: Tensor) -> Tensor:
    """Reads a value, as an op with the mark may not."""
    return x * float(x[0])


@reading.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ahead.SWITCH, raising=False)
    monkeypatch.setattr(ahead, "_going", {})
    SEEN.clear()
    for kernel in (DOUBLED, ADDED):
        kernel.__init__()  # type: ignore[misc]


def graph(function: Callable[..., Tensor], *sizes: int) -> fx.Graph:
    traced: fx.GraphModule = make_fx(function, tracing_mode="fake")(*(torch.zeros(size) for size in sizes))
    SEEN.clear()
    return traced.graph


def test_kernels_of_marked_ops_are_compiled_once_and_not_launched() -> None:
    found = graph(lambda x: doubled(doubled(x)[4:]), 8)
    ahead.compiling(found).wait()
    assert not ahead.noting()
    assert DOUBLED.compiled == [CPU]
    assert DOUBLED.launches == 0
    assert [seen[:2] for seen in SEEN] == [(True, True)] * 2
    assert [seen[2] for seen in SEEN] == [0, 4], "the address of a part of a tensor"
    doubled(torch.ones(2))
    assert DOUBLED.launches == 1


def test_an_op_inside_of_another_runs_too() -> None:
    ahead.compiling(graph(doubled_sum, 8, 8)).wait()
    assert DOUBLED.compiled == ADDED.compiled == [CPU]


def test_a_graph_without_marked_ops_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_launches_of", None)
    call = abs
    assert ahead.compiling(graph(lambda x: x + 1, 8)).before(call) is call


def test_the_first_call_waits_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    go, waited = Event(), []
    monkeypatch.setattr(Kernel, "compile", lambda kernel, device: waited.append(go.wait(60)))
    call = ahead.compiling(graph(doubled, 8)).before(lambda x: (x, list(waited)))
    go.set()
    assert call(1) == (1, [True])
    assert call(2) == (2, [True])


def test_graphs_that_launch_the_same_kernel_share_its_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, compiled = Event(), []
    monkeypatch.setattr(Kernel, "compile", lambda kernel, device: compiled.append(go.wait(60)))
    both = [ahead.compiling(graph(doubled, 8)) for _ in range(2)]
    go.set()
    for one in both:
        one.wait()
    assert compiled == [True]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ahead.SWITCH, "0")
    ahead.compiling(graph(doubled, 8)).wait()
    assert not SEEN


def test_an_op_that_fails_costs_only_itself() -> None:
    found = graph(lambda x: doubled(reading(x)), 8)
    with structlog.testing.capture_logs() as logs:
        ahead.compiling(found).wait()
    assert DOUBLED.compiled == [CPU]
    (failed,) = [line for line in logs if line["log_level"] == "debug"]
    assert "reading" in failed["op"]


def test_a_compiler_that_fails_does_not_end_the_run() -> None:
    DOUBLED.error = RuntimeError("no compiler")
    with structlog.testing.capture_logs() as logs:
        ahead.compiling(graph(doubled, 8)).wait()
    assert "no compiler" in next(line for line in logs if line["log_level"] == "debug")["error"]
    assert logs[-1]["ready"] == 0


class Pool:
    """Runs what it receives at once, as another process would: after it was sent."""

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        try:
            future.set_result(pickle.loads(pickle.dumps(job))())
        except ImportError as error:
            future.set_exception(error)
        return future


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    from torch._inductor import async_compile

    made = Pool()
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", staticmethod(lambda: made))
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", staticmethod(lambda: True))
    return made


def program(**changes: Any) -> ahead._Program:
    empty: dict[str, Any] = {"signature": {}, "constants": {}, "attributes": {}, "options": {}}
    return ahead._Program(**{"module": "no_such_module", "name": "f", "target": ("cuda", 90, 32), **empty, **changes})


def notes(**programs: ahead._Program) -> ahead._Notes:
    return ahead._Notes(programs=programs)


def test_programs_are_sent_to_the_processes_of_inductor(pool: Pool) -> None:
    """One that cannot be sent does not keep the others."""
    with structlog.testing.capture_logs() as logs:
        ahead.Compiling(notes(first=program(constants={0: lambda: None}), second=program(name="g"))).wait()
    assert [line["event"] for line in logs][:2] == ["a kernel is not compiled ahead", "a kernel was not compiled ahead"]
    assert (logs[-1]["triton"], logs[-1]["ready"]) == (1, 0)


def test_processes_that_have_ended_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    from torch._inductor import async_compile

    def ended() -> bool:
        raise RuntimeError("Attempting to use a closed pool")

    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", staticmethod(ended))
    with structlog.testing.capture_logs() as logs:
        ahead.Compiling(notes(key=program())).wait()
    assert "kernels compiled ahead are not waited for" in [line["event"] for line in logs]


def test_without_processes_triton_compiles_at_the_first_launch(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    from torch._inductor import async_compile

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    assert ahead._submitted({"key": program()}) == []


def test_all_graphs_are_waited_for_before_other_ranks_compile(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = Event(), []
    monkeypatch.setattr(Kernel, "compile", lambda kernel, device: done.append(go.wait(60)))
    ahead.compiling(graph(doubled, 8))
    Timer(0.2, go.set).start()
    ahead.wait_for_all()
    assert done == [True]
