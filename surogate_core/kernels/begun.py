"""Exchanges between ranks that a traced program begins at one place and awaits at another, and computes in between.

On a GPU a stream of its own moves the data, also inside a CUDA graph; on a CPU the exchange is done when it has begun.
An exchange is a pair of nodes in a traced graph, `begin_gather` or `begin_exchange` and `arrived`, which changes no
argument, so that a graph can be cut between other nodes. Before a graph is compiled, `dsl.exchanges.await_in_place`
makes each pair one buffer.

Shape suffixes: C ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.kernels import linked
from surogate_core.kernels.linked import Linked

_streams: dict[torch.device, torch.cuda.Stream] = {}
_under_way: dict[int, torch.cuda.Event] = {}
"""Address of what is received → recorded behind its exchange."""


def _begin(sent: Tensor, received: Callable[[], Tensor]) -> Tensor:
    """What `received` gives, computed beside the current stream from what is there now."""
    if sent.device.type != "cuda":
        return received()
    if sent.device not in _streams:
        # Before what is computed meanwhile, which would fill all multiprocessors first, on this rank or on one that
        # others wait for.
        _streams[sent.device] = torch.cuda.Stream(sent.device, priority=-1)
    stream = _streams[sent.device]
    stream.wait_stream(torch.cuda.current_stream(sent.device))
    with torch.cuda.stream(stream):
        found = received()
        event = torch.cuda.Event()
        event.record(stream)
    _under_way[found.data_ptr()] = event
    return found


@torch.library.custom_op("surogate::begin_gather", mutates_args=())
def _begin_gather(own: Tensor, size: int, number: int, after: Tensor | None = None) -> Tensor:
    """[...] → [C, ...]: what each rank gives. `after`: an exchange that has begun by then."""
    room = own.new_empty(size, *own.shape)
    return _begin(own, lambda: linked.gathered(own, room, number))


@_begin_gather.register_fake
def _(own: Tensor, size: int, number: int, after: Tensor | None = None) -> Tensor:
    return own.new_empty(size, *own.shape)


@torch.library.custom_op("surogate::begin_exchange", mutates_args=())
def _begin_exchange(sent_C: Tensor, number: int, after: Tensor | None = None) -> Tensor:
    """[C, ...] → [C, ...]: row r goes to rank r. `after`: as of `begin_gather`."""
    room = torch.empty_like(sent_C)
    return _begin(sent_C, lambda: linked.exchanged(sent_C, number, room))


@_begin_exchange.register_fake
def _(sent_C: Tensor, number: int, after: Tensor | None = None) -> Tensor:
    return torch.empty_like(sent_C)


@torch.library.custom_op("surogate::arrived", mutates_args=())
def _arrived(begun_C: Tensor, sent: Tensor) -> Tensor:
    """What an exchange brought. `sent`: what it reads until then."""
    _await(begun_C)
    return begun_C.clone()


@_arrived.register_fake
def _(begun_C: Tensor, sent: Tensor) -> Tensor:
    return torch.empty_like(begun_C)


@torch.library.custom_op("surogate::await_arrival", mutates_args=("begun_C",))
def _await_arrival(begun_C: Tensor, sent: Tensor, after: Sequence[Tensor]) -> None:
    """`arrived`, of which `begun_C` has the result. `after`: what has begun or been computed by then."""
    _await(begun_C)


@_await_arrival.register_fake
def _(begun_C: Tensor, sent: Tensor, after: Sequence[Tensor]) -> None:
    return None


def _await(begun_C: Tensor) -> None:
    if begun_C.device.type == "cuda":
        event = _under_way.pop(begun_C.data_ptr(), None)
        assert event is not None, "what an exchange brings was copied before it was there"
        torch.cuda.current_stream(begun_C.device).wait_event(event)


BEGINNINGS = (torch.ops.surogate.begin_gather.default, torch.ops.surogate.begin_exchange.default)
"""The ops of traced programs that begin an exchange."""


# -------------------------------------------------------------------------------- with gradients


class Trip:
    """An exchange whose gradient goes the other way."""

    def __init__(self, ranks: Linked, dtype: torch.dtype):
        self.ranks, self.dtype = ranks, dtype
        self._sent: Tensor | None = None
        self._begun: Tensor | None = None

    @classmethod
    def begun(cls, x: Tensor, ranks: Linked, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        """Begin the exchange of x; a function that waits and gives what arrived, to be called once. `dtype`: of that,
        if it is not x's.
        """
        trip = cls(ranks, dtype or x.dtype)
        # What is under way is nobody's value, so autograd gets an empty tensor in its place.
        token = _Begin.apply(x, trip)
        return lambda: _End.apply(token, trip)

    def gather(self, own: Tensor) -> None:
        """Begin to get [C, ...], what each rank gives."""
        self._sent = own.contiguous()
        self._begun = _begin_gather(self._sent, self.ranks.size, self.ranks.number)

    def exchange(self, sent_MI: Tensor) -> None:
        """Begin to send each rank its part of the rows, and to get this rank's from all."""
        self._sent = sent_MI.unflatten(0, (self.ranks.size, -1)).contiguous()
        self._begun = _begin_exchange(self._sent, self.ranks.number)

    def arrived(self) -> Tensor:
        """[C, ...]: what the exchange that was begun last brought."""
        assert self._begun is not None
        assert self._sent is not None
        found_C, self._begun, self._sent = _arrived(self._begun, self._sent), None, None
        return found_C

    def leave(self, x: Tensor) -> None:
        """Begin the exchange of x."""
        raise NotImplementedError

    def arrive(self) -> Tensor:
        """What arrived, waiting for it."""
        raise NotImplementedError

    def leave_back(self, dy: Tensor) -> None:
        """Begin the exchange of the gradient of what arrived."""
        raise NotImplementedError

    def arrive_back(self) -> Tensor:
        """The gradient of x."""
        raise NotImplementedError


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.leave(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbegun: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.arrive_back(), None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, trip: Trip) -> Tensor:
        ctx.trip, ctx.dtype = trip, begun.dtype
        return trip.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.leave_back(dy)
        return dy.new_empty(0, dtype=ctx.dtype), None
