"""What a plugin may import of the core: these names, at most 100, and nothing else.

`from surogate_core.plugin import bundles, UserError`. A name is imported when it is first used, so a plugin's module
imports no torch. Some names are modules: all of their names without an underscore are public too, by their module, as
`bundles.Kernel`. docs/public-surface.md lists them, and says what may change in which version.
"""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core import bundles, dsl, events, hookimpl
    from surogate_core.batch import IGNORE_LABEL, WEIGHTS, BatchCounts, MicroBatch
    from surogate_core.bundles.reinforcement.advantages import advantages
    from surogate_core.cli.main import main as surogate
    from surogate_core.config.resolve import load_run_config
    from surogate_core.config.sharing import axes
    from surogate_core.data import fields
    from surogate_core.data.encoded import EncodeContext, Encoded, Group, RowError
    from surogate_core.data.pipeline import PreparedData
    from surogate_core.data.referenced import REFERENCE, ReferencedTask
    from surogate_core.data.sampler import PackedTask, collate
    from surogate_core.data.shards import PackedRows, Row
    from surogate_core.dsl import decoder
    from surogate_core.engine.ranks.side_streams import SideStream, flat_bytes, is_dense
    from surogate_core.errors import (
        ConfigError,
        MachineError,
        PluginError,
        Problem,
        SurogateError,
        UserError,
        printable,
    )
    from surogate_core.files import atomic
    from surogate_core.files.metrics import METRICS, MetricsWriter, read_metrics
    from surogate_core.files.paths import cache_root, is_hub_id, resolve_package_path
    from surogate_core.files.records import read_run
    from surogate_core.files.runs import latest_run, run_directory
    from surogate_core.files.tensorfile import TensorFile, write_tensors
    from surogate_core.formats import adamw_8bit, fp4, fp8, fp8_rows, nvfp4
    from surogate_core.hf.card import CardFacts
    from surogate_core.hf.export import export_adapter
    from surogate_core.hf.weights import ModelDir, locate
    from surogate_core.inference import second_model
    from surogate_core.kernels import ops
    from surogate_core.numbers import count, significant
    from surogate_core.plugin import compute, encoding, inference, launching
    from surogate_core.plugins import import_policy, load_plugins
    from surogate_core.plugins.functions import load_function, mistake
    from surogate_core.run.notes import TOKENS_PER_PARAMETER, token_budget
    from surogate_core.tools import rules
    from surogate_core.train import trackers
    from surogate_core.train.checkpoint import CheckpointDir
    from surogate_core.train.loop import most_steps, total_steps
    from surogate_core.train.lr import warmup_length

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
