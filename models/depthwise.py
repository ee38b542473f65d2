"""The depthwise convolution of Conformers as matrix products, for Tensor Cores.

A library's depthwise convolution, or a sum of shifted copies, is bound by instructions on a GPU. A
block of times is a banded matrix times the frames that the block sees: five in six products
are with zero, and the whole is bound by memory all the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 64


def depthwise_products(
    x: Float[Array, "B T D"], kernel: Float[Array, "width 1 D"]
) -> Float[Array, "B T D"]:
    """Convolves every feature with its own kernel over time; zeros lie before and after.

    A kernel without a middle sees one frame more after its own than before it.

    Args:
      x: Frames.
      kernel: For each feature the weights of the frames seen, the earliest first.

    Returns:
      What `models.conformer.depthwise_convolution` returns, up to rounding.
    """
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
    y = jnp.einsum("Dts,BgsD->BgtD", banded(kernel, seen), windows)
    y = y.reshape(batch_size, -1, features)[:, :length]
    # Features come first in the product: they are brought to the end once, not for every use.
    return jax.lax.optimization_barrier(y)


def banded(kernel: Float[Array, "width 1 D"], seen: int) -> Float[Array, "D block seen"]:
    """Returns for each feature the matrix with the kernel in every row, one further each row.

    The kernel and zeros, one longer than a row, are laid out again and again and cut into rows.
    """
    width, _, features = kernel.shape
    once = jnp.pad(kernel[:, 0].T, ((0, 0), (0, seen + 1 - width)))
    again = jnp.broadcast_to(once[:, None], (features, BLOCK, seen + 1)).reshape(features, -1)
    return again[:, : BLOCK * seen].reshape(features, BLOCK, seen)
