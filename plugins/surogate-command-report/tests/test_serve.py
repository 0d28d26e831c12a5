"""The page's server: who is let in, what is handed out, how a growing run is followed."""

from __future__ import annotations

import http.client
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from surogate_command_report.card import card_of
from surogate_command_report.data import figures, texts
from surogate_command_report.document import live_page
from surogate_command_report.serve import MetricsFollower, PageServer
from surogate_command_report.write import write_report

from surogate_commands.curves import POINTS
from surogate_core.plugin import surogate as main
from surogate_core.service.files import RunRecord
from surogate_core.service.setup import locked

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def run_of(directory: Path, steps: int = 30, *, name: str = "run") -> RunRecord:
    run = RunRecord(directory=directory, name=name, live=True)
    run.add({"event": "run_start", "time": 1.0, "steps": steps, "model": HOSTILE, "notes": [HOSTILE]})
    for step in range(1, steps + 1):
        run.add({"event": "step_end", "step": step, "loss": 5 - step / steps, "lr": 1e-3, "total_tokens": 9 * step})
    run.config_text = f"name: {HOSTILE}\n"
    return run


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    run = run_of(tmp_path_factory.mktemp("run"))
    with closing(PageServer(lambda: [run])) as found:
        yield found


def ask(
    server: PageServer, path: str, *, method: str = "GET", token: str | None = "", host: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """`token` "" is the right one, None is none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    given = server.token if token == "" else token
    query = "" if given is None else f"{'&' if '?' in path else '?'}token={given}"
    connection.putrequest(method, path + query, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    reply = connection.getresponse()
    body, headers = reply.read(), {name.lower(): value for name, value in reply.getheaders()}
    connection.close()
    return reply.status, body, headers


# -------------------------------------------------------------------------------- access


@pytest.mark.parametrize("path", ["/", "/figures", "/texts", "/experts", "/nothing", "/../../etc/passwd"])
@pytest.mark.parametrize("token", [None, "wrong", "x" * 32, "é"])
def test_without_the_token_nothing_is_answered(server: PageServer, path: str, token: str | None) -> None:
    status, body, _ = ask(server, path, token=token if token != "é" else "%C3%A9")
    assert status == 403
    assert len(body) < 100


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/page.js",
        "//etc/passwd",
        "/etc/passwd",
        "/figures/../../x",
        "/C:\\windows",
    ],
)
def test_there_is_nothing_beside_the_page(server: PageServer, path: str) -> None:
    status, body, _ = ask(server, path)
    assert (status, body[:4]) == (404, b"404:")


def test_only_this_machine_under_its_own_name(server: PageServer) -> None:
    assert ask(server, "/", host=f"127.0.0.1:{server.port}")[0] == 200
    assert ask(server, "/", host=f"localhost:{server.port}")[0] == 200
    assert ask(server, "/", host=f"evil.example:{server.port}")[0] == 403
    assert server._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading(server: PageServer, method: str) -> None:
    assert ask(server, "/figures", method=method)[0] == 405
    assert ask(server, "/figures", method=method, token=None)[0] == 403


def test_head_has_no_body(server: PageServer) -> None:
    assert ask(server, "/", method="HEAD")[:2] == (200, b"")


def test_headers_let_nothing_in_or_out(server: PageServer) -> None:
    _, body, headers = ask(server, "/")
    policy = headers["content-security-policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", policy)
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    text = body.decode()
    assert set(re.findall(r'nonce="([^"]*)"', text)) == {nonce}
    assert ask(server, "/")[2]["content-security-policy"] != policy
    assert not re.search(r"(src|href)=\"(?!data:,)", text), "an outside asset"
    assert "@import" not in text
    assert "innerHTML" not in text


def test_garbage_does_not_end_it(server: PageServer) -> None:
    for garbage in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x00\xff" * 100 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(garbage)
    assert ask(server, "/")[0] == 200


def test_tokens_differ_and_closing_frees_the_port(tmp_path: Path) -> None:
    with closing(PageServer(list)) as first:
        port = first.port
        with closing(PageServer(list)) as second:
            assert first.token != second.token
            assert len(first.token) >= 32
        with pytest.raises(OSError, match="in use"):
            PageServer(list, port=port)
    with closing(PageServer(list, port=port)) as again:
        assert again.url == f"http://127.0.0.1:{port}/?token={again.token}"


# ------------------------------------------------------------------------------- content


def test_loads_of_experts(server: PageServer, tmp_path: Path) -> None:
    assert json.loads(ask(server, "/experts")[1]) == {"experts": None}
    run = run_of(tmp_path)
    run.add({"event": "expert_loads", "step": 30, "steps": 30, "layers": [0], "tokens": [[1, 2]]})
    with closing(PageServer(lambda: [run])) as found:
        assert json.loads(ask(found, "/experts")[1])["experts"]["bounds"] == [[1, 30]]
        assert json.loads(ask(found, "/figures")[1])["runs"][0]["loads"] == [1, 30]


def test_figures_of_a_run(server: PageServer) -> None:
    status, body, headers = ask(server, "/figures")
    assert (status, headers["content-type"]) == (200, "application/json")
    card = json.loads(body)["card"]
    assert (card["title"], card["tone"], card["verdict"]) == ("run", "busy", "Running: step 30 of 30")
    (run,) = json.loads(body)["runs"]
    assert (run["title"], run["over"], run["step"]) == ("run", False, 30)
    assert run["curves"]["loss"][0] == list(range(1, 31))
    assert run["curves"]["loss"][1][-1] == 4.0
    assert run["curves"]["grad_norm"][1] == [None] * 30
    assert run["curves"]["eval"] == [[], []]
    assert ["tokens", "270", ""] in card["tiles"]
    sections = {section["title"]: section for section in json.loads(ask(server, "/texts")[1])["runs"][0]}
    assert sections["Configuration"]["text"] == f"name: {HOSTILE}\n"


def test_a_stretch_has_one_point_more_on_each_side(server: PageServer) -> None:
    (run,) = json.loads(ask(server, "/figures?begin=10&end=12")[1])["runs"]
    assert run["curves"]["loss"][0] == [9, 10, 11, 12, 13]
    (run,) = json.loads(ask(server, "/figures?begin=nan&end=x")[1])["runs"]
    assert len(run["curves"]["loss"][0]) == 30
    (run,) = json.loads(ask(server, "/figures?begin=1e9&end=-5")[1])["runs"]
    assert len(run["curves"]["loss"][0]) <= 2


def test_a_long_run_is_a_small_answer_that_keeps_the_spike(tmp_path: Path) -> None:
    run = RunRecord(directory=tmp_path, name="long")
    for step in range(1, 200_001):
        run.add({"event": "step_end", "step": step, "loss": 9.0 if step == 154_321 else math.nan if step == 7 else 2.0})
    (found,) = figures([run])["runs"]
    steps, losses = found["curves"]["loss"]
    assert len(steps) <= POINTS
    assert losses[steps.index(154_321)] == 9.0
    assert losses[steps.index(7)] is None
    assert len(json.dumps(found)) < 150_000


def test_the_latest_figures_and_the_means_do_not_depend_on_the_stretch(tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=5000)
    for at, loss in ((1000, 4.0), (4000, 3.0)):
        run.add({"event": "eval_end", "step": at, "loss": loss})
    run.add({"event": "gpu_stats", "step": 500, "utilization": 0.5, "power_watts": 300.0})
    (whole,) = figures([run], smooth=0.9)["runs"]
    (part,) = figures([run], begin=100, end=300, smooth=0.9)["runs"]
    for name in ("recorded", "range", "step"):
        assert part[name] == whole[name], name
    assert figures([run], begin=100, end=300)["card"] == figures([run])["card"]
    assert whole["recorded"] == ["loss", "eval", "lr", "gpu.utilization", "gpu.power_watts"]
    means = {at: mean for at, _, mean in zip(*whole["curves"]["loss"], strict=True)}
    near = {at: mean for at, _, mean in zip(*part["curves"]["loss"], strict=True)}
    both = means.keys() & near.keys()
    assert len(both) > 10
    assert [means[at] for at in both] == [near[at] for at in both]
    assert len(whole["curves"]["lr"]) == len(figures([run])["runs"][0]["curves"]["loss"]) == 2


def test_smoothing_that_is_no_share_is_brought_into_bounds(server: PageServer) -> None:
    for given in ("7", "-1", "nan", "inf", "x"):
        status, body, _ = ask(server, f"/figures?smooth={given}")
        assert status == 200
        assert json.loads(body)["runs"][0]["curves"]["loss"][1][-1] == 4.0


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = RunRecord(directory=tmp_path, name="new", live=True)
    run.add({"event": "progress", "task": "loading weights", "done": 3, "total": 9, "unit": ""})
    (found,) = figures([run])["runs"]
    assert (found["step"], found["recorded"]) == (0, [])
    assert card_of([run]).verdict == "Starting · loading weights 3/9"
    run.add({"event": "progress", "task": "loading weights", "done": 9, "total": 9})
    assert (card_of([run]).verdict, card_of([run]).tiles) == ("Starting", [])
    assert texts([run]) == {"runs": [[]], "shared": []}


def test_a_stretch_of_tokens_or_time_is_one_of_steps(tmp_path: Path) -> None:
    run = RunRecord(directory=tmp_path, name="run")
    for at in range(1, 101):
        # The second half is twice as slow.
        run.add({"event": "step_end", "step": at, "loss": 1.0, "total_tokens": 10 * at, "seconds": 1 + (at > 50)})

    def steps(**part: Any) -> tuple[int, int]:
        found = figures([run], **part)["runs"][0]["curves"]["loss"][0]
        return found[0], found[-1]

    assert steps(axis="tokens", begin=200, end=305) == (19, 31)
    assert steps(axis="time", begin=60, end=70) == (54, 61)
    assert steps(axis="time", begin=-5, end=1e9) == (1, 100)
    axes = figures([run])["runs"][0]["axes"]
    assert [(axes[name][0], axes[name][-1]) for name in ("step", "tokens", "time")] == [(0, 100), (0, 1000), (0, 150)]


def test_the_page_quotes_its_layout() -> None:
    text = live_page("n0nce")
    assert "@" not in re.sub(r"@media", "", text.partition("<script")[0])
    assert text.count('<script nonce="n0nce">') == 1
    assert text.count("</script>") == 3


# ------------------------------------------------------------------------------ following


def line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


def step(at: int, loss: float = 1.0) -> str:
    return line(event="step_end", step=at, loss=loss)


def test_a_growing_file_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_command_report.serve.POLL_SECONDS", 0.02)
    metrics = tmp_path / "metrics.jsonl"
    with closing(MetricsFollower(tmp_path)) as follower:
        assert follower.caught_up.wait(10)
        assert len(follower.record.steps) == 0
        metrics.write_text(line(event="run_start", steps=9) + step(1) + step(2)[:-10])
        until(lambda: len(follower.record.steps) == 1)
        (tmp_path / "config.yaml").write_text("a: 1\n")
        with metrics.open("a") as file:
            file.write(step(2)[-10:] + "torn\n" + step(3) + line(event="run_end", reason="finished"))
        until(lambda: follower.record.config_text == "a: 1\n")
        assert follower.record.end is not None
        assert follower.record.steps.tolist() == [1, 2, 3]
        # A run that resumes replaces the file.
        new = tmp_path / "metrics.jsonl.tmp"
        new.write_text(line(event="run_start", steps=9) + step(1, 7.0))
        new.replace(metrics)
        until(lambda: follower.record.steps.tolist() == [1])
        assert follower.record.series["loss"].tolist() == [7.0]
        metrics.unlink()
        time.sleep(0.1)
        assert follower.record.steps.tolist() == [1]


def test_a_run_that_holds_its_lock_is_shown_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_command_report.serve.POLL_SECONDS", 0.01)
    (tmp_path / "metrics.jsonl").write_text(line(event="run_start", steps=9, notes=[]) + step(1) + step(2))
    with locked(tmp_path, key="output_dir"), closing(MetricsFollower(tmp_path)) as follower:
        until(lambda: follower.caught_up.is_set())
        shown = card_of([follower.record])
        assert shown.verdict.startswith("Running: step 2 of 9")
        assert (shown.commands, shown.tone) == ([], "busy")
        write_report([tmp_path])
        assert "Running: step 2 of 9" in (tmp_path / "report.md").read_text()
    with closing(MetricsFollower(tmp_path)) as follower:
        until(lambda: follower.caught_up.is_set())
        assert "No end is recorded: killed" in card_of([follower.record]).verdict
    with closing(MetricsFollower(tmp_path)) as follower, locked(tmp_path, key="output_dir"):
        until(lambda: follower.record.live)  # a run that goes on after the page was opened


def test_reading_while_another_thread_adds(tmp_path: Path) -> None:
    run = RunRecord(directory=tmp_path, name="run")
    run.add({"event": "run_start", "steps": 20_000})
    writer = threading.Thread(
        target=lambda: [run.add({"event": "step_end", "step": s, "loss": float(s)}) for s in range(1, 20_001)]
    )
    writer.start()
    while writer.is_alive():
        steps, losses = figures([run])["runs"][0]["curves"]["loss"]
        assert losses == [float(f"{s:.6g}") for s in steps]
    writer.join()
    assert len(run.steps) == 20_000


# ------------------------------------------------------------------------------- command


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path, stop: signal.Signals) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(step(1) + step(2))
    program = "import sys; from surogate_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "report", str(tmp_path / "a"), str(tmp_path / "b"), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32,})", url)
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)

        def read() -> list[Any]:
            connection.request("GET", f"/figures?token={found[2]}")
            return [(r["title"], r["step"]) for r in json.loads(connection.getresponse().read())["runs"]]

        until(lambda: read() == [("a", 2), ("b", 2)])
        process.send_signal(stop)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "--serve"], "there is no such directory"),
        (["run", "--serve", "--output", "x.md"], "--serve writes no --output"),
        (["run", "--serve", "--port", "99999"], "--port 99999: must be a number"),
        (["run", "--serve", "--port"], "a number must follow"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], message: str
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path: Path, capsys: Any) -> None:
    with closing(PageServer(list)) as server:
        assert main(["report", str(tmp_path), "--serve", f"--port={server.port}"]) == 2
    assert "Fix: another port" in capsys.readouterr().err
