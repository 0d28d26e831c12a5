"""What a run that is out of memory is advised to do: what is proposed is predicted to fit."""

from __future__ import annotations

import re

import pytest

from surogate_core.config.resolve import load_run_config
from surogate_core.plugins.registry import load_plugins
from surogate_core.setup import fitting

KEYS = ["model=qwen3", "model.preset=tiny", "device=cpu", "optimizer=adamw", "recompute=true"]


def advised(*keys: str, mib: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, int], int]:
    """(message, changes, bytes that those are predicted to take), on a machine of so much memory."""
    monkeypatch.setattr(fitting, "memory_of_machine", lambda: mib * 2**20)
    registry = load_plugins()
    config = load_run_config([*KEYS, *keys], registry=registry)
    message = str(fitting.out_of_memory(config, registry, MemoryError("no room")))
    changes = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", message)}
    search = fitting._Search(fitting.replace(config, **changes), registry, on_gpu=False)
    return message, changes, search.total(search.predicted(search.config))


@pytest.mark.slow
def test_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 8192 rows would need gigabytes too."""
    message, changes, nbytes = advised(
        "lora=true", "per_device_train_batch_size=8192", mib=400, monkeypatch=monkeypatch
    )
    assert "Out of host memory: no room. The run is predicted to need " in message
    assert "most of it working set" in message
    assert changes.keys() == {"per_device_train_batch_size"}
    assert 1 < changes["per_device_train_batch_size"] < 4096
    assert 0.6 * fitting.SHARE * 400 * 2**20 < nbytes <= fitting.SHARE * 400 * 2**20


@pytest.mark.slow
def test_shorter_rows_where_one_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    _, changes, nbytes = advised(
        "lora=true", "sequence_len=65536", "per_device_train_batch_size=4", mib=300, monkeypatch=monkeypatch
    )
    assert changes["per_device_train_batch_size"] == 1
    assert 128 <= changes["sequence_len"] < 65536
    assert nbytes <= fitting.SHARE * 300 * 2**20


@pytest.mark.slow
def test_shorter_rows_can_still_be_shared_by_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs that share rows cannot have equal parts of a power of two."""
    keys = ("gpus=3", "context_parallel_size=3", "model.config.num_attention_heads=6")
    keys += ("lora=true", "sequence_len=98304", "per_device_train_batch_size=1")
    _, changes, nbytes = advised(*keys, mib=900, monkeypatch=monkeypatch)
    assert changes["sequence_len"] % 3 == 0
    assert 128 <= changes["sequence_len"] < 98304
    assert nbytes <= fitting.SHARE * 300 * 2**20


@pytest.mark.slow
def test_a_rank_that_is_too_high_and_not_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    message, changes, nbytes = advised(
        "lora=true",
        "lora_rank=8192",
        "sequence_len=128",
        "per_device_train_batch_size=1",
        mib=200,
        monkeypatch=monkeypatch,
    )
    assert changes == {"lora_rank": 16}
    assert "most of it optimizer state" in message
    assert nbytes <= fitting.SHARE * 200 * 2**20


def test_where_nothing_fits_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    message, changes, _ = advised("lora=false", mib=10, monkeypatch=monkeypatch)
    assert not changes
    assert "Fix: a smaller model or a machine with more memory" in message


def test_where_it_should_fit_others_hold_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    message, changes, _ = advised("lora=true", mib=100_000, monkeypatch=monkeypatch)
    assert not changes
    assert "Fix: free memory that other processes hold." in message


def test_where_the_prediction_fails_advice_is_general(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(fitting, "assembly_of", fail)
    message = str(fitting.out_of_memory(load_run_config(KEYS, registry=load_plugins()), load_plugins(), MemoryError()))
    assert "Fix: a smaller per_device_train_batch_size" in message


@pytest.mark.slow
def test_several_gpus_share_out_more_before_batches_get_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("lora=false", "gpus=4", "model.config.num_hidden_layers=16", "model.config.hidden_size=256", "zero_level=1")
    keys += ("sequence_len=128", "per_device_train_batch_size=2")
    _, _, level_1 = advised(*keys, mib=10**6, monkeypatch=monkeypatch)
    _, _, level_2 = advised(*keys, "zero_level=2", mib=10**6, monkeypatch=monkeypatch)
    mib = 4 * int((level_1 + level_2) / 2 / fitting.SHARE) >> 20
    message, changes, nbytes = advised(*keys, mib=mib, monkeypatch=monkeypatch)
    assert changes == {"zero_level": 2}, message
    assert nbytes <= fitting.SHARE * mib * 2**20 / 4


@pytest.mark.slow
def test_gpus_without_room_for_the_experts_of_others_keep_to_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["model=qwen3-moe", "lora=false", "gpus=2", "ep_size=2", "zero_level=1", "sequence_len=128"]
    keys += [
        "model.config.hidden_size=1024",
        "model.config.moe_intermediate_size=1024",
        "ep_load_balance_threshold=1.3",
    ]
    _, _, uneven = advised(*keys, "ep_load_balance_threshold=null", mib=10**6, monkeypatch=monkeypatch)
    _, _, even = advised(*keys, mib=10**6, monkeypatch=monkeypatch)
    assert even - uneven > 10 * 2**20
    mib = 2 * int((even + uneven) / 2 / fitting.SHARE) >> 20
    message, _, _ = advised(*keys, mib=mib, monkeypatch=monkeypatch)
    assert "Fix: ep_load_balance_threshold=null, which is predicted to take" in message
