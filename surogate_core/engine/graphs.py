"""CUDA graphs of the micro-step and of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from surogate_core.engine.engine import Engine


@torch.no_grad()
def warm_up(engine: Engine) -> None:
    """Run a micro-step and an optimizer step that leave no trace, so that kernels are loaded and workspaces exist.

    The gradients are not finite in that optimizer step, in which by contract nothing may change.
    """
    engine._run_training()
    for group in engine.parameters.groups:
        # One is enough, of a parameter: what lies between parameters need not be written again.
        group.grad[:1].fill_(float("nan"))
    engine.norm.spoil()
    engine._run_update()


@torch.no_grad()
def capture(engine: Engine) -> tuple[Callable[[bool], None], Callable[[], None]]:
    """Replays of the engine's micro-step and, where the device carries it out, of the optimizer step.

    A first micro-step has a graph of its own where sums of gradients come to the device piece by piece.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up(engine)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    first = following = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        engine._run_training(True)
    if engine.streams_gradients:
        following = torch.cuda.CUDAGraph()
        with torch.cuda.graph(following, pool=first.pool()):
            engine._run_training(False)

    def micro_step(is_first: bool) -> None:
        (first if is_first else following).replay()

    if engine.settings.update_on_cpu:
        return micro_step, engine._run_update
    update = torch.cuda.CUDAGraph()
    with torch.cuda.graph(update, pool=first.pool()):
        engine._run_update()
    return micro_step, update.replay
