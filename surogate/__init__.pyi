# Made by scripts/make_stub.py from surogate_core/config/schema.py and the plugins' options; change those.
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal, TypeAlias

from surogate_command_eval.python import evaluate as evaluate
from surogate_command_export.python import export as export
from surogate_command_generate.python import generate as generate
from surogate_command_serve.serving import serve as serve

from surogate_core.api.results import HeldOutLoss as HeldOutLoss
from surogate_core.api.results import Paths as Paths
from surogate_core.api.results import Run as Run
from surogate_core.api.results import RunReport as RunReport
from surogate_core.api.results import Sample as Sample
from surogate_core.api.results import load as load
from surogate_core.errors import ConfigError as ConfigError
from surogate_core.errors import MachineError as MachineError
from surogate_core.errors import PluginError as PluginError
from surogate_core.errors import SurogateError as SurogateError
from surogate_core.errors import UserError as UserError
from surogate_core.events import Control as Control
from surogate_core.events import Event as Event

__version__: str

_Path: TypeAlias = str | PathLike[str]
_Choice: TypeAlias = str | Mapping[str, Any]
"""The name of an option, or a mapping with `name` and the option's own keys."""
_Choices: TypeAlias = _Choice | list[str] | list[_Choice]
_Data: TypeAlias = Any
"""A path or several, entries with `path` and `type`, a list of dicts, a datasets.Dataset or a data frame."""
_Callback: TypeAlias = Callable[[Any], Any]
_Callbacks: TypeAlias = _Callback | Mapping[str, _Callback | Iterable[_Callback]] | Iterable[_Callbacks]

def sft(
    config: _Path | None = None,
    /,
    *,
    callbacks: _Callbacks = (),
    quiet: bool = False,
    objective: str = ...,
    model: _Path | Mapping[str, Any] = ...,
    tokenizer: _Path | None = ...,
    from_scratch: bool = ...,
    torch_dtype: Literal["auto", "float32", "bfloat16"] = ...,
    sequence_len: int = ...,
    rope_scaling: Literal["linear", "dynamic", "yarn"] | Mapping[str, Any] | None = ...,
    max_model_len: int | None = ...,
    run_name: str | None = ...,
    output_dir: _Path | None = ...,
    checkpoint_dir: _Path | None = ...,
    num_epochs: float = ...,
    max_steps: int = ...,
    resume_from_checkpoint: bool | str = ...,
    save_steps: int = ...,
    save_total_limit: int = ...,
    load_best: bool = ...,
    eval_steps: Literal["auto"] | int = ...,
    device: Literal["auto", "cpu", "cuda"] = ...,
    compiler: Literal["auto", "fx", "inductor"] = ...,
    per_device_train_batch_size: int = ...,
    gradient_accumulation_steps: int = ...,
    sample_packing: bool = ...,
    use_cuda_graphs: bool = ...,
    deterministic: bool = ...,
    lmhead_chunks: Literal["auto"] | int = ...,
    recompute: Literal["auto"] | bool = ...,
    recompute_att: bool = ...,
    recompute_ffn: bool = ...,
    recompute_qkv: bool = ...,
    recompute_swiglu: bool = ...,
    recompute_rmsnorm: bool = ...,
    recompute_budget: float = ...,
    optimizer: _Choice = ...,
    learning_rate: float = ...,
    lr_scheduler_type: str = ...,
    warmup_ratio: float = ...,
    warmup_steps: int = ...,
    cooldown_steps: int = ...,
    final_lr_fraction: float = ...,
    weight_decay: float = ...,
    max_grad_norm: float = ...,
    lora: bool = ...,
    lora_rank: int = ...,
    lora_alpha: float = ...,
    lora_dropout: float = ...,
    lora_dtype: Literal["fp32", "bf16"] = ...,
    lora_init: Literal["default", "loftq"] = ...,
    lora_target_modules: list[str] = ...,
    lora_expert_rank: int | None = ...,
    train_router: bool = ...,
    router_aux_loss_coef: float | None = ...,
    router_aux_loss_form: Literal["step", "micro_batch", "layer"] = ...,
    router_z_loss_coef: float | None = ...,
    adapter_path: _Path | None = ...,
    adapter_init_mode: Literal["merge", "trainable"] = ...,
    merge_adapter: bool = ...,
    qlora_format: str | None = ...,
    qlora_offload_experts: bool = ...,
    qlora_selective_expert_dequant: bool = ...,
    recipe: _Choice = ...,
    model_dtype: Literal["fp32", "bf16"] | None = ...,
    master_dtype: Literal["fp32", "bf16"] | None = ...,
    skip_quant_first_layers: int = ...,
    skip_quant_last_layers: int = ...,
    offload: _Choice = ...,
    offload_dir: _Path | None = ...,
    offload_residual: bool = ...,
    offload_optimizer: bool = ...,
    offload_master: bool = ...,
    offload_grads: bool = ...,
    offload_quants: bool = ...,
    persistent_quants: bool = ...,
    cpu_training: bool = ...,
    launcher: _Choice = ...,
    gpus: int = ...,
    zero_level: Literal[0, 1, 2, 3] = ...,
    shard_gradients: bool = ...,
    shard_weights: bool = ...,
    dp_shard_size: int = ...,
    exact_reduction: Literal["auto"] | bool = ...,
    context_parallel_size: int = ...,
    ep_size: int = ...,
    ep_exchange: Literal["sums", "rows"] = ...,
    ep_load_balance_threshold: float | None = ...,
    ep_plan_refresh_interval: int = ...,
    hierarchical_reduction: bool = ...,
    fabric: _Choice = ...,
    datasets: _Data = ...,
    validation_datasets: _Data = ...,
    validation_split_ratio: float = ...,
    truncation_strategy: Literal["delete", "left", "right", "split"] = ...,
    max_length: int | None = ...,
    use_chat_template: bool = ...,
    template: str = ...,
    system: str | None = ...,
    loss_scale: Literal["default", "last_round", "all"] = ...,
    max_bad_rows: int = ...,
    dataloader_num_workers: Literal["auto"] | int = ...,
    data_cache_dir: _Path | None = ...,
    train_seed: int = ...,
    eval_seed: int = ...,
    sample_prompts: list[Mapping[str, Any]] = ...,
    sample_max_new_tokens: int = ...,
    sample_temperature: float = ...,
    sample_steps: Literal["auto"] | int = ...,
    rollout: _Choice = ...,
    environment: _Choice | None = ...,
    epoch_adjustment: bool = ...,
    monitor: _Choices = ...,
    report_to: str | list[str] | None = ...,
    log_gpu_util: int = ...,
    log_expert_loads: int | None = ...,
    log_file: _Path | None = ...,
    plugins: Mapping[str, Any] = ...,
    dataset: _Choice = ...,
    adamw_beta1: float = ...,
    adamw_beta2: float = ...,
    adamw_epsilon: float = ...,
    normuon_momentum: float = ...,
    normuon_beta2: float = ...,
    normuon_cautious_wd: bool = ...,
    matmul_dtype: Literal["fp32", "bf16", "e4m3"] | None = ...,
    gradient_dtype: Literal["fp32", "bf16", "e5m2"] | None = ...,
    fp8_amax_history: int = ...,
    fp4_backend: Literal["cutlass", "cudnn"] = ...,
    no_fp4_stochastic_rounding: bool = ...,
    qlora_fp8: bool = ...,
    qlora_block_size: Literal[32, 64, 128, 256] = ...,
    qlora_bnb: bool = ...,
    qlora_bnb_block_size: Literal[64, 128, 256, 512] = ...,
    qlora_bnb_double_quant: bool = ...,
    qlora_fp4: bool = ...,
    qlora_four_over_six: bool = ...,
    qlora_search_scales: bool = ...,
    max_restarts: int = ...,
    auto_lr_reduction: bool = ...,
    early_stop: bool = ...,
) -> Run:
    """Fine-tune a model; returns when the run is over. The same call resumes an interrupted run.

    Args:
        config: A YAML file; keyword arguments win over it.
        callbacks: Functions that receive the run's events, or a mapping from an event's name to a function.
        quiet: Print no progress.
        objective: Name of the objective, which defines the loss.
        model: The model, also in the short forms `model=DIR_OR_HUB_ID` and `model=FAMILY_OPTION`.
        tokenizer: Directory or hub id of the tokenizer; null takes the model's own.
        from_scratch: Start from random weights, drawn from `train_seed`.
        torch_dtype: Dtype of the weights; auto is bfloat16 on a GPU and float32 on a CPU.
        sequence_len: Tokens in a packed row; `truncation_strategy` decides about longer samples.
        rope_scaling: RoPE scaling that replaces the model's: a kind that stretches it to `max_model_len`, or all
            parameters.
        max_model_len: Positions of the trained model, exported as `max_position_embeddings`; null keeps the
            model's.
        run_name: Name of the run; null generates one.
        output_dir: Directory for everything that the run writes; null makes one, `runs/NAME-DATE-TIME`, or resumes
            in its own.
        checkpoint_dir: Directory for checkpoints; null is `output_dir`.
        num_epochs: Passes over the training rows.
        max_steps: Number of optimizer steps; -1 computes it from `num_epochs`.
        resume_from_checkpoint: true resumes from the latest good checkpoint if there is one, a path from that one;
            false starts from step 0.
        save_steps: Optimizer steps between checkpoints; 0 saves only at the end.
        save_total_limit: Number of checkpoints to keep; the newest good one is never deleted.
        load_best: Export the weights with the lowest eval loss instead of the last; each new best is saved and
            kept, the weights before the first step among them.
        eval_steps: Optimizer steps between evaluations; auto is a tenth of the run, 0 evaluates only at the start
            and the end.
        device: Device to train on; auto is the first GPU if there is one.
        compiler: Compiler of the traced blocks; auto is inductor on CUDA and fx on a CPU.
        per_device_train_batch_size: Rows of `sequence_len` in a micro-batch.
        gradient_accumulation_steps: Micro-batches in an optimizer step.
        sample_packing: Pack several documents into a row; false puts one document in each row.
        use_cuda_graphs: On CUDA, capture micro-step and optimizer step as graphs; not long ones with `ep_size` and
            LoRA.
        deterministic: Equal runs give equal bits; false also allows kernels whose sums depend on timing, faster on
            some GPUs.
        lmhead_chunks: Chunks of the micro-batch's tokens; only one chunk's logits exist at a time. auto: the fewest
            that fit.
        recompute: Keep only each block's input and compute the block again in the backward pass. auto: the least
            that fits.
        recompute_att: Without `recompute`: compute attention outputs again instead of keeping them.
        recompute_ffn: Without `recompute`: compute the feed-forward projections again.
        recompute_qkv: Without `recompute`: compute the q, k and v projections again.
        recompute_swiglu: Without `recompute`: compute SwiGLU outputs again.
        recompute_rmsnorm: Without `recompute`: compute RMSNorm outputs again.
        recompute_budget: Without `recompute`: share of each block's residual bytes to keep; the cheapest to
            recompute are dropped.
        optimizer: The optimizer and its own options.
        learning_rate: Peak learning rate.
        lr_scheduler_type: Schedule of the learning rate between warm-up and cool-down: linear, cosine, wsd,
            constant, or one of a plugin. wsd is constant until a cool-down, which has a tenth of all steps if
            `cooldown_steps` is 0.
        warmup_ratio: Warm-up as a share of all steps; not together with `warmup_steps`.
        warmup_steps: Warm-up in optimizer steps.
        cooldown_steps: Number of last steps in which the rate falls linearly to its final value.
        final_lr_fraction: Final learning rate as a share of the peak.
        weight_decay: Decoupled weight decay of matrices; norms and biases do not decay.
        max_grad_norm: Global gradient norm to clip to; 0 does not clip.
        lora: Train low-rank adapters and freeze the base weights.
        lora_rank: Rank r of the adapters.
        lora_alpha: The adapter's output is scaled by alpha / r.
        lora_dropout: Dropout probability of the inputs of the adapters.
        lora_dtype: Dtype in which the model computes with the adapter weights; their masters have `master_dtype`.
        lora_init: Initial values of new adapters: default has A uniform and B zero, as PEFT; loftq approximates the
            rounding errors of the frozen weights, so that the first step's model is closer to the unquantised one.
        lora_target_modules: Projections that get an adapter, by their names in the model (`q_proj`) or by group:
            `attention`, `mlp` (outside of attention and experts), `experts`; `all` is every projection.
        lora_expert_rank: Rank of the adapters of experts, with the same alpha / r as the others; null is
            `lora_rank`.
        train_router: Train the routers of a model with experts too, as whole matrices beside the adapters.
        router_aux_loss_coef: Coefficient of the load-balancing loss of the routers; 0 leaves it out. null takes the
            model's own if its config.json has `output_router_logits: true`, and otherwise leaves it out, as
            transformers does.
        router_aux_loss_form: What the load-balancing loss is computed over: all layers and the tokens of the whole
            step, which takes one more forward pass if the step has several micro-batches; all layers and each
            micro-batch, as transformers' Trainer does; or each layer and micro-batch, summed over the layers.
        router_z_loss_coef: Coefficient of the routers' z loss, the mean of (log-sum-exp of the logits)², over the
            same tokens and layers; 0 and null as for `router_aux_loss_coef`.
        adapter_path: Adapter to start from: a PEFT directory, or the output directory of a LoRA run.
        adapter_init_mode: merge folds `adapter_path` into the base and trains a new adapter on top; trainable
            continues to train it.
        merge_adapter: At the end, also export the whole model with the adapter folded in, to `output_dir/model`.
        qlora_format: Keep the frozen projections in a weight format of a plugin, by its name.
        qlora_offload_experts: Keep frozen experts, in the form in which they are stored, off the device, and fetch
            them layer by layer.
        qlora_selective_expert_dequant: Accepted for configurations of other versions: training unpacks all experts
            of a layer, whether true or false.
        recipe: The precision recipe and its own options.
        model_dtype: Dtype of weights and activations; overrides `torch_dtype`, null uses it.
        master_dtype: Dtype of the masters, the weights that the optimizer updates; bf16 is rounded stochastically,
            null is fp32.
        skip_quant_first_layers: Number of first layers whose projections a recipe leaves in the model's dtype.
        skip_quant_last_layers: Number of last layers whose projections a recipe leaves in the model's dtype.
        offload: The offloader, which places the tensors that the keys below move; alone it moves every kind that it
            can.
        offload_dir: Directory of an offloader's scratch files, deleted at the end of the run; null is `output_dir`.
        offload_residual: Move the blocks' residuals off the device; the backward fetches them block by block.
        offload_optimizer: Keep the optimizer's state off the device.
        offload_master: Keep the masters of the trained weights off the device.
        offload_grads: Keep the accumulated gradients off the device.
        offload_quants: Keep quantised frozen weights off the device and fetch them block by block; needs
            `persistent_quants`.
        persistent_quants: Keep frozen weights quantised. Always so with a quantising recipe or a qlora key;
            otherwise an error.
        cpu_training: Keep weights, masters, gradients and optimizer state off the device; the CPU runs the
            optimizer step. Several GPUs share all of it out, as with `zero_level=3`.
        launcher: The launcher, which starts the processes of the run.
        gpus: GPUs of this machine to train on, one process each; 0 is all. With `device=cpu`, the number of
            processes.
        zero_level: What several GPUs share out: 1 masters and optimizer state, 2 also gradients, 3 also weights; 0
            nothing.
        shard_gradients: Share out the gradient sums, as `zero_level=2` does.
        shard_weights: Share out the weights of layers, as `zero_level=3` does. At level 1 every GPU keeps whole
            gradient sums, which are reduced once a step; level 2 becomes 3. With `lora` the frozen base, in the
            form in which it is kept.
        dp_shard_size: Number of neighbouring GPUs, such as the GPUs of a machine, over which `zero_level` and
            `shard_weights` distribute tensors. Each such group is a replica of the others. It divides `gpus`; 0 is
            all GPUs.
        exact_reduction: Add gradients in an order that makes 1, 2, 4 and 8 equal GPUs give equal bits. auto: with
            `lora`.
        context_parallel_size: GPUs that share each row: every one has an equal part of its positions, and they
            exchange heads around attention. It divides `gpus` and `sequence_len`; `gradient_accumulation_steps`
            then counts micro-batches of such a group.
        ep_size: GPUs that share out the experts of each layer: every one keeps an equal part of them, with their
            adapters and the optimizer's state, and computes it for the tokens of all. It divides `gpus` and the
            number of experts.
        ep_exchange: What GPUs that share out experts send each other for a token: it once, and back one sum of what
            its experts there give; or, with rows, it for each of its experts, and back what each gives. Sums are
            smaller, and rows have the bits of one GPU's forward.
        ep_load_balance_threshold: Even out the rows of GPUs that share out experts in each layer where the busiest
            has more than this many times the mean: others get the weights of its largest experts and compute a part
            of their rows. Weights are sent in every layer, whatever the loads, so low values such as 1.05 cost no
            more. null sends none: weights need memory, and sums have another order.
        ep_plan_refresh_interval: Largest age, in micro-steps, of the plan by which rows are evened out. Every layer
            makes its own in every micro-step, on the GPU, which satisfies any value.
        hierarchical_reduction: On several machines with equally many GPUs, add gradients inside each machine first
            and then between machines, and gather in the other order, so that each sum leaves a machine once. false
            treats all GPUs alike.
        fabric: How several GPUs exchange data: copy_engines, nccl or, on CPUs, gloo; auto is the fastest that
            connects them.
        datasets: Training data: a path, a list of paths, or entries with `path`, `type` (auto if left out) and its
            fields.
        validation_datasets: Held-out data, same form; empty takes `validation_split_ratio` of the training
            documents.
        validation_split_ratio: Share of the training documents to hold out if there are no `validation_datasets`.
        truncation_strategy: A sample longer than `sequence_len`: drop it, cut its left or right end, or split it.
        max_length: Tokens of the longest sample, if shorter than `sequence_len`; null is `sequence_len`.
        use_chat_template: Render rows with the tokenizer's chat template; false formats instructions as plain text.
        template: The chat template: auto is the tokenizer's own; otherwise a built-in name or the path of a .jinja
            file.
        system: System prompt of conversations and instructions that have none.
        loss_scale: Tokens to train on: every assistant turn, the turns after the last user message, or the whole
            conversation.
        max_bad_rows: Number of malformed rows to skip and report; one more stops the run.
        dataloader_num_workers: Processes that tokenise; auto is one per core for large data sets, 0 is the run's
            own process.
        data_cache_dir: Directory of tokenised shards; null is the user's cache directory.
        train_seed: Seed of weights, adapters, dropout and the order of rows.
        eval_seed: Seed of the held-out split.
        sample_prompts: Prompts that the model continues during training: texts, mappings with `prompt` or
            `messages`, and paths of .jsonl files with such rows. If the data is rendered with a chat template, a
            text is a user's message.
        sample_max_new_tokens: Largest number of tokens of a sample.
        sample_temperature: Temperature of samples; 0 takes the most probable token.
        sample_steps: Optimizer steps between samples; auto is with each evaluation, 0 only at the start and the
            end.
        rollout: The rollout engine, which makes the completions that reinforcement learning trains on: native reads
            the weights where training has them, of a quantised base an unpacked copy if memory is left; dedicated
            copies them to a GPU of its own. `sample_prompts` are always continued by native.
        environment: The environment of reinforcement learning and its own options: where prompts come from and what
            answers are worth; null is none.
        epoch_adjustment: Replace `num_epochs` by the number that gives 20 tokens per parameter of the model.
        monitor: The monitors that receive the run's events.
        report_to: Names of additional monitors, such as [wandb]; the same as adding them to `monitor`.
        log_gpu_util: Steps between two readings of the GPU's utilization, memory, power, temperature and clock, and
            between two exchanges of the figures of all ranks; 0 turns both off.
        log_expert_loads: For a model with experts: steps between two records of the tokens that each expert of each
            layer received. The report draws them. 1 records every step, 0 none; null makes at most 200 records in a
            run. Each checkpoint of `save_steps` has one more.
        log_file: The run's log as JSON lines; null is `output_dir/surogate.log`.
        plugins: Which plugins may be imported.
        dataset: A data set that a plugin brings, such as embedded.
        adamw_beta1: Decay of AdamW's first moment.
        adamw_beta2: Decay of AdamW's second moment.
        adamw_epsilon: Added to AdamW's denominator.
        normuon_momentum: Decay of NorMuon's momentum.
        normuon_beta2: Decay of NorMuon's second moment of each row.
        normuon_cautious_wd: NorMuon decays only weights that its update moves towards zero.
        matmul_dtype: Dtype to which both operands of a projection are rounded; null is the model's.
        gradient_dtype: Dtype of the gradient in the backward products; null is `matmul_dtype`, or bf16 if that is
            e4m3.
        fp8_amax_history: Number of optimizer steps whose largest absolute values determine a scale.
        fp4_backend: Library of the native products: cutlass is torch's choice, cuBLASLt; cudnn is refused.
        no_fp4_stochastic_rounding: Round gradients to the nearest value instead of stochastically.
        qlora_fp8: Short for qlora_format=fp8.
        qlora_block_size: Side of a block that shares a scale.
        qlora_bnb: Short for qlora_format=nf4.
        qlora_bnb_block_size: Values that share an absmax.
        qlora_bnb_double_quant: Keep the absmax in 8 bits, in groups of 256.
        qlora_fp4: Short for qlora_format=nvfp4.
        qlora_four_over_six: Scale a block to 4 instead of 6 where that makes the squared error smaller.
        qlora_search_scales: Choose each block's scale by its squared error among eleven E4M3 numbers, instead of
            one or two.
        max_restarts: How often the run starts again from its last checkpoint after a process died, hung or had a
            bug.
        auto_lr_reduction: Halve the learning rate when the loss or the gradient jumps; its docs/adaptive.md has the
            rules.
        early_stop: End a run that has converged, diverges or stands still; its docs/adaptive.md has the criteria.
    """

def pt(
    config: _Path | None = None,
    /,
    *,
    callbacks: _Callbacks = (),
    quiet: bool = False,
    objective: str = ...,
    model: _Path | Mapping[str, Any] = ...,
    tokenizer: _Path | None = ...,
    from_scratch: bool = ...,
    torch_dtype: Literal["auto", "float32", "bfloat16"] = ...,
    sequence_len: int = ...,
    rope_scaling: Literal["linear", "dynamic", "yarn"] | Mapping[str, Any] | None = ...,
    max_model_len: int | None = ...,
    run_name: str | None = ...,
    output_dir: _Path | None = ...,
    checkpoint_dir: _Path | None = ...,
    num_epochs: float = ...,
    max_steps: int = ...,
    resume_from_checkpoint: bool | str = ...,
    save_steps: int = ...,
    save_total_limit: int = ...,
    load_best: bool = ...,
    eval_steps: Literal["auto"] | int = ...,
    device: Literal["auto", "cpu", "cuda"] = ...,
    compiler: Literal["auto", "fx", "inductor"] = ...,
    per_device_train_batch_size: int = ...,
    gradient_accumulation_steps: int = ...,
    sample_packing: bool = ...,
    use_cuda_graphs: bool = ...,
    deterministic: bool = ...,
    lmhead_chunks: Literal["auto"] | int = ...,
    recompute: Literal["auto"] | bool = ...,
    recompute_att: bool = ...,
    recompute_ffn: bool = ...,
    recompute_qkv: bool = ...,
    recompute_swiglu: bool = ...,
    recompute_rmsnorm: bool = ...,
    recompute_budget: float = ...,
    optimizer: _Choice = ...,
    learning_rate: float = ...,
    lr_scheduler_type: str = ...,
    warmup_ratio: float = ...,
    warmup_steps: int = ...,
    cooldown_steps: int = ...,
    final_lr_fraction: float = ...,
    weight_decay: float = ...,
    max_grad_norm: float = ...,
    lora: bool = ...,
    lora_rank: int = ...,
    lora_alpha: float = ...,
    lora_dropout: float = ...,
    lora_dtype: Literal["fp32", "bf16"] = ...,
    lora_init: Literal["default", "loftq"] = ...,
    lora_target_modules: list[str] = ...,
    lora_expert_rank: int | None = ...,
    train_router: bool = ...,
    router_aux_loss_coef: float | None = ...,
    router_aux_loss_form: Literal["step", "micro_batch", "layer"] = ...,
    router_z_loss_coef: float | None = ...,
    adapter_path: _Path | None = ...,
    adapter_init_mode: Literal["merge", "trainable"] = ...,
    merge_adapter: bool = ...,
    qlora_format: str | None = ...,
    qlora_offload_experts: bool = ...,
    qlora_selective_expert_dequant: bool = ...,
    recipe: _Choice = ...,
    model_dtype: Literal["fp32", "bf16"] | None = ...,
    master_dtype: Literal["fp32", "bf16"] | None = ...,
    skip_quant_first_layers: int = ...,
    skip_quant_last_layers: int = ...,
    offload: _Choice = ...,
    offload_dir: _Path | None = ...,
    offload_residual: bool = ...,
    offload_optimizer: bool = ...,
    offload_master: bool = ...,
    offload_grads: bool = ...,
    offload_quants: bool = ...,
    persistent_quants: bool = ...,
    cpu_training: bool = ...,
    launcher: _Choice = ...,
    gpus: int = ...,
    zero_level: Literal[0, 1, 2, 3] = ...,
    shard_gradients: bool = ...,
    shard_weights: bool = ...,
    dp_shard_size: int = ...,
    exact_reduction: Literal["auto"] | bool = ...,
    context_parallel_size: int = ...,
    ep_size: int = ...,
    ep_exchange: Literal["sums", "rows"] = ...,
    ep_load_balance_threshold: float | None = ...,
    ep_plan_refresh_interval: int = ...,
    hierarchical_reduction: bool = ...,
    fabric: _Choice = ...,
    datasets: _Data = ...,
    validation_datasets: _Data = ...,
    validation_split_ratio: float = ...,
    truncation_strategy: Literal["delete", "left", "right", "split"] = ...,
    max_length: int | None = ...,
    use_chat_template: bool = ...,
    template: str = ...,
    system: str | None = ...,
    loss_scale: Literal["default", "last_round", "all"] = ...,
    max_bad_rows: int = ...,
    dataloader_num_workers: Literal["auto"] | int = ...,
    data_cache_dir: _Path | None = ...,
    train_seed: int = ...,
    eval_seed: int = ...,
    sample_prompts: list[Mapping[str, Any]] = ...,
    sample_max_new_tokens: int = ...,
    sample_temperature: float = ...,
    sample_steps: Literal["auto"] | int = ...,
    rollout: _Choice = ...,
    environment: _Choice | None = ...,
    epoch_adjustment: bool = ...,
    monitor: _Choices = ...,
    report_to: str | list[str] | None = ...,
    log_gpu_util: int = ...,
    log_expert_loads: int | None = ...,
    log_file: _Path | None = ...,
    plugins: Mapping[str, Any] = ...,
    dataset: _Choice = ...,
    adamw_beta1: float = ...,
    adamw_beta2: float = ...,
    adamw_epsilon: float = ...,
    normuon_momentum: float = ...,
    normuon_beta2: float = ...,
    normuon_cautious_wd: bool = ...,
    matmul_dtype: Literal["fp32", "bf16", "e4m3"] | None = ...,
    gradient_dtype: Literal["fp32", "bf16", "e5m2"] | None = ...,
    fp8_amax_history: int = ...,
    fp4_backend: Literal["cutlass", "cudnn"] = ...,
    no_fp4_stochastic_rounding: bool = ...,
    qlora_fp8: bool = ...,
    qlora_block_size: Literal[32, 64, 128, 256] = ...,
    qlora_bnb: bool = ...,
    qlora_bnb_block_size: Literal[64, 128, 256, 512] = ...,
    qlora_bnb_double_quant: bool = ...,
    qlora_fp4: bool = ...,
    qlora_four_over_six: bool = ...,
    qlora_search_scales: bool = ...,
    max_restarts: int = ...,
    auto_lr_reduction: bool = ...,
    early_stop: bool = ...,
) -> Run:
    """Pre-train all weights of a model on text; returns when the run is over.

    Args:
        config: A YAML file; keyword arguments win over it.
        callbacks: Functions that receive the run's events, or a mapping from an event's name to a function.
        quiet: Print no progress.
        objective: Name of the objective, which defines the loss.
        model: The model, also in the short forms `model=DIR_OR_HUB_ID` and `model=FAMILY_OPTION`.
        tokenizer: Directory or hub id of the tokenizer; null takes the model's own.
        from_scratch: Start from random weights, drawn from `train_seed`.
        torch_dtype: Dtype of the weights; auto is bfloat16 on a GPU and float32 on a CPU.
        sequence_len: Tokens in a packed row; `truncation_strategy` decides about longer samples.
        rope_scaling: RoPE scaling that replaces the model's: a kind that stretches it to `max_model_len`, or all
            parameters.
        max_model_len: Positions of the trained model, exported as `max_position_embeddings`; null keeps the
            model's.
        run_name: Name of the run; null generates one.
        output_dir: Directory for everything that the run writes; null makes one, `runs/NAME-DATE-TIME`, or resumes
            in its own.
        checkpoint_dir: Directory for checkpoints; null is `output_dir`.
        num_epochs: Passes over the training rows.
        max_steps: Number of optimizer steps; -1 computes it from `num_epochs`.
        resume_from_checkpoint: true resumes from the latest good checkpoint if there is one, a path from that one;
            false starts from step 0.
        save_steps: Optimizer steps between checkpoints; 0 saves only at the end.
        save_total_limit: Number of checkpoints to keep; the newest good one is never deleted.
        load_best: Export the weights with the lowest eval loss instead of the last; each new best is saved and
            kept, the weights before the first step among them.
        eval_steps: Optimizer steps between evaluations; auto is a tenth of the run, 0 evaluates only at the start
            and the end.
        device: Device to train on; auto is the first GPU if there is one.
        compiler: Compiler of the traced blocks; auto is inductor on CUDA and fx on a CPU.
        per_device_train_batch_size: Rows of `sequence_len` in a micro-batch.
        gradient_accumulation_steps: Micro-batches in an optimizer step.
        sample_packing: Pack several documents into a row; false puts one document in each row.
        use_cuda_graphs: On CUDA, capture micro-step and optimizer step as graphs; not long ones with `ep_size` and
            LoRA.
        deterministic: Equal runs give equal bits; false also allows kernels whose sums depend on timing, faster on
            some GPUs.
        lmhead_chunks: Chunks of the micro-batch's tokens; only one chunk's logits exist at a time. auto: the fewest
            that fit.
        recompute: Keep only each block's input and compute the block again in the backward pass. auto: the least
            that fits.
        recompute_att: Without `recompute`: compute attention outputs again instead of keeping them.
        recompute_ffn: Without `recompute`: compute the feed-forward projections again.
        recompute_qkv: Without `recompute`: compute the q, k and v projections again.
        recompute_swiglu: Without `recompute`: compute SwiGLU outputs again.
        recompute_rmsnorm: Without `recompute`: compute RMSNorm outputs again.
        recompute_budget: Without `recompute`: share of each block's residual bytes to keep; the cheapest to
            recompute are dropped.
        optimizer: The optimizer and its own options.
        learning_rate: Peak learning rate.
        lr_scheduler_type: Schedule of the learning rate between warm-up and cool-down: linear, cosine, wsd,
            constant, or one of a plugin. wsd is constant until a cool-down, which has a tenth of all steps if
            `cooldown_steps` is 0.
        warmup_ratio: Warm-up as a share of all steps; not together with `warmup_steps`.
        warmup_steps: Warm-up in optimizer steps.
        cooldown_steps: Number of last steps in which the rate falls linearly to its final value.
        final_lr_fraction: Final learning rate as a share of the peak.
        weight_decay: Decoupled weight decay of matrices; norms and biases do not decay.
        max_grad_norm: Global gradient norm to clip to; 0 does not clip.
        lora: Train low-rank adapters and freeze the base weights.
        lora_rank: Rank r of the adapters.
        lora_alpha: The adapter's output is scaled by alpha / r.
        lora_dropout: Dropout probability of the inputs of the adapters.
        lora_dtype: Dtype in which the model computes with the adapter weights; their masters have `master_dtype`.
        lora_init: Initial values of new adapters: default has A uniform and B zero, as PEFT; loftq approximates the
            rounding errors of the frozen weights, so that the first step's model is closer to the unquantised one.
        lora_target_modules: Projections that get an adapter, by their names in the model (`q_proj`) or by group:
            `attention`, `mlp` (outside of attention and experts), `experts`; `all` is every projection.
        lora_expert_rank: Rank of the adapters of experts, with the same alpha / r as the others; null is
            `lora_rank`.
        train_router: Train the routers of a model with experts too, as whole matrices beside the adapters.
        router_aux_loss_coef: Coefficient of the load-balancing loss of the routers; 0 leaves it out. null takes the
            model's own if its config.json has `output_router_logits: true`, and otherwise leaves it out, as
            transformers does.
        router_aux_loss_form: What the load-balancing loss is computed over: all layers and the tokens of the whole
            step, which takes one more forward pass if the step has several micro-batches; all layers and each
            micro-batch, as transformers' Trainer does; or each layer and micro-batch, summed over the layers.
        router_z_loss_coef: Coefficient of the routers' z loss, the mean of (log-sum-exp of the logits)², over the
            same tokens and layers; 0 and null as for `router_aux_loss_coef`.
        adapter_path: Adapter to start from: a PEFT directory, or the output directory of a LoRA run.
        adapter_init_mode: merge folds `adapter_path` into the base and trains a new adapter on top; trainable
            continues to train it.
        merge_adapter: At the end, also export the whole model with the adapter folded in, to `output_dir/model`.
        qlora_format: Keep the frozen projections in a weight format of a plugin, by its name.
        qlora_offload_experts: Keep frozen experts, in the form in which they are stored, off the device, and fetch
            them layer by layer.
        qlora_selective_expert_dequant: Accepted for configurations of other versions: training unpacks all experts
            of a layer, whether true or false.
        recipe: The precision recipe and its own options.
        model_dtype: Dtype of weights and activations; overrides `torch_dtype`, null uses it.
        master_dtype: Dtype of the masters, the weights that the optimizer updates; bf16 is rounded stochastically,
            null is fp32.
        skip_quant_first_layers: Number of first layers whose projections a recipe leaves in the model's dtype.
        skip_quant_last_layers: Number of last layers whose projections a recipe leaves in the model's dtype.
        offload: The offloader, which places the tensors that the keys below move; alone it moves every kind that it
            can.
        offload_dir: Directory of an offloader's scratch files, deleted at the end of the run; null is `output_dir`.
        offload_residual: Move the blocks' residuals off the device; the backward fetches them block by block.
        offload_optimizer: Keep the optimizer's state off the device.
        offload_master: Keep the masters of the trained weights off the device.
        offload_grads: Keep the accumulated gradients off the device.
        offload_quants: Keep quantised frozen weights off the device and fetch them block by block; needs
            `persistent_quants`.
        persistent_quants: Keep frozen weights quantised. Always so with a quantising recipe or a qlora key;
            otherwise an error.
        cpu_training: Keep weights, masters, gradients and optimizer state off the device; the CPU runs the
            optimizer step. Several GPUs share all of it out, as with `zero_level=3`.
        launcher: The launcher, which starts the processes of the run.
        gpus: GPUs of this machine to train on, one process each; 0 is all. With `device=cpu`, the number of
            processes.
        zero_level: What several GPUs share out: 1 masters and optimizer state, 2 also gradients, 3 also weights; 0
            nothing.
        shard_gradients: Share out the gradient sums, as `zero_level=2` does.
        shard_weights: Share out the weights of layers, as `zero_level=3` does. At level 1 every GPU keeps whole
            gradient sums, which are reduced once a step; level 2 becomes 3. With `lora` the frozen base, in the
            form in which it is kept.
        dp_shard_size: Number of neighbouring GPUs, such as the GPUs of a machine, over which `zero_level` and
            `shard_weights` distribute tensors. Each such group is a replica of the others. It divides `gpus`; 0 is
            all GPUs.
        exact_reduction: Add gradients in an order that makes 1, 2, 4 and 8 equal GPUs give equal bits. auto: with
            `lora`.
        context_parallel_size: GPUs that share each row: every one has an equal part of its positions, and they
            exchange heads around attention. It divides `gpus` and `sequence_len`; `gradient_accumulation_steps`
            then counts micro-batches of such a group.
        ep_size: GPUs that share out the experts of each layer: every one keeps an equal part of them, with their
            adapters and the optimizer's state, and computes it for the tokens of all. It divides `gpus` and the
            number of experts.
        ep_exchange: What GPUs that share out experts send each other for a token: it once, and back one sum of what
            its experts there give; or, with rows, it for each of its experts, and back what each gives. Sums are
            smaller, and rows have the bits of one GPU's forward.
        ep_load_balance_threshold: Even out the rows of GPUs that share out experts in each layer where the busiest
            has more than this many times the mean: others get the weights of its largest experts and compute a part
            of their rows. Weights are sent in every layer, whatever the loads, so low values such as 1.05 cost no
            more. null sends none: weights need memory, and sums have another order.
        ep_plan_refresh_interval: Largest age, in micro-steps, of the plan by which rows are evened out. Every layer
            makes its own in every micro-step, on the GPU, which satisfies any value.
        hierarchical_reduction: On several machines with equally many GPUs, add gradients inside each machine first
            and then between machines, and gather in the other order, so that each sum leaves a machine once. false
            treats all GPUs alike.
        fabric: How several GPUs exchange data: copy_engines, nccl or, on CPUs, gloo; auto is the fastest that
            connects them.
        datasets: Training data: a path, a list of paths, or entries with `path`, `type` (auto if left out) and its
            fields.
        validation_datasets: Held-out data, same form; empty takes `validation_split_ratio` of the training
            documents.
        validation_split_ratio: Share of the training documents to hold out if there are no `validation_datasets`.
        truncation_strategy: A sample longer than `sequence_len`: drop it, cut its left or right end, or split it.
        max_length: Tokens of the longest sample, if shorter than `sequence_len`; null is `sequence_len`.
        use_chat_template: Render rows with the tokenizer's chat template; false formats instructions as plain text.
        template: The chat template: auto is the tokenizer's own; otherwise a built-in name or the path of a .jinja
            file.
        system: System prompt of conversations and instructions that have none.
        loss_scale: Tokens to train on: every assistant turn, the turns after the last user message, or the whole
            conversation.
        max_bad_rows: Number of malformed rows to skip and report; one more stops the run.
        dataloader_num_workers: Processes that tokenise; auto is one per core for large data sets, 0 is the run's
            own process.
        data_cache_dir: Directory of tokenised shards; null is the user's cache directory.
        train_seed: Seed of weights, adapters, dropout and the order of rows.
        eval_seed: Seed of the held-out split.
        sample_prompts: Prompts that the model continues during training: texts, mappings with `prompt` or
            `messages`, and paths of .jsonl files with such rows. If the data is rendered with a chat template, a
            text is a user's message.
        sample_max_new_tokens: Largest number of tokens of a sample.
        sample_temperature: Temperature of samples; 0 takes the most probable token.
        sample_steps: Optimizer steps between samples; auto is with each evaluation, 0 only at the start and the
            end.
        rollout: The rollout engine, which makes the completions that reinforcement learning trains on: native reads
            the weights where training has them, of a quantised base an unpacked copy if memory is left; dedicated
            copies them to a GPU of its own. `sample_prompts` are always continued by native.
        environment: The environment of reinforcement learning and its own options: where prompts come from and what
            answers are worth; null is none.
        epoch_adjustment: Replace `num_epochs` by the number that gives 20 tokens per parameter of the model.
        monitor: The monitors that receive the run's events.
        report_to: Names of additional monitors, such as [wandb]; the same as adding them to `monitor`.
        log_gpu_util: Steps between two readings of the GPU's utilization, memory, power, temperature and clock, and
            between two exchanges of the figures of all ranks; 0 turns both off.
        log_expert_loads: For a model with experts: steps between two records of the tokens that each expert of each
            layer received. The report draws them. 1 records every step, 0 none; null makes at most 200 records in a
            run. Each checkpoint of `save_steps` has one more.
        log_file: The run's log as JSON lines; null is `output_dir/surogate.log`.
        plugins: Which plugins may be imported.
        dataset: A data set that a plugin brings, such as embedded.
        adamw_beta1: Decay of AdamW's first moment.
        adamw_beta2: Decay of AdamW's second moment.
        adamw_epsilon: Added to AdamW's denominator.
        normuon_momentum: Decay of NorMuon's momentum.
        normuon_beta2: Decay of NorMuon's second moment of each row.
        normuon_cautious_wd: NorMuon decays only weights that its update moves towards zero.
        matmul_dtype: Dtype to which both operands of a projection are rounded; null is the model's.
        gradient_dtype: Dtype of the gradient in the backward products; null is `matmul_dtype`, or bf16 if that is
            e4m3.
        fp8_amax_history: Number of optimizer steps whose largest absolute values determine a scale.
        fp4_backend: Library of the native products: cutlass is torch's choice, cuBLASLt; cudnn is refused.
        no_fp4_stochastic_rounding: Round gradients to the nearest value instead of stochastically.
        qlora_fp8: Short for qlora_format=fp8.
        qlora_block_size: Side of a block that shares a scale.
        qlora_bnb: Short for qlora_format=nf4.
        qlora_bnb_block_size: Values that share an absmax.
        qlora_bnb_double_quant: Keep the absmax in 8 bits, in groups of 256.
        qlora_fp4: Short for qlora_format=nvfp4.
        qlora_four_over_six: Scale a block to 4 instead of 6 where that makes the squared error smaller.
        qlora_search_scales: Choose each block's scale by its squared error among eleven E4M3 numbers, instead of
            one or two.
        max_restarts: How often the run starts again from its last checkpoint after a process died, hung or had a
            bug.
        auto_lr_reduction: Halve the learning rate when the loss or the gradient jumps; its docs/adaptive.md has the
            rules.
        early_stop: End a run that has converged, diverges or stands still; its docs/adaptive.md has the criteria.
    """

def train(
    task: str = ...,
    config: _Path | None = None,
    /,
    *,
    callbacks: _Callbacks = (),
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Run a task by its name, also one that a plugin offers."""
