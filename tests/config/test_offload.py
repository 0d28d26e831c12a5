"""The keys that move tensors off the device: what they imply, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from surogate_core.config.offload import KINDS, chosen
from surogate_core.errors import ConfigError
from surogate_core.plugins import Registry
from surogate_core.setup import assemble
from surogate_core.setup.assemble import resolve_offloader


@pytest.mark.parametrize(
    ("arguments", "name", "kinds"),
    [
        ([], "none", None),
        (["offload_residual=true"], "host", {"residuals"}),
        (["offload_optimizer=true", "offload_master=true"], "host", {"optimizer", "master"}),
        (["cpu_training=true", "offload_residual=true"], "host", set.union(*map(set, KINDS.values()))),
        (["offload=host"], "host", set.union(*map(set, KINDS.values()))),
        (["offload=host", "offload_grads=true"], "host", {"gradients"}),
        (["offload_quants=true", "persistent_quants=true", "lora=true", "recipe=fp8-hybrid"], "host", {"weights"}),
        (["offload_quants=true", "persistent_quants=true", "lora=true", "qlora_bnb=true"], "host", {"weights"}),
        (["qlora_offload_experts=true", "lora=true"], "host", set()),
        (["qlora_offload_experts=true", "lora=true", "offload_residual=true"], "host", {"residuals"}),
        (["offload=disk"], "disk", set.union(*map(set, KINDS.values())) - {"residuals"}),
    ],
)
def test_keys_choose_an_offloader_and_its_kinds(
    load: Any, registry: Registry, arguments: list[str], name: str, kinds: set[str] | None
) -> None:
    config = load(*arguments)
    assert config.offload.name == name
    offloader = resolve_offloader(config, registry)
    assert offloader.name == name
    if kinds is not None:
        assert offloader.kinds == kinds
    assert chosen({}) == frozenset()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["offload_quants=true", "lora=true"], {"offload_quants": "without `persistent_quants` none are"}),
        (["persistent_quants=true", "lora=true"], {"persistent_quants": "recipe bf16 quantises no frozen weight"}),
        (["persistent_quants=true", "recipe=fp8-hybrid"], {"persistent_quants": "there are none without `lora`"}),
        (
            ["persistent_quants=true", "qlora_fp8=true", "lora=false"],
            {"persistent_quants": "there are none without `lora`", "lora": "not kept quantised"},
        ),
        (
            ["cpu_training=true", "offload_optimizer=true", "offload_master=true", "offload_grads=true"],
            dict.fromkeys(("offload_optimizer", "offload_master", "offload_grads"), "no effect beside `cpu_training`"),
        ),
        (["offload_residual=3"], {"offload_residual": "true or false"}),
        (["cpu_training=true", "offload=hots"], {"offload=hots": "no such"}),
        (["offload=disk", "offload_residual=true"], {"offload_residual": "disk does not place residuals"}),
    ],
)
def test_contradictions_are_all_told(problems: Any, arguments: list[str], expected: dict[str, str]) -> None:
    found = {p.key: p for p in problems(*arguments)}
    assert found.keys() == expected.keys()
    for key, text in expected.items():
        assert text in found[key].message
        assert found[key].fix or "got 3" in found[key].message


def test_an_offloader_that_does_not_place_a_kind_is_refused(
    problems: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = registry.bundles("offload")
    few = replace(offered["host"].bundle, name="few", kinds=frozenset({"residuals"}))
    monkeypatch.setitem(offered, "host", replace(offered["host"], bundle=few))  # type: ignore[index]
    (problem,) = problems("offload_residual=true", "offload_optimizer=true")
    assert problem.key == "offload_optimizer"
    assert "does not place optimizer" in problem.message


def test_the_keys_name_the_distribution_that_they_need(problems: Any) -> None:
    (problem,) = problems("offload_residual=true", "plugins.block=[offload-host]", fresh=True)
    assert "surogate-offload-host" in problem.message


def test_a_gpu_does_not_step_in_files(load: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "resolve_device", lambda config: torch.device("cuda"))
    for arguments in (["offload=disk"], ["offload=disk", "offload_optimizer=true"]):
        with pytest.raises(ConfigError) as caught:
            resolve_offloader(load(*arguments), registry)
        (problem,) = caught.value.problems
        assert problem.key == "offload"
        assert "in memory that no GPU can address" in problem.message
        assert problem.fix == "cpu_training: true, or offload: host"
    assert resolve_offloader(load("offload=disk", "cpu_training=true"), registry).name == "disk"
    with pytest.raises(ConfigError, match="Several GPUs"):
        resolve_offloader(load("offload=disk", "cpu_training=true", "gpus=2"), registry)
    quants = ["offload=disk", "offload_quants=true", "persistent_quants=true", "lora=true", "recipe=fp8-hybrid"]
    assert resolve_offloader(load(*quants), registry).kinds == {"weights"}
