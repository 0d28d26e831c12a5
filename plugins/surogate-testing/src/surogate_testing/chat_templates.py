"""A tokenizer with chat templates like those of users, for the tests of data set formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surogate_core.service.data import TURN_ENDS, template_text

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML in one line, which drops tools."""

CHATML_MARKED_INSIDE = CHATML.replace(
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
    "{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content }}{% endgeneration %}{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}",
)
"""Generation markers that exclude the end-of-turn token."""

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
    # Like Phi-3: the end-of-text token follows the last turn.
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


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of single bytes with ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


@cache
def templated(
    name: str, make: Callable[[], PreTrainedTokenizerBase] = byte_tokenizer
) -> tuple[PreTrainedTokenizerBase, str]:
    """A tokenizer of `make` with the template of that name, and the token that ends a turn.

    "own" leaves the tokenizer its own template, which ends turns with ``<|im_end|>``; "none" takes it away.
    """
    tokenizer = make()
    if name == "own":
        return tokenizer, "<|im_end|>"
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL], special_tokens=True)
    # As in Qwen3: these are tokens, but no control tokens.
    tokenizer.add_tokens([AddedToken(token) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer.bos_token = "<s>"
    end = ENDS.get(name) or ENDS.get(name.partition("-")[0]) or "<|im_end|>"
    tokenizer.eos_token = "<|endoftext|>" if name == "phi-closed" else end
    tokenizer.chat_template = TEMPLATES.get(name)
    return tokenizer, end
