"""Tests of a model family's presets and configurations, and of its parity with transformers and PEFT.

A family's tests subclass `DenseFamilyTests` and say what its models are; one with experts
subclasses `FamilyTests`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from surogate_core.plugin import UserError, bundles
from surogate_core.service.engine import distinct, pieces
from surogate_testing import tiny
from surogate_testing.parity import LENGTHS, TINY, TOLERANCE, ModelPair, Record

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rope_theta",
    "tie_word_embeddings",
)
"""Keys of a published ``config.json`` that `FamilyFacts.published` gives."""

SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
)

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rope_scaling": {"type": "spiral", "factor": 4.0}}, "`rope_scaling`: RoPE scaling `spiral`.*Fix"),
    ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "`rope_scaling.short_factor` must be .* numbers.*Fix"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "`llama3` needs `low_freq_factor`.*Fix"),
    ({"rope_scaling": {"type": "yarn"}}, "`rope_scaling`: RoPE scaling `yarn` needs `factor`.*Fix"),
    ({"use_sliding_window": True, "max_window_layers": 99}, "`use_sliding_window`.*Fix"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "`layer_types`.*Fix"),
    ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'.*Fix"),
    ({"attention_dropout": 0.1}, "`attention_dropout`.*Fix"),
    ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"),
    ({"head_dim": 15}, "`head_dim` must be even"),
    ({"hidden_size": "big"}, "`hidden_size` must be a positive integer, not 'big'"),
    ({"hidden_size": 0}, "`hidden_size` must be a positive integer, not 0"),
    ({"intermediate_size": True}, "`intermediate_size` must be a positive integer, not True"),
)
"""Changes of the preset ``tiny`` that no decoder computes, and a part of the message."""
NO_SHARE = ({"head_dim": None, "hidden_size": 129}, r"`hidden_size` \(129\) must be a multiple of")
"""One more for families whose heads share the features evenly."""

LONG: Mapping[str, Mapping[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""RoPE scaling whose original length the documents exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """What a family's models are, for its tests."""

    plugin: ModuleType
    """The plugin's module."""
    config: type[Any]
    """transformers' configuration."""
    architecture: type[Any]
    """transformers' class."""
    published: Mapping[str, tuple[Any, ...]]
    """Preset → the parameters of the published model, a tied matrix counted once, and its `SHAPE`."""
    cases: Mapping[str, Mapping[str, Any]]
    """Name → changes of the small random model that is compared with transformers'."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of every such model besides `TINY`."""
    targets: Sequence[str] = tiny.TARGETS
    """Projections that get an adapter in the test of adapters."""
    exported: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the model whose export is compared."""
    lengths: Sequence[int] = LENGTHS
    """Lengths of the packed documents; of a family with windows, some around the window."""
    long: Sequence[str] = ()
    """Names of `LONG` that are compared."""
    ropes: Sequence[str] = ()
    """Types of layers where each has a RoPE of its own, first the one that `LONG` scales."""
    settled: Callable[[Any], None] = lambda model: None
    """Changes values of the small random model in place, such as decays, which then let documents see far back."""
    sizes: Sequence[str] = SIZES
    """Keys without which no model is built."""
    absent: Sequence[str] = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act")
    """Keys that a ``config.json`` need not have, since transformers has defaults for them."""
    refused: Sequence[tuple[dict[str, Any], str]] = REFUSED
    """Changes of the preset ``tiny`` that `build` refuses, and a part of the message."""

    @property
    def family(self) -> bundles.ModelFamily:
        """What the plugin offers."""
        found: bundles.ModelFamily = self.plugin.surogate_model_family()
        return found

    @property
    def short(self) -> Sequence[int]:
        """`lengths`, and documents of one and of two tokens."""
        return tuple(dict.fromkeys((1, 2, *self.lengths)))

    def tiny(self, **changes: Any) -> dict[str, Any]:
        """The preset ``tiny`` with changes."""
        return {**self.family.presets["tiny"], **changes}

    def count(self, config: Mapping[str, Any]) -> int:
        """Parameters of a model."""
        return sum(math.prod(s.shape) for s in distinct(pieces(self.family.build(config), lora=None, max_seqlen=8)))

    def tensors(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name → shape of the tensors of a model, with experts fused as in transformers."""
        model = self.family.build(config)
        own = {s.hf_name: s.shape for s in distinct(pieces(model, lora=None, max_seqlen=8))}
        parts = {part for one in model.fused_tensors().values() for part, _ in one.parts}
        found = {name: shape for name, shape in own.items() if name.replace("{e}", "0") not in parts}
        for name, one in model.fused_tensors().items():
            count, rows, inputs = one.shape
            found[name] = (count, inputs, rows) if one.transposed else one.shape
        return found

    def expected(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The same of transformers' class."""
        kind, values = config.get("model_type"), json.loads(json.dumps(config))
        own = kind in (None, self.config.model_type)
        with torch.device("meta"):
            model = (
                self.architecture(self.config(**values))
                if own
                else AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
            )
        buffers = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
        shapes = {name: tuple(p.shape) for name, p in ({**dict(model.named_parameters()), **buffers}).items()}
        return tiny.with_body(shapes, self.family.build(config))

    def pair(self, lengths: Sequence[int] = (), **changes: Any) -> ModelPair:
        """A model of transformers and one of the family with the same random weights."""
        settings = {**TINY, "architectures": [self.architecture.__name__], **self.settings, **changes}
        # A copy, because transformers changes what it is given.
        settings = json.loads(json.dumps(settings))
        return ModelPair.of(
            self.architecture,
            self.config(**settings),
            self.family.build,
            lengths=lengths or self.lengths,
            settled=self.settled,
        )

    def long_pair(self, rope: Mapping[str, Any]) -> ModelPair:
        """The same for longer documents. Dynamic scaling counts from the positions, others from a number of theirs."""
        positions = 64 if rope["rope_type"] == "dynamic" else 128
        parameters: dict[str, Any] = {"rope_theta": 5000.0, **rope}
        if self.ropes:
            plain = {"rope_type": "default", "rope_theta": 500.0}
            parameters = {**dict.fromkeys(self.ropes, plain), self.ropes[0]: parameters}
        return self.pair((90, 21), rope_parameters=parameters, max_position_embeddings=positions)


class FamilyTests:
    """Tests that every family of decoders must pass."""

    facts: ClassVar[FamilyFacts]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each preset, case and so on of the family; of its cases only the first is quick."""
        facts = self.facts
        tables: dict[str, Sequence[Any]] = {
            "preset": list(facts.family.presets),
            "known": list(facts.published),
            "size": facts.sizes,
            "case": [pytest.param(case, marks=[pytest.mark.slow] if n else []) for n, case in enumerate(facts.cases)],
            "scaling": facts.long,
        }
        for name in tables.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, tables[name])
        if "message" in metafunc.fixturenames:
            metafunc.parametrize(("changes", "message"), facts.refused, ids=lambda value: str(value)[:60])

    def test_a_preset_has_the_tensors_of_transformers(self, preset: str) -> None:
        config = self.facts.family.presets[preset]
        assert self.facts.tensors(config) == self.facts.expected(config)
        if preset in self.facts.published:
            assert self.facts.count(config) == self.facts.published[preset][0]

    def test_a_preset_has_the_published_shape(self, known: str) -> None:
        """What the number of parameters does not show: how the features are split into heads, and the base of RoPE."""
        preset = self.facts.family.presets[known]
        preset = {**(preset.get("rope_parameters") or {}), **preset}
        assert tuple(preset.get(key) for key in SHAPE) == self.facts.published[known][1:]

    def test_presets_are_published_or_tiny_and_are_json(self) -> None:
        presets = self.facts.family.presets
        assert {*self.facts.published, "tiny"} == {*presets}
        assert json.loads(json.dumps({**presets})) == {name: dict(config) for name, config in presets.items()}

    def test_every_option_names_a_preset_and_every_preset_has_one(self) -> None:
        named = set()
        for file in resources.files(f"{self.facts.plugin.__name__}.conf.model").iterdir():
            if file.name.endswith(".yaml"):
                option = yaml.safe_load(file.read_text(encoding="utf-8"))
                assert option["model"]["name"] == self.facts.family.name
                assert (option["from_scratch"], option["lora"]) == (True, False), (
                    "adapters on random weights are no model"
                )
                named.add(option["model"]["preset"])
        assert named == set(self.facts.family.presets)

    def test_a_missing_size_is_named(self, size: str) -> None:
        config = self.facts.tiny()
        del config[size]
        with pytest.raises(UserError, match=rf"config\.json: key `{size}` is missing\. Fix"):
            self.facts.family.build(config)

    def test_what_the_blocks_do_not_compute_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            self.facts.family.build(self.facts.tiny(**changes))

    def test_absent_keys_have_the_defaults_of_transformers(self) -> None:
        """A ``config.json`` need not write what equals the family's default."""
        config = {key: value for key, value in self.facts.tiny().items() if key not in self.facts.absent}
        theirs, model = self.facts.config(**config), self.facts.family.build(config)
        assert self.facts.tensors(config) == self.facts.expected(config)
        assert model.tied == theirs.tie_word_embeddings
        blocks = [block.eps for _, block in model.blocks(0) if hasattr(block, "eps")]
        assert {model.head.eps.value(model.config), *blocks} == {theirs.rms_norm_eps}
        rotary = self.facts.architecture(theirs).model.rotary_emb
        tables = model.tables(torch.arange(4, dtype=torch.int32), torch.float32)
        for end in (name.removeprefix("cos") for name in tables if name.startswith("cos")):
            found = rotary(torch.empty(0), torch.arange(4)[None], *([end[1:]] if end else []))
            for name, expected in zip(("cos", "sin"), found, strict=True):
                table = tables[f"{name}{end}"]
                torch.testing.assert_close(table, expected[0, :, : table.shape[1]])
                assert expected.shape[2] in (table.shape[1], 2 * table.shape[1])

    def test_logits(self, case: str, record_testsuite_property: Record) -> None:
        error = self.facts.pair(**self.facts.cases[case]).logits_error()
        record_testsuite_property(f"logits, {case}", f"{error:.2e}")
        assert error <= TOLERANCE

    @pytest.mark.slow_cases("recomputed")
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_loss_and_every_gradient(self, case: str, recompute: bool, record_testsuite_property: Record) -> None:
        error, name = self.facts.pair(**self.facts.cases[case]).gradient_error(recompute=recompute)
        record_testsuite_property(f"gradient, {case}, {recompute=}", f"{error:.2e} {name}")
        assert error <= TOLERANCE, name

    def test_a_token_of_one_document_changes_no_bit_of_another(self) -> None:
        """Documents of one token, of two, and longer ones, each changed in turn."""
        pair = self.facts.pair(self.facts.short, **self.facts.exported)
        assert not pair.leaks(), "these documents see others"

    def test_greedy_text(self) -> None:
        """Generation equals transformers' forward, from prompts of each length, well past any window."""
        pair = self.facts.pair(self.facts.short, **self.facts.exported)
        own, theirs = pair.greedy(24)
        assert own == theirs

    def test_the_exported_model(self, tmp_path: Path) -> None:
        assert self.facts.pair(**self.facts.exported).full_export_error(tmp_path / "model") <= TOLERANCE


class DenseFamilyTests(FamilyTests):
    """Tests that every dense family must pass."""

    @pytest.mark.slow_cases("linear", "yarn", "llama3")
    def test_rope_past_its_original_length(self, scaling: str, record_testsuite_property: Record) -> None:
        scaled, plain = (
            self.facts.long_pair(rope) for rope in ({"rope_type": scaling, **LONG[scaling]}, {"rope_type": "default"})
        )
        logits, (gradient, name) = scaled.logits_error(), scaled.gradient_error(recompute=True)
        record_testsuite_property(scaling, f"logits {logits:.2e}, gradient {gradient:.2e} {name}")
        assert max(logits, gradient) <= TOLERANCE
        theirs = scaled.reference.config.to_dict()
        mixed = ModelPair(
            reference=plain.reference, build=lambda _: self.facts.family.build(theirs), documents=plain.documents
        )
        assert mixed.logits_error() > 100 * TOLERANCE, "the scaling must matter"

    def test_the_exported_adapter(self, tmp_path: Path) -> None:
        pair = self.facts.pair(tie_word_embeddings=True)
        assert pair.adapter_export_error(tmp_path / "adapter", targets=self.facts.targets) <= TOLERANCE
