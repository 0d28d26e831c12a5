"""Ops by name, and the choice of a kernel for each, made once, while a block is traced.

An op is called inside traced code. Its reference is plain PyTorch, so it is traced through and Inductor may fuse it; a
kernel of a pack replaces it if its predicate accepts the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.errors import PluginError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE_PRIORITY = -100

references: dict[str, Kernel] = {}
"""Op name → its reference, as the kernel of last resort."""


OP_MODULES = (
    *("kernels.ops", "kernels.experts", "kernels.updates", "kernels.decoding", "kernels.sums"),
    *("formats.fp8", "formats.nvfp4", "formats.adamw_8bit"),
)
"""Modules of the core that define ops; importing them makes `references` complete."""


def unknown_op(name: str) -> str:
    """Why an op of this name does not exist, with the nearest name; empty if it does."""
    for module in OP_MODULES:
        import_module(f"surogate_core.{module}")
    if name in references:
        return ""
    near = get_close_matches(name, references, n=1)
    fix = f" Fix: {near[0]}" if near else ""
    return f"there is no op {name!r}; known: {', '.join(sorted(references))}.{fix}"


workspaces: dict[Any, Callable[..., int]] = {}
"""Custom op → peak bytes besides inputs and results, from its arguments."""


def workspace(target: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """State the internal memory of a custom op (``torch.ops.namespace.name``), for plans; decorates a function of its
    arguments, which may be fake tensors.
    """

    def register(nbytes: Callable[..., int]) -> Callable[..., int]:
        workspaces[target] = nbytes
        return nbytes

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """The form of a custom op that writes into arguments that it declares mutated."""

    op: Any
    """The form; it has the arguments and the results of the op."""
    takes: Callable[..., bool]
    """Whether it may replace the op for these arguments, which are fake tensors where they are tensors."""


in_place: dict[Any, InPlace] = {}
"""A custom op that changes no argument, as an overload (``torch.ops.namespace.name.default``) → the form that does.

A traced graph has the first, so that it can be cut and reordered. Inductor gets the second, whose schema says what is
written: its functionalisation orders the readers, and copies where a reader still needs the old values.
"""


def write_in_place(graph: fx.Graph) -> None:
    """Replace ops of a graph by the forms that write into their arguments."""
    for node in graph.nodes:
        form = in_place.get(node.target) if node.op == "call_function" else None
        if form is None:
            continue
        arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if form.takes(*arguments, **named):
            node.target = form.op


@dataclass(slots=True)
class KernelTable:
    """The kernels that a run may use on its device, and which were chosen."""

    device: torch.device
    kernels: tuple[Kernel, ...] = ()
    rewrites: tuple[Callable[[fx.Graph], None], ...] = ()
    chosen: dict[tuple[str, str], str] = field(default_factory=dict)
    """(op, dtype) → name of the chosen kernel."""
    labels: dict[tuple[str, str], str] = field(default_factory=dict)
    """(op, dtype) → ``pack/kernel`` of the chosen kernel; for the run's log and `surogate doctor`."""
    packs: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """(op, kernel, priority) → the pack that offers it."""

    @classmethod
    def build(cls, device: torch.device, packs: Sequence[KernelPack], *, deterministic: bool = True) -> KernelTable:
        """The table of all kernels of the packs that the device can use, optionally only deterministic ones.

        Raises `PluginError` for a kernel of an op that does not exist, which no code would ever call, and for two packs
        whose kernels of an op have one name and priority, so that nothing says which of them is meant.
        """
        usable = [pack for pack in packs if pack.unavailable(device) is None]
        offered = [(pack, kernel) for pack in usable for kernel in pack.kernels()]
        for pack, kernel in offered:
            if kernel.op not in references and (fault := unknown_op(kernel.op)):
                raise PluginError(f"kernel pack {pack.name}: kernel {kernel.name}: {fault}")
        owners: dict[tuple[str, str, int], str] = {}
        for pack, kernel in offered:
            other = owners.setdefault((kernel.op, kernel.name, kernel.priority), pack.name)
            if other != pack.name:
                raise PluginError(
                    f"kernel packs {other} and {pack.name}: both offer the kernel {kernel.name} of {kernel.op} with "
                    f"priority {kernel.priority}. Fix: leave one out with plugins.block=[PLUGIN]; `surogate doctor` "
                    f"shows the plugin of a pack"
                )
        return cls(
            packs=owners,
            device=device,
            kernels=tuple(k for _, k in offered if k.deterministic or not deterministic),
            rewrites=tuple(rewrite for pack in usable for rewrite in pack.rewrites()),
        )

    def offers(self, op: str, dtype: torch.dtype) -> bool:
        """Whether a kernel of a pack would be chosen."""
        return any(k.op == op and k.supports(self.device, dtype) for k in self.kernels)

    def choose(self, op: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel with the highest priority that supports the arguments; the first name wins a tie."""
        offers = [k for k in self.kernels if k.op == op and k.supports(self.device, dtype)]
        if args:
            offers = [k for k in offers if k.takes(*args, **kwargs)]
        best = min([*offers, references[op]], key=lambda k: (-k.priority, k.name))
        pack, key = self.packs.get((op, best.name, best.priority)), (op, str(dtype).removeprefix("torch."))
        self.chosen[key] = best.name
        self.labels[key] = best.name if pack is None else f"{pack}/{best.name}"
        return best


_active: ContextVar[KernelTable | None] = ContextVar("surogate_kernels", default=None)


@contextmanager
def using(table: KernelTable) -> Iterator[KernelTable]:
    """Ops called inside choose from the table; outside of a table they run their references."""
    token = _active.set(table)
    try:
        yield table
    finally:
        _active.reset(token)


def rewrite(joint: fx.Graph) -> None:
    """Let the active table's packs change a joint graph."""
    table = _active.get()
    for change in table.rewrites if table is not None else ():
        change(joint)
        joint.eliminate_dead_code()
        joint.lint()


def op(reference: Callable[P, R]) -> Callable[P, R]:
    """Register a function as an op and its reference; the first argument is a tensor."""
    name = reference.__name__
    references[name] = Kernel(
        op=name,
        name="reference",
        function=reference,
        supports=lambda device, dtype: True,
        priority=REFERENCE_PRIORITY,
    )

    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        table = _active.get()
        if table is None:
            return reference(*args, **kwargs)
        first: Tensor = args[0]
        return table.choose(name, first.dtype, *args, **kwargs).function(*args, **kwargs)

    return call
