"""A tiny Qwen3 in an engine, and micro-batches for it: what tests of several directories share.

On the path of pytest (`pythonpath` in pyproject.toml): ``from tiny_engine import make_engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from surogate_model_qwen3.model import build
from surogate_optimizer_adamw.adamw import AdamW
from surogate_recipe_bf16 import linear
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import (
    Kernel,
    KernelPack,
    Objective,
    Offloader,
    OptimizerSettings,
    OptimizerSpec,
    Recipe,
    TensorKind,
    WeightFormat,
)
from surogate_core.dsl.declare import LoRA, Model, TensorSpec
from surogate_core.dsl.slots import Adapter
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine, EngineSettings
from surogate_core.engine.parameters import RandomSource, Source
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.ops import cross_entropy
from surogate_core.kernels.registry import KernelTable

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Tensors this small are done before a second thread wakes up; on busy cores it is waited for.
torch.set_num_threads(1)

REFERENCES_ONLY = KernelPack(name="none", kernels=tuple[Kernel, ...])
BF16 = Recipe(name="bf16", linear=linear, plain=True)
ADAMW = OptimizerSpec(name="adamw", build=AdamW.build)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` mapping of a two-layer Qwen3 with grouped queries."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "use_sliding_window": False,
        "hidden_act": "silu",
        **changes,
    }


def lora(rank: int = 4, *, scale: float = 2.0, dropout: float = 0.0, targets: Sequence[str] = ("all",)) -> LoRA:
    """Adapters with fp32 weights."""
    return LoRA(
        adapter=Adapter(rank=rank, scale=scale, dropout=dropout, dtype=torch.float32), targets=frozenset(targets)
    )


def noisy_source(seed: int = 0, std: float = 0.2, device: str = "cpu") -> Source:
    """Random values in every tensor: norms near one, biases and LoRA B not zero, so that each gradient matters.

    Drawn on the CPU, so every device gets the same ones.
    """
    draw = RandomSource(seed=seed, std=std, device=torch.device("cpu"))

    def source(spec: TensorSpec) -> Tensor:
        value = draw(spec)
        if spec.init in ("ones", "zeros"):
            value = value + 0.5 * draw(replace(spec, init="normal"))
        return value.to(device)

    return source


def tensor_source(tensors: Mapping[str, Tensor]) -> Source:
    """The given tensors by HF name."""
    return lambda spec: tensors[spec.hf_name].detach()


def make_engine(
    config: Mapping[str, Any] | None = None,
    *,
    tokens: int = 32,
    borders: int = 8,
    max_seqlen: int | None = None,
    lora: LoRA | None = None,
    source: Source | None = None,
    recompute: Recompute | None = None,
    packs: Sequence[KernelPack] = (TORCH_PACK,),
    offloader: Offloader = NO_OFFLOAD,
    optimizer: OptimizerSpec = ADAMW,
    optimizer_settings: OptimizerSettings | None = None,
    device: str = "cpu",
    recipe: Recipe = BF16,
    recipe_options: Any = None,
    build: Callable[[Mapping[str, Any]], Model] = build,
    weight_format: WeightFormat | None = None,
    skips: Callable[[str], bool] = lambda name: False,
    **settings: Any,
) -> Engine:
    """An engine of `tiny_config()` in fp32 with FX graphs; `settings` are fields of `EngineSettings`."""
    place = torch.device(device)
    defaults: dict[str, Any] = {
        "dtype": torch.float32,
        "adapter_dtype": torch.float32,
        "compiler": "fx",
        "cuda_graphs": False,
        "head_chunks": 1,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "seed": 0,
    }
    return Engine(
        build(config or tiny_config()),
        settings=EngineSettings(
            device=place,
            tokens=tokens,
            borders=borders,
            max_seqlen=max_seqlen or tokens,
            recompute=recompute or Recompute(block=False),
            **{**defaults, **settings},
        ),
        recipe=recipe,
        recipe_options=recipe_options,
        objective=Objective(name="cross_entropy", token_loss=cross_entropy),
        optimizer=optimizer,
        optimizer_settings=optimizer_settings or OptimizerSettings(),
        optimizer_options=optimizer.options(),
        offloader=offloader,
        offloader_options=None,
        kernels=KernelTable.build(place, list(packs)),
        lora=lora,
        source=source or noisy_source(device=device),
        weight_format=weight_format,
        skips=skips,
    )


def make_batch(
    documents: Sequence[Sequence[int]],
    *,
    tokens: int = 32,
    borders: int = 8,
    labelled: Sequence[Sequence[bool]] | None = None,
    padding_id: int = 0,
) -> MicroBatch:
    """The documents end to end, then padding as a document of its own.

    `labelled[d][t]`: whether token t of document d is to be predicted; by default all but the first are.
    """
    used = sum(map(len, documents))
    assert used <= tokens
    parts = [list(d) for d in documents]
    if used < tokens:
        parts.append([padding_id] * (tokens - used))
    labels: list[int] = []
    for number, document in enumerate(parts):
        wanted = labelled[number] if labelled and number < len(documents) else [number < len(documents)] * len(document)
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
    )


def random_documents(lengths: Sequence[int], *, vocab: int = 61, seed: int = 0) -> list[list[int]]:
    """Documents of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def gradients(engine: Engine, batches: Sequence[MicroBatch], *, step: int = 0) -> dict[str, Tensor]:
    """The gradient of every trained tensor by HF name, of the mean loss over the batches."""
    for group in engine.parameters.groups:
        group.grad.zero_()
    engine.accumulate(batches, step=step)
    return {name: g.clone() for name, g in engine.parameters.gradients_by_name().items()}


def relative_error(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖ / ‖expected‖ in float64."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    assert value.shape == expected.shape, f"{tuple(value.shape)}, not {tuple(expected.shape)}"
    return float((value - expected).norm() / expected.norm().clamp(min=1e-300))


def worst(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of the tensors, and its name; the names must agree."""
    assert values.keys() == expected.keys(), sorted(values.keys() ^ expected.keys())
    return max((relative_error(values[name], expected[name]), name) for name in expected)


@dataclass
class StrictStore:
    """A store as an offloader's would be: fetched tensors are copies, and are poisoned once released."""

    kind: TensorKind
    log: list[tuple[str, str]] = field(default_factory=list)
    held: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    out: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Keep copies."""
        self.held[key] = tuple(t.clone() for t in tensors)
        self.log.append(("put", key))

    def prefetch(self, key: str) -> None:
        """Noted; the copy is made at fetch."""
        self.log.append(("prefetch", key))

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """Copies, the same ones until they are released."""
        if key not in self.out:
            self.out[key] = tuple(t.clone() for t in self.held[key])
            self.log.append(("fetch", key))
        return self.out[key]

    def release(self, key: str) -> None:
        """Poison the copies."""
        self.log.append(("release", key))
        for tensor in self.out.pop(key, ()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        if self.kind == "residuals":
            del self.held[key]

    def nbytes(self) -> Mapping[Any, int]:
        """Bytes of the copies, and of what is held."""
        return {
            "device": sum(t.nbytes for held in self.out.values() for t in held),
            "host": sum(t.nbytes for held in self.held.values() for t in held),
            "disk": 0,
        }


def strict_offloader() -> tuple[Offloader, dict[str, StrictStore]]:
    """An offloader of `StrictStore`s, and its stores by kind."""
    stores: dict[str, StrictStore] = {}

    def store(kind: TensorKind, device: torch.device, options: Any) -> StrictStore:
        stores[kind] = StrictStore(kind)
        return stores[kind]

    kinds: frozenset[TensorKind] = frozenset({"weights", "residuals"})
    return Offloader(name="strict", kinds=kinds, place="host", store=store), stores
