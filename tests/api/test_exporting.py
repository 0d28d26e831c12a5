"""`surogate.export`: a GGUF file from Python."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

import surogate


def test_a_file_is_written(hf_dir: Path, tmp_path: Path) -> None:
    file = surogate.export(hf_dir, tmp_path / "a.gguf", type="q8_0", ollama=tmp_path / "Modelfile")
    assert file == tmp_path / "a.gguf"
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert "Q8_0" in kinds
    assert (tmp_path / "Modelfile").is_file()
    again = surogate.Run(hf_dir).export(tmp_path, format="gguf", keys={"rope_scaling": "linear", "max_model_len": 1024})
    assert again == tmp_path / f"{hf_dir.name}.gguf"
    fields = gguf.GGUFReader(again).fields
    assert fields["qwen3.rope.scaling.type"].contents() == "linear"
    assert fields["qwen3.rope.scaling.factor"].contents() == 4
    assert fields["qwen3.context_length"].contents() == 1024


def test_wrong_options(hf_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(surogate.ConfigError, match=r"typ: is no option of gguf. Fix: type"):
        surogate.export(hf_dir, tmp_path / "a.gguf", typ="q8_0")
    with pytest.raises(surogate.ConfigError, match="type: must be one of auto, f32, f16, bf16, q8_0; got 'q4'"):
        surogate.export(hf_dir, tmp_path / "a.gguf", type="q4")
    with pytest.raises(surogate.UserError, match="--format onnx: there is no such export"):
        surogate.export(hf_dir, tmp_path / "a.gguf", format="onnx")
    with pytest.raises(surogate.UserError, match=r'does not tell the format. Fix: set `format`: .*"gguf" \(.gguf\)'):
        surogate.export(hf_dir, tmp_path)
    assert not list(tmp_path.iterdir())
