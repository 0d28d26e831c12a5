"""A model as another program's file: which tensors a format receives, and files that are whole or not there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from surogate_command_export.conversion import Converted, convert, place_of, title_of
from surogate_command_export.merge import merge

from surogate_core.bundles import Exported, ExportFormat, ExportJob
from surogate_core.errors import MachineError, UserError
from surogate_core.files import atomic
from surogate_core.plugins.registry import Registry

Convert = Callable[..., Converted]


def writes(job: ExportJob, options: Any) -> Exported:
    """All tensors, as a format that the tests can read."""
    save_file({name: job.get(name).clone() for name in job.shapes}, job.file)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in load_file(job.file).items()} == {
        n: (job.dtypes[n], job.shapes[n]) for n in job.shapes
    }
    job.progress(1, 1)
    return Exported(notes=("a note",), texts={job.place.with_suffix(".txt"): job.name})


SPEC = ExportFormat(name="tensors", summary="tests", suffix=".safetensors", write=writes)


@pytest.fixture
def converting(installed: Registry, tmp_path: Path) -> Convert:
    def start(word: Path, spec: ExportFormat = SPEC, **options: Any) -> Converted:
        return convert(str(word), spec, None, tmp_path / "out" / "a.safetensors", installed, **options)

    return start


@pytest.fixture(scope="module")
def adapter(hf_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(hf_dir), LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.peft_config["default"].base_model_name_or_path = str(hf_dir)
    directory = tmp_path_factory.mktemp("run") / "shop" / "adapter"
    model.save_pretrained(directory)
    return directory


def test_a_directory_is_written_as_it_is(hf_dir: Path, converting: Convert) -> None:
    done = converting(hf_dir)
    assert done.notes == ("a note",)
    (text,) = done.others
    assert text.read_text() == hf_dir.name
    found, expected = load_file(done.file), load_file(hf_dir / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [p.name for p in sorted(done.file.parent.iterdir())] == ["a.safetensors", "a.txt"]


def test_an_adapter_is_folded_in_as_merge_does(
    adapter: Path, hf_dir: Path, converting: Convert, tmp_path: Path
) -> None:
    done = converting(adapter)
    assert done.others[0].read_text() == "shop"
    merge(None, adapter, tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    found, base = load_file(done.file), load_file(hf_dir / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(
        found["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )
    named = converting(hf_dir, adapter=str(adapter))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(named.file).items())


def test_a_tied_head_is_left_out(model_copy: Path, converting: Convert) -> None:
    config = (model_copy / "config.json").read_text()
    tied = re.sub(r'"tie_word_embeddings": false', '"tie_word_embeddings": true', config)
    assert tied != config
    (model_copy / "config.json").write_text(tied)
    tensors = load_file(model_copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model_copy / "model.safetensors")
    assert "lm_head.weight" not in load_file(converting(model_copy).file)


def test_the_former_file_stays_if_writing_fails(hf_dir: Path, converting: Convert, tmp_path: Path) -> None:
    first = converting(hf_dir).file.read_bytes()

    errors = [KeyboardInterrupt(), UserError("no"), OSError(28, "No space left on device")]

    def fails(job: ExportJob, options: Any) -> Exported:
        job.file.write_bytes(b"half")
        raise errors.pop(0)

    spec = ExportFormat(name="tensors", summary="tests", suffix=".safetensors", write=fails)
    for raised in (KeyboardInterrupt, UserError, MachineError):
        with pytest.raises(raised):
            converting(hf_dir, spec)
    out = tmp_path / "out"
    assert (out / "a.safetensors").read_bytes() == first
    assert sorted(p.name for p in out.iterdir()) == ["a.safetensors", "a.txt"]


def test_what_a_killed_export_left_is_replaced(hf_dir: Path, converting: Convert, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    left = atomic.sibling(tmp_path / "out" / "a.safetensors", "tmp")
    left.write_bytes(b"half")
    converting(hf_dir)
    assert not left.exists()


def test_names_and_places(tmp_path: Path, adapter: Path) -> None:
    assert title_of("acme/shop@v2") == "shop"
    assert title_of(str(adapter)) == "shop"
    assert place_of(str(tmp_path), SPEC, "acme/shop") == tmp_path / "shop.safetensors"
    assert place_of(f"{tmp_path}/new/", SPEC, "acme/shop") == tmp_path / "new" / "shop.safetensors"
    assert place_of(str(tmp_path / "x.safetensors"), SPEC, "acme/shop") == tmp_path / "x.safetensors"
    with pytest.raises(UserError, match=r"x.bin: is no .safetensors file. Fix: --to .*x.bin.safetensors"):
        place_of(str(tmp_path / "x.bin"), SPEC, "acme/shop")


def test_a_format_receives_what_the_family_says_to_it(
    hf_dir: Path, converting: Convert, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ExportJob] = []
    spec = replace(SPEC, write=lambda job, options: seen.append(job) or writes(job, options))
    converting(hf_dir, spec)
    assert seen[-1].family == {}
    kind = json.loads((hf_dir / "config.json").read_text())["model_type"]
    families = installed.all("model")
    described = {
        name: replace(one, exports={"tensors": lambda config: {"size": config["hidden_size"]}})
        for name, one in families.items()
        if kind in one.hf_model_types
    }
    real = Registry.all
    monkeypatch.setattr(
        Registry, "all", lambda self, what: families | described if what == "model" else real(self, what)
    )
    converting(hf_dir, spec)
    assert seen[-1].family == {"size": seen[-1].config["hidden_size"]}
    assert seen[-1].generation_config == json.loads((hf_dir / "generation_config.json").read_text())
