import json
import shutil
from pathlib import Path

import pytest
import surogate_dataset_chat
import torch
from transformers import AutoTokenizer

from surogate_core.data.templates import apply_template
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.hf.card import CardFacts
from surogate_core.hf.export import export_adapter, export_full
from surogate_core.hf.tokenizer_files import TokenizerFiles

SOURCE = Path(surogate_dataset_chat.__file__).parent / "embedded" / "tokenizer"
OWN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def base(tmp_path):
    """Files as Llama 3 has them: a class of transformers 4, and a template in the configuration."""
    shutil.copytree(SOURCE, tmp_path / "base")
    return tmp_path / "base"


def changed(directory, **values):
    path = directory / "tokenizer_config.json"
    found = {**json.loads(path.read_bytes()), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def files(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def written(tokenizer, place):
    place.mkdir()
    TokenizerFiles.of(tokenizer).save_pretrained(str(place))
    return place


def test_files_that_nothing_changed_are_copied_in_every_export(base, tmp_path):
    (base / "additional_chat_templates").mkdir()
    (base / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    changed(base, chat_template=None)
    (base / "chat_template.jinja").write_text(OWN)
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    before, tokenizer = files(base), load_tokenizer(str(base))
    assert files(written(tokenizer, tmp_path / "alone")) == before
    weights = {"model.norm.weight": torch.ones(4)}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    export_full(tmp_path / "full", weights.items(), config=config, tokenizer=tokenizer, card=CardFacts(title="a"))
    pair = {"q.lora_A.weight": torch.ones(1, 4), "q.lora_B.weight": torch.ones(4, 1)}
    export_adapter(
        tmp_path / "adapter",
        pair.items(),
        rank=1,
        alpha=1.0,
        dropout=0.0,
        base_model=None,
        card=CardFacts(title="a"),
        tokenizer=tokenizer,
    )
    for place in ("full", "adapter"):
        assert before.items() <= files(tmp_path / place).items()


@pytest.mark.parametrize("inside", [True, False])
def test_a_template_changes_its_key_or_its_file_alone(inside, base, tmp_path):
    if not inside:
        changed(base, chat_template=None)
        (base / "chat_template.jinja").write_text(OWN)
    tokenizer = load_tokenizer(str(base))
    apply_template(tokenizer, "chatml")
    found = written(tokenizer, tmp_path / "new")
    before, after = files(base), files(found)
    name = "tokenizer_config.json" if inside else "chat_template.jinja"
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == [name]
    if inside:
        old, new = (json.loads(one[name]) for one in (before, after))
        assert {**new, "chat_template": old["chat_template"]} == old
    again = AutoTokenizer.from_pretrained(found)
    assert again.chat_template == tokenizer.chat_template
    assert again("Hi <|im_end|>")["input_ids"] == tokenizer("Hi <|im_end|>")["input_ids"]


def test_named_templates_end_when_a_run_has_one(base, tmp_path):
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(str(base))
    apply_template(tokenizer, "chatml")
    found = written(tokenizer, tmp_path / "new")
    assert AutoTokenizer.from_pretrained(found).chat_template == tokenizer.chat_template


def test_the_end_of_a_turn_becomes_the_end_of_text(base, tmp_path):
    changed(base, eos_token="<|endoftext|>")
    (base / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}')
    tokenizer = load_tokenizer(str(base))
    apply_template(tokenizer, "chatml")
    found = written(tokenizer, tmp_path / "new")
    assert json.loads((found / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    both = json.loads((found / "special_tokens_map.json").read_text())
    assert both == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert AutoTokenizer.from_pretrained(found).eos_token == "<|im_end|>"


def test_a_dropout_that_is_off_stays_off(base, tmp_path):
    path = base / "tokenizer.json"
    values = json.loads(path.read_bytes())
    values["model"]["dropout"] = 0.5
    path.write_text(json.dumps(values))
    tokenizer = load_tokenizer(str(base))
    tokenizer.backend_tokenizer.model.dropout = None
    found = written(tokenizer, tmp_path / "new")
    values["model"]["dropout"] = None
    assert json.loads((found / "tokenizer.json").read_text()) == values
    assert json.loads(path.read_bytes())["model"]["dropout"] == 0.5


def test_files_that_are_gone_are_written_by_transformers(base, tmp_path):
    tokenizer = load_tokenizer(str(base))
    shutil.rmtree(base)
    assert TokenizerFiles.of(tokenizer) is None
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    weights = {"model.norm.weight": torch.ones(4)}
    export_full(tmp_path / "full", weights.items(), config=config, tokenizer=tokenizer, card=CardFacts(title="a"))
    assert AutoTokenizer.from_pretrained(tmp_path / "full").get_vocab() == tokenizer.get_vocab()
