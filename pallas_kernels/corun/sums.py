"""A GEMM beside the column sums of a large array, the plainest reader: the public functions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.corun import mosaic_gpu
from pallas_kernels.corun.api import rows_of, with_axes_of
from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.api import check_gemm, gemm
from pallas_kernels.gemm.mosaic_gpu import Epilogue


class GemmBesideSums(NamedTuple):
    """Results of two independent pieces of work.

    Attributes:
      product: The result of `gemm`.
      sums: The column sums of the data, in f32.
    """

    product: Float[Array, "*B N"]
    sums: Float[Array, " C"]


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
      w: Weight of the GEMM.
      data: Read once; the kernel takes 128 columns and rows in multiples of 64.
      bias: Bias of the GEMM.
      residual: Residual of the GEMM.
      activation: Activation of the GEMM.
      sm_budget: SMs that the launch may fill; None: all.
      implementation: See `gemm_beside_norm`.

    Returns:
      The results of both.

    Raises:
      ValueError: See `gemm`.
      NotImplementedError: The named implementation cannot do these shapes, dtypes or device.
    """
    check_gemm(x, w, bias, residual, activation)

    def together(sms: int) -> GemmBesideSums:
        product, sums = _beside_sums(
            rows_of(x),
            w,
            bias,
            None if residual is None else rows_of(residual),
            data,
            epilogue=Epilogue(activation=activation),
            ctas=sms,
        )
        return GemmBesideSums(with_axes_of(product, x), jnp.sum(sums, axis=(0, 1)))

    def in_sequence() -> GemmBesideSums:
        options = {"bias": bias, "residual": residual, "activation": activation}
        product = gemm(x, w, **options, implementation="xla")
        return GemmBesideSums(product, jnp.sum(data, axis=0, dtype=jnp.float32))

    return dispatch.run_kernel(
        "gemm_beside_sums",
        launch=together,
        plain=in_sequence,
        sm_budget=sm_budget,
        implementation=implementation,
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
    return dispatch.run_kernel(
        "column_sums",
        launch=lambda sms: jnp.sum(_column_sums(data, ctas=sms), axis=(0, 1)),
        plain=lambda: jnp.sum(data, axis=0, dtype=jnp.float32),
        sm_budget=sm_budget,
        implementation=implementation,
    )


# One launch is traced and lowered once for all its uses in a program.
_beside_sums = jax.jit(mosaic_gpu.gemm_beside_sums, static_argnames=("epilogue", "ctas"))
_column_sums = jax.jit(mosaic_gpu.column_sums, static_argnames=("ctas",))
