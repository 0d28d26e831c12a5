"""Surogate plugin: completions by a vLLM server, which receives the adapter after every update."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl
from surogate_rollout_vllm.options import VllmOptions

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `rollout=vllm` is."""
    return "pkg://surogate_rollout_vllm.conf"


@hookimpl
def surogate_rollout_engine() -> bundles.RolloutEngineSpec:
    """A vLLM server."""
    return bundles.RolloutEngineSpec(name="vllm", open=_open, options=VllmOptions, caches=False, apart=True)


def _open(weights: bundles.ModelWeights, settings: bundles.RolloutSettings) -> bundles.RolloutEngine:
    from surogate_rollout_vllm.engine import VllmEngine

    return VllmEngine(weights, settings, settings.options or VllmOptions())
