"""The names of the commands."""

from __future__ import annotations

COMMANDS = ("sft", "pt", "tokenize", "merge", "report", "numerics", "plan", "plugins", "doctor")
PEERS_COMMANDS = {
    **dict.fromkeys(("train", "finetune", "fine-tune", "finetuning", "fit", "run", "lora", "qlora"), "sft"),
    **dict.fromkeys(("pretrain", "pre-train"), "pt"),
    "preprocess": "tokenize",
    "export": "merge",
}
"""Name of a command in other trainers → its name here."""
