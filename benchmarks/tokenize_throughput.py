"""Tokenising and packing conversations against TRL's SFTTrainer: rows a second and peak memory, in one run.

The same JSONL of conversations, the same byte-level BPE tokenizer (trained here on Python's own
sources) with the same ChatML template with generation blocks, assistant-only labels, best-fit
packing into rows of 2048 tokens, the same number of worker processes, no cache from before. Each
side runs in a process of its own, in turn. TRL's time is that of `SFTTrainer._prepare_dataset` alone,
given a data set that is loaded already; ours has the reading of the file in it. Memory is the sum
over the process and its children, sampled: RSS counts shared pages once a process, PSS once. CPU
seconds are of all of a side's processes, imports and all.

    python benchmarks/tokenize_throughput.py [--rows 100000] [--processes 2] [--rounds 1] [--json FILE]
    python benchmarks/tokenize_throughput.py --large 5        # a JSONL of 5 GB, ours alone

Needs `pip install trl psutil`, but for --large, which needs psutil only.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH = 2048
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer(directory: Path) -> None:
    """A tokenizer of 32,768 entries in `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=32768, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts(), trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)


def texts() -> Iterator[str]:
    """Paragraphs of the standard library's sources."""
    import sysconfig

    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from path.read_text(encoding="utf-8", errors="replace").split("\n\n")


def write_rows(path: Path, *, rows: int = 0, size: int = 0) -> int:
    """Conversations of 1 to 4 turns with log-normal lengths, `rows` of them or `size` bytes; their number."""
    pool = [text for text in texts() if text.strip()]
    draw, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while written < rows or file.tell() < size:
            messages = []
            for _ in range(draw.choice((1, 1, 2, 3, 4))):
                answer = ""
                length = draw.lognormvariate(5.8, 0.9)
                while len(answer) < length:
                    answer += draw.choice(pool) + "\n"
                messages.append({"role": "user", "content": draw.choice(pool)[:400]})
                messages.append({"role": "assistant", "content": answer[: int(length) + 20].strip() or "none"})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            written += 1
    return written


def ours(data: Path, tokenizer: Path, cache: Path, processes: int) -> dict[str, Any]:
    """The work of a run before its first step."""
    from surogate_core.config.schema import RunConfig
    from surogate_core.data.pipeline import prepare
    from surogate_core.data.text.tokenizer import load_tokenizer
    from surogate_core.plugins import load_plugins

    config = RunConfig(
        datasets=[{"path": str(data), "type": "conversation"}],
        sequence_len=LENGTH,
        truncation_strategy="split",
        validation_split_ratio=0.0,
        data_cache_dir=str(cache),
        dataloader_num_workers=processes,
    )
    loaded, formats = load_tokenizer(str(tokenizer)), load_plugins().all("dataset")
    started = time.perf_counter()
    rows = prepare(config, loaded, formats).train
    return {
        "seconds": time.perf_counter() - started,
        "tokens": rows.stats.tokens,
        "label_tokens": rows.stats.label_tokens,
        "fill": rows.fill,
    }


def theirs(data: Path, tokenizer: Path, cache: Path, processes: int) -> dict[str, Any]:
    """The same by TRL."""
    import datasets
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    started = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(cache))
    load_seconds = time.perf_counter() - started
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    seconds: list[float] = []
    found: dict[str, Any] = {}

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            packed = super()._prepare_dataset(*args, **options)
            seconds.append(time.perf_counter() - begun)
            found["packed"] = packed
            return packed

    Timed(
        Qwen3ForCausalLM(config),
        args=SFTConfig(
            output_dir=str(cache / "out"),
            max_length=LENGTH,
            packing=True,
            packing_strategy="bfd",
            assistant_only_loss=True,
            dataset_num_proc=processes,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=loaded,
        processing_class=AutoTokenizer.from_pretrained(str(tokenizer)),
    )
    packed = found["packed"].with_format("arrow")
    tokens = sum(len(batch["input_ids"].combine_chunks().flatten()) for batch in packed.iter(1000))
    return {
        "seconds": seconds[0],
        "load_seconds": load_seconds,
        "tokens": tokens,
        "fill": tokens / (len(packed) * LENGTH),
    }


def memory_of(process: int) -> dict[str, int]:
    """RSS and PSS of a process in bytes; nothing when it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    fields = {line.split(":")[0].lower(): line.split()[1] for line in lines[1:]}
    return {name: int(fields[name]) * 1024 for name in ("rss", "pss") if name in fields}


def measured(side: str, data: Path, tokenizer: Path, root: Path, processes: int) -> dict[str, Any]:
    """One side in a process of its own, with the peak memory of all its processes in GiB."""
    import psutil

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=root) as cache:
        command = [sys.executable, __file__, "--side", side, str(data), str(tokenizer), cache]
        process = subprocess.Popen([*command, "--processes", str(processes)], stdout=subprocess.PIPE, text=True)
        peak = {"rss": 0, "pss": 0}

        def watch() -> None:
            root_process = psutil.Process(process.pid)
            while process.poll() is None:
                now = dict.fromkeys(peak, 0)
                for member in (root_process, *root_process.children(recursive=True)):
                    for name, value in memory_of(member.pid).items():
                        now[name] += value
                for name, value in now.items():
                    peak[name] = max(peak[name], value)
                time.sleep(0.2)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        output, _ = process.communicate()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{side} failed")
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result | {name: value / 2**30 for name, value in peak.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--large", type=float, help="gigabytes of a file that is tokenised by ours alone")
    parser.add_argument("--work", type=Path, help="a directory with room for the data, the system's own by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, data, tokenizer, cache = options.side
        measure = {"ours": ours, "trl": theirs}[side]
        print(json.dumps(measure(Path(data), Path(tokenizer), Path(cache), options.processes)))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        root = Path(name)
        data, tokenizer = root / "rows.jsonl", root / "tokenizer"
        make_tokenizer(tokenizer)
        rows = write_rows(data, rows=0 if options.large else options.rows, size=int((options.large or 0) * 1e9))
        print(f"{rows:,} rows, {data.stat().st_size / 1e9:.2f} GB, {options.processes} processes", flush=True)
        for _ in range(options.rounds):
            for side in ("ours",) if options.large else ("ours", "trl"):
                figures = measured(side, data, tokenizer, root, options.processes)
                results.setdefault(side, []).append(figures | {"rows_per_second": rows / figures["seconds"]})
                print(side, {k: round(v, 4) for k, v in results[side][-1].items()}, flush=True)
    if not options.large:
        for name in ("rows_per_second", "cpu_seconds", "rss", "pss"):
            ratio = statistics.median(r[name] for r in results["ours"]) / statistics.median(
                r[name] for r in results["trl"]
            )
            print(f"{name}: ours / TRL = {ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
