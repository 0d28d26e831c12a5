"""A tiny model of the kit's own in an engine, on a CPU: what recipes, optimizers and offloaders are tried with.

Shape suffixes: N tokens, D features.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import (
    KernelPack,
    Objective,
    Offloader,
    OptimizerSettings,
    OptimizerSpec,
    ParamGroup,
    Recipe,
    RecipeSettings,
    WeightFormat,
)
from surogate_core.dsl import Block, Dim, Embedding, Linear, LMHead, Model, Param, Setting, Stack
from surogate_core.dsl.declare import LoRA, TensorSpec
from surogate_core.dsl.slots import Adapter
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine, EngineSettings
from surogate_core.engine.parameters import RandomSource, Source
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_core.kernels import ops
from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.registry import KernelTable
from surogate_core.testing.check import ensure

CPU = torch.device("cpu")
TOKENS = 32
LENGTHS = (13, 9, 7)
VOCABULARY = 64
CONFIG: Mapping[str, Any] = {
    "model_type": "conformance",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}

D, H, F = Dim("hidden_size"), Dim("num_attention_heads"), Dim("intermediate_size")
EPS = Setting("rms_norm_eps", default=1e-6)


class TinyBlock(Block):
    """Attention without positions, and a gated feed-forward; sizes are multiples of 32, as quantisers want them."""

    heads, eps = H, EPS
    norm = Param("norm.weight", D)
    q = Linear("q_proj", D, D, group="qkv")
    k = Linear("k_proj", D, D, group="qkv")
    v = Linear("v_proj", D, D, group="qkv")
    o = Linear("o_proj", D, D, group="att")
    gate = Linear("gate_proj", D, F, group="ffn")
    up = Linear("up_proj", D, F, group="ffn")
    down = Linear("down_proj", F, D, group="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        h = ops.rms_norm(x, self.norm, self.eps)
        heads = (len(h), self.heads, -1)
        q, k, v = self.q(h).view(heads), self.k(h).view(heads), self.v(h).view(heads)
        x = x + self.o(ops.attention(q, k, v, tables["cu_seqlens"], self.max_seqlen, 0.35).flatten(1))
        h = ops.rms_norm(x, self.norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class TinyModel(Model):
    """Two blocks."""

    architecture = "Conformance"
    embed = Embedding("embed.weight", Dim("vocab_size"), D)
    layers = Stack(TinyBlock, Dim("num_hidden_layers"), "layers.{i}.")
    head = LMHead("head.weight", "final.weight", EPS, tied=Setting("tie_word_embeddings", default=False))


class PlainDescent:
    """Gradient descent without state, for checks of everything but optimizers."""

    def __init__(self, groups: Sequence[ParamGroup], settings: OptimizerSettings, options: Any):
        self.groups = groups

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """One update of every master."""
        for group in self.groups:
            group.master.sub_(lr * torch.where(skip > 0, 0.0, group.grad * clip))

    def state(self) -> dict[str, Tensor]:
        """None."""
        return {}


PLAIN = Recipe(name="reference", linear=lambda x, weight, slot, options: x @ weight.t(), plain=True)
CROSS_ENTROPY = Objective(name="cross_entropy", token_loss=ops.cross_entropy)
DESCENT = OptimizerSpec(name="reference", build=PlainDescent, state_bytes_per_parameter=0.0)


def random_source(seed: int = 0) -> Source:
    """Random values in every tensor, norms near one and LoRA's B not zero, so that each gradient matters."""
    draw = RandomSource(seed=seed, std=0.2, device=CPU)

    def source(spec: TensorSpec) -> Tensor:
        value = draw(spec)
        return value + 0.5 * draw(replace(spec, init="normal")) if spec.init in ("ones", "zeros") else value

    return source


def adapters() -> LoRA:
    """Adapters of rank 4 on every slot."""
    return LoRA(adapter=Adapter(rank=4, scale=2.0, dropout=0.0, dtype=torch.float32), targets=frozenset({"all"}))


def engine(
    *,
    config: Mapping[str, Any] = CONFIG,
    build: Callable[[Mapping[str, Any]], Model] = TinyModel,
    recipe: Recipe = PLAIN,
    recipe_options: Any = None,
    optimizer: OptimizerSpec = DESCENT,
    offloader: Offloader = NO_OFFLOAD,
    offload_dir: str | None = None,
    lora: LoRA | None = None,
    source: Source | None = None,
    recompute: bool = False,
    packs: Sequence[KernelPack] = (TORCH_PACK,),
    objective: Objective = CROSS_ENTROPY,
    head_chunks: int = 1,
    weight_format: WeightFormat | None = None,
) -> Engine:
    """An engine in fp32 with FX graphs; bundles get their options' defaults. `MachineError` if a CPU cannot.

    `offload_dir`: for the offloader's scratch files; by default the system's directory of temporary files.
    """
    if recipe_options is None:
        recipe_options = recipe.prepare(recipe.options(), RecipeSettings(), CPU)
    return Engine(
        build(config),
        settings=EngineSettings(
            device=CPU,
            tokens=TOKENS,
            borders=8,
            max_seqlen=TOKENS,
            recompute=Recompute(block=recompute),
            dtype=torch.float32,
            adapter_dtype=torch.float32,
            compiler="fx",
            cuda_graphs=False,
            head_chunks=head_chunks,
            weight_decay=0.1,
            max_grad_norm=1.0,
            seed=0,
        ),
        recipe=recipe,
        recipe_options=recipe_options,
        objective=objective,
        optimizer=optimizer,
        optimizer_settings=OptimizerSettings(),
        optimizer_options=optimizer.options(),
        offloader=offloader,
        offloader_options=offloader.prepare(offloader.options(), offload_dir or tempfile.gettempdir()),
        kernels=KernelTable.build(CPU, list(packs)),
        lora=lora,
        source=source or random_source(),
        weight_format=weight_format,
    )


def documents(seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Three documents of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]


def batch(found: Sequence[Sequence[int]]) -> MicroBatch:
    """The documents end to end, then padding as a document of its own; all but each first token are predicted."""
    used = sum(map(len, found))
    parts = [*map(list, found), [0] * (TOKENS - used)]
    labels: list[int] = []
    for part in parts[:-1]:
        labels += [*part[1:], IGNORE_LABEL]
    labels += [IGNORE_LABEL] * (TOKENS - used)
    stops = [0]
    for part in parts:
        stops.append(stops[-1] + len(part))
    stops += [TOKENS] * (8 - len(stops))
    return MicroBatch(
        input_ids=torch.tensor([t for p in parts for t in p]),
        labels=torch.tensor(labels),
        positions=torch.cat([torch.arange(len(p), dtype=torch.int32) for p in parts]),
        cu_seqlens=torch.tensor(stops, dtype=torch.int32),
        max_seqlen=TOKENS,
        tokens=used,
        label_tokens=sum(label != IGNORE_LABEL for label in labels),
    )


def batches(step: int, count: int = 1) -> list[MicroBatch]:
    """The micro-batches of a step, all different."""
    return [batch(documents(step * count + micro_step)) for micro_step in range(count)]


def train(
    made: Engine, steps: int, *, start: int = 0, lr: float = 1e-2, same: bool = False, micro_batches: int = 1
) -> list[float]:
    """The losses of that many steps, on data that depends on the step's number, or is always the same."""
    return [
        made.train_step(batches(0 if same else step, micro_batches), step=step, lr=lr).read()[0]
        for step in range(start, start + steps)
    ]


def snapshot(made: Engine) -> dict[str, Tensor]:
    """Copies of everything that a checkpoint keeps."""
    return {f"{file} {name}": t.clone() for file, tensors in made.state().items() for name, t in tensors.items()}


def ensure_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise `AssertionError` naming the first tensor that is not equal."""
    ensure(found.keys() == expected.keys(), f"{what}: other tensors: {sorted(found.keys() ^ expected.keys())}")
    for name, tensor in expected.items():
        equal = torch.equal(found[name], tensor)
        ensure(equal, f"{what}: {name} differs by {_difference(found[name], tensor)}")


def _difference(a: Tensor, b: Tensor) -> str:
    return f"{float((a.double() - b.double()).abs().max()):.2e}" if a.shape == b.shape else "its shape"


def ensure_resumes(make: Callable[[], Engine]) -> None:
    """Two steps, a checkpoint into a fresh engine, two steps: the same bits as four steps."""
    whole, first, second = make(), make(), make()
    losses = train(whole, 4)
    train(first, 2)
    second.load_state({file: {n: t.clone() for n, t in tensors.items()} for file, tensors in first.state().items()})
    resumed = train(second, 2, start=2)
    ensure(resumed == losses[2:], f"losses after a resume are {resumed}, without one {losses[2:]}")
    ensure_same_bits(snapshot(second), snapshot(whole), "after a resume")


def relative_error(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖ / ‖expected‖ in float64."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    ensure(value.shape == expected.shape, f"shape {tuple(value.shape)}, not {tuple(expected.shape)}")
    return float((value - expected).norm() / expected.norm().clamp(min=1e-300))
