"""Heads: what a model computes from the output of its last layer.

Shape suffixes: N tokens, D features of the residual stream, O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from surogate_core.dsl.dims import Number, Setting, number_of
from surogate_core.dsl.tensors import TensorSpec
from surogate_core.kernels import ops

if TYPE_CHECKING:
    from surogate_core.dsl.declare import Model


@dataclass(frozen=True)
class Head:
    """Base of heads: a norm, and a weight that multiplies its output.

    A family declares the head of its language models as `Model.head`, and the classes of heads that a model of the
    family may have instead in `Model.heads`; the end of the class name in ``config.json`` tells which one it has. Such
    a class sets the names below and overrides `size`; one that is more than a product overrides `outputs` too.
    """

    kind: ClassVar[str]
    """What it computes for each token, as `TaskSpec.head` names it."""
    model_name: ClassVar[str]
    """What a model with it is called in messages: ``a reward model``."""
    suffix: ClassVar[str]
    """End of the name of transformers' class, such as ``ForSequenceClassification``."""
    weight_name: ClassVar[str]
    """Name of the weight in files, of a head that a model may have instead."""
    peft_task: ClassVar[str]
    """``task_type`` of an adapter's configuration in PEFT's format."""
    reads_last_token: ClassVar[bool] = False
    """Whether transformers finds the last token of a text by ``pad_token_id``, which an export must then have."""

    hf_name: str
    """Name of the weight in files."""
    norm_hf_name: str
    eps: Setting
    tied: Setting | None = None
    """Whether the weight is the embedding's; None: never."""
    offset: float = 0.0
    """Number that is added to the weight of the norm, as in `ops.rms_norm`."""
    rounds_once: bool = False
    """Whether the norm is rounded once, as in `ops.rms_norm`."""

    @classmethod
    def beside(cls, head: Head) -> Head:
        """A head of this class for a family whose language models have `head`: with the same norm."""
        return cls(cls.weight_name, head.norm_hf_name, head.eps, offset=head.offset, rounds_once=head.rounds_once)

    def size(self, model: Model) -> int:
        """Outputs O."""
        raise TypeError(f"{type(self).__name__} declares no size")

    @classmethod
    def is_of(cls, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` describes a model with such a head."""
        classes = config.get("architectures")
        return isinstance(classes, list) and any(str(name).endswith(cls.suffix) for name in classes)

    @classmethod
    def hf_class(cls, architecture: str) -> str:
        """The class of transformers for such a head; `architecture`: the class of the family's language models."""
        return architecture.removesuffix(LMHead.suffix) + cls.suffix

    @classmethod
    def config(cls, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
        """The ``config.json`` of a model with such a head and the layers of a language model that has `config`."""
        return {**config, "architectures": [cls.hf_class(architecture)]}

    def weight_spec(self, model: Model, *, train_base: bool) -> TensorSpec:
        """The weight [O, D], named ``weight``. One that is trainable without `train_base`, as here, is trained beside
        adapters, saved with them, and begins from random numbers where the base has another head.
        """
        return TensorSpec(
            name="weight",
            hf_name=self.hf_name,
            shape=(self.size(model), model.width),
            trainable=True,
            role="embedding",
            init="normal",
        )

    def specs(self, model: Model, *, train_base: bool) -> tuple[TensorSpec, ...]:
        """Its tensors: the norm and the weight."""
        norm = TensorSpec(
            name="norm",
            hf_name=self.norm_hf_name,
            shape=(model.width,),
            trainable=train_base,
            role="norm",
            init="zeros" if self.offset else "ones",
        )
        return norm, self.weight_spec(model, train_base=train_base)

    def outputs(self, model: Model, x_ND: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """[N, O] in the dtype of x. `tensors`: the tensors of `specs` by name. Traced with its backward."""
        eps = float(self.eps.value(model.config))
        h_ND = ops.rms_norm(x_ND, tensors["norm"], eps, offset=self.offset, rounds_once=self.rounds_once)
        return h_ND @ tensors["weight"].t()

    def own(self, model: Model) -> frozenset[str]:
        """Names in files of the tensors that are trained beside adapters, which a base with another head lacks."""
        return frozenset(spec.hf_name for spec in self.specs(model, train_base=False) if spec.trainable)


@dataclass(frozen=True)
class LMHead(Head):
    """Final norm and vocabulary projection; `tied` shares the embedding's weight."""

    kind = "logits"
    model_name = "a language model"
    suffix = "ForCausalLM"
    weight_name = "lm_head.weight"
    peft_task = "CAUSAL_LM"

    scale: Number = 1.0
    """Factor of the logits."""
    softcap: Number = 0.0
    """c: the logits become c·tanh(logits/c), after the factor; 0 leaves them."""

    def size(self, model: Model) -> int:
        """V."""
        return model.vocab_size

    def weight_spec(self, model: Model, *, train_base: bool) -> TensorSpec:
        """[V, D], which may be the embedding's, and is trained with the base."""
        name = model.embed.hf_name if model.tied else self.hf_name
        return replace(super().weight_spec(model, train_base=train_base), hf_name=name, trainable=train_base)

    def outputs(self, model: Model, x_ND: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The logits, [N, V]."""
        logits_NV = super().outputs(model, x_ND, tensors)
        scale = number_of(self.scale, model.config, "the factor of the logits")
        softcap = number_of(self.softcap, model.config, "the soft cap of the logits", least=0, absent=0)
        if scale != 1:
            logits_NV = logits_NV * scale
        return torch.tanh(logits_NV / softcap) * softcap if softcap else logits_NV


@dataclass(frozen=True)
class ScoreHead(Head):
    """The head of a reward model: final norm and one score for each token, without factor and soft cap."""

    kind = "scores"
    model_name = "a reward model"
    suffix = "ForSequenceClassification"
    weight_name = "score.weight"
    peft_task = "SEQ_CLS"
    reads_last_token = True

    @classmethod
    def config(cls, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
        """With one label."""
        label = "reward"
        return {**super().config(config, architecture), "id2label": {"0": label}, "label2id": {label: 0}}

    def size(self, model: Model) -> int:
        """One."""
        return 1
