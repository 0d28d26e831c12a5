"""Which tokenizer a configuration means, and what is said of one that may be another model's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from surogate_core.config.schema import ModelSelection, RunConfig
from surogate_core.errors import UserError
from surogate_core.files.paths import resolve_package_path
from surogate_core.setup.tokenizer_of_run import tokenizer_of_run

OWN = "pkg://surogate_dataset_chat/embedded/tokenizer"


def test_the_key_wins_over_the_models_own(tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve_package_path(OWN), tmp_path / "model"))
    (model / "chat_template.jinja").write_text("its own")
    chosen = ModelSelection(path=str(model))
    own, _ = tokenizer_of_run(RunConfig(model=chosen), vocab_size=1024, pretrained=True)
    assert own.chat_template == "its own"
    other, _ = tokenizer_of_run(RunConfig(model=chosen, tokenizer=OWN), vocab_size=1024, pretrained=True)
    assert other.chat_template != "its own"


def test_a_model_from_random_weights_has_none() -> None:
    with pytest.raises(UserError, match="set `tokenizer`"):
        tokenizer_of_run(RunConfig(), vocab_size=1024, pretrained=False)


@pytest.mark.parametrize(
    ("vocab_size", "pretrained", "notes"), [(1024, True, 0), (2000, True, 1), (2000, False, 0), (None, True, 0)]
)
def test_a_tokenizer_that_may_be_another_models(vocab_size: int | None, pretrained: bool, notes: int) -> None:
    _, found = tokenizer_of_run(RunConfig(tokenizer=OWN), vocab_size=vocab_size, pretrained=pretrained)
    assert len(found) == notes


def test_what_the_loader_changes_is_said(tmp_path: Path) -> None:
    path = Path(shutil.copytree(resolve_package_path(OWN), tmp_path / "tokenizer"))
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    (path / "tokenizer.json").write_text(json.dumps(content))
    _, notes = tokenizer_of_run(RunConfig(tokenizer=str(path)), vocab_size=2000, pretrained=True)
    assert ["BPE dropout" in note for note in notes] == [True, False]


def test_ids_that_the_embedding_has_no_row_for() -> None:
    with pytest.raises(UserError, match="vocabulary has 100 entries"):
        tokenizer_of_run(RunConfig(tokenizer=OWN), vocab_size=100, pretrained=False)
