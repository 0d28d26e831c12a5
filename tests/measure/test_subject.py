"""A model that is measured: likelihoods of continuations, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surogate_core.bundles import Kernel
from surogate_core.config.resolve import load_run_config
from surogate_core.errors import UserError
from surogate_core.inference.generation import named, prepare
from surogate_core.measure import subject as module
from surogate_core.measure.subject import JudgedText, Subject
from surogate_core.plugins.registry import Registry

LENGTHS = ((1, 1), (5, 3), (40, 7), (2, 60), (30, 9), (200, 57))
"""(tokens of the context, of the continuation)."""


def opened(directory: Path, installed: Registry, *keys: str) -> Subject:
    found = named(str(directory))
    config = load_run_config([*found.overrides, *(keys or ("device=cpu",))], registry=installed)
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
        pairs.append(JudgedText(name=f"r:{number}", context=tuple(context), continuation=tuple(ids[before:])))
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
        subject.likelihoods([*pairs, JudgedText(name="r:9", context=(1,) * 200, continuation=(2,) * 58)])


def test_attention_knows_the_longest_document(
    hf_dir: Path, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's flash kernel computes no rows of a document behind the bound."""
    subject, seen = opened(hf_dir, installed), set()

    def attention(q: torch.Tensor, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, scale: float) -> torch.Tensor:
        seen.add(max_seqlen)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    kernel = Kernel(op="attention", name="spy", function=attention, supports=lambda *_: True, priority=999)
    kernels = subject.weights.programs.kernels
    spied = replace(kernels, kernels=(*kernels.kernels, kernel))
    monkeypatch.setattr(type(subject.weights.programs), "kernels", property(lambda self: spied))
    subject.likelihoods([JudgedText(name="r:1", context=(1,) * 70, continuation=(2,) * 30)])
    assert len(seen) == 1
    assert min(seen) >= 99


def test_weights_that_are_no_numbers_are_named(model_copy: Path, installed: Registry) -> None:
    (file,) = model_copy.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    subject = opened(model_copy, installed)
    with pytest.raises(UserError, match=r"^m: the loss is not a number: model.layers.1.mlp.up_proj.weight has NaN"):
        subject.likelihoods([JudgedText(name="r:1", context=(1,), continuation=(2,))])


@pytest.mark.gpu
def test_likelihoods_of_a_gpu_are_those_of_a_cpu(hf_dir: Path, installed: Registry) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(1024, (length,), generator=generator).tolist()) for length in (3, 129, 256, 200, 17)]
    pairs = [JudgedText(name=f"r:{n}", context=one[:2], continuation=one[2:]) for n, one in enumerate(ids)]
    expected = [one.logprob for one in opened(hf_dir, installed).likelihoods(pairs)]
    for keys in (("model_dtype=fp32",), ("model_dtype=bf16",)):
        found = [one.logprob for one in opened(hf_dir, installed, "device=cuda", *keys).likelihoods(pairs)]
        assert found == pytest.approx(expected, rel=1e-3 if "fp32" in keys[0] else 1e-2)
