"""`reinforce`: GRPO on the generated problems, in three precisions, over three seeds, beside TRL's trainer.

The base model does not know the chat format, so `--start-steps` of fine-tuning come first; all runs begin with that
model. Each run is a process of its own and gives a JSON file with its curve: the mean reward of the sampled answers by
step, and the share of held-out problems that greedy answers solve. TRL has the same prompts a step, samples, lengths,
rate and loss (dapo without KL), and the generation of transformers. It stops early when the call's time ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from surogate_environments.options import ProblemsOptions

from accuracy.finetune import LORA, write_result
from accuracy.problems import final_number
from surogate_core.files.metrics import METRICS, read_metrics

LINES: Mapping[str, Sequence[str]] = {
    "bf16": ["recipe=bf16"],
    "fp8-hybrid": ["recipe=fp8-hybrid"],
    "nf4": ["recipe=bf16", "qlora_format=nf4"],
    "trl": [],
}
"""Line of the picture → keys of its runs; `trl` is the peer."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", type=Path, help="the base model; OUT/pretrain/model without it")
    parser.add_argument("--lines", nargs="*", choices=list(LINES), default=list(LINES))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, default=9.0, help="length of this call")
    parser.add_argument("--start-steps", type=int, default=120, help="steps of fine-tuning before")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument("--held", type=int, default=256, help="held-out problems to answer")
    parser.add_argument("--run", help=argparse.SUPPRESS)


TINY = {
    "start_steps": 2,
    "steps": 2,
    "group": 2,
    "prompts": 2,
    "new_tokens": 8,
    "eval_steps": 1,
    "held": 4,
    "seeds": [1],
}
"""Options of a trial on a CPU."""


def run(given: argparse.Namespace) -> None:
    """Run those that have no result yet, all at the same time."""
    place = given.out / "reinforce"
    if given.run is not None:
        line, seed = given.run.rsplit("-s", 1)
        began = time.monotonic()
        found = (_trl if line == "trl" else _ours)(line, int(seed), given, place)
        found |= {"line": line, "seed": int(seed), "seconds": time.monotonic() - began}
        write_result(place / f"{given.run}.json", found)
        return
    place.mkdir(parents=True, exist_ok=True)
    prepare(given, place)
    names = [f"{line}-s{seed}" for seed in given.seeds for line in given.lines]
    waiting = [name for name in names if not (place / f"{name}.json").is_file()]
    going = {}
    for name in waiting:
        with (place / f"{name}.log").open("wb") as log:
            words = [sys.executable, *sys.argv, "--run", name]
            going[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + 60 * given.minutes
    for name, process in going.items():
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
        print(f"{name}: {'done' if code == 0 else f'failed, see {place / name}.log'}", flush=True)


def asked(question: str) -> str:
    """The user's message: the question and the instruction of the environment, which both sides give."""
    return ProblemsOptions().prompt.replace("{question}", question)


def prepare(given: argparse.Namespace, place: Path) -> None:
    """Write the problems as questions and answers, and fine-tune the model that all runs begin with."""
    for name, new in (("tune.jsonl", "train.jsonl"), ("tune-held.jsonl", "held.jsonl")):
        rows = [json.loads(line) for line in (given.out / "data" / name).read_text(encoding="utf-8").splitlines()]
        texts = [{"question": row["messages"][0]["content"], "answer": row["answer"]} for row in rows]
        (place / new).write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    if (place / "start/model").is_dir():
        return
    import surogate

    surogate.sft(
        model=str(given.model or given.out / "pretrain/model"),
        datasets=[{"path": str(given.out / "data/tune.jsonl"), "type": "conversation"}],
        lora=False,
        learning_rate=1e-4,
        max_steps=given.start_steps,
        warmup_steps=0,
        eval_steps=0,
        save_steps=0,
        sequence_len=given.length,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        output_dir=str(place / "start"),
        quiet=True,
    )


def _ours(line: str, seed: int, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """A run of `surogate grpo`, read from its metrics."""
    out = place / f"{line}-s{seed}"
    words = [sys.executable, "-m", "surogate", "grpo", f"model={place / 'start/model'}", *LINES[line]]
    words += ["environment=problems", f"environment.path={place / 'train.jsonl'}"]
    words += [f"environment.eval_path={place / 'held.jsonl'}", f"eval_environment_tasks={given.held}"]
    words += [f"prompts_per_step={given.prompts}", f"num_generations={given.group}", "max_refills=0"]
    words += [f"max_completion_length={given.new_tokens}", f"sequence_len={given.length}", f"max_steps={given.steps}"]
    words += [f"learning_rate={given.rate}", "warmup_steps=0", "lr_scheduler_type=constant", "weight_decay=0"]
    words += [f"lora_rank={LORA['lora_rank']}", f"lora_alpha={LORA['lora_alpha']}", f"eval_steps={given.eval_steps}"]
    words += ["save_steps=0", "per_device_train_batch_size=8", f"train_seed={seed}", f"output_dir={out}"]
    subprocess.run([*words, "monitor=[jsonl]"], check=True)
    steps = read_metrics(out / METRICS, event="rollouts")
    held = read_metrics(out / METRICS, event="rollout_eval")
    return {"rollouts": steps, "held": held}


def _trl_settings(out: Path, seed: int, given: argparse.Namespace, ends: Sequence[int]) -> Any:
    """The settings of TRL's trainer. `ends`: tokens that end a completion."""
    import torch
    from trl import GRPOConfig

    gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=given.prompts * given.group,
        gradient_accumulation_steps=1,
        num_generations=given.group,
        max_completion_length=given.new_tokens,
        generation_kwargs={"eos_token_id": ends},
        max_steps=given.steps,
        learning_rate=given.rate,
        lr_scheduler_type="constant",
        beta=0.0,
        seed=seed,
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _trl_adapters() -> Any:
    """The adapters that TRL's trainer trains."""
    from peft import LoraConfig

    return LoraConfig(
        r=LORA["lora_rank"], lora_alpha=LORA["lora_alpha"], lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip


def _solved(
    model: Any, *, tokenizer: Any, held: Sequence[Mapping[str, str]], ends: Sequence[int], new_tokens: int
) -> float:
    """The share of held-out problems that TRL's model solves with the most probable tokens."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": asked(row["question"])}], add_generation_prompt=True, tokenize=False
        )
        for row in held
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.no_grad():
        found = model.generate(
            **batch, max_new_tokens=new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
        )
    texts = tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(final_number(t) == row["answer"] for t, row in zip(texts, held, strict=True)) / len(held)


def _trl(line: str, seed: int, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """A run of TRL's trainer with the same settings."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(place / "start/model", padding_side="left")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    settings = _trl_settings(place / f"trl-s{seed}", seed, given, ends)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    # With SDPA the probabilities of a batch were not numbers, on an H100: evidence/reinforcement-learning.md.
    model = AutoModelForCausalLM.from_pretrained(place / "start/model", dtype=dtype, attn_implementation="eager")
    rows, held = (
        [json.loads(text) for text in (place / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "held.jsonl")
    )
    held, began = list(islice(held, given.held)), time.time()
    solved = partial(_solved, tokenizer=tokenizer, held=held, ends=ends, new_tokens=given.new_tokens)
    curve: list[dict[str, float]] = []
    evals: list[dict[str, float]] = []

    def correct(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        texts = [one[0]["content"] for one in completions]
        rewards = [float(final_number(text) == right) for text, right in zip(texts, answer, strict=True)]
        curve.append({"step": len(curve) + 1, "reward": sum(rewards) / len(rewards), "time": time.time() - began})
        return rewards

    class Held(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop |= time.time() - began > 60 * given.minutes - 30
            if not all(p.isfinite().all() for p in trainer.model.parameters() if p.requires_grad):
                raise SystemExit(f"step {state.global_step}: adapters that are not numbers")
            if state.global_step % given.eval_steps == 0:
                evals.append({"step": state.global_step, "share": solved(trainer.model)})

    trainer = GRPOTrainer(
        model=model, args=settings, reward_funcs=correct, processing_class=tokenizer, peft_config=_trl_adapters(),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": asked(r["question"])}], "answer": r["answer"]} for r in rows]
        ),
        callbacks=[Held()],
    )  # fmt: skip
    evals.append({"step": 0, "share": solved(trainer.model)})
    trainer.train()
    return {"rollouts": curve, "held": evals}
