"""The connection to a Ray cluster, and why there is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from surogate_core.plugin import ConfigError, MachineError, Problem
from surogate_launcher_ray.head import HeadProbe

ANSWER_SECONDS = 5.0
"""The time in which the head of a cluster takes a connection."""
SHOWN = 500
"""Characters of Ray's explanations that are shown."""


def ray_module() -> Any:
    """The package `ray`; `MachineError` if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MachineError(
            f"launcher=ray: the package {error.name} is not installed. "
            f"Fix: pip install 'surogate-launcher-ray[cluster]' on all machines of the cluster."
        ) from error
    return ray


def refuse_client(address: str, environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an address of Ray Client: its driver has neither the run's directory nor its network."""
    named = environment.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.startswith("ray://"):
        by = " (RAY_ADDRESS)" if address == "auto" else ""
        message = f"{named}{by} is Ray Client, which drives a cluster from outside; the run's directory is inside."
        fix = "ray job submit --address=http://HOST:8265 -- surogate sft run.yaml launcher=ray …, without ray_address"
        raise ConfigError([Problem(key="launcher.ray_address", message=message, fix=fix)])


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The package `ray`, connected to the cluster as long as this is open; `MachineError` if it does not answer."""
    ray = ray_module()
    if ray.is_initialized():  # by the program that calls us
        yield ray
        return
    _check_answer(address)
    keys = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **keys)
    except Exception as error:
        if not isinstance(error, OSError | RuntimeError | ValueError) and not _is_ray_error(error):
            raise
        raise _refused(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answer(address: str) -> None:
    """Raise `MachineError` if nothing takes a connection where Ray would look. Ray itself would try for minutes."""
    try:
        from ray._private.services import canonicalize_bootstrap_address  # type: ignore[import-not-found, unused-ignore]

        place = canonicalize_bootstrap_address(address)
    except (ImportError, OSError, ValueError):  # no such function in this version, or Ray's own error, which it repeats
        return
    if place is not None and HeadProbe(place, ANSWER_SECONDS).wait() is not None:
        raise _refused(address, ConnectionError(f"nothing at {place} takes a connection"))


def _is_ray_error(error: Exception) -> bool:
    """Whether it is one of `ray.exceptions`, among them that of a cluster with tokens if none is found here."""
    return type(error).__module__.partition(".")[0] == "ray"


def _refused(address: str, error: Exception) -> MachineError:
    """Why there is no connection. A wrong token looks to Ray as if nobody answered; only its log names it."""
    start = (
        "`ray start --head` on one machine and `ray start --address=HOST:PORT` on the others, or "
        "launcher.ray_address=local for one"
    )
    token = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file that has the cluster's token"
    if type(error).__name__ == "AuthenticationError":
        what, fix = "this program has no token for it", token
    elif isinstance(error, ConnectionError) and "Failed to connect" in str(error):
        what, fix = "no Ray cluster answers", f"{start}. If Ray's log above has InvalidAuthToken, {token}"
    else:
        what, fix = "no Ray cluster answers", start
    text = " ".join(str(error).split())
    return MachineError(f"launcher.ray_address={address}: {what} ({text[:SHOWN]}). Fix: {fix}.")
