"""Vision Transformers: Dosovitskiy et al. 2020, with the details of Hugging Face's modeling_vit.py.

Not here: dropout, masked image modelling, interpolated position embeddings.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models import layers
from models.attention import Keys, attention
from models.errors import InputError
from models.folding import Hidden
from models.kernels import PLAIN
from models.outputs import register_output
from models.pre_norm import PreNorm, PreNormMlp, Products, run_layers
from models.vit.config import ViTConfig
from pallas_kernels.gemm import gemm

Pixels = Float[Array | np.ndarray, "B C height width"]


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class ViTOutput:
    """The output of a Vision Transformer, under Hugging Face's names.

    Attributes:
      last_hidden_state: Hidden states after the last norm; the class token is the first.
      pooler_output: tanh of a Linear on the class token; None without a pooler.
      logits: Scores of the labels; None without a classification head.
    """

    last_hidden_state: Float[Array, "B T D"]
    pooler_output: Float[Array, "B D"] | None
    logits: Float[Array, "B labels"] | None


class ViTEmbeddings(nnx.Module):
    """A Linear on every patch, behind a class token, plus position embeddings."""

    def __init__(self, config: ViTConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        side, dim = config.patch_size, config.embed_dim
        self.kernel = _parameter((side, side, config.num_channels, dim), dtype, rngs)
        self.bias = nnx.Param(jnp.zeros(dim, dtype))
        self.cls_token = _parameter((1, 1, dim), dtype, rngs)
        self.position = _parameter((1, 1 + config.num_patches, dim), dtype, rngs)
        self.kernels = PLAIN

    def __call__(self, pixel_values: Pixels, length: int) -> Float[Array, "B T D"]:
        """Embeds images, patch row by patch row, padded with zeros to the length."""
        with jax.named_scope("embeddings"):
            kernel, bias = self.kernel[...], self.bias[...]
            pixels = jnp.asarray(pixel_values).astype(kernel.dtype)
            patches = extract_patches(pixels, kernel.shape[0])
            kernel = kernel.reshape(-1, kernel.shape[-1])
            if self.kernels.gemm == "pallas":
                x = gemm(patches, kernel, bias=bias)
            else:
                x = jnp.einsum("BPF,FD->BPD", patches, kernel)
                x = x + jnp.broadcast_to(bias, x.shape)
            # The class token is added to the table: padding with zeros in front is one pass, and
            # concatenation is not.
            table = jnp.concatenate(
                [self.position[0, :1] + self.cls_token[0], self.position[0, 1:]]
            )
            after = length - table.shape[0]
            x = jnp.pad(x, ((0, 0), (1, after), (0, 0)))
            return x + jnp.broadcast_to(jnp.pad(table, ((0, after), (0, 0))), x.shape)


class ViTAttention(PreNorm):
    """Norm, bidirectional multi-head attention and residual."""

    def __init__(self, config: ViTConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        project = partial(layers.linear, config.embed_dim, config.embed_dim, dtype, rngs)
        self.norm = layers.layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)
        self.query = project(use_bias=config.qkv_bias)
        self.key = project(use_bias=config.qkv_bias)
        self.value = project(use_bias=config.qkv_bias)
        self.output = project()
        self.num_heads = config.num_heads

    def products(self) -> Products:
        """Returns the products that norms can be folded into."""
        return Products([self.query, self.key, self.value], self.output)

    def __call__(self, x: Hidden, keys: Keys) -> Hidden:
        """Attends over all tokens."""
        with jax.named_scope("attention"):
            inner = self.normalise(x)
            query, key, value = (
                self._heads(f.after_norm(inner)) for f in (self.query, self.key, self.value)
            )
            context = attention(query, key, value, keys)
            return self.output.add_to(x, context.reshape(x.shape))

    def _heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.num_heads, -1)


class ViTLayer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: ViTConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = ViTAttention(config, dtype=dtype, rngs=rngs)
        self.mlp = PreNormMlp(
            config.embed_dim,
            config.mlp_dim,
            norm_eps=config.norm_eps,
            activation=config.activation,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: Hidden, keys: Keys) -> Hidden:
        """Applies the block."""
        return self.mlp(self.attention(x, keys))


class ViTModel(nnx.Module):
    """A Vision Transformer for inference, with an optional pooler or classification head."""

    def __init__(self, config: ViTConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs) -> None:
        """Makes a model with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config = config
        self.embeddings = ViTEmbeddings(config, dtype=dtype, rngs=rngs)
        blocks = [ViTLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(blocks)
        self.norm = layers.layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)
        dim, labels = config.embed_dim, config.num_labels
        self.pooler = layers.linear(dim, dim, dtype, rngs) if config.pooler else None
        self.classifier = layers.linear(dim, labels, dtype, rngs) if labels else None
        self.kernels = PLAIN

    def __call__(self, pixel_values: Pixels) -> ViTOutput:
        """Encodes a batch of images.

        Args:
          pixel_values: Images as [batch, channels, height, width], each channel already shifted
            and scaled by the checkpoint's preprocessor_config.json.

        Returns:
          Hidden states of every token, and the heads' output for the first one.

        Raises:
          InputError: The images have another shape than the model's.
        """
        x = self._padded_states(pixel_values)[-1]
        with jax.named_scope("norm"):
            last = self._cut(self.norm(x))
        pooled = logits = None
        if self.pooler is not None:
            with jax.named_scope("pooler"):
                pooled = jnp.tanh(self.pooler(last[:, 0]))
        if self.classifier is not None:
            with jax.named_scope("classifier"):
                logits = self.classifier(last[:, 0])
        return ViTOutput(last_hidden_state=last, pooler_output=pooled, logits=logits)

    def hidden_states(self, pixel_values: Pixels) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states after the embeddings and after each block, in order.

        The last norm is not among them.
        """
        return [self._cut(x) for x in self._padded_states(pixel_values)]

    def _cut(self, x: Float[Array, "B padded D"]) -> Float[Array, "B T D"]:
        length = 1 + self.config.num_patches
        return x if x.shape[1] == length else x[:, :length]

    def _padded_states(self, pixel_values: Pixels) -> list[Float[Array, "B T D"]]:
        check_shape(self.config, tuple(pixel_values.shape))
        length, lengths = 1 + self.config.num_patches, None
        padding = -length % 8
        by = self.kernels.ragged_attention if padding else self.kernels.attention
        if by == "pallas" and padding:
            # Padded once here; the kernel would copy queries, keys and values in every layer.
            lengths = jnp.full(pixel_values.shape[0], length, jnp.int32)
            length += padding
        keys = Keys(by=by, lengths=lengths)
        return run_layers(self.layers, self.embeddings(pixel_values, length), keys)


def extract_patches(
    pixels: Float[Array, "B C height width"], side: int
) -> Float[Array, "B P features"]:
    """Cuts images into square patches, row by row, each flattened as (row, column, channel)."""
    size, channels, height, width = pixels.shape
    grid = pixels.reshape(size, channels, height // side, side, width // side, side)
    patches = grid.transpose(0, 2, 4, 3, 5, 1)
    return patches.reshape(size, -1, side * side * channels)


def check_shape(config: ViTConfig, shape: tuple[int, ...]) -> None:
    """Raises InputError unless images of the shape fit into the model."""
    wanted = (config.num_channels, config.image_size, config.image_size)
    if len(shape) != 4 or shape[1:] != wanted:
        needed = ", ".join(map(str, wanted))
        raise InputError(
            f"ViTModel(pixel_values): shape is {shape}; [batch, {needed}] is needed;"
            " resize the images and put the channels first"
        )


def _parameter(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(nnx.initializers.normal(layers.INIT_STDDEV)(rngs.params(), shape, dtype))
