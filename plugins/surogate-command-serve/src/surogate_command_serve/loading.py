"""From the words of a user to a server that listens."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_command_serve.models import ServedModel
from surogate_command_serve.server import Note, Server
from surogate_command_serve.worker import Worker
from surogate_commands.adapters import Adapters, prepare_beside
from surogate_core.plugin import UserError, bundles, inference
from surogate_core.service.config import RunConfig
from surogate_core.service.inference import (
    check_parser,
    named,
    on_its_base,
    prepare,
    quantised_note,
    rollout_of,
    warm_up,
    with_adapter,
)

if TYPE_CHECKING:
    from surogate_core.service.plugins import Registry

CONTEXT = 4096
"""Tokens of the longest sequence, unless the user says otherwise."""
SLOTS = {"cpu": 8, "cuda": 64}
"""Sequences at a time on a device, unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served, and how."""

    model: str
    """A directory, a run, a checkpoint, an adapter or a hub id."""
    configure: Callable[[Sequence[str]], RunConfig]
    """The keys that say where the model is → the configuration, with the user's keys."""
    name: str = ""
    """The model's name in requests; the last part of its path without one."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name → directory of each adapter on it."""
    context: int | None = None
    slots: int | None = None
    engine: str = "native"
    tool_parser: str = ""
    """The form of the model's tool calls; by default the chat template decides."""
    sampling: Callable[[bundles.Sampling], bundles.Sampling] = lambda own: own
    """The sampling of a model's files → that of requests which name none."""

    @property
    def base(self) -> str:
        """The model's name in requests."""
        return self.name or Path(self.model.rstrip("/")).name


def load(
    serving: Serving,
    registry: Registry,
    *,
    progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    note: Note = lambda line: None,
) -> tuple[dict[str, ServedModel], Worker]:
    """(models by name, the thread that generates). `note` receives notices about the models."""
    if serving.base in serving.adapters:
        directory = serving.adapters[serving.base]
        raise UserError(
            f"--adapter {serving.base}={directory}: the model is called {serving.base} too. "
            f"Fix: --adapter OTHER={directory}"
        )
    spec = rollout_of(registry, serving.engine)
    parsers = registry.all("tool_parser")
    if serving.tool_parser:
        check_parser(parsers, serving.tool_parser, key="--tool-parser")
    prepared, beside = _prepared(serving, registry, note)
    context = int(min(serving.context or CONTEXT, prepared.context))
    models = {
        name: ServedModel(
            name=name,
            prepared=one,
            sampling=serving.sampling(one.sampling),
            context=context,
            parent=None if name == serving.base else serving.base,
            parsers=parsers,
            tool_parser=serving.tool_parser,
            constrains=spec.constrains,
        )
        for name, one in {serving.base: prepared, **beside}.items()
    }
    weights = prepared.load(registry, progress=progress)
    adapters = Adapters(weights, beside)
    slots = inference.fitting_slots(
        weights,
        context,
        serving.slots or SLOTS.get(weights.device.type, 8),
        least=serving.slots or 1,
        fix="fewer --slots, or a lower --context",
    )
    engine = spec.open(weights, bundles.RolloutSettings(slots=slots, context=context, frozen=True))
    progress("warming up", 0, 1)
    warm_up(engine, slots=slots, context=context)
    progress("warming up", 1, 1)

    def activate(name: str) -> None:
        if adapters.activate(name if name in beside else None):
            engine.forget()

    return models, Worker(engine, slots=slots, activate=activate)


def _prepared(
    serving: Serving, registry: Registry, note: Note
) -> tuple[inference.PreparedModel, dict[str, inference.PreparedModel]]:
    """(the model, the adapters beside it by name)."""
    model = serving.model
    base = named(model, fix=on_its_base("surogate serve"))
    config = serving.configure(base.overrides)
    if not serving.adapters:
        prepared = prepare(base, config, registry)
        said = {model: (*prepared.notes, *quantised_note(model, base, prepared, registry))}
        beside: dict[str, inference.PreparedModel] = {}
    else:
        found = {name: with_adapter(model, directory) for name, directory in serving.adapters.items()}
        prepared, beside = prepare_beside(base, found, config, registry)
        said = {model: prepared.notes} | {
            directory: (*beside[name].notes, *quantised_note(directory, found[name], beside[name], registry))
            for name, directory in serving.adapters.items()
        }
    for word, notes in said.items():
        for one in notes:
            note(f"{word}: {one}")
    return prepared, beside


def check_address(host: str, port: int) -> None:
    """Raises `UserError` if a server cannot listen there; called before a model is loaded."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise UserError(f"port {port!r}: must be a whole number from 0 to 65535. Fix: port 0, which takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    reason = error.strerror or error
    return UserError(f"surogate serve: cannot listen on {host}:{port}: {reason}. Fix: another --port or --host")


def listen(
    models: Mapping[str, ServedModel], worker: Worker, *, host: str, port: int, token: str | None, note: Note
) -> Server:
    """A server for these models; raises `UserError` if it cannot listen there."""
    try:
        return Server(models, worker, host=host, port=port, token=token, note=note)
    except OSError as error:
        worker.close()
        raise _cannot_listen(host, port, error) from error
