"""The choice of tokens: filters as in transformers, samples by key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import generation

from surogate_core.bundles import Kernel, Request, Sampling
from surogate_core.generate.sampling import FEW, Rows, choose, filters_of, kept, kept_by_mass, key_of
from surogate_core.kernels.registry import KernelTable, references, using

CPU = torch.device("cpu")
VOCABULARY = 50


def rows(*samplings: Sampling, position: int = 0) -> Rows:
    keys = [key_of(Request(prompt=(1,), max_new_tokens=1, number=n, sampling=s)) for n, s in enumerate(samplings)]
    return Rows.of(samplings, keys, [position] * len(samplings), CPU)


def logits(count: int = 4) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(top_k=7), generation.TopKLogitsWarper(7)),
        (Sampling(top_k=500), generation.TopKLogitsWarper(VOCABULARY)),
        (Sampling(top_p=0.6), generation.TopPLogitsWarper(0.6)),
        (Sampling(min_p=0.1), generation.MinPLogitsWarper(0.1)),
    ],
)
def test_filters_keep_what_transformers_keeps(sampling, warper):
    found = kept(logits(), rows(*[sampling] * 4))
    assert torch.equal(found, warper(None, logits()).isfinite())
    assert found.sum(1).min() >= 1
    assert found.sum(1).max() < VOCABULARY or sampling.top_k == 500


def test_filters_follow_each_other():
    together = Sampling(top_k=9, top_p=0.8, min_p=0.05)
    scores = logits()
    for warper in (generation.TopKLogitsWarper(9), generation.TopPLogitsWarper(0.8), generation.MinPLogitsWarper(0.05)):
        scores = warper(None, scores)
    assert torch.equal(kept(logits(), rows(*[together] * 4)), scores.isfinite())


def test_the_penalty_is_that_of_transformers():
    ids = torch.tensor([[3, 7, 7, 20]] * 4)
    seen = torch.zeros(4, VOCABULARY, dtype=torch.bool).scatter(1, ids, True)
    scores = generation.RepetitionPenaltyLogitsProcessor(3.0)(ids, logits())
    tokens, logprobs = choose(logits(), rows(*[Sampling(temperature=0, repetition_penalty=3.0)] * 4), seen)
    assert torch.equal(tokens, scores.argmax(-1))
    assert torch.equal(logprobs, torch.log_softmax(logits(), -1).gather(1, tokens[:, None])[:, 0])


def test_a_choice_of_few_looks_at_the_most_probable_tokens_alone():
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(200, 3 * FEW, generator=generator) * 2
    seen = torch.rand(200, 3 * FEW, generator=generator) < 0.1
    some = [
        Sampling(top_k=20, top_p=0.9, temperature=0.7),
        Sampling(top_k=FEW - 1, min_p=0.02),
        Sampling(temperature=0, repetition_penalty=2.0),
        Sampling(top_k=5, temperature=3.0, repetition_penalty=0.5),
    ]
    full = rows(*some * 50)
    assert filters_of(some) == "few"
    chosen = [choose(scores, replace(full, filters=how), seen)[0] for how in ("few", "sorted")]
    assert torch.equal(*chosen)
    tokens, logprobs = choose(scores, replace(full, filters="few"))
    assert torch.equal(tokens, choose(scores, full)[0])
    assert torch.allclose(logprobs, choose(scores, full)[1], atol=1e-6)
    assert (tokens != scores.argmax(-1))[3::4].any()


def test_the_mass_of_tokens_is_found_without_a_sort():
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(300, 400, generator=generator) * torch.tensor([0.1, 1.0, 10.0]).repeat(100)[:, None]
    some = [Sampling(top_p=0.9), Sampling(top_p=0.2, min_p=0.1), Sampling(min_p=0.3), Sampling(), Sampling(top_p=1e-6)]
    full = rows(*some * 60)
    assert filters_of(some) == "mass"
    assert torch.equal(kept_by_mass(scores, full), kept(scores, full))
    assert kept_by_mass(scores, full).sum(1).unique().numel() > 20
    # Equal tokens stay together.
    assert kept_by_mass(torch.zeros(1, 8), rows(Sampling(top_p=0.5))).all()


def test_a_kernel_of_bounds_takes_the_place_of_the_other_ways():
    scores = torch.randn(60, 300, generator=torch.Generator().manual_seed(7))
    seen = torch.rand(60, 300, generator=torch.Generator().manual_seed(8)) < 0.1
    some = [Sampling(top_k=20, top_p=0.9), Sampling(repetition_penalty=2.0, min_p=0.02), Sampling(temperature=0)]
    full = rows(*some * 20)
    calls = []

    def bounds(*arguments):
        calls.append(arguments)
        return references["token_bounds"].function(*arguments)

    kernel = Kernel(op="token_bounds", name="test", function=bounds, supports=lambda device, dtype: True)
    for masks in ((), (seen,)):
        expected = choose(scores, full, *masks)
        with using(KernelTable(device=CPU, kernels=(kernel,))):
            found = choose(scores, full, *masks)
        assert torch.equal(found[0], expected[0])
        assert torch.allclose(found[1], expected[1], atol=1e-6)
    assert len(calls) == 2


def test_the_cheapest_way_to_filter():
    short, long, nucleus, greedy = (
        Sampling(top_k=20),
        Sampling(top_k=FEW),
        Sampling(top_p=0.9),
        Sampling(temperature=0, top_k=FEW),
    )
    assert filters_of([Sampling(), Sampling(temperature=0)]) == "none"
    assert filters_of([short, greedy]) == "few"
    assert filters_of([nucleus, Sampling(), greedy]) == "mass"
    assert filters_of([short, long]) == filters_of([short, nucleus]) == filters_of([short, Sampling()]) == "sorted"


def test_samples_have_the_probabilities_of_the_softmax():
    count, sampling = 4000, Sampling(temperature=0.8)
    one = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf")]])
    keys = [key_of(Request(prompt=(1,), max_new_tokens=1, sample=n)) for n in range(count)]
    tokens, _ = choose(one.expand(count, -1), Rows.of([sampling] * count, keys, [0] * count, CPU))
    shares = torch.bincount(tokens, minlength=5) / count
    assert torch.allclose(shares, torch.softmax(one[0] / 0.8, -1), atol=0.03)
    assert shares[4] == 0


def test_greedy_and_sampled_rows_share_a_batch():
    mixed = rows(Sampling(temperature=0), Sampling(temperature=5.0, top_k=3), Sampling(temperature=0), Sampling())
    tokens, _ = choose(logits(), mixed)
    assert tokens[0] == logits()[0].argmax()
    assert tokens[2] == logits()[2].argmax()
    assert tokens[1] in logits()[1].topk(3).indices


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"top_k": -1}, {"repetition_penalty": 0}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
