"""Damaged models, adapters and tokenizers: each is read as it is, or refused in one message that names its file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from surogate_core.config.resolve import load_run_config
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import SurogateError
from surogate_core.files.paths import resolve_package_path
from surogate_core.files.tokenizers import named_panics
from surogate_core.hf.lora_files import CONFIG, PREFIX, WEIGHTS, check_merging, fold, open_stack
from surogate_core.hf.weights import INDEX, ModelDir, generation_config_in
from surogate_core.plugins.registry import Registry, load_plugins
from surogate_core.setup.assemble import resolve_model

MODULE = "model.layers.0.self_attn.q_proj"
FILES = {
    "model": ("config.json", "generation_config.json", INDEX, "model-00001-of-00001.safetensors"),
    "adapter": (CONFIG, WEIGHTS),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
}
VALUES = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        3,
        10**9,
        2**63,
        10**400,
        1.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "../../etc/passwd",
        "\x00",
        "\x1b[2J",
        "x" * 100_000,
        [],
        {},
        [1],
        ["x"],
        {"a": 1},
        [[[[]]]],
    ]
)
RAW = {
    "empty": b"",
    "nothing": b"null",
    "an array": b"[1]",
    "nested arrays": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "nested inside": b'{"num_hidden_layers":' + b"[" * 500 + b"]" * 500 + b"}",
    "an infinite number": b'{"num_hidden_layers": 1e999, "r": 1e999}',
    "a long number": b'{"r": ' + b"9" * 5000 + b"}",
    "a name twice": b'{"r": 8, "r": 16}',
    "half a pair": b'{"model_type": "\\ud800"}',
    "no UTF-8": b'{"a": "\xff"}',
    "a mark": b"\xef\xbb\xbf{}",
    "NUL": b"\x00" * 4096,
}
PLACES = ("a pipe", "a directory", "a device", "a link to itself", "a dead link", "gone", "unreadable length")
PATTERNS = (
    "(a+)+$",
    r"(\w+)*\W",
    ".*" * 30 + "x",
    "((.*)*)*!",
    "(",
    "[a",
    "q_proj",
    r"model\.layers\.\d+\..*",
    "x" * 5000,
)
RULES: tuple[dict[str, Any], ...] = (
    {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}},
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 6}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 5000}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Nothing"}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
    {"decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 6}},
    {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}},
    {"model": {"type": "BPE", "vocab": {}, "merges": []}},
    {"model": {"type": "WordPiece", "vocab": {"a": 10**30}}},
    {"added_tokens": [{"id": -1, "content": "x"}]},
    {"added_tokens": [{"id": 2**31, "content": "<x>", "special": True, "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": False}]},
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One file of one directory, and what is wrong with it."""

    kind: str
    file: str
    how: str
    path: tuple[str, ...] = ()
    value: Any = None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(sorted(FILES)))
    file = draw(st.sampled_from(FILES[kind]))
    how = draw(st.sampled_from(["value", "value", "raw", "place", "own"]))
    if how == "raw":
        return Case(kind, file, how, value=draw(st.sampled_from(sorted(RAW))))
    if how == "place":
        return Case(kind, file, how, value=draw(st.sampled_from(PLACES)))
    if how == "own" and kind == "adapter":
        key = draw(st.sampled_from(["rank_pattern", "alpha_pattern"]))
        return Case(
            kind, CONFIG, "set", (key,), {draw(st.sampled_from(PATTERNS)): draw(st.sampled_from([4, 8, -1, "x"]))}
        )
    if how == "own" and kind == "tokenizer":
        return Case(kind, "tokenizer.json", "merge", value=draw(st.sampled_from(RULES)))
    # A number in place of a key chooses one of those that are there.
    return Case(kind, file, "value", tuple(draw(st.lists(st.sampled_from("0123456789"), min_size=1, max_size=4))),
                draw(VALUES))  # fmt: skip


# ------------------------------------------------------------------------------------ the directories


def _write_model(directory: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "model.safetensors").rename(directory / FILES["model"][-1])
    names = _names(directory / FILES["model"][-1])
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, FILES["model"][-1])}))


def _names(file: Path) -> list[str]:
    from surogate_core.files.tensorfile import read_header

    return list(read_header(file))


def _write_adapter(directory: Path) -> None:
    directory.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {}}
    (directory / CONFIG).write_text(json.dumps(values))
    sides = {"lora_A": torch.ones(4, 32), "lora_B": torch.zeros(32, 4)}
    save_file({f"{PREFIX}{MODULE}.{side}.weight": t for side, t in sides.items()}, directory / WEIGHTS)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    _write_model(place / "model")
    _write_adapter(place / "adapter")
    source = Path(resolve_package_path("pkg://surogate_dataset_chat/embedded/tokenizer"))
    shutil.copytree(source, place / "tokenizer", ignore=shutil.ignore_patterns("__*"))
    return {kind: place / kind for kind in FILES}


# ------------------------------------------------------------------------------------ damage


def _header(content: bytes) -> tuple[Any, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _damage(file: Path, case: Case) -> None:
    if case.how == "place":
        _replace(file, str(case.value))
        return
    content = file.read_bytes()
    tensors = file.suffix == ".safetensors"
    if case.how == "raw":
        raw = RAW[case.value]
        file.write_bytes(_with_header(raw, _header(content)[1]) if tensors else raw)
        return
    values, data = _header(content) if tensors else (json.loads(content), b"")
    if case.how == "merge":
        values.update(case.value)
    elif case.how == "set":
        values[case.path[0]] = case.value
    else:
        _set(values, case.path, case.value)
    text = json.dumps(values).encode()
    file.write_bytes(_with_header(text, data) if tensors else text)


def _set(values: Any, path: tuple[str, ...], value: Any) -> None:
    for number in path[:-1]:
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))
        below = values[keys[int(number) * len(keys) // 10]] if keys else None
        if not isinstance(below, dict | list) or not below:
            break
        values = below
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    if keys:
        values[keys[int(path[-1]) * len(keys) // 10]] = value


def _replace(file: Path, what: str) -> None:
    if what == "unreadable length":
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
        return
    file.unlink()
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a directory":
        file.mkdir()
    elif what != "gone":
        file.symlink_to({"a device": "/dev/zero", "a link to itself": file, "a dead link": file.with_name("no")}[what])


# ------------------------------------------------------------------------------------ what is done with it


def _use_model(place: Path, registry: Registry) -> None:
    config = load_run_config(
        [f"model={place}", f"tokenizer={place}", "datasets=x.jsonl", "device=cpu"], registry=registry
    )
    resolve_model(config, registry)
    generation_config_in(place)


def _use_adapter(place: Path, base: ModelDir) -> None:
    stack = open_stack(place)
    shapes = {name: base.shape(name) for name in base.names()}
    check_merging(stack, shapes, base, tied=True, key="adapter_path")
    fold(f"{MODULE}.weight", torch.zeros(32, 32), stack)


def _use_tokenizer(place: Path) -> None:
    tokenizer = load_tokenizer(str(place))
    with named_panics(str(place)):
        ids = tokenizer("a" * 2000 + "!", add_special_tokens=False)["input_ids"]
        tokenizer.decode(ids)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", fuzzing.numbers(12, 300, 2000))
def test_models(number: int, roots: dict[str, Path]) -> None:
    registry, base = load_plugins(), ModelDir.open(roots["model"])
    uses: dict[str, Callable[[Path], None]] = {
        "model": lambda place: _use_model(place, registry),
        "adapter": lambda place: _use_adapter(place, base),
        "tokenizer": _use_tokenizer,
    }

    def run(case: Case, directory: Path) -> None:
        place = directory / case.kind
        shutil.copytree(roots[case.kind], place)
        _damage(place / case.file, case)
        try:
            uses[case.kind](place)
        except SurogateError as error:
            if str(place) not in str(error) and case.how != "value":
                raise fuzzing.WrongError(f"the message does not name the file: {error}") from error
            raise

    counts = fuzzing.fuzz(cases(), run, number, start=7)
    counts.check(number, least_accepted=0.05, least_refused=0.2)
