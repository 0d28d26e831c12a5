"""`surogate.serve`: a server from Python, with adapters that share their base."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from surogate_command_serve import loading
from surogate_command_serve.serving import serve

from surogate_core.plugin import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token": "short"}, "token: is too short"),
        ({"token": "with a space in it"}, "token: is too short, or has other characters"),
        ({"slots": 0}, "slots 0: must be a whole number"),
        ({"sampling": {"warmth": 1}}, "warmth"),
        ({"adapters": {"base": "b"}, "name": "base"}, "the model is called base too. Fix: --adapter OTHER=b"),
        ({"engine": "none"}, "--engine none"),
        ({"port": -4}, "port -4: must be a whole number from 0 to 65535"),
        ({"adapters": ["runs/a"]}, 'adapters: is no mapping. Fix: adapters={"shop": "runs/a"}'),
    ],
)
def test_bad_input(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        serve("a/model", device="cpu", **values)


def test_a_port_that_is_taken_ends_the_thread(hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(hf_dir, device="cpu") as server:
        with pytest.raises(UserError, match=r"cannot listen on 127\."):
            serve("no/model/is/read", device="cpu", port=server.port)
        # It may be taken while the model is loaded, too.
        monkeypatch.setattr(loading, "check_address", lambda host, port: None)
        with pytest.raises(UserError, match=r"cannot listen on 127\."):
            serve(hf_dir, device="cpu", port=server.port)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("surogate-")]
