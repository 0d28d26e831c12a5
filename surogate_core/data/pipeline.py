"""From the configuration's data sets to packed rows: read, encode, keep, split, mix, pack, report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.data.cache import DataCache, digest_of
from surogate_core.data.encoded import EncodeContext
from surogate_core.data.encoding import UNREAD_KEPT, RowEncoder, encode_chunks, process_count
from surogate_core.data.entries import DatasetEntry, check_task, choose_format, parse_entries
from surogate_core.data.mixture import count_copies, keep_copies_together, mix, split_documents
from surogate_core.data.packing import PackSettings
from surogate_core.data.report import BAD_ROWS_KEPT, BadRow, DataReport, DatasetReport, list_bad_rows, list_some
from surogate_core.data.rows.chunks import START
from surogate_core.data.rows.sources import READERS_VERSION, RowSource, open_source
from surogate_core.data.shards import (
    DOCUMENTS_VERSION,
    SHARD_VERSION,
    Documents,
    DocumentShard,
    DocumentWriter,
    PackedRows,
    pack_documents,
)
from surogate_core.data.text import clock
from surogate_core.data.text.tokenizer import padding_id, tokenizer_digest
from surogate_core.errors import UserError
from surogate_core.events import Progress
from surogate_core.files import atomic
from surogate_core.files.paths import cache_root
from surogate_core.masking import masked

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles import DatasetFormat
    from surogate_core.config.schema import RunConfig

MANY_DROPPED_SHARE = 0.1
"""Share of documents dropped because of their length above which the run warns."""

_PROGRESS_SECONDS = 0.2
_CHECK_SECONDS = 1.0
"""Seconds after which a check of the cache is shown."""
_SAVE_SECONDS = 5.0
"""Seconds between two saves; a killed tokenisation loses at most this much work."""
_STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """The data of a run."""

    train: PackedRows
    eval: PackedRows | None
    """Held-out rows; None when nothing is held out."""
    report: DataReport
    digest: str
    """Digest of the content and order of all rows; equal digests give equal micro-batches."""
    day: str | None = None
    """The date that the chat template writes into the rows."""


def prepare(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    formats: Mapping[str, DatasetFormat],
    *,
    trains_prompts: bool = False,
    group: int = 1,
    progress: Callable[[Progress], None] = lambda event: None,
) -> PreparedData:
    """Read, tokenise and pack the data sets of `config`, or map the result of an earlier run.

    `trains_prompts`: whether the task trains every token on purpose (`TaskSpec.trains_prompts`).
    `group`: documents of its groups (`TaskSpec.group`).
    Raises `ConfigError` for a wrong entry, `UserError` for missing, empty or too broken data,
    `MachineError` when the cache's disk is full.
    """
    entries = _entries(config, formats, group=group)
    encoder = _Encoder(config, tokenizer, formats, progress, trains_prompts=trains_prompts, group=group)
    loaded = [encoder.load(entry) for entry in entries]
    train_sets, eval_sets = loaded[: len(config.datasets)], loaded[len(config.datasets) :]
    packer = _Packer(config, tokenizer, encoder, progress)

    documents = _concatenated(train_sets)
    digests = documents.digests()
    split = _split(config, documents, digests, held_out=not eval_sets)
    train, passes = packer.train(documents, train_sets, split)
    held_out: PackedRows | None = None
    if eval_sets:
        measured = _concatenated(eval_sets)
        held_out = packer.pack(measured, None, "all")
        encoder.notices += _repeated(measured, digests)
    elif len(split.out):
        held_out = packer.pack(documents, [split.out], {**split.key, "side": "eval"})
    _require_rows(train, config, "datasets", encoder.notes)
    if held_out is not None and len(held_out) == 0:
        if eval_sets:
            _require_rows(held_out, config, "validation_datasets", encoder.notes)
        held_out = None
    if held_out is not None:
        # Every micro-batch of the run has the same shapes, training and evaluation alike.
        train.max_documents = held_out.max_documents = max(train.max_documents, held_out.max_documents)
        train.weighted = held_out.weighted = train.weighted or held_out.weighted

    report = DataReport(
        datasets=tuple(item.report for item in loaded),
        bad_rows=tuple(row for item in loaded for row in item.bad_rows)[:BAD_ROWS_KEPT],
        train=train.stats,
        train_fill=train.fill,
        eval=held_out.stats if held_out is not None else None,
        notes=tuple(encoder.notes),
        mixture=_mixture(train_sets, documents, passes),
        copies=split.copies,
        warnings=(*encoder.notices, *_warnings(config, loaded, train, held_out)),
    )
    digest = digest_of([train.digest, held_out.digest if held_out is not None else None])
    return PreparedData(train=train, eval=held_out, report=report, digest=digest, day=encoder.day)


def _entries(config: RunConfig, formats: Mapping[str, DatasetFormat], *, group: int) -> list[DatasetEntry]:
    """The checked entries of the configuration, `validation_datasets` last."""
    entries = [
        *parse_entries(config.datasets, formats, key="datasets"),
        *parse_entries(config.validation_datasets, formats, key="validation_datasets"),
    ]
    for entry in entries:
        check_task(entry, config.task, group=group, formats=formats)
    if not config.datasets:
        raise UserError("`datasets` is empty. Fix: name at least one data set, e.g. dataset=embedded.")
    return entries


def _repeated(measured: Documents, trained: NDArray[Any]) -> list[str]:
    """A warning where held-out documents have the digests of `trained` ones."""
    repeated = int(np.isin(measured.digests(), trained).sum())
    if not repeated:
        return []
    return [
        f"{repeated:,} of {len(measured):,} documents of validation_datasets are in datasets too: the held-out "
        f"loss is partly measured on training data."
    ]


# ---------------------------------------------------------------------- split and packed rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The documents to train on, and the held-out documents."""

    kept: NDArray[np.int64]
    out: NDArray[np.int64]
    key: Mapping[str, Any]
    """Everything that determines the split, for the cache's key."""
    copies: int
    """Documents that are copies of earlier ones."""


def _split(config: RunConfig, documents: Documents, digests: NDArray[Any], *, held_out: bool) -> _Split:
    """The split by `validation_split_ratio`, copies of a document on one side; everything is kept unless `held_out`."""
    ratio = config.validation_split_ratio if held_out else 0.0
    kept, out = split_documents(len(documents), ratio, config.eval_seed)
    key: dict[str, Any] = {"ratio": ratio, "seed": config.eval_seed}
    copies = count_copies(digests)
    if copies and len(out):
        plain = out
        kept, out = keep_copies_together(kept, out, digests)
        key |= {} if np.array_equal(out, plain) else {"copies": "together"}
    return _Split(kept=kept, out=out, key=key, copies=copies)


class _Packer:
    """Packs documents into rows, or maps the rows that an earlier run packed."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        encoder: _Encoder,
        progress: Callable[[Progress], None],
    ):
        self._config, self._encoder, self._progress = config, encoder, progress
        self._padding = padding_id(tokenizer)
        self._cache = DataCache(encoder.root, "rows")
        self._settings = PackSettings(
            sequence_len=config.sequence_len,
            max_length=config.max_length,
            truncation_strategy=config.truncation_strategy,
            sample_packing=config.sample_packing,
        )

    def pack(self, documents: Documents, chosen: Sequence[NDArray[np.int64]] | None, key: Any) -> PackedRows:
        """The chosen documents, or all, as rows; `key` says how they were chosen."""
        return pack_documents(
            self._cache,
            documents,
            chosen,
            key,
            self._settings,
            padding_id=self._padding,
            progress=lambda done, total: self._progress(
                Progress(task="pack", done=done, total=total, unit="documents")
            ),
            damaged=self._encoder.notices.append,
        )

    def train(
        self, documents: Documents, sets: Sequence[_Loaded], split: _Split
    ) -> tuple[PackedRows, Sequence[NDArray[np.int64]] | None]:
        """The training rows, mixed by the data sets' weights, and the documents of each pass if not all once."""
        weights = [item.weight for item in sets]
        key: dict[str, Any] = {**split.key, "side": "train"} if len(split.out) else {}
        seed = self._config.train_seed
        if any(weight != 1 for weight in weights):
            key |= {"weights": weights, "train_seed": seed}
        passes = mix(split.kept, [len(item.shard) for item in sets], weights, seed) if key else None
        return self.pack(documents, passes, key or "all"), passes


# -------------------------------------------------------------------------------- encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    shard: DocumentShard
    weight: float
    digest: str
    report: DatasetReport
    bad_rows: tuple[BadRow, ...]
    ends_special: float
    """Share of the documents whose last trained token is a special one."""
    left_out: tuple[str, ...]
    """Files of its directory that are not read, each with the reason."""


class _Encoder:
    """Turns entries into document shards and counts bad rows over all of them."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        formats: Mapping[str, DatasetFormat],
        progress: Callable[[Progress], None],
        *,
        trains_prompts: bool,
        group: int,
    ):
        import tokenizers
        import transformers

        self.root = cache_root(config.data_cache_dir)
        self._cache = DataCache(self.root, "documents")
        self._max_bad_rows = config.max_bad_rows
        self._bad_rows: list[BadRow] = []
        self._bad_row_count = 0
        self.notices: list[str] = []
        """Further warnings of the report."""
        self.notes: list[str] = []
        self._formats = formats
        self._task, self._group = config.task, group
        self._trains_prompts = trains_prompts or config.loss_scale == "all"
        self._progress = progress
        self._workers = config.dataloader_num_workers
        self._context = EncodeContext(
            tokenizer=tokenizer,
            sequence_len=config.sequence_len,
            truncation_strategy=config.truncation_strategy,
            system=config.system,
            use_chat_template=config.use_chat_template,
            max_length=config.max_length,
            loss_scale=config.loss_scale,
        )
        self._key = {
            "shard_version": SHARD_VERSION,
            "readers_version": READERS_VERSION,
            "documents_version": DOCUMENTS_VERSION,
            "tokenizer": tokenizer_digest(tokenizer),
            "sequence_len": config.sequence_len,
            "truncation_strategy": config.truncation_strategy,
            "system": config.system,
            "use_chat_template": config.use_chat_template,
            "max_length": config.max_length,
            "loss_scale": config.loss_scale,
            # Both libraries determine tokens: one renders templates, the other splits text.
            "libraries": [transformers.__version__, tokenizers.__version__],
        }
        self.day = clock.today().isoformat() if config.use_chat_template and clock.shows_date(tokenizer) else None
        if self.day is not None:
            self._key["date"] = self.day
            self.notes.append(f"The chat template writes the date, which is {self.day} in all rows of this run.")

    def load(self, entry: DatasetEntry) -> _Loaded:
        """The entry's documents, encoded now unless the cache has them."""
        source = open_source(entry.source)
        entry = choose_format(entry, source, self._formats)
        check_task(entry, self._task, group=self._group, formats=self._formats)
        if entry.format.note is not None and (note := entry.format.note(entry.options, self._context)):
            self.notes.append(f"{entry.key} ({masked(entry.source.path)}): {note}")
        task = f"tokenise {source.name}"
        cached = True

        def build(directory: Path) -> Mapping[str, Any]:
            nonlocal cached
            cached = False
            return self._encode(entry, source, directory, task)

        def waiting() -> None:
            self._progress(Progress(task=f"wait for another run to {task}", done=0, unit="rows"))

        began = time.monotonic()

        def checked(done: int, total: int) -> None:
            if time.monotonic() - began > _CHECK_SECONDS:
                check = f"check the tokens of {source.name}"
                self._progress(Progress(task=check, done=done >> 20, total=total >> 20, unit="MiB"))

        found = self._cache.get_or_build(
            self._key_of(entry, source),
            build,
            waiting=waiting,
            damaged=self.notices.append,
            checked=checked,
            resumable=True,
        )
        if cached:
            rows = [BadRow(**row) for row in found.facts["bad_rows"]]
            self._count_bad_rows(entry, rows, found.facts["bad_row_count"])
        facts = found.facts
        return _Loaded(
            shard=DocumentShard(found.path, facts["weight_values"]),
            weight=entry.source.weight,
            digest=facts["digest"],
            bad_rows=tuple(BadRow(**row) for row in facts["bad_rows"]),
            ends_special=facts["ends_special"] / facts["documents"],
            left_out=source.left_out,
            report=DatasetReport(
                key=entry.key,
                path=masked(entry.source.path),
                cached=cached,
                chosen=entry.chosen,
                other_splits=source.other_splits,
                type=entry.format.name,
                unread=facts.get("unread", {}),
                prompts_are_meant=entry.format.trains_prompts or self._trains_prompts,
                could_read=_field_keys(entry.options),
                bad_rows=facts["bad_row_count"],
                **{name: facts[name] for name in ("rows", "documents", "tokens", "label_tokens")},
            ),
        )

    def _key_of(self, entry: DatasetEntry, source: RowSource) -> str:
        """A digest of everything that determines the entry's documents."""
        of_format = [entry.format.name, entry.format.version]
        options = dataclasses.asdict(entry.options)
        return digest_of({**self._key, "source": source.digest, "format": of_format, "options": options})

    def _encode(self, entry: DatasetEntry, source: RowSource, directory: Path, task: str) -> Mapping[str, Any]:
        encoder = RowEncoder(format=entry.format, options=entry.options, context=self._context)
        state = _saved_state(directory)
        rows, bad_count, ends_special = state["counts"] if state else (0, 0, 0)
        unread: Counter[str] = Counter(state.get("unread") if state else None)
        bad = [BadRow(**row) for row in state["bad_rows"]] if state else []
        self._count_bad_rows(entry, bad, bad_count)
        start = tuple(state["place"]) if state else START
        shown = saved = time.monotonic()
        with (
            DocumentWriter(directory, state["documents"] if state else None) as writer,
            closing(encode_chunks(encoder, source.chunks(start), process_count(self._workers, source.size))) as chunks,
        ):
            for chunk in chunks:
                self._count_bad_rows(entry, chunk.bad_rows, chunk.bad_row_count)
                bad += chunk.bad_rows[: BAD_ROWS_KEPT - len(bad)]
                writer.append(chunk)
                rows, bad_count = rows + chunk.rows, bad_count + chunk.bad_row_count
                ends_special += chunk.ends_special
                unread.update(chunk.unread)
                unread = Counter(dict(unread.most_common(UNREAD_KEPT)))
                now = time.monotonic()
                if now - shown > _PROGRESS_SECONDS:
                    shown = now
                    # Estimate: the remaining rows are as long as those that were read.
                    total = max(rows, round(rows * source.size / chunk.done)) if chunk.done else 0
                    self._progress(Progress(task=task, done=rows, total=total, unit="rows"))
                if now - saved > _SAVE_SECONDS:
                    saved = now
                    writer.flush()
                    state = {
                        "place": chunk.after,
                        "counts": (rows, bad_count, ends_special),
                        "unread": unread,
                        "bad_rows": [dataclasses.asdict(row) for row in bad],
                        "documents": writer.state(),
                    }
                    atomic.replace_file(directory / _STATE, json.dumps(state).encode(), key="data_cache_dir")
            if writer.documents == 0:
                why = f" Bad rows: {list_bad_rows(bad, bad_count)}" if bad else ""
                empty = "has no rows" if rows == 0 else f"has no usable row among {rows:,}"
                raise UserError(
                    f"{entry.key}: data set {entry.source.path} {empty}.{why} "
                    f"Fix: check `path`, `type` ({entry.format.name}) and the type's fields."
                )
            self._progress(Progress(task=task, done=rows, total=rows, unit="rows"))
            (directory / _STATE).unlink(missing_ok=True)
            return {
                "path": masked(entry.source.path),
                "rows": rows,
                "bad_row_count": bad_count,
                "bad_rows": [dataclasses.asdict(row) for row in bad],
                "documents": writer.documents,
                "tokens": writer.tokens,
                "label_tokens": writer.label_tokens,
                "weight_values": writer.weight_values,
                "ends_special": ends_special,
                "unread": dict(sorted(unread.items())),
                "digest": writer.content_digest(),
            }

    def _count_bad_rows(self, entry: DatasetEntry, rows: Sequence[BadRow], count: int) -> None:
        """Record `count` bad rows, of which `rows` are the first; above the limit the run ends."""
        self._bad_row_count += count
        self._bad_rows += rows[: BAD_ROWS_KEPT - len(self._bad_rows)]
        if self._bad_row_count > self._max_bad_rows:
            raise UserError(
                f"{entry.key}: more than max_bad_rows={self._max_bad_rows} malformed rows: "
                f"{list_bad_rows(self._bad_rows[: self._max_bad_rows + 1], self._max_bad_rows + 1)} "
                f"Fix: mend the rows, check `type` and its fields, or raise `max_bad_rows`."
            )


def _saved_state(directory: Path) -> dict[str, Any] | None:
    """The saved state of a build that was killed, if it had saved one."""
    try:
        state: dict[str, Any] = json.loads((directory / _STATE).read_bytes())
    except (FileNotFoundError, ValueError):  # a crash of the machine may leave it empty
        return None
    return state


def _field_keys(options: Any) -> tuple[str, ...]:
    """The keys of an entry that name a field of its rows."""
    return tuple(f.name for f in dataclasses.fields(options) if f.name.endswith("_field"))


def _concatenated(sets: list[_Loaded]) -> Documents:
    return Documents([item.shard for item in sets], digest_of([item.digest for item in sets]))


def _mixture(
    sets: list[_Loaded], documents: Documents, passes: Sequence[NDArray[np.int64]] | None
) -> tuple[float, ...]:
    """Each data set's share of the tokens of an epoch."""
    if passes is None:
        tokens = np.array([item.report.tokens for item in sets], np.float64)
    else:
        borders = np.cumsum([0, *(len(item.shard) for item in sets)])
        tokens = np.zeros(len(sets))
        for part in passes:
            ends = np.concatenate([[0], np.cumsum(documents.length(part))])
            tokens += np.diff(ends[np.searchsorted(part, borders)])
    return tuple((tokens / tokens.sum()).tolist())


# ------------------------------------------------------------------------------- judgement


def _longest(config: RunConfig) -> str:
    """The key that limits a document's length, and its value."""
    key = "sequence_len" if config.max_length is None else "max_length"
    return f"{key}={getattr(config, key)}"


def _require_rows(rows: PackedRows, config: RunConfig, key: str, notes: Sequence[str]) -> None:
    said = "".join(f" {note}" for note in notes)
    if len(rows) == 0 and config.truncation_strategy != "delete":
        other = "left" if config.truncation_strategy == "right" else "right"
        raise UserError(
            f"{key}: none of the {rows.stats.documents:,} documents has a trained token left within "
            f"{_longest(config)} with truncation_strategy={config.truncation_strategy}.{said} "
            f"Fix: raise it, or set truncation_strategy to {other}."
        )
    if len(rows) == 0:
        raise UserError(
            f"{key}: none of the {rows.stats.documents:,} documents fits into {_longest(config)} "
            f"with truncation_strategy={config.truncation_strategy}.{said} "
            f"Fix: raise it, or set truncation_strategy to right or split."
        )


def _warnings(config: RunConfig, loaded: list[_Loaded], train: PackedRows, held_out: PackedRows | None) -> list[str]:
    warnings = []
    for item in loaded:
        report = item.report
        name = f"{report.key} ({report.path})"
        if report.trains_almost_nothing:
            warnings.append(
                f"{name}: only {report.trained_share:.2%} of the tokens are trained; "
                f"check that the assistant's turns are where the data set's type looks for them."
            )
        elif report.trains_prompts:
            warnings.append(
                f"{name}: every token is trained, prompts included; "
                f"check which tokens the chat template marks as the assistant's."
            )
        if item.ends_special < 0.5:
            warnings.append(
                f"{name}: most documents do not end in a trained end-of-turn token, so the model will not learn "
                f"to stop; check the tokenizer's chat template."
            )
        if item.left_out:
            files = "file is" if len(item.left_out) == 1 else "files are"
            warnings.append(f"{name}: {len(item.left_out):,} {files} not read: {list_some(item.left_out)}")
        if report.bad_rows:
            warnings.append(
                f"{name}: {report.bad_rows:,} of {report.rows:,} rows were malformed and skipped: "
                f"{list_bad_rows(item.bad_rows, report.bad_rows)}"
            )
    for key, rows in (("training", train), ("held-out", held_out)):
        if rows is not None and rows.stats.deleted > MANY_DROPPED_SHARE * rows.stats.documents:
            warnings.append(
                f"{rows.stats.deleted:,} of {rows.stats.documents:,} {key} documents are longer than "
                f"{_longest(config)} and were dropped; raise it, or set truncation_strategy."
            )
        # A document that is cut at one end may have nothing left to train; a split one has other parts.
        cut_off = rows.stats.unlabelled if rows is not None and config.truncation_strategy in ("left", "right") else 0
        if rows is not None and cut_off > MANY_DROPPED_SHARE * rows.stats.documents:
            warnings.append(
                f"{cut_off:,} of {rows.stats.documents:,} {key} documents have no trained token within "
                f"{_longest(config)} and were dropped; raise it, or set another truncation_strategy."
            )
    if held_out is None and config.validation_split_ratio > 0:
        warnings.append("Nothing is held out: too few documents differ from each other, so there is no evaluation.")
    return warnings
