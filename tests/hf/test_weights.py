"""Reading model directories: every kind of damage is one clear error before any data is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from surogate_core.errors import MachineError, UserError
from surogate_core.files.tensorfile import TensorFile, TensorWriter, write_tensors
from surogate_core.hf.weights import INDEX, SINGLE, ModelDir, unused_note

TENSORS = {
    "model.embed_tokens.weight": torch.randn(16, 4, generator=torch.Generator().manual_seed(0)),
    "model.layers.0.mlp.up_proj.weight": torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4),
    "model.layers.0.mlp.down_proj.weight": torch.arange(12, dtype=torch.float16).reshape(4, 3),
    "model.norm.weight": torch.ones(4),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(params=[1, 2], ids=["single", "sharded"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return single(tmp_path) if request.param == 1 else sharded(tmp_path)


def single(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_file(TENSORS, path / SINGLE)
    return path


def sharded(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    where = {name: SHARDS[i // 2] for i, name in enumerate(TENSORS)}
    for shard in SHARDS:
        save_file({name: TENSORS[name] for name in TENSORS if where[name] == shard}, path / shard)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def test_reads_every_tensor(model: Path) -> None:
    opened = ModelDir.open(str(model))
    assert opened.config == {"model_type": "qwen3"}
    assert sorted(opened.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert opened.header(name) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(opened.get(name), tensor)
        target = torch.empty_like(tensor)
        opened.copy_into(name, target)
        assert torch.equal(target, tensor)
    assert opened.check(SHAPES) == ()
    assert opened.check({"model.norm.weight": (4,)}) == tuple(n for n in opened.names() if n != "model.norm.weight")


def test_checks_need_no_data(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFile, "_read", lambda *args: pytest.fail("data was read"))
    ModelDir.open(model).check(SHAPES)
    ModelDir.open(model).fingerprint()


def test_missing_and_misshapen_are_reported_together(model: Path) -> None:
    needs = {**SHAPES, "model.embed_tokens.weight": (16, 8), "model.norm.weight": (5,)}
    del needs["model.layers.0.mlp.up_proj.weight"]
    needs["model.layers.0.mlp.upp_proj.weight"] = (3, 4)
    with pytest.raises(UserError) as caught:
        ModelDir.open(model).check(needs)
    message = str(caught.value)
    assert "embed_tokens.weight has shape [16, 4] in model" in message
    assert "the model needs [16, 8]" in message
    assert "model.norm.weight has shape [4]" in message
    assert "upp_proj.weight is missing; the nearest name is model.layers.0.mlp.up_proj.weight" in message
    assert "Fix:" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_by_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = sharded(tmp_path)
    save_file({n: torch.zeros(s, dtype=dtype) for n, s in list(SHAPES.items())[:2]}, model / SHARDS[0])
    with pytest.raises(UserError) as caught:
        ModelDir.open(model).check(SHAPES)
    name = {torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}[dtype]
    assert f"model.embed_tokens.weight is {name} in {SHARDS[0]}, the model needs one of F64, F32" in str(caught.value)
    assert "norm" not in str(caught.value)
    assert "Fix: name the model that these weights were quantised from." in str(caught.value)


def test_missing_shards_are_reported_together(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    (model / SHARDS[1]).unlink()
    with pytest.raises(UserError, match=rf"{SHARDS[1]}: missing \(needed by .*index\.json\)"):
        ModelDir.open(model)
    (model / SHARDS[0]).write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"2 weight files cannot be used") as caught:
        ModelDir.open(model)
    assert all(shard in str(caught.value) for shard in SHARDS)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    model = single(tmp_path)
    whole = (model / SINGLE).read_bytes()
    for length in [*range(40), *range(40, len(whole), 37), len(whole) - 1]:
        os.truncate(model / SINGLE, length)
        with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
            ModelDir.open(model)
        (model / SINGLE).write_bytes(whole)
    os.truncate(model / SINGLE, len(whole) - 1)
    with pytest.raises(UserError, match=rf"truncated: the header says {len(whole)} bytes"):
        ModelDir.open(model)
    (model / SINGLE).write_bytes(whole + b"x")
    with pytest.raises(UserError, match="too long"):
        ModelDir.open(model)


def raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        raw(b"{"),
        raw([1]),
        raw({"w": 3}),
        raw({"w": {"dtype": "F32", "shape": [1]}}, b"1234"),
        raw({"w": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        raw({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        raw({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        raw({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
        raw({"w": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}, b"1234"),
        raw({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"1234"),
        (2**63).to_bytes(8, "little") + b"x" * 99,
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes) -> None:
    model = single(tmp_path)
    (model / SINGLE).write_bytes(content)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        ModelDir.open(model)


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_broken_json(tmp_path: Path, file: str) -> None:
    model = sharded(tmp_path)
    (model / file).write_text('{"model_type": "qwen3",')
    with pytest.raises(UserError, match=rf"{file}: not valid JSON: .*line 1"):
        ModelDir.open(model)
    (model / file).write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        ModelDir.open(model)


def test_index_that_is_not_of_these_shards(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = SHARDS[0]
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model\.extra\.weight: not in"):
        ModelDir.open(model)
    index["weight_map"] = {"w": "../../etc/passwd"}
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="must be in the directory itself"):
        ModelDir.open(model)
    (model / INDEX).write_text("{}")
    with pytest.raises(UserError, match="weight_map"):
        ModelDir.open(model)


def test_no_weights(tmp_path: Path) -> None:
    model = single(tmp_path)
    (model / SINGLE).rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle, which is never read"):
        ModelDir.open(model)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="neither"):
        ModelDir.open(model)
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: missing"):
        ModelDir.open(model)


def test_no_such_directory(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(UserError, match=r"no such directory.*nearest name is .*/my-model"):
        ModelDir.open(tmp_path / "my-modle")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a file"):
        ModelDir.open(tmp_path / "file")
    with pytest.raises(UserError, match="valid Hugging Face id"):
        ModelDir.open("no spaces allowed")


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single(tmp_path)
    asked = {}

    def snapshot_download(repo: str, **kwargs: object) -> str:
        asked.update(repo=repo, **kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert ModelDir.open("Qwen/Qwen3-0.6B", revision="main").config == {"model_type": "qwen3"}
    assert (asked["repo"], asked["revision"]) == ("Qwen/Qwen3-0.6B", "main")
    assert not any(pattern in asked["allow_patterns"] for pattern in ("*.bin", "*.py", "*.pt"))

    def offline(repo: str, **kwargs: object) -> str:
        raise errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(MachineError, match="hub cannot be reached"):
        ModelDir.open("Qwen/Qwen3-0.6B")


def test_fingerprint(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    same = [ModelDir.open(single(tmp_path / name)).fingerprint() for name in ("a", "b")]
    assert same[0] == same[1]
    assert len(same[0]) == 64
    assert ModelDir.open(sharded(tmp_path / "c")).fingerprint() != same[0]
    (single(tmp_path / "d") / "config.json").write_text("{}")
    assert ModelDir.open(tmp_path / "d").fingerprint() != same[0]


def test_streamed_file_is_read_by_the_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    writer = TensorWriter(tmp_path / "a")
    odd = torch.arange(3, dtype=torch.bfloat16)
    writer.add("odd", odd)
    wide = torch.arange(2.0)
    assert not writer.fits("wide", wide), "fp32 at byte 6 is not aligned"
    writer.add("small", odd[:1])
    assert writer.fits("wide", wide)
    writer.add("wide", wide)
    writer.finish()
    loaded = load_file(tmp_path / "a")
    assert torch.equal(loaded["odd"], odd)
    assert torch.equal(loaded["wide"], wide)
    full = TensorWriter(tmp_path / "b")
    count = 0
    while full.fits(f"model.layers.{count}.weight", wide):
        full.add(f"model.layers.{count}.weight", wide)
        count += 1
    full.finish()
    assert len(load_file(tmp_path / "b")) == count > 400


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    from surogate_core.files.tensorfile import _DTYPES, write_tensors

    source = torch.arange(24).reshape(4, 6)
    tensors = {}
    for name, (torch_name, width) in _DTYPES.items():
        data = source.to(torch.uint8).repeat(1, width).contiguous()
        tensors[name] = (data % 2 == 0) if name == "BOOL" else data.view(getattr(torch, torch_name))
    tensors["strided"] = torch.arange(24.0).reshape(4, 6).t()
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 3)
    write_tensors(tmp_path / "x", tensors)
    loaded = TensorFile(tmp_path / "x")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (loaded[name], tensor)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("staging", [8, 2**20])
def test_casts_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int) -> None:
    from surogate_core.files import tensorfile

    monkeypatch.setattr(tensorfile, "_STAGING_BYTES", staging)
    opened = ModelDir.open(single(tmp_path))
    for name, tensor in TENSORS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            target = torch.full_like(tensor, -1, dtype=dtype)
            opened.copy_into(name, target)
            assert torch.equal(target, tensor.to(dtype))
    tensorfile.write_tensors(tmp_path / "x", {"t": torch.arange(5), "empty": torch.empty(0)})
    file = TensorFile(tmp_path / "x")
    with pytest.raises(UserError, match=r"tensor t is torch\.int64 \[5\], but torch\.float32 \[5\] is needed"):
        file.copy_into("t", torch.empty(5))
    file.copy_into("empty", torch.empty(0, dtype=torch.bfloat16))


def test_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_core.files import tensorfile

    monkeypatch.setattr(tensorfile, "PIECE_BYTES", 24)
    tensor = torch.arange(1001.0)
    tensorfile.write_tensors(tmp_path / "x", {"t": tensor})
    loaded = TensorFile(tmp_path / "x")
    assert torch.equal(loaded["t"], tensor)
    target = torch.zeros(1001)
    loaded.copy_into("t", target)
    assert torch.equal(target, tensor)


# ------------------------------------------------------------------------------ in a run


def changed(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(model / SINGLE)
    change(tensors)
    save_file(tensors, model / SINGLE)


HEAD = "model.layers.0.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda m: changed(m, lambda t: t.update(x=t.pop(HEAD))), f"{HEAD} is missing"),
    "shape": (lambda m: changed(m, lambda t: t.update({HEAD: t[HEAD][:-1].clone()})), f"{HEAD} has shape [31, 32] in"),
    "dtype": (lambda m: changed(m, lambda t: t.update({HEAD: t[HEAD].to(torch.int8)})), f"{HEAD} is I8 in"),
    "truncated": (lambda m: os.truncate(m / SINGLE, 9000), "not a whole safetensors file"),
    "shard": (lambda m: (m / SINGLE).rename(m / "model-1.safetensors"), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_nothing_is_allocated_before_the_files_are_checked(
    case: str,
    tmp_path: Path,
    model_copy: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surogate_core.run.run.build_engine", lambda *args, **keys: pytest.fail("allocated"))
    monkeypatch.setattr(TensorFile, "_read", lambda *args: pytest.fail("data was read"))
    damage, expected = DAMAGE[case]
    damage(model_copy)
    with pytest.raises(UserError) as caught:
        run_here(tmp_path / "out", *base_on(model_copy))
    assert expected in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert str(model_copy) in str(caught.value)


def test_tensors_without_use_are_told(
    tmp_path: Path,
    model_copy: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Callable[..., int],
    records: Callable[..., list[dict[str, Any]]],
) -> None:
    bias = HEAD.replace("weight", "bias")
    changed(model_copy, lambda t: t.update({bias: torch.zeros(32)}))
    run_here(tmp_path / "out", *base_on(model_copy), "max_steps=1", "eval_steps=0")
    (note,) = [n for n in records(tmp_path / "out", "run_start")[0]["notes"] if "has no use for" in n]
    assert bias in note
    expected = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert unused_note(expected, other_head="lm_head.weight") is None
    assert "a, b, c and 1 more" in str(unused_note(list("abcd"), other_head=None))
    both = str(unused_note(["a", "mtp.0", "mtp.1"], other_head=None, carried=("mtp.",)))
    assert "left out: a." in both
    assert "2 tensors that no run trains (mtp.0 …)" in both
    assert "left out" not in str(unused_note(["mtp.0"], other_head=None, carried=("mtp.",)))


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_head(path: Path, head: torch.Tensor, *, shards: bool) -> ModelDir:
    """A directory whose config.json ties the head, as it is read. The embedding is in bf16."""
    tensors = {EMBEDDING: TENSORS[EMBEDDING].bfloat16(), LM_HEAD: head}
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    names = dict(zip(tensors, SHARDS if shards else [SINGLE, SINGLE], strict=True))
    for file in set(names.values()):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": names}))
    return ModelDir.open(path).with_head(LM_HEAD, EMBEDDING)


@pytest.mark.parametrize("shards", [False, True])
def test_a_head_is_a_copy_of_the_embedding_only_if_their_values_are_equal(
    shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surogate_core.hf.weights._COMPARED", 7)
    embedding = TENSORS[EMBEDDING].bfloat16()
    for equal in (embedding.clone(), embedding.float(), embedding.double()):
        found = with_head(tmp_path, equal, shards=shards)
        assert found.names() == (EMBEDDING,)
        assert found.config == {"tie_word_embeddings": True}
        assert found.fingerprint() == ModelDir.open(tmp_path).fingerprint()
    last = embedding.clone()
    last[-1, -1] += 1
    for other in (last, TENSORS[EMBEDDING], embedding[:-1].clone(), embedding.t().contiguous(), embedding.int()):
        found = with_head(tmp_path, other, shards=shards)
        assert set(found.names()) == {EMBEDDING, LM_HEAD}
        assert found.config == {"tie_word_embeddings": False}
    untouched = ModelDir.open(tmp_path)
    assert untouched.with_head("head.weight", EMBEDDING) is untouched


def test_a_quantised_head_is_compared_dequantised(tmp_path: Path) -> None:
    codes = TENSORS[EMBEDDING].to(torch.float8_e4m3fn)
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for scale, expected in ((2.0, False), (1.0, True)):
        tensors = {EMBEDDING: codes.bfloat16(), LM_HEAD: codes, "lm_head.weight_scale_inv": torch.full((1, 1), scale)}
        save_file(tensors, tmp_path / SINGLE)
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True, **method}))
        assert ModelDir.open(tmp_path).is_quantised(LM_HEAD)
        found = ModelDir.open(tmp_path).with_head(LM_HEAD, EMBEDDING)
        assert found.config["tie_word_embeddings"] is expected
        assert (found.names() == (EMBEDDING,)) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_of_a_tensor_is_read_and_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(60, dtype=torch.bfloat16).view(5, 12)
    write_tensors(tmp_path / "some.safetensors", {"a": torch.zeros(3), "w": values})
    target = torch.zeros(17, dtype=dtype)
    TensorFile(tmp_path / "some.safetensors").read_part("w", 9, target)
    assert torch.equal(target, values.flatten()[9:26].to(dtype))
