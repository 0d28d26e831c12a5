"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import surogate_model_smollm3
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from surogate_testing.family_suite import NO_SHARE, REFUSED, DenseFamilyTests, FamilyFacts

WINDOWED = {"use_sliding_window": True, "sliding_window": 5}
REFUSALS = [one for one in REFUSED if "use_sliding_window" not in one[0] and "layer_types" not in one[0]]


class TestSmolLM3(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_smollm3,
        config=SmolLM3Config,
        architecture=SmolLM3ForCausalLM,
        published={"3b": (3_075_098_624, 2048, 36, 16, 4, 11008, 128256, 5e6, True)},
        settings={"pad_token_id": None},
        lengths=(1, 2, 4, 5, 6, 13),
        absent=["rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias",
                "no_rope_layers", "no_rope_layer_interval", "sliding_window", "use_sliding_window"],
        refused=[
            *REFUSALS,
            NO_SHARE,
            ({"no_rope_layers": [1, 1]}, "`no_rope_layers` must have a 1 or a 0 for each of the 4 layers"),
            ({"no_rope_layers": [1, 1, 2, 0]}, "`no_rope_layers` must have"),
            ({**WINDOWED, "layer_types": ["full_attention"]}, "`layer_types` has 1 entries, and .* has 4 layers"),
            ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 5}, "`use_sliding_window` is not true"),
            ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": True}, "`sliding_window` is None"),
        ],
        cases={
            "every second, untied": {"no_rope_layer_interval": 2, "tie_word_embeddings": False},
            "listed": {"no_rope_layers": [0, 1, 1]},
            "window": {**WINDOWED, "no_rope_layers": [1, 0, 1], "mlp_bias": True},
            # Without RoPE a bias of the keys changes no probability.
            "biases": {"no_rope_layers": [1, 1, 1], "attention_bias": True, "mlp_bias": True},
            "types, odd": {**WINDOWED, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                           "hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1},
        },
        exported={"no_rope_layers": [1, 0, 1], "attention_bias": True},
        long=["linear", "yarn"],
    )  # fmt: skip
