"""What layers give to later ones: gradients as by autograd, and the same bits wherever tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_engines import trained
from relaying_family import CONFIG, Borrowing, Inputs, Own, Relaying, engine
from surogate_offload_host import surogate_offloader
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Request, RolloutSettings, Sampling
from surogate_core.dsl import Block
from surogate_core.dsl.declare import Multiply
from surogate_core.dsl.slots import plain_gemm
from surogate_core.engine.planning.pieces import pieces
from surogate_core.engine.planning.prediction import predict
from surogate_core.errors import PluginError
from surogate_core.generate.cache import Cache, mixers_of
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.kernels import ops
from surogate_testing import tiny

torch.set_num_threads(1)

DOCUMENTS = tiny.documents((13, 9, 7))
LONG = 96


def micro_batch() -> MicroBatch:
    return tiny.batch(DOCUMENTS)


def by_autograd(made: Any) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by HF name) of the blocks, run one after the other."""
    batch, plan = micro_batch(), made.plan
    tensors = {
        piece.key: [t.detach().clone().requires_grad_() for t in made.parameters.inputs(piece)] for piece in plan.pieces
    }
    tables = {
        **plan.assembly.model.tables(batch.positions, torch.float32),
        "cu_seqlens": batch.cu_seqlens,
        "input_ids": batch.input_ids,
    }
    x_ND = torch.nn.functional.embedding(batch.input_ids, tensors[plan.embed.key][0])
    relayed: dict[tuple[int, str], Tensor] = {}
    for piece in plan.layers:
        named = {s.name: t for s, t in zip(piece.specs, tensors[piece.key], strict=True)}
        bound = piece.block.bind(named, piece.slots, Multiply(plain_gemm))
        bound.taken = piece.taken(relayed)
        x_ND, _ = bound.outputs(x_ND, tables)
        piece.keep(relayed, [bound.given[spec.name] for spec in piece.gives])
    head = {s.name: t for s, t in zip(plan.head.specs, tensors[plan.head.key], strict=True)}
    loss = ops.cross_entropy(plan.assembly.model.logits(x_ND, head), batch.labels).sum() / batch.label_tokens
    loss.backward()
    pairs = ((s, t) for p in plan.pieces for s, t in zip(p.specs, tensors[p.key], strict=True))
    return loss.item(), {s.hf_name: t.grad for s, t in pairs if t.grad is not None}


@pytest.mark.parametrize(
    ("compiler", "recompute"),
    [
        pytest.param("fx", False, marks=pytest.mark.slow),
        ("fx", True),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_gradients_reach_the_layer_that_gave(compiler: str, recompute: bool) -> None:
    made = engine(compiler=compiler, recompute=recompute)
    loss, expected = by_autograd(made)
    found = tiny.gradients(made, [micro_batch()])
    assert made.evaluate([micro_batch()])[0] == pytest.approx(loss, rel=1e-6)
    assert {"inputs.weight", "projection.weight", "layers.0.k_proj.weight"} < found.keys()
    assert "layers.2.k_proj.weight" not in found
    error, name = tiny.worst(found, expected)
    assert error < 1e-5, name


@pytest.mark.slow
def test_every_kind_of_tensor_may_be_in_host_memory() -> None:
    def state(**changes: Any) -> Any:
        made = engine(optimizer=tiny.ADAMW, **changes)
        return [made.train_step([micro_batch()], step=s, lr=1e-2).read() for s in range(2)], tiny.whole_state(made)

    kinds = frozenset(("residuals", "optimizer", "master", "gradients", "weights"))
    figures, expected = state()
    others, found = state(offloader=replace(surogate_offloader(), kinds=kinds))
    assert others == figures
    tiny.ensure_same_bits(found, expected, "host")


RANKS: dict[str, dict[str, Any]] = {
    "level 1": {"zero_level": 1},
    "level 3": {"zero_level": 3},
    "lora on a sharded base": {"lora": tiny.lora(dropout=0.1), "shard_weights": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKS)
def test_ranks_train_the_same_bits(case: str) -> None:
    changes = {"config": CONFIG, "build": Relaying, "micro_batches": 2, "count": 2, "exact": True, **RANKS[case]}
    figures, state = trained(1, **changes)
    others, found = trained(2, **changes)
    assert others == figures
    tiny.ensure_same_bits(found, state, case)


@pytest.fixture(scope="module")
def tried() -> Any:
    """After some steps, so that nothing is near zero."""
    made = engine(tokens=LONG, max_seqlen=LONG, borders=8)
    for step in range(4):
        made.train_step([tiny.batch(tiny.documents((50, 30), seed=step), tokens=LONG)], step=step, lr=0.05).read()
    return made


@pytest.mark.parametrize("stepped", [False, True])
def test_generated_tokens_have_the_log_probabilities_of_the_forward(tried: Any, stepped: bool) -> None:
    """In a slot of 128 positions a window would be a ring."""
    native = NativeEngine(Weights.of(tried), RolloutSettings(slots=2, context=128), stepped=stepped)
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=12, number=n, sampling=Sampling(temperature=0))
        for n, ids in enumerate(tiny.documents((5, 70, 1, 33), seed=5))
    ]
    for request, done in zip(asked, native.generate(asked), strict=True):
        ids = [*request.prompt, *done.ids]
        own = torch.log_softmax(tried.logits(tiny.batch([ids], tokens=LONG))[: len(ids)].float(), -1)
        expected = [own[len(request.prompt) - 1 + i, token].item() for i, token in enumerate(done.ids)]
        assert list(done.logprobs) == pytest.approx(expected, abs=2e-5)
        assert list(done.ids) == own[len(request.prompt) - 1 : -1].argmax(-1).tolist()


def test_a_layer_that_borrows_has_no_cache() -> None:
    weights = Weights.load(tiny.assembly(CONFIG, build=Relaying), tiny.random_source())
    mixers = mixers_of(weights)
    assert [[spec.lender for spec in specs] for specs in mixers] == [[], [None], [None], [(1, 0)], [(2, 0)]]
    cache = Cache(mixers, slots=2, context=128, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.layers[3][0] is cache.layers[1][0]
    assert not cache.whole  # the window that is lent is no ring
    assert Cache.slot_bytes(mixers, 128, torch.float32) == 2 * 128 * (8 + 8) * 4


def test_the_plan_counts_what_layers_give() -> None:
    (row,) = (h for h in predict(tiny.assembly(CONFIG, build=Relaying)).held if h.kind == "relayed values")
    # Each layer's input, or its gradient; keys and values of two layers, each read by one.
    assert row.nbytes == tiny.TOKENS * 4 * (4 * 6 + 2 * (8 + 8))
    assert all(h.kind != "relayed values" for h in predict(tiny.assembly()).held)


class Unsaid(Relaying):
    source = tiny.TinyModel.source


class Later(Relaying):
    def source(self, number: int, name: str) -> tuple[int, str]:
        return (0, f"inputs.{number - 1}") if name == "own" else (4, name)


class Untaken(Relaying):
    def source(self, number: int, name: str) -> tuple[int, str]:
        return (0, "inputs.0") if name == "own" else (number - 2, name)


class Twice(Borrowing):
    def mixed(self, q_NHE: Tensor, h_ND: Tensor, tables: Any) -> Tensor:
        return self.attend(q_NHE, q_NHE[:, :1], q_NHE[:, :1])


class Silent(Inputs):
    def forward(self, x: Tensor, tables: Any) -> Tensor:
        return x + self.project(x).sum()


class First(Relaying):
    first: type[Block] = Silent
    later: type[Block] = Borrowing

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        for number, (prefix, block) in enumerate(super().blocks(max_seqlen)):
            kind = self.first if number == 0 else self.later if isinstance(block, Borrowing) else type(block)
            yield prefix, kind(block.config, max_seqlen)


class Called(First):
    first, later = Inputs, Twice


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Unsaid, "Unsaid: layer 1 takes `own` of an earlier layer, and `source` does not say of which"),
        (Later, "layer 3 takes `attend.keys` .* of layer 4 gives none before it"),
        (Untaken, "Inputs: layer 0 gives `inputs.1`, and no later layer takes it"),
        (First, r"Silent: forward gives later layers \{\}, and the class declares"),
        (Called, "Twice: attend is called with keys and values, and is declared with borrows=True"),
    ],
)
def test_what_does_not_fit_is_refused(build: type[Relaying], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        tiny.engine(CONFIG, build=build)


def test_an_attention_lends_or_borrows() -> None:
    with pytest.raises(ValueError, match="lends the keys and values that it makes, or borrows"):
        type(Own.attend)(4, 4, 8, lends=True, borrows=True)
    found = pieces(Relaying(CONFIG), lora=None, max_seqlen=8)
    assert [len(piece.gives) for piece in found] == [0, 4, 2, 2, 0, 0, 0]
