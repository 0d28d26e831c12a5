"""A trained reward model as a reward of reinforcement learning, in whole runs of small models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.cli.main import main
from surogate_core.errors import ConfigError, UserError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]
END, NEWLINE = 2, 201
"""What the embedded template writes behind a reply."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Keys of a reward model that learns to prefer short answers."""
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    rows = [{"prompt": f"Copy {i}", "chosen": "A number.", "rejected": "I do not know at all."} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["task=reward", "validation_datasets=[]", f"datasets=[{{path: '{path}', type: preference}}]", "max_steps=2"]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, base: list[str], run_here: RunHere, pairs: list[str]) -> Path:
    """A run that trained all weights of a reward model."""
    place = tmp_path_factory.mktemp("reward") / "run"
    run_here(place, *base, *pairs, "lora=false", "learning_rate=1e-2")
    return place


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Copy {i}"}) + "\n" for i in range(12)))
    return path


@pytest.fixture(scope="module")
def keys(grpo_keys: list[str], reward: Path) -> list[str]:
    """Overrides of a short run on a random model."""
    return [*grpo_keys, "environment_workers=1", "max_steps=2", "save_steps=1", f"reward_model={reward}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, keys: list[str], run_here: RunHere) -> Path:
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("grpo") / "run"
    assert run_here(run, *keys) == 0
    return run


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def of_transformers(model: Path, ids: list[int]) -> float:
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(loaded(torch.tensor([ids])).logits[0, 0])


def test_scores_are_those_of_transformers(whole: Path, reward: Path, records: Records) -> None:
    lines = rollouts(whole)
    assert len(lines) >= 12
    for line in lines:
        ids = line["samples"][-1]["ids"]
        whole_ids = [*(ids[:-1] if line["reason"] == "stop" else ids), END, NEWLINE]
        assert line["rewards"]["reward_model"] == pytest.approx(of_transformers(reward / "model", whole_ids), abs=1e-5)
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()), abs=1e-9)
    assert len({line["rewards"]["reward_model"] for line in lines}) > 3
    for event in ("rollouts", "rollout_eval"):
        assert all("reward_model" in one["rewards"] for one in records(whole, event))
    assert all("reward_model" in one["seconds"] for one in records(whole, "rollouts"))


def test_equal_runs_are_equal_and_a_killed_one_resumes(
    whole: Path, keys: list[str], tmp_path: Path, run_here: RunHere, digests: Digests
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for name in ("checkpoint-2", "adapter"):
        shutil.rmtree(run / name)
    again = tmp_path / "again"
    assert run_here(run, *keys) == run_here(again, *keys) == 0
    for one in (run, again):
        assert (one / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
        assert digests(one / "adapter") == digests(whole / "adapter")


def test_a_checkpoint_of_another_reward_model_is_refused(
    whole: Path, keys: list[str], reward: Path, tmp_path: Path, run_here: RunHere
) -> None:
    """The place of the model may change, its contents may not."""
    run = shutil.copytree(whole, tmp_path / "run")
    moved = shutil.copytree(reward, tmp_path / "moved")
    assert run_here(run, *keys, f"reward_model={moved}") == 0
    from safetensors.torch import load_file, save_file

    file = moved / "model" / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    for other in (str(moved), "null"):
        with pytest.raises(UserError, match=r"other prompts or rewards \(reward_model [0-9a-f]{16}, now .*restore"):
            run_here(run, *keys, f"reward_model={other}", "max_steps=3")


def test_an_environment_may_only_give_prompts(
    keys: list[str], prompts: Path, tmp_path: Path, run_here: RunHere, records: Records
) -> None:
    only = (
        *keys,
        "environment=trl",
        f"environment.path={prompts}",
        "environment.reward_funcs=[]",
        "eval_steps=0",
        "eval_environment_tasks=0",
    )
    assert run_here(tmp_path / "run", *only, "max_steps=1", "reward_weights={reward_model: 2.0}") == 0
    for line in rollouts(tmp_path / "run"):
        assert line["rewards"].keys() == {"reward_model"}
        assert line["reward"] == 2 * line["rewards"]["reward_model"]
    with pytest.raises(UserError, match=r"gives prompts and no rewards. Fix: reward_model="):
        run_here(tmp_path / "none", *only, "reward_model=null")


FUNCTIONS = """
def letters(completions, **kwargs):
    return [None if len(text) % 3 == 0 else float(len(text)) for text in completions]

def reward_model(completions, **kwargs):
    return [1.0] * len(completions)
"""


def test_the_score_is_beside_the_rewards_of_the_environment(
    keys: list[str], prompts: Path, tmp_path: Path, run_here: RunHere
) -> None:
    """With weight 0 it is only reported; where no reward of the environment applies there is none."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    judged = (*keys, "environment=trl", f"environment.path={prompts}", "max_steps=1", "eval_environment_tasks=0")
    own = (f"environment.reward_funcs=['{tmp_path}/rewards.py:letters']", "num_generations=6")
    assert run_here(tmp_path / "run", *judged, *own, "reward_weights={reward_model: 0.0}") == 0
    lines = rollouts(tmp_path / "run")
    for line in lines:
        assert line["reward"] == line["rewards"]["letters"]
        assert (line["rewards"]["reward_model"] is None) == (line["reward"] is None)
    assert {line["reward"] is None for line in lines} == {True, False}
    same = f"environment.reward_funcs=['{tmp_path}/rewards.py:reward_model']"
    with pytest.raises(UserError, match=r"the environment has a reward of the name reward_model"):
        run_here(tmp_path / "same", *judged, same)


@pytest.mark.parametrize("whole_names", [True, False])
def test_an_adapter_with_its_head_is_read_on_its_base(
    whole_names: bool, keys: list[str], pairs: list[str], hf_dir: Path, base_on: Any, tmp_path: Path, run_here: RunHere
) -> None:
    """An adapter that is not on all projections of a name is folded into the base; its head is read all the same."""
    from peft import PeftModelForSequenceClassification
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    trained = tmp_path / "reward"
    run_here(trained, *base_on(hf_dir), *pairs, "lora_rank=4", "learning_rate=1e-2")
    if not whole_names:
        file = trained / "adapter" / "adapter_model.safetensors"
        kept = {name: t for name, t in load_file(file).items() if "layers.1.self_attn.q_proj" not in name}
        save_file(kept, file, {"format": "pt"})
    run = tmp_path / "run"
    assert run_here(run, *keys, f"reward_model={trained}", "max_steps=1", "eval_environment_tasks=0") == 0
    model = AutoModelForSequenceClassification.from_pretrained(hf_dir, num_labels=1, dtype=torch.float32)
    adapted = PeftModelForSequenceClassification.from_pretrained(model, trained / "adapter").eval()
    for line in rollouts(run)[:4]:
        ids = line["samples"][-1]["ids"]
        whole_ids = [*(ids[:-1] if line["reason"] == "stop" else ids), END, NEWLINE]
        with torch.no_grad():
            score = adapted(torch.tensor([whole_ids])).logits[0, 0].item()
        assert line["rewards"]["reward_model"] == pytest.approx(score, abs=1e-4)


def changed_config(model: Path, place: Path, **values: Any) -> Path:
    copy = shutil.copytree(model, place)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    return copy


def test_what_is_no_reward_model_is_refused(
    keys: list[str], hf_dir: Path, reward: Path, tmp_path: Path, run_here: RunHere
) -> None:
    several = changed_config(reward / "model", tmp_path / "several", id2label={"0": "a", "1": "b"})
    short = changed_config(reward / "model", tmp_path / "short", max_position_embeddings=64)
    other = shutil.copytree(reward / "model", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"Paris": 1022, "October": 1023}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "file").write_text("x")
    for word, words in {
        "nowhere": r"reward_model: nowhere: there is no such model.*Fix: reward_model=DIRECTORY, a run",
        str(tmp_path / "absent"): r"reward_model: .*/absent: there is no such directory",
        str(tmp_path / "file"): r"reward_model: .*/file: is a file",
        str(hf_dir): r"reward_model: .* is a language model, whose head gives next tokens.*Fix: a directory or a run",
        str(several): r"reward_model: .* has 2 labels, and a reward model gives one score",
        str(other): r"reward_model: .* token 'October' has id 1022 here and has id 1023 there",
        str(short): r"reward_model: .* reads up to 64 tokens, and a conversation may have 66.*sequence_len=62",
    }.items():
        with pytest.raises(ConfigError, match=words):
            run_here(tmp_path / "run", *keys, f"reward_model={word}")


def test_a_score_that_is_no_number_is_a_fault(keys: list[str], reward: Path, tmp_path: Path, run_here: RunHere) -> None:
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(reward / "model", tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["score.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"None of .* has a reward: reward_model .* the score of the reward model is nan"
    ):
        run_here(tmp_path / "run", *keys, f"reward_model={broken}", "max_refills=0", "max_attempts_without_signal=1")


def test_the_plan_has_the_bytes_of_the_reward_model(
    keys: list[str], reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *keys]) == 0
    assert "the weights of the reward model need" in capsys.readouterr().out
