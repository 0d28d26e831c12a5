"""Runs from Python: the same configuration, errors and files as on the command line.

Importing this package imports neither torch nor Hydra.
"""

from surogate_core.api.generation import generate
from surogate_core.api.results import Evaluation, Paths, Report, Run, Sample, load
from surogate_core.api.training import pt, sft, train

__all__ = [
    "Evaluation",
    "Paths",
    "Report",
    "Run",
    "Sample",
    "generate",
    "load",
    "pt",
    "sft",
    "train",
]
