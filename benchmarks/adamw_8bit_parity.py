"""8-bit AdamW against bitsandbytes' own on a GPU: codes, absmax and weights after each of 100 steps.

bitsandbytes is not a requirement of Surogate: `pip install bitsandbytes` first. Both get the same gradients, of four
orders of magnitude within a block and a tenth of them 0 (never −0, to which the two give different codes). For our
reference in torch and for the CUDA kernel, of each moment: the share of codes that are equal at the worst step and at
the last, the share that is off by more than one, the largest difference, and the largest relative difference of an
absmax; and of the way that the weights went in all, the share by which they end apart.

    python benchmarks/adamw_8bit_parity.py [--values 4194304] [--steps 100] [--decay 0.1]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import bitsandbytes
import surogate_kernels_cuda
import torch

from surogate_core.bundles import ParamGroup
from surogate_core.formats.adamw_8bit import BlockwiseAdamW
from surogate_core.kernels.registry import KernelTable, using

MOMENTS = ("first", "second")


def compare(kernel: str, values: int, steps: int, decay: float) -> str:
    """A line of figures."""
    device, rate = torch.device("cuda"), 1e-3
    generator = torch.Generator(device).manual_seed(0)
    start = torch.randn(values, generator=generator, device=device)
    shapes = {"w": (0, (values,))}
    group = ParamGroup(name="w", master=start.clone(), grad=torch.zeros_like(start), shapes=shapes, weight_decay=decay)
    ours = BlockwiseAdamW([group])
    twin = torch.nn.Parameter(start.clone())
    theirs = bitsandbytes.optim.AdamW8bit([twin], lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
    packs = [surogate_kernels_cuda.surogate_kernel_pack()] if kernel == "cuda" else []
    table = KernelTable.build(device, packs)
    figures = {
        name: torch.tensor(value, device=device) for name, value in {"lr": rate, "clip": 1.0, "skip": 0.0}.items()
    }
    worst = dict.fromkeys(MOMENTS, 1.0)
    found = dict.fromkeys(MOMENTS, "")
    path = torch.zeros_like(start)
    for _ in range(steps):
        scale = 10 ** (4 * torch.rand(values, generator=generator, device=device) - 4)
        keep = torch.rand(values, generator=generator, device=device) > 0.1
        drawn = torch.randn(values, generator=generator, device=device) * scale
        group.grad.copy_(torch.where(keep, drawn, 0.0))
        twin.grad = group.grad.clone()
        before = group.master.clone()
        with using(table) if packs else nullcontext():
            ours.step(**figures)
        path += (group.master - before).abs()
        theirs.step()
        state = theirs.state[twin]
        for number, moment in enumerate(MOMENTS, start=1):
            codes, tops = (ours.state()[f"w.{moment}.{what}"].flatten() for what in ("codes", "absmax"))
            difference = (codes.int() - state[f"state{number}"].flatten().int()).abs()
            equal = float((difference == 0).double().mean())
            worst[moment] = min(worst[moment], equal)
            absmax = float(((tops - state[f"absmax{number}"]) / tops).abs().max())
            found[moment] = (
                f"{moment}: codes equal {equal:.4%}, at the worst step {worst[moment]:.4%}, off by more than one "
                f"{float((difference > 1).double().mean()):.4%}, at most {int(difference.max())}, absmax {absmax:.1e}"
            )
    apart = (group.master - twin.detach()).abs()
    chosen = ", ".join(table.chosen.values()) or "reference"
    share = float(apart.sum() / path.sum())
    apart_by = f"weights apart {share:.1e} of their way, at most {float(apart.max()):.1e}"
    return f"{chosen}, decay {decay}: " + "; ".join([*found.values(), apart_by])


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--decay", type=float, default=0.1)
    arguments = parser.parse_args()
    print(f"bitsandbytes {bitsandbytes.__version__}, {torch.cuda.get_device_name()}, {arguments.values} values")
    for kernel in ("reference", "cuda"):
        for decay in (0.0, arguments.decay):
            print(compare(kernel, arguments.values, arguments.steps, decay), flush=True)


if __name__ == "__main__":
    main()
