"""Speed of training on pairs beside that of fine-tuning on the same documents, and beside TRL's trainers.

    python benchmarks/preference.py [--model qwen3-0.6b] [--rank 16 | --full] [--out found.json]
    python benchmarks/preference.py --model qwen3-8b --cases sft dpo orpo trl-dpo --recompute
    python benchmarks/preference.py --small                        # tiny, on a CPU

Cases: `sft`, `dpo`, `ipo`, `orpo` and `simpo` of Surogate on the same packed pairs, `reference` (the forward that
computes the reference once), and `trl-dpo`, `trl-dpo-precomputed` and `trl-orpo` on the same pairs, padded to the
longest of a batch, in bf16 with SDPA. Weights are random. A pair has a prompt and two answers of random lengths. Each
case runs in a process of its own; one that fails costs only itself.

`tokens_per_second` counts tokens that are not padding, at the median of the timed steps. `of_sft` is its share of
`sft`'s. For `dpo` and `ipo`, `with_reference` is the rate over an epoch of which each row was read once more for the
reference: 1 / (1 / dpo + 1 / reference). `memory`: GiB of the GPU at most. `trl-*` needs trl, peft, accelerate and
datasets.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench import adapters, apart, assemble, registry
from surogate_task_preference.task import TASKS, of_pairs

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.data.packing import best_fit_decreasing
from surogate_core.data.referenced import REFERENCE
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource
from surogate_core.mesh.axes import Axes

OURS = ("sft", "dpo", "ipo", "orpo", "simpo", "reference")
PEERS = ("trl-dpo", "trl-dpo-precomputed", "trl-orpo")
WARM_UP = 3.0
"""Seconds of steps that do not count, after two that compile."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Pair = tuple[list[int], list[int], list[int]]
"""(prompt, chosen answer, rejected answer)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One case's figures; times in seconds."""

    case: str
    model: str
    trained: str
    pairs: int = 0
    """Pairs of a step."""
    tokens: int = 0
    """Tokens of a step, without padding."""
    seconds: float = 0.0
    """Time of a step."""
    tokens_per_second: float = 0.0
    of_sft: float | None = None
    with_reference: float | None = None
    memory: float | None = None
    error: str | None = None


def drawn(words: argparse.Namespace, vocabulary: int) -> list[list[Pair]]:
    """The pairs of a step, by micro-batch: as many as fit into its packed rows."""
    random = np.random.default_rng(0)
    micro_batches = []
    for _ in range(words.micro_batches):
        pairs: list[Pair] = []
        while True:
            prompt = int(random.integers(words.prompt // 2, words.prompt * 3 // 2))
            answers = random.integers(words.answer // 2, words.answer * 3 // 2, 2).tolist()
            lengths = [prompt, *answers]
            ids = [random.integers(0, vocabulary, length).tolist() for length in lengths]
            sizes = [size(pair) for pair in pairs] + [2 * prompt + sum(answers)]
            if len(best_fit_decreasing(sizes, words.length)) > words.rows:
                break
            pairs.append((ids[0], ids[1], ids[2]))
        micro_batches.append(pairs)
    return micro_batches


def size(pair: Pair) -> int:
    """Tokens of its two documents."""
    return 2 * len(pair[0]) + len(pair[1]) + len(pair[2])


def packed(pairs: list[Pair], words: argparse.Namespace, borders: int) -> MicroBatch:
    """The pairs as packed rows, without columns."""
    n = words.rows * words.length
    ids, labels = torch.zeros(n, dtype=torch.int64), torch.full((n,), IGNORE_LABEL)
    positions, real = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.bool)
    stops = [0]
    for row, members in enumerate(best_fit_decreasing([size(pair) for pair in pairs], words.length)):
        at = row * words.length
        for prompt, *answers in (pairs[member] for member in members):
            for answer in answers:
                end = at + len(prompt) + len(answer)
                ids[at:end] = torch.tensor(prompt + answer)
                labels[at + len(prompt) - 1 : end - 1] = ids[at + len(prompt) : end]
                positions[at:end] = torch.arange(end - at)
                real[at:end] = True
                stops.append(end)
                at = end
        if at < (row + 1) * words.length:
            positions[at : (row + 1) * words.length] = torch.arange((row + 1) * words.length - at)
            stops.append((row + 1) * words.length)
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        positions=positions,
        cu_seqlens=torch.tensor(stops + [n] * (borders - len(stops)), dtype=torch.int32),
        max_seqlen=words.length,
        tokens=int(real.sum()),
        label_tokens=int((labels != IGNORE_LABEL).sum()),
        real=real,
    )


def ours(case: str, work: list[list[Pair]], config: Mapping[str, Any], words: argparse.Namespace) -> Callable[[], None]:
    """A step of Surogate."""
    device = torch.device("cpu" if words.small else "cuda")
    task = "dpo" if case == "reference" else case
    spec = next((spec for spec in TASKS if spec.name == task), None)
    objective = None if spec is None or spec.objective is None else spec.objective(spec.options())
    columns = () if objective is None else objective.columns
    settings = EngineSettings(
        device=device,
        tokens=words.rows * words.length,
        borders=(borders := 2 * max(map(len, work)) + words.rows + 2),
        max_seqlen=words.length,
        columns=columns,
        dtype=torch.float32 if words.small else torch.bfloat16,
        compiler="fx" if words.small else "inductor",
        cuda_graphs=device.type == "cuda",
        recompute=Recompute(block=words.recompute),
        axes=Axes(micro_batches=len(work)),
        head_chunks=words.head_chunks,
    )
    family, _, _ = words.model.partition("-")
    lora = None if words.full else adapters(words.rank)
    assembly = assemble(registry().get("model", family).build(config), settings, lora=lora)
    if objective is not None:
        assembly = replace(assembly, objective=objective)
    engine = Engine(assembly, RandomSource(seed=0, std=0.02, device=device))
    batches = [packed(pairs, words, borders) for pairs in work]
    if objective is not None:
        batches = [of_pairs(batch, words.length, lengths=True) for batch in batches]
        blank = torch.zeros(words.rows * words.length)
        batches = [replace(b, columns={n: b.columns.get(n, blank) for n in columns}) for b in batches]
        if REFERENCE in columns:
            values = [engine.logprobs(batch).cpu() for batch in batches]
            batches = [replace(b, columns={**b.columns, REFERENCE: v}) for b, v in zip(batches, values, strict=True)]
    if device.type == "cuda":
        batches = [batch.pinned() for batch in batches]

    def step() -> None:
        if case == "reference":
            for batch in batches:
                engine.logprobs(batch).cpu()
        else:
            engine.train_step(batches, step=0, lr=1e-6).read()

    return step


def of_trl(case: str, work: list[list[Pair]], config: Mapping[str, Any], words: argparse.Namespace) -> list[float]:
    """The seconds of steps of TRL's trainer; the first two are not counted."""
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    shape = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    dtype = torch.float32 if words.small else torch.bfloat16
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    pairs = [pair for pairs in work for pair in pairs]
    steps = words.steps + 2
    common = of_both(words, micro_batches=len(work), pairs=max(map(len, work)), steps=steps)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    columns = {name: [pair[place] for pair in pairs] * steps for place, name in enumerate(names)}
    orpo = case == "trl-orpo"
    if orpo:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        kind, arguments = ORPOTrainer, ORPOConfig(**common, beta=0.1)
        columns = orpo_columns(pairs * steps)
    else:
        precomputed = case.endswith("precomputed")
        kind, arguments = trl.DPOTrainer, trl.DPOConfig(**common, precompute_ref_log_probs=precomputed)
    rows = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="pairs")
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    class AsIs(kind):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    if orpo:
        # Its rows are tokenised in `Dataset.map`; these are tokenised already.
        datasets.Dataset.map = lambda self, *_, **__: self
    lora = LoraConfig(r=words.rank, lora_alpha=2 * words.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    AsIs(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=word_tokenizer(PreTrainedTokenizerFast),
        peft_config=None if words.full else lora,
        callbacks=[Clock()],
    ).train()
    return [b - a for a, b in pairwise(times[1:])]


def of_both(words: argparse.Namespace, *, micro_batches: int, pairs: int, steps: int) -> dict[str, Any]:
    """The arguments of TRL's trainers that do not depend on the loss."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": pairs,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": steps,
        "max_length": words.length,
        "learning_rate": 1e-6,
        "gradient_checkpointing": words.recompute,
        "bf16": False,
        "use_cpu": words.small,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 10_000,
        "dataloader_drop_last": False,
    }


def orpo_columns(pairs: list[Pair]) -> dict[str, list[Any]]:
    """The rows of TRL's ORPO trainer."""
    found: dict[str, list[Any]] = {
        "prompt": [""] * len(pairs),
        "chosen": [""] * len(pairs),
        "rejected": [""] * len(pairs),
    }
    found["prompt_input_ids"] = [prompt for prompt, _, _ in pairs]
    found["prompt_attention_mask"] = [[1] * len(prompt) for prompt, _, _ in pairs]
    for place, name in ((1, "chosen"), (2, "rejected")):
        found[f"{name}_input_ids"] = [pair[0] + pair[place] for pair in pairs]
        found[f"{name}_attention_mask"] = [[1] * len(pair[0] + pair[place]) for pair in pairs]
        found[f"{name}_labels"] = [[IGNORE_LABEL] * len(pair[0]) + pair[place] for pair in pairs]
    return found


def word_tokenizer(kind: Any) -> Any:
    """A tokenizer that is only asked for its padding."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return kind(tokenizer_object=backend, eos_token="b", pad_token="a", bos_token="b")


def measure(case: str, words: argparse.Namespace) -> Found:
    """The case's figures."""
    family, _, preset = words.model.partition("-")
    config = dict(registry().get("model", family).presets[preset])
    work = drawn(words, config["vocab_size"])
    if case in PEERS:
        times = of_trl(case, work, config, words)
    else:
        step, times = ours(case, work, config, words), []
        for _ in range(2):  # compiles and captures
            step()
        warm = time.perf_counter() + (0.0 if words.small else WARM_UP)
        while time.perf_counter() < warm:
            step()
        for _ in range(words.steps):
            began = time.perf_counter()
            step()  # reads its result on the host
            times.append(time.perf_counter() - began)
    seconds, tokens = median(times), sum(size(pair) for pairs in work for pair in pairs)
    return Found(
        case=case,
        model=words.model,
        trained=trained(words),
        pairs=sum(map(len, work)),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        memory=None if words.small else torch.cuda.max_memory_allocated() / 2**30,
    )


def trained(words: argparse.Namespace) -> str:
    """What is trained, in words."""
    return "all weights" if words.full else f"LoRA rank {words.rank}"


def compared(found: list[Found]) -> list[Found]:
    """With the shares of `sft` and the rates that include the reference."""
    rates = {one.case: one.tokens_per_second for one in found if one.error is None}
    result = []
    for one in found:
        if one.error is None and "sft" in rates:
            one = replace(one, of_sft=one.tokens_per_second / rates["sft"])
        if one.case in ("dpo", "ipo") and one.error is None and "reference" in rates:
            one = replace(one, with_reference=1 / (1 / one.tokens_per_second + 1 / rates["reference"]))
        result.append(one)
    return result


def measured(case: str, words: argparse.Namespace, arguments: list[str]) -> Found:
    """The case's figures, from a process of its own unless `--within` is given."""
    if words.within:
        return measure(case, words)
    figures = {"case": case, "model": words.model, "trained": trained(words)}
    return Found(**figures | apart(__file__, arguments, case))


def shown(found: Found) -> str:
    """A line."""
    if found.error is not None:
        return f"{found.case:20} {found.model}: {found.error[:200]}"
    parts = [f"{found.tokens_per_second:10,.0f} tok/s", f"{found.seconds * 1e3:.1f} ms", f"{found.pairs} pairs"]
    parts += [f"{found.of_sft:.1%} of sft"] if found.of_sft is not None else []
    parts += [f"{found.with_reference:,.0f} tok/s with the reference"] if found.with_reference is not None else []
    parts += [f"{found.memory:.1f} GiB"] if found.memory is not None else []
    return f"{found.case:20} {found.model}, {found.trained}: {', '.join(parts)}"


def main(arguments: list[str] | None = None) -> None:
    """Measure the cases."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="family-preset")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--recompute", action="store_true", help="recompute layers (gradient checkpointing)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a packed row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--head-chunks", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt, about")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer, about")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--cases", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--within", action="store_true", help="all cases in this process")
    parser.add_argument("--small", action="store_true", help="qwen3-tiny, few tokens, on a CPU")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(arguments)
    if words.small:
        words.model, words.length, words.rows, words.prompt, words.answer = "qwen3-tiny", 256, 2, 16, 32
        words.head_chunks, words.steps = 1, min(words.steps, 5)
    found: list[Found] = []
    for case in words.cases:
        found = compared([*found, measured(case, words, arguments)])
        print(shown(found[-1]), flush=True)
        if words.out is not None:
            words.out.write_text(json.dumps([asdict(one) for one in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
