"""The core's rollout engine with a copy of a run's weights: on a GPU of its own, where it generates while the run
trains, or unpacked, where memory is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surogate_core.bundles import Arriving, Completion, OnChosen, OnToken, Request, RolloutSettings
from surogate_core.bundles.handed import ModelWeights, whole
from surogate_core.dsl.declare import LoRA
from surogate_core.dsl.tensors import TensorSpec
from surogate_core.engine.device_memory import free_memory, give_back
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import InFile, Kept, OneByOne, Source
from surogate_core.engine.planning.prediction import held_bytes, programs_on_meta
from surogate_core.engine.stores import NO_OFFLOAD, DeviceStores
from surogate_core.errors import MachineError
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.room import SHARE, fitting_slots, needed_bytes
from surogate_core.generate.weights import Weights, without_values


class CopyEngine:
    """Generation by `NativeEngine` with a copy of a run's weights, which follows them."""

    def __init__(self, copy: WeightsCopy, settings: RolloutSettings):
        self._copy, self._device = copy, copy.weights.device
        with _on(self._device):
            self._engine = NativeEngine(copy.weights, settings)
        self._stale, self._frozen = False, settings.frozen

    # --------------------------------------------------------------------------- public

    def generate(self, requests: Sequence[Request], *, on_token: OnToken | None = None) -> list[Completion]:
        """A completion of each request, in their order."""
        with self._current() as engine:
            return engine.generate(requests, on_token=on_token)

    def serve(self, arriving: Arriving, on_token: OnChosen) -> None:
        """Completes requests that arrive while others run, until none runs and none arrives."""
        with self._current() as engine:
            engine.serve(arriving, on_token)

    def logprobs(self, documents: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of each document but its first."""
        with self._current() as engine:
            return engine.logprobs(documents)

    def forget(self) -> None:
        """The weights may have changed: they are copied again before the next completion."""
        self._stale = True

    def _update(self) -> None:
        if self._stale or not self._frozen:
            self._copy.refresh()
            self._engine.forget()
            self._stale = False

    @contextmanager
    def _current(self) -> Iterator[NativeEngine]:
        """The engine with the weights that it must have; its GPU is the thread's."""
        self._update()
        with _on(self._device):
            yield self._engine


class DedicatedEngine(CopyEngine):
    """The same on the next GPU. On a CPU the copy is beside the weights."""

    def __init__(self, weights: ModelWeights, settings: RolloutSettings):
        """Copies the weights. Raises `MachineError` if there is no other GPU, or if it lacks memory for them."""
        own = whole(Weights, weights)
        device = _beside(own.device)
        copy = None
        if settings.spares and _has_room(own, device, settings):
            copy = WeightsCopy.unpacked(own, device)
        try:
            copy = copy or WeightsCopy.of(own, device)
        except torch.OutOfMemoryError as error:
            message = f"rollout=dedicated: GPU {device.index} lacks memory for the model's weights."
            raise MachineError(f"{message} Fix: rollout=native") from error
        with _on(device):
            fix = "a shorter sequence_len, or rollout=native"
            slots = fitting_slots(copy.weights, settings.context, settings.slots, fix=fix)
        super().__init__(copy, replace(settings, slots=slots))

    def copy_weights(self, documents: Sequence[Sequence[int]]) -> None:
        """Take the weights as they are now; the copy is exact, so no document is compared."""
        self._stale = True
        self._update()

    def close(self) -> None:
        """Nothing is held elsewhere than in this process."""


def native(weights: ModelWeights, settings: RolloutSettings) -> CopyEngine | NativeEngine:
    """Generation with the weights where they are, or with an unpacked copy of a base in a weight format, if memory is
    spared for it: otherwise each step unpacks every weight.
    """
    own = whole(Weights, weights)
    # What a step needs is taken by now if it was captured.
    known = own.device.type != "cuda" or own.plan.assembly.captured
    if settings.spares and known and _has_room(own, own.device, settings):
        copy = WeightsCopy.unpacked(own, own.device)
        if copy is not None:
            return CopyEngine(copy, settings)
    return NativeEngine(own, settings)


def _has_room(weights: Weights, device: torch.device, settings: RolloutSettings) -> bool:
    """Whether the weights are in a weight format, and the device has room for a copy that is not, beside the caches."""
    original = weights.plan.assembly
    axes = original.settings.axes
    elsewhere = original.streams_frozen or original.experts_apart or axes.exchanges or axes.shards_weights
    if original.weight_format is None or elsewhere:
        return False
    programs = programs_on_meta(_assembly(original, device, unpacked=True))
    needed = held_bytes(programs) + needed_bytes(without_values(programs), settings.context)(settings.slots)
    room = free_memory(device, ranks=axes.ranks)
    return room is None or needed <= SHARE * room


def copied(weights: ModelWeights) -> tuple[int, ModelWeights]:
    """(bytes of the copy of weights without values, the copy without values)."""
    original = whole(Weights, weights).plan.assembly
    programs = programs_on_meta(_assembly(original, original.settings.device, unpacked=False))
    return held_bytes(programs), without_values(programs)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Streams, graphs and Triton's kernels are those of a thread's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _beside(device: torch.device) -> torch.device:
    """The GPU after the one that trains."""
    if device.type != "cuda":
        return device
    following = (device.index or 0) + 1
    if following >= torch.cuda.device_count():
        raise MachineError(
            f"rollout=dedicated: it needs a GPU after GPU {following - 1}, which trains, and torch sees none. "
            "Fix: rollout=native, or let CUDA_VISIBLE_DEVICES name two GPUs"
        )
    return torch.device("cuda", following)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCopy:
    """A copy of a run's weights, as loaded for generation alone, that follows them."""

    original: Weights
    weights: Weights

    @classmethod
    def unpacked(cls, original: Weights, device: torch.device) -> WeightsCopy | None:
        """A copy of weights in a weight format as it rounds them; None if memory is short after all."""
        try:
            return cls.of(original, device, unpacked=True)
        except torch.OutOfMemoryError:
            pass
        give_back()  # what was copied is in circles
        return None

    @classmethod
    def of(cls, original: Weights, device: torch.device, *, unpacked: bool = False) -> WeightsCopy:
        """Copy the weights to a device. `unpacked`: not in their weight format, but as it rounds them."""
        source = _source(original, device, unpacked=unpacked)
        assembly = _assembly(original.plan.assembly, device, unpacked=unpacked)
        with torch.no_grad(), _on(device):
            made = cls(original=original, weights=Weights.load(assembly, source))
        made.refresh()
        return made

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what the run trains. The devices wait for each other, and the host for neither."""
        theirs, own = self.original.parameters.masters(), self.weights.parameters
        for name, master in own.masters().items():
            master.copy_(theirs[name], non_blocking=True)
        with _on(own.device):
            own.refresh()
        pieces = {piece.key: piece for piece in own.pieces}
        for key, trained in _tensors(self.original, lambda s: s.trainable and s.hf_name not in own.flat.compute):
            stored = (s.hf_name for s in pieces[key].specs if s.hf_name not in own.flat.compute)
            for name, kept in zip(stored, own.weights.fetch(key), strict=True):
                if name in trained:
                    kept.copy_(trained[name], non_blocking=True)
        if self.weights.rows is not None and self.original.rows is not None:
            state = self.original.rows.state.state()
            for name, tensor in self.weights.rows.state.state().items():
                tensor.copy_(state[name], non_blocking=True)


def _assembly(original: Assembly, device: torch.device, *, unpacked: bool) -> Assembly:
    """The same model on a GPU for generation alone. Without adapters nothing is trained, so there are no masters."""
    every_weight = original.lora is None
    return replace(
        original,
        lora=LoRA.untrained(original.settings.adapter_dtype) if every_weight else original.lora,
        weight_format=None if unpacked else original.weight_format,
        packs=not (every_weight or unpacked),
        joins_frozen=not unpacked,
        settings=replace(original.settings, device=device, max_seqlen=1, update_on_cpu=False),
        kernels=replace(original.kernels, device=device, chosen={}, labels={}, passed={}),
        offloader=NO_OFFLOAD,
        stores=DeviceStores(),
        offload_experts=False,
    )


def _source(original: Weights, device: torch.device, *, unpacked: bool) -> Source:
    """The weights where they are. Those that are kept otherwise are as they were loaded, or are unpacked."""
    parameters, assembly = original.parameters, original.plan.assembly
    loaded = parameters.source
    assert loaded is not None
    if assembly.streams_frozen or assembly.experts_apart:
        return loaded
    pieces = _tensors(original, lambda spec: spec.hf_name not in parameters.packed)
    tensors = {name: tensor for _, found in pieces for name, tensor in found.items()}
    ready: dict[str, Tensor] = {}

    def source(spec: TensorSpec) -> Tensor | Kept | InFile | OneByOne:
        if unpacked and spec.hf_name in parameters.packed:
            if spec.hf_name not in ready:
                # All of a layer at once, into rooms that are those of the next layer too.
                piece = next(p for p in parameters.pieces if any(s.hf_name == spec.hf_name for s in p.specs))
                pairs = zip(piece.specs, parameters.inputs(piece), strict=True)
                ready.update((one.hf_name, tensor.clone()) for one, tensor in pairs if one.hf_name in parameters.packed)
            return ready.pop(spec.hf_name)
        if spec.hf_name not in tensors:
            return loaded(spec)
        tensor = tensors[spec.hf_name]
        # `Parameters.fill` keeps what is on its device already, and only frozen weights may be shared.
        shared = tensor.device == device and parameters.specs[spec.hf_name].trainable
        return tensor.clone() if shared else tensor

    return source


def _tensors(weights: Weights, wanted: Callable[[TensorSpec], bool]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(key of a piece, HF name → value in the dtype that computes) of the wanted tensors of each piece that has some,
    until the next one is asked for.
    """
    weights.store.begin_pass()
    for piece in weights.plan.pieces:
        if not any(map(wanted, piece.specs)):
            continue  # it may be in host memory, or in a weight format
        pairs = zip(piece.specs, weights.parameters.inputs(piece), strict=True)
        yield piece.key, {spec.hf_name: tensor for spec, tensor in pairs if wanted(spec)}
        weights.store.release(piece.key)
