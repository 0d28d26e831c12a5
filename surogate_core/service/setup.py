"""Set-up: from a configuration to models, recipes, engines and runs."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.engine.device_memory import free_memory as free_memory
    from surogate_core.run.identity import identity_of as identity_of
    from surogate_core.run.job import launch as launch
    from surogate_core.run.record import locked as locked
    from surogate_core.run.reference import add_references as add_references
    from surogate_core.run.reference import policy_of as policy_of
    from surogate_core.run.samples import cache_note as cache_note
    from surogate_core.setup.assemble import ResolvedModel as ResolvedModel
    from surogate_core.setup.assemble import is_out_of_memory as is_out_of_memory
    from surogate_core.setup.assemble import resolve_device as resolve_device
    from surogate_core.setup.assemble import resolve_lora as resolve_lora
    from surogate_core.setup.assemble import resolve_model as resolve_model
    from surogate_core.setup.assemble import resolve_offloader as resolve_offloader
    from surogate_core.setup.assemble import resolve_recipe as resolve_recipe
    from surogate_core.setup.assemble import resolve_weight_format as resolve_weight_format
    from surogate_core.setup.build import MARGIN as MARGIN
    from surogate_core.setup.build import MemorySettings as MemorySettings
    from surogate_core.setup.build import build_engine as build_engine
    from surogate_core.setup.counted import counted as counted
    from surogate_core.setup.experts import adapted_note as adapted_note
    from surogate_core.setup.experts import product_notes as product_notes
    from surogate_core.setup.fitting import assembly_of as assembly_of
    from surogate_core.setup.fitting import out_of_memory as out_of_memory
    from surogate_core.setup.fitting import placed as placed
    from surogate_core.setup.fitting import settled_for as settled_for
    from surogate_core.setup.heads import read_head_of as read_head_of
    from surogate_core.setup.kept import NotKeptError as NotKeptError
    from surogate_core.setup.kept import file_facts as file_facts
    from surogate_core.setup.kept import kept as kept
    from surogate_core.setup.links import check_planned as check_planned
    from surogate_core.setup.ranks import on_one_gpu as on_one_gpu
    from surogate_core.setup.ranks import reduction_notes as reduction_notes
    from surogate_core.setup.ranks import tokens_per_step as tokens_per_step
    from surogate_core.setup.router import router_notes as router_notes
    from surogate_core.setup.task_spec import objective_of as objective_of
    from surogate_core.setup.task_spec import task_spec as task_spec
    from surogate_core.setup.tokenizer_of_run import record_in as record_in
    from surogate_core.setup.tokenizer_of_run import recorded as recorded
    from surogate_core.setup.tokenizer_of_run import tokenizer_of_run as tokenizer_of_run
    from surogate_core.setup.trained import later_checkpoint as later_checkpoint
    from surogate_core.setup.trained import named_base as named_base
    from surogate_core.setup.trained import open_trained as open_trained
    from surogate_core.setup.trained import own_base as own_base

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
