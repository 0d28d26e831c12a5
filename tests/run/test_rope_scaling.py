"""`rope_scaling` and `max_model_len`: what is trained is what transformers reads from the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.dsl.rope import BY_LENGTH, KINDS, Rope
from surogate_core.errors import ConfigError, UserError
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import resolve_model

Changes = Callable[..., dict[str, Any]]


@pytest.fixture
def values(hf_dir: Path, installed: Registry) -> Changes:
    """The config.json that a run on `hf_dir` trains."""

    def read(*overrides: str) -> dict[str, Any]:
        config = load_run_config([f"model={hf_dir}", *overrides], registry=installed)
        return dict(resolve_model(config, installed).model.config)

    return read


def test_nothing_changes_by_default(values: Changes, hf_dir: Path) -> None:
    assert values() == json.loads((hf_dir / "config.json").read_text())


def test_the_keys_reach_the_model(values: Changes) -> None:
    by_name = values("rope_scaling=yarn", "max_model_len=1024", "sequence_len=512")
    assert by_name["max_position_embeddings"] == 1024
    rope = Rope(by_name, 16)
    assert (rope.kind, rope.parameters["factor"], rope.parameters["original_max_position_embeddings"]) == (
        "yarn",
        4,
        256,
    )
    as_mapping = values("rope_scaling={type: linear, factor: 2.0}", "sequence_len=64")
    assert (Rope(as_mapping, 16).kind, as_mapping["max_position_embeddings"]) == ("linear", 256)
    assert values("max_model_len=128", "sequence_len=64")["max_position_embeddings"] == 128
    with pytest.raises(UserError, match=r"rope_scaling: linear.*max_model_len above the model's 256"):
        values("rope_scaling=linear", "sequence_len=64")
    with pytest.raises(UserError, match="RoPE scaling `spiral` is not available"):
        values("rope_scaling={type: spiral, factor: 2.0}", "sequence_len=64")


def test_an_exported_model_has_the_scaling(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: Callable[..., int]
) -> None:
    scaling = ("rope_scaling=yarn", "max_model_len=1024")
    run_here(tmp_path / "out", *base_on(hf_dir), "lora=false", "max_steps=1", *scaling)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert loaded.config.rope_parameters["rope_type"] == "yarn"
    assert loaded.config.max_position_embeddings == 1024
    rope = Rope(json.loads((tmp_path / "out" / "model" / "config.json").read_text()), 16)
    rotary = loaded.model.rotary_emb
    assert torch.equal(rotary.inv_freq, rope.frequencies())
    assert rotary.attention_scaling == rope.amplitude != 1.0


# ------------------------------------------------------------------- documents and positions


@pytest.fixture
def long_rows(tmp_path: Path) -> str:
    """Data with a document of about 400 tokens."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": "the cat " * n}) + "\n" for n in (5, 10, 200)))
    return f"datasets=[{{path: '{path}', type: text}}]"


@pytest.mark.slow
def test_a_document_beyond_the_positions_ends_the_run_before_it_starts(
    tmp_path: Path,
    hf_dir: Path,
    long_rows: str,
    base_on: Callable[[Path], list[str]],
    run_here: Callable[..., int],
) -> None:
    keys = [*base_on(hf_dir), long_rows, "validation_datasets=[]", "validation_split_ratio=0", "max_steps=1"]
    with pytest.raises(UserError, match=r"has \d+ tokens, but the model's positions end at 256"):
        run_here(tmp_path / "refused", *keys, "sequence_len=1024")
    assert not (tmp_path / "refused" / "adapter").exists()
    # Short documents may share a long row; so may what is cut, and what the user stretches the model for.
    for name, more in (
        ("dropped", "max_length=256"),
        ("split", "truncation_strategy=split"),
        ("stretched", "rope_scaling=yarn"),
    ):
        own = {"split": ["max_length=200"], "stretched": ["max_model_len=1024"]}.get(name, [])
        assert run_here(tmp_path / name, *keys, "sequence_len=1024", more, *own) == 0
    card = (tmp_path / "split" / "adapter" / "README.md").read_text()
    assert "tokens of the longest document | 200" in card


@pytest.mark.slow
def test_a_model_from_scratch_has_the_positions_that_it_was_trained_on(
    tmp_path: Path, hf_dir: Path, long_rows: str, base: list[str], run_here: Callable[..., int]
) -> None:
    keys = [*base, long_rows, "validation_datasets=[]", "validation_split_ratio=0", "max_steps=1", "lora=false"]
    positions = "model.config.max_position_embeddings=256"
    for name, more in (("preset", []), ("directory", [f"model={hf_dir}", "from_scratch=true"])):
        assert run_here(tmp_path / name, *keys, "sequence_len=5000", *more) == 0
        written = json.loads((tmp_path / name / "model" / "config.json").read_text())
        assert written["max_position_embeddings"] == 5000
    with pytest.raises(UserError, match="positions end at 256"):
        run_here(tmp_path / "asked", *keys, "sequence_len=5000", positions)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [1.0 + 2 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "proportional": {"partial_rotary_factor": 0.5},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""One of each kind; `test_shared_rows.py` of the engine has them on several ranks."""


def scaled(directory: Path, kind: str) -> Path:
    """A directory with this RoPE; dynamic has 32 trained positions, the others cover 128."""
    config = json.loads((directory / "config.json").read_text())
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, **SCALINGS[kind]}
    config |= {"rope_parameters": parameters, "max_position_embeddings": 32 if kind == "dynamic" else 128}
    config["initializer_range"] = 0.2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_every_rope_generates_like_transformers(
    kind: str, model_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = scaled(model_copy, kind)
    words = ["--prompt", "The chain of the bike slips when", "--max-new-tokens=60", "--temperature=0", "--ignore-eos"]
    assert main(["generate", str(base), *words, "device=cpu", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base).eval()
    given = tokenizer(words[1], return_tensors="pt")
    # With longrope the cache of transformers keeps the keys of the short factors, except in the Phi-3 family.
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": kind != "longrope"}
    found = model.generate(**given, max_new_tokens=60, **greedy)
    assert found.shape[1] > 60
    expected = tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    assert json.loads(line)["text"] == expected


@pytest.mark.slow_cases("linear", "yarn", "llama3", "default", "proportional")
@pytest.mark.parametrize("kind", KINDS)
def test_reinforcement_learning_trains_the_probabilities_that_it_samples(
    kind: str, tmp_path: Path, model_copy: Path, grpo_keys: list[str], run_here: Any, records: Any
) -> None:
    base = scaled(model_copy, kind)
    keys = [*grpo_keys, f"model={base}", "max_steps=2", "eval_steps=0", "save_steps=0", "max_completion_length=40"]
    if kind in BY_LENGTH:
        with pytest.raises(
            ConfigError, match=r"sequence_len: is 64, and .* has RoPE whose angles.*: sequence_len: 32$"
        ):
            run_here(tmp_path / "run", *keys)
        keys += ["sequence_len=32", "max_completion_length=16"]
    run_here(tmp_path / "run", *keys)
    figures = [record["figures"] for record in records(tmp_path / "run", "step_end")]
    assert figures
    assert all(one["logprob_gap/max"] < 1e-4 for one in figures)
