"""CUDA graphs of the micro-step and of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from surogate_core.engine.engine import Engine


@torch.no_grad()
def capture(engine: Engine) -> tuple[Callable[[], None], Callable[[], None]]:
    """Replays of the engine's micro-step and, where the device carries it out, of the optimizer step.

    Both run once before capture, so that kernels are loaded and workspaces exist. The gradients
    are not finite in that first optimizer step, in which by contract nothing may change.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        engine._run_training()
        for group in engine.parameters.groups:
            group.grad.fill_(float("nan"))
        engine._run_update()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    micro_step, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(micro_step):
        engine._run_training()
    if engine.settings.update_on_cpu:
        return micro_step.replay, engine._run_update
    with torch.cuda.graph(update, pool=micro_step.pool()):
        engine._run_update()
    return micro_step.replay, update.replay
