"""What kernels and optimizers share: how a pack offers kernels, operands of ops, and steps in plain PyTorch."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.kernels.attention import flash_attention
    from surogate_core.kernels.building.ahead import compiled_ahead
    from surogate_core.kernels.building.native import Module, Sources, assumed, capability, missing_cupy, missing_gpu
    from surogate_core.kernels.building.unpacking import Unpacker
    from surogate_core.kernels.convolutions import causal_convolution_scan
    from surogate_core.kernels.decoding import slot_attention_op
    from surogate_core.kernels.documents import document_starts, document_sums, segment_sums
    from surogate_core.kernels.experts import CodedProduct, Codes, ExpertAdapter, GroupedProduct, route_backward
    from surogate_core.kernels.grouped import Grouped, describe, grouped_product, weight_gradient
    from surogate_core.kernels.ops import choice, cross_entropy, region
    from surogate_core.kernels.optimizing.norms import long_norm
    from surogate_core.kernels.optimizing.rounding import PERIOD, SALTS, place, write_master
    from surogate_core.kernels.optimizing.updates import Matrices, adamw_update, matrix_momentum, matrix_update
    from surogate_core.kernels.packed_attention import one_size, packed_attention
    from surogate_core.kernels.panels import PanelShape
    from surogate_core.kernels.registry import InPlace, in_place, op, references, workspace
    from surogate_core.kernels.scans import gated_delta_scan, ssd_scan

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
