"""`surogate plan`: does a run fit, how fast is it, how long does it take; nothing is trained, no weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import ConfigError, MachineError, Problem, UserError

if TYPE_CHECKING:
    import torch

    from surogate_command_plan.cluster import Cluster
    from surogate_command_plan.cluster_cost import ClusterPlan
    from surogate_command_plan.fit import Predictor, Proposal
    from surogate_command_plan.gpus import Gpu
    from surogate_command_plan.speed import Speed
    from surogate_command_plan.view import RunPlan
    from surogate_core.plugin import dsl
    from surogate_core.service.config import RunConfig
    from surogate_core.service.engine import Prediction
    from surogate_core.service.plugins import Registry
    from surogate_core.service.setup import ResolvedModel

USAGE = """\
usage: surogate plan [TASK] [FILE.yaml] [KEY=VALUE …] [--gpu NAME] [--fit SIZE] [--busiest LOAD] [--config] [--schedule]
                     [--json]

Answers before anything is trained: does it fit, how fast is it, how long does it take, what will it choose. Then one
table shows where the memory goes. Takes what `surogate sft` takes, or what TASK takes (`surogate plan dpo …`). Nothing
is trained and no weight is read; data of up to 16 MiB is tokenised, and the run finds the result in the cache.

--gpu h200   plans for such a GPU, which need not be here: a name such as t4, a100, rtx4090, h200 or b200,
             or a compute capability such as sm_90; gpus=8 plans for eight of them
num_nodes=125 gpus_per_node=8
             plans for 125 machines with 8 GPUs each, which need not be here; with them go
  interconnect=nvlink4,8xib400
             the wire inside a node and the one between nodes: a name of the table (nvlink2 to nvlink5, pcie4,
             pcie5; ib100, ib200, ib400, eth100, eth200, eth400), or a measured bandwidth such as 45GB/s of one
             direction; 8x: a node has 8 network adapters
  tokens_per_second=10800
             the measured speed of one GPU alone; without it, only bytes and seconds of the wires are shown
--fit 24GiB  also proposes the cheapest changes with which the run fits into so much GPU memory;
             exit code 3 if nothing does
--busiest 1.5
             with ep_size: the rows of the GPU that has most over the mean of all, for the time; without it, 1
--config     also prints the composed configuration
--schedule   also prints the schedule of a micro-step, for engine developers
--json       prints the plan as JSON
"""

SWITCHES = ("--json", "--config", "--schedule")


def _own_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, str], set[str]]:
    """(the other words, the values of --fit, --gpu and --busiest, the switches that are there)."""
    words: list[str] = []
    values: dict[str, str] = {}
    switches: set[str] = set()
    examples = {"--fit": ("a size", "24GiB"), "--gpu": ("a name", "h200"), "--busiest": ("a number", "1.5")}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, attached = word.partition("=")
        if flag in examples:
            what, example = examples[flag]
            if not equals and not rest:
                raise UserError(f"{flag}: {what} must follow. Fix: {flag} {example}")
            values[flag] = attached if equals else rest.pop(0)
        elif word == "--config" and rest and rest[0].endswith((".yaml", ".yml")):
            words += [word, rest.pop(0)]  # the other commands name the file so
        elif word in SWITCHES:
            switches.add(word)
        else:
            words.append(word)
    return words, values, switches


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    from surogate_command_plan.cluster import own_words
    from surogate_core.service.app import announce, leading_task, load, parse, quick_import, with_places
    from surogate_core.service.config import logs

    words, values, switches = _own_flags(argv)
    words, cluster = own_words(words)
    task, words = leading_task(words)
    arguments = parse(words, command="surogate plan")
    if arguments.help:
        print(USAGE, end="")
        return 0
    from surogate_command_plan.answers import answered
    from surogate_command_plan.experts import busiest_of
    from surogate_command_plan.gpus import Gpu, find

    announce("Planning: the layers are traced to count memory and work, once for a configuration.")
    busiest = busiest_of(values.get("--busiest"))
    asked = None if "--gpu" not in values else find(values["--gpu"])
    logs.configure()
    config, registry = load(arguments, task)
    if asked is not None and config.device == "cpu":
        raise UserError("--gpu: the configuration says device=cpu. Fix: leave --gpu, or set device=auto.")
    with ExitStack() as stack:
        if asked is not None:
            from surogate_core.service.kernels import assuming

            stack.enter_context(assuming(asked.capability if isinstance(asked, Gpu) else asked))
        gpu = asked if isinstance(asked, Gpu) else None
        stack.enter_context(with_places(arguments, task, registry))
        size = values.get("--fit")

        def plan() -> int:
            quick_import("surogate_command_plan.fit")
            return _plan(config, registry, size=size, switches=switches, gpu=gpu, cluster=cluster, busiest=busiest)

        # What --fit proposes depends on the space that is free on a disk now.
        return plan() if size is not None else answered(config, registry, [switches, asked, cluster, busiest], plan)


def _plan(
    config: RunConfig,
    registry: Registry,
    *,
    size: str | None,
    switches: set[str],
    gpu: Gpu | None,
    cluster: Cluster | None,
    busiest: float | None,
) -> int:
    """Predict, and print; the exit code. `busiest`: the load of `--busiest`."""
    from surogate_command_plan import fit, view
    from surogate_command_plan.experts import load_of, on_average, whole_experts
    from surogate_command_plan.gpus import Room
    from surogate_command_plan.length import length_of
    from surogate_core.service.setup import assembly_of, counted, placed, resolve_device, resolve_model, settled_for

    budget = None if size is None else fit.parse_size(size)
    device = resolve_device(config)
    gpu = gpu or _here(device)
    asked = config = _checked(config, registry, device, gpu, cluster)
    resolved = resolve_model(config, registry, weights_needed=False)
    room = Room.here(config, gpu)
    # What --fit proposes is named as changes of the fastest setting.
    config = settled_for(config, registry, resolved, room=None if budget is not None else room.device)

    predicted = fit.Predictor(
        lambda config: counted(config, registry, assembly_of(config, registry, resolved)),
        lambda config, counts: placed(config, registry, counts),
    )
    prediction = on_average(config, predicted, busiest)
    rates = fit.GpuRates.of(gpu)
    # One speed of a GPU is given for a cluster, and recurrences have not been measured.
    estimate = None if cluster is not None else _estimator(registry, resolved.model, predicted, gpu, busiest)
    plan = view.RunPlan(
        config=config,
        title=resolved.title,
        settings=predicted.counts(config).settings,
        prediction=prediction,
        gpu=gpu,
        again_rate=rates.flops,
        left_out=_left_out(registry, device),
        room=room,
        speed=None if estimate is None else estimate(config),
        cluster=None if cluster is None else _of_cluster(config, registry, prediction, gpu, cluster),
        length=length_of(config, registry, resolved),
        **_of_machine(device),
        chosen=view.chosen(asked, config),
        load=load_of(config, busiest),
        recurs=_recurs(resolved.model),
        **_caches(config, registry, resolved),
        **_of_experts(config, resolved.model, prediction.kernels, device),
    )
    plan = replace(plan, shared_out=_shared_out(plan, registry, predicted))
    plan = replace(plan, whole_experts=whole_experts(plan, registry, predicted, estimate))
    fitting = None if budget is None else fit.proposals(config, registry, predicted, rates=rates)
    _print(plan, fitting, budget, switches)
    nothing_fits = fitting is not None and budget is not None and not any(fit.fits(p, budget) for p in fitting)
    return MachineError.exit_code if nothing_fits else 0


def _checked(
    config: RunConfig, registry: Registry, device: torch.device, gpu: Gpu | None, cluster: Cluster | None
) -> RunConfig:
    """The configuration with a number of GPUs that can be connected; raises `ConfigError` and `UserError`."""
    from surogate_core.service.config import sharing
    from surogate_core.service.setup import check_planned
    from surogate_core.service.training import check_rates

    if cluster is not None and device.type != "cuda":
        raise UserError("num_nodes, gpus_per_node: a cluster has GPUs, and none is here. Fix: add --gpu h200")
    config = _with_number(config, device)
    sharing.check(config, registry.get("optimizer", config.optimizer.name))
    check_rates(config, registry)
    check_planned(config, registry, near=config.gpus if cluster is None else cluster.per_node)
    if config.gpus > 1 and config.fabric.name == "copy_engines" and gpu is not None and not gpu.peers:
        message = f"copy_engines needs GPUs that can write into each other's memory, and two {gpu.title} cannot."
        raise ConfigError([Problem(key="fabric", message=message, fix="fabric: auto")])
    return config


def _shared_out(plan: RunPlan, registry: Registry, predicted: Predictor) -> tuple[tuple[str, ...], int] | None:
    """How these GPUs, or more of one machine, can share out a run that does not fit; None if it fits, or in no way."""
    from surogate_command_plan import fit, view

    device = plan.settings.device
    if plan.fits is not False or device.type != "cuda" or plan.room.device is None:
        return None
    config, memory = plan.config, plan.room.device / view.MARGIN
    return fit.shared_out(config, registry, predicted, memory, more=plan.cluster is None)


def _estimator(
    registry: Registry, model: dsl.Model, predicted: Predictor, gpu: Gpu | None, busiest: float | None
) -> Callable[[RunConfig], Speed] | None:
    """Estimates the speed of GPUs of this kind in one machine; None if they are not known."""
    from surogate_command_plan import fit
    from surogate_command_plan.experts import load_of, on_average
    from surogate_command_plan.speed import speed

    if gpu is None or _recurs(model):
        return None

    def estimate(config: RunConfig) -> Speed:
        prediction, own = on_average(config, predicted, busiest), predicted.counts(config).own_experts
        more = fit.seconds_of(config, registry, prediction, fit.GpuRates.of(gpu))
        load = load_of(config, busiest)
        return speed(config, registry, model, prediction, gpu, more=more, own_experts=own, busiest=load)

    return estimate


def _of_cluster(
    config: RunConfig, registry: Registry, prediction: Prediction, gpu: Gpu | None, cluster: Cluster
) -> ClusterPlan:
    """What a step costs on the cluster; raises `UserError` where there are no GPUs."""
    from surogate_command_plan import cluster_cost
    from surogate_command_plan.cluster_cost import ClusterPlan
    from surogate_command_plan.speed import can_copy, update_seconds
    from surogate_core.service.config import sharing

    axes = sharing.axes(config)
    work = cluster_cost.GpuWork(
        tokens=sharing.tokens_of_rank(config) * config.gradient_accumulation_steps,
        micro_steps=config.gradient_accumulation_steps,
        update=0.0 if gpu is None else update_seconds(config, registry, prediction, gpu),
        shared=1 - 1 / axes.shard if axes.zero_level else 0.0,
    )
    cluster = replace(cluster, copies=sharing.copies(config) and can_copy(gpu))
    sent, fabric = prediction.sent, registry.get("fabric", config.fabric.name)
    return ClusterPlan(
        cluster=cluster,
        sent=sent,
        flat=cluster_cost.cost(cluster, sent, work),
        hierarchical=cluster_cost.cost(cluster, sent, work, cluster_cost.hierarchical),
        staged=cluster.nodes > 1 and cluster.per_node > 1 and config.hierarchical_reduction and fabric.across,
        tokens=work.tokens * cluster.ranks,
        update_known=gpu is not None,
    )


def _recurs(model: dsl.Model) -> bool:
    """Whether a layer is a recurrence or a convolution, whose speed on a GPU is not measured."""
    from surogate_core.service.model import States

    specs = (spec for _, block in model.blocks(0) for spec in block.mixer_specs())
    return any(isinstance(spec, States) for spec in specs)


def _of_experts(
    config: RunConfig, model: dsl.Model, kernels: Mapping[tuple[str, str], str], device: torch.device
) -> dict[str, Any]:
    """The fields of a plan that a model with experts has; none for another model."""
    from surogate_core.service.engine import distinct, pieces
    from surogate_core.service.setup import adapted_note, product_notes, resolve_lora, router_notes

    experts = model.expert_slots()
    if not experts:
        return {}
    unused = sum(slot.unused for slots in experts.values() for slot in slots)
    notes = [*router_notes(config, model), *product_notes(kernels, model, device)]
    if (lora := resolve_lora(config, model)) is None:
        return {"unused": unused, "of_experts": tuple(notes)}
    specs = distinct(pieces(model, lora=lora, max_seqlen=0))
    routers = sum(math.prod(spec.shape) for spec in specs if spec.role == "router" and spec.trainable)
    return {"unused": unused, "routers": routers, "of_experts": (adapted_note(model, lora), *notes)}


def _caches(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> dict[str, Any]:
    """What a run needs beside training to generate: the fields of a plan."""
    return {"samples": _samples(config, registry, resolved), "rollouts": _rollouts(config, registry, resolved)}


def _samples(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> tuple[int, str]:
    """What the samples of a run need; raises `UserError` for a prompt that is wrong."""
    if not config.sample_prompts:
        return 0, ""
    from surogate_core.service.engine import programs_on_meta
    from surogate_core.service.setup import assembly_of, cache_note

    return cache_note(config, registry, resolved, programs_on_meta(assembly_of(config, registry, resolved)))


def _rollouts(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> tuple[int, str]:
    """What a task needs that samples its steps from the model."""
    from surogate_core.service.setup import task_spec

    spec, engine = task_spec(config, registry), registry.get("rollout", config.rollout.name)
    if spec.planned is None or not (engine.caches or engine.copied):
        return 0, ""
    from surogate_core.plugin import atomic
    from surogate_core.service.engine import programs_on_meta, without_values
    from surogate_core.service.setup import assembly_of

    weights = without_values(programs_on_meta(assembly_of(config, registry, resolved)))
    if engine.copied is None:
        return spec.planned(config, spec.options_of(config), weights)
    copy_bytes, copy = engine.copied(weights)
    _, sentence = spec.planned(config, spec.options_of(config), copy)
    where = f"the next GPU generates, where a copy of the weights takes at least {atomic.human_bytes(copy_bytes)}"
    return 0, f"{sentence}; {where}"


def _with_number(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with the number of GPUs that `gpus=0` means here."""
    if config.gpus:
        return config
    number = 1 if device.type == "cpu" else _number_here(device)
    if number is None:
        message = "is 0, all GPUs of this machine, which does not have the GPU of --gpu."
        raise ConfigError([Problem(key="gpus", message=message, fix="a number, such as gpus=8")])
    return replace(config, gpus=number)


def _number_here(device: torch.device) -> int | None:
    """GPUs of this machine; None for a CPU, or if a GPU is only assumed."""
    import torch

    from surogate_core.plugin import compute

    return None if device.type != "cuda" or compute.assumed() is not None else torch.cuda.device_count()


def _of_machine(device: torch.device) -> dict[str, Any]:
    """The fields of a plan about the GPUs of this machine."""
    import torch

    here = _number_here(device)
    titles = [torch.cuda.get_device_name(number) for number in range(here or 0)] if torch.cuda.is_available() else []
    return {"here": here, "unequal": tuple(titles) if len(set(titles)) > 1 else ()}


def _print(plan: RunPlan, fitting: list[Proposal] | None, budget: int | None, switches: set[str]) -> None:
    from surogate_command_plan import fit, view

    if "--json" in switches:
        extra = {} if fitting is None or budget is None else {"fit": fit.as_json(budget, fitting, room=plan.room)}
        print(view.as_json(plan, **extra), end="")
        return
    text = view.as_text(plan, config="--config" in switches, schedule="--schedule" in switches)
    print(text, end="")
    if fitting is not None and budget is not None:
        print("\n" + fit.as_text(budget, fitting, room=plan.room, rates=fit.GpuRates.of(plan.gpu)), end="")


def _left_out(registry: Registry, device: torch.device) -> dict[str, str]:
    """Kernel pack → the reason why it is not counted on, for an assumed GPU."""
    from surogate_core.plugin import compute
    from surogate_core.service.kernels import TORCH_PACK

    if compute.assumed() is None:
        return {}
    reasons = {name: pack.unavailable(device) for name, pack in registry.all("kernels").items()}
    return {name: reason for name, reason in reasons.items() if reason and name != TORCH_PACK.name}


def _here(device: torch.device) -> Gpu | None:
    """The GPU of this machine; None for a CPU, for a GPU that is not known, or where one is only assumed."""
    import torch

    from surogate_command_plan.gpus import of_device
    from surogate_core.plugin import compute

    if device.type != "cuda" or compute.assumed() is not None:
        return None
    facts = torch.cuda.get_device_properties(device)
    return of_device(facts.name, facts.total_memory)
