"""Pairs of a GEMM and bandwidth-bound work of another sub-batch, for tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels.gemm.activations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class CorunShape:
    """A GEMM (m, k) x (k, n) beside a norm, or column sums, of (rows, width)."""

    name: str
    m: int
    k: int
    n: int
    rows: int
    width: int
    partner: str
    activation: Activation | None = None


SHAPES = [
    CorunShape(
        name="decode-like pair: gate and up beside 2 GB",
        m=1_024,
        k=4_096,
        n=28_672,
        rows=61_440 * 128,
        width=128,
        partner="sums",
    ),
    CorunShape(
        name="bert-base: up of 48 sequences beside norm of 48",
        m=18_432,
        k=768,
        n=3_072,
        rows=18_432,
        width=768,
        partner="norm",
        activation="gelu",
    ),
    CorunShape(
        name="bloom-7b1: up of 4 sequences beside norm of 4",
        m=2_048,
        k=4_096,
        n=16_384,
        rows=2_048,
        width=4_096,
        partner="norm",
        activation="gelu_tanh",
    ),
]

RAGGED = [
    CorunShape(
        name="fewer tiles than CTAs", m=264, k=192, n=320, rows=64, width=128, partner="sums"
    ),
    CorunShape(
        name="ragged norm",
        m=1_000,
        k=768,
        n=1_600,
        rows=1_003,
        width=512,
        partner="norm",
        activation="gelu",
    ),
]
