"""The format `preference`: both answers are tokenised, and no task of this version trains on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surogate_dataset_preference as plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from surogate_dataset_preference.preference import PreferenceOptions, encode_pair

from surogate_core.batch import IGNORE_LABEL
from surogate_core.config.schema import RunConfig
from surogate_core.data.encoded import EncodeContext, Encoded, RowError
from surogate_core.data.pipeline import prepare
from surogate_core.errors import UserError

FORMAT: Any = plugin.surogate_dataset()
ROW = {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}


def pair(tokenizer: Any, row: Any, **options: Any) -> Any:
    return encode_pair(row, PreferenceOptions(**options), EncodeContext(tokenizer=tokenizer, sequence_len=64))


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
    found = pair(tokenizer, ROW)
    assert split(tokenizer, found.chosen) == (before + after, f"Hello!{end}")
    assert split(tokenizer, found.rejected) == (before + after, f"Go away.{end}")
    context = EncodeContext(tokenizer=tokenizer, sequence_len=64)
    assert FORMAT.encode(ROW, PreferenceOptions(), context).labels.tolist() == found.chosen.labels.tolist()


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
    assert [split(tokenizer, d)[1] for d in (found.chosen, found.rejected)] == [chosen + end, rejected + end]
    assert isinstance(found.chosen, Encoded)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "field 'prompt' is missing, the row has no fields"),
        ({"prompt": "x", "chosen": "y", "reject": "z"}, "did you mean 'reject'?"),
        ({**ROW, "chosen": None}, "field 'chosen' is null"),
        ({**ROW, "chosen": [ROW]}, "field 'chosen' must be a string, this is list"),
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
def test_no_task_trains_on_it_yet(templated: Callable[..., Any], tmp_path: Path, task: Any, key: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW))
    entry = {"path": str(path), "type": "preference"}
    keys: Any = {"datasets": [entry], "data_cache_dir": str(tmp_path / "cache"), key: [entry]}
    with pytest.raises(UserError, match=rf"type preference, which task {task} cannot train on; a later version"):
        prepare(RunConfig(task=task, **keys), templated("own")[0], {"preference": FORMAT})
    assert not (tmp_path / "cache").exists()
