"""What `loss_parity.py` trains on: real text of this machine, arithmetic drills, generated word problems.

Text for pre-training are Python sources and documentation (`.py`, `.rst`, `.md`) of the standard library and
of the packages beside torch and transformers; text for fine-tuning are C and C++ headers. Of each a file
is either for training or held out, by a hash of what it holds. The same text twice is kept once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PYTHON = (".py", ".rst", ".md")
HEADERS = (".h", ".hpp", ".cuh")
HELD_OUT = 32
"""One file of so many is held out."""
SIZES = (256, 200_000)
"""Bytes of the shortest and the longest file that is taken."""
END = "<|end|>"
Ids = NDArray[np.uint16]

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Karl", "Lena")
THINGS = ("apples", "books", "coins", "eggs", "pens", "stones", "stamps", "tickets", "marbles", "cards", "nuts", "keys")
PLACES = ("box", "bag", "basket", "drawer", "jar", "case")


LARGEST = (10, 20, 50, 100)
"""Largest number of a drill or problem; each is as frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A word problem with one answer, a whole number from 0."""

    kind: str
    largest: int
    """Of `LARGEST`."""
    question: str
    answer: int


def roots() -> list[Path]:
    """The standard library, and where torch and transformers are installed with what stands beside them."""
    found = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("include"))]
    for name in ("torch", "transformers"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(Path(spec.origin).parent.parent)
    return list(dict.fromkeys(found))


def texts(endings: Sequence[str], limit: int) -> tuple[list[str], list[str]]:
    """(texts for training, held-out texts), of at most `limit` bytes, in an order that only the names decide."""
    paths: dict[str, Path] = {}
    for root in roots():
        for path in root.rglob("*"):
            if path.suffix in endings and path.is_file():
                paths.setdefault(str(path.relative_to(root)), path)
    train: list[str] = []
    held: list[str] = []
    seen: set[bytes] = set()
    size = 0
    for name in sorted(paths, key=lambda n: (zlib.crc32(n.encode()), n)):
        if size >= limit:
            break
        data = paths[name].read_bytes()
        digest = hashlib.sha256(data).digest()
        if not SIZES[0] <= len(data) <= SIZES[1] or digest in seen:
            continue
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        size += len(data)
        (held if int.from_bytes(digest[:4], "little") % HELD_OUT == 0 else train).append(text)
    if not train or not held:
        raise SystemExit(f"no text: {len(train)} files to train on and {len(held)} to hold out end in {endings}")
    return train, held


def train_tokenizer(samples: Sequence[str], vocabulary: int, special: Sequence[str] = (END,)) -> Tokenizer:
    """Byte-level BPE; every digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def tokens(tokenizer: Tokenizer, found: Sequence[str]) -> Ids:
    """The texts' tokens, each text ended."""
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch_fast(list(found), add_special_tokens=False)
    return np.concatenate([np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encoded])


def rows(ids: Ids, length: int) -> Ids:
    """[rows, length]: the tokens cut where they are, the rest left out."""
    count = len(ids) // length
    return ids[: count * length].reshape(count, length)


def drills(random: np.random.Generator) -> Iterator[str]:
    """Lines such as ``31 + 7 = 38``: sums, differences, products and two of them, without end."""
    while True:
        largest = LARGEST[int(random.integers(len(LARGEST)))]
        a, b, c, k = (int(random.integers(2, n + 1)) for n in (largest, largest, largest, 9))
        match int(random.integers(6)):
            case 0:
                yield f"{a} + {b} = {a + b}"
            case 1:
                yield f"{a + b} - {b} = {a}"
            case 2:
                yield f"{k} * {a} = {k * a}"
            case 3:
                low, high = sorted((c, a + b))
                yield f"{a} + {b} - {low} = {a + b - low}" if low == c else f"{high} - {a} + {b} = {high - a + b}"
            case 4:
                yield f"{k} * {a} + {b} = {k * a + b}"
            case _:
                taken = int(random.integers(1, k * a))
                yield f"{k} * {a} - {taken} = {k * a - taken}"


def problem(random: np.random.Generator) -> Problem:
    """One of four kinds, each of two steps, with numbers from 2 to one of `LARGEST`."""
    largest = LARGEST[int(random.integers(len(LARGEST)))]
    who, other = (str(n) for n in random.choice(NAMES, 2, replace=False))
    things, place = str(random.choice(THINGS)), str(random.choice(PLACES))
    a, b = (int(random.integers(2, largest + 1)) for _ in range(2))
    k = int(random.integers(2, 10))
    asked = f"How many {things} does {who} have now?"
    match int(random.integers(4)):
        case 0:
            c = int(random.integers(2, a + b))
            text = f"{who} has {a} {things}. {other} brings {b} more. Then {who} gives away {c}. {asked}"
            return Problem(largest=largest, kind="a + b − c", question=text, answer=a + b - c)
        case 1:
            c = int(random.integers(1, a))
            text = f"{who} has {a} {things} and loses {c}. The next day {who} finds {b}. {asked}"
            return Problem(largest=largest, kind="a − c + b", question=text, answer=a - c + b)
        case 2:
            text = f"{who} has {b} {things} and buys {k} {place}s with {a} {things} in each {place}. {asked}"
            return Problem(largest=largest, kind="b + k · a", question=text, answer=b + k * a)
        case _:
            c = int(random.integers(1, k * a))
            text = f"{who} fills {k} {place}s with {a} {things} each. {other} takes {c} of them. {asked}"
            return Problem(largest=largest, kind="k · a − c", question=text, answer=k * a - c)


def problems(count: int, held: int, *, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(problems to train on, held-out problems); no text is in both, none is twice."""
    random = np.random.default_rng(seed)
    found: dict[str, Problem] = {}
    while len(found) < count + held:
        made = problem(random)
        found.setdefault(made.question, made)
    made_all = list(found.values())
    return made_all[held:], made_all[:held]
