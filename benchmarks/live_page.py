"""The live page of a run of a million logged steps in headless Chromium: first paint, curves, zoom.

Writes such a metrics.jsonl, serves it with `surogate report DIR --serve`, opens it while it is still being read, and
again when it is. Needs playwright and a Chromium of the system.

    python benchmarks/live_page.py [--steps 1000000] [--rounds 5] [--screenshot FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = "import sys; from surogate_core.cli.main import main; sys.exit(main(sys.argv[1:]))"

LONG_TASKS = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
}).observe({ type: "longtask", buffered: true });
"""


def write_run(directory: Path, steps: int) -> float:
    """A run's files with this many steps; bytes of the metrics."""
    noise, first = random.Random(0), {"event": "run_start", "time": 1.0, "steps": steps, "model": "made up"}
    with (directory / "metrics.jsonl").open("w") as file:
        file.write(json.dumps(first) + "\n")
        for step in range(1, steps + 1):
            record = {
                "event": "step_end",
                "time": 1.0 + step,
                "step": step,
                "epoch": step / steps,
                "loss": 2 + 6 * math.exp(-step / steps * 8) + noise.gauss(0, 0.1) + (5 if step == steps // 3 else 0),
                "grad_norm": math.exp(noise.gauss(0, 0.3)),
                "lr": 1e-3 * (1 - step / steps),
                "tokens": 4096,
                "total_tokens": 4096 * step,
                "seconds": 0.05,
                "tokens_per_second": 82_000 * math.exp(noise.gauss(0, 0.02)),
                "eta_seconds": 0.05 * (steps - step),
                "peak_memory_bytes": 2**33,
                "speed_of_light": 0.5,
            }
            file.write(json.dumps(record) + "\n")
            if step % (steps // 1000 or 1) == 0:
                file.write(json.dumps({"event": "eval_end", "step": step, "loss": 2.1}) + "\n")
    (directory / "config.yaml").write_text("learning_rate: 0.001\n")
    return (directory / "metrics.jsonl").stat().st_size


def opened(browser: Any, url: str) -> dict[str, float]:
    """Milliseconds from the request of the page to its first paint and to its first curves."""
    tab = browser.new_page(viewport={"width": 1280, "height": 1000})
    tab.add_init_script(LONG_TASKS)
    tab.goto(url)
    deadline = time.monotonic() + 60
    while not (marks := tab.evaluate("performance.getEntriesByName('curves').map(e => e.startTime)")):
        assert time.monotonic() < deadline
        tab.wait_for_timeout(10)
    paint = tab.evaluate("performance.getEntriesByType('paint').map(e => [e.name, e.startTime])")
    found = {**dict(paint), "curves": marks[0], "points": tab.evaluate("state.runs[0].curves.loss[0].length")}
    began = time.perf_counter()
    tab.evaluate("(async () => { show(400000, 500000); while (busy) await new Promise(r => setTimeout(r, 5)); })()")
    found["zoom"] = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    tab.mouse.move(400, 400)
    tab.evaluate("charts.forEach((chart) => chart.draw())")
    found["redraw"] = 1e3 * (time.perf_counter() - began)
    found["longest task"] = tab.evaluate("window.longest")
    tab.close()
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = next(p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n)))
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        size = write_run(Path(name), options.steps)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened_before = browser.new_page()
        opened_before.goto("about:blank")
        started = time.perf_counter()
        command = [sys.executable, "-c", PROGRAM, "report", name, "--serve"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            ready = time.perf_counter() - started
            at_once = opened(browser, url)
            tab = browser.new_page(viewport={"width": 1280, "height": 1000})
            tab.goto(url)
            while tab.evaluate("state.runs[0]?.step ?? 0") < options.steps:
                tab.wait_for_timeout(100)
            read = time.perf_counter() - started
            if options.screenshot:
                tab.screenshot(path=str(options.screenshot))
            tab.close()
            rounds = [opened(browser, url) for _ in range(options.rounds)]
        finally:
            process.terminate()
            process.wait()
        browser.close()
    print(f"{options.steps:,} steps, {size / 2**20:.0f} MiB; served after {ready:.2f} s, all read after {read:.1f} s")
    later = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    for title, figures in (("opened at once", at_once), (f"all read, median of {options.rounds}", later)):
        print(f"{title}: " + ", ".join(f"{k} {v:.0f}{'' if k == 'points' else ' ms'}" for k, v in figures.items()))
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, "at_once": at_once, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
