"""E2M1 against its definition."""

from __future__ import annotations

import torch

from surogate_core.formats.fp4 import encode, pairs, unpaired, values

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_values_of_the_codes() -> None:
    assert values(torch.arange(16, dtype=torch.uint8)).tolist() == [*SIZES, *(-s for s in SIZES)]


def test_each_value_gets_the_nearest_code_and_in_the_middle_the_even_one() -> None:
    x = torch.linspace(-7, 7, 14 * 64 + 1)
    table = torch.tensor(SIZES)
    distances = (x.abs().clamp(max=6)[:, None] - table).abs()
    best = distances.min(dim=1, keepdim=True).values == distances
    for number, code in enumerate(encode(x).tolist()):
        choices = [i for i, equal in enumerate(best[number].tolist()) if equal]
        assert code & 7 == (choices[0] if len(choices) == 1 else next(i for i in choices if i % 2 == 0))
        assert (code >= 8) == bool(x[number] < 0)


def test_pairs_of_codes_come_back() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16) % 16
    assert pairs(codes)[0, 0].item() == 0x10
    assert torch.equal(unpaired(pairs(codes)), codes)
