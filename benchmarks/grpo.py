"""Speed of reinforcement learning with random weights: whole runs of `surogate grpo`, beside TRL's GRPOTrainer.

    python benchmarks/grpo.py [--model qwen3-0.6b] [--cases full lora sft-full trl-full] [--out found.json]
    python benchmarks/grpo.py --model qwen3-8b --cases lora lora-fp8 nf4 sft-lora trl-lora
    python benchmarks/grpo.py --cases lora --options rollout=dedicated max_staleness=1     # on two GPUs
    python benchmarks/grpo.py --small                            # tiny, on a CPU

A case is `full`, `lora` (rank 16, every projection) or `nf4` (the same on a base in NF4), with `-fp8` under the recipe
fp8-hybrid. `sft-` before it is supervised fine-tuning of rows with the same lengths in as many micro-batches, with
which the training phase is compared. `trl-` is TRL with the generation of transformers, bf16, SDPA and gradient
checkpointing, `trl-vllm-` the same with vLLM's generation on the same GPU. Each case runs in a process of its own; one
that fails costs only itself. TRL, and vLLM for its cases, must be importable.

Completions have the largest length: random weights hardly ever choose a stop token (`truncated` is the measured
share), and TRL gets `min_new_tokens`. The reward is a hash of the completion, so every group has a signal.

`seconds` is the median time of the steps after the first two, from the end of one to the end of the next; `phases` are
the medians of its parts. `first_rollout` is the time from the start of the process to the first rewarded completions.
`memory`: GiB of the GPU at most, caches of generation included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import surogate_dataset_chat
import torch
from bench import apart

TOKENIZER = Path(surogate_dataset_chat.__file__).parent / "embedded/tokenizer"
KINDS: Mapping[str, Sequence[str]] = {
    "full": ["lora=false"],
    "lora": ["lora=true", "lora_rank=16", "lora_alpha=32"],
    "nf4": ["lora=true", "lora_rank=16", "lora_alpha=32", "qlora_bnb=true"],
}
PEERS = ("trl-full", "trl-lora", "trl-vllm-full", "trl-vllm-lora")
FIRST = 2
"""Steps that compile and capture, which do not count."""
REWARDS = """import zlib


def digest(completions, **kwargs):
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One case's figures; times in seconds."""

    case: str
    model: str
    samples: int
    prompt: int
    """Tokens of a prompt, about."""
    new: int
    steps: int = 0
    """Steps that count."""
    seconds: float | None = None
    steps_per_hour: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    generated_per_second: float | None = None
    """Sampled tokens a second of the generation alone."""
    trained_per_second: float | None = None
    """Tokens of prompts and completions a second of the optimizer step alone."""
    truncated: float | None = None
    gap: float | None = None
    first_rollout: float | None = None
    losses: list[float] = field(default_factory=list)
    """The loss of each step of a Surogate run, for comparing runs."""
    memory: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None


def names(case: str) -> tuple[str, str]:
    """(kind, recipe) of a case of ours."""
    kind, _, recipe = case.removeprefix("sft-").partition("-")
    return kind, {"": "bf16", "fp8": "fp8-hybrid"}[recipe]


def command(case: str, words: argparse.Namespace, directory: Path) -> list[str]:
    """The run of a case of ours."""
    family, _, preset = words.model.partition("-")
    kind, recipe = names(case)
    length = words.prompt + words.new
    line = [sys.executable, "-m", "surogate_core", "sft" if case.startswith("sft-") else "grpo"]
    line += [f"model.name={family}", f"model.preset={preset}", f"tokenizer={TOKENIZER}", f"recipe={recipe}"]
    line += [*KINDS[kind], "learning_rate=1e-6", "warmup_steps=0", "eval_steps=0", "save_steps=0"]
    line += [f"max_steps={words.steps + FIRST}", f"sequence_len={length}", f"output_dir={directory / 'run'}"]
    line += [f"per_device_train_batch_size={words.rows}", "monitor=[jsonl]", *words.options]
    if words.small:
        line += ["device=cpu", "compiler=fx"]
    if case.startswith("sft-"):
        batches = -(-words.samples // words.rows)
        return [*line, f"gradient_accumulation_steps={batches}", f"datasets=[{{path: {texts(words, directory)}}}]"]
    prompts, rewards = questions(words, directory)
    line += ["environment=trl", f"environment.path={prompts}", f"environment.reward_funcs=[{rewards}:digest]"]
    line += [f"num_generations={words.group}", f"prompts_per_step={words.samples // words.group}"]
    return [*line, f"max_completion_length={words.new}", "max_refills=0", "log_completions=false"]


def questions(words: argparse.Namespace, directory: Path) -> tuple[Path, Path]:
    """The files of prompts and of the reward."""
    prompts, rewards = directory / "prompts.jsonl", directory / "rewards.py"
    rows = [{"prompt": text} for text in prompt_texts(words)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rewards.write_text(REWARDS, encoding="utf-8")
    return prompts, rewards


def prompt_texts(words: argparse.Namespace) -> list[str]:
    """Prompts of nearly the same length, all different; a chat template adds a few tokens."""
    room = max(1, words.prompt - 16)
    steps = words.steps + FIRST + 1
    return [sized(f"{n:05d} ", room) for n in range(steps * (words.samples // words.group))]


def sized(start: str, tokens: int) -> str:
    """A text of at most this number of tokens, as long as that allows."""
    text = start
    while len(tokenizer()(text + " the")["input_ids"]) <= tokens:
        text += " the"
    return text


def tokenizer() -> Any:
    """The embedded one, read once."""
    from transformers import AutoTokenizer

    if "found" not in _TOKENIZER:
        _TOKENIZER["found"] = AutoTokenizer.from_pretrained(TOKENIZER)
    return _TOKENIZER["found"]


_TOKENIZER: dict[str, Any] = {}


def texts(words: argparse.Namespace, directory: Path) -> Path:
    """A file of documents that fill a row each."""
    file = directory / "texts.jsonl"
    text = sized("0", words.prompt + words.new - 2)
    rows = (json.dumps({"text": text.replace("0", str(n % 10), 1)}) + "\n" for n in range(4 * words.samples))
    file.write_text("".join(rows), encoding="utf-8")
    return file


def ours(case: str, words: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The figures of a run of ours, from its `metrics.jsonl`."""
    line = command(case, words, directory)
    began = time.time()
    done = subprocess.run(line, check=False, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip())[-2000:])
    lines = (directory / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(one) for one in lines]
    ends = [event for event in events if event["event"] == "step_end"]
    rolled = {event["step"]: event for event in events if event["event"] == "rollouts"}
    times = [later["time"] - sooner["time"] for sooner, later in pairwise(ends)][FIRST - 1 :]
    counted = ends[FIRST:]
    found: dict[str, Any] = {"steps": len(times), "seconds": median(times), "losses": [end["loss"] for end in ends]}
    found["memory"] = max(end["peak_memory_bytes"] for end in ends) / 2**30
    if not rolled:
        rate = median(end["tokens"] / end["seconds"] for end in counted)
        return {**found, "phases": {"train": median(end["seconds"] for end in counted)}, "trained_per_second": rate}
    # What ran beside the step before is a phase too, though it delays nothing.
    laps = {step: {**event.get("overlapped", {}), **event["seconds"]} for step, event in rolled.items()}
    names = dict.fromkeys(name for lap in laps.values() for name in lap)
    phases = {name: [laps[end["step"]].get(name, 0.0) for end in counted] for name in names}
    rest = [end["seconds"] - sum(rolled[end["step"]]["seconds"].values()) for end in counted]
    gaps = [end["figures"].get("logprob_gap/mean") for end in counted if end.get("figures")]
    return {
        **found,
        "phases": {name: median(values) for name, values in {**phases, "train": rest}.items()},
        "generated_per_second": median(
            rolled[end["step"]]["tokens"] / max(laps[end["step"]]["generate"], 1e-9) for end in counted
        ),
        "trained_per_second": median(
            end["tokens"] / seconds for end, seconds in zip(counted, rest, strict=True) if seconds > 0
        ),
        "truncated": median(rolled[end["step"]]["truncated"] for end in counted),
        "gap": median(gaps) if gaps and None not in gaps else None,
        "first_rollout": min(event["time"] for event in rolled.values()) - began,
    }


def trl_case(case: str, words: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The figures of TRL's trainer, in this process."""
    began = time.time()
    import trl
    from grpo_trl import train

    found = train(case.removeprefix("trl-"), words, prompt_texts(words), tokenizer(), directory, REWARDS)
    times = [later - sooner for sooner, later in pairwise(found.ends)][FIRST - 1 :]
    generating = median(found.generating[FIRST:])
    return {
        "steps": len(times),
        "seconds": median(times),
        "phases": {"generate": generating, "train": median(times) - generating},
        "generated_per_second": words.samples * words.new / generating,
        "first_rollout": found.first - began,
        "memory": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
    }


def measure(case: str, words: argparse.Namespace) -> Found:
    """The case's figures, or its error."""
    about = {"case": case, "model": words.model, "samples": words.samples, "prompt": words.prompt, "new": words.new}
    with tempfile.TemporaryDirectory() as parent:
        try:
            if case in PEERS and not words.within:
                found = of_peer(case, words)
            else:
                found = (trl_case if case in PEERS else ours)(case, words, Path(parent))
        except RuntimeError as error:
            return Found(**about, error=str(error))
    return Found(**about, **{"steps_per_hour": 3600 / found["seconds"], **found})


def of_peer(case: str, words: argparse.Namespace) -> dict[str, Any]:
    """The figures of a peer, from a process of its own."""
    found = apart(__file__, words.given, case)
    if found["error"]:
        raise RuntimeError(found["error"])
    return {name: value for name, value in found.items() if name not in ("case", "model", "samples", "prompt", "new")}


def compared(found: Sequence[Found]) -> dict[str, float]:
    """Case → the speed of its training phase as a share of that of supervised fine-tuning, where both were measured.

    Both train as many rows of the same length.
    """
    train = {one.case: one.phases["train"] for one in found if one.phases.get("train")}
    return {case: train[f"sft-{case}"] / seconds for case, seconds in train.items() if f"sft-{case}" in train}


def shown(found: Found) -> str:
    """A line."""
    if found.error is not None:
        return f"{found.case:10} {found.model}: {found.error.splitlines()[-1][:200]}"
    assert found.seconds is not None
    parts = [f"{found.steps_per_hour:8,.0f} steps/h, {found.seconds:.2f} s"]
    parts += [f"{name} {seconds:.2f}" for name, seconds in found.phases.items() if seconds >= 0.005]
    if found.generated_per_second is not None:
        parts.append(f"generates {found.generated_per_second:,.0f} tok/s")
    if found.trained_per_second is not None:
        parts.append(f"trains {found.trained_per_second:,.0f} tok/s")
    if found.first_rollout is not None:
        parts.append(f"first rollout {found.first_rollout:.1f} s")
    if found.memory is not None:
        parts.append(f"{found.memory:.1f} GiB")
    return f"{found.case:10} {found.model}: {', '.join(parts)}"


def main(arguments: list[str] | None = None) -> int:
    """Measure the cases; the exit status says whether one failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="family-preset")
    parser.add_argument("--samples", type=int, default=128, help="completions of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt, at most")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--rows", type=int, default=16, help="completions of a micro-batch")
    parser.add_argument("--steps", type=int, default=6, help=f"steps that count, after {FIRST}")
    parser.add_argument("--cases", nargs="+", default=["full", "sft-full", "lora", "sft-lora"])
    parser.add_argument("--options", nargs="*", default=[], help="keys of the configuration for the runs of ours")
    parser.add_argument("--within", action="store_true", help="peers in this process")
    parser.add_argument("--small", action="store_true", help="qwen3-tiny, few tokens, on a CPU")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(arguments)
    if words.small:
        words.model, words.samples, words.group, words.rows = "qwen3-tiny", 8, 4, 4
        words.prompt, words.new, words.steps = 32, 8, 2
    known = {f"{before}{kind}{after}" for before in ("", "sft-") for kind in KINDS for after in ("", "-fp8")}
    if unknown := set(words.cases) - known - set(PEERS):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    if words.samples % words.group:
        parser.error(f"{words.samples} samples are not groups of {words.group}")
    words.given, found = arguments, []
    for case in words.cases:
        found.append(measure(case, words))
        print(shown(found[-1]), flush=True)
        if words.out is not None:
            words.out.write_text(json.dumps([asdict(one) for one in found], indent=1), encoding="utf-8")
    for case, share in compared(found).items():
        print(f"{case:10} {words.model}: the training phase has {share:.0%} of the speed of sft-{case}")
    return int(any(one.error is not None for one in found))


if __name__ == "__main__":
    sys.exit(main())
