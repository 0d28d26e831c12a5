"""Gradients of weights that stay products, so that the product adds to the sum.

dW = dyᵀ x of each micro-step is added to a sum of wider dtype. If a block's backward computed it, it would be rounded,
written, and read again by the addition, which takes longer than the memory traffic of the product itself. So the
backward returns dyᵀ and x instead, and the product adds to the sum as it writes. A product of scaled FP8 codes returns
these and the inverses of their scales.

Shape suffixes: N tokens, O and I the sides of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from surogate_core.kernels.sums import sum_coded_product

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient [O, I] = left @ right, times both inverses if the factors are FP8 codes."""

    left_ON: Tensor
    right_NI: Tensor
    inverses: tuple[Tensor, Tensor] | None = None
    """The inverses of the scales of both factors, 0-d fp32."""

    def add_to(self, total_OI: Tensor) -> None:
        """Add the product to a sum of its dtype or a wider one; on a GPU it is not rounded before it is added to a
        wider one.
        """
        left_ON, right_NI = self.left_ON, self.right_NI
        if self.inverses is not None:
            sum_coded_product(total_OI, left_ON, right_NI, *self.inverses, True)
        elif left_ON.dtype == total_OI.dtype:
            total_OI.addmm_(left_ON, right_NI)
        elif total_OI.device.type == "cuda":
            aten.addmm.dtype_out(total_OI, left_ON, right_NI, total_OI.dtype, out=total_OI)
        else:
            total_OI.add_(left_ON @ right_NI)

    def write_to(self, total_OI: Tensor) -> None:
        """The same into a sum whose contents do not count."""
        left_ON, right_NI = self.left_ON, self.right_NI
        if self.inverses is not None:
            sum_coded_product(total_OI, left_ON, right_NI, *self.inverses, False)
        elif left_ON.dtype == total_OI.dtype:
            torch.mm(left_ON, right_NI, out=total_OI)
        elif total_OI.device.type == "cuda":
            aten.addmm.dtype_out(total_OI, left_ON, right_NI, total_OI.dtype, beta=0, out=total_OI)
        else:
            total_OI.copy_(left_ON @ right_NI)


def add_products(pairs: Iterable[tuple[Tensor, Tensor | Product]]) -> list[tuple[Tensor, Tensor]]:
    """Add the pairs (sum, gradient) that are products, and return the others.

    Merges consecutive products that share the same x and whose left factors and sums are contiguous.
    """
    products, plain = _merged(pairs)
    for total, product in products:
        product.add_to(total)
    return plain


def write_gradients(pairs: Iterable[tuple[Tensor, Tensor | Product]]) -> None:
    """Write each gradient over its sum, with products merged as `add_products` does."""
    products, plain = _merged(pairs)
    for total, product in products:
        product.write_to(total)
    for total, gradient in plain:
        total.copy_(gradient)


def _merged(
    pairs: Iterable[tuple[Tensor, Tensor | Product]],
) -> tuple[list[tuple[Tensor, Product]], list[tuple[Tensor, Tensor]]]:
    """(those that are products, merged where possible; the others)."""
    plain: list[tuple[Tensor, Tensor]] = []
    products: list[tuple[Tensor, Product]] = []
    for total, gradient in pairs:
        if isinstance(gradient, Tensor):
            plain.append((total, gradient))
            continue
        joined = _joined(*products[-1], total, gradient) if products else None
        if joined is None:
            products.append((total, gradient))
        else:
            products[-1] = joined
    return products, plain


def _joined(total: Tensor, product: Product, next_total: Tensor, following: Product) -> tuple[Tensor, Product] | None:
    """Both merged into one product for one sum, or None."""
    left, right = product.left_ON, product.right_NI
    if product.inverses is not None or following.inverses is not None:
        return None
    if not (_same(right, following.right_NI) and _follows(total, next_total) and _follows(left, following.left_ON)):
        return None
    rows = total.shape[0] + next_total.shape[0]
    whole = Product(left.as_strided((rows, left.shape[1]), left.stride()), right)
    return total.as_strided((rows, total.shape[1]), total.stride()), whole


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _follows(a: Tensor, b: Tensor) -> bool:
    """Whether b's rows begin where a's end, in one storage."""
    if a.dtype != b.dtype or a.stride() != b.stride() or a.shape[1] != b.shape[1]:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return b.storage_offset() == a.storage_offset() + a.shape[0] * a.stride(0)


def defer_products(backward: fx.GraphModule, count: int) -> tuple[int, ...]:
    """Make the graph return the factors of each product among its first `count` outputs.

    Outputs that are fp32 sums, rounded at the end, are returned without the rounding, because they are added to a wide
    sum. Returns for each output how many it is now: 1, 2 for left and right of a `Product`, 4 with both inverses.
    """
    (output,) = (n for n in backward.graph.nodes if n.op == "output")
    returned: list[fx.Node] = []
    deferred: list[int] = []
    for number, node in enumerate(output.args[0]):
        factors = _factors(node, output) if number < count else None
        deferred.append(1 if factors is None else len(factors))
        if factors is None:
            returned.append(_unrounded(node, output) if number < count else node)
            continue
        for factor, transposed in factors:
            with backward.graph.inserting_before(output):
                returned.append(_transpose(backward.graph, factor) if transposed else factor)
    output.args = (returned,)
    backward.graph.eliminate_dead_code()
    backward.recompile()
    return tuple(deferred)


def collect(outputs: Sequence[Any], deferred: Sequence[int]) -> list[Any]:
    """The outputs of such a graph, with a `Product` for those that are several."""
    flat = iter(outputs)
    found = []
    for parts in deferred:
        left, *rest = islice(flat, parts)
        found.append(Product(left, rest[0], (rest[1], rest[2]) if parts == 4 else None) if rest else left)
    return found


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        return {node.args[1], node.args[2]} in ({0, 1}, {-1, -2})
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def _unrounded(node: fx.Node, output: fx.Node) -> fx.Node:
    """The fp32 sum that the node rounds, if that is all it does. A product in fp32 keeps its rounding: a recipe that
    emulates a narrower one means it."""
    if node.target is not aten._to_copy.default or list(node.users) != [output]:
        return node
    (source,) = node.all_input_nodes
    summed = source.target is aten.sum.dim_IntList and source.meta["val"].dtype == torch.float32
    return source if summed else node


def _factors(node: fx.Node, output: fx.Node) -> Sequence[tuple[fx.Node, bool]] | None:
    """(left, whether to transpose it), (right, likewise) of an output that is a product without other readers; after
    them the inverses of their scales, if they are codes.
    """
    transposed = False
    reader = output
    while list(node.users) == [reader] and _is_transpose(node):
        transposed = not transposed
        reader, node = node, node.all_input_nodes[0]
    if list(node.users) != [reader]:
        return None
    if node.target is aten._scaled_mm.default and not transposed:
        return _coded_factors(node)
    if node.target is not aten.mm.default:
        return None
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return ((right, True), (left, True)) if transposed else ((left, False), (right, False))


def _coded_factors(node: fx.Node) -> Sequence[tuple[fx.Node, bool]] | None:
    """The factors of a scaled product and their inverses, if it has one scale a factor, nothing added to it, and the
    digits of fp32 in its sums.
    """
    named: Any = node.target
    given: dict[str, Any] = dict(zip((a.name for a in named._schema.arguments), node.args, strict=False))
    given |= node.kwargs
    factors = [given.pop(name) for name in ("self", "mat2", "scale_a", "scale_b")]
    given.pop("out_dtype", None)
    one_each = all(scale.meta["val"].numel() == 1 for scale in factors[2:])
    return [(factor, False) for factor in factors] if one_each and not any(given.values()) else None


def _transpose(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _is_transpose(node):
        return node.all_input_nodes[0]
    made = graph.call_function(aten.permute.default, (node, [1, 0]))
    made.meta["val"] = node.meta["val"].t()
    return made
