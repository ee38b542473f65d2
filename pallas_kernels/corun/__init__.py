"""A GEMM and bandwidth-bound work of another sub-batch in one launch."""

from pallas_kernels.corun.api import (
    GemmBesideNorm,
    GemmBesideSums,
    column_sums,
    gemm_beside_norm,
    gemm_beside_sums,
)

__all__ = [
    "GemmBesideNorm",
    "GemmBesideSums",
    "column_sums",
    "gemm_beside_norm",
    "gemm_beside_sums",
]
