"""Directories as users have them: a tiny model with its tokenizer, and an adapter on it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch


def write_model(directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a random Qwen3 as transformers does, with the tokenizer of the default data set; the directory.

    `config` replaces fields of `transformers.Qwen3Config`. Needs plugins that offer the family and the data set.
    """
    import transformers

    from surogate_core.plugin import load_plugins, load_run_config
    from surogate_core.service.files import resolve_package_path

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **config})).save_pretrained(directory)
    tokenizer = load_run_config([], registry=load_plugins()).tokenizer
    shutil.copytree(resolve_package_path(str(tokenizer)), directory, dirs_exist_ok=True)
    return directory


def random_adapter(base: Path, directory: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write an adapter that changes the base much, with PEFT; the directory. `config`: fields of `LoraConfig`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **config}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**values))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(str(directory))
    return directory
