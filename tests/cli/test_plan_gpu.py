"""`surogate plan --gpu`: what a run takes of a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.cli.main import main
from surogate_core.cli.plan import GPUS, parse_gpu
from surogate_core.engine.prediction import CUBLAS_WORKSPACE, CUDA_CONTEXT
from surogate_core.errors import UserError
from surogate_core.kernels import native

SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.head_dim=128",
    "sequence_len=256",
    "lora=true",
    "recompute=false",
]


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *SMALL, *arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("text", "capability"), [("h200", (9, 0)), ("H200", (9, 0)), ("RTX 4090", (8, 9)), ("sm_120", (12, 0))]
)
def test_names(text: str, capability: tuple[int, int]) -> None:
    assert parse_gpu(text) == capability


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(UserError, match="h200"):
        parse_gpu("h2000")
    assert main(["plan", "--gpu", "h2000"]) == 2
    assert main(["plan", "device=cpu", "--gpu", "h200"]) == 2
    assert main(["plan", "--gpu"]) == 2


def test_kernels_are_those_of_the_gpu(capsys: Any) -> None:
    found = {name: plan(capsys, "--gpu", name) for name in ("h200", "a100")}
    assert all(p["device"] == "cuda:0" for p in found.values())
    assert found["h200"]["kernels"]["attention bfloat16"] == "hopper"
    assert found["a100"]["kernels"]["attention bfloat16"] != "hopper"
    assert "sm_80" in found["a100"]["kernels_left_out"]["hopper"]
    assert found["h200"]["kernels"]["cross_entropy bfloat16"] == "cuda"
    held = {h["kind"]: h["nbytes"] for h in found["h200"]["held"]}
    assert held["workspace"] == 2 * CUBLAS_WORKSPACE
    assert held["CUDA context"] == CUDA_CONTEXT
    assert native.assumed() is None, "only the plan is made so"


def test_the_gpu_stands_for_any_device_but_a_cpu(capsys: Any, tmp_path: Path) -> None:
    assert plan(capsys, "device=auto", "--gpu", "a100")["device"] == "cuda:0"
    (tmp_path / "on_cpu.yaml").write_text("device: cpu\n")
    assert main(["plan", str(tmp_path / "on_cpu.yaml"), "--gpu", "a100"]) == 2
    assert "device=cpu" in capsys.readouterr().err


def test_attention_counts_alike_whichever_kernel_takes_it(capsys: Any) -> None:
    """torch's own formula for its flash kernel is of other work."""
    again = [plan(capsys, "--gpu", gpu, "recompute=true")["recomputed_flops"] for gpu in ("h200", "a100")]
    assert again[0] / 1.5 < again[1] < again[0] * 1.5


def test_what_is_computed_again(capsys: Any) -> None:
    """A smaller budget keeps less and multiplies more; whole blocks keep least."""
    found = [plan(capsys, "--gpu", "h200", f"recompute_budget={b}") for b in (1, 0.5)]
    found.append(plan(capsys, "--gpu", "h200", "recompute=true"))
    residuals = [next(h["nbytes"] for h in p["held"] if h["kind"] == "residuals") for p in found]
    assert residuals == sorted(residuals, reverse=True)
    assert len(set(residuals)) == 3
    again = [p["recomputed_flops"] for p in found]
    assert again == sorted(again)
    assert again[0] == 0 < again[2]
    assert main(["plan", *SMALL[:-1], "recompute=true", "recompute_budget=0.5"]) == 2


def test_every_gpu_has_a_capability_that_packs_can_ask_for() -> None:
    for capability in GPUS.values():
        with native.assuming(capability):
            assert native.capability(torch.device("cuda", 0)) == capability
            assert native.missing_gpu(torch.device("cuda", 0)) is None
