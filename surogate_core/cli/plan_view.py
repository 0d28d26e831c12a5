"""How `surogate plan` shows a prediction."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from surogate_core.cli.plan_room import Room
from surogate_core.config.resolve import to_dict, to_yaml
from surogate_core.config.schema import RunConfig
from surogate_core.engine.assembly import EngineSettings
from surogate_core.engine.prediction import Prediction
from surogate_core.engine.schedule import render
from surogate_core.files.atomic import human_bytes
from surogate_core.masking import masked_values, masked_yaml

PLACES = ("device", "host", "disk")


def tokens_per_step(config: RunConfig) -> int:
    """Token slots of an optimizer step, padding counted."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return rows * config.sequence_len


def totals(prediction: Prediction) -> str:
    """Bytes in each place, for people; a disk is named only if something is stored on it."""
    places = PLACES if prediction.total("disk") else PLACES[:2]
    return ", ".join(f"{place} {human_bytes(prediction.total(place))}" for place in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The facts about the device in a plan."""

    flops: float
    """FLOP/s of a product."""
    source: str
    """Whether that was measured here or assumed."""
    left_out: Mapping[str, str]
    """Kernel pack → why it is not counted on."""


def as_json(
    config: RunConfig, title: str, settings: EngineSettings, prediction: Prediction, device: Device, **extra: Any
) -> str:
    """The plan as one JSON object, with further keys at its end."""
    value = {
        "model": title,
        "config": masked_values(to_dict(config)),
        "device": str(settings.device),
        "parameters": prediction.parameters,
        "trainable_parameters": prediction.trainable_parameters,
        "tokens_per_step": tokens_per_step(config),
        "schedule": [str(action) for action in prediction.schedule],
        "kernels": {f"{op} {dtype}": name for (op, dtype), name in prediction.kernels.items()},
        "kernels_left_out": dict(device.left_out),
        "held": [asdict(h) for h in prediction.held],
        "device_bytes": prediction.total("device"),
        "host_bytes": prediction.total("host"),
        "disk_bytes": prediction.total("disk"),
        "recomputed_flops": prediction.again,
        "recomputed_seconds": prediction.again / device.flops,
        **extra,
    }
    return json.dumps(value, indent=1) + "\n"


def _on_top(settings: EngineSettings) -> str:
    """A note on what the total does not include; the figure is the largest of docs/memory.md, "On a CPU"."""
    if settings.device.type == "cpu":
        return "a lower bound: holes in the heap took up to 34 % more in measured runs"
    return "fragmentation not included"


def as_text(
    config: RunConfig, title: str, settings: EngineSettings, prediction: Prediction, device: Device, room: Room
) -> str:
    """The plan for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensors")
    table.add_column("place")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for held in prediction.held:
        table.add_row(held.kind, held.place, human_bytes(held.nbytes), held.detail)
    buffer = io.StringIO()
    Console(file=buffer, width=110, highlight=False).print(table)
    trained = f"{prediction.parameters:,} parameters, {prediction.trainable_parameters:,} trained"
    kernels = ", ".join(f"{op} {name}" for (op, _), name in sorted(prediction.kernels.items()))
    again = (
        f"computed again in a micro-step: {prediction.again / 1e12:.3g} TFLOP of products and attention, "
        f"{1e3 * prediction.again / device.flops:.3g} ms at {device.flops / 1e12:.3g} TFLOP/s ({device.source})\n"
        if prediction.again
        else ""
    )
    disk = room.short_of(prediction).get("disk")
    full = f"{disk}. Fix: set offload_dir to a directory of another disk, or offload less.\n" if disk else ""
    left_out = "".join(f"without the kernels of {name}: {why}\n" for name, why in sorted(device.left_out.items()))
    parts = [
        f"# config\n{masked_yaml(to_yaml(config))}",
        f"# model\n{title}: {trained}\n",
        f"# micro-step on {settings.device} ({settings.compiler}), {settings.tokens:,} tokens\n"
        f"{render(prediction.schedule)}\n"
        f"× {config.gradient_accumulation_steps} micro-steps, then clip and {config.optimizer.name}: "
        f"{tokens_per_step(config):,} tokens a step\n"
        f"kernels: {kernels}\n{left_out}",
        f"# memory, predicted\n{buffer.getvalue()}{totals(prediction)}; {_on_top(settings)}\n{full}{again}",
    ]
    return "\n".join(parts)
