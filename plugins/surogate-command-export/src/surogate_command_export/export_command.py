"""`surogate export`: the result of a run, to the Hugging Face hub, to a directory, or as another program's file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_commands.flags import Flag
from surogate_commands.words import Flags, Words
from surogate_core.plugin import UserError, latest_run, run_directory
from surogate_core.service.app import Arguments, registry_for

if TYPE_CHECKING:
    from surogate_core.plugin import bundles
    from surogate_core.service.plugins import Registry

USAGE = """\
usage: surogate export [RUN] --to hub://USER/NAME [--public] [--base-model HUB_ID] [--overwrite] [--dry-run]
       surogate export [RUN] --to DIR [--dry-run]
       surogate export [MODEL] --to FILE.gguf [--type TYPE] [--ollama Modelfile] [KEY=VALUE …]

  RUN                  a run's directory, or an export in it such as RUN/merged; without it the latest run
  --to hub://USER/NAME upload as one commit of a repository on the Hugging Face hub; a new one is private
  --to DIR             copy to a directory
  --public             allow a public repository: make it so, or add to one that is
  --base-model HUB_ID  the hub id of an adapter's base, if the run read it from a directory
  --overwrite          commit on top of a repository that Surogate did not write
  --message TEXT       the commit's message
  --dry-run            list what would be sent; nothing is written and nothing is sent

  --format NAME        write one file for another program; without it the end of --to decides. MODEL is a run, a
                       Hugging Face directory, an adapter, a checkpoint with an adapter, or a hub id; adapters are
                       folded in. A plugin offers the format and its flags. gguf, for llama.cpp and Ollama, has:
  --type TYPE          auto (the model's dtype), f32, f16, bf16 or q8_0 (8 bits with a scale for 32 weights)
  --ollama FILE        write a Modelfile too: the chat template, stop texts and parameters for `ollama create`
  --adapter DIR        an adapter, a run or a checkpoint to fold into MODEL

The token comes from `hf auth login` or HF_TOKEN. Paths of this machine and secrets are left out of what is sent.
"""

FLAGS = Flags(
    command="surogate export",
    flags=(
        *(Flag("text", name) for name in ("--to", "--base-model", "--message", "--format")),
        *(Flag("switch", name) for name in ("--public", "--overwrite", "--dry-run")),
    ),
)
_DIRECTORIES = "hf"
"""The format of a run's exports: Hugging Face directories, which are copied or uploaded."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    chosen, target = _value(argv, "--format"), _value(argv, "--to") or ""
    ends_as_a_file = "://" not in target and Path(target).suffix and not Path(target).expanduser().is_dir()
    if chosen != _DIRECTORIES and (chosen is not None or ends_as_a_file):
        registry = registry_for(Arguments(overrides=[w for w in argv if "=" in w and not w.startswith("-")]))
        spec = _format(registry, chosen, target)
        if spec is not None:
            return _convert(spec, registry, argv)
    words = FLAGS.read(argv)
    if words.overrides:
        raise UserError(f"surogate export: {words.overrides[0]}: keys are for --format. Fix: leave it out")
    model = _model_of(words, FLAGS.command)
    if not target:
        raise UserError("surogate export: --to missing. Fix: --to hub://USER/NAME, or --to DIR")
    from surogate_command_export.push import SCHEME, export_in

    export = export_in(run_directory(model))
    if target.startswith(SCHEME):
        return _push(words, export, target)
    if "://" in target:
        raise UserError(f"--to {target}: only hub:// and directories are known. Fix: --to hub://USER/NAME")
    return _copy(words, export, Path(target).expanduser())


def _value(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag, before the flags of the format are known."""
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == flag and (equals or place + 1 < len(argv)):
            return value if equals else argv[place + 1]
    return None


def _format(registry: Registry, chosen: str | None, target: str) -> bundles.ExportFormat | None:
    """The format of a name or, without one, that whose files end as the target does; None if there is none."""
    from surogate_command_export.conversion import format_of, formats_by_suffix

    if chosen is not None:
        return format_of(registry, chosen)
    found, name = formats_by_suffix(registry, Path(target)), Path(target).suffix[1:]
    if not found and registry.explain_missing("export", name, ()).fix:
        return format_of(registry, name)  # says which plugin offers it
    return found[0] if len(found) == 1 else None


def _convert(spec: bundles.ExportFormat, registry: Registry, argv: Sequence[str]) -> int:
    from surogate_command_export.conversion import convert, options_of, place_of
    from surogate_core.plugin import atomic, events
    from surogate_core.service.app import shown_progress
    from surogate_core.service.config import logs
    from surogate_core.service.plugins import field_types

    logs.configure()
    switches = [field for field, hint in field_types(spec.options).items() if hint is bool]
    own = {field: f"--{field.replace('_', '-')}" for field in field_types(spec.options)}
    flags = Flags(
        command=f"surogate export --format {spec.name}",
        flags=(
            *(Flag("text", name) for name in ("--to", "--format", "--adapter")),
            *(Flag("switch" if field in switches else "text", flag) for field, flag in own.items()),
        ),
    )
    words = flags.read(argv)
    model, target = _model_of(words, flags.command), words.texts.get("--to", "")
    if not target or "://" in target:
        what = f"--to {target}: only files and directories are known" if target else "--to missing"
        raise UserError(f"{flags.command}: {what}. Fix: --to FILE{spec.suffix}")
    values = {field: words.texts[flag] for field, flag in own.items() if flag in words.texts}
    options = options_of(spec, values | {field: own[field] in words.switches for field in switches}, prefix="--")
    with shown_progress() as progress:

        def told(done: int, total: int) -> None:
            progress(events.Progress(task=f"writing {spec.name}", done=done >> 20, total=total >> 20, unit="MiB"))

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
    print(f"{model} is in {done.file} ({atomic.human_bytes(done.file.stat().st_size)}){others}")
    return 0


def _model_of(words: Words, command: str) -> str:
    if len(words.models) > 1:
        raise UserError(f"{command}: {' and '.join(words.models)}: one at a time. Fix: keep one")
    return words.models[0] if words.models else str(latest_run(command=command))


def _push(words: Words, export: Path, target: str) -> int:
    from surogate_command_export.push import outgoing, parse_repo, push
    from surogate_core.plugin import atomic

    repo = parse_repo(target)
    files = outgoing(export, base_model=words.texts.get("--base-model"), repo=repo)
    public, size = "--public" in words.switches, atomic.human_bytes(sum(f.size for f in files))
    what = f"{export} to {repo} ({'public' if public else 'private'}): {len(files)} files, {size}"
    if "--dry-run" in words.switches:
        print("\n".join([f"Would upload {what}", *(f"  {f.name}  {atomic.human_bytes(f.size)}" for f in files)]))
        return 0
    print(f"Uploading {what}", file=sys.stderr, flush=True)
    message = words.texts.get("--message") or f"Upload {export.name} with Surogate"
    address = push(files, repo, public=public, overwrite="--overwrite" in words.switches, message=message)
    print(f"Uploaded to {address}")
    return 0


def _copy(words: Words, export: Path, target: Path) -> int:
    import shutil

    from surogate_core.plugin import atomic
    from surogate_core.service.files import check_place

    if wrong := [
        f for f in ("--public", "--overwrite", "--base-model", "--message") if f in {*words.switches, *words.texts}
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
