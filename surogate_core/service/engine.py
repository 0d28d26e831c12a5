"""The engine: assemblies, plans, predictions, ranks and launching them."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.engine.engine import Engine as Engine
    from surogate_core.engine.figures import of_chunk as of_chunk
    from surogate_core.engine.figures import of_sequences as of_sequences
    from surogate_core.engine.planning import assembly as assembly
    from surogate_core.engine.planning.assembly import Assembly as Assembly
    from surogate_core.engine.planning.assembly import EngineSettings as EngineSettings
    from surogate_core.engine.planning.pieces import RandomSource as RandomSource
    from surogate_core.engine.planning.pieces import Source as Source
    from surogate_core.engine.planning.pieces import distinct as distinct
    from surogate_core.engine.planning.pieces import pieces as pieces
    from surogate_core.engine.planning.prediction import CUBLAS_WORKSPACE as CUBLAS_WORKSPACE
    from surogate_core.engine.planning.prediction import CUDA_CONTEXT as CUDA_CONTEXT
    from surogate_core.engine.planning.prediction import Held as Held
    from surogate_core.engine.planning.prediction import Prediction as Prediction
    from surogate_core.engine.planning.prediction import TensorBytes as TensorBytes
    from surogate_core.engine.planning.prediction import predict as predict
    from surogate_core.engine.planning.prediction import programs_on_meta as programs_on_meta
    from surogate_core.engine.planning.weight_plan import plain_layers as plain_layers
    from surogate_core.engine.planning.weight_plan import plan_panels as plan_panels
    from surogate_core.engine.ranks.shares import Sent as Sent
    from surogate_core.engine.schedule import render as render
    from surogate_core.engine.stores import NO_OFFLOAD as NO_OFFLOAD
    from surogate_core.engine.update import StepResult as StepResult
    from surogate_core.generate.weights import without_values as without_values
    from surogate_core.host import memory_of_machine as memory_of_machine
    from surogate_core.mesh.axes import Axes as Axes
    from surogate_core.mesh.mesh import Mesh as Mesh
    from surogate_core.mesh.offers import FABRICS as FABRICS
    from surogate_core.mesh.sums import lanes_of as lanes_of

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
