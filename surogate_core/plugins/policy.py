"""The sources of the plugin policy: the configuration, the environment, and a file of the machine's owner.

Each source can only forbid. No source allows what another forbids, so a user cannot loosen the machine's policy.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surogate_core.errors import UserError

Policy = Literal["open", "allowlist", "locked"]
POLICIES: tuple[Policy, ...] = ("open", "allowlist", "locked")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRule:
    """A lock that the installed plugins must equal before one of them is imported."""

    where: str
    """The source of the rule."""
    file: str
    allow_editable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPolicy:
    """The policy of the machine's owner."""

    file: str
    policy: Policy = "open"
    allow: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    lock: str = ""
    """Absolute path; required with `locked`, as a lock of the user's choice would lock nothing."""
    allow_editable: bool = False


def system_policy_file() -> Path:
    """``policy.toml`` of the machine: in ``/etc/surogate`` on Linux, otherwise in the system's configuration directory.

    On Linux platformdirs would follow ``XDG_CONFIG_DIRS``, which a user sets.
    """
    if sys.platform.startswith("linux"):
        return Path("/etc/surogate/policy.toml")
    import platformdirs

    return Path(platformdirs.site_config_dir("surogate", appauthor=False)) / "policy.toml"


def system_policy(file: Path | None = None) -> SystemPolicy | None:
    """The machine's policy, or None where there is none. Raises `UserError` where it cannot be understood."""
    file = system_policy_file() if file is None else file
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        # A policy that cannot be read forbids everything: to go on would loosen it.
        raise UserError(f"{file}: the plugin policy of this machine cannot be read: {error}.") from None
    return _parse(data, str(file))


def _parse(data: Mapping[str, Any], file: str) -> SystemPolicy:
    kinds: dict[str, tuple[type, str]] = {
        "policy": (str, f"one of {', '.join(POLICIES)}"),
        "allow": (list, "a list of names"),
        "block": (list, "a list of names"),
        "lock": (str, "an absolute path"),
        "allow_editable": (bool, "true or false"),
    }
    for key, value in data.items():
        if key not in kinds:
            raise UserError(f"{file}: there is no key `{key}`; known: {', '.join(kinds)}.")
        expected, text = kinds[key]
        wrong = isinstance(value, list) and not all(isinstance(v, str) for v in value)
        if wrong or type(value) is not expected:
            raise UserError(f"{file}: `{key}` must be {text}.")
    policy = as_policy(data.get("policy", "open"), f"{file}: `policy`")
    lock = data.get("lock", "")
    if policy == "locked" and not Path(lock).is_absolute():
        raise UserError(f"{file}: `policy` is locked, so `lock` must be the absolute path of a lock.")
    return SystemPolicy(
        file=file,
        policy=policy,
        allow=tuple(data.get("allow", ())),
        block=tuple(data.get("block", ())),
        lock=lock,
        allow_editable=data.get("allow_editable", False),
    )


def as_policy(text: str, where: str) -> Policy:
    """The policy of that name; raises `UserError`."""
    for policy in POLICIES:
        if text == policy:
            return policy
    raise UserError(f"{where} must be one of {', '.join(POLICIES)}, not {text!r}.")
