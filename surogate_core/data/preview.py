"""Packed documents as text that shows which tokens are trained. Every character is visible.

Shape suffix: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from surogate_core.data.pipeline import PreparedData
    from surogate_core.data.shards import PackedRows

SHOWN_TOKENS = 600
"""Tokens of a document that are shown; the middle of a longer document is omitted."""
EXAMPLE_TOKENS = 120
"""The same for an example in a warning."""
RECORDED_EXAMPLES = 3
"""Number of documents in the record of a run."""
EXAMPLE_DOCUMENTS = 1000
"""Number of documents among which a warning's example is chosen."""

LEGEND = "⟦…⟧ trained (⟦×0.5 …⟧ with that loss weight), «…» a special token, ↵ a line's end, ⇥ a tab, · a space"
"""The legend of the marks of `plain`."""

_UNFINISHED = "�"
"""What a decoder writes for the first bytes of a character whose other bytes are in the next token."""
_LONGEST_CHARACTER = 8
"""Tokens that may be one character: a byte each, with room for a decoder that composes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedDocument:
    """One document of a packed row."""

    row: int
    number: int
    """1 for the first document of the row."""
    documents: int
    """Documents of the row."""
    input_ids: NDArray[np.int32]
    """[T] int32."""
    weights: NDArray[np.float32]
    """[T] float32: loss weight of each token, 0 if it is not trained.

    The first token is never trained, because nothing predicts it.
    """

    @property
    def trained(self) -> NDArray[np.bool_]:
        """[T] bool: whether a token carries loss."""
        return self.weights > 0

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.trained))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Adjacent tokens with the same treatment."""

    kind: Literal["token", "special", "gap"]
    """``gap`` replaces omitted tokens; its text has their number."""
    trained: bool
    weight: float
    parts: tuple[str, ...]
    """The text token by token; tokens that only together make a character are one part."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts)


def packed_documents(rows: PackedRows) -> Iterator[PackedDocument]:
    """The documents in the order of the rows."""
    for index in range(len(rows)):
        row = rows.row(index)
        end = 0
        for number, length in enumerate(row.lengths, start=1):
            start, end = end, end + length
            weights = row.weights[start:end].copy()
            weights[:1] = 0
            yield PackedDocument(
                row=index,
                number=number,
                documents=len(row.lengths),
                input_ids=row.input_ids[start:end],
                weights=weights,
            )


def segments(
    document: PackedDocument, tokenizer: PreTrainedTokenizerBase, *, limit: int = SHOWN_TOKENS
) -> list[Segment]:
    """The document as segments; of one longer than `limit` tokens the middle is a gap."""
    length = len(document.input_ids)
    if length <= limit:
        return _segments(document, tokenizer, 0, length)
    head = limit // 2
    tail = length - (limit - head)
    trained = int(np.count_nonzero(document.trained[head:tail]))
    text = f"… {tail - head:,} tokens left out, {trained:,} of them trained …"
    gap = Segment(kind="gap", trained=False, weight=0.0, parts=(text,))
    return [*_segments(document, tokenizer, 0, head), gap, *_segments(document, tokenizer, tail, length)]


def _segments(document: PackedDocument, tokenizer: PreTrainedTokenizerBase, first: int, last: int) -> list[Segment]:
    special = special_ids(tokenizer)
    ids = document.input_ids.tolist()
    found: list[Segment] = []
    start = first
    while start < last:
        weight = float(document.weights[start])
        kind: Literal["token", "special"] = "special" if ids[start] in special else "token"
        end = start + 1
        while end < last and (ids[end] in special) == (kind == "special") and document.weights[end] == weight:
            end += 1
        parts = tuple(_parts(tokenizer, ids, start, end))
        found.append(Segment(kind=kind, trained=weight > 0, weight=weight, parts=parts))
        start = end
    return found


def _parts(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int) -> Iterator[str]:
    while start < end:
        stop = start + 1
        text = _decoded(tokenizer, ids, start, stop)
        while _UNFINISHED in text and stop < min(end, start + _LONGEST_CHARACTER):
            stop += 1
            text = _decoded(tokenizer, ids, start, stop)
        if _UNFINISHED in text:  # not the beginning of a character: one token alone, so that none swallows others
            stop = start + 1
            text = _decoded(tokenizer, ids, start, stop)
        yield text
        start = stop


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int) -> str:
    """The text of some tokens as in the document; decoders treat the first token of a text differently."""
    text = _decode(tokenizer, ids[start:end])
    if start == 0:
        return text
    before = _decode(tokenizer, ids[start - 1 : start])
    both = _decode(tokenizer, ids[start - 1 : end])
    return both[len(before) :] if both.startswith(before) and _UNFINISHED not in before else text


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of special tokens, those that only the vocabulary file declares among them."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids) | frozenset(added)


# --------------------------------------------------------------------------------- as text


def visible(text: str, *, line: str = "↵\n") -> str:
    """The text with visible line ends, tabs and control characters, and visible spaces where they are easily missed.

    `line` replaces a line's end.
    """
    shown = []
    for index, character in enumerate(text):
        if character == "\n":
            shown.append(line)
        elif character == "\t":
            shown.append("⇥")
        elif character == " ":
            edge = index in (0, len(text) - 1)
            run = text[index - 1 : index] == " " or text[index + 1 : index + 2] in (" ", "\n")
            shown.append("·" if edge or run else " ")
        elif not character.isprintable() or character in "⟦⟧«»":
            shown.append(character.encode("unicode_escape").decode("ascii"))
        else:
            shown.append(character)
    return "".join(shown)


def plain(parts: list[Segment], *, line: str = "↵\n") -> str:
    """Segments as text without colours; `LEGEND` explains the marks."""
    shown: list[str] = []
    open_weight: float | None = None
    for segment in parts:
        weight = segment.weight if segment.trained else None
        if weight != open_weight:
            if open_weight is not None:
                shown.append("⟧")
            if weight is not None:
                shown.append("⟦" if weight == 1 else f"⟦×{weight:g} ")
            open_weight = weight
        match segment.kind:
            case "special":
                shown += [f"«{visible(part, line=line)}»" for part in segment.parts]
            case "gap":
                shown.append(f"{line[1:]}{segment.text}{line[1:]}" if line.endswith("\n") else f" {segment.text} ")
            case "token":
                shown.append(visible(segment.text, line=line))
    if open_weight is not None:
        shown.append("⟧")
    return "".join(shown)


def first_and_last(document: PackedDocument, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first and the last trained token with their positions, in words."""
    positions = np.flatnonzero(document.trained).tolist()
    if not positions:
        return "none trained"
    ids = document.input_ids.tolist()
    texts = [visible(_decoded(tokenizer, ids, i, i + 1), line="↵") for i in (positions[0], positions[-1])]
    return f"first trained '{texts[0]}' (#{positions[0]}), last trained '{texts[1]}' (#{positions[-1]})"


def examples(rows: PackedRows, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The first packed documents for the record of a run: their place, their tokens, and the text with its marks."""
    return [
        {
            "row": document.row,
            "document": document.number,
            "tokens": len(document.input_ids),
            "trained_tokens": document.trained_tokens,
            "text": plain(segments(document, tokenizer)),
        }
        for document in islice(packed_documents(rows), RECORDED_EXAMPLES)
    ]


def suspicious_examples(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A document as plain text, for data of which almost nothing is trained, or everything although the configuration
    does not ask for it.

    Such data has a warning in its report; the example shows why.
    """
    wanted = []
    if any(dataset.trains_almost_nothing for dataset in data.report.datasets):
        wanted.append(("almost nothing", False))
    if any(dataset.trains_prompts for dataset in data.report.datasets):
        wanted.append(("everything", True))
    if not wanted:
        return []
    sample = list(islice(packed_documents(data.train), EXAMPLE_DOCUMENTS))
    examples = []
    for what, most in wanted:
        # The clearest case; among equals the shortest, which is shown whole.
        document = min(sample, key=lambda d: ((-_share(d) if most else _share(d)), len(d.input_ids)))
        text = plain(segments(document, tokenizer, limit=EXAMPLE_TOKENS), line="↵")
        examples.append(
            f"An example in which {what} is trained ({document.trained_tokens:,} of "
            f"{len(document.input_ids):,} tokens; {first_and_last(document, tokenizer)}): {text}  ({LEGEND})"
        )
    return examples


def _share(document: PackedDocument) -> float:
    return document.trained_tokens / max(1, len(document.input_ids) - 1)
