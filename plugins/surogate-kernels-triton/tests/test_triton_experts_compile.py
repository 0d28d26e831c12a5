"""The programs of experts compile for every architecture, as they are launched for Qwen3-30B-A3B; no GPU is needed."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Compute capability → KiB of shared memory that a block may have."""
PROGRAMS = {
    *("choose", "scan", "scatter", "tile_table"),
    *("sum_rows", "combine_backward"),
    *("down", "up", "factors", "weight_factors"),
}
SPILLED = 64
"""Most bytes of local memory of a thread."""
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 8192, 128, 8, 2048, 768


@dataclass(frozen=True)
class Launch:
    program: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile(self, capability: int) -> Any:
        """For an architecture, with what a launch would know of the arguments: types, and multiples of 16."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.tools.tensor_descriptor import TensorDescriptor

        signature, constants, known = {}, {}, {}
        for place, (name, value) in enumerate(self.arguments.items()):
            if isinstance(value, TensorDescriptor):
                element, block = TYPES[value.base.dtype].lstrip("*"), ",".join(map(str, value.block_shape))
                signature[name] = f"tensordesc<{element}[{block}]>"
            elif isinstance(value, Tensor):
                signature[name], known[place,] = TYPES[value.dtype], [["tt.divisibility", 16]]
            elif self.program.params[place].is_constexpr or value is None or value == 1:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    known[place,] = [["tt.divisibility", 16]]
        source = ASTSource(self.program, signature, constants, known)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
        launches.append(Launch(self, dict(zip(self.arg_names, args, strict=False)) | named, options))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield launches


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Never written, so that it takes no memory."""
    return torch.empty(shape, dtype=dtype)


def everything(capability: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """All launches of a layer with experts, forward and backward, in both forms."""
    from surogate_kernels_triton import (
        experts_adapters,
        experts_combined,
        experts_frozen,
        experts_launches,
        experts_plain,
        experts_routing,
    )

    rows = TOKENS * CHOICES
    major = capability // 10
    monkeypatch.setattr(experts_launches, "large", lambda device: major in (9, 10))
    monkeypatch.setattr(experts_frozen.grouped, "torch_product", lambda x, w, ends: x.new_empty(len(x), w.shape[1]))
    order, ends = torch.zeros(rows, dtype=torch.int32), empty(EXPERTS, dtype=torch.int32)
    slot, weights = empty(TOKENS, CHOICES, dtype=torch.int32), empty(TOKENS, CHOICES, dtype=torch.float32)

    def linears(x: Tensor, outputs: int, projections: int, fused: bool, masks: tuple[Any, ...]) -> None:
        where = (order, slot) if x.shape[0] == TOKENS else (None, None)
        inputs = x.shape[1]
        w = [empty(EXPERTS, outputs, inputs)] * projections
        a, b = [empty(EXPERTS, rank, inputs)] * projections, [empty(EXPERTS, outputs, rank)] * projections
        dys = [empty(rows, outputs)] * projections
        *_, u = experts_frozen._forward._init_fn(x, where[0], ends, w, a, b, 2.0, CHOICES, fused, *masks)
        experts_frozen._backward._init_fn(dys, x, *where, ends, w, a, b, u, 2.0, CHOICES, fused, *masks)
        experts_adapters._rows._init_fn(x, where[0], ends, a, CHOICES, *masks)
        experts_adapters._rows_backward._init_fn(empty(rows, inputs), u, x, *where, ends, a, CHOICES, *masks)
        experts_adapters._up._init_fn(dys[0], u[:, :rank], ends, b[0], 2.0)
        experts_adapters._up_backward._init_fn(dys[0], u[:, :rank], ends, b[0], 2.0)

    def combined(fused: bool, masks: tuple[Any, ...]) -> None:
        x, w, u = empty(rows, INNER), empty(EXPERTS, WIDTH, INNER), [empty(rows, rank)]
        a, b = [empty(EXPERTS, rank, INNER)], [empty(EXPERTS, WIDTH, rank)]
        backward = experts_combined._backward._init_fn
        backward(empty(TOKENS, WIDTH), x, order, ends, weights, w, a, b, u, 2.0, fused, *masks)

    def plain(inputs: int, outputs: int) -> None:
        x, dy, w = empty(rows, inputs), empty(rows, outputs), empty(EXPERTS, outputs, inputs)
        experts_plain._product._init_fn(x, w, ends)
        experts_plain._product._init_fn(dy, w.transpose(1, 2), ends)
        experts_plain._factors._init_fn(dy, x, ends)

    with recorded(monkeypatch) as launches:
        plain(WIDTH, INNER)
        experts_routing._route._init_fn(empty(TOKENS, EXPERTS), CHOICES, True)
        experts_routing.sum_rows._init_fn(empty(rows, WIDTH), slot, weights)
        experts_routing._combine_backward._init_fn(empty(TOKENS, WIDTH), empty(rows, WIDTH), order, weights)
        for fused in (False, True):
            for masks in ((None, 0.0, []), (ends[0], 0.1, [0, 1])):
                linears(empty(TOKENS, WIDTH), INNER, 2, fused, masks)
                linears(empty(rows, INNER), WIDTH, 1, fused, masks)
                combined(fused, masks)
    return launches


def usage(compiled: Any, file: Path) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, as the assembler counts them."""
    import triton.backends.nvidia as nvidia

    file.write_bytes(compiled.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


RANKS = [(capability, 16) for capability in SHARED] + list(itertools.product((89, 90, 100, 120), (32, 64, 128)))


@pytest.mark.parametrize(("capability", "rank"), RANKS)
def test_every_program_compiles(capability: int, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within the shared memory of a block, and with next to nothing outside of registers."""
    launches = everything(capability, rank, monkeypatch)
    products = {"product_copied"} if capability // 10 in (9, 10) else {"product"}
    assert {launch.program.__name__ for launch in launches} == PROGRAMS | products
    seen: set[str] = set()
    for launch in launches:
        compiled = launch.compile(capability)
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        name = launch.program.__name__
        assert compiled.metadata.shared <= SHARED[capability] * 1024, f"{name} needs {compiled.metadata.shared} bytes"
        registers, local = usage(compiled, tmp_path / "program.cubin")
        assert local <= SPILLED, f"{name} has {local} bytes of local memory beside {registers} registers"
