"""Chunks of rows → chunks of documents, in this process or in several.

The result does not depend on the number of processes: chunks are sent and received in order. Processes are started
fresh (spawned), so they inherit neither CUDA nor threads.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.batch import IGNORE_LABEL
from surogate_core.data.contract import encoded
from surogate_core.data.encoded import RowError, members
from surogate_core.data.report import BAD_ROWS_KEPT, BadRow
from surogate_core.data.text import clock
from surogate_core.data.text.chat import encoder_of
from surogate_core.errors import MachineError, UserError
from surogate_core.host import cores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from surogate_core.bundles import DatasetFormat
    from surogate_core.data.encoded import EncodeContext, Encoded, Group
    from surogate_core.data.rows.chunks import Chunk, Place

WORTH_PROCESSES = 8 << 20
"""Size of a data set in bytes above which starting processes, which takes a few seconds, is worth it."""
MOST_PROCESSES = 16
"""Largest number of processes of `dataloader_num_workers: auto`."""
UNREAD_KEPT, LONGEST_NAME = 100, 60
"""Largest number of unread fields that are named, and of characters of a name, because data may have any number."""
_FEW = 8
"""Up to this number of chunks are encoded in this process; with more, this process encodes the first ones while the
others start.
"""
_AHEAD = 3
"""Chunks in flight per process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedChunk:
    """The documents of a chunk; a group counts as one. Shape suffixes: T tokens of all of them, D documents, G borders
    inside groups.
    """

    after: Place
    done: int
    rows: int
    bad_row_count: int
    bad_rows: list[BadRow]
    """The first of them."""
    tokens_T: NDArray[np.int32]
    weights_T: NDArray[np.uint8]
    """Index into `weight_values` of each token's loss weight."""
    weight_values: list[float]
    """Begins with 0 and 1."""
    lengths_D: NDArray[np.int64]
    label_counts_D: NDArray[np.int32]
    inner_G: NDArray[np.int64]
    """The tokens, counted from the chunk's first, at which the later documents of groups begin."""
    digests: list[bytes]
    """SHA-256 of each document."""
    ends_special: int
    """Documents whose last trained token is a special one."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Field that the format does not read → number of rows with a value in it."""

    @classmethod
    def of(cls, found: Sequence[Encoded | Group], **facts: Any) -> EncodedChunk:
        """The concatenated documents, and the other fields."""
        groups = [members(one) for one in found]
        documents = [document for group in groups for document in group]
        codes, values = _weight_codes(documents)
        lengths = [[len(d.input_ids) for d in group] for group in groups]
        starts = np.cumsum([0, *chain.from_iterable(lengths)], dtype=np.int64)[:-1]
        begins = [number > 0 for group in groups for number in range(len(group))]
        return cls(
            tokens_T=_joined([d.input_ids for d in documents], np.int32),
            weights_T=_joined(codes, np.uint8),
            weight_values=values,
            lengths_D=np.array([sum(one) for one in lengths], np.int64),
            label_counts_D=np.array([sum(d.label_tokens for d in group) for group in groups], np.int32),
            inner_G=starts[np.array(begins, np.bool_)],
            digests=[_digest(group) for group in groups],
            **facts,
        )


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Makes documents of the rows of one data set. It can be pickled if the format can."""

    format: DatasetFormat
    options: Any
    context: EncodeContext
    day: date = field(default_factory=clock.today)
    """The date in chat templates, also in another process."""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encode the rows; unusable ones are counted."""
        assert self.format.encode is not None, "a type that chooses has been replaced by its choice"
        special_ids = encoder_of(self.context.tokenizer).special_ids
        read = None if self.format.columns is None else frozenset(self.format.columns(self.options))
        unread: Counter[str] = Counter()
        documents: list[Encoded | Group] = []
        bad: list[BadRow] = []
        rows = bad_count = ends_special = 0
        for where, row in chunk.rows():
            rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                if read is not None and not row.keys() <= read:
                    names = (str(name)[:LONGEST_NAME] for name in row.keys() - read if not _is_empty(row[name]))
                    unread.update(name for name in sorted(names) if name in unread or len(unread) < UNREAD_KEPT)
                document = encoded(self.format, row, self.options, self.context)
                if any(one.label_tokens == 0 for one in members(document)):
                    raise RowError("no token of it would be trained")
            except RowError as error:
                bad_count += 1
                if len(bad) < BAD_ROWS_KEPT:
                    bad.append(BadRow.of(where, error))
                continue
            documents.append(document)
            ends_special += all(_last_label(one) in special_ids for one in members(document))
        return EncodedChunk.of(
            documents,
            after=chunk.after,
            done=chunk.done,
            rows=rows,
            bad_row_count=bad_count,
            bad_rows=bad,
            ends_special=ends_special,
            unread=dict(sorted(unread.items())),
        )


def _last_label(document: Encoded) -> int:
    """The last token that carries loss."""
    return int(document.labels[len(document.labels) - 1 - int(np.argmax(document.labels[::-1] != IGNORE_LABEL))])


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _joined(parts: list[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _weight_codes(documents: list[Encoded]) -> tuple[list[NDArray[np.uint8]], list[float]]:
    """The documents' loss weights as indices into a list of the values that occur."""
    values = [0.0, 1.0]
    codes = []
    for document in documents:
        trained = (document.labels != IGNORE_LABEL).astype(np.uint8)
        if document.weights is not None:
            for value in np.unique(document.weights).tolist():
                if value not in values:
                    values.append(value)
                    check_weights(values)
                trained[document.weights == np.float32(value)] = values.index(value)
        codes.append(trained)
    return codes, values


def check_weights(values: list[float]) -> None:
    """Raise `UserError` if a data set has more different loss weights than a byte can index."""
    if len(values) > 256:
        raise UserError("A data set has more than 254 different loss weights. Fix: round the weights of its messages.")


def _digest(group: Sequence[Encoded]) -> bytes:
    """SHA-256 of the document, or of all documents of a group."""
    digests = [_document_digest(document) for document in group]
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def _document_digest(document: Encoded) -> bytes:
    """SHA-256 of a document's tokens, labels and weights; independent of the storage of weights."""
    content = hashlib.sha256(len(document.input_ids).to_bytes(8, "little"))
    content.update(document.input_ids.tobytes())
    content.update(document.labels.tobytes())
    if document.weights is not None:
        content.update(document.weights.tobytes())
    return content.digest()


# ------------------------------------------------------------------------------- processes


def process_count(wanted: int | str, size: int) -> int:
    """Number of processes to encode a data set of `size` bytes; 0 means this process. A size of 0 is unknown and may be
    large.
    """
    if isinstance(wanted, int):
        return wanted
    found = cores()
    return min(found, MOST_PROCESSES) if found > 1 and (size == 0 or size >= WORTH_PROCESSES) else 0


def encode_chunks(encoder: RowEncoder, chunks: Iterable[Chunk], processes: int) -> Generator[EncodedChunk, None, None]:
    """The encoded chunks, in order. Raises what the format raises, and `MachineError` when a process is killed."""
    # Rows are encoded one at a time: threads of the tokenizer would only compete for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    chunks = iter(chunks)
    first = list(islice(chunks, _FEW)) if processes else []
    if len(first) < _FEW or not _can_be_sent(encoder):
        yield from map(encoder, chain(first, chunks))
        return
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(encoder,)
    )
    under_way: deque[Future[EncodedChunk]] = deque()
    try:
        with _interrupts_held():
            under_way.extend(pool.submit(_encode, chunk) for chunk in islice(chunks, _AHEAD * processes - 1))
        yield from map(encoder, first)  # while the processes start
        for chunk in chunks:
            under_way.append(pool.submit(_encode, chunk))
            if len(under_way) >= _AHEAD * processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BaseException as error:
        # A signal to the group ends the processes too, and this one with another exception than theirs.
        _end_writes(pool)
        if not isinstance(error, BrokenProcessPool):
            raise
        raise MachineError(
            "A process that tokenises was killed, most likely because memory ran out; the finished part is kept. "
            "Fix: run it again with a smaller `dataloader_num_workers` (0 uses only this process)."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_writes(pool: ProcessPoolExecutor) -> None:
    """Wake the thread that writes a chunk to a killed process, which `shutdown` waits for. Since 3.11.5 Python does so
    itself (https://github.com/python/cpython/issues/94777).
    """
    queue = getattr(pool, "_call_queue", None)
    if sys.version_info < (3, 11, 5) and queue is not None:
        queue._reader.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to all processes; this one handles it afterwards.

    A process inherits the blocked signal; a process that is still importing could not ignore it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _can_be_sent(encoder: RowEncoder) -> bool:
    """Whether the encoder can be sent to another process; it cannot if its format or options exist only in this one."""
    try:
        ForkingPickler.dumps(encoder)
    except Exception:  # pickling may raise any exception
        return False
    return True


_encoder: Callable[[Chunk], EncodedChunk] | None = None


def _start(encoder: RowEncoder) -> None:
    """Initialise this process, so that it does not outlive the process that started it."""
    global _encoder
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.join,), daemon=True).start()
    _encoder = encoder
    clock.set_day(encoder.day)


def _end_with(wait: Callable[[], None]) -> None:
    wait()
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
