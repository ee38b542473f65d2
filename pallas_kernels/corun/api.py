"""A GEMM and bandwidth-bound work of another sub-batch in one launch: the public functions."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.corun import mosaic_gpu
from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.api import check_gemm, gemm
from pallas_kernels.gemm.mosaic_gpu import Epilogue
from pallas_kernels.norm.api import add_layer_norm, add_rms_norm, check_norm


class GemmBesideNorm(NamedTuple):
    """Results of two independent pieces of work.

    Attributes:
      product: residual + scale * activation(x @ w + bias), as of `gemm`.
      normed: The norm of the other sub-batch's sum.
      total: That sum.
    """

    product: Float[Array, "*B N"]
    normed: Float[Array, "*C D"]
    total: Float[Array, "*C D"]


class GemmBesideSums(NamedTuple):
    """Results of two independent pieces of work.

    Attributes:
      product: As of `gemm`.
      sums: The column sums of the data, in f32.
    """

    product: Float[Array, "*B N"]
    sums: Float[Array, " C"]


def gemm_beside_norm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    norm_x: Float[Array, "*C D"],
    norm_residual: Float[Array, "*C D"],
    norm_scale: Float[Array, " D"],
    norm_bias: Float[Array, " D"] | None = None,
    *,
    eps: float,
    centred: bool,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> GemmBesideNorm:
    """A GEMM of one sub-batch beside the residual sum and norm of another, in one launch.

    Args:
      x: Input of the GEMM, as of `gemm`.
      w: Its weight.
      norm_x: Rows to add to and normalise, as of `add_layer_norm`; widths to 4,096.
      norm_residual: Added to norm_x.
      norm_scale: Gain per feature.
      norm_bias: Added per feature.
      eps: Added to the variance.
      centred: Whether the mean is subtracted: LayerNorm, else RMSNorm, which has no bias.
      bias: Of the GEMM.
      residual: Of the GEMM.
      activation: Of the GEMM.
      sm_budget: SMs that the launch may fill; None: all.
      implementation: "mosaic_gpu" for the one launch, "xla" for one after the other, None for the
        best that can.

    Returns:
      The results of both.

    Raises:
      ValueError: As for `gemm` and `add_layer_norm`.
      NotImplementedError: The named implementation cannot do these shapes, dtypes or device.
    """
    check_gemm(x, w, bias, residual, activation)
    check_norm("gemm_beside_norm", norm_x, norm_residual, norm_scale, norm_bias, eps)
    if norm_bias is not None and not centred:
        raise ValueError(
            "gemm_beside_norm(centred=False, norm_bias=...): RMSNorm has no bias; pass "
            "norm_bias=None"
        )
    ctas = dispatch.check_sm_budget("gemm_beside_norm", sm_budget)
    width = norm_x.shape[-1]
    rows = [a.reshape(-1, width) for a in (norm_x, norm_residual)]

    def together():
        _require(implementation)
        results = _beside_norm(
            _rows(x),
            w,
            bias,
            None if residual is None else _rows(residual),
            *rows,
            norm_scale,
            norm_bias,
            eps=eps,
            centred=centred,
            epilogue=Epilogue(activation=activation),
            ctas=ctas,
        )
        shapes = ((*x.shape[:-1], w.shape[1]), norm_x.shape, norm_x.shape)
        return GemmBesideNorm(*(a.reshape(s) for a, s in zip(results, shapes, strict=True)))

    def in_sequence():
        options = {"bias": bias, "residual": residual, "activation": activation}
        product = gemm(x, w, **options, implementation="xla")
        rows = (norm_x, norm_residual, norm_scale)
        if centred:
            both = add_layer_norm(*rows, norm_bias, eps=eps, implementation="xla")
        else:
            both = add_rms_norm(*rows, eps=eps, implementation="xla")
        return GemmBesideNorm(product, both.normed, both.total)

    return dispatch.dispatch(
        "gemm_beside_norm", implementation, {"mosaic_gpu": together, "xla": in_sequence}
    )


def gemm_beside_sums(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    data: Float[Array, "R C"],
    *,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> GemmBesideSums:
    """A GEMM beside the column sums of a large array, in one launch: the plainest partner.

    Args:
      x: Input of the GEMM, as of `gemm`.
      w: Its weight.
      data: Read once; the kernel takes 128 columns and rows in multiples of 64.
      bias: Of the GEMM.
      residual: Of the GEMM.
      activation: Of the GEMM.
      sm_budget: SMs that the launch may fill; None: all.
      implementation: As for `gemm_beside_norm`.

    Returns:
      The results of both.

    Raises:
      ValueError: As for `gemm`.
      NotImplementedError: The named implementation cannot do these shapes, dtypes or device.
    """
    check_gemm(x, w, bias, residual, activation)
    ctas = dispatch.check_sm_budget("gemm_beside_sums", sm_budget)

    def together():
        _require(implementation)
        product, sums = _beside_sums(
            _rows(x),
            w,
            bias,
            None if residual is None else _rows(residual),
            data,
            epilogue=Epilogue(activation=activation),
            ctas=ctas,
        )
        return GemmBesideSums(
            product.reshape(*x.shape[:-1], w.shape[1]), jnp.sum(sums, axis=(0, 1))
        )

    def in_sequence():
        options = {"bias": bias, "residual": residual, "activation": activation}
        product = gemm(x, w, **options, implementation="xla")
        return GemmBesideSums(product, jnp.sum(data, axis=0, dtype=jnp.float32))

    return dispatch.dispatch(
        "gemm_beside_sums", implementation, {"mosaic_gpu": together, "xla": in_sequence}
    )


def column_sums(
    data: Float[Array, "R C"],
    *,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, " C"]:
    """The column sums of a large array in f32: what `gemm_beside_sums` is measured against.

    Args:
      data: Read once; the kernel takes 128 columns and rows in multiples of 64.
      sm_budget: SMs that the kernel may fill; None: all.
      implementation: "mosaic_gpu", "xla" or None for the best that can.

    Returns:
      One sum per column.

    Raises:
      ValueError: A budget the device lacks.
      NotImplementedError: The named implementation cannot do this shape, dtype or device.
    """
    ctas = dispatch.check_sm_budget("column_sums", sm_budget)

    def on_hopper():
        _require(implementation)
        return jnp.sum(_column_sums(data, ctas=ctas), axis=(0, 1))

    return dispatch.dispatch(
        "column_sums",
        implementation,
        {"mosaic_gpu": on_hopper, "xla": lambda: jnp.sum(data, axis=0, dtype=jnp.float32)},
    )


def _require(implementation) -> None:
    if implementation is None:
        dispatch.require_hopper("corun")


def _rows(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _run_beside_norm(
    x, w, bias, residual, norm_x, norm_residual, scale, norm_bias, *, eps, centred, epilogue, ctas
):
    partner = mosaic_gpu.norm_partner(
        norm_x, norm_residual, scale, norm_bias, eps=eps, centred=centred
    )
    return mosaic_gpu.gemm_beside(
        x,
        w,
        bias,
        residual,
        partner,
        epilogue=epilogue,
        ctas=ctas,
        name="pbjax_gemm_beside_norm",
    )


# One launch is traced and lowered once for all its uses in a program.
_beside_norm = jax.jit(_run_beside_norm, static_argnames=("eps", "centred", "epilogue", "ctas"))
_beside_sums = jax.jit(mosaic_gpu.gemm_beside_sums, static_argnames=("epilogue", "ctas"))
_column_sums = jax.jit(mosaic_gpu.column_sums, static_argnames=("ctas",))
