"""The most bytes that a calculation on a CPU holds at one time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that ops create inside it; `peak` is their largest sum."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known = {t.untyped_storage()._cdata for t in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._count(tensor)
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self._known.discard(key)
            self.live -= nbytes

        weakref.finalize(storage, freed)
