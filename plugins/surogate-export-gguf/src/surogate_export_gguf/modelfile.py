"""A Modelfile for Ollama, whose template is found by rendering samples with the tokenizer's chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surogate_core.plugin import RowError, UserError, bundles, encoding
from surogate_export_gguf.vocabulary import Vocabulary

HEADER = "# Written by `surogate export`. Use: ollama create NAME -f {name}\n"
_SYSTEM, _USER, _ASSISTANT, _NEXT = "Qsystem7", "Quser7", "Qassistant7", "Qnext7"
_WIDEST = '"""'
"""What a text in a Modelfile cannot have."""

Messages = Sequence[Mapping[str, str]]


def modelfile(job: bundles.ExportJob, vocabulary: Vocabulary, path: Path) -> tuple[str, list[str]]:
    """The text of the Modelfile `path`, and notes for the user.

    Raises `UserError` if another file has that name.
    """
    _refuse_another(path)
    source = os.path.relpath(job.place.absolute(), path.absolute().parent)
    lines = [HEADER.format(name=path.name), f"FROM {source if source.startswith('..') else f'./{source}'}\n"]
    notes = []
    if vocabulary.template is None:
        lines.append("TEMPLATE {{ .Prompt }}\n")
    else:
        # llama.cpp puts a beginning of text in front by itself.
        frame = MessageTexts.of(
            encoding.chat_of(job.tokenizer), str(job.tokenizer.bos_token) if vocabulary.adds_bos else ""
        )
        if frame is None:
            notes.append(f"{path}: the chat template has no equal in Ollama's templates, so Ollama chooses one.")
        else:
            lines.append(f"TEMPLATE {_WIDEST}{frame.template()}{_WIDEST}\n")
            if frame.before_system is None:
                notes.append(f"{path}: the chat template has no system message, so Ollama's SYSTEM has no effect.")
    lines += [f"PARAMETER {name} {value}\n" for name, value in _parameters(job)]
    lines += [f'PARAMETER stop "{text}"\n' for text in _stops(job, vocabulary)]
    return "".join(lines), notes


def _refuse_another(path: Path) -> None:
    try:
        own = not path.exists() or path.read_text(encoding="utf-8").startswith(HEADER[:32])
    except (OSError, UnicodeDecodeError):
        own = False
    if not own:
        raise UserError(f"--ollama {path}: this was not written by `surogate export`. Fix: name another file")


def _parameters(job: bundles.ExportJob) -> list[tuple[str, float]]:
    chosen = job.sampling
    if chosen.temperature == 0:
        return []  # the model's files say nothing about sampling
    return [
        ("temperature", chosen.temperature),
        ("top_k", chosen.top_k),
        ("top_p", chosen.top_p),
        ("min_p", chosen.min_p),
        ("repeat_penalty", chosen.repetition_penalty),
    ]


def _stops(job: bundles.ExportJob, vocabulary: Vocabulary) -> list[str]:
    texts = [vocabulary.tokens[i] for i in sorted(job.stop_ids)]
    return [text for text in texts if '"' not in text and text.isprintable()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTexts:
    """The texts around the messages of a conversation that ends with the user's."""

    alone: str
    """Before the first user's message, if there is no system message."""
    before_system: str | None
    """None if the chat template refuses system messages or drops them."""
    after_system: str
    before_user: str
    after_user: str
    before_answer: str
    """Between a user's message and its answer, after `after_user`."""
    after_answer: str
    prompt: str
    """Before the answer to be generated, after `after_user`."""

    @classmethod
    def of(cls, chat: encoding.Chat, bos: str = "") -> MessageTexts | None:
        """The frame of a chat template; None if conversations cannot be put together from one.

        `bos`: a text at the beginning of every conversation that is left out.
        """

        def render(messages: Messages) -> str:
            return chat.render(messages, add_generation_prompt=True).removeprefix(bos)

        try:
            found, asked = cls._of_renders(render, takes_system=chat.takes_system())
            samples = _samples(with_system=found.before_system is not None)
            is_equal = asked and all(render(messages) == found.render(messages) for messages in samples)
        except (RowError, ValueError):
            return None
        return found if is_equal and _WIDEST not in found.template() else None

    @classmethod
    def _of_renders(cls, render: Callable[[Messages], str], *, takes_system: bool) -> tuple[MessageTexts, bool]:
        """The frame of two conversations, and whether the text behind a user's message is the same in both.

        Raises `ValueError` if a message is not there once, and `RowError`.
        """
        user: Mapping[str, str] = {"role": "user", "content": _USER}
        longer = [user, {"role": "assistant", "content": _ASSISTANT}, {"role": "user", "content": _NEXT}]
        alone, asked = render([user]).split(_USER)
        begin, rest = _system_rendered(render, longer) if takes_system else (None, render(longer))
        to_user, rest = rest.split(_USER)
        to_answer, rest = rest.split(_ASSISTANT)
        to_next, last = rest.split(_NEXT)
        before_all = [alone, to_next] if begin is None else [alone, to_user, to_next]
        before_user = _common([text[::-1] for text in before_all])[::-1]
        after_user = _common([to_answer, last])
        found = cls(
            alone=alone.removesuffix(before_user),
            before_system=begin,
            after_system=to_user.removesuffix(before_user),
            before_user=before_user,
            after_user=after_user,
            before_answer=to_answer.removeprefix(after_user),
            after_answer=to_next.removesuffix(before_user),
            prompt=last.removeprefix(after_user),
        )
        return found, asked == last

    def render(self, messages: Messages) -> str:
        """A conversation that ends with the user's message, and the beginning of its answer."""
        around = {
            "system": (self.before_system or "", self.after_system),
            "user": (self.before_user, self.after_user),
            "assistant": (self.before_answer, self.after_answer),
        }
        texts = [f"{around[m['role']][0]}{m['content']}{around[m['role']][1]}" for m in messages]
        begin = "" if messages[0]["role"] == "system" else self.alone
        return begin + "".join(texts) + self.prompt

    def template(self) -> str:
        """The frame as a template of Go."""
        system = alone = _go(self.alone)
        if self.before_system is not None:
            system = f"{{{{ if .System }}}}{_go(self.before_system)}{{{{ .System }}}}{_go(self.after_system)}"
            system += f"{{{{ else }}}}{alone}{{{{ end }}}}" if alone else "{{ end }}"
        prompt = f"{{{{ if $last }}}}{_go(self.prompt)}{{{{ end }}}}" if self.prompt else ""
        return (
            f"{system}{{{{ range $i, $_ := .Messages }}}}{{{{ $last := eq (len (slice $.Messages $i)) 1 }}}}"
            f'{{{{ if eq .Role "user" }}}}{_go(self.before_user)}{{{{ .Content }}}}{_go(self.after_user)}{prompt}'
            f'{{{{ else if eq .Role "assistant" }}}}{_go(self.before_answer)}{{{{ .Content }}}}'
            f"{{{{ if not $last }}}}{_go(self.after_answer)}{{{{ end }}}}{{{{ end }}}}{{{{ end }}}}"
        )


def _common(texts: Sequence[str]) -> str:
    """The longest beginning of all."""
    short = min(texts, key=len)
    return next((short[:i] for i, character in enumerate(short) if any(t[i] != character for t in texts)), short)


def _go(text: str) -> str:
    """A text as a Go template writes it."""
    return text.replace("{{", '{{ "{{" }}')


def _system_rendered(render: Callable[[Messages], str], others: Messages) -> tuple[str | None, str]:
    """The texts before and after a system message; without it if the chat template refuses it."""
    try:
        begin, rest = render([{"role": "system", "content": _SYSTEM}, *others]).split(_SYSTEM)
    except RowError:
        return None, render(others)
    return begin, rest


def _samples(*, with_system: bool) -> list[Messages]:
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("user", "five")]
    made = [[{"role": role, "content": text} for role, text in turns[:count]] for count in (1, 3, 5)]
    system = {"role": "system", "content": "zero"}
    return [*made, *([system, *messages] for messages in made if with_system)]
