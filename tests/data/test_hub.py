"""Hub ids: one commit for config, weights and tokenizer, from the cache alone when offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_cache import add_repository
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import MachineError, UserError
from surogate_core.files.hub import commit_of, fetch, one_revision, split_revision
from surogate_core.hf.weights import INDEX, SINGLE, ModelDir, locate

OLD, NEW = "0" * 39 + "1", "a" * 40
REPO = "acme/tiny"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def model(tmp_path: Path, tokenizer: Any) -> Path:
    """A directory with a configuration, a tokenizer, two shards and what is never fetched."""
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save_pretrained(directory)
    shards = {f"model-0000{i}-of-00002.safetensors": {f"w{i}": torch.full((2,), float(i))} for i in (1, 2)}
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    where = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    (directory / "config.json").write_text('{"model_type": "new"}')
    return directory


@pytest.fixture
def cached(offline: Path, model: Path, tmp_path: Path) -> Path:
    """A cache with two commits: main and the tag v1."""
    before = tmp_path / "before"
    before.mkdir()
    (before / "config.json").write_text('{"model_type": "old"}')
    save_file({"w": torch.zeros(3)}, before / SINGLE)
    return add_repository(offline, REPO, {NEW: model, OLD: before}, {"main": NEW, "v1": OLD, "refs/pr/3": OLD})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("acme/tiny@v1", ("acme/tiny", "v1")),
        ("tiny@refs/pr/3", ("tiny", "refs/pr/3")),
        ("acme/tiny", ("acme/tiny", None)),
        ("./dir@v1", ("./dir@v1", None)),
        ("a/b/c@v1", ("a/b/c@v1", None)),
        ("acme/tiny@", ("acme/tiny@", None)),
    ],
)
def test_the_short_form(source: str, expected: tuple[str, str | None]) -> None:
    assert split_revision(source) == expected


def test_a_directory_with_an_at_sign_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny@v1").mkdir()
    assert split_revision("tiny@v1") == ("tiny@v1", None)
    assert locate("tiny@v1") == Path("tiny@v1")


def test_two_revisions_are_refused() -> None:
    assert one_revision("acme/tiny@v1", "v1", key="model") == (REPO, "v1")
    with pytest.raises(UserError, match=r"model acme/tiny@v1: the revision v2 is given besides\. Fix: keep one"):
        one_revision("acme/tiny@v1", "v2", key="model")


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), ("refs/pr/3", OLD), (OLD, OLD), (NEW, NEW)]
)
def test_a_revision_is_found_in_the_cache(cached: Path, revision: str | None, commit: str) -> None:
    short = REPO if revision is None else f"{REPO}@{revision}"
    for source, given in ((REPO, revision), (short, None)):
        opened = ModelDir.open(source, revision=given)
        assert (opened.commit, commit_of(opened.path)) == (commit, commit)
        assert opened.config == {"model_type": "new" if commit == NEW else "old"}
        assert opened.names() == (("w1", "w2") if commit == NEW else ("w",))


def test_the_tokenizer_is_of_the_same_revision(cached: Path) -> None:
    assert load_tokenizer(REPO)("w5 w6")["input_ids"] == [5, 6]
    assert load_tokenizer(f"{REPO}@{NEW}")("w5")["input_ids"] == [5]
    with pytest.raises(MachineError, match=rf"tokenizer acme/tiny@{OLD}: tokenizer\.json not in the local cache"):
        load_tokenizer(REPO, revision="v1")


def test_what_is_not_in_the_cache_says_what_to_do(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError) as caught:
        ModelDir.open(REPO, revision="v2")
    text = str(caught.value)
    assert "model acme/tiny@v2: not in the local cache, and HF_HUB_OFFLINE is set." in text
    assert f"The cache has refs/pr/3 = v1 ({OLD}), main ({NEW})." in text
    assert "Fix: unset HF_HUB_OFFLINE, or run `hf download acme/tiny --revision v2` on a machine that reaches" in text
    with pytest.raises(MachineError, match=r"model acme/other: not in the local cache, .*Fix: unset"):
        ModelDir.open("acme/other")
    # A mistyped path looks like an id.
    monkeypatch.chdir(cached)
    (cached / "models" / "qwen3").mkdir(parents=True)
    for load in (ModelDir.open, load_tokenizer):
        with pytest.raises(
            MachineError, match=r"There is no directory models/qwem3 either\. The nearest name is models/qwen3"
        ):
            load("models/qwem3")
    # A commit that was cut off is not guessed.
    with pytest.raises(MachineError, match="not in the local cache"):
        ModelDir.open(REPO, revision=NEW[:8])


@pytest.mark.parametrize("gone", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_snapshot_that_lacks_a_file(offline: Path, model: Path, gone: str) -> None:
    add_repository(offline, REPO, {NEW: model}, {"main": NEW}, leave_out=(gone,))
    with pytest.raises(MachineError, match=rf"model acme/tiny@{NEW}: {gone} not in the local cache.*--revision {NEW}"):
        ModelDir.open(REPO)


def test_random_weights_need_the_configuration_only(offline: Path, model: Path) -> None:
    shards = tuple(p.name for p in model.glob("*.safetensors"))
    add_repository(offline, REPO, {NEW: model}, {"main": NEW}, leave_out=shards)
    assert locate(REPO, weights=False).name == NEW
    with pytest.raises(MachineError, match="not in the local cache"):
        locate(REPO)


def test_a_revision_of_a_directory_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"is a directory here, and the revision v1 .*Fix: leave"):
        ModelDir.open(model, revision="v1")


def test_the_network_is_down(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Nothing listens there.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    assert ModelDir.open(REPO).commit == NEW
    with pytest.raises(MachineError, match=r"and the hub cannot be reached\..*Fix: run `hf download acme/other`"):
        ModelDir.open("acme/other")


class Hub:
    """Stands for the hub: fills the cache with the files that match, and remembers them."""

    def __init__(self, cache: Path, source: Path, files: tuple[str, ...] = ()):
        self.cache, self.source, self.fetched = cache, source, list[str]()
        self.more, self.calls = files, list[dict[str, Any]]()

    def snapshot_download(self, repo: str, **options: Any) -> str:
        from huggingface_hub.utils import filter_repo_objects

        self.calls.append(options)
        names = [*(p.name for p in self.source.iterdir()), *self.more]
        chosen = list(filter_repo_objects(names, allow_patterns=options["allow_patterns"]))
        self.fetched += chosen
        snapshot = self.cache / "models--acme--tiny" / "snapshots" / NEW
        snapshot.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            if (self.source / name).exists():
                (snapshot / name).write_bytes((self.source / name).read_bytes())
        return str(snapshot)


NEVER = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "original/model.safetensors",
    "original/tokenizer.model",
    "modeling_tiny.py",
    "training_args.bin",
    "onnx/model.onnx",
    "README.md",
    "model.safetensors.index.json.bak",
)


def test_only_what_is_needed_is_fetched(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub", model, NEVER)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert ModelDir.open(f"{REPO}@main").commit == NEW
    assert sorted(set(hub.fetched)) == sorted(p.name for p in model.iterdir())
    # The branch is looked up once: what comes later is of the commit that it meant then.
    assert [call["revision"] for call in hub.calls] == ["main", NEW]
    # The library shows its own progress bars.
    assert all("tqdm_class" not in call for call in hub.calls)


def test_a_repository_of_pickles(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in [*model.glob("*.safetensors"), model / INDEX]:
        file.unlink()
    hub = Hub(tmp_path / "hub", model, NEVER)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(UserError, match=r"has no model\.safetensors, .*pickles are never read\. Fix:"):
        ModelDir.open(REPO)
    assert "pytorch_model.bin" not in hub.fetched


def _http(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "from the hub")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (_http(errors.RevisionNotFoundError), UserError, r"acme/tiny@v9: the repository has no such branch.*tree/main"),
        (_http(errors.RepositoryNotFoundError), UserError, r"acme/tiny@v9: neither a directory.*hf auth login"),
        (_http(errors.GatedRepoError), UserError, r"access to this repository must be requested"),
        (errors.HFValidationError("x"), UserError, "nor a valid Hugging Face id"),
        (RuntimeError("proxy"), MachineError, "the Hugging Face hub failed: proxy"),
        (OSError(28, "No space left on device"), MachineError, "No space left"),
    ],
)
def test_errors_of_the_hub(
    error: Exception, kind: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch, offline: Path
) -> None:
    def fail(repo: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=expected):
        fetch(REPO, ["config.json"], revision="v9", key="model")
