"""Packing loses nothing, doubles nothing, keeps documents apart and fills rows."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.batch import IGNORE_LABEL
from surogate_core.data.cache import DataCache
from surogate_core.data.encoded import Encoded, Group
from surogate_core.data.encoding import EncodedChunk
from surogate_core.data.packing import DocumentSpan, PackSettings, PackStats, best_fit_decreasing, cut, pack
from surogate_core.data.sampler import EvalBatches, collate
from surogate_core.data.shards import Documents, DocumentShard, DocumentWriter, PackedRows, pack_documents
from surogate_core.errors import UserError

PADDING = 7
NO_ROWS: Any = {"after": (0, 0, 0), "done": 0, "rows": 0, "bad_row_count": 0, "bad_rows": [], "ends_special": 0}


def make_rows(root: Path, lengths: list[int], settings_: PackSettings) -> tuple[PackedRows, list[Encoded]]:
    """Documents of distinct tokens; every third token of a document is untrained."""
    documents, token = [], 10
    for length in lengths:
        ids = range(token, token + length)
        documents.append(Encoded.from_mask(ids, [i % 3 != 0 for i in ids]))
        token += length
    shard = root / "shard"
    shard.mkdir()
    with DocumentWriter(shard) as writer:
        writer.append(EncodedChunk.of(documents, **NO_ROWS))
        digest = writer.content_digest()
    joined = Documents([DocumentShard(shard)], digest)
    return pack_documents(DataCache(root, "rows"), joined, None, "all", settings_, padding_id=PADDING), documents


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    sequence_len=st.integers(2, 24),
    strategy=st.sampled_from(["delete", "left", "right", "split"]),
    sample_packing=st.booleans(),
    window=st.integers(1, 70),
)
@settings(max_examples=60, deadline=None)
def test_micro_batches_hold_each_kept_token_once_with_its_own_next_token(
    lengths: list[int], sequence_len: int, strategy: str, sample_packing: bool, window: int
) -> None:
    config = PackSettings(
        sequence_len=sequence_len,
        truncation_strategy=strategy,  # type: ignore[arg-type]
        sample_packing=sample_packing,
        window=window,
    )
    with tempfile.TemporaryDirectory() as root:
        rows, documents = make_rows(Path(root), lengths, config)
        owner = {int(t): d for d, document in enumerate(documents) for t in document.input_ids}
        label_of = {
            int(t): int(x) for document in documents for t, x in zip(document.input_ids, document.labels, strict=True)
        }
        seen: list[int] = []
        learnt: list[int] = []
        token_count = label_count = 0
        for batch in EvalBatches(rows, rows_per_micro_batch=2):
            ids, labels = batch.input_ids.tolist(), batch.labels.tolist()
            borders = batch.cu_seqlens.tolist()
            assert len(ids) == len(labels) == 2 * sequence_len
            assert len(borders) == 2 * rows.max_documents + 1
            assert borders[0] == 0
            assert borders[-1] == len(ids)
            assert borders == sorted(borders)
            assert set(range(0, len(ids) + 1, sequence_len)) <= set(borders)
            for start, end in pairwise(borders):
                if start == end:
                    continue
                part = ids[start:end]
                assert batch.positions.tolist()[start:end] == list(range(end - start))
                assert labels[end - 1] == IGNORE_LABEL
                if all(t == PADDING for t in part):
                    assert all(x == IGNORE_LABEL for x in labels[start:end])
                    continue
                assert len({owner[t] for t in part}) == 1
                assert part == list(range(part[0], part[0] + len(part)))
                assert labels[start : end - 1] == [label_of[t] for t in part[1:]]
                seen += part
                learnt += [x for x in labels[start:end] if x != IGNORE_LABEL]
            token_count += batch.tokens
            label_count += batch.label_tokens
        assert len(learnt) == len(set(learnt)) == label_count == rows.stats.label_tokens
        assert len(seen) == token_count == rows.stats.tokens
        short = [t for d in documents if len(d.input_ids) <= sequence_len for t in d.input_ids.tolist()]
        assert set(short) <= set(seen)
        if strategy == "split":
            assert set(learnt) == {int(x) for d in documents for x in d.labels[1:] if x != IGNORE_LABEL}
        else:
            assert len(seen) == len(set(seen))
        if not sample_packing:
            assert all(len(rows.row(i).lengths) == 1 for i in range(len(rows)))


@given(lengths=st.lists(st.integers(1, 50), max_size=200), capacity=st.integers(50, 120))
def test_best_fit_decreasing_places_each_document_once_in_bins_that_hold(lengths: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= capacity for b in bins)
    assert bins == best_fit_decreasing(lengths, capacity)
    # Any two bins together hold more than one bin's worth, else best fit would have joined them.
    loads = sorted(sum(lengths[i] for i in b) for b in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


def test_a_row_of_any_length_needs_no_memory_of_its_own() -> None:
    assert best_fit_decreasing([5, 999_999_999_998, 7], 999_999_999_999) == [[1], [2, 0]]


def test_best_fit_prefers_the_tightest_bin() -> None:
    assert best_fit_decreasing([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]


class Known:
    """Lengths without tokens."""

    grouped = False

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths.astype(np.int64)

    def length(self, documents: np.ndarray) -> np.ndarray:
        return self.lengths[documents]

    def label_count(self, documents: np.ndarray) -> np.ndarray:
        return self.lengths[documents] - 1

    def labels(self, document: int) -> np.ndarray:
        return np.zeros(self.lengths[document], np.int32)


def test_rows_of_a_realistic_mix_are_at_least_98_percent_full() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 20_000), 8, 2048).astype(np.int64)
    stats = PackStats()
    rows = [
        row for w in pack(np.arange(len(lengths)), Known(lengths), PackSettings(sequence_len=2048), stats) for row in w
    ]
    assert stats.documents == len(lengths)
    assert stats.tokens == lengths.sum() == sum(p.length for row in rows for p in row)
    assert stats.tokens / (len(rows) * 2048) >= 0.98


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [("delete", []), ("left", [(6, 4)]), ("right", [(0, 4)]), ("split", [(0, 4), (3, 4), (6, 4)])],
)
def test_a_long_document_is_cut_as_asked(strategy: str, parts: list[tuple[int, int]]) -> None:
    assert cut(10, 4, strategy) == parts  # type: ignore[arg-type]
    assert cut(4, 4, strategy) == [(0, 4)]  # type: ignore[arg-type]


def test_parts_without_a_label_are_dropped_and_counted() -> None:
    class OnlyTheEnd(Known):
        def trained(self, document: int) -> np.ndarray:
            return np.arange(self.lengths[document]) == self.lengths[document] - 1

    stats = PackStats()
    config = PackSettings(sequence_len=4, truncation_strategy="split")
    rows = [row for w in pack(np.arange(1), OnlyTheEnd(np.array([10])), config, stats) for row in w]
    assert rows == [[DocumentSpan(0, 6, 4)]]
    assert (stats.split, stats.unlabelled, stats.label_tokens) == (1, 2, 1)


def groups_of(root: Path, sizes: list[list[int]], **keys: Any) -> tuple[PackedRows, Documents]:
    """Packed groups of documents with these lengths, each token different."""
    ids = iter(range(10, 10_000))
    found = [[Encoded.from_mask([next(ids) for _ in range(size)]) for size in group] for group in sizes]
    chunks = [[Group(documents=tuple(group)) if len(group) > 1 else group[0]] for group in found]
    shard = root / "shard"
    shard.mkdir()
    with DocumentWriter(shard) as writer:
        for chunk in chunks[:2]:
            writer.append(EncodedChunk.of(chunk, **NO_ROWS))
        writer.flush()
        state = writer.state()
        writer.append(EncodedChunk.of([Group(documents=(found[0][0],) * 2)], **NO_ROWS))  # lost by a kill
    with DocumentWriter(shard, state) as writer:
        writer.append(EncodedChunk.of([one for chunk in chunks[2:] for one in chunk], **NO_ROWS))
    documents = Documents([DocumentShard(shard)], writer.content_digest())
    settings_ = PackSettings(**{"sequence_len": 12, **keys})
    return pack_documents(DataCache(root, "rows"), documents, None, "all", settings_, padding_id=PADDING), documents


def test_the_documents_of_a_group_share_a_row_in_their_order(tmp_path: Path) -> None:
    rows, documents = groups_of(tmp_path, [[2, 3], [5], [4, 2], [3, 3, 2], [9, 4], [4, 8]])
    assert [documents.parts(i) for i in range(6)] == [[2, 3], [5], [4, 2], [3, 3, 2], [9, 4], [4, 8]]
    found = [(rows.row(i).lengths, rows.row(i).input_ids[0]) for i in range(len(rows))]
    assert found == [((4, 8), 47), ((3, 3, 2), 26), ((4, 2, 2, 3), 20), ((5,), 15)]
    assert (rows.stats.documents, rows.stats.deleted, rows.stats.label_tokens) == (6, 1, 26)
    assert (rows.max_documents, rows.longest) == (5, 8)
    batch = collate(rows, [2])
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2, 0]
    assert batch.labels.tolist() == [21, 22, 23, -100, 25, -100, 11, -100, 13, 14, -100, -100]


@pytest.mark.parametrize(
    ("strategy", "lengths", "first", "stats"),
    [
        ("delete", [], [], (2, 0, 0)),
        ("split", [], [], (2, 0, 0)),
        ("right", [(4, 4), (3, 4)], [[10, 11, 12, 13], [19, 20, 21, 22]], (0, 2, 0)),
        ("left", [(4, 4), (3, 4)], [[15, 16, 17, 18], [19, 20, 21, 22]], (0, 2, 0)),
    ],
)
def test_documents_of_a_long_group_are_cut_to_equal_shares_of_a_row(
    tmp_path: Path, strategy: str, lengths: Any, first: Any, stats: tuple[int, ...]
) -> None:
    rows, _ = groups_of(tmp_path, [[9, 4], [3, 6]], sequence_len=8, truncation_strategy=strategy)
    assert [rows.row(i).lengths for i in range(len(rows))] == lengths
    assert (rows.stats.deleted, rows.stats.truncated, rows.stats.unlabelled) == stats
    if first:
        ids = rows.row(0).input_ids.tolist()
        assert [ids[:4], ids[4:]] == first


def test_a_group_with_a_document_that_has_no_label_left_is_dropped(tmp_path: Path) -> None:
    rows, _ = groups_of(tmp_path, [[9, 1], [2, 2]], sequence_len=8, truncation_strategy="right")
    assert (len(rows), rows.stats.unlabelled, rows.stats.label_tokens) == (1, 1, 2)


def test_a_row_of_padding_only_has_no_tokens_and_no_labels(tmp_path: Path) -> None:
    rows, _ = make_rows(tmp_path, [3, 3], PackSettings(sequence_len=8))
    batch = collate(rows, [None, 0])
    assert batch.input_ids[:8].tolist() == [PADDING] * 8
    assert (batch.labels[:8] == IGNORE_LABEL).all()
    assert batch.cu_seqlens.tolist() == [0, 8, 11, 14, 16, 16, 16]
    assert (batch.tokens, batch.max_seqlen) == (6, 8)


def test_loss_weights_reach_the_micro_batch_shifted_like_the_labels(tmp_path: Path) -> None:
    plain = Encoded.from_mask([10, 11, 12], [False, True, True])
    weighted = Encoded.from_mask([20, 21, 22, 23], [False, True, True, True], [1, 0.5, 0, 2])
    shard = tmp_path / "shard"
    shard.mkdir()
    with DocumentWriter(shard) as writer:
        writer.append(EncodedChunk.of([plain], **NO_ROWS))
        writer.append(EncodedChunk.of([weighted, Encoded.from_mask([30, 31], [0, 1], [0, 2])], **NO_ROWS))
        values, digest = writer.weight_values, writer.content_digest()
    assert values == [0, 1, 0.5, 2]
    documents = Documents([DocumentShard(shard, values)], digest)
    rows = pack_documents(
        DataCache(tmp_path, "rows"), documents, None, "all", PackSettings(sequence_len=10), padding_id=0
    )
    batch = collate(rows, [0])
    order = {length: first for first, length in zip((0, 4, 7), (4, 3, 2), strict=True)}
    got = {n: batch.columns["weights"][at : at + n].tolist() for n, at in order.items()}
    assert got == {4: [0.5, 0, 2, 0], 3: [1, 1, 0], 2: [2, 0]}
    assert batch.labels.tolist() == [21, -100, 23, -100, 11, 12, -100, 31, -100, -100]
    assert (batch.label_tokens, batch.loss_weight) == (5, 6.5)


def test_more_weights_than_a_byte_can_number_are_refused(tmp_path: Path) -> None:
    def weighted(first: int, count: int) -> EncodedChunk:
        ids = range(10, 11 + count)
        return EncodedChunk.of([Encoded.from_mask(ids, None, [2.0, *range(first, first + count)])], **NO_ROWS)

    with pytest.raises(UserError, match="round the weights"):
        weighted(2, 255)
    with DocumentWriter(tmp_path) as writer:
        writer.append(weighted(2, 200))
        with pytest.raises(UserError, match="round the weights"):
            writer.append(weighted(300, 200))
