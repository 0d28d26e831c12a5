"""Adapters of every family equal PEFT's, as they are exported and folded in; what breaks that is caught."""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import peft
import pytest
import surogate_command_export.merge as merging
from surogate_model_gemma4 import surogate_model_family as gemma4
from surogate_model_llama import surogate_model_family as llama
from surogate_model_mistral import surogate_model_family as mistral
from surogate_model_olmo3 import surogate_model_family as olmo3
from surogate_model_phi3 import surogate_model_family as phi3
from surogate_model_qwen3_moe import surogate_model_family as qwen3_moe

from surogate_core.bundles import ModelFamily
from surogate_core.errors import UserError
from surogate_testing import NotApplicable, model_adapters

OTHERS: dict[str, tuple[ModelFamily, dict[str, Any]]] = {
    "ministral": (
        mistral(),
        {
            "model_type": "ministral", "architectures": ["MinistralForCausalLM"], "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "olmo2": (
        olmo3(),
        {
            "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "layer_types": None, "sliding_window": None,
            "rope_scaling": None, "rope_parameters": None, "rope_theta": 5e5,
        },
    ),
    "gemma4 without experts": (gemma4(), {"enable_moe_block": False}),
    "qwen3-moe with dense layers": (qwen3_moe(), {"mlp_only_layers": [0]}),
    "longrope": (
        phi3(),
        {
            "original_max_position_embeddings": 8,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12},
        },
    ),
}  # fmt: skip


def small(family: ModelFamily, changes: dict[str, Any]) -> ModelFamily:
    return replace(family, presets={"tiny": {**family.presets["tiny"], **changes}})


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_adapters_of_other_models_of_a_family(name: str) -> None:
    """The kit has each family's preset `tiny`."""
    model_adapters.merges_as_peft(small(*OTHERS[name]))


@pytest.fixture(scope="module")
def family() -> ModelFamily:
    return small(llama(), {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64})


@pytest.mark.slow
def test_wrong_adapters_are_caught(family: ModelFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    model_adapters.merges_as_peft(family)
    export, fold = model_adapters.export_adapter, merging.lora_files.fold
    with monkeypatch.context() as patch:
        patch.setattr(model_adapters, "export_adapter", lambda *a, **k: export(*a, **{**k, "alpha": 1.0}))
        with pytest.raises(AssertionError, match="the exported adapter in PEFT: logits with a relative error of"):
            model_adapters.merges_as_peft(family)
    with monkeypatch.context() as patch:
        patch.setattr(merging.lora_files, "fold", lambda name, tensor, stack: tensor)
        with pytest.raises(AssertionError, match="`surogate merge`: logits with a relative error of"):
            model_adapters.merges_as_peft(family)
    with monkeypatch.context() as patch:
        rounded = lambda name, tensor, stack: fold(name, tensor, stack) * (1 + 2e-5 * ("q_proj" in name))  # noqa: E731
        patch.setattr(merging.lora_files, "fold", rounded)
        with pytest.raises(AssertionError, match=r"`surogate merge`: \S+q_proj.weight differs from PEFT's by 2.0e-05"):
            model_adapters.merges_as_peft(family)


@pytest.mark.slow
def test_what_peft_cannot_read_is_said(family: ModelFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[str] = []
    fold = merging.lora_files.fold

    def noted(name: str, tensor: Any, stack: Any) -> Any:
        folded.append(name)
        return fold(name, tensor, stack)

    monkeypatch.setattr(merging.lora_files, "fold", noted)

    def refuses(model: Any, path: str) -> Any:
        raise ValueError("[PEFT:LORA] Module 'out_proj' is incompatible with Mamba-based models (model_type='x').")

    monkeypatch.setattr(peft.PeftModel, "from_pretrained", refuses)
    with pytest.raises(NotApplicable, match="'out_proj' is incompatible with Mamba-based models"):
        model_adapters.merges_as_peft(family)
    assert folded, "`merge` is compared all the same"
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", lambda model, path: deepcopy(model))
    monkeypatch.setattr(model_adapters, "TensorFile", lambda path: {"layers.0.mlp.experts.0.up_proj.lora_A.weight": 0})
    with pytest.raises(NotApplicable, match="no adapters of single experts of model_type 'llama'"):
        model_adapters.merges_as_peft(family)
    monkeypatch.setitem(sys.modules, "surogate_command_export.merge", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("surogate_command_export.merge")):
        model_adapters.merges_as_peft(family)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(NotApplicable, match="PEFT is not installed"):
        model_adapters.merges_as_peft(family)


def test_a_family_that_transformers_lacks(family: ModelFamily) -> None:
    with pytest.raises(NotApplicable, match="transformers has no model of type 'acme'"):
        model_adapters.merges_as_peft(small(family, {"model_type": "acme"}))
    with pytest.raises(UserError):
        model_adapters.merges_as_peft(small(family, {"head_dim": 15}))
