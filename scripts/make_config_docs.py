"""Write docs/config.md from the schema and the flat keys of plugins.

With --check nothing is written: exit 1 if it is not current."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.config.docs import key_docs  # noqa: E402
from surogate_core.plugins import load_plugins  # noqa: E402
from surogate_core.plugins.catalogue import catalogue  # noqa: E402

FILE = ROOT / "docs" / "config.md"

INTRODUCTION = """\
# Configuration

<!-- Made by scripts/make_config_docs.py from surogate_core/config/schema.py and the plugins' options; change those. -->

Flat keys configure a run. They may be set in three places; later places override earlier ones:

1. the option files of the config groups (`recipe=bf16` reads `recipe/bf16.yaml` of the plugin that offers it);
2. a YAML file: `surogate sft run.yaml`, or `--config run.yaml`;
3. the command line: `surogate sft run.yaml learning_rate=1e-4 model=Qwen/Qwen3-0.6B`.

```yaml
# run.yaml
model: Qwen/Qwen3-0.6B          # a directory, a hub id, or an option such as qwen3-0.6b (random weights)
recipe: bf16                    # or a mapping: {name: bf16, …the recipe's own options}
datasets:
  - path: my.jsonl
    type: conversation
monitor: [console, jsonl]
learning_rate: 2e-4
```

Keys and values are checked before anything is loaded or written, and all mistakes are reported together, each with its
file and line, the nearest valid name and the fix. What depends on the model or the machine is checked at the start of
the run, before any long work. Numbers are written without quotes, switches are `true` or `false`.

## On the command line

| form | meaning |
| --- | --- |
| `key=value`, `+key=value`, `++key=value` | set a key; the three are the same |
| `recipe=bf16` | choose an option of a group |
| `recipe.KEY=value` | set an option's own key |
| `monitor=[console,jsonl]` | choose several |
| `model=DIR_OR_HUB_ID` | short for `model=hf model.path=…` |
| `'datasets=[{path: my.jsonl, type: text}]'` | lists and mappings, in quotes for the shell |
| `datasets=my.jsonl`, `lora_target_modules=q_proj,v_proj` | one string, or several with commas, where a list is meant |
| `~key` | reset to the default |
| `learning_rate=1e-3,1e-4 --multirun` | one run for each value, in `output_dir/0`, `output_dir/1`, … |
| `--cfg job` | show the composed config and stop |
| `--info defaults` | show how it was composed |
| `eval "$(surogate -sc install=bash)"` | tab completion |

Setting `datasets` replaces the embedded data set (`dataset=none`); `dataset=embedded` selects it.
The groups are `task`, `model`, `dataset`, `recipe`, `optimizer`, `offload`, `launcher`, `fabric`, `rollout`,
`environment` and `monitor`; `surogate plugins list` shows what is installed.

A finished run has its whole configuration in `output_dir/config.yaml`; `surogate sft output_dir/config.yaml`
repeats it.

A plugin's option may have a flat key of its own: `adamw_beta1=0.95` and `optimizer.beta1=0.95` set the same option of
`optimizer=adamw`. Setting both to different values is an error; the command line overrides the file. A flat key
has no effect if its plugin is not chosen, and the run says so.

A config never names Python objects: `_target_` and similar keys are refused at every level.

## Data sets

An entry of `datasets` or `validation_datasets` has `path`, `type`, `subset` (null), `split` (train), `samples`
(null: all), and the fields of its type, which the README of the type's plugin lists.

## Which plugins may be imported

`plugins.policy`, `plugins.allow` and `plugins.block` name entry points. The environment variables
`SUROGATE_PLUGINS_BLOCK` and `SUROGATE_PLUGINS_ALLOW` (names, with commas between) narrow it further: a plugin must
be permitted by both.

`plugins.policy=locked` compares the installed plugins with the file `plugins.lock`, which `surogate plugins lock`
wrote, before anything is imported. One message refuses everything that is absent, added or altered; `surogate plugins
verify` makes the same comparison without a run. Editable installs are refused unless `plugins.allow_editable=true`.

`SUROGATE_PLUGINS_POLICY`, `SUROGATE_PLUGINS_LOCK` and `SUROGATE_PLUGINS_ALLOW_EDITABLE` are a policy of the
environment, in addition to that of the configuration. A third policy is the machine's, in `/etc/surogate/policy.toml`
on Linux and in the system's configuration directory elsewhere, with the keys `policy`, `allow`, `block`, `lock` (an
absolute path) and `allow_editable`. Each can only forbid: none of the three can allow what another refuses.
[security.md](security.md) says what this protects against, and what it does not.

## Keys
"""


def make() -> str:
    """The page's text."""
    parts = [INTRODUCTION]
    ours = {key: flat for key, flat in load_plugins().flat_keys().items() if key in catalogue().keys}
    for section, docs in groupby(key_docs(ours), key=lambda d: d.section):
        rows = [
            f"| `{d.key}` | {d.type} | {f'`{d.default}`' if d.default else ''} | {d.text.replace('|', chr(92) + '|')} |"
            for d in docs
        ]
        head = ["", f"### {section[:1].upper()}{section[1:]}", "", "| key | type | default | meaning |"]
        parts.append("\n".join([*head, "| --- | --- | --- | --- |", *rows]) + "\n")
    return "".join(parts)


def main() -> int:
    """Write the page, or check it."""
    text = make()
    if "--check" in sys.argv[1:]:
        current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        if not current:
            print("docs/config.md is not current; run: python scripts/make_config_docs.py", file=sys.stderr)
        return 0 if current else 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text, encoding="utf-8")
    print("wrote docs/config.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
