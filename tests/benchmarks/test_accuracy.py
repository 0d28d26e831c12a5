"""benchmarks/accuracy: its texts and problems, its plan, its scores, its table, and a whole trial on a CPU."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accuracy import anchor, cells, corpus, data, finetune, parcel, pretrain, problems, rounding, table

from surogate_core.files.metrics import METRICS
from surogate_core.formats.nvfp4 import quantise
from surogate_core.generate.losses import DocumentSums

ROOT = Path(__file__).parents[2]


def worked(problem: problems.Problem) -> int:
    """The last result of the steps, each of which must be true."""
    steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", problem.worked)
    for left, sign, right, result in steps:
        assert eval(f"{left} {sign} {right}") == int(result)
    return int(steps[-1][-1])


@pytest.mark.parametrize("use", ["pretrain", "finetune"])
def test_problems_are_worked_out_and_their_story_has_the_same_numbers(use: problems.Use) -> None:
    found = list(islice(problems.problems(use, seed=3), 300))
    for one in found:
        assert worked(one) == one.answer >= 0
        assert problems.final_number(one.worked) == str(one.answer)
        assert "{" not in one.question
        told = set(re.findall(r"\d+", one.question))
        first = one.worked.split()[0]
        assert first in told or one.worked.startswith(f"{first} * ")
    assert {one.steps for one in found} == set(problems.STEPS)
    assert {one.largest for one in found} == set(problems.LARGEST)
    assert found == list(islice(problems.problems(use, seed=3), 300)), "the seed decides them"


def test_held_out_problems_share_operations_and_numbers_with_no_trained_one() -> None:
    seen: set[bytes] = set()
    held = list(islice(problems.distinct("finetune", seed=1, seen=seen), 200))
    keys = {one.key for one in held}
    trained = list(islice(problems.distinct("finetune", seed=2, seen=seen), 400))
    assert len({one.key for one in (*held, *trained)}) == 600
    before = list(islice(problems.problems("pretrain", seed=3, avoid=frozenset(keys)), 3000))
    assert not keys & {one.key for one in before}
    free = {one.key for one in islice(problems.problems("pretrain", seed=3), 3000)}
    assert keys & free, "without the rule some would be the same"


def test_the_final_number_is_the_one_after_the_mark() -> None:
    for text, number in {
        "1 + 1 = 2. #### 2": "2",
        "#### 3\nNo: #### 1,234.": "1234",
        "#### $18": "18",
        "the answer is 7": None,
        "####": None,
    }.items():
        assert problems.final_number(text) == number


def test_texts_are_taken_once_and_repetitions_left_out(tmp_path: Path) -> None:
    lines = [f"Sentence number {n} of a text that is long enough to count." for n in range(40)]
    (tmp_path / "a.md").write_text("\n".join(lines))
    (tmp_path / "same.md").write_text("  \n".join(lines))
    (tmp_path / "mostly.txt").write_text("\n".join([*lines, "One new line, which is long enough to count as well."]))
    (tmp_path / "own.py").write_text(
        "\n".join(f"value_of_{n} = compute(argument_number={n}, other=None)" for n in range(9))
    )
    (tmp_path / "numbers.txt").write_text("1234567890 " * 100)
    (tmp_path / "short.md").write_text("short")
    (tmp_path / "data.bin").write_bytes(b"x" * 1000)
    page = '.\\" a comment\n.TH LS 1\n.SH NAME\nls \\- list \\fBdirectory\\fR contents\n' + "Words of the page. " * 30
    (tmp_path / "ls.1.gz").write_bytes(gzip.compress(page.encode()))
    found = corpus.collect(limit=10**9, places=[tmp_path])
    texts = [*found.train, *found.held]
    assert len(texts) == 3
    assert sum(one.repeated for one in found.counts.values()) == 2
    (manual,) = (text for text in texts if "NAME" in text)
    assert "ls - list directory contents" in manual
    assert "comment" not in manual
    assert found.counts["manual pages"].texts + found.counts["manual pages"].held == 1
    assert corpus.collect(limit=10**9, places=[tmp_path]) == found


def test_the_plan_fits_steps_into_the_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    pretrain.add_options(parser)
    given = parser.parse_args(["--minutes", "8", "--total-minutes", "24", "--rows", "4", "--length", "256"])
    given.out = tmp_path
    asked: list[dict[str, Any]] = []

    def trained(keys: dict[str, Any], file: Path, seconds: float | None) -> int:
        asked.append(keys)
        (tmp_path / "probe").mkdir()
        rates = [10.0, 10.0, 2000.0, 2048.0, 2100.0]
        records = ({"event": "step_end", "step": n, "tokens_per_second": rate} for n, rate in enumerate(rates, 1))
        (tmp_path / "probe" / METRICS).write_text("".join(json.dumps(one) + "\n" for one in records))
        return 0

    monkeypatch.setattr(pretrain, "train", trained)
    plan = pretrain.planned(given)
    assert plan["tokens_per_second"] == 2048.0, "the first steps, which are slow, do not count"
    assert plan["steps"] == int(2 * (24 * 60 - 3 * (pretrain.SET_UP + pretrain.MARGIN)))
    assert asked[0]["max_steps"] == given.probe_steps
    assert pretrain.settings(tmp_path, plan)["from_scratch"]
    assert pretrain.settings(tmp_path, {**plan, "begin": "base"})["model"] == "base"


def test_a_slice_is_asked_to_stop_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "stand_in.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        f"place = pathlib.Path({str(tmp_path / 'saved')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (place.write_text('yes'), sys.exit(143)))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)\n"
    )
    start = subprocess.Popen

    def begun(words: list[str]) -> subprocess.Popen[bytes]:
        process = start([sys.executable, str(program)])
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        return process

    monkeypatch.setattr(pretrain.subprocess, "Popen", begun)
    assert pretrain.train({"task": "pt", "max_steps": 3}, tmp_path / "run.yaml", 0.01) == 143
    assert (tmp_path / "saved").read_text() == "yes"
    assert json.loads((tmp_path / "run.yaml").read_text()) == {"max_steps": 3}


def test_cells_have_names_and_keys_of_their_own() -> None:
    found = list(cells.cells())
    assert len({cell.name for cell in found}) == len(found)
    assert len([cell for cell in found if cell.group == "lora"]) == 4 * 3 * 3
    assert all(re.fullmatch(r"[\w.-]+", cell.name) for cell in found)
    assert {cell.row for cell in found if cell.group == "options"} == set(cells.OPTIONS)
    (own,) = (cell for cell in found if cell.row == "nf4 nvfp4" and cell.seed == 2)
    assert dict(own.keys) == {"recipe": "nvfp4", "qlora_format": "nf4"}


def test_work_starts_no_cell_that_would_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = list(cells.cells(["lora"], [1]))[:4]
    script = (
        "import pathlib, sys; pathlib.Path(sys.argv[-1] + '.ran').touch(); sys.exit(sys.argv[-1].startswith('nf4'))"
    )
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {script}"]
    finetune.work(some, command, tmp_path, seconds=1000, together=2)
    assert {file.stem for file in tmp_path.glob("*.ran")} == {cell.name for cell in some}
    assert capsys.readouterr().out.count("failed, see") == 1
    finetune.work(some, [sys.executable, "-c", "raise SystemExit(9)"], tmp_path, seconds=0, together=2)
    assert not capsys.readouterr().out, "no time is left"


def test_score_compares_final_numbers() -> None:
    rows = [{"answer": "2", "steps": 1}, {"answer": "30", "steps": 2}, {"answer": "4", "steps": 2}]
    found = finetune.score(rows, ["1 + 1 = 2. #### 2", "#### 31", "I do not know"])
    assert found["share"] == pytest.approx(1 / 3)
    assert found["stderr"] == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3))
    assert found["unanswered"] == pytest.approx(1 / 3)
    assert found["by_steps"] == {1: 1.0, 2: 0.0}
    assert found["right"] == "100"


def result(row: str, seed: int, loss: float, share: float = 0.5, group: str = "lora") -> dict[str, Any]:
    return {
        "row": row, "group": group, "seed": seed, "start": 2.0, "settings": {"steps": 2},
        "problems": {"loss": loss}, "exact_match": {"share": share, "stderr": 0.01}, "gsm8k": {"loss": 2 * loss},
    }  # fmt: skip


def test_the_table_compares_seed_by_seed(tmp_path: Path) -> None:
    found = [result("bf16 bf16", 1, 1.0), result("bf16 bf16", 2, 2.0)]
    found += [result("nf4 bf16", 1, 1.1), result("nf4 bf16", 2, 2.2), result("full bf16", 1, 0.9, group="full")]
    lines = table.lines_of(found)
    assert [line.row for line in lines] == ["bf16 bf16", "nf4 bf16", "full bf16"]
    text = table.markdown(lines)
    assert "| bf16 bf16 | 2 | 2.0000 | 1.5000 ± 0.5000 |  | 50.0 ± 0.0 (one seed ± 1.0) |" in text
    assert "| nf4 bf16 | 2 | 2.0000 | 1.6500 ± 0.5500 | +10.00 ± 0.00 % |" in text
    assert "| full bf16 | 1 | 2.0000 | 0.9000 | -10.00 % |" in text
    root = ElementTree.fromstring(table.picture(lines))
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 2 * len(lines)
    place = tmp_path / "cells"
    place.mkdir()
    for number, one in enumerate([found[0], found[1] | {"settings": {"steps": 3}}]):
        (place / f"{number}.json").write_text(json.dumps(one))
    with pytest.raises(SystemExit, match="different settings"):
        table.results(place)


def test_a_parcel_comes_back_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "model/sub").mkdir(parents=True)
    (tmp_path / "model/a").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "model/sub/b").write_text("b")
    parcel.split(tmp_path / "model", tmp_path / "parts", 4096)
    assert len(list((tmp_path / "parts").glob("part-*"))) > 2
    parcel.join(tmp_path / "parts", tmp_path / "again")
    assert (tmp_path / "again/a").read_bytes() == (tmp_path / "model/a").read_bytes()
    assert (tmp_path / "again/sub/b").read_text() == "b"
    (tmp_path / "parts/part-001").write_bytes(b"x")
    with pytest.raises(SystemExit, match="part-001 is damaged"):
        parcel.join(tmp_path / "parts", tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_the_reference_in_float64_has_the_values_of_the_format() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(48, 64, generator=generator) * torch.exp2(
        torch.randint(-6, 4, (48, 1), generator=generator).float()
    )
    x[:16, :16] = 0
    for square in (False, True):
        found = quantise(x, square=square, four_over_six=True)
        theirs = rounding.reference(x.double().numpy(), height=16 if square else 1)
        np.testing.assert_allclose((found.blocks(48, 64) * found.decode).numpy(), theirs, rtol=1e-5, atol=1e-12)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 7.0])
    assert rounding.nearest(rounding.E2M1, ties).tolist() == [0, 1, 1, 2, 2, 4, 4, -4, 6]


def test_differences_are_over_pairs_of_documents() -> None:
    exact = [DocumentSums(loss=loss, weight=2.0, tokens=2, hits=0) for loss in (2.0, 8.0, 20.0)]
    shifted = [DocumentSums(loss=one.loss + 0.2, weight=2.0, tokens=2, hits=0) for one in exact]
    found = rounding.difference(shifted, exact)
    assert found.loss == pytest.approx(30.6 / 6)
    assert found.difference == pytest.approx(0.1)
    assert found.stderr == pytest.approx(0.0, abs=1e-12), "documents are far apart, pairs are not"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("accuracy")
    gsm8k = out / "gsm8k"
    gsm8k.mkdir()
    row = {"question": "What is 48 / 2?", "answer": "It is 48/2=<<48/2=24>>24.\n#### 24"}
    for part in ("train", "test"):
        (gsm8k / f"{part}.jsonl").write_text((json.dumps(row) + "\n") * 20)
    words = [sys.executable, "benchmarks/accuracy", "data", "--out", str(out), "--tiny", "--gsm8k", str(gsm8k)]
    subprocess.run([*words, "--places", "docs"], cwd=ROOT, check=True, capture_output=True)
    return out


def test_data_writes_files_that_its_manifest_describes(collected: Path) -> None:
    place = collected / "data"
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["files"]["tune.jsonl"]["rows"] == data.TINY["problems"]
    for name, facts in manifest["files"].items():
        content = (place / name).read_bytes()
        content = gzip.decompress(content) if name.endswith(".gz") else content
        assert len(content) == facts["bytes"]
        assert content.count(b"\n") == facts["rows"] > 0
    rows = [json.loads(line) for line in (place / "gsm8k-held.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    assert rows[0]["messages"][1]["content"] == "It is 48/2=24.\n#### 24"
    config = json.loads((place / "base/config.json").read_text())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    assert len(tokenizer) == config["vocab_size"] == data.TINY["vocabulary"]
    assert tokenizer.convert_tokens_to_ids("<|end|>") == config["eos_token_id"]
    text = tokenizer.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 48 / 2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_of_all_commands(collected: Path) -> None:
    def run(*words: str) -> str:
        command = [sys.executable, "benchmarks/accuracy", words[0], "--out", str(collected), "--tiny", *words[1:]]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert '"step": 6' in run("pretrain")
    assert "without a result: none" in run("finetune", "--only", "bf16 bf16", "nf4 bf16")
    assert "2 of 2 cells have a result" in run("finetune", "--only", "bf16 bf16", "nf4 bf16")
    text = run("rounding")
    assert "| nvfp4 | weight and activation |" in text
    assert "| base in nf4 | weight |" in text
    assert "differ from the reference in float64 for 0 of " in text
    text = run("table")
    assert "| bf16 bf16 | 1 |" in text
    assert "| nf4 bf16 | 1 |" in text
    ElementTree.fromstring((collected / "accuracy.svg").read_text())


def test_the_mean_length_is_that_of_all_files() -> None:
    rows: list[dict[str, Any]] = [{"n": n} for n in range(1999)]
    found = [row["n"] for row in anchor.sample(rows)]
    assert len(found) == 667
    assert max(found) > 1990
    assert anchor.sample(rows[:3]) == rows[:3]
