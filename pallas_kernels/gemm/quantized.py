"""GEMMs of 8 bits, int8 or FP8 (e4m3): the public functions and their checks.

Each row of the input and each output feature of the weight has a scale, which the epilogue
multiplies by; so no kernel writes or reads what is not scaled. The norms give such inputs
(`norm.quantized_layer_norm`); behind an activation a scale of the whole result, known beforehand,
makes one, as a GEMM's tile never sees a whole row.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_arrays, number
from pallas_kernels.gemm import mosaic_gpu, xla
from pallas_kernels.gemm.activations import ACTIVATIONS, Activation
from pallas_kernels.gemm.api import ROWS, padded
from pallas_kernels.gemm.plan import Epilogue, Tile
from pallas_kernels.gemm.tiles import is_left_to_xla, tile_for
from pallas_kernels.quantization import LARGEST, Quantized

Accumulation = Literal["fast", "promoted"]
ACCUMULATIONS = ("fast", "promoted")
ResultDtype = Literal["bfloat16", "float16", "int8", "float8_e4m3fn"]
RESULTS = ("bfloat16", "float16", "int8", "float8_e4m3fn")


def quantized_gemm(
    x: Quantized,
    w: Quantized,
    *,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
    dtype: ResultDtype = "bfloat16",
    result_scale: Float[Array, ""] | None = None,
    accumulation: Accumulation = "fast",
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Num[Array, "*B N"]:
    """Multiplies 8 bits and finishes in one pass: residual + scale * activation(x @ w.T + bias).

    x and w stand for values * scales[..., None]. Products of int8 are summed exactly, those of FP8
    as `accumulation` says. From there on all is in float32, and rounded once. The kernel takes K
    and N in multiples of 64. Unless the kernel is named, few rows are left to XLA, as by `gemm`.

    Args:
      x: Input: values (..., K) with scales (...), or with None where that of w holds them.
      w: Weight, output features first: values (N, K) with scales (N,), of the type of x.
      bias: Added to each row before the activation, of any floating dtype of 16 or 32 bits.
      residual: Added last, in the dtype of the result.
      activation: See `gemm`.
      scale: Multiplies what is added to the residual.
      dtype: Of the result.
      result_scale: What a result of 8 bits is divided by before it is rounded, to nearest even;
        what is beyond the largest value of the type becomes that.
      accumulation: Of FP8: "fast", in the tensor cores, which keep some 14 bits of a sum, so that
        one of like signs falls short by 0.7 % at K = 4,096 and 4 % at 16,384; or "promoted", to
        float32 every 512 products, which takes up to 17 % longer and errs by 0.02 %.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: Overrides the choice made by shape.

    Returns:
      The result; of 8 bits, values whose scale is result_scale.

    Raises:
      ValueError: Shapes or dtypes that do not fit together, an unknown activation or dtype, a
        budget the device lacks.
      NotImplementedError: The named implementation cannot do this shape or device.
    """
    scale = number("quantized_gemm", "scale", scale)
    kernel = "quantized_gemm"
    check_quantized(kernel, x, (w,), bias, residual, activation, dtype, result_scale)
    check_accumulation(kernel, x, accumulation)
    epilogue = Epilogue(activation=activation, scale=scale, dtype=dtype)
    operands = (x, (w,), bias, residual, result_scale)
    return _dispatch(kernel, operands, epilogue, accumulation, sm_budget, implementation, tile)


def quantized_gated_gemm(
    x: Quantized,
    w_gate: Quantized,
    w: Quantized,
    *,
    activation: Activation | None = "silu",
    dtype: ResultDtype = "bfloat16",
    result_scale: Float[Array, ""] | None = None,
    accumulation: Accumulation = "fast",
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Num[Array, "*B N"]:
    """Multiplies two weights of 8 bits in one pass: activation(x @ w_gate.T) * (x @ w.T).

    Args:
      x: See `quantized_gemm`.
      w_gate: Weight of the gate, output features first.
      w: Weight of the value.
      activation: Of the gate.
      dtype: See `quantized_gemm`.
      result_scale: See `quantized_gemm`.
      accumulation: See `quantized_gemm`.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: Overrides the choice made by shape; its weights are 2.

    Returns:
      The result, as of `quantized_gemm`.

    Raises:
      ValueError: As for `quantized_gemm`.
      NotImplementedError: As for `quantized_gemm`.
    """
    kernel = "quantized_gated_gemm"
    check_quantized(kernel, x, (w_gate, w), None, None, activation, dtype, result_scale)
    check_accumulation(kernel, x, accumulation)
    epilogue = Epilogue(activation=activation, gated=True, dtype=dtype)
    operands = (x, (w_gate, w), None, None, result_scale)
    return _dispatch(kernel, operands, epilogue, accumulation, sm_budget, implementation, tile)


def _dispatch(kernel, operands, epilogue: Epilogue, accumulation, sm_budget, implementation, tile):
    """The result of the implementation that is named, or else of the best that can."""
    x, weights, bias, residual, result_scale = operands
    ctas = dispatch.check_sm_budget(kernel, sm_budget)
    rows, (n, k) = math.prod(x.values.shape[:-1]), weights[0].values.shape

    def on_hopper():
        if implementation is None:
            dispatch.require_hopper(kernel)
            few = functools.partial(is_left_to_xla, (rows,), n, k, gated=epilogue.gated)
            if few(num_sms=dispatch.num_sms(), operand_bytes=1):
                raise NotImplementedError(
                    f"{kernel}(x: {rows} rows, w: {n} x {k}): too few tiles to read a weight at "
                    "full bandwidth; leave it to implementation='xla'"
                )
        return _run(kernel, operands, epilogue, accumulation, ctas, tile)

    def by_xla():
        options = {"activation": epilogue.activation, "scale": epilogue.scale}
        options["accumulation"] = accumulation
        return xla.quantized_gemm(*operands, **options, dtype=str(epilogue.dtype))

    names = ("w_gate", "w") if epilogue.gated else ("w",)
    arrays = {"x": x.values, "x_scales": x.scales, "bias": bias, "residual": residual}
    for name, weight in zip(names, weights, strict=True):
        arrays |= {name: weight.values, f"{name}_scales": weight.scales}
    arguments = arrays | {
        "result_scale": result_scale,
        "activation": epilogue.activation,
        "scale": epilogue.scale,
        "dtype": epilogue.dtype,
        "accumulation": accumulation,
    }
    return dispatch.dispatch(
        kernel, implementation, {"mosaic_gpu": on_hopper, "xla": by_xla}, arguments
    )


def _run(kernel: str, operands, epilogue: Epilogue, accumulation, ctas: int, tile: Tile | None):
    """The result of one launch."""
    x, weights, bias, residual, result_scale = operands
    shape, (n, k) = x.values.shape[:-1], weights[0].values.shape
    m = math.prod(shape)
    if tile is None:
        tile = tile_for(
            (m,),
            n,
            k,
            gated=epilogue.gated,
            heavy=residual is not None or epilogue.activation is not None,
            ctas=ctas,
            num_sms=dispatch.num_sms(),
            operand_bytes=1,
            promoted=accumulation == "promoted",
        )
    scales = None if x.scales is None else (jnp.pad(x.scales.reshape(m), (0, -m % ROWS)),)
    (result,) = _matmul(
        (padded(x.values.reshape(m, k)),),
        tuple(w.values for w in weights),
        bias,
        None if residual is None else (padded(residual.reshape(m, n)),),
        scales,
        tuple(w.scales for w in weights),
        None if result_scale is None else result_scale.reshape(1),
        epilogue=epilogue,
        tile=tile,
        ctas=ctas,
        name=f"pbjax_{kernel}",
    )
    return result[:m].reshape(*shape, n)


# One launch is traced and lowered once for all its uses in a program.
_matmul = jax.jit(
    mosaic_gpu.matmul, static_argnames=("epilogue", "tile", "ctas", "name", "emulated")
)


def check_quantized(kernel, x, weights, bias, residual, activation, dtype, result_scale) -> None:
    """Raises ValueError unless the operands fit together, TypeError for no arrays."""
    names = ("w_gate", "w")[-len(weights) :]
    given = {"x": x.values} | {f"{n}": w.values for n, w in zip(names, weights, strict=True)}
    given |= {f"{n}.scales": w.scales for n, w in zip(names, weights, strict=True)}
    optional = {"x.scales": x.scales, "bias": bias, "residual": residual}
    check_arrays(kernel, given, optional | {"result_scale": result_scale})
    for name, w in zip(names, weights, strict=True):
        _check_weight(kernel, x, name, w, weights[-1])
    _check_scales(kernel, "x", x)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"{kernel}(activation={activation!r}): no such activation; there are "
            f"{', '.join(ACTIVATIONS)} and None; choose one"
        )
    if dtype not in RESULTS:
        raise ValueError(
            f"{kernel}(dtype={dtype!r}): no such result; there are {', '.join(RESULTS)}; name one"
        )
    _check_result(kernel, x, weights[-1], bias, residual, dtype, result_scale)


def check_accumulation(kernel: str, x: Quantized, accumulation: str) -> None:
    """Raises ValueError unless sums can be accumulated so."""
    if accumulation not in ACCUMULATIONS:
        raise ValueError(
            f"{kernel}(accumulation={accumulation!r}): no such way; there are "
            f"{', '.join(ACCUMULATIONS)}; choose one"
        )
    if accumulation == "promoted" and x.values.dtype == jnp.int8:
        raise ValueError(
            f"{kernel}(x: int8, accumulation={accumulation!r}): sums of int8 are exact and need no "
            "promotion; leave it out"
        )


def _check_weight(kernel: str, x: Quantized, name: str, w: Quantized, like: Quantized) -> None:
    """Raises ValueError unless a weight fits the input, and the other weight."""
    if x.values.ndim < 2 or w.values.ndim != 2 or x.values.shape[-1] != w.values.shape[-1]:
        raise ValueError(
            f"{kernel}(x: {x.values.shape}, {name}: {w.values.shape}): x is (..., K) with at least "
            f"one axis of rows, {name} is (N, K); give {name} with its output features first"
        )
    if 0 in x.values.shape or w.values.shape != like.values.shape or 0 in w.values.shape:
        raise ValueError(
            f"{kernel}(x: {x.values.shape}, {name}: {w.values.shape}): empty, or weights of two "
            f"shapes; every axis is at least 1, and weights are {like.values.shape}; reshape them"
        )
    if x.values.dtype not in LARGEST or w.values.dtype != x.values.dtype:
        raise ValueError(
            f"{kernel}(x: {x.values.dtype}, {name}: {w.values.dtype}): both are of one of "
            f"{', '.join(kind.name for kind in LARGEST)}; quantise them, or call gemm"
        )
    _check_scales(kernel, name, w)


def _check_scales(kernel: str, name: str, x: Quantized) -> None:
    rows = x.values.shape[:-1]
    if x.scales is not None and (x.scales.shape != rows or x.scales.dtype != jnp.float32):
        raise ValueError(
            f"{kernel}({name}.scales: {x.scales.dtype}{x.scales.shape}): each row of {name} has a "
            f"scale, float32{rows}; reshape or cast them"
        )


def _check_result(kernel: str, x, w, bias, residual, dtype, result_scale) -> None:
    """Raises ValueError unless what the epilogue adds fits the result."""
    n, eight_bit = w.values.shape[0], jnp.dtype(dtype) in LARGEST
    if bias is not None and (
        bias.shape != (n,) or bias.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32)
    ):
        raise ValueError(
            f"{kernel}(bias: {bias.dtype}{bias.shape}): a bias is floating of shape {(n,)}; "
            "reshape or cast it"
        )
    shape = (*x.values.shape[:-1], n)
    if residual is not None and (
        eight_bit or residual.shape != shape or residual.dtype != jnp.dtype(dtype)
    ):
        raise ValueError(
            f"{kernel}(residual: {residual.dtype}{residual.shape}, dtype={dtype!r}): a residual is "
            f"of the shape and dtype of the result, {shape}, and that of 16 bits; cast one of them"
        )
    if eight_bit != (result_scale is not None):
        raise ValueError(
            f"{kernel}(dtype={dtype!r}, result_scale: {'given' if not eight_bit else None}): a "
            "result of 8 bits has a scale, no other has; pass both or neither"
        )
    if result_scale is not None and (result_scale.shape != () or result_scale.dtype != jnp.float32):
        raise ValueError(
            f"{kernel}(result_scale: {result_scale.dtype}{result_scale.shape}): one float32 holds "
            "for the whole result; reshape or cast it"
        )
