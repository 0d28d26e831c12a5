"""The frozen dataclasses that hooks return: what a plugin offers, as data.

Every bundle has a `name`, unique within its kind: the name that a config selects it by
(``recipe=bf16`` selects the `Recipe` whose name is ``bf16``). A bundle with `options` names a
dataclass, one docstring a field; the config node of the group is validated against it, and an
instance is passed to the bundle's callables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.data.encoded import EncodeContext, Encoded
    from surogate_core.dsl import Model
    from surogate_core.dsl.slots import LinearSlot, TracedSlot
    from surogate_core.events import Control, Event, RunInfo

FLAT_ALIGNMENT = 256
"""Elements that a parameter's offset in a flat group is a multiple of (1 KiB of fp32): a block of 8-bit state
never holds two parameters."""

TensorKind = Literal["weights", "residuals", "gradients", "master", "optimizer"]
"""The kinds of tensor that a store can hold."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a bundle that has none."""


# ------------------------------------------------------------------------ what is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A model architecture: the DSL model built from a Hugging Face ``config.json``."""

    name: str
    """The value of `model.name`."""
    hf_model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json`` that this family reads."""
    build: Callable[[Mapping[str, Any]], Model]
    """Makes the model from the mapping of a ``config.json``; raises `UserError` naming a bad key."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Preset name → a ``config.json`` mapping, for training from random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A task's loss, per token; the engine chunks it over tokens and averages over label tokens."""

    name: str
    """The value of the key `objective`."""
    token_loss: Callable[[Tensor, Tensor], Tensor]
    """(logits_NV in compute dtype, labels_N int64) → loss_N fp32; 0 where the label is -100.
    Traced: plain torch ops only, differentiable in the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """The type chosen for a data set from its sampled rows."""

    type: str
    """The `type` of the format that reads them."""
    fields: Mapping[str, Any]
    """Fields of that type, as an entry of `datasets` would have them."""
    reason: str
    """What in the rows shows it; said to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFormat:
    """One `type` of data set: how a row becomes tokens and labels, or which other type does that."""

    name: str
    """The `type` of an entry of `datasets`."""
    options: type
    """Dataclass of the fields that a `datasets` entry of this type may have in addition to the common ones."""
    encode: Callable[[Mapping[str, Any], Any, EncodeContext], Encoded] | None = None
    """(row, options, context) → tokens and labels; raises `RowError` with the reason for a bad row."""
    choose: Callable[[Sequence[Mapping[str, Any]], Any], FormatChoice] | None = None
    """Instead of `encode`: (sampled rows, options) → the type that reads them; raises `RowError` when none does."""
    columns: Callable[[Any], Collection[str]] | None = None
    """Options → the fields of a row that `encode` reads; the run names those that it does not. None: not known.
    A function of a module, as `encode`: it is sent to worker processes, and a lambda cannot be."""
    trains_prompts: bool = False
    """Whether every token of a document is meant to be trained, so the run does not warn about it."""
    version: int = 1
    """Raised when the same row encodes differently; part of the shard cache's digest."""
    tasks: tuple[str, ...] | None = None
    """Tasks that can train on it; None is all that train on documents."""
    examples: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = ()
    """(row, fields of an entry) that the format reads; the conformance kit tries it with them."""

    def __post_init__(self) -> None:
        """Raise `ValueError` unless exactly one of `encode` and `choose` is given."""
        if (self.encode is None) == (self.choose is None):
            raise ValueError(f"data set format {self.name!r} must have either `encode` or `choose`")


# ----------------------------------------------------------------------- how it is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSettings:
    """The flat precision keys of the configuration that every recipe may read."""

    fp8_amax_history: int = 1024
    no_fp4_stochastic_rounding: bool = False
    fp4_backend: str = "cutlass"
    """cutlass or cudnn."""
    matmul_dtype: str | None = None
    """fp32, bf16, e4m3, or None: the model's."""
    gradient_dtype: str | None = None
    """fp32, bf16, e5m2, or None: the recipe's choice."""
    model_dtype: str | None = None
    """fp32 or bf16, of activations and weights as `linear` gets them; None where that is not known."""


class RecipeState(Protocol):
    """What a recipe carries from one optimizer step to the next, for all slots of the model at once."""

    @property
    def rows(self) -> Tensor:
        """[P, K] fp32, one row a slot: what `linear` reads as `slot.row`. Updated in place."""

    def update(self, observed: Tensor, skip: Tensor) -> None:
        """Take in what the slots saw since the last update, with no host synchronisation.

        `observed`: [P, K] fp32, the largest of each figure over the micro-steps, NaN where one was.
        `skip`: 0-d fp32, 1 when the gradients are not finite: nothing may change then.
        """

    def state(self) -> dict[str, Tensor]:
        """The live state tensors by name; loading copies into them in place."""


@runtime_checkable
class RangedState(RecipeState, Protocol):
    """A recipe state whose rows are scales: it can say how much of the formats' range the slots used."""

    @property
    def formats(self) -> Mapping[str, float]:
        """Role of each column of `rows`, in order → the smallest normal number of its format over the largest."""

    def used_range(self, observed: Tensor) -> Tensor:
        """[P, K] fp32: the largest value seen, scaled as it was, over the largest of the format.

        Called before `update` with what that gets. Above 1 values were cut off; 0 where nothing was seen or the
        scale was the tensor's own. No host synchronisation.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision recipe: how linear slots multiply."""

    name: str
    """The value of `recipe`."""
    linear: Callable[[Tensor, Tensor, TracedSlot, Any], Tensor]
    """(x_NI, weight_OI, slot, options) → y_NO, traced with its backward; no bias, no adapter."""
    plain: bool = False
    """Whether `linear` is x Wᵀ in the dtype of both; then an adapter may be folded into the product."""
    plain_with: Callable[[Any], bool] = lambda options: True
    """Whether `plain` holds with these prepared options."""
    dtypes: Mapping[Literal["matmul_dtype", "gradient_dtype"], str] | None = field(default_factory=dict)
    """What it forces these keys to, and the run says where they are set to something else; None if it follows them."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    """Why the device cannot run the recipe natively, or None."""
    prepare: Callable[[Any, RecipeSettings, torch.device], Any] = lambda options, settings, device: options
    """(options, the run's precision keys, device) → what the callables get as options; `MachineError` if it cannot."""
    note: Callable[[Any], str | None] = lambda options: None
    """(prepared options) → what the run says of them once, or None."""
    state: Callable[[int, torch.device, Any], RecipeState] | None = None
    """(number of slots, device, prepared options) → the recipe's state, or None if it has none."""
    pack: Callable[[Tensor, LinearSlot, Any], Tensor] | None = None
    """(frozen weight_OI, slot, prepared options) → the one tensor, of any shape and dtype, that `linear` is given
    in its place; called once a weight. Traced for its shape, so plain torch ops only."""
    scaled_margin: Callable[[Any], int | None] = lambda options: None
    """(prepared options) → the margin with which adapted slots with frozen weights may be multiplied by the op
    `scaled_linears` instead, whose rows of state are those of this recipe; None if they may not."""
    rounded: Callable[[Tensor, str, Any], tuple[Tensor, Tensor]] | None = None
    """(matrix [R, K], K the inner dimension of its product; role: activation, weight or gradient; prepared options)
    → (the values that it rounds to, fp32 [R, K]; where they are cut off, bool [R, K]). For reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """The flat QLoRA keys of the configuration that every weight format may read."""

    qlora_block_size: int = 128
    qlora_bnb_block_size: int = 64
    qlora_bnb_double_quant: bool = True
    qlora_four_over_six: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A form that frozen weights rest in; each is made wide again before it is multiplied with, whatever the recipe."""

    name: str
    """The value of `qlora_format`; `nf4`, `fp8` and `nvfp4` have keys of their own."""
    nbytes: Callable[[int, int, WeightSettings], int]
    """(outputs, inputs, keys) → bytes of such a weight."""
    pack: Callable[[Tensor, WeightSettings], Tensor]
    """(weight_OI in the model's dtype, keys) → [nbytes] uint8. Called once a weight, on its device; temporaries are
    smaller than the weight."""
    unpack: Callable[[Tensor, Tensor, WeightSettings], None]
    """(what `pack` made, room_OI, keys): write the weight into the room, whose dtype is the model's and whose rows lie
    apart. Called before each use, in CUDA graphs too: nothing may wait for the device. Equal inputs give equal bits."""
    adopt: Callable[[Mapping[str, Tensor], WeightSettings], Tensor] | None = None
    """(the tensors of a weight of a quantised checkpoint by part, keys) → what `pack` would make, with its own codes.
    ``fp8`` is given codes and scales, ``nvfp4`` codes, scales and decode, as `hf.prequantised` names them."""
    keys: tuple[str, ...] = ()
    """The fields of `WeightSettings` that it reads; a checkpoint is resumed only with equal ones."""
    note: Callable[[torch.device, WeightSettings], str | None] = lambda device, settings: None
    """What the run says of it once, such as that a device has no kernel for it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Trainable parameters that share hyper-parameters, as flat tensors.

    `master` (fp32, or bf16 with `master_dtype=bf16`) and `grad` (fp32) are 1-D of equal length; `shapes`
    maps each parameter's name to its (offset in elements, shape) in them, in order. Offsets and the length
    are multiples of `FLAT_ALIGNMENT`; between parameters are zeros, which an update must leave zeros.
    """

    name: str
    """Unique among the groups of the run; state is named after it."""
    master: Tensor
    """[P] fp32 or bf16: the weights that are trained."""
    grad: Tensor
    """[P] fp32: their gradients, summed over the step and not clipped yet."""
    shapes: Mapping[str, tuple[int, tuple[int, ...]]]
    """Parameter's name → (offset in elements, shape)."""
    weight_decay: float
    """Decay of every parameter of the group."""
    hidden: frozenset[str] = frozenset()
    """Names of the matrices [outputs, inputs] within blocks: no embedding, no LM head, no adapter."""
    seed: Tensor | None = None
    """Of bf16 masters: 0-d int32, another in every optimizer step; `kernels.rounding.write_master` rounds with it."""
    number: int = 0
    """Its place among the run's groups; separates their random numbers."""


class Optimizer(Protocol):
    """What an `OptimizerSpec` builds: state as named tensors, one capturable step."""

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """Update every group's master in place, with no host synchronisation.

        `lr`: 0-d fp32. `clip`: 0-d fp32, the factor that gradients are multiplied by.
        `skip`: 0-d fp32, 1 when the gradients are not finite: nothing may change then.
        """

    def state(self) -> dict[str, Tensor]:
        """The live state tensors by name; loading copies into them in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer."""

    name: str
    """The value of `optimizer`."""
    build: Callable[[Sequence[ParamGroup], OptimizerSettings, Any], Optimizer]
    """(groups, the run's optimizer keys, options) → the optimizer with zeroed state."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    state_bytes_per_parameter: float = 8.0
    """For `surogate plan`'s prediction."""
    master_dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32",)
    """The `master_dtype`s that it can train; bf16 it writes by `surogate_core.kernels.rounding.write_master`."""
    adapters: bool = True
    """Whether it makes sense on adapters; one that does not is refused with `lora`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The flat optimizer keys of the configuration that every optimizer may read."""

    adamw_beta1: float = 0.9
    adamw_beta2: float = 0.999
    adamw_epsilon: float = 1e-8
    normuon_momentum: float = 0.95
    normuon_beta2: float = 0.95
    normuon_cautious_wd: bool = True


class Store(Protocol):
    """Where tensors of one kind live between their uses at block borders.

    Keys are the schedule's (``layer 3``). Prefetch starts a copy on a side stream; fetch
    returns tensors that the current stream may read at once; release ends their use.
    """

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Take the tensors over."""

    def prefetch(self, key: str) -> None:
        """Start bringing the key's tensors to the compute device."""

    def fetch(self, key: str) -> Sequence[Tensor]:
        """The key's tensors on the compute device."""

    def release(self, key: str) -> None:
        """The compute-device copies may be reused; residuals are forgotten."""

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held now, by place."""


@runtime_checkable
class GradientStore(Store, Protocol):
    """The fp32 sums of trained tensors' gradients, a piece's at a time on the compute device.

    What a piece adds to the fetched tensors between `fetch` and `release` is kept. A tied tensor is under two keys.
    """

    def begin(self, *, first: bool) -> None:
        """A micro-step begins; in the first of an optimizer step all sums count as zeros, whatever was left in them."""

    def finish(self) -> None:
        """A micro-step ends: what the current stream runs from here on finds the sums where they live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloader:
    """A place for some kinds of tensor."""

    name: str
    """The value of `offload`."""
    kinds: frozenset[TensorKind]
    """The kinds of tensor that it places."""
    place: Literal["device", "host", "disk", "sharded"]
    """For the plan's table."""
    store: Callable[[TensorKind, torch.device, Any], Store]
    """(kind, compute device, options) → the store of weights, residuals or gradients (a `GradientStore`), which go and
    come as blocks run."""
    allocate: Callable[[TensorKind, int, torch.dtype, torch.device, Any], tuple[Tensor, Tensor]] | None = None
    """(kind, elements, dtype, compute device, options) → the same zeroed [elements] twice, as a tensor of the compute
    device and as one of the CPU. Of master, gradients and optimizer, which kernels of the optimizer step read and write
    where they live, and of trained weights."""
    addressable: bool = True
    """Whether kernels of a GPU can work on what `allocate` gives, and a CUDA graph holds all that a store does. Where
    they cannot, both tensors of `allocate` are the CPU's, and it takes the optimizer step."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    prepare: Callable[[Any, str], Any] = lambda options, directory: options
    """(options, directory for scratch files) → what `store` and `allocate` receive as options."""

    def __post_init__(self) -> None:
        """Raise `ValueError` where kinds are placed that there is no `allocate` for."""
        flat = self.kinds - {"weights", "residuals"}
        if flat and self.place != "device" and self.allocate is None:
            raise ValueError(f"offloader {self.name!r} places {', '.join(sorted(flat))} without an `allocate`")

    def moves(self, kind: TensorKind) -> bool:
        """Whether tensors of the kind live elsewhere than on the device."""
        return self.place != "device" and kind in self.kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation of a registered op."""

    op: str
    """The op's name in `surogate_core.kernels`, e.g. ``rms_norm``."""
    name: str
    """Unique within the op, shown by `surogate doctor`."""
    function: Callable[..., Any]
    """Same signature and meaning as the op's reference; differentiable under tracing."""
    supports: Callable[[torch.device, torch.dtype], bool]
    """(device, dtype of the first argument) → whether it can run there."""
    takes: Callable[..., bool] = lambda *args, **kwargs: True
    """Whether it takes these arguments, asked with the op's own while a block is traced: shapes, never values."""
    priority: int = 0
    """The highest supporting priority wins; the reference has -100."""
    deterministic: bool = True
    """Equal inputs give equal bits. A kernel that cannot promise it is used with `deterministic=false` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPack:
    """A set of kernels for some hardware."""

    name: str
    """Shown by `surogate doctor`."""
    kernels: Callable[[], Iterable[Kernel]]
    """Called once, on first use; may compile."""
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    """Why the device cannot use the pack, or None."""
    rewrites: Callable[[], Iterable[Callable[[torch.fx.Graph], None]]] = tuple
    """Changes to a block's joint graph of forward and backward, made in place before it is cut in two: a kernel that
    does the work of several ops takes their place so. Called once; ops of other packs may stand in the graph."""


# --------------------------------------------------------------------- where and who watches


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How the run's processes start."""

    name: str
    """The value of `launcher`."""
    launch: Callable[[Callable[[], int], Any], int]
    """(the run's main, options) → exit code."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""


class Monitor(Protocol):
    """What a `MonitorSpec` builds."""

    def on_event(self, event: Event) -> Control | None:
        """See one event; may answer with a control. Never blocks on the device."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the monitor, as JSON values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def close(self) -> None:
        """Flush and release; called once, also after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSpec:
    """A monitor."""

    name: str
    """A name in `monitor=[…]`."""
    build: Callable[[Any, RunInfo], Monitor]
    """(options, the run's facts) → the monitor."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    prints: bool = False
    """Whether it may write to standard output, as a console does; otherwise the conformance kit refuses that."""


Bundle = (
    ModelFamily
    | Objective
    | DatasetFormat
    | Recipe
    | WeightFormat
    | OptimizerSpec
    | Offloader
    | KernelPack
    | Launcher
    | MonitorSpec
)

KINDS: Mapping[str, tuple[str, type]] = {
    "model": ("surogate_model_family", ModelFamily),
    "objective": ("surogate_objective", Objective),
    "dataset": ("surogate_dataset", DatasetFormat),
    "recipe": ("surogate_recipe", Recipe),
    "quant": ("surogate_weight_format", WeightFormat),
    "optimizer": ("surogate_optimizer", OptimizerSpec),
    "offload": ("surogate_offloader", Offloader),
    "kernels": ("surogate_kernel_pack", KernelPack),
    "launcher": ("surogate_launcher", Launcher),
    "monitor": ("surogate_monitor", MonitorSpec),
}
"""Kind (= the config group, where there is one) → its hook and its bundle's type."""
