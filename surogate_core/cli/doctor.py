"""`surogate doctor`: versions, devices, what this machine can run, and the reasons for what it cannot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

from surogate_core.errors import PluginError
from surogate_core.plugins import Registry, import_policy, load_plugins

PACKAGES = ("surogate-core", "torch", "transformers", "datasets", "tokenizers", "safetensors", "hydra-core", "pluggy")
OPTIONAL_PACKAGES = ("surogate", "triton", "cupy-cuda13x", "cupy-cuda12x", "peft", "wandb")


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code is 0 also when something cannot run."""
    parser = argparse.ArgumentParser(prog="surogate doctor", description="List what this machine can run.")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    arguments = parser.parse_args(list(argv))
    registry = load_plugins(import_policy())
    facts = examine(registry)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def examine(registry: Registry) -> dict[str, Any]:
    """Everything that the command shows, as plain values."""
    clashes = []
    try:
        registry.check()
    except PluginError as error:
        clashes.append(str(error))
    devices = _devices()
    kernels, clash = _kernels(registry, devices)
    clashes += clash
    return {
        "versions": _versions(),
        "devices": [{k: v for k, v in d.items() if k != "device"} for d in devices],
        "several GPUs": _together([d for d in devices if d["device"].type == "cuda"]),
        "host": _host(),
        "places": _places(),
        "recipes": _runnable(registry, "recipe", devices),
        "kernel packs": _runnable(registry, "kernels", devices),
        "kernels": kernels,
        "plugins": registry.plugin_set(),
        "not loaded": [
            *(str(broken) for broken in registry.broken.values()),
            *(f"{plugin.label} is {reason}" for plugin, reason in registry.blocked.values()),
            *clashes,
        ],
        "remarks on plugins": [str(remark) for remark in registry.remarks],
    }


def _versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["CUDA of torch"] = torch.version.cuda or "none: torch is built for CPUs"
    found["NVIDIA driver"] = _driver() or "none found"
    return found


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    try:
        first = file.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), first)


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [
        {"device": torch.device("cpu"), "name": "cpu", "model": _cpu_model(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "device": torch.device("cuda", index),
                "name": f"cuda:{index}",
                "model": properties.name,
                "sm": f"{properties.major}{properties.minor}",
                "memory": _gib(total),
                "free": _gib(free),
            }
        )
    return devices


def _together(gpus: list[dict[str, Any]]) -> dict[str, str]:
    """How the GPUs train together; empty for fewer than two."""
    if len(gpus) < 2:
        return {}
    import torch
    from torch.distributed import is_nccl_available

    pairs = list(combinations(range(len(gpus)), 2))
    apart = [f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    reach = "all" if not apart else "none" if len(apart) == len(pairs) else f"all but {', '.join(apart)}"
    models = sorted({gpu["model"] for gpu in gpus})
    return {
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if is_nccl_available() else "none: only gpus=1 can run",
        "peer access": reach if not apart else f"{reach}; without it data goes through host memory, which is slower",
        "models": models[0] if len(models) == 1 else f"{', '.join(models)}: equal bits are not promised",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _host() -> dict[str, str]:
    from surogate_core.host import cores, free_host_memory, memory_of_machine

    return {
        "system": platform.platform(),
        "cores": str(cores()),
        "memory": "unknown" if (whole := memory_of_machine()) is None else _gib(whole),
        "available": _gib(free_host_memory()),
    }


def _places() -> dict[str, str]:
    from platformdirs import user_cache_path, user_log_path

    cache = user_cache_path("surogate")
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    places = {"working directory": Path.cwd(), "cache": cache, "log of failed starts": user_log_path("surogate")}
    return {name: _disk(path) for name, path in {**places, "Hugging Face cache": hub}.items()}


def _disk(path: Path) -> str:
    existing = next(p for p in (path, *path.parents) if p.exists())
    writable = "" if os.access(existing, os.W_OK) else ", not writable"
    return f"{path} ({_gib(shutil.disk_usage(existing).free)} free{writable})"


def _runnable(registry: Registry, kind: str, devices: list[dict[str, Any]]) -> list[dict[str, str]]:
    try:
        offers = registry.bundles(kind)
    except PluginError:
        return []
    rows = []
    for name, offered in offers.items():
        row = {"name": name, "plugin": offered.plugin.name}
        for device in devices:
            try:
                row[device["name"]] = offered.bundle.unavailable(device["device"]) or "ok"
            except Exception as error:
                row[device["name"]] = f"{offered.plugin.label} failed: {type(error).__name__}: {error}"
        rows.append(row)
    return rows


def _kernels(registry: Registry, devices: list[dict[str, Any]]) -> tuple[list[dict[str, str]], list[str]]:
    """For each op, ``pack/kernel`` by device and dtype where a pack has one, and the reasons why there is no choice.

    An op that a pack serves and no installed plugin defines has a row that says so.
    """
    import torch

    from surogate_core.kernels.registry import KernelTable

    try:
        packs, families = (list(registry.all(kind).values()) for kind in ("kernels", "model"))
    except PluginError:
        return [], []
    rows: dict[str, dict[str, str]] = {}
    faults: list[str] = []
    for device in devices:
        try:
            table = KernelTable.build(device["device"], packs, families=families)
        except Exception as error:
            faults.append(str(error))
            continue
        for op in sorted({kernel.op for kernel in table.kernels}):
            for dtype in (torch.float32, torch.bfloat16):
                if table.offers(op, dtype):
                    table.choose(op, dtype)
        for (op, name), label in table.labels.items():
            rows.setdefault(op, {"op": op})[f"{device['name']} {name}"] = label
        for op, pack in table.undefined.items():
            rows[op] = {"op": op, "left out": f"{pack} has kernels, no installed plugin defines the op"}
    return list(rows.values()), list(dict.fromkeys(faults))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _print(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=160)
    for title, content in facts.items():
        if not content:
            continue
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
        if isinstance(content, dict):
            table.show_header = False
            for name, text in content.items():
                table.add_row(name, str(text))
        elif isinstance(content[0], dict):
            columns = list(dict.fromkeys(key for row in content for key in row))
            for column in columns:
                table.add_column(column)
            for row in content:
                table.add_row(*(str(row.get(column, "")) for column in columns))
        else:
            table.show_header = False
            for text in content:
                table.add_row(str(text))
        console.print(table)
