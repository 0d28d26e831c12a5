"""Triton's programs compiled for each architecture as they are launched; no GPU is needed, but Triton is.

A test calls the functions that launch programs, on tensors that are never written, inside `recorded`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from torch import Tensor

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Compute capability → KiB of shared memory that a block may have."""
SPILLED = 64
"""Most bytes of local memory of a thread."""
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


_looked_through: set[str] = set()
"""Hashes of programs: several launches are of one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A program with the arguments and options that it would have been launched with."""

    program: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile(self, capability: int) -> Any:
        """For an architecture, with what a launch would know of the arguments: types, and multiples of 16.

        The machine code of sm_90 is looked through (`unwritten_registers`).
        """
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
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)
        if capability == 90 and compiled.hash not in _looked_through:
            with NamedTemporaryFile() as file:
                machine_code = dumped(compiled, "--dump-sass", Path(file.name))
            assert INSTRUCTION.search(machine_code), machine_code
            unwritten = unwritten_registers(machine_code)
            assert not unwritten, f"{self.program.__name__} {self.options} reads registers {unwritten} before any write"
            _looked_through.add(compiled.hash)
        return compiled


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Inside, launches are noted instead of made."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in OPTIONS if key in named}
        launches.append(Launch(self, dict(zip(self.arg_names, args, strict=False)) | named, options))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield launches


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Never written, so that it takes no memory."""
    return torch.empty(shape, dtype=dtype)


def usage(compiled: Any, file: Path) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, as the assembler counts them."""
    text = dumped(compiled, "--dump-resource-usage", file)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def dumped(compiled: Any, option: str, file: Path) -> str:
    """What cuobjdump says of a binary, which is written to the file."""
    import triton.backends.nvidia as nvidia

    file.write_bytes(compiled.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
WRITES_UNIFORM = ("R2UR", "S2UR", "VOTEU", "LDCU", "REDUX", "ELECT")
"""Instructions whose result is a uniform register, beside those that begin with a U."""
AFTER_PREDICATE = ("ULOP3", "R2UR", "ELECT")
"""Those whose result may stand behind a predicate."""


def unwritten_registers(machine_code: str) -> list[int]:
    """Uniform registers that an instruction reads and none before it writes, ascending: a mistake of the assembler.

    Descriptors of products are in such registers, so the product then reads wrong memory, or memory that is not there.
    ptxas 12.8.93 made such code of programs whose PTX is right. Instructions are taken in the order of the code, each
    as if its predicate held: a register that is written on another branch only is not found.

    `machine_code`: what ``cuobjdump --dump-sass`` says of a binary for sm_90.
    """
    found: set[int] = set()
    for function in machine_code.split("Function :"):
        written: set[int] = set()
        for name, rest in INSTRUCTION.findall(function):
            result, operands = _result_of(name, [each.strip() for each in rest.split(",")])
            found |= {
                each for n, operand in enumerate(operands) for each in _read_by(name, operand, n, operands)
            } - written
            written |= set(result)
    return sorted(found)


def _result_of(name: str, operands: list[str]) -> tuple[Sequence[int], list[str]]:
    """The uniform registers that an instruction writes, and its operands with another in that place."""
    kind = name.partition(".")[0]
    if kind[0] != "U" and kind not in WRITES_UNIFORM:
        return (), operands
    behind = kind in AFTER_PREDICATE and re.fullmatch(r"U?P(T|\d+)", operands[0])
    place = 1 if behind else 0
    own = re.fullmatch(r"UR(\d+)", operands[place])
    if own is None:
        return (), operands
    count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return range(int(own[1]), int(own[1]) + count), [*operands[:place], "", *operands[place + 1 :]]


def _read_by(name: str, operand: str, place: int, operands: Sequence[str]) -> Iterator[int]:
    """The uniform registers that an operand names."""
    pair = bool(re.fullmatch(r"UR\d+", operand)) and (
        (name[0] == "U" and ".64" in name) or (".WIDE" in name and place == len(operands) - 1)
    )
    for descriptor, number, wide in re.findall(r"(g?desc\[)?UR(\d+)(\.64)?", operand):
        # The left operand's descriptor is in the first two, unless that operand is in registers.
        span = (
            range(0 if place == 1 else 2, 4)
            if descriptor == "gdesc["
            else range(2 if descriptor or wide or pair else 1)
        )
        yield from (int(number) + each for each in span)


def check_compiled(launches: Sequence[Launch], capability: int, file: Path) -> None:
    """Every program compiles, within the shared memory of a block and with next to nothing outside of registers.

    `file`: a place for binaries.
    """
    seen: set[str] = set()
    for launch in launches:
        compiled = launch.compile(capability)
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        name = launch.program.__name__
        assert compiled.metadata.shared <= SHARED[capability] * 1024, f"{name} needs {compiled.metadata.shared} bytes"
        registers, local = usage(compiled, file)
        assert local <= SPILLED, f"{name} has {local} bytes of local memory beside {registers} registers"
