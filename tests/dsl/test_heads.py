"""Heads: which one a model has, what it asks of runs and exports, and one that a family brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from surogate_core.bundles import ModelFamily, Objective
from surogate_core.dsl import Head, LMHead, Model, ScoreHead, Setting
from surogate_core.dsl.tensors import TensorSpec
from surogate_testing import models, tiny

SCORES = {**tiny.SMALL_CONFIG, "architectures": ["AnyForSequenceClassification"]}


class LabelHead(Head):
    """Labels for each token, as many as the configuration names."""

    kind = "labels"
    model_name = "a model of labels"
    suffix = "ForTokenClassification"
    weight_name = "classifier.weight"
    peft_task = "TOKEN_CLS"

    @classmethod
    def config(cls, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
        return {**super().config(config, architecture), "num_labels": 3}

    def size(self, model: Model) -> int:
        return int(model.config["num_labels"])


TEMPERATURE = Setting("label_temperature", default=1.0)


class BiasedHead(LabelHead):
    """Labels with a bias, divided by a temperature that `config.json` may name."""

    def specs(self, model: Model, *, train_base: bool) -> tuple[TensorSpec, ...]:
        norm, weight = super().specs(model, train_base=train_base)
        bias = replace(
            weight, name="bias", hf_name="classifier.bias", shape=weight.shape[:1], role="bias", init="zeros"
        )
        return norm, weight, bias

    def outputs(self, model: Model, x_ND: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        y_NO = super().outputs(model, x_ND, tensors) + tensors["bias"]
        return y_NO / float(TEMPERATURE.value(model.config))


class CubedHead(LMHead):
    """Logits whose cube is the model's."""

    def outputs(self, model: Model, x_ND: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().outputs(model, x_ND, tensors) ** 3


class Labelled(tiny.SmallModel):
    architecture = "WordForCausalLM"
    heads = (ScoreHead, LabelHead)


def test_the_class_in_the_configuration_tells_the_head() -> None:
    plain, scored = tiny.SmallModel(tiny.SMALL_CONFIG), tiny.SmallModel(SCORES)
    assert plain.head is tiny.SmallModel.head
    assert isinstance(scored.head, ScoreHead)
    assert (plain.other_head, scored.other_head) == (None, "head.weight")
    assert (plain.hf_class, scored.hf_class) == ("Conformance", "ConformanceForSequenceClassification")
    assert not scored.tied
    assert [s.shape for s in scored.head_specs(train_base=False)] == [(plain.width,), (1, plain.width)]
    assert (scored.head.own(scored), plain.head.own(plain)) == ({"score.weight"}, frozenset())
    assert [s.trainable for s in scored.head_specs(train_base=False)] == [False, True]


@pytest.mark.parametrize("classes", [5, None, "AnyForSequenceClassification", {}])
def test_what_is_no_list_of_classes_names_no_head(classes: Any) -> None:
    assert not ScoreHead.is_of({**SCORES, "architectures": classes})


def test_a_model_with_another_head_has_the_keys_of_its_class() -> None:
    model = Labelled(tiny.SMALL_CONFIG)
    scores, labels = model.with_head("scores"), model.with_head("labels")
    assert scores is not None
    assert labels is not None
    assert scores["architectures"] == ["WordForSequenceClassification"]
    assert scores["id2label"] == {"0": "reward"}
    assert isinstance(Labelled(labels).head, LabelHead)
    assert model.with_head("logits") == tiny.SMALL_CONFIG
    assert model.with_head("images") is None


def test_a_familys_own_head_is_trained_beside_adapters() -> None:
    """Three labels a token: traced, in chunks, saved with the adapter."""
    config = Labelled(tiny.SMALL_CONFIG).with_head("labels")
    assert config is not None

    def loss(outputs, labels, columns):
        assert outputs.shape[1] == 3
        found = torch.nn.functional.cross_entropy(outputs.float(), (labels % 3).clamp(min=0), reduction="none")
        return torch.where(labels >= 0, found, 0.0)

    settings = {"build": Labelled, "objective": Objective(name="labels", token_loss=loss), "lora": tiny.lora()}
    for chunks in (1, 4):
        made = tiny.engine(config, head_chunks=chunks, **settings)
        losses = [made.train_step([tiny.batches(0)[0]], step=step, lr=0.1).read()[0] for step in range(4)]
        assert losses[-1] < losses[0]
        assert made.parameters.specs["classifier.weight"].trainable


def test_a_head_computes_what_it_declares() -> None:
    class Cubed(tiny.SmallModel):
        head = CubedHead("head.weight", "final.weight", tiny.EPS, tied=Setting("tie_word_embeddings", default=False))

    batch = tiny.batches(0)[0]
    plain, cubed = (tiny.engine(tiny.SMALL_CONFIG, build=cls) for cls in (tiny.SmallModel, Cubed))
    torch.testing.assert_close(cubed.logits(batch), plain.logits(batch) ** 3)


def test_a_head_with_a_bias_and_a_setting_is_trained_and_read_back() -> None:
    class Biased(tiny.SmallModel):
        heads = (BiasedHead,)

    config = {**(Biased(tiny.SMALL_CONFIG).with_head("labels") or {}), "label_temperature": 2.0}
    model = Biased(config)
    assert model.head.own(model) == {"classifier.weight", "classifier.bias"}
    x_ND, norm_D = torch.randn(3, model.width), torch.ones(model.width)
    given = {"norm": norm_D, "weight": torch.randn(3, model.width), "bias": torch.tensor([1.0, 2.0, 3.0])}
    plain = LabelHead.beside(tiny.SmallModel.head).outputs(model, x_ND, given)
    torch.testing.assert_close(model.head.outputs(model, x_ND, given), (plain + given["bias"]) / 2)
    made = ModelFamily(name="made", hf_model_types=("made",), build=Biased, presets={"tiny": tiny.SMALL_CONFIG})
    models.trains_its_other_heads(made)


def test_a_head_without_a_size() -> None:
    class Empty(Head):
        weight_name = "empty.weight"

    with pytest.raises(TypeError, match="Empty declares no size"):
        Empty.beside(tiny.SmallModel.head).specs(tiny.SmallModel(tiny.SMALL_CONFIG), train_base=True)


def test_the_kit_finds_a_head_that_is_not_read_back_or_not_trained() -> None:
    class Lost(LabelHead):
        @classmethod
        def is_of(cls, config: Mapping[str, Any]) -> bool:
            return False

    class Frozen(LabelHead):
        def weight_spec(self, model: Model, *, train_base: bool) -> Any:
            return replace(super().weight_spec(model, train_base=train_base), trainable=train_base)

    def family(head: type[Head]) -> ModelFamily:
        made = type("Made", (Labelled,), {"heads": (head,)})
        return ModelFamily(name="made", hf_model_types=("made",), build=made, presets={"tiny": tiny.SMALL_CONFIG})

    models.trains_its_other_heads(family(LabelHead))
    with pytest.raises(AssertionError, match="head labels: a model of its configuration has LMHead"):
        models.trains_its_other_heads(family(Lost))
    with pytest.raises(AssertionError, match=r"head labels: classifier\.weight is not trained beside adapters"):
        models.trains_its_other_heads(family(Frozen))
