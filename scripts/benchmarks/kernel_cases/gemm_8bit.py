"""GEMMs of 8 bits of the six models: the product alone, with the epilogue, with an 8-bit result.

A product alone has scales of rows and columns in ours and none in the library's call, which is
timed for the operands' types alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm import quantized_gated_gemm, quantized_gemm, reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.gemm.shapes import (
    BERT,
    BLOOM,
    GPT2,
    LLAMA,
    RAGGED,
    SHAPES,
    VIT,
    GemmShape,
)
from pallas_kernels.quantization import LARGEST, Quantized, quantize

from . import Case

KINDS = ("float8_e4m3fn", "int8")
PEAK_FLOPS_PER_S = 1_979e12  # Of the data sheet of an H200; both types have it.
LONG_FLOPS = 8e10  # Of products that take longer than it takes to launch them, some 50 us.
# A second for each call of each is what a benchmark's minutes allow.
LONG_RUNS = {"float8_e4m3fn": ("bert", "gpt2", "bloom", "llama"), "int8": ("llama",)}
# With this a few values of a hidden layer lie beyond the largest of either type.
RESULT_SCALE = {"float8_e4m3fn": 0.01, "int8": 0.03}
LARGEST_SUMS = (6.0, 36.0)  # Of a deviation of 1; a gated result is the product of two.
PROMOTED_ERROR = reference.fp8_sum_error(512)
ROUNDING = {"float8_e4m3fn": 2.0**-10, "int8": 0.5}  # Half a step of the smallest codes.


def cases() -> list[Case]:
    """Every shape in both types; hidden layers also with results of 8 bits; ragged shapes."""
    plain = {(s.m, s.k, s.n): s for s in SHAPES if not s.gated and s.m >= 512 and s not in VIT}
    products = [
        GemmShape(name=f"{s.name}, product alone", m=s.m, k=s.k, n=s.n) for s in plain.values()
    ]
    hidden = [s for s in SHAPES if s.activation is not None and s.m >= 512]
    found = []
    for kind in KINDS:
        found += [_case(shape, kind) for shape in [*products, *SHAPES]]
        found += [_case(shape, kind, result=kind) for shape in hidden]
        found += [_case(shape, kind, sm_budget=50) for shape in RAGGED]
        found += [_case(shape, kind, sm_budget=1, dtype="float16") for shape in RAGGED]
        found += [_exact(shape, kind) for shape in [*RAGGED, *LLAMA] if not shape.gated]
    found += [_promoted(shape) for shape in (BERT[3], GPT2[3], BLOOM[3], *LLAMA[2:])]
    return found


def _promoted(shape: GemmShape) -> Case:
    """A product whose sums leave the tensor cores; XLA's by its highest precision."""
    case = _case(shape, "float8_e4m3fn")
    error = GELU_ERROR + PROMOTED_ERROR * LARGEST_SUMS[shape.gated]
    options = {"accumulation": "promoted"}
    return dataclasses.replace(
        case,
        name=f"{case.name}, promoted",
        run=functools.partial(case.run, **options),
        opponents={name: functools.partial(f, **options) for name, f in case.opponents.items()},
        close=({"reduction": shape.k, "function_error": error},),
    )


def _case(
    shape: GemmShape,
    kind: str,
    *,
    sm_budget: int | None = None,
    dtype: str = "bfloat16",
    result: str | None = None,
) -> Case:
    """A product with scales and its epilogue against that of dequantised operands."""
    weights, small = 1 + shape.gated, sm_budget is not None
    flops = 2 * weights * shape.m * shape.k * shape.n
    moved = shape.k * (shape.m + weights * shape.n)
    moved += shape.m * shape.n * (1 if result else 2 + 2 * shape.residual)
    call = functools.partial(_call, shape, result or dtype)
    if "alone" in shape.name:
        opponents = {"library product": functools.partial(_alone, kind)}
    else:
        opponents = {"xla": functools.partial(call, implementation="xla")}
    name = f"{shape.name}, {kind}" + (" result" if result else "")
    return Case(
        kernel="gemm_8bit",
        name=f"{name}, {sm_budget} SMs" if small else name,
        dtype=dtype,
        make=functools.partial(_make, shape, kind, dtype, result),
        run=functools.partial(call, implementation="mosaic_gpu", sm_budget=sm_budget),
        reference=functools.partial(_truth, shape, result),
        close=(_close(shape, kind, result),),
        opponents={} if small else opponents,
        flops=flops,
        num_bytes=moved,
        peak_flops_per_s=PEAK_FLOPS_PER_S,
        sustained=flops >= LONG_FLOPS and result is None and shape.name.startswith(LONG_RUNS[kind]),
    )


def _exact(shape: GemmShape, kind: str) -> Case:
    """Small integers and scales that are powers of two: nothing is rounded but the result."""

    def make(key):
        keys = jax.random.split(key, 6)
        x, w = (
            Quantized(
                jax.random.randint(k, (rows, shape.k), -2, 3).astype(kind),
                jnp.exp2(jax.random.randint(s, (rows,), -4, 0)),
            )
            for k, s, rows in zip(keys[:2], keys[2:4], (shape.m, shape.n), strict=True)
        )
        bias = jax.random.randint(keys[4], (shape.n,), -8, 8).astype("bfloat16")
        residual = jax.random.randint(keys[5], (shape.m, shape.n), -8, 8).astype("bfloat16")
        return x, w, bias, residual

    def run(x, w, bias, residual):
        operands = {"bias": bias, "residual": residual, "activation": "relu"}
        return quantized_gemm(x, w, **operands, implementation="mosaic_gpu")

    def truth(x, w, bias, residual):
        y = reference.quantized_gemm(x, w, bias, residual, activation="relu")
        return y.astype(jnp.bfloat16).astype(jnp.float32)

    return Case(
        kernel="gemm_8bit",
        name=f"{shape.name}, {kind}, exact",
        dtype="bfloat16",
        make=make,
        run=run,
        reference=truth,
        close=({"reduction": 1},),
        flops=2 * shape.m * shape.k * shape.n,
        num_bytes=shape.k * (shape.m + shape.n) + 4 * shape.m * shape.n,
    )


def _call(shape: GemmShape, dtype: str, *operands, **options):
    """The public function, or its XLA form."""
    given = dict(zip(_names(shape, dtype), operands, strict=True)) | options
    given |= {"activation": shape.activation, "dtype": dtype}
    if shape.gated:
        return quantized_gated_gemm(**given)
    return quantized_gemm(**given, scale=shape.scale)


def _alone(kind: str, x: Quantized, w: Quantized):
    """The library's product: to bfloat16, or of int8 to int32, which is all it offers."""
    result = jnp.int32 if kind == "int8" else jnp.bfloat16
    last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.values, w.values, last, preferred_element_type=result)


def _truth(shape: GemmShape, result: str | None, *operands):
    """The result in float32; of 8 bits, before it is rounded."""
    given = dict(zip(_names(shape, result or "bfloat16"), operands, strict=True))
    result_scale = given.pop("result_scale", None)
    if shape.gated:
        y = reference.quantized_gated_gemm(**given, activation=shape.activation)
    else:
        options = {"activation": shape.activation, "scale": shape.scale}
        y = reference.quantized_gemm(**given, **options)
    if result is None:
        return y
    largest = LARGEST[jnp.dtype(result)]
    return jnp.clip(y / result_scale, -largest, largest)


def _close(shape: GemmShape, kind: str, result: str | None) -> dict:
    error = GELU_ERROR
    if kind == "float8_e4m3fn":
        error += reference.fp8_sum_error(shape.k) * LARGEST_SUMS[shape.gated]
    if result:
        error = error / RESULT_SCALE[result] + ROUNDING[result]
    return {"reduction": shape.k, "function_error": error}


def _names(shape: GemmShape, dtype: str) -> list[str]:
    names = ["x", "w_gate", "w"] if shape.gated else ["x", "w"]
    names += ["bias"] * (shape.bias and not shape.gated) + ["residual"] * shape.residual
    return names + ["result_scale"] * (dtype in KINDS)


def _make(shape: GemmShape, kind: str, dtype: str, result: str | None, key):
    sizes = {
        "x": (shape.m, shape.k),
        "w": (shape.n, shape.k),
        "w_gate": (shape.n, shape.k),
        "bias": (shape.n,),
        "residual": (shape.m, shape.n),
    }
    names = [n for n in _names(shape, result or dtype) if n != "result_scale"]
    keys = jax.random.split(key, len(names))
    found = []
    for k, name in zip(keys, names, strict=True):
        array = jax.random.normal(k, sizes[name], jnp.float32)
        array *= shape.k**-0.5 if name.startswith("w") else 1.0
        quantized = name in ("x", "w", "w_gate")
        found.append(quantize(array, kind) if quantized else array.astype(dtype))
    return (*found, jnp.float32(RESULT_SCALE[result])) if result else tuple(found)
