"""Inductor's kernels are chosen by rules, not by timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surogate_core.dsl import adjacent, inductor
from surogate_core.dsl.trace import Signature, _export, without_gradients
from surogate_core.kernels import registry
from surogate_core.kernels.registry import InPlace


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_additions_to_products_are_kept_apart_in_16_bits(dtype: torch.dtype) -> None:
    """Inductor would make one op of both; the numbers are those of the ops as written."""
    graph = torch.fx.Graph()
    x, a, b = (graph.placeholder(name) for name in "xab")
    values = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, product))
    other = graph.call_function(torch.ops.aten.add.Tensor, (total, product))
    graph.output((other,))
    for node, value in zip((x, a, b), values, strict=True):
        node.meta["val"] = value
    for node in (product, total, other):
        node.meta["val"] = values[0]
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    inductor._keep_additions(module)
    added = [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor and product in n.all_input_nodes]
    assert len(added) == (2 if dtype == torch.float32 else 0)
    x_value, a_value, b_value = values
    product_value = a_value @ b_value
    assert torch.equal(module(*values)[0], (x_value + product_value) + product_value)


def test_nothing_is_timed_and_the_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, ...]] = []

    def settings() -> tuple[bool, ...]:
        config = torch._inductor.config
        return config.deterministic, config.triton.autotune_pointwise, config.autotune_local_cache

    before = settings()
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs: seen.append(settings()))
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    inductor.compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.zeros(1)])
    assert seen == [(True, False, False)]
    assert settings() == before


@torch.library.custom_op("surogate_test::past", mutates_args=())
def past(x: Tensor, inputs: int) -> Tensor:
    """x · 2 and the sum of a row; columns behind the inputs are not read."""
    return past_in_place(x.clone(), inputs)


@torch.library.custom_op("surogate_test::past_", mutates_args=("x",))
def past_in_place(x: Tensor, inputs: int) -> Tensor:
    """The same; the sum is written behind the inputs."""
    WRITTEN.append(x.data_ptr())
    x[:, inputs] = x[:, :inputs].sum(1)
    return 2 * x[:, : inputs + 1]


@torch.library.custom_op("surogate_test::roomy", mutates_args=())
def roomy(x: Tensor) -> Tensor:
    """[x | 3x], or with columns that hold nothing in the place of the latter."""
    out = torch.cat((x, 3 * x), dim=1)
    MADE.append(out.data_ptr())
    return out


WRITTEN: list[int] = []
MADE: list[int] = []


@past.register_fake
@past_in_place.register_fake
def _(x: Tensor, inputs: int) -> Tensor:
    return x.new_empty(x.shape[0], inputs + 1)


@roomy.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 2 * x.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("read", [False, True], ids=["columns behind are free", "columns behind are read"])
def test_an_op_writes_behind_its_input_where_nothing_else_reads(monkeypatch: pytest.MonkeyPatch, read: bool) -> None:
    """Without a copy where the columns are free, and into a copy where they are not."""
    form = InPlace(op=torch.ops.surogate_test.past_.default, takes=lambda x, inputs: x.shape[1] > inputs)
    monkeypatch.setitem(registry.in_place, torch.ops.surogate_test.past.default, form)

    def function(x: Tensor) -> Tensor:
        both = roomy(x)
        y = past(torch.cat((both[:, :8], x.new_empty(4, 8)), dim=1), 8)
        # The first columns are read again behind the op, as attention's backward reads its output.
        return y.sum(1) + (both.sum(1) if read else both[:, :8].sum(1))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = 4 * x.sum(1) + (4 if read else 1) * x.sum(1)
    WRITTEN.clear()
    MADE.clear()
    (found,) = without_gradients(function, [Signature.of(x)], compiler="inductor")([x])
    torch.testing.assert_close(found, expected)
    assert (WRITTEN == MADE) == (not read)


def test_an_op_that_has_no_room_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    form = InPlace(op=torch.ops.surogate_test.past_.default, takes=lambda x, inputs: x.shape[1] > inputs)
    monkeypatch.setitem(registry.in_place, torch.ops.surogate_test.past.default, form)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8)
    calls = [graph.call_function(torch.ops.surogate_test.past.default, (x, inputs)) for inputs in (8, 7)]
    registry.write_in_place(graph)
    assert [call.target for call in calls] == [
        torch.ops.surogate_test.past.default,
        torch.ops.surogate_test.past_.default,
    ]


KERNELS = """
import json, torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from surogate_core.dsl.inductor import compile_graph

def run(x, y):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return normed, (x * y + normed * x).sum(0, dtype=torch.float32), x.t() * y.t() + x.t().cos()

inputs = [torch.randn(4096, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
compile_graph(make_fx(run)(*inputs), inputs)(*inputs)
found = {}
for module in PyCodeCache.modules:
    for name, kernel in vars(module).items():
        if isinstance(kernel, CachingAutotuner):
            found[name] = [[str(one.config), len(kernel.compile_results)] for one in kernel.launchers]
print(json.dumps(found))
"""


@pytest.mark.gpu
def test_kernels_from_disk_are_those_of_the_process_that_compiled_them(tmp_path: Path) -> None:
    """What an earlier process leaves on disk was once timed anew, each time a program was loaded."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", KERNELS]
    first, second = (
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    )
    assert len(first) >= 2
    assert all(len(tilings) == 1 and tilings[0][1] == 1 for tilings in first.values()), first
    assert second == first


@pytest.mark.gpu
def test_kernels_of_the_compile_processes_are_those_of_this_process(tmp_path: Path) -> None:
    """They are started early, so that none is compiled here while they import torch."""
    ready = "from torch._inductor.async_compile import AsyncCompile\nfrom surogate_core.dsl import inductor\n"
    ready += "inductor.start_workers()\nAsyncCompile.wait_pool_ready()\n"
    found = []
    for number, (code, workers) in enumerate([(KERNELS, "1"), (ready + KERNELS, "4")]):
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": workers, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(number))}
        environment = {**os.environ, **threads}
        found.append(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert json.loads(found[0]) == json.loads(found[1])


def test_every_kernel_has_the_assembler_of_the_compile_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the ptxas that torch brings. This process takes it too, before anything is compiled."""
    from torch._inductor import async_compile
    from torch._inductor.runtime import compile_tasks

    done: list[str] = []
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: done.append("ptxas"))
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: done.append("processes"))
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs: done.append("kernels"))
    inductor.start_workers()
    assert done == ["ptxas", "processes"]
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    inductor.compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.zeros(1)])
    assert done[2:] == ["ptxas", "kernels"]


def test_compile_processes_write_to_the_private_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    found: list[str | None] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: found.append(os.environ.get("TRITON_CACHE_DIR")))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    inductor.start_workers()
    assert found != [""]
    assert len(found) == 1


def test_results_in_wide_rows_are_joined_by_kernels_of_their_own() -> None:
    """A kernel of the whole would take the exponentials of a few columns for every column. No number changes."""
    wide = adjacent.WIDE

    def joined(x_ND: Tensor, h_NF: Tensor) -> Tensor:
        small, rows = torch.sigmoid(h_NF.exp()), (x_ND * 2).unflatten(1, (-1, 4))
        whole = torch.cat((x_ND * 2, small, x_ND, x_ND.neg()), 1)
        room = torch.cat((x_ND * 3, x_ND.new_empty(6, wide)), 1)
        again = torch.cat((rows, rows.neg()), 1).flatten(1)
        return torch.cat((whole[:, :2], room[:, :2], again[:, -2:]), 1)

    inputs = [Signature(shape, torch.float32, torch.device("cpu")) for shape in ((6, wide // 2), (6, 3))]
    x, h = (torch.randn(*s.shape, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(inputs))
    module = _export(joined, inputs, joint=False)
    adjacent.join_columns_apart(module.graph)
    module.recompile()
    shapes = [tuple(n.meta["val"].shape) for n in module.graph.nodes if n.target is torch.ops.surogate.joined.default]
    assert shapes == [(6, 3 * (wide // 2) + 3), (6, wide // 4, 4)], "neither narrow rows nor one result with room"
    assert torch.equal(module(x, h)[0], joined(x, h))
    call = without_gradients(joined, inputs, compiler="inductor")
    torch.testing.assert_close(call([x, h])[0], joined(x, h))


@torch.library.custom_op("surogate_test::laid_out", mutates_args=())
def laid_out(x: Tensor) -> Tensor:
    """2x, whose layout `LAYOUT` decides."""
    return torch.empty_strided(x.shape, LAYOUT[-1]).copy_(2 * x)


@laid_out.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, LAYOUT[-1])


LAYOUT = [(4, 1)]


def read_out(x: Tensor) -> Tensor:
    """A function whose traced text does not say how the op lays its result out."""
    return laid_out(x + 1) * 3


def traced(function: Callable[[Tensor], Tensor], *shape: int) -> torch.fx.Graph:
    """The graph of a function of one tensor."""
    return _export(function, [Signature(shape, torch.float32, torch.device("cpu"))], joint=False).graph


def test_what_an_op_returns_is_a_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traced(read_out, 4, 4)
    monkeypatch.setattr(sys.modules[__name__], "LAYOUT", [(1, 4)])
    after = traced(read_out, 4, 4)
    assert str(before) == str(after)
    assert inductor.facts_of(before) != inductor.facts_of(after)
    monkeypatch.setattr(sys.modules[__name__], "LAYOUT", [(4, 1)])
    assert inductor.facts_of(before) == inductor.facts_of(traced(read_out, 4, 4))


def test_the_instructions_of_a_cpu_are_a_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(read_out, 4, 4)
    before = inductor.facts_of(graph)
    monkeypatch.setattr(inductor, "instructions", lambda: "others")
    assert inductor.facts_of(graph) != before


def test_a_graph_of_which_too_little_is_known_is_not_looked_up() -> None:
    graph = traced(read_out, 4, 4)
    (node,) = (n for n in graph.nodes if n.target is torch.ops.surogate_test.laid_out.default)
    (added,) = (n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor)
    del added.meta["val"]
    assert inductor.facts_of(graph) is not None
    del node.meta["val"]
    assert inductor.facts_of(graph) is None


def test_keys_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def settings() -> tuple[str, bool]:
        return torch.compiler.config.cache_key_tag, torch._inductor.config.fx_graph_cache

    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs: seen.append(settings()))
    before = settings()
    for known in (True, False):
        graph = traced(read_out, 4, 4)
        for node in graph.nodes:
            if not known:
                node.meta.pop("val", None)
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        monkeypatch.setattr(inductor, "_keep_additions", lambda module: None)
        monkeypatch.setattr(inductor, "join_columns_apart", lambda graph: None)
        inductor.compile_graph(module, [torch.zeros(4, 4)])
    assert seen[0] != before
    assert seen[1] == (before[0], False)
    assert settings() == before


@pytest.mark.slow
def test_a_compiled_graph_is_read_from_disk_until_an_op_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here = sys.modules[__name__]
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    counters.clear()
    hits = []
    for layout in ((4, 1), (4, 1), (1, 4), (4, 1)):
        monkeypatch.setattr(here, "LAYOUT", [layout])
        call = without_gradients(read_out, [Signature.of(x)], compiler="inductor")
        torch.testing.assert_close(call([x])[0], 6 * (x + 1))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 1, 2]


PROGRAM = """
import hashlib, json, torch
from torch._dynamo.utils import counters
from surogate_core.dsl.trace import Recompute, Signature, differentiate

def layer(x, weight):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return torch.nn.functional.silu(normed @ weight) * x + normed.sum(0, dtype=torch.float32).to(x.dtype)

random = torch.Generator("cuda").manual_seed(0)
x, weight, dy = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, generator=random) for _ in range(3))
signatures = [Signature.of(value, requires_grad=True) for value in (x, weight)]
program = differentiate(layer, signatures, recompute=Recompute(block=False), compiler="inductor")
y, *kept = program.forward([x, weight])
found = [y, *program.backward([x, weight, *kept, dy])]
digests = [hashlib.sha256(v.float().cpu().numpy().tobytes()).hexdigest() for v in found]
print(json.dumps([digests, counters["aot_autograd"]["autograd_cache_hit"]]))
"""


@pytest.mark.gpu
def test_programs_from_disk_give_the_bits_of_those_that_were_compiled(tmp_path: Path) -> None:
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-c", PROGRAM]
    (first, missed), (second, hits) = (
        json.loads(subprocess.check_output(command, env={**os.environ, **variables}, text=True)) for _ in range(2)
    )
    assert (missed, hits) == (0, 2)
    assert second == first
