"""The format `unpaired`, and the micro-batches with mismatched documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from surogate_task_kto.loss import BAD, GOOD, KIND, MISMATCHED
from surogate_task_kto.options import KTOOptions
from surogate_task_kto.rows import KTORows
from surogate_task_kto.task import KTOTask
from surogate_task_kto.unpaired import FORMAT, UnpairedOptions, encode

from surogate_core.plugin import IGNORE_LABEL, REFERENCE, ConfigError, EncodeContext, Encoded, RowError
from surogate_core.service.config import RunConfig
from surogate_core.service.data import References, prepare
from surogate_testing.chat_templates import byte_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
ROW = {"prompt": "Hi", "completion": "Hello!", "label": True}
WORDS = ("Hi", "So", "Why?", "How so?", "Really?")


def document(row: Any, tokenizer: Any) -> Encoded:
    return encode(row, UnpairedOptions(), EncodeContext(tokenizer=tokenizer, sequence_len=64))


def test_text_messages_and_every_way_to_write_a_label(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("own")
    answer = [{"role": "assistant", "content": "Hello!"}]
    for prompt, completion in (("Hi", "Hello!"), (MESSAGES, answer), (MESSAGES, "Hello!")):
        for label, weights in ((True, None), (1, None), ("true", None), (False, 2.0), (0, 2.0), ("0", 2.0)):
            found = document({"prompt": prompt, "completion": completion, "label": label}, tokenizer)
            trained = found.labels != IGNORE_LABEL
            assert tokenizer.decode(found.input_ids[trained]) == f"Hello!{end}"
            assert (found.weights is None) == (weights is None)
            if found.weights is not None:
                assert set(found.weights[trained]) == {weights}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"label": None}, "field 'label' is null"),
        ({"label": "good"}, "must be true or false, this is 'good'"),
        ({"label": 0.5}, "must be true or false"),
        ({"completion": " "}, "field 'completion' is empty"),
        ({"completion": MESSAGES}, "does not end with a message of the assistant"),
        ({"prompt": []}, "field 'prompt' is empty"),
    ],
)
def test_bad_rows(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        document({**ROW, **changed}, byte_tokenizer())


# ----------------------------------------------------------------------------------- micro-batches


def config_of(directory: Path, rows: list[dict[str, Any]], **keys: Any) -> RunConfig:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        task="kto",
        datasets=[{"path": str(directory / "rows.jsonl"), "type": "unpaired"}],
        data_cache_dir=str(directory / "cache"),
        dataloader_num_workers=0,
        sequence_len=48,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        use_chat_template=False,
        validation_split_ratio=0.0,
    )
    return replace(config, **keys)


def task_of(directory: Path, rows: list[dict[str, Any]], options: KTOOptions | None = None, **keys: Any) -> KTOTask:
    config = config_of(directory, rows, **keys)
    data = prepare(config, byte_tokenizer(), {"unpaired": FORMAT}, trains_prompts=False)
    return KTOTask(config, data, options or KTOOptions())


def several() -> list[dict[str, Any]]:
    return [{"prompt": WORDS[i % 5] + " ", "completion": f"Answer {i}.", "label": i % 3 == 0} for i in range(30)]


def rows_of(task: KTOTask) -> KTORows:
    (found,) = [rows for rows, _ in task.referenced(1)]
    assert isinstance(found, KTORows)
    return found


def test_mismatched_documents_have_the_prompts_of_a_row_and_its_answers_moved_by_one(tmp_path: Path) -> None:
    rows, tokenizer = rows_of(task_of(tmp_path, several())), byte_tokenizer()
    for index in range(len(rows)):
        row, other = rows.row(index), rows.row(index + len(rows))
        assert len(row.lengths) > 1
        assert sum(row.lengths) == sum(other.lengths)
        texts = [
            [tokenizer.decode(part) for part in np.split(ids, np.cumsum(lengths)[:-1])]
            for ids, lengths in ((row.input_ids, row.lengths), (other.input_ids, other.lengths))
        ]
        prompts, answers = zip(*(text.split("Answer") for text in texts[0]), strict=True)
        moved = [answers[-1], *answers[:-1]]
        assert texts[1] == [f"{prompt}Answer{answer}" for prompt, answer in zip(prompts, moved, strict=True)]


def test_a_micro_batch_has_kinds_references_and_the_number_of_answers(tmp_path: Path) -> None:
    task = task_of(tmp_path, several())
    ((rows, numbers),) = task.referenced(1000)
    assert sorted(numbers) == list(range(2 * len(rows)))
    references = References(
        rows_R=np.array(numbers), logprobs_RL=np.repeat(-np.array(numbers, np.float32)[:, None], 48, axis=1)
    )
    task.refer([references])
    batch = task.make(rows, [0, 1])
    assert batch.columns.keys() == task.sample().columns.keys() == {KIND, REFERENCE}
    assert batch.labels.shape == task.sample().labels.shape == (4 * 48,)
    assert batch.cu_seqlens.shape == task.sample().cu_seqlens.shape
    kinds = batch.columns[KIND].view(4, 48)
    starts = (batch.positions == 0).view(4, 48)
    assert set(kinds[[0, 2]][starts[[0, 2]]].tolist()) - {0.0} == {GOOD, BAD}
    assert set(kinds[[1, 3]][starts[[1, 3]]].tolist()) - {0.0} == {MISMATCHED}
    assert batch.divisor == len(rows.row(0).lengths) + len(rows.row(1).lengths)
    assert batch.columns[REFERENCE].view(4, 48)[:, 0].tolist() == [0, -len(rows), -1, -1 - len(rows)]
    good = {f"Answer {i}." for i in range(0, 30, 3)}
    ids = batch.input_ids.view(4, 48)[0].tolist()
    for start, kind in zip(torch.where(starts[0])[0].tolist(), kinds[0][starts[0]].tolist(), strict=True):
        text = byte_tokenizer().decode(ids[start:]).partition("<|")[0]
        if kind:
            assert any(answer in text[:20] for answer in good) == (kind == GOOD)


def test_rows_of_one_document_take_the_answer_of_the_next_such_row(tmp_path: Path) -> None:
    single = [
        {"prompt": f"{i}" * 20 + ": ", "completion": f"Answer {i}" + "." * 3 * i, "label": True} for i in range(4)
    ]
    rows = rows_of(task_of(tmp_path, single))
    assert all(len(rows.row(index).lengths) == 1 for index in range(len(rows)))
    texts = [byte_tokenizer().decode(rows.row(index + len(rows)).input_ids) for index in range(len(rows))]
    assert all(len(rows.row(index + len(rows)).input_ids) <= 48 for index in range(len(rows)))
    assert all(text[0] != text.partition("Answer ")[2][0] for text in texts)
    task = task_of(tmp_path, single[:1])
    alone = rows_of(task)
    assert task.unreferenced(alone, [0, 1, None, None]).divisor == 1
    assert len(alone.row(1).input_ids) == 0
    assert not alone.kinds(1).any()


def test_without_the_divergence_there_are_no_mismatched_rows(tmp_path: Path) -> None:
    task = task_of(tmp_path, several(), KTOOptions(loss_type="apo_zero_unpaired"), per_device_train_batch_size=3)
    ((rows, numbers),) = task.referenced(1000)
    assert len(numbers) == len(rows)
    assert not (task.sample().columns[KIND] == MISMATCHED).any()


def test_odd_micro_batches_and_split_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 is odd.*per_device_train_batch_size=4"):
        task_of(tmp_path, several(), per_device_train_batch_size=3)
    with pytest.raises(ConfigError, match="its parts cannot be judged"):
        task_of(tmp_path, several(), truncation_strategy="split")
