"""A GEMM beside bandwidth-bound work: one launch against the two in sequence on all SMs."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels import corun
from pallas_kernels.corun import reference as corun_reference
from pallas_kernels.corun.shapes import RAGGED, SHAPES, CorunShape
from pallas_kernels.gemm import gemm
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.norm import add_layer_norm
from pallas_kernels.norm import reference as norm_reference

EPS = 1e-5


def cases() -> list[Case]:
    """Every pair on all SMs; ragged pairs on few, in both dtypes."""
    found = [_case(shape, "bfloat16", None) for shape in SHAPES]
    return found + [_case(shape, dtype, 6) for shape in RAGGED for dtype in ("bfloat16", "float16")]


def _case(shape: CorunShape, dtype: str, sm_budget: int | None) -> Case:
    on_gpu = {"implementation": "mosaic_gpu", "sm_budget": sm_budget}
    activation, sums = shape.activation, shape.partner == "sums"

    def together(x, w, *partner):
        if sums:
            return corun.gemm_beside_sums(x, w, *partner, activation=activation, **on_gpu)
        return corun.gemm_beside_norm(
            x, w, *partner, eps=EPS, centred=True, activation=activation, **on_gpu
        )

    def in_sequence(product, x, w, *partner):
        y = gemm(x, w, activation=activation, implementation=product)
        if sums:
            return y, corun.column_sums(*partner, implementation="mosaic_gpu")
        return y, add_layer_norm(*partner, eps=EPS, implementation="mosaic_gpu")

    def truth(x, w, *partner):
        y = gemm_reference.gemm(x, w, activation=activation)
        if sums:
            return corun.GemmBesideSums(y, corun_reference.column_sums(*partner))
        total = norm_reference.add(*partner[:2])
        normed = norm_reference.layer_norm(total, *partner[2:], eps=EPS)
        return corun.GemmBesideNorm(y, normed, total)

    product = {"reduction": shape.k, "function_error": GELU_ERROR}
    partner = (
        ({"reduction": shape.rows},) if sums else ({"reduction": shape.width}, {"reduction": 1})
    )
    moved = shape.m * (shape.k + shape.n) + shape.k * shape.n
    moved += shape.rows * shape.width * (1 if sums else 4)
    return Case(
        kernel="corun",
        name=shape.name,
        dtype=dtype,
        make=functools.partial(_make, shape, dtype),
        run=together,
        reference=truth,
        close=(product, *partner),
        opponents={}
        if sm_budget
        else {
            "in sequence, cublaslt": functools.partial(in_sequence, "xla"),
            "in sequence, our gemm": functools.partial(in_sequence, "mosaic_gpu"),
        },
        flops=2 * shape.m * shape.k * shape.n,
        num_bytes=2 * moved,
        wall=True,
    )


def _make(shape: CorunShape, dtype, key):
    shapes = [(shape.m, shape.k), (shape.k, shape.n), (shape.rows, shape.width)]
    scales = [1.0, shape.k**-0.5, 1.0]
    if shape.partner == "norm":
        shapes += [(shape.rows, shape.width), (shape.width,), (shape.width,)]
        scales += [1.0, 1.0, 1.0]
    keys = jax.random.split(key, len(shapes))
    return tuple(
        (jax.random.normal(k, s, jnp.bfloat16) * scale).astype(dtype)
        for k, s, scale in zip(keys, shapes, scales, strict=True)
    )
