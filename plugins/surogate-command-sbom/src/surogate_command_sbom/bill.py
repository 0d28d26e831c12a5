"""A bill of materials of what is installed, as CycloneDX 1.6 in JSON (https://cyclonedx.org/docs/1.6/json/)."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution
from typing import Any

from surogate_core.service.plugins import (
    CORE_DISTRIBUTION,
    GROUP,
    LINK,
    InstalledPlugin,
    LockedDistribution,
    Scope,
    canonical,
    in_scope,
    installed_distributions,
    required_by,
)

SPEC_VERSION = "1.6"


def bill_of_materials(plugins: Sequence[InstalledPlugin], scope: Scope) -> dict[str, Any]:
    """The bill of the plugins' distributions, of the core and of what `scope` adds.

    Equal sets give equal bills: a bill contains no time, and its serial number is derived from the contents.
    """
    names = {CORE_DISTRIBUTION, *(canonical(plugin.distribution) for plugin in plugins)}
    dists = {name: dist for name, dist in required_by(names).items() if name in names}
    dists = dict(sorted((dists | in_scope(scope, names)).items()))
    locked = installed_distributions(plugins, "core" if scope == "plugins" else scope)
    components = [_component(name, dist, locked[name]) for name, dist in dists.items()]
    core = next((c for c in components if c["name"] == CORE_DISTRIBUTION), {"name": CORE_DISTRIBUTION})
    bill: dict[str, Any] = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {"component": {**core, "type": "application"}},
        "components": [c for c in components if c is not core],
        "dependencies": [
            {"ref": _reference(name, dist), "dependsOn": [_reference(n, dists[n]) for n in _requires(name, dists)]}
            for name, dist in dists.items()
        ],
    }
    digest = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill, sort_keys=True))
    return {**bill, "serialNumber": f"urn:uuid:{digest}"}


def _component(name: str, dist: Distribution, locked: LockedDistribution) -> dict[str, Any]:
    reference = _reference(name, dist)
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": dist.version,
        "purl": reference,
        "scope": "required",
    }
    metadata = dist.metadata
    if metadata["Summary"]:
        found["description"] = metadata["Summary"]
    if metadata["License-Expression"]:
        found["licenses"] = [{"expression": metadata["License-Expression"]}]
    elif metadata["License"]:
        # Some put the whole text there.
        found["licenses"] = [{"license": {"name": metadata["License"].strip().splitlines()[0]}}]
    if locked.wheel_sha256:
        found["hashes"] = _hashes(locked.wheel_sha256)
    if locked.files:
        found["components"] = [_file(path, digest) for path, digest in sorted(locked.files.items())]
    points = [f"{p.name} = {p.value}" for p in dist.entry_points if p.group == GROUP]
    if points:
        found["properties"] = [{"name": "surogate:entry_point", "value": text} for text in sorted(points)]
    return found


def _file(path: str, digest: str) -> dict[str, Any]:
    """A file below the directory of installation; one that cannot be read has the reason in place of its hash."""
    sha256 = digest.removeprefix(f"{LINK} ")
    found: dict[str, Any] = {"type": "file", "name": path}
    if re.fullmatch("[0-9a-f]{64}", sha256):
        return {**found, "hashes": _hashes(sha256)}
    return {**found, "properties": [{"name": "surogate:no_hash", "value": digest}]}


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _reference(name: str, dist: Distribution) -> str:
    return f"pkg:pypi/{canonical(name)}@{dist.version}"


def _requires(name: str, dists: Mapping[str, Distribution]) -> list[str]:
    """Direct requirements that are in the bill."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = set()
    for text in dists[name].requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(canonical(requirement.name))
    return sorted(found & dists.keys() - {name})
