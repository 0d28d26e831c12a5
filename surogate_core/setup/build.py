"""From a configuration to an engine: choose the fastest setting that fits into memory, build, fall back if it does not.

`recompute: auto` and `lmhead_chunks: auto` are settled here, before anything is compiled. The choices are tried in the
order of their cost, and the first one whose predicted memory fits is taken. If building the engine runs out of memory
all the same, the next choice is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import structlog
import torch

from surogate_core.config.schema import RunConfig
from surogate_core.config.sharing import tokens_of_rank
from surogate_core.engine.device_memory import free_memory, give_back
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.prediction import Prediction, TensorBytes
from surogate_core.files.atomic import human_bytes
from surogate_core.mesh.mesh import Mesh
from surogate_core.setup.assemble import (
    ResolvedModel,
    assemble,
    is_out_of_memory,
    resolve_device,
    resolve_dtype,
    resolve_lora,
)
from surogate_core.setup.counted import counted
from surogate_core.setup.initial_weights import weights_source

if TYPE_CHECKING:
    from surogate_core.batch import MicroBatch
    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)

MARGIN = 1.02
"""The prediction times this must fit: workspaces and fragmentation need memory too. Measured runs are within 0.4 % of
their prediction, and a choice that runs out of memory is followed by the next one.
"""
BUDGETS = (1.0, 0.75, 0.6, 0.5, 0.4, 0.25, 0.1)
"""The values of `recompute_budget` that are tried, from the fastest to the smallest."""
CHUNKS = (1, 2, 4)
"""The values of `lmhead_chunks` that are tried for each of them: more cost little, and help little."""
FEWEST_TOKENS = 256
"""Tokens of the smallest chunk of the head that is tried."""
EASY = 0.5
"""With an upper bound below this share of the memory, the first choice is taken without tracing a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The settings that trade memory for time, by their keys."""

    recompute: bool
    recompute_budget: float
    lmhead_chunks: int

    @classmethod
    def of(cls, values: object) -> MemorySettings | None:
        """The choice that a checkpoint recorded; None if it has none that can be read."""
        if not isinstance(values, Mapping):
            return None
        try:
            return cls(**values)
        except TypeError:
            return None

    @classmethod
    def taken(cls, settings: EngineSettings) -> MemorySettings:
        """The choice that an engine was built with."""
        recompute = settings.recompute
        return cls(recompute=recompute.block, recompute_budget=recompute.budget, lmhead_chunks=settings.head_chunks)

    def applied(self, config: RunConfig) -> RunConfig:
        """The configuration with these values."""
        return replace(
            config,
            recompute=self.recompute,
            recompute_budget=self.recompute_budget,
            lmhead_chunks=self.lmhead_chunks,
        )

    def record(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        kept = "recompute=true" if self.recompute else "recompute=false"
        budget = "" if self.recompute_budget == 1 else f" recompute_budget={self.recompute_budget:g}"
        return f"{kept}{budget} lmhead_chunks={self.lmhead_chunks}"


def is_open(config: RunConfig) -> bool:
    """Whether a key is left to this module."""
    return config.recompute == "auto" or config.lmhead_chunks == "auto"


def choices(config: RunConfig) -> list[MemorySettings]:
    """What the configuration leaves open, from the fastest choice to the one that needs least memory."""
    tokens = tokens_of_rank(config)
    policies: list[tuple[bool, float]]
    if config.recompute == "auto":
        largest = config.recompute_budget
        policies = [(False, largest), *((False, budget) for budget in BUDGETS if budget < largest), (True, 1.0)]
        if any(getattr(config, f"recompute_{part}") for part in ("att", "ffn", "qkv", "swiglu", "rmsnorm")):
            # The parts that are computed again were named: computing everything again would ignore them.
            policies.pop()
    else:
        policies = [(config.recompute, config.recompute_budget)]
    if config.lmhead_chunks == "auto":
        chunks = [1, *(n for n in CHUNKS[1:] if tokens // n >= FEWEST_TOKENS)]
    else:
        chunks = [config.lmhead_chunks]
    found = [
        MemorySettings(recompute=block, recompute_budget=budget, lmhead_chunks=n)
        for (block, budget), n in product(policies, chunks)
    ]
    if config.lmhead_chunks == "auto":
        block, budget = policies[-1]
        found += [
            MemorySettings(recompute=block, recompute_budget=budget, lmhead_chunks=n)
            for n in (8, 16)
            if tokens // n >= FEWEST_TOKENS
        ]
    return found


def fastest(config: RunConfig) -> RunConfig:
    """The configuration with the first choice, whatever fits."""
    return choices(config)[0].applied(config) if is_open(config) else config


def smallest(config: RunConfig) -> RunConfig:
    """The configuration with the choice that needs least memory."""
    return choices(config)[-1].applied(config) if is_open(config) else config


def settled(
    config: RunConfig,
    registry: Registry,
    resolved: ResolvedModel,
    *,
    room: int | None,
    borders: int,
    columns: tuple[str, ...] | None = None,
) -> RunConfig:
    """The configuration with the fastest choice that is predicted to fit into `room` bytes.

    With `room` None it is the fastest choice, and the smallest one where none fits.
    """
    if not is_open(config):
        return config
    tried = _fitting(config, registry, resolved, room=room, borders=borders, columns=columns)
    return next(iter(tried)).applied(config)


def _fitting(
    config: RunConfig,
    registry: Registry,
    resolved: ResolvedModel,
    *,
    room: int | None,
    borders: int,
    columns: tuple[str, ...] | None,
    prefer: MemorySettings | None = None,
) -> Iterator[MemorySettings]:
    """The choices that are predicted to fit, in order, and at last the smallest one. `prefer` comes first."""
    all_choices = choices(config)
    if prefer in all_choices:
        all_choices = all_choices[all_choices.index(prefer) :]
    if room is None or upper_bound(fastest(config), resolved) < EASY * room:
        yield from all_choices
        return
    counts: dict[tuple[bool, float], TensorBytes] = {}
    for choice in all_choices[:-1]:
        changed = choice.applied(config)
        assembly = assemble(changed, registry, resolved, borders=borders, columns=columns)
        key = (choice.recompute, choice.recompute_budget)
        if key not in counts:
            counts = {key: counted(changed, registry, assembly)}
        if needed(counts[key].placed(assembly), assembly.settings.device) * MARGIN <= room:
            yield choice
    yield all_choices[-1]


def needed(prediction: Prediction, device: torch.device) -> int:
    """Predicted bytes in the device's memory; on a CPU the host's and the device's are one."""
    return prediction.total("device") + (0 if device.type == "cuda" else prediction.total("host"))


def upper_bound(config: RunConfig, resolved: ResolvedModel) -> int:
    """Bytes that the run cannot exceed, from shapes alone: much too high, and found without tracing a layer."""
    device, lora = resolve_device(config), resolve_lora(config, resolved.model)
    size = resolve_dtype(config, device).itemsize
    tokens = tokens_of_rank(config)
    model = resolved.model
    parameters = activations = 0
    for _, block in model.blocks(tokens):
        slots = block.linear_slots(lora)
        parameters += sum(s.inputs * s.outputs for s in slots)
        activations += tokens * sum(s.inputs + s.outputs for s in slots)
        experts = block.expert_slots(lora)
        parameters += sum(e.count * e.inputs * e.outputs for e in experts)
        # GPUs that share out experts have room for the rows of all their tokens.
        rows = [config.ep_size * min(e.choices, e.count // config.ep_size) for e in experts]
        activations += tokens * sum(n * (e.inputs + e.outputs) for n, e in zip(rows, experts, strict=True))
    head = model.vocab_size * model.width
    state = (size + 4) * parameters if lora else 32 * parameters
    return state + 40 * head + 6 * size * activations + 16 * tokens * (model.vocab_size + 16 * model.width) + 2**30


def build_engine(
    config: RunConfig,
    registry: Registry,
    resolved: ResolvedModel,
    *,
    sample: MicroBatch,
    progress: Callable[[str, int, int], None],
    prefer: MemorySettings | None = None,
    notes: list[str] | None = None,
    mesh: Mesh | None = None,
) -> Engine:
    """Choose what fits, load or draw the weights, differentiate and compile.

    `sample` has the shapes of every micro-batch. `prefer`: the choice of the checkpoint that the run resumes from,
    since another one may round differently. `notes` receives a sentence if memory decided anything. The ranks of a
    `mesh` all build the same engine: rank 0 chooses what fits on each, and a rank that runs out of memory all the same
    ends the run.
    """
    borders, columns = sample.cu_seqlens.numel(), tuple(sorted(sample.columns))
    said, mesh = notes if notes is not None else [], mesh or Mesh()

    def engine_of(config: RunConfig) -> Engine:
        return _engine(config, registry, resolved, borders=borders, columns=columns, progress=progress, mesh=mesh)

    if not is_open(config):
        return engine_of(config)
    room = _least(mesh.gather(free_memory(resolve_device(config), ranks=mesh.local_world)))
    tried = _fitting(config, registry, resolved, room=room, borders=borders, columns=columns, prefer=prefer)
    if mesh.world > 1:
        mine = next(tried).record() if mesh.leads else None
        tried = iter([MemorySettings(**mesh.gather(mine)[0])])
    failed: list[MemorySettings] = []
    for choice in tried:
        try:
            engine = engine_of(choice.applied(config))
        except Exception as error:
            if not is_out_of_memory(error) or choice == choices(config)[-1] or mesh.world > 1:
                raise
            log.warning("out of memory", choice=str(choice), error=repr(error))
        else:
            said += _notes(config, choice, prefer=prefer, failed=failed, room=room)
            return engine
        failed.append(choice)
        give_back()
    raise AssertionError("the last choice returns or raises")


def _least(rooms: Sequence[int | None]) -> int | None:
    """The smallest of the ranks' free memories, of those that are known."""
    return min((room for room in rooms if room is not None), default=None)


def _engine(
    config: RunConfig,
    registry: Registry,
    resolved: ResolvedModel,
    *,
    borders: int,
    columns: tuple[str, ...],
    progress: Callable[[str, int, int], None],
    mesh: Mesh,
) -> Engine:
    assembly = assemble(config, registry, resolved, borders=borders, columns=columns)
    directory = config.offload_dir or config.place
    stores = assembly.offloader.build(config.offload.options, directory, assembly.settings.device)
    source = weights_source(config, registry, resolved, assembly)
    return Engine(replace(assembly, stores=stores), source, mesh=mesh, progress=progress)


def _notes(
    config: RunConfig,
    choice: MemorySettings,
    *,
    prefer: MemorySettings | None,
    failed: Sequence[MemorySettings],
    room: int | None,
) -> list[str]:
    """What was chosen, if it is not the fastest, and whether it differs from the checkpoint's."""
    notes = []
    if failed:
        notes.append(f"Out of memory with {failed[-1]}: the run uses {choice}.")
    elif choice not in (choices(config)[0], prefer):
        free = "" if room is None else f" ({human_bytes(room)} free)"
        notes.append(f"{choice} is the fastest setting that is predicted to fit into memory{free}.")
    if prefer is not None and choice != prefer:
        notes.append(
            f"The checkpoint was made with {prefer}, and the run goes on with {choice}: sums may round differently."
        )
    return notes
