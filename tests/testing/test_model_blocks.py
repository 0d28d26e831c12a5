"""Checks of a family's blocks: right ones pass, and each fault is found by the check that should, with the class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import ModelFamily
from surogate_core.dsl import Attention, Dim, Model, Recurrence, Setting, Stack
from surogate_core.errors import PluginError
from surogate_core.kernels import ops
from surogate_core.kernels.scans import gated_delta_step
from surogate_testing import tiny
from surogate_testing.check import NotApplicable
from surogate_testing.model_blocks import (
    CHECKS,
    gives_each_setting_its_result,
    keeps_documents_apart,
    longest_of,
    sees_other_rows_by_mixers_alone,
)
from tests.support import hybrid_family

torch.set_num_threads(1)

TINY = tiny.TinyBlock


def family(block: type, *, config: Mapping[str, Any] | None = None, **members: Any) -> ModelFamily:
    """Two layers of a block; `members`: of the model's class."""
    stack = Stack(block, Dim("num_hidden_layers"), "layers.{i}.")
    model = type("M", (tiny.TinyModel,), {"layers": stack, **members})
    presets = {"tiny": {**tiny.CONFIG, **(config or {})}}
    return ModelFamily(name="toy", hf_model_types=("toy",), build=model, presets=presets)


def found(check: Callable[[ModelFamily], None], of: ModelFamily) -> str:
    with pytest.raises(AssertionError) as error:
        check(of)
    return str(error.value)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_blocks_with_every_mixer_pass(check: Callable[[ModelFamily], None]) -> None:
    check(hybrid_family.FAMILY)
    check(family(TINY))


def test_documents_are_longer_than_windows_and_chunks() -> None:
    assert longest_of(tiny.TinyModel(tiny.CONFIG)) == 48
    assert longest_of(hybrid_family.Hybrid(hybrid_family.CONFIG)) == 80
    assert longest_of(hybrid_family.Hybrid({**hybrid_family.CONFIG, "window": 100})) == 208


class Shifted(TINY):
    """Adds the row before, whose document may be another."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x + 0.5 * x.roll(1, 0), tables)


class Centred(TINY):
    """Centres the rows of a micro-batch, which no order of them shows."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x - 0.1 * x.mean(0), tables)


class ShiftedInDocuments(TINY):
    """Adds the row before except at a document's first position: right in training, wrong in generation."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x + x.roll(1, 0) * tables["follows"], tables)


class AttendsItself(tiny.SmallBlock):
    """Attends by the op, with the borders, and declares nothing."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        q = x.view(len(x), 4, 8)
        return super().forward(ops.attention(q, q, q, tables["cu_seqlens"], self.max_seqlen, 0.3).flatten(1), tables)


def follows(self: Model, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"follows": (positions_N > 0).to(dtype)[:, None]}


@pytest.mark.parametrize("block", [Shifted, Centred])
def test_a_block_that_mixes_rows_itself_is_named_with_the_fix(block: type) -> None:
    of = family(block)
    said = found(sees_other_rows_by_mixers_alone, of)
    assert f"test_model_blocks.{block.__name__} (layers.0, " in said
    assert "looks at other rows beside its mixers (attend): a row changes by" in said
    assert "with other neighbours" in said
    assert "Fix: what a row needs of others is an Attention, a Recurrence or a Convolution that the class dec" in said
    said = found(keeps_documents_apart, of)
    assert f"{block.__name__} (layers.0, " in said
    assert "a document's rows change by" in said


def test_a_block_that_is_right_in_training_alone_is_found() -> None:
    of = family(ShiftedInDocuments, tables=follows)
    keeps_documents_apart(of)
    assert "ShiftedInDocuments" in found(sees_other_rows_by_mixers_alone, of)


def test_a_block_that_reads_the_borders_trains_and_is_not_asked_for_more() -> None:
    keeps_documents_apart(family(AttendsItself))
    with pytest.raises(NotApplicable, match=r"no generation, and no rows that GPUs share: .*reads cu_seqlens itself"):
        sees_other_rows_by_mixers_alone(family(AttendsItself))


def test_a_step_that_is_not_its_scan_is_found() -> None:
    """No training calls a step, and generation on a GPU nothing else."""
    faults: dict[str, Callable[..., Tensor]] = {
        "gives other rows than its scan": lambda y, states, slots: y + 1,
        "leaves other states than its scan": lambda y, states, slots: (states[slots[0]].mul_(2), y)[1],
        "changes slots that no row has": lambda y, states, slots: (states[0].zero_(), y)[1],
        "leaves no zeros in the last slot": lambda y, states, slots: (states[-1].add_(1), y)[1],
    }
    for message, change in {**faults, "": lambda y, states, slots: y}.items():

        def step(*given: Tensor, change: Callable[..., Tensor] = change) -> Tensor:
            return change(gated_delta_step(*given), *given[-2:])

        sizes = (hybrid_family.H, hybrid_family.E, hybrid_family.E)
        scan = Recurrence(hybrid_family.Delta.scan.scan, sizes, step=step)
        kind = type("Odd", (hybrid_family.Delta,), {"scan": scan})

        def blocks(self: Any, longest: int, kind: type = kind) -> Any:
            return iter([("layers.0.", kind(self.layer_config(0), longest))])

        model = type("M", (hybrid_family.Hybrid,), {"blocks": blocks})
        of = replace(hybrid_family.FAMILY, build=model)
        if message:
            assert f"Odd.scan: its step {message}" in found(sees_other_rows_by_mixers_alone, of)
        else:
            sees_other_rows_by_mixers_alone(of)


def test_a_mixer_that_is_called_twice_is_found() -> None:
    class Twice(TINY):
        def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
            return super().forward(super().forward(x, tables), tables)

    for check in (sees_other_rows_by_mixers_alone, keeps_documents_apart):
        with pytest.raises(PluginError, match="Twice: forward calls attend 2 times"):
            check(family(Twice))


def test_a_window_that_checks_cannot_look_beyond_is_named() -> None:
    class Wide(TINY):
        attend = Attention(4, 4, 8, window=Setting("window"))

    said = found(keeps_documents_apart, family(Wide, config={"window": 4096}))
    assert "preset `tiny`: attend of layers.0 has a window of 4096 positions" in said


# ------------------------------------------------------------------------- settings


class Deaf(TINY):
    """Declares a window that its attention does not have."""

    window = Setting("window", default=0)


def numbered(self: Model, number: int) -> Mapping[str, Any]:
    return {**self.config, "number": number}


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (family(Deaf, config={"window": 4}), r"Deaf\.window \(key `window`\): is declared, and with another value"),
        (
            family(TINY, layer_config=numbered),
            r"TinyBlock: layers\.0 and layers\.1 differ in number and compute the same\. Fix: .*`layer_config`",
        ),
        (
            family(TINY, config={"sliding_window": 5}),
            r"preset `tiny` has `sliding_window` 5 \(a sliding window\), and with 10 the logits are the same",
        ),
        (
            family(TINY, config={"layer_types": ["sliding_attention", "full_attention"]}),
            r"`layer_types` \['sliding_attention', 'full_attention'\] \(attention of another kind",
        ),
    ],
)
def test_a_setting_without_a_result_is_found(of: ModelFamily, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        gives_each_setting_its_result(of)


def test_a_setting_that_some_block_reads_is_right() -> None:
    class Windowed(Deaf):
        attend = Attention(4, 4, 8, window=Setting("window"))

    stacks = (Stack(TINY, Dim("num_hidden_layers"), "a.{i}."), Stack(Windowed, Dim("num_hidden_layers"), "b.{i}."))
    gives_each_setting_its_result(family(TINY, config={"window": 4, "sliding_window": None}, layers=stacks))
