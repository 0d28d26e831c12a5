"""transformers with PEFT, and Unsloth, on Qwen3-MoE's shapes, for gpu_moe.py.

Shape suffixes: N tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import tempfile
from typing import Any

import peers
import shapes
import torch
from torch import Tensor
from torch.nn.functional import linear

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""transformers' tensors of all experts of a layer, which PEFT adapts as `target_parameters`."""


def _prefer(model: Any) -> None:
    """Give each router of transformers' model the preferences of `shapes.SkewedBlock`."""

    def forward(gate: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight) + gate.preference
        probabilities_NE = torch.softmax(logits_NE, dim=-1, dtype=torch.float)
        weights_NK, experts_NK = probabilities_NE.topk(gate.top_k, dim=-1)
        if gate.norm_topk_prob:
            weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        return logits_NE, weights_NK.to(logits_NE.dtype), experts_NK

    for number, layer in enumerate(model.model.layers):
        gate = getattr(layer.mlp, "gate", None)
        if gate is None:  # a dense layer
            continue
        found = shapes.preference(f"model.layers.{number}.", gate.num_experts)
        gate.register_buffer("preference", found.to(gate.weight), persistent=False)
        gate.forward = forward.__get__(gate)


def random_model(work: peers.Work) -> Any:
    """transformers' Qwen3-MoE in bf16 with grouped products, made and drawn on the device by its own initialiser."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    keys = {k: v for k, v in work.config.items() if k not in ("architectures", "model_type", "rope_theta")}
    keys |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": work.config["rope_theta"]},
        "use_cache": False,
        "attn_implementation": work.attention,
        "experts_implementation": "grouped_mm",
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(work.device):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys))
    finally:
        torch.set_default_dtype(before)
    _prefer(model)
    return model


def transformers_side(work: peers.Work, *, experts: bool) -> peers.Side:
    """transformers and PEFT: adapters on attention alone, or on the experts too."""
    from peft import LoraConfig, get_peft_model

    model = random_model(work)
    if work.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = LoraConfig(
        r=work.rank,
        lora_alpha=round(work.scale * work.rank),
        lora_dropout=0.0,
        target_modules=ATTENTION,
        target_parameters=EXPERTS if experts else None,
        bias="none",
    )
    return peers.side_of(get_peft_model(model, config, autocast_adapter_dtype=False), work)


def unsloth_side(work: peers.Work, *, experts: bool) -> peers.Side:
    """Unsloth, which loads from a directory alone. Its routers have no preferences unless it keeps transformers'."""
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as place:
        model = random_model(work)
        model.save_pretrained(place)
        del model
        peers.stub_tokenizer(place)
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            place, max_seq_length=work.batches[0].max_seqlen, dtype=torch.bfloat16, load_in_4bit=False
        )
    checkpointing = "unsloth" if work.recompute else False
    model = FastLanguageModel.get_peft_model(
        model,
        r=work.rank,
        lora_alpha=round(work.scale * work.rank),
        lora_dropout=0,
        target_modules=[*ATTENTION, *(["gate_proj", "up_proj", "down_proj", "gate_up_proj"] if experts else [])],
        bias="none",
        use_gradient_checkpointing=checkpointing,
    )
    return peers.side_of(
        FastLanguageModel.for_training(model, use_gradient_checkpointing=work.recompute) or model, work
    )
