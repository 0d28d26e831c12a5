"""Files: runs and their records, models, adapters and exports in Hugging Face formats."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.files.evaluations import EVALUATIONS, add_evaluations
    from surogate_core.files.figures import TRAIN_TIME
    from surogate_core.files.foreign import read_json
    from surogate_core.files.hub import split_revision
    from surogate_core.files.loads import Column, Loads, loads
    from surogate_core.files.metrics import as_number, json_line, parsed
    from surogate_core.files.paths import PACKAGE_SCHEME, resolve_package_path
    from surogate_core.files.private import private
    from surogate_core.files.prompts import fault_of, parsed_line, prompt_rows, read_prompts, some_prompts
    from surogate_core.files.records import COMPLETIONS, RunRecord, find_runs, metrics_path
    from surogate_core.files.run_lock import is_running
    from surogate_core.files.runs import config_of_run
    from surogate_core.hf import lora_files
    from surogate_core.hf.card import config_overrides, without_places
    from surogate_core.hf.contents import contents_of, digest_cache
    from surogate_core.hf.export import check_place, export_full, exported_facts, generation_of
    from surogate_core.hf.fused import rejoined
    from surogate_core.hf.lora_files import CONFIG, MARKER, LoraAdapter, fold
    from surogate_core.hf.text_part import PLACE, text_config, text_part
    from surogate_core.hf.tokenizer_files import TokenizerFiles
    from surogate_core.hf.weights import TIED, generation_config_in

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
