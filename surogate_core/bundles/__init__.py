"""The frozen dataclasses that hooks return: what a plugin offers, as data.

Every bundle has a `name`, unique within its kind: the name that a config selects it by
(``recipe=bf16`` selects the `RecipeSpec` whose name is ``bf16``). A bundle with `options` names a
dataclass, one docstring a field; the config node of the group is validated against it, and an
instance is passed to the bundle's `build`. An option with the mark `Flat` has a flat key too. What `build`
returns has methods and no options; its class has the bundle's name without ``Spec``. So a plugin imports
torch only when something of it is built.
"""

from __future__ import annotations

from collections.abc import Mapping

from surogate_core.bundles.commands import CommandSpec
from surogate_core.bundles.data import DatasetFormat, FormatChoice
from surogate_core.bundles.evals import BenchmarkResult, EvalSettings, Evaluator, EvaluatorSpec
from surogate_core.bundles.exports import Exported, ExportFormat, ExportJob
from surogate_core.bundles.fabrics import Fabric, FabricContext, FabricSpec
from surogate_core.bundles.handed import (
    ChosenBundle,
    MeasuredModel,
    ModelWeights,
    Plugins,
    RunKeys,
    TrainedModel,
    TrainedTensors,
)
from surogate_core.bundles.kernels import Kernel, KernelPack
from surogate_core.bundles.launchers import Job, Launcher
from surogate_core.bundles.models import ModelFamily, check_export, decoder_presets
from surogate_core.bundles.monitors import Monitor, MonitorSpec, ReportSpec
from surogate_core.bundles.objectives import Objective, ObjectiveSpec
from surogate_core.bundles.offloaders import GradientStore, OffloaderSpec, Store, Stores, TensorKind
from surogate_core.bundles.optimizers import FLAT_ALIGNMENT, Optimizer, OptimizerSpec, ParamGroup
from surogate_core.bundles.options import Code, Flat, NoOptions, options_from_flat
from surogate_core.bundles.parts import Part, part_of
from surogate_core.bundles.recipes import PanelOp, Recipe, RecipeContext, RecipeSpec, RecipeState, Role
from surogate_core.bundles.reinforcement.advantages import AdvantageSpec
from surogate_core.bundles.reinforcement.environments import (
    Environment,
    EnvironmentProblem,
    EnvironmentSpec,
    Episode,
    Fault,
    FaultReason,
    Rewards,
    Turn,
    total_reward,
)
from surogate_core.bundles.reinforcement.policy_losses import (
    PER_COMPLETION,
    PER_LARGEST_LENGTH,
    PER_MICRO_BATCH,
    PER_TOKEN,
    SUM_PER_COMPLETION,
    Aggregation,
    Lengths,
    PolicyLoss,
    PolicyLossSpec,
    PolicyTerms,
)
from surogate_core.bundles.reinforcement.rollouts import (
    ApartEngine,
    Arriving,
    Completion,
    Constraint,
    Grammar,
    OnChosen,
    OnToken,
    Reason,
    Request,
    RolloutEngine,
    RolloutEngineSpec,
    RolloutSettings,
    Sampling,
)
from surogate_core.bundles.schedules import ScheduleContext, ScheduleSpec
from surogate_core.bundles.tasks import (
    Evaluation,
    OnlineContext,
    OnlineSteps,
    OnlineTask,
    PrepareContext,
    PreparingTask,
    SharedSteps,
    Steps,
    Stopped,
    Task,
    TaskSpec,
    Together,
)
from surogate_core.bundles.tool_parsers import Tag, ToolParser, ToolParserSpec, ToolPart
from surogate_core.bundles.weight_formats import WeightFormat, WeightFormatSpec

__all__ = [
    "FLAT_ALIGNMENT",
    "KINDS",
    "PER_COMPLETION",
    "PER_LARGEST_LENGTH",
    "PER_MICRO_BATCH",
    "PER_TOKEN",
    "SUM_PER_COMPLETION",
    "AdvantageSpec",
    "Aggregation",
    "ApartEngine",
    "Arriving",
    "BenchmarkResult",
    "Bundle",
    "ChosenBundle",
    "Code",
    "CommandSpec",
    "Completion",
    "Constraint",
    "DatasetFormat",
    "Environment",
    "EnvironmentProblem",
    "EnvironmentSpec",
    "Episode",
    "EvalSettings",
    "Evaluation",
    "Evaluator",
    "EvaluatorSpec",
    "ExportFormat",
    "ExportJob",
    "Exported",
    "Fabric",
    "FabricContext",
    "FabricSpec",
    "Fault",
    "FaultReason",
    "Flat",
    "FormatChoice",
    "GradientStore",
    "Grammar",
    "Job",
    "Kernel",
    "KernelPack",
    "Launcher",
    "Lengths",
    "MeasuredModel",
    "ModelFamily",
    "ModelWeights",
    "Monitor",
    "MonitorSpec",
    "NoOptions",
    "Objective",
    "ObjectiveSpec",
    "OffloaderSpec",
    "OnChosen",
    "OnToken",
    "OnlineContext",
    "OnlineSteps",
    "OnlineTask",
    "Optimizer",
    "OptimizerSpec",
    "PanelOp",
    "ParamGroup",
    "Part",
    "Plugins",
    "PolicyLoss",
    "PolicyLossSpec",
    "PolicyTerms",
    "PrepareContext",
    "PreparingTask",
    "Reason",
    "Recipe",
    "RecipeContext",
    "RecipeSpec",
    "RecipeState",
    "ReportSpec",
    "Request",
    "Rewards",
    "Role",
    "RolloutEngine",
    "RolloutEngineSpec",
    "RolloutSettings",
    "RunKeys",
    "Sampling",
    "ScheduleContext",
    "ScheduleSpec",
    "SharedSteps",
    "Steps",
    "Stopped",
    "Store",
    "Stores",
    "Tag",
    "Task",
    "TaskSpec",
    "TensorKind",
    "Together",
    "ToolParser",
    "ToolParserSpec",
    "ToolPart",
    "TrainedModel",
    "TrainedTensors",
    "Turn",
    "WeightFormat",
    "WeightFormatSpec",
    "check_export",
    "decoder_presets",
    "options_from_flat",
    "part_of",
    "total_reward",
]

Bundle = (
    ModelFamily
    | ObjectiveSpec
    | DatasetFormat
    | RecipeSpec
    | WeightFormatSpec
    | OptimizerSpec
    | ScheduleSpec
    | OffloaderSpec
    | KernelPack
    | TaskSpec
    | AdvantageSpec
    | PolicyLossSpec
    | RolloutEngineSpec
    | ToolParserSpec
    | ExportFormat
    | EvaluatorSpec
    | EnvironmentSpec
    | Launcher
    | FabricSpec
    | MonitorSpec
    | ReportSpec
    | CommandSpec
)

KINDS: Mapping[str, tuple[str, type]] = {
    "model": ("surogate_model_family", ModelFamily),
    "objective": ("surogate_objective", ObjectiveSpec),
    "dataset": ("surogate_dataset", DatasetFormat),
    "recipe": ("surogate_recipe", RecipeSpec),
    "quant": ("surogate_weight_format", WeightFormatSpec),
    "optimizer": ("surogate_optimizer", OptimizerSpec),
    "schedule": ("surogate_schedule", ScheduleSpec),
    "offload": ("surogate_offloader", OffloaderSpec),
    "kernels": ("surogate_kernel_pack", KernelPack),
    "task": ("surogate_task", TaskSpec),
    "advantage": ("surogate_advantage", AdvantageSpec),
    "policy_loss": ("surogate_policy_loss", PolicyLossSpec),
    "rollout": ("surogate_rollout_engine", RolloutEngineSpec),
    "tool_parser": ("surogate_tool_parser", ToolParserSpec),
    "export": ("surogate_export_format", ExportFormat),
    "eval": ("surogate_evaluator", EvaluatorSpec),
    "environment": ("surogate_environment", EnvironmentSpec),
    "launcher": ("surogate_launcher", Launcher),
    "fabric": ("surogate_fabric", FabricSpec),
    "monitor": ("surogate_monitor", MonitorSpec),
    "report": ("surogate_report", ReportSpec),
    "command": ("surogate_command", CommandSpec),
}
"""Kind (= the config group, where there is one) → its hook and its bundle's type."""
