"""The connection to a Ray cluster, and why there is none. Ray itself is a stand-in."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import surogate_launcher_ray
from surogate_launcher_ray import connection

from surogate_core.plugin import MachineError, load_plugins
from surogate_testing.launchers import Probe


class AuthenticationError(Exception):
    """Ray's error of that name, which is none of Python's."""

    __module__ = "ray.exceptions"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionError("Could not find any running\nRay instance."),
            r"no Ray cluster answers \(Could not find any running Ray instance\.\)\. Fix: `ray start --head` .* one\.$",
        ),
        (
            ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"),
            r"no Ray cluster answers .* has InvalidAuthToken, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to",
        ),
        (
            AuthenticationError("Token authentication is enabled but no token was found."),
            r"this program has no token for it \(Token .*\)\. Fix: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH",
        ),
    ],
)
def test_a_cluster_that_does_not_answer(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Ray:
        is_initialized = staticmethod(lambda: False)

        @staticmethod
        def init(address: str, **keys: Any) -> None:
            raise error

    monkeypatch.setitem(sys.modules, "ray", Ray)
    launcher = surogate_launcher_ray.surogate_launcher()
    with pytest.raises(MachineError, match=f"launcher.ray_address=auto: {said}"):
        launcher.launch(Probe(directory=str(tmp_path)), launcher.options(), load_plugins())


def test_nobody_at_the_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        services = SimpleNamespace(canonicalize_bootstrap_address=lambda address: place)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
        monkeypatch.setitem(sys.modules, "ray._private.services", services)
        monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
        with pytest.raises(MachineError, match=f"no Ray cluster answers .nothing at {place} takes a connection"):
            connection.connected("auto").__enter__()


def test_an_error_that_is_no_word_of_ray_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**keys: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(TypeError, match="a bug"):
        connection.connected("auto").__enter__()
