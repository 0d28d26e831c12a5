"""Checks of model families that have experts, beside those of every family.

Shape suffixes: N tokens, E experts, K experts of a token, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import UserError, bundles, dsl
from surogate_core.service.engine import Engine, RandomSource, Source
from surogate_core.service.model import TensorSpec
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.models import balances_as_transformers
from surogate_testing.virtual import VirtualFabric, in_threads

TOLERANCE = 1e-5
"""Relative error of gradients and logits in fp32."""
STEEP = 1e3
"""A learning rate with which weights after a step are their gradients, all but for the rounding of fp32."""


def checks_of(family: bundles.ModelFamily) -> Sequence[Callable[[bundles.ModelFamily], None]]:
    """The checks below and that of the load-balancing loss, if the family's preset `tiny` has experts."""
    try:
        model = family.build(dict(family.presets["tiny"]))
    except (KeyError, UserError):
        return ()
    return (balances_as_transformers, *CHECKS) if isinstance(model, dsl.Model) and model.expert_slots() else ()


def routes_every_token(family: bundles.ModelFamily) -> None:
    """Experts compute K times the tokens, and no padding counts; of equal probabilities the lowest number wins."""
    model, config = _tiny(family)
    drawn = tiny.random_source()

    def undecided(spec: TensorSpec) -> Tensor:
        value = drawn(spec)
        assert isinstance(value, Tensor)
        return torch.zeros_like(value) if spec.role == "router" else value

    choices = {slots[0].choices for slots in model.expert_slots().values()}
    batch = tiny.batch(tiny.documents())
    for source, tied in ((drawn, False), (undecided, True)):
        result = _engine(family, config, source).train_step([batch], step=0, lr=0.0)
        counts = [total_LE for role, total_LE in result.sides().values() if role == "expert_tokens"]
        ensure(bool(counts), "no side output has the role expert_tokens: use `router_sides` and `router_figures`")
        for total_LE in counts:
            found, allowed = sorted({int(n) for n in total_LE.sum(1)}), sorted(batch.tokens * k for k in choices)
            ensure(set(found) <= set(allowed), f"experts compute {found} tokens of a layer, and {allowed} are routed")
            first = total_LE[:, : min(choices)]
            ensure(
                not tied or bool((first == batch.tokens).all()),
                "with equal probabilities tokens do not go to the experts with the lowest numbers",
            )


def trains_its_routers(family: bundles.ModelFamily) -> None:
    """`train_router` trains a `Param` of role router in each layer with experts, with the gradient of a full training.

    Recomputing changes no bit of any gradient.
    """
    model, config = _tiny(family)
    batches = [tiny.batch(tiny.documents())]
    # B is zero, so the adapters change nothing.
    source = RandomSource(seed=0, std=0.2, device=tiny.CPU)
    kept = tiny.gradients(_engine(family, config, source), batches)
    again = tiny.gradients(_engine(family, config, source, recompute=True), batches)
    tiny.ensure_same_bits(again, kept, "recomputed")
    made = _engine(family, config, source, lora=tiny.lora(train_router=True))
    found = {n: g for n, g in tiny.gradients(made, batches).items() if ".lora_" not in n}
    for prefix in model.expert_slots():
        ensure(any(name.startswith(prefix) for name in found), f"{prefix}: has experts, and no `Param` of role router")
    for name, gradient in found.items():
        error = tiny.relative_error(gradient, kept[name])
        ensure(error <= TOLERANCE, f"gradient of {name} beside adapters: relative error {error:.1e}")


def merges_its_experts(family: bundles.ModelFamily) -> None:
    """Each expert has an A and a B of its own, of rank `lora_expert_rank`, which add scale · B A to its weight."""
    _, config = _tiny(family)
    made = _engine(family, config, tiny.random_source(), lora=tiny.lora(rank=4, expert_rank=2, scale=2.0))
    weights = {name: value.clone() for name, value in made.parameters.base_tensors()}
    adapters = dict(made.parameters.adapter_tensors())
    for name in adapters:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        ensure(f"{module}.weight" in weights, f"{module}: has an adapter, and the model's files have no such weight")
        a, b = adapters[name], adapters[f"{module}.lora_B.weight"]
        weights[f"{module}.weight"] += 2.0 * b @ a
    ranks = {adapters[n].shape[0] for n in adapters if ".experts." in n and n.endswith(".lora_A.weight")}
    ensure(ranks <= {2}, f"adapters of experts have the ranks {sorted(ranks)}, and `lora_expert_rank` is 2")
    merged = _engine(family, config, tiny.tensor_source(weights))
    packed = tiny.batch(tiny.documents())
    error = tiny.relative_error(merged.logits(packed), made.logits(packed))
    ensure(error <= TOLERANCE, f"logits of the merged model: relative error {error:.1e}")


def shares_out_its_experts(family: bundles.ModelFamily) -> None:
    """Two ranks that share out experts give one rank's logits, to the bit, and its gradients (`ep_size`)."""
    (wanted, alone), *_ = _on_ranks(family, 1)
    both = _on_ranks(family, 2, expert_rows=True)
    for one, ((found,), _) in zip(wanted, both, strict=True):
        error = tiny.relative_error(found, one)
        ensure(torch.equal(found, one), f"logits of two ranks that share out experts: relative error {error:.1e}")
    error, name = tiny.worst(both[0][1], alone)
    ensure(error <= TOLERANCE, f"gradient of {name} on two ranks that share out experts: relative error {error:.1e}")


def evens_out_loads(family: bundles.ModelFamily) -> None:
    """The same where a rank computes rows of the other's experts (`ep_load_balance_threshold`), but for rounding."""
    (wanted, alone), *_ = _on_ranks(family, 1)
    both = _on_ranks(family, 2, expert_balance=1.0)
    for one, ((found,), _) in zip(wanted, both, strict=True):
        error = tiny.relative_error(found, one)
        ensure(error <= TOLERANCE, f"logits of two ranks that even out their loads: relative error {error:.1e}")
    error, name = tiny.worst(both[0][1], alone)
    ensure(error <= TOLERANCE, f"gradient of {name} on two ranks that even out their loads: relative error {error:.1e}")


def _on_ranks(
    family: bundles.ModelFamily, count: int, **changes: Any
) -> Sequence[tuple[Sequence[Tensor], dict[str, Tensor]]]:
    """(logits of its part of two batches, trained state after a step of both) of each rank."""
    model, config = _tiny(family)
    if odd := sorted({s.count for slots in model.expert_slots().values() for s in slots if s.count % 2}):
        raise NotApplicable(f"two GPUs cannot share out {odd[0]} experts")
    batches = [tiny.batch(tiny.documents(seed=number)) for number in range(2)]

    def work(fabric: VirtualFabric) -> tuple[list[Tensor], dict[str, Tensor]]:
        ranks = {"ranks": fabric.world, "expert": fabric.world, **changes}
        made = tiny.assembly(config, build=family.build, micro_batches=2, max_grad_norm=0.0, **ranks)
        engine = Engine(made, tiny.random_source(), mesh=fabric.mesh() if fabric.world > 1 else None)
        engine.evaluate(batches)
        logits = [engine.logits(batch) for batch in batches[fabric.rank :: fabric.world]]
        own = engine.sharing.share(2).numbers
        given = [batch if number in own else batch.counts() for number, batch in enumerate(batches)]
        engine.train_step(given, step=0, lr=STEEP)
        state = tiny.whole_state(engine)
        engine.close()
        return logits, state

    return in_threads(count, work)


def _tiny(family: bundles.ModelFamily) -> tuple[dsl.Model, dict[str, Any]]:
    config = dict(family.presets["tiny"])
    return family.build(config), config


def _engine(family: bundles.ModelFamily, config: Mapping[str, Any], source: Source, **changes: Any) -> Engine:
    return tiny.engine(config, build=family.build, source=source, **changes)


CHECKS = (routes_every_token, trains_its_routers, merges_its_experts, shares_out_its_experts, evens_out_loads)
