"""Which machine runs which ranks. Pure: no Ray here."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.plugin import ConfigError, MachineError, Problem
from surogate_launcher_ray.options import RayOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the cluster, as Ray describes it."""

    id: str
    address: str
    cpus: float
    gpus: int

    @classmethod
    def of(cls, nodes: Sequence[Mapping[str, Any]]) -> list[Machine]:
        """The living machines in `ray.nodes()`, in the order of their ranks."""
        found = []
        for node in nodes:
            if node["Alive"]:
                has = node["Resources"]
                place = {"id": node["NodeID"], "address": node["NodeManagerAddress"]}
                found.append(cls(**place, cpus=has.get("CPU", 0.0), gpus=int(has.get("GPU", 0))))
        return sorted(found, key=lambda machine: order(machine.address, machine.id))


def order(address: str, node: str) -> tuple[int, int, str, str]:
    """What machines are sorted by: the address as a number, then the id."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return 99, 0, address, node
    return ip.version, int(ip), "", node


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How many ranks run where: the same number on each machine."""

    nodes: int
    per_node: int
    on_gpus: bool

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    @property
    def bundle(self) -> dict[str, float]:
        """What the run reserves on each machine, as Ray's resources."""
        return {"CPU": 1.0, **({"GPU": float(self.per_node)} if self.on_gpus else {})}

    def check(self, machines: Sequence[Machine]) -> None:
        """Raise `MachineError` unless enough machines have what the run needs, whether or not it is in use."""
        need = self.per_node if self.on_gpus else 0
        able = self.able(machines)
        if len(able) < self.nodes:
            what = f"{need} GPU{'s' if need > 1 else ''} and a CPU" if need else "a CPU"
            count = f"{len(able)} machine{'' if len(able) == 1 else 's'}"
            raise MachineError(
                f"launcher.num_nodes={self.nodes}: the Ray cluster has {count} with {what}: "
                f"{_listed(machines)}. Fix: launcher.num_nodes={max(len(able), 1)}, or add machines by "
                f"`ray start --address=HOST:PORT`."
            )

    def able(self, machines: Sequence[Machine]) -> list[Machine]:
        """The machines that have what the run needs of each, whether or not it is in use."""
        need = self.per_node if self.on_gpus else 0
        return [machine for machine in machines if machine.cpus >= 1 and machine.gpus >= need]

    def on_those_left(
        self,
        machines: Sequence[Machine],
        micro_batches: int | None,
        *,
        least: int,
        shard: int = 0,
        context: int = 1,
        experts: int = 1,
    ) -> RankLayout | None:
        """The layout for a restart: this one, or after a loss the largest whose ranks share a step equally.

        `micro_batches`: M, of a step of all ranks; None if their number varies, and any ranks share them. `least`:
        fewest machines. `shard`: ranks of each replica (`dp_shard_size`), into which several ranks must divide.
        `context`: ranks that share each micro-batch (`context_parallel_size`). `experts`: ranks that share out experts
        (`ep_size`). None: another machine is needed.
        """
        left = min(len(self.able(machines)), self.nodes)
        if left == self.nodes:
            return self
        for nodes in range(left, least - 1, -1):
            ranks = nodes * self.per_node
            groups, apart = divmod(ranks, context)
            equal = not apart and (micro_batches is None or (micro_batches > 0 and micro_batches % groups == 0))
            if equal and ranks % experts == 0 and (ranks == 1 or ranks % max(shard, 1) == 0):
                return replace(self, nodes=nodes)
        return None


def layout(options: RayOptions, wanted: int, device: str, machines: Sequence[Machine]) -> RankLayout:
    """The layout for the keys of a run. `wanted`: `gpus`. `machines`: those of the cluster.

    Raises `ConfigError` for numbers that contradict each other, and `MachineError` if the cluster has too little.
    """
    nodes, given = options.num_nodes, options.gpus_per_node
    if given and wanted > 1 and wanted != nodes * given:
        message = (
            f"{wanted} GPUs, but {nodes} machines with {given} each (launcher.gpus_per_node) have {nodes * given}."
        )
        raise ConfigError([Problem(key="gpus", message=message, fix=f"gpus={nodes * given}, or leave it out")])
    if wanted > 1 and wanted % nodes:
        message = f"{wanted} ranks cannot be divided equally among {nodes} machines (launcher.num_nodes)."
        near = max(wanted - wanted % nodes, nodes)
        raise ConfigError([Problem(key="gpus", message=message, fix=f"gpus={near}")])
    on_gpus = device != "cpu" and (device != "auto" or any(machine.gpus for machine in machines))
    per_node = given or (wanted // nodes if wanted > 1 else 0) or (_gpus_of_each(nodes, machines) if on_gpus else 1)
    found = RankLayout(nodes=nodes, per_node=per_node, on_gpus=on_gpus)
    found.check(machines)
    return found


def _gpus_of_each(nodes: int, machines: Sequence[Machine]) -> int:
    """The GPUs of each of the machines that have the most."""
    most = sorted(machines, key=lambda machine: -machine.gpus)[:nodes]
    counts = {machine.gpus for machine in most}
    if len(most) == nodes and len(counts) == 1:
        return max(counts.pop(), 1)
    if len(most) < nodes or 0 in counts:
        return 1  # `check` says what is missing
    raise MachineError(
        f"launcher.gpus_per_node=0: the machines have different numbers of GPUs: {_listed(most)}. "
        f"Fix: launcher.gpus_per_node={min(counts)}."
    )


def _listed(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{m.address} has {m.cpus:g} CPUs and {m.gpus} GPUs" for m in machines) or "it has no machine"
