"""`surogate export`: the result of a run, to the Hugging Face hub, to a directory, or as another program's file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from surogate_core.cli.words import Flags, Words
from surogate_core.errors import UserError
from surogate_core.files.runs import latest_run, run_directory

USAGE = """\
usage: surogate export [RUN] --to hub://USER/NAME [--public] [--base-model HUB_ID] [--overwrite] [--dry-run]
       surogate export [RUN] --to DIR [--dry-run]
       surogate export [MODEL] --format gguf --to FILE.gguf [--type TYPE] [--ollama Modelfile] [KEY=VALUE …]

  RUN                  a run's directory, or an export in it such as RUN/merged; without it the latest run
  --to hub://USER/NAME upload as one commit of a repository on the Hugging Face hub; a new one is private
  --to DIR             copy to a directory
  --public             allow a public repository: make it so, or add to one that is
  --base-model HUB_ID  the hub id of an adapter's base, if the run read it from a directory
  --overwrite          commit on top of a repository that Surogate did not write
  --message TEXT       the commit's message
  --dry-run            list what would be sent; nothing is written and nothing is sent

  --format NAME        write one file for another program. MODEL is a run, a Hugging Face directory, an adapter, a
                       checkpoint with an adapter, or a hub id; adapters are folded in. A plugin offers the format and
                       its flags. gguf, for llama.cpp and Ollama, has:
  --type TYPE          auto (the model's dtype), f32, f16, bf16 or q8_0 (8 bits with a scale for 32 weights)
  --ollama FILE        write a Modelfile too: the chat template, stop texts and parameters for `ollama create`
  --adapter DIR        an adapter, a run or a checkpoint to fold into MODEL

The token is that of `hf auth login` or HF_TOKEN. Paths of this machine and secrets are left out of what is sent.
"""

_VALUES = ("--to", "--base-model", "--message")
_SWITCHES = ("--public", "--overwrite", "--dry-run")
_FORMAT = "--format"
_DIRECTORIES = "hf"
"""The format of a run's exports: Hugging Face directories, which are copied or uploaded."""


@dataclass(slots=True)
class _Words:
    run: str | None
    values: dict[str, str]
    switches: set[str]


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    chosen, rest = _chosen_format(argv)
    if chosen not in (None, _DIRECTORIES):
        return _convert(chosen, rest)
    words = _parse(rest)
    target = words.values.get("--to")
    if not target:
        raise UserError("surogate export: --to missing. Fix: --to hub://USER/NAME, or --to DIR")
    from surogate_core.hf.push import SCHEME, export_in

    run = run_directory(words.run) if words.run else latest_run(command="surogate export")
    export = export_in(run)
    if target.startswith(SCHEME):
        return _push(words, export, target)
    if "://" in target:
        raise UserError(f"--to {target}: only hub:// and directories are known. Fix: --to hub://USER/NAME")
    return _copy(words, export, Path(target).expanduser())


def _chosen_format(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--format``, and the other words."""
    words = list(argv)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == _FORMAT:
            before, after = words[:place], words[place + 1 :]
            if not equals and not after:
                raise UserError(f"surogate export {_FORMAT}: a value must follow. Fix: {_FORMAT} gguf")
            return (value, [*before, *after]) if equals else (after[0], [*before, *after[1:]])
    return None, words


def _convert(name: str, argv: Sequence[str]) -> int:
    from surogate_core import logs
    from surogate_core.bundles.options import field_types
    from surogate_core.cli.arguments import Arguments, registry_for
    from surogate_core.cli.progress import shown_progress
    from surogate_core.events import Progress
    from surogate_core.files.atomic import human_bytes
    from surogate_core.run.conversion import convert, format_of, options_of, place_of

    logs.configure()
    keys = [word for word in argv if "=" in word and not word.startswith("-")]
    registry = registry_for(Arguments(overrides=keys))
    spec = format_of(registry, name)
    switches = [field for field, hint in field_types(spec.options).items() if hint is bool]
    own = {field: f"--{field.replace('_', '-')}" for field in field_types(spec.options)}
    flags = Flags(
        command=f"surogate export --format {name}",
        texts=("--to", "--adapter", *(flag for field, flag in own.items() if field not in switches)),
        switches=tuple(own[field] for field in switches),
    )
    words = flags.read(argv)
    model = _model_of(words, flags.command)
    target = words.texts.get("--to", "")
    if not target or "://" in target:
        what = f"--to {target}: only files and directories are known" if target else "--to missing"
        raise UserError(f"{flags.command}: {what}. Fix: --to FILE{spec.suffix}")
    values = {field: words.texts[flag] for field, flag in own.items() if flag in words.texts}
    options = options_of(spec, values | {field: own[field] in words.switches for field in switches}, prefix="--")
    with shown_progress() as progress:

        def told(done: int, total: int) -> None:
            progress(Progress(task=f"writing {name}", done=done >> 20, total=total >> 20, unit="MiB"))

        done = convert(
            model,
            spec,
            options,
            place_of(target, spec, model),
            registry,
            adapter=words.texts.get("--adapter"),
            overrides=words.overrides,
            progress=told,
        )
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    others = "".join(f", with {path}" for path in done.others)
    print(f"{model} is in {done.file} ({human_bytes(done.file.stat().st_size)}){others}")
    return 0


def _model_of(words: Words, command: str) -> str:
    if len(words.models) > 1:
        raise UserError(f"{command}: {' and '.join(words.models)}: one model at a time. Fix: keep one")
    return words.models[0] if words.models else str(latest_run(command=command))


def _push(words: _Words, export: Path, target: str) -> int:
    from surogate_core.files.atomic import human_bytes
    from surogate_core.hf.push import outgoing, parse_repo, push

    repo = parse_repo(target)
    files = outgoing(export, base_model=words.values.get("--base-model"), repo=repo)
    public, size = "--public" in words.switches, human_bytes(sum(f.size for f in files))
    what = f"{export} to {repo} ({'public' if public else 'private'}): {len(files)} files, {size}"
    if "--dry-run" in words.switches:
        print("\n".join([f"Would upload {what}", *(f"  {f.name}  {human_bytes(f.size)}" for f in files)]))
        return 0
    print(f"Uploading {what}", file=sys.stderr, flush=True)
    message = words.values.get("--message") or f"Upload {export.name} with Surogate"
    address = push(files, repo, public=public, overwrite="--overwrite" in words.switches, message=message)
    print(f"Uploaded to {address}")
    return 0


def _copy(words: _Words, export: Path, target: Path) -> int:
    import shutil

    from surogate_core.files import atomic
    from surogate_core.hf.export import check_place

    if wrong := [
        f for f in ("--public", "--overwrite", "--base-model", "--message") if f in {*words.switches, *words.values}
    ]:
        raise UserError(f"surogate export: {wrong[0]} is for the hub, and --to names a directory. Fix: leave it out")
    if export.resolve() in (target.resolve(), *target.resolve().parents):
        raise UserError(f"--to {target}: is in the export itself. Fix: choose another directory")
    check_place(target)
    size = sum(p.stat().st_size for p in export.rglob("*") if p.is_file())
    if "--dry-run" in words.switches:
        print(f"Would copy {export} to {target}: {atomic.human_bytes(size)}")
        return 0
    with atomic.replaced_directory(target, what="--to", needed=size) as new:
        shutil.copytree(export, new, dirs_exist_ok=True)
    print(f"Copied {export} to {target}")
    return 0


def _parse(argv: Sequence[str]) -> _Words:
    parsed = _Words(run=None, values={}, switches=set())
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag in _VALUES:
            if not equals and not words:
                raise UserError(f"surogate export {flag}: a value must follow. Fix: `surogate export --help`")
            parsed.values[flag] = value if equals else words.pop(0)
        elif word in _SWITCHES:
            parsed.switches.add(word)
        elif word.startswith("-"):
            near = get_close_matches(flag, (*_VALUES, *_SWITCHES), n=1)
            fix = near[0] if near else "`surogate export --help` shows the form"
            raise UserError(f"surogate export: {word} is not known. Fix: {fix}")
        elif parsed.run is not None:
            raise UserError(f"surogate export: {parsed.run} and {word}: one run at a time. Fix: keep one")
        else:
            parsed.run = word
    return parsed
