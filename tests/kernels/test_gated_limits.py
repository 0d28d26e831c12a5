"""How many rows the kernels that take SwiGLU into the projections around it can count."""

from __future__ import annotations

from surogate_native.gated import fits


def test_rows_of_8b_in_bf16_and_in_fp8() -> None:
    features = 12_288
    assert fits(311_296, features)
    assert fits(2_796_202, features)
    assert not fits(2_796_203, features), "elements of du's parts"
    assert fits(174_762, features, codes=True)
    assert not fits(174_763, features, codes=True), "bytes of codes"
