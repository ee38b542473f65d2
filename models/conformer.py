"""Conformer encoders: Gulati et al. 2020, with the details of modeling_wav2vec2_conformer.py.

In this file: configuration and modules from hidden states on, for inference. The convolutions that
make hidden states of raw audio are in `models.wav2vec2_conformer`, the names of the files in
`models.conformer_checkpoint`. Not here: dropout, causal convolutions, streaming.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.conformer_positions import relative_table, rotary_table, rotate, shift
from models.errors import ConfigError, InputError
from models.outputs import register_output

Activation = Literal["gelu", "gelu_tanh", "silu"]
Mask = Integer[Array | np.ndarray, "B T"] | Bool[Array | np.ndarray, "B T"]

ACTIVATIONS = layers.ACTIVATIONS | {"silu": jax.nn.silu}
# Of every norm inside a block, whatever the configuration says of the others.
BLOCK_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerConfig:
    """Sizes and constants of one Conformer encoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLPs.
      num_heads: Attention heads; divides embed_dim.
      kernel_size: Frames that the depthwise convolution sees at once; odd.
      positions: Whether attention knows positions by their difference, "relative", or by rotation
        of what queries and keys are made of, "rotary".
      norm_eps: Added to the variance in the LayerNorm after the last block.
      rotary_base: The slowest wave of rotary positions.
      activation: Of MLPs and convolution.
      bias: Whether the Linears of MLPs and attention have biases.
      convolution_bias: Whether the convolution and the Linears around it have biases.
      masks_convolution: Whether padding is zeros to the convolution of every block, else only to
        the first block as a whole.
      final_norm: Whether there is a LayerNorm after the last block, beside the block's own.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    kernel_size: int
    positions: Literal["relative", "rotary"]
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    activation: Activation = "silu"
    bias: bool = True
    convolution_bias: bool = False
    masks_convolution: bool = False
    final_norm: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        names = ("num_layers", "embed_dim", "mlp_dim", "num_heads", "kernel_size")
        check_positive(self, *names, "norm_eps", "rotary_base")
        check_choice(self, "positions", ("relative", "rotary"))
        check_choice(self, "activation", ACTIVATIONS)
        heads, dim = self.num_heads, self.embed_dim
        even = 2 * heads if self.positions == "rotary" else 2
        if dim % heads or dim % even:
            raise ConfigError(
                f"ConformerConfig: embed_dim is {dim} with {heads} heads; the heads must divide it"
                f" and {self.positions} positions need a multiple of {even}; change one of them"
            )
        if self.kernel_size % 2 == 0:
            raise ConfigError(
                f"ConformerConfig: kernel_size is {self.kernel_size}; only an odd one has a middle;"
                " choose an odd one"
            )

    @classmethod
    def conformer_l(cls) -> "ConformerConfig":
        """Conformer-L, the large encoder of Gulati et al. 2020: 17 layers x 512."""
        return cls(
            num_layers=17,
            embed_dim=512,
            mlp_dim=2048,
            num_heads=8,
            kernel_size=31,
            positions="relative",
        )


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerOutput:
    """What a Conformer returns, under Hugging Face's names.

    Attributes:
      last_hidden_state: Hidden states after the last norm.
      logits: Scores of the vocabulary for CTC; None without such a head.
    """

    last_hidden_state: Float[Array, "B T D"]
    logits: Float[Array, "B T V"] | None


class ConformerMlp(nnx.Module):
    """Norm, two Linears with an activation between them, and half of it onto the residual."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.norm = layers.layer_norm(config.embed_dim, BLOCK_NORM_EPS, dtype, rngs)
        dim, inner, bias = config.embed_dim, config.mlp_dim, config.bias
        self.up = layers.linear(dim, inner, dtype, rngs, use_bias=bias)
        self.down = layers.linear(inner, dim, dtype, rngs, use_bias=bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Transforms every frame by itself."""
        inner = self.up(self.norm(x).astype(x.dtype))
        return x + 0.5 * self.down(activate(inner, self.activation))


class ConformerAttention(nnx.Module):
    """Norm, bidirectional multi-head attention that knows positions, and residual."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, heads = config.embed_dim, config.num_heads
        project = partial(layers.linear, dim, dim, dtype, rngs, use_bias=config.bias)
        self.norm = layers.layer_norm(dim, BLOCK_NORM_EPS, dtype, rngs)
        self.query = project()
        self.key = project()
        self.value = project()
        self.output = project()
        self.num_heads, self.positions = heads, config.positions
        if config.positions == "relative":
            self.position = project(use_bias=False)
            self.content_bias = nnx.Param(jnp.zeros((heads, dim // heads), dtype))
            self.position_bias = nnx.Param(jnp.zeros((heads, dim // heads), dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        table: Float[Array, "..."],
        bias: Float[Array, "B 1 1 T"] | None,
    ) -> Float[Array, "B T D"]:
        """Attends over all frames, adding `bias` to the scores in f32."""
        with jax.named_scope("attention"):
            inner = self.norm(x).astype(x.dtype)
            rotary = self.positions == "rotary"
            turned = rotate(inner, table, self.num_heads) if rotary else inner
            query, key = self._heads(self.query(turned)), self._heads(self.key(turned))
            scores = dot(query, key) if rotary else self._relative_scores(query, key, table)
            scores = scores * (query.shape[-1] ** -0.5)
            if bias is not None:
                scores = scores + bias
            weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
            context = jnp.einsum("BNTS,BSNH->BTNH", weights, self._heads(self.value(inner)))
            return x + self.output(context.reshape(x.shape))

    def _relative_scores(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T N H"],
        table: Float[Array, "R D"],
    ) -> Float[Array, "B N T T"]:
        content = query + jnp.broadcast_to(self.content_bias[...], query.shape)
        position = query + jnp.broadcast_to(self.position_bias[...], query.shape)
        rows = self.position(table.astype(query.dtype)).reshape(-1, *query.shape[2:])
        by_difference = jnp.einsum(
            "BTNH,RNH->BNTR", position, rows, preferred_element_type=jnp.float32
        )
        return dot(content, key) + shift(by_difference)

    def _heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.num_heads, -1)


class BatchNorm(nnx.Module):
    """BatchNorm with fixed statistics: y = (x - mean) / sqrt(var + eps) * scale + bias."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike) -> None:
        """Makes the fresh parameters and statistics."""
        self.scale = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))
        self.mean = nnx.BatchStat(jnp.zeros(features, dtype))
        self.var = nnx.BatchStat(jnp.ones(features, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises every feature by itself, in f32."""
        parts = (self.scale, self.bias, self.mean, self.var)
        scale, bias, mean, var = (part[...].astype(jnp.float32) for part in parts)
        factor = scale * jax.lax.rsqrt(var + self.eps)
        offset = bias - mean * factor
        x = x.astype(jnp.float32)
        return x * jnp.broadcast_to(factor, x.shape) + jnp.broadcast_to(offset, x.shape)


class ConformerConvolution(nnx.Module):
    """Norm, gated Linear, depthwise convolution over time, BatchNorm, Linear, and residual."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, bias = config.embed_dim, config.convolution_bias
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.norm = layers.layer_norm(dim, BLOCK_NORM_EPS, dtype, rngs)
        self.gated = layers.linear(dim, 2 * dim, dtype, rngs, use_bias=bias)
        self.depthwise = nnx.Param(init(rngs.params(), (config.kernel_size, 1, dim), dtype))
        self.depthwise_bias = nnx.Param(jnp.zeros(dim, dtype)) if bias else None
        self.batch_norm = BatchNorm(dim, eps=BLOCK_NORM_EPS, dtype=dtype)
        self.output = layers.linear(dim, dim, dtype, rngs, use_bias=bias)
        self.activation, self.masks = config.activation, config.masks_convolution

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Mixes neighbouring frames."""
        with jax.named_scope("convolution"):
            inner, gate = jnp.split(self.gated(self.norm(x).astype(x.dtype)), 2, axis=-1)
            inner = inner * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)
            if self.masks and mask is not None:
                inner = without_padding(inner, mask)
            inner = depthwise_convolution(inner, self.depthwise[...])
            if self.depthwise_bias is not None:
                inner = inner + jnp.broadcast_to(self.depthwise_bias[...], inner.shape)
            inner = self.batch_norm(inner)
            return x + self.output(activate(inner, self.activation).astype(x.dtype))


class ConformerLayer(nnx.Module):
    """One block: half an MLP, attention, convolution, half an MLP, norm."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.mlp_before = ConformerMlp(config, dtype=dtype, rngs=rngs)
        self.attention = ConformerAttention(config, dtype=dtype, rngs=rngs)
        self.convolution = ConformerConvolution(config, dtype=dtype, rngs=rngs)
        self.mlp_after = ConformerMlp(config, dtype=dtype, rngs=rngs)
        self.norm = layers.layer_norm(config.embed_dim, BLOCK_NORM_EPS, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        table: Float[Array, "..."],
        mask: Bool[Array, "B T"] | None,
        bias: Float[Array, "B 1 1 T"] | None,
    ) -> Float[Array, "B T D"]:
        """Applies the block."""
        with jax.named_scope("mlp_before"):
            x = self.mlp_before(x)
        x = self.convolution(self.attention(x, table, bias), mask)
        with jax.named_scope("mlp_after"):
            x = self.mlp_after(x)
            return self.norm(x).astype(x.dtype)


class ConformerEncoder(nnx.Module):
    """Conformer blocks, and a norm if there is one, for inference."""

    def __init__(
        self, config: ConformerConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes an encoder with fresh weights.

        Args:
          config: Its sizes.
          dtype: Of weights and activations; norms, scores and softmax are computed in f32 always.
          rngs: Source of the weights.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        blocks = [ConformerLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(blocks)
        dim, eps = config.embed_dim, config.norm_eps
        self.norm = layers.layer_norm(dim, eps, dtype, rngs) if config.final_norm else None

    def __call__(
        self, hidden_states: Float[Array | np.ndarray, "B T D"], attention_mask: Mask | None = None
    ) -> ConformerOutput:
        """Encodes a batch of sequences of frames.

        Args:
          hidden_states: The frames.
          attention_mask: 1 for frames, 0 for padding on the right (its outputs mean nothing, and
            to the first block it is zeros); None = all 1.

        Returns:
          Hidden states after the last norm.

        Raises:
          InputError: A shape is wrong.
        """
        last = self.hidden_states(hidden_states, attention_mask)[-1]
        return ConformerOutput(last_hidden_state=last, logits=None)

    def hidden_states(
        self, hidden_states: Float[Array | np.ndarray, "B T D"], attention_mask: Mask | None = None
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states before the blocks, after each, and after a final norm."""
        mask_shape = None if attention_mask is None else tuple(attention_mask.shape)
        check_frames(self.config, tuple(hidden_states.shape), mask_shape)
        x, mask, bias = jnp.asarray(hidden_states).astype(self.dtype), None, None
        if attention_mask is not None:
            with jax.named_scope("mask"):
                mask = jnp.asarray(attention_mask) != 0
                bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]
                x = without_padding(x, mask)
        with jax.named_scope("positions"):
            table = self._positions(x.shape[1])
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], table, mask, bias))
        if self.norm is None:
            return states
        with jax.named_scope("norm"):
            return [*states, self.norm(states[-1]).astype(x.dtype)]

    def _positions(self, length: int) -> Float[Array, "..."]:
        config = self.config
        if config.positions == "relative":
            return relative_table(length, config.embed_dim)
        return rotary_table(length, config.embed_dim // config.num_heads, config.rotary_base)


def dot(query: Float[Array, "B T N H"], key: Float[Array, "B S N H"]) -> Float[Array, "B N T S"]:
    """Returns the product of every query and key, in f32."""
    return jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32)


def without_padding(x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns zeros at padding, whatever is there."""
    return jnp.where(jnp.broadcast_to(mask[:, :, None], x.shape), x, jnp.zeros_like(x))


def depthwise_convolution(
    x: Float[Array, "B T D"], kernel: Float[Array, "width 1 D"]
) -> Float[Array, "B T D"]:
    """Convolves every feature with its own kernel over time; zeros lie before and after.

    A kernel without a middle sees one frame more after its own than before it.
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
    """Applies an activation in f32, as torch does it for 16-bit values, and casts back."""
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)


def check_positive(config: object, *names: str) -> None:
    """Raises ConfigError unless the fields of a configuration are positive."""
    values = {name: getattr(config, name) for name in names}
    if bad := [f"{name} is {value}" for name, value in values.items() if not value > 0]:
        kind = type(config).__name__
        raise ConfigError(f"{kind}: {', '.join(bad)}; sizes are positive; correct them")


def check_choice(config: object, name: str, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless a field of a configuration has one of the allowed values."""
    value, names = getattr(config, name), list(allowed)
    if value not in names:
        kind = type(config).__name__
        supported = f"supported are {', '.join(names)}"
        raise ConfigError(f"{kind}: {name} is {value!r}; {supported}; choose one")


def check_frames(
    config: ConformerConfig, frames: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    """Raises InputError unless the shapes of a call fit together and into the encoder."""
    if len(frames) != 3 or frames[2] != config.embed_dim or not frames[1]:
        raise InputError(
            f"ConformerEncoder(hidden_states): shape is {frames};"
            f" [batch, frames, {config.embed_dim}] is needed; give at least one frame of that width"
        )
    if mask is not None and mask != frames[:2]:
        raise InputError(
            f"ConformerEncoder(attention_mask): shape is {mask}; {frames[:2]} is needed;"
            " pad both alike"
        )
