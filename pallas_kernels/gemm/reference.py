"""What the GEMM kernels compute, in plain jnp and float32: the truth they are checked against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.activations import Activation
from pallas_kernels.quantization import Quantized


def gemm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    *,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> Float[Array, "*B N"]:
    """The sum residual + scale * activation(x @ w + bias), in float32."""
    y = _product(x, w)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    y = scale * activate(y, activation)
    return y if residual is None else residual.astype(jnp.float32) + y


def gated_gemm(
    x: Float[Array, "*B K"],
    w_gate: Float[Array, "K N"],
    w: Float[Array, "K N"],
    *,
    activation: Activation | None = "silu",
) -> Float[Array, "*B N"]:
    """activation(x @ w_gate) * (x @ w), in float32."""
    return activate(_product(x, w_gate), activation) * _product(x, w)


def normed_gemm(
    x: Float[Array, "*B K"],
    row_scale: Float[Array, "*B"],
    w: Float[Array, "K N"],
    *,
    w_gate: Float[Array, "K N"] | None = None,
    bias: Float[Array, " N"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "*B N"]:
    """activation(row_scale * (x @ w) + bias), or with a gate, in float32."""
    y = _product(x, w) * row_scale[..., None]
    if w_gate is not None:
        return activate(_product(x, w_gate) * row_scale[..., None], activation) * y
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return activate(y, activation)


def dequantized(x: Quantized) -> Float[Array, "*B K"]:
    """The matrix that values and scales stand for, in float32."""
    values = x.values.astype(jnp.float32)
    return values if x.scales is None else values * x.scales[..., None]


def quantized_gemm(
    x: Quantized,
    w: Quantized,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    *,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> Float[Array, "*B N"]:
    """`gemm` of the dequantised operands; w is (N, K)."""
    product = {"activation": activation, "scale": scale}
    return gemm(dequantized(x), dequantized(w).T, bias, residual, **product)


def quantized_gated_gemm(
    x: Quantized, w_gate: Quantized, w: Quantized, *, activation: Activation | None = "silu"
) -> Float[Array, "*B N"]:
    """`gated_gemm` of the dequantised operands; weights are (N, K)."""
    weights = (dequantized(w_gate).T, dequantized(w).T)
    return gated_gemm(dequantized(x), *weights, activation=activation)


def fp8_sum_error(k: int) -> float:
    """How far a tensor core's sum of k products of FP8 may lie from exact, over its magnitude.

    It aligns 32 products and the sum so far to the largest of them, and drops what is below some
    14 bits of that: a random part, which grows as the root of the steps, and one towards zero,
    which grows as their number; weighed as in `testing.tolerance`.
    """
    steps = k / 32
    return 2.0**-13 * (steps**0.5 + steps / 4)


def row_scale(x: Float[Array, "*B D"], *, eps: float, centred: bool) -> Float[Array, "*B"]:
    """1 / sqrt(variance + eps) of each row, of RMSNorm the mean of squares, in float32."""
    x = x.astype(jnp.float32)
    if centred:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return 1 / jnp.sqrt(jnp.mean(x * x, axis=-1) + eps)


def activate(y: Float[Array, "*B"], activation: Activation | None) -> Float[Array, "*B"]:
    """Applies an activation by its name, as jax.nn defines it."""
    match activation:
        case None:
            return y
        case "gelu":
            return jax.nn.gelu(y, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(y, approximate=True)
        case "silu":
            return jax.nn.silu(y)
        case "sigmoid":
            return jax.nn.sigmoid(y)
        case "relu":
            return jax.nn.relu(y)


def _product(x: Float[Array, "*B K"], w: Float[Array, "K N"]) -> Float[Array, "*B N"]:
    return jnp.matmul(
        x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
