"""Checks of a family in use: a right one passes, and what generation or a run would do wrongly is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.dsl import Recurrence
from surogate_core.plugins.registry import Registry
from surogate_testing import model_runs, tiny
from surogate_testing.check import NotApplicable
from surogate_testing.model_blocks import keeps_documents_apart, sees_other_rows_by_mixers_alone
from surogate_testing.model_runs import generates_as_it_computes, runs_with
from tests.support import hybrid_family
from tests.testing.test_model_blocks import AttendsItself, ShiftedInDocuments, family, follows

torch.set_num_threads(1)


@pytest.mark.slow
def test_right_families_generate_as_they_compute() -> None:
    generates_as_it_computes(hybrid_family.FAMILY)
    generates_as_it_computes(family(Adds))


def _sums(x_ND: Tensor, borders: Tensor, initial_RD: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the sums of a run's rows up to each, the sum of each run), on from `initial_RD`."""
    last_R = borders.long()[1:] - 1
    whole_ND = x_ND.float().cumsum(0)
    before_RD = torch.cat([torch.zeros_like(whole_ND[:1]), whole_ND])[borders.long()[:-1]]
    run_N = torch.bucketize(torch.arange(len(x_ND)), last_R)
    start_RD = before_RD if initial_RD is None else before_RD - initial_RD
    finals_RD = torch.cat([torch.zeros_like(whole_ND[:1]), whole_ND])[borders.long()[1:]] - start_RD
    return whole_ND - start_RD[run_N], finals_RD


def sums(
    x_ND: Tensor, *, borders: Tensor | None, initial: Sequence[Tensor] | None, finals: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """A scan that adds the rows of a run."""
    if borders is None:
        borders = torch.arange(len(x_ND) + 1, dtype=torch.int32)
    y_ND, last_RD = _sums(x_ND, borders, initial[0] if initial else None)
    return y_ND.to(x_ND.dtype), (last_RD,)


def forgetful(x_ND: Tensor, **others: Any) -> tuple[Tensor, Sequence[Tensor]]:
    """The same, and it begins every run from zero."""
    return sums(x_ND, **{**others, "initial": None})


class Adds(tiny.SmallBlock):
    """Adds up the rows of a document."""

    scan = Recurrence(sums, (32,))

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x + 0.1 * self.scan(x), tables)


class Forgets(Adds):
    scan = Recurrence(forgetful, (32,))


def test_a_scan_without_its_initial_states_is_found_in_generation() -> None:
    for block in (Adds, Forgets):
        sees_other_rows_by_mixers_alone(family(block))
        keeps_documents_apart(family(block))
    with pytest.raises(AssertionError, match=r"token 2 behind a prompt of \d+ has the log-probability"):
        generates_as_it_computes(family(Forgets))


def test_what_is_right_in_training_alone_is_found_in_generation() -> None:
    with pytest.raises(AssertionError, match=r"fixed passes, slots of 64 positions: (token|a prompt)"):
        generates_as_it_computes(family(ShiftedInDocuments, tables=follows))
    with pytest.raises(NotApplicable, match="AttendsItself reads cu_seqlens itself, and in generation it cannot"):
        generates_as_it_computes(family(AttendsItself))


# ------------------------------------------------------------------------- a run


@pytest.mark.slow
def test_a_hybrid_runs_from_a_checkpoint(installed: Registry) -> None:
    runs_with(installed)(hybrid_family.FAMILY)


@pytest.mark.slow
def test_a_run_finds_a_family_that_refuses_its_own_files(installed: Registry) -> None:
    """What the presets do not show: `config.json` as transformers writes it has other keys."""
    family = installed.get("model", "llama")

    def build(config: Mapping[str, Any]) -> Any:
        assert "rope_parameters" not in config, "RoPE is read from rope_theta alone"
        return family.build(config)

    with pytest.raises(AssertionError, match="RoPE is read from rope_theta alone"):
        runs_with(installed)(replace(family, build=build))


def test_a_run_without_the_plugins_that_it_needs_does_not_apply(
    installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surogate_core.errors import PluginError

    def check(self: Any, config: Any) -> None:
        raise PluginError("dataset 'conversation': its plugin surogate-dataset-chat is not installed.")

    monkeypatch.setattr(model_runs._Run, "check", check)
    with pytest.raises(NotApplicable, match="a run needs another plugin: dataset 'conversation'"):
        runs_with(installed)(hybrid_family.FAMILY)
