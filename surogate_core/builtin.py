"""The core's own offers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.config.schema import RunConfig
    from surogate_core.data.pipeline import PreparedData


@hookimpl
def surogate_objective() -> bundles.ObjectiveSpec:
    """Next-token cross-entropy."""
    return bundles.ObjectiveSpec(name="cross_entropy", build=_cross_entropy_objective)


def _cross_entropy_objective(options: bundles.NoOptions) -> bundles.Objective:
    return bundles.Objective(name="cross_entropy", token_loss=_cross_entropy)


def _cross_entropy(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    # torch is imported when the loss is traced, not when a configuration is checked.
    from surogate_core.kernels.ops import cross_entropy

    return cross_entropy(logits_NV, labels_N)


@hookimpl
def surogate_task() -> list[bundles.TaskSpec]:
    """Supervised fine-tuning, and pre-training of all weights on every token."""
    return [
        bundles.TaskSpec(name="sft", build=_packed),
        bundles.TaskSpec(name="pt", build=_packed, adapters=False, trains_prompts=True),
    ]


def _packed(config: RunConfig, data: PreparedData) -> bundles.Task:
    from surogate_core.data.sampler import PackedTask

    return PackedTask(config, data)


@hookimpl
def surogate_schedule() -> list[bundles.ScheduleSpec]:
    """Linear, cosine, wsd and constant."""
    from surogate_core.train.lr import SCHEDULES

    return [*SCHEDULES]


@hookimpl
def surogate_launcher() -> bundles.Launcher:
    """The processes of this machine."""
    from surogate_core.launch.local import LocalOptions, launch

    return bundles.Launcher(name="local", launch=launch, options=LocalOptions)


@hookimpl
def surogate_fabric() -> list[bundles.FabricSpec]:
    """Copy engines and NCCL between GPUs, gloo between CPUs, and the choice among all that there are."""
    from surogate_core.mesh.offers import FABRICS

    return [*FABRICS]


@hookimpl
def surogate_offloader() -> bundles.OffloaderSpec:
    """No offloading."""
    from surogate_core.engine.stores import NO_OFFLOAD

    return NO_OFFLOAD


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """Kernels of torch."""
    from surogate_core.kernels.torch_pack import TORCH_PACK

    return TORCH_PACK


@hookimpl
def surogate_rollout_engine() -> list[bundles.RolloutEngineSpec]:
    """Generation by the blocks of the model itself: on the GPU that trains, or on one of its own."""
    return [
        bundles.RolloutEngineSpec(name="native", open=_native, constrains=True),
        bundles.RolloutEngineSpec(
            name="dedicated", open=_dedicated, caches=False, apart=True, copied=_copied, constrains=True
        ),
    ]


@hookimpl
def surogate_tool_parser() -> list[bundles.ToolParserSpec]:
    """The calls of Qwen and Hermes, of Qwen3-Coder, of Llama 3 and of Mistral."""
    from surogate_core.tools import json_calls, xml_calls

    return [*json_calls.SPECS, xml_calls.SPEC]


COMMANDS = (
    bundles.CommandSpec(
        name="tokenize",
        usage="tokenize [TASK] [FILE.yaml] [KEY=VALUE …] [--debug [N]]",
        help="tokenise and pack the data, show what is trained",
        main="surogate_core.cli.tokenize:main",
        rank=200,
    ),
    bundles.CommandSpec(
        name="plugins",
        usage="plugins list|show NAME|lock|verify\nplugins new NAME --kind KIND\nplugins check [NAME …|--matrix]",
        help="what is installed, and whether it matches the lock\n"
        "write a plugin package of your own\n"
        "whether a plugin does what its kind must; what can be combined",
        main="surogate_core.cli.plugins:main",
        rank=800,
    ),
    bundles.CommandSpec(
        name="doctor",
        usage="doctor",
        help="what this machine can run, and why not the rest",
        main="surogate_core.cli.doctor:main",
        rank=900,
    ),
)
"""What the command line has without plugins, besides the tasks and `demo`; read from here without an import."""


@hookimpl
def surogate_command() -> list[bundles.CommandSpec]:
    """The core's commands."""
    return [*COMMANDS]


def _dedicated(weights: bundles.ModelWeights, settings: bundles.RolloutSettings) -> bundles.RolloutEngine:
    from surogate_core.generate.copies import DedicatedEngine

    return DedicatedEngine(weights, settings)


def _copied(weights: bundles.ModelWeights) -> tuple[int, bundles.ModelWeights]:
    from surogate_core.generate.copies import copied

    return copied(weights)


def _native(weights: bundles.ModelWeights, settings: bundles.RolloutSettings) -> bundles.RolloutEngine:
    from surogate_core.generate.copies import native

    return native(weights, settings)
