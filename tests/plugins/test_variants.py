"""Plugins with one fault each: the conformance kit finds it, and its message names the contract.

Shape suffixes as in `surogate_core.kernels.ops`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import mixture
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from surogate_core import bundles, dsl
from surogate_core.data.encoded import Encoded
from surogate_core.dsl import Routes, project
from surogate_core.dsl.sides import TOKENS, router_figures
from surogate_core.events import Control, Progress, StepEnd
from surogate_core.kernels import ops
from surogate_testing import guard, monitors, tiny
from surogate_testing.suites import bundle_checks

torch.set_num_threads(1)


def failures(kind: str, bundle: Any, *titles: str) -> str:
    """The messages of the checks with these titles about a bundle, one line each."""
    found = []
    for check in bundle_checks(kind, bundle):
        if check.title in titles:
            try:
                check.run()
            except AssertionError as error:
                found.append(f"{check}: {error}")
    return "\n".join(found)


# ------------------------------------------------------------------------------ optimizers


class Adam:
    """A right optimizer with state; the variants change one thing."""

    def __init__(self, groups: Any, options: Any):
        self.groups = groups
        self.first = {g.name: torch.zeros_like(g.grad) for g in groups}

    def gradient(self, group: Any, clip: Tensor, skip: Tensor) -> Tensor:
        return torch.where(skip > 0, 0.0, group.grad * clip)

    def decay(self, group: Any) -> Tensor | float:
        return group.weight_decay * group.master

    def direction(self, momentum: Tensor) -> Tensor:
        return momentum

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        for group in self.groups:
            momentum = self.first[group.name]
            momentum.lerp_(self.gradient(group, clip, skip), 0.1 * (1 - skip))
            group.master.sub_(lr * (1 - skip) * (self.direction(momentum) + self.decay(group)))

    def state(self) -> dict[str, Tensor]:
        return dict(self.first)


def optimizer(**changes: Any) -> bundles.OptimizerSpec:
    made = type("Variant", (Adam,), changes)
    return bundles.OptimizerSpec(name="x", build=made, state_bytes_per_parameter=4.0)


def _reads_lr(self: Any, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
    Adam.step(self, lr=torch.tensor(float(lr)), clip=clip, skip=skip)


def _reads_skip(self: Any, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
    if skip:
        return
    Adam.step(self, lr=lr, clip=clip, skip=skip)


def _selects(self: Any, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
    for group in self.groups:
        chosen = group.grad != 0
        group.master[chosen] -= lr * (1 - skip) * (group.grad[chosen] * clip)


def _adds(value: float) -> Callable[..., None]:
    def step(self: Any, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        Adam.step(self, lr=lr, clip=clip, skip=skip)
        for group in self.groups:
            offset, shape = next(iter(reversed(group.shapes.values())))
            group.master[offset + int(np.prod(shape)) :] += value

    return step


def _raises(*args: Any, **kwargs: Any) -> NoReturn:
    raise ZeroDivisionError("by the plugin")


READS = ("reads nothing back",)
OPTIMIZERS: Mapping[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "padding moves with lr": (
        {"direction": lambda self, m: torch.where(m >= 0, 1.0, -1.0)},
        ("steps",),
        "which is padding between parameters; it must stay 0",
    ),
    "padding moves by itself": (
        {"step": _adds(1e-3)},
        ("steps",),
        "wrote 0.001 to element 289 of `master`, which is padding",
    ),
    "padding is NaN": (
        {"step": _adds(float("nan"))},
        ("steps",),
        "wrote nan to element 289 of `master`, which is padding",
    ),
    "clip is ignored": (
        {"gradient": lambda self, g, clip, skip: torch.where(skip > 0, 0.0, g.grad)},
        ("multiplies gradients by clip",),
        "`clip` is not what gradients are multiplied by",
    ),
    "decay is ignored": (
        {"decay": lambda self, g: 0.0},
        ("decays weights",),
        "`weight_decay` of group decayed is ignored",
    ),
    "decay grows weights": (
        {"decay": lambda self, g: -g.weight_decay * g.master},
        ("decays weights",),
        "does not draw towards 0",
    ),
    "every group decays": (
        {"decay": lambda self, g: max(x.weight_decay for x in self.groups) * g.master},
        ("decays weights",),
        "group undecayed has weight_decay 0 and moves",
    ),
    "float(lr)": ({"step": _reads_lr}, READS, "step reads a tensor's value on the host (__float__)"),
    "if skip": ({"step": _reads_skip}, READS, "step reads a tensor's value on the host (__bool__)"),
    "indexing by a mask": ({"step": _selects}, READS, "on the host (aten::index with a mask)"),
    "an exception": ({"step": _raises}, ("steps",), "ZeroDivisionError: by the plugin (at "),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_faults_of_optimizers_are_named(case: str) -> None:
    changes, titles, message = OPTIMIZERS[case]
    assert failures("optimizer", optimizer(), *titles) == ""
    assert message in failures("optimizer", optimizer(**changes), *titles)


def test_what_fails_in_a_plugin_has_file_and_line() -> None:
    said = failures("optimizer", optimizer(step=_raises), "steps")
    line = _raises.__code__.co_firstlineno + 1
    assert said.endswith(f"(at {__file__}:{line})")


# --------------------------------------------------------------------------------- recipes


def _rounding(change: Callable[[Tensor], Tensor], dx: float = 1.0) -> Any:
    """A product of rounded operands, straight through."""

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return change(x) @ change(w).t()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return dx * (change(dy) @ change(w)), change(dy).t() @ change(x)

    return lambda x, w, slot: Product.apply(x, w)


def _to_int8(rounded: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        scale = (x.abs().amax() / 127).clamp(min=1e-30)
        return rounded(x / scale) * scale

    return change


def _per_row(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def _no_dx(x: Tensor, w: Tensor, slot: Any) -> Tensor:
    return x.detach() @ w.t()


def _branches(x: Tensor, w: Tensor, slot: Any) -> Tensor:
    return x @ w.t() if x.abs().amax() > 0 else x.new_zeros(len(x), len(w))


RECIPES: Mapping[str, tuple[Any, str, str]] = {
    "dx × 1.2": (
        _rounding(_to_int8(torch.round), 1.2),
        "multiplies",
        "dx in torch.float32 is 1.199 times what it should be",
    ),
    "dx × 1.05": (_rounding(lambda x: x, 1.05), "multiplies", "dx in torch.float32 is 1.05 times what it should be"),
    "rounds down": (_rounding(_to_int8(torch.floor)), "rounds without bias", "y is rounded down on average"),
    "rounds up": (_rounding(_to_int8(torch.ceil)), "rounds without bias", "y is rounded up on average"),
    "truncates": (_rounding(_to_int8(torch.trunc)), "rounds without bias", "y is rounded down on average"),
    "NaN for a row of zeros": (_rounding(_per_row), "takes zeros", "is not finite where a row of x is zeros"),
    "no dx": (_no_dx, "multiplies", "linear gives no dx: its backward returns None"),
    "a branch on a value": (_branches, "reads nothing back", "linear reads a tensor's value on the host (__bool__)"),
    "another shape": (lambda x, w, s: (x @ w.t())[:3], "multiplies", "y has the shape (3, 32), not (32, 32)"),
    "no tensor": (lambda x, w, s: [x @ w.t()], "multiplies", "linear returned list, not a tensor"),
}


def _recipe(linear: Any) -> bundles.RecipeSpec:
    made = type("Made", (bundles.Recipe,), {"name": "x", "linear": staticmethod(linear)})
    return bundles.RecipeSpec(name="x", build=lambda options, context: made())


@pytest.mark.parametrize("case", RECIPES)
def test_faults_of_recipes_are_named(case: str) -> None:
    linear, title, message = RECIPES[case]
    right = _recipe(_rounding(_to_int8(torch.round)))
    assert failures("recipe", right, title) == ""
    assert message in failures("recipe", _recipe(linear), title)


# -------------------------------------------------------------------------------- monitors


class Monitor(monitors._Recorder):
    """A right one."""

    def __init__(self, options: Any, info: Any):
        super().__init__()


def _answer(**fields: Any) -> Any:
    return lambda self, event: Control(**fields) if isinstance(event, StepEnd) else None


def _sleep(self: Any, *args: Any) -> None:
    time.sleep(60)


def _hold_on(self: Any, *args: Any) -> None:
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


RUN = ("sees a run",)
MONITORS: Mapping[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "os._exit": ({"on_event": lambda self, e: os._exit(0)}, RUN, "it ends the process by os._exit(0) (at "),
    "a signal": (
        {"on_event": lambda self, e: os.kill(os.getpid(), signal.SIGTERM)},
        RUN,
        "it ends the process by SIGTERM",
    ),
    "sys.exit": ({"close": lambda self: sys.exit(0)}, RUN, "it ends the process by SystemExit(0)"),
    "close hangs": ({"close": _sleep}, RUN, "it is not done after 0.5 s: it hangs, or is far too slow (at "),
    "on_event hangs": ({"on_event": _sleep}, RUN, "it is not done after 0.5 s"),
    "state hangs": ({"state": _sleep}, ("keeps json",), "it is not done after 0.5 s"),
    "it cannot be interrupted": ({"close": _hold_on}, RUN, "and does not let itself be interrupted"),
    "slow": ({"on_event": lambda self, e: time.sleep(0.03)}, RUN, "on_event holds up the run: 3 events took 0.0 s"),
    "NaN in its state": ({"state": lambda self: {"best": float("nan")}}, ("keeps json",), "state() is not JSON"),
    "a set in its state": (
        {"state": lambda self: {"seen": {1}}},
        ("keeps json",),
        "state() is not JSON: Object of type set",
    ),
    "a list as state": ({"state": lambda self: [1]}, ("keeps json",), "state() is list, not a dictionary"),
    "lr_scale NaN": (
        {"on_event": _answer(lr_scale=float("nan"))},
        RUN,
        "step_end with lr_scale nan, which is not a finite",
    ),
    "lr_scale < 0": ({"on_event": _answer(lr_scale=-1.0)}, RUN, "step_end with lr_scale -1.0, which is not a finite"),
    "lr_scale is text": (
        {"on_event": _answer(lr_scale="0.5")},
        RUN,
        "step_end with lr_scale '0.5', which is not a number",
    ),
    "prints": ({"close": lambda self: sys.stdout.write("done\n")}, RUN, "it prints to standard output: 'done'"),
    "raises": ({"on_event": _raises}, RUN, "on_event fails at progress: ZeroDivisionError: by the plugin (at "),
    "no control": ({"on_event": lambda self, e: "stop"}, RUN, "progress with 'stop', which is not a Control"),
    "close raises": ({"close": _raises}, ("is isolated",), "close fails: ZeroDivisionError"),
}


@pytest.mark.parametrize("case", MONITORS)
def test_faults_of_monitors_are_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, titles, message = MONITORS[case]
    monkeypatch.setattr(guard, "SECONDS_APART", 0.5 if "not done" in message or "interrupted" in message else 60.0)
    monkeypatch.setattr(guard, "GRACE", 0.3)
    monkeypatch.setattr(monitors, "SLOW_SECONDS", 0.02 if case == "slow" else 10.0)
    said = failures("monitor", bundles.MonitorSpec(name="x", build=type("Variant", (Monitor,), changes)), *titles)
    assert message in said


def test_a_right_monitor_conforms() -> None:
    for spec in (
        bundles.MonitorSpec(name="x", build=Monitor),
        bundles.MonitorSpec(
            name="x", build=type("Loud", (Monitor,), {"close": lambda self: sys.stdout.write("done\n")}), prints=True
        ),
    ):
        assert failures("monitor", spec, "sees a run", "keeps json", "is isolated") == ""


def test_a_check_apart_leaves_this_process_as_it_is() -> None:
    before = os.getpid(), os._exit
    spec = bundles.MonitorSpec(name="x", build=type("Exits", (Monitor,), {"close": lambda self: os._exit(0)}))
    assert "os._exit(0)" in failures("monitor", spec, "sees a run")
    assert (os.getpid(), os._exit) == before


# --------------------------------------------------------------------------------- kernels


def _norm(x: Tensor, weight: Tensor, eps: float, wide: torch.dtype = torch.float32) -> Tensor:
    inverse = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    return weight * (x * inverse).to(x.dtype)


class _FirstRows(Function):
    """The gradient of the weight takes in the first 64 rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = _norm(x, weight, ctx.eps)
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        rows = torch.arange(len(x), device=x.device)[:, None] < 64
        (dw,) = torch.autograd.grad(y, [weight], torch.where(rows, dy, 0.0) if x.ndim == 2 else dy)
        return dx, dw, None


class _Dense(Function):
    """The backward reads the memory of the gradient as if its rows stood side by side."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.nn.functional.silu(gate) * up
        dgate, dup = torch.autograd.grad(y, [gate, up], dy.as_strided(dy.shape, (dy.shape[1], 1)))
        return dgate, dup


@torch.library.custom_op("surogate_variants::swiglu", mutates_args=())
def _fused(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@_fused.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, dtype=torch.float64)


def _fused_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return dy.to(torch.float32), dy.to(torch.float32)


_fused.register_autograd(_fused_backward)


def _clobbers(gate: Tensor, up: Tensor) -> Tensor:
    y = ops.swiglu(gate, up)
    with torch.no_grad():
        gate.mul_(1.0).add_(1e-9)
    return y


def _branching(gate: Tensor, up: Tensor) -> Tensor:
    return ops.swiglu(gate, up) if float(gate.detach().sum()) < 1e30 else gate


def _only(test: Callable[[Tensor], bool]) -> Any:
    """Right where the test holds of x, wrong elsewhere."""

    def function(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = ops.rms_norm(x, weight, eps)
        return y if test(x) else 1.1 * y

    return function


F32 = torch.float32
EQUAL = "equals references"
KERNELS: Mapping[str, tuple[str, Any, torch.dtype, str, str]] = {
    "dW of the first rows": ("rms_norm", _FirstRows.apply, F32, EQUAL, "200 rows: error "),
    "eps is ignored": (
        "rms_norm",
        lambda x, w, e: _norm(x, w, 1e-6),
        F32,
        EQUAL,
        "eps as large as the mean square: error",
    ),
    "3 dimensions": ("rms_norm", _only(lambda x: x.ndim == 2), F32, EQUAL, "x of 3 dimensions: error"),
    "x with gaps": ("rms_norm", _only(lambda x: x.is_contiguous()), F32, EQUAL, "gaps between rows: error"),
    "dy with gaps": ("swiglu", _Dense.apply, F32, EQUAL, "gaps between rows: error"),
    "one row": ("rms_norm", _only(lambda x: len(x) > 1), F32, EQUAL, "one row: error"),
    "odd sizes": ("rms_norm", _only(lambda x: x.shape[-1] % 16 == 0), F32, EQUAL, "40 features: error"),
    "bf16 statistics": (
        "rms_norm",
        lambda x, w, e: _norm(x, w, e, torch.bfloat16),
        torch.bfloat16,
        EQUAL,
        "statistics of a row must be fp32",
    ),
    "a wrong dx": ("rms_norm", lambda x, w, e: ops.rms_norm(2 * x - x.detach(), w, e), F32, EQUAL, " of dx, more than"),
    "no dW": ("rms_norm", lambda x, w, e: ops.rms_norm(x, w.detach(), e), F32, EQUAL, "it gives no dweight"),
    "writes to its argument": ("swiglu", _clobbers, F32, EQUAL, "it writes to its argument gate"),
    "a fake of another dtype": ("swiglu", _fused, F32, "is traced as it runs", "traced, y is torch.float64"),
    "a branch on a value": ("swiglu", _branching, F32, "is traced as it runs", "it reads a tensor's value on the host"),
    "an exception": (
        "swiglu",
        _raises,
        F32,
        EQUAL,
        "swiglu k on cpu in torch.float32: ZeroDivisionError: by the plugin (at ",
    ),
    "no such op": ("swigloo", _raises, F32, "names ops", "there is no op 'swigloo'"),
}


@pytest.mark.parametrize("case", KERNELS)
def test_faults_of_kernels_are_named(case: str) -> None:
    op, function, dtype, title, message = KERNELS[case]

    def kernels() -> Iterator[bundles.Kernel]:
        yield bundles.Kernel(op=op, name="k", function=function, supports=lambda device, found: found == dtype)

    assert message in failures("kernels", bundles.KernelPack(name="x", kernels=kernels), title)


# -------------------------------------------------------------------------------- data sets


def _format(encode: Any) -> bundles.DatasetFormat:
    return bundles.DatasetFormat(name="x", options=bundles.NoOptions, encode=encode, examples=(({"a": "b"}, {}),))


FORMATS: Mapping[str, tuple[Any, str]] = {
    "lists": (
        lambda r, o, c: Encoded(input_ids=[1, 2], labels=[1, 2]),
        "input_ids is list, not a NumPy array of int32",
    ),  # type: ignore[arg-type]
    "int64": (
        lambda r, o, c: Encoded(input_ids=np.arange(3), labels=np.arange(3)),  # type: ignore[arg-type]
        "input_ids are int64, not int32",
    ),
    "no such id": (lambda r, o, c: Encoded.from_mask([1, 9999]), "an id is not in the vocabulary: 9999 of"),
    "an exception": (_raises, "ZeroDivisionError: by the plugin (at "),
}


@pytest.mark.parametrize("case", FORMATS)
def test_faults_of_formats_are_named(case: str) -> None:
    encode, message = FORMATS[case]
    assert message in failures("dataset", _format(encode), "labels are inputs")


# ---------------------------------------------------------------------------------- models


class Idle(tiny.TinyBlock):
    """Has a weight that it does not use."""

    spare = dsl.Param("spare.weight", tiny.D)


class Fading(tiny.TinyModel):
    layers = dsl.Stack(Idle, dsl.Dim("num_hidden_layers"), "layers.{i}.")


def _family(**changes: Any) -> bundles.ModelFamily:
    right = bundles.ModelFamily(
        name="x",
        hf_model_types=("conformance",),
        build=tiny.TinyModel,
        presets={"tiny": {**tiny.CONFIG, "architectures": ["Conformance"]}},
    )
    return replace(right, **changes)


def test_faults_of_families_are_named() -> None:
    assert failures("model", _family(), "says what it is") == ""
    said = failures("model", _family(hf_model_types=("other",)), "says what it is")
    assert "`hf_model_types` ('other') does not have the model_type 'conformance' of preset tiny" in said
    renamed = type("Renamed", (tiny.TinyModel,), {"architecture": "Another"})
    said = failures("model", _family(build=renamed), "says what it is")
    assert "`architecture` is 'Another', and preset tiny has `architectures` ['Conformance']" in said
    as_llama = {"tiny": {**tiny.CONFIG, "model_type": "llama"}}
    said = failures("model", _family(hf_model_types=("llama",), presets=as_llama), "says what it is")
    assert "`architecture` is 'Conformance'; transformers loads model_type 'llama' as LlamaForCausalLM" in said


def test_a_weight_that_a_block_does_not_use_is_named() -> None:
    said = failures("model", _family(build=Fading), "trains under every recipe")
    assert "Idle: the output of forward does not depend on spare, so that there is no gradient" in said


def _mixture(**changes: Any) -> bundles.ModelFamily:
    """A family with experts whose block has these attributes in the place of the right ones."""
    kept = {name: value for name, value in vars(mixture.Sparse).items() if not name.startswith("_")}
    block = type("Variant", (dsl.Block,), {**kept, **changes})
    layers = dsl.Stack(block, dsl.Dim("num_hidden_layers"), "layers.{i}.")
    return _family(build=type("Varied", (mixture.Mixture,), {"layers": layers}), presets={"tiny": mixture.CONFIG})


def _half(self: Any, x: Tensor, tables: Mapping[str, Tensor]) -> Any:
    y, figures = mixture.Sparse.forward(self, x, tables)
    return y, {**figures, TOKENS: figures[TOKENS] // 2}


def _last(self: Any, x: Tensor, tables: Mapping[str, Tensor]) -> Any:
    """If probabilities are equal, the highest number wins."""
    h = ops.rms_norm(x, self.norm, self.eps)
    logits = h @ self.router.t() + 1e-5 * torch.arange(6)
    routes = Routes.of(logits, self.choices, renormalise=True)
    gate, up = project(h, routes, self.gate, self.up)
    (y,) = project(ops.swiglu(gate, up), routes, self.down, gathered=True)
    return x + routes.combine(y), router_figures(logits, routes, tables)


EXPERTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "right": ({}, "routes every token", ""),
    "drops tokens": ({"forward": _half}, "routes every token", "and [58] are routed"),
    "ties": ({"forward": _last}, "routes every token", "do not go to the experts with the lowest numbers"),
    "frozen router": (
        {"router": dsl.Param("router.weight", mixture.E, mixture.D, init="normal", role="weight")},
        "trains its routers",
        "layers.1.: has experts, and no `Param` of role router",
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_faults_of_families_with_experts_are_named(case: str) -> None:
    changes, title, message = EXPERTS[case]
    said = failures("model", _mixture(**changes), title)
    assert message in said
    assert bool(said) == bool(message)


def test_only_families_with_experts_have_their_checks() -> None:
    titles = {check.title for check in bundle_checks("model", _mixture())}
    assert titles - {check.title for check in bundle_checks("model", _family())} == {
        "balances as transformers",
        "routes every token",
        "trains its routers",
        "merges its experts",
        "shares out its experts",
        "evens out loads",
    }


def test_the_events_of_a_run_begin_with_progress() -> None:
    assert isinstance(monitors.events_of_run()[0], Progress)
