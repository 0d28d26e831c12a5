"""Inference: opening models, adapters, texts, constraints and tool calls."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.generate.constraints import Grammars as Grammars
    from surogate_core.generate.constraints import grammars_of as grammars_of
    from surogate_core.generate.losses import DocumentSums as DocumentSums
    from surogate_core.generate.losses import documents_of as documents_of
    from surogate_core.generate.weights import Weights as Weights
    from surogate_core.inference import texts as texts
    from surogate_core.inference.completions import token_bytes as token_bytes
    from surogate_core.inference.generation import Named as Named
    from surogate_core.inference.generation import named as named
    from surogate_core.inference.generation import on_its_base as on_its_base
    from surogate_core.inference.generation import placed as placed
    from surogate_core.inference.generation import prepare as prepare
    from surogate_core.inference.generation import quantised_note as quantised_note
    from surogate_core.inference.generation import rollout_of as rollout_of
    from surogate_core.inference.generation import with_adapter as with_adapter
    from surogate_core.inference.texts import counted as counted
    from surogate_core.inference.texts import generate_texts as generate_texts
    from surogate_core.inference.texts import memory_notes as memory_notes
    from surogate_core.inference.texts import prompt_of_messages as prompt_of_messages
    from surogate_core.inference.texts import prompt_of_row as prompt_of_row
    from surogate_core.inference.texts import prompt_of_text as prompt_of_text
    from surogate_core.inference.texts import requests_of as requests_of
    from surogate_core.inference.texts import settings_of as settings_of
    from surogate_core.inference.texts import stop_token as stop_token
    from surogate_core.inference.texts import unanswered as unanswered
    from surogate_core.inference.texts import usual_slots as usual_slots
    from surogate_core.inference.texts import warm_up as warm_up
    from surogate_core.inference.tool_calls import Calling as Calling
    from surogate_core.inference.tool_calls import OneCall as OneCall
    from surogate_core.inference.tool_calls import calling as calling
    from surogate_core.inference.tool_calls import tag_ids as tag_ids
    from surogate_core.tools.checks import MOST_TOOLS as MOST_TOOLS
    from surogate_core.tools.checks import ToolError as ToolError
    from surogate_core.tools.checks import check_tools as check_tools
    from surogate_core.tools.checks import read_tools as read_tools
    from surogate_core.tools.choosing import check_parser as check_parser
    from surogate_core.tools.choosing import core_parsers as core_parsers
    from surogate_core.tools.choosing import parser_of as parser_of
    from surogate_core.tools.reading import Call as Call
    from surogate_core.tools.reading import CallReader as CallReader
    from surogate_core.tools.reading import Delta as Delta

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
