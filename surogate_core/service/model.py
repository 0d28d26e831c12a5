"""The DSL beneath families: slots, tensors, tracing, sides, mixers."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.dsl.budget import ARITHMETIC
    from surogate_core.dsl.declare import LoRA, Multiply
    from surogate_core.dsl.experts import EXPERT, Fused, expanded, split
    from surogate_core.dsl.known_keys import KNOWN, Known
    from surogate_core.dsl.mixers import BORDERS, KeyValues, States, mixing
    from surogate_core.dsl.sides import REAL, Form, RouterLosses
    from surogate_core.dsl.slots import Adapter, Panel
    from surogate_core.dsl.tensors import TensorSpec
    from surogate_core.dsl.trace import Recompute, Signature, trace_joint

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
