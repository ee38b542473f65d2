"""Activations in f32, written with what is fast on the GPU: exp2, rsqrt, multiply, add."""

import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Activation = Literal["gelu", "gelu_tanh", "silu", "sigmoid", "relu"]

# log2 of the normal distribution's lower tail, log2(P(Z < -t)), for t in [0, 6]: fitted so that t
# times the tail is right to GELU_ERROR absolutely. Beyond 6 the polynomial falls without end, as
# the logarithm does.
_LOG2_TAIL = (-1.0, -1.15100062, -0.459595561, -0.0521469781, 0.00719888461, -0.000488129186)
GELU_ERROR = 6e-7


def gelu(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Exact GELU, x * P(Z < x), as max(x, 0) - |x| * P(Z < -|x|); right to GELU_ERROR."""
    t = jnp.minimum(jnp.abs(x), 16.0)
    exponent = jnp.full_like(t, _LOG2_TAIL[-1])
    for coefficient in _LOG2_TAIL[-2::-1]:
        exponent = exponent * t + coefficient
    return jnp.maximum(x, 0.0) - t * jnp.exp2(exponent)


def gelu_tanh(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """GELU by tanh: x * sigmoid(2 * u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3).

    The constants are gathered: exp(-2 * u) is exp2 of x times a polynomial of x^2.
    """
    factor = -2 * math.sqrt(2 / math.pi) * math.log2(math.e)
    root = lax.rsqrt(1.0 + jnp.exp2(x * (factor + (0.044715 * factor) * (x * x))))
    return x * (root * root)


def silu(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """SiLU: x * sigmoid(x)."""
    return x * sigmoid(x)


def sigmoid(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """1 / (1 + exp(-x)), by a squared reciprocal root: a division takes ten operations."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return root * root


def relu(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """max(x, 0)."""
    return jnp.maximum(x, 0.0)


ACTIVATIONS: dict[Activation, Callable[[Float[Array, "*B"]], Float[Array, "*B"]]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "sigmoid": sigmoid,
    "relu": relu,
}
