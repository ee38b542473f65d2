"""A GEMM and bandwidth-bound work of another sub-batch in one launch."""

from pallas_kernels.corun.api import (
    GemmBesideDecodeAttention,
    GemmBesideNorm,
    gemm_beside_decode_attention,
    gemm_beside_norm,
)
from pallas_kernels.corun.sums import GemmBesideSums, column_sums, gemm_beside_sums

__all__ = [
    "GemmBesideDecodeAttention",
    "GemmBesideNorm",
    "GemmBesideSums",
    "column_sums",
    "gemm_beside_decode_attention",
    "gemm_beside_norm",
    "gemm_beside_sums",
]
