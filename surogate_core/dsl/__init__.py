"""The language that model families are written in: dims, parameters, linear slots, blocks.

A family declares the parameters of a block and writes its forward once, in plain torch ops and the ops of
`surogate_core.kernels`. The engine adds weight formats, adapters, recipes and recomputation when it traces the block
(`surogate_core.dsl.trace`).
"""

from surogate_core.dsl import inits
from surogate_core.dsl.declare import Block, Embedding, Linear, Model, Param, Stack
from surogate_core.dsl.dims import Dim, Setting, not_computed, number_of, read_key
from surogate_core.dsl.experts import Experts, ExpertSlot, Routes, TracedExperts, mixture, project, project_combined
from surogate_core.dsl.heads import Head, LMHead, ScoreHead
from surogate_core.dsl.mixers import Attention, Convolution, Recurrence
from surogate_core.dsl.rope import Rope
from surogate_core.dsl.sides import Given, Received, Side, router_figures, router_sides
from surogate_core.dsl.slots import LinearSlot, TracedSlot

__all__ = [
    "Attention",
    "Block",
    "Convolution",
    "Dim",
    "Embedding",
    "ExpertSlot",
    "Experts",
    "Given",
    "Head",
    "LMHead",
    "Linear",
    "LinearSlot",
    "Model",
    "Param",
    "Received",
    "Recurrence",
    "Rope",
    "Routes",
    "ScoreHead",
    "Setting",
    "Side",
    "Stack",
    "TracedExperts",
    "TracedSlot",
    "inits",
    "mixture",
    "not_computed",
    "number_of",
    "project",
    "project_combined",
    "read_key",
    "router_figures",
    "router_sides",
]
