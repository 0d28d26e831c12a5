"""The evaluator without lm-eval, and its model class over a stand-in of a model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from surogate_eval_lm_eval import surogate_evaluator

from surogate_core.plugin import MachineError, UserError, bundles

SUROGATE_PLUGIN = "eval-lm-eval"


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MachineError, match=r"lm-eval:gsm8k: the package lm_eval is not installed. Fix: pip install"):
        surogate_evaluator().open(["gsm8k"], bundles.EvalSettings())


class Letters:
    """A tokenizer with a token for each character."""

    bos_token_id, eos_token_id, name_or_path, chat_template = None, 0, "letters", "x"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        ids = [ids] if isinstance(ids, int) else ids
        return "".join("" if i == 0 and skip_special_tokens else chr(i) if i else "<end>" for i in ids)

    def apply_chat_template(self, messages: Any, **more: Any) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


class Parrot:
    """Completes every prompt with its last two characters, and finds a continuation as improbable as it is long."""

    name, tokenizer, prepared = "m", Letters(), SimpleNamespace(context=40)

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.wanted: Any = None

    def complete(self, prompts: Any, wanted: Any) -> list[Any]:
        self.wanted = wanted
        self.prompts += [self.tokenizer.decode(one.ids) for one in prompts]
        return [SimpleNamespace(ids=(*one.ids[-2:], 0)) for one in prompts]

    def likelihoods(self, pairs: Any) -> list[Any]:
        self.pairs = pairs
        return [SimpleNamespace(logprob=-float(len(one.continuation)), greedy=False) for one in pairs]


@pytest.fixture
def parrot() -> Any:
    pytest.importorskip("lm_eval", reason="needs surogate-eval-lm-eval[harness]")
    return Parrot()


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_completions_are_made_by_settings_and_come_back_in_order(parrot: Any) -> None:
    from surogate_eval_lm_eval.model import SurogateLM

    model = SurogateLM(parrot, seed=3)
    short, long = {"until": ["b"], "max_gen_toks": 8}, {"max_gen_toks": 10, "do_sample": True, "temperature": 0.5}
    found = model.generate_until(requests(("xab", short), ("yz", long), ("q" * 50 + "cd", short)))
    assert found == ["a", "yz", "cd"], "cut at the stop text"
    assert parrot.prompts == ["xab", "q" * 30 + "cd", "yz"], "cut at the left to leave room"
    assert parrot.wanted.sampling.temperature == 0.5
    assert parrot.wanted.sampling.seed == 3
    with pytest.raises(UserError, match="num_beams is not available"):
        model.generate_until(requests(("x", {"num_beams": 4})))
    with pytest.raises(UserError, match="`max_gen_toks`: 40 tokens are asked for"):
        model.generate_until(requests(("x", {"max_gen_toks": 40})))


def test_likelihoods_keep_the_end_of_what_is_too_long(parrot: Any) -> None:
    from surogate_eval_lm_eval.model import SurogateLM

    model = SurogateLM(parrot)
    assert model.loglikelihood(requests(("ab", "cde"), ("", "xy"), ("k" * 60, "lm"))) == [
        (-3.0, False),
        (-2.0, False),
        (-2.0, False),
    ]
    first, empty, long = parrot.pairs
    assert (first.context, first.continuation) == ((97, 98), (99, 100, 101))
    assert empty.context == (0,), "the token before a text"
    assert len(long.context) + len(long.continuation) == 41
    assert model.loglikelihood_rolling(requests(("z" * 100,), ("ab",))) == [-100.0, -2.0], "each token once"
    assert [len(pair.continuation) for pair in parrot.pairs] == [40, 40, 20, 2]


def test_a_task_from_a_file(tmp_path: Path, parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"q": "is it ab", "a": "ab"}, {"q": "is it cd", "a": "xy"}, {"q": "is it ef", "a": "ef"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 4}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    lines: list[Any] = []
    settings = bundles.EvalSettings(chat=True, system="Be brief.", max_new_tokens=5)
    (found,) = surogate_evaluator().open([str(tmp_path / "letters.yaml")], settings).run(parrot, lines.append)
    assert (found.model, found.task, found.metric, found.rows) == ("m", "lm-eval:letters", "exact_match", 3)
    assert found.scores == (0.0, 0.0, 0.0), "the chat ends with the assistant's head"
    assert parrot.prompts[0].endswith("is it ab[assistant]")
    assert parrot.wanted.max_new_tokens == 5
    (found,) = (
        surogate_evaluator()
        .open([str(tmp_path / "letters.yaml")], bundles.EvalSettings(limit=2))
        .run(parrot, lines.append)
    )
    assert (found.value, found.rows, found.scores) == (0.5, 2, (1.0, 0.0))
    assert found.stderr == pytest.approx(math.sqrt(0.25 / 1))
    assert lines[-1] == {
        "model": "m",
        "task": "lm-eval:letters",
        "row": 1,
        "filter": "none",
        "prompt": "is it cd",
        "responses": ["cd"],
        "answer": "xy",
        "exact_match": 0.0,
    }


@pytest.mark.slow
def test_a_task_that_is_not_there_has_a_near_name(parrot: Any) -> None:
    with pytest.raises(UserError, match=r"lm-eval:gsm8kk: lm-eval has no such task. Fix: .*gsm8k"):
        surogate_evaluator().open(["gsm8kk"], bundles.EvalSettings())


def test_a_task_without_its_data_is_named(tmp_path: Path, parrot: Any) -> None:
    (tmp_path / "t.yaml").write_text(
        f"task: broken\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/gone.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    with pytest.raises(UserError, match=r"t.yaml: lm-eval cannot load it: .*gone.jsonl"):
        surogate_evaluator().open([str(tmp_path / "t.yaml")], bundles.EvalSettings())
