"""Kernels: the table of ops, their references, and the modules that define them."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.kernels import convolutions, decoding, experts, scans, sums
    from surogate_core.kernels.building import ahead, native, unpacking
    from surogate_core.kernels.building.native import assuming, source_of
    from surogate_core.kernels.decoding import slot_attention
    from surogate_core.kernels.grouped import masked_factors, masked_product
    from surogate_core.kernels.optimizing import rounding, updates
    from surogate_core.kernels.optimizing.rounding import write_master
    from surogate_core.kernels.registry import (
        OP_MODULES,
        REFERENCE_PRIORITY,
        KernelTable,
        define_ops,
        extensions,
        fault_of,
        owner_of,
        using,
    )
    from surogate_core.kernels.scans import CHUNK
    from surogate_core.kernels.sums import tree_sum
    from surogate_core.kernels.torch_pack import TORCH_PACK

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
