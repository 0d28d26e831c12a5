"""Checkpoints with damaged bytes: only a whole one is loaded, with its own values, and none is ever deleted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzzing
import pytest
import torch
from hypothesis import strategies as st
from tiny_qwen3 import make_engine

from surogate_core.engine.engine import Engine
from surogate_core.errors import UserError
from surogate_core.files.tensorfile import file_digest
from surogate_core.train.checkpoint import CheckpointDir, manifest_digest
from surogate_core.train.loop import Loop, LoopState
from surogate_testing import tiny

FILES = ("trainable.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
STEPS = (1, 2)
JSON_VALUES = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        2,
        3,
        10**30,
        -(10**30),
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "2",
        [],
        {},
        [1],
        {"a": 1},
        "\x00",
        "\ud800",
    ]
)

BLOCKS = [b"\x00" * 512, b"{}", b"[" * 5000, b'{"a":' * 3000]


@dataclass(frozen=True)
class Damage:
    """The damage to one file of the checkpoint of a step."""

    how: str
    file: str
    step: int
    share: float = 0.0
    """Where in the file."""
    data: bytes = b""
    path: tuple[int, ...] = ()
    value: Any = None


@dataclass(frozen=True)
class Case:
    """Damages of the directory with checkpoints of steps 1 and 2."""

    kind: str
    damages: tuple[Damage, ...]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """One damage."""
    file = draw(st.sampled_from(FILES))
    how = draw(
        st.sampled_from(
            [
                "flipped",
                "flipped",
                "flipped",
                "cut",
                "extended",
                "put in",
                "replaced",
                "removed",
                "empty",
                "swapped",
                "directory",
                "link to another",
                "link to itself",
                "pipe",
                "json",
                "json",
                "json",
                "forged",
                "forged",
                "renamed",
            ]
        )
    )
    return Damage(
        how=how,
        file=file,
        step=draw(st.sampled_from(STEPS)),
        share=draw(st.floats(0, 1, exclude_max=True)),
        data=draw(
            st.one_of(
                st.binary(min_size=1, max_size=8), st.sampled_from([b"\x00" * 512, b"{}", b"[" * 5000, b'{"a":' * 3000])
            )
        ),
        path=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))),
        value=draw(JSON_VALUES),
    )


cases = st.lists(damages(), min_size=1, max_size=2).map(
    lambda found: Case(
        kind=" + ".join(sorted({d.how for d in found})) if len(found) == 1 else "two damages", damages=tuple(found)
    )
)


@cache
def _engine() -> Engine:
    return make_engine(lora=tiny.lora(rank=2))


def _values(engine: Engine) -> dict[str, torch.Tensor]:
    return {f"{group}: {name}": t.clone() for group, named in engine.state().items() for name, t in named.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A directory with checkpoints of two steps, and what each of them holds."""
    root = tmp_path_factory.mktemp("checkpoints")
    engine, held = _engine(), {}
    checkpoints = CheckpointDir(root, limit=2)
    for step in STEPS:
        engine.train_step([tiny.batch(tiny.documents([20], seed=step))], step=step - 1, lr=1e-2)
        state = {"loop": asdict(LoopState(step=step)), "monitors": {}, "loader": {"epoch": 0, "position": step}}
        checkpoints.save(step, tensors=engine.state(), state=state)
        held[step] = (_values(engine), state)
    return root, held


def _damage(root: Path, damage: Damage) -> None:
    directory = root / f"checkpoint-{damage.step}"
    file, other = directory / damage.file, root / f"checkpoint-{3 - damage.step}" / damage.file
    if not file.is_file() or file.is_symlink():
        return  # gone with the damage before
    content = file.read_bytes()
    if not content and damage.how in ("flipped", "forged"):
        return
    at = int(damage.share * len(content))
    match damage.how:
        case "flipped":
            file.write_bytes(content[:at] + bytes([content[at] ^ (damage.data[0] or 1)]) + content[at + 1 :])
        case "cut":
            file.write_bytes(content[:at])
        case "extended":
            file.write_bytes(content + damage.data)
        case "put in":
            file.write_bytes(content[:at] + damage.data + content[at:])
        case "replaced":
            file.write_bytes(damage.data)
        case "empty":
            file.write_bytes(b"")
        case "removed":
            file.unlink()
        case "renamed":
            file.rename(file.with_suffix(".bak"))
        case "swapped" if other.is_file():
            file.write_bytes(other.read_bytes())
        case "directory":
            file.unlink()
            file.mkdir()
        case "link to another" if other.is_file():
            file.unlink()
            file.symlink_to(other)
        case "link to itself":
            file.unlink()
            file.symlink_to(file)
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "json":
            _change_json(directory / ("manifest.json" if "tensors" in damage.file else damage.file), damage)
        case "forged":
            _forge(directory, damage, content, at)


def _change_json(file: Path, damage: Damage) -> None:
    """Put another value somewhere into a JSON file."""
    if not file.is_file():
        return
    try:
        value = place = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return
    for depth, index in enumerate(damage.path):
        if not isinstance(place, dict) or not place:
            break
        key = sorted(place)[index % len(place)]
        if depth == len(damage.path) - 1 or not isinstance(place[key], dict):
            place[key] = damage.value
            break
        place = place[key]
    file.write_text(json.dumps(value), encoding="utf-8")


def _forge(directory: Path, damage: Damage, content: bytes, at: int) -> None:
    """Flip a byte, most often in a header, and enter the file's new digest: no mistake of a disk."""
    at = at if damage.share < 0.3 else int(damage.share * min(len(content), 400))
    file = directory / damage.file
    file.write_bytes(content[:at] + bytes([content[at] ^ (damage.data[0] or 1)]) + content[at + 1 :])
    if not (directory / "manifest.json").is_file():
        return
    try:
        manifest = json.loads((directory / "manifest.json").read_bytes())
        entry = manifest["files"][damage.file]
        entry["bytes"], entry["xxh3_128"] = len(content), file_digest(file)
        manifest["xxh3_128"] = manifest_digest(manifest)
        (directory / "manifest.json").write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError):
        return


def _contents(root: Path) -> dict[str, str]:
    """Every entry below, with what it holds."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            what = f"link to {path.readlink()}"
        elif path.is_file():
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            what = "directory" if path.is_dir() else "pipe"
        found[str(path.relative_to(root))] = what
    return found


def _run(case: Case, directory: Path, root: Path, held: dict[int, Any]) -> None:
    here = directory / "checkpoints"
    shutil.copytree(root, here)
    for damage in case.damages:
        _damage(here, damage)
    before = _contents(here)
    forged = any(damage.how == "forged" for damage in case.damages)
    engine = _engine()
    try:
        checkpoint = CheckpointDir(here, limit=2).latest_good()
        if checkpoint is None:
            raise fuzzing.WrongError("checkpoints are there, none is used, and the run would start anew without a word")
        loop = object.__new__(Loop)
        loop.engine, loop.bus = engine, SimpleNamespace(load_state=lambda states: None)  # type: ignore[assignment]
        loop._restore(checkpoint)
        if forged:
            return
        if checkpoint.step not in held or checkpoint.path.name != f"checkpoint-{checkpoint.step}":
            raise fuzzing.WrongError("a checkpoint of a wrong step is loaded")
        values, state = held[checkpoint.step]
        if checkpoint.state != state or asdict(loop.state) != state["loop"]:
            raise fuzzing.WrongError("a damaged state is loaded")
        now = _values(engine)
        if now.keys() != values.keys() or any(not torch.equal(now[name], values[name]) for name in now):
            raise fuzzing.WrongError("damaged tensors are loaded")
        newest = [d for d in case.damages if d.step == STEPS[-1] or "link" in d.how or d.how == "swapped"]
        if checkpoint.step != STEPS[-1] and not newest:
            raise fuzzing.WrongError("the newest checkpoint is whole and passed over")
    except UserError as error:
        if complaint := fuzzing.needs_fix(error):
            raise fuzzing.WrongError(f"{complaint}: {error}") from error
        raise
    finally:
        if _contents(here) != before:
            gone = sorted(before.items() - _contents(here).items())
            raise fuzzing.WrongError(f"files were changed or deleted: {gone[:3]}")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", fuzzing.numbers(40, 300, 3000))
def test_checkpoints(number: int, saved: tuple[Path, dict[int, Any]]) -> None:
    root, held = saved
    torch.set_num_threads(1)
    counts = fuzzing.fuzz(cases, lambda case, directory: _run(case, directory, root, held), number, start=3)
    counts.check(number, least_accepted=0.3, least_refused=0.0)
