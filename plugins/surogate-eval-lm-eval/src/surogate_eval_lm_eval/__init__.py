"""Surogate plugin: the benchmarks of lm-eval (the Language Model Evaluation Harness)."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_evaluator() -> bundles.EvaluatorSpec:
    """The benchmarks of lm-eval."""
    return bundles.EvaluatorSpec(name="lm-eval", open=_open)


def _open(names: Sequence[str], settings: bundles.EvalSettings) -> bundles.Evaluator:
    from surogate_core.plugin import MachineError

    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise MachineError(
            f"--tasks lm-eval:{names[0]}: the package {error.name} is not installed. "
            f"Fix: pip install 'surogate-eval-lm-eval[harness]'"
        ) from error
    from surogate_eval_lm_eval.evaluator import HarnessBenchmarks

    return HarnessBenchmarks(names, settings)
