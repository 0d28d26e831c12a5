"""Twenty optimizer steps of DPO and IPO equal TRL's, on the same pairs, in fp32 on the CPU.

Needs ``pip install trl peft accelerate datasets``; skipped without.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from surogate_task_preference.objectives import dpo
from surogate_task_preference.options import DPOOptions
from surogate_task_preference.task import of_pairs
from torch import Tensor
from trl_parity import END, distance, engine_of

from surogate_core.batch import MicroBatch
from surogate_core.data.referenced import REFERENCE
from surogate_core.engine.engine import Engine
from surogate_testing import tiny

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, PAIRS = 20, 4
LR, NORM = 1e-3, 0.5
TOKENS, BORDERS = 96, 16

Pair = tuple[list[int], list[int], list[int]]
"""(prompt, chosen answer, rejected answer)"""


def drawn() -> list[Pair]:
    generator = np.random.default_rng(7)
    return [
        tuple(  # type: ignore[misc]
            [*generator.integers(0, END, int(length)).tolist(), *([END] if place else [])]
            for place, length in enumerate(generator.integers(1, 7, 3))
        )
        for _ in range(STEPS * PAIRS)
    ]


Course = tuple[list[float], list[float], list[float], dict[str, Tensor]]
"""(losses, gradient norms, margins, final weights)"""


def of_trl(saved: Path, options: DPOOptions, pairs: list[Pair], output: Path) -> Course:
    import datasets
    import trl
    from transformers import AutoTokenizer

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    # With a name the table is not pickled for one, which fails under some versions of pyarrow.
    rows = datasets.table.InMemoryTable.from_pydict(dict(zip(names, map(list, zip(*pairs, strict=True)), strict=True)))
    config = trl.DPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=NORM,
        beta=options.beta,
        loss_type=options.loss_type,
        label_smoothing=options.label_smoothing,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )

    class Trainer(trl.DPOTrainer):  # type: ignore[misc]
        """Takes the rows as they are, in their order."""

        def _prepare_dataset(self, dataset, *_, **__):  # type: ignore[no-untyped-def]
            return dataset

        def _get_train_sampler(self, *_):  # type: ignore[no-untyped-def]
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = Trainer(
        model=str(saved),
        args=config,
        train_dataset=datasets.Dataset(rows, fingerprint="pairs"),
        processing_class=AutoTokenizer.from_pretrained(saved),
    )
    trainer.train()
    log = [row for row in trainer.state.log_history if "grad_norm" in row]
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return [r["loss"] for r in log], [r["grad_norm"] for r in log], [r["rewards/margins"] for r in log], weights


def of_surogate(saved: Path, options: DPOOptions, pairs: list[Pair]) -> Course:
    """The same of the engine, with packed pairs, two micro-batches a step."""
    made = dpo(options)
    engine = engine_of(saved, made, tokens=TOKENS, borders=BORDERS, max_grad_norm=NORM)
    steps = [pairs[first : first + PAIRS] for first in range(0, len(pairs), PAIRS)]
    halves = [[packed(engine, step[:1], options), packed(engine, step[1:], options)] for step in steps]
    results = []
    for number, batches in enumerate(halves):
        result = engine.train_step(batches, step=number, lr=LR)
        results.append((*result.read(), result.figures()["rewards/margins"]))
    losses, norms, margins = (list(values) for values in zip(*results, strict=True))
    weights = {name: value.clone() for name, value in engine.state()["trainable"].items()}  # type: ignore[union-attr]
    return losses, norms, margins, weights


def packed(engine: Engine, pairs: list[Pair], options: DPOOptions) -> MicroBatch:
    """A micro-batch of pairs with the log-probabilities of the model as it is."""
    documents = [prompt + answer for prompt, *answers in pairs for answer in answers]
    labelled = [
        [place >= len(prompt) for place in range(len(prompt + answer))]
        for prompt, *answers in pairs
        for answer in answers
    ]
    used = sum(map(len, documents))
    batch = tiny.batch(documents, tokens=TOKENS, borders=BORDERS, labelled=labelled)
    batch = of_pairs(replace(batch, real=torch.arange(TOKENS) < used), TOKENS, lengths=options.loss_type == "ipo")
    blank = replace(batch, columns={**batch.columns, REFERENCE: torch.zeros(TOKENS)})
    return replace(batch, columns={**batch.columns, REFERENCE: engine.logprobs(blank).clone()})


@pytest.mark.parametrize(
    "options",
    [
        DPOOptions(),
        DPOOptions(beta=0.3, loss_type="ipo"),
        DPOOptions(beta=0.5, loss_type="robust", label_smoothing=0.1),
        DPOOptions(beta=0.5, loss_type="nca_pair"),
    ],
    ids=lambda options: options.loss_type,
)
def test_twenty_steps(saved: Path, options: DPOOptions, tmp_path: Path, no_accelerator_state: None) -> None:
    """Losses and gradient norms to 1e-4; final weights to a thousandth of the way that they went."""
    pairs = drawn()
    losses, norms, margins, weights = of_trl(saved, options, pairs, tmp_path)
    found_losses, found_norms, found_margins, found = of_surogate(saved, options, pairs)
    assert found_losses == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-4)
    assert found_margins == pytest.approx(margins, rel=1e-3, abs=1e-4)
    assert distance(load_file(saved / "model.safetensors"), weights, found) < 1e-6
