"""The loss of every token of held-out micro-batches, by the forward of the model alone.

Shape suffixes: N tokens of a micro-batch, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, WEIGHTS, MicroBatch
from surogate_core.bundles.handed import ModelWeights, whole
from surogate_core.dsl.mixers import Packed, mixing
from surogate_core.dsl.sides import IDS, REAL
from surogate_core.generate.weights import Weights
from surogate_core.kernels import ops
from surogate_core.kernels.registry import using

LOGITS = 2**26
"""Logits that exist at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSums:
    """The sums over the label tokens of one document."""

    loss: float
    """Weighted."""
    weight: float
    """Their number, or the sum of their weights."""
    tokens: int
    hits: int
    """Tokens that were the most probable ones."""


@torch.no_grad()
def documents_of(weights: Weights, batches: Iterable[MicroBatch]) -> Iterator[list[DocumentSums]]:
    """The documents of each micro-batch that have label tokens, in order."""
    for batch in batches:
        loss_N, hits_N = _losses(weights, batch)
        labelled_N = batch.labels != IGNORE_LABEL
        weight_N = batch.columns[WEIGHTS].double() if WEIGHTS in batch.columns else labelled_N.double()
        number_N = (batch.positions == 0).cumsum(0) - 1
        count = int(number_N[-1]) + 1

        def summed(values_N: Tensor, number_N: Tensor = number_N, count: int = count) -> list[float]:
            return torch.zeros(count, dtype=torch.float64).index_add_(0, number_N, values_N.double()).tolist()

        sums = zip(
            summed(loss_N * weight_N), summed(weight_N), summed(labelled_N), summed(hits_N & labelled_N), strict=True
        )
        yield [
            DocumentSums(loss=loss, weight=weight, tokens=int(tokens), hits=int(hits))
            for loss, weight, tokens, hits in sums
            if tokens
        ]


def logits_of(given: ModelWeights, batch: MicroBatch) -> Iterator[tuple[slice, Tensor]]:
    """(positions of a part of the micro-batch, [n, V] their logits on the device), in order, without gradients."""
    weights = whole(Weights, given)
    device, model = weights.device, weights.plan.assembly.model
    tables = [*model.tables(batch.positions.to(device), weights.parameters.dtype).values()]
    tables.append(batch.cu_seqlens.to(device))
    kernels, documents = weights.programs.kernels, Packed(tables[-1], batch.max_seqlen)
    if REAL in weights.plan.tables:
        assert batch.real is not None
        tables.append(batch.real.to(device))
    # The blocks of loaded weights know no bound of a document.
    with torch.no_grad(), using(kernels), mixing(documents):
        ids_N, relayed = batch.input_ids.to(device), dict[tuple[int, str], Tensor]()
        if IDS in weights.plan.tables:
            tables.append(ids_N)
        x_ND = weights.embedded(ids_N)
        for layer in weights.layers():
            x_ND = layer(x_ND, tables, relayed)
    size = max(1, LOGITS // model.vocab_size)
    for start in range(0, len(x_ND), size):
        part = slice(start, min(start + size, len(x_ND)))
        with torch.no_grad(), using(kernels):
            logits_NV = weights.logits(x_ND[part])
        yield part, logits_NV


def _losses(weights: Weights, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(negative log-likelihood of each label in float64, whether it is the most probable token), on the host."""
    losses, hits = [], []
    for part, logits_NV in logits_of(weights, batch):
        labels_N = batch.labels[part].to(weights.device)
        with using(weights.programs.kernels):
            losses.append(ops.cross_entropy(logits_NV, labels_N))
        hits.append(logits_NV.argmax(-1) == labels_N)
    return torch.cat(losses).double().cpu(), torch.cat(hits).cpu()
