"""Set-up: from a configuration to models, recipes, engines and runs."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.run.identity import identity_of
    from surogate_core.run.job import launch
    from surogate_core.run.record import locked
    from surogate_core.run.reference import add_references, policy_of
    from surogate_core.run.samples import cache_note, without_values
    from surogate_core.setup.assemble import (
        ResolvedModel,
        is_out_of_memory,
        resolve_device,
        resolve_lora,
        resolve_model,
        resolve_offloader,
        resolve_recipe,
        resolve_weight_format,
    )
    from surogate_core.setup.build import MARGIN, MemorySettings, build_engine, free_memory
    from surogate_core.setup.experts import adapted_note, product_notes
    from surogate_core.setup.fitting import assembly_of, out_of_memory, placed, settled_for
    from surogate_core.setup.heads import read_head_of
    from surogate_core.setup.links import check_planned
    from surogate_core.setup.ranks import on_one_gpu, reduction_notes, tokens_per_step
    from surogate_core.setup.router import router_notes
    from surogate_core.setup.task_spec import objective_of, task_spec
    from surogate_core.setup.tokenizer_of_run import record_in, recorded, tokenizer_of_run
    from surogate_core.setup.trained import later_checkpoint, named_base, open_trained, own_base

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
