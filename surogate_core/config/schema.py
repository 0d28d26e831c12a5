"""The keys of a run: one frozen dataclass with a docstring per field (docs/config.md is generated from it).

The keys of the core are here; a plugin marks an option of its own with `Flat` to give it a flat key. Nodes of config
groups (`recipe`, `optimizer`, …) are `Selection`s: the name picks a plugin's bundle and the other keys are that
bundle's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen

from surogate_core.config.choices import default_groups
from surogate_core.files.runs import RUNS

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
    """The model: a directory or hub id to read, or a preset shape of a family."""

    name: str = "auto"
    """Name of the model family; auto reads `model_type` from the model's config.json."""
    path: Name | None = None
    """Local directory or Hugging Face id with config.json, weights and tokenizer."""
    revision: Name | None = None
    """Branch, tag or commit of a Hugging Face id, also `model=OWNER/NAME@REVISION`; null is the default branch."""
    preset: Name | None = None
    """Name of a shape of the family, used if `path` is null; implies `from_scratch`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json to override, e.g. `model.config.num_hidden_layers=2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPolicy:
    """Which plugins may be imported."""

    policy: Literal["open", "allowlist", "locked"] = "open"
    """`open` loads every installed plugin, `allowlist` only those in `allow`, `locked` only those that equal `lock`."""
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
    """The whole configuration of a run: each field is a key, except `flat` and `weight_format`."""

    # ------------------------------------------------------------------ what is trained
    task: Name = "sft"
    """The training task: `sft` is supervised fine-tuning, `pt` pre-training of all weights; plugins may offer more."""
    objective: Name = "cross_entropy"
    """Name of the objective, which defines the loss."""
    model: ModelSelection = field(default_factory=ModelSelection)
    """The model, also in the short forms `model=DIR_OR_HUB_ID` and `model=FAMILY_OPTION`."""
    tokenizer: Name | None = None
    """Directory or hub id of the tokenizer; null takes the model's own."""
    from_scratch: bool = False
    """Start from random weights, drawn from `train_seed`."""
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights; auto is bfloat16 on a GPU and float32 on a CPU."""
    sequence_len: Annotated[int, Interval(ge=8, le=MAX_TOKENS)] = 1024
    """Tokens in a packed row; `truncation_strategy` decides about longer samples."""
    rope_scaling: Literal["linear", "dynamic", "yarn"] | dict[str, Any] | None = None
    """RoPE scaling that replaces the model's: a kind that stretches it to `max_model_len`, or all parameters."""
    max_model_len: Annotated[int, Interval(ge=1, le=MAX_TOKENS)] | None = None
    """Positions of the trained model, exported as `max_position_embeddings`; null keeps the model's."""

    # ------------------------------------------------------------------------ the run
    run_name: Name | None = None
    """Name of the run; null generates one."""
    output_dir: Name | None = None
    """Directory for everything that the run writes; null makes one, `runs/NAME-DATE-TIME`, or resumes in its own."""
    checkpoint_dir: Name | None = None
    """Directory for checkpoints; null is `output_dir`."""
    num_epochs: Annotated[float, Interval(gt=0, le=10**6)] = 3.0
    """Passes over the training rows."""
    max_steps: Annotated[int, Interval(ge=-1, le=10**9)] = -1
    """Number of optimizer steps; -1 computes it from `num_epochs`."""
    resume_from_checkpoint: bool | Name = True
    """true resumes from the latest good checkpoint if there is one, a path from that one; false starts from step 0."""
    save_steps: Steps = 50
    """Optimizer steps between checkpoints; 0 saves only at the end."""
    save_total_limit: Annotated[int, Interval(ge=1, le=10**9)] = 5
    """Number of checkpoints to keep; the newest good one is never deleted."""
    load_best: bool = False
    """Export the weights with the lowest eval loss instead of the last; each new best is saved and kept, the weights
    before the first step among them.
    """
    eval_steps: Literal["auto"] | Steps = "auto"
    """Optimizer steps between evaluations; auto is a tenth of the run, 0 evaluates only at the start and the end."""

    # ----------------------------------------------------------------- batch and engine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto is the first GPU if there is one."""
    compiler: Literal["auto", "fx", "inductor"] = "auto"
    """Compiler of the traced blocks; auto is inductor on CUDA and fx on a CPU."""
    per_device_train_batch_size: Annotated[int, Interval(ge=1, le=2**16)] = 2
    """Rows of `sequence_len` in a micro-batch."""
    gradient_accumulation_steps: Annotated[int, Interval(ge=1, le=2**16)] = 4
    """Micro-batches in an optimizer step."""
    sample_packing: bool = True
    """Pack several documents into a row; false puts one document in each row."""
    use_cuda_graphs: bool = True
    """On CUDA, capture micro-step and optimizer step as graphs; not long ones with `ep_size` and LoRA."""
    deterministic: bool = True
    """Equal runs give equal bits; false also allows kernels whose sums depend on timing, faster on some GPUs."""
    lmhead_chunks: Literal["auto"] | Annotated[int, Interval(ge=1, le=2**16)] = "auto"
    """Chunks of the micro-batch's tokens; only one chunk's logits exist at a time. auto: the fewest that fit."""
    recompute: Literal["auto"] | bool = "auto"
    """Keep only each block's input and compute the block again in the backward pass. auto: the least that fits."""
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
    """Without `recompute`: share of each block's residual bytes to keep; the cheapest to recompute are dropped."""

    # ------------------------------------------------------------------------ optimizer
    optimizer: Selection = field(default_factory=lambda: _default("optimizer"))
    """The optimizer and its own options."""
    learning_rate: Annotated[float, Interval(ge=0, le=1000)] = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Name = "linear"
    """Schedule of the learning rate between warm-up and cool-down: linear, cosine, wsd, constant, or one of a plugin.
    wsd is constant until a cool-down, which has a tenth of all steps if `cooldown_steps` is 0.
    """
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all steps; not together with `warmup_steps`."""
    warmup_steps: Steps = 0
    """Warm-up in optimizer steps."""
    cooldown_steps: Steps = 0
    """Number of last steps in which the rate falls linearly to its final value."""
    final_lr_fraction: Fraction = 0.0
    """Final learning rate as a share of the peak."""
    weight_decay: Annotated[float, Interval(ge=0, le=1000)] = 0.1
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    max_grad_norm: Annotated[float, Interval(ge=0, le=1e30)] = 1.0
    """Global gradient norm to clip to; 0 does not clip."""

    # ----------------------------------------------------------------------------- LoRA
    lora: bool = True
    """Train low-rank adapters and freeze the base weights."""
    lora_rank: Annotated[int, Interval(ge=1, le=8192)] = 16
    """Rank r of the adapters."""
    lora_alpha: Annotated[float, Interval(gt=0, le=10**6)] = 32.0
    """The adapter's output is scaled by alpha / r."""
    lora_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.05
    """Dropout probability of the inputs of the adapters."""
    lora_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the model computes with the adapter weights; their masters have `master_dtype`."""
    lora_init: Literal["default", "loftq"] = "default"
    """Initial values of new adapters: default has A uniform and B zero, as PEFT; loftq approximates the rounding errors
    of the frozen weights, so that the first step's model is closer to the unquantised one.
    """
    lora_target_modules: list[Name] = field(default_factory=lambda: ["all"])
    """Projections that get an adapter, by their names in the model (`q_proj`) or by group: `attention`, `mlp` (outside
    of attention and experts), `experts`; `all` is every projection.
    """
    lora_expert_rank: Annotated[int, Interval(ge=1, le=8192)] | None = None
    """Rank of the adapters of experts, with the same alpha / r as the others; null is `lora_rank`."""
    train_router: bool = False
    """Train the routers of a model with experts too, as whole matrices beside the adapters."""
    router_aux_loss_coef: Annotated[float, Interval(ge=0, le=10**6)] | None = None
    """Coefficient of the load-balancing loss of the routers; 0 leaves it out. null takes the model's own if its
    config.json has `output_router_logits: true`, and otherwise leaves it out, as transformers does.
    """
    router_aux_loss_form: Literal["step", "micro_batch", "layer"] = "step"
    """What the load-balancing loss is computed over: all layers and the tokens of the whole step, which takes one more
    forward pass if the step has several micro-batches; all layers and each micro-batch, as transformers' Trainer does;
    or each layer and micro-batch, summed over the layers.
    """
    router_z_loss_coef: Annotated[float, Interval(ge=0, le=10**6)] | None = None
    """Coefficient of the routers' z loss, the mean of (log-sum-exp of the logits)², over the same tokens and layers; 0
    and null as for `router_aux_loss_coef`.
    """
    adapter_path: Name | None = None
    """Adapter to start from: a PEFT directory, or the output directory of a LoRA run."""
    adapter_init_mode: Literal["merge", "trainable"] = "merge"
    """merge folds `adapter_path` into the base and trains a new adapter on top; trainable continues to train it."""
    merge_adapter: bool = False
    """At the end, also export the whole model with the adapter folded in, to `output_dir/model`."""

    # ---------------------------------------------------------------------------- QLoRA
    qlora_format: Name | None = None
    """Keep the frozen projections in a weight format of a plugin, by its name."""
    qlora_offload_experts: bool = False
    """Keep frozen experts, in the form in which they are stored, off the device, and fetch them layer by layer."""
    qlora_selective_expert_dequant: bool = False
    """Accepted for configurations of other versions: training unpacks all experts of a layer, whether true or false."""

    # ------------------------------------------------------------------------ precision
    recipe: Selection = field(default_factory=lambda: _default("recipe"))
    """The precision recipe and its own options."""
    model_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of weights and activations; overrides `torch_dtype`, null uses it."""
    master_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the masters, the weights that the optimizer updates; bf16 is rounded stochastically, null is fp32."""
    skip_quant_first_layers: Layers = 0
    """Number of first layers whose projections a recipe leaves in the model's dtype."""
    skip_quant_last_layers: Layers = 0
    """Number of last layers whose projections a recipe leaves in the model's dtype."""

    # ------------------------------------------------------------------------- placement
    offload: Selection = field(default_factory=lambda: _default("offload"))
    """The offloader, which places the tensors that the keys below move; alone it moves every kind that it can."""
    offload_dir: Name | None = None
    """Directory of an offloader's scratch files, deleted at the end of the run; null is `output_dir`."""
    offload_residual: bool = False
    """Move the blocks' residuals off the device; the backward fetches them block by block."""
    offload_optimizer: bool = False
    """Keep the optimizer's state off the device."""
    offload_master: bool = False
    """Keep the masters of the trained weights off the device."""
    offload_grads: bool = False
    """Keep the accumulated gradients off the device."""
    offload_quants: bool = False
    """Keep quantised frozen weights off the device and fetch them block by block; needs `persistent_quants`."""
    persistent_quants: bool = False
    """Keep frozen weights quantised. Always so with a quantising recipe or a qlora key; otherwise an error."""
    cpu_training: bool = False
    """Keep weights, masters, gradients and optimizer state off the device; the CPU runs the optimizer step.
    Several GPUs share all of it out, as with `zero_level=3`.
    """
    launcher: Selection = field(default_factory=lambda: _default("launcher"))
    """The launcher, which starts the processes of the run."""

    # --------------------------------------------------------------------- several GPUs
    gpus: Annotated[int, Interval(ge=0, le=1024)] = 1
    """GPUs of this machine to train on, one process each; 0 is all. With `device=cpu`, the number of processes."""
    zero_level: Literal[0, 1, 2, 3] = 1
    """What several GPUs share out: 1 masters and optimizer state, 2 also gradients, 3 also weights; 0 nothing."""
    shard_gradients: bool = False
    """Share out the gradient sums, as `zero_level=2` does."""
    shard_weights: bool = False
    """Share out the weights of layers, as `zero_level=3` does. At level 1 every GPU keeps whole gradient sums, which
    are reduced once a step; level 2 becomes 3. With `lora` the frozen base, in the form in which it is kept.
    """
    dp_shard_size: Annotated[int, Interval(ge=0, le=1024)] = 0
    """Number of neighbouring GPUs, such as the GPUs of a machine, over which `zero_level` and `shard_weights`
    distribute tensors. Each such group is a replica of the others. It divides `gpus`; 0 is all GPUs.
    """
    exact_reduction: Literal["auto"] | bool = "auto"
    """Add gradients in an order that makes 1, 2, 4 and 8 equal GPUs give equal bits. auto: with `lora`."""
    context_parallel_size: Annotated[int, Interval(ge=1, le=1024)] = 1
    """GPUs that share each row: every one has an equal part of its positions, and they exchange heads around attention.
    It divides `gpus` and `sequence_len`; `gradient_accumulation_steps` then counts micro-batches of such a group.
    """
    ep_size: Annotated[int, Interval(ge=1, le=1024)] = 1
    """GPUs that share out the experts of each layer: every one keeps an equal part of them, with their adapters and the
    optimizer's state, and computes it for the tokens of all. It divides `gpus` and the number of experts.
    """
    ep_exchange: Literal["sums", "rows"] = "sums"
    """What GPUs that share out experts send each other for a token: it once, and back one sum of what its experts there
    give; or, with rows, it for each of its experts, and back what each gives. Sums are smaller, and rows have the bits
    of one GPU's forward.
    """
    ep_load_balance_threshold: Annotated[float, Interval(ge=1, le=1024)] | None = None
    """Even out the rows of GPUs that share out experts in each layer where the busiest has more than this many times
    the mean: others get the weights of its largest experts and compute a part of their rows. Weights are sent in every
    layer, whatever the loads, so low values such as 1.05 cost no more. null sends none: weights need memory, and sums
    have another order.
    """
    ep_plan_refresh_interval: Annotated[int, Interval(ge=1)] = 1
    """Largest age, in micro-steps, of the plan by which rows are evened out. Every layer makes its own in every
    micro-step, on the GPU, which satisfies any value.
    """
    hierarchical_reduction: bool = True
    """On several machines with equally many GPUs, add gradients inside each machine first and then between machines,
    and gather in the other order, so that each sum leaves a machine once. false treats all GPUs alike.
    """
    fabric: Selection = field(default_factory=lambda: _default("fabric"))
    """How several GPUs exchange data: copy_engines, nccl or, on CPUs, gloo; auto is the fastest that connects them."""

    # ----------------------------------------------------------------------------- data
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Training data: a path, a list of paths, or entries with `path`, `type` (auto if left out) and its fields."""
    validation_datasets: list[dict[str, Any]] = field(default_factory=list)
    """Held-out data, same form; empty takes `validation_split_ratio` of the training documents."""
    validation_split_ratio: Annotated[float, Interval(ge=0, lt=1)] = 0.1
    """Share of the training documents to hold out if there are no `validation_datasets`."""
    truncation_strategy: Literal["delete", "left", "right", "split"] = "delete"
    """A sample longer than `sequence_len`: drop it, cut its left or right end, or split it."""
    max_length: Annotated[int, Interval(ge=8, le=MAX_TOKENS)] | None = None
    """Tokens of the longest sample, if shorter than `sequence_len`; null is `sequence_len`."""
    use_chat_template: bool = True
    """Render rows with the tokenizer's chat template; false formats instructions as plain text."""
    template: Name = "auto"
    """The chat template: auto is the tokenizer's own; otherwise a built-in name or the path of a .jinja file."""
    system: str | None = None
    """System prompt of conversations and instructions that have none."""
    loss_scale: Literal["default", "last_round", "all"] = "default"
    """Tokens to train on: every assistant turn, the turns after the last user message, or the whole conversation."""
    max_bad_rows: Annotated[int, Interval(ge=0, le=10**9)] = 100
    """Number of malformed rows to skip and report; one more stops the run."""
    dataloader_num_workers: Literal["auto"] | Annotated[int, Interval(ge=0, le=1024)] = "auto"
    """Processes that tokenise; auto is one per core for large data sets, 0 is the run's own process."""
    data_cache_dir: Name | None = None
    """Directory of tokenised shards; null is the user's cache directory."""
    train_seed: Seed = 1234
    """Seed of weights, adapters, dropout and the order of rows."""
    eval_seed: Seed = 1234
    """Seed of the held-out split."""

    # --------------------------------------------------------------------------- samples
    sample_prompts: list[Any] = field(default_factory=list)
    """Prompts that the model continues during training: texts, mappings with `prompt` or `messages`, and paths of
    .jsonl files with such rows. If the data is rendered with a chat template, a text is a user's message.
    """
    sample_max_new_tokens: Annotated[int, Interval(ge=1, le=MAX_TOKENS)] = 64
    """Largest number of tokens of a sample."""
    sample_temperature: Annotated[float, Interval(ge=0, le=100)] = 0.0
    """Temperature of samples; 0 takes the most probable token."""
    sample_steps: Literal["auto"] | Steps = "auto"
    """Optimizer steps between samples; auto is with each evaluation, 0 only at the start and the end."""

    # -------------------------------------------------------------------------- rollouts
    rollout: Selection = field(default_factory=lambda: _default("rollout"))
    """The rollout engine, which makes the completions that reinforcement learning trains on: native reads the weights
    where training has them, of a quantised base an unpacked copy if memory is left; dedicated copies them to a GPU of
    its own. `sample_prompts` are always continued by native.
    """
    environment: Selection | None = None
    """The environment of reinforcement learning and its own options: where prompts come from and what answers are
    worth; null is none.
    """

    # ------------------------------------------------------------------------ automation
    epoch_adjustment: bool = False
    """Replace `num_epochs` by the number that gives 20 tokens per parameter of the model."""

    # -------------------------------------------------------------------------- watching
    monitor: list[Selection] = field(default_factory=list)
    """The monitors that receive the run's events."""
    report_to: list[Name] | None = None
    """Names of additional monitors, such as [wandb]; the same as adding them to `monitor`."""
    log_gpu_util: Steps = 100
    """Steps between two readings of the GPU's utilization, memory, power, temperature and clock, and between two
    exchanges of the figures of all ranks; 0 turns both off.
    """
    log_expert_loads: Steps | None = None
    """For a model with experts: steps between two records of the tokens that each expert of each layer received. The
    report draws them. 1 records every step, 0 none; null makes at most 200 records in a run. Each checkpoint of
    `save_steps` has one more.
    """
    log_file: Name | None = None
    """The run's log as JSON lines; null is `output_dir/surogate.log`."""

    # --------------------------------------------------------------------------- plugins
    plugins: PluginPolicy = field(default_factory=PluginPolicy)
    """Which plugins may be imported."""

    flat: Mapping[str, Any] = field(default_factory=dict, metadata={"key": False})
    """Flat keys of plugins that are set, apart from those that are in the options of a `Selection`; and all those of
    the weight format that is chosen."""
    weight_format: str | None = field(default=None, metadata={"key": False})
    """The weight format that `qlora_format` or its own flat key chooses."""

    def with_keys(self, **keys: Any) -> RunConfig:
        """A copy with other values, which are not checked again."""
        return replace(self, **keys)

    @property
    def place(self) -> str:
        """`output_dir`, or the directory in which a run without one gets its own."""
        return self.output_dir or str(RUNS)


KEYS = tuple(f.name for f in fields(RunConfig) if f.metadata.get("key", True))
"""The keys of the core, in their order."""
