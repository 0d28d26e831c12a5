"""The choice of the kernel for an op."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from surogate_core.bundles import Kernel, KernelPack, ModelFamily
from surogate_core.dsl.trace import Signature, trace_joint
from surogate_core.errors import PluginError
from surogate_core.kernels import ops, registry
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK

CPU = torch.device("cpu")


def kernel(
    name: str, *, priority: int = 0, dtypes: tuple[torch.dtype, ...] = (torch.float32,), op: str = "swiglu"
) -> Kernel:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        return torch.full_like(gate, 7)

    return Kernel(
        op=op, name=name, function=function, supports=lambda device, dtype: dtype in dtypes, priority=priority
    )


def table(*kernels: Kernel) -> KernelTable:
    return KernelTable.build(CPU, [KernelPack(name="test", kernels=lambda: kernels)])


@pytest.mark.parametrize(
    ("kernels", "chosen"),
    [
        ((), "reference"),
        ((kernel("a"),), "a"),
        ((kernel("a"), kernel("b", priority=1)), "b"),
        ((kernel("b"), kernel("a")), "a"),
        ((kernel("a", dtypes=(torch.bfloat16,)),), "reference"),
        ((kernel("a", priority=-101),), "reference"),
        ((kernel("a", op="rope"),), "reference"),
    ],
    ids=["none", "one", "higher priority", "a tie by name", "another dtype", "below the reference", "another op"],
)
def test_choice(kernels: tuple[Kernel, ...], chosen: str) -> None:
    made = table(*kernels)
    assert made.choose("swiglu", torch.float32).name == chosen
    assert made.chosen == {("swiglu", "float32"): chosen}


def test_an_op_runs_what_the_active_table_chooses() -> None:
    x = torch.ones(2, 3)
    plain = ops.swiglu(x, x)
    with registry.using(table(kernel("a"))) as active:
        assert (ops.swiglu(x, x) == 7).all()
        assert torch.equal(ops.swiglu(x.double(), x.double()).float(), plain)
        with registry.using(table()):
            assert torch.equal(ops.swiglu(x, x), plain)
        assert (ops.swiglu(x, x) == 7).all()
    assert torch.equal(ops.swiglu(x, x), plain)
    assert active.chosen == {("swiglu", "float32"): "a", ("swiglu", "float64"): "reference"}


def test_the_table_ends_with_an_error_inside() -> None:
    with pytest.raises(ZeroDivisionError), registry.using(table(kernel("a"))):
        raise ZeroDivisionError
    x = torch.ones(2, 3)
    assert not (ops.swiglu(x, x) == 7).any()


def test_a_pack_that_the_device_cannot_use_is_not_asked_for_its_kernels() -> None:
    def compile_kernels() -> Any:
        raise AssertionError("must not be called")

    pack = KernelPack(name="gpu", kernels=compile_kernels, unavailable=lambda device: f"no {device.type} kernels")
    assert KernelTable.build(CPU, [pack]).kernels == ()


def test_a_kernel_is_asked_whether_it_takes_the_arguments() -> None:
    narrow = replace(kernel("narrow", priority=1), takes=lambda gate, up: gate.shape[-1] < 4)
    with registry.using(table(narrow, kernel("any"))) as active:
        ops.swiglu(torch.ones(2, 3), torch.ones(2, 3))
        assert active.chosen["swiglu", "float32"] == "narrow"
        ops.swiglu(torch.ones(2, 4), torch.ones(2, 4))
        assert active.chosen["swiglu", "float32"] == "any"


def test_a_pack_may_rewrite_a_joint_graph() -> None:
    def halve(joint: fx.Graph) -> None:
        for node in list(joint.nodes):
            if node.target == torch.ops.aten.mul.Tensor:
                with joint.inserting_after(node):
                    half = joint.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
                half.meta = dict(node.meta)
                node.replace_all_uses_with(half, delete_user_cb=lambda user, half=half: user is not half)

    def double(x: Tensor) -> Tensor:
        return x * 2

    inputs = [Signature((3,), torch.float32, CPU, requires_grad=True)]
    for unavailable, expected in ((None, 1.0), ("it is not there", 2.0)):
        pack = KernelPack(
            name="test", kernels=tuple, unavailable=lambda device, r=unavailable: r, rewrites=lambda: (halve,)
        )
        with registry.using(KernelTable.build(CPU, [pack])):
            joint = trace_joint(double, inputs)
        y, dx = fx.Interpreter(joint).run(torch.ones(3), torch.ones(3))
        assert y.tolist() == dx.tolist() == [expected] * 3


def test_an_op_keeps_its_name_and_documentation() -> None:
    for name, reference in registry.references.items():
        call = getattr(sys.modules[reference.function.__module__], name)
        assert call.__name__ == name
        assert call.__doc__


def test_a_kernel_of_any_order_is_used_only_when_that_is_allowed() -> None:
    def kernel(name: str, *, deterministic: bool, priority: int) -> Kernel:
        return Kernel(
            op="rms_norm",
            name=name,
            function=ops.rms_norm,
            supports=lambda device, dtype: True,
            priority=priority,
            deterministic=deterministic,
        )

    kernels = (kernel("sure", deterministic=True, priority=0), kernel("fast", deterministic=False, priority=1))
    pack = KernelPack(name="test", kernels=lambda: kernels)
    for deterministic, name in ((True, "sure"), (False, "fast")):
        chosen = KernelTable.build(CPU, [pack], deterministic=deterministic).choose("rms_norm", torch.float32)
        assert chosen.name == name
    cuda = {k.name: k.deterministic for k in TORCH_PACK.kernels() if k.op == "attention"}
    assert cuda == {"torch-cpu": True, "torch-flash": True, "torch-flash-any-order": False}


def test_two_packs_with_one_kernel_are_refused_and_labels_name_the_pack() -> None:
    def pack(name: str, kernel_name: str, priority: int) -> KernelPack:
        made = Kernel(
            op="rms_norm",
            name=kernel_name,
            function=ops.rms_norm,
            supports=lambda device, dtype: True,
            priority=priority,
        )
        return KernelPack(name=name, kernels=lambda: (made,))

    with pytest.raises(
        PluginError, match=r"packs one and two: both offer the kernel fast of rms_norm with priority 5\. Fix: leave one"
    ):
        KernelTable.build(CPU, [pack("one", "fast", 5), pack("two", "fast", 5)])
    for second in (pack("two", "fast", 6), pack("two", "faster", 6)):
        found = KernelTable.build(CPU, [pack("one", "fast", 5), second])
        found.choose("rms_norm", torch.float32)
        assert found.labels["rms_norm", "float32"].startswith("two/fast")
    plain = KernelTable.build(CPU, [])
    plain.choose("rms_norm", torch.float32)
    assert plain.labels["rms_norm", "float32"] == "reference"


def test_a_kernel_of_an_op_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        PluginError, match=r"kernel pack test: kernel fast: there is no op 'rms_nrom'; known: .*Fix: rms_norm"
    ):
        table(kernel("fast", op="rms_nrom"))


def test_every_op_is_known_whatever_was_imported() -> None:
    code = "from surogate_core.kernels.registry import references, unknown_op; print(unknown_op('nvfp4_rounded'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""
    code = "from surogate_core.plugin import compute; print(compute.references['sum_coded_product'].op)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "sum_coded_product"
    with pytest.raises(KeyError, match="swigloo"):
        registry.references["swigloo"]
    assert registry.unknown_op("swigloo").startswith("there is no op 'swigloo'")


# ------------------------------------------------------------------------------ extensions


@pytest.fixture
def ops_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops that the test defines are forgotten after it."""
    for name in ("references", "extensions"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


@pytest.fixture
def scaled(ops_of_today: None) -> Any:
    """An op with two extensions."""

    def scaled(x: Tensor, factor: float, *, shift: float = 0.0, bias: Tensor | None = None) -> Tensor:
        """The input times a factor, plus a number and a bias."""
        return x * factor + shift + (0 if bias is None else bias)

    return registry.op(scaled)


class Noted:
    """A kernel's function that notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        self.calls.append((len(args), named))
        return torch.full_like(args[0], 7)


def noted(name: str, op: str = "scaled", **fields: Any) -> Kernel:
    return Kernel(op=op, name=name, function=Noted(), supports=lambda device, dtype: True, **fields)


def test_a_kernel_that_knows_no_extension_gets_the_call_without_them(scaled: Any) -> None:
    x, bias = torch.ones(2, 3), torch.ones(3)
    old = noted("old", takes=lambda x, factor: True)
    with registry.using(table(old)) as active:
        for named in ({}, {"shift": 0}, {"shift": 0.0, "bias": None}):
            assert (scaled(x, 2.0, **named) == 7).all()
        for named in ({"shift": 1.0}, {"bias": bias}, {"shift": 0.0, "bias": 0 * bias}):
            assert torch.equal(scaled(x, 2.0, **named), scaled.__wrapped__(x, 2.0, **named))
    assert old.function.calls == [(2, {})] * 3
    assert active.chosen == {
        ("scaled", "float32"): "old",
        ("scaled(shift)", "float32"): "reference",
        ("scaled(bias)", "float32"): "reference",
    }
    assert active.labels["scaled", "float32"] == "test/old"
    assert active.labels["scaled(bias)", "float32"] == "reference"
    assert active.passed == {
        ("scaled(shift)", "float32"): {"test/old": "shift"},
        ("scaled(bias)", "float32"): {"test/old": "bias"},
    }


def test_a_kernel_gets_only_the_extensions_that_it_knows(scaled: Any) -> None:
    x, bias = torch.ones(2, 3), torch.ones(3)
    some = noted("some", knows=frozenset({"shift"}))
    every = noted("every", knows=frozenset({"shift", "bias"}), priority=-1)
    with registry.using(table(some, every)) as active:
        scaled(x, 2.0, shift=1.0, bias=None)
        scaled(x, 2.0, shift=1.0, bias=bias)
    assert some.function.calls == [(2, {"shift": 1.0})]
    assert every.function.calls == [(2, {"shift": 1.0, "bias": bias})]
    assert active.chosen == {("scaled(shift)", "float32"): "some", ("scaled(bias, shift)", "float32"): "every"}
    assert active.passed == {("scaled(bias, shift)", "float32"): {"test/some": "bias"}}


def test_offers_answers_for_the_extensions_of_a_call(scaled: Any) -> None:
    made = table(noted("some", knows=frozenset({"shift"})))
    asked = ((), ("shift",), ("bias",), ("shift", "bias"))
    assert [made.offers("scaled", torch.float32, named) for named in asked] == [True, True, False, False]


def test_a_kernel_cannot_know_what_its_op_does_not_have(scaled: Any) -> None:
    with pytest.raises(
        PluginError, match=r"pack test: kernel a: it knows 'shitf', and scaled has bias, shift\. Fix: shift"
    ):
        table(noted("a", knows=frozenset({"shift", "shitf"})))
    with pytest.raises(
        PluginError, match=r"it knows 'window', and geglu has no extension\. Fix: take it out of `knows`"
    ):
        table(replace(kernel("a", op="geglu"), knows=frozenset({"window"})))


def test_an_op_of_two_modules_is_refused(scaled: Any) -> None:
    def other(module: str) -> Any:
        def again(x: Tensor) -> Tensor:
            return x

        again.__name__, again.__module__ = "scaled", module
        return again

    registry.op(other(__name__))  # the same module, as when it is loaded again
    with pytest.raises(
        PluginError, match=rf"the op scaled is defined by two modules: {__name__} and acme\.ops\. Fix: rename one"
    ):
        registry.op(other("acme.ops"))


def test_two_packs_that_offer_a_call_with_one_priority_are_refused() -> None:
    one, two = kernel("fast"), replace(kernel("quick"), takes=lambda gate, up: gate.shape[-1] < 4)
    packs = [KernelPack(name=n, kernels=lambda k=k: (k,)) for n, k in (("one", one), ("two", two))]
    with registry.using(KernelTable.build(CPU, packs)) as active:
        ops.swiglu(torch.ones(2, 4), torch.ones(2, 4))
        assert active.labels == {("swiglu", "float32"): "one/fast"}
        with pytest.raises(
            PluginError, match=r"kernels one/fast and two/quick: both offer swiglu .* priority 0\. Fix: "
        ):
            ops.swiglu(torch.ones(2, 3), torch.ones(2, 3))
    better = KernelPack(name="three", kernels=lambda: (kernel("best", priority=1),))
    with registry.using(KernelTable.build(CPU, [*packs, better])) as active:
        ops.swiglu(torch.ones(2, 3), torch.ones(2, 3))
        assert active.labels == {("swiglu", "float32"): "three/best"}


# -------------------------------------------------------------------------- ops of plugins

SCAN = """
import torch
from surogate_core.kernels.registry import op

@op
def selective_scan(x: torch.Tensor, *, decay: float = 1.0) -> torch.Tensor:
    return (x * decay).cumsum(0)
"""


@pytest.fixture
def acme(tmp_path: Path, ops_of_today: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of modules that can be imported; `acme_scan` defines an op."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_scan.py").write_text(SCAN)
    for name in ("acme_scan", "acme_other", "acme_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def family(*modules: str) -> ModelFamily:
    return ModelFamily(name="acme", hf_model_types=(), build=lambda config: None, ops=modules)  # type: ignore[arg-type,return-value]


def scan_pack(serves: frozenset[str] = frozenset(), modules: tuple[str, ...] = ()) -> KernelPack:
    kernels = (
        noted("fast", op="selective_scan"),
        noted("any-order", op="selective_scan", priority=1, deterministic=False),
    )
    return KernelPack(name="scans", kernels=lambda: kernels, ops=modules, serves=serves)


def test_a_pack_serves_the_op_of_another_plugins_family(acme: Path) -> None:
    pack = scan_pack(frozenset({"selective_scan"}))
    made = KernelTable.build(CPU, [pack, TORCH_PACK], families=[family("acme_scan")])
    scan = sys.modules["acme_scan"].selective_scan
    with registry.using(made):
        assert (scan(torch.ones(3)) == 7).all()
        assert scan(torch.ones(3), decay=2.0).tolist() == [2, 4, 6]
    assert made.labels == {
        ("selective_scan", "float32"): "scans/fast",
        ("selective_scan(decay)", "float32"): "reference",
    }
    assert made.undefined == {}
    any_order = KernelTable.build(CPU, [pack], families=[family("acme_scan")], deterministic=False)
    assert any_order.choose("selective_scan", torch.float32).name == "any-order"


def test_kernels_for_an_op_that_nobody_defines_are_left_out(acme: Path) -> None:
    made = KernelTable.build(CPU, [scan_pack(frozenset({"selective_scan"})), TORCH_PACK])
    assert made.undefined == {"selective_scan": "scans"}
    assert made.kernels
    assert "selective_scan" not in {k.op for k in made.kernels}
    with pytest.raises(
        PluginError,
        match=r"pack scans: kernel fast: there is no op 'selective_scan'; known: .* Fix: an op of another plugin",
    ):
        KernelTable.build(CPU, [scan_pack(frozenset({"other_scan"}))])


def test_a_pack_defines_an_op_of_its_own(acme: Path) -> None:
    made = KernelTable.build(CPU, [scan_pack(modules=("acme_scan",))])
    assert made.choose("selective_scan", torch.float32).name == "fast"


def test_a_module_of_ops_that_cannot_be_used_is_named(acme: Path) -> None:
    (acme / "acme_broken.py").write_text("raise ValueError('no such GPU')")
    (acme / "acme_other.py").write_text(SCAN)
    for modules, message in (
        (
            ("acme_missing",),
            "model family acme: the module acme_missing of its ops: ModuleNotFoundError: No module named",
        ),
        (("acme_broken",), "model family acme: the module acme_broken of its ops: ValueError: no such GPU"),
        (
            ("acme_scan", "acme_other"),
            "family acme: the op selective_scan is defined by two modules: acme_scan and acme_other. Fix: rename one",
        ),
    ):
        with pytest.raises(PluginError, match=message):
            KernelTable.build(CPU, [], families=[family(*modules)])
