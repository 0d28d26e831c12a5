"""Data sets: their files, tokenizing, preparation and batches."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.data import pipeline as pipeline
    from surogate_core.data.contract import fault_of as fault_of
    from surogate_core.data.encoded import members as members
    from surogate_core.data.entries import parse_entries as parse_entries
    from surogate_core.data.pipeline import prepare as prepare
    from surogate_core.data.referenced import References as References
    from surogate_core.data.rows.files import FileKind as FileKind
    from surogate_core.data.rows.files import kind_of as kind_of
    from surogate_core.data.rows.files import list_directory as list_directory
    from surogate_core.data.sampler import EvalBatches as EvalBatches
    from surogate_core.data.sampler import epoch_order as epoch_order
    from surogate_core.data.templates import TURN_ENDS as TURN_ENDS
    from surogate_core.data.templates import template_text as template_text
    from surogate_core.data.text import clock as clock
    from surogate_core.data.text.calls import text_of_call as text_of_call
    from surogate_core.data.text.tokenizer import check_vocabulary as check_vocabulary
    from surogate_core.data.text.tokenizer import load_tokenizer as load_tokenizer

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
