"""Twenty optimizer steps of KTO and of a reward model equal TRL's, on the same answers, in fp32 on the CPU.

Needs ``pip install trl peft accelerate datasets``; skipped without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from surogate_task_kto import loss as kto
from surogate_task_kto.options import KTOOptions
from surogate_task_reward import loss as reward
from surogate_task_reward.options import RewardOptions
from tiny_qwen3 import tiny_config
from torch import Tensor
from trl_parity import END, PAD, distance, engine_of

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.data.referenced import REFERENCE
from surogate_core.dsl import ScoreHead
from surogate_core.engine.engine import Engine
from surogate_testing import tiny

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, ANSWERS = 20, 4
LR, NORM = 1e-3, 0.5
TOKENS, BORDERS = 128, 16

Rows = Mapping[str, Sequence[Any]]
Course = tuple[list[float], list[float], dict[str, Tensor]]
"""(losses, gradient norms, final weights)"""


def words(generator: np.random.Generator, *, end: bool) -> list[int]:
    found: list[int] = generator.integers(0, END, int(generator.integers(1, 7))).tolist()
    return [*found, END] if end else found


def of_trl(name: str, model: Any, saved: Path, rows: Rows, output: Path, **keys: Any) -> Course:
    """The course of TRL's trainer of this name on the rows as they are, in their order."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    kind: Any = getattr(trl, f"{name}Trainer")

    class Trainer(kind):  # type: ignore[misc]
        def _prepare_dataset(self, dataset, *_, **__):  # type: ignore[no-untyped-def]
            return dataset

        def _get_train_sampler(self, *_):  # type: ignore[no-untyped-def]
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = getattr(trl, f"{name}Config")(
        output_dir=str(output),
        per_device_train_batch_size=ANSWERS,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=NORM,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **keys,
    )
    # With a name the table is not pickled for one, which fails under some versions of pyarrow.
    table = datasets.table.InMemoryTable.from_pydict(dict(rows))
    trainer = Trainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset(table, fingerprint="answers"),
        processing_class=AutoTokenizer.from_pretrained(saved),
    )
    trainer.train()
    log = [row for row in trainer.state.log_history if "grad_norm" in row]
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return [row["loss"] for row in log], [row["grad_norm"] for row in log], weights


SIZES: dict[str, Any] = {"tokens": TOKENS, "borders": BORDERS, "max_grad_norm": NORM}


def trained(engine: Engine, steps: Sequence[Sequence[MicroBatch]]) -> Course:
    found = [engine.train_step(batches, step=number, lr=LR).read() for number, batches in enumerate(steps)]
    state: Any = engine.state()["trainable"]
    return [loss for loss, _ in found], [norm for _, norm in found], {n: value.clone() for n, value in state.items()}


def check(start: Path, theirs: Course, ours: Course) -> None:
    """Losses and gradient norms to 1e-4; final weights to a thousandth of the way that they went."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4, abs=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert distance(load_file(start / "model.safetensors"), theirs[2], ours[2]) < 1e-6


# ----------------------------------------------------------------------------------------- KTO


def judged() -> dict[str, list[Any]]:
    generator = np.random.default_rng(5)
    count = STEPS * ANSWERS
    prompts = [words(generator, end=False) for _ in range(count)]
    answers = [words(generator, end=True) for _ in range(count)]
    moved = [answers[i - 1 if i % ANSWERS else i + ANSWERS - 1] for i in range(count)]
    labels = [bool(generator.integers(0, 2)) for _ in range(count)]
    return {"prompt_ids": prompts, "completion_ids": answers, "KL_completion_ids": moved, "label": labels}


def judged_batch(engine: Engine, rows: Rows, options: KTOOptions, first: int) -> MicroBatch:
    """A step's documents, its mismatched ones, and the log-probabilities of the model as it is."""
    own = range(first, first + ANSWERS)
    found = [(rows["prompt_ids"][i], rows["completion_ids"][i], kto.GOOD if rows["label"][i] else kto.BAD) for i in own]
    if options.loss_type == "kto":
        found += [(rows["prompt_ids"][i], rows["KL_completion_ids"][i], kto.MISMATCHED) for i in own]
    documents = [[*prompt, *answer] for prompt, answer, _ in found]
    labelled = [[place >= len(prompt) for place in range(len(prompt + answer))] for prompt, answer, _ in found]
    batch = tiny.batch(documents, tokens=TOKENS, borders=BORDERS, labelled=labelled)
    kind_N = torch.zeros(TOKENS)
    kind_N[: batch.tokens] = torch.cat([torch.full((len(p) + len(a),), kind) for p, a, kind in found])
    columns = {kto.KIND: kind_N, REFERENCE: torch.zeros(TOKENS)}
    blank = replace(batch, columns=columns, divisor=float(ANSWERS))
    return replace(blank, columns={**columns, REFERENCE: engine.logprobs(blank).clone()})


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_twenty_steps_of_kto(saved: Path, loss_type: Any, tmp_path: Path, no_accelerator_state: None) -> None:
    options = KTOOptions(beta=0.4, desirable_weight=1.5, undesirable_weight=0.8, loss_type=loss_type)
    rows = judged()
    keys = {name: getattr(options, name) for name in ("beta", "desirable_weight", "undesirable_weight", "loss_type")}
    given = {name: value for name, value in rows.items() if loss_type == "kto" or name != "KL_completion_ids"}
    theirs = of_trl("KTO", str(saved), saved, given, tmp_path, **keys, model_init_kwargs={"dtype": "float32"})
    engine = engine_of(saved, kto.objective(options), **SIZES)
    steps = [[judged_batch(engine, rows, options, step * ANSWERS)] for step in range(STEPS)]
    check(saved, theirs, trained(engine, steps))


# -------------------------------------------------------------------------------- reward model


def pairs() -> dict[str, list[list[int]]]:
    generator = np.random.default_rng(6)
    prompts = [words(generator, end=False) for _ in range(STEPS * ANSWERS)]
    return {name: [p + words(generator, end=True) for p in prompts] for name in ("chosen_ids", "rejected_ids")}


def pair_batch(rows: Rows, own: range) -> MicroBatch:
    """Pairs, with a label at the last token of each answer."""
    documents = [rows[name][i] for i in own for name in ("chosen_ids", "rejected_ids")]
    batch = tiny.batch(documents, tokens=TOKENS, borders=BORDERS)
    ends = np.cumsum([len(document) for document in documents]) - 1
    labels_N = torch.full((TOKENS,), IGNORE_LABEL)
    labels_N[ends] = 0
    sides_N = torch.zeros(TOKENS)
    sides_N[: batch.tokens] = torch.cat([torch.full((len(d),), 1.0 - 2 * (n % 2)) for n, d in enumerate(documents)])
    return replace(
        batch, labels=labels_N, label_tokens=len(ends), columns={reward.PREFERRED: sides_N}, divisor=float(len(own))
    )


@pytest.mark.parametrize("centre", [0.0, 0.1])
def test_twenty_steps_of_a_reward_model(saved: Path, centre: float, tmp_path: Path, no_accelerator_state: None) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1, pad_token_id=PAD, dtype="float32")
    model.save_pretrained(tmp_path / "start")
    rows = pairs()
    theirs = of_trl("Reward", model, saved, rows, tmp_path, center_rewards_coefficient=centre or None)
    config = ScoreHead.config(tiny_config(), "Qwen3ForCausalLM")
    engine = engine_of(tmp_path / "start", reward.objective(RewardOptions(centre=centre)), config=config, **SIZES)
    firsts = range(0, STEPS * ANSWERS, ANSWERS)
    # Two micro-batches a step: of one pair and of three.
    steps = [[pair_batch(rows, range(i, i + 1)), pair_batch(rows, range(i + 1, i + ANSWERS))] for i in firsts]
    check(tmp_path / "start", theirs, trained(engine, steps))
