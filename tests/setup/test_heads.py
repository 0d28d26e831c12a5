"""Which head the model of a run has."""

from __future__ import annotations

import pytest

from surogate_core.bundles import ModelFamily
from surogate_core.config.schema import RunConfig
from surogate_core.dsl import ScoreHead
from surogate_core.errors import ConfigError
from surogate_core.plugins import load_plugins
from surogate_core.setup.heads import built_for, check_head
from surogate_testing import tiny


def test_the_task_decides_and_a_model_that_has_another_keeps_it() -> None:
    registry = load_plugins()
    family = ModelFamily(name="small", hf_model_types=("small",), build=tiny.SmallModel)
    sft, reward = registry.get("task", "sft"), registry.get("task", "reward")
    plain = dict(tiny.SMALL_CONFIG)
    assert built_for(family, plain, sft)[0] is plain
    values, scored = built_for(family, plain, reward)
    assert isinstance(scored.head, ScoreHead)
    assert built_for(family, values, sft)[0] is values
    check_head(RunConfig(task="reward"), registry, scored, "MODEL")
    with pytest.raises(
        ConfigError, match="MODEL is a reward model, whose head gives scores; task sft needs logits"
    ) as said:
        check_head(RunConfig(task="sft"), registry, scored, "MODEL")
    assert said.value.problems[0].fix == "task=reward, or name another model."


def test_a_family_without_the_head_of_a_task_is_refused() -> None:
    class Texts(tiny.SmallModel):
        heads = ()

    family = ModelFamily(name="texts", hf_model_types=("texts",), build=Texts)
    reward = load_plugins().get("task", "reward")
    with pytest.raises(ConfigError, match="reward trains a head of kind scores, and models of family texts have log"):
        built_for(family, dict(tiny.SMALL_CONFIG), reward)
