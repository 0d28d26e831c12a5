"""The report on the rows: counts, bad rows with their places, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surogate_core.data.packing import PackStats
from surogate_core.masking import masked

BAD_ROWS_KEPT = 1000
"""Bad rows whose place and reason are kept; more are only counted."""

BAD_ROWS_SHOWN = 5

UNREAD_SHOWN = 10
"""Largest number of unread fields that are named; the rest are counted."""

NOTHING_TRAINED_SHARE = 0.01
"""Below this share of trained tokens a data set is reported as (almost) untrained."""

_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that was skipped."""

    where: str
    """``file:line``, or the file and the row's number."""
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @classmethod
    def of(cls, where: str, error: ValueError) -> BadRow:
        """The reason on one line, with control characters escaped."""
        reason = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "…"
        return cls(where=masked(where), reason=masked(reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """One entry of `datasets` or `validation_datasets`, before packing."""

    key: str
    """The entry's key, e.g. ``datasets[0]``."""
    path: str
    rows: int
    """Rows read, bad ones among them."""
    bad_rows: int
    documents: int
    tokens: int
    label_tokens: int
    cached: bool
    """Whether its tokens were read from the cache."""
    chosen: str = ""
    """The type chosen from its rows and why, if the configuration says `auto`."""
    other_splits: tuple[str, ...] = ()
    """Data files of its directory that belong to another split, each with its name."""
    type: str = ""
    """The type that its rows are read as."""
    prompts_are_meant: bool = False
    """Whether every token is trained, because of the type, the task or `loss_scale`."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Field that the type does not read → rows that have something in it."""
    could_read: tuple[str, ...] = ()
    """Keys of the entry that name a field to be read."""

    @property
    def trains_almost_nothing(self) -> bool:
        """Whether almost no token carries loss."""
        return self.trained_share < NOTHING_TRAINED_SHARE

    @property
    def trains_prompts(self) -> bool:
        """Whether every token carries loss although the configuration does not ask for that."""
        return self.trained_share == 1 and not self.prompts_are_meant

    @property
    def unread_note(self) -> str:
        """A note about the fields that are not read, or nothing."""
        if not self.unread:
            return ""
        names = ", ".join(
            repr(name) + (f" (in {count:,} of {self.rows:,} rows)" if count < self.rows - self.bad_rows else "")
            for name, count in list(self.unread.items())[:UNREAD_SHOWN]
        )
        if len(self.unread) > UNREAD_SHOWN:
            names += f" and {len(self.unread) - UNREAD_SHOWN} more"
        keys = f" ({', '.join(self.could_read)} choose what is read)" if self.could_read else ""
        return f"Type {self.type} does not read {names} of {self.key} ({self.path}){keys}."

    @property
    def trained_share(self) -> float:
        """Share of the tokens that carry loss, relative to those that can: the first token of a document cannot."""
        return self.label_tokens / max(1, self.tokens - self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The whole of a run's data."""

    datasets: tuple[DatasetReport, ...]
    bad_rows: tuple[BadRow, ...]
    """The first `BAD_ROWS_KEPT` of them."""
    train: PackStats
    train_fill: float
    """Share of the training rows' positions that hold tokens."""
    eval: PackStats | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What the user should know about how the rows are read, and cannot see in the figures."""
    mixture: tuple[float, ...] = ()
    """Share of each entry of `datasets` in the tokens of an epoch, before long documents are cut."""
    copies: int = 0
    """Documents of `datasets` that are equal to an earlier one in tokens, labels and weights."""

    @property
    def rows_read(self) -> int:
        """Rows of all data sets, bad ones among them."""
        return sum(d.rows for d in self.datasets)

    @property
    def bad_row_count(self) -> int:
        """All bad rows."""
        return sum(d.bad_rows for d in self.datasets)

    @property
    def trained_share(self) -> float:
        """Share of the training tokens that carry loss."""
        return self.train.label_tokens / max(1, self.train.tokens)

    def summary(self) -> str:
        """The report as one paragraph; where the bad rows are is in `warnings`."""
        train = self.train
        parts = [
            f"{self.rows_read:,} rows read: {train.tokens:,} tokens for training in {train.rows:,} packed rows "
            f"({self.train_fill:.1%} full), {self.trained_share:.1%} of them trained"
        ]
        if self.eval is not None:
            rows = "1 row" if self.eval.rows == 1 else f"{self.eval.rows:,} rows"
            parts.append(f"{self.eval.tokens:,} tokens in {rows} held out")
        changes = [
            f"{count:,} {what}"
            for count, what in (
                (self.bad_row_count, "bad rows skipped"),
                (train.deleted, "too long and dropped"),
                (train.truncated, "too long and cut"),
                (train.split, "too long and split"),
                (train.unlabelled, "parts without a label dropped"),
            )
            if count
        ]
        if changes:
            parts.append(", ".join(changes))
        if self.copies:
            side = ", all on one side of the split" if self.eval is not None else ""
            parts.append(f"{copies_text(self.copies)}{side}")
        if len(self.mixture) > 1:
            shares = zip(self.datasets, self.mixture, strict=False)
            parts.append("mixed of " + ", ".join(f"{share:.1%} {d.key} ({d.path})" for d, share in shares))
        chosen = [f" {d.key} ({d.path}) is read as {d.chosen}." for d in self.datasets if d.chosen]
        others = [
            f" {d.key} ({d.path}) leaves out {list_some(d.other_splits)}" for d in self.datasets if d.other_splits
        ]
        unread = [f" {d.unread_note}" for d in self.datasets if d.unread]
        return "; ".join(parts) + "." + "".join(chosen + others + unread)


def list_bad_rows(bad: tuple[BadRow, ...] | list[BadRow], total: int) -> str:
    """The first few bad rows on one line."""
    return list_some([str(row) for row in bad[:BAD_ROWS_SHOWN]], total)


def copies_text(count: int) -> str:
    """A sentence on the number of copies, without a full stop."""
    return "1 document is a copy of another" if count == 1 else f"{count:,} documents are copies of others"


def list_some(items: Sequence[str], total: int | None = None) -> str:
    """The first few items on one line, and how many more there are; `total` of them where `items` are the first."""
    total = len(items) if total is None else total
    shown = "; ".join(items[:BAD_ROWS_SHOWN])
    return shown + (f"; and {total - BAD_ROWS_SHOWN:,} more." if total > BAD_ROWS_SHOWN else ".")
