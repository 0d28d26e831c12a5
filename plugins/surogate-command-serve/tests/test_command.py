"""`surogate serve`: a real process that answers and ends, tokens, and bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from surogate_command_serve.command import FLAGS, _named_adapters, _token_of

from surogate_core.plugin import UserError
from surogate_core.plugin import surogate as main

SUROGATE_PLUGIN = "command-serve"


def test_conformance(surogate_check: Any) -> None:
    surogate_check.run()


def free_port() -> int:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        return int(other.getsockname()[1])


def asked(url: str, token: str, **body: object) -> Any:
    """The answer to a completion, once the server is there."""
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {token}"}
    )
    for _ in range(600):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                return json.loads(error.read())
            time.sleep(0.1)
    raise AssertionError("no server")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_until_it_is_ended(hf_dir: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    """Also where SIGINT was ignored, as it is for a command that a script starts with `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    port, answers = free_port(), []

    def client() -> None:
        try:
            url = f"http://127.0.0.1:{port}/v1"
            answers.append(asked(url, "wrong", prompt="a"))
            line = capsys.readouterr().out.splitlines()[0]
            token = line.removeprefix("token: ").split()[0]
            assert "api_key" in line
            assert "--no-token" in line
            answers.append(asked(url, token, model="qwen3", prompt="The chain", max_tokens=3))
        finally:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=client)
    thread.start()
    assert main(["serve", str(hf_dir), "device=cpu", f"--port={port}"]) == 0
    thread.join()
    refused, answered = answers
    assert refused["error"]["code"] == "invalid_api_key"
    assert answered["usage"]["completion_tokens"] <= 3
    said = capsys.readouterr().err.splitlines()
    # The client can end the server before the line for its answer is written.
    assert "stopping" in said[-2:]
    assert any(re.fullmatch(r"[\d:]+ qwen3: \d tokens in \d+\.\d s, answered", line) for line in said[-2:])
    assert signal.signal(number, before) == signal.SIG_IGN


@pytest.mark.slow
def test_ctrl_c_ends_the_process(hf_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    words = [str(hf_dir), "device=cpu", "--port=0", "--name=shop", f"--token-file={file}"]
    command = [sys.executable, "-m", "surogate_core", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"shop at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends it\n", line)
        assert found, line
        token = file.read_text().strip()
        assert asked(found[1], token, model="shop", prompt="The chain", max_tokens=3)["choices"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == ""
    assert token not in err


def test_a_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    token = _token_of(file)
    assert len(token) >= 24
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert _token_of(file) == token
    assert capsys.readouterr().err == ""
    file.chmod(0o644)
    assert _token_of(file) == token
    assert "others on this machine can read" in capsys.readouterr().err
    for text in ("", "short", "two words of a sentence", "größer als sechzehn"):
        file.write_text(text)
        with pytest.raises(UserError, match="has no token"):
            _token_of(file)
    for other, reason in ((tmp_path, "cannot be read"), (tmp_path / "no" / "token", "cannot be written")):
        with pytest.raises(UserError, match=reason):
            _token_of(other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model is named. Fix: surogate serve MODEL"),
        (("a", "b"), "a and b: one model at a time"),
        (("a", "--port", "x"), "--port x: is not a whole number"),
        (("a", "--port", "70000"), "--port 70000: must be at most 65535"),
        (("a", "--no-token", "--host", "0.0.0.0"), "everybody who reaches 0.0.0.0 could ask"),
        (("a", "--no-token", "--token-file", "x"), "both --no-token and --token-file"),
        (("a/b",), "a/b"),
    ],
)
def test_bad_input(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["serve", *words]) in (2, 3)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["shop=a", "shop=b"], "two adapters are called shop. Fix: --adapter OTHER=b"),
        (["shop=a", "x/shop"], "two adapters are called shop. Fix: --adapter OTHER=x/shop"),
        (["=a"], "has no name or no directory"),
    ],
)
def test_names_of_adapters(adapters: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _named_adapters(FLAGS.read(["some/model", *(f"--adapter={word}" for word in adapters)]))


def test_a_port_that_is_taken_is_said_before_the_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "not/here/at/all", "device=cpu", f"--port={port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use. Fix: another --port" in capsys.readouterr().err
