"""What machine code of sm_90 is looked through for."""

from __future__ import annotations

import pytest

from surogate_testing.triton_programs import unwritten_registers

WRITTEN = """
        /*0010*/                   S2UR UR4, SR_CgaCtaId ;                       /* 0x00000000000479c3 */
        /*0020*/                   UMOV UR5, 0x40000040 ;                        /* 0x4000004000057882 */
        /*0030*/                   ULDC.64 UR6, c[0x0][0x220] ;                  /* 0x0000880000067ab9 */
        /*0040*/              @!P0 UIADD3 UR8, UP0, UR4, 0x40, URZ ;             /* 0x0000004004087890 */
        /*0050*/                   UIADD3.X UR9, UR5, -0x7fffffe0, URZ, UP0, !UPT ;
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("HGMMA.64x32x16.F32 R40, gdesc[UR4].tnspA.tnspB, R40 ;", []),
        ("HGMMA.64x32x16.F32 R40, gdesc[UR8].tnspA.tnspB, R40 ;", [10, 11]),
        ("HGMMA.64x32x16.F32 R40, R16, gdesc[UR4], R40 ;", []),
        # The first two are the left operand's, which is in registers.
        ("HGMMA.64x32x16.F32 R40, R16, gdesc[UR2], R40 ;", []),
        ("HGMMA.64x32x16.F32 R40, R16, gdesc[UR8], R40, gsb0 ;", [10, 11]),
        ("UIADD3 UR15, UP0, UR15, 0x40, URZ ;", [15]),
        ("@!P3 STG.E.128 desc[UR6][R88.64], R8 ;", []),
        ("STG.E.128 desc[UR32][R88.64], R8 ;", [32, 33]),
        ("UIADD3.64 UR28, UR9, 0x80, URZ ;", [10]),
        ("UISETP.NE.AND UP0, UPT, UR20, URZ, UPT ;", [20]),
        ("ULOP3.LUT UP0, UR20, UR4, 0x1, URZ, 0xc0, !UPT ;", []),
        ("ULDC.64 UR20, c[0x0][UR8+0x220] ;", []),
        ("ELECT P0, UR20, PT ;", []),
        ("R2UR UR20, R5 ;", []),
        ("LDG.E R2, desc[UR6][UR9.64] ;", [10]),
        ("IMAD.WIDE R2, R3, 0x4, UR9 ;", [10]),
    ],
)
def test_uniform_registers_that_nothing_has_written(line: str, found: list[int]) -> None:
    assert unwritten_registers(f"{WRITTEN}        /*0060*/    {line}") == found


def test_each_function_has_registers_of_its_own() -> None:
    read = "        /*0010*/    UMOV UR20, UR5 ;"
    assert unwritten_registers(WRITTEN + read) == []
    assert unwritten_registers(f"Function : a{WRITTEN}\nFunction : b\n{read}") == [5]
