"""LayerNorm and RMSNorm, alone or after a residual sum: the public functions and their checks."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_arrays, number
from pallas_kernels.norm import mosaic_gpu, xla
from pallas_kernels.norm.mosaic_gpu import Tile, tile_for
from pallas_kernels.quantization import LARGEST, QuantizedDtype


class AddNorm(NamedTuple):
    """A residual sum and its norm, both in the dtype of x.

    Attributes:
      normed: The norm of the sum, from the sum in f32.
      total: The sum, the residual of what follows.
    """

    normed: Float[Array, "*B D"]
    total: Float[Array, "*B D"]


class QuantizedNorm(NamedTuple):
    """A norm as one-byte values and a scale per row; the norm is values * scales[..., None].

    Attributes:
      values: Values of the requested type; the largest of a row becomes the largest absolute value
        of the type, 127 or 448.
      scales: In f32; 0 for a row of zeros.
      total: The residual sum in the dtype of x; None without a residual.
    """

    values: Num[Array, "*B D"]
    scales: Float[Array, "*B"]
    total: Float[Array, "*B D"] | None


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B D"]:
    """Computes (x - mean) / sqrt(variance + eps) * scale + bias over the last axis, in f32.

    The kernel takes bfloat16 and float16 rows of 64 to 16,384 values: multiples of 64 up to 2,048,
    of 256 beyond.

    Args:
      x: Values; leading axes count as rows.
      scale: Gain per feature, of any floating dtype.
      bias: Added per feature.
      eps: Added to the variance.
      sm_budget: SMs that the kernel may fill; None: all. XLA's implementation knows no budget and
        ignores it.
      implementation: "mosaic_gpu", "xla" or None for the best that can.
      tile: Overrides the choice made by width.

    Returns:
      The normalised values, in the dtype of x.

    Raises:
      ValueError: Shapes or dtypes do not fit together, or the budget exceeds the device's SMs.
      NotImplementedError: The named implementation cannot do this width, dtype or device.

    Source: Ba, Kiros and Hinton 2016, equation 3.
    """
    options = (sm_budget, implementation, tile)
    return _dispatch("layer_norm", x, None, scale, bias, eps, True, *options)[0]


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B D"]:
    """Computes x / sqrt(mean of squares + eps) * scale over the last axis, in f32.

    Args:
      x: Values; leading axes count as rows.
      scale: Gain per feature, of any floating dtype.
      eps: Added to the mean of squares.
      sm_budget: See `layer_norm`.
      implementation: See `layer_norm`.
      tile: See `layer_norm`.

    Returns:
      The normalised values, in the dtype of x.

    Raises:
      ValueError: See `layer_norm`.
      NotImplementedError: See `layer_norm`.

    Source: Zhang and Sennrich 2019, equation 4.
    """
    options = (sm_budget, implementation, tile)
    return _dispatch("rms_norm", x, None, scale, None, eps, False, *options)[0]


def add_layer_norm(
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> AddNorm:
    """The LayerNorm of x + residual, and that sum, in one pass; arguments as of `layer_norm`.

    Args:
      x: Values; leading axes count as rows.
      residual: Added to x.
      scale: Gain per feature.
      bias: Added per feature.
      eps: Added to the variance.
      sm_budget: See `layer_norm`.
      implementation: See `layer_norm`.
      tile: See `layer_norm`.

    Returns:
      The norm and the sum.

    Raises:
      ValueError: See `layer_norm`.
      NotImplementedError: See `layer_norm`.
    """
    options = (sm_budget, implementation, tile)
    return AddNorm(*_dispatch("add_layer_norm", x, residual, scale, bias, eps, True, *options))


def add_rms_norm(
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> AddNorm:
    """The RMSNorm of x + residual, and that sum, in one pass; arguments as of `layer_norm`.

    Args:
      x: Values; leading axes count as rows.
      residual: Added to x.
      scale: Gain per feature.
      eps: Added to the mean of squares.
      sm_budget: See `layer_norm`.
      implementation: See `layer_norm`.
      tile: See `layer_norm`.

    Returns:
      The norm and the sum.

    Raises:
      ValueError: See `layer_norm`.
      NotImplementedError: See `layer_norm`.
    """
    options = (sm_budget, implementation, tile)
    return AddNorm(*_dispatch("add_rms_norm", x, residual, scale, None, eps, False, *options))


def quantized_layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    *,
    dtype: QuantizedDtype,
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> QuantizedNorm:
    """LayerNorm of x, or of x + residual, quantised with one scale per row, in one pass.

    Args:
      x: Values; leading axes count as rows.
      scale: Gain per feature.
      bias: Added per feature.
      dtype: "int8", rounded to nearest even, or "float8_e4m3fn".
      eps: Added to the variance.
      residual: Added to x.
      sm_budget: See `layer_norm`.
      implementation: See `layer_norm`.
      tile: See `layer_norm`.

    Returns:
      The quantised norm, its scales, and with a residual the sum.

    Raises:
      ValueError: See `layer_norm`; also for an unknown dtype.
      NotImplementedError: See `layer_norm`.
    """
    options = (sm_budget, implementation, tile)
    return _quantized("quantized_layer_norm", x, residual, scale, bias, eps, True, options, dtype)


def quantized_rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    dtype: QuantizedDtype,
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> QuantizedNorm:
    """RMSNorm of x, or of x + residual, quantised with one scale per row, in one pass.

    Args:
      x: Values; leading axes count as rows.
      scale: Gain per feature.
      dtype: See `quantized_layer_norm`.
      eps: Added to the mean of squares.
      residual: Added to x.
      sm_budget: See `layer_norm`.
      implementation: See `layer_norm`.
      tile: See `layer_norm`.

    Returns:
      The quantised norm, its scales, and with a residual the sum.

    Raises:
      ValueError: See `quantized_layer_norm`.
      NotImplementedError: See `layer_norm`.
    """
    options = (sm_budget, implementation, tile)
    return _quantized("quantized_rms_norm", x, residual, scale, None, eps, False, options, dtype)


def _quantized(kernel, x, residual, scale, bias, eps, centred, options, dtype) -> QuantizedNorm:
    if dtype not in (names := [kind.name for kind in LARGEST]):
        raise ValueError(
            f"{kernel}(dtype={dtype!r}): unknown dtype; choices are {', '.join(names)}; choose one"
        )
    rest = (scale, bias, eps, centred, *options, jnp.dtype(dtype))
    values, *total, scales = _dispatch(kernel, x, residual, *rest)
    return QuantizedNorm(values, scales, total[0] if total else None)


def check_norm(kernel: str, x, residual, scale, bias, eps: float) -> None:
    """Raises ValueError unless the operands of a norm fit together, TypeError for no arrays."""
    check_arrays(kernel, {"x": x, "scale": scale}, {"residual": residual, "bias": bias})
    if x.ndim < 2 or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{kernel}(x: {x.dtype}{x.shape}): floating rows (..., D) of at least one value are "
            "normalised; reshape or cast x"
        )
    for name, array in (("scale", scale), ("bias", bias)):
        if array is not None and (
            array.shape != x.shape[-1:] or not jnp.issubdtype(array.dtype, jnp.floating)
        ):
            raise ValueError(
                f"{kernel}({name}: {array.dtype}{array.shape}): rows have {x.shape[-1]} features; "
                f"{name} is floating of shape {x.shape[-1:]}; reshape or cast it"
            )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{kernel}(residual: {residual.dtype}{residual.shape}): x is {x.dtype}{x.shape}; both "
            "are alike; reshape or cast one"
        )
    if not eps >= 0:
        raise ValueError(f"{kernel}(eps={eps}): eps must be at least 0; pass the model's epsilon")


def _dispatch(
    kernel, x, residual, scale, bias, eps, centred, sm_budget, implementation, tile, dtype=None
) -> tuple[Array, ...]:
    eps = number(kernel, "eps", eps)
    check_norm(kernel, x, residual, scale, bias, eps)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    flat_x = x.reshape(rows, width)
    flat_residual = None if residual is None else residual.reshape(rows, width)
    operands = (flat_x, flat_residual, scale, bias)
    options = {"eps": eps, "centred": centred, "dtype": dtype}

    def launch(sms: int) -> tuple[Array, ...]:
        chosen = tile or tile_for(width, residual=residual is not None, quantized=dtype is not None)
        return _normalise(*operands, **options, tile=chosen, ctas=sms, name=f"pbjax_{kernel}")

    results = dispatch.run_kernel(
        kernel,
        launch=launch,
        plain=lambda: xla.normalise(*operands, **options),
        sm_budget=sm_budget,
        implementation=implementation,
        arguments={
            "x": x,
            "residual": residual,
            "scale": scale,
            "bias": bias,
            "eps": eps,
            "dtype": dtype,
        },
    )
    return tuple(a.reshape(*x.shape[:-1], *a.shape[1:]) for a in results)


# One launch is traced and lowered once for all its uses in a program.
_normalise = jax.jit(
    mosaic_gpu.normalise,
    static_argnames=("eps", "centred", "tile", "ctas", "name", "dtype", "emulated"),
)
