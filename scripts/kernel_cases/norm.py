"""Norms of the six models, with the residual sum."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels import norm
from pallas_kernels.norm import reference
from pallas_kernels.norm.shapes import RAGGED, SHAPES, NormShape

EPS = 1e-5


def cases() -> list[Case]:
    """Every shape on all SMs and on 48, and ragged shapes in both dtypes."""
    found = [_case(shape, "bfloat16", sms) for shape in SHAPES for sms in (None, 48)]
    return found + [_case(shape, dtype, 5) for shape in RAGGED for dtype in ("bfloat16", "float16")]


def _case(shape: NormShape, dtype: str, sm_budget: int | None) -> Case:
    names = ["x"] + ["residual"] * shape.residual + ["scale"] + ["bias"] * shape.bias
    centred = "layer_norm" if shape.centred else "rms_norm"
    function = getattr(norm, f"add_{centred}" if shape.residual else centred)

    def call(extra):
        def run(*inputs):
            return function(**dict(zip(names, inputs, strict=True)), eps=EPS, **extra)

        return run

    def truth(*inputs):
        named = {"bias": None, **dict(zip(names, inputs, strict=True))}
        x, scale = named["x"], named["scale"]
        total = reference.add(x, named["residual"]) if shape.residual else x
        if shape.centred:
            normed = reference.layer_norm(total, scale, named["bias"], eps=EPS)
        else:
            normed = reference.rms_norm(total, scale, eps=EPS)
        return norm.AddNorm(normed, total) if shape.residual else normed

    arrays = 4 if shape.residual else 2
    return Case(
        kernel="norm",
        name=shape.name if sm_budget is None else f"{shape.name}, {sm_budget} SMs",
        dtype=dtype,
        make=functools.partial(_make, shape, tuple(names), dtype),
        run=call({"implementation": "mosaic_gpu", "sm_budget": sm_budget}),
        reference=truth,
        close=({"reduction": shape.width}, {"reduction": 1})[: 1 + shape.residual],
        opponents={} if sm_budget == 5 else {"xla fusion": call({"implementation": "xla"})},
        num_bytes=2 * arrays * shape.rows * shape.width,
    )


def _make(shape: NormShape, names, dtype, key):
    keys = jax.random.split(key, len(names))
    arrays = []
    for k, name in zip(keys, names, strict=True):
        rows = (shape.rows, shape.width) if name in ("x", "residual") else (shape.width,)
        arrays.append((3 * jax.random.normal(k, rows, jnp.float32) + 0.5).astype(dtype))
    return tuple(arrays)
