"""Tiny models of the kit in an engine, and micro-batches for them, for the tests of plugins.

Shape suffixes: N tokens, D features.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, MicroBatch, bundles, decoder, dsl, ops
from surogate_core.service.engine import NO_OFFLOAD, Assembly, Axes, Engine, EngineSettings, RandomSource, Source
from surogate_core.service.kernels import TORCH_PACK, KernelTable
from surogate_core.service.model import EXPERT, Adapter, LoRA, Recompute, TensorSpec, expanded, split
from surogate_testing.check import ensure

T = TypeVar("T")
CPU = torch.device("cpu")
TOKENS = 32
"""Tokens of a micro-batch."""
BORDERS = 8
"""Largest number of documents of a micro-batch, plus one."""
LENGTHS = (13, 9, 7)
"""Lengths of the documents of a micro-batch; the rest is padding."""
VOCABULARY = 61
"""Number of different tokens in documents: the vocabulary of the smallest model."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear slots of a decoder's block, as PEFT names them."""
CONFIG: Mapping[str, Any] = {
    "model_type": "conformance",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
"""Configuration of a `TinyModel`; its sizes are multiples of 32, as quantisers need them."""
SMALL_CONFIG: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}
"""Configuration of a `SmallModel`."""

D, H, F = dsl.Dim("hidden_size"), dsl.Dim("num_attention_heads"), dsl.Dim("intermediate_size")
EPS = dsl.Setting("rms_norm_eps", default=1e-6)
FEATURES = dsl.Dim("head_dim", default=decoder.even_share)


class TinyBlock(dsl.Block):
    """Attention without positions, and a gated feed-forward."""

    heads, eps = H, EPS
    norm = dsl.Param("norm.weight", D)
    q = dsl.Linear("q_proj", D, D, region="qkv")
    k = dsl.Linear("k_proj", D, D, region="qkv")
    v = dsl.Linear("v_proj", D, D, region="qkv")
    o = dsl.Linear("o_proj", D, D, region="att")
    attend = dsl.Attention(H, H, FEATURES, scale=0.35)
    gate = dsl.Linear("gate_proj", D, F, region="ffn")
    up = dsl.Linear("up_proj", D, F, region="ffn")
    down = dsl.Linear("down_proj", F, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        h = ops.rms_norm(x, self.norm, self.eps)
        heads = (len(h), self.heads, -1)
        q, k, v = self.q(h).view(heads), self.k(h).view(heads), self.v(h).view(heads)
        x = x + self.o(self.attend(q, k, v).flatten(1))
        h = ops.rms_norm(x, self.norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class TinyModel(dsl.Model):
    """Two blocks."""

    architecture = "Conformance"
    embed = dsl.Embedding("embed.weight", dsl.Dim("vocab_size"), D)
    layers = dsl.Stack(TinyBlock, dsl.Dim("num_hidden_layers"), "layers.{i}.")
    head = dsl.LMHead("head.weight", "final.weight", EPS, tied=dsl.Setting("tie_word_embeddings", default=False))


class SmallBlock(dsl.Block):
    """Two projections, which are traced quickly, for tests of linear slots."""

    eps = EPS
    norm = dsl.Param("norm.weight", D)
    up = dsl.Linear("up_proj", D, F, region="ffn")
    down = dsl.Linear("down_proj", F, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        return x + self.down(torch.relu(self.up(ops.rms_norm(x, self.norm, self.eps))))


class SmallModel(TinyModel):
    """Two blocks of two projections each, without attention."""

    layers = dsl.Stack(SmallBlock, dsl.Dim("num_hidden_layers"), "layers.{i}.")


class PlainDescent:
    """Gradient descent without state, for checks of everything but optimizers."""

    def __init__(self, groups: Sequence[bundles.ParamGroup], options: Any):
        self.groups = groups

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """One update of every master."""
        for group in self.groups:
            group.master.sub_(lr * torch.where(skip > 0, 0.0, group.grad * clip))

    def state(self) -> dict[str, Tensor]:
        """None."""
        return {}


class TextbookAdamW:
    """AdamW (arXiv 1711.05101) like torch.optim.AdamW, for tests that compare with it or need state."""

    def __init__(self, groups: Sequence[bundles.ParamGroup], options: Any):
        self.groups = groups
        self.moments = [(torch.zeros_like(g.grad), torch.zeros_like(g.grad)) for g in groups]
        self.steps = torch.zeros((), device=groups[0].master.device)

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """One update of every master."""
        beta1, beta2 = 0.9, 0.999
        keep = skip > 0
        self.steps += 1 - skip
        count = self.steps.clamp(min=1)
        for group, (first, second) in zip(self.groups, self.moments, strict=True):
            grad = group.grad * clip
            first.copy_(torch.where(keep, first, beta1 * first + (1 - beta1) * grad))
            second.copy_(torch.where(keep, second, beta2 * second + (1 - beta2) * grad * grad))
            root = (second / (1 - beta2**count)).sqrt() + 1e-8
            moved = group.master * (1 - lr * group.weight_decay) - lr * (first / (1 - beta1**count)) / root
            group.master.copy_(torch.where(keep, group.master, moved))

    def state(self) -> dict[str, Tensor]:
        """Both moments of every group, and the number of steps."""
        named = {"steps": self.steps}
        for group, (first, second) in zip(self.groups, self.moments, strict=True):
            named |= {f"{group.name}.first": first, f"{group.name}.second": second}
        return named


class PlainProduct(bundles.Recipe):
    """x Wᵀ in the dtype of both."""

    name = "reference"
    plain = True

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: dsl.TracedSlot) -> Tensor:
        """[N, O]."""
        return x_NI @ weight_OI.t()


PLAIN = PlainProduct()
CROSS_ENTROPY = bundles.Objective(
    name="cross_entropy", token_loss=lambda logits, labels, columns: ops.cross_entropy(logits, labels)
)
DESCENT = bundles.OptimizerSpec(
    name="reference", build=PlainDescent, state_bytes_per_parameter=0.0, whole_matrices=False
)
ADAMW = bundles.OptimizerSpec(name="textbook-adamw", build=TextbookAdamW, whole_matrices=False)


def random_source(seed: int = 0, *, std: float = 0.2, device: str = "cpu") -> Source:
    """Random values in every tensor: norms near one, biases and LoRA's B not zero, so that each gradient matters.

    They are drawn on the CPU, so every device gets the same ones.
    """
    draw = RandomSource(seed=seed, std=std, device=CPU)

    def source(spec: TensorSpec) -> Tensor:
        value = draw(spec)
        if spec.init in ("ones", "zeros"):
            value = value + 0.5 * draw(replace(spec, init="normal"))
        return value.to(device)

    return source


def tensor_source(tensors: Mapping[str, Tensor]) -> Source:
    """The given tensors by HF name; those of experts one by one."""

    def source(spec: TensorSpec) -> Tensor:
        if EXPERT not in spec.hf_name:
            return tensors[spec.hf_name].detach()
        return torch.stack([tensors[name].detach() for name in expanded(spec.hf_name, spec.shape)])

    return source


def with_body(tensors: Mapping[str, T], model: dsl.Model) -> dict[str, T]:
    """What belongs to tensors of transformers' class, by the names that files have. transformers calls the body of
    every model ``model``; files of a family may have another name for it.
    """
    body = next(prefix for prefix, _ in model.blocks(0)).partition(".")[0]
    return {f"{body}.{n.removeprefix('model.')}" if n.startswith("model.") else n: t for n, t in tensors.items()}


def in_files(tensors: Mapping[str, Tensor], model: dsl.Model) -> dict[str, Tensor]:
    """Tensors of transformers' class by the names that files have, where each expert has its own."""
    fused, found = model.fused_tensors(), {}
    for name, value in with_body(tensors, model).items():
        if name not in fused:
            found[name] = value
            continue
        parts = fused[name].parts
        value = value.transpose(1, 2) if fused[name].transposed else value
        values = value.reshape(-1).split([math.prod(shape) for _, shape in parts])
        found |= {part: one.view(shape) for (part, shape), one in zip(parts, values, strict=True)}
    return found


def lora(
    rank: int = 4, *, scale: float = 2.0, dropout: float = 0.0, targets: Sequence[str] = ("all",), **others: Any
) -> LoRA:
    """Adapters with fp32 weights. `others`: further fields of `LoRA`."""
    adapter = Adapter(rank=rank, scale=scale, dropout=dropout, dtype=torch.float32)
    return LoRA(adapter=adapter, targets=frozenset(targets), **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyParts:
    """The parts of an `assembly`, in addition to its `EngineSettings`."""

    build: Callable[[Mapping[str, Any]], dsl.Model] = TinyModel
    recipe: bundles.Recipe = PLAIN
    optimizer: bundles.OptimizerSpec = DESCENT
    offloader: bundles.OffloaderSpec = NO_OFFLOAD
    offload_dir: str | None = None
    """The offloader's directory of scratch files; None: the system's directory of temporary files."""
    objective: bundles.Objective = CROSS_ENTROPY
    packs: Sequence[bundles.KernelPack] = (TORCH_PACK,)
    lora: LoRA | None = None
    weight_format: bundles.WeightFormat | None = None
    skips: Callable[[str], bool] = lambda name: False
    offload_experts: bool = False


def engine(config: Mapping[str, Any] = CONFIG, *, source: Source | None = None, **changes: Any) -> Engine:
    """An engine of an `assembly`, with values from `source`, by default `random_source`."""
    made = assembly(config, **changes)
    return Engine(made, source or random_source(device=made.settings.device.type))


def assembly(config: Mapping[str, Any] = CONFIG, **changes: Any) -> Assembly:
    """What a run on the CPU, in fp32 with FX graphs, is made of.

    `changes` are fields of `AssemblyParts`, arguments of `axes`, or fields of `EngineSettings`, whose `device` may be a
    name and `recompute` a bool: whether whole blocks are computed again.
    """
    parts = AssemblyParts(**{f.name: changes.pop(f.name) for f in fields(AssemblyParts) if f.name in changes})
    settings = _settings(**changes)
    device, offloader = settings.device, parts.offloader
    return Assembly(
        model=parts.build(config),
        settings=settings,
        recipe=parts.recipe,
        objective=parts.objective,
        optimizer=parts.optimizer,
        optimizer_options=parts.optimizer.options(),
        offloader=offloader,
        stores=offloader.build(offloader.options(), parts.offload_dir or tempfile.gettempdir(), device),
        kernels=KernelTable.build(device, list(parts.packs)),
        lora=parts.lora,
        weight_format=parts.weight_format,
        keeps_as_it_is=parts.skips,
        offload_experts=parts.offload_experts,
    )


def _settings(
    *, device: str = "cpu", tokens: int = TOKENS, recompute: Recompute | bool = False, **others: Any
) -> EngineSettings:
    defaults: dict[str, Any] = {"borders": BORDERS, "max_seqlen": tokens}
    plan = axes(**{name: others.pop(name) for name in list(others) if name in AXES})
    policy = Recompute(block=recompute) if isinstance(recompute, bool) else recompute
    return EngineSettings(
        device=torch.device(device), tokens=tokens, recompute=policy, axes=plan, **{**defaults, **others}
    )


AXES = frozenset({"ranks", "shard_ranks", *(f.name for f in fields(Axes))})
"""The arguments of `axes`."""


def axes(*, ranks: int = 1, shard_ranks: int = 0, **others: Any) -> Axes:
    """The plan of `ranks` ranks, of which groups of `shard_ranks` share out tensors; 0: all."""
    return Axes.of(ranks, shard=shard_ranks, **others)


def documents(lengths: Sequence[int] = LENGTHS, *, seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Documents of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def batch(
    found: Sequence[Sequence[int]],
    *,
    tokens: int = TOKENS,
    borders: int = BORDERS,
    labelled: Sequence[Sequence[bool]] | None = None,
    padding_id: int = 0,
) -> MicroBatch:
    """The concatenated documents, then padding as a separate document.

    `labelled[d][t]`: whether token t of document d is a label; by default all but the first are.
    """
    used = sum(map(len, found))
    assert used <= tokens
    parts = [list(document) for document in found]
    if used < tokens:
        parts.append([padding_id] * (tokens - used))
    labels: list[int] = []
    for number, document in enumerate(parts):
        wanted = labelled[number] if labelled and number < len(found) else [number < len(found)] * len(document)
        following = zip(document[1:], wanted[1:], strict=True)
        labels += [token if want else IGNORE_LABEL for token, want in following] + [IGNORE_LABEL]
    stops = [0]
    for part in parts:
        stops.append(stops[-1] + len(part))
    assert len(stops) <= borders, "more documents than the engine has borders"
    stops += [tokens] * (borders - len(stops))
    return MicroBatch(
        input_ids=torch.tensor([t for p in parts for t in p]),
        labels=torch.tensor(labels),
        positions=torch.cat([torch.arange(len(p), dtype=torch.int32) for p in parts]),
        cu_seqlens=torch.tensor(stops, dtype=torch.int32),
        max_seqlen=tokens,
        tokens=used,
        label_tokens=sum(label != IGNORE_LABEL for label in labels),
        real=torch.arange(tokens) < used,
    )


def batches(step: int, count: int = 1) -> list[MicroBatch]:
    """The micro-batches of a step, all different."""
    return [batch(documents(seed=step * count + micro_step)) for micro_step in range(count)]


def train(
    made: Engine, steps: int, *, start: int = 0, lr: float = 1e-2, same: bool = False, micro_batches: int = 1
) -> list[float]:
    """The losses of this number of steps, on data that depends on the step's number, or is always the same."""
    return [
        made.train_step(batches(0 if same else step, micro_batches), step=step, lr=lr).read()[0]
        for step in range(start, start + steps)
    ]


def gradients(made: Engine, found: Sequence[MicroBatch], *, step: int = 0) -> dict[str, Tensor]:
    """The gradient of every trained tensor by HF name, of the mean loss over the micro-batches; experts one by one."""
    for group in made.parameters.groups:
        group.grad.zero_()
    made.accumulate(found, step=step)
    by_name = made.parameters.gradients_by_name().items()
    return {name: part.clone() for spec_name, gradient in by_name for name, part in split(spec_name, gradient)}


def snapshot(made: Engine) -> dict[str, Tensor]:
    """Copies of all tensors of a checkpoint."""
    return {f"{file} {name}": t.clone() for file, tensors in made.state().items() for name, t in tensors.items()}


def ensure_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise `AssertionError` naming the first tensor that is not equal."""
    ensure(found.keys() == expected.keys(), f"{what}: other tensors: {sorted(found.keys() ^ expected.keys())[:5]}")
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


def worst(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of the tensors, and its name; the names must agree."""
    ensure(values.keys() == expected.keys(), f"other tensors: {sorted(values.keys() ^ expected.keys())}")
    return max((relative_error(values[name], expected[name]), name) for name in expected)


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as rank 0 writes them; nothing on the others."""
    if not engine.mesh.leads:
        engine.serve()
        return {}
    found = snapshot(engine)
    if engine.mesh.world > 1:
        engine.dismiss()
    return found
