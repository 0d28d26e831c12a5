"""What is kept of values that are parts of others."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx

from surogate_core.dsl.parts import keep_whole
from surogate_core.dsl.trace import Compiler, Recompute, Signature, _split, trace_joint

CPU = torch.device("cpu")
N, D, F = 6, 4, 8


def test_parts_of_a_value_are_kept_as_one() -> None:
    """A part alone would keep the memory of all of them, and could not be moved."""

    def gated(x_ND: Tensor, both_FD: Tensor) -> Tensor:
        a, b = (x_ND @ both_FD.t()).split(F // 2, dim=1)
        return a @ b.t()

    inputs = [Signature(shape, torch.float32, CPU, True) for shape in ((N, D), (F, D))]
    forward, backward, kept = _split(trace_joint(gated, inputs), Recompute(block=False), "inductor")
    (whole,) = (n.meta["val"] for n in kept)
    assert whole.shape == (N, F)
    assert whole.is_contiguous()
    torch.manual_seed(0)
    x, both, dy = (torch.randn(shape, requires_grad=True) for shape in ((N, D), (F, D), (N, N)))
    forward.recompile()
    y, value = forward(x, both)
    found = backward(x, both, value, dy)
    wanted = torch.autograd.grad(gated(x, both), (x, both), dy)
    torch.testing.assert_close(y, gated(x, both))
    torch.testing.assert_close(tuple(found), wanted)


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_a_small_part_of_a_value_is_copied(compiler: Compiler) -> None:
    """It would keep the memory of the whole otherwise."""

    def attended(x_ND: Tensor, joined_FD: Tensor) -> Tensor:
        queries, values = (x_ND @ joined_FD.t()).split((F - 2, 2), dim=1)
        rotated = torch.sigmoid(queries)
        return (rotated @ rotated.t()) @ values

    inputs = [Signature(shape, torch.float32, CPU, True) for shape in ((N, D), (F, D))]
    joint = trace_joint(attended, inputs)
    forward, backward, kept = _split(joint, Recompute(block=False), compiler)
    if compiler == "inductor":  # otherwise the function is computed again, from all parts
        assert [n.name for n in kept if n.target is torch.ops.aten.clone.default] == ["part_0"]
    forward.recompile()
    torch.manual_seed(0)
    x, joined, dy = (torch.randn(shape, requires_grad=True) for shape in ((N, D), (F, D), (N, 2)))
    y, *values = forward(x, joined)
    assert len(values) == len(kept) > 0
    for node, value in zip(kept, values, strict=True):
        assert node.meta["val"].stride() == value.stride()
        assert value.untyped_storage().nbytes() == value.nbytes
    places = {n.name: value for n, value in zip(kept, values, strict=True)}
    own = iter((x, joined, dy))
    taken = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    found = backward(*(places[name] if name in places else next(own) for name in taken))
    torch.testing.assert_close(y, attended(x, joined))
    torch.testing.assert_close(tuple(found), torch.autograd.grad(attended(x, joined), (x, joined), dy))


def test_what_the_forward_returns_the_backward_finds_by_name() -> None:
    """Also where the backward has a value of its own under the name of what is kept."""
    aten, x, both = torch.ops.aten, torch.randn(N, D), fx.Graph()
    given = both.placeholder("x")
    largest = both.call_function(aten.topk.default, (given, 4))
    whole = both.call_function(operator.getitem, (largest, 0))
    split = both.call_function(aten.split.Tensor, (whole, 2, 1))
    parts = [both.call_function(operator.getitem, (split, i)) for i in range(2)]
    both.output([given, *parts])
    largest.meta["val"] = aten.topk.default(x, 4)
    whole.meta["val"] = largest.meta["val"][0]
    split.meta["val"] = whole.meta["val"].split(2, 1)
    for part, value in zip(parts, split.meta["val"], strict=True):
        part.meta["val"] = value
    alone = fx.Graph()
    kept = [alone.placeholder(part.name) for part in parts]
    own = alone.create_node("call_function", aten.neg.default, (kept[0],), name=whole.name)
    alone.output([alone.call_function(aten.mul.Tensor, (own, kept[1]))])
    forward, backward = (fx.GraphModule(torch.nn.Module(), graph) for graph in (both, alone))
    expected = backward(*split.meta["val"])
    keep_whole(forward, backward, 1)
    returned = [node.name for node in next(iter(reversed(both.nodes))).args[0]][1:]
    assert returned == [n.name for n in alone.nodes if n.op == "placeholder"]
    assert torch.equal(backward(forward(x)[1])[0], expected[0])
