"""GGUF files of tiny models: read back by transformers, and by llama.cpp where its Python package is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from surogate_export_gguf import surogate_export_format
from surogate_export_gguf.options import GgufOptions
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from surogate_core.plugin import MachineError, UserError, atomic, bundles

SUROGATE_PLUGIN = "export-gguf"

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = [
    pre_tokenizers.Split(Regex(WORDS + r"\p{N}" + REST), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]
TEXT = "The chain slips when it's 1234 °C.  Ünïcode\n\n and so on"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
DESCRIBED: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama", "biases": BIASES, "interleaved": True, "has_frequency_factors": True},
    "qwen2": {"arch": "qwen2", "biases": BIASES[:3]},
    "qwen3": {"arch": "qwen3"},
    "qwen3_moe": {
        "arch": "qwen3moe",
        "figures": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    },
}
"""How the plugins of these families describe such models."""

Make = Callable[..., tuple[bundles.ExportJob, Any]]
SPEC = surogate_export_format()


def test_conformance(surogate_check: Any) -> None:
    surogate_check.run()


def a_tokenizer(steps: list[Any], **model: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=special[0], eos_token=special[2])
    found.chat_template = CHATML
    return found


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return a_tokenizer(QWEN)


@pytest.fixture
def make(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Make:
    """A job of a random model, and the model."""

    def start(family: str, *, like: Any = tokenizer, dtype: Any = torch.float32, **changes: Any) -> Any:
        torch.manual_seed(0)
        sizes = {**SIZES, **(EXPERTS if family == "qwen3_moe" else {}), **changes}
        config = transformers.AutoConfig.for_model(family, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()  # zeros would hide a bias that is lost
        tensors = dict(each_expert(model.state_dict()))
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        job = bundles.ExportJob(
            name="tiny",
            config=config.to_dict(),
            shapes={name: tuple(t.shape) for name, t in tensors.items()},
            dtypes={name: t.dtype for name, t in tensors.items()},
            get=tensors.__getitem__,
            tokenizer=like,
            stop_ids=frozenset({0, 2}),
            sampling=bundles.Sampling(temperature=0.7, top_k=20),
            family=DESCRIBED[family],
            file=tmp_path / "tiny.gguf",
            place=tmp_path / "tiny.gguf",
        )
        return job, model

    return start


def each_expert(tensors: dict[str, torch.Tensor]) -> Any:
    """The names that checkpoints have."""
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            yield from ((name.replace("down_proj", f"{e}.down_proj.weight"), one) for e, one in enumerate(tensor))
        else:
            yield name, tensor


def greedy(model: Any, ids: list[int]) -> list[int]:
    given = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    return list(found[0, len(ids) :].tolist())


FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3_moe", {}),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_transformers_reads_the_file_back(family: str, changes: dict[str, Any], make: Make) -> None:
    job, model = make(family, **changes)
    steps: list[tuple[int, int]] = []
    object.__setattr__(job, "progress", lambda done, total: steps.append((done, total)))
    SPEC.write(job, GgufOptions())
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    ids = job.tokenizer(TEXT)["input_ids"]
    # Its reader does not read every figure, so it gets the configuration.
    again = transformers.AutoModelForCausalLM.from_pretrained(
        job.place.parent, gguf_file=job.place.name, config=model.config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert greedy(again, ids) == greedy(model, ids)


SCALINGS = [
    ("qwen3", {"rope_type": "linear", "factor": 4.0}),
    ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5}),
    (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [*FAMILIES, *((family, {"rope_parameters": {"rope_theta": 1e4, **scaling}}) for family, scaling in SCALINGS)],
)
def test_llama_cpp_continues_as_transformers_does(
    family: str, changes: dict[str, Any], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    job, model = make(family, **changes)
    SPEC.write(job, GgufOptions())
    llama = llama_cpp.Llama(str(job.place), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    ids = job.tokenizer(TEXT)["input_ids"] * 4
    llama.eval(ids)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    found = torch.log_softmax(torch.from_numpy(llama.scores[: len(ids)].copy()).double(), -1)
    # llama.cpp keeps keys and values in half precision. Without its scaling, RoPE gives more than 5e-3.
    assert (found - expected).abs().max() < 1e-3
    llama.reset()
    made = []
    for token in llama.generate(ids[:20], temp=0.0):
        made.append(token)
        if len(made) == 12:
            break
    assert made == greedy(model, ids[:20])


@pytest.mark.parametrize(("kind", "bound"), [("f16", 6e-4), ("bf16", 4e-3), ("q8_0", 8e-3)])
def test_types(kind: str, bound: float, make: Make) -> None:
    job, model = make("qwen3_moe", moe_intermediate_size=48)
    done = SPEC.write(job, GgufOptions(type=kind))  # type: ignore[arg-type]
    reader = gguf.GGUFReader(job.place)
    tensors = {t.name: t for t in reader.tensors}
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.1.ffn_up_exps.weight"} <= set(tensors)
    state = dict(each_expert(model.state_dict()))
    for name, own in (("blk.1.attn_v", "self_attn.v_proj"), ("blk.1.ffn_gate_inp", "mlp.gate")):
        found = gguf.dequantize(tensors[f"{name}.weight"].data, tensors[f"{name}.weight"].tensor_type)
        expected = state[f"model.layers.1.{own}.weight"].numpy()
        assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
    kinds = {name: t.tensor_type.name for name, t in tensors.items()}
    assert kinds["blk.0.attn_v.weight"] == kind.upper()
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    # Rows of 48 are no groups of 32.
    assert kinds["blk.0.ffn_down_exps.weight"] == ("F16" if kind == "q8_0" else kind.upper())
    assert bool(done.notes) == (kind == "q8_0")
    expert = state["model.layers.1.mlp.experts.3.down_proj.weight"].numpy()
    data = tensors["blk.1.ffn_down_exps.weight"]
    assert np.abs(gguf.dequantize(data.data, data.tensor_type)[3] - expert).max() <= bound * np.abs(expert).max()


def test_a_disk_without_room_is_found_before_writing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = make("qwen3")
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    with pytest.raises(MachineError, match=r"tiny.gguf: the disk is full: .* KiB needed, 1000 B free"):
        SPEC.write(job, GgufOptions())
    assert not job.file.exists()


def test_the_type_is_that_of_the_model(make: Make) -> None:
    job, model = make("llama", dtype=torch.bfloat16)
    SPEC.write(job, GgufOptions())
    tensors = {t.name: t for t in gguf.GGUFReader(job.place).tensors}
    found = gguf.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)
    assert tensors["output.weight"].tensor_type.name == "BF16"
    assert np.array_equal(found, model.lm_head.weight.detach().float().numpy())


def test_the_vocabulary(make: Make) -> None:
    job, _ = make("qwen2")
    SPEC.write(job, GgufOptions())
    again = transformers.AutoTokenizer.from_pretrained(job.place.parent, gguf_file=job.place.name)
    for text in (TEXT, "<|im_start|>user\n<tool>12345<|im_end|>\n"):
        assert again(text)["input_ids"] == job.tokenizer(text)["input_ids"]
    assert again.chat_template == CHATML
    fields = gguf.GGUFReader(job.place).fields
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    tokens, types = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(types) == SIZES["vocab_size"]
    assert (tokens[-1], types[-1]) == ("[PAD399]", gguf.TokenType.UNUSED)
    assert types[tokens.index("<|im_end|>")] == gguf.TokenType.CONTROL
    assert types[tokens.index("<tool>")] == gguf.TokenType.USER_DEFINED
    ids = {role: fields[f"tokenizer.ggml.{role}_token_id"].contents() for role in ("bos", "eos", "eot")}
    assert ids == {"bos": 0, "eos": 2, "eot": 2}
    assert fields["general.sampling.temp"].contents() == pytest.approx(0.7)
    assert fields["general.sampling.top_k"].contents() == 20


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = [pre_tokenizers.Split(Regex(WORDS + r"\p{N}{1,3}" + REST), "isolated"), QWEN[1]]


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
START, SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LOWERED, UPPERED = START + UPPER + "*" + LOWER + "+", START + UPPER + "+" + LOWER + "*"
MISTRAL = LOWERED + "|" + UPPERED + r"|\p{N}" + SYMBOLS
O200K = LOWERED + SHORT + "|" + UPPERED + SHORT + r"|\p{N}{1,3}" + SYMBOLS


def split_by(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior, invert), QWEN[1]]


PRES = [
    (split_by(MISTRAL), {"ignore_merges": True}, "tekken"),
    (split_by(O200K), {}, "gpt-4o"),
    (split_by(O200K), {"ignore_merges": True}, "gpt-4o"),
    (split_by(WORDS + r"\p{N}{1,3}" + REST, "removed", invert=True), {}, "smaug-bpe"),
    (QWEN, {}, "qwen2"),
    (LLAMA3, {"ignore_merges": True}, "llama-bpe"),
    (LLAMA3, {}, "smaug-bpe"),
    ([BYTES], {}, "gpt-2"),
    ([pre_tokenizers.Digits(individual_digits=True), BYTES], {}, "smollm"),
]


@pytest.mark.parametrize(("steps", "model", "pre"), PRES)
def test_ways_of_splitting_texts(steps: list[Any], model: dict[str, Any], pre: str, make: Make) -> None:
    job, _ = make("llama", like=a_tokenizer(steps, **model))
    SPEC.write(job, GgufOptions())
    assert gguf.GGUFReader(job.place).fields["tokenizer.ggml.pre"].contents() == pre


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(("steps", "model", "pre"), PRES)
def test_llama_cpp_splits_texts_in_the_same_way(
    steps: list[Any], model: dict[str, Any], pre: str, adds_bos: bool, make: Make
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = a_tokenizer(steps, **model)
    if adds_bos:
        bos = ("<|endoftext|>", 0)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[bos]
        )
    job, _ = make("llama", like=tokenizer)
    SPEC.write(job, GgufOptions())
    llama = llama_cpp.Llama(str(job.place), vocab_only=True, verbose=False)
    for text in (TEXT, "<|im_start|>user\nHello 12345<|im_end|>\n", "a  b\n\n\nc it's\tUNICODE ☃ <tool> IT'S"):
        ids = tokenizer(text)["input_ids"]
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == ids
        assert (ids[0] == 0) is adds_bos


def of_pieces(*, scheme: str | None = None, merges: Callable[[list[Any]], list[Any]] = list) -> PreTrainedTokenizerFast:
    """A tokenizer as transformers makes it from SentencePiece's BPE."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [TEXT + " the slips slip chains abab baba ababa bab abba aab"] * 4,
        trainers.BpeTrainer(vocab_size=110, show_progress=False),
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {token: i for i, token in enumerate([*special, *made])}
    pairs = [(t[:i], t[i:]) for t in made for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab]
    fallback = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges(pairs), **fallback))
    if scheme == "gemma":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif scheme is None:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens(special[:3])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_words_that_merges_do_not_give_are_said(make: Make) -> None:
    tokenizer = a_tokenizer(split_by(O200K), ignore_merges=True)
    job, _ = make("llama", like=tokenizer)
    assert SPEC.write(job, GgufOptions()).notes == ()
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    values["model"]["vocab"]["zqz"] = 390
    backend = Tokenizer.from_str(json.dumps(values))
    job, _ = make("llama", like=PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))
    (note,) = SPEC.write(job, GgufOptions()).notes
    assert "writes 1 words of the vocabulary, such as 'zqz', as several tokens" in note


@pytest.mark.parametrize("scheme", [None, "always", "never", "first", "gemma"])
def test_tokenizers_of_sentencepiece(scheme: str | None, make: Make) -> None:
    tokenizer = of_pieces(scheme=scheme)
    job, _ = make("llama", like=tokenizer)
    done = SPEC.write(job, GgufOptions())
    assert any("in front of a text behind a special token" in note for note in done.notes) == (scheme == "first")
    fields = gguf.GGUFReader(job.place).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is (scheme not in ("never", "gemma"))
    assert fields["tokenizer.ggml.token_type"].contents()[:4] == [2, 3, 3, 6]
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(job.place), vocab_only=True, verbose=False)
    texts = [TEXT, "the chain  slips ☃\n slip", "slips</s>chains and so", "ababab babaab abbaba"]
    for text in (t for t in texts if scheme != "first" or "</s>" not in t):
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: a_tokenizer([pre_tokenizers.Whitespace(), QWEN[1]]), "splits texts in a way"),
        (lambda: a_tokenizer([pre_tokenizers.ByteLevel(add_prefix_space=True)]), "splits texts in a way"),
        (lambda: a_tokenizer(QWEN, byte_fallback=True), "another treatment of spaces than SentencePiece"),
        (lambda: of_pieces(merges=lambda pairs: pairs[:-1]), "merges are not those of SentencePiece"),
        (lambda: of_pieces(merges=lambda pairs: pairs[::2] + pairs[1::2]), "merges are not those of SentencePiece"),
        (lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))), "WordLevel"),
    ],
)
def test_unknown_tokenizers_are_refused(tokenizer: Callable[[], Any], reason: str, make: Make) -> None:
    job, _ = make("llama", like=tokenizer())
    with pytest.raises(UserError, match=reason):
        SPEC.write(job, GgufOptions())
    assert not job.file.exists()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "'gpt2' are not available: the plugin of their family does not describe them"),
        ("qwen3", {"attention_bias": True}, "bias has no place in a qwen3 file"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers.0.mlp.gate_proj.weight has no place in a qwen3moe file"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "is dynamic"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, **SCALINGS[3][1]}}, "llama3, which qwen3 lacks"),
    ],
)
def test_models_that_llama_cpp_lacks(family: str, changes: dict[str, Any], reason: str, make: Make) -> None:
    job, _ = make("qwen3" if family == "gpt2" else family, **changes)
    if family == "gpt2":
        changed(job, config={**job.config, "model_type": "gpt2"}, family={})
    with pytest.raises(UserError, match=reason):
        SPEC.write(job, GgufOptions())
    assert not job.file.exists()


@pytest.mark.parametrize(
    ("value", "kind", "reason"), [(1e5, "f16", "100,000, and f16 ends at 65504"), (float("nan"), "q8_0", "not finite")]
)
def test_values_that_the_type_lacks(value: float, kind: str, reason: str, make: Make) -> None:
    job, model = make("qwen3")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = value
    with pytest.raises(UserError, match=f"layers.1.self_attn.o_proj.weight: has .*{reason}"):
        SPEC.write(job, GgufOptions(type=kind))  # type: ignore[arg-type]


def ids_of(job: bundles.ExportJob) -> dict[str, Any]:
    fields = gguf.GGUFReader(job.place).fields
    ends = "_token_id"
    return {k.split(".")[-1].removesuffix(ends): v.contents() for k, v in fields.items() if k.endswith(ends)}


def changed(job: bundles.ExportJob, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(job, name, value)


def test_tokens_that_only_the_configuration_has(make: Make) -> None:
    bare = a_tokenizer(QWEN)
    bare.bos_token = bare.eos_token = bare.chat_template = None
    # config.json, then generation_config.json, one of them as a list; ids outside of the vocabulary are ignored.
    for config, generation, expected in [
        ({"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}, {}, {"bos": 0, "eos": 2, "padding": 1}),
        ({}, {"eos_token_id": [2, 0], "bos_token_id": 0}, {"bos": 0, "eos": 2, "eot": 0}),
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {"eos": 7, "eot": 2}),
        ({"eos_token_id": 400, "pad_token_id": -1}, {"eos_token_id": 2}, {"eos": 2}),
    ]:
        job, _ = make("qwen2", like=bare)
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        stop = [generation.get("eos_token_id", config.get("eos_token_id"))]
        stops = frozenset(stop[0] if isinstance(stop[0], list) else stop)
        changed(job, config={**job.config, **none, **config}, generation_config=generation, stop_ids=stops)
        SPEC.write(job, GgufOptions())
        assert ids_of(job) == expected


def test_a_model_without_an_end_token_is_said(make: Make) -> None:
    bare = a_tokenizer(QWEN)
    bare.bos_token = bare.eos_token = bare.chat_template = None
    job, _ = make("qwen2", like=bare)
    changed(job, config={**job.config, "eos_token_id": None}, stop_ids=frozenset())
    assert any("has an end token" in note for note in SPEC.write(job, GgufOptions()).notes)


def test_several_end_tokens(make: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    job, _ = make("qwen2")
    changed(job, stop_ids=frozenset({0, 2}))
    assert SPEC.write(job, GgufOptions()).notes == ()
    assert ids_of(job) == {"bos": 0, "eos": 2, "eot": 2, "eom": 0}
    changed(job, stop_ids=frozenset({0, 2, 5, 6}))
    (note,) = SPEC.write(job, GgufOptions()).notes
    five, six = tokenizer.convert_ids_to_tokens([5, 6])
    assert f"llama.cpp may go on after {five}, {six}. Name them as stop texts there" in note


def test_a_family_describes_itself(make: Make) -> None:
    """With names, figures and other weights of its own."""
    job, _ = make("llama", attention_bias=True)
    family = DESCRIBED["llama"]
    renamed = {name.replace("self_attn.q_proj", "mix.queries"): shape for name, shape in job.shapes.items()}
    get = job.get
    changed(
        job,
        shapes=renamed,
        dtypes=dict.fromkeys(renamed, torch.float32),
        get=lambda name: get(name.replace("mix.queries", "self_attn.q_proj")),
        config={**job.config, "model_type": "acme"},
        family={
            **family,
            "tensors": {"model.layers.{}.mix.queries": "blk.{}.attn_q"},
            "figures": {"attention.sliding_window": 128, "context_length": 99, "attn_logit_softcapping": 50.0},
            "convert": lambda name, weight: weight + 1 if name == "model.norm.weight" else weight,
        },
    )
    SPEC.write(job, GgufOptions())
    reader = gguf.GGUFReader(job.place)
    assert reader.fields["llama.attention.sliding_window"].contents() == 128
    assert reader.fields["llama.context_length"].contents() == 99
    kinds = {reader.fields[f"llama.{key}"].types[0] for key in ("attention.sliding_window", "context_length")}
    assert kinds == {gguf.GGUFValueType.UINT32}, "llama.cpp reads no signed ones"
    assert reader.fields["llama.attn_logit_softcapping"].types == [gguf.GGUFValueType.FLOAT32]
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert {"blk.0.attn_q.weight", "blk.1.attn_q.bias"} <= tensors.keys()
    assert np.array_equal(tensors["output_norm.weight"], get("model.norm.weight").numpy() + 1)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ({"arch": "lama"}, r"'acme' describes it with an unknown `arch` 'lama'\. .* llama"),
        ({"arch": "llama", "bias": ()}, r"unknown key 'bias'\. .* one of arch, biases, "),
    ],
)
def test_a_description_with_a_mistake(family: dict[str, Any], reason: str, make: Make) -> None:
    job, _ = make("llama")
    changed(job, config={**job.config, "model_type": "acme"}, family=family)
    with pytest.raises(UserError, match=reason):
        SPEC.write(job, GgufOptions())
    assert not job.file.exists()
