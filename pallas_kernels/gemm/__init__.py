"""Matrix products with fused epilogues."""

from pallas_kernels.gemm.api import gated_gemm, gemm, grouped_gemm
from pallas_kernels.gemm.folded import ScaledRows, gemm_for_norm, normed_gemm, scale_rows
from pallas_kernels.gemm.quantized import quantized_gated_gemm, quantized_gemm

__all__ = [
    "ScaledRows",
    "gated_gemm",
    "gemm",
    "gemm_for_norm",
    "grouped_gemm",
    "normed_gemm",
    "quantized_gated_gemm",
    "quantized_gemm",
    "scale_rows",
]
