"""The benchmark of two Ray nodes, without Ray: its keys, its table, and what it reads in logs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray_nodes

ROW: dict[str, Any] = {
    "case": "LoRA",
    "line": "ray",
    "tokens_per_second": 1500.0,
    "milliseconds": 20.0,
    "first_seconds": 9.0,
    "moved_by": ["nccl", "P2P/CUMEM"],
    "losses": [6.5, 4.25],
}


def test_a_line_has_the_keys_of_its_case_and_launcher(tmp_path: Path) -> None:
    options = argparse.Namespace(gpus=2, device="cuda", tiny=False, preset=None)
    keys = ray_nodes.keys_of("full, HSDP", "ray", tmp_path, options, 7)
    wanted = {"gpus=4", "max_steps=7", "model.preset=1.7b", "dp_shard_size=2", "zero_level=1", "launcher.num_nodes=2"}
    assert wanted <= set(keys)
    local = ray_nodes.keys_of("LoRA", "local, nccl", tmp_path, options, 7)
    assert "fabric=nccl" in local
    assert not any(key.startswith(("launcher", "dp_shard_size")) for key in local)


def test_what_moved_the_data_is_read_from_the_logs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "surogate.log").write_text('{"chosen": "nccl", "event": "fabric", "level": "info"}\n')
    (tmp_path / "nccl.host.1").write_text("host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
    (tmp_path / "nccl.host.2").write_text("NCCL INFO Channel 01/0 : 1[0] -> 0[0] [send] via NET/Socket/0\n")
    assert ray_nodes.moved_by(tmp_path) == ["nccl", "NET/Socket", "P2P/CUMEM"]


def test_the_table_has_the_share_of_the_local_line_and_failures() -> None:
    assert ray_nodes.cells(ROW, 2000.0) == [
        *("LoRA", "ray", "1,500", "75.0%", "20.0", "9.0 s", "nccl, P2P/CUMEM", "6.50000 … 4.25000")
    ]
    failed = ray_nodes.cells({"case": "LoRA", "line": "ray", "error": "a | b"}, None)
    assert failed[2] == "failed: a \\| b"
    assert len(failed) == len(ray_nodes.HEADS)
