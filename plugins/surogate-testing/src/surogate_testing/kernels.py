"""Checks of kernel packs: every kernel against its op's reference in float64, forward and backward.

Shape suffixes as in `surogate_core.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from surogate_core.plugin import IGNORE_LABEL, bundles, compute
from surogate_core.service.kernels import REFERENCE_PRIORITY, define_ops, extensions, fault_of
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.expert_cases import EXPERT_CASES, swiglu_of_experts
from surogate_testing.guard import explained
from surogate_testing.honest import HonestOps
from surogate_testing.kernel_inputs import Inputs, inputs_of, normal
from surogate_testing.own_ops import beside, ensure_declared, ensure_known
from surogate_testing.scan_cases import SCAN_CASES, STEPS, ensure_states_move_on
from surogate_testing.slot_cases import ensure_slots_are_filled

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error over the largest value of a tensor, by dtype of the inputs."""

EPS = 1e-6


def _turns(like: Tensor) -> tuple[Tensor, Tensor]:
    angles = normal(like.shape[0], like.shape[-1] // 2, seed=90).to(like.device)
    wide = torch.promote_types(like.dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def _rms_norm() -> Iterator[Inputs]:
    def made(
        *shape: int, what: str = "", eps: float = EPS, size: float = 1.0, apart: bool = False, **named: Any
    ) -> Inputs:
        leaves = {"x": size * normal(*shape, seed=0), "weight": normal(shape[-1], seed=1)}
        return Inputs(leaves=leaves, call=lambda f, t: f(*t, eps, **named), what=what, apart=apart)

    yield made(48, 64)
    yield made(200, 64, what="200 rows")
    yield made(1, 64, what="one row")
    yield made(48, 40, what="40 features")
    yield made(6, 8, 64, what="x of 3 dimensions")
    yield made(48, 64, what="eps as large as the mean square", eps=1e-4, size=1e-2)
    yield made(48, 64, what="gaps between rows", apart=True)
    yield made(48, 512, what="512 features")
    yield made(48, 64, what="an offset", offset=1.0)
    yield made(48, 64, what="rounded once", rounds_once=True)


def _gated_rms_norm() -> Iterator[Inputs]:
    def made(*shape: int, what: str = "", eps: float = EPS, apart: bool = False, **named: Any) -> Inputs:
        leaves = {"x": normal(*shape, seed=0), "gate": normal(*shape, seed=2), "weight": normal(shape[-1], seed=1)}
        return Inputs(leaves=leaves, call=lambda f, t: f(*t, eps, **named), what=what, apart=apart)

    yield made(48, 64)
    yield made(200, 64, what="200 rows")
    yield made(1, 64, what="one row")
    yield made(6, 8, 64, what="x of 3 dimensions")
    yield made(48, 64, what="gaps between rows", apart=True)
    yield made(48, 64, what="the gate first", gate_first=True)
    yield made(48, 80, what="two groups, the gate first", gate_first=True, groups=2)
    yield made(48, 1024, what="eight groups of 128, the gate first", gate_first=True, groups=8)


def _squared_relu() -> Iterator[Inputs]:
    def made(*shape: int, what: str = "", apart: bool = False) -> Inputs:
        return Inputs(leaves={"x": normal(*shape, seed=0)}, call=lambda f, t: f(*t), what=what, apart=apart)

    yield made(48, 64)
    yield made(200, 40, what="200 rows of 40 features")
    yield made(1, 64, what="one row")
    yield made(48, 64, what="gaps between rows", apart=True)


def _gated(*settings: float) -> Iterator[Inputs]:
    """Inputs of an activation with a gate, which takes `settings` after both."""

    def made(*shape: int, what: str = "", apart: bool = False) -> Inputs:
        leaves = {"gate": normal(*shape, seed=0), "up": normal(*shape, seed=1)}
        return Inputs(leaves=leaves, call=lambda f, t: f(*t, *settings), what=what, apart=apart)

    yield made(48, 64)
    yield made(200, 64, what="200 rows")
    yield made(1, 64, what="one row")
    yield made(48, 40, what="40 features")
    yield made(48, 64, what="gaps between rows", apart=True)


def _swiglu() -> Iterator[Inputs]:
    yield from _gated()
    for spare in (0, 8):
        yield swiglu_of_experts(48, 2, spare)


def _rope() -> Iterator[Inputs]:
    def made(n: int, what: str = "", apart: bool = False) -> Inputs:
        leaves = {"x": normal(n, 4, 64, seed=0)}
        return Inputs(leaves=leaves, call=lambda f, t: f(t[0], *_turns(t[0])), what=what, apart=apart)

    yield made(48)
    yield made(1, what="one token")
    yield made(48, what="gaps between rows", apart=True)


def _norm_rope() -> Iterator[Inputs]:
    def made(n: int, what: str = "", eps: float = EPS, size: float = 1.0, apart: bool = False) -> Inputs:
        leaves = {name: size * normal(n, h, 64, seed=ord(name)) for name, h in (("q", 4), ("k", 2), ("v", 2))}
        leaves |= {"q_norm": normal(64, seed=8), "k_norm": normal(64, seed=9)}
        return Inputs(leaves=leaves, call=lambda f, t: f(*t, eps, *_turns(t[0])), what=what, apart=apart)

    yield made(48)
    yield made(200, what="200 tokens")
    yield made(1, what="one token")
    yield made(48, what="eps as large as the mean square", eps=1e-4, size=1e-2)
    yield made(48, what="gaps between rows", apart=True)


def _attention() -> Iterator[Inputs]:
    def made(
        what: str = "", apart: bool = False, n: int = 48, features: int = 128, sinks: bool = False, **settings: Any
    ) -> Inputs:
        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            borders = torch.tensor([0, n // 2 - 4, n // 2 - 3, n, n], dtype=torch.int32, device=t[0].device)
            named = {**settings, "sinks": t[3]} if sinks else settings
            return function(*t[:3], borders, n, 0.125, **named)

        shapes = {"q": (n, 4, 128), "k": (n, 2, 128), "v": (n, 2, features)} | ({"sinks": (4,)} if sinks else {})
        leaves = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
        return Inputs(leaves=leaves, call=call, what=what, apart=apart)

    yield made()
    yield made(what="gaps between rows", apart=True)
    yield made(what="values of 64 features", features=64)
    yield made(what="a window of 5", window=5)
    yield made(what="a window of 2", window=2)
    yield made(what="a window of 70 of 300 tokens", n=300, window=70)
    yield made(what="a soft cap", softcap=1.5)
    yield made(what="sinks", sinks=True)
    yield made(what="a window and sinks", sinks=True, window=5)
    yield made(what="a window, a soft cap and sinks, gaps between rows", apart=True, sinks=True, window=5, softcap=1.5)


def _cross_entropy() -> Iterator[Inputs]:
    def made(n: int, vocabulary: int, what: str = "") -> Inputs:
        labels = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(3))
        labels[[0, 7 % n, n - 1]] = IGNORE_LABEL
        labels[n // 2] = vocabulary - 1
        leaves = {"logits": normal(n, vocabulary, seed=0)}
        return Inputs(leaves=leaves, call=lambda f, t: f(t[0], labels.to(t[0].device)), what=what)

    yield made(48, 128)
    yield made(200, 100, what="200 tokens of 100 words")


def _dropout() -> Iterator[Inputs]:
    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        return function(t[0], torch.tensor([5, 7], dtype=torch.int32, device=t[0].device), 3, 0.25)

    yield Inputs(leaves={"x": normal(48, 64, seed=0)}, call=call)
    yield Inputs(leaves={"x": normal(1, 40, seed=0)}, call=call, what="one row of 40")


def _adapted_linears() -> Iterator[Inputs]:
    def made(n: int, what: str = "", apart: bool = False) -> Inputs:
        shape = compute.PanelShape(inputs=64, outputs=(64, 128), rank=16, scale=0.75, dropout=0.0, salts=(0, 1))
        weights = [normal(o, 64, seed=o) for o in shape.outputs]
        leaves = {"x": normal(n, 64, seed=20)}
        for s, o in enumerate(shape.outputs):
            leaves |= {f"A{s}": normal(16, 64, seed=s), f"B{s}": normal(o, 16, seed=s)}

        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            x, *ab = t
            panel = shape.allocate(x.device, x.dtype)
            for number, weight in enumerate(weights):
                # Representable in bf16, so that all dtypes compute with the same weight.
                shape.weight(panel, number).copy_(weight.bfloat16())
            with torch.no_grad():
                shape.load(panel, list(zip(ab[::2], ab[1::2], strict=True)))
            return function(x, panel, None, shape, *ab)

        return Inputs(leaves=leaves, call=call, what=what, apart=apart)

    yield made(48)
    yield made(200, what="200 tokens")


CASES: Mapping[str, Callable[[], Iterable[Inputs]]] = {
    "rms_norm": _rms_norm,
    "gated_rms_norm": _gated_rms_norm,
    "swiglu": _swiglu,
    "geglu": _gated,
    "clamped_swiglu": partial(_gated, 0.9, 1.702),
    "squared_relu": _squared_relu,
    "rope": _rope,
    "norm_rope": _norm_rope,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "adapted_linears": _adapted_linears,
    **EXPERT_CASES,
    **SCAN_CASES,
}
"""Op → its inputs; the first ones are ordinary."""

WIDE_STATISTICS = frozenset({"rms_norm", "norm_rope"})
"""Ops whose statistics of a row are in fp32, so that no row is scaled by a rounded factor."""

WITHOUT_CASES = frozenset(
    {
        "adamw_8bit_update",
        "adamw_update",
        "add_tree_sum",
        "choose_tokens",
        "matrix_momentum",
        "matrix_update",
        "nvfp4_quantised",
        "nvfp4_rounded",
        "quantise_both",
        "route",
        "scaled_linears",
        "slot_attention",
        "sum_coded_product",
        "token_bounds",
        *STEPS,
    }
)
"""Ops that work in place or return codes or choices: an error bound on results and gradients cannot check them.
`fills_slots` checks `slot_attention` and the steps of recurrences; packs test the bits of the others."""


def _spread(tensor: Tensor) -> Tensor:
    """A copy with gaps between rows."""
    room = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 16)
    return room[..., : tensor.shape[-1]].copy_(tensor)


def _leaves(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    made = [t.to(device, dtype) for t in inputs.leaves.values()]
    return [_spread(t) if inputs.apart and t.ndim > 1 else t.clone() for t in made]


def _values(function: Callable[..., Any], inputs: Inputs, leaves: list[Tensor]) -> dict[str, Tensor]:
    returned = inputs.call(function, leaves)
    if isinstance(returned, Tensor):
        return {"y": returned}
    ensure(isinstance(returned, tuple | list), f"it returns {type(returned).__name__}, not a tensor")
    return {f"y{number}": y for number, y in enumerate(returned)}


def _run(function: Callable[..., Any], inputs: Inputs, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Values and gradients by name; refuses a function that writes to its arguments."""
    # Views, so that the layout stays; writes of a function to them are visible in `leaves`.
    before = [t.clone() for t in leaves]
    given = [t.detach().requires_grad_() for t in leaves]
    with HonestOps():
        values = _values(function, inputs, given)
    _ensure_untouched(inputs.leaves, leaves, before, "argument")
    dys = [normal(*y.shape, seed=70 + n).to(y) for n, y in enumerate(values.values())]
    if inputs.apart:
        dys = [_spread(dy) if dy.ndim > 1 else dy for dy in dys]
    kept = [dy.clone() for dy in dys]
    live = [name for name, y in values.items() if not y.requires_grad]
    ensure(not live, f"{', '.join(live)} has no gradient")
    with HonestOps():
        gradients = torch.autograd.grad(list(values.values()), given, dys, allow_unused=True)
    _ensure_untouched(inputs.leaves, leaves, before, "argument")
    _ensure_untouched(values, dys, kept, "gradient of")
    found = {name: y.detach() for name, y in values.items()}
    for name, gradient in zip(inputs.leaves, gradients, strict=True):
        ensure(gradient is not None, f"it gives no d{name}")
        assert gradient is not None
        found[f"d{name}"] = gradient
    return found


def _ensure_untouched(names: Iterable[str], tensors: list[Tensor], before: list[Tensor], what: str) -> None:
    for name, tensor, old in zip(names, tensors, before, strict=True):
        ensure(torch.equal(tensor, old), f"it writes to its {what} {name}")


def _takes(kernel: bundles.Kernel, inputs: Inputs, leaves: list[Tensor]) -> bool:
    answers: list[bool] = []

    def ask(*args: Any, **kwargs: Any) -> None:
        known = kwargs.keys() & extensions[kernel.op].keys() <= kernel.knows
        answers.append(known and kernel.takes(*args, **kwargs))

    inputs.call(ask, leaves)
    return all(answers)


def _devices(pack: bundles.KernelPack) -> list[torch.device]:
    known = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    reasons = {device: pack.unavailable(device) for device in known}
    usable = [device for device, reason in reasons.items() if reason is None]
    if not usable:
        raise NotApplicable("; ".join(str(r) for r in reasons.values()))
    return usable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A kernel and inputs that it supports."""

    kernel: bundles.Kernel
    device: torch.device
    dtype: torch.dtype
    inputs: Inputs

    @property
    def leaves(self) -> list[Tensor]:
        return _leaves(self.inputs, self.device, self.dtype)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix an error with the kernel's name and its inputs."""
        special = f", {self.inputs.what}" if self.inputs.what else ""
        where = f"{self.kernel.op} {self.kernel.name} on {self.device.type} in {self.dtype}{special}"
        try:
            with explained(where):
                yield
        except AssertionError as error:
            if isinstance(error.__cause__, Exception):
                raise
            raise AssertionError(f"{where}: {error}").with_traceback(error.__traceback__) from error.__cause__


def _inputs(op: str) -> Iterable[Inputs]:
    if op in CASES:
        return CASES[op]()
    return inputs_of(op) if op in compute.references and op not in WITHOUT_CASES else ()


def _cases(pack: bundles.KernelPack) -> Iterator[_Case]:
    """Every kernel with all supported inputs of its op, in each supported dtype and on each supported device."""
    for device in _devices(pack):
        for kernel in pack.kernels():
            for dtype in BOUNDS:
                if not kernel.supports(device, dtype):
                    continue
                for inputs in _inputs(kernel.op):
                    case = _Case(kernel=kernel, device=device, dtype=dtype, inputs=inputs)
                    with case.named():
                        taken = _takes(kernel, inputs, case.leaves)
                    if taken:
                        yield case


def names_ops(pack: bundles.KernelPack) -> None:
    """Every kernel belongs to an op of the core, of the pack or of those that it serves, has a unique name, and a
    higher priority than the reference.
    """
    _devices(pack)
    define_ops([pack])
    kernels = list(pack.kernels())
    for kernel in kernels:
        if kernel.op in pack.serves and kernel.op not in compute.references:
            continue
        fault = fault_of(kernel)
        ensure(not fault, f"kernel {kernel.name}: {fault}")
        ensure_declared(pack, kernel)
        lowest = REFERENCE_PRIORITY
        ensure(kernel.priority > lowest, f"{kernel.name} is never above the reference, whose priority is {lowest}")
    names = [(k.op, k.name) for k in kernels]
    ensure(len(set(names)) == len(names), "two kernels of an op have one name")


def computes_what_it_knows(pack: bundles.KernelPack) -> None:
    """A kernel takes some of the kit's inputs with each extension that it knows, and has no other one as parameter."""
    devices = _devices(pack)
    define_ops([pack])
    kernels = [k for k in pack.kernels() if extensions.get(k.op)]
    if not kernels:
        _ensure_defined(pack)
        raise NotApplicable("no kernel's op has an extension")
    taken: dict[tuple[str, str], set[str]] = {}
    for case in _cases(pack):
        taken.setdefault((case.kernel.op, case.kernel.name), set()).update(_extensions(case.inputs, case.leaves))
    for kernel in kernels:
        ensure_known(kernel)
        inputs = [(one, list(one.leaves.values())) for one in _inputs(kernel.op)]
        known = kernel.knows & {name for one, leaves in inputs for name in _extensions(one, leaves)}
        if any(kernel.supports(device, dtype) for device in devices for dtype in BOUNDS):
            left = sorted(known - taken.get((kernel.op, kernel.name), set()))
            what = f"kernel {kernel.name} of {kernel.op} knows {', '.join(left)}"
            ensure(not left, f"{what}, and takes none of the kit's inputs with it")


def _extensions(inputs: Inputs, leaves: list[Tensor]) -> set[str]:
    """Keyword arguments of these inputs."""
    found: set[str] = set()
    inputs.call(lambda *args, **named: found.update(named), leaves)
    return found


def fills_slots(pack: bundles.KernelPack) -> None:
    """Kernels of `slot_attention`, with every extension that they know, and of the steps of recurrences give what the
    reference gives in float64, and write what it writes.
    """
    tried = 0
    checks = {"slot_attention": ensure_slots_are_filled, **dict.fromkeys(STEPS, ensure_states_move_on)}
    for device in _devices(pack):
        for kernel in pack.kernels():
            for dtype in BOUNDS:
                if kernel.op in checks and kernel.supports(device, dtype):
                    with explained(f"{kernel.op} {kernel.name} on {device.type} in {dtype}"):
                        checks[kernel.op](kernel, device, dtype, BOUNDS[dtype])
                    tried += 1
    if not tried:
        raise NotApplicable("no kernel that writes into slots supports a device of this machine")


def equals_references(pack: bundles.KernelPack) -> None:
    """Values and gradients are those of the reference in float64, in each dtype and shape that it takes."""
    _try(pack, _ensure_equal)


def _try(pack: bundles.KernelPack, check: Callable[[_Case], None]) -> None:
    """Raises `NotApplicable` if there was nothing to check, or if nobody defines the op of some kernels."""
    tried = 0
    for case in _cases(pack):
        with case.named():
            check(case)
        tried += 1
    _ensure_defined(pack)
    if not tried:
        raise NotApplicable("no kernel supports a device of this machine and takes the kit's inputs")


def _ensure_defined(pack: bundles.KernelPack) -> None:
    missing = sorted({k.op for k in pack.kernels() if k.op in pack.serves and k.op not in compute.references})
    if missing:
        raise NotApplicable(f"no installed plugin defines {', '.join(missing)}; install it to compare")


def _ensure_equal(case: _Case) -> None:
    reference, leaves, dtype = compute.references[case.kernel.op].function, case.leaves, case.dtype
    found = _run(case.kernel.function, case.inputs, leaves)
    expected = _run(reference, case.inputs, [t.double() for t in leaves])
    ensure(found.keys() == expected.keys(), f"it returns {len(found)} tensors, not {len(expected)}")
    own = _run(reference, case.inputs, leaves) if case.kernel.op in WIDE_STATISTICS else {}
    for name, exact in expected.items():
        a, b = found[name], exact.double()
        ensure(a.shape == b.shape, f"{name} has the shape {tuple(a.shape)}, not {tuple(b.shape)}")
        ensure(bool(a.isfinite().all()), f"{name} is not finite")
        error = float((a.double() - b).abs().max() / b.abs().max())
        ensure(error <= BOUNDS[dtype], f"error {error:.1e} of {name}, more than {BOUNDS[dtype]:.0e}")
        if name in own and b.ndim > 1 and name.startswith("y"):
            off, usual = _row_scale(a, b), _row_scale(own[name], b)
            ensure(
                off <= 3 * usual + 1e-6,
                f"rows of {name} are scaled by a factor that is {off:.1e} off, the reference's by {usual:.1e}: "
                f"statistics of a row must be fp32",
            )


def _row_scale(found: Tensor, exact: Tensor) -> float:
    """Error in the scaling of the rows: root mean square over the rows; rounding of elements averages out."""
    a, b = found.double().flatten(0, -2), exact.double().flatten(0, -2)
    scale = (a * b).sum(-1) / (b * b).sum(-1)
    return float((scale - 1).square().mean().sqrt())


def is_traced_as_it_runs(pack: bundles.KernelPack) -> None:
    """On fake tensors, as blocks are traced with, it gives the shapes, dtypes and layouts of a real run."""
    _try(pack, _ensure_traced)


def _ensure_traced(case: _Case) -> None:
    found, traced = _run(case.kernel.function, case.inputs, case.leaves), _layouts_traced(case)
    for name, tensor in found.items():
        real = _layout(tensor)
        ensure(
            traced[name] == real,
            f"traced, {name} is {traced[name]}, and when it runs {real}: the fake of its custom op is wrong",
        )


def _layout(tensor: Tensor) -> str:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tuple(strides)}"


def _layouts_traced(case: _Case) -> dict[str, str]:
    """The result of `_run`, on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(t).detach().requires_grad_() for t in case.leaves]
        try:
            values = _values(case.kernel.function, case.inputs, given)
            dys = [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) for y in values.values()]
            if case.inputs.apart:
                dys = [_spread(dy) if dy.ndim > 1 else dy for dy in dys]
            gradients = torch.autograd.grad(list(values.values()), given, dys)
        except DataDependentOutputException as error:
            raise AssertionError(f"it reads a tensor's value on the host ({error.func})").with_traceback(
                error.__traceback__
            ) from error
        names = (f"d{name}" for name in case.inputs.leaves)
        return {n: _layout(t) for n, t in (*values.items(), *zip(names, gradients, strict=True))}


def repeats_its_bits(pack: bundles.KernelPack) -> None:
    """A kernel that is `deterministic` gives equal bits for equal inputs."""
    for case in _cases(pack):
        if case.kernel.deterministic:
            with case.named():
                first, second = (_run(case.kernel.function, case.inputs, case.leaves) for _ in range(2))
                for name, tensor in first.items():
                    ensure(torch.equal(tensor, second[name]), f"{name} has other bits the second time")
    _ensure_defined(pack)


CHECKS = (
    *(names_ops, equals_references, computes_what_it_knows, fills_slots),
    *(is_traced_as_it_runs, repeats_its_bits),
)


def checks_beside(families: Iterable[bundles.ModelFamily]) -> list[Callable[[bundles.KernelPack], None]]:
    """The checks, with the ops of these families."""
    return [beside(families, check) for check in CHECKS]
