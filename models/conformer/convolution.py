"""The convolution of a Conformer block for inference, plain or folded for kernels."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from models import layers
from models.conformer.config import ConformerConfig
from models.kernels import PLAIN
from models.layers import ACTIVATIONS, Activation
from pallas_kernels import depthwise
from pallas_kernels.gemm import gated_gemm

# The epsilon of every norm inside a block; the configuration sets that of the others.
BLOCK_NORM_EPS = 1e-5


class BatchNorm(nnx.Module):
    """BatchNorm with fixed statistics: y = (x - mean) / sqrt(var + eps) * scale + bias."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike) -> None:
        """Makes the fresh parameters and statistics."""
        self.scale = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))
        self.mean = nnx.BatchStat(jnp.zeros(features, dtype))
        self.var = nnx.BatchStat(jnp.ones(features, dtype))
        self.eps = eps

    def affine(self) -> tuple[Float[Array, " D"], Float[Array, " D"]]:
        """Returns factor and offset of every feature in f32: y = x * factor + offset."""
        parts = (self.scale, self.bias, self.mean, self.var)
        scale, bias, mean, var = (part[...].astype(jnp.float32) for part in parts)
        factor = scale * jax.lax.rsqrt(var + self.eps)
        return factor, bias - mean * factor

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises each feature, in f32."""
        factor, offset = self.affine()
        x = x.astype(jnp.float32)
        return x * jnp.broadcast_to(factor, x.shape) + jnp.broadcast_to(offset, x.shape)


class FoldedConvolution(nnx.Module):
    """Depthwise convolution, BatchNorm and activation as one kernel; its weights are in f32."""

    def __init__(
        self,
        kernel: Float[Array, "width 1 D"],
        bias: Float[Array, " D"] | None,
        batch_norm: BatchNorm,
        activation: Activation,
    ) -> None:
        """Folds the BatchNorm's fixed statistics into the weights."""
        factor, offset = batch_norm.affine()
        if bias is not None:
            offset = offset + bias.astype(jnp.float32) * factor
        self.kernel = nnx.Param(kernel[:, 0].astype(jnp.float32) * factor[None])
        self.offset, self.activation = nnx.Param(offset), activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Convolves, normalises and activates."""
        kernel, offset = self.kernel[...], self.offset[...]
        return depthwise.depthwise_convolution(x, kernel, offset, activation=self.activation)


class ConformerConvolution(nnx.Module):
    """Norm, gated Linear, depthwise convolution over time, BatchNorm, Linear, and residual."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, bias = config.embed_dim, config.convolution_bias
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.norm = layers.layer_norm(dim, BLOCK_NORM_EPS, dtype, rngs)
        self.gated = layers.linear(dim, 2 * dim, dtype, rngs, use_bias=bias)
        self.parts: nnx.List[layers.Linear] | None = nnx.data(None)
        self.folded: FoldedConvolution | None = nnx.data(None)
        self.depthwise = nnx.Param(init(rngs.params(), (config.kernel_size, 1, dim), dtype))
        self.depthwise_bias = nnx.Param(jnp.zeros(dim, dtype)) if bias else None
        self.batch_norm = BatchNorm(dim, eps=BLOCK_NORM_EPS, dtype=dtype)
        self.output = layers.linear(dim, dim, dtype, rngs, use_bias=bias)
        self.activation, self.masks = config.activation, config.masks_convolution
        self.kernels = PLAIN

    def arrange_weights(self) -> None:
        """Folds the BatchNorm, and splits value and gate for one kernel unless they have biases."""
        if self.folded is not None:
            return
        bias = None if self.depthwise_bias is None else self.depthwise_bias[...]
        kernel = self.depthwise[...]
        self.folded = FoldedConvolution(kernel, bias, self.batch_norm, self.activation)
        if self.gated.bias is None:
            dim = self.gated.in_features
            columns = (slice(0, dim), slice(dim, 2 * dim))
            self.parts = nnx.List([layers.part_of(self.gated, part) for part in columns])
            del self.gated

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Mixes neighbouring frames."""
        with jax.named_scope("convolution"):
            inner = self._gate(self.norm(x))
            if self.masks and mask is not None:
                inner = without_padding(inner, mask)
            if self.kernels.gemm == "pallas" and self.folded is not None:
                return self.output(self.folded(inner), residual=x)
            inner = depthwise_convolution(inner, self.depthwise[...])
            if self.depthwise_bias is not None:
                inner = inner + jnp.broadcast_to(self.depthwise_bias[...], inner.shape)
            inner = self.batch_norm(inner)
            inner = activate(inner, self.activation).astype(x.dtype)
            return self.output(inner, residual=x)

    def _gate(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.parts is not None:
            value, gate = (part.kernel[...] for part in self.parts)
            by = None if self.kernels.gemm == "pallas" else "xla"
            return gated_gemm(x, gate, value, activation="sigmoid", implementation=by)
        inner, gate = jnp.split(self.gated(x), 2, axis=-1)
        return inner * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)


def without_padding(x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns x with zeros at padding."""
    return jnp.where(jnp.broadcast_to(mask[:, :, None], x.shape), x, jnp.zeros_like(x))


def depthwise_convolution(
    x: Float[Array, "B T D"], kernel: Float[Array, "width 1 D"]
) -> Float[Array, "B T D"]:
    """Convolves every feature with its own kernel over time, with padding by zeros.

    The window of an even kernel has one more frame after its own than before it.
    """
    others = kernel.shape[0] - 1
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,),
        padding=[(others // 2, others - others // 2)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=kernel.shape[2],
    )


def activate(x: Float[Array, "*B F"], activation: Activation) -> Float[Array, "*B F"]:
    """Applies an activation in f32, as torch does for 16-bit values, and casts back."""
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)
