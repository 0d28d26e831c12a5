"""The tokenizer in a GGUF file: byte-level BPE that splits texts in a way that llama.cpp has a name for, or
SentencePiece's BPE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf

from surogate_core.plugin import UserError, bundles, encoding
from surogate_export_gguf import pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}{_SYMBOLS}"
_O200K = rf"{_START}{_UPPER}*{_LOWER}+{_SHORT}|{_START}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}{_SYMBOLS}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BYTES, _GPT2_BYTES = ("bytes", False), ("bytes", True)
_DIGITS = ("digits", True)

SPLITS: Mapping[tuple[Any, ...], str] = {
    (False, ("split", _WORDS + r"\p{N}" + _REST), _BYTES): "qwen2",
    (True, ("split", _WORDS + r"\p{N}{1,3}" + _REST), _BYTES): "llama-bpe",
    (False, ("split", _WORDS + r"\p{N}{1,3}" + _REST), _BYTES): "smaug-bpe",
    (False, _GPT2_BYTES): "gpt-2",
    (False, ("split", _GPT2), _BYTES): "gpt-2",
    (False, _DIGITS, _GPT2_BYTES): "smollm",
    (True, ("split", _TEKKEN), _BYTES): "tekken",
    (False, ("split", _O200K), _BYTES): "gpt-4o",
    (True, ("split", _O200K), _BYTES): "gpt-4o",
}
"""(whether whole words come before merges, the steps of the pre-tokenizer) → ``tokenizer.ggml.pre``."""
MERGES_FIRST = frozenset({"gpt-4o"})
"""Those of which llama.cpp merges a word that is in the vocabulary as any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer of a file."""

    model: str
    """llama.cpp's name of the kind: ``gpt2`` for bytes, ``llama`` for characters."""
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    """The merges of a vocabulary of bytes."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Token → score, in a vocabulary of characters."""
    has_space_prefix: bool = False
    """Whether a space is put in front of texts, in a vocabulary of characters."""
    ids: Mapping[str, int]
    """Role, such as ``eos`` → token id."""
    adds_bos: bool
    adds_eos: bool
    template: str | list[dict[str, str]] | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: bundles.ExportJob, size: int) -> Vocabulary:
        """The vocabulary for `size` rows of an embedding; raises `UserError` for a tokenizer that llama.cpp lacks."""
        tokenizer = job.tokenizer
        if not tokenizer.is_fast:
            raise _refusal("has no tokenizer.json")
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        kind = _pieces(values) if pieces.is_of_pieces(values) else _bytes(values)
        tokens = {i: token for token, i in values["model"]["vocab"].items()}
        types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
        for added in values["added_tokens"]:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        if kind["model"] == "llama":
            types |= {i: gguf.TokenType.BYTE for i, token in tokens.items() if pieces.BYTE.fullmatch(token)}
            types |= {i: gguf.TokenType.UNKNOWN for i in [tokenizer.unk_token_id] if i is not None}
        if (largest := max(tokens)) >= size:
            raise _refusal(f"has token ids up to {largest}, and the embedding has {size} rows")
        adds_bos, adds_eos = _added(tokenizer)
        ids, unnamed = special_ids(job, size)
        notes = [*kind.pop("notes", ()), *_end_notes(ids, [tokens.get(i, str(i)) for i in unnamed])]
        return cls(
            **kind,
            tokens=tuple(tokens.get(i, f"[PAD{i}]") for i in range(size)),
            types=tuple(int(types.get(i, gguf.TokenType.UNUSED)) for i in range(size)),
            ids=ids,
            adds_bos=adds_bos,
            adds_eos=adds_eos,
            template=_template(tokenizer),
            notes=tuple(notes),
        )

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write it."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "llama":
            writer.add_token_scores([self.scores.get(token, pieces.UNREACHED) for token in self.tokens])
            writer.add_add_space_prefix(self.has_space_prefix)
        else:
            writer.add_token_merges(self.merges)
        for role, i in self.ids.items():
            getattr(writer, f"add_{role}_token_id")(i)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.template is not None:
            writer.add_chat_template(self.template)


def _refusal(why: str) -> UserError:
    return UserError(
        f"--format gguf: the tokenizer {why}. "
        f"Fix: serve the model with transformers or vLLM, which read it; `surogate merge` writes its directory."
    )


def _bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of byte-level BPE."""
    pre, merges, notes = _pre(values), _merges(values), []
    if pre in MERGES_FIRST and values["model"].get("ignore_merges") and (lost := _lost(values)):
        notes.append(
            f"llama.cpp writes {len(lost):,} words of the vocabulary, such as {lost[0]!r}, as several tokens, since "
            f"their merges do not give them."
        )
    return {"model": "gpt2", "pre": pre, "merges": merges, "notes": notes}


def _lost(values: Mapping[str, Any]) -> list[str]:
    """The words of a vocabulary that its merges do not give."""
    from tokenizers.models import BPE

    special = {added["content"] for added in values["added_tokens"]}
    pairs = (pair.split(" ") for pair in _merges(values))
    model = BPE(values["model"]["vocab"], [(first, second) for first, second in pairs])
    return [word for word in values["model"]["vocab"] if word not in special and len(model.tokenize(word)) != 1]


def _pieces(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SentencePiece's BPE."""
    prefix, scores = pieces.prefix(values), pieces.scores(values)
    if prefix is None:
        raise _refusal("is BPE over characters, with another treatment of spaces than SentencePiece")
    if scores is None:
        raise _refusal("is BPE over characters, and its merges are not those of SentencePiece")
    note = "llama.cpp puts a space in front of a text behind a special token, and this tokenizer does not."
    return {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "has_space_prefix": prefix != "never",
        "notes": (note,) if prefix == "first" else (),
    }


def _pre(values: Mapping[str, Any]) -> str:
    """llama.cpp's name of how texts are split."""
    model, normalizer = values["model"], values.get("normalizer")
    if model["type"] != "BPE":
        raise _refusal(f"is of type {model['type']}; only byte-level BPE is available")
    if wrong := [k for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(k)]:
        raise _refusal(f"has `{wrong[0]}`, which llama.cpp lacks")
    # llama.cpp does not normalise. Most text is in the form NFC already.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _refusal(f"normalises texts by {normalizer['type']}, which llama.cpp lacks")
    steps = _steps(values.get("pre_tokenizer"))
    found = SPLITS.get((bool(model.get("ignore_merges")), *steps))
    if found is None:
        raise _refusal(f"splits texts in a way that llama.cpp has no name for: {steps}")
    return found


def _steps(step: Mapping[str, Any] | None) -> tuple[Any, ...]:
    if step is None:
        return ()
    kind = step["type"]
    if kind == "Sequence":
        return tuple(inner for one in step["pretokenizers"] for inner in _steps(one))
    # A pattern that matches every character leaves nothing to remove.
    kept = {"Isolated": False, "Removed": True}
    if kind == "Split" and kept.get(step["behavior"]) is step["invert"] and "Regex" in step["pattern"]:
        return (("split", step["pattern"]["Regex"]),)
    if kind == "Digits":
        return (("digits", step["individual_digits"]),)
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return (("bytes", step["use_regex"]),)
    return ((kind, json.dumps(step, sort_keys=True)),)


def _merges(values: Mapping[str, Any]) -> tuple[str, ...]:
    merges = values["model"]["merges"]
    return tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in merges)


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the tokenizer puts its beginning and its end of text around a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    bos = bool(whole) and whole[0] == tokenizer.bos_token_id and whole[0] != plain[0]
    eos = bool(whole) and whole[-1] == tokenizer.eos_token_id and whole[-1] != plain[-1]
    if list(whole[bos : len(whole) - eos]) != list(plain):
        raise _refusal("puts other tokens around texts than its beginning and its end of text")
    return bos, eos


def special_ids(job: bundles.ExportJob, size: int) -> tuple[dict[str, int], list[int]]:
    """Role → token id, and the tokens that end a completion for which the format has no key left.

    A role that the tokenizer's files do not give is that of ``config.json``, as in llama.cpp's converter, or of
    ``generation_config.json``. Further end tokens take the keys of a turn's and a message's end, ``eot`` and ``eom``.
    """
    tokenizer, found = job.tokenizer, {}
    for role in ("bos", "eos", "pad"):
        values = [getattr(tokenizer, f"{role}_token_id")]
        for config in (job.config, job.generation_config):
            own = config.get(f"{role}_token_id")
            values += own if isinstance(own, list | tuple) else [own]
        found[role] = next((i for i in values if _is_id(i, size)), None)
    found |= {"unk": tokenizer.unk_token_id, "eot": encoding.turn_end_id(tokenizer)}
    others = sorted(i for i in job.stop_ids - {found["eos"], found["eot"]} if _is_id(i, size))
    for role in ("eos", "eot", "eom"):
        if others and found.get(role) is None:
            found[role] = others.pop(0)
    return {role: i for role, i in found.items() if i is not None}, others


def _is_id(value: object, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _end_notes(ids: Mapping[str, int], unnamed: list[str]) -> Iterator[str]:
    if "eos" not in ids:
        yield (
            "neither the tokenizer nor config.json nor generation_config.json has an end token, and llama.cpp takes "
            "a token of its own choice for it."
        )
    if unnamed:
        yield (
            f"the format has keys for three end tokens (eos, eot, eom), and the model has more: llama.cpp may go on "
            f"after {', '.join(unnamed)}. Name them as stop texts there."
        )


def _template(tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]] | None:
    found = tokenizer.chat_template
    if isinstance(found, dict):
        return [{"name": name, "template": _unmarked(template)} for name, template in found.items()]
    return _unmarked(found) if found else None


def _unmarked(template: str) -> str:
    """The template without marks of what is trained, which only transformers knows; they are blocks without effect."""
    template = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", template)
