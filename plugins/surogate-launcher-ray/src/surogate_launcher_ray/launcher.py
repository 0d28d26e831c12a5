"""`launcher=ray`: a run on machines of a Ray cluster."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from surogate_core.plugin import MachineError, UserError, atomic, launching
from surogate_launcher_ray.cluster import (
    LOOK,
    Lost,
    Member,
    StoppedEarly,
    answers,
    describe,
    lost_machines,
    machine_here,
    reserved,
)
from surogate_launcher_ray.connection import connected, ray_module, refuse_client
from surogate_launcher_ray.facts import compare, installed_in
from surogate_launcher_ray.head import HeadProbe
from surogate_launcher_ray.layout import Machine, RankLayout, layout
from surogate_launcher_ray.node import PreparedMachine, Start
from surogate_launcher_ray.options import RayOptions
from surogate_launcher_ray.watch import RanksWatch

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

log = structlog.get_logger(__name__)

FORWARDED = ("SUROGATE_", "NCCL_", "GLOO_", "TORCH", "OMP_NUM_THREADS")
"""Beginnings of the names of environment variables that ranks on all machines get from the driver. Tokens are none of
them: each machine has its own."""

ACCUMULATION = "gradient_accumulation_steps"


class Apart(Exception):  # noqa: N818
    """Ray has chosen machines without the driver's, whose output directory they do not share."""


class Fewer(Exception):  # noqa: N818
    """A restart waits for a machine that is gone, and can go on without it."""


def launch(job: bundles.Job, options: RayOptions, registry: bundles.Plugins) -> int:
    """Run the job on machines of the cluster; the exit code. Raises the first failure as a `SurogateError`."""
    refuse_client(options.ray_address, os.environ)
    ray_module()
    restarts = launching.Restarts(job.config, options.max_restarts)
    job.to_json()  # raises for what cannot leave this process
    _directory()
    atomic.ensure_writable(_logs(job), key="output_dir")
    with connected(options.ray_address) as ray, launching.Forwarding() as signals:
        run = _Run(ray, job, options, registry, signals)
        return restarts.run(run.start, signals)


class _Run:
    """What every start of the run has in common."""

    def __init__(
        self, ray: Any, job: bundles.Job, options: RayOptions, registry: bundles.Plugins, signals: launching.Forwarding
    ):
        self._ray, self._job, self._options, self._signals = ray, job, options, signals
        self._head = HeadProbe.of(ray, os.environ)
        self._here = installed_in(registry)
        self._layout: RankLayout | None = None
        """That of the first start, which a restart has too if no machine is missing."""
        self._machines: Sequence[Machine] = ()
        """Those of the cluster at the first start."""
        self._facts = Path(job.config["output_dir"]) / launching.FACTS
        self._facts_before = _written(self._facts)
        self._looked, self._restarting = 0.0, False
        self._with_here = False
        """Whether this machine must take part, because rank 0 of another one would not see the output directory."""
        self._policy = registry_policy(job.config)

    def start(self, resume: bool) -> int | launching.Failure:
        """Start all ranks: the exit code or the first failure, when they are gone."""
        try:
            result = self._start(resume)
            if isinstance(result, launching.Failure) and (lost := self._head.wait(self._check_signals)) is not None:
                return lost  # that is why the machine of the failure does not answer
            return result
        except StoppedEarly:
            return 128 + (self._signals.received or 0)

    def _start(self, resume: bool) -> int | launching.Failure:
        config = self._job.config
        try:
            if self._layout is None:
                self._machines = Machine.of(self._ray.nodes())
                self._layout = layout(self._options, config["gpus"], config["device"], self._machines)
                return self._start_on(self._layout, resume)
            self._restarting = True
            while True:
                found = self._layout_left()
                with suppress(Fewer):
                    return self._start_on(found, resume)
        except Lost as error:
            return error.failure

    def _start_on(self, found: RankLayout, resume: bool) -> int | launching.Failure:
        """Start all ranks on machines of the cluster. Raises `Fewer` while it waits for more than there are, and `Lost`
        for a machine that is lost before the ranks start."""
        try:
            return self._start_there(found, resume)
        except Apart:
            self._with_here = True
            return self._start_there(found, resume)

    def _start_there(self, found: RankLayout, resume: bool) -> int | launching.Failure:
        ray, head, check = self._ray, self._head, partial(self._check_left, found)
        with reserved(ray, found, head, check, with_here=self._with_here) as members:
            describe(ray, members, self._policy, head, self._check)
            compare(self._here, [member.facts for member in members if member.facts is not None])
            self._start_ranks(members, found, resume)
            return RanksWatch(ray, members, self._signals, head=head, silence=self._options.node_silence).run()

    def _layout_left(self) -> RankLayout:
        """The layout for a restart, and a line about what has changed."""
        full = self._layout
        assert full is not None
        found, steps = self._on_those_left(), self._micro_batches()
        shared = "the rows of a step" if steps is None else f"the {steps} micro-batches of a step"
        if found is None:
            what = f"ranks of fewer machines cannot share {shared} equally"
            groups = {"dp_shard_size": self._shard, "context_parallel_size": self._context, "ep_size": self._experts}
            if named := " and ".join(f"{key}={size}" for key, size in groups.items() if size > 1):
                what += f" in groups of {named}"
            if self._options.min_nodes > 1:
                what = f"launcher.min_nodes={self._options.min_nodes}, and {what}"
            log.warning(f"the run waits for {full.nodes} machines as before: {what}")
        elif found.nodes < full.nodes:
            log.warning(
                f"the run goes on with {found.nodes} of {full.nodes} machines: {found.world} "
                f"rank{'s' * (found.world > 1)} for {shared}"
            )
        return found or full

    def _on_those_left(self) -> RankLayout | None:
        assert self._layout is not None
        machines = Machine.of(self._ray.nodes())
        least, micro_batches = self._options.min_nodes, self._micro_batches()
        groups = {"shard": self._shard, "context": self._context, "experts": self._experts}
        return self._layout.on_those_left(machines, micro_batches, least=least, **groups)

    @property
    def _shard(self) -> int:
        """Ranks of each replica; 0 if all share out the model."""
        return int(self._job.config.get("dp_shard_size", 0))

    @property
    def _context(self) -> int:
        """Ranks that share each micro-batch."""
        return int(self._job.config.get("context_parallel_size", 1))

    @property
    def _experts(self) -> int:
        """Ranks that share out experts."""
        return int(self._job.config.get("ep_size", 1))

    def _micro_batches(self) -> int | None:
        """M, of a step of all ranks; 0 for a job that has no steps, None if their number varies.

        A run that resumed another one's checkpoint has kept the steps of that one, which its record says.
        """
        assert self._layout is not None
        with suppress(OSError, ValueError, KeyError):
            if _written(self._facts) != self._facts_before:
                written = json.loads(self._facts.read_bytes())["micro_batches"]
                return None if written is None else int(written)
        return int(self._job.config.get(ACCUMULATION, 0)) * (self._layout.world // self._context)

    def _check_left(self, found: RankLayout) -> None:
        """As `_check`, while machines are reserved.

        Raises `Lost` if the cluster no longer has enough machines for the first start, and `Fewer` once a restart can
        go on with fewer.
        """
        self._check()
        now = time.monotonic()
        if now - self._looked <= LOOK or not self._head.answers():
            return
        self._looked = now
        if self._restarting:
            fewer = self._on_those_left() if found.nodes > 1 else None
            if fewer is not None and fewer.nodes < found.nodes:
                raise Fewer
            return
        nodes = self._ray.nodes()
        machines = Machine.of(nodes)
        if len(found.able(machines)) < found.nodes:
            left = {machine.id for machine in machines}
            raise Lost(lost_machines(nodes, {m.id for m in found.able(self._machines)} - left))

    def _check(self) -> None:
        self._check_signals()
        if (failure := self._head.look()) is not None:
            raise Lost(failure)

    def _check_signals(self) -> None:
        if self._signals.received is not None:
            raise StoppedEarly

    def _start_ranks(self, members: Sequence[Member], found: RankLayout, resume: bool) -> None:
        assert self._layout is not None
        logs, here = _logs(self._job), _directory()
        with _shared(logs) as (file, content):
            asked = [m.actor.prepare.remote(here, str(file), content) for m in members]
            what = "for the machines to find the output directory"
            prepared = answers(self._ray, members, asked, what, self._head, self._check)
        self._check_prepared(members, prepared, found)
        # Fewer ranks take the same steps, also where there is no checkpoint yet that says so.
        kept: dict[str, int] = {}
        if found.nodes < self._layout.nodes:
            kept = {"gpus": found.world}
            if (micro_batches := self._micro_batches()) is not None:
                kept[ACCUMULATION] = micro_batches * self._context // found.world
        job = launching.sent(self._job, found.world, (), resume=resume, changes=kept)
        asked = []
        for member in members:
            assert member.facts is not None
            start = Start(
                job=job,
                world=found.world,
                first=member.first,
                here=found.per_node,
                address=members[0].address,
                port=prepared[0].port,
                logs=str(logs),
                silence=self._options.silence,
                host=member.name,
                environment=forwarded(os.environ),
                on_gpus=found.on_gpus,
            )
            if found.on_gpus and len(member.facts.gpus) < found.per_node:
                raise MachineError(
                    f"{member.name}: Ray has reserved {found.per_node} GPUs, but its processes see "
                    f"{len(member.facts.gpus)}. Fix: check nvidia-smi there, and restart Ray on it."
                )
            asked.append(member.actor.start.remote(start))
        # After a loss some ranks run: the watch finds out too, and ends them.
        with suppress(Lost):
            answers(self._ray, members, asked, "for the supervisors to start the ranks", self._head, self._check)

    def _check_prepared(
        self, members: Sequence[Member], prepared: Sequence[PreparedMachine], found: RankLayout
    ) -> None:
        """Raise `UserError` if a machine cannot start its ranks, or if rank 0 would write what this process cannot
        see. `Apart` if that could be otherwise."""
        wrong = [f"{m.name} {one.wrong}" for m, one in zip(members, prepared, strict=True) if one.wrong]
        if wrong:
            raise UserError(f"launcher=ray: {' '.join(wrong)}")
        here = machine_here(self._ray)
        if not prepared[0].shares:
            able = {machine.id for machine in found.able(Machine.of(self._ray.nodes()))}
            if here in able and not self._with_here:
                raise Apart
            raise UserError(
                f"launcher=ray: {members[0].name}, the machine of rank 0, does not see output_dir "
                f"{_logs(self._job).parent} of this machine, which takes no part in the run. Fix: start the command on "
                f"a machine that can take part, or name an output_dir on a file system that both share under the same "
                f"path."
            )
        self._with_here = members[0].id == here and not all(one.shares for one in prepared)


def registry_policy(config: Mapping[str, Any]) -> Any:
    """The plugin policy of a job's configuration; None where it has none."""

    return launching.policy_from(config) if "plugins" in config else None


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the driver that the ranks get."""
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED)}


def _written(file: Path) -> int:
    """When the file was written; 0 if there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _directory() -> str:
    """The directory of this process, which all ranks enter; `UserError` if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError as error:
        raise UserError(
            "launcher=ray: the directory in which the run was started is gone. Fix: start it in one that stays, such "
            "as one on the file system that the machines share; in a job of Ray by `sh -c 'cd /shared/project && …'`."
        ) from error


def _logs(job: bundles.Job) -> Path:
    return Path(job.config["output_dir"]).absolute() / "logs"


@contextmanager
def _shared(directory: Path) -> Iterator[tuple[Path, str]]:
    """A file in the directory and its content, by which other machines show whether they have the same directory."""
    file, content = directory / f".surogate-shared-{os.getpid()}", secrets.token_hex(16)
    atomic.write_file(file, content.encode())
    try:
        yield file, content
    finally:
        with suppress(OSError):
            file.unlink()
