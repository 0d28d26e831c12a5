"""Every hook of Surogate on one page; the prose, with an example each, is docs/hooks.md.

A plugin is a module named by an entry point of group ``surogate``; its functions marked with
``surogate_core.hookimpl`` implement these. A hook that offers bundles may return one bundle,
a list of them, or None. Importing the module must be cheap: no torch at the top level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from typing import TypeAlias, TypeVar

    from surogate_core import bundles as b

    T = TypeVar("T")
    Offer: TypeAlias = T | list[T] | None

hookspec = HookspecMarker("surogate")


# -------------------------------------------------------------------------- configuration


@hookspec
def surogate_config_path() -> str | None:
    """The plugin's Hydra search path, e.g. ``pkg://surogate_model_qwen3.conf``."""


# ------------------------------------------------------------------------ what is trained


@hookspec
def surogate_model_family() -> Offer[b.ModelFamily]:
    """Model families: HF config mapping, blocks in the DSL, presets."""


@hookspec
def surogate_objective() -> Offer[b.ObjectiveSpec]:
    """Objectives: the per-token loss of a task."""


@hookspec
def surogate_dataset() -> Offer[b.DatasetFormat]:
    """Dataset formats: rows of one type into tokens and labels."""


@hookspec
def surogate_task() -> Offer[b.TaskSpec]:
    """Tasks: the micro-batches of a run, step by step."""


@hookspec
def surogate_advantage() -> Offer[b.AdvantageSpec]:
    """Advantages: from the rewards of a step's completions to the factor of each in the loss."""


@hookspec
def surogate_policy_loss() -> Offer[b.PolicyLossSpec]:
    """Policy losses: what reinforcement learning minimises for each sampled token, and how tokens are averaged."""


# ----------------------------------------------------------------------- how it is trained


@hookspec
def surogate_recipe() -> Offer[b.RecipeSpec]:
    """Precision recipes: how a linear slot multiplies, forward and backward."""


@hookspec
def surogate_weight_format() -> Offer[b.WeightFormatSpec]:
    """Weight formats: how frozen base weights are stored under QLoRA."""


@hookspec
def surogate_optimizer() -> Offer[b.OptimizerSpec]:
    """Optimizers over flat parameter groups."""


@hookspec
def surogate_schedule() -> Offer[b.ScheduleSpec]:
    """Schedules of the learning rate, between warm-up and cool-down."""


@hookspec
def surogate_offloader() -> Offer[b.OffloaderSpec]:
    """Offloaders: where tensors of a kind are kept between uses."""


@hookspec
def surogate_kernel_pack() -> Offer[b.KernelPack]:
    """Kernel packs: implementations of registered ops for some hardware."""


# ------------------------------------------------------------------- what it is trained for


@hookspec
def surogate_rollout_engine() -> Offer[b.RolloutEngineSpec]:
    """Rollout engines: how prompts are continued with the weights of a run."""


@hookspec
def surogate_tool_parser() -> Offer[b.ToolParserSpec]:
    """Tool parsers: the form in which the models of a family call tools."""


@hookspec
def surogate_export_format() -> Offer[b.ExportFormat]:
    """Export formats: a trained model as a file for another program."""


@hookspec
def surogate_evaluator() -> Offer[b.EvaluatorSpec]:
    """Evaluators: sources of benchmarks that `surogate eval` measures a model on."""


@hookspec
def surogate_environment() -> Offer[b.EnvironmentSpec]:
    """Environments: problems of reinforcement learning and the rewards of their answers."""


# --------------------------------------------------------------------- where and who watches


@hookspec
def surogate_launcher() -> Offer[b.Launcher]:
    """Launchers: how the processes of a run are started."""


@hookspec
def surogate_fabric() -> Offer[b.FabricSpec]:
    """Fabrics: how the ranks of a run move data among each other."""


@hookspec
def surogate_monitor() -> Offer[b.MonitorSpec]:
    """Monitors: receive the run's events, may answer with a control."""


@hookspec
def surogate_report() -> Offer[b.ReportSpec]:
    """Reports: pages made from the files of a run when it ends."""


# ------------------------------------------------------------------------------ what is typed


@hookspec
def surogate_command() -> Offer[b.CommandSpec]:
    """Commands: `surogate NAME`."""
