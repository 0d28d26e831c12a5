"""The engine: assemblies, plans, predictions, ranks and launching them."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.engine.engine import Engine
    from surogate_core.engine.figures import of_chunk, of_sequences
    from surogate_core.engine.host_memory import memory_of_machine
    from surogate_core.engine.planning import assembly
    from surogate_core.engine.planning.assembly import Assembly, EngineSettings
    from surogate_core.engine.planning.pieces import RandomSource, Source, distinct, pieces
    from surogate_core.engine.planning.prediction import (
        CUBLAS_WORKSPACE,
        CUDA_CONTEXT,
        Held,
        Prediction,
        TensorBytes,
        predict,
        programs_on_meta,
    )
    from surogate_core.engine.planning.weight_plan import plain_layers, plan_panels
    from surogate_core.engine.ranks.shares import Sent
    from surogate_core.engine.schedule import render
    from surogate_core.engine.stores import NO_OFFLOAD
    from surogate_core.engine.update import StepResult
    from surogate_core.mesh.axes import Axes
    from surogate_core.mesh.mesh import Mesh
    from surogate_core.mesh.offers import FABRICS
    from surogate_core.mesh.sums import lanes_of

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
