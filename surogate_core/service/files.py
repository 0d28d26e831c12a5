"""Files: runs and their records, models, adapters and exports in Hugging Face formats."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.files.evaluations import EVALUATIONS as EVALUATIONS
    from surogate_core.files.evaluations import add_evaluations as add_evaluations
    from surogate_core.files.figures import TRAIN_TIME as TRAIN_TIME
    from surogate_core.files.foreign import read_json as read_json
    from surogate_core.files.hub import split_revision as split_revision
    from surogate_core.files.loads import Column as Column
    from surogate_core.files.loads import Loads as Loads
    from surogate_core.files.loads import loads as loads
    from surogate_core.files.metrics import as_number as as_number
    from surogate_core.files.metrics import json_line as json_line
    from surogate_core.files.metrics import parsed as parsed
    from surogate_core.files.paths import PACKAGE_SCHEME as PACKAGE_SCHEME
    from surogate_core.files.paths import resolve_package_path as resolve_package_path
    from surogate_core.files.private import private as private
    from surogate_core.files.prompts import fault_of as fault_of
    from surogate_core.files.prompts import parsed_line as parsed_line
    from surogate_core.files.prompts import prompt_rows as prompt_rows
    from surogate_core.files.prompts import read_prompts as read_prompts
    from surogate_core.files.prompts import some_prompts as some_prompts
    from surogate_core.files.records import COMPLETIONS as COMPLETIONS
    from surogate_core.files.records import RunRecord as RunRecord
    from surogate_core.files.records import find_runs as find_runs
    from surogate_core.files.records import metrics_path as metrics_path
    from surogate_core.files.run_lock import is_running as is_running
    from surogate_core.files.runs import config_of_run as config_of_run
    from surogate_core.hf import lora_files as lora_files
    from surogate_core.hf.card import config_overrides as config_overrides
    from surogate_core.hf.card import without_places as without_places
    from surogate_core.hf.contents import contents_of as contents_of
    from surogate_core.hf.contents import digest_cache as digest_cache
    from surogate_core.hf.export import check_place as check_place
    from surogate_core.hf.export import export_full as export_full
    from surogate_core.hf.export import exported_facts as exported_facts
    from surogate_core.hf.export import generation_of as generation_of
    from surogate_core.hf.fused import rejoined as rejoined
    from surogate_core.hf.lora_files import CONFIG as CONFIG
    from surogate_core.hf.lora_files import MARKER as MARKER
    from surogate_core.hf.lora_files import LoraAdapter as LoraAdapter
    from surogate_core.hf.lora_files import fold as fold
    from surogate_core.hf.text_part import PLACE as PLACE
    from surogate_core.hf.text_part import Whole as Whole
    from surogate_core.hf.text_part import text_config as text_config
    from surogate_core.hf.text_part import text_part as text_part
    from surogate_core.hf.tokenizer_files import TokenizerFiles as TokenizerFiles
    from surogate_core.hf.weights import TIED as TIED
    from surogate_core.hf.weights import generation_config_in as generation_config_in

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
