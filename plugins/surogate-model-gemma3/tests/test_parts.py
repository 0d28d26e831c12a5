"""The language model of a checkpoint that has a vision tower too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from surogate_model_gemma3 import surogate_model_family
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from surogate_core.plugin import CardFacts, ModelDir, export_adapter
from surogate_core.service.files import PLACE, LoraAdapter, text_config, text_part
from surogate_testing import tiny

FAMILY = surogate_model_family()
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61, "sliding_window": 5, "pad_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "model_type": "siglip_vision_model",
}  # fmt: skip


def saved(directory: Path) -> Any:
    """A random model of both parts, which is saved; its experts of images are never called."""
    torch.manual_seed(0)
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=60)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    model.save_pretrained(directory)
    return model


def engine_of(files: ModelDir, **settings: Any) -> Any:
    drawn = tiny.random_source()

    def source(spec: Any) -> torch.Tensor:
        return drawn(spec) if spec.role == "adapter" else files.get(spec.hf_name)

    return tiny.engine(dict(files.config), build=FAMILY.build, source=source, **settings)


def test_its_logits_and_its_adapter_are_those_of_the_whole_model(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole")
    files, note = text_part(ModelDir.open(tmp_path / "whole"), lambda: {"gemma3": FAMILY}, "whole")
    assert note is not None
    assert "whole is a gemma3 of several parts. Its language model is read and trained, as gemma3_text" in note
    engine = engine_of(files, lora=tiny.lora(4, scale=2.0))
    expected = {spec.hf_name for piece in engine.plan.pieces for spec in piece.specs if spec.role != "adapter"}
    assert not files.check({name: files.shape(name) for name in expected}), "no tensor of another part"
    assert files.config["architectures"] == ["Gemma3ForCausalLM"]
    (document,) = tiny.documents((13,), seed=7, vocabulary=60)
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([document])).logits[0]
    engine.train_step([tiny.batch([document])], step=0, lr=1e-2).read()
    tensors = dict(engine.parameters.adapter_tensors())
    card = CardFacts(title="t", base_place=files.place)
    directory = export_adapter(
        tmp_path / "adapter", tensors.items(), rank=4, alpha=8, dropout=0.0, base_model=None, card=card
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    loaded = PeftModel.from_pretrained(base, str(directory)).eval()
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([document])).logits[0]
    assert tiny.relative_error(engine.logits(tiny.batch([document]))[:13], logits) <= 1e-5
    assert tiny.relative_error(plain, logits) > 1e-3, "the adapter must matter"
    opened = LoraAdapter.open(directory)
    assert all(torch.equal(opened.get(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "transformers 4"])
def test_files_of_each_version_are_read(tmp_path: Path, old: bool) -> None:
    from safetensors.torch import load_file, save_file

    model = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if name != "lm_head.weight"}
    begins = {False: "language_model.model.", True: PLACE}
    plain = {name.replace(PLACE, "language_model.model."): t for name, t in tensors.items()}
    save_file({n.replace(begins[False], begins[old]): t for n, t in plain.items()}, file)
    files, _ = text_part(ModelDir.open(tmp_path), lambda: {"gemma3": FAMILY}, "whole")
    (document,) = tiny.documents((13,), seed=7, vocabulary=60)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([document])).logits[0]
    assert tiny.relative_error(engine_of(files).logits(tiny.batch([document]))[:13], expected) <= 1e-5


def test_a_family_that_reads_the_whole_model_or_none_at_all() -> None:
    config = {"model_type": "gemma3", "text_config": {**TEXT, "model_type": "gemma3_text"}, "eos_token_id": [1, 106]}
    found = text_config(config, {"gemma3": FAMILY})
    assert found is not None
    assert json.dumps(found)
    assert found["eos_token_id"] == [1, 106]
    assert text_config(config, {}) is None
    assert text_config({**config, "model_type": "gemma3_text"}, {"gemma3": FAMILY}) is None
    assert text_config({"model_type": "gemma3_text"}, {"gemma3": FAMILY}) is None
