"""From rows to tokens: chats and templates, answers, labels, groups of documents, sources and the cache."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.data.cache import CacheEntry as CacheEntry
    from surogate_core.data.cache import DataCache as DataCache
    from surogate_core.data.cache import digest_of as digest_of
    from surogate_core.data.packing import PackSettings as PackSettings
    from surogate_core.data.packing import cut_group as cut_group
    from surogate_core.data.rows.sources import SourceSpec as SourceSpec
    from surogate_core.data.rows.sources import open_source as open_source
    from surogate_core.data.text.answers import Messages as Messages
    from surogate_core.data.text.answers import check_answer as check_answer
    from surogate_core.data.text.answers import encode_answer as encode_answer
    from surogate_core.data.text.answers import text_or_messages as text_or_messages
    from surogate_core.data.text.calls import CallError as CallError
    from surogate_core.data.text.calls import template_call as template_call
    from surogate_core.data.text.chat import GUARD as GUARD
    from surogate_core.data.text.chat import Chat as Chat
    from surogate_core.data.text.chat import chat_of as chat_of
    from surogate_core.data.text.chat import encode_text as encode_text
    from surogate_core.data.text.chat import with_default_system as with_default_system
    from surogate_core.data.text.labels import Override as Override
    from surogate_core.data.text.labels import tokenize_completion as tokenize_completion
    from surogate_core.data.text.labels import tokenize_conversation as tokenize_conversation
    from surogate_core.data.text.tokenizer import turn_end_id as turn_end_id
    from surogate_core.data.text.whole_text import encode_whole as encode_whole
    from surogate_core.files.prompts import read_rows as read_rows

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
