"""Files in which one tensor holds a projection of all experts of a layer: where in it the weight of each is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from surogate_core.files.tensorfile import FLOATS, TensorInfo, View, in_order
from surogate_core.hf.prequantised import QuantisedPart, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.dsl.experts import Fused


def views_of_experts(
    fused: Mapping[str, Fused], scheme: Scheme | None, infos: Mapping[str, TensorInfo], where: Mapping[str, str]
) -> tuple[dict[str, list[View]], list[str]]:
    """(name of a tensor of all experts → the tensors of each; what is wrong), from the headers of the files.

    `where`: name of a tensor → name of its file.

    A quantised weight has several such tensors: ``mlp.experts.down_proj`` has ``mlp.experts.down_proj_scale_inv`` or
    ``mlp.experts.down_proj.weight_scale_inv`` beside it, if each expert would have ``….weight_scale_inv``.
    """
    views: dict[str, list[View]] = {}
    problems: list[str] = []
    for whole, one in fused.items():
        parts = _parts(whole, scheme, infos)
        for name, part in parts.items():
            wanted = _stored(one) if part is None else _shape(part, one)
            info, dtypes = infos[name], FLOATS if part is None else part.dtypes
            if info.dtype not in dtypes or info.shape not in (wanted, wanted if len(wanted) > 1 else (*wanted, 1)):
                needed = f"{list(wanted)} of {', '.join(dtypes)}"
                problems.append(f"{name} is {info.dtype} {list(info.shape)} in {where[name]}, the model needs {needed}")
            elif scheme is not None and part is not None and (misfit := _misfit(scheme.rows, one)):
                problems.append(f"{name} {misfit}")
            else:
                views[name] = _views(part, one)
    return views, problems


def _parts(whole: str, scheme: Scheme | None, infos: Mapping[str, TensorInfo]) -> dict[str, QuantisedPart | None]:
    """The tensors in the file of which a weight of all experts is made; None is the weight itself, not quantised."""
    found: dict[str, QuantisedPart | None] = {}
    for part in scheme.parts.values() if scheme is not None else ():
        endings = [form for s in part.suffixes for form in (s, s.removeprefix(".weight"), f"_{s[1:]}")]
        name = next((whole + ending for ending in endings if whole + ending in infos), None)
        if name is not None:
            found[name] = part
    # The codes may have the name of the weight itself; it is quantised if there are scales too.
    if len(found) > 1 or (found and whole not in found):
        return found
    return {whole: None} if whole in infos else {}


def _shape(part: QuantisedPart, one: Fused) -> tuple[int, ...]:
    """A part of all experts. What does not depend on the rows, as a scale of the matrix, is one value an expert."""
    count, rows, inputs = one.shape
    return (count, *part.shape(rows, inputs))


def _misfit(rows: int, one: Fused) -> str | None:
    """Why scales of blocks with this number of rows cannot be divided among the projections of an expert."""
    outputs = [outputs for _, (outputs, _) in one.parts[: len(one.parts) // one.shape[0]]]
    if not any(count % rows for count in outputs[:-1]):
        return None
    return (
        f"has scales of {rows} rows that belong to two projections, which have {' and '.join(map(str, outputs))} rows"
    )


def _stored(one: Fused) -> tuple[int, ...]:
    """The shape in files of a tensor that is not quantised."""
    count, rows, inputs = one.shape
    return (count, inputs, rows) if one.transposed else one.shape


def rejoined(tensors: Iterable[tuple[str, Tensor]], fused: Mapping[str, Fused]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an export, with one tensor of all experts where all files of the model have it so.

    `tensors`: (name, tensor) of each expert, in any order. What has been joined is freed.
    """
    import torch

    place = {part: name for name, one in fused.items() if one.always for part, _ in one.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if name not in place:
            yield name, tensor
            continue
        whole = place[name]
        found = waiting.setdefault(whole, {})
        found[name] = tensor
        if len(found) == len(fused[whole].parts):
            del waiting[whole]
            values = (found.pop(part) for part, _ in fused[whole].parts)
            yield whole, torch.stack([value.t() if fused[whole].transposed else value for value in values])
    assert not waiting, f"an expert of {next(iter(waiting))} is missing"


def adapters_joined(
    tensors: Mapping[str, Tensor], fused: Mapping[str, Fused]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """(tensors of an adapter, the parameters that PEFT must target → their ranks): with one A and B of all experts, as
    `expert_adapters` describes them, where adapters are of one tensor of all experts.

    PEFT wraps the parameters of a module one after the other, so the name of the first one has ``.base_layer``.
    """
    kept: dict[str, Tensor] = dict(tensors)
    modules: dict[str, list[tuple[str, int, Tensor, Tensor]]] = {}
    for name, one in fused.items():
        if one.adapted and (whole := _of_all_experts(kept, one)) is not None:
            a, b = whole
            modules.setdefault(name.rpartition(".")[0], []).append((name, len(a) // one.shape[0], a, b))
    targets = {}
    for module, found in modules.items():
        for number, (name, rank, a, b) in enumerate(found):
            place = module + ".base_layer" * (len(found) - 1 - number)
            kept |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
            targets[name] = rank
    return kept, targets


def _of_all_experts(tensors: dict[str, Tensor], one: Fused) -> tuple[Tensor, Tensor] | None:
    """(A [E·r, inputs], B [rows, r·E]) of the adapters of each expert, which are taken out; None without any.

    The projections of an expert have different A, one below the other, so that r is the sum of their ranks, and B has a
    block for each of them: zeros for a projection without an adapter.
    """
    import torch

    each = len(one.parts) // one.shape[0]
    of_a, of_b = [], []
    for expert in range(one.shape[0]):
        a, b = [], []
        for part, (outputs, inputs) in one.parts[expert * each : (expert + 1) * each]:
            module = part.removesuffix(".weight")
            none = torch.zeros(0, inputs), torch.zeros(outputs, 0)
            found = tuple(tensors.pop(f"{module}.lora_{side}.weight", None) for side in "AB")
            pair = none if found[0] is None or found[1] is None else (found[0], found[1])
            a.append(pair[0])
            b.append(pair[1])
        kept = [value for value in a if len(value)]
        if not kept:
            return None
        of_a.append(torch.cat(kept))
        of_b.append(torch.block_diag(*(value.to(kept[0]) for value in b)))
    return torch.cat(of_a), torch.stack(of_b, -1).flatten(1)


def _views(part: QuantisedPart | None, one: Fused) -> list[View]:
    if part is None:
        return in_order(one.parts, transposed=one.transposed)
    named = [(weight.removesuffix(".weight") + part.suffixes[0], part.shape(*shape)) for weight, shape in one.parts]
    if named[0][1]:
        return in_order(named)
    each = len(named) // one.shape[0]
    return [View(name=name, shape=(), first=number // each) for number, (name, _) in enumerate(named)]
