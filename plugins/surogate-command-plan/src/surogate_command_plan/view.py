"""How `surogate plan` shows a prediction."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from surogate_command_plan import cluster_cost, experts
from surogate_command_plan.cluster_cost import ClusterPlan
from surogate_command_plan.experts import WholeExperts
from surogate_command_plan.gpus import Gpu, Room
from surogate_command_plan.length import Length
from surogate_command_plan.speed import ASSUMED, Speed, step_time
from surogate_core.plugin import atomic
from surogate_core.service.config import RunConfig, masked_values, masked_yaml, numbers, sharing, to_dict, to_yaml
from surogate_core.service.engine import EngineSettings, Prediction, render
from surogate_core.service.setup import MARGIN, MemorySettings, reduction_notes, tokens_per_step

PLACES = ("device", "host", "disk")
CHOSEN_KEYS = ("recompute", "recompute_budget", "lmhead_chunks")


def totals(prediction: Prediction) -> str:
    """Bytes in each place, for people; a disk is named only if something is stored on it."""
    places = PLACES if prediction.total("disk") else PLACES[:2]
    return ", ".join(f"{place} {atomic.human_bytes(prediction.total(place))}" for place in places)


def chosen(asked: RunConfig, settled: RunConfig) -> str:
    """What the run chooses by itself, as overrides; empty if the configuration leaves nothing open."""
    if asked == settled:
        return ""
    return str(MemorySettings(**{key: getattr(settled, key) for key in CHOSEN_KEYS}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that is said about a run."""

    config: RunConfig
    """What the run leaves open is chosen."""
    title: str
    settings: EngineSettings
    prediction: Prediction
    gpu: Gpu | None
    """None on a CPU, and for a GPU that is not in the table."""
    again_rate: float
    """FLOP/s of what is computed again."""
    left_out: Mapping[str, str]
    """Kernel pack → why it is not counted on."""
    room: Room
    speed: Speed | None
    cluster: ClusterPlan | None
    """None unless the command names nodes."""
    length: Length
    here: int | None
    """GPUs of this machine; None for a CPU, or if a GPU is only assumed."""
    chosen: str
    recurs: bool = False
    """Whether a layer is a recurrence."""
    unused: int = 0
    """Parameters of the base that a token does not use: those of the experts that it does not go to."""
    routers: int = 0
    """Parameters of routers that are trained beside adapters."""
    of_experts: tuple[str, ...] = ()
    """Notes on experts."""
    unequal: tuple[str, ...] = ()
    """The names of this machine's GPUs, if they are not equal."""
    load: float = 1.0
    """Rows of the busiest GPU of those that share out experts over their mean, as assumed."""
    whole_experts: WholeExperts | None = None
    """The run without `ep_size`, where that fits."""
    samples: tuple[int, str] = (0, "")
    """Bytes of the caches of samples, and a sentence about them."""
    rollouts: tuple[int, str] = (0, "")
    """The same for a task that samples its steps from the model."""
    shared_out: tuple[tuple[str, ...], int] | None = None
    """How GPUs can share out a run that does not fit: overrides, and what it needs of each."""

    @property
    def base(self) -> int:
        """Parameters without adapters."""
        adapters = self.prediction.trainable_parameters - self.routers if self.config.lora else 0
        return self.prediction.parameters - adapters

    @property
    def needed(self) -> int:
        """Bytes in the device's memory; on a CPU the host's and the device's are one."""
        total = self.prediction.total
        return total("device") + (0 if self.settings.device.type == "cuda" else total("host"))

    @property
    def fits(self) -> bool | None:
        """Whether it fits, with a margin; None if the memory is not known."""
        return None if self.room.device is None else self.needed * MARGIN <= self.room.device

    @property
    def seconds(self) -> float | None:
        """The time of all steps, without evaluations and checkpoints."""
        step = self.step_seconds
        return None if step is None or self.length.steps is None or self.length.sampled else step * self.length.steps

    @property
    def step_seconds(self) -> float | None:
        """The time of an optimizer step; None if it is not known."""
        if self.cluster is not None:
            return self.cluster.cost.seconds
        return None if self.speed is None else self.speed.seconds


def as_json(plan: RunPlan, **extra: Any) -> str:
    """The plan as one JSON object, with further keys at its end."""
    prediction, speed = plan.prediction, plan.speed
    of_cluster = {} if plan.cluster is None else cluster_cost.as_json(plan.cluster)
    value = {
        "model": plan.title,
        "gpu": None if plan.gpu is None else plan.gpu.title,
        "gpus": prediction.ranks,
        "fits": plan.fits,
        "fits_with": [] if plan.shared_out is None else list(plan.shared_out[0]),
        "memory_bytes": plan.room.device,
        "tokens_per_second": None if speed is None else speed.tokens_per_second,
        "seconds_per_step": None if speed is None else speed.seconds,
        "mfu": None if speed is None else speed.mfu,
        "efficiency": None if speed is None else speed.efficiency,
        "steps": plan.length.steps,
        "seconds": plan.seconds,
        "config": masked_values(to_dict(plan.config)),
        "device": str(plan.settings.device),
        "parameters": prediction.parameters,
        "trainable_parameters": prediction.trainable_parameters,
        "active_parameters": plan.base - plan.unused,
        "tokens_per_step": tokens_per_step(plan.config),
        "schedule": [str(action) for action in prediction.schedule],
        "kernels": {f"{op} {dtype}": name for (op, dtype), name in prediction.kernels.items()},
        "kernels_left_out": dict(plan.left_out),
        "held": [asdict(h) for h in prediction.held],
        "sent": [asdict(s) for s in prediction.sent],
        "sent_bytes": sum(s.nbytes for s in prediction.sent),
        "sent_seconds": None if speed is None else speed.wire.seconds,
        "hidden_seconds": None if speed is None else speed.wire.hidden,
        "without_ep_size": None if plan.whole_experts is None else plan.whole_experts.as_json(),
        "samples_bytes": plan.samples[0],
        "rollouts_bytes": plan.rollouts[0],
        "device_bytes": prediction.total("device"),
        "host_bytes": prediction.total("host"),
        "disk_bytes": prediction.total("disk"),
        "recomputed_flops": prediction.again,
        "recomputed_seconds": prediction.again / plan.again_rate,
        **of_cluster,
        **extra,
    }
    return json.dumps(value, indent=1) + "\n"


def as_text(plan: RunPlan, *, config: bool = False, schedule: bool = False) -> str:
    """The plan for people: the answers, then the memory; the rest on request."""
    trained = f"{plan.prediction.parameters:,} parameters, {plan.prediction.trainable_parameters:,} trained"
    if plan.unused:
        trained += f"\n{plan.base:,} in the base, {plan.base - plan.unused:,} of them active for a token"
    answers = [("Fits", _fit(plan)), ("Speed", _speed(plan)), ("Time", _time(plan))]
    if plan.cluster is None:
        answers += [("Sends", _sends(plan))] if plan.prediction.ranks > 1 else []
    answers += [("Chooses", plan.chosen)] if plan.chosen else []
    answers += [("Note", note) for note in _notes(plan)]
    parts = [
        f"{plan.title}: {trained}\n{_device(plan)}\n\n" + "".join(f"{name:<9}{text}\n" for name, text in answers),
        f"{_of_each('Memory', plan)}, predicted\n{_memory(plan)}",
    ]
    if plan.cluster is not None:
        parts.insert(1, cluster_cost.as_text(plan.cluster))
    if schedule:
        parts.append(_schedule(plan))
    if config:
        parts.append(f"Configuration\n{masked_yaml(to_yaml(plan.config))}")
    return "\n".join(parts)


def _device(plan: RunPlan) -> str:
    ranks = plan.prediction.ranks
    if plan.settings.device.type != "cuda":
        return "on the CPU of this machine" + (f", {ranks} processes" if ranks > 1 else "")
    count = f"{ranks} × " if ranks > 1 else ""
    if plan.cluster is not None:
        nodes = plan.cluster.cluster.nodes
        count = f"{nodes} {'node' if nodes == 1 else 'nodes'} of {plan.cluster.cluster.per_node} × "
    return f"on {count}{plan.gpu.title if plan.gpu is not None else 'a GPU that is not in the table'}"


def _of_each(what: str, plan: RunPlan) -> str:
    """``Memory of each GPU`` if there are several."""
    if plan.prediction.ranks == 1:
        return what
    return f"{what} of each {'GPU' if plan.settings.device.type == 'cuda' else 'process'}"


def _fit(plan: RunPlan) -> str:
    needed = atomic.human_bytes(plan.needed)
    if plan.room.device is None:
        return f"{needed} are needed; the memory of this GPU is not known"
    sizes = f"{needed} of {atomic.human_bytes(plan.room.device)}"
    if plan.fits:
        return f"yes: {sizes}"
    changes = f"--fit {plan.room.device / 2**30 * 0.99:.3g}GiB proposes what to change"
    if plan.shared_out is None:
        return f"no: {sizes}; {changes}"
    overrides, each = plan.shared_out
    return f"no: {sizes}; {changes}; {' '.join(overrides)} needs {atomic.human_bytes(each)} of each GPU"


def _speed(plan: RunPlan) -> str:
    if plan.cluster is not None:
        return cluster_cost.speed(plan.cluster)
    if plan.speed is None:
        what = "a CPU" if plan.settings.device.type != "cuda" else "this GPU"
        what = "a model with recurrent layers" if plan.recurs else what
        return f"not estimated for {what}; train with max_steps=5 to see"
    step = step_time(plan.speed.seconds)
    rate = numbers.rate(plan.speed.tokens_per_second)
    return f"about {rate} tokens/s, {step} a step, MFU {plan.speed.mfu:.0%} (estimated; {ASSUMED})"


def _sends(plan: RunPlan) -> str:
    """What the GPUs send each other."""
    sent = atomic.human_bytes(sum(s.nbytes for s in plan.prediction.sent))
    if plan.speed is None or plan.gpu is None:
        return f"{sent} a step from each to the others"
    wire, ranks = plan.speed.wire, plan.prediction.ranks
    over = "NVLink" if plan.gpu.link is not None else f"PCIe, because {plan.gpu.title} has no NVLink"
    if not plan.gpu.peers:
        over = f"PCIe and host memory, because {plan.gpu.title} has no NVLink and no peer access"
    hidden = f", {wire.hidden / wire.seconds:.0%} of it beside computation" if wire.hidden else ""
    return (
        f"{sent} a step from each GPU over {over}: {step_time(wire.seconds)}{hidden}; "
        f"{min(plan.speed.efficiency, 1):.0%} of the speed of {ranks} single GPUs"
    )


def _time(plan: RunPlan) -> str:
    steps, config = plan.length.steps, plan.config
    if steps is None:
        return f"not known: {plan.length.data}"
    if plan.length.sampled:
        return f"not estimated: {steps:,} steps, and {plan.length.data}"
    epochs = "" if config.max_steps > 0 else f", {config.num_epochs:g} epochs"
    about = "about " if plan.length.estimated else ""
    count = f"{about}{steps:,} steps of {tokens_per_step(config):,} tokens{epochs} ({plan.length.data})"
    return count if plan.seconds is None else f"about {duration(plan.seconds)} without evaluations: {count}"


def duration(seconds: float) -> str:
    """``3 h 20 min``, ``12 min``, ``40 s``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{minutes / 1440:.1f} days"


def _notes(plan: RunPlan) -> list[str]:
    notes = []
    if plan.gpu is not None and plan.gpu.note:
        notes.append(f"{plan.gpu.title}: {plan.gpu.note}")
    ranks = plan.prediction.ranks
    if plan.here is not None and plan.here < ranks and plan.cluster is None:
        notes.append(f"this machine has {plan.here} GPU{'s' * (plan.here != 1)}, and gpus={ranks} needs {ranks}")
    if plan.here is not None and plan.here > ranks == 1:
        notes.append(f"this machine has {plan.here} GPUs; gpus=0 trains on all of them")
    if plan.unequal and ranks > 1:
        notes.append(f"the GPUs here are not equal ({', '.join(plan.unequal)}); the plan is of equal ones, the first")
    notes += [] if plan.cluster is None else cluster_cost.notes(plan.cluster)
    notes += [*plan.of_experts, *experts.notes(plan)]
    notes += [sentence for _, sentence in (plan.samples, plan.rollouts) if sentence]
    notes += sharing.notes(plan.config)
    notes += reduction_notes(plan.settings, None, deterministic=plan.config.deterministic)
    notes += [f"without the kernels of {name}: {why}" for name, why in sorted(plan.left_out.items())]
    if disk := plan.room.short_of(plan.prediction).get("disk"):
        notes.append(f"{disk}. Fix: set offload_dir to a directory of another disk, or offload less.")
    if plan.prediction.again and plan.gpu is not None and not plan.recurs:
        seconds = plan.config.gradient_accumulation_steps * plan.prediction.again / plan.again_rate
        notes.append(f"{step_time(seconds)} of a step compute again what was not kept")
    return notes


def _on_top(settings: EngineSettings) -> str:
    """A note on what the total does not include; the figure is the largest of docs/memory.md, "On a CPU"."""
    if settings.device.type == "cpu":
        return "a lower bound: holes in the heap took up to 34 % more in measured runs"
    return "fragmentation not included"


def _memory(plan: RunPlan) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensors")
    table.add_column("place")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for held in plan.prediction.held:
        table.add_row(held.kind, held.place, atomic.human_bytes(held.nbytes), held.detail)
    buffer = io.StringIO()
    Console(file=buffer, width=110, highlight=False).print(table)
    ranks, host = plan.prediction.ranks, plan.prediction.total("host")
    all_hosts = f" (host memory of all {ranks}: {atomic.human_bytes(ranks * host)})" if ranks > 1 and host else ""
    return f"{buffer.getvalue()}{totals(plan.prediction)}{all_hosts}; {_on_top(plan.settings)}\n"


def _schedule(plan: RunPlan) -> str:
    settings, config = plan.settings, plan.config
    kernels = ", ".join(f"{op} {name}" for (op, _), name in sorted(plan.prediction.kernels.items()))
    gpus = f" on each of {config.gpus} GPUs" if config.gpus > 1 else ""
    return (
        f"Micro-step on {settings.device} ({settings.compiler}), {settings.tokens:,} tokens\n"
        f"{render(plan.prediction.schedule)}\n"
        f"× {config.gradient_accumulation_steps} micro-steps{gpus}, then clip and {config.optimizer.name}: "
        f"{tokens_per_step(config):,} tokens a step\n"
        f"kernels: {kernels}\n"
    )
