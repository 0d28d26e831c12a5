"""Renderers by the name of a chat template."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
from surogate_task_grpo.conversation import Renderer

from surogate_testing import chat_templates


@pytest.fixture(scope="session")
def renderer_of() -> Callable[..., Renderer]:
    """A renderer by the name of a chat template, or by a template of one's own."""

    def make(name: str, *, template: str | None = None, stops: Sequence[str] = ()) -> Renderer:
        tokenizer, end = chat_templates.templated(name)
        if template is not None:
            tokenizer = copy.deepcopy(tokenizer)  # other tests share it
            tokenizer.chat_template = template
        ids = {tokenizer.convert_tokens_to_ids(token) for token in (end, *stops)}
        return Renderer(tokenizer, templated=True, system=None, stop_ids=frozenset(ids))

    return make
