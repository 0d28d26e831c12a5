"""The peers that benchmarks/gpu_peers.py runs: each one's model and its optimizer step.

Every peer gets what is fast in it and what a user could write down: weights, adapters, gradients and
optimizer state in bf16, torch's fused AdamW, clipping to norm 1, scaled-dot-product attention, no
key-value cache, tensors on the GPU before the clock starts, and no reading of the loss between steps.
Ours keeps fp32 masters, gradients and moments, so a peer moves fewer bytes in full fine-tuning.

Shape suffixes: B rows, T tokens of a row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, MicroBatch

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Loss = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of every side."""

    preset: str
    config: Mapping[str, Any]
    """A `config.json` as a mapping."""
    full: bool
    recompute: bool
    rank: int
    scale: float
    """alpha / rank."""
    rows: int
    attention: str
    """`attn_implementation` of the peers."""
    device: torch.device
    batches: Sequence[MicroBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A side made ready."""

    step: Callable[[], Loss]
    """One optimizer step; the answer reads its loss, and waits for the device only then."""
    facts: Mapping[str, Any]


def build_peer(peer: str, work: Work) -> Side:
    """The peer's model, optimizer and step."""
    torch.manual_seed(0)
    if peer == "unsloth":
        model = unsloth_model(work)
    elif peer == "bitsandbytes":
        model = bitsandbytes_model(work)
    else:
        model = transformers_model(work, liger=peer == "liger")
    return side_of(model, work, mixed=peer == "bitsandbytes")


def side_of(model: Any, work: Work, *, mixed: bool = False) -> Side:
    """A model of transformers with its step: fused AdamW, gradients clipped at 1. `mixed`: in autocast to bf16."""
    model.train()
    # What prepare_model_for_kbit_training keeps in fp32 is multiplied in bf16, as transformers' Trainer does.
    autocast = torch.autocast(work.device.type, torch.bfloat16, enabled=mixed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1, fused=True)
    label_tokens = sum(b.label_tokens for b in work.batches)
    inputs = [(arguments(batch, work), batch.label_tokens / label_tokens) for batch in work.batches]

    def step() -> Loss:
        total = torch.zeros((), device=work.device)
        for given, share in inputs:
            with autocast:
                loss = model(**given, use_cache=False).loss * share
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item

    sizes = [sum(p.numel() for p in found) for found in (model.parameters(), trained)]
    facts = {
        "parameters": sizes[0],
        "trained": sizes[1],
        "trained_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
        "attention": getattr(model.config, "_attn_implementation", None),
        "frozen_gib": sum(_kept_bytes(p) for p in model.parameters() if not p.requires_grad) / 2**30,
        "projections_gib": sum(_kept_bytes(p) for p in model.parameters() if hasattr(p, "quant_state")) / 2**30,
    }
    return Side(step=step, facts=facts)


def _kept_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter, in NF4 with its absmax."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.nbytes
    return int(parameter.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes + state.offset.nbytes)


def arguments(batch: MicroBatch, work: Work) -> dict[str, Tensor]:
    """The micro-batch as transformers takes it: labels stand under their own token, not the one before.

    Documents within a row are kept apart by positions that restart, from which transformers makes a mask.
    """
    labels_BT = batch.labels.view(work.rows, -1)
    shifted_BT = torch.full_like(labels_BT, IGNORE_LABEL)
    shifted_BT[:, 1:] = labels_BT[:, :-1]
    given = {"input_ids": batch.input_ids.view(work.rows, -1), "labels": shifted_BT}
    positions_BT = batch.positions.view(work.rows, -1).long()
    if (positions_BT[:, 1:] == 0).any():
        given["position_ids"] = positions_BT
    return {name: value.to(work.device) for name, value in given.items()}


def random_model(work: Work) -> Any:
    """transformers' model of the configuration in bf16, made and drawn on the device by its own initialiser."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {k: v for k, v in work.config.items() if k != "architectures"}
    config = AutoConfig.for_model(**{**keys, "use_cache": False, "attn_implementation": work.attention})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(work.device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(before)


def transformers_model(work: Work, *, liger: bool) -> Any:
    """transformers, with PEFT's adapters unless all weights are trained, and with Liger's kernels if asked."""
    if liger:
        from liger_kernel.transformers import monkey_patch

        family = work.config["model_type"]
        # Its default: rotation, norms, SwiGLU, and the head fused with the loss.
        apply = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")
        apply(fused_linear_cross_entropy=True, cross_entropy=False)
    model = random_model(work)
    if work.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if work.full:
        return model
    from peft import get_peft_model

    # Adapters in bf16, as the weights: in fp32, PEFT's default, every projection's input would be cast.
    return get_peft_model(model, _lora(work), autocast_adapter_dtype=False)


def _lora(work: Work) -> Any:
    from peft import LoraConfig

    alpha = round(work.scale * work.rank)
    return LoraConfig(r=work.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=TARGETS, bias="none")


def bitsandbytes_model(work: Work) -> Any:
    """transformers with the blocks' projections in bitsandbytes' NF4, double-quantised, and PEFT's adapters.

    As `prepare_model_for_kbit_training` leaves it: embedding, norms and LM head in fp32, like the adapters.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import get_peft_model, prepare_model_for_kbit_training

    model = random_model(work)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in TARGETS:
                if not hasattr(part, name):
                    continue
                wide = getattr(part, name)
                narrow = Linear4bit(
                    wide.in_features,
                    wide.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=True,
                    quant_type="nf4",
                    device="meta",
                )
                packed = Params4bit(wide.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
                narrow.weight = packed.to(work.device)
                setattr(part, name, narrow)
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=work.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    return get_peft_model(model, _lora(work))


def unsloth_model(work: Work) -> Any:
    """Unsloth, which loads from a directory alone: random weights and a stub of a tokenizer are written to one."""
    # It patches transformers, so it is imported first.
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as place:
        model = random_model(work)
        model.save_pretrained(place)
        del model
        stub_tokenizer(place)
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            place,
            max_seq_length=work.batches[0].max_seqlen,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=work.full,
            use_gradient_checkpointing="unsloth" if work.recompute else False,
        )
    if not work.full:
        model = FastLanguageModel.get_peft_model(
            model,
            r=work.rank,
            lora_alpha=round(work.scale * work.rank),
            lora_dropout=0,
            target_modules=TARGETS,
            bias="none",
            use_gradient_checkpointing="unsloth" if work.recompute else False,
        )
    return FastLanguageModel.for_training(model, use_gradient_checkpointing=work.recompute) or model


def stub_tokenizer(place: str) -> None:
    """Write a tokenizer of three words, which a loader asks for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    stub = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=stub, **names).save_pretrained(place)
