"""The depthwise convolution as matrix products for Tensor Cores: what XLA runs on any device.

A library's depthwise convolution, or a sum of shifted copies, is bound by instructions on a GPU. A
block of times is a banded matrix times the frames that the block sees: five in six products are
with zero, and the whole is bound by memory all the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.reference import activate

BLOCK = 64


def depthwise_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "width D"],
    offset: Float[Array, " D"] | None,
    *,
    activation: Activation | None,
) -> Float[Array, "B T D"]:
    """Convolves in the dtype of x and finishes in f32; see api.depthwise_convolution."""
    y = _products(x, kernel.astype(x.dtype)).astype(jnp.float32)
    if offset is not None:
        y = y + jnp.broadcast_to(offset.astype(jnp.float32), y.shape)
    return activate(y, activation).astype(x.dtype)


def _products(x: Float[Array, "B T D"], kernel: Float[Array, "width D"]) -> Float[Array, "B T D"]:
    batch_size, length, features = x.shape
    width = kernel.shape[0]
    num_blocks = -(-length // BLOCK)
    # Frames that a block sees, up to a multiple of what a Tensor Core takes at once.
    seen = -(-(BLOCK + width - 1) // 16) * 16
    before = (width - 1) // 2
    after = num_blocks * BLOCK - BLOCK + seen - length - before
    padded = jnp.pad(x, ((0, 0), (before, after), (0, 0)))
    starts = range(0, num_blocks * BLOCK, BLOCK)
    windows = jnp.stack([padded[:, start : start + seen] for start in starts], axis=1)
    y = jnp.einsum("Dts,BgsD->BgtD", _banded(kernel, seen), windows)
    y = y.reshape(batch_size, -1, features)[:, :length]
    # Features come first in the product: they are brought to the end once, not for every use.
    return jax.lax.optimization_barrier(y)


def _banded(kernel: Float[Array, "width D"], seen: int) -> Float[Array, "D block seen"]:
    """Returns for each feature the matrix with the kernel in every row, one further each row.

    The kernel and zeros, one longer than a row, are laid out again and again and cut into rows.
    """
    width, features = kernel.shape
    once = jnp.pad(kernel.T, ((0, 0), (0, seen + 1 - width)))
    again = jnp.broadcast_to(once[:, None], (features, BLOCK, seen + 1)).reshape(features, -1)
    return again[:, : BLOCK * seen].reshape(features, BLOCK, seen)
