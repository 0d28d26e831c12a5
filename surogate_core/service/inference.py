"""Inference: opening models, adapters, texts, constraints and tool calls."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.generate.constraints import Grammars, grammars_of
    from surogate_core.generate.losses import DocumentSums, documents_of
    from surogate_core.generate.weights import Weights
    from surogate_core.inference import texts
    from surogate_core.inference.completions import token_bytes
    from surogate_core.inference.generation import (
        Named,
        named,
        on_its_base,
        placed,
        prepare,
        quantised_note,
        rollout_of,
        with_adapter,
    )
    from surogate_core.inference.texts import (
        counted,
        generate_texts,
        memory_notes,
        prompt_of_messages,
        prompt_of_row,
        prompt_of_text,
        requests_of,
        settings_of,
        stop_token,
        unanswered,
        usual_slots,
        warm_up,
    )
    from surogate_core.inference.tool_calls import Calling, OneCall, calling, tag_ids
    from surogate_core.tools.checks import MOST_TOOLS, ToolError, check_tools, read_tools
    from surogate_core.tools.choosing import check_parser, core_parsers, parser_of
    from surogate_core.tools.reading import Call, CallReader, Delta

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
