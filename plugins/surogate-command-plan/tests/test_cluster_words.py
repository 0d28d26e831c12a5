"""The words of `surogate plan` that describe a cluster."""

from __future__ import annotations

import pytest
from surogate_command_plan.cluster import own_words

from surogate_core.plugin import UserError


def test_words_become_a_cluster_and_a_number_of_gpus() -> None:
    assert own_words(["run.yaml", "lora=true"]) == (["run.yaml", "lora=true"], None)
    rest, cluster = own_words(
        ["num_nodes=125", "lora=true", "gpus_per_node=8", "interconnect=nvlink4,8xib400", "tokens_per_second=1.2e4"]
    )
    assert rest == ["lora=true", "gpus=1000"]
    assert cluster is not None
    assert (cluster.nodes, cluster.per_node, cluster.ranks, cluster.tokens_per_second) == (125, 8, 1000, 12000)
    assert cluster.timed
    rest, cluster = own_words(["gpus=2", "gpus_per_node=2"])
    assert cluster is not None
    assert (rest, cluster.nodes, cluster.timed) == (["gpus=2"], 1, False)


def test_mistakes_name_the_fix() -> None:
    mistakes = {
        "num_nodes=4": "Fix: add gpus_per_node=8",
        "interconnect=nvlink4": "Fix: add gpus_per_node=8",
        "num_nodes=four gpus_per_node=8": "num_nodes=four: it is a number from 1 to 1024. Fix: num_nodes=125",
        "num_nodes=2 gpus_per_node=0": "gpus_per_node=0: it is a number from 1 to 1024. Fix: gpus_per_node=8",
        "num_nodes=99999999 gpus_per_node=8": "from 1 to 1024",
        "num_nodes=256 gpus_per_node=8": "2,048 GPUs, and a cluster has 2 to 1,024. Fix: num_nodes=128",
        "num_nodes=1 gpus_per_node=1": "one GPU",
        "num_nodes=2 gpus_per_node=8 gpus=8": "gpus=8: num_nodes=2 gpus_per_node=8 is 16 GPUs. Fix: leave gpus",
        "num_nodes=2 gpus_per_node=8 tokens_per_second=fast": "Fix: tokens_per_second=12000",
        "num_nodes=2 gpus_per_node=8 tokens_per_second=-1": "a number above 0",
        "num_nodes=2 gpus_per_node=8 tokens_per_second=nan": "a number above 0",
    }
    for text, said in mistakes.items():
        with pytest.raises(UserError) as error:
            own_words(text.split())
        assert said in str(error.value)
