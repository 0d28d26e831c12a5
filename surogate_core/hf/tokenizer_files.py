"""A tokenizer in an export: the files that it was read from, with only what a run changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.data.text.tokenizer import TOKENIZER_FILES, has_tokenizer
from surogate_core.files import atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, OLD_MAP, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as files. They are copied unchanged but for what a run changed.

    A copy is read by every program that reads the base's. transformers 5 writes files of its own that transformers 4
    does not load.
    """

    directory: Path
    changes: Mapping[str, str] = field(default_factory=dict)
    """`chat_template` and `eos_token`, where they differ from the files."""
    has_dropout: bool = True
    """Whether the merges of the file may be dropped out; False switches that off."""

    @classmethod
    def first(cls, *directories: Path) -> TokenizerFiles | None:
        """The files of the first directory that has a tokenizer."""
        return next((cls(directory) for directory in directories if has_tokenizer(directory)), None)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerFiles | None:
        """The files that a tokenizer was read from, with its changes; None if they are no longer there."""
        directory = Path(tokenizer.name_or_path)
        if not tokenizer.name_or_path or not has_tokenizer(directory):
            return None
        config = _json(directory / CONFIG)
        changes = {}
        template = tokenizer.chat_template
        if isinstance(template, str) and template not in (_template_of(directory, config), None):
            changes["chat_template"] = template
        eos = _text(config.get("eos_token", _json(directory / OLD_MAP).get("eos_token")))
        if tokenizer.eos_token not in (eos, None) and (changes or eos is not None):
            changes["eos_token"] = str(tokenizer.eos_token)
        backend = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        return cls(directory, changes, has_dropout=getattr(backend, "dropout", None) is not None)

    def save_pretrained(self, save_directory: str) -> None:
        """Write the files into a directory."""
        new = Path(save_directory)
        for pattern in TOKENIZER_FILES:
            for file in sorted(self.directory.glob(pattern)):
                target = new / file.relative_to(self.directory)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
        if (template := self.changes.get("chat_template")) is not None:
            self._write_template(new, template)
        if (eos := self.changes.get("eos_token")) is not None:
            _change(new / CONFIG, {"eos_token": eos})
            if (new / OLD_MAP).exists():
                _change(new / OLD_MAP, {"eos_token": eos})
        if not self.has_dropout:
            _switch_dropout_off(new / "tokenizer.json")

    def _write_template(self, new: Path, template: str) -> None:
        """Write a chat template where the files have theirs; none of the former ones stays."""
        inside = "chat_template" in _json(new / CONFIG)
        if inside:
            _change(new / CONFIG, {"chat_template": template})
        if not inside or (new / TEMPLATE).exists():
            atomic.write_file(new / TEMPLATE, template.encode())
        (new / "chat_template.json").unlink(missing_ok=True)
        shutil.rmtree(new / "additional_chat_templates", ignore_errors=True)


def _template_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The only chat template of the files; None if there is none, or several with names."""
    if any(directory.glob("additional_chat_templates/*.jinja")):
        return None
    if (directory / TEMPLATE).is_file():
        return (directory / TEMPLATE).read_text(encoding="utf-8")
    found = config.get("chat_template", _json(directory / "chat_template.json").get("chat_template"))
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    """The mapping of a file that transformers has read before; empty without the file."""
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _text(token: object) -> str | None:
    """A token's text, which files have alone or as a mapping with flags."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _change(path: Path, values: Mapping[str, str]) -> None:
    text = json.dumps({**_json(path), **values}, indent=2, ensure_ascii=False)
    atomic.write_file(path, (text + "\n").encode())


def _switch_dropout_off(path: Path) -> None:
    values = _json(path)
    if isinstance(values.get("model"), dict) and values["model"].get("dropout") is not None:
        values["model"]["dropout"] = None
        atomic.write_file(path, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())
