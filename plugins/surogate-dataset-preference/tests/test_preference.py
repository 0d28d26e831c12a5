"""The format `preference`: texts and conversations become a chosen and a rejected document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surogate_dataset_preference as plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from surogate_dataset_preference.preference import PreferenceOptions

from surogate_core.plugin import IGNORE_LABEL, EncodeContext, RowError, UserError
from surogate_core.service.config import RunConfig
from surogate_core.service.data import prepare

FORMAT: Any = plugin.surogate_dataset()
ROW = {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}


def pair(tokenizer: Any, row: Any, *, context: Any = None, **options: Any) -> Any:
    around = EncodeContext(tokenizer=tokenizer, sequence_len=64, **(context or {}))
    return FORMAT.encode(row, PreferenceOptions(**options), around).documents


def split(tokenizer: Any, document: Any) -> tuple[str, str]:
    mask = document.labels != IGNORE_LABEL
    return tokenizer.decode(document.input_ids[~mask]), tokenizer.decode(document.input_ids[mask])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("own", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "\n"),
        (
            "llama3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "",
        ),
        ("none", "Hi", ""),
    ],
)
def test_both_answers_follow_the_prompt(templated: Callable[..., Any], name: str, before: str, after: str) -> None:
    tokenizer, end = templated(name)
    chosen, rejected = pair(tokenizer, ROW)
    assert split(tokenizer, chosen) == (before + after, f"Hello!{end}")
    assert split(tokenizer, rejected) == (before + after, f"Go away.{end}")


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello!"), ("assistant", "No."))
)
EARLIER = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, USER]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": [USER], "chosen": "Hello!", "rejected": "No."}, {}),
        ({"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])}, {}),
        ({"prompt": "Hi", "chosen": [{**USER, "name": None}, GOOD], "rejected": [USER, BAD]}, {"prompt_field": None}),
    ],
)
def test_conversations_and_texts_give_the_same_documents(templated: Callable[..., Any], row: Any, options: Any) -> None:
    tokenizer, _end = templated("chatml")
    plain = pair(tokenizer, {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."})
    for document, expected in zip(pair(tokenizer, row, **options), plain, strict=True):
        assert document.input_ids.tolist() == expected.input_ids.tolist()
        assert document.labels.tolist() == expected.labels.tolist()


def test_only_turns_of_the_answer_are_trained(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("chatml")
    for row in (
        {"prompt": EARLIER, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*EARLIER, GOOD], "rejected": [*EARLIER, BAD]},
    ):
        chosen, rejected = pair(tokenizer, row, context={"system": "Be brief."})
        assert [split(tokenizer, d)[1] for d in (chosen, rejected)] == [f"Hello!{end}", f"No.{end}"]
        assert "Be brief." in split(tokenizer, chosen)[0]
    several = [GOOD, USER, GOOD]
    chosen, rejected = pair(tokenizer, {"prompt": [USER], "chosen": several, "rejected": [BAD]})
    assert split(tokenizer, chosen)[1] == f"Hello!{end}Hello!{end}"


def test_two_texts_share_their_beginning_as_the_prompt(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("none")
    row = {"chosen": "Human: Hi\n\nAssistant: Hey you", "rejected": "Human: Hi\n\nAssistant: Heya"}
    found = [split(tokenizer, d) for d in pair(tokenizer, row, prompt_field=None)]
    assert found == [("Human: Hi\n\nAssistant: ", f"Hey you{end}"), ("Human: Hi\n\nAssistant: ", f"Heya{end}")]


def test_messages_need_a_template(templated: Callable[..., Any]) -> None:
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    with pytest.raises(UserError, match="use_chat_template is false"):
        pair(templated("chatml")[0], row, context={"use_chat_template": False})
    with pytest.raises(UserError, match="chat template"):
        pair(templated("none")[0], row)


TEXT = st.text(st.sampled_from("abc é\n.<|1漢😀"), min_size=1, max_size=12).filter(lambda t: t.strip() == t)


@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["own", "chatml", "none"])
def test_labels_decode_to_the_answers(templated: Any, name: str, prompt: str, chosen: str, rejected: str) -> None:
    tokenizer, end = templated(name)
    row = {"q": prompt, "good": chosen, "bad": rejected}
    options = {"prompt_field": "q", "chosen_field": "good", "rejected_field": "bad"}
    if chosen == rejected:
        with pytest.raises(RowError, match="are equal"):
            pair(tokenizer, row, **options)
        return
    found = pair(tokenizer, row, **options)
    assert [split(tokenizer, document)[1] for document in found] == [chosen + end, rejected + end]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "field 'prompt' is missing, the row has no fields"),
        ({"prompt": "x", "chosen": "y", "reject": "z"}, "did you mean 'reject'?"),
        ({**ROW, "chosen": None}, "field 'chosen' is null"),
        ({**ROW, "prompt": " "}, "field 'prompt' is empty"),
        ({**ROW, "chosen": 3}, "field 'chosen' must be a string, this is int"),
        ({**ROW, "chosen": [ROW]}, "field 'chosen': item 1 is no message"),
        ({**ROW, "chosen": []}, "field 'chosen' is empty"),
        ({**ROW, "chosen": [GOOD]}, "must both be text or both be messages"),
        ({**ROW, "chosen": [{**GOOD, "content": None}], "rejected": [BAD]}, "the content of message 1 is no text"),
        ({**ROW, "chosen": [{**GOOD, "content": " "}], "rejected": [BAD]}, "that has text"),
        ({**ROW, "chosen": [GOOD, USER], "rejected": [BAD]}, "does not end with a message of the assistant"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "field 'rejected' has no message after the common prompt"),
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "begin with different messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "field 'prompt' is missing"),
        ({"chosen": "Hi", "rejected": "No"}, "field 'prompt' is missing"),
        ({**ROW, "rejected": " "}, "field 'rejected' is empty"),
        ({**ROW, "rejected": "Hello!"}, "fields 'chosen' and 'rejected' are equal"),
    ],
)
def test_bad_rows_have_a_reason(templated: Callable[..., Any], row: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        pair(templated("own")[0], row)
    assert reason in str(caught.value)


@pytest.mark.parametrize("task", ["sft", "pt"])
@pytest.mark.parametrize("key", ["datasets", "validation_datasets"])
def test_tasks_of_documents_refuse_it(templated: Callable[..., Any], tmp_path: Path, task: Any, key: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW))
    entry = {"path": str(path), "type": "preference"}
    keys: Any = {"datasets": [entry], "data_cache_dir": str(tmp_path / "cache"), key: [entry]}
    with pytest.raises(
        UserError, match=rf"type preference, which task {task} cannot train on; it is for dpo, ipo, .* and reward"
    ):
        prepare(RunConfig(task=task, **keys), templated("own")[0], {"preference": FORMAT})
    assert not (tmp_path / "cache").exists()


CUT = {"truncation_strategy": "right", "max_length": 12}


@pytest.mark.parametrize(
    ("name", "row", "context", "reason"),
    [
        ("llama3", {"prompt": "Hi", "chosen": "Yes. ", "rejected": "\nYes."}, {}, "are equal as tokens"),
        ("none", {"prompt": "Hi", "chosen": "Say it.", "rejected": "Say it.<|im_end|>"}, {}, "are equal as tokens"),
        (
            "none",
            {"prompt": "Hi ", "chosen": "a b c d e f g h i j", "rejected": "a b c d e f g h i k"},
            CUT,
            "once they",
        ),
        (
            "none",
            {"prompt": "Hi ", "chosen": "b " * 40, "rejected": "a b " + "b " * 38},
            {**CUT, "truncation_strategy": "left"},
            "once",
        ),
    ],
)
def test_answers_that_become_equal_are_a_bad_row(
    templated: Callable[..., Any], name: str, row: Any, context: Any, reason: str
) -> None:
    with pytest.raises(RowError, match=f"fields 'chosen' and 'rejected' are equal .*|{reason}") as caught:
        pair(templated(name)[0], row, context=context)
    assert reason in str(caught.value)


def test_a_long_pair_that_differs_before_the_cut_stays(templated: Callable[..., Any]) -> None:
    tokenizer, _ = templated("none")
    for strategy in ("delete", "right", "split"):
        row = {"prompt": "Hi ", "chosen": "a" + " b" * 40, "rejected": "c" + " b" * 40}
        assert len(pair(tokenizer, row, context={**CUT, "truncation_strategy": strategy})) == 2


def test_answers_and_prompts_of_json_are_texts(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("chatml")
    one, two = '[{"city": "Paris"}]', '[{"city": "Rome"}]'
    chosen, rejected = pair(tokenizer, {"prompt": "Cities?", "chosen": one, "rejected": two})
    assert split(tokenizer, chosen)[1] == one + end
    assert split(tokenizer, rejected)[1] == two + end
    chosen, _ = pair(tokenizer, {"prompt": one, "chosen": "yes", "rejected": "no"})
    assert one in split(tokenizer, chosen)[0]
    with pytest.raises(RowError, match="'prompt' is missing"):
        pair(tokenizer, {"chosen": one, "rejected": two})
