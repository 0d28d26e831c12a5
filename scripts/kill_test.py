"""SIGKILL a run at random moments, also during a save, resume it, and compare with an uninterrupted run.

Prints one line a kill and a verdict: PASS when the final weights, the optimizer's state, the checkpoint's state,
the export and every loss are bit-identical to those of a run that was never killed. Exit 0 then, else 1.

    python scripts/kill_test.py [--mode full|lora|disk|experts|shared-experts|nemotron-h|qwen3-5] [--kills 20]
                                [--steps 160] [--seed 0] [--dir DIRECTORY]

A third of the kills come anywhere in a process's life (set-up included), a third at a random step, a third
while a checkpoint or an export is being written; for the last the child writes slowly, in small pieces.
Where a run has two processes, one of them is killed, either one by chance. The other one and the command have to end by
themselves, with one message.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SAVE_STEPS = 5
EMBEDDED = "pkg://surogate_dataset_chat/embedded"
SETTINGS = (
    f"datasets=[{{path: '{EMBEDDED}/train.jsonl', type: conversation, samples: 120}}]",
    f"validation_datasets=[{{path: '{EMBEDDED}/validation.jsonl', type: conversation, samples: 12}}]",
    f"tokenizer='{EMBEDDED}/tokenizer'",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "sequence_len=64",
    "per_device_train_batch_size=2",
    "gradient_accumulation_steps=2",
    "warmup_steps=5",
    f"save_steps={SAVE_STEPS}",
    "save_total_limit=2",
    "eval_steps=10",
    "monitor=[jsonl]",
    "run_name=kill-test",
    "device=cpu",
)
EXPERTS = (
    "model=qwen3-moe",
    "model.config.moe_intermediate_size=16",
    "lora=true",
    "lora_rank=4",
    "lora_expert_rank=2",
    "lora_dropout=0.1",
    "train_router=true",
)
MODES = {
    "full": ("lora=false",),
    "lora": ("lora=true", "lora_rank=4", "lora_dropout=0.1"),
    "disk": ("lora=false", "offload=disk", "cpu_training=true"),
    "experts": EXPERTS,
    "shared-experts": (*EXPERTS, "gpus=2", "ep_size=2", "ep_load_balance_threshold=1"),
    "nemotron-h": ("model=nemotron-h", "model.config.num_hidden_layers=5", "model.config.n_routed_experts=4"),
    "qwen3-5": ("model=qwen3-5", "model.config.full_attention_interval=2", "lora=true", "lora_rank=4"),
}
KINDS = ("life", "step", "save")


def child(arguments: list[str], *, slow: bool) -> int:
    """The run itself, through the command line."""
    if slow:
        _write_slowly()
    from surogate_core.cli.main import main

    return main(arguments)


def _write_slowly() -> None:
    """Stretch every save, so that kills fall into all of its stages."""
    from surogate_core.files import atomic, tensorfile

    whole_write, whole_sync = os.write, os.fsync

    def write_all(descriptor: int, data: memoryview) -> None:
        piece = max(1, len(data) // 4)
        while len(data):
            data = data[whole_write(descriptor, data[:piece]) :]
            time.sleep(0.0005)

    def fsync(descriptor: int) -> None:
        time.sleep(0.008)
        whole_sync(descriptor)

    atomic.write_all = write_all
    tensorfile.write_all = write_all
    os.fsync = fsync


class Run:
    """A run in a directory, as child processes one after the other."""

    def __init__(self, output: Path, mode: str, cache: Path, steps: int):
        self.output, self._steps, self.several = output, steps, "gpus=2" in MODES[mode]
        places = (f"output_dir={output}", f"data_cache_dir={cache}")
        self._arguments = [*SETTINGS, *MODES[mode], f"max_steps={steps}", *places]

    def start(self, *, slow: bool = False) -> subprocess.Popen[str]:
        """Begin, or go on."""
        command = [sys.executable, __file__, "--child", "slow" if slow else "fast", *self._arguments]
        # One thread: small products on several wait for each other on a busy machine.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def steps(self) -> int:
        """Steps in metrics.jsonl."""
        return max((line["step"] for line in self._lines() if line["event"] == "step_end"), default=0)

    def losses(self) -> list[tuple[object, ...]]:
        """Every loss and norm, training and held-out."""
        keys = ("event", "step", "epoch", "loss", "grad_norm", "lr", "total_tokens", "gap")
        chosen = ("step_end", "eval_end")
        return [tuple(line.get(key) for key in keys) for line in self._lines() if line["event"] in chosen]

    def writing(self) -> str:
        """The directories that are being written just now, or an empty text."""
        return " ".join(sorted(path.name for path in self.output.glob(".*.surogate-*") if path.is_dir()))

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints."""
        return sorted(path.name for path in self.output.glob("checkpoint-*"))

    def result(self) -> dict[str, str]:
        """File → digest of what the run leaves behind."""
        found = {}
        export = "adapter" if (self.output / "adapter").exists() else "model"
        for directory in (self.output / f"checkpoint-{self._steps}", self.output / export):
            for file in sorted(directory.glob("*")):
                if file.name != "manifest.json":
                    found[f"{directory.name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
        return found

    def _lines(self) -> list[dict[str, object]]:
        try:
            text = (self.output / "metrics.jsonl").read_text()
        except OSError:
            return []
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # torn by a kill
        return lines


def ranks(command: int) -> list[int]:
    """The processes that train, of a run that has several."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            of_run = parent == command and b"surogate_core.launch.worker" in (place / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue  # it has ended
        found += [int(place.name)] if of_run else []
    return sorted(found)


def kill(process: subprocess.Popen[str], chance: random.Random, *, several: bool) -> str | None:
    """Kill the run or one of its processes; what is wrong with its end, None if it came to its end before."""
    members = ranks(process.pid) if several else []
    victim = chance.choice(members) if members else process.pid
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate()
    if process.returncode == 0:
        return None
    if victim == process.pid:
        return "" if process.returncode == -signal.SIGKILL else f"ended with {process.returncode}:\n{output}"
    said = output.count("was killed by SIGKILL")
    if process.returncode != 128 + signal.SIGKILL or said != 1 or "Traceback" in output:
        return f"ended with {process.returncode} and {said} messages where a process was killed:\n{output}"
    left = [member for member in members if Path(f"/proc/{member}").exists()]
    return f"left processes {left}" if left else ""


def kill_somewhere(run: Run, kind: str, chance: random.Random, life: float) -> str:
    """Start the run and kill it; what it was doing then, or an empty text if it came to its end first."""
    before, leftover = run.steps(), run.writing()
    process = run.start(slow=kind == "save")
    began = time.monotonic()
    moment, target = began + chance.uniform(0.05, 0.9) * life, before + chance.randint(1, 2 * SAVE_STEPS)
    saves, being_written = chance.randint(1, 2), leftover
    while process.poll() is None:
        if kind == "life" and time.monotonic() >= moment:
            break
        if kind == "step" and run.steps() >= target:
            time.sleep(chance.uniform(0, 0.02))
            break
        if kind == "save" and (now := run.writing()) != being_written:
            being_written = now
            saves -= "surogate-tmp" in now
            if saves == 0:
                time.sleep(chance.uniform(0, 0.06))
                break
        time.sleep(0.0005)
    wrong = kill(process, chance, several=run.several)
    if wrong is None:
        return ""
    if wrong:
        raise SystemExit(f"FAIL: the resumed run {wrong}")
    seen, steps = run.writing(), run.steps()
    where = "in set-up" if (seen, steps) == (leftover, before) else f"writing {seen}" if seen else f"after step {steps}"
    return f"{time.monotonic() - began:.1f} s, {where}"


def difference(whole: Run, cut: Run) -> list[str]:
    """The differences between two finished runs."""
    expected, found = whole.result(), cut.result()
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if whole.losses() != cut.losses():
        differing.append("losses in metrics.jsonl")
    return differing + [f"left over: {name}" for name in cut.writing().split()]


def finish(run: Run) -> None:
    """Let the run finish."""
    process = run.start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"FAIL: a run that was let alone ended with {process.returncode}:\n{output}")


def main() -> int:
    """Run the test; the exit code."""
    if len(sys.argv) > 2 and sys.argv[1] == "--child":
        return child(sys.argv[3:], slow=sys.argv[2] == "slow")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=sorted(MODES), default="lora")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    directory = options.dir or Path(tempfile.mkdtemp(prefix="surogate-kill-test-"))
    chance = random.Random(options.seed)

    whole = Run(directory / "whole", options.mode, directory / "cache", options.steps)
    began = time.monotonic()
    finish(whole)
    life = time.monotonic() - began
    print(
        f"{options.mode}: uninterrupted run of {options.steps} steps in {life:.1f} s; seed {options.seed}; {directory}"
    )

    killed = rounds = while_saving = 0
    differing: list[str] = []
    cut = whole
    while killed < options.kills or cut is not whole:
        if cut is whole:
            rounds += 1
            cut = Run(directory / f"cut-{rounds}", options.mode, directory / "cache", options.steps)
        if killed < options.kills:
            kind = KINDS[-1 - killed % len(KINDS)]
            told = kill_somewhere(cut, kind, chance, life)
            if told:
                killed += 1
                while_saving += "writing" in told
                kept = " ".join(cut.checkpoints()) or "no checkpoint"
                print(f"kill {killed:>2} ({kind}): {told}; on disk: {kept}", flush=True)
                continue
        else:
            finish(cut)
        differing += difference(whole, cut)
        print(f"run {rounds} came to its end: {len(whole.result())} files, {len(whole.losses())} losses compared")
        cut = whole
    print(f"{killed} kills, {while_saving} of them during a write, {rounds} runs")
    print(f"FAIL: {', '.join(differing)}" if differing else "PASS: bit-identical to the uninterrupted run")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
