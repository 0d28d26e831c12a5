"""Modelfiles: the template is rendered as Ollama does, and compared with the chat template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from surogate_export_gguf.modelfile import MessageTexts, modelfile
from surogate_export_gguf.vocabulary import Vocabulary, _unmarked

from surogate_core.plugin import UserError, bundles, encoding
from surogate_testing.chat_templates import TEMPLATES, byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [("user", "one"), ("assistant", "two"), ("user", "three")]
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
WITH_BOS = "{{ bos_token }}" + CHATML
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
BRACES = CHATML.replace("<|im_start|>", "<{{ '{{' }}>")
BY_TURN = ("mistral", "mistral-marked")
"""Their system message is in the last user's turn."""
BY_PLACE = CHATML.replace("{{ m.content }}", "{{ loop.index }} {{ m.content }}")


def with_template(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = template
    return tokenizer


def messages(system: bool, turns: int) -> list[dict[str, str]]:
    made = [{"role": role, "content": text} for role, text in TURNS[:turns]]
    return [{"role": "system", "content": "zero"}, *made] if system else made


def go(template: str, conversation: list[dict[str, str]]) -> str:
    """The output of the part of Go's text/template that the templates here use."""
    parts = re.split(r"(\{\{.*?\}\})", template)
    system = "".join(m["content"] for m in conversation if m["role"] == "system")
    out: list[str] = []

    def run(place: int, scope: dict[str, Any], active: bool) -> int:
        """Run up to the matching ``else`` or ``end``."""
        while place < len(parts):
            part = parts[place]
            word = part[2:-2].strip() if part.startswith("{{") else None
            if word is None:
                out.append(part if active else "")
            elif word == "end" or word.startswith("else"):
                return place
            elif word.startswith("range"):
                for i, m in enumerate(scope["messages"]):
                    end = run(place + 1, {**scope, "m": m, "i": i}, active)
                place = end
            elif word.startswith("if"):
                place, done, test = place, False, word.removeprefix("if")
                while True:
                    holds = active and not done and (test is None or truth(test.strip(), scope))
                    done = done or holds
                    place = run(place + 1, scope, holds)
                    word = parts[place][2:-2].strip()
                    if word == "end":
                        break
                    test = word.removeprefix("else").strip().removeprefix("if") or None
            elif word.startswith("$last"):
                scope["last"] = scope["i"] == len(scope["messages"]) - 1
            elif active:
                out.append(value(word, scope))
            place += 1
        return place

    def truth(test: str, scope: dict[str, Any]) -> bool:
        if test.startswith("eq .Role"):
            return bool(scope["m"]["role"] == test.split('"')[1])
        return {".System": bool(system), "$last": scope.get("last"), "not $last": not scope.get("last")}[test]

    def value(word: str, scope: dict[str, Any]) -> str:
        return word[1:-1] if word.startswith('"') else system if word == ".System" else str(scope["m"]["content"])

    run(0, {"messages": conversation}, True)
    return "".join(out)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        DEFAULT_SYSTEM,
        WITH_BOS,
        THINKING,
        BRACES,
        *(t for n, t in TEMPLATES.items() if n not in BY_TURN),
    ],
)
def test_the_template_renders_as_the_chat_template(template: str) -> None:
    tokenizer = with_template(template)
    chat = encoding.chat_of(tokenizer)
    for bos in ("", "<|endoftext|>"):
        frame = MessageTexts.of(chat, bos)
        assert frame is not None
        for system in (False, True) if frame.before_system is not None else (False,):
            for turns in (1, 3):
                conversation = messages(system, turns)
                expected = chat.render(conversation, add_generation_prompt=True)
                assert go(frame.template(), conversation) == expected.removeprefix(bos)


@pytest.mark.parametrize(
    "template",
    [
        BY_PLACE,
        TEMPLATES["mistral"],
        "{% for m in messages %}{{ m.content }}{{ 1 / 0 }}{% endfor %}",
        CHATML + '"""',
    ],
)
def test_templates_without_an_equal(template: str) -> None:
    tokenizer = with_template(template)
    assert MessageTexts.of(encoding.chat_of(tokenizer)) is None


def job_of(tokenizer: Any, place: Path) -> bundles.ExportJob:
    return bundles.ExportJob(
        name="tiny",
        config={},
        shapes={},
        dtypes={},
        get={}.__getitem__,
        tokenizer=tokenizer,
        stop_ids=frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])),
        sampling=bundles.Sampling(temperature=0.7, top_k=20),
        file=place,
        place=place,
    )


@pytest.mark.parametrize("template", [t for t in TEMPLATES.values() if "generation" in t])
def test_marks_of_what_is_trained_have_no_effect(template: str) -> None:
    """Programs other than transformers do not know them."""
    marked, plain = with_template(template), with_template(_unmarked(template))
    assert "endgeneration" not in plain.chat_template
    conversation = messages(False, 3)
    for prompted in (False, True):
        texts = [encoding.chat_of(t).render(conversation, add_generation_prompt=prompted) for t in (marked, plain)]
        assert texts[0] == texts[1]


def test_the_file(tmp_path: Path) -> None:
    tokenizer = with_template(CHATML)
    path, job = tmp_path / "Modelfile", job_of(tokenizer, tmp_path / "tiny.gguf")
    text, notes = modelfile(job, Vocabulary.of(job, 400), path)
    lines = text.splitlines()
    assert lines[:2] == [
        "# Written by `surogate export`. Use: ollama create NAME -f Modelfile",
        "FROM ./tiny.gguf",
    ]
    assert {
        "PARAMETER temperature 0.7",
        "PARAMETER top_k 20",
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop "<|endoftext|>"',
    } <= set(lines)
    assert not notes
    path.write_text(text)
    modelfile(job, Vocabulary.of(job, 400), path)  # its own may be replaced
    path.write_text("FROM llama3")
    with pytest.raises(UserError, match="was not written by"):
        modelfile(job, Vocabulary.of(job, 400), path)


def test_a_template_that_ollama_must_choose(tmp_path: Path) -> None:
    tokenizer = with_template(BY_PLACE)
    job = job_of(tokenizer, tmp_path / "tiny.gguf")
    text, notes = modelfile(job, Vocabulary.of(job, 400), tmp_path / "Modelfile")
    assert "TEMPLATE" not in text
    assert "Ollama chooses one" in notes[0]
    tokenizer.chat_template = None
    assert "TEMPLATE {{ .Prompt }}\n" in modelfile(job, Vocabulary.of(job, 400), tmp_path / "Modelfile")[0]
