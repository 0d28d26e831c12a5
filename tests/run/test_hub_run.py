"""Runs on a hub id: the commit is recorded, and a resume or a repetition is of the same one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_cache import add_repository
from huggingface_hub import constants

from surogate_core.cli.main import main
from surogate_core.errors import UserError
from surogate_core.train.checkpoint import CheckpointDir

OLD, NEW = "1" * 40, "2" * 40
Run = Callable[..., int]


@pytest.fixture
def repository(tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """acme/tiny in the cache, with no network: the branch main and the tag v1 are at `OLD`; `NEW` is there too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return add_repository(tmp_path / "hub", "acme/tiny", {OLD: hf_dir, NEW: hf_dir}, {"main": OLD, "v1": OLD})


@pytest.fixture
def keys(base_on: Callable[[Path], list[str]]) -> list[str]:
    """Overrides of a short run on the hub id."""
    return [*base_on(Path("acme/tiny")), "lora_rank=4", "max_steps=1", "eval_steps=0"]


@pytest.mark.slow
def test_the_commit_is_in_everything_that_a_run_leaves(
    tmp_path: Path, repository: Path, keys: list[str], run_here: Run, digests: Callable[[Path], Any]
) -> None:
    out = tmp_path / "out"
    assert run_here(out, *keys, "model=acme/tiny@v1", "merge_adapter=true") == 0
    assert json.loads((out / "run.json").read_text())["base_commit"] == OLD
    checkpoint = CheckpointDir(out, limit=5).latest_good()
    assert checkpoint is not None
    assert checkpoint.state["base_commit"] == OLD
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["model"]["path"], config["model"]["revision"]) == ("acme/tiny", OLD)
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("acme/tiny", OLD)
    for export in ("adapter", "model"):
        card = (out / export / "README.md").read_text()
        assert f"Base model: `acme/tiny`, commit `{OLD}`." in card
        assert 'base_model: "acme/tiny"' in card
    # The branch and the tag move on; the written configuration repeats the run all the same.
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(NEW)
    again = tmp_path / "again"
    assert run_here(again, config_file=out / "config.yaml") == 0
    assert json.loads((again / "run.json").read_text())["base_commit"] == OLD
    assert digests(again / "adapter") == digests(out / "adapter")
    # And so does a merge: the adapter and the checkpoint know their base's commit.
    for trained in (out, out / "checkpoint-1"):
        arguments = [
            "--base-model",
            "acme/tiny",
            "--checkpoint-dir",
            str(trained),
            "--output",
            str(tmp_path / "merged"),
        ]
        assert main(["merge", *arguments]) == 0
        assert f"commit `{OLD}`" in (tmp_path / "merged" / "README.md").read_text()
        assert digests(tmp_path / "merged") == digests(out / "model")


@pytest.mark.slow
def test_a_branch_that_moved_is_not_resumed_on(
    tmp_path: Path, repository: Path, keys: list[str], run_here: Run
) -> None:
    run_here(tmp_path / "out", *keys)
    (repository / "refs" / "main").write_text(NEW)
    with pytest.raises(UserError, match=rf"at commit {OLD} when .* at {NEW} now\. Fix: set model\.revision={OLD}"):
        run_here(tmp_path / "out", *keys, "max_steps=2")
    assert run_here(tmp_path / "out", *keys, "max_steps=2", f"model.revision={OLD}") == 0


def test_a_merge_with_another_commit_is_told(
    tmp_path: Path, repository: Path, keys: list[str], run_here: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path / "out", *keys)
    base = f"acme/tiny@{NEW}"
    arguments = ["--base-model", base, "--checkpoint-dir", str(tmp_path / "out"), "--output", str(tmp_path / "merged")]
    assert main(["merge", *arguments]) == 0
    assert f"was trained on commit {OLD} of acme/tiny, and is folded into {NEW}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["model.revision=v9"], "model acme/tiny@v9: not in the local cache, and HF_HUB_OFFLINE is set"),
        (["model=acme/tiny@v9", "model.revision=v1"], "the revision v1 is given besides"),
        (["model=qwen3-0.6b", "model.revision=v1"], "only a hub id has a revision"),
    ],
)
def test_bad_revisions(
    given: list[str], expected: str, tmp_path: Path, repository: Path, keys: list[str], run_here: Run
) -> None:
    with pytest.raises(Exception, match=expected):
        run_here(tmp_path / "out", *keys, *given)
