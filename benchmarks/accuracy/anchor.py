"""`anchor`: the fine-tuning of the line "bf16 bf16" by TRL, on the same rows, measured in the same way.

Needs `trl` and `peft`. TRL's batches are documents, as many as fill the rows of one of our steps on average.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accuracy import finetune

ROW = "TRL, bf16 LoRA"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command: those of `finetune`."""
    finetune.add_options(parser)


TINY = finetune.TINY


def run(given: argparse.Namespace) -> None:
    """Train and measure each seed that has no result yet."""
    missing = [name for name in ("trl", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"anchor: {', '.join(missing)} is not installed. Fix: pip install trl peft")
    (given.out / "cells").mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    for seed in given.seeds:
        place = given.out / "cells" / f"trl-s{seed}.json"
        if place.is_file() or time.monotonic() > end:
            continue
        began = time.monotonic()
        adapter, loss = _trained(given, seed)
        trained = time.monotonic() - began
        result = {
            "row": ROW, "group": "anchor", "seed": seed, "keys": {}, "start": None, "train_loss": loss,
            "settings": {key: getattr(given, key) for key in finetune.SETTINGS},
            "train_seconds": trained, **finetune.measured(str(adapter), given, {}),
        }  # fmt: skip
        finetune.write_result(place, result | {"seconds": time.monotonic() - began})
        print(f"{place.stem}: done in {time.monotonic() - began:.0f} s", flush=True)


def rows(out: Path) -> Iterator[dict[str, Any]]:
    """The training rows as prompts and completions, of which TRL trains the completions."""
    for name in ("tune.jsonl", "gsm8k.jsonl"):
        if (out / "data" / name).is_file():
            with (out / "data" / name).open(encoding="utf-8") as file:
                for line in file:
                    prompt, completion = json.loads(line)["messages"]
                    yield {"prompt": [prompt], "completion": [completion]}


def sample(rows: Sequence[dict[str, Any]], size: int = 500) -> Sequence[dict[str, Any]]:
    """About `size` of the rows, from all of them: the files have documents of different lengths."""
    return rows[:: max(1, len(rows) // size)]


def _trained(given: argparse.Namespace, seed: int) -> tuple[Path, float]:
    """(the adapter, the last training loss)."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    base = str(given.model or given.out / "pretrain/model")
    tokenizer = AutoTokenizer.from_pretrained(base)
    found = list(rows(given.out))
    texts = [tokenizer.apply_chat_template([*r["prompt"], *r["completion"]], tokenize=False) for r in sample(found)]
    mean = sum(len(ids) for ids in tokenizer(texts)["input_ids"]) / len(texts)
    gpu = torch.cuda.is_available()
    settings = SFTConfig(
        output_dir=str(given.out / "runs" / f"trl-s{seed}"),
        max_length=given.length,
        per_device_train_batch_size=max(1, round(given.rows * given.length / mean)),
        max_steps=given.steps,
        learning_rate=finetune.LORA["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=max(1, given.steps // 20),
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=seed,
        bf16=gpu,
        use_cpu=not gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    lora = LoraConfig(
        r=finetune.LORA["lora_rank"], lora_alpha=finetune.LORA["lora_alpha"], lora_dropout=0.0,
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16 if gpu else torch.float32)
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=Dataset.from_list(found), processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one][-20:]
    place = given.out / "runs" / f"trl-s{seed}" / "adapter"
    trainer.save_model(str(place))
    return place, sum(losses) / len(losses)
