"""Sessions with an OpenEnv server: JSON messages over a WebSocket, one session for each episode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from surogate_core.plugin import MachineError, UserError, bundles
from surogate_environment_openenv.options import OpenEnvOptions
from surogate_reinforcement.answers import tagged, visible
from surogate_reinforcement.draws import Draws
from surogate_reinforcement.episodes import user_says

LARGEST = 2**24
"""Bytes of the largest message of a server."""
REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors that say that an action is none of the environment's."""


class ActionError(Exception):
    """The server refused an action; its reason goes to the model."""


class Session:
    """A connection that has an environment of its own on the server."""

    def __init__(self, options: OpenEnvOptions) -> None:
        """Raises `MachineError` if the server does not answer."""
        self._timeout, self._stack = options.timeout, ExitStack()
        address = _address(options.url)
        try:
            opened = connect(address, open_timeout=options.timeout, close_timeout=1, max_size=LARGEST, proxy=None)
            self._socket = self._stack.enter_context(opened)
        except (OSError, WebSocketException) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise MachineError(
                f"environment openenv: {address} does not answer: {text}. "
                "Fix: start the server, or correct environment.url"
            ) from error

    def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message; the data of the observation that the server answers.

        Raises `ActionError` for an action that the environment does not have, `RuntimeError` for any other error.
        """
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            text = self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise RuntimeError(f"the server took longer than {self._timeout:g} s for {kind}") from None
        except (OSError, WebSocketException) as error:
            raise RuntimeError(f"the server ended the session: {' '.join(str(error).split())}") from error
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        found = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(found, Mapping):
            raise RuntimeError(f"the server's answer to {kind} is no message of OpenEnv")
        if answer.get("type") == "error":
            message = _message(found)
            if found.get("code") in REFUSED and kind == "step":
                raise ActionError(message)
            raise RuntimeError(f"the server answered {kind} with an error: {message}")
        if not isinstance(found.get("observation"), Mapping):
            raise RuntimeError(f"the server's answer to {kind} has no observation")
        return found

    def close(self) -> None:
        """End the session."""
        with suppress(OSError, WebSocketException):
            self._socket.send(json.dumps({"type": "close"}))
        with suppress(OSError, WebSocketException):
            self._stack.close()


class ServerProblems:
    """Problems without an end: each has a seed of its own, which the server's environment is reset with."""

    size = None

    def __init__(self, options: OpenEnvOptions) -> None:
        self.options = options
        if "{reply}" not in json.dumps(options.action):
            raise UserError("environment.action: has no {reply}. Fix: environment.action={message: '{reply}'}")
        Session(options).close()

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        options = self.options
        own = Draws(seed, number).below(2**31)
        session = Session(options)
        try:
            shown = self.shown(self.reset(session, own))
        finally:
            session.close()
        system = ({"role": "system", "content": options.system},) if options.system else ()
        messages = (*system, *user_says(options.prompt.replace("{observation}", shown)))
        return bundles.EnvironmentProblem(messages=messages, data={"seed": own, "shown": shown})

    def start(self, problem: bundles.EnvironmentProblem) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, problem)

    def reset(self, session: Session, seed: int) -> Mapping[str, Any]:
        """The first observation of a session."""
        return session.ask("reset", {**self.options.reset, "seed": seed})

    def shown(self, found: Mapping[str, Any]) -> str:
        """The text of an observation."""
        observation = found["observation"]
        name = self.options.observation
        if name:
            if name not in observation:
                raise RuntimeError(f"the observation has no field {name!r}; it has {', '.join(sorted(observation))}")
            value = observation[name]
        else:
            value = {k: v for k, v in observation.items() if k not in ("done", "reward", "metadata")}
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)

    def action(self, reply: str) -> Any:
        """The action of a reply. Raises `ActionError` for a reply that has none."""
        text = visible(reply).strip()
        value: Any = text
        if self.options.reply != "text":
            inner = tagged(text, "action")
            if self.options.reply == "tag" and inner is None:
                raise ActionError("There is no action. Write it between <action> and </action>.")
            value = text if inner is None else inner
        if self.options.reply == "json":
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise ActionError("The action is not valid JSON.") from None
        return _filled(self.options.action, value)


class OpenEnvEpisode:
    """An episode on the server."""

    def __init__(self, owner: ServerProblems, problem: bundles.EnvironmentProblem) -> None:
        self._owner, self._rewards, self._done = owner, [0.0], False
        self._session = Session(owner.options)
        if owner.shown(owner.reset(self._session, int(problem.data["seed"]))) != problem.data["shown"]:
            self._session.close()
            raise RuntimeError("the server's environment begins differently with the same seed, so it does not repeat")

    def reply(self, text: str) -> bundles.Turn:
        if self._done:
            return bundles.Turn(done=True)
        try:
            found = self._session.ask("step", self._owner.action(text))
        except ActionError as error:
            self._rewards.append(0.0)
            return bundles.Turn(messages=user_says(f"Error: {error}"), done=False)
        self._rewards.append(_reward(found))
        if found.get("done") is True:
            self._done = True
            self._session.close()
            return bundles.Turn(done=True)
        return bundles.Turn(messages=user_says(self._owner.shown(found)), done=False)

    def rewards(self) -> Mapping[str, float | None]:
        if not self._done:
            self._done = True
            self._session.close()
        total = math.fsum(self._rewards) if self._owner.options.reward == "sum" else self._rewards[-1]
        return {"reward": total, "steps": float(len(self._rewards) - 1)}

    def __del__(self) -> None:
        with suppress(Exception):
            if not self._done:
                self._session.close()


def _message(found: Mapping[str, Any]) -> str:
    """A server's error in one line, with the fields that it names."""
    errors = found.get("errors")
    named = [e for e in errors if isinstance(e, Mapping)] if isinstance(errors, list) else []
    parts = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in named]
    return " ".join("; ".join([str(found.get("message")), *parts]).split())


def _reward(found: Mapping[str, Any]) -> float:
    value = found.get("reward")
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RuntimeError(f"the server's reward is {value!r}")
    return float(value)


def _filled(template: Any, value: Any) -> Any:
    """The template with `{reply}` replaced: by the value where it is a whole text, otherwise by its text."""
    if isinstance(template, Mapping):
        return {key: _filled(item, value) for key, item in template.items()}
    if isinstance(template, list):
        return [_filled(item, value) for item in template]
    if template == "{reply}":
        return value
    if isinstance(template, str):
        return template.replace("{reply}", value if isinstance(value, str) else json.dumps(value))
    return template


def _address(url: str) -> str:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise UserError(f"environment.url: {url!r} is no address of a server. Fix: http://HOST:PORT")
    path = parts.path.rstrip("/")
    return urlunsplit((schemes[parts.scheme], parts.netloc, path if path.endswith("/ws") else f"{path}/ws", "", ""))
