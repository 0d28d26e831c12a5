"""Against transformers and PEFT on a tiny random Qwen3: twenty steps and what they export, and packed documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from surogate_model_qwen3.model import build
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from surogate_core.plugin import IGNORE_LABEL, CardFacts, MicroBatch, export_adapter
from surogate_core.service.engine import Engine
from surogate_core.service.files import export_full
from surogate_testing import tiny

TOLERANCE = 1e-5
"""Relative, in fp32; what is measured is near 1e-6."""
LENGTHS = (13, 9, 7)
RANK, ALPHA, LR = 4, 8, 2e-3
PREFIX = "base_model.model."

Record = Callable[[str, object], None]
"""Measured errors go into the report (``--junitxml``)."""


def reference(*, tied: bool = False, bias: bool = False) -> Qwen3ForCausalLM:
    """A random model whose every tensor matters: norms are not one, biases are not zero."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=bias,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        max_position_embeddings=128,
        attn_implementation="eager",
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.ndim == 2 else 0.3))
    return model


def documents(step: int) -> list[list[int]]:
    return tiny.documents(LENGTHS, seed=100 + step)


def batch(step: int = 0) -> MicroBatch:
    return tiny.batch(documents(step))


def per_token_losses(model: Any, documents: list[list[int]]) -> list[Tensor]:
    """Each document alone, without padding."""
    losses = []
    for document in documents:
        ids = torch.tensor([document])
        logits = model(input_ids=ids).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none"))
    return losses


def mean_loss(model: Any, documents: list[list[int]]) -> Tensor:
    return torch.cat(per_token_losses(model, documents)).mean()


def state_of(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if not (model.config.tie_word_embeddings and "lm_head" in k)}


def engine_of(model: Qwen3ForCausalLM, **settings: Any) -> Engine:
    source = tiny.tensor_source(state_of(model))
    return tiny.engine(model.config.to_dict(), build=build, optimizer=tiny.ADAMW, source=source, **settings)


def peft_model(model: Qwen3ForCausalLM) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(tiny.TARGETS), task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): t.clone() for name, t in get_peft_model_state_dict(model).items()}


def lora_pair(*, bias: bool = False) -> tuple[Any, Engine, dict[str, Tensor]]:
    """A PEFT model and an engine with the same base and adapters, and the base's tensors."""
    base = reference(tied=True, bias=bias)
    state = {name: t.clone() for name, t in state_of(base).items()}
    config = base.config.to_dict()
    model = peft_model(base)
    engine = tiny.engine(
        config,
        build=build,
        optimizer=tiny.ADAMW,
        source=tiny.tensor_source({**state, **adapters_of(model)}),
        lora=tiny.lora(RANK, scale=ALPHA / RANK),
        recompute=True,
    )
    return model, engine, state


def train_reference(model: Any, groups: list[dict[str, Any]], steps: int) -> Iterator[float]:
    """AdamW, clipped at 1, two micro-batches a step averaged over the label tokens of both."""
    trained = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    for step in range(steps):
        loss = mean_loss(model, documents(2 * step) + documents(2 * step + 1)[:2])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_engine(engine: Engine, steps: int) -> Iterator[float]:
    for step in range(steps):
        batches = [batch(2 * step), tiny.batch(documents(2 * step + 1)[:2])]
        yield engine.train_step(batches, step=step, lr=LR).read()[0]


def compare_losses(found: list[float], expected: list[float], record_testsuite_property: Record) -> None:
    error = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    record_testsuite_property(f"{len(found)} losses from {expected[0]:.4f}", f"{error:.2e}")
    assert error <= TOLERANCE
    assert abs(expected[0] - expected[-1]) > 1e-3 * expected[0], "the weights must have moved"


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("bias", [False, True])
def test_twenty_lora_steps_and_the_exported_adapter(
    tmp_path: Path, bias: bool, record_testsuite_property: Record
) -> None:
    model, engine, state = lora_pair(bias=bias)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = list(train_reference(model, [{"params": trained, "weight_decay": 0.1}], 20))
    compare_losses(list(train_engine(engine, 20)), expected, record_testsuite_property)
    assert tiny.worst(dict(engine.parameters.adapter_tensors()), adapters_of(model))[0] < 1e-3

    directory = export_adapter(
        tmp_path / "adapter",
        engine.parameters.adapter_tensors(),
        rank=RANK,
        alpha=ALPHA,
        dropout=0.0,
        base_model=None,
        card=CardFacts(title="tiny"),
    )
    base = reference(tied=True, bias=bias)
    assert all(torch.equal(t, state[name]) for name, t in state_of(base).items())
    loaded = PeftModel.from_pretrained(base, str(directory)).eval()
    first = documents(99)[0]
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([first])).logits[0]
    assert tiny.relative_error(engine.logits(tiny.batch([first]))[: len(first)], logits) <= TOLERANCE
    with torch.no_grad(), loaded.disable_adapter():
        plain = loaded(input_ids=torch.tensor([first])).logits[0]
    assert tiny.relative_error(plain, logits) > 100 * TOLERANCE, "the adapter must matter"


@pytest.mark.slow
def test_twenty_full_steps_and_the_exported_model(tmp_path: Path, record_testsuite_property: Record) -> None:
    model = reference(tied=False, bias=True)
    engine = engine_of(model)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    expected = list(train_reference(model, groups, 20))
    compare_losses(list(train_engine(engine, 20)), expected, record_testsuite_property)

    config = {"architectures": ["Qwen3ForCausalLM"], **model.config.to_dict()}
    directory = export_full(
        tmp_path / "model",
        engine.parameters.base_tensors(),
        config=config,
        tokenizer=None,
        card=CardFacts(title="tiny"),
        max_shard_bytes=20_000,
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([documents(0)[0]])).logits[0]
    assert tiny.relative_error(engine.logits(batch())[: LENGTHS[0]], logits) <= TOLERANCE


def test_packed_documents_equal_the_same_ones_alone(record_testsuite_property: Record) -> None:
    model = reference()
    engine = engine_of(model)
    packed = engine.logits(batch())
    labels = batch().labels
    losses = torch.nn.functional.cross_entropy(packed, labels, ignore_index=IGNORE_LABEL, reduction="none")
    start, errors = 0, []
    theirs = per_token_losses(model, documents(0))
    for number, document in enumerate(documents(0)):
        alone = tiny.batch([document])
        logits = engine.logits(alone)
        expected = torch.nn.functional.cross_entropy(logits, alone.labels, ignore_index=IGNORE_LABEL, reduction="none")[
            : len(document) - 1
        ]
        found = losses[start : start + len(document) - 1]
        for other in (expected, theirs[number]):
            errors.append(((found - other).abs() / other.abs().clamp(min=1e-3)).max().item())
        start += len(document)
    record_testsuite_property("packed against alone, a token's loss", f"{max(errors):.2e}")
    assert max(errors) <= 1e-5
    # What the test would see if the borders were lost, and if the positions ran on.
    joined = tiny.batch(documents(0))
    joined.cu_seqlens[1:] = len(joined.labels)
    assert tiny.relative_error(engine.logits(joined), packed) > 1e-2
    running = tiny.batch(documents(0))
    running.cu_seqlens[1:] = len(running.labels)
    running.positions.copy_(torch.arange(len(running.positions)))
    assert tiny.relative_error(engine.logits(running), engine.logits(joined)) > 1e-2


def test_packed_gradients_equal_the_sum_of_the_documents_alone() -> None:
    engine = engine_of(reference())
    packed = tiny.gradients(engine, [batch()])
    alone = tiny.gradients(engine, [tiny.batch([d]) for d in documents(0)])
    assert tiny.worst(alone, packed)[0] <= TOLERANCE
