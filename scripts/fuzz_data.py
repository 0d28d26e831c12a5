"""Feed broken data sets to `prepare` and check that each is either read or refused cleanly.

    python scripts/fuzz_data.py [--cases 3000] [--seed 0] [--failures 20]

A case is a file or directory (JSON lines, a JSON array, CSV, Parquet, Arrow; whole, cut short, corrupted, in another
encoding, empty, looping links, …), a data set type and a few keys. What may happen: success, or a `SurogateError` whose
message is one printable line that names the data. No row is lost: the rows that a plain reader finds are trained or
reported, and what is trained is in the file. After either, the cache holds only whole entries, locks and resumable
`*.partial` work, and a second call gives the same. No case takes over 10 s. Prints the counts, and each failure so that
it can be repeated.
Exit 0 when there are no failures, else 1.
"""

from __future__ import annotations

import argparse
import bz2
import csv
import dataclasses
import gzip
import io
import json
import logging
import lzma
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_checks import Hang, check_counts, left_behind, time_limit

BATCH = 50
"""Cases that are drawn together."""
LONGEST_MESSAGE = 4000
EMBEDDED_TOKENIZER = "pkg://surogate_dataset_chat/embedded/tokenizer"
RAISING = "{{ raise_exception('roles must alternate') }}"
UNMARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEMPLATES: Mapping[str, str | None] = {"own": "", "none": None, "raising": RAISING, "unmarked": UNMARKED}
CHOSEN = ("own",) * 4 + ("unmarked",) * 4 + ("none", "raising")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One data set and how it is asked for."""

    kind: str
    """The keys by which counts are grouped."""
    files: tuple[tuple[str, bytes], ...] = ()
    """(name below the case's directory, content)."""
    special: str = ""
    """Something that is no file with content: ``loop``, ``broken link`` …"""
    path: str
    """The entry's `path`, below the case's directory."""
    entry: Mapping[str, Any]
    keys: Mapping[str, Any]
    template: str

    def write(self, directory: Path) -> Path:
        """Make the files; the path to give to the entry."""
        for name, content in self.files:
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        place = directory / self.path
        match self.special:
            case "loop":
                (place / "again").symlink_to(place, target_is_directory=True)
            case "broken link" | "link to itself":
                place.symlink_to(place if self.special == "link to itself" else directory / "absent")
            case "pipe":
                os.mkfifo(place)
            case "broken link inside":
                (place / "a.jsonl").symlink_to(place / "absent.jsonl")
            case "directory named as a file":
                place.mkdir(parents=True)
            case "unreadable":
                place.chmod(0)
        return place


# ------------------------------------------------------------------------------------- rows

WORDS = st.sampled_from(
    ["hello there", "", " ", "\n", "<|im_end|>", "<|im_start|>user\n", "\x00", "\x1b[31mred", "\ud800", "é你🦊\u2028",
     "{{ x }}", "{% raw %}", "word " * 400, "\ufeff", "\r", "a\u202eb", "⟦", "</s>", "%s", "{}"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([10**400, -1, 0, 2**63, 1e308, float("nan"), float("inf"), -0.0]),
    WORDS,
    st.text(max_size=30),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
TEXTS = st.one_of(st.just("A sentence that is learnt."), st.text(min_size=1, max_size=40), WORDS)
ROLES = st.one_of(st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "User", ""]), SCALARS)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """Turns, most of them well-formed."""
    turns: list[Any] = []
    if draw(st.booleans()):
        turns.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.sampled_from([1, 2, 3, 0]))):
        turns += [{"role": "user", "content": draw(TEXTS)}, {"role": "assistant", "content": draw(TEXTS)}]
    if turns and draw(st.integers(0, 3)) == 3:
        index = draw(st.integers(0, len(turns) - 1))
        turn = dict(turns[index])
        change = draw(st.integers(0, 6))
        if change == 0:
            turn["role"] = draw(ROLES)
        elif change == 1:
            turn["content"] = draw(VALUES)
        elif change == 2:
            del turn[draw(st.sampled_from(["role", "content"]))]
        elif change == 3:
            turn[draw(st.sampled_from(["train", "weight", "name", "tool_calls", "thinking"]))] = draw(VALUES)
        elif change == 4:
            turn["content"] = [{"type": draw(st.sampled_from(["text", "image"])), "text": draw(TEXTS)}]
        elif change == 5:
            turn = draw(VALUES)
        turns[index] = turn
    return turns


ROW_FIELDS = {
    "text": ["text"],
    "instruction": ["instruction", "input", "output", "system"],
    "preference": ["prompt", "chosen", "rejected"],
    "conversation": ["messages", "system", "tools"],
    "auto": ["messages", "text", "instruction", "output", "conversations", "prompt", "chosen"],
}


@st.composite
def rows(draw: st.DrawFn, type_: str, shape: str) -> Any:
    """A row of the type; one in four is wrong somewhere."""
    row: Any
    if shape == "text":
        row = {"text": draw(TEXTS)}
    elif shape == "instruction":
        row = {"instruction": draw(TEXTS), "input": draw(TEXTS), "output": draw(TEXTS)}
    elif shape == "preference":
        row = {"prompt": draw(TEXTS), "chosen": draw(TEXTS), "rejected": draw(TEXTS)}
    elif shape == "sharegpt":
        row = {"conversations": [{"from": "human", "value": draw(TEXTS)}, {"from": "gpt", "value": draw(TEXTS)}]}
    else:
        row = {"messages": draw(messages())}
    if draw(st.integers(0, 3)) == 3:
        change = draw(st.integers(0, 3))
        if change == 0:
            row[draw(st.sampled_from(ROW_FIELDS[type_]))] = draw(VALUES)
        elif change == 1:
            row.pop(draw(st.sampled_from(sorted(row))))
        elif change == 2:
            row = draw(VALUES)
        else:
            row = {f"{k}s": v for k, v in row.items()}
    return row


@st.composite
def row_lists(draw: st.DrawFn, type_: str) -> list[Any]:
    """Rows of one file: most of them alike, as `auto` needs it."""
    shapes = ["text", "instruction", "conversation", "sharegpt"] if type_ == "auto" else [type_]
    shape = draw(st.sampled_from(shapes))
    return draw(st.lists(rows(type_, shape), min_size=draw(st.sampled_from([3, 1, 0])), max_size=8))


# ------------------------------------------------------------------------------------ files


@st.composite
def corrupted(draw: st.DrawFn, content: bytes) -> bytes:
    """The content, unchanged in most cases, otherwise cut, flipped, with inserted bytes, or repeated."""
    how = draw(st.integers(0, 12))
    how = max(how - 7, 0) + 4
    if not content or how < 5:
        return content
    at = draw(st.integers(0, len(content) - 1))
    if how == 5:
        return content[:at]
    if how == 6:
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    if how == 7:
        extra = draw(st.sampled_from([b"\x00", b"\x00" * 100, b"\xff\xfe", b"\xef\xbb\xbf", b"\n\n\n", b"\r", b'"']))
        return content[:at] + extra + content[at:]
    if how == 8:
        return content[at:]
    return content + content


ODD_LINES = (
    "", "   ", "{", "}", "null", "[]", "{}", "true", "1" * 6000, "[" * 3000, '{"text":' * 2000, "NaN", '{"text": "\0"}',
    '{"text": "a", "text": "b"}', '{"text": "a"}{"text": "b"}', '[{"text": "a"}, {"text": "b"}]', '[[{"text": "a"}]]',
    '{"text": "a", "weight": 1e999}', '{"text": "a", "n": ' + "1" * 400 + "}", '{"n": ' + "[" * 980 + "]" * 980 + "}",
    '{\n"text": "over lines"\n}', '{"text": "a"} {"text"', '{"text": "a"}\0', '\ufeff{"text": "a"}', '"text"',
    "{'text': 'a'}", '{"text": "a"},', "// no", '{"text": "\\ud800"}',
)  # fmt: skip
ENCODINGS = (*["utf-8"] * 20, "utf-8-sig", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "latin-1")


@st.composite
def json_lines(draw: st.DrawFn, type_: str) -> bytes:
    """Lines of JSON, with odd ones among them."""
    lines = [json.dumps(row) for row in draw(row_lists(type_))]
    for line in draw(st.lists(st.sampled_from(ODD_LINES), max_size=2)):
        lines.insert(draw(st.integers(0, len(lines))), line)
    end = draw(st.sampled_from(["\n", "\n", "\n", "\r\n", "\r"]))
    text = end.join(lines) + draw(st.sampled_from(["", end]))
    return draw(corrupted(text.encode(draw(st.sampled_from(ENCODINGS)), "replace")))


@st.composite
def json_array(draw: st.DrawFn, type_: str) -> bytes:
    """One array of rows, or something near it."""
    made = draw(row_lists(type_))
    indent = draw(st.sampled_from([None, 2]))
    text = json.dumps(made, indent=indent)
    wrong = draw(st.integers(0, 9))
    if wrong == 6:
        text = json.dumps({"data": made}, indent=indent)
    elif wrong == 7:
        text = f"{text[:-1]},]"
    elif wrong == 8:
        text = f"[{draw(st.sampled_from(ODD_LINES))},{text[1:]}"
    elif wrong == 9:
        text += draw(
            st.sampled_from([" ", "\n", "]", "garbage", text, "\n" + text, ",{}", '\n{"text": "after"}', "[", "1"])
        )
    return draw(corrupted(text.encode(draw(st.sampled_from(ENCODINGS)), "replace")))


@st.composite
def table(draw: st.DrawFn, type_: str) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows of cells)."""
    columns = ROW_FIELDS[type_][:3]
    if draw(st.integers(0, 3)) == 3:
        columns = draw(st.lists(st.sampled_from(ROW_FIELDS[type_]), unique=True, min_size=1, max_size=4))
    cells = st.one_of(TEXTS, TEXTS, TEXTS, TEXTS, SCALARS)
    least = draw(st.sampled_from([3, 1, 0]))
    return columns, draw(st.lists(st.tuples(*(cells for _ in columns)).map(list), min_size=least, max_size=8))


@st.composite
def comma_separated(draw: st.DrawFn, type_: str, separator: str) -> bytes:
    """CSV as a spreadsheet writes it, or with rows of other lengths."""
    columns, made = draw(table(type_))
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator)
    writer.writerow(columns)
    for row in made:
        ragged = draw(st.integers(0, 11)) == 11
        try:
            writer.writerow([*row, "more"] if ragged else row)
        except csv.Error:  # a NUL, in some versions of Python
            continue
    if draw(st.integers(0, 9)) == 9:
        text.write('"an open quote')
    return draw(corrupted(text.getvalue().encode(draw(st.sampled_from(ENCODINGS)), "replace")))


@st.composite
def arrow_table(draw: st.DrawFn, type_: str, form: str) -> bytes:
    """A table as Parquet or as Arrow's file or stream format; columns of several types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns, made = draw(table(type_))
    arrays = []
    for index, name in enumerate(columns):
        values = [row[index] for row in made]
        kind = draw(st.integers(0, 9))
        if name == "messages" and kind < 8:
            turn = {"role": "user", "content": "hi"}
            answer = {"role": "assistant", "content": draw(TEXTS).encode("utf-8", "replace").decode()}
            arrays.append(pa.array([[turn, answer] for _ in values]))
        elif kind == 9:
            arrays.append(pa.array([draw(st.one_of(st.none(), st.integers(-5, 5))) for _ in values], pa.int64()))
        elif kind == 8:
            arrays.append(pa.array([draw(st.binary(max_size=6)) for _ in values], pa.binary()))
        else:
            texts = [v.encode("utf-8", "replace").decode() if isinstance(v, str) else None for v in values]
            arrays.append(pa.array(texts, pa.string()))
    made_table = pa.table(dict(zip(columns, arrays, strict=True)))
    sink = io.BytesIO()
    if form == "parquet":
        pq.write_table(made_table, sink)
    else:
        new = pa.ipc.new_file if draw(st.booleans()) else pa.ipc.new_stream
        with new(sink, made_table.schema) as writer:
            writer.write_table(made_table)
    return draw(corrupted(sink.getvalue()))


SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = {".jsonl.gz": gzip.compress, ".csv.bz2": bz2.compress, ".json.xz": lzma.compress}
STEMS = st.sampled_from(
    ["data", "data", "data", "a b", "ü", "a[1]", "x*y", "a?b", "v#1", "a%20b", "a::b", "{x}", "-", "train.v1", "a=b"]
)


@st.composite
def content(draw: st.DrawFn, type_: str, suffix: str) -> bytes:
    """What a file of this suffix may hold; now and then what belongs to another one, or nothing."""
    if draw(st.integers(0, 19)) == 19:
        return b""
    if draw(st.integers(0, 19)) == 19:
        suffix = draw(st.sampled_from(SUFFIXES))
    if suffix in COMPRESSED:
        whole = COMPRESSED[suffix](draw(content(type_, Path(suffix).stem)))
        return draw(corrupted(whole)) if draw(st.integers(0, 9)) == 9 else whole
    match suffix:
        case ".jsonl" | ".ndjson":
            return draw(json_lines(type_))
        case ".json":
            return draw(st.one_of(json_array(type_), json_lines(type_)))
        case ".csv":
            return draw(comma_separated(type_, ","))
        case ".tsv":
            return draw(comma_separated(type_, "\t"))
        case ".parquet":
            return draw(arrow_table(type_, "parquet"))
        case _:
            return draw(arrow_table(type_, "arrow"))


# ------------------------------------------------------------------------------------ cases

SPECIALS = ("loop", "broken link", "link to itself", "broken link inside", "directory named as a file", "unreadable",
            "absent", "no suffix", "pipe")  # fmt: skip
NAMED = {"instruction_field": "instruction", "output_field": "output"}
FIELDS: Mapping[str, list[dict[str, str]]] = {
    "text": [*[{}] * 6, {"text_field": "txt"}],
    "instruction": [*[NAMED] * 4, {**NAMED, "input_field": "input"}, {**NAMED, "instruction_field": "prompt"}],
    "conversation": [*[{}] * 6, {"system_field": "system"}, {"tools_field": "tools"}, {"messages_field": "turns"}],
    **{name: [{}] for name in ("preference", "auto")},
}
JSON_SUFFIXES = (".jsonl", ".jsonl", ".json", ".ndjson", ".jsonl.gz")
GOOD = b'{"text": "some text"}\n'


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case."""
    type_ = draw(st.sampled_from(["conversation", "text", "instruction", "auto", "preference"]))
    entry = {"type": type_, **draw(st.sampled_from(FIELDS[type_]))}
    if draw(st.integers(0, 9)) == 9:
        entry["samples"] = draw(st.integers(1, 3))
    keys = {
        "sequence_len": draw(st.sampled_from([256, 1024, 64, 8])),
        "truncation_strategy": draw(st.sampled_from(["delete", "left", "right", "split"])),
        "sample_packing": draw(st.booleans()),
        "max_bad_rows": draw(st.sampled_from([100, 100, 100, 2, 0])),
        "validation_split_ratio": draw(st.sampled_from([0.0, 0.3])),
    }
    common: dict[str, Any] = {"entry": entry, "keys": keys, "template": draw(st.sampled_from(CHOSEN))}
    # Most of the work is in JSON and in types; the libraries' formats take longer a case.
    json_only = type_ in ("conversation", "auto", "preference") and draw(st.integers(0, 4)) < 4
    suffix = draw(st.sampled_from(JSON_SUFFIXES if json_only else (*SUFFIXES, *COMPRESSED)))
    how = draw(st.integers(0, 11))
    if how == 11:
        special = draw(st.sampled_from(SPECIALS))
        name, path = f"f{suffix}", f"f{suffix}"
        if special in ("loop", "broken link inside"):
            name, path = "d/inside.jsonl", "d"
        elif special == "no suffix":
            name = path = draw(st.sampled_from(["f", "f.txt", "f.json.gz", "f.JSONL", ".jsonl"]))
        files = ((name, GOOD),) if special in ("loop", "broken link inside", "unreadable", "no suffix") else ()
        return Case(kind=special, special=special, files=files, path=path, **common)
    if how == 10:
        names = draw(
            st.lists(st.tuples(STEMS, st.sampled_from((*SUFFIXES, *COMPRESSED))), min_size=1, max_size=3, unique=True)
        )
        files = tuple((f"d/{stem}{end}", draw(content(type_, end))) for stem, end in names)
        return Case(kind="directory", files=files, path="d", **common)
    name = f"{draw(STEMS)}{suffix}"
    return Case(kind=suffix, files=((name, draw(content(type_, suffix))),), path=name, **common)


# ---------------------------------------------------------------------------------- running


@cache
def tokenizer(template: str) -> Any:
    """The embedded tokenizer with one of the templates."""
    from surogate_core.data.text.tokenizer import load_tokenizer

    loaded = load_tokenizer(EMBEDDED_TOKENIZER)
    if template != "own":
        loaded.chat_template = TEMPLATES[template]
    return loaded


@cache
def formats() -> Mapping[str, Any]:
    """The installed data set types, also those that no task trains on yet."""
    from surogate_core.plugins import load_plugins

    return {name: dataclasses.replace(f, tasks=None) for name, f in load_plugins().all("dataset").items()}


@dataclass
class Counts:
    """The outcomes so far, by kind of case."""

    successes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Fault, in short → (its count, the first such case)."""

    @property
    def cases(self) -> int:
        """All of them."""
        return self.successes.total() + self.refusals.total() + sum(n for n, _ in self.failures.values())

    def summary(self) -> str:
        """One line."""
        failed = sum(n for n, _ in self.failures.values())
        return (
            f"{self.cases:,} cases: {self.successes.total():,} read, {self.refusals.total():,} refused cleanly, "
            f"{failed:,} failures of {len(self.failures)} kinds"
        )


def once(case: Case, path: Path, cache_dir: Path) -> tuple[str, str]:
    """("read", digest) or ("refused", message)."""
    from surogate_core.config.schema import RunConfig
    from surogate_core.data.pipeline import prepare
    from surogate_core.errors import SurogateError

    config = RunConfig(
        datasets=[{"path": str(path), **case.entry}],
        data_cache_dir=str(cache_dir),
        dataloader_num_workers=0,
        **case.keys,
    )
    try:
        data = prepare(config, tokenizer(case.template), formats())
    except SurogateError as error:
        return "refused", str(error)
    check_counts(case.files, case.entry.get("samples"), data.report)
    for part in (data.train, data.eval):
        for index in range(len(part) if part is not None else 0):
            row = part.row(index)  # type: ignore[union-attr]
            assert sum(row.lengths) == len(row.input_ids) <= case.keys["sequence_len"], "a row's lengths"
            assert (row.labels >= 0).any(), "a row without a label"
    return "read", data.digest


def complaints(case: Case, path: Path, outcome: tuple[str, str]) -> str:
    """The fault of a refusal; empty if there is none."""
    message = outcome[1] if outcome[0] == "refused" else path.name
    names = [path.name, *(Path(name).name for name, _ in case.files)]
    if not message.isprintable():
        odd = sorted({repr(c) for c in message if not c.isprintable()})
        return f"the message has unprintable characters {', '.join(odd)}"
    # Documents that are all too long are no file's fault, nor is a missing chat template.
    elsewhere = message.startswith(("datasets: none of the", "The tokenizer"))
    if not elsewhere and not any(name in message for name in names):
        return "the message does not name the data"
    return "the message is very long" if len(message) > LONGEST_MESSAGE else ""


@cache
def load_libraries() -> None:
    """Do what only the first case needs: it takes its time, and an alarm in the middle of an import breaks that."""
    import datasets  # noqa: F401

    formats()
    for template in TEMPLATES:
        tokenizer(template)


def run_case(case: Case, counts: Counts) -> None:
    """Run it twice and count it."""
    load_libraries()
    with tempfile.TemporaryDirectory(prefix="fuzz-data-") as name:
        directory, cache_dir = Path(name) / "data", Path(name) / "cache"
        directory.mkdir()
        path = case.write(directory)
        wrong = ""
        try:
            with time_limit():
                outcome = once(case, path, cache_dir)
                wrong = complaints(case, path, outcome)
                if not wrong and (left := left_behind(cache_dir)):
                    wrong = f"left behind: {left[0].split('/')[0]}"
                if not wrong and (again := once(case, path, cache_dir)) != outcome:
                    wrong = f"the second call: {outcome[0]} became {again[0]}"
            detail = outcome[1][:600]
        except (Exception, Hang) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "fuzz_data" not in f.filename]
            ours = [f for f in frames if "surogate" in f.filename] or frames
            place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "the check itself"
            wrong = f"{type(error).__name__} in {place}"
            detail = "".join(traceback.format_exception(error)[-6:])
        finally:
            if case.special == "unreadable":
                path.chmod(0o600)
    if not wrong:
        (counts.successes if outcome[0] == "read" else counts.refusals)[case.kind] += 1
        return
    key = f"{wrong} ({case.kind}, {case.entry['type']})"
    number, first = counts.failures.get(key, (0, ""))
    counts.failures[key] = number + 1, first or f"{described(case)}\n{detail}"


def described(case: Case) -> str:
    """The case, so that it can be made again."""
    files = {n: c if len(c) <= 3000 else f"{c[:200]!r} and {len(c) - 200} bytes" for n, c in case.files}
    special = f" special={case.special!r}" if case.special else ""
    return f"path={case.path!r}{special} entry={case.entry} keys={case.keys} template={case.template!r} files={files}"


def fuzz(number: int, *, start: int = 0, watch: Callable[[Counts], None] = lambda counts: None) -> Counts:
    """Run `count` cases; the same ones for the same `start`."""
    counts = Counts()

    def batch(number: int, start: int) -> None:
        options = {"database": None, "deadline": None, "derandomize": False, "phases": [Phase.generate]}

        @seed(start)
        @settings(max_examples=number, suppress_health_check=list(HealthCheck), **options)
        @given(cases())
        def one(case: Case) -> None:
            run_case(case, counts)
            watch(counts)

        one()

    # Hypothesis varies what it has drawn before; new beginnings keep the cases apart.
    for first in range(0, number, BATCH):
        batch(min(BATCH, number - first), start * 1_000_003 + first)
    return counts


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=20, help="failures that are shown")
    options = parser.parse_args()
    # The libraries tell in lines of their own what the errors say again.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    began = time.monotonic()

    def watch(counts: Counts) -> None:
        if counts.cases % 100 == 0:
            print(f"{time.monotonic() - began:6.0f} s  {counts.summary()}", flush=True)

    counts = fuzz(options.cases, start=options.seed, watch=watch)
    for kind in sorted({*counts.successes, *counts.refusals}):
        print(f"  {kind:<28} {counts.successes[kind]:>6,} read {counts.refusals[kind]:>6,} refused")
    for key, (times, first) in list(counts.failures.items())[: options.failures]:
        print(f"\nFAILURE, {times} times: {key}\n{first}")
    print(counts.summary())
    return int(bool(counts.failures))


if __name__ == "__main__":
    sys.exit(main())
