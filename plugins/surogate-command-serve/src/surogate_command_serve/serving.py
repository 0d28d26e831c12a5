"""`serve`: a server of the OpenAI API from Python."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_command_serve.access import LEAST_TOKEN, is_token
from surogate_core.plugin import UserError
from surogate_core.service.app import contained, plain

if TYPE_CHECKING:
    from surogate_command_serve.server import Server


def serve(
    model: str | os.PathLike[str],
    *,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    name: str = "",
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    context: int | None = None,
    slots: int | None = None,
    engine: str = "native",
    tool_parser: str = "",
    sampling: Mapping[str, float] | None = None,
    **keys: Any,
) -> Server:
    """Serve a model over the OpenAI API until the server is closed: ``with surogate.serve(run.path) as server: …``.

    `adapters`: name → an adapter on it, served beside it. `name`: the model's name in requests, by default the last
    part of its path. `port` 0 takes a free one. `token`: what clients must send; by default a random one. The server
    has `url`, `token`, `models` and `close()`. `tool_parser`: the form of the model's tool calls, by default that
    of the chat template. The others are the flags of `surogate serve` and keys of the configuration, such as
    ``device="cpu"``. Raises `UserError` or `MachineError`.
    """
    with contained():
        from surogate_command_serve.loading import Serving, check_address, listen, load
        from surogate_commands.sampling import flags_of, sampling_of
        from surogate_core.plugin import load_run_config
        from surogate_core.service.app import Arguments, registry_for
        from surogate_core.service.config import with_keywords
        from surogate_core.service.inference import counted

        if token is not None and not is_token(token):
            fix = f"at least {LEAST_TOKEN} letters, digits and signs"
            raise UserError(f"token: is too short, or has other characters. Fix: {fix}")
        for key, value in (("context", context), ("slots", slots)):
            if value is not None:
                counted(key, value)
        if adapters is not None and not isinstance(adapters, Mapping):
            raise UserError('adapters: is no mapping. Fix: adapters={"shop": "runs/a"}')
        check_address(host, port)
        source = with_keywords(None, {key: plain(value) for key, value in keys.items()})
        registry = registry_for(Arguments(config_file=source))
        flags = flags_of(sampling)
        serving = Serving(
            model=os.fspath(model),
            configure=lambda overrides: load_run_config(overrides, config_file=source, registry=registry),
            name=name,
            adapters={key: os.fspath(path) for key, path in (adapters or {}).items()},
            context=context,
            slots=slots,
            engine=engine,
            tool_parser=tool_parser,
            sampling=lambda own: sampling_of(flags, own),
        )
        models, worker = load(serving, registry)
        given = token if token is not None else secrets.token_urlsafe(24)
        return listen(models, worker, host=host, port=port, token=given, note=lambda line: None)
