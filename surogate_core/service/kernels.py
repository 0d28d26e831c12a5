"""Kernels: the table of ops, their references, and the modules that define them."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.kernels import convolutions as convolutions
    from surogate_core.kernels import decoding as decoding
    from surogate_core.kernels import experts as experts
    from surogate_core.kernels import scans as scans
    from surogate_core.kernels import sums as sums
    from surogate_core.kernels.building import ahead as ahead
    from surogate_core.kernels.building import native as native
    from surogate_core.kernels.building import unpacking as unpacking
    from surogate_core.kernels.building.native import assuming as assuming
    from surogate_core.kernels.building.native import source_of as source_of
    from surogate_core.kernels.decoding import slot_attention as slot_attention
    from surogate_core.kernels.grouped import masked_factors as masked_factors
    from surogate_core.kernels.grouped import masked_product as masked_product
    from surogate_core.kernels.optimizing import rounding as rounding
    from surogate_core.kernels.optimizing import updates as updates
    from surogate_core.kernels.optimizing.rounding import write_master as write_master
    from surogate_core.kernels.registry import OP_MODULES as OP_MODULES
    from surogate_core.kernels.registry import REFERENCE_PRIORITY as REFERENCE_PRIORITY
    from surogate_core.kernels.registry import KernelTable as KernelTable
    from surogate_core.kernels.registry import define_ops as define_ops
    from surogate_core.kernels.registry import extensions as extensions
    from surogate_core.kernels.registry import fault_of as fault_of
    from surogate_core.kernels.registry import owner_of as owner_of
    from surogate_core.kernels.registry import using as using
    from surogate_core.kernels.scans import CHUNK as CHUNK
    from surogate_core.kernels.sums import tree_sum as tree_sum
    from surogate_core.kernels.torch_pack import TORCH_PACK as TORCH_PACK

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
