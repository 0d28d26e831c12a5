"""The DSL beneath families: slots, tensors, tracing, sides, mixers."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.dsl.budget import ARITHMETIC as ARITHMETIC
    from surogate_core.dsl.declare import LoRA as LoRA
    from surogate_core.dsl.declare import Multiply as Multiply
    from surogate_core.dsl.experts import EXPERT as EXPERT
    from surogate_core.dsl.experts import Fused as Fused
    from surogate_core.dsl.experts import expanded as expanded
    from surogate_core.dsl.experts import split as split
    from surogate_core.dsl.known_keys import KNOWN as KNOWN
    from surogate_core.dsl.known_keys import Known as Known
    from surogate_core.dsl.mixers import BORDERS as BORDERS
    from surogate_core.dsl.mixers import KeyValues as KeyValues
    from surogate_core.dsl.mixers import States as States
    from surogate_core.dsl.mixers import mixing as mixing
    from surogate_core.dsl.sides import IDS as IDS
    from surogate_core.dsl.sides import REAL as REAL
    from surogate_core.dsl.sides import Form as Form
    from surogate_core.dsl.sides import RouterLosses as RouterLosses
    from surogate_core.dsl.slots import Adapter as Adapter
    from surogate_core.dsl.slots import Panel as Panel
    from surogate_core.dsl.tensors import TensorSpec as TensorSpec
    from surogate_core.dsl.trace import Recompute as Recompute
    from surogate_core.dsl.trace import Signature as Signature
    from surogate_core.dsl.trace import trace_joint as trace_joint

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
