"""What kernels and optimizers share: how a pack offers kernels, operands of ops, and steps in plain PyTorch."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.kernels.attention import flash_attention as flash_attention
    from surogate_core.kernels.building.ahead import compiled_ahead as compiled_ahead
    from surogate_core.kernels.building.native import Module as Module
    from surogate_core.kernels.building.native import Sources as Sources
    from surogate_core.kernels.building.native import assumed as assumed
    from surogate_core.kernels.building.native import capability as capability
    from surogate_core.kernels.building.native import missing_cupy as missing_cupy
    from surogate_core.kernels.building.native import missing_gpu as missing_gpu
    from surogate_core.kernels.building.unpacking import UnpackedByKernel as UnpackedByKernel
    from surogate_core.kernels.building.unpacking import Unpacker as Unpacker
    from surogate_core.kernels.building.unpacking import at_sixteens as at_sixteens
    from surogate_core.kernels.building.unpacking import parts_at_sixteens as parts_at_sixteens
    from surogate_core.kernels.convolutions import causal_convolution_scan as causal_convolution_scan
    from surogate_core.kernels.decoding import slot_attention_op as slot_attention_op
    from surogate_core.kernels.documents import document_starts as document_starts
    from surogate_core.kernels.documents import document_sums as document_sums
    from surogate_core.kernels.documents import segment_sums as segment_sums
    from surogate_core.kernels.experts import LEAST_TOTAL as LEAST_TOTAL
    from surogate_core.kernels.experts import CodedProduct as CodedProduct
    from surogate_core.kernels.experts import Codes as Codes
    from surogate_core.kernels.experts import ExpertAdapter as ExpertAdapter
    from surogate_core.kernels.experts import GroupedProduct as GroupedProduct
    from surogate_core.kernels.experts import route_backward as route_backward
    from surogate_core.kernels.grouped import Grouped as Grouped
    from surogate_core.kernels.grouped import describe as describe
    from surogate_core.kernels.grouped import grouped_product as grouped_product
    from surogate_core.kernels.grouped import weight_gradient as weight_gradient
    from surogate_core.kernels.ops import choice as choice
    from surogate_core.kernels.ops import cross_entropy as cross_entropy
    from surogate_core.kernels.ops import region as region
    from surogate_core.kernels.optimizing.norms import long_norm as long_norm
    from surogate_core.kernels.optimizing.rounding import PERIOD as PERIOD
    from surogate_core.kernels.optimizing.rounding import SALTS as SALTS
    from surogate_core.kernels.optimizing.rounding import place as place
    from surogate_core.kernels.optimizing.rounding import write_master as write_master
    from surogate_core.kernels.optimizing.updates import Matrices as Matrices
    from surogate_core.kernels.optimizing.updates import adamw_update as adamw_update
    from surogate_core.kernels.optimizing.updates import matrix_momentum as matrix_momentum
    from surogate_core.kernels.optimizing.updates import matrix_update as matrix_update
    from surogate_core.kernels.packed_attention import one_size as one_size
    from surogate_core.kernels.packed_attention import packed_attention as packed_attention
    from surogate_core.kernels.panels import PanelShape as PanelShape
    from surogate_core.kernels.registry import InPlace as InPlace
    from surogate_core.kernels.registry import in_place as in_place
    from surogate_core.kernels.registry import op as op
    from surogate_core.kernels.registry import references as references
    from surogate_core.kernels.registry import workspace as workspace
    from surogate_core.kernels.scans import gated_delta_scan as gated_delta_scan
    from surogate_core.kernels.scans import ssd_scan as ssd_scan

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
