"""SIGKILL `surogate merge` at random instants: the output is always absent or whole, and a rerun succeeds.

Merges two adapters in turn into the same place, so that most merges replace a former one. Each child writes slowly
and is killed somewhere in its life; then the output must be absent or bit for bit one of the two merges, the same
merge run again must give its own, and nothing hidden may be left beside it. Prints one line a kill and a verdict;
exit 0 for PASS, else 1.

    python scripts/kill_merge.py [--kills 40] [--seed 0] [--dir DIRECTORY]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from surogate_model_qwen3.model import build

from surogate_core.cli.main import main as surogate
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.files import atomic, tensorfile
from surogate_core.files.paths import resolve_package_path
from surogate_core.hf.card import CardFacts
from surogate_core.hf.export import export_adapter, export_full
from surogate_core.hf.tokenizer_files import TokenizerFiles

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
TOKENIZER = "pkg://surogate_dataset_chat/embedded/tokenizer"
RANK = 4


def write_inputs(directory: Path) -> tuple[Path, tuple[Path, Path]]:
    """A random base with a tokenizer, and two adapters of it."""
    torch.manual_seed(0)
    specs = list(distinct(pieces(build(SHAPE), lora=None, max_seqlen=8)))
    tensors = ((spec.hf_name, torch.randn(spec.shape)) for spec in specs)
    card = CardFacts(title="kill test")
    tokenizer = TokenizerFiles(Path(resolve_package_path(TOKENIZER)))
    base = export_full(directory / "base", tensors, config=SHAPE, tokenizer=tokenizer, card=card)
    modules = [(spec.hf_name.removesuffix(".weight"), spec.shape) for spec in specs if "_proj" in spec.hf_name]

    def adapter(name: str) -> Path:
        halves: list[tuple[str, torch.Tensor]] = []
        for module, (outputs, inputs) in modules:
            halves += [(f"{module}.lora_A.weight", torch.randn(RANK, inputs))]
            halves += [(f"{module}.lora_B.weight", torch.randn(outputs, RANK))]
        return export_adapter(
            directory / name, halves, rank=RANK, alpha=8, dropout=0.0, base_model=str(base),
            card=card,
        )  # fmt: skip

    return base, (adapter("first"), adapter("second"))


def write_slowly() -> None:
    """Stretch every stage of the writing, so that kills fall into all of them."""
    whole_write, whole_sync, whole_rename = os.write, os.fsync, os.rename

    def write_all(descriptor: int, data: memoryview) -> None:
        piece = max(1, len(data) // 4)
        while len(data):
            data = data[whole_write(descriptor, data[:piece]) :]
            time.sleep(0.0005)

    def fsync(descriptor: int) -> None:
        time.sleep(0.004)
        whole_sync(descriptor)

    def rename(source: object, target: object, **options: object) -> None:
        whole_rename(source, target, **options)  # type: ignore[arg-type]
        time.sleep(0.03)

    atomic.write_all = write_all
    tensorfile.write_all = write_all
    os.fsync = fsync
    os.rename = rename  # type: ignore[assignment]


def child(base: Path, adapter: Path, output: Path, slow: bool) -> None:
    """The command itself."""
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if slow:
        write_slowly()
    sys.exit(surogate(["merge", "--base-model", str(base), "--checkpoint-dir", str(adapter), "--output", str(output)]))


def digest(directory: Path) -> str:
    """Of every file's name and bytes; an empty text when there is no such directory."""
    if not directory.exists():
        return ""
    found = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            found.update(f"{file.relative_to(directory)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


@contextlib.contextmanager
def started(base: Path, adapter: Path, output: Path, *, slow: bool) -> Iterator[BaseProcess]:
    """The command in a process of its own; forked, as its imports take longer than the merge."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(base, adapter, output, slow))
    process.start()
    yield process
    process.join()


def main() -> int:
    """Run the test; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    directory = options.dir or Path(tempfile.mkdtemp(prefix="surogate-kill-merge-"))
    chance = random.Random(options.seed)
    base, adapters = write_inputs(directory)
    output = directory / "merged"

    def finish(adapter: Path) -> str:
        with started(base, adapter, output, slow=False) as process:
            pass
        if process.exitcode:
            raise SystemExit(f"FAIL: a merge that was let alone ended with {process.exitcode}")
        return digest(output)

    wanted = {adapter: finish(adapter) for adapter in adapters}
    begun = time.monotonic()
    with started(base, adapters[0], output, slow=True):
        pass
    life = time.monotonic() - begun
    print(f"a slow merge takes {life:.2f} s; seed {options.seed}; {directory}")

    killed = attempts = writing = gone = 0
    problems: list[str] = []
    while killed < options.kills:
        adapter = adapters[attempts % 2]
        attempts += 1
        if chance.random() < 0.2 and output.exists():
            atomic.remove_directory(output)  # the first merge into a place
        before = digest(output)
        with started(base, adapter, output, slow=True) as process:
            time.sleep(chance.uniform(0, life))
            process.kill()
        if process.exitcode != -signal.SIGKILL:
            continue  # it came to its end first
        killed += 1
        after = digest(output)
        left = sorted(path.name.rpartition("-")[2] for path in directory.glob(".merged.surogate-*"))
        writing += bool(left)
        gone += not after
        state = "absent" if not after else "as before" if after == before else "the new one, whole"
        if after not in ("", before, wanted[adapter]):
            state = "TORN"
            problems.append(f"kill {killed}: the output is neither absent nor whole")
        if finish(adapter) != wanted[adapter]:
            problems.append(f"kill {killed}: the rerun gave something else")
        if beside := [path.name for path in directory.glob(".*")]:
            problems.append(f"kill {killed}: left over after the rerun: {', '.join(beside)}")
        print(f"kill {killed:>2}: output {state}; left beside it: {' '.join(left) or 'nothing'}", flush=True)
    print(f"{killed} kills, {writing} of them during the write, {gone} left no output; every one was run again")
    for problem in problems:
        print(problem)
    print("FAIL" if problems else "PASS")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
