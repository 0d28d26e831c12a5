"""Kernels of packs, compiled while Inductor compiles the graph that launches them.

Triton and NVRTC compile a kernel when it is first launched. The first start on a machine would do so for all of them,
one after the other, in the micro-step before the capture. Instead, every op of a graph with the mark `compiled_ahead`
runs once on the fake tensors of the graph. Its launches are noted and not made, and what is not in the caches is
compiled meanwhile: by NVRTC in threads, by Triton in the processes that compile Inductor's kernels. The first call of
the graph waits for them. A launch finds the binary where an earlier run of the machine would have left it, so no bit
depends on this. Triton's processes also compile the C library through which each program is launched.

Why so, and not otherwise:

- Nothing runs on the device. A micro-step without its launches would compute with memory that nobody has written, from
  which come indices of experts and whether an optimizer step is skipped.
- The launches follow from the graph, so there is no list of kernels that could become wrong. A launch that was not
  foreseen is compiled when it is made, and one that is never made costs a process that has nothing else to do.
- Triton compiles in processes because its compiler asks for the GIL again and again. In a thread beside Python code it
  took three times as long, and the other code ran at less than a third of its speed. NVRTC asks for it once.

Whatever fails here is logged at the level debug, and the kernels are compiled at their first launch.
`SUROGATE_COMPILE_AHEAD=0` turns it off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any, Protocol, TypeVar

import structlog
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
log = structlog.get_logger(__name__)

SWITCH = "SUROGATE_COMPILE_AHEAD"
"""The environment variable that turns it off with the value 0."""
LONGEST = 60.0
"""Seconds to wait at most for NVRTC, and then for Triton, at the first call of a graph."""

launching: dict[Any, Callable[..., Any]] = {}
"""Custom op with the mark, as an overload (``torch.ops.namespace.name.default``) → its function."""


def compiled_ahead(op: T) -> T:
    """Mark a custom op, what ``torch.library.custom_op`` returns, to have its kernels compiled ahead.

    Its function also runs on fake tensors and then launches nothing (`noting`). It reads no values and keeps no tensor.
    """
    launching[op._opoverload] = op._init_fn  # type: ignore[attr-defined]
    return op


class Source(Protocol):
    """What NVRTC compiles."""

    def compile(self, device: torch.device) -> None:
        """Compile for the device, unless that was done."""


@dataclass(slots=True)
class _Notes:
    """Kernels that were to be launched."""

    programs: dict[str, _Program] = field(default_factory=dict)
    """Triton's key → what is not in its cache."""
    sources: dict[tuple[int, torch.device], tuple[Source, torch.device]] = field(default_factory=dict)


_notes: ContextVar[_Notes | None] = ContextVar("surogate_noted_launches", default=None)
_one_at_a_time = Lock()
"""Triton's hooks are the whole process's."""
_going: dict[Any, Future[None]] = {}
"""A source and its device, or Triton's key → its compilation, which other graphs that launch it share."""


def noting() -> bool:
    """Whether launches are noted instead of made, and tensors are fake."""
    return _notes.get() is not None


def noted(source: Source, device: torch.device) -> bool:
    """Whether a launch of CUDA C++ was noted, and is not to be made."""
    notes = _notes.get()
    if notes is not None:
        notes.sources[id(source), device] = source, device
    return notes is not None


class Compiling:
    """Kernels that are being compiled."""

    def __init__(self, notes: _Notes | None = None) -> None:
        """Start the compilers."""
        self._native: list[Future[None]] = []
        self._triton: list[Future[None]] = []
        if notes is None:
            return
        if notes.sources:
            threads = ThreadPoolExecutor(len(notes.sources))
            for key, (source, device) in notes.sources.items():
                self._native.append(_shared(key, partial(threads.submit, source.compile, device)))
            threads.shutdown(wait=False)
        self._triton = _submitted(notes.programs)

    def before(self, call: Callable[..., T]) -> Callable[..., T]:
        """The function, whose first call waits for the kernels."""
        if not self._native and not self._triton:
            return call
        waiting = [self]

        def run(*arguments: Any) -> T:
            if waiting:
                waiting.pop().wait()
            return call(*arguments)

        return run

    def wait(self) -> None:
        """Wait, but not for processes that are still starting: they go on meanwhile."""
        _wait(self._native, self._triton)
        done = [future for future in (*self._native, *self._triton) if future.done() and not future.cancelled()]
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in errors:
            _log_failure("a kernel was not compiled ahead", error)
        counts = {"native": len(self._native), "triton": len(self._triton), "ready": len(done) - len(errors)}
        log.info("kernels compiled ahead", **counts)


def compiling(graph: fx.Graph) -> Compiling:
    """Start to compile the kernels of the graph's ops."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in launching]
    if not nodes or os.environ.get(SWITCH) == "0":
        return Compiling()
    try:
        return Compiling(_launches_of(nodes))
    except Exception as error:
        _log_failure("kernels are not compiled ahead", error)
        return Compiling()


def wait_for_all() -> None:
    """Wait for the compilations of all graphs, so that other processes find the binaries."""
    native = [future for key, future in _going.items() if not isinstance(key, str)]
    triton = [future for key, future in _going.items() if isinstance(key, str)]
    _wait(native, triton)


def _wait(native: Sequence[Future[None]], triton: Sequence[Future[None]]) -> None:
    wait(native, LONGEST)
    if triton and _processes_run():
        wait(triton, LONGEST)


def _log_failure(event: str, error: BaseException, **named: Any) -> None:
    log.debug(event, error=f"{type(error).__name__}: {error}", **named)


def _shared(key: Any, start: Callable[[], Future[None]]) -> Future[None]:
    """The compilation of the key that is going on, otherwise a new one."""
    found = _going.get(key)
    if found is None or found.done():
        found = _going[key] = start()
    return found


def _processes_run() -> bool:
    """Whether the processes of Inductor have started."""
    from torch._inductor.async_compile import AsyncCompile

    try:
        return AsyncCompile.use_process_pool()
    except Exception as error:  # they have ended
        _log_failure("kernels compiled ahead are not waited for", error)
        return False


def _submitted(programs: Mapping[str, _Program]) -> list[Future[None]]:
    """The programs, in the processes of Inductor; without them, none."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    found: list[Future[None]] = []
    if programs and get_compile_threads() > 1:
        pool = AsyncCompile.process_pool()
        for key, program in programs.items():
            try:
                found.append(_shared(key, partial(pool.submit, partial(program.compile, key))))
            except Exception as error:  # a constant that cannot be sent
                _log_failure("a kernel is not compiled ahead", error, kernel=program.name)
    return found


# --------------------------------------------------------------------------- what a graph launches


class _Addresses(TorchFunctionMode):
    """A fake tensor's memory begins at 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].storage_offset() * args[0].itemsize
        return func(*args, **(kwargs or {}))


class _Functions(TorchDispatchMode):
    """An op with the mark runs its function instead of its fake, also inside another's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = launching.get(func)
        if function is None:
            return func(*args, **(kwargs or {}))
        with self, _Addresses():
            return function(*args, **(kwargs or {}))


def _launches_of(nodes: Sequence[fx.Node]) -> _Notes:
    """What the ops of these nodes would launch. An op that fails is logged; what it noted before counts."""
    notes = _Notes()
    with _one_at_a_time:
        token = _notes.set(notes)
        try:
            for node in nodes:
                try:
                    _run(node)
                except Exception as error:
                    _log_failure("an op's kernels are not compiled ahead", error, op=str(node.target))
        finally:
            _notes.reset(token)
    return notes


def _run(node: fx.Node) -> None:
    """Run the op's function; launches are noted."""
    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fakes = [value for value in tree_leaves((arguments, named)) if isinstance(value, FakeTensor)]
    with torch.no_grad(), _noting_triton(), fakes[0].fake_mode, _Functions():
        node.target(*arguments, **named)  # type: ignore[operator]


# --------------------------------------------------------------------------- Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pointer:
    """What Triton asks of a tensor: its type, and by which powers of two its address can be divided."""

    dtype: torch.dtype
    address: int

    @classmethod
    def of(cls, value: Any) -> Any:
        """For a tensor; other arguments stay."""
        return cls(dtype=value.dtype, address=value.data_ptr()) if isinstance(value, Tensor) else value

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A program of Triton with everything that decides what is compiled, to be sent to another process."""

    module: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]
    target: tuple[Any, ...]

    @classmethod
    def of(cls, function: Any, found: Mapping[str, Any], target: Any) -> _Program:
        """From what Triton shows to `jit_cache_hook`."""
        options = json.loads(found["specialization_data"])["options"]
        return cls(
            module=function.fn.__module__,
            name=function.fn.__qualname__,
            signature=found["signature"],
            constants=found["constants"],
            attributes=found["configs"][0],
            options={key: tuple(value) if isinstance(value, list) else value for key, value in options.items()},
            target=(target.backend, target.arch, target.warp_size),
        )

    def _source(self) -> tuple[Any, Any]:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        function = getattr(import_module(self.module), self.name)
        source = ASTSource(function, dict(self.signature), dict(self.constants), dict(self.attributes))
        return source, GPUTarget(*self.target)

    def key(self) -> str:
        """Triton's key of the program."""
        from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

        source, target = self._source()
        backend = make_backend(target)
        options = backend.parse_options(dict(self.options))
        text: str = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(text.encode()).hexdigest()

    def compile(self, key: str) -> None:
        """Compile into Triton's cache on disk, with the library that launches the program.

        Raises `RuntimeError` if it has another key here, because the process that sent it would not find it.
        """
        import triton

        if (own := self.key()) != key:
            raise RuntimeError(f"{self.name} has the key {own} here, and {key} where it is launched")
        source, target = self._source()
        compiled = triton.compile(source, target=target, options=dict(self.options))
        if target.backend == "cuda":
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)


def _in_cache(key: str, name: str) -> bool:
    """Whether Triton's cache on disk has the program."""
    from triton.runtime.cache import get_cache_manager

    return bool(get_cache_manager(key).get_group(f"{name[:150]}.json"))


@contextmanager
def _noting_triton() -> Iterator[None]:
    """Inside, this context's launches of Triton's programs are noted; other threads launch as usual.

    Raises `ImportError` or `RuntimeError` if this Triton would launch them.
    """
    if find_spec("triton") is None:
        yield
        return
    from triton import knobs
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise RuntimeError("Triton interprets")
    launch, hook, notes = JITFunction.run, knobs.runtime.jit_cache_hook, _notes.get()
    assert notes is not None

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if _notes.get() is not notes:
            return launch(self, *arguments, grid=grid, warmup=warmup, **named)
        shown = {name: _Pointer.of(value) for name, value in named.items()}
        return launch(self, *map(_Pointer.of, arguments), grid=grid, warmup=True, **shown)

    def keep(*, fn: Any, compile: Mapping[str, Any], **rest: Any) -> Any:
        if _notes.get() is not notes:
            return hook(fn=fn, compile=compile, **rest) if hook is not None else None
        program = _Program.of(fn.jit_function, compile, driver.active.get_current_target())
        if not _in_cache(key := program.key(), program.name):
            notes.programs[key] = program
        return True  # Triton then compiles nothing

    JITFunction.run, knobs.runtime.jit_cache_hook = run, keep
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook
