"""The products of experts in Triton: gathered rows, two pairs of operands and adapters in one sum.

Names as in `experts_programs`.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from surogate_kernels_triton.experts_programs import kept


@triton.jit
def _rows_times(
    acc,
    x,
    w,
    source,
    inside,
    columns,
    x_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    W_I: tl.constexpr,
    W_O: tl.constexpr,
    B: tl.constexpr,
):
    """acc[m, o] += Σ_i x[source[m], i] w[o, i]; w is that of one expert."""
    real = (columns < OUT)[None, :]
    steps = tl.arange(0, B)
    left = x + source[:, None] * x_row + steps[None, :]
    right = w + steps[:, None] * W_I + columns[None, :] * W_O
    for start in tl.range(0, IN, B):
        known = start + steps < IN
        value = tl.load(left + start, mask=inside & known[None, :], other=0.0)
        weight = tl.load(right + start * W_I, mask=known[:, None] & real, other=0.0)
        acc = tl.dot(value, weight, acc)
    return acc


@triton.jit
def product(
    x0,
    x1,
    w0,
    w1,
    v0,
    v1,
    u,
    b0,
    b1,
    order,
    table,
    y,
    seed,
    key0,
    key1,
    threshold,
    inverse,
    scale,
    x_row,
    u_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    W_I: tl.constexpr,
    W_O: tl.constexpr,
    B_L: tl.constexpr,
    B_O: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    PAIRS: tl.constexpr,
    OWN: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    DROP: tl.constexpr,
):
    """y[r, o] = Σ_p Σ_i x_p[r, i] W_p[e, o, i] + scale · Σ_s Σ_l u[r, s·L + l] B_s[e, o, l], rounded once.

    With K, row r of x is that of its token. L = 0: no adapters. With DROP,
    elements of each adapter's product are dropped. `W_I`, `W_O`, `B_L`, `B_O`: strides of W and B. With OWN, w has that
    many experts, and v those behind them. Tiles of the same rows follow each other, so that x is read from the L2
    cache.
    """
    COLUMNS: tl.constexpr = (OUT + C - 1) // C
    tile = tl.program_id(0) // COLUMNS
    expert = tl.load(table + tile * 4)
    if expert < 0:
        return
    rows = tl.load(table + tile * 4 + 1) + tl.arange(0, M)
    inside = rows < tl.load(table + tile * 4 + 2)
    columns = tl.program_id(0) % COLUMNS * C + tl.arange(0, C)
    real = (columns < OUT)[None, :]
    source = rows
    if K > 0:
        source = tl.load(order + rows, mask=inside, other=0) // K
    source = source.to(tl.int64)
    rows = rows.to(tl.int64)
    expert = expert.to(tl.int64)
    acc = tl.zeros([M, C], tl.float32)
    if L > 0:
        ranks = tl.arange(0, L)
        place = expert * (OUT * L) + ranks[:, None] * B_L + columns[None, :] * B_O
        v = tl.load(u + rows[:, None] * u_row + ranks[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(v, tl.load(b0 + place, mask=real, other=0.0), acc)
        if DROP:
            acc = tl.where(kept(rows, columns, seed, key0, threshold, OUT), acc * inverse, 0.0)
        if S > 1:
            v = tl.load(u + rows[:, None] * u_row + L + ranks[None, :], mask=inside[:, None], other=0.0)
            if DROP:
                more = tl.dot(v, tl.load(b1 + place, mask=real, other=0.0))
                acc += tl.where(kept(rows, columns, seed, key1, threshold, OUT), more * inverse, 0.0)
            else:
                acc = tl.dot(v, tl.load(b1 + place, mask=real, other=0.0), acc)
        acc = acc * scale
    if OWN > 0:  # noqa: SIM102 - with `and` the branch would stay without OWN
        if expert >= OWN:
            w0 = v0
            w1 = v1
            expert = expert - OWN
    first = w0 + expert * (IN * OUT)
    acc = _rows_times(acc, x0, first, source, inside[:, None], columns, x_row, IN, OUT, W_I, W_O, B)
    if PAIRS > 1:
        second = w1 + expert * (IN * OUT)
        acc = _rows_times(acc, x1, second, source, inside[:, None], columns, x_row, IN, OUT, W_I, W_O, B)
    target = y + rows[:, None] * OUT + columns[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=inside[:, None] & real)


@triton.jit
def product_copied(
    x0,
    x1,
    w0,
    w1,
    v0,
    v1,
    u,
    b0,
    b1,
    order,
    table,
    y,
    seed,
    key0,
    key1,
    threshold,
    inverse,
    scale,
    x_row,
    u_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BACKWARD: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    PAIRS: tl.constexpr,
    OWN: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    DROP: tl.constexpr,
):
    """`product` where weights, and without K also x, are descriptors, whose tiles the copy engine brings.

    The weights are those of all experts as one matrix: [E·OUT, IN] or, with BACKWARD, [E·IN, OUT]. B divides IN.
    Columns past OUT and rows past the expert's last belong to another expert, and are not stored. With K there is one
    pair.
    """
    tl.static_assert(K == 0 or PAIRS == 1)
    COLUMNS: tl.constexpr = (OUT + C - 1) // C
    tile = tl.program_id(0) // COLUMNS
    expert = tl.load(table + tile * 4)
    if expert < 0:
        return
    first = tl.load(table + tile * 4 + 1)
    stop = tl.load(table + tile * 4 + 2)
    rows = first + tl.arange(0, M)
    inside = rows < stop
    column = tl.program_id(0) % COLUMNS * C
    columns = column + tl.arange(0, C)
    real = (columns < OUT)[None, :]
    acc = tl.zeros([M, C], tl.float32)
    if L > 0:
        ranks = tl.arange(0, L)
        B_L: tl.constexpr = OUT if BACKWARD else 1
        B_O: tl.constexpr = 1 if BACKWARD else L
        place = expert.to(tl.int64) * (OUT * L) + ranks[:, None] * B_L + columns[None, :] * B_O
        low = u + rows.to(tl.int64)[:, None] * u_row + ranks[None, :]
        v = tl.load(low, mask=inside[:, None], other=0.0)
        acc = tl.dot(v, tl.load(b0 + place, mask=real, other=0.0), acc)
        if DROP:
            acc = tl.where(kept(rows, columns, seed, key0, threshold, OUT), acc * inverse, 0.0)
        if S > 1:
            v = tl.load(low + L, mask=inside[:, None], other=0.0)
            if DROP:
                more = tl.dot(v, tl.load(b1 + place, mask=real, other=0.0))
                acc += tl.where(kept(rows, columns, seed, key1, threshold, OUT), more * inverse, 0.0)
            else:
                acc = tl.dot(v, tl.load(b1 + place, mask=real, other=0.0), acc)
        acc = acc * scale
    if OWN > 0:  # noqa: SIM102 - with `and` the branch would stay without OWN
        if expert >= OWN:
            w0 = v0
            w1 = v1
            expert = expert - OWN
    if K > 0:
        source = tl.load(order + rows, mask=inside, other=0) // K
        left = x0 + source.to(tl.int64)[:, None] * x_row + tl.arange(0, B)[None, :]
        for start in tl.range(0, IN, B):
            value = tl.load(left + start, mask=inside[:, None], other=0.0)
            if BACKWARD:
                acc = tl.dot(value, w0.load([expert * IN + start, column]), acc)
            else:
                acc = tl.dot(value, w0.load([expert * OUT + column, start]).T, acc)
    else:
        for start in tl.range(0, IN, B):
            value = x0.load([first, start])
            if BACKWARD:
                acc = tl.dot(value, w0.load([expert * IN + start, column]), acc)
            else:
                acc = tl.dot(value, w0.load([expert * OUT + column, start]).T, acc)
        if PAIRS > 1:
            for start in tl.range(0, IN, B):
                value = x1.load([first, start])
                if BACKWARD:
                    acc = tl.dot(value, w1.load([expert * IN + start, column]), acc)
                else:
                    acc = tl.dot(value, w1.load([expert * OUT + column, start]).T, acc)
    target = y + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=inside[:, None] & real)


@triton.jit
def _at_least(value, floor):
    """The larger one; a NaN stays."""
    return tl.where(value < floor, floor, value)


@triton.jit
def product_codes(
    x0,
    x1,
    w0,
    w1,
    sx0,
    sx1,
    sw0,
    sw1,
    u,
    b0,
    b1,
    order,
    table,
    y,
    scale,
    inverse,
    x_row,
    u_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    B_L: tl.constexpr,
    B_O: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    PAIRS: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    """`product` of codes E4M3: x and W have an inverse scale, a power of two, for each row.

    The weights of all experts are descriptors of one matrix [E·OUT, IN], and so is x without K. B divides IN. `inverse`
    is 1 / scale. With K there is one pair.
    """
    tl.static_assert(K == 0 or PAIRS == 1)
    COLUMNS: tl.constexpr = (OUT + C - 1) // C
    tile = tl.program_id(0) // COLUMNS
    expert = tl.load(table + tile * 4)
    if expert < 0:
        return
    first = tl.load(table + tile * 4 + 1)
    rows = first + tl.arange(0, M)
    inside = rows < tl.load(table + tile * 4 + 2)
    column = tl.program_id(0) % COLUMNS * C
    columns = column + tl.arange(0, C)
    real = columns < OUT
    source = rows
    if K > 0:
        source = tl.load(order + rows, mask=inside, other=0) // K
    source = source.to(tl.int64)
    acc = tl.zeros([M, C], tl.float32)
    if K > 0:
        left = x0 + source[:, None] * x_row + tl.arange(0, B)[None, :]
        for start in tl.range(0, IN, B):
            value = tl.load(left + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(value, w0.load([expert * OUT + column, start]).T, acc)
    else:
        for start in tl.range(0, IN, B):
            acc = tl.dot(x0.load([first, start]), w0.load([expert * OUT + column, start]).T, acc)
    place = expert.to(tl.int64) * OUT + columns
    rows_scale = tl.load(sx0 + source, mask=inside, other=1.0)
    columns_scale = tl.load(sw0 + place, mask=real, other=1.0)
    if PAIRS > 1:
        rows_next = tl.load(sx1 + source, mask=inside, other=1.0)
        columns_next = tl.load(sw1 + place, mask=real, other=1.0)
        # Zeros have the smallest of all scales, by which the quotients would overflow. 2^-40 of the first pair's scale
        # is far below what the sum keeps.
        rows_next = _at_least(rows_next, rows_scale * 9.094947017729282e-13)
        columns_next = _at_least(columns_next, columns_scale * 9.094947017729282e-13)
        acc = acc * (rows_scale / rows_next)[:, None] * (columns_scale / columns_next)[None, :]
        for start in tl.range(0, IN, B):
            acc = tl.dot(x1.load([first, start]), w1.load([expert * OUT + column, start]).T, acc)
        rows_scale = rows_next
        columns_scale = columns_next
    acc = acc * rows_scale[:, None] * columns_scale[None, :]
    rows = rows.to(tl.int64)
    if L > 0:
        ranks = tl.arange(0, L)
        low = u + rows[:, None] * u_row + ranks[None, :]
        high = expert.to(tl.int64) * (OUT * L) + ranks[:, None] * B_L + columns[None, :] * B_O
        acc = acc * inverse
        v = tl.load(low, mask=inside[:, None], other=0.0)
        acc = tl.dot(v, tl.load(b0 + high, mask=real[None, :], other=0.0), acc)
        if S > 1:
            v = tl.load(low + L, mask=inside[:, None], other=0.0)
            acc = tl.dot(v, tl.load(b1 + high, mask=real[None, :], other=0.0), acc)
        acc = acc * scale
    target = y + rows[:, None] * OUT + columns[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def round_rows(x, codes, inverse, rows, x_row, IN: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr):
    """`fp8_rows.quantise_rows` of M rows; WIDE is IN's next power of two."""
    mine = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.arange(0, WIDE)
    inside = (mine < rows)[:, None] & (columns < IN)[None, :]
    wide = mine.to(tl.int64)[:, None]
    value = tl.load(x + wide * x_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    # As integers, infinity and NaN are the largest.
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.minimum(tl.maximum(262 - ((largest + 0x1FFFFF) >> 23), 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(codes + wide * IN + columns[None, :], (value * scale[:, None]).to(tl.float8e4nv), mask=inside)
    found = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(inverse + mine, tl.where(largest < 0x7F800000, found, float("nan")), mask=mine < rows)


@triton.jit
def weight_factors(
    dy,
    x,
    ends,
    out,
    dy_row,
    x_row,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    """out[e, o, i] = Σ_r dy[r, o] x[r, i] over an expert's rows, in their order; zeros without rows."""
    COLUMNS: tl.constexpr = (IN + B - 1) // B
    outputs = tl.program_id(0) // COLUMNS * C + tl.arange(0, C)
    inputs = tl.program_id(0) % COLUMNS * B + tl.arange(0, B)
    expert = tl.program_id(1)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    acc = tl.zeros([C, B], tl.float32)
    for start in tl.range(begin, stop, M):
        rows = start + tl.arange(0, M)
        inside = (rows < stop)[:, None]
        wide = rows.to(tl.int64)[:, None]
        g = tl.load(dy + wide * dy_row + outputs[None, :], mask=inside & (outputs < OUT)[None, :], other=0.0)
        v = tl.load(x + wide * x_row + inputs[None, :], mask=inside & (inputs < IN)[None, :], other=0.0)
        acc = tl.dot(tl.trans(g), v, acc)
    target = out + expert.to(tl.int64) * (OUT * IN) + outputs[:, None] * IN + inputs[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(outputs < OUT)[:, None] & (inputs < IN)[None, :])
