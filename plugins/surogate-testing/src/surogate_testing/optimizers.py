"""Checks of optimizers: step, clip, decay, non-finite gradients, state and its size, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from surogate_core.plugin import bundles
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.hostreads import no_host_reads

SHAPES = {"decayed": ((256, 64), (64, 128)), "undecayed": ((64,), (33,))}
DECAY = {"decayed": 0.1, "undecayed": 0.0}
DRAWS = 32
"""Number of seeds in the mean of rounded masters."""
CLIP_TOLERANCE = 1e-3
"""Relative error of masters and state; some values of 8-bit state may round differently."""


def _groups(seed: int = 0, dtype: torch.dtype = torch.float32, *, decays: bool = True) -> list[bundles.ParamGroup]:
    generator = torch.Generator().manual_seed(seed)
    rounding = None if dtype == torch.float32 else torch.zeros((), dtype=torch.int32)
    found: list[bundles.ParamGroup] = []
    for name, members in SHAPES.items():
        shapes, offset = {}, 0
        for number, shape in enumerate(members):
            shapes[f"{name}.{number}"] = (offset, shape)
            offset += -(-math.prod(shape) // bundles.FLAT_ALIGNMENT) * bundles.FLAT_ALIGNMENT
        group = bundles.ParamGroup(
            name=name,
            master=torch.zeros(offset, dtype=dtype),
            grad=torch.zeros(offset),
            shapes=shapes,
            weight_decay=DECAY[name] if decays else 0.0,
            hidden=frozenset(n for n, (_, shape) in shapes.items() if len(shape) == 2),
            seed=rounding,
            number=len(found),
        )
        _fill(group, group.master, generator)
        found.append(group)
    return found


def _fill(group: bundles.ParamGroup, flat: Tensor, generator: torch.Generator) -> None:
    """Random parameters; the padding between them does not change."""
    for offset, shape in group.shapes.values():
        flat[offset : offset + math.prod(shape)] = torch.randn(math.prod(shape), generator=generator)


def _parameters(group: bundles.ParamGroup, flat: Tensor) -> Tensor:
    """Without the padding."""
    return torch.cat([flat[offset : offset + math.prod(shape)] for offset, shape in group.shapes.values()])


def _made(
    spec: bundles.OptimizerSpec, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[bundles.Optimizer, list[bundles.ParamGroup]]:
    groups = _groups(seed, dtype)
    return spec.build(groups, spec.options()), groups


def _gradients(groups: list[bundles.ParamGroup], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for group in groups:
        _fill(group, group.grad, generator)


def _step(
    made: bundles.Optimizer, groups: list[bundles.ParamGroup], number: int, lr: float = 1e-2, skip: bool = False
) -> None:
    _gradients(groups, number)
    if skip:
        for group in groups:
            group.grad[3] = torch.nan
    made.step(lr=torch.tensor(lr), clip=torch.tensor(torch.nan if skip else 0.5), skip=torch.tensor(float(skip)))
    if not skip:
        _ensure_padding(groups)


def _ensure_padding(groups: list[bundles.ParamGroup]) -> None:
    """The padding between parameters is still zero."""
    for group in groups:
        between = torch.ones(len(group.master), dtype=torch.bool)
        for offset, shape in group.shapes.values():
            between[offset : offset + math.prod(shape)] = False
        moved = between & (group.master != 0)
        if bool(moved.any()):
            number = int(moved.nonzero()[0])
            raise AssertionError(
                f"group {group.name}: a step wrote {float(group.master[number]):.3g} to element {number} of `master`, "
                f"which is padding between parameters; it must stay 0"
            )


def _bits(made: bundles.Optimizer, groups: list[bundles.ParamGroup]) -> dict[str, Tensor]:
    masters = {f"master {g.name}": g.master.clone() for g in groups}
    return masters | {f"state {n}": t.clone() for n, t in made.state().items()}


def steps(spec: bundles.OptimizerSpec) -> None:
    """Every master moves and stays finite; with a learning rate of 0 none does."""
    made, groups = _made(spec)
    before = [g.master.clone() for g in groups]
    _step(made, groups, 0, lr=0.0)
    for group, old in zip(groups, before, strict=True):
        ensure(torch.equal(group.master, old), f"group {group.name} moved although lr is 0")
    _step(made, groups, 1)
    for group, old in zip(groups, before, strict=True):
        ensure(bool(group.master.isfinite().all()), f"group {group.name} is not finite after a step")
        moved = float((_parameters(group, group.master) != _parameters(group, old)).float().mean())
        ensure(moved > 0.9, f"a step moved {moved:.0%} of group {group.name}")


def multiplies_gradients_by_clip(spec: bundles.OptimizerSpec) -> None:
    """A step with `clip` equals a step with gradients multiplied by it; a power of two, so that both are exact."""
    (made, groups), (twin, twins) = _made(spec), _made(spec)
    for number, clip in enumerate((0.5, 1.0, 0.125)):
        _gradients(groups, number)
        _gradients(twins, number)
        for group in twins:
            group.grad.mul_(clip)
        for optimizer, factor in ((made, clip), (twin, 1.0)):
            optimizer.step(lr=torch.tensor(1e-2), clip=torch.tensor(factor), skip=torch.tensor(0.0))
    expected = _bits(twin, twins)
    for name, tensor in _bits(made, groups).items():
        if tensor.is_floating_point() and tensor.numel():
            error = tiny.relative_error(tensor, expected[name])
            ensure(
                error <= CLIP_TOLERANCE,
                f"`clip` is not what gradients are multiplied by: {name} is another with clip=0.5 than with gradients "
                f"that are halved (relative error {error:.1e})",
            )


def decays_weights(spec: bundles.OptimizerSpec) -> None:
    """`weight_decay` of a group pulls its weights towards 0; the weights of a group without it do not decay."""
    found = []
    for decays in (True, False):
        groups = _groups(decays=decays)
        made = spec.build(groups, spec.options())
        _step(made, groups, 0, lr=0.1)
        found.append({group.name: group.master.clone() for group in groups})
    start = {group.name: group.master for group in _groups()}
    for name, decay in DECAY.items():
        drawn = found[0][name] - found[1][name]
        if decay:
            ensure(bool(drawn.any()), f"`weight_decay` of group {name} is ignored: 0.1 and 0 give the same weights")
            ensure(float((drawn * start[name]).sum()) < 0, f"`weight_decay` of group {name} does not draw towards 0")
        else:
            ensure(not drawn.any(), f"group {name} has weight_decay 0 and moves with the decay of another group")


def reads_nothing_back(spec: bundles.OptimizerSpec) -> None:
    """A step reads no tensor's value on the host, neither in Python nor by an op whose result's shape depends on it."""
    made, groups = _made(spec)
    _gradients(groups, 0)
    for skip in (0.0, 1.0):
        with no_host_reads("step"):
            made.step(lr=torch.tensor(1e-2), clip=torch.tensor(0.5), skip=torch.tensor(skip))


def skips(spec: bundles.OptimizerSpec) -> None:
    """A step whose gradients are not finite changes neither masters nor state, at first and later."""
    made, groups = _made(spec)
    for number in range(3):
        before = _bits(made, groups)
        _step(made, groups, 50 + number, skip=True)
        tiny.ensure_same_bits(_bits(made, groups), before, f"a skipped step after {number}")
        _step(made, groups, number)
    twin, twins = _made(spec)
    for number in range(3):
        _step(twin, twins, number)
    tiny.ensure_same_bits(_bits(made, groups), _bits(twin, twins), "steps with skipped ones between")


def keeps_state(spec: bundles.OptimizerSpec) -> None:
    """An optimizer with copied state continues bit for bit."""
    made, groups = _made(spec)
    for number in range(3):
        _step(made, groups, number)
    other, others = _made(spec, seed=9)
    for mine, theirs in zip(groups, others, strict=True):
        theirs.master.copy_(mine.master)
    for name, tensor in other.state().items():
        tensor.copy_(made.state()[name].clone())
    for number in range(3, 6):
        _step(made, groups, number)
        _step(other, others, number)
    tiny.ensure_same_bits(_bits(other, others), _bits(made, groups), "with copied state")


def rounds_masters(spec: bundles.OptimizerSpec) -> None:
    """If it supports bf16 masters: their mean over many seeds equals fp32 masters, and a seed reproduces its bits."""
    if "bf16" not in spec.master_dtypes:
        return
    wide, twins = _made(spec)
    total = [torch.zeros(len(g.master)) for g in twins]
    for number in range(DRAWS):
        made, groups = _made(spec, dtype=torch.bfloat16)
        before = _bits(made, groups)
        _step(made, groups, 50, skip=True)
        tiny.ensure_same_bits(_bits(made, groups), before, "a skipped step of bf16 masters")
        for group in groups:
            assert group.seed is not None
            group.seed.fill_(number)
        _step(made, groups, 0)
        for group, sum_ in zip(groups, total, strict=True):
            ensure(group.master.dtype == torch.bfloat16, f"group {group.name} is {group.master.dtype} after a step")
            sum_ += group.master.float()
    for twin, start in zip(twins, _groups(dtype=torch.bfloat16), strict=True):
        twin.master.copy_(start.master)
    _step(wide, twins, 0)
    for twin, sum_ in zip(twins, total, strict=True):
        # In units of 2^-7 of each value, which is between half a step of bf16 and one: about 0.05 is right, 0.2 means
        # rounding to nearest.
        unit = 2.0**-7 * _parameters(twin, twin.master).abs()
        error = _parameters(twin, sum_ / DRAWS - twin.master) / unit.clamp(min=1e-30)
        off = float(error.square().mean().sqrt())
        ensure(off < 0.1, f"group {twin.name}: the mean of bf16 masters is {off:.2f} of a step off")
    again, others = _made(spec, dtype=torch.bfloat16)
    for group in others:
        assert group.seed is not None
        group.seed.fill_(DRAWS - 1)
    _step(again, others, 50, skip=True)
    _step(again, others, 0)
    tiny.ensure_same_bits(_bits(again, others), _bits(made, groups), "with the seed of another step")


def states_its_size(spec: bundles.OptimizerSpec) -> None:
    """The state has the bytes that `state_bytes_per_parameter` predicts, to a tenth and 4 KiB."""
    made, groups = _made(spec)
    _step(made, groups, 0)
    expected = spec.state_bytes_per_parameter * sum(g.master.numel() for g in groups)
    found = sum(t.nbytes for t in made.state().values())
    ensure(abs(found - expected) <= 0.1 * expected + 4096, f"{found} bytes of state, predicted are {expected:.0f}")


def trains_and_resumes(spec: bundles.OptimizerSpec) -> None:
    """On a tiny model the loss falls, and a resumed run has the bits of an uninterrupted one."""
    losses = tiny.train(tiny.engine(optimizer=spec), 5, lr=1e-3, same=True)
    ensure(all(map(math.isfinite, losses)) and losses[-1] < losses[0], f"the loss does not fall: {losses}")
    tiny.ensure_resumes(lambda: tiny.engine(optimizer=spec))


def _cut(group: bundles.ParamGroup, cuts: list[int]) -> list[bundles.ParamGroup]:
    """Copies of the parts of a group between the cuts, as several ranks have them."""
    found = []
    for number, (start, stop) in enumerate(pairwise([0, *cuts, group.master.numel()])):
        shapes, sizes = {}, {}
        for name, (offset, shape) in group.shapes.items():
            count = math.prod(shape)
            low, high = max(offset, start), min(offset + count, stop)
            if low < high:
                shapes[name], sizes[name] = (low - start, (high - low,)), count
        found.append(
            replace(
                group,
                name=f"{group.name}@{number}",
                master=group.master[start:stop].clone(),
                grad=group.grad[start:stop].clone(),
                shapes=shapes,
                sizes=sizes,
                hidden=group.hidden & shapes.keys(),
                first=start,
            )
        )
    return found


def takes_parts_of_parameters(spec: bundles.OptimizerSpec) -> None:
    """Without `whole_matrices`, groups cut anywhere are updated to the same bits, and their state adds up to the whole
    group's.
    """
    if spec.whole_matrices:
        raise NotApplicable("it needs whole matrices, and says so")
    made, groups = _made(spec)
    parts = {g.name: _cut(g, [256, 40 * 256] if g.name == "decayed" else []) for g in groups}
    others = [part for found in parts.values() for part in found]
    again = spec.build(others, spec.options())
    for number in range(3):
        _gradients(groups, number)
        for group in groups:
            for part in parts[group.name]:
                part.grad.copy_(group.grad[part.first : part.first + part.grad.numel()])
        scalars = {name: torch.tensor(value) for name, value in (("lr", 1e-2), ("clip", 0.5), ("skip", 0.0))}
        made.step(**scalars)
        again.step(**scalars)
    state = again.state()
    for group in groups:
        masters = torch.cat([part.master for part in parts[group.name]])
        ensure(torch.equal(masters, group.master), f"the masters of parts of {group.name} differ from the whole ones")
        for name, whole in made.state().items():
            if not name.startswith(f"{group.name}."):
                continue
            names = [part.name + name[len(group.name) :] for part in parts[group.name]]
            pieces = [state[n] for n in names if n in state]
            same = bool(pieces) and torch.equal(torch.cat(pieces), whole)
            ensure(same, f"the state of parts, {', '.join(names)}, does not add up to {name}")


CHECKS = (
    steps,
    multiplies_gradients_by_clip,
    decays_weights,
    reads_nothing_back,
    skips,
    keeps_state,
    rounds_masters,
    states_its_size,
    takes_parts_of_parameters,
    trains_and_resumes,
)
