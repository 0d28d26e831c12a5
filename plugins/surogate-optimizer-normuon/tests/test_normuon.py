"""Against a float64 transcription; singular values of polar; the variance is kept; skipped steps, state."""

from __future__ import annotations

import math

import pytest
import torch
from surogate_optimizer_normuon import NorMuonOptions, normuon, surogate_optimizer
from surogate_optimizer_normuon.normuon import NorMuon, polar
from torch import Tensor

from surogate_core.plugin import adamw_8bit, bundles

MEMBERS = {"embedding": (50, 40), "a": (40, 24), "b": (24, 40), "c": (40, 24), "d": (40, 24)}
HIDDEN = frozenset("abcd")


def make_groups(seed: int = 0, device: str = "cpu") -> list[bundles.ParamGroup]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for name, members, hidden in (("decayed", MEMBERS, HIDDEN), ("undecayed", {"norm": (40,)}, frozenset())):
        shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
        size = 0
        for member, shape in members.items():
            shapes[member] = (size, shape)
            size += -(-math.prod(shape) // bundles.FLAT_ALIGNMENT) * bundles.FLAT_ALIGNMENT
        master = torch.zeros(size)
        for start, shape in shapes.values():
            master[start : start + math.prod(shape)].normal_(generator=generator)
        groups.append(
            bundles.ParamGroup(
                name=name,
                master=master.to(device),
                grad=torch.zeros(size, device=device),
                shapes=shapes,
                weight_decay=0.1 if name == "decayed" else 0.0,
                hidden=frozenset(hidden),
            )
        )
    return groups


def part(group: bundles.ParamGroup, flat: Tensor, name: str) -> Tensor:
    offset, shape = group.shapes[name]
    return flat[offset : offset + math.prod(shape)].view(shape)


def set_gradients(groups: list[bundles.ParamGroup], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for group in groups:
        for name, (_, shape) in group.shapes.items():
            # Rows of unequal size, so that the second moment matters.
            rows = 10 ** (2 * torch.rand(shape[0], generator=generator) - 2)
            value = torch.randn(shape, generator=generator) * rows.view(-1, *(1,) * (len(shape) - 1))
            part(group, group.grad, name).copy_(value)


def make(groups: list[bundles.ParamGroup], **options: float | bool) -> NorMuon:
    return NorMuon(groups, NorMuonOptions(**options))  # type: ignore[arg-type]


def step(optimizer: NorMuon, lr: float, clip: float = 1.0, skip: float = 0.0) -> None:
    optimizer.step(lr=torch.tensor(lr), clip=torch.tensor(clip), skip=torch.tensor(skip))


def snapshot(groups: list[bundles.ParamGroup], optimizer: NorMuon) -> dict[str, Tensor]:
    masters = {f"master {g.name}": g.master.clone() for g in groups}
    return {**masters, **{name: t.clone() for name, t in optimizer.state().items()}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --------------------------------------------------------------------------------- polar


def polar64(m: Tensor) -> Tensor:
    """The SPEC's five steps in float64, from the published coefficients, on one matrix."""
    published = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]
    x = m.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (1.01 * x.norm() + 1e-7)
    for a, b, c in published:
        square = x @ x.T
        x = a / 1.01 * x + (b / 1.01**3 * square + c / 1.01**5 * square @ square) @ x
    return x.T if tall else x


def conditioned(rows: int, columns: int, smallest: float) -> Tensor:
    """Two random matrices; with `smallest` > 0 their singular values go from 1 down to it, evenly in the exponent."""
    m = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    if not smallest:
        return m
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    return (u * torch.logspace(0, math.log10(smallest), s.shape[1])) @ v


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("smallest", [0, 1e-1, 1e-2], ids=["random", "condition 10", "condition 100"])
@pytest.mark.parametrize("shape", [(64, 160), (160, 64), (96, 384)])
def test_singular_values_of_polar(shape: tuple[int, int], smallest: float, scale: float) -> None:
    values = torch.linalg.svdvals(polar(conditioned(*shape, smallest) * scale).float())
    assert values.min() >= 0.7
    assert values.max() <= 1.2


def test_singular_values_too_small_for_five_steps_are_lifted_and_never_too_large() -> None:
    """Below a thousandth of the norm they end under 0.7: a condition of 10^5, and a square random matrix."""
    for m in (conditioned(64, 160, 1e-5), conditioned(96, 96, 0)):  # the first has many, the second may have none
        values = torch.linalg.svdvals(polar(m).float())
        relative = torch.linalg.svdvals(m) / torch.linalg.vector_norm(m, dim=(1, 2))[:, None]
        assert values.max() <= 1.2
        assert values[relative > 1e-3].min() >= 0.7
        assert (values[relative < 1e-4] < 0.7).all()


def test_a_large_matrix_is_scaled_by_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed in fp32 throughout, a CPU finds a norm of 16 million values that is too small by one in a thousand."""
    monkeypatch.setattr(normuon, "POLAR_EXPRESS", ())
    for shape in ((1, 2048, 8192), (1, 8192, 2048)):
        scaled = polar(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        squares = sum(part.double().square().sum().item() for part in scaled[0].split(64))
        assert squares**0.5 * normuon.SAFETY == pytest.approx(1, rel=1e-4)


def test_polar_against_float64() -> None:
    for shape in ((64, 160), (160, 64)):
        m = conditioned(*shape, 1e-1)
        exact = torch.stack([polar64(x) for x in m])
        assert (polar(m) - exact).norm() / exact.norm() < 2e-2, "bf16 has 8 bits"
    assert (polar(torch.zeros(1, 8, 4)) == 0).all()


# ------------------------------------------------------------------------------ the steps


class Transcription:
    """One matrix by SPEC section 6, float64."""

    def __init__(self, w: Tensor, *, lr: float, decay: float, betas: tuple[float, float], cautious: bool):
        self.w, self.lr, self.decay, self.betas, self.cautious = w.double().clone(), lr, decay, betas, cautious
        self.m = torch.zeros_like(self.w)
        self.v = torch.zeros(len(self.w), dtype=torch.float64)

    def step(self, grad: Tensor) -> None:
        beta1, beta2 = self.betas
        self.m = beta1 * self.m + (1 - beta1) * grad.double()
        o = polar64(self.m)
        self.v = beta2 * self.v + (1 - beta2) * (o**2).mean(dim=1)
        scaled = o / (self.v.sqrt() + 1e-8)[:, None]
        scaled = scaled * o.norm() / scaled.norm()
        where = scaled * self.w >= 0 if self.cautious else torch.ones_like(scaled, dtype=torch.bool)
        rows, columns = self.w.shape
        change = math.sqrt(max(1, rows / columns)) * scaled
        self.w = self.w - self.lr * change - self.lr * self.decay * self.w * where


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("exact", [True, False], ids=["polar in float64", "polar in bf16"])
def test_steps_equal_a_transcription(exact: bool, cautious: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With polar in float64 on both sides nothing differs but rounding to fp32; bf16 adds its own."""
    if exact:
        monkeypatch.setattr(normuon, "polar", lambda m: torch.stack([polar64(x) for x in m]).float())
    groups = make_groups()
    decayed = groups[0]
    optimizer = make(groups, momentum=0.9, beta2=0.8, cautious_wd=cautious)
    start = {name: part(decayed, decayed.master, name).clone() for name in sorted(HIDDEN)}
    settings = {"lr": 1e-2, "decay": 0.1, "betas": (0.9, 0.8), "cautious": cautious}
    twins = {name: Transcription(w, **settings) for name, w in start.items()}  # type: ignore[arg-type]
    for number in range(20):
        set_gradients(groups, number)
        for name, twin in twins.items():
            twin.step(part(decayed, decayed.grad, name) * 0.5)
        step(optimizer, 1e-2, clip=0.5)
    for name, twin in twins.items():
        found = part(decayed, decayed.master, name).double()
        error = (found - twin.w).norm() / (twin.w - start[name].double()).norm()
        assert error < (1e-5 if exact else 2e-2), name
    variance = optimizer.state()["decayed.40x24.variance"]
    expected = torch.stack([twins[name].v for name in "acd"])
    torch.testing.assert_close(variance.double(), expected, rtol=1e-5 if exact else 5e-2, atol=0)


def test_the_rest_is_8_bit_adamw() -> None:
    groups, twins = make_groups(), make_groups()
    optimizer = NorMuon(groups, NorMuonOptions(rest_lr_factor=0.5))
    twin = adamw_8bit.BlockwiseAdamW(twins)
    for number in range(5):
        set_gradients(groups, number)
        set_gradients(twins, number)
        step(optimizer, 1e-2)
        twin.step(lr=torch.tensor(5e-3), clip=torch.tensor(1.0), skip=torch.tensor(0.0))
    assert torch.equal(groups[1].master, twins[1].master)
    assert torch.equal(part(groups[0], groups[0].master, "embedding"), part(twins[0], twins[0].master, "embedding"))
    assert not torch.equal(part(groups[0], groups[0].master, "a"), part(twins[0], twins[0].master, "a"))


def test_the_variance_is_kept() -> None:
    groups = make_groups()
    optimizer = make(groups)
    variances = []
    for number in range(10):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
        variances.append(optimizer.state()["decayed.40x24.variance"].clone())
    assert (variances[0] > 0).all()
    # v grows as 1 − β2^t when the rows of O stay alike: 0.05 at step 1, 0.40 at step 10.
    assert (variances[9] > 4 * variances[0]).float().mean() > 0.9
    assert not torch.equal(variances[9], variances[8])


def test_stacks_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on temporary memory: one matrix at a time as all of a shape together, but for the product's rounding."""
    found = []
    for size in (1, 1 << 24):
        monkeypatch.setitem(adamw_8bit.CHUNK, "cuda", size)
        groups = make_groups()
        optimizer = make(groups)
        for number in range(3):
            set_gradients(groups, number)
            step(optimizer, 1e-2)
        found.append(groups[0].master)
    assert (found[0] - found[1]).abs().max() < 1e-3
    assert (found[0] - make_groups()[0].master).abs().max() > 1e-2


def test_the_matrices_of_all_experts_are_updated_one_by_one() -> None:
    """A parameter [3, 40, 24] gets the bits of three of [40, 24]."""
    found = []
    for shapes in ({"e": (0, (3, 40, 24))}, {name: (i * 960, (40, 24)) for i, name in enumerate("abc")}):
        values = torch.randn(2, 3 * 960, generator=torch.Generator().manual_seed(0))
        master, grad = values.clone().unbind()
        group = bundles.ParamGroup(
            name="decayed", master=master, grad=grad, shapes=shapes, weight_decay=0.1, hidden=frozenset(shapes)
        )
        step(make([group]), 1e-2)
        found.append(group.master)
        assert not torch.equal(group.master, values[0])
    assert torch.equal(*found)


# ----------------------------------------------------------------- skipped steps and state


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("done", [0, 3], ids=["at the first step", "later"])
def test_a_skipped_step_changes_nothing(bad: float, done: int) -> None:
    groups = make_groups()
    optimizer = make(groups)
    for number in range(done):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    before = snapshot(groups, optimizer)
    set_gradients(groups, 7)
    part(groups[0], groups[0].grad, "b")[1, 2] = bad
    step(optimizer, 1e-2, clip=bad, skip=1.0)
    assert_equal(snapshot(groups, optimizer), before)


def test_gradients_that_are_not_finite_or_all_zero_leave_finite_weights() -> None:
    groups = make_groups()
    optimizer = make(groups)
    step(optimizer, 1e-2)
    set_gradients(groups, 0)
    part(groups[0], groups[0].grad, "b")[1, 2] = math.nan
    part(groups[0], groups[0].grad, "c")[1, 2] = math.inf
    step(optimizer, 1e-2)
    assert all(t.float().isfinite().all() for t in snapshot(groups, optimizer).values())


def test_state_goes_into_another_optimizer_and_continues_bit_for_bit() -> None:
    groups, others = make_groups(), make_groups(seed=9)
    optimizer, other = make(groups), make(others)
    for number in range(5):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    for group, mine in zip(others, groups, strict=True):
        group.master.copy_(mine.master)
    for name, tensor in other.state().items():
        tensor.copy_(optimizer.state()[name].clone())
    for number in range(5, 8):
        for some, that in ((groups, optimizer), (others, other)):
            set_gradients(some, number)
            step(that, 1e-2)
    assert_equal(snapshot(others, other), snapshot(groups, optimizer))


def test_state_is_at_most_what_the_plan_is_told() -> None:
    flat = torch.zeros(1 << 20)
    group = bundles.ParamGroup(
        name="w",
        master=flat,
        grad=flat.clone(),
        shapes={"e": (0, (512, 512)), "w": (1 << 18, (3 * 512, 512))},
        weight_decay=0.0,
        hidden=frozenset({"w"}),
    )
    state_bytes = sum(t.nbytes for t in make([group]).state().values())
    spec = surogate_optimizer()
    assert spec.name == "normuon"
    assert 0.8 * spec.state_bytes_per_parameter * len(flat) < state_bytes < spec.state_bytes_per_parameter * len(flat)


@pytest.mark.gpu
def test_captured_steps_on_a_gpu_equal_the_cpu() -> None:
    cpu, cuda = make_groups(), make_groups(device="cuda")
    exact, optimizer = make(cpu), make(cuda)
    lr, clip, skip = (torch.tensor(x, device="cuda") for x in (1e-2, 0.5, 1.0))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer.step(lr=lr, clip=clip, skip=skip)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(lr=lr, clip=clip, skip=skip)
    skip.zero_()
    start = cpu[0].master.clone()
    for number in range(20):
        set_gradients(cpu, number)
        for group, twin in zip(cuda, cpu, strict=True):
            group.grad.copy_(twin.grad)
        graph.replay()
        step(exact, 1e-2, clip=0.5)
    moved = (cpu[0].master - start).norm()
    assert (cuda[0].master.cpu() - cpu[0].master).norm() / moved < 2e-2
