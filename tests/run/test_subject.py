"""A model that is measured: likelihoods of continuations, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surogate_core.config.resolve import load_run_config
from surogate_core.errors import UserError
from surogate_core.plugins.registry import Registry
from surogate_core.run import subject as module
from surogate_core.run.generation import named, prepare
from surogate_core.run.subject import Pair, Subject

LENGTHS = ((1, 1), (5, 3), (40, 7), (2, 60), (30, 30), (90, 20), (200, 57))
"""(tokens of the context, of the continuation)."""


def opened(directory: Path, installed: Registry) -> Subject:
    found = named(str(directory))
    config = load_run_config([*found.overrides, "device=cpu"], registry=installed)
    engine = installed.get("rollout", "native")
    return Subject.load("m", prepare(found, config, installed), installed, engine)


def test_likelihoods_are_those_of_transformers(
    hf_dir: Path, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(hf_dir).eval()
    pairs, expected = [], []
    for number, (before, after) in enumerate(LENGTHS):
        context = torch.randint(1024, (before,), generator=generator).tolist()
        greedy = number % 2 == 0
        ids = list(context)
        for _ in range(after):
            following = model(torch.tensor([ids])).logits[0, -1].argmax()
            ids.append(int(following) if greedy else int(torch.randint(1024, (1,), generator=generator)))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, before - 1 : -1].double(), dim=-1)
        expected.append((logprobs.gather(1, torch.tensor(ids[before:])[:, None]).sum().item(), greedy))
        pairs.append(Pair(name=f"r:{number}", context=tuple(context), continuation=tuple(ids[before:])))
    subject = opened(hf_dir, installed)
    for tokens in (512, 64):
        monkeypatch.setitem(module.TOKENS, "cpu", tokens)
        found = subject.likelihoods(pairs)
        assert [one.greedy for one in found] == [greedy for _, greedy in expected]
        assert [one.logprob for one in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert subject.likelihoods([]) == []
    with pytest.raises(
        UserError, match="r:9: has 257 tokens before its last one, and the model's positions end at 256"
    ):
        subject.likelihoods([*pairs, Pair(name="r:9", context=(1,) * 200, continuation=(2,) * 58)])


def test_weights_that_are_no_numbers_are_named(model_copy: Path, installed: Registry) -> None:
    (file,) = model_copy.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    subject = opened(model_copy, installed)
    with pytest.raises(UserError, match=r"^m: the loss is not a number: model.layers.1.mlp.up_proj.weight has NaN"):
        subject.likelihoods([Pair(name="r:1", context=(1,), continuation=(2,))])
