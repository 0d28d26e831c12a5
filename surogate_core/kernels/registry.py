"""Ops by name, and the choice of a kernel for each, made once, while a block is traced.

An op is called inside traced code. Its reference is plain PyTorch, so it is traced through and Inductor may fuse it; a
kernel of a pack replaces it if its predicate accepts the arguments.

An op grows by *extensions*: keyword-only parameters with a default. An argument that equals its default is dropped, so
a kernel from before the extension gets the calls that it always got. A call with any other argument is offered only to
kernels that say that they know the extension (`Kernel.knows`): none can ignore it by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx

from surogate_core.bundles import Kernel, KernelPack, ModelFamily
from surogate_core.errors import PluginError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE_PRIORITY = -100


class ReferenceKernels(dict[str, Kernel]):
    """Op name → its reference, as the kernel of last resort, which knows every extension.

    Ops of the core are there whatever was imported before.
    """

    def __missing__(self, op: str) -> Kernel:
        define_ops()
        if op not in self:
            raise KeyError(op)
        return self[op]


references = ReferenceKernels()

extensions: dict[str, dict[str, Any]] = {}
"""Op name → its keyword-only parameters with a default, and these defaults."""


def given(op: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call of an op without the extensions that equal their default."""
    defaults = extensions[op]
    return {name: value for name, value in named.items() if name not in defaults or not _is(value, defaults[name])}


def _is(value: Any, default: Any) -> bool:
    # A comparison of a tensor would be a tensor.
    return value is default or (isinstance(value, int | float | str) and value == default)


OP_MODULES = tuple(
    f"surogate_core.{module}"
    for module in (
        *(
            "kernels.ops",
            "kernels.experts",
            "kernels.grouped",
            "kernels.optimizing.updates",
            "kernels.decoding",
            "kernels.sums",
        ),
        *("kernels.scans", "kernels.convolutions"),
        *("formats.fp8", "formats.nvfp4", "formats.adamw_8bit"),
    )
)
"""The core's own `ops`: modules that define ops, as families and kernel packs name them."""

_owners: dict[str, str] = {}
"""Module that a plugin's `ops` names → the bundle that names it, e.g. ``model family acme``."""


def define_ops(packs: Iterable[KernelPack] = (), families: Iterable[ModelFamily] = ()) -> None:
    """Import the modules that define the ops of the core and of these plugins.

    Raises `PluginError` if one cannot be imported, or defines an op that another module has defined.
    """
    owned = [("the core", OP_MODULES)]
    owned += [(f"model family {family.name}", family.ops) for family in families]
    owned += [(f"kernel pack {pack.name}", pack.ops) for pack in packs]
    for owner, modules in owned:
        for module in modules:
            _owners[module] = owner
            try:
                import_module(module)
            except PluginError as error:
                raise PluginError(f"{owner}: {error}") from error
            except Exception as error:
                raise PluginError(
                    f"{owner}: the module {module} of its ops: {type(error).__name__}: {error}"
                ) from error


def owner_of(op: str) -> str:
    """The bundle whose `ops` name the op's module, e.g. ``model family acme``; the module itself if none is known."""
    module = references[op].function.__module__
    return next((owner for named, owner in _owners.items() if f"{module}.".startswith(f"{named}.")), module)


def unknown_op(name: str) -> str:
    """Why an op of this name does not exist, with the nearest name; empty if it does."""
    define_ops()
    if name in references:
        return ""
    near = get_close_matches(name, references, n=1)
    fix = f"{near[0]}; an" if near else "an"
    return (
        f"there is no op {name!r}; known: {', '.join(sorted(references))}. Fix: {fix} op of another plugin belongs in "
        f"`KernelPack.serves`, the module of an own op in `KernelPack.ops`"
    )


def fault_of(kernel: Kernel) -> str:
    """Why no call is meant for this kernel: its op, or an extension that it knows, does not exist. Empty if both do."""
    if kernel.op not in references and (fault := unknown_op(kernel.op)):
        return fault
    known = extensions[kernel.op]
    for name in sorted(kernel.knows - known.keys()):
        near = get_close_matches(name, known, n=1)
        fix = f" Fix: {near[0]}" if near else " Fix: take it out of `knows`"
        return f"it knows {name!r}, and {kernel.op} has {', '.join(sorted(known)) or 'no extension'}.{fix}"
    return ""


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
    """(op, dtype) → name of the chosen kernel. The extensions of a call are a part of the op: ``attention(window)``."""
    labels: dict[tuple[str, str], str] = field(default_factory=dict)
    """(op, dtype) → ``pack/kernel`` of the chosen kernel; for the run's log and `surogate doctor`."""
    passed: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    """(op, dtype) → ``pack/kernel`` of each kernel of a higher priority than the chosen one that does not know all
    extensions of the call → those that it does not know; for the run's log."""
    packs: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """(op, kernel, priority) → the pack that offers it."""
    undefined: dict[str, str] = field(default_factory=dict)
    """An op that nobody defines → the pack that serves it, whose kernels are left out."""

    @classmethod
    def build(
        cls,
        device: torch.device,
        packs: Sequence[KernelPack],
        *,
        families: Iterable[ModelFamily] = (),
        deterministic: bool = True,
    ) -> KernelTable:
        """The table of all kernels of the packs that the device can use, optionally only deterministic ones.

        Defines the ops of the packs and of the families first, see `define_ops`.
        Raises `PluginError` for a kernel of an op that does not exist, which no code would ever call, or that knows an
        extension which the op does not have, and for two packs whose kernels of an op have one name and priority, so
        that nothing says which of them is meant.
        """
        define_ops(packs, families)
        usable = [pack for pack in packs if pack.unavailable(device) is None]
        every = [(pack, kernel) for pack in usable for kernel in pack.kernels()]
        undefined = {k.op: pack.name for pack, k in every if k.op in pack.serves and k.op not in references}
        offered = [
            (pack, kernel) for pack, kernel in every if kernel.op not in undefined or kernel.op not in pack.serves
        ]
        for pack, kernel in offered:
            if fault := fault_of(kernel):
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
            undefined=undefined,
            device=device,
            kernels=tuple(k for _, k in offered if k.deterministic or not deterministic),
            rewrites=tuple(rewrite for pack in usable for rewrite in pack.rewrites()),
        )

    def offers(self, op: str, dtype: torch.dtype, named: Iterable[str] = ()) -> bool:
        """Whether a kernel of a pack would be chosen for a call with these extensions."""
        return bool(self._candidates(op, dtype, frozenset(named)))

    def choose(self, op: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel with the highest priority that supports the arguments; the first name of a pack wins a tie.

        Raises `PluginError` where two packs offer a kernel for these arguments with that priority.
        """
        named = kwargs.keys() & extensions[op].keys()
        offers = self._candidates(op, dtype, named)
        if args:
            offers = [k for k in offers if k.takes(*args, **kwargs)]
        best = min([*offers, references[op]], key=lambda k: (-k.priority, k.name))
        if args:
            self._refuse_tie(best, offers)
        what = f"{op}({', '.join(sorted(named))})" if named else op
        key = what, str(dtype).removeprefix("torch.")
        self.chosen[key] = best.name
        self.labels[key] = self._label(best)
        better = [k for k in self.kernels if k.op == op and k.priority > best.priority]
        if found := {
            self._label(k): ", ".join(sorted(named - k.knows))
            for k in better
            if not named <= k.knows and k.supports(self.device, dtype)
        }:
            self.passed[key] = found
        return best

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Run an op, whose first argument is a tensor, by the kernel that is chosen for the arguments."""
        named = given(op, kwargs)
        first: Tensor = args[0]
        return self.choose(op, first.dtype, *args, **named).function(*args, **named)

    def _candidates(self, op: str, dtype: torch.dtype, named: Set[str]) -> list[Kernel]:
        return [k for k in self.kernels if k.op == op and named <= k.knows and k.supports(self.device, dtype)]

    def _pack(self, kernel: Kernel) -> str | None:
        return self.packs.get((kernel.op, kernel.name, kernel.priority))

    def _label(self, kernel: Kernel) -> str:
        pack = self._pack(kernel)
        return kernel.name if pack is None else f"{pack}/{kernel.name}"

    def _refuse_tie(self, best: Kernel, offers: Sequence[Kernel]) -> None:
        for other in offers:
            packs = sorted(f"{self._pack(k)}/{k.name}" for k in (best, other))
            if other.priority == best.priority and self._pack(other) != self._pack(best):
                raise PluginError(
                    f"kernels {packs[0]} and {packs[1]}: both offer {best.op} for these arguments with priority "
                    f"{best.priority}. Fix: leave one out with plugins.block=[PLUGIN]; `surogate doctor` shows the "
                    f"plugin of a pack"
                )


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
    """Register a function as an op and its reference; the first argument is a tensor.

    Its keyword-only parameters with a default are extensions, see the module. Raises `PluginError` if another module
    defines an op of this name.
    """
    name = reference.__name__
    before = references.get(name)
    if before is not None and before.function.__module__ != reference.__module__:
        raise PluginError(
            f"the op {name} is defined by two modules: {before.function.__module__} and {reference.__module__}. "
            f"Fix: rename one, or leave its plugin out with plugins.block=[PLUGIN]"
        )
    extensions[name] = {
        p.name: p.default
        for p in signature(reference).parameters.values()
        if p.kind is Parameter.KEYWORD_ONLY and p.default is not Parameter.empty
    }
    references[name] = Kernel(
        op=name,
        name="reference",
        function=reference,
        supports=lambda device, dtype: True,
        knows=frozenset(extensions[name]),
        priority=REFERENCE_PRIORITY,
    )

    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        table = _active.get()
        return reference(*args, **kwargs) if table is None else table.call(name, *args, **kwargs)

    return call
