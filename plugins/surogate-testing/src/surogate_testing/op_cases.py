"""Inputs for ops, and the definitions of the ops in float64, differentiated by autograd.

These are the textbook formulas; nothing is shared with `surogate_core.kernels`. Shapes: N tokens, H heads, E features
of a head, D features, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# One thread: tensors this small are finished before a second thread wakes up, and waiting for it is slow on busy cores.
torch.set_num_threads(1)

Op = Callable[..., Tensor]

BOUNDS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2}
"""Largest error over the largest value of a tensor."""


# ------------------------------------------------------------------------- definitions


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_once: bool = False) -> Tensor:
    """x_ND over the root of its mean square and eps, times offset + weight_D."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int = 1, gate_first: bool = False
) -> Tensor:
    """rms_norm of each group of x, times silu(gate) behind the norm or before it."""
    silu = gate / (1 + torch.exp(-gate))
    x = x * silu if gate_first else x
    normed = torch.cat([rms_norm(part, torch.ones_like(part[..., 0, None]), eps) for part in x.chunk(groups, -1)], -1)
    return normed * weight * (1 if gate_first else silu)


def squared_relu(x: Tensor) -> Tensor:
    """x² where x is positive, otherwise 0."""
    return torch.where(x > 0, x * x, torch.zeros_like(x))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return gate / (1 + torch.exp(-gate)) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up, by the formula with tanh."""
    return 0.5 * gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) · gate · sigmoid(alpha · gate), gate at most limit and up within ±limit."""
    gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
    up = torch.where(up.abs() > limit, limit * up.sign(), up)
    return (up + 1) * gate / (1 + torch.exp(-alpha * gate))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A complex rotation of (x_i, x_{i + E/2}) of x [N, H, E]; cos and sin are [N, E/2]."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos.to(x.dtype), sin.to(x.dtype))[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """loss_N of logits_NV; 0 where the label is -100."""
    return torch.stack(
        [
            row.sum() * 0 if label == -100 else -row.log_softmax(0)[label]
            for row, label in zip(logits, labels.tolist(), strict=True)
        ]
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[N, H, F], one document, one head, one position at a time; k and v may have fewer heads."""
    groups = q.shape[1] // k.shape[1]
    borders = cu_seqlens.tolist()
    rows: list[Tensor] = []
    for start, stop in pairwise(borders):
        for t in range(start, stop):
            first = max(start, t + 1 - window) if window else start
            heads = []
            for h in range(q.shape[1]):
                scores = (k[first : t + 1, h // groups] @ q[t, h]) * scale
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                powers = (scores - scores.max().detach()).exp()
                below = powers.sum()
                if sinks is not None:
                    below = below + (sinks[h] - scores.max().detach()).exp()
                heads.append(powers / below @ v[first : t + 1, h // groups])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, borders: Tensor, initial: Tensor, *, delta: bool
) -> tuple[Tensor, Tensor]:
    """(y [N, H, F], the states behind the runs [R, H, E, F]) of a linear recurrence, one position at a time.

    With `delta` a value is what the state does not yet return for its key; q and k may have fewer heads than v.
    """
    shared = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
    rows, states = [], []
    for run, (start, stop) in enumerate(pairwise(borders.tolist())):
        state = initial[run]
        for t in range(start, stop):
            state = decay[t].exp()[:, None, None] * state
            new = v[t] - torch.einsum("hef,he->hf", state, k[t]) if delta else v[t]
            state = state + torch.einsum("he,hf,h->hef", k[t], new, beta[t])
            rows.append(torch.einsum("hef,he->hf", state, q[t]))
        states.append(state)
    return torch.stack(rows), torch.stack(states)


def gated_delta(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The scan of (q, k, v, decay, beta, borders, initial) with the delta rule."""
    return scan(*tensors, delta=True)


def ssd(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, dt: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """The scan of the inputs x with keys b and queries c."""
    return scan(c, b, x, decay, dt, *rest, delta=False)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, borders: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """(y [N, C], the last W - 1 inputs of each run), one position at a time."""
    rows, states = [], []
    width = weight.shape[1]
    for run, (start, stop) in enumerate(pairwise(borders.tolist())):
        seen = torch.cat((initial[run], x[start:stop]))
        for t in range(stop - start):
            rows.append(bias + sum(weight[:, tap] * seen[t + tap] for tap in range(width)))
        states.append(seen[len(seen) - width + 1 :])
    return torch.stack(rows), torch.stack(states)


# --------------------------------------------------------------------------- comparison


@dataclass
class Compared:
    """Outputs and gradients of an implementation and of the definition."""

    values: list[Tensor]
    expected: list[Tensor]

    def error(self, *, at_least: Sequence[float] = ()) -> float:
        """The largest error over the largest value, over all tensors.

        `at_least[i]`: a size of tensor i below which its errors do not count as relative, for
        differences of terms of that size that nearly cancel.
        """
        sizes = [*at_least, *[0.0] * (len(self.values) - len(at_least))]
        return max(_error(a, b, size) for a, b, size in zip(self.values, self.expected, sizes, strict=True))


def _error(value: Tensor, expected: Tensor, at_least: float) -> float:
    assert value.shape == expected.shape
    assert torch.isfinite(value).all(), "not finite where the definition is"
    size = max(float(expected.abs().max()), at_least)
    return float((value.double() - expected).abs().max()) / (size if size > 0 else 1.0)


def compare(op: Op, definition: Op, tensors: Sequence[Tensor], *rest: object, dy_seed: int = 5) -> Compared:
    """Run both forward and backward; floating `tensors` are differentiated."""
    mine = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    y, expected = op(*mine, *rest), definition(*wide, *rest)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(dy_seed)).to(y.dtype)
    leaves = [t for t in mine if t.requires_grad]
    grads = torch.autograd.grad(y, leaves, dy.to(y.device))
    wide_grads = torch.autograd.grad(expected, [t for t in wide if t.requires_grad], dy.double().to(expected.device))
    assert all(g.dtype == t.dtype for g, t in zip(grads, leaves, strict=True))
    return Compared([y.detach(), *grads], [expected.detach(), *wide_grads])


def random(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values, drawn in float64 on the CPU."""
    value = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (value * scale).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values in a layout that is not contiguous: every other element of a transposed buffer."""
    buffer = torch.full((*x.shape[::-1], 2), float("nan") if x.is_floating_point() else 0, dtype=x.dtype)
    view = buffer[..., 0].permute(*reversed(range(x.ndim)))
    view.copy_(x)
    return view
