"""The report: whole, safe, self-contained, thin, and right about the run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from surogate_command_report import contents
from surogate_command_report.card import card_of
from surogate_command_report.write import write_report

from surogate_commands.curves import POINTS, Curve, chart
from surogate_core.plugin import events, read_run
from surogate_core.plugin import surogate as main
from surogate_core.service.files import json_line

HOSTILE = "<script>alert(1)</script>|`\"'&"


def record(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, "time": 1.0, **fields}) + "\n"


def step(at: int, loss: float | str, **changes: Any) -> str:
    fields = {"grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 1000.0, "peak_memory_bytes": 2**30, "seconds": 0.1}
    return record("step_end", step=at, loss=loss, total_tokens=100 * at, **{**fields, **changes})


def make_run(directory: Path, *, steps: int = 30, end: str | None = "finished") -> Path:
    directory.mkdir(parents=True)
    lines = [
        record(
            "run_start", model="m", parameters=1000, trainable_parameters=10, device="cpu", steps=steps, notes=["hi"]
        ),
        record("eval_end", step=0, loss=5.0),
        *(step(at, 5.0 - at / steps) for at in range(1, steps + 1)),
        record("eval_end", step=steps, loss=4.25),
        record("phase_change", step=10, phase="converging", previous="warmup", improvement=0.01),
        record("phase_change", step=20, phase="plateau", previous="converging", improvement=0.0),
        record(
            "advice",
            step=25,
            rule="plateau",
            message="It stands.",
            key="lr_key",
            suggestion="turn",
            evidence={"x": 1.5},
        ),
        record("notice", level="warning", message="a warning"),
        record("notice", level="info", message="not shown"),
    ]
    if end:
        lines.append(record("run_end", reason=end, step=steps, message="so it ended", export_path="out/model"))
    (directory / "metrics.jsonl").write_text("".join(lines))
    (directory / "config.yaml").write_text(f"learning_rate: 0.001\nname: {json.dumps(HOSTILE)}\n")
    counts = dict.fromkeys(("documents", "split", "unlabelled", "rows", "tokens", "label_tokens"), 7)
    data = {
        "rows_read": 1234,
        "bad_rows": 5,
        "datasets": [{"key": "datasets[0]", "path": HOSTILE, "rows": 1234, "bad_rows": 5}],
        "train": {**counts, "deleted": 11, "truncated": 12},
        "eval": None,
    }
    plugins = [{"name": "core", "distribution": "surogate-core", "version": "0.1.0"}]
    (directory / "run.json").write_text(json.dumps({"plugins": plugins, "data_report": data}))
    return directory


class Page(HTMLParser):
    """The content of a page: tags, attributes, text; fails on tags that are not closed."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", list[str]()
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data

    @property
    def shown(self) -> str:
        """The text of the body, without empty lines."""
        return "\n".join(line for line in self.text.partition("Surogate")[2].splitlines() if line.strip())

    def points(self) -> list[int]:
        return [len((attrs["points"] or "").split()) for tag, attrs in self.tags if tag == "polyline"]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    files = write_report([make_run(tmp_path / "run")])
    assert [file.name for file in files] == ["report.html", "report.md"]
    text = files[0].read_text()
    page = Page(text)
    # Train loss raw and smoothed, eval loss, lr, grad norm raw and smoothed, throughput, memory.
    assert page.points() == [30, 30, 2, 30, 30, 30, 30, 30]
    assert [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"] == [
        "Loss", "Learning rate", "Grad norm", "Throughput", "Peak memory",
    ]  # fmt: skip
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json"] * 2 + [None]
    assert [attrs["href"] for tag, attrs in page.tags if "href" in attrs] == ["data:,"]
    assert page.count("img") == 0
    assert re.findall(r"https?://[^\"\s]*", text) == ["http://www.w3.org/2000/svg"] * text.count("w3.org")
    # Phases are shaded in the chart of the loss alone.
    fills = [attrs["fill"] for tag, attrs in page.tags if attrs.get("class") == "band"]
    assert fills == ["#10b981", "#f59e0b"]
    for part in (
        "Finished",
        "so it ended",
        "out/model",
        "It stands.",
        "lr_key",
        "x 1.5",
        "a warning",
        "hi",
        "surogate",
    ):
        assert part in page.text, part
    for part in ("1,234", "documents too long and dropped", "11", "documents too long and cut", "12", HOSTILE):
        assert part in page.text, part
    assert "not shown" not in page.text
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "report.md",
        "run.json",
    ]


def test_the_markdown_of_a_run(tmp_path: Path) -> None:
    text = write_report([make_run(tmp_path / "run")])[1].read_text()
    lines = text.splitlines()
    assert lines[:5] == [
        "# run", "", "m · cpu", "", "**Finished after 30 steps. Eval loss fell from 5.0000 to 4.2500**",
    ]  # fmt: skip
    assert "| train loss | 4.967 → 4.317 (mean of the last 20) |" in lines
    assert "| eval loss | 5 → 4.25 (step 30, the best) |" in lines
    assert "| 25 | It stands. | lr_key | turn | x 1.5 |" in lines
    assert "| 10 | converging | warmup | +1.00% |" in lines
    assert "| training: documents too long and dropped | 11 |" in lines
    course = lines[lines.index("## Steps") + 4 : lines.index("## Advice") - 1]
    assert [line.split("|")[1].strip() for line in (course[0], course[-1])] == ["1", "30"]
    assert "<script>" not in text[: text.index("```yaml")]


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("stopped", "stopped early"),
        ("signal", "interrupted"),
        ("failed", "failed"),
        (None, "no end is recorded: killed, or running on another machine"),
    ],
)
def test_outcomes(tmp_path: Path, end: str | None, shown: str) -> None:
    assert read_run(make_run(tmp_path / "run", end=end)).outcome == shown


def test_what_a_killed_and_resumed_run_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", end="failed")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step_end", "st\n')
        file.write(record("run_start", model="m", steps=31))
        file.write(step(30, 1.0) + step(31, "NaN"))
    found = read_run(run)
    assert found.outcome.startswith("no end")
    assert list(found.steps) == list(range(1, 32))
    assert found.series["loss"][29] == 1.0
    assert math.isnan(found.series["loss"][30])
    page = Page(write_report([run])[0].read_text())
    assert page.points()[0] == 30
    assert "steps that were not finite" in page.text
    assert "Step 31 of 31. No end is recorded" in page.text


def test_a_run_that_failed_before_its_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(record("run_end", reason="failed", message="no such data set"))
    page = Page(write_report([run])[0].read_text())
    assert page.points() == []
    assert page.shown.split("\n")[0].startswith("runFailed before its first stepno such data set")
    assert page.count("figure") == page.count("canvas") == page.count("table") == 0


def tiles(run: Path) -> dict[str, tuple[str, str]]:
    return {name: (value, remark) for name, value, remark in card_of([read_run(run)]).tiles}


def test_one_evaluation_is_no_change(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(s for s in lines if '"loss": 4.25' not in s) + "\n")
    assert tiles(run)["eval loss"] == ("5", "step 0 only")
    assert card_of([read_run(run)]).verdict == "Finished after 30 steps"


def test_a_figure_that_was_not_measured_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"peak_memory_bytes": 1073741824, ', "", 1))
    assert tiles(run)["peak memory"] == ("1.00 GiB", "")
    (run / "metrics.jsonl").write_text(text.replace('"peak_memory_bytes": 1073741824, ', ""))
    assert "peak memory" not in tiles(run)
    assert "MFU" not in tiles(run)


def test_counts_of_zero_are_folded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["data_report"]["train"]["split"] = 0
    (run / "run.json").write_text(json.dumps(facts))
    found = {section.title: section for section in contents.sections(read_run(run))}
    assert ("training: documents too long and split", "0") not in found["Data"].rows
    assert found["Data: counts that are 0"].rows == [("training: documents too long and split", "0")]
    assert [title for title, section in found.items() if section.folded] == [
        "Data: counts that are 0", "Phases", "Plugins", "Configuration",
    ]  # fmt: skip
    assert "\ntraining: documents too long and split.\n" in write_report([run])[1].read_text()


def test_samples_are_shown_where_they_were_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "Samples" not in {section.title for section in contents.sections(read_run(run))}
    with (run / "metrics.jsonl").open("a") as file:
        for at in (10, 30):
            event = events.Samples(step=at, prompts=(HOSTILE, "Say yes"), texts=("no", f"yes {at}"))
            file.write(json_line(event, at=1.0))
    (samples,) = (s for s in contents.sections(read_run(run)) if s.title == "Samples")
    assert samples.rows[0] == (HOSTILE, "30", "no")
    assert samples.rows[2:] == [("Say yes", "30", "yes 30"), ("Say yes", "10", "yes 10")]
    assert "yes 30" in Page(write_report([run])[0].read_text()).text


def test_a_long_run_shows_some_steps_of_each_prompt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for at in range(0, 1000, 10):
            file.write(json_line(events.Samples(step=at, prompts=("a", "b"), texts=(f"a {at}", f"b {at}")), at=1.0))
    rows = contents.samples(read_run(run))
    assert [prompt for prompt, _, _ in rows] == ["a"] * 12 + ["b"] * 12
    steps = [int(step) for _, step, _ in rows[:12]]
    assert steps == sorted(steps, reverse=True)
    assert (steps[0], steps[-1]) == (990, 0)
    assert all(text == f"{prompt} {step}" for prompt, step, text in rows)


def test_a_sample_is_shown_as_far_as_it_says_something(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    texts = ("a\n\n\n\n\nb\n", "\n" * 20, "", "cut here", "x" * 5000)
    event = events.Samples(step=0, prompts=tuple("12345"), texts=texts, ended=(True, False, True, False, True))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json_line(event, at=1.0))
    shown = [text for _, _, text in contents.samples(read_run(run))]
    assert shown[:4] == ["a\n\nb", "(no visible text)", "(no visible text)", "cut here …"]
    assert len(shown[4]) == 2002


def test_equal_prompts_are_not_one_and_long_ones_are_shortened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for at in (0, 10):
            event = events.Samples(step=at, prompts=("Why?", "Why?", "y" * 900), texts=("a", "b", "c"))
            file.write(json_line(event, at=1.0))
    rows = contents.samples(read_run(run))
    assert [(step, text) for _, step, text in rows] == [
        ("10", "a"), ("0", "a"), ("10", "b"), ("0", "b"), ("10", "c"), ("0", "c"),
    ]  # fmt: skip
    assert rows[-1][0] == "y" * 300 + " …"


def test_the_scripts_data_cannot_end_its_element_and_the_policy_names_its_script(tmp_path: Path) -> None:
    run = make_run(tmp_path / HOSTILE.replace("/", "-"))
    text = write_report([run])[0].read_text()
    program = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for (content,) in (program, style):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in text
    assert "unsafe" not in text
    (shown,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert [r["curves"]["loss"][0] for r in json.loads(shown)["runs"]] == [list(range(1, 31))]


def test_without_a_script_charts_have_values_as_tooltips(tmp_path: Path) -> None:
    text = write_report([make_run(tmp_path / "run")])[0].read_text()
    assert "<title>train raw 4.5 (step 15)\ntrain, smoothed 4.6" in text
    assert "eval 4.25 (step 30)</title>" in text


def test_several_runs_are_compared_and_same_plugins_listed_once(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=steps) for name, steps in (("a", 30), ("b", 20), ("c", 20))]
    for suffix, head in ((".html", '<th scope="col">distribution</th>'), (".md", "| distribution |")):
        text = write_report(runs, output=tmp_path / f"r{suffix}")[0].read_text()
        assert text.count(head) == 1
    page = Page(write_report(runs, output=tmp_path / "r.html")[0].read_text())
    assert page.text.index("5.0000 → 4.2500") < page.text.index("Plugins of all runs")
    facts = json.loads((runs[1] / "run.json").read_text())
    facts["plugins"][0]["version"] = "0.2.0"
    (runs[1] / "run.json").write_text(json.dumps(facts))
    assert write_report(runs, output=tmp_path / "r.html")[0].read_text().count(">distribution</th>") == 3


def test_several_runs_are_overlaid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=20)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(a), str(b)]) == 0
    assert capsys.readouterr().out.split() == ["report.html", "report.md"]
    page = Page((tmp_path / "report.html").read_text())
    assert page.points() == [30, 30, 20, 20, 2, 2, 30, 20, 30, 30, 20, 20, *[30, 20] * 2]
    assert not any(attrs.get("class") == "band" for _, attrs in page.tags)
    assert "| a (lowest) | finished | 30 | 5.0000 → 4.2500 |" in (tmp_path / "report.md").read_text()
    assert main(["report", str(a), f"--output={tmp_path}/new/x.md"]) == 0
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is named and there is no runs/latest. Fix: surogate report RUN_DIRECTORY"),
        (["gone"], "surogate report gone: there is no such directory. Fix: name a run's output_dir."),
        (["empty"], "surogate report empty: there is no metrics.jsonl in it or below it. Fix:"),
        (["run", "--output", "x.pdf"], "--output x.pdf: the name must end in .html or .md. Fix: x.html"),
        (["run", "--output"], "a file must follow"),
        (["run", "--server"], "--server is not known"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], message: str
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_report_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    before = write_report([run])[0].read_bytes()
    monkeypatch.setattr(
        "surogate_core.files.atomic.write_all", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(Exception, match=r"disk is full|No space"):
        write_report([run])
    assert (run / "report.html").read_bytes() == before


# ------------------------------------------------------------------------------- curves


def test_a_logarithmic_axis_is_named() -> None:
    wide = [Curve(label="", points=[(1, 1e-3), (2, 1.0)])]
    assert "Loss, log scale<" in chart("Loss", wide)
    assert "log scale" not in chart("Loss", [Curve(label="", points=[(1, 1e-2), (2, 1.0)])])
    assert "log scale" not in chart("Loss", wide, log=False)
    assert Page(chart("Loss", [Curve(label="", points=[(1, 0.0), (2, 1.0), (3, 2.0)])], log=True)).points() == [2]


def test_a_report_never_turns_logarithmic_by_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(step(31, 1e-9, lr=1e-12))
    assert "log scale" not in Page(write_report([run])[0].read_text()).text.replace(" log scale\n", "")


def test_a_chart_of_hostile_values() -> None:
    curve = Curve(label=HOSTILE, points=[(1, 1.0), (2, math.inf), (3, 1e30), (4, math.nan), (5, 1e-30)])
    page = Page(chart(HOSTILE, [curve]))
    assert page.points() == [1, 1, 1]
    assert page.count("script") == 0
    assert "nothing recorded" in chart("t", [Curve(label="", points=[(1, math.nan)])])
    assert Page(chart("t", [Curve(label="", points=[(1, 0.0)])])).count("circle") == 1
    assert Page(chart("t", [Curve(label="", points=[(1, 5.0), (2, 5.0)])])).points() == [2]


@pytest.mark.slow
def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100_000)
    file = write_report([run], output=tmp_path / "r.html")[0]
    assert max(Page(file.read_text()).points()) <= POINTS
    assert file.stat().st_size < 300_000


CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    file = write_report([make_run(tmp_path / "run")])[0]
    shot = tmp_path / "shot.png"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1600",
        f"--screenshot={shot}",
    ]
    subprocess.run([*command, file.as_uri()], check=True, capture_output=True, timeout=120)
    assert shot.read_bytes().startswith(b"\x89PNG")
