"""Norms of the six models, with the residual sum, and with quantised results."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import norm
from pallas_kernels.norm import reference
from pallas_kernels.norm.shapes import QUANTIZED, RAGGED, SHAPES, NormShape

from . import Case

EPS = 1e-5
# The largest value of each quantised type, and how far from an unrounded code the code may lie
# beside the type's relative precision: half a step of integers, or of the smallest fp8 values.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
ROUNDING = {"int8": 0.5, "float8_e4m3fn": 2.0**-10}


def cases() -> list[Case]:
    """Every shape on all SMs and on 48, some quantised, and ragged shapes in both dtypes."""
    found = [_case(shape, "bfloat16", sms) for shape in SHAPES for sms in (None, 48)]
    found += [_quantized(shape, "bfloat16", None, kind) for shape in QUANTIZED for kind in LARGEST]
    for shape in RAGGED:
        found += [_case(shape, "bfloat16", 5), _case(shape, "float16", 5)]
        found += [_quantized(shape, "bfloat16", 5, "int8")]
        found += [_quantized(shape, "float16", 5, "float8_e4m3fn")]
    return found


def _case(shape: NormShape, dtype: str, sm_budget: int | None) -> Case:
    names = _names(shape)
    centred = "layer_norm" if shape.centred else "rms_norm"
    function = getattr(norm, f"add_{centred}" if shape.residual else centred)

    def call(extra):
        def run(*inputs):
            return function(**dict(zip(names, inputs, strict=True)), eps=EPS, **extra)

        return run

    def truth(*inputs):
        normed, total = _truth(shape, inputs)
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


def _quantized(shape: NormShape, dtype: str, sm_budget: int | None, kind: str) -> Case:
    names = _names(shape)
    function = norm.quantized_layer_norm if shape.centred else norm.quantized_rms_norm

    def call(extra):
        def run(*inputs):
            given = dict(zip(names, inputs, strict=True))
            return function(**given, dtype=kind, eps=EPS, **extra)

        return run

    def truth(*inputs):
        normed, total = _truth(shape, inputs)
        scales = reference.quantization_scales(normed, LARGEST[kind])
        codes = reference.unrounded_codes(normed, scales)
        return norm.QuantizedNorm(codes, scales, total if shape.residual else None)

    codes = {"reduction": shape.width, "function_error": ROUNDING[kind]}
    close = (codes, {"reduction": shape.width}, {"reduction": 1})[: 2 + shape.residual]
    arrays = 6 if shape.residual else 2  # In bytes of a value, beside the code.
    return Case(
        kernel="norm",
        name=f"{shape.name}, {kind}" + (f", {sm_budget} SMs" if sm_budget else ""),
        dtype=dtype,
        make=functools.partial(_make, shape, tuple(names), dtype),
        run=call({"implementation": "mosaic_gpu", "sm_budget": sm_budget}),
        reference=truth,
        close=close,
        opponents={} if sm_budget else {"xla fusion": call({"implementation": "xla"})},
        num_bytes=shape.rows * ((arrays + 1) * shape.width + 4),
    )


def _names(shape: NormShape) -> list[str]:
    return ["x"] + ["residual"] * shape.residual + ["scale"] + ["bias"] * shape.bias


def _truth(shape: NormShape, inputs):
    """The norm and the sum, in float32."""
    named = {"bias": None, **dict(zip(_names(shape), inputs, strict=True))}
    x, scale = named["x"], named["scale"]
    total = reference.add(x, named["residual"]) if shape.residual else x
    if shape.centred:
        return reference.layer_norm(total, scale, named["bias"], eps=EPS), total
    return reference.rms_norm(total, scale, eps=EPS), total


def _make(shape: NormShape, names, dtype, key):
    keys = jax.random.split(key, len(names))
    arrays = []
    for k, name in zip(keys, names, strict=True):
        rows = (shape.rows, shape.width) if name in ("x", "residual") else (shape.width,)
        arrays.append((3 * jax.random.normal(k, rows, jnp.float32) + 0.5).astype(dtype))
    return tuple(arrays)
