"""What `surogate tokenize` prints: the report as JSON or as tables, and documents with their label mask."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from surogate_core.data import preview
from surogate_core.data.report import BAD_ROWS_SHOWN, copies_text, list_some
from surogate_core.files.paths import cache_root

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from surogate_core.config.schema import RunConfig
    from surogate_core.data.packing import PackStats
    from surogate_core.data.pipeline import PreparedData
    from surogate_core.data.shards import PackedRows

PIPE_WIDTH = 140
"""Columns where there is no terminal to ask."""
BAD_ROWS_LISTED = 20
SAMPLED_ROWS = 20_000
"""Rows whose documents are measured; of more, as many are taken evenly."""
PERCENTILES = (50, 90, 99, 100)

TRAINED_STYLES = ("green", "bright_green")
PROMPT_STYLES = ("dim", "dim italic")
"""Two each, in turn, so that the borders of tokens are seen."""


def console() -> Console:
    """Standard output; colours where it is a terminal and ``NO_COLOR`` is not set."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An ASCII terminal gets escapes for what it cannot show, not an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


# ----------------------------------------------------------------------------------- report


def report_of(
    config: RunConfig,
    data: PreparedData,
    *,
    group: int,
    notes: Sequence[str],
    examples: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The report as JSON-able values; `show` prints the same. `group`: documents that count as one."""
    report = data.report
    sets = [{**dataclasses.asdict(d), "trained_share": d.label_tokens / max(1, d.tokens)} for d in report.datasets]
    return {
        "task": config.task,
        "group": group,
        "sequence_len": config.sequence_len,
        "seconds": round(seconds, 3),
        "cache": {
            "directory": str(cache_root(config.data_cache_dir)),
            "used": all(d.cached for d in report.datasets),
        },
        "digest": data.digest,
        "datasets": sets,
        "train": _rows_of(data.train, report.train),
        "eval": _rows_of(data.eval, report.eval) if data.eval is not None and report.eval is not None else None,
        "copies": report.copies,
        "bad_row_count": report.bad_row_count,
        "bad_rows": [dataclasses.asdict(row) for row in report.bad_rows],
        "warnings": [*notes, *report.notes, *report.warnings],
        "examples": list(examples),
    }


def _rows_of(rows: PackedRows, stats: PackStats) -> dict[str, Any]:
    lengths, sampled = _document_lengths(rows)
    percentiles = np.percentile(lengths, PERCENTILES, method="higher").astype(int).tolist()
    return {
        **dataclasses.asdict(stats),
        "fill": rows.fill,
        "trained_share": stats.label_tokens / max(1, stats.tokens),
        "document_lengths": {
            **{("max" if p == 100 else f"p{p}"): n for p, n in zip(PERCENTILES, percentiles, strict=True)},
            "sampled": sampled,
        },
    }


def _document_lengths(rows: PackedRows) -> tuple[NDArray[np.int64], bool]:
    """(tokens of the packed documents, whether only a sample of the rows was measured)."""
    sampled = len(rows) > SAMPLED_ROWS
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).astype(np.int64))
    return np.array([n for index in chosen.tolist() for n in rows.row(index).lengths], np.int64), sampled


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report as tables and sentences."""
    for d in report["datasets"]:
        chosen = f", read as {d['chosen']}" if d["chosen"] else ""
        unread = f"; not read: {', '.join(map(repr, d['unread']))}" if d["unread"] else ""
        console.print(Text.assemble((d["key"], "bold"), f": {d['path']}{chosen}{unread}"), soft_wrap=True)
    sets = Table("data set", title="Read", title_justify="left", title_style="bold")
    for name in ("rows", "bad", _unit(report), "tokens", "trained", "tokenised"):
        sets.add_column(name, justify="right", no_wrap=True)
    for d in report["datasets"]:
        sets.add_row(
            d["key"],
            *(f"{d[name]:,}" for name in ("rows", "bad_rows", "documents", "tokens")),
            f"{d['trained_share']:.1%}",
            "before" if d["cached"] else "now",
        )
    console.print(sets)
    console.print(_packed_table(report))
    console.print(_lengths_table(report))
    if report["copies"]:
        console.print(f"{copies_text(report['copies'])}.")
    for d in report["datasets"]:
        if d["other_splits"]:
            others = Text(f"{d['key']} leaves out {list_some(d['other_splits'])}")
            console.print(others, soft_wrap=True)
    if any(d["bad_rows"] > BAD_ROWS_SHOWN for d in report["datasets"]):  # otherwise the warnings name each of them
        console.print(f"Bad rows, {report['bad_row_count']:,} in all:", style="bold")
        for row in report["bad_rows"][:BAD_ROWS_LISTED]:
            console.print(Text(f"  {row['where']}: {row['reason']}"), soft_wrap=True)
        if report["bad_row_count"] > BAD_ROWS_LISTED:
            console.print("  …")
    for kind, key in (("warning", "warnings"), ("example", "examples")):
        for text in report[key]:
            console.print(Text.assemble((f"{kind}: ", "bold yellow"), text), soft_wrap=True)
    cache = report["cache"]
    state = "everything was there already" if cache["used"] else "the next run with this data and tokenizer finds it"
    console.print(Text(f"Cache: {cache['directory']} ({state})"), soft_wrap=True)
    console.print(f"Digest of the rows: {report['digest'][:16]}; {report['seconds']:.1f} s")


_CHANGES = {"deleted": "dropped", "truncated": "cut", "split": "split", "unlabelled": "untrained parts"}
"""Count → what a column calls it."""


def _unit(report: Mapping[str, Any]) -> str:
    """What is counted as documents: those that belong together count once."""
    return {1: "documents", 2: "pairs"}.get(report["group"], "groups")


def _packed_table(report: Mapping[str, Any]) -> Table:
    title = f"Packed into rows of {report['sequence_len']:,} tokens"
    table = Table("", title=title, title_justify="left", title_style="bold")
    sides = [(side, report[key]) for side, key in (("training", "train"), ("held out", "eval")) if report[key]]
    changes = [name for name in _CHANGES if any(rows[name] for _, rows in sides)]
    for name in ("rows", "full", _unit(report), "tokens", "trained", *(_CHANGES[name] for name in changes)):
        table.add_column(name, justify="right", no_wrap=name in ("rows", "tokens"))
    for side, rows in sides:
        documents, tokens = f"{rows['documents']:,}", f"{rows['tokens']:,}"
        full, trained = f"{rows['fill']:.1%}", f"{rows['trained_share']:.1%}"
        counts = [f"{rows[name]:,}" for name in changes]
        table.add_row(side, f"{rows['rows']:,}", full, documents, tokens, trained, *counts)
    return table


def _lengths_table(report: Mapping[str, Any]) -> Table:
    sampled = ", of a sample" if report["train"]["document_lengths"]["sampled"] else ""
    title = f"Tokens of a packed document{sampled}"
    table = Table("", title=title, title_justify="left", title_style="bold")
    for p in PERCENTILES:
        table.add_column("longest" if p == 100 else "half have at most" if p == 50 else f"{p} %", justify="right")
    for side, key in (("training", "train"), ("held out", "eval")):
        if (rows := report[key]) is not None:
            lengths = rows["document_lengths"]
            table.add_row(side, *(f"{lengths['max' if p == 100 else f'p{p}']:,}" for p in PERCENTILES))
    return table


# -------------------------------------------------------------------------------- documents


def show_documents(console: Console, data: PreparedData, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Print the first packed training documents with their label mask."""
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    if coloured:
        legend = Text.assemble(
            ("trained", TRAINED_STYLES[0]),
            ", ",
            ("not trained", PROMPT_STYLES[0]),
            ", ",
            ("special token", "reverse"),
            ", ",
            ("×0.5", "bold yellow"),
            " loss weight; ↵ a line's end, ⇥ a tab, · a space",
        )
        console.print(legend)
    else:
        console.print(Text(preview.LEGEND), soft_wrap=True)
    documents = list(islice(preview.packed_documents(data.train), count))
    elided = False
    for document in documents:
        console.print(Text(heading(document, tokenizer), style="bold cyan"), soft_wrap=True)
        parts = preview.segments(document, tokenizer)
        elided |= any(part.kind == "gap" for part in parts)
        console.print(_coloured(parts) if coloured else Text(preview.plain(parts)), soft_wrap=True)
    offered = data.report.train.documents
    console.print(
        f"── {len(documents):,} of {offered:,} documents; --debug {max(10, 2 * count)} shows more", style="bold"
    )
    if elided:
        console.print(f"   (the middle of documents over {preview.SHOWN_TOKENS} tokens is left out)")
    console.print()


def heading(document: preview.PackedDocument, tokenizer: PreTrainedTokenizerBase) -> str:
    """The line above a document."""
    tokens, trained = len(document.input_ids), document.trained_tokens
    return (
        f"── row {document.row}, document {document.number} of {document.documents}: {tokens:,} tokens, "
        f"{trained:,} trained ({trained / tokens:.1%}); {preview.first_and_last(document, tokenizer)}"
    )


def _coloured(parts: list[preview.Segment]) -> Text:
    text = Text()
    weight = 1.0
    for segment in parts:
        if segment.kind == "gap":
            text.append(f"\n{segment.text}\n", "yellow")
            continue
        if segment.trained and segment.weight != weight:
            text.append(f"×{segment.weight:g} ", "bold yellow")
        weight = segment.weight if segment.trained else 1.0
        styles = TRAINED_STYLES if segment.trained else PROMPT_STYLES
        for index, part in enumerate(segment.parts):
            style = f"{styles[0]} reverse" if segment.kind == "special" else styles[index % 2]
            text.append(preview.visible(part), style)
    return text


def debug_as_json(data: PreparedData, tokenizer: PreTrainedTokenizerBase, count: int) -> list[dict[str, Any]]:
    """The first packed training documents, each with its mask and the text that shows it."""
    return [
        {
            "row": document.row,
            "document": document.number,
            "tokens": len(document.input_ids),
            "trained_tokens": document.trained_tokens,
            "input_ids": document.input_ids.tolist(),
            "trained": document.trained.astype(int).tolist(),
            "weights": document.weights.tolist(),
            "text": preview.plain(preview.segments(document, tokenizer)),
        }
        for document in islice(preview.packed_documents(data.train), count)
    ]
