"""GEMMs with fused epilogues: the public functions, their checks, the implementation chosen."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.gemm import mosaic_gpu, xla
from pallas_kernels.gemm.activations import ACTIVATIONS, Activation
from pallas_kernels.gemm.mosaic_gpu import Epilogue, Tile
from pallas_kernels.gemm.tiles import tile_for


def gemm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    *,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B N"]:
    """Multiplies and finishes in one pass: residual + scale * activation(x @ w + bias).

    Products are summed in f32 and stay there until the result is rounded once. The kernel takes
    bfloat16 and float16, rows in multiples of 8, K and N in multiples of 64.

    Args:
      x: Input; leading axes count as rows.
      w: Weight, input features first.
      bias: Added to each row before the activation.
      residual: Added last.
      activation: "gelu" is exact, by the error function (absolute error 6e-7); "gelu_tanh" its
        approximation.
      scale: Multiplies what is added to the residual.
      sm_budget: SMs that the kernel may fill; None: all. XLA's implementation knows no budget and
        ignores it.
      implementation: "mosaic_gpu", "xla" or None for the best that can.
      tile: Overrides the choice made by shape.

    Returns:
      The result, in the dtype of x.

    Raises:
      ValueError: Shapes or dtypes that do not fit together, an unknown activation, a budget the
        device lacks.
      NotImplementedError: The named implementation cannot do this shape, dtype or device.
    """
    check_gemm(x, w, bias, residual, activation)
    ctas = dispatch.check_sm_budget("gemm", sm_budget)
    run = functools.partial(
        _run, x, (w,), bias, residual, Epilogue(activation=activation, scale=scale), ctas, tile
    )
    return dispatch.dispatch(
        "gemm",
        implementation,
        {
            "mosaic_gpu": _on_hopper("gemm", implementation, run),
            "xla": lambda: xla.gemm(x, w, bias, residual, activation=activation, scale=scale),
        },
    )


def gated_gemm(
    x: Float[Array, "*B K"],
    w_gate: Float[Array, "K N"],
    w: Float[Array, "K N"],
    *,
    activation: Activation | None = "silu",
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B N"]:
    """Multiplies two weights in one pass: activation(x @ w_gate) * (x @ w).

    With "silu" the first half of a SwiGLU layer, with "sigmoid" a gated linear unit.

    Args:
      x: Input; leading axes count as rows.
      w_gate: Weight of the gate, input features first.
      w: Weight of the value.
      activation: Of the gate.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: Overrides the choice made by shape; its weights are 2.

    Returns:
      The result, in the dtype of x.

    Raises:
      ValueError: As for `gemm`.
      NotImplementedError: As for `gemm`.
    """
    check_gemm(x, w, None, None, activation)
    _check_like("w_gate", w_gate, w.shape, x)
    ctas = dispatch.check_sm_budget("gated_gemm", sm_budget)
    epilogue = Epilogue(activation=activation, gated=True)
    run = functools.partial(_run, x, (w_gate, w), None, None, epilogue, ctas, tile)
    return dispatch.dispatch(
        "gated_gemm",
        implementation,
        {
            "mosaic_gpu": _on_hopper("gated_gemm", implementation, run),
            "xla": lambda: xla.gated_gemm(x, w_gate, w, activation=activation),
        },
    )


def _on_hopper(kernel, implementation, run):
    """What the kernel would do: refuse another device, unless it was asked for by name."""

    def attempt():
        if implementation is None:
            dispatch.require_hopper(kernel)
        return run()

    return attempt


def _run(x, weights, bias, residual, epilogue: Epilogue, ctas: int, tile: Tile | None):
    rows, n = math.prod(x.shape[:-1]), weights[0].shape[1]
    if tile is None:
        tile = tile_for(
            rows, n, x.shape[-1], gated=epilogue.gated, ctas=ctas, num_sms=dispatch.num_sms()
        )
    if residual is not None:
        residual = residual.reshape(rows, n)
    y = _matmul(
        x.reshape(rows, x.shape[-1]),
        weights,
        bias,
        residual,
        epilogue=epilogue,
        tile=tile,
        ctas=ctas,
        name="pbjax_gated_gemm" if epilogue.gated else "pbjax_gemm",
    )
    return y.reshape(*x.shape[:-1], n)


# One launch is traced and lowered once for all its uses in a program.
_matmul = jax.jit(mosaic_gpu.matmul, static_argnames=("epilogue", "tile", "ctas", "name"))


def check_gemm(x, w, bias, residual, activation) -> None:
    """Raises ValueError unless the operands of a GEMM fit together."""
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"gemm(x: {x.shape}, w: {w.shape}): x is (..., K) with at least one axis of rows, w "
            "is (K, N); give w with its input features first"
        )
    if 0 in x.shape or 0 in w.shape:
        raise ValueError(f"gemm(x: {x.shape}, w: {w.shape}): empty; every axis is at least 1")
    if not jnp.issubdtype(x.dtype, jnp.floating) or w.dtype != x.dtype:
        raise ValueError(
            f"gemm(x: {x.dtype}, w: {w.dtype}): both are of one floating dtype; cast one of them"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"gemm(activation={activation!r}): no such activation; there are "
            f"{', '.join(ACTIVATIONS)} and None; choose one"
        )
    _check_like("bias", bias, (w.shape[1],), x)
    _check_like("residual", residual, (*x.shape[:-1], w.shape[1]), x)


def _check_like(name: str, array, shape, x) -> None:
    if array is not None and (array.shape != tuple(shape) or array.dtype != x.dtype):
        raise ValueError(
            f"gemm({name}: {array.dtype}{array.shape}): this x and w want "
            f"{x.dtype}{tuple(shape)}; reshape or cast it"
        )
