"""Random PEFT adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def random_adapter(base: Path, directory: Path, *, seed: int = 1, **config: Any) -> Path:
    """Writes an adapter that changes the base much, with PEFT. `config`: of `LoraConfig`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **config}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**values))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(directory)
    return directory
