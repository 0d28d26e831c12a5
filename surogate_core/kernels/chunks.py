"""The arithmetic of scans: linear recurrences over the runs of packed rows, chunk by chunk, and their gradients.

A state S [E, F] of each head is read and changed by every position of a run:

    S ← exp(g) S;   n = β (v − Sᵀ k)  (delta rule)  or  n = β v;   S ← S + k nᵀ;   y = Sᵀ q

Inside a chunk of C positions this is a triangular system and a few products; only the state passes from chunk to chunk
(arXiv 2412.06464 for the delta rule, arXiv 2405.21060 without it). Chunks are counted from the beginning of a run.
Shapes depend on the numbers of rows, runs and C alone, and nothing is read on the host, so a CUDA graph can contain it.
Shape suffixes: N rows, R runs, P places of chunks, C positions of a chunk, H heads, E features of a key, F of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the rows of runs are in a table of chunks. Chunks without a run are behind all others."""

    row_PC: Tensor
    """int64: the row at each position of each chunk; any row where there is none."""
    real_PC: Tensor
    """bool: whether there is a row."""
    place_N: Tensor
    """int64: the position of each row in the flattened table."""
    run_P: Tensor
    """int64: the run of each chunk."""
    first_P: Tensor
    """bool: the first chunk of its run."""
    last_P: Tensor
    """bool: the last chunk of its run."""
    first_R: Tensor
    """int64: the first chunk of each run; any chunk for an empty run."""
    last_R: Tensor
    """int64: likewise the last one."""
    empty_R: Tensor
    """bool: the runs without a row."""

    @classmethod
    def of(cls, borders: Tensor, rows: int, chunk: int) -> Places:
        """`borders`: [R + 1] from 0 to `rows`, which is not 0."""
        borders = borders.long()
        runs = len(borders) - 1
        count = places_of(rows, runs, chunk)
        begin_R, end_R = borders[:-1].contiguous(), borders[1:].contiguous()
        chunks_R = (end_R - begin_R + chunk - 1) // chunk
        behind_R = chunks_R.cumsum(0)
        before_R = behind_R - chunks_R
        chunk_P = torch.arange(count, device=borders.device)
        run_P = torch.searchsorted(behind_R, chunk_P, right=True)
        used_P = run_P < runs
        run_P = run_P.clamp(max=runs - 1)
        inside_C = torch.arange(chunk, device=borders.device)
        row_PC = (begin_R[run_P] + (chunk_P - before_R[run_P]) * chunk)[:, None] + inside_C
        row_N = torch.arange(rows, device=borders.device)
        run_N = torch.searchsorted(end_R, row_N, right=True)
        return cls(
            row_PC=row_PC.clamp(0, rows - 1),
            real_PC=(row_PC < end_R[run_P][:, None]) & used_P[:, None],
            place_N=before_R[run_N] * chunk + row_N - begin_R[run_N],
            run_P=run_P,
            first_P=used_P & (chunk_P == before_R[run_P]),
            last_P=used_P & (chunk_P == behind_R[run_P] - 1),
            first_R=before_R.clamp(max=count - 1),
            last_R=(behind_R - 1).clamp(min=0),
            empty_R=chunks_R == 0,
        )

    def chunks(self, x_NH: Tensor, dtype: torch.dtype) -> Tensor:
        """[P, H, C, …] of [N, H, …], with zeros where there is no row."""
        x_PCH = x_NH[self.row_PC]
        absent = ~self.real_PC.view(*self.real_PC.shape, *[1] * (x_NH.ndim - 1))
        return x_PCH.masked_fill(absent, 0).to(dtype).transpose(1, 2).contiguous()

    def rows(self, x_PHC: Tensor) -> Tensor:
        """[N, H, …] of [P, H, C, …]."""
        return x_PHC.transpose(1, 2).flatten(0, 1)[self.place_N]

    def states(self, x_PHEF: Tensor, edge_RHEF: Tensor | None, *, entering: bool) -> Tensor:
        """[P, H, E, F]: the states that enter the chunks, of those that leave them, or the reverse.

        `edge_RHEF`: the states at the border of the runs; zeros without them.
        """
        zero = torch.zeros_like(x_PHEF[:1])
        moved = torch.cat((zero, x_PHEF[:-1]) if entering else (x_PHEF[1:], zero))
        at_edge = (self.first_P if entering else self.last_P)[:, None, None, None]
        return torch.where(at_edge, 0.0 if edge_RHEF is None else edge_RHEF[self.run_P], moved)

    def edge(self, number: int, state_HEF: Tensor, edge_RHEF: Tensor | None, *, entering: bool) -> Tensor:
        """[H, E, F]: `states` of one chunk, of the state that leaves the one before it, or enters the one behind."""
        at_edge = (self.first_P if entering else self.last_P)[number]
        if edge_RHEF is None:
            return state_HEF.masked_fill(at_edge, 0.0)
        return torch.where(at_edge, edge_RHEF.index_select(0, self.run_P[number : number + 1])[0], state_HEF)

    def finals(self, x_PHEF: Tensor, edge_RHEF: Tensor | None, *, entering: bool) -> Tensor:
        """[R, H, E, F]: the states that leave the runs, of those that leave the chunks, or the reverse.

        An empty run passes its state at the other border on.
        """
        found = x_PHEF[self.first_R if entering else self.last_R]
        empty = self.empty_R[:, None, None, None]
        return torch.where(empty, 0.0 if edge_RHEF is None else edge_RHEF, found)


def places_of(rows: int, runs: int, chunk: int) -> int:
    """The number of chunks of these runs at most."""
    return min(rows, (rows + runs * (chunk - 1)) // chunk)


def _unit_inverse(a: Tensor) -> Tensor:
    """(1 + a)⁻¹ of strictly lower triangular matrices [..., C, C].

    Inverses of the blocks on the diagonal are joined to inverses of blocks twice as large. That is as stable as
    substitution, other than a product of powers of a, whose values cancel.
    """
    size, rows = 1, a.shape[-1]
    whole = 1 << (rows - 1).bit_length()
    a = torch.nn.functional.pad(a, (0, whole - rows, 0, whole - rows))
    found = a.new_ones(*a.shape[:-2], whole, 1, 1)
    while size < whole:
        pairs = whole // (2 * size)
        blocks = a.unflatten(-1, (pairs, 2 * size)).unflatten(-3, (pairs, 2 * size)).diagonal(dim1=-4, dim2=-2)
        below = blocks.movedim(-1, -3)[..., size:, :size]
        upper, lower = found[..., 0::2, :, :], found[..., 1::2, :, :]
        joined = a.new_zeros(*a.shape[:-2], pairs, 2 * size, 2 * size)
        joined[..., :size, :size] = upper
        joined[..., size:, size:] = lower
        joined[..., size:, :size] = -(lower @ (below @ upper))
        found, size = joined, 2 * size
    return found[..., 0, :rows, :rows].contiguous()


def _decays(g_PHC: Tensor) -> Tensor:
    """[P, H, C, C]: exp of the sum of g over the positions behind j up to i, for j ≤ i; 0 elsewhere.

    Each is a sum of its own. The difference of two sums from the beginning would lose small ones beside a large one.
    """
    size = g_PHC.shape[-1]
    behind = torch.ones(size, size, dtype=torch.bool, device=g_PHC.device).tril(-1)
    sums = g_PHC[..., None].expand(*g_PHC.shape, size).masked_fill(~behind, 0).cumsum(-2)
    return sums.exp().tril()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A scan over chunks, [P, H, C, …], before its states are known."""

    places: Places
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    """[P, H, C, 1]."""
    between: Tensor
    """[P, H, C, C]: decay from the position j to the position i."""
    since: Tensor
    """[P, H, C, 1]: decay since the beginning of the chunk."""
    inverse: Tensor | None
    """[P, H, C, C]: of the system of the delta rule."""
    initial: Tensor | None

    @classmethod
    def of(
        cls,
        rows: Sequence[Tensor],
        borders: Tensor,
        initial: Tensor | None,
        chunk: int,
        delta: bool,
    ) -> Scan:
        """`rows`: q_NHE, k_NHE, v_NHF, g_NH, beta_NH; a key or query may have fewer heads than the value."""
        dtype = state_dtype(rows[2])
        places = Places.of(borders, rows[2].shape[0], chunk)
        heads = rows[2].shape[1]
        q, k, v, g, beta = (places.chunks(_of_heads(x, heads), dtype) for x in rows)
        beta, between = beta[..., None], _decays(g)
        inverse = _unit_inverse((beta * (k @ k.mT) * between).tril(-1)) if delta else None
        return cls(
            places=places,
            q=q,
            k=k,
            v=v,
            beta=beta,
            between=between,
            since=g.cumsum(-1).exp()[..., None],
            inverse=inverse,
            initial=None if initial is None else initial.to(dtype),
        )

    @property
    def keys_to_end(self) -> Tensor:
        """[P, H, C, E]: the keys, decayed up to the end of the chunk."""
        return self.k * self.between[..., -1, :, None]

    @property
    def corrections(self) -> Tensor | None:
        """[P, H, C, E]: what the delta rule takes of the state that enters the chunk."""
        return None if self.inverse is None else self.inverse @ (self.beta * self.since * self.k)

    def forward(self) -> tuple[Tensor, Tensor]:
        """(new values [P, H, C, F], states that leave the chunks [P, H, E, F])."""
        new = self.beta * self.v
        if self.inverse is not None:
            new = self.inverse @ new
        keys, corrections = self.keys_to_end.mT, self.corrections
        through = self.since[..., -1:, :]
        leaving = new.new_empty(*new.shape[:2], keys.shape[2], new.shape[3])
        state = torch.zeros_like(leaving[0])
        for number in range(len(leaving)):
            state = self.places.edge(number, state, self.initial, entering=True)
            if corrections is not None:
                new[number] -= corrections[number] @ state
            state = torch.add(keys[number] @ new[number], through[number] * state, out=leaving[number])
        return new, leaving

    def outputs(self, new: Tensor, leaving: Tensor) -> Tensor:
        """[P, H, C, F]: what the queries read."""
        entering = self.places.states(leaving, self.initial, entering=True)
        return self.since * (self.q @ entering) + (self.q @ self.k.mT * self.between) @ new

    def backward_states(self, dy: Tensor, dfinals: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the new values and of the states that leave and enter the chunks."""
        dnew = (self.q @ self.k.mT * self.between).mT @ dy
        read = (self.since * self.q).mT @ dy
        keys, corrections = self.keys_to_end, self.corrections
        through = self.since[..., -1:, :]
        dentering = torch.empty_like(read)
        dstate = torch.zeros_like(read[0])
        for number in reversed(range(len(read))):
            dstate = self.places.edge(number, dstate, dfinals, entering=False)
            dnew[number] += keys[number] @ dstate
            dstate = torch.add(read[number], through[number] * dstate, out=dentering[number])
            if corrections is not None:
                dstate -= corrections[number].mT @ dnew[number]
        return dnew, self.places.states(dentering, dfinals, entering=False), dentering

    def backward(self, dy: Tensor, dfinals: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """(gradients of q, k, v, g, β in chunks, gradient of the initial states)."""
        new, leaving = self.forward()
        dnew, dleaving, dentering = self.backward_states(dy, dfinals)
        dinitial = self.places.finals(dentering, dfinals, entering=True)
        entering = self.places.states(leaving, self.initial, entering=True)
        # y = since · (q S) + (q kᵀ · between) new
        read, scores = self.q @ entering, self.q @ self.k.mT
        dweights = dy @ new.mT
        dscores = dweights * self.between
        dq = self.since * (dy @ entering.mT) + dscores @ self.k
        dk = dscores.mT @ self.q
        dbetween, dsince = dweights * scores, (dy * read).sum(-1)
        # state = since[-1] · state + (between[-1] · k)ᵀ new
        of_keys = new @ dleaving.mT
        dk += self.between[..., -1, :, None] * of_keys
        dbetween[..., -1, :] += (self.k * of_keys).sum(-1)
        dsince[..., -1] += (entering * dleaving).sum((-1, -2))
        # new = inverse · β (v − since · (k S))
        dright = dnew
        known = self.v
        if self.inverse is not None:
            dright = self.inverse.mT @ dnew
            seen = self.k @ entering
            known = self.v - self.since * seen
            dseen = -self.beta * dright
            dk += (self.since * dseen) @ entering.mT
            dsince += (dseen * seen).sum(-1)
        dv, dbeta = self.beta * dright, (dright * known).sum(-1)
        if self.inverse is not None:
            dsystem = -(dright @ new.mT).tril(-1)
            likeness = self.k @ self.k.mT
            dbeta += (dsystem * likeness * self.between).sum(-1)
            dlikeness = dsystem * self.beta * self.between
            dk += (dlikeness + dlikeness.mT) @ self.k
            dbetween += dsystem * self.beta * likeness
        return (dq, dk, dv, self._ddecay(dbetween, dsince), dbeta), dinitial

    def _ddecay(self, dbetween: Tensor, dsince: Tensor) -> Tensor:
        """[P, H, C]: every decay counts the positions behind j up to i; of g_l those with j < l ≤ i."""
        sums = (dbetween * self.between).tril(-1)
        behind = sums.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
        return behind + (dsince * self.since[..., 0]).flip(-1).cumsum(-1).flip(-1)


def state_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the states of these rows: fp32; float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def only(states: Sequence[Tensor] | None) -> Tensor | None:
    """The state of a scan that has one."""
    if states is None:
        return None
    (state,) = states
    return state


def _of_heads(x_NG: Tensor, heads: int) -> Tensor:
    """[N, H, …] of [N, G, …]: each of the G is used by H/G heads beside each other."""
    return x_NG if x_NG.shape[1] == heads else x_NG.repeat_interleave(heads // x_NG.shape[1], dim=1)
