"""From rows to tokens: chats and templates, answers, labels, groups of documents, sources and the cache."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.data.cache import CacheEntry, DataCache, digest_of
    from surogate_core.data.packing import PackSettings, cut_group
    from surogate_core.data.rows.sources import SourceSpec, open_source
    from surogate_core.data.text.answers import Messages, check_answer, encode_answer, text_or_messages
    from surogate_core.data.text.calls import CallError, template_call
    from surogate_core.data.text.chat import GUARD, Chat, chat_of, encode_text, with_default_system
    from surogate_core.data.text.labels import Override, tokenize_completion, tokenize_conversation
    from surogate_core.data.text.tokenizer import turn_end_id
    from surogate_core.data.text.whole_text import encode_whole
    from surogate_core.files.prompts import read_rows

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
