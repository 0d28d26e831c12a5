"""A new plugin package, from the templates beside this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surogate_core.errors import UserError
from surogate_core.plugins.discovery import core_plugin, installed_plugins
from surogate_core.plugins.static import static_view

TEMPLATES = Path(__file__).with_name("templates")

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageKind:
    """The properties that all packages of a kind share."""

    what: str
    """The kind in words."""
    file: str
    """Module that does the work."""
    use: str
    """A command that uses it."""
    has_option: bool = True
    """Whether there is an option file in the config group of the last of `offers`."""
    offers: tuple[str, ...] = ()
    """Kinds of its bundles, if not only one of the kind's name."""
    library: str = ""
    """A library of Surogate that it needs beside the core."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further module → its template."""

    def offered(self, kind: str) -> tuple[str, ...]:
        """Kinds of the bundles that a package of `kind` offers."""
        return self.offers or (kind,)


KINDS: Mapping[str, PackageKind] = {
    "model": PackageKind(what="the model family", file="model", use="surogate model=@NAME@"),
    "head": PackageKind(
        what="the head",
        file="head",
        use="surogate task=@NAME@ model.name=@NAME@ model.preset=tiny lora=false",
        offers=("model", "task"),
        more={"model": "model/code.py"},
    ),
    "objective": PackageKind(what="the objective", file="objective", use="surogate objective=@NAME@", has_option=False),
    "recipe": PackageKind(what="the precision recipe", file="linear", use="surogate recipe=@NAME@"),
    "quant": PackageKind(
        what="the weight format", file="rows", use="surogate lora=true qlora_format=@NAME@", has_option=False
    ),
    "optimizer": PackageKind(what="the optimizer", file="optimizer", use="surogate optimizer=@NAME@"),
    "schedule": PackageKind(
        what="the schedule of the learning rate",
        file="schedule",
        use="surogate lr_scheduler_type=@NAME@ warmup_steps=0",
        has_option=False,
    ),
    "offload": PackageKind(what="the offloader", file="store", use="surogate offload=@NAME@"),
    "dataset": PackageKind(
        what="data sets of type",
        file="format",
        use="surogate 'datasets=[{path: my.jsonl, type: @NAME@}]'",
        has_option=False,
    ),
    "task": PackageKind(what="the task", file="steps", use="surogate task=@NAME@"),
    "advantage": PackageKind(
        what="the advantage", file="advantage", use="surogate grpo advantage=@NAME@", has_option=False
    ),
    "policy_loss": PackageKind(
        what="the policy loss", file="loss", use="surogate grpo loss_type=@NAME@", has_option=False
    ),
    "environment": PackageKind(
        what="the environment",
        file="environment",
        use="surogate env check @NAME@",
        library="surogate-reinforcement",
    ),
    "launcher": PackageKind(what="the launcher", file="launch", use="surogate launcher=@NAME@"),
    "fabric": PackageKind(what="the fabric", file="links", use="surogate gpus=2 device=cpu fabric=@NAME@"),
    "monitor": PackageKind(what="the monitor", file="monitor", use="surogate monitor=[console,jsonl,@NAME@]"),
    "command": PackageKind(what="the command", file="command", use="surogate @NAME@", has_option=False),
    "kernels": PackageKind(what="the kernel pack", file="kernels", use="surogate doctor", has_option=False),
}
"""Kinds that a package can be made for."""


def new_plugin(name: str, kind: str, parent: Path) -> Path:
    """Write the package ``surogate-<kind>-<name>`` below `parent`; returns its directory.

    Raises `UserError` for a name that cannot be one or is an installed plugin's, and where the directory exists.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a plugin. Fix: lower-case letters and digits with dashes between, "
            "the first a letter"
        )
    _refuse_taken(name, kind)
    facts, values = KINDS[kind], _values(name, kind)
    directory, module = parent / values["DIST"], values["MODULE"]
    package = f"src/{module}"
    files = {
        "pyproject.toml": "common/pyproject.toml",
        "README.md": "common/README.md",
        ".github/workflows/ci.yml": "common/ci.yml",
        f"{package}/__init__.py": f"{kind}/init.py",
        f"{package}/{facts.file}.py": f"{kind}/code.py",
        f"{package}/py.typed": "",
        "tests/test_conformance.py": "common/test_conformance.py",
        f"tests/test_{name.replace('-', '_')}.py": f"{kind}/test.py",
    }
    files |= {f"{package}/{other}.py": template for other, template in facts.more.items()}
    if facts.has_option:
        group = facts.offered(kind)[-1]
        files |= {f"{package}/conf/__init__.py": "", f"{package}/conf/{group}/__init__.py": ""}
        files[f"{package}/conf/{group}/{name}.yaml"] = f"{kind}/option.yaml"
    try:
        directory.mkdir(parents=True)
        for path, template in files.items():
            text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8") if template else ""
            for key, value in values.items():
                text = text.replace(f"@{key}@", value)
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{directory} exists. Fix: another name, or --output DIR") from None
    except OSError as error:
        raise UserError(f"{directory}: the package cannot be written: {error.strerror}.") from None
    return directory


def entry_point(name: str, kind: str) -> str:
    """Name of the new plugin's entry point."""
    return f"{kind.replace('_', '-')}-{name}"


def _values(name: str, kind: str) -> dict[str, str]:
    """Placeholder of the templates → its text."""
    from surogate_core import API_VERSION, __version__

    major, minor, *_ = __version__.split(".")
    point, facts = entry_point(name, kind), KINDS[kind]
    # Before 1.0 a minor version may change the plugin API.
    core, after = f"{major}.{minor}", f"{major}.{int(minor) + 1}"
    needs = ["surogate-core", *([facts.library] if facts.library else [])]
    return {
        "USE": facts.use,
        "NAME": name,
        "KIND": kind,
        "WHAT": facts.what,
        "FILE": facts.file,
        "POINT": point,
        "KEY": name.replace("-", "_"),
        "DIST": f"surogate-{point}",
        "MODULE": f"surogate-{point}".replace("-", "_"),
        "CLASS": "".join(part.capitalize() for part in name.split("-")),
        "API": f">={API_VERSION},<{API_VERSION + 1}",
        "NEEDS": ", ".join(f'"{library}>={core},<{after}"' for library in needs),
        "CORE": core,
        "NEXT": after,
    }


def _refuse_taken(name: str, kind: str) -> None:
    """Raise `UserError` where an installed plugin offers a bundle that the package would offer too."""
    for plugin in (core_plugin(), *installed_plugins()):
        for offered in KINDS[kind].offered(kind):
            if (offered, name) in static_view(plugin.module).bundles:
                raise UserError(
                    f"{plugin.label} offers {offered} {name} already, and a duplicate name stops every run. "
                    "Fix: choose another name"
                )
