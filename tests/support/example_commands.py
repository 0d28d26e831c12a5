"""The example files, the commands that their headers show, and what a user who types them has around them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SHORT = (
    "max_steps=2",
    "save_steps=0",
    "eval_steps=0",
    "sequence_len=128",
    "per_device_train_batch_size=1",
    "gradient_accumulation_steps=1",
    "device=cpu",
    "monitor=[jsonl]",
)
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
FAMILIES = {"Qwen/Qwen3-0.6B": "Qwen3", "Qwen2.5-0.5B-Instruct": "Qwen2", "Llama-3.2-1B-Instruct": "Llama"}


def commands(example: Path) -> list[list[str]]:
    """The words after ``surogate`` of each command in the comments, the main one first."""
    comments = [line[1:] for line in example.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    own_lines = [line.strip() for line in comments if line.startswith("   surogate ")]
    inline = [m for line in comments for m in re.findall(r"`(surogate [^`]*examples/[^`]*)`", line)]
    return [shlex.split(text)[1:] for text in (*own_lines, *inline)]


def furnish(here: Path) -> None:
    """Small models and data under the names that examples and guides use."""
    import torch
    import transformers

    from surogate_core.files.paths import resolve_package_path

    (here / "examples").symlink_to(ROOT / "examples")
    embedded = Path(resolve_package_path("pkg://surogate_dataset_chat/embedded"))
    for name, family in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SMALL)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(here / name)
        shutil.copytree(embedded / "tokenizer", here / name, dirs_exist_ok=True)
    (here / "Qwen3-0.6B").symlink_to(here / "Qwen/Qwen3-0.6B")
    for name in ("Qwen3-8B", "Qwen/Qwen3-8B"):
        (here / name).symlink_to(here / "Qwen/Qwen3-0.6B")
    lines = (embedded / "train.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    turns = [{m["role"]: m["content"] for m in json.loads(line)["messages"]} for line in lines]
    alpaca = [{"instruction": t["user"], "input": "", "output": t["assistant"]} for t in turns]
    texts = [{"text": f"{t['user']} {t['assistant']}"} for t in turns]
    pairs = [{"prompt": t["user"], "chosen": t["assistant"], "rejected": f"{number}"} for number, t in enumerate(turns)]
    (here / "corpus").mkdir()
    for file, rows in {"alpaca.jsonl": alpaca, "corpus/a.jsonl": texts, "pairs.jsonl": pairs}.items():
        (here / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (here / "my.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
