"""`surogate merge --parts`: the language model of a model of several parts alone, or with the others as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from run_fixtures import QUICK
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from surogate_core.cli.main import main
from surogate_core.errors import UserError
from surogate_core.hf.text_part import Whole
from surogate_testing import tiny
from surogate_testing.chat_templates import byte_tokenizer

TEXT: dict[str, Any] = {
    "head_dim": 16, "hidden_size": 32, "intermediate_size": 48, "linear_key_head_dim": 8, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_value_head_dim": 8, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 5000.0,
        "rope_type": "default",
    },
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
GEMMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "sliding_window": 5, "pad_token_id": None,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "model_type": "siglip_vision_model",
}  # fmt: skip
EAGER: Any = {"experts_implementation": "eager"}
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3-5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**TEXT}, vision_config={**VISION}, **EAGER)
    ),
    "qwen3-5 with experts": lambda: Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config={**TEXT, **EXPERTS}, vision_config={**VISION}, **EAGER)
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=GEMMA, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=319)
    ),
}
"""Name → a random model of several parts."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_parts_are_the_base_with_the_adapter(
    kind: str, tmp_path: Path, data_cache: Path, run_here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    model = KINDS[kind]()
    architecture = type(model)
    model.save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"patch_size": 16}')
    file = base / "model.safetensors"
    before = load_file(file) | ({"mtp.fc.weight": torch.ones(32, 64)} if "qwen" in kind else {})
    save_file(before, file, metadata={"format": "pt"})
    keys = [*QUICK, f"model={base}", "tokenizer=null", "max_steps=2", f"data_cache_dir={data_cache}", "lora=true"]
    run_here(tmp_path / "run", *keys, "lora_rank=4", "lora_target_modules=[all]", "learning_rate=0.02")

    capsys.readouterr()
    words = ["merge", str(tmp_path / "run"), "--output"]
    assert main([*words, str(tmp_path / "text")]) == 0
    assert "merge --parts all writes all parts" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "all"), "--parts", "all"]) == 0
    assert "several parts" not in capsys.readouterr().err

    after, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("all", "text"))
    assert after.keys() == before.keys()
    kept = [name for name in before if "language_model" not in name and not name.startswith("lm_head.")]
    assert len(kept) > 10
    assert all(torch.equal(after[name], before[name]) for name in kept)
    body = next(name.partition("embed_tokens")[0] for name in after if name.endswith("embed_tokens.weight"))
    places = {name: body + name.removeprefix("model.") for name in alone if name.startswith("model.")}
    assert all(torch.equal(tensor, after[places.get(name, name)]) for name, tensor in alone.items())
    assert (tmp_path / "all" / "preprocessor_config.json").read_text() == '{"patch_size": 16}'
    assert json.loads((tmp_path / "all" / "config.json").read_text())["model_type"] == model.config.model_type

    loaded, info = architecture.from_pretrained(tmp_path / "all", output_loading_info=True)
    assert not info["missing_keys"]
    adapted = PeftModel.from_pretrained(architecture.from_pretrained(base), str(tmp_path / "run" / "adapter"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        found, expected, plain = (m.eval()(input_ids=ids).logits for m in (loaded, adapted, model))
    assert tiny.relative_error(found, expected) <= 1e-5
    assert tiny.relative_error(plain, expected) > 1e-3, "the adapter must matter"


def test_another_word_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.joinpath("run.json").write_text("{}")
    assert main(["merge", str(tmp_path), "--parts", "vision"]) == 2
    assert "--parts: vision is not known. Fix: text or all" in capsys.readouterr().err


def test_quantised_files_are_refused() -> None:
    files: Any = SimpleNamespace(scheme=object(), path="base")
    with pytest.raises(UserError, match=r"the weights of base are quantised\. Fix: name the unquantised model"):
        Whole.of(files, files)
