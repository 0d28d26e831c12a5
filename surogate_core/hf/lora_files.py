"""LoRA adapters that exist already: reading PEFT directories and checkpoints, folding them into base weights.

Everything is checked from headers before any tensor is read. An adapter that was trained on a base
with other adapters folded in (stacked LoRA) carries those in ``stacked_on/``; a stack is a list of
adapters, the lowest first.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.errors import UserError
from surogate_core.files.foreign import matchers, read_json, wrong_pattern
from surogate_core.files.hub import split_revision
from surogate_core.files.tensorfile import FLOATS, TensorFile, file_digest
from surogate_core.hf.card import OVERRIDES
from surogate_core.hf.contents import differences
from surogate_core.hf.expert_adapters import OfAllExperts, is_of_all_experts
from surogate_core.hf.text_part import OWN, PLACE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.dsl.experts import Fused
    from surogate_core.hf.weights import ModelDir, ReadPart

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
STACKED_ON = "stacked_on"
"""Directory inside an adapter's: the adapter that its base had folded in."""
MARKER = "surogate_export.json"
"""Marks a directory as an export, which a later export may replace, and records its base."""
PREFIX = "base_model.model."
"""What PEFT puts before every module's name."""

_SIDES = (".lora_A.weight", ".lora_B.weight")
_HEAD = "lm_head.weight"
_COPY = ".base_layer.weight"
"""End of the name of a base weight that PEFT saves beside the adapter of an embedding or a head."""
_SHOWN = 12

_NEUTRAL = frozenset(
    """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules
    exclude_modules lora_alpha lora_dropout use_rslora layers_to_transform layers_pattern megatron_core
    rank_pattern alpha_pattern modules_to_save
    qalora_group_size eva_config ensure_weight_tying
    """.split()  # noqa: SIM905
)
"""Keys that are honoured, or change nothing of a finished adapter; any other that is set is refused."""

_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter: y += scale · x Aᵀ Bᵀ on some modules; of others, such as routers, the whole weight."""

    source: str
    """Its source, for messages."""
    rank: int
    alpha: float
    scale: float
    """alpha / rank, or alpha / √rank with rsLoRA."""
    tensors: Mapping[str, Tensor]
    """A [r, in] and B [out, r] of each module, and whole matrices by their own names; any float dtype, by PEFT's names
    after `prefix`.
    """
    scales: Mapping[str, float] = field(default_factory=dict)
    """Module → its scale, where it differs from `scale`."""
    prefix: str = ""
    base_fingerprint: str | None = None
    """Fingerprint of the base that it was trained on, if known."""
    base_model: str | None = None
    """Hub id or directory of that base."""
    base_commit: str | None = None
    """Commit of a hub id."""
    base_files: Mapping[str, str] = field(default_factory=dict)
    """Weight file of that base → digest of its data; empty where it is not known."""
    base_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the base's ``config.json`` that it was trained with other values of."""
    of_all_experts: OfAllExperts | None = None
    """Adapters of one tensor of all experts of a layer, until `with_experts` takes them apart."""

    @classmethod
    def open(cls, path: Path, *, key: str = "adapter_path") -> LoraAdapter:
        """Open a PEFT directory; `key` is the configuration key that named it. Raises one `UserError` with all
        faults.
        """
        values = _read_config(path / CONFIG)
        problems = _unsupported(values)
        rank, alpha = values.get("r"), values.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            problems.append(f"{CONFIG}: r is {rank!r}, not a positive integer")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            problems.append(f"{CONFIG}: lora_alpha is {alpha!r}, not a number")
        if problems:
            raise _bad(path, key, problems)
        assert isinstance(rank, int)
        assert isinstance(alpha, int | float)
        if not (path / WEIGHTS).exists():
            pickles = sorted(p.name for pattern in ("*.bin", "*.pt") for p in path.glob(pattern))
            why = f"; {pickles[0]} is a pickle, which is never read" if pickles else ""
            fix = "load it with PEFT and save_pretrained it again" if pickles else "copy the complete adapter again"
            raise UserError(f"{key} {path}: {WEIGHTS} is missing{why}. Fix: {fix}.")
        file = _of_text(TensorFile(path / WEIGHTS))
        ranks = _by_pattern(path, values.get("rank_pattern") or {}, rank)
        if problems := _wrong_tensors(file, PREFIX, ranks, values.get("modules_to_save") or ()):
            raise _bad(path, key, problems)
        names = [n for n in file.infos if n.endswith(_SIDES[0]) and not is_of_all_experts(n)]
        modules = [name.removeprefix(PREFIX).removesuffix(_SIDES[0]) for name in names]
        alphas = _by_pattern(path, values.get("alpha_pattern") or {}, alpha)
        power = 0.5 if values.get("use_rslora") else 1
        scale, scales = alpha / rank**power, {m: alphas(m) / ranks(m) ** power for m in modules}
        base, revision, version = (values.get(k) for k in ("base_model_name_or_path", "revision", "peft_version"))
        return cls(
            source=str(path),
            rank=rank,
            alpha=float(alpha),
            scale=scale,
            tensors=file,
            scales={m: other for m, other in scales.items() if not math.isclose(other, scale, rel_tol=1e-9)},
            prefix=PREFIX,
            base_model=base if isinstance(base, str) else None,
            base_commit=revision if isinstance(revision, str) else None,
            base_files=_recorded_base(path / MARKER),
            base_overrides=_read_config(path / OVERRIDES) if (path / OVERRIDES).exists() else {},
            of_all_experts=OfAllExperts(
                file=file,
                prefix=PREFIX,
                version=version if isinstance(version, str) else None,
                kind=lambda name: (int(ranks(name)), alphas(name) / ranks(name) ** power),
            )
            if any(map(is_of_all_experts, file.infos))
            else None,
        )

    def with_experts(self, fused: Mapping[str, Fused], *, key: str = "adapter_path") -> LoraAdapter:
        """The adapter with its tensors of all experts taken apart, for a base that has these tensors of experts.

        Raises `UserError` if they fit none of them, or fit both of PEFT's layouts.
        """
        if self.of_all_experts is None:
            return self
        tensors, scales, problems = self.of_all_experts.apart(fused)
        if problems:
            fix = f"name its own base, or set peft_version in {CONFIG} to the version of PEFT that wrote it"
            raise _bad(Path(self.source), key, problems, fix=fix)
        others = {m: s for m, s in scales.items() if not math.isclose(s, self.scale, rel_tol=1e-9)}
        return replace(self, tensors=tensors, scales={**self.scales, **others}, of_all_experts=None)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it adapts, by their Hugging Face names, sorted."""
        return tuple(
            sorted(n.removeprefix(self.prefix).removesuffix(_SIDES[0]) for n in self.tensors if n.endswith(_SIDES[0]))
        )

    @property
    def whole(self) -> tuple[str, ...]:
        """The weights that it has as whole matrices, by their Hugging Face names, sorted."""
        return tuple(sorted(n.removeprefix(self.prefix) for n in self.tensors if not n.endswith((*_SIDES, _COPY))))

    def ranks(self) -> dict[str, int]:
        """Module → rank."""
        return {module: self._shape(module + _SIDES[0])[0] for module in self.modules}

    def replaces(self, name: str) -> bool:
        """Whether it has the whole weight of this name."""
        return not name.endswith(_SIDES) and self.prefix + name in self.tensors

    def adapts(self, name: str) -> bool:
        """Whether it changes the base tensor of this name."""
        module = name.removesuffix(".weight")
        has_pair = name.endswith(".weight") and self.prefix + module + _SIDES[0] in self.tensors
        return has_pair or self.replaces(name)

    def get(self, name: str) -> Tensor:
        """A tensor by its name without the prefix."""
        return self.tensors[self.prefix + name]

    def delta(self, module: str) -> Tensor:
        """The term that it adds to a module's weight: [out, in] fp32, on the CPU."""
        import torch

        a, b = (self.get(module + side).detach().to("cpu", torch.float32) for side in _SIDES)
        return (b @ a).mul_(self.scales.get(module, self.scale))

    def onto(self, name: str, weight: Tensor) -> Tensor:
        """A weight, any float dtype, with this adapter: fp32, on the CPU."""
        import torch

        if self.replaces(name):
            return self.get(name).detach().to("cpu", torch.float32)
        return self.delta(name.removesuffix(".weight")).add_(weight)

    def check_against(self, shapes: Mapping[str, Sequence[int]], *, key: str = "adapter_path") -> None:
        """Compare the headers with a base (tensor name → shape); one `UserError` lists all mismatches."""
        problems: list[str] = []
        linears = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
        for module in self.modules:
            outputs, inputs = self._shape(module + _SIDES[1])[0], self._shape(module + _SIDES[0])[1]
            weight = shapes.get(f"{module}.weight")
            if weight is None:
                # Only for those that are shown: a model with experts has tens of thousands of projections.
                shown = len(problems) < _SHOWN
                near = difflib.get_close_matches(module, linears, n=1, cutoff=0.8) if shown else []
                hint = f"; the nearest is {near[0]}" if near else ""
                problems.append(f"{module}: the base has no such linear layer{hint}")
            elif list(weight) != [outputs, inputs]:
                problems.append(f"{module}: made for {[outputs, inputs]}, the base has {list(weight)}")
        for name in self.whole:
            here, wanted = list(self._shape(name)), shapes.get(name)
            if wanted is None or list(wanted) != here:
                found = "no such weight" if wanted is None else f"{list(wanted)}"
                problems.append(f"{name}: a whole weight of {here}, the base has {found}")
        if problems:
            raise _bad(Path(self.source), key, problems, "it is not an adapter of this base", "name its own base")

    def check_copies(self, base: ModelDir, *, key: str = "adapter_path") -> None:
        """Raise `UserError` unless every copy of a base weight among the tensors equals the base's. Equal ones are
        not used.
        """
        problems = []
        for copy in sorted(name for name in self.tensors if name.endswith(_COPY)):
            name = copy.removeprefix(self.prefix).removesuffix(_COPY) + ".weight"
            if name not in base.names() or not base.has(name, *self._stored(copy)):
                problems.append(f"{copy}: a copy of a base weight, which has other values than {name} of the base")
        if problems:
            raise _bad(Path(self.source), key, problems, "it was trained on another base", "name its own base")

    def _stored(self, name: str) -> tuple[tuple[int, ...], ReadPart, torch.dtype]:
        """Shape, a reader of parts, and dtype of a tensor."""
        if isinstance(self.tensors, TensorFile):
            info = self.tensors.infos[name]
            return info.shape, partial(self.tensors.read_part, name), info.torch_dtype
        flat = (whole := self.tensors[name]).view(-1)
        return tuple(whole.shape), lambda first, into: into.copy_(flat[first : first + len(into)]), whole.dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        name = self.prefix + name
        return self.tensors.infos[name].shape if isinstance(self.tensors, TensorFile) else self.tensors[name].shape

    def fingerprint(self) -> str:
        """SHA-256 (hex) over the scale, the rank and every byte of the tensors' file."""
        assert isinstance(self.tensors, TensorFile)
        text = json.dumps([self.rank, self.scale, file_digest(self.tensors.path)])
        return hashlib.sha256(text.encode()).hexdigest()


def open_stack(path: Path, *, key: str = "adapter_path") -> list[LoraAdapter]:
    """The adapter of a PEFT directory after those that its base had folded in."""
    if not path.is_dir():
        raise UserError(f"{key} {path}: there is no such directory. Fix: correct {key}.")
    if not (path / CONFIG).exists() and (path / "adapter" / CONFIG).exists():
        path = path / "adapter"
    below = path / STACKED_ON
    return [*(open_stack(below, key=key) if below.is_dir() else []), LoraAdapter.open(path, key=key)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialAdapter:
    """The adapter that a run starts from: ``adapter_path``."""

    mode: str
    """``merge`` or ``trainable``."""
    stack: tuple[LoraAdapter, ...]
    fingerprint: str

    @classmethod
    def open(cls, path: str, mode: str, fused: Mapping[str, Fused] | None = None) -> InitialAdapter:
        """Read the headers; raises `UserError`. `fused`: the base's tensors of all experts."""
        stack = tuple(one.with_experts(fused or {}) for one in open_stack(Path(path).expanduser()))
        return cls(mode=mode, stack=stack, fingerprint=stack_fingerprint(stack))

    @property
    def start(self) -> LoraAdapter | None:
        """The adapter that is trained on."""
        return self.stack[-1] if self.mode == "trainable" else None

    @property
    def folded(self) -> tuple[LoraAdapter, ...]:
        """The adapters that are folded into the base."""
        return self.stack[:-1] if self.mode == "trainable" else self.stack

    def check_continues(self, shapes: Mapping[str, Sequence[int]], *, rank: int, alpha: float) -> None:
        """Compare the adapter to continue with the run's; one `UserError` lists all differences.

        `shapes`: trained tensor of the run → its shape. `rank`, `alpha`: of the adapters outside of experts.
        """
        if self.start is None:
            return
        theirs, problems = self.start, []
        own = {n.removesuffix(_SIDES[0]): shape[0] for n, shape in shapes.items() if n.endswith(_SIDES[0])}
        ranks = theirs.ranks()
        found, found_of_experts = (_rank_of(ranks, experts=kind) for kind in (False, True))
        if found is not None and found != rank:
            problems.append(f"lora_rank is {rank}, the adapter's is {found}")
        of_experts = _rank_of(own, experts=True)
        if None not in (of_experts, found_of_experts) and of_experts != found_of_experts:
            problems.append(f"lora_expert_rank is {of_experts}, the adapter's is {found_of_experts}")
        uneven = [m for m, r in ranks.items() if r != (found_of_experts if _is_expert(m) else found)]
        if uneven:
            problems.append(f"{uneven[0]} has another rank than the adapter's other modules of its kind")
        if theirs.scales:
            problems.append(f"{next(iter(theirs.scales))} has another alpha / rank than the adapter's other modules")
        plain = theirs.scale * (found or rank)
        if not math.isclose(plain, alpha, rel_tol=1e-9):
            with_rs = not math.isclose(theirs.scale * theirs.rank, theirs.alpha, rel_tol=1e-9)
            rs = f" ({theirs.alpha:g} with rsLoRA)" if with_rs else ""
            problems.append(f"lora_alpha is {alpha:g}, the adapter's is {plain:g}{rs}")
        if wrong := {n for n in shapes if not n.endswith(_SIDES)} ^ set(theirs.whole):
            who = "the run" if sorted(wrong)[0] in shapes else "the adapter"
            problems.append(f"train_router: only {who} trains {', '.join(sorted(wrong)[:_SHOWN])}")
        last = {module.rsplit(".", 1)[-1] for module in own}, {m.rsplit(".", 1)[-1] for m in theirs.modules}
        if last[0] != last[1]:
            problems.append(
                f"lora_target_modules is {', '.join(sorted(last[0]))}, the adapter's is {', '.join(sorted(last[1]))}"
            )
        elif missing := sorted(own.keys() ^ set(theirs.modules)):
            problems.append(f"only one of the two is on {', '.join(missing[:_SHOWN])}")
        if problems:
            fix = "set the adapter's values, or adapter_init_mode: merge"
            raise _bad(Path(theirs.source), "adapter_path", problems, "cannot be trained on by this run", fix)


def stack_fingerprint(stack: Iterable[LoraAdapter]) -> str:
    """SHA-256 (hex) of a stack."""
    return hashlib.sha256(" ".join(adapter.fingerprint() for adapter in stack).encode()).hexdigest()


def check_merging(
    stack: Iterable[LoraAdapter],
    shapes: Mapping[str, Sequence[int]],
    base: ModelDir | None,
    *,
    tied: bool,
    key: str,
) -> None:
    """Refuse a stack that does not fit a base (tensor name → shape, and its files if it has any)."""
    for adapter in stack:
        if tied and adapter.adapts(_HEAD):
            why = f"{_HEAD}: the base has none that could change alone, because its head is tied to the embedding"
            fix = (
                "save the base with a copy of the embedding as lm_head.weight and tie_word_embeddings false, which is "
                "the same model, and name that"
            )
            raise _bad(Path(adapter.source), key, [why], fix=fix)
        adapter.check_against(shapes, key=key)
        if base is not None:
            adapter.check_copies(base, key=key)
        if tied and (embeddings := [name for name in adapter.whole if "embed" in name]):
            why = (
                f"{embeddings[0]}: a whole weight, which the base uses for its head too; it may be meant for one alone"
            )
            raise _bad(Path(adapter.source), key, [why])


def fold(name: str, weight: Tensor, stack: Sequence[LoraAdapter]) -> Tensor:
    """A base tensor with every delta of the stack added in fp32 and rounded once, to the tensor's own dtype.

    PEFT's merge_and_unload of one adapter gives the same bits. Returns `weight` itself if no adapter applies to it.
    Raises `UserError` when the sum is not finite or the weight is quantised.
    """
    import torch

    hits = [adapter for adapter in stack if adapter.adapts(name)]
    if not hits:
        return weight
    if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise UserError(f"{name}: is {weight.dtype}; an adapter is folded into unquantised weights only.")
    total = weight.to("cpu")
    for adapter in hits:
        total = adapter.onto(name, total)
    total = total.to(weight.dtype)
    # Check the extremes, because isfinite would copy the tensor; a NaN is both of them.
    if not all(extreme.isfinite() for extreme in torch.aminmax(total)):
        sources = ", ".join(adapter.source for adapter in hits)
        raise UserError(
            f"{name}: is not finite with {sources} folded in. Fix: use an adapter of a run that did not diverge."
        )
    return total


def folded(tensors: Iterable[tuple[str, Tensor]], stack: Sequence[LoraAdapter]) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors with the stack folded in, one at a time."""
    return ((name, fold(name, tensor, stack)) for name, tensor in tensors)


def _read_config(path: Path) -> dict[str, Any]:
    fix = "Fix: name a directory that PEFT or Surogate wrote."
    try:
        values = read_json(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; an adapter is a directory with {CONFIG} and {WEIGHTS}. {fix}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. {fix}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}. Fix: copy the adapter again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object. {fix}")
    return values


def _recorded_base(path: Path) -> dict[str, str]:
    """The digests of the base's weight files in an export; none for an adapter of other programs."""
    try:
        values = read_json(path).get("base_files")
    except (OSError, ValueError, AttributeError):
        return {}
    return {str(name): str(digest) for name, digest in values.items()} if isinstance(values, dict) else {}


def another_base(adapter: LoraAdapter, base: str, files: Mapping[str, str]) -> str | None:
    """Why the adapter was trained on another base than `base` with these `files` (name → digest), in a sentence.

    None if the weights are the same, or if nothing shows that they differ.
    """
    if adapter.base_files:
        found = differences(adapter.base_files, files)
        theirs = f", that is {adapter.base_model}" if adapter.base_model not in (None, base) else ""
        return f"{adapter.source} was trained on other weights{theirs}: {found}." if found else None
    named = adapter.base_model
    if named is None or _names(named) & _names(base):
        return None
    return f"{adapter.source} names {named} as its base."


def _names(base: str) -> set[str]:
    """The names that a base may have: its last part, and the repository of a snapshot in the hub's cache."""
    path = Path(split_revision(base)[0]).expanduser()
    path = path.resolve() if path.is_dir() else path
    repositories = [part.rpartition("--")[2] for part in path.parts if part.startswith("models--")]
    return {name.lower() for name in (path.name, *repositories)}


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    """The settings of the adapter that are not supported, each by its name."""
    problems = []
    if values.get("peft_type", "LORA") != "LORA":
        problems.append(f"peft_type is {values['peft_type']!r}, and only LORA is read")
    if values.get("bias", "none") != "none":
        problems.append(f"bias is {values['bias']!r}: trained biases are not supported")
    if values.get("init_lora_weights") not in _INITS:
        problems.append(f"init_lora_weights is {values['init_lora_weights']!r}, which changes the base weights too")
    known = _NEUTRAL | {"bias", "init_lora_weights", "target_parameters"}
    for key in ("rank_pattern", "alpha_pattern"):
        problems += _wrong_pattern(key, values.get(key) or {})
    saved = values.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) and name for name in saved):
        problems.append(f"modules_to_save is {saved!r}, not a list of names")
    for key, value in values.items():
        if key not in known and value:
            shown = json.dumps(value)
            problems.append(f"{key} is {shown if len(shown) < 60 else shown[:57] + '…'}: not supported")
    return [f"{CONFIG}: {problem}" for problem in problems]


def _by_pattern(path: Path, patterns: Mapping[str, float], otherwise: float) -> Callable[[str], Any]:
    """Module → the value of the first pattern that matches it, as PEFT reads `rank_pattern` and `alpha_pattern`."""
    matches = matchers({key: rf"(.*\.)?({key})$" for key in patterns}, str(path / CONFIG))
    return lambda module: next((value for key, value in patterns.items() if matches(key, module)), otherwise)


def _rank_of(ranks: Mapping[str, int], *, experts: bool) -> int | None:
    """The rank of the adapters of experts, or of the others; None if there are none. The largest if they differ."""
    return max((r for module, r in ranks.items() if _is_expert(module) == experts), default=None)


def _is_expert(module: str) -> bool:
    return ".experts." in module


def _wrong_pattern(key: str, patterns: Any) -> list[str]:
    """The faults in `rank_pattern` or `alpha_pattern`, which map regular expressions to positive numbers."""
    if not isinstance(patterns, dict):
        return [f"{key} is {patterns!r}, not a mapping"]
    kinds = int if key == "rank_pattern" else (int, float)
    problems = []
    for pattern, value in patterns.items():
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            problems.append(f"{key}: {pattern} is {value!r}, not a positive number")
        if (why := wrong_pattern(pattern)) is not None:
            problems.append(f"{key}: {pattern[:100]} {why}")
    return problems


def _of_text(file: TensorFile) -> TensorFile:
    """The tensors by the names of the language model alone, of an adapter for a model of several parts."""
    return file.renamed({name: name.replace(PREFIX + PLACE, PREFIX + OWN, 1) for name in file.infos})


def _wrong_tensors(file: TensorFile, prefix: str, ranks: Callable[[str], int], saved: Collection[str]) -> list[str]:
    """The faults in the names, shapes and dtypes of an adapter's tensors; `saved`: its `modules_to_save`."""
    problems = []
    for name, info in file.infos.items():
        side = next((s for s in _SIDES if name.endswith(s)), None)
        if side is None and name.startswith(prefix) and (name.endswith(_COPY) or _is_saved(name, saved)):
            if info.dtype not in FLOATS:
                problems.append(f"{name}: is {info.dtype}, not a float")
            continue
        if side is None or not name.startswith(prefix):
            problems.append(f"{name}: not the name of a LoRA tensor ({prefix}MODULE{_SIDES[0]})")
            continue
        other = name.removesuffix(side) + _SIDES[1 - _SIDES.index(side)]
        if other not in file.infos:
            problems.append(f"{name}: its other half {other} is missing")
        if info.dtype not in FLOATS:
            problems.append(f"{name}: is {info.dtype}, not a float")
        if is_of_all_experts(name):
            continue  # its rank is known with the number of experts
        rank = ranks(name.removeprefix(prefix).removesuffix(side))
        if len(info.shape) != 2 or info.shape[_SIDES.index(side)] != rank:
            problems.append(f"{name}: has shape {list(info.shape)}, which is not of rank {rank}")
    for one in saved:
        if not any(_is_saved(name, [one]) for name in file.infos):
            problems.append(f"{CONFIG}: modules_to_save has {one}, and {WEIGHTS} has no such weight")
    return problems or ([] if file.infos else [f"{WEIGHTS}: holds no tensor"])


def _is_saved(name: str, saved: Collection[str]) -> bool:
    """Whether a tensor is the weight or the bias of a module that PEFT saves whole."""
    module, _, last = name.rpartition(".")
    return last in ("weight", "bias") and any(module.endswith(f".{one}") for one in saved)


def _bad(
    path: Path, key: str, problems: list[str], what: str = "cannot be used", fix: str = "use another adapter"
) -> UserError:
    if len(problems) == 1:
        return UserError(f"{key} {path}: {what}: {problems[0]}. Fix: {fix}.")
    lines = [f"  - {line}" for line in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  … and {len(problems) - _SHOWN} more")
    listed = "\n".join(lines)
    return UserError(f"{key} {path}: {what}:\n{listed}\nFix: {fix}.")
