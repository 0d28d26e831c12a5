"""The embedded tokenizer with chat templates in the shapes that users bring; for the tests of data set formats."""

from __future__ import annotations

import re
from functools import cache

from surogate_dataset_chat import EMBEDDED_TOKENIZER
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import AddedToken

from surogate_core.data.templates import TURN_ENDS, template_text
from surogate_core.data.tokenizer import load_tokenizer

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML in one line, which leaves tools out."""

CHATML_MARKED_INSIDE = CHATML.replace(
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
    "{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content }}{% endgeneration %}{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}",
)
"""Generation markers that leave the end-of-turn token out."""

MISTRAL_PAIRS = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}"
    "{%- endfor %}"
)
"""No header before an assistant's turn, so no generation prompt; refuses system turns."""

UNPROMPTED = CHATML.partition("{%- if add_generation_prompt")[0]
"""A header before each turn, and yet no generation prompt."""


def unmarked(template: str) -> str:
    """The template without its generation blocks."""
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


SHIPPED = tuple(TURN_ENDS)
TEMPLATES = {
    "chatml-short": CHATML,
    "chatml-marked-inside": CHATML_MARKED_INSIDE,
    "mistral-pairs": MISTRAL_PAIRS,
    "unprompted": UNPROMPTED,
    # As Phi-3 has it: the end of the text is written behind the last turn.
    "phi-closed": unmarked(template_text("phi")).rstrip().removesuffix("{%- endif %}").rstrip()
    + "{%- else %}{{- eos_token }}{%- endif %}",
    **{name: unmarked(template_text(name)) for name in SHIPPED},
    **{f"{name}-marked": template_text(name) for name in SHIPPED},
}
ENDS = {**TURN_ENDS, "mistral": "</s>", "phi-closed": "<|end|>"}

SPECIAL = """
<|start_header_id|> <|end_header_id|> <|eot_id|> <s> </s>
[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
<start_of_turn> <end_of_turn> <|system|> <|user|> <|assistant|> <|end|> <|im_sep|>
""".split()  # noqa: SIM905


@cache
def templated(name: str) -> tuple[PreTrainedTokenizerBase, str]:
    """The embedded tokenizer with another template, and the token that ends a turn.

    "embedded" is its own template, "none" takes it away.
    """
    tokenizer = load_tokenizer(EMBEDDED_TOKENIZER)
    if name == "embedded":
        return tokenizer, "<|im_end|>"
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL], special_tokens=True)
    # As in Qwen3: these are tokens, but no control tokens.
    tokenizer.add_tokens([AddedToken(token) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer.bos_token = "<s>"
    end = ENDS.get(name) or ENDS.get(name.partition("-")[0]) or "<|im_end|>"
    tokenizer.eos_token = "<|endoftext|>" if name == "phi-closed" else end
    tokenizer.chat_template = TEMPLATES.get(name)
    return tokenizer, end
