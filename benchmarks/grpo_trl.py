"""TRL's side of benchmarks/grpo.py: GRPOTrainer with the generation of transformers or vLLM, on random weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from bench import registry
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback


@dataclass(slots=True)
class Times:
    """Seconds since the epoch, and of each generation."""

    ends: list[float] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)
    first: float = 0.0
    """When the first completions had their rewards."""


class Watch(TrainerCallback):
    """Notes the end of every step, when the device has done its work."""

    def __init__(self, times: Times):
        self.times = times

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the device, and read the clock."""
        synchronize()
        self.times.ends.append(time.time())


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(
    kind: str, words: argparse.Namespace, prompts: Sequence[str], tokenizer: Any, directory: Path, rewards: str
) -> Times:
    """Train for `words.steps` and two more. `kind`: ``full``, ``lora``, or one of them behind ``vllm-``."""
    family, _, preset = words.model.partition("-")
    values = dict(registry().get("model", family).presets[preset])
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    on_gpu = torch.cuda.is_available() and not words.small
    with torch.device("cuda" if on_gpu else "cpu"):
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    if kind.startswith("vllm-"):
        start_faster(words.samples)
        written(model, tokenizer, directory / "model")
    scope: dict[str, Any] = {}
    exec(rewards, scope)  # the same source that the other side loads
    times = Times()

    def digest(completions: Sequence[str], **others: Any) -> list[float]:
        found: list[float] = scope["digest"](completions)
        times.first = times.first or time.time()
        return found

    # With a name the table is not pickled for one, which fails under some versions of pyarrow.
    rows = datasets.table.InMemoryTable.from_pydict({"prompt": list(prompts)})
    trainer = trl.GRPOTrainer(
        model=model,
        args=settings(words, directory, on_gpu=on_gpu, **(VLLM if kind.startswith("vllm-") else {})),
        reward_funcs=digest,
        train_dataset=datasets.Dataset(rows, fingerprint="prompts"),
        processing_class=tokenizer,
        peft_config=adapters() if kind.endswith("lora") else None,
        callbacks=[Watch(times)],
    )
    generate = trainer._generate_single_turn

    def timed(*given: Any, **others: Any) -> Any:
        synchronize()
        began = time.time()
        found = generate(*given, **others)
        synchronize()
        times.generating.append(time.time() - began)
        return found

    trainer._generate_single_turn = timed
    trainer.train()
    return times


def written(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write the model where vLLM finds it, which takes weights from a directory first and from the trainer later."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    model.name_or_path = model.config._name_or_path = str(directory)


def start_faster(samples: int) -> None:
    """Have vLLM capture the batches that occur alone, which TRL has no argument for."""
    import trl.generation.vllm_generation as generation

    sizes = {"cudagraph_capture_sizes": sorted({1, samples // 2, samples})}
    generation.LLM = partial(generation.LLM, compilation_config=sizes)


def adapters() -> Any:
    """Those of the other side: rank 16 on every projection."""
    import peft

    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
"""Its other settings are TRL's defaults: 30 % of the memory, no sleep between generations."""


def settings(words: argparse.Namespace, directory: Path, *, on_gpu: bool, **engine: Any) -> Any:
    """TRL's defaults, with the sizes of the benchmark."""
    least = {"min_tokens": words.new, "ignore_eos": True} if engine else {"min_new_tokens": words.new}
    if engine:
        engine = {**engine, "vllm_max_model_length": words.prompt + words.new}
    return trl.GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=words.rows,
        gradient_accumulation_steps=words.samples // words.rows,
        num_generations=words.group,
        max_completion_length=words.new,
        generation_kwargs=least,
        max_steps=words.steps + 2,
        learning_rate=1e-6,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **engine,
    )
