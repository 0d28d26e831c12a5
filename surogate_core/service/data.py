"""Data sets: their files, tokenizing, preparation and batches."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.data import pipeline
    from surogate_core.data.contract import fault_of
    from surogate_core.data.encoded import members
    from surogate_core.data.entries import parse_entries
    from surogate_core.data.pipeline import prepare
    from surogate_core.data.referenced import References
    from surogate_core.data.rows.files import FileKind, kind_of, list_directory
    from surogate_core.data.sampler import EvalBatches, epoch_order
    from surogate_core.data.templates import TURN_ENDS, template_text
    from surogate_core.data.text import clock
    from surogate_core.data.text.calls import text_of_call
    from surogate_core.data.text.tokenizer import check_vocabulary, load_tokenizer

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
