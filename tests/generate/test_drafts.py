"""Drafts change no bit: completions are those without, whatever is right and wherever a text ends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hybrid_family
import pytest
import relaying_family
import torch
from replayed_steps import replays
from surogate_model_qwen3 import surogate_model_family as qwen3
from surogate_model_qwen3_moe import surogate_model_family as qwen3_moe
from surogate_recipe_fp8 import FP8Options
from surogate_recipe_fp8.gemm import FP8Hybrid
from tiny_qwen3 import tiny_config

from surogate_core.bundles import Completion, Request, RolloutSettings, Sampling
from surogate_core.dsl.tensors import TensorSpec
from surogate_core.engine.planning.pieces import Source
from surogate_core.generate import drafts as drafting
from surogate_core.generate.decoding import BLOCK, SteppedRunner
from surogate_core.generate.drafts import Drafts, Repeats, Siblings, StepRow, accepted, rows_of, shared_out
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.passes import FixedRunner
from surogate_core.generate.sequences import SEGMENT, Running
from surogate_core.generate.weights import Weights
from surogate_testing import tiny
from surogate_testing.rollouts import Stepwise

torch.set_num_threads(1)

CONTEXT = 160
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.2)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "filters": Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01),
    "tempered": Sampling(temperature=0.7, tempered_logprobs=True),
}


def weights(*, source: Source | None = None, **changes: Any) -> Weights:
    return Weights.load(tiny.assembly(**{"lora": tiny.lora(), **changes}), source or tiny.random_source())


def mixture() -> Weights:
    config = {**qwen3_moe().presets["tiny"], "vocab_size": 61, "num_hidden_layers": 2}
    return weights(config=config, build=qwen3_moe().build)


def hybrid(*kinds: str) -> Weights:
    """In a slot of `CONTEXT` positions its window is a ring."""
    return Weights.of(hybrid_family.engine(config={"kinds": kinds}, tokens=96, max_seqlen=96, borders=8))


def relayed() -> Weights:
    return Weights.of(relaying_family.engine(tokens=96, max_seqlen=96, borders=8))


def sinks() -> Weights:
    from surogate_model_gpt_oss import surogate_model_family as gpt_oss

    config = {**gpt_oss().presets["tiny"], "vocab_size": 61}
    return weights(config=config, build=gpt_oss().build, lora=tiny.lora(targets=()))


@pytest.fixture(scope="module")
def shared() -> Weights:
    return weights()


def opened(made: Weights, *, slots: int = 4, stepped: bool = False, **changes: Any) -> NativeEngine:
    return NativeEngine(made, RolloutSettings(slots=slots, context=CONTEXT), stepped=stepped, **changes)


def drafts_of(engine: NativeEngine) -> Drafts:
    runner = engine._runner
    assert isinstance(runner, FixedRunner | SteppedRunner)
    return runner.drafts


def requests(sampling: Sampling = GREEDY, *, count: int = 3, new: int = 30, **changes: Any) -> list[Request]:
    prompts = tiny.documents((5, 17, 40, 16, 1, 9, 23, 2), seed=4)[:count]
    return [
        Request(prompt=tuple(ids), max_new_tokens=new + 3 * number, number=number, sampling=sampling, **changes)
        for number, ids in enumerate(prompts)
    ]


Guess = Callable[[Sequence[int], int], list[int]]


def guessing(asked: Sequence[Request], expected: Sequence[Completion], wrong: float, vocabulary: int) -> Guess:
    """Drafts of which some are wrong, drawn from what the texts go on with."""
    texts = [(*r.prompt, *c.ids) for r, c in zip(asked, expected, strict=True)]
    draw = random.Random(0)

    def guess(text: Sequence[int], count: int) -> list[int]:
        known = next(t for t in texts if t[: len(text)] == tuple(text))
        whole = [*known[len(text) :], *[0] * count][:count]
        return [draw.randrange(vocabulary) if draw.random() < wrong else token for token in whole]

    return guess


def guessed(engine: NativeEngine, guess: Guess, monkeypatch: pytest.MonkeyPatch) -> NativeEngine:
    """The engine with these drafts at every step."""
    monkeypatch.setattr(Repeats, "next", lambda self, count: guess(self.text, count))
    drafts_of(engine).pays = lambda rows: -1.0
    return engine


CASES: dict[str, Callable[[], Weights]] = {
    "experts": mixture,
    "window": lambda: hybrid("window", "full"),
    "relayed": relayed,
    "sinks": sinks,
}


def ensure_bits(
    made: Weights, asked: list[Request], *, stepped: bool, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Drafts:
    """Completions by drafts, of which one in five is wrong, are those without; what was drafted."""
    expected = opened(made, stepped=stepped, drafts=False, **changes).generate(asked)
    engine = guessed(opened(made, stepped=stepped, **changes), guessing(asked, expected, 0.2, 61), monkeypatch)
    found = engine.generate(asked)
    monkeypatch.undo()
    assert found == expected
    return drafts_of(engine)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_completions_have_the_bits_of_those_without_drafts(shared, name, stepped, monkeypatch):
    for count in (1, 8):
        asked = requests(SAMPLINGS[name], count=count)
        drafts = ensure_bits(shared, asked, stepped=stepped, slots=8, monkeypatch=monkeypatch)
        tokens = sum(r.max_new_tokens for r in asked)
        assert tokens / 3 < drafts.right < tokens
        assert drafts.steps < max(r.max_new_tokens for r in asked)


@pytest.mark.parametrize("name", CASES)
def test_of_other_models_too(name, monkeypatch):
    made = CASES[name]()
    assert ensure_bits(made, requests(SAMPLINGS["sampled"]), stepped=False, monkeypatch=monkeypatch).right > 30
    drafts = ensure_bits(made, requests(SAMPLINGS["sampled"]), stepped=True, monkeypatch=monkeypatch)
    # How many rows an expert has may decide how a GPU adds up its product.
    assert drafts.right > 30 if name in ("window", "relayed") else not drafts.steps


@pytest.mark.parametrize("stepped", [False, True])
def test_a_text_may_end_among_right_drafts(shared, stepped, monkeypatch):
    asked = requests(SAMPLINGS["sampled"])
    expected = opened(shared, stepped=stepped, drafts=False).generate(asked)
    asked[0] = replace(asked[0], stop_ids=frozenset({expected[0].ids[11]}))
    cut = expected[0].ids.index(expected[0].ids[11]) + 1
    seen: list[tuple[int, int]] = []

    def on_token(index: int, token: int) -> bool:
        seen.append((index, token))
        return index == 1 and sum(i == 1 for i, _ in seen) == 13

    engine = guessed(opened(shared, stepped=stepped), guessing(asked, expected, 0.0, 61), monkeypatch)
    found = engine.generate(asked, on_token=on_token)
    assert [len(one.ids) for one in found] == [cut, 13, 36]
    assert [one.reason for one in found] == ["stop", "stop", "length"]
    for index, (one, whole) in enumerate(zip(found, expected, strict=True)):
        assert one.ids == whole.ids[: len(one.ids)] == tuple(token for i, token in seen if i == index)
        assert one.logprobs == whole.logprobs[: len(one.ids)]
    assert drafts_of(engine).steps < 12


@pytest.mark.parametrize("stepped", [False, True])
def test_a_slot_may_end_among_right_drafts(shared, stepped, monkeypatch):
    (request,) = requests(count=3, new=CONTEXT - 46)[2:]
    assert len(request.prompt) + request.max_new_tokens == CONTEXT
    assert ensure_bits(shared, [request], stepped=stepped, monkeypatch=monkeypatch).right > 80


@pytest.mark.parametrize("stepped", [False, True])
def test_texts_that_repeat_themselves_take_fewer_steps(stepped):
    made = Weights.load(tiny.assembly(), tiny.random_source(std=0.02))  # nearly the embedding of the last token
    asked = requests(count=2, new=90)
    expected = opened(made, stepped=stepped, drafts=False).generate(asked)
    engine = opened(made, stepped=stepped)
    drafts = drafts_of(engine)
    drafts.pays = lambda rows: 0.5
    assert engine.generate(asked) == expected
    assert drafts.right > 60 > 3 * drafts.steps
    counts = drafts.steps, drafts.right
    assert engine.generate(asked) == expected
    assert (drafts.steps, drafts.right) == (2 * counts[0], 2 * counts[1])


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kinds", ["full", "window"])
def test_a_rejected_draft_may_have_no_number(kinds, stepped, monkeypatch):
    """It does not stay in what the next rows read, which is all places of a ring."""
    config = {**hybrid_family.CONFIG, "kinds": [kinds, "full"]}
    plain, asked = tiny.random_source(), requests(count=2, new=50)

    def made(broken: Sequence[int] = ()) -> Weights:
        def source(spec: TensorSpec) -> torch.Tensor:
            value = plain(spec).clone()
            if spec.hf_name == "embed.weight":
                value[[*broken]] = math.nan
            return value

        return weights(config=config, build=hybrid_family.Hybrid, lora=tiny.lora(targets=()), source=source)

    expected = opened(made(), stepped=stepped, drafts=False).generate(asked)
    used = {token for r, c in zip(asked, expected, strict=True) for token in (*r.prompt, *c.ids)}
    unused = next(token for token in range(64) if token not in used)
    right = guessing(asked, expected, 0.0, 61)

    def guess(text: Sequence[int], count: int) -> list[int]:
        return [*right(text, 1), *[unused] * count][:count]

    engine = guessed(opened(made([unused]), stepped=stepped), guess, monkeypatch)
    assert engine.generate(asked) == expected
    assert drafts_of(engine).right > 30


def test_angles_that_change_with_the_length_of_a_text(monkeypatch):
    """Rows behind the change have the old angles; on a GPU the texts that change are prefilled together."""
    rope = {
        "rope_theta": 10_000.0,
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + 2 * i for i in range(8)],
        "original_max_position_embeddings": 24,
    }
    config = tiny_config(rope_parameters=rope, initializer_range=0.3)
    made = weights(config=config, build=qwen3().build, lora=tiny.lora(targets=()))
    asked = requests(SAMPLINGS["sampled"])
    assert ensure_bits(made, asked, stepped=False, monkeypatch=monkeypatch).right > 30
    assert not ensure_bits(made, asked, stepped=True, monkeypatch=monkeypatch).steps


@pytest.mark.parametrize("stepped", [False, True])
def test_rows_that_depend_on_the_tokens_before_get_none(shared, stepped, monkeypatch):
    """Because of a penalty, a grammar, a state, or a recipe with one scale for all rows."""
    penalised = requests(replace(GREEDY, repetition_penalty=1.3))
    held = requests(stop_ids=frozenset({60}))
    held[1] = replace(held[1], grammar=Stepwise(50, 60, size=61))  # until both end
    fp8 = weights(recipe=FP8Hybrid.of(FP8Options(), "a test"))
    assert not drafts_of(opened(fp8, stepped=stepped)).allowed
    for made, asked in ((shared, penalised), (shared, held[:2]), (hybrid("window", "delta"), requests(new=9))):
        assert not ensure_bits(made, asked, stepped=stepped, monkeypatch=monkeypatch).steps


def test_requests_that_wait(shared, monkeypatch):
    """Which of them are prefilled together decides bits on a GPU, so drafts wait for the last ones."""
    asked = requests(SAMPLINGS["sampled"], count=8)
    fixed = ensure_bits(shared, asked, stepped=False, slots=2, monkeypatch=monkeypatch)
    stepped = ensure_bits(shared, asked, stepped=True, slots=2, monkeypatch=monkeypatch)
    assert fixed.right > 3 * stepped.right > 0


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_many_sequences_whose_step_has_rows_left(shared, window, stepped, monkeypatch):
    """20 of 40 slots run in steps of 48 rows; on a CPU in two passes of 16. No sequence gets more rows than a ring has
    room for beside its window.
    """
    asked = [replace(one, number=8 * n + one.number) for n in range(3) for one in requests(SAMPLED, count=8)][:20]
    made = hybrid("window", "full") if window else shared
    shared_out = drafting.shared_out

    def to_the_first(free: int, rates: list[float], most: list[int]) -> tuple[list[int], float]:
        return shared_out(free, [float(number == 0) for number, _ in enumerate(rates)], most)

    monkeypatch.setattr(drafting, "shared_out", to_the_first)
    drafts = ensure_bits(made, asked, stepped=stepped, slots=40, monkeypatch=monkeypatch)
    assert drafts.right > max(one.max_new_tokens for one in asked)
    assert drafting.ROWS <= SEGMENT


def test_samples_of_one_prompt_draft_for_each_other():
    """The last of them run alone, with what the others ended with."""
    made = Weights.load(tiny.assembly(), tiny.random_source(std=0.05))
    prompt = requests(count=3)[2]
    asked = [
        replace(prompt, sample=n, max_new_tokens=40 + 20 * n, sampling=Sampling(temperature=0.05)) for n in range(4)
    ]
    expected = opened(made, drafts=False).generate(asked)
    engine, alone = opened(made), opened(made)
    assert engine.generate(asked) == expected
    for one, found in zip(asked, expected, strict=True):
        assert alone.generate([one]) == [found]
    assert drafts_of(engine).right > drafts_of(alone).right


# --------------------------------------------------------------------------- choice


def followed(text: str, chosen: str = "") -> Repeats:
    found = Repeats()
    found.follow(map(ord, text), chosen=False)
    found.follow(map(ord, chosen), chosen=True)
    return found


def test_a_text_goes_on_as_it_did_behind_the_longest_ngram():
    def drafted(text: str, count: int) -> str:
        return "".join(map(chr, followed(text).next(count)))

    assert drafted("the cat. the c", 3) == "at."
    assert drafted("xabcd1 yabcd2 bcd3 zabcd", 1) == "2"  # four tokens before three, of equal ones the last
    assert drafted("bcd3 cd4 zbcd", 2) == "3 "
    assert drafted("abcabca", 8) == "bcabcabc"  # beyond its end it goes on in a circle
    assert drafted("aaa", 4) == "aaaa"
    assert drafted("abcdef", 4) == drafted("a", 4) == drafted("", 4) == ""
    assert drafted("abab", 0) == ""


def test_chosen_tokens_say_how_well_drafts_guess():
    assert followed("abcabcabc").rate == 0
    assert followed("abcabc", "abcabcabc").rate > 0.6
    assert 0 < followed("abcabc", "abxabyabz").rate < 0.4
    assert followed("ab", "cdefghi").rate == 0


def test_a_text_goes_on_as_another_of_its_prompt_did():
    siblings = Siblings()
    one, other = (Repeats(siblings=siblings) for _ in range(2))
    one.follow(map(ord, "12345 cats"), chosen=True)
    for text in (one, other):
        text.follow(map(ord, "x"), chosen=False)  # a prompt is in no sibling
    other.follow(map(ord, "234"), chosen=True)
    assert other.next(4) == [*map(ord, "5 ca")]
    assert other.next(20) == [*map(ord, "5 catsx")], "no circle in another text"
    assert other.rate > 0, "the 4 was guessed"
    siblings.ended.append([*map(ord, "2346")])
    siblings.read()
    other.follow([ord("!")], chosen=True)
    other.follow(map(ord, "234"), chosen=True)
    assert other.next(1) == [ord("!")], "its own text before those of others"
    fresh = Repeats(siblings=siblings)
    fresh.follow(map(ord, "234"), chosen=True)
    assert fresh.next(2) == [*map(ord, "!2")], "the latest that goes on"


def test_rows_go_where_they_are_probably_right():
    assert shared_out(4, [0.5, 0.9], [9, 9]) == ([0, 4], pytest.approx(0.9 + 0.81 + 0.729 + 0.6561))
    assert shared_out(4, [0.5, 0.9], [9, 2]) == ([2, 2], pytest.approx(0.9 + 0.81 + 0.5 + 0.25))
    assert shared_out(5, [1.0, 1.0], [9, 9])[0] == [3, 2]
    assert shared_out(0, [1.0], [9]) == ([0], 0)
    assert shared_out(3, [], []) == ([], 0)


def running(text: str, chosen: str, **changes: Any) -> Running:
    request = Request(prompt=tuple(map(ord, text)), max_new_tokens=40, sampling=GREEDY, **changes)
    return Running(index=0, request=request, slot=0, key=(0, 0), filled=False, ids=[*map(ord, chosen)])


def test_sequences_share_the_rows_of_a_step():
    drafts = Drafts(allowed=True, rows=lambda count: 16 if count <= 16 else 64, pays=lambda rows: 0.5)
    for count in range(1, 70):
        found = [len(one) for one in drafts.of([running("abcabc", "abcabcabc") for _ in range(count)])]
        free = drafts.rows(count) - count
        assert sum(found) == (free if free >= 0.7 * count else 0)
        assert max(found, default=0) - min(found, default=0) <= 1
    last = running("abcabc", "abcabcabc" * 4)
    assert [len(one) for one in drafts.of([last])] == [3]  # the row of its last token chooses the fourth
    assert [len(one) for one in drafts.of([last, running("xy", "zuvw")])] == [3, 0]
    assert drafts.of([last, *[running("xy", "zuvw")] * 5]) == []  # five would wait for three drafts
    assert drafts.likely([last])
    assert not drafts.likely([running("xy", "zuvw")])
    assert not Drafts(allowed=False, rows=lambda count: 16, pays=lambda rows: 0.0).of([last])


def test_drafts_pay_sooner_where_steps_take_longer() -> None:
    few, many = (
        drafts_of(opened(weights(config={**tiny.CONFIG, "num_hidden_layers": layers}), stepped=True))
        for layers in (2, 8)
    )
    assert many.pays(16) < few.pays(16) < few.pays(64)


def test_drafts_are_accepted_up_to_the_first_that_was_not_chosen():
    one, two = running("ab", "c"), running("de", "f")
    rows = rows_of([one, two], [[5, 6, 7], [8]])
    assert rows[1] == StepRow(sequence=one, token=5, ahead=1)
    assert [(row.token, row.position, row.number) for row in rows] == [
        (ord("c"), 2, 1), (5, 3, 2), (6, 4, 3), (7, 5, 4), (ord("f"), 2, 1), (8, 3, 2),
    ]  # fmt: skip
    pairs = [(token, -float(token)) for token in (5, 9, 7, 1, 8, 4)]
    assert accepted(rows, pairs) == {id(one): pairs[:2], id(two): pairs[4:]}
    assert accepted(rows_of([one, two]), pairs[:2]) == {id(one): pairs[:1], id(two): pairs[1:2]}


def test_a_step_with_drafts_is_captured_for_itself(shared, monkeypatch):
    """Capturing loses the rows of the buffers, and what a step feeds back is no part of the next one."""
    asked = requests(SAMPLINGS["sampled"])
    expected = opened(shared, stepped=True, drafts=False).generate(asked)
    right = guessing(asked, expected, 0.2, 61)
    engine = guessed(
        opened(shared, stepped=True), lambda text, count: right(text, count * (len(text) % 7 < 4)), monkeypatch
    )
    runner, _ = replays(engine, monkeypatch)
    for _ in range(2):
        assert engine.generate(asked) == expected
    assert {kind.drafted for kind in runner._graphs} == {False, True}


def test_no_block_is_started_ahead_of_a_step_with_drafts(shared, monkeypatch):
    asked = requests(count=1, new=4 * BLOCK)
    expected = opened(shared, stepped=True, drafts=False).generate(asked)
    guess = guessing(asked, expected, 0.0, 61)
    engine = guessed(opened(shared, stepped=True), guess, monkeypatch)
    queued: list[tuple[bool, int]] = []
    queue = SteppedRunner._queue

    def noted(self, kind, steps):
        queued.append((kind.drafted, steps))
        return queue(self, kind, steps)

    monkeypatch.setattr(SteppedRunner, "_queue", noted)
    assert engine.generate(asked) == expected
    assert queued == [(True, 1), (True, 1)]
    queued.clear()
    monkeypatch.setattr(Repeats, "next", lambda self, count: [])
    assert engine.generate(asked) == expected
    assert queued == [(False, BLOCK)] * 3 + [(False, BLOCK - 1)]
