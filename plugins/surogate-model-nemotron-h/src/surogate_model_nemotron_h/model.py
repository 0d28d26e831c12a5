"""Nemotron-H (arXiv 2504.03624): every layer is one mixer, a Mamba-2 scan, attention, a feed-forward or experts.

Attention has no rotary embedding: the scans know the positions. Shape suffixes: N tokens, D model features, H heads of
a scan, P features of a head, G groups of heads, S features of a state for each of them, C = H·P + 2·G·S channels of the
convolution, E experts, K experts of a token, R = N·K rows sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from surogate_core.plugin import UserError, compute, decoder, dsl, ops

D, F = decoder.D, decoder.F
EPS = dsl.Setting("layer_norm_epsilon", default=1e-5)
H, P = dsl.Dim("mamba_num_heads"), dsl.Dim("mamba_head_dim")
G, S = dsl.Dim("n_groups"), dsl.Dim("ssm_state_size")
C = H * P + G * S + G * S
WIDTH = 4
"""Positions of the convolution."""
LARGEST_RATE = 80.0
"""Larger logarithms of decay rates count as this one: e^80 leaves nothing of a state, and e^89 is infinite in fp32."""
E, K = dsl.Dim("n_routed_experts"), dsl.Dim("num_experts_per_tok")
I, SHARED = dsl.Dim("moe_intermediate_size"), dsl.Dim("moe_shared_expert_intermediate_size")  # noqa: E741
BIAS, MLP_BIAS = dsl.Setting("use_bias", default=False), dsl.Setting("mlp_bias", default=False)
UP, DOWN = "mixer.experts.{e}.up_proj", "mixer.experts.{e}.down_proj"
PREFIX = "backbone.layers.{i}."
OWN = "Fix: use the model's own config.json."

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
"""Kinds of layers by their letters in ``hybrid_override_pattern``."""
OLDER = {"mamba": MAMBA, "attention": ATTENTION}
"""Names that files from before transformers 5.24 have in ``layers_block_type``."""
RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
"""Keys of some files → their names here, as transformers reads them."""


class MixerBlock(dsl.Block):
    """What the layers share: a norm before the mixer, whose result is added to the rows."""

    eps = EPS
    norm = dsl.Param("norm.weight", D)

    def normed(self, x_ND: Tensor) -> Tensor:
        """[N, D]: the rows that the mixer reads."""
        return ops.rms_norm(x_ND, self.norm, self.eps, rounds_once=True)


def time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the largest time step of a scan. `UserError` for what is no such pair."""
    given = config["time_step_limit"]
    if isinstance(given, list | tuple) and len(given) == 2:
        # transformers 5 writes infinity as {"__float__": "Infinity"}.
        parts: list[Any] = [one.get("__float__") if isinstance(one, Mapping) else one for one in given]
        try:
            low, high = (float(one) for one in parts if not isinstance(one, bool))
        except (TypeError, ValueError):
            low, high = math.nan, math.nan
        if 0 <= low < high:
            return low, high
    raise UserError(f"config.json: `time_step_limit` is {given!r}, and must be two growing numbers from 0 on. {OWN}")


def _counted(u: Tensor) -> Tensor:
    """log of 1, 2, 3 …: the decay rates of the heads before training."""
    return torch.arange(1, len(u) + 1, dtype=u.dtype, device=u.device).log()


def _first_steps(config: Mapping[str, Any]) -> Any:
    """The biases whose softplus are time steps from ``time_step_min`` to ``time_step_max``."""
    low = max(config["time_step_min"], config["time_step_floor"])
    steps = dsl.inits.log_uniform(low, config["time_step_max"])
    assert not isinstance(steps, str)
    return dsl.inits.softplus_inverse(steps)


class PlainMambaBlock(MixerBlock):
    """A layer with a Mamba-2 scan (arXiv 2405.21060), whose convolution has no bias."""

    heads, features, groups, state = H, P, G, S
    in_proj = dsl.Linear("mixer.in_proj", D, H * P + C + H, region="qkv", bias=BIAS)
    kernel = dsl.Param("mixer.conv1d.weight", C, 1, WIDTH, init=dsl.inits.uniform(-0.5, 0.5), role="weight")
    kernel_bias: dsl.Param | None = None
    step_bias = dsl.Param(
        "mixer.dt_bias", H, init=dsl.Setting("_first_steps", default=_first_steps), role="scalar", dtype="fp32"
    )
    rate = dsl.Param("mixer.A_log", H, init=_counted, role="scalar", dtype="fp32")
    skip = dsl.Param("mixer.D", H, role="scalar", dtype="fp32")
    gated_norm = dsl.Param("mixer.norm.weight", H * P)
    out_proj = dsl.Linear("mixer.out_proj", H * P, D, region="att", bias=BIAS)
    conv = dsl.Convolution(C, WIDTH)
    scan = dsl.Recurrence(compute.ssd_scan, (H, S, P))

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        inner, states = self.heads * self.features, self.groups * self.state
        gate_ND, x_NC, steps_NH = self.in_proj(self.normed(x)).split([inner, inner + 2 * states, self.heads], dim=1)
        x_NC = silu(self.conv(x_NC, weight_CW=self.kernel.squeeze(1), bias_C=self.kernel_bias))
        x_NHP, b_NGS, c_NGS = (
            part.unflatten(1, (count, -1))
            for part, count in zip(
                x_NC.split([inner, states, states], dim=1), (self.heads, self.groups, self.groups), strict=True
            )
        )
        steps_NH = self.limited(softplus(ops.wide(steps_NH) + self.step_bias))
        y_NHP = self.scan(x_NHP, b_NGS, c_NGS, -steps_NH * self.rate.clamp(max=LARGEST_RATE).exp(), steps_NH)
        y_NHP = (ops.wide(y_NHP) + self.skip[:, None] * ops.wide(x_NHP)).to(x.dtype)
        y_ND = ops.gated_rms_norm(
            y_NHP.flatten(1), gate_ND, self.gated_norm, self.eps, groups=self.groups, gate_first=True
        )
        return x + self.out_proj(y_ND)

    def limited(self, steps_NH: Tensor) -> Tensor:
        """The time steps within their limits."""
        low, high = time_step_limit(self.config)
        # A softplus is positive.
        return steps_NH if (low, high) == (0, math.inf) else steps_NH.clamp(low, high)


class MambaBlock(PlainMambaBlock):
    """The same with a bias of the convolution."""

    kernel_bias = dsl.Param("mixer.conv1d.bias", C, init="zeros", role="scalar")


class AttentionMixerBlock(MixerBlock):
    """A layer with attention without a rotary embedding."""

    q = dsl.Linear("mixer.q_proj", D, decoder.H * decoder.E, region="qkv")
    k = dsl.Linear("mixer.k_proj", D, decoder.K * decoder.E, region="qkv")
    v = dsl.Linear("mixer.v_proj", D, decoder.K * decoder.E, region="qkv")
    o = dsl.Linear("mixer.o_proj", decoder.H * decoder.E, D, region="att")
    attend = dsl.Attention(decoder.H, decoder.K, decoder.E)
    head_dim = decoder.E

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        h_ND = self.normed(x)
        q_NHE, k_NKE, v_NKE = (slot(h_ND).unflatten(1, (-1, self.head_dim)) for slot in (self.q, self.k, self.v))
        return x + self.o(self.attend(q_NHE, k_NKE, v_NKE).flatten(1))


class MlpBlock(MixerBlock):
    """A layer with a feed-forward without a gate."""

    up = dsl.Linear("mixer.up_proj", D, F, region="ffn", bias=MLP_BIAS)
    down = dsl.Linear("mixer.down_proj", F, D, region="ffn", bias=MLP_BIAS)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        return x + self.down(ops.squared_relu(self.up(self.normed(x))))


class ExpertsBlock(MixerBlock):
    """A layer with experts, and one more that every token uses.

    Scores are sigmoids. The correction bias, which no run trains, takes part in the choice, not in the weights.
    """

    choices, renormalise = K, dsl.Setting("norm_topk_prob", default=True)
    groups, group_choices = dsl.Dim("n_group"), dsl.Dim("topk_group")
    scale = dsl.Setting("routed_scaling_factor", default=1.0)
    router = dsl.Param("mixer.gate.weight", E, D, init="normal", role="router", dtype="fp32")
    correction = dsl.Param(
        "mixer.gate.e_score_correction_bias", E, init="zeros", role="router", dtype="fp32", trained=False
    )
    up = dsl.Experts(UP, E, K, D, I, region="ffn", fused="mixer.experts.up_proj")
    down = dsl.Experts(DOWN, E, K, I, D, region="ffn", fused="mixer.experts.down_proj")
    shared_up = dsl.Linear("mixer.shared_experts.up_proj", D, SHARED, region="ffn", bias=MLP_BIAS)
    shared_down = dsl.Linear("mixer.shared_experts.down_proj", SHARED, D, region="ffn", bias=MLP_BIAS)
    tokens, probability, z, mass = dsl.router_sides(E)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D], and what the router reports."""
        h_ND = self.normed(x)
        logits_NE = ops.wide(h_ND) @ self.router.t()
        routes = dsl.Routes.of(
            logits_NE,
            self.choices,
            renormalise=self.renormalise,
            sigmoid=True,
            correction_E=self.correction,
            groups=self.groups,
            group_choices=self.group_choices,
            scale=float(self.scale),
        )
        y_ND = dsl.mixture(h_ND, routes, (self.up,), lambda routes, rows_RI: ops.squared_relu(rows_RI), self.down)
        y_ND = y_ND + self.shared_down(ops.squared_relu(self.shared_up(h_ND)))
        return x + y_ND, dsl.router_figures(logits_NE, routes, tables, sigmoid=True)


class NemotronH(dsl.Model):
    """The causal language model."""

    architecture = "NemotronHForCausalLM"
    embed = dsl.Embedding("backbone.embeddings.weight", decoder.V, D)
    layers = dsl.Stack(MambaBlock, dsl.Dim("num_hidden_layers", default=lambda c: len(kinds_of(c))), PREFIX)
    head = dsl.LMHead("lm_head.weight", "backbone.norm_f.weight", EPS, rounds_once=True)
    heads = ()
    carried = ("mtp.",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "conv_kernel": WIDTH,
        "head_dim": 128,
        "mamba_head_dim": 64,
        "n_group": 1,
        "n_groups": 8,
        "ssm_state_size": 128,
        "time_step_floor": 1e-4,
        "time_step_limit": (0.0, math.inf),
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_conv_bias": True,
    }
    """Values of keys that a file may leave out, as transformers has them."""
    unlike_transformers = ("time_step_min",)  # it limits time steps there, instead of `time_step_limit`
    reads = (
        *("hybrid_override_pattern", "layers_block_type", "layer_types", "mamba_num_heads", "use_bias", "mlp_bias"),
        *("n_routed_experts", "num_local_experts", "moe_shared_expert_intermediate_size", "routed_scaling_factor"),
        *("n_group", "topk_group"),
    )
    computes: ClassVar[Mapping[str, Any]] = {
        "conv_kernel": WIDTH,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mlp_hidden_act": "relu2",
        "n_shared_experts": 1,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
    }

    def __init__(self, config: Mapping[str, Any]):
        given = {RENAMED.get(key, key): value for key, value in config.items()}
        super().__init__({**self.defaults, **{key: v for key, v in given.items() if v is not None}})

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, dsl.Block]]:
        """Every layer as (HF name prefix, block), in order."""
        mamba = MambaBlock if self.config["use_conv_bias"] else PlainMambaBlock
        classes: dict[str, type[dsl.Block]] = {
            MAMBA: mamba,
            ATTENTION: AttentionMixerBlock,
            MLP: MlpBlock,
            MOE: ExpertsBlock,
        }
        kinds = kinds_of(self.config)
        made = {kind: classes[kind](self.config, max_seqlen) for kind in dict.fromkeys(kinds)}
        for number, kind in enumerate(kinds):
            yield PREFIX.format(i=number), made[kind]

    def stretched(self, scaling: str | Mapping[str, Any] | None, positions: int | None) -> dict[str, Any]:
        """With other positions: without a rotary embedding there is nothing to scale."""
        if scaling is not None:
            raise UserError("rope_scaling: nemotron-h has no rotary embedding. Fix: leave rope_scaling at null.")
        return {**self.config, "max_position_embeddings": positions or self.config.get("max_position_embeddings")}

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> NemotronH:
        """The model of a ``config.json``; `UserError` naming the key for what it does not compute."""
        model = cls(config)
        model.check()
        return model

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        config, kinds = self.config, set(kinds_of(self.config))
        decoder.check_keys(
            config, family="nemotron-h", reads=self.reads, computes=self.computes, positions=self.positions
        )
        if MAMBA in kinds:
            time_step_limit(config)
            _check_multiple(config, H, G)
        if ATTENTION in kinds:
            _check_multiple(config, decoder.H, decoder.K)
        if MOE in kinds:
            _check_experts(config)
        for prefix, block in {b.identity: (p, b) for p, b in self.blocks(0)}.values():
            block.mixer_specs()
            block.tensor_specs(prefix, block.linear_slots(None), train_base=False, experts=block.expert_slots(None))
        self.embed_specs(train_base=False)
        self.head_specs(train_base=False)


def kinds_of(config: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer. `UserError` for kinds that do not exist, and for keys that contradict each other."""
    listed = {key: config[key] for key in ("layers_block_type", "layer_types") if config.get(key) is not None}
    found = {key: _of_list(key, value) for key, value in listed.items()}
    if config.get("hybrid_override_pattern") is not None or not found:
        found["hybrid_override_pattern"] = _of_pattern(dsl.read_key(config, "hybrid_override_pattern"))
    (key, kinds), *others = found.items()
    for other, same in others:
        if same != kinds:
            number = next((n for n, pair in enumerate(zip(kinds, same, strict=False)) if len(set(pair)) > 1), None)
            where = f"{len(kinds)} layers and {len(same)}" if number is None else f"layer {number}"
            raise UserError(f"config.json: `{key}` and `{other}` contradict each other ({where}). {OWN}")
    count = config.get("num_hidden_layers")
    if count is not None and count != len(kinds):
        raise UserError(f"config.json: `{key}` has {len(kinds)} layers, and `num_hidden_layers` is {count!r}. {OWN}")
    return kinds


def _of_list(key: str, given: Any) -> list[str]:
    if not isinstance(given, list | tuple) or not given:
        raise UserError(f"config.json: `{key}` is {given!r}, and must list the kinds of the layers. {OWN}")
    kinds = [OLDER.get(str(kind), str(kind)) for kind in given]
    for number, kind in enumerate(kinds):
        if kind not in LETTERS.values():
            raise UserError(
                f"config.json: `{key}` has {kind!r} as layer {number}; known: {', '.join(LETTERS.values())}. {OWN}"
            )
    return kinds


def _of_pattern(given: Any) -> list[str]:
    if not isinstance(given, str) or not given:
        raise UserError(
            f"config.json: `hybrid_override_pattern` is {given!r}, and must be a letter for each layer. {OWN}"
        )
    for number, letter in enumerate(given):
        if letter not in LETTERS:
            raise UserError(
                f"config.json: `hybrid_override_pattern` has {letter!r} as layer {number}; known: {' '.join(LETTERS)} "
                f"(Mamba-2, attention, feed-forward, experts). {OWN}"
            )
    return [LETTERS[letter] for letter in given]


def _check_multiple(config: Mapping[str, Any], heads: dsl.Dim, groups: dsl.Dim) -> None:
    if heads.size(config) % groups.size(config):
        raise UserError(
            f"config.json: `{heads.label}` ({heads.size(config)}) must be a multiple of `{groups.label}` "
            f"({groups.size(config)}). {OWN}"
        )


def _check_experts(config: Mapping[str, Any]) -> None:
    """Refuse experts and groups of them that cannot be."""
    experts, choices = E.size(config), K.size(config)
    groups, chosen = (dsl.Dim(key).size(config) for key in ("n_group", "topk_group"))
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise UserError(
            f"config.json: `n_routed_experts` ({experts}) must be a multiple of `n_group` ({groups}), of at least two "
            f"experts each. {OWN}"
        )
    if chosen > groups:
        raise UserError(f"config.json: `topk_group` ({chosen}) is larger than `n_group` ({groups}). {OWN}")
    if choices > experts // groups * chosen:
        raise UserError(
            f"config.json: `num_experts_per_tok` ({choices}) is larger than the {experts // groups * chosen} experts "
            f"that a token chooses from (`n_routed_experts`, `n_group`, `topk_group`). {OWN}"
        )
    dsl.number_of(dsl.Setting("routed_scaling_factor", default=1.0), config, "the factor of the experts")


build = NemotronH.build
