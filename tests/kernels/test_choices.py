"""The kernel of the installed packs that runs an op, by architecture."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import importlib.machinery, importlib.util, json, sys, types
import torch
from surogate_core.kernels.building.native import assuming
from surogate_core.kernels.registry import KernelTable, references
from surogate_core.plugins import load_plugins

packs = list(load_plugins().all("kernels").values())
if importlib.util.find_spec("triton") is None:
    # Modules of programs are imported and none is launched, so decorators may give back what they get.
    class Anything(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return (lambda program: program) if name == "jit" else Anything(name)
        def __call__(self, *args, **named):
            return Anything("result")
    for name in ("", ".language", ".language.extra", ".tools", ".tools.tensor_descriptor"):
        name = "triton" + name
        sys.modules[name] = Anything(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)

# A machine without a GPU has no cuBLASLt.
import surogate_kernels_cuda.coded_products
surogate_kernels_cuda.coded_products._library = lambda: None
device, found = torch.device("cuda"), {}
for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
    with assuming(capability):
        table = KernelTable.build(device, packs)
        chosen = {op: table.choose(op, torch.bfloat16).name for op in references}
        wide = {op: table.choose(op, torch.float32).name for op in references}
        rewrites = [rewrite.__module__ for rewrite in table.rewrites]
    found["sm_%d%d" % capability] = [
        {op: name for op, name in of.items() if name != "reference"} for of in (chosen, wide)
    ] + [rewrites]
print(json.dumps(found))
"""

WIDE = {
    "add_tree_sum": "triton",
    "adamw_8bit_update": "cuda",
    "adamw_update": "triton",
    "causal_convolution": "triton",
    "causal_convolution_step": "triton",
    "choose_tokens": "triton",
    "cross_entropy": "cuda",
    "gated_delta": "triton",
    "gated_delta_step": "triton",
    "matrix_momentum": "triton",
    "matrix_update": "triton",
    "nvfp4_quantised": "cuda",
    "nvfp4_rounded": "cuda",
    "route": "triton",
    "slot_attention": "triton",
    "ssd": "triton",
    "ssd_step": "triton",
    "token_bounds": "triton",
}
AMPERE = {
    "adapted_linears": "triton",
    "attention": "triton",
    "causal_convolution": "triton",
    "causal_convolution_step": "triton",
    "choose_tokens": "triton",
    "combine": "triton",
    "combined_linear": "triton-fused",
    "cross_entropy": "cuda",
    "gated_delta": "triton",
    "gated_delta_step": "triton",
    "grouped_linears": "triton-fused",
    "grouped_product": "triton",
    "matrix_update": "triton",
    "norm_rope": "triton",
    "nvfp4_quantised": "cuda",
    "nvfp4_rounded": "cuda",
    "rms_norm": "triton",
    "route": "triton",
    "slot_attention": "triton",
    "ssd": "triton",
    "ssd_step": "triton",
    "swiglu": "triton",
    "token_bounds": "triton",
}
ADA = AMPERE | {"quantise_both": "cuda"}
CODES = WIDE | {"sum_coded_product": "cublaslt"}
GROUPED = {"grouped_product": "torch-grouped"}
HOPPER = ADA | GROUPED | {"attention": "hopper", "scaled_linears": "hopper"}
REWRITES = ["surogate_kernels_cuda.gated", "surogate_kernels_triton.norm", "surogate_kernels_triton.experts_combined"]
ON_HOPPER = [REWRITES[0], "surogate_kernels_hopper.scaled_gated", *REWRITES[1:]]
EXPECTED = {
    "sm_75": [{"attention": "torch-flash"}, {}, []],
    "sm_80": [AMPERE, WIDE, REWRITES],
    "sm_89": [ADA, CODES, REWRITES],
    "sm_90": [HOPPER, CODES, ON_HOPPER],
    "sm_100": [ADA | GROUPED, CODES, REWRITES],
    "sm_120": [ADA, CODES, REWRITES],
}
"""Architecture → (kernels for bf16, kernels for fp32, modules of the rewrites in order); others run the reference."""


@pytest.fixture(scope="module")
def found() -> dict[str, list[object]]:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    answers: dict[str, list[object]] = json.loads(result.stdout)
    return answers


@pytest.mark.parametrize("architecture", EXPECTED)
def test_the_kernels_of_an_architecture(found: dict[str, list[object]], architecture: str) -> None:
    bf16, fp32, rewrites = found[architecture]
    assert bf16 == EXPECTED[architecture][0]
    assert fp32 == EXPECTED[architecture][1]
    assert rewrites == EXPECTED[architecture][2]
