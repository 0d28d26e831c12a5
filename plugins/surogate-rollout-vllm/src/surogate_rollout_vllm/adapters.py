"""The adapter of a run on a server: written, loaded, and proved by log-probabilities."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from surogate_core.plugin import CardFacts, MachineError, UserError, bundles, export_adapter, inference, significant
from surogate_rollout_vllm.client import Client, Refused
from surogate_rollout_vllm.options import VllmOptions
from surogate_rollout_vllm.wire import models_of, scored

if TYPE_CHECKING:
    from torch import Tensor


IGNORED = 0.1
"""The server ignored an update if its log-probabilities are the same to the last digit although those of the trainer
changed by more than this share of `probe_tolerance` on average."""

UNLOADING = 10.0
"""Seconds that the server has to unload an adapter."""


class ServerAdapter:
    """Keeps a server's adapter equal to that of the weights."""

    def __init__(self, weights: bundles.ModelWeights, client: Client, options: VllmOptions, base: str):
        self.weights, self.client, self.options, self.base = weights, client, options, base
        self.name = base
        """The model that requests ask for: the base, or the adapter that was loaded last."""
        self.stale = True
        """Whether the weights may have changed since the last comparison."""
        self._digest = b""
        self._updates = 0
        self._run = secrets.token_hex(4)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._trainer: inference.NativeEngine | None = None
        self._probe: tuple[int, ...] = ()
        self._before: tuple[list[float], list[float]] | None = None
        """The trainer's and the server's log-probabilities of the probe when those of the server changed last."""
        _check_trained(weights)

    def update(self, prompts: Sequence[Sequence[int]]) -> None:
        """Load the adapter if it changed, and compare the log-probabilities of the first prompts.

        Raises `MachineError` if the server does not have the trainer's weights.
        """
        if not self.stale:
            return
        tensors = dict(self.weights.adapter_tensors())
        digest = _digest(tensors)
        if digest != self._digest:
            if tensors:
                self._load(tensors)
            self._prove(prompts)
            self._digest = digest
        self.stale = False

    def close(self) -> None:
        """Unload the adapter, and delete its files."""
        self.client.resume()
        self._unload(self.name)
        self.name, self._digest, self.stale = self.base, b"", True
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    # ------------------------------------------------------------------------------ load

    def _load(self, tensors: dict[str, Tensor]) -> None:
        lora = self.weights.lora
        assert lora is not None
        adapter, former = lora.adapter, self.name
        name = f"surogate-{self._run}-{self._updates}"
        path = self._directory() / name
        export_adapter(
            path,
            tensors.items(),
            rank=adapter.rank,
            alpha=adapter.scale * adapter.rank,
            dropout=0.0,
            base_model=None,
            card=CardFacts(title=name),
            model=self.weights.model,
        )
        self._updates += 1
        try:
            self.client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except Refused as error:
            raise MachineError(f"{error}. Fix: {_fix(error, adapter.rank)}") from error
        listed = [model for model, _ in models_of(self.client.get("/v1/models"))]
        if name not in listed:
            raise MachineError(
                f"rollout vllm: {self.client.url} accepted adapter {name} and does not serve it; it serves "
                f"{', '.join(listed) or 'nothing'}. Fix: send requests to one server, not to several behind one address"
            )
        self.name = name
        self._unload(former)

    def _unload(self, name: str) -> None:
        if name == self.base:
            return
        # One that stays loaded does no harm.
        self.client.tell("/v1/unload_lora_adapter", {"lora_name": name}, seconds=UNLOADING)
        shutil.rmtree(self._directory() / name, ignore_errors=True)

    def _directory(self) -> Path:
        if self.options.adapter_dir is not None:
            path = Path(self.options.adapter_dir).expanduser().absolute()
            path.mkdir(parents=True, exist_ok=True)
            return path
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="surogate-vllm-")
            # The server may run as another user.
            Path(self._temporary.name).chmod(0o755)
        return Path(self._temporary.name)

    # ----------------------------------------------------------------------------- prove

    def _prove(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compare the log-probabilities of the probe, whose tokens are those of the first prompts."""
        if not self._probe:
            self._probe = tuple(token for prompt in prompts for token in prompt)[: self.options.probe_tokens]
        if len(self._probe) < 2:
            self._probe = ()
            return
        if self._trainer is None:
            self._trainer = inference.NativeEngine(
                self.weights, bundles.RolloutSettings(slots=1, context=len(self._probe))
            )
        (trainer,) = self._trainer.logprobs([self._probe])
        server = scored(self.client, self.name, self._probe)
        place = f"{self.client.url} (model {self.name})"
        if self._before is not None:
            changed = _mean_difference(trainer, self._before[0])
            if server == self._before[1] and changed > IGNORED * self.options.probe_tolerance:
                raise MachineError(
                    f"rollout vllm: {place} has the weights of an earlier step: the trainer's log-probabilities of "
                    f"{len(server)} tokens changed by {significant(changed, 2)} on average, and the server's are the "
                    "same. "
                    "Fix: serve with --enable-lora from one process that reads the adapter's directory"
                )
        apart = _mean_difference(trainer, server)
        if not apart <= self.options.probe_tolerance:
            raise MachineError(
                f"rollout vllm: {place} has other weights than the trainer: the log-probabilities of {len(server)} "
                f"tokens differ by {significant(apart, 2)} on average, more than "
                f"probe_tolerance={self.options.probe_tolerance:g}. "
                "Fix: serve the model that is trained, in its dtype and weight format, or raise rollout.probe_tolerance"
            )
        if self._before is None or server != self._before[1]:
            self._before = (trainer, server)


def _check_trained(weights: bundles.ModelWeights) -> None:
    specs = weights.specs.values()
    whole = [spec.hf_name for spec in specs if spec.trainable and spec.role != "adapter"]
    if whole:
        adapters = any(spec.role == "adapter" for spec in specs)
        fix = "train_router: false" if adapters else "lora: true"
        raise UserError(
            f"rollout vllm: it sends adapters, and {whole[0]} is trained as a whole. Fix: {fix}, or rollout: native"
        )


def _digest(tensors: dict[str, Tensor]) -> bytes:
    """A hash of the names and values."""
    made = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        made.update(name.encode())
        made.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return made.digest()


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))


def _fix(error: Refused, rank: int) -> str:
    if error.status == 404:
        return "serve with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    return (
        f"serve with --enable-lora --max-lora-rank {rank}, on a machine that sees rollout.adapter_dir by the same path"
    )
