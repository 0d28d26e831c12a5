"""Several adapters on one base that is loaded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mixture import save_qwen3_moe
from safetensors import safe_open
from safetensors.torch import save_file

from surogate_commands.adapters import Adapters, prepare_beside
from surogate_core.bundles import Request, RolloutSettings, Sampling
from surogate_core.config.resolve import load_run_config
from surogate_core.errors import UserError
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.inference.generation import named, prepare, with_adapter
from surogate_core.plugins.registry import Registry
from surogate_testing.pretrained import random_adapter

CPU = ("device=cpu",)
SETTINGS = RolloutSettings(slots=2, context=32, frozen=True)
PROMPTS = ((5, 6, 7, 8), tuple(range(20, 40)))


@pytest.fixture(scope="module")
def pair(hf_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of one kind."""
    place = tmp_path_factory.mktemp("pair")
    return {name: random_adapter(hf_dir, place / name, seed=seed) for seed, name in enumerate(("one", "two"))}


def completed(engine: NativeEngine) -> list[Any]:
    """What greedy decoding gives, tokens and log-probabilities."""
    sampling = Sampling(temperature=0)
    found = engine.generate([Request(prompt=p, max_new_tokens=6, sampling=sampling) for p in PROMPTS])
    return [(one.ids, one.logprobs) for one in found]


def logprobs(weights: Weights) -> list[Any]:
    return completed(NativeEngine(weights, SETTINGS))


def alone(base: Path, adapter: Path | None, registry: Registry, *keys: str) -> list[Any]:
    found = with_adapter(str(base), str(adapter)) if adapter is not None else named(str(base))
    config = load_run_config([*found.overrides, *(keys or CPU)], registry=registry)
    return logprobs(prepare(found, config, registry).load(registry))


def beside(base: Path, adapters: dict[str, Path], registry: Registry, *keys: str) -> tuple[Weights, Adapters]:
    found = named(str(base))
    config = load_run_config([*found.overrides, *(keys or CPU)], registry=registry)
    words = {name: with_adapter(str(base), str(path)) for name, path in adapters.items()}
    prepared, each = prepare_beside(found, words, config, registry)
    weights = prepared.load(registry)
    return weights, Adapters(weights, each)


def test_adapters_take_turns_on_one_base(hf_dir: Path, pair: dict[str, Path], installed: Registry) -> None:
    weights, adapters = beside(hf_dir, pair, installed)
    base = logprobs(weights)
    assert base == alone(hf_dir, None, installed)
    for name in ("two", "one"):
        assert adapters.activate(name)
        assert not adapters.activate(name)
        assert logprobs(weights) == alone(hf_dir, pair[name], installed), "to the bit, with equal ranks"
    assert adapters.activate(None)
    assert logprobs(weights) == base


@pytest.mark.slow_cases("bf16", "host")
@pytest.mark.parametrize(
    "keys",
    [
        (*CPU, "qlora_bnb=true"),
        (*CPU, "model_dtype=bf16", "lora_dtype=bf16"),
        (*CPU, "offload=host"),
        pytest.param(("model_dtype=bf16",), marks=pytest.mark.gpu),
        pytest.param(("model_dtype=bf16", "qlora_bnb=true"), marks=pytest.mark.gpu),
    ],
    ids=["nf4", "bf16", "host", "gpu", "gpu-nf4"],
)
def test_adapters_on_a_base_that_is_kept_otherwise(
    hf_dir: Path, pair: dict[str, Path], installed: Registry, keys: tuple[str, ...]
) -> None:
    weights, adapters = beside(hf_dir, pair, installed, *keys)
    engine = NativeEngine(weights, SETTINGS)
    found = {}
    for name in ("one", "two", "one"):
        adapters.activate(name)
        engine.forget()
        found[name] = completed(engine)
    for name, path in pair.items():
        assert found[name] == alone(hf_dir, path, installed, *keys), "an engine that is open reads the new adapter"


def test_an_engine_that_runs_in_blocks_reads_the_adapter_too(
    hf_dir: Path, pair: dict[str, Path], installed: Registry
) -> None:
    """The way of a GPU, on a CPU; requests join between its blocks."""
    weights, adapters = beside(hf_dir, pair, installed)
    engine = NativeEngine(weights, SETTINGS, stepped=True)
    requests = [
        Request(prompt=prompt, max_new_tokens=12, number=number, sampling=Sampling(temperature=1.0))
        for number, prompt in enumerate([*PROMPTS, (9, 9), (3,)])
    ]
    for name in pair:
        adapters.activate(name)
        engine.forget()
        arrivals = [requests[:1], requests[1:3], requests[3:]]
        tokens: dict[int, list[int]] = {}

        def take(index: int, token: int, logprob: float, tokens: dict[int, list[int]] = tokens) -> bool:
            tokens.setdefault(index, []).append(token)
            return False

        engine.serve(lambda arrivals=arrivals: arrivals.pop(0) if arrivals else (), take)
        expected = NativeEngine(weights, SETTINGS).generate(requests)
        assert [tuple(tokens[index]) for index in range(4)] == [one.ids for one in expected]


def test_adapters_of_other_ranks_scales_and_places(hf_dir: Path, installed: Registry, tmp_path: Path) -> None:
    given = {
        "small": random_adapter(hf_dir, tmp_path / "small"),
        "large": random_adapter(
            hf_dir, tmp_path / "large", seed=2, r=8, use_rslora=True, target_modules=["k_proj", "up_proj"]
        ),
        "uneven": random_adapter(
            hf_dir, tmp_path / "uneven", seed=3, rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 3}
        ),
    }
    weights, adapters = beside(hf_dir, given, installed)
    for name, path in given.items():
        adapters.activate(name)
        for (ids, found), (expected_ids, expected) in zip(
            logprobs(weights), alone(hf_dir, path, installed), strict=True
        ):
            assert ids == expected_ids
            assert found == pytest.approx(expected, abs=1e-4)


def of_experts(base: Path, directory: Path, rank: int, projections: tuple[str, ...]) -> Path:
    """An adapter on the projections of every expert, written by hand."""
    torch.manual_seed(rank)
    tensors = {}
    with safe_open(next(base.glob("*.safetensors")), "pt") as file:
        for name in file.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            if module.rsplit(".", 1)[-1] in projections:
                outputs, inputs = file.get_slice(name).get_shape()
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs)
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank) * 0.3
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(projections)}
    values = {**config, "base_model_name_or_path": str(base)}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


def test_adapters_of_experts(installed: Registry, tmp_path: Path) -> None:
    base = save_qwen3_moe(tmp_path / "moe")
    given = {
        "one": of_experts(base, tmp_path / "one", 2, ("gate_proj", "down_proj")),
        "two": of_experts(base, tmp_path / "two", 4, ("up_proj", "q_proj")),
    }
    weights, adapters = beside(base, given, installed)
    before = logprobs(weights)
    for name, path in given.items():
        adapters.activate(name)
        found, expected = logprobs(weights), alone(base, path, installed)
        assert found != before
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        for (_, values), (_, wanted) in zip(found, expected, strict=True):
            assert values == pytest.approx(wanted, abs=1e-4)


def test_adapters_that_cannot_share_a_base(hf_dir: Path, installed: Registry, tmp_path: Path) -> None:
    lower = random_adapter(hf_dir, tmp_path / "lower")
    upper = random_adapter(hf_dir, tmp_path / "upper", seed=2)
    lower.rename(upper / "stacked_on")
    with pytest.raises(UserError, match=r"--adapter top: it was trained on top of another adapter.*serve it alone"):
        beside(hf_dir, {"top": upper}, installed)
