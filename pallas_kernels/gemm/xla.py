"""The GEMMs as XLA runs them: a library product in the dtype of x, and what XLA fuses around it."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.reference import activate
from pallas_kernels.quantization import Quantized, rounded


def gemm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "*B N"] | None,
    *,
    activation: Activation | None,
    scale: float,
) -> Float[Array, "*B N"]:
    """The sum residual + scale * activation(x @ w + bias), each step rounded to x's dtype."""
    y = jnp.matmul(x, w)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    y = activate(y, activation)
    if scale != 1.0:
        y = y * jnp.asarray(scale, y.dtype)
    return y if residual is None else residual + y


def gated_gemm(
    x: Float[Array, "*B K"],
    w_gate: Float[Array, "K N"],
    w: Float[Array, "K N"],
    *,
    activation: Activation | None,
) -> Float[Array, "*B N"]:
    """activation(x @ w_gate) * (x @ w), each result rounded to the dtype of x."""
    return activate(jnp.matmul(x, w_gate), activation) * jnp.matmul(x, w)


def normed_gemm(
    x: Float[Array, "*B K"],
    row_scale: Float[Array, "*B"],
    weights: tuple[Float[Array, "K N"], ...],
    bias: Float[Array, " N"] | None,
    *,
    activation: Activation | None,
) -> Float[Array, "*B N"]:
    """activation(row_scale * (x @ w) + bias), or gated, in float32 and rounded once.

    Products before the scale may be beyond what float16 holds.
    """
    *gate, y = (
        jnp.matmul(x, w, preferred_element_type=jnp.float32) * row_scale[..., None] for w in weights
    )
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    y = activate(gate[0], activation) * y if gate else activate(y, activation)
    return y.astype(x.dtype)


def quantized_gemm(
    x: Quantized,
    weights: tuple[Quantized, ...],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "*B N"] | None,
    result_scale: Float[Array, ""] | None,
    *,
    activation: Activation | None,
    scale: float,
    dtype: DTypeLike,
    accumulation: str = "fast",
) -> Num[Array, "*B N"]:
    """What `quantized.quantized_gemm` says, or gated: a library product of 8 bits, and one pass."""
    kind = jnp.int32 if x.values.dtype == jnp.int8 else jnp.float32
    last = (((x.values.ndim - 1,), (1,)), ((), ()))
    # cuBLASLt sums FP8 in the tensor cores alone unless the highest precision is asked for.
    precision = lax.Precision.HIGHEST if accumulation == "promoted" else None
    products = []
    for w in weights:
        y = lax.dot_general(
            x.values, w.values, last, precision=precision, preferred_element_type=kind
        )
        y = y.astype(jnp.float32)
        for scales in (x.scales if x.scales is None else x.scales[..., None], w.scales):
            y = y if scales is None else y * jnp.broadcast_to(scales, y.shape)
        products.append(y)
    *gate, y = products
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    y = activate(gate[0], activation) * y if gate else activate(y, activation)
    if scale != 1.0:
        y = y * scale
    if residual is not None:
        y = residual.astype(jnp.float32) + y
    return rounded(y if result_scale is None else y / result_scale, dtype)


def row_scale(x: Float[Array, "*B D"], *, eps: float, centred: bool) -> Float[Array, "*B"]:
    """1 / sqrt(variance + eps) of rows in float32, or of the mean of squares."""
    x = x.astype(jnp.float32)
    if centred:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
