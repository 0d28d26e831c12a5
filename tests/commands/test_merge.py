"""`surogate merge`: killed at any instant, its progress, and what it carries along of the run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from surogate_command_export.merge import merge
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.data.text.tokenizer import TOKENIZER_FILES
from surogate_core.hf.card import CardFacts
from surogate_core.hf.export import export_adapter, export_full
from surogate_core.inference.generation import named, prepare
from surogate_core.plugins.registry import Registry
from surogate_testing import tiny

KILL_MERGE = Path(__file__).parents[2] / "scripts" / "kill_merge.py"
IDS = torch.arange(300).reshape(1, 300)
Run = Callable[..., int]


@pytest.mark.slow
def test_a_killed_merge_leaves_the_old_the_new_or_nothing(tmp_path: Path) -> None:
    kill_merge(tmp_path, kills=8)


@pytest.mark.slow
def test_sixty_killed_merges(tmp_path: Path) -> None:
    kill_merge(tmp_path, kills=60)


def kill_merge(directory: Path, *, kills: int) -> None:
    arguments = [sys.executable, str(KILL_MERGE), "--kills", str(kills), "--dir", str(directory)]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("PASS")
    assert f"{kills} kills" in done.stdout


def test_the_progress_is_in_bytes_and_ends_at_all(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: Run
) -> None:
    run_here(tmp_path / "run", *base_on(hf_dir), "lora_rank=2", "max_steps=1", "eval_steps=0")
    told: list[tuple[int, int]] = []
    merge(str(hf_dir), tmp_path / "run", tmp_path / "merged", progress=lambda *figures: told.append(figures))
    total = (hf_dir / "model.safetensors").stat().st_size
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]
    assert 0.9 * total < told[-1][1] < total


# --------------------------------------------------------------- what is carried along

SCALING = ("rope_scaling=yarn", "max_model_len=1024", "sequence_len=512")


@pytest.fixture
def scaled(tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: Run) -> Path:
    """The output of a LoRA run that stretched its base, with the whole model beside the adapter."""
    keys = ("lora_rank=2", "max_steps=1", "eval_steps=0", "merge_adapter=true", "learning_rate=3e-3")
    run_here(tmp_path / "run", *base_on(hf_dir), *keys, *SCALING)
    return tmp_path / "run"


def logits(directory: Path, **keys: Any) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, **keys).eval()(IDS).logits


def test_an_adapter_says_how_its_base_was_changed(scaled: Path, hf_dir: Path) -> None:
    from peft import PeftModel

    changed = json.loads((scaled / "adapter" / "base_config_overrides.json").read_text())
    assert changed["max_position_embeddings"] == 1024
    (rope,) = [value for key, value in changed.items() if key.startswith("rope_")]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    card = (scaled / "adapter" / "README.md").read_text()
    assert f"--hf-overrides '{json.dumps(changed)}'" in card
    assert "The base's configuration was changed" in card
    # As the card says.
    config = AutoConfig.from_pretrained(hf_dir, **changed)
    base = AutoModelForCausalLM.from_pretrained(hf_dir, config=config)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, str(scaled / "adapter")).eval()(IDS).logits
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_dir), str(scaled / "adapter"))
        assert not torch.allclose(plain.eval()(IDS).logits, adapted, atol=1e-3), "the change must matter"
    torch.testing.assert_close(adapted, logits(scaled / "model"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases("adapter", "checkpoint-1")
@pytest.mark.parametrize("source", ["", "adapter", "checkpoint-1"])
def test_a_merge_has_the_configuration_that_was_trained(
    scaled: Path, tmp_path: Path, hf_dir: Path, source: str
) -> None:
    arguments = ["--base-model", str(hf_dir), "--checkpoint-dir", str(scaled / source), "--output", str(tmp_path / "m")]
    assert main(["merge", *arguments]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "m").rope_parameters["rope_type"] == "yarn"
    assert AutoConfig.from_pretrained(tmp_path / "m").max_position_embeddings == 1024
    assert torch.equal(logits(tmp_path / "m"), logits(scaled / "model"))


@pytest.mark.slow
def test_a_run_on_a_stretched_adapter_is_told_when_it_does_not_stretch(
    scaled: Path,
    tmp_path: Path,
    hf_dir: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Run,
    records: Callable[..., list[dict[str, Any]]],
) -> None:
    keys = [*base_on(hf_dir), "max_steps=1", "eval_steps=0", f"adapter_path={scaled}"]
    run_here(tmp_path / "plain", *keys)
    run_here(tmp_path / "same", *keys, *SCALING)
    told = [
        any("set rope_scaling" in n for n in records(tmp_path / r, "run_start")[0]["notes"]) for r in ("plain", "same")
    ]
    assert told == [True, False]


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("generation", [None, {"temperature": 0.5, "do_sample": True, "eos_token_id": [1, 2]}])
def test_every_export_is_complete(
    tmp_path: Path,
    model_copy: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Run,
    generation: dict[str, Any] | None,
) -> None:
    (model_copy / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (model_copy / "generation_config.json").write_text(json.dumps(generation))
    values = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**values, "eos_token_id": 7}))
    (model_copy / "chat_template.jinja").write_text(AutoTokenizer.from_pretrained(model_copy).chat_template)
    (model_copy / "additional_chat_templates").mkdir()
    (model_copy / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }} with tools")
    keys = ("lora_rank=2", "max_steps=2", "merge_adapter=true", "learning_rate=3e-3", "run_name=my-run")
    run_here(tmp_path / "run", *base_on(model_copy), *keys)
    # The run knows its base.
    assert main(["merge", str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    template = AutoTokenizer.from_pretrained(model_copy).chat_template
    assert sorted(template) == ["default", "tool_use"]
    for directory in (tmp_path / "run" / "adapter", tmp_path / "run" / "model", tmp_path / "merged"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.chat_template == template
        assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model_copy).get_vocab()
        card = (directory / "README.md").read_text()
        front, text = card.removeprefix("---\n").split("\n---\n", 1)
        assert yaml.safe_load(front)["pipeline_tag"] == "text-generation"
        assert text.startswith(f"\n# {'merged' if directory.name == 'merged' else 'my-run'}\n")
        assert f"Base model: `{model_copy.name}`." in text
        for row in (
            "| steps | 2 |",
            "| eval loss | ",
            "| method | LoRA, sft, rank 2, alpha 32, all projections |",
            "| data | train.jsonl (conversation, 120 rows); validation.jsonl (conversation, 12 rows, held out) |",
            "| trained parameters | ",
            "| learning_rate | 0.003 |",
        ):
            assert row in text, directory
        configuration = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
        assert (configuration["lora_rank"], configuration["max_steps"]) == (2, 2)
        assert configuration["datasets"][0]["type"] == "conversation"
        assert "output_dir" not in configuration
        # Only what differs: of the group, the path alone.
        assert configuration["model"].keys() == {"path"}
        assert str(tmp_path) not in text, "the card tells nothing of the place"
        assert "null" not in text
        assert "AutoModelForCausalLM.from_pretrained(place)" in text
    for directory in (tmp_path / "run" / "model", tmp_path / "merged"):
        written = json.loads((directory / "generation_config.json").read_text())
        # The base does not know the token that ends a turn of the chats: with its own ends alone it would talk on.
        ends = (generation or {"eos_token_id": [7]})["eos_token_id"]
        assert written == {
            **(generation or {}),
            "eos_token_id": sorted({*ends, tokenizer.eos_token_id}, reverse=not generation),
        }
    assert "adapters folded in | 1" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.slow_cases("another")
@pytest.mark.parametrize("own", ["base", "another"])
def test_a_checkpoint_has_the_template_and_the_tokenizer_that_were_trained(
    tmp_path: Path,
    hf_dir: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Run,
    installed: Registry,
    own: str,
) -> None:
    another = tmp_path / "another"
    another.mkdir()
    for file in TOKENIZER_FILES:
        for found in hf_dir.glob(file):
            shutil.copy(found, another)
    (another / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    keys = {"base": "template=chatml", "another": f"tokenizer={another}"}[own]
    run_here(tmp_path / "run", *base_on(hf_dir), "lora_rank=2", "max_steps=1", "eval_steps=0", keys)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    for trained, merged in ((tmp_path / "run" / "adapter", "of-adapter"), (checkpoint, "of-checkpoint")):
        arguments = ["--base-model", str(hf_dir), "--checkpoint-dir", str(trained), "--output", str(tmp_path / merged)]
        assert main(["merge", *arguments]) == 0
    about = {"README.md", "surogate_export.json"}
    one, other = (
        {p.name: p.read_bytes() for p in (tmp_path / merged).iterdir() if p.name not in about}
        for merged in ("of-adapter", "of-checkpoint")
    )
    assert one == other
    found = named(str(checkpoint))
    opened = prepare(found, load_run_config([*found.overrides, "device=cpu"], registry=installed), installed)
    expected = AutoTokenizer.from_pretrained(tmp_path / "of-adapter")
    assert opened.tokenizer.chat_template == expected.chat_template
    assert opened.tokenizer.eos_token == expected.eos_token


@pytest.mark.slow
def test_a_merge_takes_what_was_saved_last_and_says_what_is_later(
    tmp_path: Path,
    hf_dir: Path,
    base_on: Callable[[Path], list[str]],
    run_here: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    keys = (*base_on(hf_dir), "lora_rank=2", "eval_steps=0", "save_steps=1")
    run_here(out, *keys, "max_steps=2")
    arguments = ["--base-model", str(hf_dir), "--checkpoint-dir", str(out), "--output", str(tmp_path / "merged")]
    assert main(["merge", *arguments]) == 0
    assert "warning" not in capsys.readouterr().err
    shutil.copytree(out / "adapter", tmp_path / "of-step-2")
    run_here(out, *keys, "max_steps=3")
    shutil.rmtree(out / "adapter")
    # As a copy may leave the times: what counts is the order of saving.
    os.utime(out / "checkpoint-1" / "manifest.json")
    assert main(["merge", *arguments]) == 0
    assert f"{out / 'checkpoint-3'} is folded into" in capsys.readouterr().out
    shutil.copytree(tmp_path / "of-step-2", out / "adapter")
    assert main(["merge", *arguments]) == 0
    assert f"is of step 2, and {out / 'checkpoint-3'} was saved later" in capsys.readouterr().err
    # A checkpoint that cannot be read takes no adapter away, and is named where one of them is to be chosen.
    (out / "checkpoint-1" / "manifest.json").write_text("{")
    assert main(["merge", *arguments]) == 0
    shutil.rmtree(out / "adapter")
    capsys.readouterr()
    assert main(["merge", *arguments]) == 2
    assert re.search(r"checkpoint-1: manifest.json cannot be read.* Fix: name the checkpoint", capsys.readouterr().err)


def test_experts_in_mxfp4_that_no_adapter_changes(tmp_path: Path, installed: Registry) -> None:
    """All of a layer are in one tensor, and are written dequantised beside the projections that are folded in."""
    family = installed.get("model", "gpt-oss")
    config = {**family.presets["tiny"], "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32}
    engine = tiny.engine(config, build=family.build, lora=tiny.lora(rank=4, targets=("attention",)))
    base, card = tmp_path / "base", CardFacts(title="base")
    tensors, fused = engine.parameters.base_tensors(), engine.model.fused_tensors()
    export_full(base, tensors, config=config, tokenizer=None, card=card, fused=fused)
    held = load_file(base / "model.safetensors")
    expected = {}
    for name in fused:
        count, inputs, rows = held.pop(name).shape
        shape, generator = (count, rows, inputs // 32), torch.Generator().manual_seed(inputs)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(held, base / "model.safetensors")
    values = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (base / "config.json").write_text(json.dumps(values))
    engine.train_step(tiny.batches(0), step=0, lr=0.1).read()
    adapters = engine.parameters.adapter_tensors()
    export_adapter(
        tmp_path / "adapter", adapters, rank=4, alpha=8, dropout=0.0, base_model=None, card=card, model=engine.model
    )
    merge(str(base), tmp_path / "adapter", tmp_path / "merged", families=lambda: installed.all("model"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], value) for name, value in expected.items())
    assert merged.keys() == {name.split("_blocks")[0] for name in held if not name.endswith("_scales")}
    changed = {name for name in merged.keys() & held.keys() if not torch.equal(merged[name], held[name])}
    assert changed == {f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkvo"}
