"""The model card of an export: README.md with the configuration and the figures of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from surogate_core import __version__
from surogate_core.bundles.options import flat_values
from surogate_core.config.resolve import selections, to_dict
from surogate_core.config.schema import RunConfig
from surogate_core.config.yamlfile import write_yaml
from surogate_core.files import atomic
from surogate_core.masking import masked, masked_values
from surogate_core.numbers import significant

OVERRIDES = "base_config_overrides.json"
"""Keys of the base's ``config.json`` that an adapter was trained with other values of."""

OF_THE_PLACE = frozenset(
    """
    run_name output_dir checkpoint_dir offload_dir data_cache_dir log_file resume_from_checkpoint monitor plugins
    launcher fabric dataloader_num_workers
    """.split()  # noqa: SIM905
)
"""Keys that affect no weight: places and monitors of a run."""

_ROPE = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """The facts of the run for the model card."""

    title: str
    base_model: str | None = None
    """Hub id or directory of the model that training began from; None: random weights."""
    base_commit: str | None = None
    """The commit of a hub id."""
    base_place: str | None = None
    """As `ModelDir.place`: adapters have the names of the whole model."""
    base_files: Mapping[str, str] = field(default_factory=dict)
    """Weight file of the base → digest of its data."""
    base_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the base's ``config.json`` that the run changed, e.g. ``{"max_position_embeddings": 8192}``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Selected configuration keys, in order."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Final figures, e.g. ``{"held-out loss": 1.23}``, in order; None is left out."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The run's keys that differ from their defaults, as flat keys."""


def changed_keys(config: RunConfig) -> dict[str, Any]:
    """The flat keys, and keys of groups, that differ from their defaults, except those that name places of the run."""
    values = {key: value for key, value in to_dict(config).items() if key not in OF_THE_PLACE}
    defaults = to_dict(RunConfig())
    for _, selection in selections(config):
        if selection.options is not None:
            defaults |= flat_values(type(selection.options)())
    return _changed(values, defaults)


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        default = defaults.get(key)
        if value == default:
            continue
        if isinstance(value, Mapping):
            value = _changed(value, default if isinstance(default, Mapping) else {})
        found[key] = value
    return found


def without_places(value: Any) -> Any:
    """Nested values with the last part alone of each absolute path, which says something of this machine."""
    if isinstance(value, str):
        return Path(value).name if value.startswith(("/", "~/")) else value
    if isinstance(value, Mapping):
        return {key: without_places(item) for key, item in value.items()}
    return [without_places(item) for item in value] if isinstance(value, list) else value


def config_overrides(base: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the base's ``config.json`` to change for the model that was trained.

    RoPE parameters carry their ``rope_theta``: transformers takes it from nowhere else when they are given.
    """
    changed = {key: value for key, value in trained.items() if value != base.get(key)}
    for key in _ROPE:
        if isinstance(changed.get(key), Mapping) and trained.get("rope_theta") is not None:
            changed[key] = {"rope_theta": trained["rope_theta"], **changed[key]}
    return changed


def write_card(directory: Path, card: CardFacts, *, library: str, notes: list[str]) -> None:
    """README.md, with the front matter that the hub reads; `notes` are paragraphs on how to use the directory."""
    front = [f"library_name: {library}", "pipeline_tag: text-generation", "tags: [surogate]"]
    lines = [f"# {card.title}", "", f"Trained with Surogate {__version__}."]
    if card.base_model is not None:
        commit = f", commit `{card.base_commit}`" if card.base_commit else ""
        lines.append(f"Base model: `{without_places(card.base_model)}`{commit}.")
        # The hub refuses front matter whose base model is not a repository.
        if not Path(card.base_model).exists() and card.base_model.count("/") == 1:
            front.append(f"base_model: {json.dumps(card.base_model)}")
    for note in notes:
        lines += ["", note]
    values = {**card.figures, **card.settings}
    if rows := [f"| {_cell(key)} | {_cell(value)} |" for key, value in values.items() if value is not None]:
        lines += ["", "## Training", "", "| | |", "| --- | --- |", *rows]
    if card.configuration:
        lines += ["", "<details><summary>Configuration: the keys that differ from their defaults</summary>", ""]
        lines += [
            "```yaml",
            *write_yaml(without_places(masked_values(card.configuration))).rstrip().splitlines(),
            "```",
            "",
            "</details>",
        ]
    text = "\n".join(["---", *front, "---", "", *lines, ""])
    atomic.write_file(directory / "README.md", masked(text).encode())


USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "."  # this directory, or its id on the hub
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place)
chat = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```"""
"""How to use an export: transformers loads an adapter on its base where PEFT is installed."""


def overrides_note(overrides: Mapping[str, Any]) -> str:
    """How to load a base with the configuration that the adapter was trained with."""
    text = json.dumps(overrides)
    return (
        f"**The base's configuration was changed for training**, and the adapter needs the same: `{OVERRIDES}`.\n"
        f"`surogate merge` applies it. vLLM takes it as `--hf-overrides '{text}'`; with transformers:\n\n"
        "```python\n"
        f'config = AutoConfig.from_pretrained(BASE, **json.loads(Path("{OVERRIDES}").read_text()))\n'
        "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, config=config), ADAPTER)\n"
        "```"
    )


def card_facts(card: CardFacts) -> dict[str, Any]:
    """The facts that a later merge repeats in its own card, as JSON values."""
    kept = ("settings", "figures", "configuration", "base_files")
    return {f.name: without_places(masked_values(dict(getattr(card, f.name)))) for f in fields(card) if f.name in kept}


def _cell(value: Any) -> str:
    text = significant(value, 6) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
