"""The wires of `interconnect=`."""

from __future__ import annotations

import pytest
from surogate_command_plan.cluster import parse, wires
from surogate_command_plan.gpus import gpus
from surogate_command_plan.speed import LINKED, UNLINKED

from surogate_core.plugin import UserError


def test_the_table_agrees_with_that_of_gpus() -> None:
    table = wires()
    for gpu, wire in (("v100", "nvlink2"), ("a100", "nvlink3"), ("h200", "nvlink4"), ("b200", "nvlink5")):
        assert gpus()[gpu].link == table[wire].rate
        assert {"exchange": table[wire].exchange, "gather": table[wire].gather} == LINKED
    for gpu, wire in (("a100", "pcie4"), ("h200", "pcie5")):
        assert gpus()[gpu].bus == table[wire].rate
        assert UNLINKED == table[wire].exchange == table[wire].gather
    for name, link in table.items():
        assert link.source
        assert link.shares
        assert (link.place == "between") == name.startswith(("ib", "eth"))


def test_names_counts_and_given_bandwidths() -> None:
    inside, between = parse("nvlink4,8xib400", nodes=2)
    assert between is not None
    assert (inside.title, str(between)) == ("NVLink 4", "8 × InfiniBand 400 Gb/s")
    assert between.bandwidth("gather") == pytest.approx(8 * 0.92 * 50e9)
    inside, between = parse("[NVLink 5, 100Gb/s]", nodes=2)
    assert between is not None
    assert inside.rate == 900e9
    assert between.bandwidth("exchange") == 12.5e9, "a given bandwidth is what is reached"
    assert parse("300GB/s", nodes=1)[0].bandwidth("gather") == 300e9
    assert parse("pcie4", nodes=1)[1] is None


def test_mistakes_name_the_fix() -> None:
    mistakes = {
        "nvlink4": "no wire between the 2 nodes. Fix: interconnect=nvlink4,8xib400",
        "ib400,nvlink4": "ib400 does not connect GPUs inside a node",
        "nvlink4,nvlink4": "nvlink4 does not connect GPUs between nodes",
        "8xnvlink4,ib400": "a count is for the network adapters",
        "nvlink4,0xib400": "1 to 64 network adapters, not 0",
        "nvlnk4,ib400": "no wire nvlnk4. Fix: nvlink4",
        "nvlink4,token-ring": "or a measured bandwidth such as 45GB/s",
        "nvlink4,400": "400 has no unit",
        "nvlink4,0GB/s": "no bandwidth between",
        "nvlink4,1.1.1GB/s": "no bandwidth between",
        "a,b,c": "one wire inside a node and one between nodes",
        "": "one wire inside a node and one between nodes",
    }
    for text, said in mistakes.items():
        with pytest.raises(UserError) as error:
            parse(text, nodes=2)
        assert said in str(error.value)
        assert str(error.value).startswith(f"interconnect={text}: ")
