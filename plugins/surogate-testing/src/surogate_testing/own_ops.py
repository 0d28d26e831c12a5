"""Checks of the modules that a model family or a kernel pack names as those of its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Protocol

import torch

from surogate_core.plugin import bundles, compute
from surogate_core.service.kernels import OP_MODULES, define_ops, extensions
from surogate_testing.check import ensure
from surogate_testing.guard import explained
from surogate_testing.kernel_inputs import inputs_of


class Definer(Protocol):
    """A bundle with ops of its own."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Modules."""


def within(module: str, modules: Iterable[str]) -> bool:
    """Whether it is one of these modules, or in one of these packages."""
    return any(module == one or module.startswith(f"{one}.") for one in modules)


def defined_by(modules: Iterable[str]) -> Iterator[str]:
    """The ops that these modules define."""
    return (name for name, reference in compute.references.items() if within(reference.function.__module__, modules))


def defines_its_ops(bundle: Definer) -> None:
    """Each module of its `ops` defines an op, whose reference is differentiable and right in float64."""
    if isinstance(bundle, bundles.KernelPack):
        define_ops(packs=[bundle])
    elif isinstance(bundle, bundles.ModelFamily):
        define_ops(families=[bundle])
    for module in bundle.ops:
        found = list(defined_by([module]))
        ensure(bool(found), f"the module {module} in `ops` defines no op with surogate_core.kernels.registry.op")
        for op in found:
            _ensure_differentiable(op)


def _ensure_differentiable(op: str) -> None:
    function = compute.references[op].function
    for inputs in inputs_of(op):
        leaves = [t.clone().requires_grad_() for t in inputs.leaves.values()]

        def values(*tensors: torch.Tensor, call: Callable[..., Any] = inputs.call) -> Any:
            return call(function, list(tensors))

        what = f"the reference of {op}{', ' + inputs.what if inputs.what else ''}"
        with explained(what):
            returned = values(*leaves)
            given = [returned] if isinstance(returned, torch.Tensor) else returned
            narrow = sorted({str(y.dtype) for y in given if y.requires_grad} - {"torch.float64"})
            right = not narrow and torch.autograd.gradcheck(values, leaves, fast_mode=True, raise_exception=False)
        fix = "Fix: where it computes in float32, torch.promote_types(x.dtype, torch.float32)"
        ensure(not narrow, f"{what}: it returns {', '.join(narrow)} for arguments in torch.float64. {fix}")
        ensure(right, f"{what}: its gradients are not those of its values (finite differences in float64). {fix}")


def ensure_declared(pack: bundles.KernelPack, kernel: bundles.Kernel) -> None:
    """Raise `AssertionError` for a kernel whose op belongs to another plugin, and which the pack does not serve."""
    module = compute.references[kernel.op].function.__module__
    if not within(module, (*OP_MODULES, *pack.ops)):
        ensure(
            kernel.op in pack.serves,
            f"kernel {kernel.name}: {kernel.op} is an op of another plugin ({module}), without which every run ends. "
            f"Fix: add it to `serves`",
        )


def ensure_known(kernel: bundles.Kernel) -> None:
    """Raise `AssertionError` for a kernel that has an extension among its parameters and does not say so."""
    code = getattr(kernel.function, "__code__", None)
    if code is None:
        return
    named = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    silent = sorted((named & extensions[kernel.op].keys()) - kernel.knows)
    ensure(
        not silent,
        f"kernel {kernel.name} of {kernel.op} has the parameter {', '.join(silent)}, which it never gets. Fix: add it "
        f"to `knows`",
    )


def beside(
    families: Iterable[bundles.ModelFamily], check: Callable[[bundles.KernelPack], None]
) -> Callable[[bundles.KernelPack], None]:
    """A check of a kernel pack with the ops of these families, which it may serve."""

    @wraps(check)
    def call(pack: bundles.KernelPack) -> None:
        define_ops([pack], families)
        check(pack)

    return call
