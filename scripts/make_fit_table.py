"""Write the table of README.md that says what fits into how much GPU memory, by `surogate plan`'s prediction.

With --check the table is made again and compared: exit 1 if it is not current. It takes minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.cli.main import main as surogate  # noqa: E402

FILE = ROOT / "README.md"
BUDGETS = (8, 16, 24, 48, 80, 140)
SPARE = 0.95
"""Share of a budget that a prediction may take."""

MODELS = {
    "0.6B": ("qwen3", "0.6b"),
    "1.7B": ("qwen3", "1.7b"),
    "4B": ("qwen3", "4b"),
    "8B": ("qwen3", "8b"),
    "14B": ("qwen3", "14b"),
    "32B": ("qwen3", "32b"),
    "70B": ("llama", "3.1-70b"),
}
COMMON = ("recompute=true", "per_device_train_batch_size=1", "sequence_len=2048", "lmhead_chunks=8", "device=cuda")
METHODS = {
    "LoRA on 4 bits (`qlora_bnb`)": ("lora=true", "qlora_bnb=true"),
    "LoRA": ("lora=true",),
    "all weights": ("lora=false",),
    "all weights, `cpu_training`": ("lora=false", "cpu_training=true", "master_dtype=bf16", "optimizer=adamw"),
}
GIB = 2**30
_TABLE = re.compile(r"(<!-- made by scripts/make_fit_table.py -->\n)(?:\|[^\n]*\n)*")


def predicted(model: tuple[str, str], method: tuple[str, ...]) -> tuple[int, int]:
    """Bytes on the device and in host memory, without a GPU."""
    family, preset = model
    words = ["plan", f"model={family}", f"model.preset={preset}", *COMMON, *method, "--gpu", "h200", "--json"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = surogate(words)
    if code:
        raise SystemExit(f"surogate {' '.join(words)}: exit code {code}")
    plan = json.loads(out.getvalue())
    return plan["device_bytes"], plan["host_bytes"]


def rows() -> list[str]:
    """The table, a line each."""
    lines = [f"| GPU memory | {' | '.join(METHODS)} |", f"|{' --- |' * (len(METHODS) + 1)}"]
    sizes = {method: {m: predicted(model, keys) for m, model in MODELS.items()} for method, keys in METHODS.items()}
    for budget in BUDGETS:
        cells = []
        for found in sizes.values():
            fits = [m for m, (device, _) in found.items() if device <= budget * GIB * SPARE]
            if not fits:
                cells.append("")
                continue
            device, host = found[fits[-1]]
            beside = f", {host / GIB:.0f} GiB host" if host > GIB else ""
            cells.append(f"{fits[-1]} ({device / GIB:.1f} GiB{beside})")
        lines.append(f"| {budget} GiB | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Write the table, or check it."""
    text = FILE.read_text(encoding="utf-8")
    made = _TABLE.sub(lambda m: m[1] + "\n".join(rows()) + "\n", text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    FILE.write_text(made, encoding="utf-8")
    print("wrote the table of README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
