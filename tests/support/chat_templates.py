"""The embedded tokenizer with chat templates in the shapes that users bring; for the tests of data set formats."""

from __future__ import annotations

from functools import cache

from surogate_dataset_chat import EMBEDDED_TOKENIZER
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import AddedToken

from surogate_core.data.tokenizer import load_tokenizer

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""No generation markers."""

CHATML_MARKED_INSIDE = CHATML.replace(
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
    "{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content }}{% endgeneration %}{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}",
)
"""Generation markers that leave the end-of-turn token out."""

LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set text = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + text }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + text }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.name + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Thinking in the last turn only: what comes before a turn changes when turns follow."""

MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}"
    "{%- endfor %}"
)
"""No header before an assistant's turn, so no generation prompt; refuses system turns."""

TEMPLATES = {
    "chatml": CHATML,
    "chatml-marked-inside": CHATML_MARKED_INSIDE,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
}
ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>"}


@cache
def templated(name: str) -> tuple[PreTrainedTokenizerBase, str]:
    """The embedded tokenizer with another template, and the token that ends a turn.

    "embedded" is its own template, "none" takes it away.
    """
    tokenizer = load_tokenizer(EMBEDDED_TOKENIZER)
    if name == "embedded":
        return tokenizer, "<|im_end|>"
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"]
    tokenizer.add_tokens([AddedToken(t, special=True) for t in special], special_tokens=True)
    tokenizer.bos_token = "<s>"
    end = ENDS.get(name, "<|im_end|>")
    tokenizer.eos_token = end
    tokenizer.chat_template = TEMPLATES.get(name)
    return tokenizer, end
