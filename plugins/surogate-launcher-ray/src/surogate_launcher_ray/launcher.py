"""`launcher=ray`: a run on machines of a Ray cluster."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.errors import MachineError, UserError
from surogate_core.files import atomic
from surogate_core.launch.child import Failure
from surogate_core.launch.forwarding import Forwarding
from surogate_core.launch.local import sent
from surogate_core.launch.restarts import Restarts
from surogate_launcher_ray.cluster import Member, Stopped, answers, connected, describe, ray_module, reserved
from surogate_launcher_ray.facts import compare, installed_in
from surogate_launcher_ray.layout import Layout, Machine, layout
from surogate_launcher_ray.node import Start
from surogate_launcher_ray.options import RayOptions
from surogate_launcher_ray.watch import Watch

if TYPE_CHECKING:
    from surogate_core.bundles.launchers import Job
    from surogate_core.plugins.registry import Registry

FORWARDED = ("SUROGATE_", "NCCL_", "GLOO_", "TORCH", "OMP_NUM_THREADS")
"""Beginnings of the names of environment variables that ranks on all machines get from the driver. Tokens are none of
them: each machine has its own."""


def launch(job: Job, options: RayOptions, registry: Registry) -> int:
    """Run the job on machines of the cluster; the exit code. Raises the first failure as a `SurogateError`."""
    ray_module()
    restarts = Restarts(job.config, options.max_restarts)
    job.to_json()  # raises for what cannot leave this process
    atomic.ensure_writable(_logs(job), key="output_dir")
    with connected(options.ray_address) as ray, Forwarding() as signals:
        run = _Run(ray, job, options, registry, signals)
        return restarts.run(run.start, signals)


class _Run:
    """What every start of the run has in common."""

    def __init__(self, ray: Any, job: Job, options: RayOptions, registry: Registry, signals: Forwarding):
        self._ray, self._job, self._options, self._signals = ray, job, options, signals
        self._here = installed_in(registry)
        self._layout: Layout | None = None
        self._policy = registry_policy(job.config)

    def start(self, resume: bool) -> int | Failure:
        """Start all ranks: the exit code or the first failure, when they are gone."""
        config, ray = self._job.config, self._ray
        try:
            if (found := self._layout) is None:
                found = layout(self._options, config["gpus"], config["device"], Machine.of(ray.nodes()))
            # A restart has the same layout, and waits for a machine in place of one that was lost.
            self._layout = found
            with reserved(ray, found, self._check) as members:
                describe(ray, members, self._policy, self._check)
                compare(self._here, [member.facts for member in members if member.facts is not None])
                self._start_ranks(members, found, resume)
                silence = self._options.node_silence
                return Watch(ray, members, self._signals, per_node=found.per_node, silence=silence).run()
        except Stopped:
            return 128 + (self._signals.received or 0)

    def _check(self) -> None:
        if self._signals.received is not None:
            raise Stopped

    def _start_ranks(self, members: Sequence[Member], found: Layout, resume: bool) -> None:
        logs = _logs(self._job)
        with _shared(logs) as (file, content):
            asked = [m.actor.prepare.remote(str(Path.cwd()), str(file), content) for m in members]
            prepared = answers(self._ray, members, asked, "for the machines to find the output directory", self._check)
        wrong = [f"{m.name} {text}" for m, (text, _) in zip(members, prepared, strict=True) if text]
        if wrong:
            raise UserError(f"launcher=ray: {' '.join(wrong)}")
        job = sent(self._job, found.world, (), resume=resume)
        asked = []
        for member in members:
            assert member.facts is not None
            start = Start(
                job=job,
                world=found.world,
                first=member.first,
                here=found.per_node,
                address=members[0].address,
                port=prepared[0][1],
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
        answers(self._ray, members, asked, "for the supervisors to start the ranks", self._check)


def registry_policy(config: Mapping[str, Any]) -> Any:
    """The plugin policy of a job's configuration; None where it has none."""
    from surogate_core.config.resolve import policy_from

    return policy_from(config) if "plugins" in config else None


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the driver that the ranks get."""
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED)}


def _logs(job: Job) -> Path:
    return Path(job.config["output_dir"]).absolute() / "logs"


@contextmanager
def _shared(directory: Path) -> Iterator[tuple[Path, str]]:
    """A file in the directory and its content, by which other machines show that they have the same directory."""
    file, content = directory / f".surogate-shared-{os.getpid()}", secrets.token_hex(16)
    atomic.write_file(file, content.encode())
    try:
        yield file, content
    finally:
        with suppress(OSError):
            file.unlink()
