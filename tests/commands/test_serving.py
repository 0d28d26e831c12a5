"""Answers of a server in this process equal those of `surogate generate`."""

from __future__ import annotations

import threading
import urllib.error
from pathlib import Path

import pytest
from asking import ask
from surogate_command_generate.python import generate
from surogate_command_serve.serving import serve

from surogate_testing.pretrained import random_adapter

GREEDY = {"prompt": "The chain", "max_tokens": 8, "temperature": 0}


def test_adapters_are_models_of_their_own(hf_dir: Path, tmp_path: Path) -> None:
    one, two = (random_adapter(hf_dir, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    names, found = ["shop", "base", "two", "shop", "two", "base", "shop"], {}
    with serve(hf_dir, adapters={"shop": one, "two": two}, name="base", slots=3, device="cpu") as server:
        assert [(name, model.parent) for name, model in server.models.items()] == [
            ("base", None),
            ("shop", "base"),
            ("two", "base"),
        ]

        def client(number: int, name: str) -> None:
            found[number] = ask(server, model=name, **GREEDY)["choices"][0]["text"]

        threads = [threading.Thread(target=client, args=pair) for pair in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(server, **GREEDY)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(server, "another-token-than-its-own", **GREEDY)
    with pytest.raises(urllib.error.URLError):
        ask(server, model="base", **GREEDY)
    for name, model in (("base", hf_dir), ("shop", one), ("two", two)):
        (text,) = generate(model, "The chain", max_new_tokens=8, sampling={"temperature": 0}, device="cpu")
        assert {found[number] for number, other in enumerate(names) if other == name} == {text.text}
