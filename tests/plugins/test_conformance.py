"""Our own plugins pass the conformance kit, and plugins that break a rule do not."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core import bundles
from surogate_core.data.encoded import Encoded
from surogate_core.engine.stores import DeviceGradients
from surogate_core.errors import MachineError, UserError
from surogate_core.kernels.grouped import grouped_product
from surogate_core.mesh.offers import FABRICS
from surogate_core.plugins import Registry, import_policy, load_plugins
from surogate_core.plugins.commands import commands_of
from surogate_core.plugins.discovery import core_plugin, installed_plugins
from surogate_testing import (
    Check,
    NotApplicable,
    checks,
    datasets,
    experts,
    kernels,
    launchers,
    models,
    monitors,
    objectives,
    offloaders,
    optimizers,
    recipes,
    tiny,
)

# Tensors this small are done before a second thread wakes up; on busy cores it is waited for.
torch.set_num_threads(1)

OURS = sorted(p.name for p in installed_plugins() if p.distribution.startswith("surogate-"))


QUICK = ("reads its presets", "sees other rows by mixers alone", "gives each setting its result")
"""Checks of families that trace nothing."""
NF4 = "quant nf4: trains as on rounded weights"


@cache
def registry() -> Registry:
    return load_plugins(import_policy())


def cases() -> list[Any]:
    """Those that trace a family's blocks or start an interpreter are too slow for every run.

    So are runs under recipes and weight formats that round, but for one of NF4; every run of the tests has bf16's.
    """
    found = []
    for name in OURS:
        for check in checks(name, registry()):
            traces = check.subject.startswith("model ") and check.title not in QUICK
            runs = check.title in ("trains", "resumes", "trains as on rounded weights")
            rounds = runs and check.subject != "recipe bf16" and str(check) != NF4
            slow = traces or rounds or check.title == "imports quietly"
            marks = [pytest.mark.slow] if slow else []
            found.append(pytest.param(check, id=f"{name}-{check}".replace(" ", "_"), marks=marks))
    return found


@pytest.mark.parametrize("check", cases())
def test_our_own_plugins_conform(check: Check) -> None:
    try:
        check.run()
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_the_core_conforms() -> None:
    found = checks("core", registry())
    subjects = {
        "offload none",
        "kernels torch",
        "objective cross_entropy",
        "launcher local",
        "task sft",
        "task pt",
        "rollout native",
        "rollout dedicated",
    }
    fabrics = {f"fabric {spec.name}" for spec in FABRICS}
    subjects |= {f"schedule {name}" for name in ("linear", "cosine", "wsd", "constant")}
    subjects |= {f"tool_parser {name}" for name in ("hermes", "qwen3-coder", "llama3", "mistral")}
    subjects |= {f"command {command.name}" for command in commands_of(core_plugin())}
    assert {c.subject for c in found} == subjects | fabrics
    for check in found:
        if check.subject not in fabrics:
            with suppress(NotApplicable):
                check.run()


# ------------------------------------------------------------------------- what breaks a rule


class Careful(tiny.PlainDescent):
    """Does what it should."""

    def step(self, *, lr: Any, clip: Any, skip: Any) -> None:
        for group in self.groups:
            group.master.mul_(1 - lr * group.weight_decay * (1 - skip))
        super().step(lr=lr, clip=clip, skip=skip)


class Careless(tiny.PlainDescent):
    """Does not look at `skip`."""

    def step(self, *, lr: Any, clip: Any, skip: Any) -> None:
        for group in self.groups:
            group.master.sub_(lr * group.grad * clip)


class Forgetful(tiny.PlainDescent):
    """Has state that it does not tell."""

    def __init__(self, groups: Any, options: Any):
        super().__init__(groups, options)
        self.steps = 0

    def step(self, *, lr: Any, clip: Any, skip: Any) -> None:
        self.steps += 1
        super().step(lr=lr / self.steps, clip=clip, skip=skip)


class Greedy(tiny.PlainDescent):
    """Has more state than it says."""

    def state(self) -> dict[str, Any]:
        return {g.name: torch.zeros(g.master.numel()) for g in self.groups}


class RoundsToNearest(tiny.PlainDescent):
    """Says that it takes bf16 masters, and loses small updates."""

    def step(self, *, lr: Any, clip: Any, skip: Any) -> None:
        for group in self.groups:
            group.master.copy_(group.master.float() - lr * torch.where(skip > 0, 0.0, group.grad * clip))


def test_optimizers_that_break_a_rule_are_caught() -> None:
    def spec(build: Any) -> bundles.OptimizerSpec:
        return bundles.OptimizerSpec(name="x", build=build, state_bytes_per_parameter=0.0)

    for check in optimizers.CHECKS:
        check(spec(Careful))
    with pytest.raises(AssertionError, match="a skipped step after 0: master decayed differs"):
        optimizers.skips(spec(Careless))
    with pytest.raises(AssertionError, match="with copied state: master decayed differs"):
        optimizers.keeps_state(spec(Forgetful))
    with pytest.raises(AssertionError, match="losses after a resume"):
        optimizers.trains_and_resumes(spec(Forgetful))
    with pytest.raises(AssertionError, match="bytes of state, predicted are 0"):
        optimizers.states_its_size(spec(Greedy))
    both = replace(spec(RoundsToNearest), master_dtypes=("fp32", "bf16"))
    with pytest.raises(AssertionError, match=r"the mean of bf16 masters is 0\.2"):
        optimizers.rounds_masters(both)


def recipe_spec(linear: Any = lambda x, w, slot: x @ w.t(), *, plain: bool = False, **methods: Any) -> Any:
    """A recipe of functions."""
    found = {name: staticmethod(function) for name, function in ({"linear": linear} | methods).items()}
    made = type("Made", (bundles.Recipe,), {"name": "x", "plain": plain, **found})
    return bundles.RecipeSpec(name="x", build=lambda options, context: made(), packs="pack" in methods)


def offloader_spec(kinds: Any, **methods: Any) -> Any:
    """An offloader to the host, of functions."""
    found = {name: staticmethod(function) for name, function in methods.items()}
    made = type("Made", (bundles.Stores,), found)
    return bundles.OffloaderSpec(
        name="x", kinds=kinds, place="host", build=lambda *a: made(), allocates="allocate" in methods
    )


@pytest.mark.parametrize(
    ("linear", "plain", "message"),
    [
        (lambda x, w, slot: x @ w.t() * 1.5, False, "y in torch.float32: relative error 0.500"),
        (lambda x, w, slot: (x @ w.t()).float(), False, "y is torch.float32, not torch.bfloat16"),
        (lambda x, w, slot: x @ w.t() + torch.rand(()) * 1e-3, False, "the same product twice has other bits"),
        (lambda x, w, slot: (x @ w.t()).bfloat16().to(x.dtype), True, "`plain` is true"),
        (lambda x, w, slot: x @ w.t().detach() + 0 * (x @ w.t()), False, "dW in torch.float32: relative error 1.0"),
    ],
)
def test_recipes_that_break_a_rule_are_caught(linear: Any, plain: bool, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        recipes.multiplies(recipe_spec(linear, plain=plain))


def test_a_recipe_that_needs_another_device_is_not_tried() -> None:
    def build(options: Any, context: bundles.RecipeContext) -> bundles.Recipe:
        raise MachineError("it needs a lathe")

    recipe = bundles.RecipeSpec(name="x", build=build)
    for check in (recipes.multiplies, recipes.trains, recipes.resumes):
        with pytest.raises(NotApplicable, match="it needs a lathe"):
            check(recipe)


def test_a_recipe_that_packs_something_else_is_caught() -> None:
    def made(factor: float) -> bundles.RecipeSpec:
        return recipe_spec(pack=lambda weight, slot: weight * factor)

    recipes.multiplies_packed_weights(made(1.0))
    with pytest.raises(AssertionError, match=r"y with the packed weight: relative error 1\.0e-02"):
        recipes.multiplies_packed_weights(made(1.01))
    with pytest.raises(NotApplicable, match="packs no weights"):
        recipes.multiplies_packed_weights(recipe_spec())
    with pytest.raises(AssertionError, match="`packs` of the spec is False, and what is built has a `pack`"):
        recipes.says_what_it_is(replace(made(1.0), packs=False))
    with pytest.raises(AssertionError, match="what is built has the name 'x', the spec 'y'"):
        recipes.says_what_it_is(replace(made(1.0), name="y"))


def test_a_recipe_that_multiplies_experts_wrongly_is_caught() -> None:
    def grouped(x: Any, weights: Any, ends: Any, slots: Any) -> Any:
        return [grouped_product(x, w, ends) for w in weights]

    def of_last(x: Any, weights: Any, ends: Any, slots: Any) -> Any:
        return [x @ w[-1].t() + 0 * w.sum() for w in weights]

    recipes.multiplies_experts(recipe_spec(grouped=grouped))
    recipes.multiplies_experts(recipe_spec(grouped=grouped, pack_experts=lambda w, slot: w * 1.0))
    with pytest.raises(AssertionError, match=r"y of gate of experts, uneven loads, torch\.float32: relative error"):
        recipes.multiplies_experts(recipe_spec(grouped=of_last))
    with pytest.raises(AssertionError, match=r"with packed weights: relative error 1\.0e-02"):
        recipes.multiplies_experts(recipe_spec(grouped=grouped, pack_experts=lambda w, slot: w * 1.01))
    with pytest.raises(NotApplicable, match="multiplies experts plainly"):
        recipes.multiplies_experts(recipe_spec())


class Rows(bundles.RecipeState):
    """State of a recipe that does what it should, but for what `fault` names."""

    def __init__(self, fault: str, slots: int):
        self.fault, self.rows = fault, torch.ones(slots, 3)
        self.hidden = 0.0

    def update(self, observed: Any, skip: Any) -> None:
        self.hidden += 1.0
        kept = self.rows * 0.5 + (self.hidden if self.fault == "forgets" else 0.0)
        if self.fault == "replaces":
            self.rows = torch.where(skip > 0, self.rows, kept)
        elif self.fault != "idles":
            self.rows.copy_(kept if self.fault == "never skips" else torch.where(skip > 0, self.rows, kept))

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("never skips", "a skipped step changed the state"),
        ("idles", "an update changed no state"),
        ("replaces", "did not write `rows` in place"),
        ("forgets", "with copied state: rows differs"),
    ],
)
def test_a_recipe_whose_state_breaks_a_rule_is_caught(fault: str, message: str) -> None:
    def made(fault: str) -> bundles.RecipeSpec:
        return recipe_spec(state=lambda slots, device: Rows(fault, slots))

    recipes.keeps_its_state(made(""))
    with pytest.raises(AssertionError, match=message):
        recipes.keeps_its_state(made(fault))


def test_an_offloader_that_changes_a_bit_is_caught() -> None:
    from surogate_core.engine.stores import DeviceStore

    class Lossy(DeviceStore):
        def put(self, key: str, tensors: Any) -> None:
            super().put(key, [t.bfloat16().to(t.dtype) if t.is_floating_point() else t for t in tensors])

    kinds: Any = frozenset({"weights", "residuals"})
    offloader = offloader_spec(kinds, store=Lossy)
    changed = ("the loss of micro-step 1 is", "sums of gradients after micro-step 1")
    for check, message in zip(BOTH_WAYS, changed, strict=True):
        with pytest.raises(AssertionError, match=message):
            check(offloader)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n, dtype: (torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)), "are not one memory"),
        (lambda n, dtype: (torch.ones(n, dtype=dtype),) * 2, "not zeros"),
        (lambda n, dtype: (torch.zeros(n),) * 2, "of torch.float32"),
    ],
)
def test_an_offloader_that_allocates_wrongly_is_caught(make: Any, message: str) -> None:
    offloader = offloader_spec(frozenset({"master"}), allocate=lambda kind, n, dtype: make(n, dtype))
    with pytest.raises(AssertionError, match=message):
        offloaders.allocates(offloader)
    with pytest.raises(ValueError, match="places master without `allocates`"):
        replace(offloader, allocates=False)


class HostSums(DeviceGradients):
    """A right store of sums; on a CPU they are where they live."""

    def begin(self, *, first: bool, last: bool) -> None:
        if first:
            for tensor in (t for held in self._held.values() for t in held):
                tensor.zero_()

    def nbytes(self) -> Any:
        return {"device": 0, "host": super().nbytes()["device"], "disk": 0}


class ForgetfulSums(HostSums):
    """Has zeros in every micro-step."""

    def begin(self, *, first: bool, last: bool) -> None:
        super().begin(first=True, last=last)


class StaleSums(HostSums):
    """Has in a step the sums of those before too."""

    def begin(self, *, first: bool, last: bool) -> None:
        """Clears nothing."""


def moving_gradients(store: Any) -> bundles.OffloaderSpec:
    def allocate(kind: Any, elements: int, dtype: Any) -> Any:
        return (torch.zeros(elements, dtype=dtype),) * 2

    return offloader_spec(frozenset({"gradients"}), store=lambda kind: store(), allocate=allocate)


BOTH_WAYS = (offloaders.keeps_frozen_weights, offloaders.keeps_residuals)


@pytest.mark.parametrize("check", BOTH_WAYS)
def test_an_offloader_with_wrong_sums_of_gradients_is_caught(check: Any) -> None:
    check(moving_gradients(HostSums))
    forgotten = r"sums of gradients after micro-step 2: \S+ differs by"
    for store, message in ((ForgetfulSums, forgotten), (StaleSums, "losses are")):
        with pytest.raises(AssertionError, match=message):
            check(moving_gradients(store))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"device": 0, "host": 0}, r"gradients: nbytes\(\) has the places \['device', 'host'\], not"),
        ({"device": 0, "host": -4, "disk": 0}, r"gradients: nbytes\(\) of host is -4, not a count"),
        ({"device": 0, "host": 4.0, "disk": 0}, r"gradients: nbytes\(\) of host is 4.0, not a count"),
        ({"device": 4, "host": 0, "disk": 0}, "gradients: after a step 4 bytes are on the device still"),
    ],
)
def test_an_offloader_that_miscounts_its_bytes_is_caught(places: Any, message: str) -> None:
    store = type("Miscounting", (HostSums,), {"nbytes": lambda self: places})
    with pytest.raises(AssertionError, match=message):
        offloaders.keeps_frozen_weights(moving_gradients(store))


def test_an_offloader_is_built_with_its_options_and_a_directory() -> None:
    built: list[Path] = []
    plain = moving_gradients(HostSums)

    def build(options: Any, directory: str, device: torch.device) -> bundles.Stores:
        assert options == bundles.NoOptions()
        place = Path(directory) / "scratch"
        place.mkdir(parents=True)
        built.append(place)
        return plain.build(options, directory, device)

    def refuse(options: Any, directory: str, device: torch.device) -> bundles.Stores:
        raise UserError("x: no such disk")

    for check in offloaders.CHECKS:
        check(replace(plain, build=build))
        assert built
        assert not any(place.parent.parent.exists() for place in built)
        with pytest.raises(UserError, match="x: no such disk"):
            check(replace(plain, build=refuse))


def _uphill(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.where(labels >= 0, -torch.log_softmax(logits.float(), -1).mean(-1), 0.0)


@pytest.mark.parametrize(
    ("loss", "check", "message"),
    [
        (lambda x, y: torch.where(y >= 0, x.float().sum(-1), 1.0), objectives.gives_a_loss_for_each_token, "is not 0"),
        (lambda x, y: x.sum(-1) * (y >= 0), objectives.gives_a_loss_for_each_token, "is torch.bfloat16"),
        (lambda x, y: x.float().sum(), objectives.gives_a_loss_for_each_token, r"has the shape \(\), not \[N\]"),
        (lambda x, y: 0 * x.float().sum(-1), objectives.is_differentiable, "of a trained token is 0"),
        (lambda x, y: x.float().sum(-1), objectives.is_differentiable, "is not 0 where the label is -100"),
        (lambda x, y: x.sum(-1) - x.mean(), objectives.does_not_look_at_other_tokens, "tokens 0 to 5 alone"),
        (lambda x, y: 2 * _uphill(x, y).detach() - _uphill(x, y), objectives.trains, "the loss does not fall"),
    ],
)
def test_objectives_that_break_a_rule_are_caught(loss: Any, check: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(bundles.Objective(name="x", token_loss=lambda x, y, columns: loss(x, y)))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda job, options, registry: 0, "the job was not run"),
        (lambda job, options, registry: job.run() and 0, "the job ended with 3, and launch returned 0"),
        (
            lambda job, options, registry: None if job.run() == 0 else 3,
            "ended with 0, and launch returned None",
        ),
        (lambda job, options, registry: job.run(rank=1, world=2), "not every rank ran once: ['1 of 2']"),
    ],
)
def test_launchers_that_break_a_rule_are_caught(launch: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        launchers.returns_the_exit_code(bundles.Launcher(name="x", launch=launch))


def test_a_launcher_that_forgets_a_rank_is_caught() -> None:
    def launch(job: Any, options: Any, registry: Any) -> int:
        return int(job.run(rank=0, world=2))

    with pytest.raises(AssertionError, match=re.escape("not every rank ran once: ['0 of 2']")):
        launchers.starts_every_rank(bundles.Launcher(name="x", launch=launch))
    with pytest.raises(AssertionError, match="rank 1 raised, and launch returned 0"):
        launchers.ends_with_a_failed_rank(bundles.Launcher(name="x", launch=launch))


def test_a_launcher_that_swallows_errors_is_caught() -> None:
    def launch(job: Any, options: Any, registry: Any) -> int:
        try:
            return int(job.run(registry=registry))
        except RuntimeError:
            return 0

    with pytest.raises(AssertionError, match="the job raised, and launch returned 0"):
        launchers.lets_errors_through(bundles.Launcher(name="x", launch=launch))


class Monitor(monitors._Recorder):
    def __init__(self, options: Any, info: Any):
        super().__init__()


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (
            {"on_event": lambda self, event: event.loss},
            monitors.sees_a_run,
            "on_event fails at progress: AttributeError",
        ),
        (
            {"on_event": lambda self, event: True},
            monitors.sees_a_run,
            "it answers progress with True, which is not a Control",
        ),
        ({"state": lambda self: {"seen": len(self.seen)}}, monitors.keeps_json, "is not s"),
    ],
)
def test_monitors_that_break_a_rule_are_caught(change: dict[str, Any], check: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(bundles.MonitorSpec(name="x", build=type("Broken", (Monitor,), change)))
    for good in monitors.CHECKS:
        good(bundles.MonitorSpec(name="x", build=Monitor))


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda row, o, c: Encoded.from_mask([1, 2, 3], [False] * 3), "no token is trained"),
        (lambda row, o, c: Encoded.from_mask([1, 2, 99999]), "an id is not in the vocabulary"),
        (lambda row, o, c: [1, 2, 3], "encode returned list, not Encoded"),
    ],
)
def test_formats_that_break_a_rule_are_caught(encode: Any, message: str) -> None:
    spec = bundles.DatasetFormat(name="x", options=bundles.NoOptions, encode=encode, examples=(({"a": "b"}, {}),))
    with pytest.raises(AssertionError, match=message):
        datasets.labels_are_inputs(spec)


def test_a_format_whose_labels_are_shifted_or_that_takes_anything_is_caught() -> None:
    def encode(row: Any, options: Any, context: Any) -> Encoded:
        good = Encoded.from_mask([1, 2, 3])
        return Encoded(input_ids=good.input_ids, labels=(good.labels + 1).astype("int32"))

    spec = bundles.DatasetFormat(name="x", options=bundles.NoOptions, encode=encode, examples=(({"a": "b"}, {}),))
    with pytest.raises(AssertionError, match="labels are not shifted"):
        datasets.labels_are_inputs(spec)
    with pytest.raises(AssertionError, match="a row without fields is not refused"):
        datasets.refuses_bad_rows(spec)


def test_a_kernel_that_does_not_take_the_inputs_is_not_run() -> None:
    def function(gate: Any, up: Any) -> Any:
        raise AssertionError("must not be called")

    kernel = bundles.Kernel(
        op="swiglu", name="k", function=function, supports=lambda d, t: True, takes=lambda gate, up: gate.shape[-1] < 8
    )
    pack = bundles.KernelPack(name="x", kernels=lambda: [kernel])
    with pytest.raises(NotApplicable, match="takes the kit's inputs"):
        kernels.equals_references(pack)
    kernels.repeats_its_bits(pack)


def test_a_kernel_that_is_not_its_reference_is_caught() -> None:
    def pack(function: Any, op: str = "swiglu") -> bundles.KernelPack:
        kernel = bundles.Kernel(op=op, name="k", function=function, supports=lambda d, t: t == torch.float32)
        return bundles.KernelPack(name="x", kernels=lambda: [kernel])

    good = pack(lambda gate, up: gate * gate.sigmoid() * up)
    for check in kernels.CHECKS:
        with suppress(NotApplicable):
            check(good)
    with pytest.raises(AssertionError, match=r"swiglu k on cpu in torch\.float32: error \S+ of y, more"):
        kernels.equals_references(pack(lambda gate, up: gate * up))
    with pytest.raises(AssertionError, match="there is no op 'swigloo'"):
        kernels.names_ops(pack(lambda gate, up: gate, op="swigloo"))
    with pytest.raises(AssertionError, match="other bits the second time"):
        kernels.repeats_its_bits(pack(lambda gate, up: gate * up * torch.rand(())))


def test_the_kit_knows_every_op() -> None:
    from surogate_core.kernels.registry import references

    assert references.keys() - kernels.CASES.keys() <= kernels.WITHOUT_CASES
    assert not kernels.CASES.keys() & kernels.WITHOUT_CASES
    for op in kernels.CASES:
        kernel = replace(references[op], name="k", priority=0)
        kernels.equals_references(bundles.KernelPack(name="x", kernels=lambda kernel=kernel: [kernel]))


def test_a_kernel_gets_no_extension_that_it_does_not_know() -> None:
    from surogate_core.kernels.registry import references

    def from_zeros(*rows: Any) -> Any:
        return references["ssd"].function(*rows)

    old = bundles.Kernel(op="ssd", name="k", function=from_zeros, supports=lambda d, t: t == torch.float32)
    kernels.equals_references(bundles.KernelPack(name="x", kernels=lambda: [old]))
    ignores = replace(old, function=lambda *rows, **ignored: from_zeros(*rows), knows=frozenset({"initial", "finals"}))
    with pytest.raises(AssertionError, match=r"ssd k on cpu in .*states before and behind the runs"):
        kernels.equals_references(bundles.KernelPack(name="x", kernels=lambda: [ignores]))


@pytest.mark.slow
def test_a_family_that_balances_otherwise_is_caught() -> None:
    family = registry().get("model", "qwen3-moe")

    def build(config: Any) -> Any:
        return family.build({**config, "rms_norm_eps": 0.5})

    models.balances_as_transformers(family)
    with pytest.raises(AssertionError, match="relative error"):
        models.balances_as_transformers(replace(family, build=build))
    assert not experts.checks_of(registry().get("model", "llama"))


@pytest.mark.slow
def test_a_family_that_computes_something_else_is_caught() -> None:
    import dataclasses

    family = registry().get("model", "llama")

    def build(config: Any) -> Any:
        return family.build({**config, "rms_norm_eps": 0.5})

    with pytest.raises(AssertionError, match="logits: relative error"):
        models.equals_transformers(dataclasses.replace(family, build=build))
    with pytest.raises(NotApplicable, match="no preset `tiny`"):
        models.equals_transformers(dataclasses.replace(family, presets={}))


def test_the_events_of_the_kit_are_all_there_are() -> None:
    from surogate_core.events import Event

    assert {type(e).__name__ for e in monitors.events_of_run()} == {c.__name__ for c in Event.__subclasses__()}
