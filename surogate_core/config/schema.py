"""The keys of a run: one frozen dataclass, a docstring a field (docs/config.md is made from it).

The keys of the core are here; a plugin marks an option of its own with `Flat` to give it a flat key. Nodes of config
groups (`recipe`, `optimizer`, …) are `Selection`s: the name picks a plugin's bundle and the other keys are that
bundle's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen

from surogate_core.config.choices import default_groups

Fraction = Annotated[float, Interval(ge=0, le=1)]
INSTANTIATE_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
"""Hydra's keys for calling Python objects; a config of ours never has them."""

Steps = Annotated[int, Interval(ge=0, le=10**9)]
"""A count of optimizer steps or of something similar."""
Name = Annotated[str, MinLen(1)]
"""A name or a path; empty text, as from an unset shell variable, is not allowed."""
Layers = Annotated[int, Interval(ge=0, le=100_000)]
Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
MAX_TOKENS = 2**22
"""Tokens of the longest row: four times the longest context of a supported family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A bundle picked by name, with its validated options."""

    name: str
    """Name of the bundle."""
    options: Any = None
    """Instance of the bundle's options dataclass."""


def _default(group: str) -> Selection:
    return Selection(name=default_groups()[group])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelection:
    """Which model: a directory or hub id to read, or a family's preset shape."""

    name: str = "auto"
    """Name of the model family; auto reads `model_type` from the model's config.json."""
    path: Name | None = None
    """Local directory or Hugging Face id with config.json, weights and tokenizer."""
    revision: Name | None = None
    """Branch, tag or commit of a Hugging Face id, also `model=OWNER/NAME@REVISION`; null is the default branch."""
    preset: Name | None = None
    """A shape that the family knows, used when `path` is null; implies `from_scratch`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json to override, e.g. `model.config.num_hidden_layers=2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPolicy:
    """Which plugins may be imported."""

    policy: Literal["open", "allowlist", "locked"] = "open"
    """`open` loads every installed plugin, `allowlist` only those in `allow`, `locked` only what equals `lock`."""
    allow: list[str] = field(default_factory=list)
    """Entry-point names that may be loaded under `allowlist`."""
    block: list[str] = field(default_factory=list)
    """Entry-point names that are never loaded."""
    lock: Name = "surogate.lock"
    """The file that `surogate plugins lock` wrote, read under `locked`."""
    allow_editable: bool = False
    """Whether a locked plugin may be an editable install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that shapes a run: a field is a key, except `flat`."""

    # ------------------------------------------------------------------ what is trained
    task: Name = "sft"
    """What is trained on: `sft` is supervised fine-tuning, `pt` pre-training of all weights; plugins may offer more."""
    objective: Name = "cross_entropy"
    """Name of the objective that gives the loss."""
    model: ModelSelection = field(default_factory=ModelSelection)
    """The model; `model=DIR_OR_HUB_ID` and `model=FAMILY_OPTION` are short forms."""
    tokenizer: Name | None = None
    """Directory or hub id of the tokenizer; null takes the model's own."""
    from_scratch: bool = False
    """Start from random weights, drawn from `train_seed`."""
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights; auto is bfloat16 on a GPU and float32 on a CPU."""
    sequence_len: Annotated[int, Interval(ge=8, le=MAX_TOKENS)] = 1024
    """Tokens in a packed row; a longer sample is treated by `truncation_strategy`."""
    rope_scaling: Literal["linear", "dynamic", "yarn"] | dict[str, Any] | None = None
    """RoPE scaling in place of the model's: a kind that stretches it to `max_model_len`, or all parameters."""
    max_model_len: Annotated[int, Interval(ge=1, le=MAX_TOKENS)] | None = None
    """Positions of the trained model, written as `max_position_embeddings`; null keeps the model's."""

    # ------------------------------------------------------------------------ the run
    run_name: Name | None = None
    """Name shown and logged; null generates one."""
    output_dir: Name = "output"
    """Where the run writes: config, metrics, checkpoints, export."""
    checkpoint_dir: Name | None = None
    """Where checkpoints are written; null is `output_dir`."""
    num_epochs: Annotated[float, Interval(gt=0, le=10**6)] = 3.0
    """Passes over the training rows."""
    max_steps: Annotated[int, Interval(ge=-1, le=10**9)] = -1
    """Optimizer steps; -1 lets `num_epochs` decide."""
    resume_from_checkpoint: bool | Name = True
    """true resumes from the latest good checkpoint if there is one; a path names it; false starts anew."""
    save_steps: Steps = 50
    """Optimizer steps between checkpoints; 0 saves at the end only."""
    save_total_limit: Annotated[int, Interval(ge=1, le=10**9)] = 5
    """Checkpoints kept; the newest good one is never deleted."""
    eval_steps: Steps = 100
    """Optimizer steps between evaluations; 0 evaluates at the start and the end only."""

    # ----------------------------------------------------------------- batch and engine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto is the first GPU if there is one."""
    compiler: Literal["auto", "fx", "inductor"] = "auto"
    """How traced blocks run; auto is inductor on CUDA and fx on a CPU."""
    per_device_train_batch_size: Annotated[int, Interval(ge=1, le=2**16)] = 2
    """Rows of `sequence_len` in a micro-batch."""
    gradient_accumulation_steps: Annotated[int, Interval(ge=1, le=2**16)] = 4
    """Micro-batches in an optimizer step."""
    sample_packing: bool = True
    """Fill rows with several documents; false puts one document in a row."""
    use_cuda_graphs: bool = True
    """On CUDA, capture the micro-step and the optimizer step as graphs."""
    deterministic: bool = True
    """Equal runs give equal bits; false also allows kernels whose sums depend on timing, faster on some GPUs."""
    lmhead_chunks: Annotated[int, Interval(ge=1, le=2**16)] = 1
    """Pieces of the micro-batch's tokens whose logits exist at one time."""
    recompute: bool = True
    """Keep only each block's input and compute the block again in the backward pass."""
    recompute_att: bool = False
    """Without `recompute`: compute attention outputs again instead of keeping them."""
    recompute_ffn: bool = False
    """Without `recompute`: compute the feed-forward projections again."""
    recompute_qkv: bool = False
    """Without `recompute`: compute the q, k and v projections again."""
    recompute_swiglu: bool = False
    """Without `recompute`: compute SwiGLU outputs again."""
    recompute_rmsnorm: bool = False
    """Without `recompute`: compute RMSNorm outputs again."""
    recompute_budget: Fraction = 1.0
    """Without `recompute`: the share of each block's residuals that is kept; the cheapest to compute again are not."""

    # ------------------------------------------------------------------------ optimizer
    optimizer: Selection = field(default_factory=lambda: _default("optimizer"))
    """The optimizer and its own options."""
    learning_rate: Annotated[float, Interval(ge=0, le=1000)] = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """Shape of the decay after the warm-up; wsd holds the peak until the cool-down."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all steps; not together with `warmup_steps`."""
    warmup_steps: Steps = 0
    """Warm-up in optimizer steps."""
    cooldown_steps: Steps = 0
    """Last steps over which the rate falls linearly to its final value."""
    final_lr_fraction: Fraction = 0.0
    """Final learning rate as a share of the peak."""
    weight_decay: Annotated[float, Interval(ge=0, le=1000)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    max_grad_norm: Annotated[float, Interval(ge=0, le=1e30)] = 1.0
    """Global norm that gradients are clipped to; 0 does not clip."""

    # ----------------------------------------------------------------------------- LoRA
    lora: bool = True
    """Train low-rank adapters and leave the base weights as they are."""
    lora_rank: Annotated[int, Interval(ge=1, le=8192)] = 16
    """Rank r of the adapters."""
    lora_alpha: Annotated[float, Interval(gt=0, le=10**6)] = 32.0
    """The adapter's output is scaled by alpha / r."""
    lora_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.05
    """Probability that an input of an adapter is dropped while training."""
    lora_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype that adapter weights are computed from; their masters are `master_dtype`."""
    lora_target_modules: list[Name] = field(default_factory=lambda: ["all"])
    """Projections that get an adapter, by their names in the model (`q_proj`); `all` is every one."""
    adapter_path: Name | None = None
    """An adapter to begin with: a directory of PEFT, or the output directory of a LoRA run."""
    adapter_init_mode: Literal["merge", "trainable"] = "merge"
    """merge folds `adapter_path` into the base and trains a fresh adapter on top; trainable trains it on."""
    merge_adapter: bool = False
    """At the end, also export the whole model with the adapter folded in, to `output_dir/model`."""

    # ---------------------------------------------------------------------------- QLoRA
    qlora_bnb: bool = False
    """Keep the frozen projections in NF4, with the codes of bitsandbytes."""
    qlora_fp8: bool = False
    """Keep the frozen projections in FP8 (E4M3) with a scale for each square block."""
    qlora_fp4: bool = False
    """Keep the frozen projections in NVFP4."""
    qlora_format: Name | None = None
    """Keep the frozen projections in a weight format of a plugin, by its name."""
    qlora_bnb_block_size: Literal[64, 128, 256, 512] = 64
    """Values that share an absmax in NF4."""
    qlora_bnb_double_quant: bool = True
    """Keep the absmax of NF4 in 8 bits, in groups of 256."""
    qlora_block_size: Literal[32, 64, 128, 256] = 128
    """Side of a block that shares a scale in FP8."""
    qlora_four_over_six: bool = True
    """Scale a block of NVFP4 to 4 instead of 6 where that makes the squared error smaller."""

    # ------------------------------------------------------------------------ precision
    recipe: Selection = field(default_factory=lambda: _default("recipe"))
    """The precision recipe and its own options."""
    model_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of weights and activations, in place of `torch_dtype`; null is what that says."""
    matmul_dtype: Literal["fp32", "bf16", "e4m3"] | None = None
    """Dtype that recipe bf16 rounds both operands of a projection to; null is the model's."""
    gradient_dtype: Literal["fp32", "bf16", "e5m2"] | None = None
    """Dtype of recipe bf16's backward products, e4m3 beside e5m2; null is `matmul_dtype`, bf16 where that is e4m3."""
    master_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the trained weights that the optimizer updates; bf16 is rounded stochastically, null is fp32."""
    fp8_amax_history: Annotated[int, Interval(ge=1, le=2**16)] = 1024
    """Optimizer steps whose largest absolute values decide a scale of recipe fp8-hybrid."""
    fp4_backend: Literal["cutlass", "cudnn"] = "cutlass"
    """Library of recipe nvfp4's native products: cutlass is torch's choice, cuBLASLt; cudnn is refused."""
    no_fp4_stochastic_rounding: bool = False
    """Round the gradients of recipe nvfp4 to the nearest value instead of stochastically."""
    skip_quant_first_layers: Layers = 0
    """Layers from the first whose projections a recipe leaves in the model's dtype."""
    skip_quant_last_layers: Layers = 0
    """Layers up to the last whose projections a recipe leaves in the model's dtype."""

    # ------------------------------------------------------------------------- placement
    offload: Selection = field(default_factory=lambda: _default("offload"))
    """Where the tensors live that the keys below move; an offloader alone moves every kind that it can."""
    offload_dir: Name | None = None
    """Directory of an offloader's files; null is `output_dir`. They are scratch, and gone when the run is."""
    offload_residual: bool = False
    """Move what the blocks keep for the backward off the device; it comes back block by block."""
    offload_optimizer: bool = False
    """Keep the optimizer's state off the device."""
    offload_master: bool = False
    """Keep the masters of the trained weights off the device."""
    offload_grads: bool = False
    """Keep the accumulated gradients off the device."""
    offload_quants: bool = False
    """Keep quantised frozen weights off the device, from where they come block by block; needs `persistent_quants`."""
    persistent_quants: bool = False
    """Hold frozen weights as the recipe or a qlora key quantised them at load. Both always do; refused for others."""
    cpu_training: bool = False
    """Keep weights, masters, gradients and optimizer off the device; the CPU carries out the optimizer step."""
    launcher: Selection = field(default_factory=lambda: _default("launcher"))
    """How the run's processes start."""

    # ----------------------------------------------------------------------------- data
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Training data: each entry has `path`, `type`, and the fields of its type."""
    validation_datasets: list[dict[str, Any]] = field(default_factory=list)
    """Held-out data, same form; empty takes `validation_split_ratio` of the training documents."""
    validation_split_ratio: Annotated[float, Interval(ge=0, lt=1)] = 0.1
    """Share of the training documents held out when there are no `validation_datasets`."""
    truncation_strategy: Literal["delete", "left", "right", "split"] = "delete"
    """A sample longer than `sequence_len`: drop it, cut its left or right end, or split it."""
    max_length: Annotated[int, Interval(ge=8, le=MAX_TOKENS)] | None = None
    """Tokens of the longest sample, where that is shorter than `sequence_len`; null is `sequence_len`."""
    use_chat_template: bool = True
    """Render rows by the tokenizer's chat template; false makes plain text of instructions."""
    template: Name = "auto"
    """The chat template: auto is the tokenizer's own; else a shipped one's name, or the path of a .jinja file."""
    system: str | None = None
    """System prompt of conversations and instructions that have none."""
    loss_scale: Literal["default", "last_round", "all"] = "default"
    """Trained are every assistant turn, those after the last user turn, or every token of a conversation."""
    max_bad_rows: Annotated[int, Interval(ge=0, le=10**9)] = 100
    """Malformed rows that are skipped and reported; one more stops the run."""
    dataloader_num_workers: Literal["auto"] | Annotated[int, Interval(ge=0, le=1024)] = "auto"
    """Processes that tokenise; auto is one a core for large data sets, 0 is the run's own process."""
    data_cache_dir: Name | None = None
    """Where tokenised shards are kept; null is the user's cache directory."""
    train_seed: Seed = 1234
    """Seed of weights, adapters, dropout and the order of rows."""
    eval_seed: Seed = 1234
    """Seed of the held-out split."""

    # ------------------------------------------------------------------------ automation
    epoch_adjustment: bool = False
    """Replace `num_epochs` by what makes up 20 tokens for each parameter of the model."""

    # -------------------------------------------------------------------------- watching
    monitor: list[Selection] = field(default_factory=list)
    """The monitors that receive the run's events."""
    report_to: list[Name] | None = None
    """Names of further monitors, such as [wandb]; the same as adding them to `monitor`."""
    log_gpu_util: Steps = 100
    """Steps between two readings of the GPU's utilization, memory, power, temperature and clock; 0 reads none."""
    log_file: Name | None = None
    """The run's log as JSON lines; null is `output_dir/surogate.log`."""

    # --------------------------------------------------------------------------- plugins
    plugins: PluginPolicy = field(default_factory=PluginPolicy)
    """Which plugins may be imported."""

    flat: Mapping[str, Any] = field(default_factory=dict, metadata={"key": False})
    """Flat keys of plugins that are set, apart from those that are in the options of a `Selection`."""


KEYS = tuple(f.name for f in fields(RunConfig) if f.metadata.get("key", True))
"""The keys of the core, in their order."""
