"""Twenty optimizer steps of GRPO equal TRL's, on the same completions, in fp32 on the CPU.

Needs ``pip install trl peft accelerate datasets``; skipped without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from surogate_model_qwen3.model import build
from surogate_task_grpo.advantages import ADVANTAGES
from surogate_task_grpo.options import GRPOOptions, advantage_name
from surogate_task_grpo.policy_losses import POLICY_LOSSES
from tiny_qwen3 import ADAMW, BF16, tiny_config
from torch import Tensor
from trl_parity import END, distance

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import part_of
from surogate_core.bundles.reinforcement.advantages import advantages
from surogate_core.engine.engine import Engine
from surogate_reinforcement.policy import Policy
from surogate_testing import tiny

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, PROMPTS, GROUP = 20, 2, 4
LR, NORM = 1e-3, 0.5
MOST = 6
"""Tokens of the longest completion."""
TOKENS = 128


SPECS = {spec.name: spec for spec in POLICY_LOSSES}


def policy(options: GRPOOptions) -> Policy:
    return Policy(part_of("policy_loss", SPECS[options.loss_type]), options)


@dataclass(frozen=True)
class Step:
    """The completions of a step: of each prompt in turn, `GROUP` of them."""

    prompts: list[list[int]]
    completions: list[list[int]]

    @property
    def documents(self) -> list[list[int]]:
        return [self.prompts[n // GROUP] + ids for n, ids in enumerate(self.completions)]


def reward(ids: list[int]) -> float:
    """Some function of a completion."""
    return sum(ids) % 7 / 7


def drawn(count: int) -> list[Step]:
    """Completions of which some end, and some reach the largest length."""
    generator = np.random.default_rng(5)
    steps = []
    for _ in range(count):
        prompts = [generator.integers(0, END, length).tolist() for length in (5, 3)]
        completions = []
        for length in generator.integers(1, MOST + 1, PROMPTS * GROUP).tolist():
            ids = generator.integers(0, END, length).tolist()
            completions.append(ids if length == MOST else [*ids[:-1], END])
        steps.append(Step(prompts, completions))
    return steps


def texts_of(steps: list[Step]) -> list[str]:
    return [" ".join(f"w{token}" for token in ids) for step in steps for ids in step.prompts]


def of_trl(saved: Path, options: GRPOOptions, steps: list[Step], output: Path) -> tuple[list[float], dict[str, Tensor]]:
    """(gradient norms, final weights) of TRL's trainer, whose generation is replaced."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    # With a name the table is not pickled for one, which fails under some versions of pyarrow.
    rows = datasets.table.InMemoryTable.from_pydict({"prompt": texts_of(steps)})
    apart = options.loss_type == "rloo"
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}.get(options.loss_type, (0.2, 0.2))
    config = (trl.RLOOConfig if apart else trl.GRPOConfig)(
        output_dir=str(output),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        steps_per_generation=1,
        num_iterations=options.num_iterations,
        max_completion_length=MOST,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=NORM,
        beta=options.beta,
        epsilon=low,
        epsilon_high=high,
        temperature=options.temperature,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **({} if apart else names_of_trl(options)),
    )
    trainer = (trl.RLOOTrainer if apart else trl.GRPOTrainer)(
        model=str(saved),
        args=config,
        reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
        train_dataset=datasets.Dataset(rows, fingerprint="prompts"),
        processing_class=AutoTokenizer.from_pretrained(saved),
    )
    left = iter(steps)

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        step = next(left)
        assert prompt_ids == [ids for ids in step.prompts for _ in range(GROUP)]
        return step.completions if apart else (step.completions, None)

    trainer._generate_single_turn = generate
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return norms, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def names_of_trl(options: GRPOOptions) -> dict[str, str]:
    name = advantage_name(options, SPECS[options.loss_type])
    found = {"loss_type": options.loss_type, "scale_rewards": "none" if name == "mean" else name}
    # A loss type of its own here, a choice of the ratio there.
    level = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    return found | (level if options.loss_type == "gspo" else {})


def of_surogate(saved: Path, options: GRPOOptions, steps: list[Step]) -> tuple[list[float], dict[str, Tensor]]:
    """The same of the engine, with packed completions, two micro-batches a step."""
    made = policy(options).objective()
    names = (*made.columns, "weights")
    parts = {"build": build, "recipe": BF16, "optimizer": ADAMW, "objective": made, "columns": names}
    settings = {"tokens": TOKENS, "borders": 16, "max_grad_norm": NORM, "weight_decay": 0.0}
    weights = load_file(saved / "model.safetensors")
    engine, base = (tiny.engine(tiny_config(), source=tiny.tensor_source(weights), **settings, **parts) for _ in "12")
    norms = []
    for number in range(STEPS):
        if number % options.num_iterations == 0:
            step = steps[number // options.num_iterations]
            batches = packed(step, options, {"old_logprobs": engine, "reference_logprobs": base})
        norms.append(engine.train_step(batches, step=number, lr=LR).read()[1])
    return norms, {name: value.clone() for name, value in engine.state()["trainable"].items()}  # type: ignore[union-attr]


def packed(step: Step, options: GRPOOptions, engines: Mapping[str, Engine]) -> list[MicroBatch]:
    """The micro-batches of a step."""
    documents = step.documents
    prompts = [len(step.prompts[n // GROUP]) for n in range(len(documents))]
    logprobs = {name: scored(engine, documents, options) for name, engine in engines.items()}
    rewards = np.array([reward(ids) for ids in step.completions])
    for n, prompt in enumerate(prompts):
        old, base = (logprobs[name][n][prompt:] for name in ("old_logprobs", "reference_logprobs"))
        rewards[n] -= policy(options).kl_penalty(old, base, [True] * len(old))
    lengths = np.array([len(ids) for ids in step.completions]).reshape(PROMPTS, GROUP)
    spec = next(spec for spec in ADVANTAGES if spec.name == advantage_name(options, SPECS[options.loss_type]))
    advantage = advantages(part_of("advantage", spec), rewards.reshape(PROMPTS, GROUP), lengths).reshape(-1)
    halves = (range(5), range(5, PROMPTS * GROUP))
    counts = [[len(step.completions[n]) for n in half] for half in halves]
    divided = policy(options).aggregation(counts, PROMPTS * GROUP)
    found = []
    for half, one in zip(halves, divided, strict=True):
        labelled = [[t >= prompts[n] for t in range(len(documents[n]))] for n in half]
        batch = tiny.batch([documents[n] for n in half], tokens=TOKENS, borders=16, labelled=labelled)
        values = {name: torch.zeros(TOKENS) for name in (*policy(options).columns, "weights")}
        at = 0
        for n, weight in zip(half, one.weights, strict=True):
            here = slice(at + prompts[n] - 1, at + len(documents[n]) - 1)
            of_engine = {name: torch.tensor(of_each[n][prompts[n] :]) for name, of_each in logprobs.items()}
            named = {**of_engine, "behaviour_logprobs": of_engine["old_logprobs"]}
            named |= {"advantages": torch.tensor(advantage[n]), "weights": torch.tensor(weight)}
            for name in values:
                values[name][here] = named[name].float()
            at += len(documents[n])
        assert bool(((batch.labels != IGNORE_LABEL) == (values["weights"] != 0)).all())
        found.append(replace(batch, columns=values, divisor=one.divisor))
    return found


def scored(engine: Engine, documents: list[list[int]], options: GRPOOptions) -> list[list[float]]:
    """The log-probability of each token of each document at the sampling temperature; 0 of the first."""
    found = []
    for ids in documents:
        batch = tiny.batch([ids], tokens=TOKENS, borders=16)
        blank = {name: torch.zeros(TOKENS) for name in (*policy(options).columns, "weights")}
        logits_TV = engine.logits(replace(batch, columns=blank))[: len(ids) - 1]
        logprobs_TV = torch.log_softmax(logits_TV / options.temperature, -1)
        found.append([0.0, *logprobs_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()])
    return found


@pytest.mark.parametrize(
    "options",
    [
        GRPOOptions(),
        GRPOOptions(loss_type="grpo", beta=0.1, num_iterations=2, scale_rewards="batch"),
        GRPOOptions(loss_type="dr_grpo", temperature=0.7, max_completion_length=MOST),
        GRPOOptions(loss_type="gspo", num_iterations=4),
        GRPOOptions(loss_type="cispo", num_iterations=2, beta=0.05),
        GRPOOptions(loss_type="rloo", num_iterations=2, beta=0.05),
    ],
    ids=lambda options: options.loss_type,
)
def test_twenty_steps(saved: Path, options: GRPOOptions, tmp_path: Path, no_accelerator_state: None) -> None:
    """Gradient norms to 1e-4; final weights to a thousandth of the way that they went."""
    steps = drawn(STEPS // options.num_iterations)
    norms, weights = of_trl(saved, options, steps, tmp_path)
    found_norms, found = of_surogate(saved, options, steps)
    start = load_file(saved / "model.safetensors")
    assert found_norms == pytest.approx(norms, rel=1e-4)
    assert distance(start, weights, found) < 1e-6
