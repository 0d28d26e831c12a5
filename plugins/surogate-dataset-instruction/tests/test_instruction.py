"""The format `instruction`: prompts by templates and by formats; the output and its end are trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surogate_dataset_instruction as plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from surogate_dataset_instruction.instruction import InstructionOptions

from surogate_core.plugin import IGNORE_LABEL, ConfigError, EncodeContext, Encoded, RowError, UserError
from surogate_core.service.config import RunConfig
from surogate_core.service.data import parse_entries, prepare

FORMAT: Any = plugin.surogate_dataset()
FIELDS = {"instruction_field": "instruction", "output_field": "output"}
ROW = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."}
SYSTEM = {"system_prompt_type": "field", "system_prompt_field": "system"}


def encoded(tokenizer: Any, row: Any, **options: Any) -> Any:
    context = EncodeContext(tokenizer=tokenizer, sequence_len=64)
    return FORMAT.encode(row, InstructionOptions(**{**FIELDS, **options}), context)


def split(tokenizer: Any, row: Any, **options: Any) -> tuple[str, str]:
    """The decoded tokens that are not trained, and those that are."""
    document = encoded(tokenizer, row, **options)
    mask = document.labels != IGNORE_LABEL
    assert (document.labels[mask] == document.input_ids[mask]).all()
    return tokenizer.decode(document.input_ids[~mask]), tokenizer.decode(document.input_ids[mask])


PROMPTS = {
    "own": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAdd.\n\n1 2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
PROMPTS |= dict.fromkeys(("chatml", "chatml-marked-inside", "qwen3"), PROMPTS["own"])


@pytest.mark.parametrize("name", PROMPTS)
def test_the_chat_template_renders_the_row(templated: Callable[..., Any], name: str) -> None:
    tokenizer, end = templated(name)
    prompt, trained = split(tokenizer, ROW, input_field="input", **SYSTEM)
    after = "" if name == "llama3" else "\n"
    assert prompt == PROMPTS[name] + after
    assert trained == ("<think>\n\n</think>\n\n" if name == "qwen3" else "") + f"3{end}"


def test_mistral_has_no_system_turn(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("mistral-pairs")
    assert split(tokenizer, ROW) == ("<s>[INST] Add. [/INST] ", f"3{end}")
    with pytest.raises(RowError, match="Only user and assistant roles"):
        encoded(tokenizer, ROW, **SYSTEM)


def test_a_fixed_system_prompt(templated: Callable[..., Any]) -> None:
    tokenizer, _ = templated("own")
    fixed = encoded(tokenizer, ROW, system_prompt_type="fixed", system_prompt="Be brief.")
    assert fixed.input_ids.tolist() == encoded(tokenizer, ROW, **SYSTEM).input_ids.tolist()


@pytest.mark.parametrize("empty", ["", " \n", None])
def test_rows_without_input_and_system_prompt(templated: Callable[..., Any], empty: Any) -> None:
    tokenizer, _ = templated("own")
    row = {**ROW, "input": empty, "system": empty}
    assert encoded(tokenizer, row, input_field="input", **SYSTEM).input_ids.tolist() == (
        encoded(tokenizer, ROW).input_ids.tolist()
    )


def test_alpaca_serves_a_tokenizer_without_a_template(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("none")
    assert split(tokenizer, ROW, input_field="input") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n",
        f"3{end}",
    )
    assert split(tokenizer, ROW) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:\n",
        f"3{end}",
    )
    assert split(tokenizer, ROW, **SYSTEM)[0] == "Be brief.\n\n### Instruction:\nAdd.\n\n### Response:\n"


def test_formats_are_used_although_there_is_a_template(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("own")
    formats = {
        "prompt_format": "Q {instruction} ({input})\nA:{output}",
        "prompt_format_no_input": "Q {instruction}\nA:",
    }
    options = {"input_field": "input", **formats}
    assert split(tokenizer, ROW, **options) == ("Q Add. (1 2)\nA:", f"3{end}")
    assert split(tokenizer, {**ROW, "input": None}, **options) == ("Q Add.\nA:", f"3{end}")
    del options["prompt_format_no_input"]
    assert split(tokenizer, {**ROW, "input": None}, **options) == ("Q Add. ()\nA:", f"3{end}")
    row = {"instruction": "{output} {x}", "output": "{input}"}
    assert split(tokenizer, row, prompt_format="{instruction}\n") == ("{output} {x}\n", "{input}" + end)


def test_the_systems_prompt_needs_a_place_in_every_format(templated: Callable[..., Any]) -> None:
    context = EncodeContext(tokenizer=templated("own")[0], sequence_len=64, system="Be kind.")
    formats = {"prompt_format": "{system} {instruction} {input}:", "prompt_format_no_input": "{instruction}:"}
    options = InstructionOptions(**FIELDS, input_field="input", **formats)
    for row in (ROW, {**ROW, "input": ""}):
        with pytest.raises(UserError, match=r"prompt_format_no_input has no \{system\}, so it would be lost"):
            FORMAT.encode(row, options, context)


def test_special_tokens_are_not_doubled(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("llama3")
    for prompt_format in ("{instruction}:", "<s>{instruction}:"):
        document = encoded(tokenizer, {**ROW, "output": f"3{end}"}, prompt_format=prompt_format)
        assert document.input_ids.tolist().count(tokenizer.bos_token_id) == int("<s>" in prompt_format)
        assert document.input_ids.tolist().count(tokenizer.eos_token_id) == 1


TEXT = st.text(st.sampled_from("abc é\n.<|1漢😀{}"), min_size=1, max_size=12).filter(lambda t: t.strip() == t)
CASES = [
    ("own", None),
    ("chatml", None),
    ("chatml-marked-inside", None),
    ("llama3", None),
    ("none", None),
    ("own", "{system} {instruction} {input} "),
    ("none", "{instruction}\n{input} 漢{system}"),
]


@given(instruction=TEXT, given_=TEXT | st.none(), system=TEXT | st.none(), output=TEXT)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize(("name", "prompt_format"), CASES)
def test_trained_tokens_decode_to_the_output_and_its_end(
    templated: Callable[..., Any],
    name: str,
    prompt_format: Any,
    instruction: Any,
    given_: Any,
    system: Any,
    output: Any,
) -> None:
    tokenizer, end = templated(name)
    row = {"instruction": instruction, "input": given_, "output": output, "system": system}
    assert split(tokenizer, row, input_field="input", prompt_format=prompt_format, **SYSTEM)[1] == output + end


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "field 'instruction' is missing, the row has no fields"),
        ({"instructions": "x", "output": "y"}, "did you mean 'instructions'?"),
        ({**ROW, "instruction": None}, "field 'instruction' is null"),
        ({**ROW, "instruction": 3}, "field 'instruction' must be a string, this is int"),
        ({**ROW, "output": " "}, "field 'output' is empty"),
        ({**ROW, "output": ["3"]}, "field 'output' must be a string, this is list"),
        ({**ROW, "output": "\ud800"}, "half a surrogate pair"),
        ({**ROW, "input": 3}, "field 'input' must be a string, this is int"),
        ({**ROW, "system": {}}, "field 'system' must be a string, this is dict"),
        ({"instruction": "x", "inputs": "y", "output": "z", "system": ""}, "did you mean 'inputs'?"),
    ],
)
def test_bad_rows_have_a_reason(templated: Callable[..., Any], row: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        encoded(templated("own")[0], row, input_field="input", **SYSTEM)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"system_prompt_type": "field"}, "system_prompt_type: field and system_prompt_field go together"),
        ({"system_prompt": "x"}, "system_prompt_type: fixed and system_prompt go together"),
        ({**SYSTEM, "system_prompt": "x"}, "fixed and system_prompt go together"),
        ({"prompt_format_no_input": "{instruction}"}, "prompt_format_no_input needs prompt_format"),
        ({"prompt_format": "{instruction} {inptu}"}, "did you mean {input}?"),
        ({"prompt_format": "Q:"}, "prompt_format has no {instruction}"),
        ({"prompt_format": "{instruction}{output}\n"}, "only once and at its end"),
        ({"prompt_format": "{instruction}", "input_field": "input"}, "has no {input}, so input_field would be lost"),
        ({"prompt_format": "{instruction}{input}"}, "has {input} but is for rows without an input"),
        ({"prompt_format": "{instruction}", **SYSTEM}, "has no {system}, so the system prompt would be lost"),
    ],
)
def test_contradicting_fields_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_entries(
            [{"path": "x.jsonl", "type": "instruction", **FIELDS, **options}], {"instruction": FORMAT}, key="d"
        )
    assert reason in str(caught.value)


USUAL = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"prompt": "Add.", "context": "1 2", "completion": "3"},
    {"instruction": "Add.", "input": "1 2", "response": "3"},
    {"instruction": None, "question": "Add.", "input": "1 2", "output": "", "answer": "3"},
]


@pytest.mark.parametrize("row", USUAL)
def test_usual_names_of_fields_need_no_options(templated: Callable[..., Any], row: Any) -> None:
    context = EncodeContext(tokenizer=templated("own")[0], sequence_len=64)
    document = FORMAT.encode(row, InstructionOptions(), context)
    assert document.input_ids.tolist() == encoded(templated("own")[0], ROW, input_field="input").input_ids.tolist()
    assert {name for name, value in row.items() if value} <= FORMAT.columns(InstructionOptions())


def test_a_named_instruction_field_has_no_input_unless_that_is_named_too(templated: Callable[..., Any]) -> None:
    context = EncodeContext(tokenizer=templated("own")[0], sequence_len=64)
    document = FORMAT.encode(ROW, InstructionOptions(instruction_field="instruction"), context)
    assert document.input_ids.tolist() == encoded(templated("own")[0], ROW).input_ids.tolist()
    assert "input" not in FORMAT.columns(InstructionOptions(instruction_field="instruction"))


def test_a_row_without_any_usual_name_is_a_bad_row(templated: Callable[..., Any]) -> None:
    context = EncodeContext(tokenizer=templated("own")[0], sequence_len=64)
    with pytest.raises(RowError, match="field 'instruction' is missing, the row has 'a'"):
        FORMAT.encode({"a": "x"}, InstructionOptions(), context)
    with pytest.raises(RowError, match="field 'output' is missing"):
        FORMAT.encode({"prompt": "x"}, InstructionOptions(), context)


def test_the_configuration_reaches_instructions(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("own")

    def text(row: Any = ROW, options: Any = None, **keys: Any) -> str:
        context = EncodeContext(tokenizer=tokenizer, sequence_len=64, **keys)
        document = FORMAT.encode(row, InstructionOptions(**FIELDS, **(options or {})), context)
        return str(tokenizer.decode(document.input_ids))

    assert text(system="Be kind.").startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    own = {"system_prompt_type": "fixed", "system_prompt": "Be brief."}
    assert "kind" not in text(options=own, system="Be kind.")
    plain = text(use_chat_template=False)
    assert plain.startswith("Below is an instruction")
    assert plain.endswith(f"### Response:\n3{end}")
    assert text(use_chat_template=False, system="Be kind.").startswith("Be kind.\n\n### Instruction")
    with pytest.raises(UserError, match=r"prompt_format has no \{system\}.*Fix: write"):
        text(options={"prompt_format": "{instruction}"}, system="Be kind.")
    context = EncodeContext(tokenizer=tokenizer, sequence_len=64, loss_scale="all", use_chat_template=False)
    everything = FORMAT.encode(ROW, InstructionOptions(**FIELDS), context)
    assert everything.labels.tolist() == everything.input_ids.tolist()


JSON = (
    st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=8) | st.lists(st.text(), max_size=2)
)


@given(row=st.fixed_dictionaries({}, optional=dict.fromkeys(ROW, JSON)))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("name", ["own", "none"])
def test_any_row_is_encoded_or_has_a_reason(templated: Callable[..., Any], name: str, row: Any) -> None:
    try:
        document = encoded(templated(name)[0], row, input_field="input", **SYSTEM)
    except RowError:
        return
    assert isinstance(document, Encoded)


def test_a_file_of_rows_is_prepared(templated: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("instruction,input,output\nAdd.,1 2,3\nName Rome.,,Rome\n")
    entry = {"path": str(path), "type": "instruction", "input_field": "input", **FIELDS}
    keys: Any = {"sequence_len": 64, "data_cache_dir": str(tmp_path / "cache"), "validation_split_ratio": 0.0}
    data = prepare(RunConfig(datasets=[entry], **keys), templated("own")[0], {"instruction": FORMAT})
    assert data.report.train.documents == 2
    assert data.report.warnings == ()


def test_a_table_of_digits_is_text(templated: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("instruction,input,output\n12,007,19\n1,,NA\n2,null,3.0\n")
    entry = {"path": str(path), "type": "instruction", "input_field": "input", **FIELDS}
    keys: Any = {"sequence_len": 128, "data_cache_dir": str(tmp_path / "cache"), "validation_split_ratio": 0.0}
    tokenizer, _ = templated("own")
    data = prepare(RunConfig(datasets=[entry], **keys), tokenizer, {"instruction": FORMAT})
    assert data.report.bad_row_count == 0
    text = tokenizer.decode(data.train.row(0).input_ids)
    for part in ("12\n\n007<", "assistant\n19<", "user\n1<", "assistant\nNA<", "2\n\nnull<", "assistant\n3.0<"):
        assert part in text, part


def test_the_alpaca_prompt_is_said_before_the_run(templated: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Add 1 and 2.", "completion": "3"}\n' * 4)

    def notes(name: str, *, use: bool = True, length: int = 512, **fields: Any) -> tuple[str, ...]:
        config = RunConfig(
            datasets=[{"path": str(path), "type": "instruction", **fields}],
            data_cache_dir=str(tmp_path / "cache"),
            validation_split_ratio=0.0,
            use_chat_template=use,
            sequence_len=length,
        )
        return prepare(config, templated(name)[0], {"instruction": FORMAT}).report.notes

    assert notes("chatml") == ()
    assert notes("none", prompt_format="{instruction}\n") == ()
    for found, reason in ((notes("none"), "no chat template"), (notes("chatml", use=False), "use_chat_template is")):
        assert len(found) == 1
        assert found[0].startswith("datasets[0] (")
        assert reason in found[0]
        assert "Alpaca's English prompt" in found[0]

    with pytest.raises(UserError, match=r"none of the 4 documents fits .* Alpaca's English prompt .* Fix: raise it"):
        notes("none", length=8)
