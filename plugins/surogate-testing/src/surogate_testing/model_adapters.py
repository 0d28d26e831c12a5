"""The check of a family's adapters against PEFT: as they are exported, and folded into the weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import CardFacts, ModelDir, TensorFile, bundles, dsl, export_adapter
from surogate_core.service.engine import Engine
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.models import TOLERANCE, reference

RANK, SCALE = 4, 2.0


def merges_as_peft(family: bundles.ModelFamily) -> None:
    """Adapters on all projections give the same logits here, exported in PEFT, and folded in by PEFT and by `merge`.

    Every tensor that `merge` writes is PEFT's. What PEFT cannot read of a family is the reason that the check is
    skipped; `merge` is compared with the adapters as they are trained, all the same.
    """
    model = reference(family)
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError:
        raise NotApplicable("PEFT is not installed") from None
    built = family.build(model.config.to_dict())
    made = _engine(family, model, built)
    documents = tiny.documents(vocabulary=min(built.vocab_size, 1000))
    logits = made.logits(tiny.batch(documents))[: sum(map(len, documents))]
    with tempfile.TemporaryDirectory() as parent:
        base, adapter, merged = (Path(parent) / name for name in ("base", "adapter", "merged"))
        model.save_pretrained(base)
        export_adapter(
            adapter, made.parameters.adapter_tensors(), rank=RANK, alpha=RANK * SCALE, dropout=0.0,
            base_model=str(base), card=CardFacts(title="check"), model=built,
        )  # fmt: skip
        ensure(_error(model, documents, logits) > 100 * TOLERANCE, "the adapters change nothing")
        theirs, limit = _by_peft(model, adapter)
        if theirs is not None:
            _ensure_close(_error(theirs, documents, logits), "the exported adapter in PEFT")
            theirs = theirs.merge_and_unload()
            _ensure_close(_error(theirs, documents, logits), "PEFT's merged model")
        _merge(family, adapter, merged)
        tensors = None if theirs is None else tiny.in_files(_state(theirs), built)
        _ensure_merged(merged, built, documents, logits, tensors)
    if limit is not None:
        raise NotApplicable(limit)


def _engine(family: bundles.ModelFamily, model: Any, built: dsl.Model) -> Engine:
    """The model with random adapters, of which neither side is zero."""
    own, drawn = tiny.tensor_source(tiny.in_files(_state(model), built)), tiny.random_source(seed=1)
    return tiny.engine(
        model.config.to_dict(),
        build=family.build,
        source=lambda spec: drawn(spec) if spec.role == "adapter" else own(spec),
        lora=tiny.lora(RANK, scale=SCALE),
    )


def _state(model: Any) -> dict[str, Tensor]:
    tied = model.config.tie_word_embeddings
    return {k: v.detach().clone() for k, v in model.state_dict().items() if not (tied and "lm_head" in k)}


def _by_peft(model: Any, adapter: Path) -> tuple[Any, str | None]:
    """(the model with the adapter, None), or (None, why PEFT cannot read adapters of such a model)."""
    from peft import PeftModel

    try:
        found = PeftModel.from_pretrained(deepcopy(model), str(adapter)).eval()
    except ValueError as error:
        if "incompatible with Mamba-based models" not in str(error):
            raise
        return None, str(error)
    names = [name for name, _ in found.named_parameters() if "lora_" in name]
    with_experts = any(".experts." in name for name in dict(TensorFile(adapter / "adapter_model.safetensors").items()))
    if with_experts and not any(".experts." in name for name in names):
        return None, f"PEFT reads no adapters of single experts of model_type {model.config.model_type!r}"
    return found, None


def _error(model: Any, documents: Sequence[Sequence[int]], logits: Tensor) -> float:
    """The largest relative error of a document's logits."""
    borders = torch.tensor([0, *map(len, documents)]).cumsum(0).tolist()
    errors = []
    for start, document in zip(borders, documents, strict=False):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([document])).logits[0]
        errors.append(tiny.relative_error(logits[start : start + len(document)], expected))
    return max(errors)


def _ensure_close(error: float, what: str) -> None:
    ensure(error <= TOLERANCE, f"{what}: logits with a relative error of {error:.1e}, above {TOLERANCE}")


def _merge(family: bundles.ModelFamily, adapter: Path, merged: Path) -> None:
    try:
        merge = import_module("surogate_command_export.merge").merge
    except ModuleNotFoundError as error:
        if error.name != "surogate_command_export":
            raise
        raise NotApplicable("`surogate merge` needs another plugin: surogate-command-export is not installed") from None
    merge(None, adapter, merged, families=lambda: {family.name: family})


def _ensure_merged(
    merged: Path,
    built: dsl.Model,
    documents: Sequence[Sequence[int]],
    logits: Tensor,
    theirs: Mapping[str, Tensor] | None,
) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    _ensure_close(_error(loaded.float().eval(), documents, logits), "`surogate merge`")
    if theirs is None:
        return
    written = ModelDir.open(merged)
    own = tiny.in_files({name: written.get(name) for name in written.names()}, built)
    ensure(own.keys() == theirs.keys(), f"`surogate merge`: other tensors: {sorted(own.keys() ^ theirs.keys())[:5]}")
    error, name = tiny.worst(own, theirs)
    ensure(error <= TOLERANCE, f"`surogate merge`: {name} differs from PEFT's by {error:.1e}")


CHECKS = (merges_as_peft,)
