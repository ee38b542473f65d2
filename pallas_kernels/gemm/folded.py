"""GEMMs with the norm before them, and the statistics that the next such GEMM needs.

A LayerNorm is (x - mean) / deviation * gain + offset. Its gain and offset go into the weight and
the bias of the product that follows, and so does the mean: taking it from x is taking the mean of
each column from the weight. What is left is one factor per row, 1 / deviation, which the epilogue
applies. So the product reads x itself, and no kernel writes or reads a normed copy of it. RMSNorm
is the same without the mean and the offset. `models.folding` prepares weights.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_arrays, number
from pallas_kernels.gemm import xla
from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.api import check_gemm, run_groups, where_best
from pallas_kernels.gemm.mosaic_gpu import PIECE, Epilogue, Tile


class ScaledRows(NamedTuple):
    """Values, and what the norm after them multiplies each row by.

    Attributes:
      values: Any rows.
      scale: 1 / sqrt(variance + eps) of each row, of RMSNorm 1 / sqrt(mean of squares + eps), in
        float32.
    """

    values: Float[Array, "*B D"]
    scale: Float[Array, "*B"]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape


def scale_rows(x: Float[Array, "*B D"], *, eps: float, centred: bool) -> ScaledRows:
    """Rows that no GEMM made, with their scale by plain JAX; arguments as of `gemm_for_norm`."""
    return ScaledRows(x, xla.row_scale(x, eps=eps, centred=centred))


def normed_gemm(
    x: Float[Array, "*B K"],
    row_scale: Float[Array, "*B"],
    w: Float[Array, "K N"],
    *,
    w_gate: Float[Array, "K N"] | None = None,
    bias: Float[Array, " N"] | None = None,
    activation: Activation | None = None,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B N"]:
    """Multiplies, scales rows and finishes in one pass: activation(row_scale * (x @ w) + bias).

    With a gate activation(row_scale * (x @ w_gate)) * row_scale * (x @ w). Otherwise as `gemm`.

    Args:
      x: Input; leading axes count as rows.
      row_scale: Factor of each row in float32.
      w: Weight, input features first, with the norm folded in.
      w_gate: Weight of the gate, likewise; there is no bias then.
      bias: Added to each row before the activation.
      activation: See `gemm`.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: Overrides the choice made by shape.

    Returns:
      The result, in the dtype of x.

    Raises:
      ValueError: As for `gemm`; a bias with a gate, other factors than one per row in float32.
      NotImplementedError: As for `gemm`.
    """
    gated = w_gate is not None
    check_normed_gemm(x, row_scale, w, w_gate, bias, activation)
    ctas = dispatch.check_sm_budget("normed_gemm", sm_budget)
    weights = (w_gate, w) if gated else (w,)
    epilogue = Epilogue(activation=activation, gated=gated)
    run = functools.partial(
        run_groups, [x], weights, bias, None, epilogue, ctas, tile, row_scales=[row_scale]
    )
    return dispatch.dispatch(
        "normed_gemm",
        implementation,
        {
            "mosaic_gpu": where_best("normed_gemm", [x], weights, implementation, lambda: run()[0]),
            "xla": lambda: xla.normed_gemm(x, row_scale, weights, bias, activation=activation),
        },
        {
            "x": x,
            "row_scale": row_scale,
            "w": w,
            "w_gate": w_gate,
            "bias": bias,
            "activation": activation,
        },
    )


def gemm_for_norm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    *,
    eps: float,
    centred: bool,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    scale: float = 1.0,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> ScaledRows:
    """A GEMM, residual + scale * (x @ w + bias), and what a norm of its rows divides them by.

    The kernel keeps mean and squared deviations of every 64 columns of a row as it stores them,
    in float32, and joins them by the pairwise rule, so that nothing is lost where the mean is
    large. Otherwise as `gemm`.

    Args:
      x: See `gemm`.
      w: See `gemm`.
      eps: Added to the variance, or to the mean of squares.
      centred: Whether the norm takes the mean from its rows: LayerNorm; else RMSNorm.
      bias: See `gemm`.
      residual: See `gemm`.
      scale: See `gemm`.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: Overrides the choice made by shape.

    Returns:
      The result, in the dtype of x, and the factor of each of its rows.

    Raises:
      ValueError: As for `gemm`; a negative eps.
      NotImplementedError: As for `gemm`.

    Source: Chan, Golub and LeVeque 1983, equation 1.5, for joining the moments of parts.
    """
    scale, eps = number("gemm_for_norm", "scale", scale), number("gemm_for_norm", "eps", eps)
    check_gemm(x, w, bias, residual, None)
    if not eps >= 0:
        raise ValueError(f"gemm_for_norm(eps={eps}): it is at least 0; pass the norm's epsilon")
    ctas = dispatch.check_sm_budget("gemm_for_norm", sm_budget)
    residuals = None if residual is None else [residual]
    epilogue = Epilogue(scale=scale, moments=True)

    def run():
        y, moments = run_groups([x], (w,), bias, residuals, epilogue, ctas, tile)
        rows = joined_scale(moments, eps=eps, centred=centred)[: math.prod(x.shape[:-1])]
        return ScaledRows(y, rows.reshape(x.shape[:-1]))

    def plain():
        y = xla.gemm(x, w, bias, residual, activation=None, scale=scale)
        return ScaledRows(y, xla.row_scale(y, eps=eps, centred=centred))

    return dispatch.dispatch(
        "gemm_for_norm",
        implementation,
        {"mosaic_gpu": where_best("gemm_for_norm", [x], (w,), implementation, run), "xla": plain},
        {
            "x": x,
            "w": w,
            "eps": eps,
            "centred": centred,
            "bias": bias,
            "residual": residual,
            "scale": scale,
        },
    )


def check_normed_gemm(x, row_scale, w, w_gate, bias, activation) -> None:
    """Raises ValueError unless the operands fit together, TypeError for no arrays."""
    check_gemm(x, w, bias, None, activation)
    check_arrays("normed_gemm", {"row_scale": row_scale})
    if row_scale.shape != x.shape[:-1] or row_scale.dtype != jnp.float32:
        raise ValueError(
            f"normed_gemm(row_scale: {row_scale.dtype}{row_scale.shape}): x has rows of shape "
            f"{x.shape[:-1]}; each has a factor in float32; take them from gemm_for_norm or "
            "scale_rows"
        )
    if w_gate is not None:
        check_gemm(x, w_gate, None, None, activation)
        if bias is not None or w_gate.shape != w.shape:
            raise ValueError(
                f"normed_gemm(w_gate: {w_gate.shape}, w: {w.shape}): with a gate there are two "
                "weights of one shape and no bias; leave out the bias, or the gate"
            )


def joined_scale(moments: Float[Array, "P M"], *, eps: float, centred: bool) -> Float[Array, " M"]:
    """1 / sqrt(variance + eps) of rows, from mean and squared deviations of equal parts of them."""
    means, deviations = moments[0::2], moments[1::2]
    # LayerNorm's about the first part's mean, not 0: both sums then take one pass, and cancel
    # nothing large.
    means = means - means[:1] if centred else means
    second = jnp.mean(means * means + deviations * (1 / PIECE), axis=0)
    if centred:
        second = second - jnp.square(jnp.mean(means, axis=0))
    return jax.lax.rsqrt(second + eps)
