"""The kit for kernel packs: extensions that a kernel does not compute, and ops of plugins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks
from torch import Tensor

from surogate_core import API_VERSION
from surogate_core.bundles import Kernel, KernelPack, ModelFamily
from surogate_core.kernels import registry
from surogate_core.kernels.decoding import slot_attention
from surogate_core.kernels.registry import references
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import kernels, own_ops, scan_cases, slot_cases
from surogate_testing.suites import bundle_checks

CPU = torch.device("cpu")
PAGE = Path(__file__).resolve().parents[2] / "docs/kernels.md"
ATTENTION = next(k for k in TORCH_PACK.kernels() if k.name == "torch-cpu" and k.op == "attention")


def pack(*offered: Kernel, **fields: Any) -> KernelPack:
    return KernelPack(name="x", kernels=lambda: offered, **fields)


def in_float32(kernel: Kernel) -> Kernel:
    return replace(kernel, supports=lambda device, dtype: device.type == "cpu" and dtype == torch.float32)


# ------------------------------------------------------------------------------ extensions


def without(function: Callable[..., Any], *ignored: str) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **{name: value for name, value in named.items() if name not in ignored})

    return call


@pytest.mark.parametrize(("ignored", "inputs"), [("window", "a window of 5"), ("sinks", "sinks")])
def test_a_kernel_that_ignores_what_it_knows_is_found(ignored: str, inputs: str) -> None:
    bad = in_float32(replace(ATTENTION, function=without(ATTENTION.function, ignored)))
    with pytest.raises(
        AssertionError, match=f"attention torch-cpu on cpu in torch.float32, {inputs}: (error|it gives no)"
    ):
        kernels.equals_references(pack(bad))


@pytest.mark.parametrize(
    ("op", "ignored"),
    [
        *(("grouped_linears", name) for name in ("parts", "others")),
        *(("combined_linear", name) for name in ("parts", "others")),
        ("combine", "parts"),
    ],
)
def test_a_kernel_of_experts_that_ignores_what_it_knows_is_found(op: str, ignored: str) -> None:
    """A kernel must obey the extensions of experts that ranks share out."""
    right = in_float32(replace(references[op], name="mine", priority=0))
    assert right.knows == {"combine": {"parts"}}.get(op, {"parts", "others"})
    kernels.computes_what_it_knows(pack(right))
    kernels.equals_references(pack(right))
    with pytest.raises(AssertionError, match=f"{op} mine on cpu in torch.float32, .*(apart|choices without a row)"):
        kernels.equals_references(pack(replace(right, function=without(right.function, ignored))))


def test_a_kernel_that_fails_with_what_it_knows_is_found() -> None:
    bad = in_float32(replace(ATTENTION, knows=frozenset({"window", "sinks", "softcap"})))
    with pytest.raises(AssertionError, match=r"in torch\.float32, a soft cap: .*unexpected keyword argument 'softcap'"):
        kernels.equals_references(pack(bad))


@pytest.mark.parametrize("op", ["attention", "rms_norm"])
def test_every_extension_changes_the_results_of_some_inputs(op: str) -> None:
    """Otherwise a kernel could ignore it unseen. Where a norm is rounded changes less than any kernel may differ."""
    reference, seen = references[op].function, set()
    for inputs in kernels.CASES[op]():
        leaves = list(inputs.leaves.values())
        known = kernels._extensions(inputs, leaves)
        whole = inputs.call(reference, leaves)
        for name in known - {"rounds_once"}:
            other = inputs.call(without(reference, name), leaves)
            assert float((whole - other).abs().max() / whole.abs().max()) > 2 * max(kernels.BOUNDS.values()), (
                inputs.what
            )
        seen |= known
    assert seen == registry.extensions[op].keys()
    assert registry.extensions["slot_attention"].keys() == slot_cases.SETTINGS.keys()


def test_a_kernel_with_a_parameter_that_it_does_not_say_it_knows() -> None:
    for known in ((), ("sinks",)):
        silent = replace(ATTENTION, knows=frozenset(known))
        with pytest.raises(
            AssertionError, match=r"torch-cpu of attention has the parameter .*window, which it never gets"
        ):
            kernels.computes_what_it_knows(pack(silent))
    refusing = replace(ATTENTION, takes=lambda *args, **named: "window" not in named)
    with pytest.raises(AssertionError, match="torch-cpu of attention knows window, and takes none of the kit's inputs"):
        kernels.computes_what_it_knows(pack(refusing))
    kernels.computes_what_it_knows(pack(ATTENTION))


def slots(function: Callable[..., Any], *known: str) -> KernelPack:
    return pack(
        in_float32(
            Kernel(
                op="slot_attention",
                name="mine",
                function=function,
                supports=lambda device, dtype: True,
                knows=frozenset(known),
            )
        )
    )


def test_kernels_of_slot_attention_fill_the_slots() -> None:
    right = references["slot_attention"].function
    every = ("window", "softcap", "sinks")
    kernels.fills_slots(slots(right, *every))
    kernels.fills_slots(slots(right))
    for name in every:
        with pytest.raises(AssertionError, match=f"with {name}: error"):
            kernels.fills_slots(slots(without(right, name), *every))

    def no_ring(*args: Any, window: int = 0) -> Tensor:
        """Reads a place as if it held the position of its number."""
        *given, positions, longest, scale = args
        known = {"window": window} if longest == given[3].shape[1] else {}
        return right(*given, positions % given[3].shape[1], longest, scale, **known)

    with pytest.raises(AssertionError, match="with window, in a ring: "):
        kernels.fills_slots(slots(no_ring, "window"))

    def writes_nothing(*args: Any) -> Tensor:
        return slot_attention(*args[:3], *(t.clone() for t in args[3:5]), *args[5:])

    with pytest.raises(AssertionError, match="without extensions: the slots hold other keys"):
        kernels.fills_slots(slots(writes_nothing))


@pytest.mark.parametrize("op", scan_cases.STEPS)
def test_kernels_of_steps_move_the_states_of_their_slots_on(op: str) -> None:
    reference = references[op].function

    def step(change: Callable[..., Any]) -> KernelPack:
        """`change`: (y, states, slots) after the step → y."""

        def function(*args: Any) -> Tensor:
            place = next(n for n, t in enumerate(args) if t.dtype == torch.int64)
            return change(reference(*args), *args[place - 1 : place + 1])

        return pack(in_float32(Kernel(op=op, name="mine", function=function, supports=lambda device, dtype: True)))

    kernels.fills_slots(step(lambda y, states, slots: y))
    faults: dict[str, Callable[..., Any]] = {
        "shape": lambda y, states, slots: y[:2],
        "error 1": lambda y, states, slots: y.roll(1, 0),
        "error of the states": lambda y, states, slots: (states[slots[:2]].zero_(), states[:4].mul_(1.001), y)[2],
        "it changes slots that no row has": lambda y, states, slots: (states[1].mul_(1 + 1e-6), y)[1],
        "the last slot, of rows that do not count": lambda y, states, slots: (states[-1].add_(1), y)[1],
    }
    for message, change in faults.items():
        with pytest.raises(AssertionError, match=f"^{message}"):
            kernels.fills_slots(step(change))


# -------------------------------------------------------------------------- ops of plugins

OPS = '''
import torch
from torch.autograd import Function
from surogate_core.kernels.registry import op

@op
def acme_scan(x: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
    """Sums of the rows up to each."""
    return x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0)

class Wrong(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, dy):
        return dy

@op
def acme_wrong(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return Wrong.apply(x)

def inputs():
    from surogate_testing.kernel_inputs import Inputs, normal
    yield Inputs(leaves={"x": normal(6, 4, seed=0)}, call=lambda f, t: f(*t))
    yield Inputs(leaves={"x": normal(6, 4, seed=0)}, call=lambda f, t: f(*t, reverse=True), what="reversed")

INPUTS = {"acme_scan": inputs, "acme_wrong": tuple}
'''


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of modules, whose ops are forgotten after the test."""
    for name in ("references", "extensions"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    for module in (kernels, own_ops, sys.modules["surogate_testing.kernel_inputs"]):
        for name in ("references", "extensions"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(registry, name))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        if tmp_path in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
            del sys.modules[name]


def family_of(*modules: str) -> ModelFamily:
    return ModelFamily(name="acme", hf_model_types=(), build=lambda config: None, ops=modules)  # type: ignore


@pytest.fixture
def acme(workshop: Path) -> Callable[..., ModelFamily]:
    """A family with two ops, of which `acme_wrong` has no inputs; optionally with further lines in their module."""
    (workshop / "acme_nothing.py").touch()

    def made(lines: str = "") -> ModelFamily:
        (workshop / "acme_ops.py").write_text(OPS + lines)
        sys.modules.pop("acme_ops", None)
        return family_of("acme_ops")

    return made


def test_ops_of_a_family_are_checked(acme: Callable[..., ModelFamily]) -> None:
    own_ops.defines_its_ops(acme())
    with pytest.raises(AssertionError, match="the module acme_nothing in `ops` defines no op"):
        own_ops.defines_its_ops(replace(acme(), ops=("acme_ops", "acme_nothing")))
    titles = [check.title for check in bundle_checks("model", acme())]
    assert titles[0] == "defines its ops"


def test_a_reference_with_a_wrong_gradient_is_found(acme: Callable[..., ModelFamily]) -> None:
    family = acme('INPUTS["acme_wrong"] = lambda: list(inputs())[:1]')
    with pytest.raises(AssertionError, match="the reference of acme_wrong: its gradients are not those of its values"):
        own_ops.defines_its_ops(family)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("lambda: next(inputs())", "returns Inputs, not an iterable. Fix: a function without arguments that yields"),
        ("next(inputs())", "is Inputs, not a function. Fix: a function without arguments that yields Inputs(...)"),
        ("lambda: 1 / 0", ": ZeroDivisionError: division by zero"),
        ("lambda: (1 / 0 for _ in 'a')", ": ZeroDivisionError: division by zero"),
        ("lambda: [{}]", "gives dict, not Inputs"),
        ("lambda: [Inputs(leaves=[torch.ones(2)], call=None)]", "`leaves` is list, not a mapping of names to tensors"),
        ("lambda: [Inputs(leaves={'x': [1.0]}, call=None)]", "the leaf x is list, not a tensor"),
        ("lambda: [Inputs(leaves={'x': torch.ones(2).int()}, call=None)]", "the leaf x is torch.int32"),
        (None, "is missing. Fix: a function without arguments that yields Inputs(...); `tuple` for an op without"),
    ],
)
def test_inputs_of_a_wrong_shape_are_named(acme: Callable[..., ModelFamily], value: str | None, fault: str) -> None:
    change = "del INPUTS['acme_scan']" if value is None else f"INPUTS['acme_scan'] = {value}"
    family = acme(f"from surogate_testing.kernel_inputs import Inputs\n{change}")
    with pytest.raises(AssertionError) as caught:
        own_ops.defines_its_ops(family)
    said = str(caught.value)
    assert said.startswith('model family acme: INPUTS["acme_scan"] of the module acme_ops')
    assert fault in said


def test_inputs_in_float32_are_differentiated_in_float64(acme: Callable[..., ModelFamily]) -> None:
    single = 'INPUTS["acme_scan"] = lambda: [replace(i, leaves={"x": i.leaves["x"].float()}) for i in inputs()]'
    own_ops.defines_its_ops(acme(f"from dataclasses import replace\n{single}"))


def test_a_reference_that_leaves_float64_is_found(acme: Callable[..., ModelFamily]) -> None:
    family = acme("INPUTS['acme_wrong'] = lambda: list(inputs())[:1]\nWrong.apply = lambda x: x.float()")
    with pytest.raises(AssertionError, match=r"acme_wrong: it returns torch\.float32 for arguments in torch\.float64"):
        own_ops.defines_its_ops(family)


def test_kernels_for_the_op_of_another_plugin_are_checked(acme: Callable[..., ModelFamily]) -> None:
    def scan(x: Tensor, *, reverse: bool = False) -> Tensor:
        return references_of_today()["acme_scan"].function(x, reverse=reverse)

    def references_of_today() -> dict[str, Kernel]:
        return registry.references

    kernel = Kernel(
        op="acme_scan",
        name="mine",
        function=scan,
        supports=lambda device, dtype: device == CPU,
        knows=frozenset({"reverse"}),
    )
    serving = pack(kernel, serves=frozenset({"acme_scan"}))

    def run(made: KernelPack, *families: ModelFamily) -> dict[str, str]:
        found = {}
        for check in bundle_checks("kernels", made, families={f.name: f for f in families}):
            try:
                check.call()
            except Exception as error:
                found[check.title] = str(error)
        return found

    alone = run(serving)
    assert "names ops" not in alone
    assert alone["equals references"] == "no installed plugin defines acme_scan; install it to compare"
    assert set(alone) == {t.__name__.replace("_", " ") for t in kernels.CHECKS} - {"names ops"}
    assert set(run(serving, acme())) == {"fills slots"}
    said = run(pack(kernel), acme())
    assert (
        "acme_scan is an op of another plugin (acme_ops), without which every run ends. Fix: add it"
        in said["names ops"]
    )
    ignoring = replace(kernel, function=partial(lambda x, reverse: scan(x), reverse=False))
    assert "reversed: error" in run(pack(ignoring, serves=frozenset({"acme_scan"})), acme())["equals references"]


def test_the_example_of_two_plugins_conforms(workshop: Path) -> None:
    """docs/kernels.md: an op of a model family, and a kernel for it in another distribution."""
    for block in blocks(PAGE):
        if block.mark.startswith("file: "):
            file = workshop / block.mark.removeprefix("file: ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
    family = family_of("surogate_model_acme.ops")
    own_ops.defines_its_ops(family)
    plugin = import_module("surogate_kernels_acme")
    assert f">={API_VERSION},<{API_VERSION + 1}" == plugin.SUROGATE_API
    made = plugin.surogate_kernel_pack()
    for check in (kernels.names_ops, kernels.equals_references, kernels.computes_what_it_knows):
        own_ops.beside([family], check)(made)
    import_module("test_acme").test_leaky_gate_equals_the_reference()
