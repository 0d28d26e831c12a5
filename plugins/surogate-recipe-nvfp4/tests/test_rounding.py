"""What a report is told of NVFP4's rounding."""

from __future__ import annotations

import pytest
import torch
from surogate_recipe_nvfp4 import surogate_recipe

from surogate_core.plugin import bundles, nvfp4
from surogate_testing.recipes import built

RECIPE = built(surogate_recipe(), torch.device("cpu"))


@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
def test_what_a_report_calls_rounded_is_what_the_format_holds(role: bundles.Role) -> None:
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(3))
    assert RECIPE.rounded is not None
    values, beyond = RECIPE.rounded(x, role)
    found = nvfp4.quantise(x, square=role == "weight", four_over_six=True)
    assert torch.equal(values, found.blocks(20, 40) * found.decode)
    # A value is beyond its block's largest exactly where it lies outside of what it rounds to at 6.
    codes = found.codes[:20, :40] & 7
    assert beyond.any()
    assert bool(((codes == 7) & (x.abs() > values.abs()))[beyond].all())
    assert not beyond[(codes < 7) | (x.abs() <= values.abs())].any()
