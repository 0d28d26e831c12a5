"""The time of an optimizer step, estimated from counted work, the rates of the GPU, and what GPUs send each other.

The shares of the vendor's rates that a step reaches are those of one H200 (docs/performance.md): LoRA at 0.6B, 1.7B, 4B
and 8B is predicted within 4 % of what was measured there. Other GPUs have not been measured. Six trainings of a model
with 128 experts on that H200 are predicted within 10 % (tests/test_plan_experts.py).

The shares of NVLink's rate, what computation hides, and the wait are those of H200s: for seven trainings on two of them
the estimated share of the speed of two single GPUs is within one percentage point (tests/test_plan_speed.py). With the
measured speed of one GPU they also fit four H100s (tests/test_cluster_cost.py). GPUs without NVLink have not been
measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from surogate_command_plan.gpus import Gpu
from surogate_core.plugin import bundles
from surogate_core.service.config import sharing
from surogate_core.service.training import ModelFlops

if TYPE_CHECKING:
    from surogate_core.plugin import dsl
    from surogate_core.service.config import RunConfig
    from surogate_core.service.engine import Prediction, Sent
    from surogate_core.service.plugins import Registry

LINKED: Mapping[str, float] = {"exchange": 0.51, "gather": 0.65}
"""Share of NVLink's rate in one direction that collectives of a layer's size reach."""
UNLINKED = 0.5
"""Share of the bus's rate that they reach without NVLink, assumed."""
CALL = 40e-6
"""Seconds of a small collective."""
HIDDEN = 0.78
"""Share of the time of transfers that the computation beside them hides, where copy engines move the data."""
HIDDEN_NCCL = 0.41
"""The same where NCCL's kernels move it, which take multiprocessors from the computation: 0.37 at level 1 and 0.46 at
level 3 for 8B with one micro-step on two H200s (benchmarks/evidence/several-gpus.md)."""
WAIT = 2e-3
"""Seconds of a step in which a GPU waits for the slowest one and for the host's exchange."""
FORWARD = 1 / 3
"""Share of a micro-step's time that its forward takes."""


class Timed(Protocol):
    """Tells how long transfers take."""

    def seconds(self, sent: Sent) -> float:
        """Time of all calls of a step, with nothing beside them."""
        ...

    def hidden(self, sent: Sent) -> float:
        """Share of it that computation beside it hides at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRates:
    """How fast one GPU exchanges tensors with the others."""

    exchange: float
    """Bytes a second in one direction."""
    gather: float
    copies: bool = True
    """Whether copy engines move the data, and not NCCL."""

    @classmethod
    def of(cls, gpu: Gpu | None, *, bus: float, copies: bool = True) -> WireRates:
        """The rates of a GPU of the table; `bus`: bytes a second of the bus where it has no NVLink, or is not known."""
        if gpu is None or gpu.link is None:
            return cls(exchange=UNLINKED * bus, gather=UNLINKED * bus, copies=copies)
        return cls(exchange=LINKED["exchange"] * gpu.link, gather=LINKED["gather"] * gpu.link, copies=copies)

    def seconds(self, sent: Sent) -> float:
        """Time of all calls of a step, with nothing beside them."""
        return sent.nbytes / (self.exchange if sent.how == "exchange" else self.gather) + CALL * sent.calls

    def hidden(self, sent: Sent) -> float:
        """As `Timed.hidden`."""
        return HIDDEN if self.copies else HIDDEN_NCCL


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The transfers of an optimizer step."""

    nbytes: int
    """Bytes that each GPU sends, and as many that it receives."""
    seconds: float
    """Their time, with nothing beside them."""
    hidden: float
    """How much of it computation hides."""
    wait: float
    """The time in which a GPU waits for the others."""

    @property
    def exposed(self) -> float:
        """The time that the other GPUs add to a step."""
        return self.seconds - self.hidden + self.wait


def wire_of(sent: Sequence[Sent], rates: Timed, *, computing: float, micro_steps: int) -> Wire:
    """The transfers beside micro-steps that take `computing` seconds each."""
    windows = {"forward": FORWARD, "backward": 1 - FORWARD, "both": 1.0, "": 0.0}
    hideable = hidden = 0.0
    for one in sent:
        fits = min(rates.seconds(one), windows[one.beside] * one.micro_steps * computing)
        hideable += fits
        hidden += rates.hidden(one) * fits
    room = min(micro_steps * computing / hideable, 1.0) if hideable else 0.0
    return Wire(
        nbytes=sum(one.nbytes for one in sent),
        seconds=sum(map(rates.seconds, sent)),
        hidden=hidden * room,
        wait=WAIT if sent else 0.0,
    )


PRODUCTS = {"bf16": 0.69, "fp8": 0.62, "fp4": 0.5}
"""Share of the rate of dense products that the products of a step reach; fp4 was not measured."""
ATTENTION = 0.36
"""Share of the bf16 rate that attention reaches."""
AGAIN = 0.61
"""Share of the bf16 rate at which a step computes again what it did not keep."""
FEATURE_BYTES = 13.0
"""Bytes that everything besides products and attention moves, for a token and a feature that a projection reads or
writes."""
LAYER_SECONDS = 35e-6
"""Idle time of a layer in a micro-step."""
WEIGHT_GRADIENTS = 0.32
"""Share of the bf16 rate that the gradients of experts' weights reach (benchmarks/evidence/experts.md)."""
ASSUMED = "the efficiency is that measured on an H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """An estimate."""

    seconds: float
    """The time of an optimizer step."""
    tokens: int
    """Tokens of an optimizer step of all GPUs."""
    mfu: float
    """Necessary FLOPs of a GPU's part of the step over its time and the GPU's bf16 rate."""
    wire: Wire
    """What the GPUs send each other in it; nothing with one."""
    alone: float
    """The time of a step of one GPU with as many micro-batches as each has."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its time."""
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """Tokens per second as a share of those of as many single GPUs."""
        return self.alone / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWork:
    """What a token costs in the experts of all layers, on average over the ranks that share them out."""

    products: float
    """FLOPs of the forward, of input gradients, and of the gradients of trained weights."""
    gradients: float
    """Those of them that are of the gradients of trained weights."""
    rows: int
    """Features that everything but the products reads and writes for a token's rows. Kernels skip places that no row
    takes."""

    @classmethod
    def of(cls, config: RunConfig, model: dsl.Model) -> ExpertWork:
        """The work of a run; none without experts."""
        slots = [slot for of_layer in model.expert_slots().values() for slot in of_layer]
        weights = sum(slot.choices * slot.inputs * slot.outputs for slot in slots)
        return cls(
            products=float(weights * (4 if config.lora else 6)),
            gradients=0.0 if config.lora else 2.0 * weights,
            rows=sum(slot.choices * (slot.inputs + slot.outputs) for slot in slots),
        )

    def seconds(self, gpu: Gpu, products: str, *, busiest: float = 1.0) -> float:
        """Time for a token; `busiest`: rows of the rank with most over the mean, for which the others wait."""
        of_rows = (self.products - self.gradients) / (PRODUCTS[products] * gpu.rate(products))
        of_rows += self.gradients / (WEIGHT_GRADIENTS * gpu.bf16)
        return busiest * of_rows + FEATURE_BYTES * self.rows / gpu.bandwidth


def again_rate(gpu: Gpu) -> float:
    """FLOP/s of what a step computes again."""
    return AGAIN * gpu.bf16


def speed(
    config: RunConfig,
    registry: Registry,
    model: dsl.Model,
    prediction: Prediction,
    gpu: Gpu,
    *,
    more: float,
    own_experts: int = 0,
    busiest: float = 1.0,
) -> Speed:
    """The estimate; `more`: seconds of a step that go into offloading, computing again and the pieces of the head.

    `own_experts`: trained parameters of a rank's experts, where ranks share them out; `busiest`: as of `ExpertWork`.
    """
    tokens = sharing.tokens_of_rank(config) * config.gradient_accumulation_steps
    # A packed row of several documents has fewer pairs: this is the longest time.
    pairs = (config.sequence_len + 1) / 2
    work = ModelFlops.of(model, frozen=config.lora)
    recipe: bundles.RecipeSpec = registry.get("recipe", config.recipe.name)
    head = model.vocab_size * model.width * (4 if config.lora else 6)
    experts, whole = ExpertWork.of(config, model), ExpertWork.of(replace(config, ep_size=1), model)
    body = work.products_per_token - head - experts.products
    each = body / (PRODUCTS[recipe.products] * gpu.rate(recipe.products)) + head / (PRODUCTS["bf16"] * gpu.bf16)
    each += work.attention(1, pairs) / (ATTENTION * gpu.bf16)
    each += FEATURE_BYTES * features(model) / gpu.bandwidth
    of_experts, alone = experts.seconds(gpu, recipe.products, busiest=busiest), whole.seconds(gpu, recipe.products)
    each += of_experts
    update = update_seconds(config, registry, prediction, gpu)
    idle = LAYER_SECONDS * config.gradient_accumulation_steps * sum(1 for _ in model.blocks(1))
    ranks, micro_steps, computing = prediction.ranks, config.gradient_accumulation_steps, tokens * each + idle
    rates = WireRates.of(gpu, bus=gpu.bus, copies=sharing.copies(config) and can_copy(gpu))
    wire = wire_of(prediction.sent, rates, computing=computing / micro_steps, micro_steps=micro_steps)
    own = update * updated_share(config, prediction.trainable_parameters, own_experts)
    seconds = computing + own + more + wire.exposed
    return Speed(
        seconds=seconds,
        tokens=tokens * ranks,
        mfu=work.per_token(pairs) * tokens / seconds / gpu.bf16,
        wire=wire,
        alone=computing - tokens * (of_experts - alone) + update + more,
    )


def can_copy(gpu: Gpu | None) -> bool:
    """Whether copy engines can move data between such GPUs; assumed of a GPU that is not in the table."""
    return gpu is None or gpu.peers


def update_seconds(config: RunConfig, registry: Registry, prediction: Prediction, gpu: Gpu) -> float:
    """Time in which one GPU updates all trained weights; 0 if the CPU does."""
    if config.cpu_training:
        return 0.0
    optimizer: bundles.OptimizerSpec = registry.get("optimizer", config.optimizer.name)
    return prediction.trainable_parameters * (18 + 2 * optimizer.state_bytes_per_parameter) / gpu.bandwidth


def updated_share(config: RunConfig, trained: int, own_experts: int) -> float:
    """Share of all trained parameters that a rank updates."""
    axes = sharing.axes(config)
    parts, replicas = (axes.shard, axes.along("expert_replicate").size) if axes.zero_level else (1, 1)
    others = trained - axes.expert * own_experts
    return (others / parts + own_experts / replicas) / trained if trained else 1.0


def features(model: dsl.Model) -> int:
    """Features of a token that the projections of all layers read and write, without those of experts."""
    return sum(s.inputs + s.outputs for _, block in model.blocks(1) for s in block.linear_slots(None))


def step_time(seconds: float) -> str:
    """``0.034 s``, ``4.8 s``, ``210 s``."""
    return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:,.0f} s"
