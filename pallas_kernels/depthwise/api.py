"""The public depthwise convolution: what a caller may pass, and which implementation answers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.depthwise import mosaic_gpu, xla
from pallas_kernels.dispatch import Implementation, run_kernel
from pallas_kernels.gemm.activations import ACTIVATIONS, Activation


def depthwise_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "width D"],
    offset: Float[Array, " D"] | None = None,
    *,
    activation: Activation | None = None,
    sm_budget: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T D"]:
    """Convolves every feature with its own kernel over time, and finishes in the same pass.

    y[t] = activation(sum over k of kernel[k] x[t + k - (width - 1) // 2] + offset), with zeros
    before and after a sequence. A BatchNorm with fixed statistics is a factor in the kernel and a
    part of the offset.

    Args:
      x: Frames; f16 or bf16, and features in multiples of 256 from 512, for the kernel.
      kernel: For each feature the weights of the frames in its window, the earliest first, at most
        33 for the kernel; f32 is not rounded. An even window has one more frame after its own than
        before it.
      offset: Added to each feature, of any floating dtype.
      activation: See `gemm`.
      sm_budget: Number of SMs the kernel may fill; all if None. XLA takes no budget.
      implementation: "mosaic_gpu", "xla", or None for the best that can.

    Returns:
      The convolved frames in the dtype of x; sums and activation are computed in f32.

    Raises:
      ValueError: Shapes do not fit, the activation is unknown, or the budget exceeds the device's
        SMs.
      TypeError: A dtype is not floating.
      NotImplementedError: The named implementation cannot do this.
    """
    check_depthwise_convolution(x, kernel, offset, activation)
    arguments = {"x": x, "kernel": kernel, "offset": offset, "activation": activation}

    def launch(sms: int) -> Array:
        _require_kernel(x, kernel)
        return _launch(**arguments, sms=sms)

    return run_kernel(
        "depthwise_convolution",
        launch=launch,
        plain=lambda: xla.depthwise_convolution(**arguments),
        sm_budget=sm_budget,
        implementation=implementation,
        arguments=arguments,
    )


# One launch is traced, lowered and compiled once for all its uses in a program.
_launch = jax.jit(mosaic_gpu.depthwise_convolution, static_argnames=("activation", "sms"))


def check_depthwise_convolution(x, kernel, offset, activation) -> None:
    """Raises unless the operands of `depthwise_convolution` fit together; see there."""
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(
            f"depthwise_convolution(x{x.shape}): frames are (B, T, D), none of them 0; reshape them"
        )
    if kernel.ndim != 2 or kernel.shape[0] < 1 or kernel.shape[1] != x.shape[2]:
        raise ValueError(
            f"depthwise_convolution(x{x.shape}, kernel{kernel.shape}): a kernel is (width, "
            f"{x.shape[2]}); transpose it"
        )
    if offset is not None and offset.shape != x.shape[2:]:
        raise ValueError(
            f"depthwise_convolution(offset{offset.shape}): shape {x.shape[2:]}; one a feature"
        )
    for name, array in (("x", x), ("kernel", kernel), ("offset", offset)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"depthwise_convolution({name}: {array.dtype}): a floating dtype; cast it"
            )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"depthwise_convolution(activation={activation!r}): unknown activation; choices are "
            f"{', '.join(ACTIVATIONS)} and None; choose one"
        )


def _require_kernel(x, kernel) -> None:
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        raise NotImplementedError(
            f"depthwise_convolution(implementation='mosaic_gpu'): dtype is {x.dtype}; frames of "
            "float16 and bfloat16 are streamed; cast, or use implementation='xla'"
        )
    # With 256 features alone, frames are contiguous: Mosaic stores them as one line, which does not
    # end with a sequence.
    narrow = x.shape[2] % mosaic_gpu.FEATURES or x.shape[2] == mosaic_gpu.FEATURES
    if narrow or kernel.shape[0] > mosaic_gpu.MAX_WIDTH:
        raise NotImplementedError(
            f"depthwise_convolution(implementation='mosaic_gpu'): {x.shape[2]} features and "
            f"{kernel.shape[0]} weights; multiples of {mosaic_gpu.FEATURES} from "
            f"{2 * mosaic_gpu.FEATURES} and at most {mosaic_gpu.MAX_WIDTH} fit; use "
            "implementation='xla'"
        )
