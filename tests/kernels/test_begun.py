"""Exchanges that are under way while a program computes: what they bring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.kernels import begun
from surogate_core.kernels.expert_ranks import ExpertRanks, SumsTrip, TokensTrip
from surogate_testing.virtual import in_threads

RANKS, WIDTH = 2, 3


def test_what_arrives_and_its_gradient() -> None:
    def work(fabric: Any) -> list[Tensor]:
        group = ExpertRanks(RANKS)
        group.open(fabric)
        x = (torch.arange(12.0).view(4, WIDTH) + 100 * fabric.rank).requires_grad_()
        tokens, dtokens = TokensTrip.begun(x, group), torch.full((8, WIDTH), 1.0 + fabric.rank)
        found = [tokens()]
        found += torch.autograd.grad(found[0], x, dtokens)
        parts = torch.cat((x, x + 7.0)).detach().requires_grad_()
        sums = SumsTrip.begun(parts, group, torch.float64)()
        found += [sums, *torch.autograd.grad(sums, parts, sums.detach())]
        group.close()
        return [t.detach() for t in found]

    first, second = in_threads(RANKS, work)
    x = torch.arange(12.0).view(4, WIDTH)
    for tokens, dx, sums, dparts in (first, second):
        assert torch.equal(tokens, torch.cat((x, x + 100)))
        assert torch.equal(dx, torch.full_like(x, 3.0))
        assert sums.dtype == torch.float64
        assert torch.equal(dparts, torch.cat((first[2], second[2])).float())
    assert torch.equal(first[2], (x + x + 100).double())
    assert torch.equal(second[2], (x + 7 + x + 107).double())


def test_a_copy_of_what_is_under_way_is_refused() -> None:
    class Remote:
        device = torch.device("cuda")

        def data_ptr(self) -> int:
            return 4096

    with pytest.raises(AssertionError, match="was copied before it was there"):
        begun._await(Remote())  # type: ignore[arg-type]
