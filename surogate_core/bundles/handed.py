"""What the core hands to the functions of a plugin: as much of it as plugins may rely on.

The core's own objects have more. A plugin that hands one of these objects back to the core hands back the one that it
got.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from surogate_core.batch import MicroBatch
    from surogate_core.dsl import Model
    from surogate_core.dsl.declare import LoRA
    from surogate_core.dsl.tensors import TensorSpec
    from surogate_core.inference.texts import Prompt, PromptOptions, Text
    from surogate_core.measure.subject import JudgedText, Likelihood

T = TypeVar("T")


def whole(kind: type[T], handed: object) -> T:
    """What a plugin hands back to the core, with all that the core knows of it."""
    return cast("T", handed)


class ChosenBundle(Protocol):
    """A bundle that a key of the configuration chooses."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def options(self) -> Any:
        """An instance of its dataclass of options."""


class RunKeys(Protocol):
    """The keys of a run that plugins may read, by their names in docs/config.md; all of them are checked."""

    @property
    def flat(self) -> Mapping[str, Any]:
        """The flat keys of options of plugins that are set."""

    @property
    def task(self) -> str: ...
    @property
    def environment(self) -> ChosenBundle | None: ...
    @property
    def rollout(self) -> ChosenBundle: ...
    @property
    def lora(self) -> bool: ...
    @property
    def gpus(self) -> int: ...
    @property
    def sequence_len(self) -> int: ...
    @property
    def per_device_train_batch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def num_epochs(self) -> float: ...
    @property
    def epoch_adjustment(self) -> bool: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def train_seed(self) -> int: ...
    @property
    def truncation_strategy(self) -> str: ...
    @property
    def system(self) -> str | None: ...
    @property
    def use_chat_template(self) -> bool: ...
    @property
    def data_cache_dir(self) -> str | None: ...

    def with_keys(self, **keys: Any) -> RunKeys:
        """A copy with other values, which are not checked again."""


class Plugins(Protocol):
    """The installed plugins that the run may use."""

    def get(self, kind: str, name: str) -> Any:
        """The bundle of that kind and name, such as ``get("rollout", "native")``; a `PluginError` if there is none."""

    def names(self, kind: str) -> list[str]:
        """The names of the bundles of a kind, sorted."""

    def all(self, kind: str) -> dict[str, Any]:
        """Name → bundle, of a kind."""

    def offerer(self, kind: str, name: str) -> str:
        """The plugin that offers a bundle, as messages name it."""

    def plugin_set(self, *, digests: bool = False) -> list[dict[str, str]]:
        """Name, distribution and version of every loaded plugin, sorted by name. `digests` adds ``sha256``."""


class TrainedTensors(Protocol):
    """The parameters that a run trains."""

    def masters(self) -> Mapping[str, Tensor]:
        """Name → the trained values, which may be written to; then `refresh` must be called."""

    def refresh(self) -> None:
        """Bring the copies that the forward reads up to date with the masters."""


class TrainedModel(Protocol):
    """The model that an online task samples from, while it is trained."""

    @property
    def model(self) -> Model:
        """What its family declares."""

    @property
    def parameters(self) -> TrainedTensors:
        """What is trained."""

    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """[N] fp32: the log-probability of each label; 0 where there is none."""

    def freshen(self) -> None:
        """Make the weights of the last step visible to what reads them outside of a step."""


class ModelWeights(Protocol):
    """The weights of a model where they are: those of a run, or of a model that is only read."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the forward."""

    @property
    def model(self) -> Model:
        """What its family declares."""

    @property
    def lora(self) -> LoRA | None:
        """Where the adapters are and their form; None without adapters."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → the declaration of each tensor: its role, and whether it is trained."""

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of each adapter's tensors."""


class MeasuredModel(Protocol):
    """The model that an evaluation measures."""

    @property
    def name(self) -> str:
        """Its name in figures and messages."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""

    @property
    def context(self) -> float:
        """Tokens of the longest sequence; infinite if the model has no end."""

    def complete(
        self,
        prompts: Sequence[Prompt],
        wanted: PromptOptions,
        *,
        stage: str = "generating",
        finished: Callable[[Text], None] | None = None,
    ) -> list[Text]:
        """The completions of prompts, the samples of each prompt together."""

    def likelihoods(self, pairs: Sequence[JudgedText], *, stage: str = "likelihoods") -> list[Likelihood]:
        """How probable each continuation is. Raises `UserError` for a document beyond the model's positions."""
