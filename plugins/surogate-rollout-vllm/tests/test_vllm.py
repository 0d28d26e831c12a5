"""The engine against a server that computes with the kit's tiny model."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from surogate_rollout_vllm import surogate_rollout_engine
from surogate_rollout_vllm.client import Client
from surogate_rollout_vllm.engine import VllmEngine
from surogate_rollout_vllm.options import VllmOptions
from surogate_rollout_vllm.wire import seed_of

from surogate_core.plugin import MachineError, UserError, bundles, inference
from surogate_core.service.inference import Weights
from surogate_testing import rollouts, tiny

SETTINGS = bundles.RolloutSettings(slots=2, context=32)
PROMPTS = tiny.documents((12, 5, 9))


@pytest.fixture(scope="module")
def still() -> Any:
    """A trainer that does not train."""
    return tiny.engine(lora=tiny.lora())


@pytest.fixture
def trainer() -> Any:
    return tiny.engine(lora=tiny.lora())


@pytest.fixture
def opened(fake: Any, still: Any) -> Callable[..., VllmEngine]:
    def open_(trainer: Any = still, **changes: Any) -> VllmEngine:
        options = VllmOptions(**{"url": fake.url, "retries": 1, **changes})
        made = VllmEngine(Weights.of(trainer), SETTINGS, options)
        made.client._pause = 0.001
        return made

    return open_


def requests(count: int = 3, **changes: Any) -> list[bundles.Request]:
    values: dict[str, Any] = {"max_new_tokens": 6, "sampling": bundles.Sampling(temperature=0), **changes}
    return [bundles.Request(prompt=tuple(p), number=n, **values) for n, p in enumerate(PROMPTS[:count])]


def moved(trainer: Any, by: float = 0.05) -> None:
    """What an optimizer step does to the adapter."""
    with torch.no_grad():
        for group in trainer.parameters.groups:
            group.master.add_(by)
    trainer.parameters.refresh()


@pytest.mark.parametrize("check", rollouts.CHECKS, ids=lambda check: check.__name__)
def test_the_kits_checks_hold_for_a_server_with_the_same_weights(check: Any, fake: Any) -> None:
    spec = dataclasses.replace(surogate_rollout_engine(), open=_opening(fake.url))
    check(spec)


def _opening(url: str) -> Callable[[Weights, bundles.RolloutSettings], bundles.RolloutEngine]:
    return lambda weights, settings: VllmEngine(weights, settings, VllmOptions(url=url))


def test_every_update_reaches_the_server_before_the_next_completion(
    fake: Any, trainer: Any, opened: Callable[..., VllmEngine]
) -> None:
    engine, native = opened(trainer), inference.NativeEngine(Weights.of(trainer), SETTINGS)
    found = [engine.generate(requests())]
    engine.generate(requests())
    assert len(fake.loads) == 1, "an adapter that has not changed is not sent again"
    for _ in range(2):
        moved(trainer)
        found.append(engine.generate(requests()))
        for completion, expected in zip(found[-1], native.generate(requests()), strict=True):
            assert completion.ids == expected.ids
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert found[1] != found[0]
    assert len(fake.loads) == 3
    assert list(fake.adapters) == fake.loads[-1:], "former adapters are unloaded"
    assert not [path for path in engine.adapters._directory().iterdir() if path.name != fake.loads[-1]]


def test_frozen_weights_are_compared_again_when_they_are_forgotten(fake: Any, trainer: Any) -> None:
    settings = dataclasses.replace(SETTINGS, frozen=True)
    engine = VllmEngine(Weights.of(trainer), settings, VllmOptions(url=fake.url))
    before = engine.generate(requests())
    moved(trainer)
    assert engine.generate(requests()) == before
    engine.forget()
    assert engine.generate(requests()) != before
    assert len(fake.loads) == 2


def test_a_copy_of_the_weights_samples_while_they_change(fake: Any, trainer: Any) -> None:
    settings = dataclasses.replace(SETTINGS, frozen=True)
    engine = VllmEngine(Weights.of(trainer), settings, VllmOptions(url=fake.url))
    documents = [list(request.prompt) for request in requests()]
    moved(trainer)
    expected = inference.NativeEngine(Weights.of(trainer), SETTINGS).generate(requests())
    engine.copy_weights(documents)
    moved(trainer)
    assert [one.ids for one in engine.generate(requests())] == [one.ids for one in expected]
    assert len(fake.loads) == 1
    engine.copy_weights(documents)
    assert len(fake.loads) == 2
    engine.close()
    assert not fake.adapters
    engine.close()
    engine.generate(requests())
    assert len(fake.loads) == 3


def test_closing_waits_for_no_server(fake: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VllmEngine(Weights.of(trainer), SETTINGS, VllmOptions(url=fake.url))
    moved(trainer)
    engine.generate(requests())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine.client._port = silent.getsockname()[1]
        monkeypatch.setattr("surogate_rollout_vllm.adapters.UNLOADING", 0.2)
        began = time.monotonic()
        engine.close()
    assert time.monotonic() - began < 5


def test_the_request_names_every_value_that_a_server_has_a_default_for(
    fake: Any, opened: Callable[..., VllmEngine]
) -> None:
    sampling = bundles.Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=3)
    engine = opened()
    engine.generate(requests(1, sampling=sampling, stop_ids=frozenset({7, 3}), sample=2))
    sent = fake.seen[-1]
    assert sent["prompt"] == PROMPTS[0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"]) == (0.7, 5, 0.9, 0.0)
    assert sent["stop_token_ids"] == [3, 7]
    assert (sent["ignore_eos"], sent["return_token_ids"], sent["add_special_tokens"]) == (True, True, False)
    first = bundles.Request(prompt=(1,), max_new_tokens=1)
    others = [dataclasses.replace(first, **change) for change in ({"number": 1}, {"sample": 1})]
    seeds = {
        seed_of(request) for request in (first, *others, dataclasses.replace(first, sampling=bundles.Sampling(seed=1)))
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(dataclasses.replace(first, prompt=(2, 3), max_new_tokens=9)) == seed_of(first)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another base", "has other weights than the trainer: .* differ by .* Fix: serve the model that is trained"),
        ("no updates", "HTTP 404: Not Found. Fix: serve with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("small rank", "max_lora_rank 1.. Fix: serve with --enable-lora --max-lora-rank 4"),
        ("hides adapters", "accepted adapter .* and does not serve it"),
        ("adds a token", "it read 26 other prompt tokens than the 26 that were sent|it read 27 other prompt tokens"),
        ("forgets ids", "it sends no token ids. Fix: vLLM 0.10.2"),
        ("shortens", "it ended after 5 of 6 tokens. Fix: serve with a larger --max-model-len"),
        ("nan", "a log-probability is not finite"),
        ("too few", "5 log-probabilities of 6 tokens"),
        ("aborts", "finish_reason='abort'"),
        ("stops anywhere", "it stopped at token .*, which is no stop token"),
        ("drops", "does not answer after 2 attempts: .*Fix: start the server"),
        ("cuts answers", "does not answer after 2 attempts: "),
    ],
)
def test_a_server_that_misbehaves_is_one_clear_error(
    fake: Any, opened: Callable[..., VllmEngine], fault: str, message: str
) -> None:
    fake.faults.add(fault)
    engine = opened()
    with pytest.raises(MachineError, match=message) as caught:
        engine.generate(requests())
    assert "\n" not in str(caught.value)


def test_a_server_that_ignores_an_update_is_found_out(
    fake: Any, trainer: Any, opened: Callable[..., VllmEngine]
) -> None:
    """Also where the difference is below the tolerance, as after a step with a small learning rate."""
    fake.faults.add("ignores updates")
    engine = opened(trainer, probe_tolerance=0.5)
    engine.generate(requests())
    moved(trainer, by=1e-6)
    engine.generate(requests())  # too small a change to tell

    def train() -> None:
        for _ in range(30):
            moved(trainer, by=1e-2)
            engine.generate(requests())

    with pytest.raises(MachineError, match="has the weights of an earlier step"):
        train()


def test_a_busy_server_is_asked_again_with_the_same_request(fake: Any, opened: Callable[..., VllmEngine]) -> None:
    expected = opened().generate(requests(1))
    engine = opened(retries=2)
    engine.generate(requests(1))
    fake.failures, before = 2, len(fake.seen)
    assert engine.generate(requests(1)) == expected
    assert fake.seen[before] == fake.seen[before + 2]
    fake.failures = 10
    with pytest.raises(MachineError, match="HTTP 503: busy"):
        engine.generate(requests(1))
    fake.failures = 0
    assert engine.generate(requests(1)) == expected, "the engine is usable after a failure"


def test_no_server(still: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(MachineError, match=rf"{url}/v1/models does not answer: .* Fix: start the server, or correct"):
        VllmEngine(Weights.of(still), SETTINGS, VllmOptions(url=url))


def test_a_server_that_never_answers_ends_at_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", key=None, timeout=0.05, retries=1, pause=0.001)
        with pytest.raises(MachineError, match=r"after 2 attempts: no answer within 0.05 s"):
            client.post("/v1/completions", {})


@pytest.mark.parametrize(
    ("processed", "changes", "message"),
    [
        (
            False,
            {"temperature": 0.7},
            r"before .* at temperature=0.7. Fix: serve with --logprobs-mode processed_logprobs",
        ),
        (True, {"top_k": 5}, r"after .* with top_k, .*. Fix: serve with --logprobs-mode raw_logprobs"),
        (True, {"temperature": 0.7}, None),
        (False, {"top_k": 5}, None),
        (False, {}, None),
        (True, {}, None),
    ],
)
def test_a_server_sends_the_log_probabilities_that_the_loss_needs(
    processed: bool,
    changes: dict[str, Any],
    message: str | None,
    fake: Any,
    still: Any,
    opened: Callable[..., VllmEngine],
) -> None:
    fake.processed = processed
    engine, asked = opened(), requests(sampling=bundles.Sampling(tempered_logprobs=True, **changes))
    if message is not None:
        with pytest.raises(MachineError, match=message):
            engine.generate(asked)
        return
    found = engine.generate(asked)
    number = len(fake.seen)
    again = engine.generate(asked)
    assert again == found
    assert len(fake.seen) == number + len(asked), "the server is asked for its mode once"
    if changes.get("temperature"):
        plain = engine.logprobs([(*one.prompt, *made.ids) for one, made in zip(asked, found, strict=True)])
        assert all(made.logprobs != tuple(p[-len(made.ids) :]) for made, p in zip(found, plain, strict=True))


def test_neither_kind_of_log_probabilities_suits_a_temperature_with_a_filter(
    fake: Any, opened: Callable[..., VllmEngine]
) -> None:
    with pytest.raises(
        UserError, match=r"temperature=0.7 and a filter .* Fix: temperature=1, no filter, or rollout=native"
    ):
        opened().generate(requests(sampling=bundles.Sampling(temperature=0.7, top_p=0.9, tempered_logprobs=True)))


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:port", "http://u:p@a", "http://a/?q=1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(UserError, match=r"rollout.url: .* Fix: http://HOST:PORT"):
        Client(url, key=None, timeout=1, retries=0)


def test_the_models_of_a_server(fake: Any, opened: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "abc")
    opened(key_variable="MY_KEY", model="tiny")
    assert fake.headers[-1]["Authorization"] == "Bearer abc"
    with pytest.raises(UserError, match=r"rollout.model: .* does not serve other; it serves tiny"):
        opened(model="other")
    fake.context = 16
    with pytest.raises(MachineError, match=r"serves 16 tokens, and the longest sequence has 32\. Fix: serve with"):
        opened()


def test_a_run_that_trains_whole_matrices_is_refused(fake: Any) -> None:
    weights = Weights.of(tiny.engine())
    with pytest.raises(UserError, match=r"is trained as a whole. Fix: lora: true, or rollout: native"):
        VllmEngine(weights, SETTINGS, VllmOptions(url=fake.url))


def test_an_error_of_the_caller_breaks_off_the_open_requests(fake: Any, opened: Callable[..., VllmEngine]) -> None:
    engine = opened()

    def on_token(index: int, token: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests(), on_token=on_token)
    assert not engine.client._open
    assert len(engine.generate(requests())) == 3
