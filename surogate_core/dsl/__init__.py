"""The language that model families are written in: dims, parameters, linear slots, blocks.

A family declares the parameters of a block and writes its forward once, in plain torch ops and the ops of
`surogate_core.kernels`. The engine adds weight formats, adapters, recipes and recomputation when it traces the block
(`surogate_core.dsl.trace`).
"""

from surogate_core.dsl.declare import Block, Embedding, Linear, Model, Param, Stack
from surogate_core.dsl.dims import Dim, Setting
from surogate_core.dsl.experts import Experts, Routes, project, project_combined
from surogate_core.dsl.heads import Head, LMHead, ScoreHead
from surogate_core.dsl.mixers import Attention, Convolution, Recurrence
from surogate_core.dsl.sides import Side

__all__ = [
    "Attention",
    "Block",
    "Convolution",
    "Dim",
    "Embedding",
    "Experts",
    "Head",
    "LMHead",
    "Linear",
    "Model",
    "Param",
    "Recurrence",
    "Routes",
    "ScoreHead",
    "Setting",
    "Side",
    "Stack",
    "project",
    "project_combined",
]
