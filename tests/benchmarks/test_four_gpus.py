"""The run of all figures that need four GPUs: its commands are ones that the other scripts know."""

from __future__ import annotations

import sys
from pathlib import Path

import equal_bits
import four_gpus
import lanes
import pytest
import several_gpus
import several_gpus_peers


@pytest.mark.parametrize("name", four_gpus.PARTS)
def test_each_part_names_cases_that_its_script_has(name: str, tmp_path: Path) -> None:
    known = {
        "several_gpus.py": several_gpus.CASES,
        "several_gpus_peers.py": several_gpus_peers.CASES,
        "equal_bits.py": equal_bits.CASES,
    }
    for _, commands in four_gpus.lanes_of(four_gpus.PARTS[name]):
        for script, *words in commands:
            python, file, *_ = lanes.words_of((script, *words), tmp_path, tiny=False, cache=tmp_path)
            assert python == sys.executable
            assert Path(file).is_file()
            makers = {"several_gpus.py": several_gpus.make_parser, "equal_bits.py": equal_bits.make_parser}
            if script in makers:
                makers[script]().parse_args(words)
            if "--only" in words:
                assert set(words[words.index("--only") + 1 :]) <= known[script].keys()
