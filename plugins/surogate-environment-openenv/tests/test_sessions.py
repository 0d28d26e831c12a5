"""Sessions with a server that speaks OpenEnv's messages; without the package websockets they are skipped."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("websockets")

from surogate_environment_openenv.options import OpenEnvOptions
from surogate_environment_openenv.sessions import ServerProblems
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from surogate_core.plugin import MachineError, UserError, bundles
from surogate_testing import NotApplicable, environments


class Guessing:
    """Higher or lower: one session for each connection, as OpenEnv's server has it."""

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self.seen: list[Any] = []
        self.open = 0
        self._resets = 0
        self.server = serve(self._session, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()

    def _session(self, connection: Any) -> None:
        self.open += 1
        secret = 0
        try:
            for text in connection:
                message = json.loads(text)
                self.seen.append(message)
                if message["type"] == "close":
                    return
                if message["type"] == "reset":
                    self._resets += 1
                    secret = message["data"]["seed"] % 10
                    shift = self._resets if "ignores seeds" in self.faults else 0
                    answer = _observation({"text": f"Guess {secret + shift} // 3", "prompt_id": 1}, None, False)
                else:
                    answer = self._step(message["data"], secret)
                if "drops" in self.faults and message["type"] == "step":
                    return
                connection.send("no JSON" if "nonsense" in self.faults else json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            self.open -= 1

    def _step(self, action: Any, secret: int) -> Any:
        if "fails" in self.faults:
            return {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
        guess = action.get("guess")
        if not isinstance(guess, int):
            errors = [{"loc": ["guess"], "msg": "not a number"}]
            return {"type": "error", "data": {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": errors}}
        if "nan" in self.faults:
            return _observation({"text": ""}, float("nan"), False)
        right = guess == secret
        return _observation({"text": "higher" if guess < secret else "lower"}, 1.0 if right else -0.25, right)


def _observation(observation: Any, reward: float | None, done: bool) -> Any:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


@pytest.fixture
def server() -> Iterator[Guessing]:
    made = Guessing()
    yield made
    made.close()


def made(server: Guessing, **changes: Any) -> ServerProblems:
    options = {
        "url": server.url,
        "action": {"guess": "{reply}"},
        "reply": "json",
        "observation": "text",
        "timeout": 5.0,
    }
    return ServerProblems(OpenEnvOptions(**{**options, **changes}))


def secret_of(problem: bundles.EnvironmentProblem) -> int:
    return int(problem.data["seed"]) % 10


def test_it_conforms(server: Guessing) -> None:
    spec = bundles.EnvironmentSpec(
        name="openenv", build=lambda _: made(server), options=OpenEnvOptions, weights={"steps": 0.0}
    )
    for check in environments.CHECKS:
        with suppress(NotApplicable):
            check(spec)


def test_an_episode_of_several_steps(server: Guessing) -> None:
    environment = made(server, system="Play.", prompt="{observation}?", reset={"level": 2})
    problem = environment.problem(3, seed=1)
    secret = secret_of(problem)
    assert problem.messages == (
        {"role": "system", "content": "Play."},
        {"role": "user", "content": f"Guess {secret} // 3?"},
    )
    episode = environment.start(problem)
    turn = episode.reply("<think>12</think> <action>-1</action>")
    assert turn.messages == ({"role": "user", "content": "higher"},)
    assert not turn.done
    assert episode.reply("what?").messages[0]["content"] == "Error: The action is not valid JSON."
    assert episode.reply('"x"').messages[0]["content"] == "Error: Invalid; guess: not a number"
    assert episode.reply(f"{secret}").done
    assert episode.reply("again").done
    assert episode.rewards() == {"reward": 0.75, "steps": 4.0}
    assert {"type": "reset", "data": {"level": 2, "seed": problem.data["seed"]}} in server.seen
    assert {"type": "step", "data": {"guess": -1}} in server.seen


def test_the_last_reward_and_an_episode_that_ends_before_it_is_done(server: Guessing) -> None:
    environment = made(server, reward="last")
    problem = environment.problem(0, seed=0)
    episode = environment.start(problem)
    assert episode.rewards() == {"reward": 0.0, "steps": 0.0}
    episode = environment.start(problem)
    episode.reply("-1")
    assert episode.rewards() == {"reward": -0.25, "steps": 1.0}


def test_tags_and_whole_observations(server: Guessing) -> None:
    environment = made(server, reply="tag", observation="", action={"say": "I: {reply}!", "more": [1, "{reply}"]})
    problem = environment.problem(0, seed=0)
    assert json.loads(problem.messages[0]["content"]) == {"prompt_id": 1, "text": f"Guess {secret_of(problem)} // 3"}
    assert environment.action("so <action>go</action>") == {"say": "I: go!", "more": [1, "go"]}
    episode = environment.start(problem)
    assert "between <action> and </action>" in episode.reply("go").messages[0]["content"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ignores seeds", "begins differently with the same seed"),
        ("drops", "the server ended the session"),
        ("nonsense", "is no message of OpenEnv"),
        ("fails", "the server answered step with an error: it broke"),
        ("nan", "the server's reward is nan"),
    ],
)
def test_a_server_that_misbehaves_is_a_fault_of_the_episode(server: Guessing, fault: str, message: str) -> None:
    environment = made(server)
    server.faults.add(fault)

    def play() -> None:
        environment.start(environment.problem(0, seed=0)).reply("1")

    with pytest.raises(RuntimeError, match=message):
        play()


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        MachineError, match=r"/ws does not answer: .* Fix: start the server, or correct environment.url"
    ):
        ServerProblems(OpenEnvOptions(url=url))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "ftp://a"}, r"environment.url: 'ftp://a' is no address"),
        ({"action": {"message": "hello"}}, r"environment.action: has no \{reply\}"),
    ],
)
def test_wrong_options_are_one_clear_message(server: Guessing, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(server, **changes)


def test_a_field_that_observations_do_not_have(server: Guessing) -> None:
    with pytest.raises(RuntimeError, match=r"has no field 'board'; it has prompt_id, text"):
        made(server, observation="board").problem(0, seed=0)
