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
    decays_of,
    dot_of,
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
        queries = tile_of(q + head // SHARED * q_head, rows, real, q_row, features, E)
        keys = tile_of(k + head // SHARED * k_head, rows, real, k_row, features, E)
        g = column_of(decay, rows, real, H, head)
        weights = (dot_of(queries, tl.trans(keys), D, WIDE) * decays_between(g, C)).to(D)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            outer = tile_of(dy + head * F, rows, real, H * F, columns, F)
            write_tile(dvalues + head * F, dot_of(tl.trans(weights), outer, D, WIDE), rows, real, H * F, columns, F)


@triton.jit
def scan_state_gradients(
    q,
    k,
    dy,
    decay,
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
    edge, within = state_of(run * H + head, features, columns, E, F)
    state = tl.zeros([EP, FP], tl.float32)
    if dfinals is not None:
        state += tl.load(dfinals + edge, mask=within, other=0.0).to(tl.float32)
    for done in range(chunks):
        number = chunks - 1 - done
        where, within = state_of((place + number) * H + head, features, columns, E, F)
        tl.store(dstates + where, state.to(D), mask=within)
        rows = begin + number * C + tl.arange(0, C)
        real = rows < end
        queries = tile_of(q + head // SHARED * q_head, rows, real, q_row, features, E)
        outer = tile_of(dy + head * F, rows, real, H * F, columns, F)
        _g, since, to_end, through = decays_of(decay, rows, end, H, head, C)
        read = dot_of(tl.trans(queries), since[:, None] * outer, D, WIDE)
        if DELTA:
            keys = tile_of(k + head // SHARED * k_head, rows, real, k_row, features, E)
            new = tile_of(dvalues + head * F, rows, real, H * F, columns, F).to(tl.float32)
            new += to_end[:, None] * dot_of(keys, state, D, WIDE)
            write_tile(dvalues + head * F, new, rows, real, H * F, columns, F)
            taken = tile_of(corrections + head * E, rows, real, H * E, features, E)
            read -= dot_of(tl.trans(taken), new, D, WIDE)
        state = read + through * state
    if dinitial is not None:
        tl.store(dinitial + edge, state.to(dinitial.dtype.element_ty), mask=within)


@triton.jit
def scan_value_gradients(
    q,
    k,
    v,
    dy,
    decay,
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
    """The gradients of the values, decays and rates of a chunk and a head, and for `scan_key_gradients` dscores
    [P, H, C, C], those of q kᵀ. Of the delta rule also dlikeness [P, H, C, C], those of k kᵀ, symmetric, and dvalues
    [N, H, F]: from the gradients of the new values to those of k S.
    """
    D: tl.constexpr = states.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        square = tl.program_id(0).to(tl.int64) * (C * C) + i * C + j
        features = tl.arange(0, EP)
        queries = tile_of(q + head // SHARED * q_head, rows, real, q_row, features, E)
        keys = tile_of(k + head // SHARED * k_head, rows, real, k_row, features, E)
        g, since, to_end, through = decays_of(decay, rows, end, H, head, C)
        rate = column_of(beta, rows, real, H, head)
        between = decays_between(g, C)
        scores = dot_of(queries, tl.trans(keys), D, WIDE)
        dweights = tl.zeros([C, C], tl.float32)
        dsystem = tl.zeros([C, C], tl.float32)
        # Gradients of decays, times the decays: since the beginning, up to the end and through the chunk.
        dsince = tl.zeros([C], tl.float32)
        dto_end = tl.zeros([C], tl.float32)
        dthrough = 0.0
        drate = tl.zeros([C], tl.float32)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            where, within = state_of(tl.program_id(0), features, columns, E, F)
            state = tl.load(states + where, mask=within, other=0.0)
            dstate = tl.load(dstates + where, mask=within, other=0.0)
            value = tile_of(v + head * v_head, rows, real, v_row, columns, F).to(tl.float32)
            outer = tile_of(dy + head * F, rows, real, H * F, columns, F)
            kept = to_end[:, None] * dot_of(keys, dstate, D, WIDE)
            if DELTA:
                new = tile_of(values + head * F, rows, real, H * F, columns, F).to(tl.float32)
                dnew = tile_of(dvalues + head * F, rows, real, H * F, columns, F).to(tl.float32)
            else:
                new = rate[:, None] * value
                dnew = kept + dot_of(tl.trans(scores * between), outer, D, WIDE)
            # y = since · (q S) + (q kᵀ · between) new
            dweights += dot_of(outer, tl.trans(new.to(D)), D, WIDE)
            dsince += since * tl.sum(outer * dot_of(queries, state, D, WIDE), 1)
            # state = through · state + (to_end · k)ᵀ new
            dto_end += tl.sum(new * kept, 1)
            dthrough += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
            # new = inverse · β (v − since · (k S))
            if DELTA:
                dnew = dot_of(tl.trans(tl.load(inverses + square)), dnew, D, WIDE)
                dsystem -= dot_of(dnew, tl.trans(new.to(D)), D, WIDE)
                seen = since[:, None] * dot_of(keys, state, D, WIDE)
                value -= seen
                dseen = -rate[:, None] * dnew
                dsince += tl.sum(dseen * seen, 1)
                write_tile(dvalues + head * F, since[:, None] * dseen, rows, real, H * F, columns, F)
            drate += tl.sum(dnew * value, 1)
            write_tile(dv + head * F, rate[:, None] * dnew, rows, real, H * F, columns, F)
        dweights *= between
        tl.store(dscores + square, dweights.to(D))
        sums = dweights * scores
        if DELTA:
            likeness = dot_of(keys, tl.trans(keys), D, WIDE)
            dsystem = tl.where(i > j, dsystem * between, 0.0)
            drate += tl.sum(dsystem * likeness, 1)
            dsystem *= rate[:, None]
            sums += dsystem * likeness
            tl.store(dlikeness + square, (dsystem + tl.trans(dsystem)).to(D))
        # Each decay counts the positions behind j up to i.
        sums = tl.cumsum(tl.where(i > j, sums, 0.0), 0, reverse=True)
        dg = tl.sum(tl.where(i > j, sums + dto_end[None, :], 0.0), 1)
        dg += tl.cumsum(dsince, 0, reverse=True) + dthrough * through
        at = rows.to(tl.int64) * H + head
        tl.store(ddecay + at, dg.to(ddecay.dtype.element_ty), mask=real)
        tl.store(dbeta + at, drate.to(dbeta.dtype.element_ty), mask=real)


@triton.jit
def scan_key_gradients(
    q,
    k,
    v,
    dy,
    decay,
    beta,
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
    """The gradients of the queries and keys of a chunk and a head of keys, added over its heads of values in order."""
    D: tl.constexpr = states.dtype.element_ty
    groups: tl.constexpr = H // SHARED
    place = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        features = tl.arange(0, EP)
        queries = tile_of(q + group * q_head, rows, real, q_row, features, E)
        keys = tile_of(k + group * k_head, rows, real, k_row, features, E)
        dqueries = tl.zeros([C, EP], tl.float32)
        dkeys = tl.zeros([C, EP], tl.float32)
        for head in range(group * SHARED, (group + 1) * SHARED):
            number = place * H + head
            square = number.to(tl.int64) * (C * C) + i * C + j
            weights = tl.load(dscores + square)
            dqueries += dot_of(weights, keys, D, WIDE)
            dkeys += dot_of(tl.trans(weights), queries, D, WIDE)
            if DELTA:
                dkeys += dot_of(tl.load(dlikeness + square), keys, D, WIDE)
            _g, since, to_end, _through = decays_of(decay, rows, end, H, head, C)
            for first in range(0, F, FP):
                columns = first + tl.arange(0, FP)
                where, within = state_of(number, features, columns, E, F)
                state = tl.trans(tl.load(states + where, mask=within, other=0.0))
                outer = tile_of(dy + head * F, rows, real, H * F, columns, F)
                dqueries += dot_of(since[:, None] * outer, state, D, WIDE)
                if DELTA:
                    new = tile_of(values + head * F, rows, real, H * F, columns, F)
                    dseen = tile_of(dvalues + head * F, rows, real, H * F, columns, F)
                    dkeys += dot_of(dseen, state, D, WIDE)
                else:
                    rate = column_of(beta, rows, real, H, head)
                    new = rate[:, None] * tile_of(v + head * v_head, rows, real, v_row, columns, F).to(tl.float32)
                dstate = tl.trans(tl.load(dstates + where, mask=within, other=0.0))
                dkeys += dot_of(to_end[:, None] * new, dstate, D, WIDE)
        write_tile(dq + group * E, dqueries, rows, real, groups * E, features, E)
        write_tile(dk + group * E, dkeys, rows, real, groups * E, features, E)
