"""The text of a completion while it grows, and its stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from surogate_core.inference.completions import GrowingText, Stop, StopText, token_bytes


@pytest.fixture(scope="module")
def byte_level(hf_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(hf_dir)


@pytest.fixture(scope="module")
def llama_like() -> Any:
    """A tokenizer that writes a space as ▁, drops the first one, and falls back to bytes."""
    words = ["▁", "▁the", "▁chain", "s", "▁slip", "日", "."]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token=None))
    parts = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    made.decoder = tokenizers.decoders.Sequence(parts)
    made.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def word_piece() -> Any:
    words = ["[UNK]", "the", "chain", "##s", "slip", "##ped", ".", ","]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """One token a byte, which every tokenizer here has, except for special tokens."""
    found = []
    table = token_bytes(tokenizer)
    single = {table.inside(token): token for token in range(len(tokenizer)) if len(table.inside(token)) == 1}
    for symbol in table.symbols(text):
        found += [symbol] if isinstance(symbol, int) else [single[bytes([byte])] for byte in symbol.encode()]
    return found


def watched(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, int]:
    """(text, tokens until a stop text is complete); what is given in parts must be the same."""
    watch, whole = (
        GrowingText(tokenizer, ids_of(tokenizer, "A"), stop),
        GrowingText(tokenizer, ids_of(tokenizer, "A"), stop),
    )
    parts: list[str] = []
    for token in ids:
        ended = watch.take(token)
        assert whole.take(token) is ended
        parts.append(watch.settled(ended))
        if ended:
            break
    parts.append(watch.settled(True))
    assert "".join(parts) == whole.text() == watch.text()
    return whole.text(), len(whole.ids)


def test_a_growing_text_is_given_in_parts(byte_level: Any) -> None:
    text = "The chain slips. 日本語 STOP here"
    for stop, wanted in (((), text), (("STOP",), "The chain slips. 日本語 "), (("chain", "The chain slips!"), "The ")):
        watch = GrowingText(byte_level, byte_level("Hello")["input_ids"], stop)
        parts: list[str] = []
        for token in byte_level(text, add_special_tokens=False)["input_ids"]:
            ended = watch.take(token)
            parts.append(watch.settled(ended))
            if ended:
                break
        parts.append(watch.settled(True))
        assert "".join(parts) == watch.text() == wanted
        assert not any("\ufffd" in part for part in parts)
        assert sum(map(bool, parts)) > (0 if stop else 6)


@pytest.mark.parametrize("stop", ["🙂" * 2, "🙂" * 40, "ተጠቃሚ፦", "用户输入：", "Пользователь:", "ผู้ใช้:", "a" * 900])
@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
def test_stop_texts_of_many_tokens(kind: str, stop: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = ids_of(tokenizer, f"ab{stop}cd")
    assert watched(tokenizer, ids, (stop,)) == ("ab", len(ids) - 2)
    assert watched(tokenizer, ids, ("never", stop, stop + "cd")) == ("ab", len(ids) - 2)
    assert watched(tokenizer, ids[:-3], (stop,))[0] == f"ab{stop}".encode()[:-1].decode("utf-8", "replace")


def test_special_tokens_in_stop_texts(byte_level: Any, llama_like: Any) -> None:
    for tokenizer in (byte_level, llama_like):
        special = str(tokenizer.eos_token)
        ids = ids_of(tokenizer, f"AB{special}CDE{special}F")
        for stop, text, count in [
            (special, "AB", 3),
            (f"{special}C", "AB", 4),
            (f"B{special}C", "A", 4),
            (f"D{special}", "ABCDE", 0),
            (f"E{special}F", "ABCD", 8),
            ("BC", "A", 4),
            ("CD", "AB", 5),
            (f"{special}{special}", "ABCDEF", 0),
        ]:
            wanted = (text if count else "ABCDEF", count or len(ids))
            assert watched(tokenizer, ids, (stop,)) == wanted, stop
        spelt = [token for letter in f"AB{special}C" for token in ids_of(tokenizer, letter)]
        assert watched(tokenizer, spelt, (special,))[0] == "AB", "other tokens may spell it out"


def test_the_stop_text_that_is_complete_first_ends_the_text(byte_level: Any) -> None:
    ids = ids_of(byte_level, "aabaac aaba")
    assert watched(byte_level, ids, ("aabaaca", "ba", "ac"))[0] == "aa"
    assert watched(byte_level, ids, ("aabaaca", "aac"))[0] == "aab"
    assert watched(byte_level, ids, ("c aaba",)) == ("aabaa", len(ids))
    assert watched(byte_level, ids, ("aabaab", "zz"))[0] == "aabaac aaba"


def test_completions_share_the_tables_of_a_stop_text(byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 completions of a request with long stop texts would wait for them, and the server with them."""
    made: list[int] = []
    make = StopText.__init__
    monkeypatch.setattr(StopText, "__init__", lambda self, symbols: made.append(make(self, symbols)))
    stop = tuple("abcd"[n] * 900 + str(byte_level.eos_token) for n in range(4))
    watches = [GrowingText(byte_level, [0], stop) for _ in range(20)]
    assert len(made) == 8
    for token in ids_of(byte_level, stop[1]):
        ended = watches[0].take(token)
    assert (ended, watches[0].text()) == (True, "")
    assert not watches[1].take(ids_of(byte_level, "b")[0]), "each has its own place in a text"


def test_a_stop_text_is_found_like_by_search() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        draw = "".join("ab"[i] for i in torch.randint(2, (40,), generator=generator).tolist())
        size = int(torch.randint(1, 7, (1,), generator=generator))
        text, stop = draw[:30], draw[30 : 30 + size]
        watching = Stop(StopText(stop))
        found = next((place for place, letter in enumerate(text, start=1) if watching.take(letter)), None)
        assert found == (text.index(stop) + size if stop in text else None)


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "word_piece"])
def test_parts_of_a_long_text_are_the_whole(kind: str, request: pytest.FixtureRequest) -> None:
    """Also where tokens are parts of characters, or no text at all."""
    tokenizer = request.getfixturevalue(kind)
    generator = torch.Generator().manual_seed(0)
    for size in (9, 40, 300):
        ids = torch.randint(len(tokenizer), (size,), generator=generator).tolist()
        if kind == "llama_like":
            # Whole characters: without the rest of one, its decoder takes the bytes before for no text either.
            ids = [byte for token in ids for byte in ((token,) if token >= 256 else "日🚲é~"[token % 4].encode())]
        lead, ids = ids[:1], ids[1:]
        first, both = (tokenizer.decode(part, skip_special_tokens=True) for part in (lead, [*lead, *ids]))
        watch = GrowingText(tokenizer, lead, ())
        parts = []
        for token in ids:
            watch.take(token)
            parts.append(watch.settled(False))
        parts.append(watch.settled(True))
        assert "".join(parts) == watch.text()
        if "\ufffd" not in first:
            assert watch.text() == both[len(first) :]


def test_the_first_space_of_a_text_is_dropped_as_by_the_tokenizer(llama_like: Any) -> None:
    words = llama_like.convert_tokens_to_ids(["▁the", "▁chain"])
    for lead, wanted in ((["<s>"], "the chain"), (["▁slip"], " the chain")):
        watch = GrowingText(llama_like, llama_like.convert_tokens_to_ids(lead), ())
        for token in words:
            watch.take(token)
        assert watch.text() == wanted


def test_the_bytes_of_parts_of_characters(byte_level: Any, llama_like: Any) -> None:
    for tokenizer in (byte_level, llama_like):
        table = token_bytes(tokenizer)
        assert [table.inside(token) for token in ids_of(tokenizer, "é🙂")] == [bytes([b]) for b in "é🙂".encode()]
        eos = tokenizer.eos_token_id
        assert (table.inside(eos), table.shown(eos)) == (b"", (tokenizer.eos_token, tokenizer.eos_token.encode()))
    assert token_bytes(llama_like).shown(llama_like.convert_tokens_to_ids("▁the")) == (" the", b" the")
    assert token_bytes(byte_level).inside(len(byte_level) + 5) == b""


def test_a_token_costs_the_same_in_a_long_text(byte_level: Any) -> None:
    stop = tuple("x" * n + "!" for n in range(1, 5))
    ids = torch.randint(300, (16_384,), generator=torch.Generator().manual_seed(0)).tolist()

    def seconds(count: int) -> float:
        best = 1e9
        for _ in range(3):
            watch, begun = GrowingText(byte_level, [0], stop), perf_counter()
            for token in ids[:count]:
                watch.take(token)
                watch.settled(False)
            best = min(best, (perf_counter() - begun) / count)
        return best

    seconds(len(ids))
    assert seconds(len(ids)) < 3 * seconds(1024)
