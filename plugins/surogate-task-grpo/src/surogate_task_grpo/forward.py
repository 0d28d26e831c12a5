"""Log-probabilities of completions under the trainer: the model before the step, and the reference.

The reference is the model of step 0. Its trained tensors are kept beside the run's checkpoints; a forward with them in
the place of the present ones is right for adapters, for all weights, and for adapters that are trained further.

Shape suffixes: N tokens of a micro-batch, T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from surogate_core.plugin import TensorFile, UserError, atomic, bundles, write_tensors
from surogate_task_grpo.packing import Document, Shape, Values, arranged, micro_batch

if TYPE_CHECKING:
    from torch import Tensor


NAME = "reference.safetensors"


def logprobs(
    engine: bundles.TrainedModel,
    documents: Sequence[Document],
    shape: Shape,
    *,
    temperature: float,
    together: bundles.Together,
) -> list[Values]:
    """[T] of each document: the log-probability of its trained tokens under the trainer's forward, otherwise 0.

    All ranks give the same documents; each computes a share of their micro-batches.
    """
    batches = arranged([len(document) for document in documents], shape)

    def compute(number: int) -> Values:
        rows = batches[number]
        batch = micro_batch([[documents[place] for place in row] for row in rows], shape, divisor=0.0)
        return engine.logprobs(batch, temperature=temperature).cpu().numpy()

    found = [np.zeros(len(document), np.float32) for document in documents]
    sizes = [shape.rows * shape.sequence_len] * len(batches)
    for rows, values_N in zip(batches, shared_values(together, sizes, compute), strict=True):
        for number, row in enumerate(rows):
            at = number * shape.sequence_len
            for place in row:
                end = at + len(documents[place])
                found[place][1:] = np.where(documents[place].trained_T[1:], values_N[at : end - 1], 0.0)
                at = end
    return found


def shared_values(together: bundles.Together, parts: Sequence[int], compute: Callable[[int], Values]) -> list[Values]:
    """The values of parts of these lengths, each computed by one rank. All ranks get all of them."""
    if together.world == 1:
        return [compute(part) for part in range(len(parts))]
    own = [part for part in range(len(parts)) if together.own(part)]
    rows = together.gather(lambda: b"".join(np.asarray(compute(part), np.float32).tobytes() for part in own))
    by_rank, at = [np.frombuffer(row, np.float32) for row in rows], [0] * together.world
    found = []
    for part, length in enumerate(parts):
        rank = part % together.world
        found.append(by_rank[rank][at[rank] : at[rank] + length])
        at[rank] += length
    return found


class Reference:
    """The trained tensors of step 0."""

    def __init__(self, engine: bundles.TrainedModel, directory: Path, *, begun: bool, together: bundles.Together):
        """`begun`: whether the run has taken steps, so that the tensors are read instead of written. Rank 0 writes.

        Raises `UserError` if they are gone or are those of another model.
        """
        self._engine, path = engine, directory / NAME
        live = engine.parameters.masters()
        if not begun and together.rank == 0:
            with atomic.replaced_file(path, what="the reference of the KL divergence") as temporary:
                write_tensors(temporary, live)
        together.gather(bytes)  # the others read what is complete
        if not path.is_file():
            raise UserError(
                f"{path}: is gone, and beta needs the model of step 0. Fix: put it back, or start anew with "
                f"resume_from_checkpoint=false."
            )
        self._tensors: Mapping[str, Tensor] = TensorFile(path)
        if {name: tuple(t.shape) for name, t in self._tensors.items()} != {n: tuple(t.shape) for n, t in live.items()}:
            raise UserError(f"{path}: has the tensors of another model. Fix: remove it, and start anew.")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The engine's weights are those of step 0."""
        live = self._engine.parameters.masters()
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in live.items()}
        try:
            self._fill(self._tensors)
            yield
        finally:
            self._fill(kept)

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._engine.parameters.masters().items():
            tensor.copy_(tensors[name])
        self._engine.parameters.refresh()
