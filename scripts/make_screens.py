"""Make the pictures of report and live page in docs/images: light and dark, wide and narrow, one run, a sweep, experts,
rewards.

Trains the embedded example, a sweep of three learning rates, a model with experts and the arithmetic of the tutorial on
the CPU (about eight minutes; runs that are there are kept), and shoots them in a Chromium of the system. Needs
playwright and Pillow.

    OMP_NUM_THREADS=1 python scripts/make_screens.py [--runs DIR] [--to DIR] [--whole]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from surogate_command_report.serve import MetricsFollower, PageServer
from surogate_command_report.write import write_report

from surogate_core.cli.main import main as command
from surogate_core.config.resolve import load_run_config
from surogate_core.files.records import find_runs
from surogate_core.plugins.registry import load_plugins
from surogate_core.run.job import launch

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

RUNS = Path("runs")
"""Relative, because the pictures show the paths of the runs."""

DEMO = ("max_steps=240", "eval_steps=24")
RATES = ("3e-4", "1e-3", "3e-3")
EXPERTS = (
    *("model=qwen3-moe", "model.config.num_experts=32", "model.config.num_experts_per_tok=4", "max_steps=200"),
    *("router_aux_loss_coef=0", "eval_steps=100"),
)
SUMS = (
    *("env", "problems", "arithmetic", "digits=1", "operators=+"),
    *("--limit", "3000", "--solved", "--output", "sums.jsonl"),
)
READING = (
    *("datasets=sums.jsonl", "tokenizer=pkg://surogate_dataset_chat/embedded/tokenizer", "model=qwen3"),
    *("sequence_len=128", "max_steps=160", "warmup_steps=10", "learning_rate=1e-3", "lr_scheduler_type=constant"),
)
ADDING = (
    *("task=grpo", "model=runs/sums/model", "environment={name: arithmetic, digits: 1, operators: '+'}", "lora=false"),
    *("sequence_len=128", "max_completion_length=8", "prompts_per_step=16", "num_generations=8", "weight_decay=0"),
    *("per_device_train_batch_size=4", "learning_rate=2e-4", "warmup_steps=10", "max_steps=200"),
)
"""The second half of docs/tutorials/reinforcement-learning.md."""

WIDE: dict[str, Any] = {"viewport": {"width": 1440, "height": 1080}, "device_scale_factor": 0.75}
NARROW: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1}


def train() -> None:
    """The example and the sweep, below the working directory; a run that has a report is kept."""
    registry = load_plugins()
    wanted: dict[str, tuple[str, ...]] = {"demo": DEMO} | {
        f"sweep/{rate}": (f"learning_rate={rate}", "max_steps=100", "eval_steps=10") for rate in RATES
    }
    wanted |= {"experts": EXPERTS, "sums": READING, "adding": ADDING}
    if not Path("sums.jsonl").exists():
        command(SUMS)
    for name, keys in wanted.items():
        place = RUNS / name
        if (place / "report.md").exists():
            continue
        common = ("save_steps=0", "device=cpu", "monitor=[jsonl,adaptive]", f"output_dir={place}")
        launch(load_run_config([*common, *keys], registry=registry), registry)


def keep(picture: bytes, path: Path) -> None:
    """With 256 colours a picture of curves is much smaller and looks the same."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE).save(
        path, optimize=True
    )


def shoot(browser: Any, url: str, path: Path, *, whole: bool, **options: Any) -> None:
    """One picture of a page; its first screen, or all of it."""
    tab = browser.new_page(**options)
    tab.goto(url)
    tab.wait_for_timeout(1500)
    keep(tab.screenshot(full_page=whole), path)
    tab.close()


def shoot_experts(browser: Any, to: Path, temporary: Path) -> None:
    """The heat maps in a report of a model with experts, light and dark."""
    report = write_report([RUNS / "experts"], output=temporary / "report.html")[0].as_uri()
    for scheme in ("light", "dark"):
        tab = browser.new_page(**{**WIDE, "color_scheme": scheme})
        tab.goto(report)
        tab.wait_for_selector("canvas.heat")
        boxes = [figure.bounding_box() for figure in tab.locator("figure:has(canvas.heat)").all()]
        left, top = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
        right, bottom = (max(box[a] + box[b] for box in boxes) for a, b in (("x", "width"), ("y", "height")))
        clip = {"x": left - 8, "y": top - 8, "width": right - left + 16, "height": bottom - top + 16}
        keep(tab.screenshot(clip=clip, full_page=True), to / f"experts{'-dark' if scheme == 'dark' else ''}.png")
        tab.close()


def shoot_rewards(browser: Any, to: Path, temporary: Path) -> None:
    """The first screen of the report of a run that learns from rewards, light and dark."""
    report = write_report([RUNS / "adding"], output=temporary / "report.html")[0].as_uri()
    for scheme in ("light", "dark"):
        path = to / f"report-rewards{'-dark' if scheme == 'dark' else ''}.png"
        shoot(browser, report, path, whole=False, **{**WIDE, "color_scheme": scheme})


def pictures(to: Path, *, whole: bool) -> None:
    """Every page in both schemes and widths; the sweep's report wide alone, unless `whole`."""
    from playwright.sync_api import sync_playwright

    chromium = next(p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n)))
    subjects = {"": "demo", "-sweep": "sweep"}
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as temporary:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for subject, name in subjects.items():
            report = write_report([RUNS / name], output=Path(temporary) / "report.html")[0].as_uri()
            followers = [MetricsFollower(run, group=group) for run, group in find_runs([RUNS / name])]
            for follower in followers:
                follower.caught_up.wait(60)
            records = [follower.record for follower in followers]
            with closing(PageServer(lambda records=records: records)) as server:  # type: ignore[misc]
                views = [(p, w, s) for p in ("report", "page") for w in ("", "-390") for s in ("", "-dark")]
                for page, width, scheme in views if whole or not subject else views[:2]:
                    url = report if page == "report" else server.url
                    options = {**(NARROW if width else WIDE), "color_scheme": scheme.strip("-") or "light"}
                    shoot(browser, url, to / f"{page}{subject}{width}{scheme}.png", whole=whole, **options)
            for follower in followers:
                follower.close()
        shoot_experts(browser, to, Path(temporary))
        shoot_rewards(browser, to, Path(temporary))
        browser.close()


def main() -> None:
    """Train, shoot, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, help="a directory to keep the runs in")
    parser.add_argument("--to", type=Path, default=IMAGES)
    parser.add_argument("--whole", action="store_true", help="whole pages instead of first screens")
    options = parser.parse_args()
    to = options.to.resolve()
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.runs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.chdir(directory):
            train()
            pictures(to, whole=options.whole)


if __name__ == "__main__":
    main()
