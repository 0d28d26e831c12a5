"""Several adapters on one base that is loaded once; one of them is in the weights at a time.

The layers have room for all of them: the largest rank, on every projection that one of them adapts. What an adapter
does not have is zero there, which adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surogate_core.plugin import UserError, inference
from surogate_core.service.config import RunConfig
from surogate_core.service.files import LoraAdapter
from surogate_core.service.inference import Named, Weights, prepare
from surogate_core.service.model import EXPERT, Adapter, LoRA, TensorSpec, expanded
from surogate_core.service.plugins import Registry

_A, _B = ".lora_A.weight", ".lora_B.weight"


class NotSharedError(UserError):
    """An adapter cannot share its base with others."""


def prepare_beside(
    base: Named, adapters: Mapping[str, Named], config: RunConfig, registry: Registry
) -> tuple[inference.PreparedModel, dict[str, inference.PreparedModel]]:
    """(the base with room for the adapters of these names, each adapter's tokenizer and settings); no weight is read.

    Raises `NotSharedError` for an adapter that cannot share the base with others.
    """
    prepared = prepare(base, config, registry)
    found, tops = {}, []
    for name, adapter in adapters.items():
        one = prepare(adapter, config, registry)
        tops.append(_only(one, name))
        if one.model.config != prepared.model.config:
            raise NotSharedError(
                f"--adapter {name}: it was trained with other positions (rope_scaling or max_model_len) than the base "
                f"has. Fix: serve it alone."
            )
        # What `prepare` says about folding does not happen here.
        found[name] = replace(one, notes=adapter.notes)
    return replace(prepared, lora=_room(tops, prepared)), found


def _only(prepared: inference.PreparedModel, name: str) -> LoraAdapter:
    """The only adapter, if the base is unchanged below it."""
    assert prepared.resolved.adapter is not None
    *below, top = prepared.resolved.adapter.stack
    if below or top.whole:
        why = "it was trained on top of another adapter" if below else f"it has the whole weight {top.whole[0]}"
        raise NotSharedError(f"--adapter {name}: {why}, so it cannot share the base with others. Fix: serve it alone.")
    return top


def _room(adapters: Sequence[LoraAdapter], prepared: inference.PreparedModel) -> LoRA:
    ranks = [(module, rank) for adapter in adapters for module, rank in adapter.ranks().items()]
    largest = [max((r for m, r in ranks if (".experts." in m) == experts), default=None) for experts in (False, True)]
    first = prepared.lora.adapter
    return LoRA(
        adapter=Adapter(rank=largest[0] or largest[1] or 1, scale=adapters[0].scale, dropout=0.0, dtype=first.dtype),
        targets=frozenset(module.rsplit(".", 1)[-1] for module, _ in ranks),
        expert_rank=largest[1],
    )


class Adapters:
    """The adapters of some weights, in host memory."""

    def __init__(self, weights: Weights, adapters: Mapping[str, inference.PreparedModel]):
        """`weights`: those that `prepare_beside` has made room in. The files are read once, here."""
        self._parameters = weights.parameters
        self._specs = [spec for spec in weights.parameters.specs.values() if spec.role == "adapter"]
        self._scale = weights.plan.assembly.lora.adapter.scale if weights.plan.assembly.lora else 1.0
        self._tensors = {name: self._read(_only(one, name)) for name, one in adapters.items()}
        self.active: str | None = None
        """The adapter that is in the weights; None is the base alone."""

    def activate(self, name: str | None) -> bool:
        """Put an adapter into the weights; None takes all out. Whether that changes them."""
        if name == self.active:
            return False
        masters = self._parameters.masters()
        tensors = self._tensors[name] if name is not None else {}
        for spec in self._specs:
            value = tensors.get(spec.hf_name)
            if value is None:
                masters[spec.hf_name].zero_()
            else:
                masters[spec.hf_name].copy_(value)
        self._parameters.refresh()
        self.active = name
        return True

    def _read(self, adapter: LoraAdapter) -> dict[str, Tensor]:
        return {spec.hf_name: value for spec in self._specs if (value := self._value(adapter, spec)) is not None}

    def _value(self, adapter: LoraAdapter, spec: TensorSpec) -> Tensor | None:
        """The values of a tensor of the model, padded with zeros; None if the adapter is not on it."""
        has = set(adapter.modules)
        found = torch.zeros(spec.shape, dtype=torch.float32)
        used = False
        for number, (name, _) in enumerate(expanded(spec.hf_name, spec.shape).items()):
            module = name.removesuffix(_A).removesuffix(_B)
            if module not in has:
                continue
            value = adapter.get(name).float()
            if name.endswith(_B):
                value = value * (adapter.scales.get(module, adapter.scale) / self._scale)
            place = found[number] if EXPERT in spec.hf_name else found
            place[: value.shape[0], : value.shape[1]] = value
            used = True
        return found if used else None
