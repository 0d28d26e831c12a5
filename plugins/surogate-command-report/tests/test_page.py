"""The live page in Chromium: what it draws, what it never executes, how it answers the mouse.

Skipped where playwright or Chromium is missing: `pip install playwright`, and a system's Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from surogate_command_report import html
from surogate_command_report.serve import PageServer

from surogate_core.service.files import RunRecord

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>${window.hacked=3}{{7*7}}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class Shown:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, *runs: RunRecord, **options: Any):
        self.runs = list(runs)
        self.server = PageServer(lambda: self.runs)
        self.tab = browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.wrong: list[str] = []
        # `ink` reads pixels back, which Chromium advises against.
        self.tab.on("console", lambda m: self.wrong.append(m.text) if "getImageData" not in m.text else None)
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.asked: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(self.server.url)
        self.tab.wait_for_selector("body[data-drawn]")

    def close(self) -> None:
        self.tab.close()
        self.server.close()

    def until(self, expression: str) -> None:
        """Wait until it is true; the page's policy forbids playwright's own way of waiting."""
        deadline = time.monotonic() + 20
        while not self.tab.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.tab.wait_for_timeout(20)

    def verdict(self) -> str:
        return str(self.tab.locator(".verdict").inner_text())

    def ink(self, title: str) -> int:
        """Pixels of a curve's canvas that are neither empty nor grey."""
        count = """element => {
            const d = element.getContext("2d").getImageData(0, 0, element.width, element.height).data;
            let found = 0;
            for (let i = 0; i < d.length; i += 4) {
                const rgb = [d[i], d[i + 1], d[i + 2]];
                if (d[i + 3] > 128 && Math.max(...rgb) - Math.min(...rgb) > 60) found++;
            }
            return found;
        }"""
        return int(self.tab.locator(f'canvas[aria-label="{title}"]').evaluate(count))


def make_run(name: str = "run", steps: int = 200, *, text: str = "plain", loss: float = 5.0) -> RunRecord:
    run = RunRecord(directory=Path(name), name=name, live=True)
    run.add({"event": "run_start", "time": 1.0, "steps": 2 * steps, "model": text, "notes": [text], "device": text})
    for step in range(1, steps + 1):
        run.add(
            {
                "event": "step_end",
                "step": step,
                "loss": loss - 3 * step / steps,
                "lr": 1e-3,
                "grad_norm": 1.0 + step % 5,
                "tokens_per_second": 100.0,
                "peak_memory_bytes": 2**30,
                "seconds": 0.5,
            }
        )
    run.add({"event": "eval_end", "step": steps, "loss": 2.5})
    run.add({"event": "phase_change", "step": 75, "phase": "converging", "previous": "warmup", "improvement": 0.1})
    run.add(
        {"event": "advice", "step": 150, "rule": "r", "message": text, "key": text, "suggestion": text, "evidence": {}}
    )
    run.add({"event": "notice", "level": "warning", "message": text})
    run.config_text = f"name: {text}\n"
    return run


def test_it_draws_a_run_and_follows_it(browser: Any) -> None:
    run = make_run()
    with closing(Shown(browser, run)) as shown:
        tab = shown.tab
        assert tab.title() == "run · Surogate"
        assert shown.verdict() == "Running: step 200 of 400 · 0:01:40 to go"
        found = tiles(shown)
        assert (found["train loss"], found["phase"]) == ("2", "converging")
        assert found["eval loss"].split() == ["2.5", "step", "200", "only"]
        assert tab.locator("figure:visible").count() == 5
        before = shown.ink("Loss")
        assert before > 300
        run.add({"event": "step_end", "step": 201, "loss": 1.0, "seconds": 0.5})
        run.add({"event": "run_end", "reason": "finished"})
        shown.until("document.querySelector('.verdict').textContent.startsWith('Finished: step 201')")
        assert shown.wrong == []
        own = f"http://127.0.0.1:{shown.server.port}"
        asked = {url.split("?")[0] for url in shown.asked if not url.startswith("data:")}
        assert asked == {f"{own}/", f"{own}/figures", f"{own}/texts"}


def with_experts(run: RunRecord, steps: int) -> RunRecord:
    for at in range(10, steps + 1, 10):
        tokens = [[5, 3, 0, 8], [4, 4, 4, 4 + at]]
        run.add({"event": "expert_loads", "step": at, "steps": 10, "layers": [2, 5], "tokens": tokens})
        run.add({"event": "routing_stats", "step": at, "moe_load_imbalance": 2.5})
    return run


def test_heat_maps_of_experts(browser: Any) -> None:
    run = with_experts(make_run(), 200)
    with closing(Shown(browser, run)) as shown:
        tab = shown.tab
        shown.until("heat.maps.length === 2 && heat.maps[1].cells !== null")
        assert tab.locator("figure:visible").count() == 8
        assert min(shown.ink("Expert imbalance"), shown.ink("Expert load")) > 1000
        assert tab.locator("label.choice select").input_value() == "1", "the layer that is least even"
        tab.locator("label.choice select").select_option("0")
        experts = tab.locator('canvas[aria-label="Expert load"]')
        experts.focus()
        tab.keyboard.press("ArrowLeft")
        assert tab.evaluate("heat.maps[1].readout.textContent") == "steps 191 to 200, expert 0: 1.3 × the mean"
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowLeft")
        assert tab.evaluate("heat.maps[1].readout.textContent") == "steps 181 to 190, expert 2: no token"
        tab.locator('canvas[aria-label="Expert imbalance"]').hover(position={"x": 100, "y": 100})
        assert "layer 5" in tab.evaluate("heat.maps[0].readout.textContent")
        tab.mouse.down()
        tab.mouse.up()
        assert tab.locator("label.choice select").input_value() == "1", "a click on a layer chooses it"
        tab.locator("#axis").select_option("time")
        shown.until("!busy && heat.maps[0].scale.edges.length === 20")
        assert shown.wrong == []


def test_hostile_text_is_shown_and_not_executed(browser: Any) -> None:
    run = make_run(HOSTILE, text=HOSTILE)
    with closing(Shown(browser, run, make_run("other", text=HOSTILE))) as shown:
        tab = shown.tab
        tab.locator("details.run > summary").first.click()
        tab.locator("details.run details summary").filter(has_text="Configuration").first.click()
        assert tab.locator("details.run pre").first.inner_text().strip() == f"name: {HOSTILE}"
        assert tab.locator("#runs label").first.inner_text() == HOSTILE
        assert tab.locator("#details li").first.inner_text() == HOSTILE
        assert HOSTILE in tab.locator("#details td").all_inner_texts()
        assert tab.locator("img").count() == 0
        assert tab.locator("script").count() == 3
        assert tab.evaluate("window.hacked === undefined")
        assert shown.wrong == []


def test_a_script_that_is_put_in_does_not_run(browser: Any) -> None:
    """The policy holds even where the page's own care would fail."""
    with closing(Shown(browser, make_run())) as shown:
        shown.tab.evaluate("document.getElementById('details').innerHTML = '<img src=x onerror=\"window.hacked=1\">'")
        shown.tab.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked=2'}))"
        )
        shown.tab.wait_for_timeout(100)
        assert shown.tab.evaluate("window.hacked === undefined")
        assert any("Content Security Policy" in text for text in shown.wrong)


def test_dragging_enlarges_a_stretch(browser: Any) -> None:
    run = make_run(steps=5000)
    with closing(Shown(browser, run)) as shown:
        tab = shown.tab
        assert tab.evaluate("state.runs[0].curves.grad_norm[0].length") <= 1000
        box = tab.locator('canvas[aria-label="Loss"]').bounding_box()
        middle = box["y"] + 80
        tab.mouse.move(box["x"] + 200, middle)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 230, middle)
        assert tab.locator("figcaption span").first.inner_text().startswith("step ")
        tab.mouse.up()
        tab.wait_for_selector("#whole:visible")
        shown.until("state.runs[0].curves.grad_norm[0].length < 900")
        steps = tab.evaluate("state.runs[0].curves.grad_norm[0]")
        begin, end = tab.evaluate("[state.begin, state.end]")
        # Every step of the stretch, and one on each side.
        assert steps == list(range(begin - 1, end + 2))
        tab.locator("#whole").click()
        shown.until("state.runs[0].curves.grad_norm[0].length > 900")
        assert shown.wrong == []


def test_runs_are_laid_over_each_other_and_can_be_hidden(browser: Any) -> None:
    with closing(Shown(browser, make_run("a"), make_run("b", loss=9.0))) as shown:
        tab = shown.tab
        assert tab.locator("#runs label").all_inner_texts() == ["a", "b"]
        assert tab.locator("h1").all_inner_texts() == ["comparison: 2 runs"]
        assert tab.locator("details.run > summary").all_inner_texts() == ["a", "b"]
        assert tab.locator("#tables tr").all_inner_texts()[0].split("\t") == [
            "run", "outcome", "steps", "train loss", "tokens/s", "training time", "peak memory",
        ]  # fmt: skip
        assert shown.verdict().startswith("2 running. Lowest eval loss: 2.5000")
        both = shown.ink("Loss")
        tab.locator("#runs input").nth(1).uncheck()
        shown.until("charts[0].scale && charts[0].curves().length === 1")
        tab.wait_for_timeout(50)
        assert 0 < shown.ink("Loss") != both
        assert shown.wrong == []


def test_values_that_are_not_finite_and_a_run_without_steps(browser: Any) -> None:
    run = RunRecord(directory=Path("r"), name="r", live=True)
    run.add({"event": "progress", "task": "loading weights", "done": 1, "total": 4})
    with closing(Shown(browser, run)) as shown:
        assert shown.verdict() == "Starting · loading weights 1/4"
        run.add({"event": "run_start", "time": 2.0, "steps": 9})
        for step, loss in enumerate(["NaN", 2.0, "Infinity", 1e30, 3.0, 0.0], start=1):
            run.add({"event": "step_end", "step": step, "loss": loss})
        shown.until("state.runs[0].step === 6")
        shown.tab.wait_for_timeout(50)
        assert shown.ink("Loss") > 10
        assert shown.wrong == []


def tiles(shown: Shown) -> dict[str, str]:
    texts = shown.tab.locator(".tiles dt").all_inner_texts(), shown.tab.locator(".tiles dd").all_inner_texts()
    return dict(zip(*texts, strict=True))


def test_tiles_and_shown_charts_are_the_runs_whatever_is_enlarged(browser: Any) -> None:
    run = make_run(steps=400)
    for step, loss in ((100, 9.0), (300, 8.0)):
        run.add({"event": "eval_end", "step": step, "loss": loss})
    for step in (10, 20, 390):
        stats = {"utilization": step / 400, "memory_used_bytes": 2**30, "power_watts": 300.4}
        run.add({"event": "gpu_stats", "step": step, **stats})
    with closing(Shown(browser, run)) as shown:
        before, charts = tiles(shown), shown.tab.locator("figure:visible").count()
        assert before["eval loss"].split()[:3] == ["9", "→", "8"]
        assert before["GPU"].split() == ["98%", "300", "W"]
        for begin, end in ((90, 110), (200, 250), (5, 25)):
            shown.tab.evaluate(f"show({begin}, {end})")
            shown.until(f"state.runs[0].curves.loss[0].length === {end - begin + 3} && !busy")
            assert tiles(shown) == before
            assert shown.tab.locator("figure:visible").count() == charts
        assert shown.wrong == []


def test_smoothing_is_of_loss_and_gradient_norm_and_keeps_the_raw_values(browser: Any) -> None:
    run = make_run(steps=300)
    for step in range(301, 500):
        run.add({"event": "step_end", "step": step, "loss": 2.0 + step % 2, "lr": 0.001 * (step % 7), "grad_norm": 1.0})
    with closing(Shown(browser, run)) as shown:
        seen = "JSON.stringify(state.runs[0].curves.{}.map(c => c.slice(0, 50)))"
        before = {name: shown.tab.evaluate(seen.format(name)) for name in ("lr", "peak_memory_bytes", "eval")}
        raw = shown.tab.evaluate("state.runs[0].curves.loss[1]")
        assert shown.tab.locator("#smooth").input_value() == "0.8"
        shown.tab.locator("#smooth").fill("0")
        shown.until("state.runs[0].curves.loss.length === 2 && !busy")
        shown.tab.locator("#smooth").fill("0.95")
        shown.until("state.runs[0].curves.loss.length === 3 && !busy")
        assert before == {name: shown.tab.evaluate(seen.format(name)) for name in before}
        assert shown.tab.evaluate("state.runs[0].curves.loss[1]") == raw
        means = shown.tab.evaluate("state.runs[0].curves.loss[2]")
        assert means[0] == raw[0]
        assert max(means[-20:]) - min(means[-20:]) < 0.1
        assert shown.tab.evaluate("state.runs[0].curves.grad_norm.length") == 3
        assert shown.wrong == []


def test_the_pointer_and_the_arrow_keys_read_values(browser: Any) -> None:
    run = make_run(steps=300)
    for at in (0, 100, 200):
        run.add({"event": "eval_end", "step": at, "loss": 3.0})
    run.add({"event": "step_end", "step": 301, "loss": 2.0})
    with closing(Shown(browser, run)) as shown:
        tab, canvas = shown.tab, shown.tab.locator('canvas[aria-label="Loss"]')
        box = canvas.bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
        shown.until("!charts[0].tip.hidden")
        assert [line.split()[0] for line in tab.locator("div.tip:visible div").all_inner_texts()] == ["train", "eval"]
        tab.mouse.move(0, 0)
        shown.until("charts[0].tip.hidden")
        canvas.focus()
        tab.keyboard.press("End")
        shown.until("charts[0].readout.textContent.startsWith('step 301: train 2')")
        tab.keyboard.press("ArrowLeft")
        shown.until("charts[0].readout.textContent.startsWith('step 295: ')")
        assert charts_said(shown, "Learning rate").startswith("step 295: 0.001")
        assert shown.wrong == []


def charts_said(shown: Shown, title: str) -> str:
    figure = shown.tab.locator("figure").filter(has=shown.tab.locator(f'canvas[aria-label="{title}"]'))
    return str(figure.locator("figcaption span").inner_text())


def test_switches_of_the_axes(browser: Any) -> None:
    run = make_run(steps=200)
    for step in range(201, 301):
        run.add({"event": "step_end", "step": step, "loss": 2.0, "total_tokens": 50 * step, "seconds": 1.0, "lr": 0})
    with closing(Shown(browser, run)) as shown:
        tab = shown.tab
        tab.locator("#log").check()
        shown.until("charts[0].title.textContent === 'Loss, log scale'")
        assert "log" not in tab.locator("figure:visible figcaption b").all_inner_texts()[-1]
        tab.locator("#axis").select_option("tokens")
        shown.until("!busy && charts[0].scale.high === 15000")
        tab.evaluate("show(10000, 12500)")
        shown.until("!busy && state.runs[0].curves.lr[0].at(-1) === 251")
        assert tab.evaluate("state.runs[0].curves.lr[0][0]") == 200
        # A zoom belongs to its axis.
        tab.locator("#axis").select_option("time")
        shown.until("!busy && charts[0].scale.high === 200")
        assert tab.locator("#whole").is_hidden()
        tab.locator("#log").uncheck()
        shown.until("charts[0].title.textContent === 'Loss'")
        assert shown.wrong == []


def test_the_report_has_values_and_switches_of_its_own(browser: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(html.render([make_run("a"), make_run(HOSTILE, loss=9.0, text=HOSTILE)]))
    tab, wrong = browser.new_page(viewport={"width": 1200, "height": 900}), []
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(report.as_uri())
    tab.wait_for_selector("body[data-drawn]")
    assert tab.locator("figure:visible").count() == tab.locator("canvas:visible").count() == 6
    box = tab.locator('canvas[aria-label="Loss"]').bounding_box()
    tab.mouse.move(box["x"] + 200, box["y"] + 80)
    tab.wait_for_selector("div.tip:visible")
    assert tab.locator("div.tip:visible div").count() == 2
    tab.mouse.down()
    tab.mouse.move(box["x"] + 300, box["y"] + 80)
    tab.mouse.up()
    tab.wait_for_selector("#whole:visible")
    tab.locator("#whole").click()
    tab.locator("#smooth").uncheck()
    tab.locator("#axis").select_option("time")
    tab.evaluate("new Promise((drawn) => requestAnimationFrame(drawn))")
    assert tab.evaluate("[state.begin, state.smooth, charts[0].scale.high]") == [None, 0, 100]
    assert tab.evaluate("window.hacked === undefined")
    assert wrong == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    tab.close()


def test_the_report_can_be_read_without_its_script(browser: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(html.render([make_run()]))
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 800})
    tab = context.new_page()
    tab.goto(report.as_uri())
    assert tab.locator("figure svg[role=img]").count() == 5
    assert tab.locator("#tools").is_hidden()
    assert tab.locator("rect.tip title").first.text_content().startswith("train raw 4.9")
    report.write_text(html.render([with_experts(make_run(), 200)]))
    tab.goto(report.as_uri())
    assert tab.locator("figure svg image").count() == 2
    context.close()


def touch(tab: Any, kind: str, *points: tuple[float, float]) -> None:
    tab.session.send(
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(points)]},
    )


def test_fingers_enlarge_pinch_scroll_and_reset(browser: Any) -> None:
    run = make_run(steps=1000)
    phone = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
    with closing(Shown(browser, run, **phone)) as shown:
        tab = shown.tab
        tab.session = tab.context.new_cdp_session(tab)
        tab.locator('canvas[aria-label="Loss"]').scroll_into_view_if_needed()
        box = tab.locator('canvas[aria-label="Loss"]').bounding_box()
        y = box["y"] + 90

        def slide(*stations: tuple[tuple[float, float], ...]) -> None:
            touch(tab, "touchStart", *stations[0])
            for points in stations[1:]:
                touch(tab, "touchMove", *points)
            touch(tab, "touchEnd")

        slide(*(((box["x"] + x, y),) for x in (120, 140, 170, 200, 220)))
        tab.wait_for_selector("#whole:visible")
        begin, end = tab.evaluate("[state.begin, state.end]")
        assert 100 < begin < end < 600
        # Two fingers that part enlarge further, and the steps under them stay.
        shown.until("!busy")
        slide(*(((box["x"] + 200 - x, y), (box["x"] + 220 + x, y)) for x in (0, 20, 40)))
        shown.until("!busy && state.begin !== null")
        closer = tab.evaluate("[state.begin, state.end]")
        assert begin < closer[0] < closer[1] < end
        assert closer[1] - closer[0] < 0.5 * (end - begin)
        for _ in range(2):
            slide(((box["x"] + 200, y),))
        shown.until("state.begin === null")
        assert tab.locator("#whole").is_hidden()
        # A finger that goes up the page scrolls it, and enlarges nothing.
        before = tab.evaluate("scrollY")
        slide(*(((box["x"] + 200, y - dy),) for dy in range(0, 90, 15)))
        shown.until(f"scrollY > {before}")
        assert tab.evaluate("state.begin") is None
        assert shown.wrong == []


def test_a_drag_past_the_edge_enlarges_up_to_it(browser: Any) -> None:
    with closing(Shown(browser, make_run(steps=300))) as shown:
        box = shown.tab.locator('canvas[aria-label="Loss"]').bounding_box()
        shown.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
        shown.tab.mouse.down()
        shown.tab.mouse.move(box["x"] - 30, box["y"] - 20)
        shown.tab.mouse.up()
        shown.tab.wait_for_selector("#whole:visible")
        assert shown.tab.evaluate("state.begin") == 1


def test_a_start_that_failed_shows_its_message_and_nothing_empty(browser: Any) -> None:
    run = RunRecord(directory=Path("r"), name="r")
    run.add({"event": "run_end", "reason": "failed", "message": "no such data set"})
    with closing(Shown(browser, run)) as shown:
        assert shown.verdict() == "Failed before its first step"
        assert shown.tab.locator(".message").inner_text() == "no such data set"
        for selector in (".tiles", "figure:visible", "#tools:visible", "progress", "table"):
            assert shown.tab.locator(selector).count() == 0, selector
        assert shown.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_page_shows_every_value_without_scrolling(browser: Any, scheme: str, tmp_path: Path) -> None:
    run = make_run("r" * 60)
    run.facts = {
        "data_report": {
            "rows_read": 1234, "bad_rows": 0, "train": None, "eval": None,
            "datasets": [{"key": "datasets[0]", "path": "/a" * 60, "rows": 1234, "bad_rows": 0}],
        }
    }  # fmt: skip
    outside = """[...document.querySelectorAll('td, th, dd, h1, p')].filter(e => {
        const box = e.getBoundingClientRect();
        return box.right > innerWidth || box.left < 0;
    }).map(e => e.textContent)"""
    narrow = {"viewport": {"width": 390, "height": 800}, "color_scheme": scheme}
    with closing(Shown(browser, run, **narrow)) as shown:
        shown.until("document.body.textContent.includes('1,234 rows, 0 bad')")
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= 390
        assert shown.tab.evaluate(outside) == []
        assert shown.wrong == []
        report = tmp_path / "report.html"
        report.write_text(html.render([run]))
        shown.tab.goto(report.as_uri())
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= 390
        assert shown.tab.evaluate(outside) == []


def test_the_server_going_away_is_said(browser: Any) -> None:
    with closing(Shown(browser, make_run())) as shown:
        threading.Thread(target=shown.server.close).start()
        shown.until("document.querySelector('.verdict').textContent.startsWith('No longer served')")


def with_rollouts(run: RunRecord, steps: int) -> RunRecord:
    """Reinforcement learning with two rewards, of which the second comes from step 3 on."""
    for at in range(1, steps + 1):
        values = {"mean": at / steps, "std": 0.1, "min": 0.0, "max": 1.0}
        run.add(
            {
                "event": "rollouts", "step": at, "reward": values, "without_signal": 0.25, "kept": 0.75,
                "rewards": {"correct": values, **({"<format>": values} if at > 2 else {})},
                "length": {"mean": 20.0, "std": 1.0, "min": 1.0, "max": 40.0}, "truncated": 0.1, "tokens": 640,
                "seconds": {"generate": 0.3, "score": 0.1}, "faults": {}, "refills": 0,
            }
        )  # fmt: skip
        run.add({"event": "step_end", "step": at, "loss": 0.1, "seconds": 0.5, "figures": {"entropy": 1 / at}})
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0, "rewards": {}, "reason": "stop", "length": 3}
    run.add({"event": "rollout_samples", "step": steps, "samples": [sample, {**sample, "reward": None}]})
    return run


def titles(shown: Shown) -> list[str]:
    return list(shown.tab.locator("figure:visible figcaption b").all_inner_texts())


def test_charts_of_reinforcement_learning_come_as_they_are_recorded(browser: Any) -> None:
    run = RunRecord(directory=Path("run"), name="run", live=True)
    run.add({"event": "run_start", "time": 1.0, "steps": 9})
    with closing(Shown(browser, with_rollouts(run, 2))) as shown:
        assert titles(shown) == [
            *("Reward", "Reward spread (std)", "Signal (%)", "Completion length (tokens)"),
            *("Truncated completions (%)", "Time by phase (s)", "Generation (tokens/s)", "Loss"),
            "Entropy (nats per token)",
        ]
        loss = shown.tab.locator("figure").filter(has=shown.tab.locator('canvas[aria-label="Loss"]')).element_handle()
        held_out = {"mean": 0.5, "std": 0.1, "min": 0.0, "max": 1.0}
        run.add({"event": "rollout_eval", "step": 2, "tasks": 4, "reward": held_out, "seconds": 0.1})
        with_rollouts(run, 6)
        shown.until("charts.length === 10")
        assert titles(shown)[1] == "Rewards by name"
        assert loss.evaluate("element => element.isConnected"), "a chart that stays keeps its element"
        key = shown.tab.locator("figure:visible").first.locator("ul.key").inner_text()
        assert key.split("\n") == ["train, smoothed", "train", "held-out"]
        assert shown.tab.locator("figure:visible").nth(1).locator("ul.key").inner_text().split() == [
            "correct",
            "_format_",
        ]
        shown.until("document.getElementById('details').textContent.includes('Completions')")
        assert HOSTILE in shown.tab.locator('td[data-head="text"]').all_inner_texts()
        assert min(shown.ink("Rewards by name"), shown.ink("Time by phase")) > 100
        assert shown.tab.evaluate("window.hacked === undefined")
        assert shown.wrong == []


def test_layout_is_what_the_script_reads(browser: Any) -> None:
    with closing(Shown(browser, make_run())) as shown:
        layout = json.loads(shown.tab.locator("#layout").text_content())
        assert set(layout) == {"dashes", "phases", "smooth", "heat"}
        assert layout["smooth"] == shown.tab.evaluate("state.smooth")
        assert [t.removesuffix(" (before clipping)") for t in titles(shown)][:3] == [
            "Loss",
            "Learning rate",
            "Grad norm",
        ]


# -------------------------------------------------------------------------- accessibility

AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))

VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (390, 768, 1440)]


def violations(browser: Any, url: str, scheme: str, width: int) -> list[str]:
    """Each violation of any impact, with the elements."""
    # The page's policy would forbid the checker to run.
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport={"width": width, "height": 900})
    tab = context.new_page()
    tab.goto(url)
    tab.wait_for_selector("body[data-drawn]")
    tab.evaluate("document.querySelectorAll('details').forEach(element => { element.open = true; })")
    tab.evaluate(AXE.read_text(encoding="utf-8"))
    found = tab.evaluate("axe.run()")
    assert len(found["passes"]) > 10
    context.close()
    return [f"{v['impact']} {v['id']}: {n['html'][:120]}" for v in found["violations"] for n in v["nodes"]]


def runs_of(name: str) -> list[RunRecord]:
    failed = RunRecord(directory=Path("r"), name="r")
    failed.add({"event": "run_end", "reason": "failed", "message": "no such data set"})
    return {
        "one": [with_experts(make_run(), 200)],
        "rewards": [with_rollouts(make_run(steps=2), 9)],
        "several": [make_run("a"), make_run("b", loss=9.0)],
        "failed": [failed],
    }[name]


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: AXE_CORE=…/node_modules/axe-core/axe.min.js")
@pytest.mark.parametrize("name", ["one", "rewards", "several", "failed"])
def test_axe_core_finds_nothing(browser: Any, tmp_path: Path, name: str) -> None:
    runs, report = runs_of(name), tmp_path / "report.html"
    report.write_text(html.render(runs))
    with closing(PageServer(lambda: runs)) as server:
        for scheme, width in VIEWS if name == "one" else VIEWS[::2]:
            for url in (report.as_uri(), server.url):
                assert violations(browser, url, scheme, width) == [], (scheme, width)
