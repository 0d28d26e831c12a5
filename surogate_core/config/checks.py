"""Contradictions between keys: a table of named rules, all reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.config import offload
from surogate_core.errors import Problem

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One contradiction."""

    name: str
    key: str
    """The key that the message is about."""
    wrong: Callable[[Values], bool]
    """Whether the values contradict each other; absent keys have their defaults."""
    message: str
    """A key in braces stands for its value."""
    fix: str

    def problem(self, values: Values) -> Problem:
        """What is wrong with these values."""
        return Problem(key=self.key, message=self.message.format_map(values), fix=self.fix)


def _recompute_part(part: str) -> Rule:
    return Rule(
        name=f"recompute_{part}_without_effect",
        key=f"recompute_{part}",
        wrong=lambda v: v["recompute"] is True and v[f"recompute_{part}"],
        message="has no effect while `recompute` is true, which computes the whole block again.",
        fix="recompute: false",
    )


RECOMPUTE_BUDGET = Rule(
    name="recompute_budget_without_effect",
    key="recompute_budget",
    wrong=lambda v: v["recompute"] is True and v["recompute_budget"] != 1,
    message="has no effect while `recompute` is true, which computes the whole block again.",
    fix="recompute: false",
)


def _in_host_memory_already(key: str) -> Rule:
    return Rule(
        name=f"{key}_with_cpu_training",
        key=key,
        wrong=lambda v: v[key] and v["cpu_training"],
        message="has no effect beside `cpu_training`, which keeps these tensors off the device.",
        fix=f"{key}: false",
    )


TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
"""Value of `torch_dtype` → value of `model_dtype`."""


def model_dtype(v: Values) -> str:
    """fp32 or bf16. torch is asked for a GPU only where that decides."""
    named = v["model_dtype"] or TORCH_DTYPES.get(v["torch_dtype"])
    if named is not None:
        return str(named)
    device = v["device"]
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return "bf16" if device == "cuda" else "fp32"


MAX_MICRO_BATCH = 2**24
"""Tokens of the largest micro-batch."""
MAX_STEP = 2**26
"""Tokens of the largest optimizer step, because the data of a whole step are in memory at once."""


def _micro_batch(v: Values) -> int:
    """Tokens of a micro-batch."""
    return int(v["per_device_train_batch_size"] * v["sequence_len"])


EXACT_RANKS = (1, 2, 4, 8)
"""Numbers of GPUs among which a run with exact sums has equal bits."""


def row_groups(gpus: int, context_parallel_size: int) -> int:
    """Groups of GPUs that take different rows; at least 1."""
    return max(gpus // context_parallel_size, 1)


def several(v: Values) -> bool:
    """Whether the run has several ranks. With 0, that is known when the run starts, and checked again."""
    return bool(v["gpus"] > 1)


def _divides_gpus(name: str, key: str, do: str) -> Rule:
    """`do`: what the groups do into which a number of GPUs divides all of them."""
    return Rule(
        name=name,
        key=key,
        wrong=lambda v: v["gpus"] % v[key] > 0,
        message=f"is {{{key}}} and does not divide gpus={{gpus}} into groups that {do}.",
        fix=f"gpus: a multiple of it, or another {key}",
    )


def _not_with(group: str, key: str, wrong: Callable[[Values], bool], why: str, fix: str) -> Rule:
    """`group`: the key of the number of GPUs that share rows, or experts."""
    return Rule(
        name=f"{key}_with_{group}",
        key=key,
        wrong=lambda v: bool(v[group] > 1) and wrong(v),
        message=f"is set, and with `{group}` {why}.",
        fix=f"{fix}, or {group}: 1",
    )


def _only_states(group: str) -> tuple[Rule, ...]:
    """What GPUs that exchange values inside of layers cannot share out."""
    return tuple(
        _not_with(group, key, wrong, "only masters and optimizer state are shared out otherwise", fix)
        for key, wrong, fix in (
            ("zero_level", lambda v: v["zero_level"] > 1, "zero_level: 1"),
            ("shard_gradients", lambda v: v["shard_gradients"], "shard_gradients: false"),
            ("shard_weights", lambda v: v["shard_weights"], "shard_weights: false"),
            ("cpu_training", lambda v: v["cpu_training"], "cpu_training: false"),
        )
    )


SHARED_ROWS: tuple[Rule, ...] = (
    _divides_gpus("groups_of_gpus", "context_parallel_size", "share rows"),
    Rule(
        name="parts_of_rows",
        key="context_parallel_size",
        wrong=lambda v: v["sequence_len"] % v["context_parallel_size"] > 0,
        message=(
            "is {context_parallel_size} and does not divide sequence_len={sequence_len}, so that the GPUs would "
            "have unequal parts of a row."
        ),
        fix="sequence_len: a multiple of it",
    ),
    *_only_states("context_parallel_size"),
    _not_with(
        "context_parallel_size",
        "exact_reduction",
        lambda v: v["exact_reduction"] is True,
        "a sum over the tokens of a row has another order than on one GPU",
        "exact_reduction: auto",
    ),
)
"""What GPUs that share rows cannot do."""

SHARED_EXPERTS: tuple[Rule, ...] = (
    _divides_gpus("groups_of_experts", "ep_size", "share out experts"),
    *_only_states("ep_size"),
    _not_with(
        "ep_size",
        "exact_reduction",
        lambda v: v["exact_reduction"] is True,
        "a sum over the tokens of an expert has another order than on one GPU",
        "exact_reduction: auto",
    ),
    _not_with(
        "ep_size",
        "context_parallel_size",
        lambda v: v["context_parallel_size"] > 1,
        "GPUs that share a row cannot train a model with experts",
        "context_parallel_size: 1",
    ),
    _not_with(
        "ep_size",
        "sample_prompts",
        lambda v: bool(v["sample_prompts"]),
        "no GPU has all experts, as samples need",
        "sample_prompts: []",
    ),
)
"""What GPUs that share out experts cannot do."""

SEVERAL: tuple[Rule, ...] = (
    *SHARED_ROWS,
    *SHARED_EXPERTS,
    *(
        Rule(
            name=f"{key}_without_level",
            key=key,
            wrong=lambda v, key=key: (  # type: ignore[misc]
                several(v) and v[key] and v["zero_level"] == 0 and not (v["lora"] or v["cpu_training"])
            ),
            message="is set while `zero_level` is 0, which shares out nothing.",
            fix=f"zero_level: {level}, or {key}: false",
        )
        for key, level in (("shard_gradients", 2), ("shard_weights", 1))
    ),
    Rule(
        name="groups_that_share_out",
        key="dp_shard_size",
        wrong=lambda v: several(v) and v["dp_shard_size"] > 0 and v["gpus"] % v["dp_shard_size"] > 0,
        message="is {dp_shard_size} and does not divide gpus={gpus} into groups that share out the model.",
        fix="gpus: a multiple of it, or another dp_shard_size",
    ),
    Rule(
        name="groups_of_one",
        key="dp_shard_size",
        wrong=lambda v: several(v) and v["dp_shard_size"] == 1,
        message="is 1, with which no GPU shares out anything.",
        fix="zero_level: 0 with shard_weights: false, or dp_shard_size: 0 or at least 2",
    ),
    Rule(
        name="groups_without_level",
        key="dp_shard_size",
        wrong=lambda v: (
            several(v) and v["dp_shard_size"] > 1 and v["zero_level"] == 0 and not (v["lora"] or v["cpu_training"])
        ),
        message="is set while `zero_level` is 0, which shares out nothing.",
        fix="zero_level: 1, or dp_shard_size: 0",
    ),
    Rule(
        name="shared_experts_offloaded",
        key=offload.EXPERTS,
        wrong=lambda v: v[offload.EXPERTS] and several(v) and (v["shard_weights"] or v["zero_level"] == 3),
        message="moves the experts alone, and each GPU keeps its part of a layer's frozen weights as one.",
        fix="offload_quants: true with persistent_quants: true, or shard_weights: false",
    ),
    Rule(
        name="exact_sums_of_other_numbers",
        key="exact_reduction",
        wrong=lambda v: v["exact_reduction"] is True and v["gpus"] not in (0, *EXACT_RANKS),
        message="is true, and exact sums exist for 1, 2, 4 and 8 GPUs.",
        fix="gpus: 1, 2, 4 or 8; or exact_reduction: auto",
    ),
    Rule(
        name="exact_sums_off_the_device",
        key="exact_reduction",
        wrong=lambda v: v["exact_reduction"] is True and (v["offload_grads"] or v["cpu_training"]),
        message="is true, and exact sums need the gradients on the device.",
        fix="offload_grads: false and cpu_training: false, or exact_reduction: auto",
    ),
)
"""Contradictions that may depend on the number of ranks."""

RULES: tuple[Rule, ...] = (
    *SEVERAL,
    Rule(
        name="micro_batch_past_any_memory",
        key="per_device_train_batch_size",
        wrong=lambda v: _micro_batch(v) > MAX_MICRO_BATCH,
        message=f"times `sequence_len` is more than {MAX_MICRO_BATCH:,} tokens in a micro-batch.",
        fix="a smaller `per_device_train_batch_size` or `sequence_len`",
    ),
    Rule(
        name="step_past_any_memory",
        key="gradient_accumulation_steps",
        wrong=lambda v: (
            _micro_batch(v) <= MAX_MICRO_BATCH
            and _micro_batch(v) * v["gradient_accumulation_steps"] * row_groups(v["gpus"], v["context_parallel_size"])
            > MAX_STEP
        ),
        message=f"times the tokens of a micro-batch and `gpus` is more than {MAX_STEP:,} tokens in an optimizer step.",
        fix="smaller `gradient_accumulation_steps`",
    ),
    Rule(
        name="two_warmups",
        key="warmup_ratio",
        wrong=lambda v: v["warmup_ratio"] > 0 and v["warmup_steps"] > 0,
        message="and `warmup_steps` are both set.",
        fix="keep one and set the other to 0",
    ),
    *(_recompute_part(part) for part in ("att", "ffn", "qkv", "swiglu", "rmsnorm")),
    RECOMPUTE_BUDGET,
    Rule(
        name="row_past_the_positions",
        key="sequence_len",
        wrong=lambda v: v["max_model_len"] is not None and v["sequence_len"] > v["max_model_len"],
        message="is longer than `max_model_len`.",
        fix="a row of at most `max_model_len` tokens",
    ),
    Rule(
        name="sample_past_the_row",
        key="max_length",
        wrong=lambda v: v["max_length"] is not None and v["max_length"] > v["sequence_len"],
        message="is longer than `sequence_len`, the tokens of a row.",
        fix="max_length: null, or a larger `sequence_len`",
    ),
    Rule(
        name="template_without_use",
        key="template",
        wrong=lambda v: v["template"] != "auto" and not v["use_chat_template"],
        message="is set while `use_chat_template` is false.",
        fix="use_chat_template: true, or template: auto",
    ),
    Rule(
        name="no_steps",
        key="max_steps",
        wrong=lambda v: v["max_steps"] == 0,
        message="is 0: nothing would be trained.",
        fix="a number of steps, or -1 to let `num_epochs` decide",
    ),
    Rule(
        name="no_target_modules",
        key="lora_target_modules",
        wrong=lambda v: v["lora"] and not v["lora_target_modules"],
        message="is empty, so nothing would be trained.",
        fix="lora_target_modules: [all], or lora: false",
    ),
    Rule(
        name="adapter_without_lora",
        key="adapter_path",
        wrong=lambda v: v["adapter_path"] is not None and not v["lora"],
        message="is set while `lora` is false.",
        fix="lora: true; or `surogate merge` it first and train the merged model",
    ),
    Rule(
        name="adapter_on_random_weights",
        key="adapter_path",
        wrong=lambda v: v["adapter_path"] is not None and v["from_scratch"],
        message="is set together with `from_scratch`: an adapter belongs to trained weights.",
        fix="from_scratch: false, or adapter_path: null",
    ),
    Rule(
        name="trainable_without_adapter",
        key="adapter_init_mode",
        wrong=lambda v: v["adapter_path"] is None and v["adapter_init_mode"] == "trainable",
        message="is trainable while there is no `adapter_path`.",
        fix="set adapter_path to the adapter that is to be trained on",
    ),
    Rule(
        name="init_of_trained_adapter",
        key="lora_init",
        wrong=lambda v: v["lora_init"] != "default" and v["adapter_init_mode"] == "trainable",
        message="gives new adapters their values, and `adapter_init_mode: trainable` continues to train one.",
        fix="lora_init: default, or adapter_init_mode: merge",
    ),
    Rule(
        name="merge_without_lora",
        key="merge_adapter",
        wrong=lambda v: v["merge_adapter"] and not v["lora"],
        message="is set while `lora` is false: all weights are trained and exported anyway.",
        fix="merge_adapter: false, or lora: true",
    ),
    Rule(
        name="qlora_without_lora",
        key="lora",
        wrong=lambda v: v["weight_format"] is not None and not v["lora"],
        message="is false together with a qlora key: weights that are trained are not kept quantised.",
        fix="lora: true, or no qlora key",
    ),
    Rule(
        name="two_model_dtypes",
        key="model_dtype",
        wrong=lambda v: (
            v["model_dtype"] is not None and TORCH_DTYPES.get(v["torch_dtype"], v["model_dtype"]) != v["model_dtype"]
        ),
        message="and `torch_dtype` name two dtypes for the same tensors.",
        fix="torch_dtype: auto, or model_dtype: null",
    ),
    *(
        _in_host_memory_already(key)
        for key in (*(f"offload_{what}" for what in ("optimizer", "master", "grads", "quants")), offload.EXPERTS)
    ),
    Rule(
        name="experts_offloaded_twice",
        key=offload.EXPERTS,
        wrong=lambda v: v[offload.EXPERTS] and v["offload_quants"],
        message="has no effect beside `offload_quants`, which keeps all frozen weights off the device.",
        fix=f"{offload.EXPERTS}: false, or offload_quants: false",
    ),
    Rule(
        name="trained_experts_offloaded",
        key=offload.EXPERTS,
        wrong=lambda v: v[offload.EXPERTS] and not v["lora"],
        message="moves frozen experts, and there are none without `lora`.",
        fix=f"lora: true, or {offload.EXPERTS}: false",
    ),
    Rule(
        name="offloaded_quants_made_anew",
        key="offload_quants",
        wrong=lambda v: v["offload_quants"] and not v["persistent_quants"],
        message="moves quantised weights that are kept, and without `persistent_quants` none are.",
        fix="persistent_quants: true, or offload_quants: false",
    ),
    Rule(
        name="quants_of_trained_weights",
        key="persistent_quants",
        wrong=lambda v: v["persistent_quants"] and not v["lora"],
        message="applies to frozen weights, and there are none without `lora`: trained ones are quantised on each use.",
        fix="persistent_quants: false, or lora: true",
    ),
    Rule(
        name="epochs_without_effect",
        key="epoch_adjustment",
        wrong=lambda v: v["epoch_adjustment"] and v["max_steps"] > 0,
        message="has no effect while `max_steps` decides how long the run is.",
        fix="max_steps: -1, or epoch_adjustment: false",
    ),
)
