"""benchmarks/loss_parity.py: its texts and problems, its batches, its score, its tables, and a short run on a CPU."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loss_parity
import numpy as np
import parity_report
import parity_text
import pytest
import torch
from loss_parity import Setting
from tokenizers import Tokenizer

from surogate_core.batch import IGNORE_LABEL

SETTING = Setting(tiny=True, device="cpu", rows=2, length=128, vocabulary=400)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    learn, _ = parity_text.problems(300, 1, seed=1)
    return parity_text.train_tokenizer([p.question for p in learn], SETTING.vocabulary)


def value(line: str) -> tuple[int, int]:
    """Left and right side of a drill."""
    left, _, right = line.partition(" = ")
    assert re.fullmatch(r"[\d +*-]+", left)
    return eval(left), int(right)


def test_drills_are_true() -> None:
    for line in islice(parity_text.drills(np.random.default_rng(0)), 500):
        left, right = value(line)
        assert left == right >= 0


def test_problems_have_the_answer_of_their_numbers_and_none_is_in_both_parts() -> None:
    learn, held = parity_text.problems(400, 200, seed=3)
    assert (len(learn), len(held)) == (400, 200)
    assert not {p.question for p in learn} & {p.question for p in held}
    rules = {
        "a + b − c": lambda a, b, c: a + b - c,
        "a − c + b": lambda a, c, b: a - c + b,
        "b + k · a": lambda b, k, a: b + k * a,
        "k · a − c": lambda k, a, c: k * a - c,
    }
    for problem in held:
        numbers = [int(n) for n in re.findall(r"\d+", problem.question)]
        assert rules[problem.kind](*numbers) == problem.answer >= 0
        assert numbers[0] <= problem.largest
    assert Counter(p.kind for p in held).keys() == rules.keys()
    assert {p.largest for p in held} == set(parity_text.LARGEST)
    assert parity_text.problems(400, 200, seed=3) == (learn, held)
    assert parity_text.problems(400, 200, seed=4)[1] != held


def test_files_are_kept_apart_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        (tmp_path / f"{number}.py").write_text(f"# {number}\n" * 90)
    (tmp_path / "copy.py").write_text((tmp_path / "7.py").read_text())
    (tmp_path / "short.py").write_text("1")
    (tmp_path / "data.txt").write_text("text" * 100)
    (tmp_path / "broken.py").write_bytes(b"\xff" * 1000)
    monkeypatch.setattr(parity_text, "roots", lambda: [tmp_path])
    train, held = parity_text.texts(parity_text.PYTHON, 10**9)
    assert len(train) + len(held) == len({*train, *held}) == 200
    assert 0 < len(held) < 20
    fewer, _ = parity_text.texts(parity_text.PYTHON, 50_000)
    assert 0 < len(fewer) < 140
    assert set(fewer) <= set(train)
    with pytest.raises(SystemExit, match="no text"):
        parity_text.texts((".rst",), 10**9)


def test_every_digit_is_a_token_and_texts_are_ended(tokenizer: Tokenizer) -> None:
    ids = parity_text.tokens(tokenizer, ["1234", "é"])
    end = tokenizer.token_to_id(parity_text.END)
    assert [tokenizer.id_to_token(i) for i in ids[:4]] == ["1", "2", "3", "4"]
    assert (ids == end).nonzero()[0].tolist() == [4, len(ids) - 1]
    assert tokenizer.decode(ids[5:-1].tolist()) == "é"


def test_batches_of_text_shift_labels_and_repeat_by_seed() -> None:
    found = np.arange(6 * 128, dtype=np.uint16).reshape(6, 128)
    batch = next(loss_parity.text_batches(found, SETTING, seed=1))
    assert batch.labels[:127].tolist() == batch.input_ids[1:128].tolist()
    assert batch.labels[[127, 255]].tolist() == [IGNORE_LABEL] * 2
    assert batch.cu_seqlens[:3].tolist() == [0, 128, 256]
    assert batch.cu_seqlens.numel() == SETTING.borders
    epoch = [b.input_ids[0].item() for b in islice(loss_parity.text_batches(found, SETTING, seed=1), 3)]
    again = [b.input_ids[0].item() for b in islice(loss_parity.text_batches(found, SETTING, seed=1), 3)]
    assert epoch == again
    rows = torch.cat([b.input_ids for b in islice(loss_parity.text_batches(found, SETTING, seed=1), 3)])
    assert sorted(rows.tolist()) == list(range(6 * 128)), "an epoch sees each row once"


def test_exact_match_counts_problems_whose_every_token_is_the_likeliest(tokenizer: Tokenizer) -> None:
    _, held = parity_text.problems(1, 12, seed=5)
    packed = list(loss_parity.pack(held, tokenizer, SETTING))
    assert len(packed) > 1
    assert all(p.batch.input_ids.numel() == 256 for p in packed)
    assert sum(p.batch.label_tokens for p in packed) == sum(len(str(p.answer)) + 2 for p in held)

    def logits(wrong: int) -> Any:
        """Right at every label but at the last of the first `wrong` problems."""
        left = wrong

        def call(batch: Any) -> torch.Tensor:
            nonlocal left
            labels = batch.labels.clamp(min=0)
            out = torch.nn.functional.one_hot(labels, SETTING.vocabulary).float()
            ends = [i for i in range(255) if batch.labels[i] >= 0 and batch.labels[i + 1] < 0]
            for at in ends[:left]:
                out[at] = 0
                out[at, 5 if labels[at] != 5 else 6] = 1
            left -= min(left, len(ends))
            return out

        return call

    def scored(wrong: int) -> dict[str, Any]:
        engine: Any = SimpleNamespace(logits=logits(wrong))
        return loss_parity.score(engine, packed)

    assert scored(0)["exact_match"] == 1.0
    found = scored(3)
    assert found["exact_match"] == 9 / 12
    assert found["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 12))
    assert found["right"] == "000" + "1" * 9
    assert found["problems"] == 12


def test_tables_and_picture() -> None:
    found: dict[str, Any] = {}
    for number, name in enumerate(loss_parity.RECIPES):
        held = [[0, 9.0], [4, 2.0 + 0.01 * number]]
        task = {"exact_match": 0.5, "standard_error": 0.01, "problems": 9, "by_kind": {}, "by_largest": {"10": 0.5}}
        found[f"pretrain-{name}"] = {"starts": {"0": {"held": held}}}
        found[f"lora-{name}"] = {"headers": {"held": held}, "task": {"untuned": task, "tuned": task}}
    steps = {"pretrain": 4, "lora": 4}
    text = parity_report.markdown(found, steps, "title")
    assert text.count("| fp8-hybrid | 2.0100 | +0.50% | +0.5% |") == 2
    assert text.count("| nvfp4 | 2.0200 | +1.00% | +1.5% |") == 2
    assert text.count("0.5000 ± 0.0100") == 4
    assert "mean" not in text
    ElementTree.fromstring(parity_report.picture(found))
    del found["pretrain-nvfp4"]
    text = parity_report.markdown(found, steps, "title")
    assert text.count("| nvfp4 | 2.0200") == 1, "a part that failed leaves the others"


def test_a_gap_is_to_bf16_from_the_same_weights_and_has_an_error_over_starts() -> None:
    losses = {"bf16": {"0": 2.0, "1": 3.0}, "fp8-hybrid": {"0": 2.02, "1": 3.0}}
    found = {
        f"pretrain-{name}": {"starts": {start: {"held": [[0, 9.0], [4, loss]]} for start, loss in of.items()}}
        for name, of in losses.items()
    }
    text = parity_report.markdown(found, {"pretrain": 4, "lora": 4}, "title")
    assert "| bf16, start 1 | 3.0000 |  |  |" in text
    assert "| fp8-hybrid | 2.0200 | +1.00% | +0.5% |" in text
    assert "| fp8-hybrid, start 1 | 3.0000 | +0.00% | +0.5% |" in text
    assert "| fp8-hybrid, mean ± standard error | | +0.50% ± 0.50% | +0.5% |" in text
    assert "LoRA, " not in text
    found["pretrain-fp8-hybrid"]["starts"]["1"]["held_in_bf16"] = 2.97
    text = parity_report.markdown(found, {"pretrain": 4, "lora": 4}, "title")
    assert "| fp8-hybrid, start 1 | 3.0000 | +0.00% | +0.5% | 2.9700 | -1.00% |" in text
    picture = parity_report.picture(found)
    assert picture.count(">fp8-hybrid, start 1</text>") == 1
    assert "LoRA fine-tuning" not in picture


def test_options_give_the_setting_to_every_process() -> None:
    setting = replace(SETTING, out=Path("x"), steps=7, rate=0.5)
    options = vars(loss_parity.make_parser().parse_args(loss_parity.words(setting)))
    assert Setting(**{key: options[key] for key in options if key not in ("part", "work")}) == setting


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    setting = replace(
        SETTING, out=tmp_path, steps=4, drill_steps=4, lora_steps=2, task_steps=2, problems=12, held_rows=4,
        megabytes=2, evaluate=2, recipes="bf16,fp8-hybrid", starts="0,3",
    )  # fmt: skip
    assert loss_parity.compare(setting) == 0
    pretrained = json.loads((tmp_path / "pretrain-fp8-hybrid.json").read_text())
    held = {start: figures["held"] for start, figures in pretrained["starts"].items()}
    assert held.keys() == {"0", "3"}
    assert [step for step, _ in held["0"]] == [step for step, _ in held["3"]] == [0, 2, 4]
    assert held["0"] != held["3"]
    tuned = json.loads((tmp_path / "lora-fp8-hybrid.json").read_text())
    assert tuned["task"]["tuned"]["problems"] == 12
    assert "fp8-hybrid" in (tmp_path / "loss_parity.md").read_text()
