"""The language model of a checkpoint that has a vision tower and heads for several tokens too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from surogate_model_qwen3_5 import surogate_model_family
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from surogate_core.plugin import CardFacts, ModelDir, export_adapter
from surogate_core.service.files import LoraAdapter, text_part
from surogate_testing import tiny

FAMILY = surogate_model_family()
TEXT: dict[str, Any] = {
    "head_dim": 16, "hidden_size": 32, "intermediate_size": 48, "linear_key_head_dim": 6, "linear_num_key_heads": 1,
    "linear_num_value_heads": 3, "linear_value_head_dim": 10, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 5000.0,
        "rope_type": "default",
    },
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 8,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, TEXT),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, {**TEXT, **EXPERTS}),
}


def saved(kind: str, directory: Path) -> Any:
    """A random model of all parts, which is saved as released ones are, with a tensor of `mtp`."""
    torch.manual_seed(0)
    config_class, architecture, text = KINDS[kind]
    config = config_class(text_config={**text}, vision_config={**VISION}, experts_implementation="eager")
    model = architecture(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(32, 64)}, file, metadata={"format": "pt"})
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_logits_and_its_adapter_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path / "whole")
    files, note = text_part(ModelDir.open(tmp_path / "whole"), lambda: {"qwen3-5": FAMILY}, "whole")
    assert note is not None
    assert f"whole is a {kind} of several parts. Its language model is read and trained, as {kind}_text" in note
    assert "mtp.fc.weight" in files.names(), "an export has it"
    built = FAMILY.build(files.config)
    files, drawn = files.with_experts(built.fused_tensors()), tiny.random_source()
    stored = tiny.tensor_source({name: files.get(name) for name in files.names()})
    engine = tiny.engine(
        dict(files.config),
        build=FAMILY.build,
        source=lambda spec: drawn(spec) if spec.role == "adapter" else stored(spec),
        lora=tiny.lora(4, scale=2.0, targets=("all",)),
    )
    (document,) = tiny.documents((13,), seed=7, vocabulary=60)
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([document])).logits[0]
    engine.train_step([tiny.batch([document])], step=0, lr=1e-2).read()
    tensors = dict(engine.parameters.adapter_tensors())
    card = CardFacts(title="t", base_place=files.place)
    directory = export_adapter(
        tmp_path / "adapter", tensors.items(), rank=4, alpha=8, dropout=0.0, base_model=None, card=card, model=built
    )
    loaded = PeftModel.from_pretrained(model, str(directory)).eval()
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([document])).logits[0]
    assert tiny.relative_error(engine.logits(tiny.batch([document]))[:13], logits) <= 1e-5
    assert tiny.relative_error(plain, logits) > 1e-3, "the adapter must matter"
    assert LoraAdapter.open(directory)
