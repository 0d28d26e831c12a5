"""Type `instruction`: a request and its output in fields of their own; the output is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from surogate_core.plugin import UserError, bundles, encoding, fields
from surogate_dataset_instruction import prompts

if TYPE_CHECKING:
    from surogate_core.plugin import EncodeContext, Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionOptions:
    """Fields of a data set of type `instruction`."""

    instruction_field: str | None = None
    """Field of the row that holds the instruction; null: `instruction`, `prompt`, `question` or `query`."""
    output_field: str | None = None
    """Field that holds the output, which is trained; null: `output`, `response`, `completion` or `answer`."""
    input_field: str | None = None
    """Field that holds the instruction's input, which may be empty; null: none if `instruction_field` is set, otherwise
    `input` or `context`.
    """
    system_prompt_type: Literal["field", "fixed"] | None = None
    """Source of the system prompt: a field of the row, or `system_prompt`; null is no system prompt."""
    system_prompt_field: str | None = None
    """Field that holds the system prompt; a row in which it is empty has none."""
    system_prompt: str | None = None
    """The system prompt of every row."""
    prompt_format: str | None = None
    """The prompt, with {system}, {instruction}, {input}; null: the tokenizer's chat template, or Alpaca's format if it
    has none.
    """
    prompt_format_no_input: str | None = None
    """The prompt of rows without an input; null: `prompt_format` with nothing for {input}."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for fields that contradict each other."""
        for kind, name in (("field", "system_prompt_field"), ("fixed", "system_prompt")):
            if (self.system_prompt_type == kind) != (getattr(self, name) is not None):
                raise ValueError(f"system_prompt_type: {kind} and {name} go together")
        has_system = self.system_prompt_type is not None
        if self.prompt_format is not None:
            has_input = self.input_field is not None
            if self.instruction_field is None:
                has_input = has_input or "{input}" in self.prompt_format
            prompts.check_format("prompt_format", self.prompt_format, has_input=has_input, has_system=has_system)
        if self.prompt_format_no_input is not None:
            if self.prompt_format is None:
                raise ValueError("prompt_format_no_input needs prompt_format")
            prompts.check_format(
                "prompt_format_no_input", self.prompt_format_no_input, has_input=False, has_system=has_system
            )


def columns(options: InstructionOptions) -> set[str]:
    """The fields of a row that are read."""
    named = (options.instruction_field, options.output_field, options.input_field, options.system_prompt_field)
    found = {name for name in named if name is not None}
    if options.instruction_field is None:
        found.update(fields.INSTRUCTIONS, () if options.input_field else fields.INPUTS)
    return found if options.output_field else found.union(fields.OUTPUTS)


def encode(row: Mapping[str, Any], options: InstructionOptions, context: EncodeContext) -> Encoded:
    """The prompt and the output; the output and the token that ends it are trained.

    Raises `RowError` when a field is missing, not a string or empty, or the chat template does
    not take the row.
    """
    from surogate_core.plugin import Encoded

    instruction = _text(row, options.instruction_field, fields.INSTRUCTIONS)
    output = _text(row, options.output_field, fields.OUTPUTS)
    field = options.input_field
    if field is None and options.instruction_field is None:
        field = fields.first_with_text(row, fields.INPUTS)
    given = fields.optional_text(row, field)
    system = options.system_prompt or fields.optional_text(row, options.system_prompt_field)
    if options.prompt_format is None and _has_template(context):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
        messages.append({"role": "assistant", "content": output})
        encoding.with_default_system(messages, context)
        return encoding.tokenize_conversation(context.tokenizer, messages, loss_scale=context.loss_scale)
    if context.system and not system:
        system = context.system
        for name in ("prompt_format", "prompt_format_no_input"):
            text = getattr(options, name)
            if text is not None and "{system}" not in text:
                raise UserError(
                    f"`system` is set, but {name} has no {{system}}, so it would be lost. "
                    f"Fix: write {{system}} into {name}, or system: null."
                )
    prompt = _prompt(options, instruction, given, system)
    document = encoding.tokenize_completion(context.tokenizer, prompt, output)
    return Encoded.from_mask(document.input_ids) if context.loss_scale == "all" else document


def _has_template(context: EncodeContext) -> bool:
    return context.use_chat_template and bool(context.tokenizer.chat_template)


def note(options: InstructionOptions, context: EncodeContext) -> str:
    """That Alpaca's prompt is written around the rows, if it is."""
    if options.prompt_format is not None or _has_template(context):
        return ""
    reason = "the tokenizer has no chat template" if context.use_chat_template else "use_chat_template is false"
    wish = "template: chatml or another" if context.use_chat_template else "use_chat_template: true"
    return (
        f"{reason}, so each row is written into Alpaca's English prompt ({prompts.ALPACA_SYSTEM_NO_INPUT!r} …). "
        f"To change that, set {wish}, or prompt_format: '{{instruction}}' for nothing around the instruction."
    )


def _text(row: Mapping[str, Any], field: str | None, names: tuple[str, ...]) -> str:
    """The text of a field, or of the first of the usual names if none is set. Raises `RowError` where there is none."""
    return fields.required_text(
        row, field or fields.first_with_text(row, names) or next((n for n in names if n in row), names[0])
    )


def _prompt(options: InstructionOptions, instruction: str, given: str, system: str) -> str:
    text, no_input = options.prompt_format, options.prompt_format_no_input
    if text is None:
        text, no_input = prompts.ALPACA, prompts.ALPACA_NO_INPUT
        system = system or (prompts.ALPACA_SYSTEM if given else prompts.ALPACA_SYSTEM_NO_INPUT)
    if not given and no_input is not None:
        text = no_input
    return prompts.fill(text, {"system": system, "instruction": instruction, "input": given})


_FIELDS = {"instruction_field": "instruction", "output_field": "output"}

FORMAT = bundles.DatasetFormat(
    name="instruction",
    options=InstructionOptions,
    encode=encode,
    columns=columns,
    note=note,
    version=3,
    examples=(
        ({"prompt": "Add.", "completion": "3"}, {}),
        ({"instruction": "Add.", "output": "3"}, _FIELDS),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, {**_FIELDS, "input_field": "input"}),
    ),
)
