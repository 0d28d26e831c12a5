"""The Ray cluster as the driver uses it: a reserved place on each machine, and a supervisor in it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog

from surogate_core.plugin import MachineError, PluginError, SurogateError, launching
from surogate_launcher_ray.connection import SHOWN
from surogate_launcher_ray.facts import Facts
from surogate_launcher_ray.head import HeadProbe
from surogate_launcher_ray.layout import Machine, RankLayout, order
from surogate_launcher_ray.node import Node

log = structlog.get_logger(__name__)

RESERVE_SECONDS = 300.0
"""The time in which the cluster frees what the run needs."""
READY_SECONDS = 120.0
"""The time in which the supervisors start and load their plugins."""
LOST = "the machine or its Ray is lost"
PATIENT = 5.0
"""Seconds after which a notice says what the launcher waits for."""
POLL = 0.1
LOOK = 1.0
"""Seconds between looks at the machines of the cluster, while something is waited for."""
_ATTRIBUTE = re.compile(r"\s+(class_name|actor_id|pid|name|namespace|ip): ")


class StoppedEarly(Exception):  # noqa: N818
    """A signal came while the run was not started yet."""


class Lost(Exception):  # noqa: N818
    """A machine, or the head of the cluster, was lost before all ranks had started."""

    def __init__(self, failure: launching.Failure):
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, kw_only=True)
class Member:
    """A machine of the run."""

    actor: Any
    id: str
    address: str
    first: int = 0
    """Its first rank."""
    here: int = 1
    """Number of its ranks."""
    facts: Facts | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.facts.name if self.facts is not None else self.address


def machine_here(ray: Any) -> str:
    """Ray's id of the machine of this process."""
    return str(ray.get_runtime_context().get_node_id())


@contextmanager
def reserved(
    ray: Any, layout: RankLayout, head: HeadProbe, check: Callable[[], None], *, with_here: bool = False
) -> Iterator[list[Member]]:
    """The machines of the run in the order of their ranks, each with an actor; all is given back afterwards.

    This process's machine comes first if it takes part, which `with_here` demands. `check` is called while this waits,
    and may raise. Raises `MachineError` if the cluster is too busy, and `Lost` if a machine is lost at once.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    here, bundles = machine_here(ray), [layout.bundle] * layout.nodes
    if with_here:
        # Every machine has a resource with the address by which Ray knows it.
        own = [f"node:{machine.address}" for machine in Machine.of(ray.nodes()) if machine.id == here]
        bundles[0] = {**layout.bundle, **dict.fromkeys(own, 0.001)}
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        waiting = f"for {layout.nodes} machines with {_shown(layout.bundle)} that no other program has reserved"
        _wait(ray, [group.ready()], seconds=RESERVE_SECONDS, what=waiting, check=check)
        addresses = {machine.id: machine.address for machine in Machine.of(ray.nodes())}
        places = placement_group_table(group)["bundles_to_node_id"]
        if gone := set(places.values()) - addresses.keys():
            raise Lost(lost_machines(ray.nodes(), gone))  # Ray looks for another place, which may never be there

        def rank_order(item: tuple[Any, str]) -> Any:
            return item[1] != here, order(addresses.get(item[1], ""), item[1])

        for index, node in sorted(places.items(), key=rank_order):
            options = {"num_cpus": 1, "num_gpus": int(layout.bundle.get("GPU", 0)), "max_restarts": 0}
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=int(index))
            actor = ray.remote(Node).options(scheduling_strategy=where, **options)
            address = addresses.get(node, "")
            actors.append((actor.remote(node, address), node, address))
        yield [
            Member(actor=actor, id=node, address=address, first=number * layout.per_node, here=layout.per_node)
            for number, (actor, node, address) in enumerate(actors)
        ]
    finally:
        # Without a head there is nothing to give back, and these calls would not return.
        if head.wait() is None:
            for actor, _, _ in actors:
                with suppress(Exception):
                    ray.kill(actor, no_restart=True)
            with suppress(Exception):
                remove_placement_group(group)


def describe(
    ray: Any,
    members: Sequence[Member],
    policy: launching.PluginPolicy | None,
    head: HeadProbe,
    check: Callable[[], None],
) -> None:
    """Ask each machine for its facts. Raises its errors, with its name."""
    asked = [member.actor.facts.remote(policy) for member in members]
    found = answers(ray, members, asked, "for the supervisors of the machines", head, check)
    for member, facts in zip(members, found, strict=True):
        member.facts = facts


def answers(
    ray: Any, members: Sequence[Member], asked: Sequence[Any], what: str, head: HeadProbe, check: Callable[[], None]
) -> list[Any]:
    """What a method of each machine's actor has returned. `what` is waited for, `check` is called meanwhile.

    Raises its `SurogateError` with the machine's name, `PluginError` for any other error, `MachineError` if the actor
    cannot start or does not answer, and `Lost` for a machine that is lost meanwhile.
    """
    looked = time.monotonic()

    def check_all() -> None:
        nonlocal looked
        check()
        if time.monotonic() - looked > LOOK and head.answers():
            looked = time.monotonic()
            # A question to a lost machine may stay without an answer: Ray looks for another place for its actor.
            nodes = ray.nodes()
            alive = {machine.id for machine in Machine.of(nodes)}
            for member in members:
                if member.id not in alive:
                    raise Lost(lost(member, f"{LOST}: {_cause(nodes, member.id)}"))

    _wait(ray, asked, seconds=READY_SECONDS, what=what, check=check_all)
    return [_answer(ray, member, ref) for member, ref in zip(members, asked, strict=True)]


def _answer(ray: Any, member: Member, ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SurogateError):
            raise type(cause)(f"{member.name}: {cause}") from error
        raise PluginError(_unlike(member, f"{type(cause).__name__}: {cause}")) from error
    except ray.exceptions.RayActorError as error:
        text = str(error)
        if "ModuleNotFoundError" in text or "ImportError" in text or "AttributeError" in text:
            raise PluginError(_unlike(member, text.strip().splitlines()[-1])) from error
        if getattr(error, "actor_init_failed", False):
            raise MachineError(f"{member.name}: its supervisor cannot start. {death(error)}") from error
        raise Lost(lost(member, f"{LOST}: {death(error)}")) from error


def lost(member: Member, text: str) -> launching.Failure:
    """The failure of a machine of the run that is lost, with its ranks. `text`: what is known of the cause."""
    first, last = member.first, member.first + member.here - 1
    who = f"rank {first} to {last}" if last > first else f"rank {first}"
    message = f"{who} on {member.name}: {text}"
    return launching.Failure(rank=first, message=message, code=1, at=0.0, advice=launching.RESUME, host=member.name)


def lost_machines(nodes: Sequence[Mapping[str, Any]], gone: Collection[str]) -> launching.Failure:
    """As `lost`, for machines that have no ranks yet: those of `ray.nodes()` with the ids."""
    names = {item["NodeID"]: item["NodeManagerAddress"] for item in nodes}
    known = [f"{names[node]}: {LOST}: {_cause(nodes, node)}" for node in sorted(gone) if node in names]
    message = " ".join(known) or f"{LOST}: the cluster no longer has it."
    return launching.Failure(rank=0, message=message, code=1, at=0.0, advice=launching.RESUME)


def _cause(nodes: Sequence[Mapping[str, Any]], node: str) -> str:
    """What Ray knows of the death of a machine."""
    reasons = [str(item.get("DeathReasonMessage") or "") for item in nodes if item["NodeID"] == node]
    return " ".join("".join(reasons).split())[:SHOWN] or "Ray counts it as dead."


def _unlike(member: Member, text: str) -> str:
    return (
        f"{member.name}: its supervisor fails: {text}. Fix: install the same versions of Surogate and its plugins, "
        f"surogate-launcher-ray among them, on all machines."
    )


def death(error: BaseException) -> str:
    """What Ray says about the death of an actor, in short."""
    lines = [line.strip() for line in str(error).splitlines() if not _ATTRIBUTE.match(line)]
    return " ".join(line for line in lines if line)[:SHOWN] or type(error).__name__


def _wait(ray: Any, refs: Sequence[Any], *, seconds: float, what: str, check: Callable[[], None]) -> None:
    """Wait until all is there; `MachineError` if that takes too long."""
    began, told = time.monotonic(), False
    while ray.wait(list(refs), num_returns=len(refs), timeout=POLL)[1]:
        check()
        waited = time.monotonic() - began
        if waited > PATIENT and not told:
            log.warning(f"launcher=ray is waiting {what}")
            told = True
        if waited > seconds:
            raise MachineError(f"launcher=ray has waited {seconds:.0f} seconds {what}. Fix: see `ray status`.")


def _shown(bundle: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in bundle.items())
