"""`surogate tokenize`: the report, the label mask, its exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_cache import add_repository
from huggingface_hub import constants

from surogate_core.cli.main import main
from surogate_core.files.paths import resolve_package_path

EMBEDDED = "pkg://surogate_dataset_chat/embedded"
TOKENIZER = f"tokenizer={EMBEDDED}/tokenizer"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Tokenize = Callable[..., int]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Conversations, two of them malformed and one too long."""
    turns = [("What is one and one?", "Two."), ("And two?", "Four, two and two."), ("Say it.", "word " * 300)]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"{i}. {q}"}, {"role": "assistant", "content": a}]})
        for i in range(4)
        for q, a in turns
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*lines, '{"messages": 1}', "{"]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tokenize(tmp_path: Path, rows: Path) -> Tokenize:
    """Calls the command in this process on `rows`; the exit code."""

    def call(*args: str, path: Path = rows, type_: str = "conversation") -> int:
        data = f"datasets=[{{path: '{path}', type: {type_}}}]"
        keys = [f"data_cache_dir={tmp_path / 'cache'}", "sequence_len=128", "validation_split_ratio=0.4"]
        return main(["tokenize", data, TOKENIZER, *keys, *args])

    return call


def leftovers(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*") if ".tmp-" in p.name]


# ----------------------------------------------------------------------------------- report


def test_report(tokenize: Tokenize, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize() == 0
    out = capsys.readouterr().out
    for words in ("datasets[0]", "Packed into rows of 128 tokens", "dropped", "longest", "chats.jsonl:13", "not JSON"):
        assert words in out, words
    assert f"Cache: {tmp_path / 'cache'} (the next run" in out
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if line.startswith(("│", "┃"))) <= 140
    assert tokenize() == 0
    assert "everything was there already" in capsys.readouterr().out


def test_json_is_the_report_and_nothing_else(tokenize: Tokenize, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize("--json") == 0
    report = json.loads(capsys.readouterr().out)
    (data_set,) = report["datasets"]
    assert (data_set["rows"], data_set["bad_rows"], data_set["documents"]) == (14, 2, 12)
    assert not report["cache"]["used"]
    assert [row["where"].rsplit(":", 1)[1] for row in report["bad_rows"]] == ["13", "14"]
    both = (report["train"], report["eval"])
    assert sum(side["documents"] for side in both) == 12
    assert sum(side["deleted"] for side in both) == 4
    assert report["train"]["document_lengths"]["max"] <= 128
    assert set(report["train"]["document_lengths"]) == {"p50", "p90", "p99", "max", "sampled"}
    assert 0 < report["train"]["fill"] <= 1
    assert "debug" not in report
    assert tokenize("--json", "--debug", "2") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["digest"] == report["digest"]
    assert again["cache"]["used"]
    assert len(again["debug"]) == 2
    assert sum(again["debug"][0]["trained"]) == again["debug"][0]["trained_tokens"] > 0


def test_a_name_that_is_not_utf8_is_printed(
    tokenize: Tokenize,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "n\udcff.jsonl").write_bytes(rows.read_bytes())
    assert tokenize("--json", path=odd) == 0
    assert json.loads(capsys.readouterr().out)["bad_rows"][0]["where"].endswith("n\udcff.jsonl:13")
    # As with PYTHONIOENCODING=ascii.
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", write_through=True))
    assert tokenize("--debug", path=odd) == 0
    assert b"n\\udcff.jsonl:13" in printed.getvalue()


def test_long_documents_are_counted_as_they_are_treated(tokenize: Tokenize, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize("--json", "truncation_strategy=split") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["train"]["split"] + report["eval"]["split"] == 4
    assert report["train"]["deleted"] == 0


def test_the_run_finds_what_was_tokenised(tokenize: Tokenize, tmp_path: Path) -> None:
    from surogate_core.config.resolve import load_run_config
    from surogate_core.data.pipeline import prepare
    from surogate_core.data.text.tokenizer import load_tokenizer
    from surogate_core.plugins import load_plugins

    assert tokenize() == 0
    registry = load_plugins()
    data = f"datasets=[{{path: '{tmp_path / 'chats.jsonl'}', type: conversation}}]"
    overrides = [data, TOKENIZER, f"data_cache_dir={tmp_path / 'cache'}", "sequence_len=128"]
    config = load_run_config(overrides, task="sft", registry=registry)
    found = prepare(config, load_tokenizer(str(config.tokenizer)), registry.all("dataset"))
    assert all(d.cached for d in found.report.datasets)


def test_the_embedded_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", f"data_cache_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "2,600" in out
    assert "held out" in out


def test_a_file_of_keys(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"datasets: [{{path: {rows}, type: auto}}]\nsequence_len: 64\n{TOKENIZER.replace('=', ': ')}\n")
    for words in ([str(file)], ["--config", str(file)]):
        assert main(["tokenize", *words, f"data_cache_dir={tmp_path / 'cache'}"]) == 0
        out = capsys.readouterr().out
        assert "rows of 64 tokens" in out
        assert "type conversation" in " ".join(re.sub("[│┃]", " ", out).split())


def test_a_model_without_weights_will_do(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_package_path(f"{EMBEDDED}/tokenizer"), model)
    data = [f"datasets=[{{path: '{rows}', type: conversation}}]", f"data_cache_dir={tmp_path / 'cache'}"]
    arguments = ["tokenize", f"model={model}", *data, "sequence_len=128"]
    assert main(arguments) == 0
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 4096}')
    assert main(arguments) == 0
    assert "The tokenizer knows 1,024 of the model's 4,096 token ids" in capsys.readouterr().out
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 100}')
    assert main(arguments) == 2
    assert "the model's vocabulary has 100 entries" in capsys.readouterr().err
    (model / "config.json").write_text("[")
    assert main(arguments) == 2
    assert "config.json: cannot be read" in capsys.readouterr().err


def test_of_a_hub_id_no_weights_are_needed(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "model"
    shutil.copytree(resolve_package_path(f"{EMBEDDED}/tokenizer"), model)
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 100}')
    add_repository(tmp_path / "hub", "acme/tiny", {"1" * 40: model}, {"main": "1" * 40})
    data = [f"datasets=[{{path: '{rows}', type: conversation}}]", f"data_cache_dir={tmp_path / 'cache'}"]
    assert main(["tokenize", "model=acme/tiny", *data]) == 2
    assert "the model's vocabulary has 100 entries" in capsys.readouterr().err
    assert main(["tokenize", "model=acme/absent", *data]) == 3
    assert "not in the local cache" in capsys.readouterr().err
    # The tokenizer is at hand, so the data can be prepared before the model is.
    assert main(["tokenize", "model=acme/absent", TOKENIZER, *data]) == 0


def test_an_example_when_everything_is_trained(
    tokenize: Tokenize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "all.jinja"
    template.write_text(
        "{% generation %}{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% endgeneration %}"
    )
    assert tokenize(f"template='{template}'") == 0
    out = capsys.readouterr().out
    assert "every token is trained, prompts included" in out
    assert "example: An example in which everything is trained" in out
    assert "⟦" in out


def test_plain_text_is_trained_whole_without_a_warning(
    tokenize: Tokenize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "All of this is learnt.", "source": "web"}\n' * 4)
    assert tokenize(path=path, type_="text") == 0
    out = capsys.readouterr().out
    assert "every token" not in out
    assert "example:" not in out
    assert f"{path}; not read: 'source'\n" in out


def test_long_answers_are_not_everything(
    tokenize: Tokenize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "well " * 6000}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    assert tokenize("sequence_len=65536", path=path) == 0
    out = capsys.readouterr().out
    assert re.search(r" 99\.[5-9]% ", out)
    assert "every token" not in out


# ------------------------------------------------------------------------------------ debug


def test_debug_without_colour_marks_what_is_trained(tokenize: Tokenize, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize("--debug", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("⟦…⟧ trained")
    assert re.match(r"── row 0, document 1 of \d+: \d+ tokens, \d+ trained \(\d.*last trained '<\|im_end\|>'", lines[1])
    text = "\n".join(lines)
    assert "⟦Four, two and two.«<|im_end|>»⟧↵" in text
    assert "«<|im_start|>»user↵" in text
    assert text.count("── row") == 1
    assert "--debug 10 shows more" in text


@pytest.mark.parametrize(("args", "shown"), [(["--debug"], 3), (["--debug", "5"], 5), (["--debug=2"], 2)])
def test_debug_shows_as_many_as_it_is_told(
    args: list[str], shown: int, tokenize: Tokenize, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(*args) == 0
    assert capsys.readouterr().out.count("── row") == shown


def test_debug_leaves_the_middle_of_a_long_document_out(
    tokenize: Tokenize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "many words " * 2000}) + "\n")
    assert tokenize("--debug", "sequence_len=16384", path=path, type_="text") == 0
    out = capsys.readouterr().out
    assert "tokens left out" in out
    assert "the middle of documents over 600 tokens is left out" in out


def run_on_terminal(arguments: list[str], **environ: str) -> tuple[int, str]:
    """(exit code, what a terminal of 100 columns was sent)."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", "OMP_NUM_THREADS": "1", **environ}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "surogate_core.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    sent = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not block:
            break
        sent += block
    os.close(ours)
    return process.wait(60), sent.decode()


@pytest.mark.slow
def test_debug_on_a_terminal_is_coloured(tmp_path: Path, rows: Path) -> None:
    data = f"datasets=[{{path: '{rows}', type: conversation}}]"
    arguments = ["tokenize", data, TOKENIZER, f"data_cache_dir={tmp_path / 'cache'}", "--debug"]
    code, sent = run_on_terminal(arguments)
    assert code == 0, sent
    plain = ANSI.sub("", sent)
    assert "⟦" not in plain
    assert "\x1b[32mF" in sent or "\x1b[32mT" in sent, "trained text is green"
    assert "\x1b[2m" in sent, "the rest is dim"
    assert "tokenise chats.jsonl" in plain, "progress"
    code, sent = run_on_terminal(arguments, NO_COLOR="1")
    assert code == 0
    assert "⟦" in sent
    assert "\x1b[32m" not in sent


# ------------------------------------------------------------------------------ wrong input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--debug", "0"], "1 or more"),
        (["--debug=x"], "must be a number of documents"),
        (["--debgu"], "Fix: --debug"),
        (["--jsn"], "Fix: --json"),
        (["--multirun"], "has no --multirun"),
        (["--cfg", "job"], "Fix: surogate sft --cfg job"),
        (["absent.yaml"], "there is no such file"),
        (["dop", TOKENIZER], "dop: there is no such file"),
        (["lerning_rate=1"], "Fix: learning_rate"),
        (["datasets=[{path: absent.jsonl, type: conversation}]", TOKENIZER], "no such file or directory"),
        (["tokenizer=./absent"], "no such directory"),
    ],
)
def test_wrong_input_is_one_message(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenize", f"data_cache_dir={tmp_path}", *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("surogate: ")
    assert not captured.out


def test_a_task_may_come_first(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, the word was taken for a file."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}\n' * 4, encoding="utf-8")
    keys = [f"data_cache_dir={tmp_path / 'cache'}", TOKENIZER, "sequence_len=128", "validation_split_ratio=0"]
    assert main(["tokenize", "--json", "dpo", f"datasets={pairs}", *keys]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["tokens"]
    assert main(["tokenize", "dpo", f"datasets={pairs}", *keys]) == 0
    shown = capsys.readouterr().out
    assert "bad ┃ pairs" in shown, "four pairs are no four documents"
    assert main(["tokenize", "sft", f"datasets={pairs}", *keys]) == 2
    assert "type preference, which task sft cannot train on" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written(tokenize: Tokenize, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert tokenize() == 2
    assert "data_cache_dir" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "--help"]) == 0
    assert "--debug [N]" in capsys.readouterr().out


# --------------------------------------------------------------------------- interruptions


@pytest.mark.slow_cases("15-143-0.1")
@pytest.mark.parametrize(
    ("number", "code", "after"),
    [
        # While processes start, and while they work.
        (signal.SIGTERM, 143, 0.1),
        pytest.param(signal.SIGINT, 130, 0.1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, 4.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, 4.0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_nothing_half_written(number: signal.Signals, code: int, after: float, tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    row = {"messages": [{"role": "user", "content": "one " * 40}, {"role": "assistant", "content": "two " * 40}]}
    path.write_text((json.dumps(row) + "\n") * 100_000)
    data = f"datasets=[{{path: '{path}', type: conversation}}]"
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "surogate_core.cli.main", "tokenize", data, TOKENIZER, f"data_cache_dir={cache}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 60
    while not list(cache.rglob("*.partial")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    time.sleep(after)
    # As a terminal does: to the whole group, whatever processes help.
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert not out
    assert "Traceback" not in err, err
    # What may be taken up again is there, and nothing that looks finished.
    assert not leftovers(cache)
    assert not list(cache.rglob("meta.json"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_in_a_finaliser_is_not_lost(
    number: signal.Signals,
    code: int,
    tokenize: Tokenize,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from surogate_core.setup import tokenizer_of_run as module

    class Signals:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def load(*arguments: Any, **named: Any) -> Any:
        Signals()
        return tokenizer_of_run(*arguments, **named)

    tokenizer_of_run = module.tokenizer_of_run
    monkeypatch.setattr(module, "tokenizer_of_run", load)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        found = tokenize("--json")
    except SystemExit as end:
        found = int(str(end))
    finally:
        after = signal.signal(number, before)
    assert (found, after) == (code, signal.SIG_DFL)
    captured = capsys.readouterr()
    assert not captured.out
    assert "Exception ignored" not in captured.err


def test_progress_lines_where_there_is_no_terminal(
    tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from surogate_core.app import progress as command

    monkeypatch.setattr(command, "PROGRESS_SECONDS", 0.0)
    assert tokenize("--json") == 0
    captured = capsys.readouterr()
    assert re.search(r"tokenise chats.jsonl: \d+.* rows", captured.err)
    json.loads(captured.out)


def test_progress_says_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_core.app import progress as command
    from surogate_core.events import Progress

    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    lines: Any = command._Lines()
    for seconds, done in ((2, 100), (10, 1000), (30, 4000)):
        now[0] = float(seconds)
        lines.take(Progress(task="tokenise", done=done, total=4000, unit="rows"))
    assert capsys.readouterr().err.splitlines() == [
        "tokenise: 1,000 of 4,000 rows, 100/s, 27 s to go",  # at the speed since the first event
        "tokenise: 4,000 of 4,000 rows, 133/s",
    ]
