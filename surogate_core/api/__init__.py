"""Runs from Python: the same configuration, errors and files as on the command line.

Importing this package imports neither torch nor Hydra.
"""

from surogate_core.api.results import HeldOutLoss, Paths, Run, RunReport, Sample, load
from surogate_core.api.training import pt, sft, train

__all__ = [
    "HeldOutLoss",
    "Paths",
    "Run",
    "RunReport",
    "Sample",
    "load",
    "pt",
    "sft",
    "train",
]
