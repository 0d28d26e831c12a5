"""`data`: the texts, problems, tokenizer and model shape that the other commands start from."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from parity_text import END, drills, train_tokenizer

from accuracy.corpus import Corpus, collect
from accuracy.problems import Problem, distinct, problems

TURN, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{TURN}' + message['role'] + '\\n' + message['content'] + '{TURN_END}' + '\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN}assistant\\n' }}}}{{% endif %}}"
)
SAMPLE = 24 << 20
"""Characters that the tokenizer is trained on."""
SEEDS = {"held": 1, "finetune": 2, "pretrain": 3, "drills": 4, "held pretrain": 5}
PER_TEXT = 8
"""Problems of a text for pre-training."""
DRILLS_PER_TEXT = 40
_CALCULATION = re.compile(r"<<[^>]*>>")
"""GSM8K's annotations for a calculator."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--megabytes", type=int, default=400, help="most text to collect")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--pretrain-problems", type=int, default=400_000)
    parser.add_argument("--drills", type=int, default=2_000_000, help="lines of arithmetic")
    parser.add_argument("--problems", type=int, default=12_000, help="problems to fine-tune on")
    parser.add_argument("--held", type=int, default=1_000, help="held-out problems")
    parser.add_argument("--held-texts", type=int, default=400, help="most held-out texts")
    parser.add_argument("--gsm8k", type=Path, help="directory with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--places", type=Path, nargs="*", help="directories to collect text from")


TINY = {"megabytes": 1, "vocabulary": 600, "pretrain_problems": 64, "drills": 80, "problems": 48, "held": 8}
"""Options of a trial on a CPU."""


def run(given: argparse.Namespace) -> None:
    """Write everything to the directory `data` of `--out`, or nothing."""
    final = given.out / "data"
    out = given.out / "data.partial"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    corpus = collect(limit=given.megabytes << 20, places=given.places)
    if not corpus.train or not corpus.held:
        raise SystemExit("data: too little text was found. Fix: name directories with text by --places.")
    manifest: dict[str, Any] = {"text": {kind: asdict(counts) for kind, counts in corpus.counts.items()}, "files": {}}

    def write(name: str, rows: Iterable[Mapping[str, Any]], *, packed: bool = False) -> None:
        manifest["files"][name] = _write(out / name, rows, packed=packed)

    seen: set[bytes] = set()
    held = list(islice(distinct("finetune", seed=SEEDS["held"], seen=seen), given.held))
    held_pretrain = list(islice(distinct("pretrain", seed=SEEDS["held pretrain"], seen=seen), max(8, given.held // 4)))
    avoid = frozenset(seen)
    write("text.jsonl.gz", ({"text": text} for text in corpus.train), packed=True)
    write("text-held.jsonl", ({"text": text} for text in corpus.held[: given.held_texts]))
    write("problems.jsonl.gz", _texts(given.pretrain_problems, given.drills, avoid), packed=True)
    write("problems-held.jsonl", ({"text": text} for text in _grouped(as_text(one) for one in held_pretrain)))
    tuned = islice(distinct("finetune", seed=SEEDS["finetune"], seen=seen), given.problems)
    write("tune.jsonl", map(as_chat, tuned))
    write("tune-held.jsonl", map(as_chat, held))
    if given.gsm8k is not None:
        for part, name in (("train", "gsm8k.jsonl"), ("test", "gsm8k-held.jsonl")):
            write(name, _gsm8k(given.gsm8k / f"{part}.jsonl", 16 if given.tiny else None))
    _tokenizer(corpus, given, out / "base")
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    out.rename(final)
    print(json.dumps(manifest, indent=1))


def as_text(problem: Problem) -> str:
    """A problem for pre-training."""
    return f"Question: {problem.question}\nAnswer: {problem.worked}\n"


def as_chat(problem: Problem) -> dict[str, Any]:
    """A row for fine-tuning."""
    turns = (("user", problem.question), ("assistant", problem.worked))
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, "answer": str(problem.answer), "steps": problem.steps, "largest": problem.largest}


def _gsm8k(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise SystemExit(f"--gsm8k: {path} is missing. Fix: name the directory with train.jsonl and test.jsonl.")
    with path.open(encoding="utf-8") as file:
        for line in islice(file, limit):
            row = json.loads(line)
            answer = _CALCULATION.sub("", row["answer"])
            turns = (("user", row["question"]), ("assistant", answer))
            yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def _texts(count: int, lines: int, avoid: frozenset[bytes]) -> Iterator[dict[str, str]]:
    """Texts of problems, and between them texts of drills."""
    made = islice(problems("pretrain", seed=SEEDS["pretrain"], avoid=avoid), count)
    sums = islice(drills(np.random.default_rng(SEEDS["drills"])), lines)
    of_drills = iter(_grouped((f"{line}\n" for line in sums), DRILLS_PER_TEXT))
    for text in _grouped(as_text(one) for one in made):
        yield {"text": text}
        if (drill := next(of_drills, None)) is not None:
            yield {"text": drill}
    yield from ({"text": drill} for drill in of_drills)


def _grouped(texts: Iterable[str], size: int = PER_TEXT) -> Iterator[str]:
    found = iter(texts)
    while group := list(islice(found, size)):
        yield "\n".join(group) if size == PER_TEXT else "".join(group)


def _write(path: Path, rows: Iterable[Mapping[str, Any]], *, packed: bool) -> dict[str, Any]:
    digest, count, size = hashlib.sha256(), 0, 0
    # Level 1: the file is read once.
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as file:
        for row in rows:
            line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            digest.update(line)
            file.write(line)
            count, size = count + 1, size + len(line)
    return {"rows": count, "bytes": size, "sha256": digest.hexdigest()}


def _tokenizer(corpus: Corpus, given: argparse.Namespace, out: Path) -> None:
    """The directory of the untrained model: config.json and tokenizer."""
    from transformers import PreTrainedTokenizerFast

    sample, size = [], 0
    for text in corpus.train:
        sample.append(text[:20_000])
        size += len(sample[-1])
        if size >= SAMPLE:
            break
    made = islice(problems("pretrain", seed=SEEDS["pretrain"]), 20 if given.tiny else 4_000)
    sample += map(as_text, made)
    tokenizer = train_tokenizer(sample, given.vocabulary, (END, TURN, TURN_END, PAD))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE)
    fast.save_pretrained(out)
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
    if given.tiny:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.token_to_id(END)}
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **shape, **heads, **ends,
        "vocab_size": tokenizer.get_vocab_size(), "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
