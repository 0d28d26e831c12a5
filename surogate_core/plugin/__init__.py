"""What a plugin may import of the core: these names, at most 100, and nothing else.

`from surogate_core.plugin import bundles, UserError`. A name is imported when it is first used, so a plugin's module
imports no torch. Some names are modules: all of their names without an underscore are public too, by their module, as
`bundles.Kernel`. docs/public-surface.md lists them, and says what may change in which version.
"""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core import bundles as bundles
    from surogate_core import dsl as dsl
    from surogate_core import events as events
    from surogate_core import hookimpl as hookimpl
    from surogate_core.batch import IGNORE_LABEL as IGNORE_LABEL
    from surogate_core.batch import WEIGHTS as WEIGHTS
    from surogate_core.batch import BatchCounts as BatchCounts
    from surogate_core.batch import MicroBatch as MicroBatch
    from surogate_core.bundles.reinforcement.advantages import advantages as advantages
    from surogate_core.cli.main import surogate as surogate
    from surogate_core.config.resolve import load_run_config as load_run_config
    from surogate_core.config.sharing import axes as axes
    from surogate_core.data import fields as fields
    from surogate_core.data.encoded import EncodeContext as EncodeContext
    from surogate_core.data.encoded import Encoded as Encoded
    from surogate_core.data.encoded import Group as Group
    from surogate_core.data.encoded import RowError as RowError
    from surogate_core.data.pipeline import PreparedData as PreparedData
    from surogate_core.data.referenced import REFERENCE as REFERENCE
    from surogate_core.data.referenced import ReferencedTask as ReferencedTask
    from surogate_core.data.sampler import PackedTask as PackedTask
    from surogate_core.data.sampler import collate as collate
    from surogate_core.data.shards import PackedRows as PackedRows
    from surogate_core.data.shards import Row as Row
    from surogate_core.dsl import decoder as decoder
    from surogate_core.engine.ranks.side_streams import SideStream as SideStream
    from surogate_core.engine.ranks.side_streams import flat_bytes as flat_bytes
    from surogate_core.engine.ranks.side_streams import is_dense as is_dense
    from surogate_core.errors import ConfigError as ConfigError
    from surogate_core.errors import MachineError as MachineError
    from surogate_core.errors import PluginError as PluginError
    from surogate_core.errors import Problem as Problem
    from surogate_core.errors import SurogateError as SurogateError
    from surogate_core.errors import UserError as UserError
    from surogate_core.errors import printable as printable
    from surogate_core.files import atomic as atomic
    from surogate_core.files.metrics import METRICS as METRICS
    from surogate_core.files.metrics import MetricsWriter as MetricsWriter
    from surogate_core.files.metrics import read_metrics as read_metrics
    from surogate_core.files.paths import cache_root as cache_root
    from surogate_core.files.paths import is_hub_id as is_hub_id
    from surogate_core.files.paths import resolve_package_path as resolve_package_path
    from surogate_core.files.records import read_run as read_run
    from surogate_core.files.runs import latest_run as latest_run
    from surogate_core.files.runs import run_directory as run_directory
    from surogate_core.files.tensorfile import TensorFile as TensorFile
    from surogate_core.files.tensorfile import write_tensors as write_tensors
    from surogate_core.formats import adamw_8bit as adamw_8bit
    from surogate_core.formats import fp4 as fp4
    from surogate_core.formats import fp8 as fp8
    from surogate_core.formats import fp8_rows as fp8_rows
    from surogate_core.formats import nvfp4 as nvfp4
    from surogate_core.hf.card import CardFacts as CardFacts
    from surogate_core.hf.export import export_adapter as export_adapter
    from surogate_core.hf.weights import ModelDir as ModelDir
    from surogate_core.hf.weights import locate as locate
    from surogate_core.inference import second_model as second_model
    from surogate_core.kernels import ops as ops
    from surogate_core.numbers import count as count
    from surogate_core.numbers import significant as significant
    from surogate_core.plugin import compute as compute
    from surogate_core.plugin import encoding as encoding
    from surogate_core.plugin import inference as inference
    from surogate_core.plugin import launching as launching
    from surogate_core.plugins import import_policy as import_policy
    from surogate_core.plugins import load_plugins as load_plugins
    from surogate_core.plugins.functions import load_function as load_function
    from surogate_core.plugins.functions import mistake as mistake
    from surogate_core.run.notes import TOKENS_PER_PARAMETER as TOKENS_PER_PARAMETER
    from surogate_core.run.notes import token_budget as token_budget
    from surogate_core.tools import rules as rules
    from surogate_core.train import trackers as trackers
    from surogate_core.train.checkpoint import CheckpointDir as CheckpointDir
    from surogate_core.train.loop import most_steps as most_steps
    from surogate_core.train.loop import total_steps as total_steps
    from surogate_core.train.lr import warmup_length as warmup_length

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
