"""Ours and every installed peer on the card at hand, in one run: one table as Markdown and JSON.

    python benchmarks/one_table.py --out DIR [--budget 1500] [--only lora rows full generation grpo]
    python benchmarks/one_table.py --out DIR --device cpu --tiny      # without a GPU: the script itself
    python benchmarks/one_table.py --out DIR --join DIR1 DIR2         # one table of runs side by side

- lora: gpu_peers.py, with transformers and PEFT, Liger's kernels, and Unsloth; rows: other lengths, with Unsloth.
- full: all weights in bf16 and FP8: several_gpus.py on one GPU, with FSDP2, torchao's float8 and torchtitan.
- generation: generate.py, with vLLM.
- grpo: grpo.py, with TRL's generation by transformers and by vLLM. Its tokens are those of the completions.

Before each part and at the end the product of 8192³ in bf16 is measured. Parts run in this order until the time is up;
the files are written again after each. What a command prints and writes is in a directory of its own below `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu_peers
import lanes
from lanes import Command

OURS = "Surogate"
NEEDS: Mapping[str, Sequence[str]] = {
    **{gpu_peers.TITLES[name]: packages for name, packages in gpu_peers.PEERS.items()},
    "FSDP2": ("transformers",),
    "FSDP2 float8": ("transformers", "torchao"),
    "torchtitan": ("torchtitan",),
    "torchtitan float8": ("torchtitan", "torchao"),
    "vLLM": ("vllm",),
    "TRL": ("trl", "peft"),
    "TRL with vLLM": ("trl", "peft", "vllm"),
}
"""Peer → the packages that it needs."""
PACKAGES = ("transformers", "peft", "liger_kernel", "unsloth", "torchao", "torchtitan", "trl", "vllm")
FILE, END = "one_table", "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side of one piece of work."""

    part: str
    work: str
    side: str
    tokens_per_second: float | None = None
    gib: float | None = None
    error: str | None = None
    ours_over_this: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is compared: for each side the number of the part's command that measures it, and its case there."""

    name: str
    sides: Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Commands, each with the option that takes its cases, and what they compare."""

    commands: Sequence[Command]
    works: Sequence[Work]

    def of(self, lacking: Callable[[str], str]) -> list[Command]:
        """The commands with the cases of the sides that do not lack a package."""
        found: list[Command] = []
        for number, command in enumerate(self.commands):
            sides = [(side, case) for work in self.works for side, (n, case) in work.sides.items() if n == number]
            # gpu_peers.py runs ours in any case, and takes the others' names.
            cases = [case for side, case in sides if case != gpu_peers.OURS and not lacking(side)]
            found.append([*command, *cases])
        return found


def _lora(*lines: tuple[str, Sequence[str]], sides: Sequence[str] = tuple(gpu_peers.TITLES)) -> Part:
    """`lines`: (name of the work, further options)."""
    return Part(
        commands=[["gpu_peers.py", "--modes", "lora", *more, "--peers"] for _, more in lines],
        works=[
            Work(name=name, sides={gpu_peers.TITLES[side]: (n, side) for side in sides})
            for n, (name, _) in enumerate(lines)
        ],
    )


def _full(*sizes: str) -> Part:
    command = ["--worlds", "1", "--limit", "200", "--budget", "900", "--only"]
    works = []
    for size in sizes:
        for ours, theirs in (("", "bf16"), (" fp8", "float8")):
            suffix = "" if theirs == "bf16" else f" {theirs}"
            sides = {
                OURS: (0, f"{size} full{ours}, level 1, accumulation 4"),
                **{
                    f"{peer}{suffix}": (1, f"{size} full, {peer} {theirs}, accumulation 4")
                    for peer in ("FSDP2", "torchtitan")
                },
            }
            works.append(Work(name=f"{size} all weights, {'bf16' if not ours else 'FP8'}", sides=sides))
    return Part(commands=[["several_gpus.py", *command], ["several_gpus_peers.py", *command]], works=works)


def _generation(*models: tuple[str, int]) -> Part:
    commands, works = [], []
    for n, (model, sequences) in enumerate(models):
        commands.append(["generate.py", "--model", model, "--sequences", str(sequences), "--cases"])
        sides = {OURS: (n, "bf16"), f"{OURS}, LoRA not merged": (n, "lora"), "vLLM": (n, "vllm")}
        works.append(Work(name=f"{model}, {sequences} sequences", sides=sides))
    return Part(commands=commands, works=works)


PARTS: Mapping[str, Part] = {
    "lora": _lora(("0.6B LoRA", ["--sizes", "0.6b"]), ("8B LoRA", ["--sizes", "8b"])),
    "rows": _lora(
        ("0.6B LoRA, 8 rows of 512", ["--sizes", "0.6b", "--batches", "8x512"]),
        ("0.6B LoRA, documents of 40 tokens", ["--sizes", "0.6b", "--documents", "tiny"]),
        ("8B LoRA, a row of 8192", ["--sizes", "8b", "--batches", "1x8192"]),
        sides=(gpu_peers.OURS, "unsloth"),  # the best peer
    ),
    "full": _full("4B", "8B"),
    "generation": _generation(("qwen3-0.6b", 256), ("qwen3-8b", 128)),
    "grpo": Part(
        commands=[["grpo.py", "--model", "qwen3-0.6b", "--samples", "128", "--rows", "16", "--steps", "4", "--cases"]],
        works=[
            Work(
                name="qwen3-0.6b LoRA, 128 completions",
                sides={OURS: (0, "lora"), "TRL": (0, "trl-lora"), "TRL with vLLM": (0, "trl-vllm-lora")},
            )
        ],
    ),
}


# ------------------------------------------------------------------------- what scripts write


def figures(script: str, place: Path) -> dict[str, dict[str, Any]]:
    """Case → its figures as a script wrote them, as fields of `Row`; a script that was stopped wrote some."""
    found: dict[str, dict[str, Any]] = {}
    for case, one in _written(script, place):
        if one.get("error"):
            found[case] = {"error": str(one["error"])}
            continue
        rate = one.get("tokens_per_second")
        if script == "grpo.py":
            rate = one["samples"] * one["new"] / one["seconds"]
        memory = one.get("memory") if script in ("generate.py", "grpo.py") else one.get("peak_gib")
        found[case] = {"tokens_per_second": rate, "gib": memory}
    return found


def _written(script: str, place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(case, its figures)."""
    stem = Path(script).stem
    with contextlib.suppress(OSError):
        if script.startswith("several_gpus"):
            lines = (place / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines()
            yield from ((one["case"], one) for one in map(json.loads, lines))
            return
        found = json.loads((place / f"{stem}.json").read_text(encoding="utf-8"))
        if script == "gpu_peers.py":
            yield from ((one["side"], one) for one in found["lines"] if not one["again"])
        else:
            yield from ((one["case"], one) for one in found)


def rows_of(name: str, part: Part, places: Sequence[Path], lacking: Callable[[str], str]) -> list[Row]:
    """The rows of a part, whose commands wrote into these directories."""
    written = [figures(command[0], place) for command, place in zip(part.commands, places, strict=True)]
    found = []
    for work in part.works:
        rows = []
        for side, (number, case) in work.sides.items():
            measured = written[number].get(case) or {"error": lacking(side) or "no result"}
            rows.append(Row(part=name, work=work.name, side=side, **measured))
        found += with_ratios(rows)
    return found


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one piece of work with the ratio of ours to each."""
    ours = next((row.tokens_per_second for row in rows if row.side == OURS), None)
    return [
        replace(row, ours_over_this=ours / row.tokens_per_second)
        if ours and row.tokens_per_second and row.side != OURS
        else row
        for row in rows
    ]


def lack(side: str) -> str:
    """Why a side cannot run here, or ""."""
    missing = [package for package in NEEDS.get(side, ()) if importlib.util.find_spec(package) is None]
    return f"not installed ({', '.join(missing)})" if missing else ""


# -------------------------------------------------------------------------------- the command


def markdown(report: Mapping[str, Any]) -> str:
    """The table, and what it was measured on."""
    rates = [f"{one['tflops']:.0f} {_when(one['part'])}" for one in report["rates"]]
    text = [f"{report['card']}; {report['versions']}.", f"Product of 8192³ in bf16, TFLOP/s: {', '.join(rates)}.", ""]
    heads = ["work", "side", "tok/s", "ours ÷ this", "GiB"]
    text += ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for row in report["rows"]:
        cells = [row["work"], row["side"]]
        if row["error"]:
            cells += [row["error"].splitlines()[-1][:160].replace("|", "\\|"), "", ""]
        else:
            ratio, gib = row["ours_over_this"], row["gib"]
            cells += [f"{row['tokens_per_second']:,.0f}", f"{ratio:.2f}" if ratio else "", f"{gib:.1f}" if gib else ""]
        text.append("| " + " | ".join(cells) + " |")
    text += ["", *(f"- {why}" for why in report["failed"])]
    return "\n".join(text).rstrip() + "\n"


def joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of runs on GPUs of one host, or of peers that do not fit into one environment."""

    def each(key: str) -> str:
        return "; ".join(dict.fromkeys(report[key] for report in reports))

    def all_of(key: str) -> list[Any]:
        return [one for report in reports for one in report[key]]

    rows = sorted(all_of("rows"), key=lambda row: list(PARTS).index(row["part"]))
    return {"card": each("card"), "versions": each("versions"), "rows": rows} | {
        key: all_of(key) for key in ("rates", "failed")
    }


def write(report: Mapping[str, Any], out: Path) -> None:
    """Both files."""
    (out / f"{FILE}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (out / f"{FILE}.md").write_text(markdown(report), encoding="utf-8")


def _when(part: str) -> str:
    return "at the end" if part == END else f"before {part}"


def measure_rate(options: argparse.Namespace) -> None:
    """Write the card and its product rate."""
    import torch

    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found = {"card": name, "tflops": gpu_peers.ceiling(device)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rate.json").write_text(json.dumps(found), encoding="utf-8")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every part in turn; both files are written after each."""
    until = time.monotonic() + options.budget
    report: dict[str, Any] = {"card": "nothing ran", "versions": gpu_peers.versions(PACKAGES)}
    report |= {"rates": [], "rows": [], "failed": []}

    def words(command: Command, place: Path) -> list[str]:
        return lanes.words_of(command, place, tiny=options.tiny, cache=options.out / "cache")

    for name in [*options.only, END]:
        part = PARTS.get(name, Part(commands=[], works=[]))
        commands: list[Command] = [["one_table.py", "--rate"], *part.of(lack)]
        places = [options.out / f"{name}.0.{number}" for number in range(len(commands))]
        for place in places:
            shutil.rmtree(place, ignore_errors=True)  # an earlier run's
        begun, failed = lanes.run(name, [(None, commands)], options.out, until, words)
        for label in begun[1:]:
            print(f"== {label}\n{lanes.said(options.out / label)}", flush=True)
        report["failed"] += failed
        with contextlib.suppress(OSError):
            rate = json.loads((places[0] / "rate.json").read_text(encoding="utf-8"))
            report["card"] = rate["card"]
            report["rates"].append({"part": name, "tflops": rate["tflops"]})
        report["rows"] += [asdict(row) for row in rows_of(name, part, places[1:], lack)]
        write(report, options.out)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Write the table; the exit status says whether a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--budget", type=float, default=1500, help="seconds for all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, to try the script itself")
    parser.add_argument("--join", nargs="+", type=Path, metavar="DIR", help="only join the tables of these directories")
    parser.add_argument("--rate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.tiny = options.tiny or options.device == "cpu"
    if options.rate:
        measure_rate(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.join:
        report = joined([json.loads((one / f"{FILE}.json").read_text(encoding="utf-8")) for one in options.join])
        write(report, options.out)
    else:
        report = run(options)
    print(markdown(report))
    return int(bool(report["failed"]))


if __name__ == "__main__":
    sys.exit(main())
