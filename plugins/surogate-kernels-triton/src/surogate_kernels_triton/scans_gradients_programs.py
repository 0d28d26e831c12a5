"""The gradients of scans over the runs of packed rows, in Triton. Names as in `scans_programs`.

Those of states are carried back from chunk to chunk; all others need one chunk. Gradients of queries and keys have
programs of their own, which add over the heads that share a key, since registers hold no more.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from surogate_kernels_triton.scans_programs import (
    column_of,
    decays_between,
    decays_between_transposed,
    dot_of,
    read_state,
    square_of,
    state_of,
    tile_of,
    write_tile,
)


@triton.jit
def delta_value_gradients(
    q,
    k,
    dy,
    decay,
    table,
    places,
    dvalues,
    q_row,
    q_head,
    k_row,
    k_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dvalues [N, H, F]: the gradients of the new values of a chunk and a head, from the outputs of the same chunk."""
    D: tl.constexpr = dvalues.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        features = tl.arange(0, EP)
        queries = tile_of(q + head // SHARED * q_head, begin, real, q_row, features, E)
        keys = tile_of(k + head // SHARED * k_head, begin, real, k_row, features, E)
        g = column_of(decay, rows, real, H, head)
        weights = (dot_of(keys, tl.trans(queries), D, WIDE) * decays_between_transposed(g, C, D)).to(D)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            outer = tile_of(dy + head * F, begin, real, H * F, columns, F)
            write_tile(dvalues + head * F, dot_of(weights, outer, D, WIDE), begin, real, H * F, columns, F)


@triton.jit
def scan_state_gradients(
    q,
    k,
    dy,
    since,
    to_end,
    through,
    corrections,
    dvalues,
    borders,
    before,
    dfinals,
    dstates,
    dinitial,
    q_row,
    q_head,
    k_row,
    k_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Carries the gradient of the state of a run and a head back, FP columns of it: dstates [P, H, E, F], of the states
    that leave the chunks; dinitial [R, H, E, F], if wanted. Of the delta rule also dvalues [N, H, F]: from those of the
    same chunk's outputs to the whole.
    """
    D: tl.constexpr = dstates.dtype.element_ty
    parts: tl.constexpr = (F + FP - 1) // FP
    run = tl.program_id(0) // (H * parts)
    head = tl.program_id(0) // parts % H
    columns = tl.program_id(0) % parts * FP + tl.arange(0, FP)
    features = tl.arange(0, EP)
    begin = tl.load(borders + run)
    end = tl.load(borders + run + 1)
    place = tl.load(before + run)
    chunks = (end - begin + C - 1) // C
    state = tl.zeros([EP, FP], tl.float32)
    if dfinals is not None:
        state += read_state(dfinals, run * H + head, features, columns, E, F).to(tl.float32)
    # Decays are read a chunk ahead: all else waits for them.
    rows = begin + (chunks - 1) * C + tl.arange(0, C)
    real = (rows >= begin) & (rows < end)
    read = column_of(since, rows, real, H, head)
    rest = column_of(to_end, rows, real, H, head)
    whole = tl.load(through + (place + chunks - 1) * H + head, mask=begin < end, other=0.0)
    for done in range(chunks):
        number = chunks - 1 - done
        places, within = state_of(dstates, (place + number) * H + head, features, columns, E, F)
        tl.store(places, state.to(D), mask=within)
        start = begin + number * C
        rows = start + tl.arange(0, C)
        real = rows < end
        queries = tile_of(q + head // SHARED * q_head, start, real, q_row, features, E)
        outer = tile_of(dy + head * F, start, real, H * F, columns, F)
        earlier = rows - C
        next_read = column_of(since, earlier, earlier >= begin, H, head)
        next_rest = column_of(to_end, earlier, earlier >= begin, H, head)
        next_whole = tl.load(through + (place + number - 1) * H + head, mask=number > 0, other=0.0)
        found = dot_of(tl.trans(queries), read[:, None] * outer, D, WIDE)
        if DELTA:
            keys = tile_of(k + head // SHARED * k_head, start, real, k_row, features, E)
            new = tile_of(dvalues + head * F, start, real, H * F, columns, F).to(tl.float32)
            new += rest[:, None] * dot_of(keys, state, D, WIDE)
            write_tile(dvalues + head * F, new, start, real, H * F, columns, F)
            taken = tile_of(corrections + head * E, start, real, H * E, features, E)
            found -= dot_of(tl.trans(taken), new, D, WIDE)
        state = found + whole * state
        read = next_read
        rest = next_rest
        whole = next_whole
    if dinitial is not None:
        places, within = state_of(dinitial, run * H + head, features, columns, E, F)
        tl.store(places, state.to(dinitial.dtype.element_ty), mask=within)


@triton.jit
def scan_value_gradients(
    q,
    k,
    v,
    dy,
    decay,
    to_end,
    beta,
    inverses,
    values,
    dvalues,
    table,
    places,
    states,
    dstates,
    dscores,
    dlikeness,
    dv,
    ddecay,
    dbeta,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradients of the values of a chunk and a head; those of decays and rates as far as they come from products in
    the chunk [N, H]; and for `scan_key_gradients` dscores [P, H, C, C], those of q kᵀ. Of the delta rule also dlikeness
    [P, H, C, C], those of k kᵀ, symmetric, and dvalues [N, H, F]: from the gradients of the new values to those of the
    system's right side.
    """
    D: tl.constexpr = dscores.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        features = tl.arange(0, EP)
        g = column_of(decay, rows, real, H, head)
        rate = column_of(beta, rows, real, H, head)
        dweights = tl.zeros([C, C], tl.float32)
        dsystem = tl.zeros([C, C], tl.float32)
        drate = tl.zeros([C], tl.float32)
        if DELTA:
            inverse = tl.trans(tl.load(square_of(inverses, tl.program_id(0), C)))
            for first in range(0, F, FP):
                columns = first + tl.arange(0, FP)
                outer = tile_of(dy + head * F, begin, real, H * F, columns, F)
                new = tl.trans(tile_of(values + head * F, begin, real, H * F, columns, F))
                dnew = tile_of(dvalues + head * F, begin, real, H * F, columns, F)
                value = tile_of(v + head * v_head, begin, real, v_row, columns, F).to(tl.float32)
                # y = since · (q S) + (q kᵀ · between) new;  new = inverse · β (v − since · (k S))
                dweights += dot_of(outer, new, D, WIDE)
                dsystem += dot_of(dnew, new, D, WIDE)
                dnew = dot_of(inverse, dnew, D, WIDE)
                drate += tl.sum(dnew * value, 1)
                write_tile(dvalues + head * F, dnew, begin, real, H * F, columns, F)
                write_tile(dv + head * F, rate[:, None] * dnew, begin, real, H * F, columns, F)
            queries = tile_of(q + head // SHARED * q_head, begin, real, q_row, features, E)
            keys = tile_of(k + head // SHARED * k_head, begin, real, k_row, features, E)
        else:
            queries = tile_of(q + head // SHARED * q_head, begin, real, q_row, features, E)
            keys = tile_of(k + head // SHARED * k_head, begin, real, k_row, features, E)
            rest = column_of(to_end, rows, real, H, head)
            weights = dot_of(keys, tl.trans(queries), D, WIDE) * decays_between_transposed(g, C, D)
            weights = weights.to(D)
            for first in range(0, F, FP):
                columns = first + tl.arange(0, FP)
                dstate = read_state(dstates, tl.program_id(0), features, columns, E, F)
                outer = tile_of(dy + head * F, begin, real, H * F, columns, F)
                value = tile_of(v + head * v_head, begin, real, v_row, columns, F)
                # y = since · (q S) + (q kᵀ · between) (β v);  the state takes (to_end · k)ᵀ (β v)
                dweights += dot_of(outer, tl.trans(value), D, WIDE)
                dnew = rest[:, None] * dot_of(keys, dstate, D, WIDE) + dot_of(weights, outer, D, WIDE)
                drate += tl.sum(dnew * value.to(tl.float32), 1)
                write_tile(dv + head * F, rate[:, None] * dnew, begin, real, H * F, columns, F)
            dweights *= rate[None, :]
        between = decays_between(g, C, D)
        dweights *= between
        tl.store(square_of(dscores, tl.program_id(0), C), dweights.to(D))
        sums = tl.where(i > j, dweights * dot_of(queries, tl.trans(keys), D, WIDE), 0.0)
        if DELTA:
            likeness = dot_of(keys, tl.trans(keys), D, WIDE)
            dsystem = tl.where(i > j, -dot_of(inverse, dsystem, D, WIDE) * between, 0.0)
            drate += tl.sum(dsystem * likeness, 1)
            dsystem *= rate[:, None]
            sums += dsystem * likeness
            tl.store(square_of(dlikeness, tl.program_id(0), C), (dsystem + tl.trans(dsystem)).to(D))
        # Each decay counts the positions behind j up to i.
        if tl.float32 == D:
            dg = tl.sum(tl.where(i > j, tl.cumsum(sums, 0, reverse=True), 0.0), 1)
        else:
            # All pairs with i at this position or behind it, less those with j there too.
            dg = tl.cumsum(tl.sum(sums, 1) - tl.sum(sums, 0), 0, reverse=True)
        at = rows.to(tl.int64) * H + head
        tl.store(ddecay + at, dg, mask=real)
        tl.store(dbeta + at, drate, mask=real)


@triton.jit
def scan_key_gradients(
    q,
    k,
    v,
    dy,
    since,
    to_end,
    through,
    beta,
    inverses,
    values,
    dvalues,
    table,
    places,
    states,
    dstates,
    dscores,
    dlikeness,
    dq,
    dk,
    ddecay,
    dbeta,
    total,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradients of the queries and keys of a chunk and a head of keys, EP features of them, added over its heads of
    values in order. Also those features' part of the gradients of decays and rates as far as they come from states
    [parts, N, H], of `total` elements a part, behind those of `scan_value_gradients`: each product with a state is a
    product with q or k as well.
    """
    D: tl.constexpr = states.dtype.element_ty
    groups: tl.constexpr = H // SHARED
    parts: tl.constexpr = (E + EP - 1) // EP
    place = tl.program_id(0) // (groups * parts)
    group = tl.program_id(0) // parts % groups
    part = tl.program_id(0) % parts
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        features = part * EP + tl.arange(0, EP)
        dqueries = tl.zeros([C, EP], tl.float32)
        dkeys = tl.zeros([C, EP], tl.float32)
        for head in range(group * SHARED, (group + 1) * SHARED):
            number = place * H + head
            begun = column_of(since, rows, real, H, head)
            rest = column_of(to_end, rows, real, H, head)
            rate = column_of(beta, rows, real, H, head)
            at = rows.to(tl.int64) * H + head
            # Rows of dy Sᵀ, and of the gradients of the system's right side times Sᵀ.
            read = tl.zeros([C, EP], tl.float32)
            taken = tl.zeros([C, EP], tl.float32)
            for first in range(0, F, FP):
                columns = first + tl.arange(0, FP)
                state = tl.trans(read_state(states, number, features, columns, E, F))
                outer = tile_of(dy + head * F, begin, real, H * F, columns, F)
                read += dot_of(outer, state, D, WIDE)
                if DELTA:
                    dnew = tile_of(dvalues + head * F, begin, real, H * F, columns, F)
                    taken += dot_of(dnew, state, D, WIDE)
            queries = tile_of(q + group * q_head, begin, real, q_row, features, E)
            dsince = begun * tl.sum(queries.to(tl.float32) * read, 1)
            dqueries += begun[:, None] * read
            keys = tile_of(k + group * k_head, begin, real, k_row, features, E)
            if DELTA:
                drate = -begun * tl.sum(keys.to(tl.float32) * taken, 1)
                dsince += rate * drate
                dkeys -= (rate * begun)[:, None] * taken
                tl.store(dbeta + (part + 1) * total + at, drate, mask=real)
            # Rows of new dSᵀ.
            kept = tl.zeros([C, EP], tl.float32)
            dthrough = tl.zeros([EP], tl.float32)
            for first in range(0, F, FP):
                columns = first + tl.arange(0, FP)
                state = read_state(states, number, features, columns, E, F)
                dstate = read_state(dstates, number, features, columns, E, F)
                dthrough += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
                if DELTA:
                    new = tile_of(values + head * F, begin, real, H * F, columns, F)
                else:
                    new = tile_of(v + head * v_head, begin, real, v_row, columns, F)
                kept += dot_of(new, tl.trans(dstate), D, WIDE)
            if not DELTA:
                rest *= rate
            dto_end = rest * tl.sum(keys.to(tl.float32) * kept, 1)
            dkeys += rest[:, None] * kept
            # Positions since the beginning count all up to them, those up to the end all behind them.
            dg = tl.cumsum(dsince, 0, reverse=True) + tl.cumsum(dto_end, 0) - dto_end
            dg += tl.sum(dthrough, 0) * tl.load(through + number)
            tl.store(ddecay + (part + 1) * total + at, dg, mask=real)
            weights = tl.load(square_of(dscores, number, C))
            dqueries += dot_of(weights, keys, D, WIDE)
            dkeys += dot_of(tl.trans(weights), queries, D, WIDE)
            if DELTA:
                dkeys += dot_of(tl.load(square_of(dlikeness, number, C)), keys, D, WIDE)
        write_tile(dq + group * E, dqueries, begin, real, groups * E, features, E)
        write_tile(dk + group * E, dkeys, begin, real, groups * E, features, E)


@triton.jit
def add_parts(ddecays, dbetas, ddecay, dbeta, total, PARTS: tl.constexpr, DELTA: tl.constexpr, B: tl.constexpr):
    """ddecay and dbeta [N, H], `total` elements: sums of their parts in order. Without the delta rule a rate has
    one.
    """
    at = tl.program_id(0) * B + tl.arange(0, B)
    real = at < total
    decays = tl.load(ddecays + at, mask=real)
    betas = tl.load(dbetas + at, mask=real)
    for part in tl.static_range(1, PARTS):
        decays += tl.load(ddecays + part * total + at, mask=real)
        if DELTA:
            betas += tl.load(dbetas + part * total + at, mask=real)
    tl.store(ddecay + at, decays.to(ddecay.dtype.element_ty), mask=real)
    tl.store(dbeta + at, betas.to(dbeta.dtype.element_ty), mask=real)
