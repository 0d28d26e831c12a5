"""`surogate plan --fit`: proposals that fit, the cheapest first, and that mean what they say."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from surogate_command_plan.fit import MARGIN, _candidates, parse_size, shared_out

from surogate_core.plugin import UserError, load_run_config
from surogate_core.plugin import surogate as main
from surogate_core.service.plugins import Registry

SMALL = ["model.config.num_hidden_layers=2", "sequence_len=512", "per_device_train_batch_size=2"]


@cache
def printed(*arguments: str) -> str:
    """What the command prints; equal commands are run once."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", *SMALL, *arguments, "--json"]) == 0
    return out.getvalue()


def plan(*arguments: str) -> dict[str, Any]:
    value = json.loads(printed(*arguments))
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("text", "nbytes"), [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("1.5 MiB", 3 * 2**19), ("8G", 8 * 2**30)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_gpus_without_room_for_the_experts_of_others_keep_to_their_own(installed: Registry) -> None:
    keys = ["model=qwen3", "model.preset=tiny", "gpus=2", "ep_size=2", "ep_load_balance_threshold=1.3"]
    config = load_run_config(keys, registry=installed)

    def predicted(changed: Any) -> Any:
        return SimpleNamespace(total=lambda place: 10 if changed.ep_load_balance_threshold is None else 12)

    found = shared_out(config, installed, predicted, 11.0, more=False)
    assert found == (("ep_load_balance_threshold=null",), 10)


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "24 apples", "24gib", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="such as 24GiB"):
        parse_size(text)


@pytest.mark.slow_cases("1.2", "0.5")
@pytest.mark.parametrize("share", [1.2, 0.6, 0.5])
def test_proposals_fit_and_mean_what_they_say(share: float) -> None:
    wide = "optimizer=adamw"  # leaves more to save than the default
    before = plan(wide)
    budget = int(before["device_bytes"] * share)
    found = plan(wide, f"--fit={budget / 2**20}MiB")["fit"]
    assert found
    assert [p["seconds"] for p in found] == sorted(p["seconds"] for p in found)
    for proposal in found[:2]:
        assert proposal["device_bytes"] * MARGIN <= budget
        again = plan(*{o.partition("=")[0]: o for o in (wide, *proposal["overrides"])}.values())
        assert again["device_bytes"] == proposal["device_bytes"]
        assert again["host_bytes"] == proposal["host_bytes"]
    assert (found[0]["overrides"] == []) == (share > 1)
    if share > 1:
        assert found[0]["device_bytes"] == before["device_bytes"]


def test_what_the_configuration_asks_for_stays() -> None:
    for proposal in plan("offload_residual=true", "optimizer=normuon", "--fit", "1GiB")["fit"]:
        assert not any(o.startswith(("offload_residual", "optimizer=")) for o in proposal["overrides"])


@pytest.mark.slow
def test_a_quantised_base_may_leave_the_device() -> None:
    keys = ("lora=true", "qlora_bnb=true", "recompute=true", "optimizer=adamw_8bit")
    keys += tuple(f"offload_{what}=true" for what in ("residual", "optimizer", "master", "grads"))
    # Beside an embedding that is most of the model there would be nothing to gain.
    keys += ("model.config.vocab_size=64", "model.config.num_hidden_layers=32", "sequence_len=128")
    before = plan(*keys)
    kept = next(h["nbytes"] for h in before["held"] if h["kind"] == "weights")
    moved = plan(*keys, "offload_quants=true", "persistent_quants=true")
    assert {h["kind"]: h["place"] for h in moved["held"]}["weights"] == "host"
    assert moved["host_bytes"] >= before["host_bytes"] + kept
    budget = int(moved["device_bytes"] * MARGIN * 1.001)
    assert budget < before["device_bytes"]
    found = plan(*keys, f"--fit={budget / 2**20}MiB")["fit"]
    assert [p["overrides"] for p in found] == [["offload_quants=true", "persistent_quants=true"]]
    assert found[0]["device_bytes"] == moved["device_bytes"]


@pytest.mark.slow
def test_proposals_are_of_what_the_offloader_places() -> None:
    keys = ["lora=true", "qlora_bnb=true", "offload_quants=true", "persistent_quants=true", "recompute=false"]
    for proposal in plan(*keys, "offload=disk", "--gpu", "h200", "--fit", "4GiB")["fit"]:
        moved = {word.partition("=")[0] for word in proposal["overrides"] if word.startswith("offload_")}
        assert "offload_residual" not in moved
        assert not moved or "cpu_training=true" in proposal["overrides"]


def test_several_cpus_share_out_what_the_optimizer_allows(installed: Registry) -> None:
    keys = ["model=qwen3", "lora=false", "gpus=2", "zero_level=0", "lmhead_chunks=1", "recompute=true"]

    def levels(optimizer: str) -> set[int]:
        config = load_run_config([*keys, f"optimizer={optimizer}"], registry=installed)
        return {changed.zero_level for changed in _candidates(config, installed) if changed.cpu_training}

    assert levels("adamw") == {0}, "it implies a level"
    assert levels("normuon") == set()


def test_chunks_of_the_head_are_of_a_ranks_own_tokens(installed: Registry) -> None:
    keys = ["model=qwen3", "gpus=4", "context_parallel_size=4", "sequence_len=4096", "per_device_train_batch_size=1"]
    config = load_run_config([*keys, "lmhead_chunks=1", "recompute=true"], registry=installed)
    assert {changed.lmhead_chunks for changed in _candidates(config, installed)} == {1, 4}, "1024 tokens, 256 at least"


@pytest.mark.slow
def test_nothing_fits(capsys: Any) -> None:
    assert main(["plan", *SMALL, "--fit", "1MiB"]) == 3
    out = capsys.readouterr().out
    assert "Nothing does. The smallest is" in out
    assert "Fix: " in out


def test_for_people(capsys: Any) -> None:
    assert main(["plan", *SMALL, "--fit", "10GiB"]) == 0
    out = capsys.readouterr().out
    assert "# fit into 10 GiB" in out
    assert "the unchanged configuration: device" in out
    assert main(["plan", *SMALL, "--fit"]) == 2
    assert "Fix: --fit 24GiB" in capsys.readouterr().err
