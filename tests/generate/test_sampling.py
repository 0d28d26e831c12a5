"""The choice of tokens: filters as in transformers, samples by key."""

from __future__ import annotations

import pytest
import torch
from transformers import generation

from surogate_core.bundles import Kernel, Request, Sampling
from surogate_core.generate.sampling import FLOATS, Rows, choose, filtered, key_of
from surogate_core.kernels.decoding import choose_tokens, kept, token_bounds
from surogate_core.kernels.registry import KernelTable, using

CPU = torch.device("cpu")
VOCABULARY = 50


def rows(*samplings: Sampling, position: int = 0) -> Rows:
    keys = [key_of(Request(prompt=(1,), max_new_tokens=1, number=n, sampling=s)) for n, s in enumerate(samplings)]
    return Rows.of(samplings, keys, [position] * len(samplings), CPU)


def logits(count: int = 4) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2


def kept_of(sampling: Sampling) -> torch.Tensor:
    some = rows(*[sampling] * 4)
    return kept(logits(), *token_bounds(logits(), some.temperature_N, some.top_k_N, some.top_p_N, some.min_p_N))


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
    found = kept_of(sampling)
    assert torch.equal(found, warper(None, logits()).isfinite())
    assert found.sum(1).min() >= 1
    assert found.sum(1).max() < VOCABULARY or sampling.top_k == 500


def test_filters_follow_each_other():
    together = Sampling(top_k=9, top_p=0.8, min_p=0.05)
    scores = logits()
    for warper in (generation.TopKLogitsWarper(9), generation.TopPLogitsWarper(0.8), generation.MinPLogitsWarper(0.05)):
        scores = warper(None, scores)
    assert torch.equal(kept_of(together), scores.isfinite())


def test_only_rows_that_keep_some_tokens_are_filtered():
    assert not filtered([Sampling(), Sampling(temperature=0)])
    assert all(filtered([Sampling(), one]) for one in (Sampling(top_k=5), Sampling(top_p=0.9), Sampling(min_p=0.1)))


def test_the_penalty_is_that_of_transformers():
    ids = torch.tensor([[3, 7, 7, 20]] * 4)
    seen = torch.zeros(4, VOCABULARY, dtype=torch.bool).scatter(1, ids, True)
    scores = generation.RepetitionPenaltyLogitsProcessor(3.0)(ids, logits())
    tokens, logprobs = choose(logits(), rows(*[Sampling(temperature=0, repetition_penalty=3.0)] * 4), seen)
    assert torch.equal(tokens, scores.argmax(-1))
    assert torch.equal(logprobs, torch.log_softmax(logits(), -1).gather(1, tokens[:, None])[:, 0])


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


def test_a_rows_bits_do_not_depend_on_what_its_neighbours_ask_for():
    """Although a kernel adds up in another order than torch."""

    def function(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = choose_tokens.__wrapped__(*arguments)
        return tokens, logprobs.nextafter(torch.tensor(0.0))

    kernel = Kernel(op="choose_tokens", name="other", function=function, supports=lambda device, dtype: True)
    plain, tempered = Sampling(), Sampling(temperature=0.5, tempered_logprobs=True)
    seen, allowed = torch.ones(2, 4, VOCABULARY, dtype=torch.bool)
    allowed[1, :20] = False
    with using(KernelTable(device=CPU, kernels=(kernel,))):
        alone, logprobs = choose(logits(), rows(plain, plain, plain, plain))
        for one, named in ((tempered, {}), (Sampling(repetition_penalty=2.0), {"seen_NV": seen}), (plain, {})):
            for held in ({}, {"allowed_NV": allowed}):
                tokens, found = choose(logits(), rows(plain, one, plain, one), **named, **held)
                assert torch.equal(tokens[::2], alone[::2])
                assert torch.equal(found[::2], logprobs[::2])


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"top_k": -1}, {"repetition_penalty": 0}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_figures_of_rows_are_fp32_also_if_they_are_whole_numbers() -> None:
    whole = Sampling(temperature=1, top_p=1, min_p=0, repetition_penalty=1, tempered_logprobs=True)
    rows = Rows.of([whole], [(0, 0)], [0], torch.device("cpu"))
    assert {getattr(rows, name).dtype for name in FLOATS} == {torch.float32}
