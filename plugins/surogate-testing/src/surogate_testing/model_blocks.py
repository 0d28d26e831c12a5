"""Checks of a model family's blocks, one at a time: what they see of other rows, and what their settings change.

Blocks run without an engine, on random rows and weights. Shape suffixes: N rows, D model features, H query heads, K
key/value heads, E features of a query and a key, F features of a value, R runs of rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import UserError, bundles, dsl
from surogate_core.service.model import (
    BORDERS,
    IDS,
    KNOWN,
    REAL,
    KeyValues,
    Known,
    Multiply,
    States,
    TensorSpec,
    mixing,
)
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.models import longest_of, tiny_preset

TOLERANCE = 1e-5
"""Largest difference of a row that should be equal, relative to the largest number of the output."""
SMALLEST_TABLE = 16
"""Tokens that blocks which read them get have smaller numbers."""
MOVES = "Fix: what a row needs of others is an Attention, a Recurrence or a Convolution that the class declares"


def blocks_of(model: dsl.Model) -> list[tuple[str, dsl.Block]]:
    """(prefix of the first layer, block) of the blocks that differ."""
    found: dict[Any, tuple[str, dsl.Block]] = {}
    for prefix, block in model.blocks(longest_of(model)):
        found.setdefault(block.identity, (prefix, block))
    return list(found.values())


def _name(block: dsl.Block) -> str:
    kind = type(block)
    return f"{kind.__module__}.{kind.__qualname__}"


def _where(prefix: str, block: dsl.Block) -> str:
    """The block for a message, with the place of its `forward`."""
    function = type(block).forward
    file, line = inspect.getsourcefile(function), function.__code__.co_firstlineno
    return f"{_name(block)} ({prefix.rstrip('.')}, {file}:{line})"


def _bound(block: dsl.Block, source: Callable[[TensorSpec], Any], prefix: str = "") -> dsl.Block:
    """The block with random weights, which multiply plainly."""
    slots, experts = block.linear_slots(None), block.expert_slots(None)
    specs = block.tensor_specs(prefix, slots, train_base=True, experts=experts)
    plain = Multiply(lambda x_NI, w_OI, slot: x_NI @ w_OI.t())
    return block.bind({spec.name: source(spec) for spec in specs}, slots, plain)


def _shapes(block: dsl.Block) -> Sequence[tuple[str, tuple[int, ...]]]:
    specs = block.tensor_specs("", block.linear_slots(None), train_base=True, experts=block.expert_slots(None))
    return [(spec.name, spec.shape) for spec in specs]


def _tables(model: dsl.Model, lengths: Sequence[int]) -> dict[str, Tensor]:
    """The tables of packed documents."""
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    return {**model.tables(positions, torch.float32), **_borders(lengths)}


def _borders(lengths: Sequence[int]) -> dict[str, Tensor]:
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {BORDERS: borders, REAL: torch.ones(sum(lengths), dtype=torch.bool)}


@torch.no_grad()
def _rows(bound: dsl.Block, x_ND: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
    # What the block takes of earlier layers and of the tokens belongs to its rows, as they do.
    ids_N = (1000 * x_ND[:, 0]).long() % SMALLEST_TABLE
    bound.taken = {}
    for number, spec in enumerate(bound.taken_specs()):
        generator = torch.Generator().manual_seed(1000 + number)
        mixed = x_ND @ torch.randn(x_ND.shape[1], math.prod(spec.shape), generator=generator) / x_ND.shape[1] ** 0.5
        bound.taken |= {spec.name: mixed.view(-1, *spec.shape)}
    y_ND, _ = bound.outputs(x_ND, {**tables, IDS: ids_N})
    return torch.cat([y_ND, *(value.flatten(1) for value in bound.given.values())], dim=1)


def _drawn(model: dsl.Model, rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, model.width, generator=torch.Generator().manual_seed(seed))


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


# ------------------------------------------------------------------------- other rows


class _EachAlone:
    """Every row as if there were no other: what a mixer gives depends on its row and on the row's number."""

    hides_borders = "in this check"

    def __init__(self, numbers_N: Tensor):
        self.numbers_N = numbers_N

    def attend(self, number: int, spec: KeyValues, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[N, H, F]: a part of a row's own value, by its own score."""
        group = spec.heads // spec.kv_heads
        k_NHE, v_NHF = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score_NH = (q * k_NHE).sum(-1) * spec.scale
        return (score_NH if sinks is None else score_NH - sinks).sigmoid().unsqueeze(-1) * v_NHF

    def recur(self, number: int, spec: States, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …]: a decoding step from a state of the row's own."""
        count, initial = len(self.numbers_N), []
        for place, shape in enumerate(spec.shapes):
            generator = torch.Generator().manual_seed(100 * number + place)
            initial.append(torch.randn(count, *shape, generator=generator)[self.numbers_N])
        y, finals = spec.run(rows, None, initial, parameters)
        if spec.step is not None:
            _ensure_steps(spec, rows, parameters, (initial, finals), y)
        return y


def _ensure_steps(
    spec: States,
    rows: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    around: tuple[Sequence[Tensor], Sequence[Tensor]],
    y: Tensor,
) -> None:
    """The `step` gives and leaves what the scan does, in the slots of its rows. `around`: the states before and after.
    The last row does not count.
    """
    assert spec.step is not None
    count, states = len(y) - 1, []
    slots = torch.arange(len(y)).flip(0) + 1
    slots[-1] = len(y) + 2
    for first in around[0]:
        state = torch.ones(len(y) + 3, *first.shape[1:])
        state[slots], state[-1] = first, 0
        states.append(state)
    before = [state.clone() for state in states]
    found = spec.step(*rows, *states, slots, **parameters)
    what = f"{spec.name}: its step"
    ensure(found.shape == y.shape, f"{what} gives {tuple(found.shape)}, and its scan {tuple(y.shape)}")
    error = _difference(found[:count], y[:count])
    ensure(error <= TOLERANCE, f"{what} gives other rows than its scan, by {error:.1e}")
    for state, old, after in zip(states, before, around[1], strict=True):
        error = _difference(state[slots[:count]], after[:count])
        ensure(error <= TOLERANCE, f"{what} leaves other states than its scan, by {error:.1e}")
        others = torch.ones(len(state), dtype=torch.bool)
        others[slots] = False
        ensure(torch.equal(state[others], old[others]), f"{what} changes slots that no row has")
        ensure(not bool(state[-1].any()), f"{what} leaves no zeros in the last slot, of rows that do not count")


def sees_other_rows_by_mixers_alone(family: bundles.ModelFamily) -> None:
    """Beside its mixers a block computes each row by itself: with other neighbours, and in another order."""
    model, own = family.build(tiny_preset(family)), []
    rows = 24
    table = model.tables(torch.arange(rows, dtype=torch.int32) % 11, torch.float32)
    for prefix, block in blocks_of(model):
        bound, x_ND = _bound(block, tiny.random_source()), _drawn(model, rows)

        def result(x_ND: Tensor, order_N: Tensor, bound: dsl.Block = bound) -> Tensor:
            tables = {name: t[order_N] if t.ndim and len(t) == rows else t for name, t in table.items()}
            with mixing(_EachAlone(order_N)):
                return _rows(bound, x_ND[order_N], tables | _borders([rows]))

        in_order = torch.arange(rows)
        try:
            alone = result(x_ND, in_order)
        except UserError as refusal:
            if BORDERS not in str(refusal):
                raise
            own.append(str(refusal))
            continue
        for kept in (in_order % 2 == 0, in_order % 2 == 1):
            others = torch.where(kept[:, None], x_ND, _drawn(model, rows, 1))
            error = _difference(result(others, in_order)[kept], alone[kept])
            ensure(error <= TOLERANCE, _looks(prefix, block, f"changes by {error:.1e} with other neighbours"))
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        error = _difference(result(x_ND, order), alone[order])
        ensure(error <= TOLERANCE, _looks(prefix, block, f"changes by {error:.1e} in another order of the rows"))
    if own:
        raise NotApplicable(f"no generation, and no rows that GPUs share: {' '.join(own)}")


def _looks(prefix: str, block: dsl.Block, how: str) -> str:
    declared = ", ".join(mixer.name for mixer in block._mixers) or "none"
    return (
        f"{_where(prefix, block)} looks at other rows beside its mixers ({declared}): a row {how}. In training "
        f"documents of one micro-batch would mix, and generation would compute something else. {MOVES}"
    )


def keeps_documents_apart(family: bundles.ModelFamily) -> None:
    """Packed documents have the logits that each has alone, whatever its neighbours are; in each block, then in all."""
    config = tiny_preset(family)
    model = family.build(config)
    longest = longest_of(model)
    lengths = (17, 1, longest, 9)
    tables = _tables(model, lengths)
    spans = [slice(*ends) for ends in pairwise(tables[BORDERS].tolist())]
    for prefix, block in blocks_of(model):
        bound, x_ND = _bound(block, tiny.random_source()), _drawn(model, sum(lengths))
        packed_ND = _rows(bound, x_ND, tables)
        for span in spans:
            others = _drawn(model, len(x_ND), 1)
            others[span] = x_ND[span]
            error = _difference(_rows(bound, others, tables)[span], packed_ND[span])
            where = f"{_where(prefix, block)}: a document's rows change by {error:.1e}"
            ensure(error <= TOLERANCE, f"{where} with other documents beside it. {MOVES}")
            alone = _rows(bound, x_ND[span], _tables(model, [span.stop - span.start]))
            error = _difference(alone, packed_ND[span])
            where = f"{_where(prefix, block)}: a document's rows change by {error:.1e}"
            ensure(error <= TOLERANCE, f"{where} where it is alone. {MOVES}")
    _ensure_apart(family, config, lengths)


def _ensure_apart(family: bundles.ModelFamily, config: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """The logits of the whole model in an engine."""
    tokens = -(-sum(lengths) // 16) * 16
    made = tiny.engine(config, build=family.build, tokens=tokens, max_seqlen=tokens)
    vocabulary = min(made.model.vocab_size, 1000)
    documents = tiny.documents(lengths, vocabulary=vocabulary)
    packed, start = made.logits(tiny.batch(documents, tokens=tokens)), 0
    for number, ids in enumerate(documents):
        own = packed[start : start + len(ids)]
        others = [d if n == number else tiny.documents([len(d)], seed=9, vocabulary=vocabulary)[0]
                  for n, d in enumerate(documents)]  # fmt: skip
        for what, batch, begin in (
            ("alone", [ids], 0),
            ("beside others", others, start),
        ):
            found = made.logits(tiny.batch(batch, tokens=tokens))[begin : begin + len(ids)]
            error = tiny.relative_error(found, own)
            ensure(error <= TOLERANCE, f"the logits of a document {what} differ by {error:.1e} from those when packed")
        start += len(ids)


# ------------------------------------------------------------------------- settings


def gives_each_setting_its_result(family: bundles.ModelFamily) -> None:
    """Two settings of one block give two results: of its layers, of each setting that it declares, of known keys."""
    config = tiny_preset(family)
    model = family.build(config)
    _ensure_layers_differ(model)
    unread: dict[str, list[bool]] = {}
    for prefix, block in blocks_of(model):
        for label, setting in _settings(type(block)).items():
            changed = _acts(model, prefix, block, setting)
            if changed is not None:
                unread.setdefault(f"{label} (key `{setting.key}`)", []).append(changed)
    ignored = [label for label, changes in unread.items() if not any(changes)]
    ensure(
        not ignored,
        f"{', '.join(ignored)}: is declared, and with another value every block computes the same. Fix: compute it, "
        f"such as Attention(…, window=Setting(…)), or delete it",
    )
    ignored = [text for key, value in config.items() if (text := _ignored(family, model, key, value))]
    ensure(not ignored, "; ".join(ignored))


def _ensure_layers_differ(model: dsl.Model) -> None:
    """Layers of one class that are built from other mappings compute something else."""
    by_class: dict[type, list[tuple[str, dsl.Block]]] = {}
    for prefix, block in blocks_of(model):
        by_class.setdefault(type(block), []).append((prefix, block))
    for found in by_class.values():
        results = [(p, b, _shapes(b), _result(model, p, b)) for p, b in found]
        for number, (prefix, block, shapes, y_ND) in enumerate(results):
            for other, beside, its_shapes, its_ND in results[:number]:
                keys = sorted(
                    key
                    for key in block.config.keys() | beside.config.keys()
                    if block.config.get(key) != beside.config.get(key)
                )
                ensure(
                    shapes != its_shapes or not torch.equal(y_ND, its_ND),
                    f"{_name(block)}: {other.rstrip('.')} and {prefix.rstrip('.')} differ in {', '.join(keys)} and "
                    f"compute the same. Fix: compute it, or leave it out of `layer_config`: each other mapping is "
                    f"compiled as a program of its own",
                )


def _result(model: dsl.Model, prefix: str, block: dsl.Block) -> Tensor:
    """The block's output for one long document, with weights that depend on their names within the layer."""
    longest = longest_of(model)
    return _rows(_bound(block, tiny.random_source()), _drawn(model, longest), _tables(model, [longest]))


def _settings(kind: type) -> dict[str, dsl.Setting]:
    """Attribute → the settings that a block reads by it, and those of its mixers."""
    found: dict[str, dsl.Setting] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            parts = {name: value}
            if name in {mixer.name for mixer in getattr(kind, "_mixers", ())}:
                parts = {f"{name}.{part}": one for part, one in vars(value).items()}
            found |= {f"{kind.__qualname__}.{n}": one for n, one in parts.items() if isinstance(one, dsl.Setting)}
    return found


def _other(value: Any) -> Any:
    """Another value of the same kind that acts on a short document; None if there is no such."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 if value != 2 else 3
    return 3 * value + 0.5 if isinstance(value, float) else None


def _acts(model: dsl.Model, prefix: str, block: dsl.Block, setting: dsl.Setting) -> bool | None:
    """Whether a block computes something else with another value of a setting; None where that cannot be tried."""
    try:
        value = setting.value(block.config)
        changed = {**block.config, setting.key: _other(value)}
        if changed[setting.key] is None or setting.value(changed) == value:
            return None
        other = type(block)(changed, block.max_seqlen)
        if _shapes(other) != _shapes(block):
            return True
        return not torch.equal(_result(model, prefix, other), _result(model, prefix, block))
    except Exception:  # a value that the block refuses or cannot compute with: it reads it
        return None


def _ignored(family: bundles.ModelFamily, model: dsl.Model, key: str, value: Any) -> str:
    """What is wrong with a known key of the preset: it acts, and the model without it is the same; or nothing."""
    known, config = KNOWN.get(key), model.config
    neutral = _without(known, key, value, model) if known is not None else None
    if known is None or neutral is None:
        return ""
    try:
        other = family.build({**config, key: neutral})
        if _logits(other) != _logits(family.build(dict(config))):
            return ""
    except Exception:  # refused, or it cannot be built: the key is read
        return ""
    return (
        f"preset `tiny` has `{key}` {value!r} ({known.what}), and with {neutral!r} the logits are the same. Fix: "
        f"compute it, or refuse it in `build` (`check_keys`)"
    )


def _without(known: Known, key: str, value: Any, model: dsl.Model) -> Any:
    """Another value for a known key that acts in this configuration; None where it does not act."""
    neutral = known.neutral
    if value is None or isinstance(value, dict):
        return None
    if callable(neutral):
        acts = isinstance(value, int | float) and not neutral(value, model.config, model.positions)
        return 2 * value if acts else None
    parts = value if isinstance(value, list | tuple) else (value,)
    if all(part in neutral for part in parts):
        return None
    return [neutral[0]] * len(parts) if isinstance(value, list | tuple) else neutral[0]


def _logits(model: dsl.Model) -> tuple[Any, ...]:
    """The names and shapes of a model's tensors, and its logits for one long document."""
    longest = longest_of(model)
    x_ND = torch.randn(longest, model.width, generator=torch.Generator().manual_seed(0))
    shapes = tuple((prefix, tuple(_shapes(block))) for prefix, block in model.blocks(longest))
    x_ND, ids_N = x_ND * model.embed_scale(x_ND.dtype), torch.arange(longest) % SMALLEST_TABLE
    return shapes, logits_of(model, tiny.random_source(), x_ND, ids_N).tolist()


@torch.no_grad()
def logits_of(model: dsl.Model, source: Callable[[TensorSpec], Any], x_ND: Tensor, ids_N: Tensor) -> Tensor:
    """[N, V]: the logits of one document without an engine. `x_ND`: what the first layer reads."""
    tables = {**_tables(model, [len(x_ND)]), IDS: ids_N}
    relayed: dict[tuple[int, str], Tensor] = {}
    for number, (prefix, block) in enumerate(model.blocks(len(x_ND))):
        bound = _bound(block, source, prefix)
        bound.taken = {spec.name: relayed[model.source(number, spec.name)] for spec in bound.taken_specs()}
        x_ND, _ = bound.outputs(x_ND, tables)
        relayed |= {(number, name): value for name, value in bound.given.items()}
    head: dict[str, Any] = {spec.name: source(spec) for spec in model.head_specs(train_base=True)}
    return model.logits(x_ND, head)


CHECKS = (sees_other_rows_by_mixers_alone, keeps_documents_apart, gives_each_setting_its_result)
