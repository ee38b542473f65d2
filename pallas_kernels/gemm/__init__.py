"""Matrix products with fused epilogues."""

from pallas_kernels.gemm.api import gated_gemm, gemm, grouped_gemm

__all__ = ["gated_gemm", "gemm", "grouped_gemm"]
