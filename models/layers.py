"""Layers that two or more families share: Linear, norms, attention, embeddings, the LM head.

Each layer computes in plain JAX, or calls the kernels named by its `kernels` (`models.kernels`).
Not here: parts of pre-norm layers (`models.pre_norm`), and layers of one family alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models.errors import InputError
from models.folding import FoldedNorm, Hidden, fold, values_of
from models.kernels import PLAIN
from models.outputs import register_output
from pallas_kernels import norm
from pallas_kernels.gemm import ScaledRows, gemm, gemm_for_norm, normed_gemm

Ids = Integer[Array | np.ndarray, "B T"]
Mask = Integer[Array | np.ndarray, "B T"] | Bool[Array | np.ndarray, "B T"]

Activation = Literal["gelu", "gelu_tanh", "silu"]

ACTIVATIONS = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
HUGGING_FACE_ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Standard deviation of fresh weights; only used without a checkpoint.
INIT_STDDEV = 0.02


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class CausalOutput:
    """The output of a decoder, under Hugging Face's names.

    Attributes:
      last_hidden_state: Hidden states after the last block and the final norm.
      logits: Scores of the next token; None without a language model head.
    """

    last_hidden_state: Float[Array, "B T D"]
    logits: Float[Array, "B T V"] | None


class Linear(nnx.Linear):
    """residual + scale * activation(x @ kernel + bias), by one kernel if possible.

    Attributes:
      next_norm: The folded norm of the result; None without one.
    """

    def __init__(self, *args, **options) -> None:
        """Takes the arguments of nnx.Linear."""
        super().__init__(*args, **options)
        self.kernels = PLAIN
        self.next_norm: FoldedNorm | None = None

    def __call__(
        self,
        x: Float[Array, "*B K"],
        *,
        activation: Activation | None = None,
        residual: Float[Array, "*B N"] | None = None,
        scale: float = 1.0,
    ) -> Float[Array, "*B N"]:
        """Applies the layer and its epilogue.

        Args:
          x: Input.
          activation: Computed in f32, as torch does for 16-bit values.
          residual: Added last.
          scale: Factor of what is added to the residual.
        """
        if self.kernels.gemm == "pallas":
            return gemm(
                x,
                self.kernel[...],
                bias=None if self.bias is None else self.bias[...],
                residual=residual,
                activation=activation,
                scale=scale,
            )
        y = super().__call__(x)
        if activation is not None:
            # In f32: in bfloat16 even the constant of GELU would be rounded.
            y = ACTIVATIONS[activation](y.astype(jnp.float32)).astype(y.dtype)
        y = y if scale == 1.0 else scale * y
        return y if residual is None else residual + y

    def after_norm(
        self, x: Hidden, *, activation: Activation | None = None
    ) -> Float[Array, "B T N"]:
        """Applies the layer to normalised states, or to scaled ones with a folded norm."""
        if not isinstance(x, ScaledRows):
            return self(x, activation=activation)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        return normed_gemm(x.values, x.scale, kernel, bias=bias, activation=activation)

    def add_to(self, x: Hidden, inner: Float[Array, "B T K"]) -> Hidden:
        """Returns x + self(inner), with the row factors of a folded norm that follows."""
        if self.next_norm is None:
            return self(inner, residual=values_of(x))
        return gemm_for_norm(
            inner,
            self.kernel[...],
            bias=None if self.bias is None else self.bias[...],
            residual=values_of(x),
            eps=self.next_norm.eps,
            centred=self.next_norm.centred,
        )


class LayerNorm(nnx.LayerNorm):
    """LayerNorm that computes in f32 and returns the dtype of its input."""

    def __init__(self, *args, **options) -> None:
        """Takes the arguments of nnx.LayerNorm."""
        super().__init__(*args, **options)
        self.kernels = PLAIN

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises the last axis."""
        if self.kernels.norm != "xla":
            bias = None if self.bias is None else self.bias[...]
            return norm.layer_norm(x, self.scale[...], bias, eps=self.epsilon)  # pyrefly: ignore
        return super().__call__(x).astype(x.dtype)

    def fold_into(self, *linears: Linear) -> FoldedNorm:
        """Folds the norm into all Linears that read it, and returns its replacement."""
        bias = None if self.bias is None else self.bias[...]
        gain, eps = self.scale[...], self.epsilon  # pyrefly: ignore
        return fold(linears, gain, bias, eps=eps, centred=True)


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    bias: Float[Array, "#B 1 #T S"] | None,
    alibi: Float[Array, "#B N 1 S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attends with scores and softmax in f32; query head i reads key head i // (N / K).

    Args:
      query: Queries.
      key: Keys.
      value: Values.
      bias: Added to the scores q . k / sqrt(H), to mask keys; None = all keys are seen.
      alibi: Also added: the weight of a key's position for each head.

    Returns:
      For each query the weighted mean of the values.
    """
    batch_size, length, heads, size = query.shape
    grouped = heads != key.shape[2]
    if grouped:
        query = query.reshape(batch_size, length, key.shape[2], -1, size)
    product = "BTKGH,BSKH->BKGTS" if grouped else "BTNH,BSNH->BNTS"
    scores = jnp.einsum(product, query, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch_size, heads, length, -1) * (size**-0.5)
    if alibi is not None:
        scores = scores + alibi
    if bias is not None:
        scores = scores + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    if not grouped:
        return jnp.einsum("BNTS,BSNH->BTNH", weights, value)
    weights = weights.reshape(batch_size, key.shape[2], -1, length, key.shape[1])
    context = jnp.einsum("BKGTS,BSKH->BTKGH", weights, value)
    return context.reshape(batch_size, length, heads, size)


def causal_bias(length: int, attention_mask: Mask | None) -> Float[Array, "#B 1 T S"]:
    """Returns 0 for the keys that a token sees and the lowest finite f32 elsewhere.

    A finite value keeps rows that see no token, such as left padding, free of NaN.

    Args:
      length: Number of tokens.
      attention_mask: 1 for tokens, 0 for padding, which no token sees; None = all 1.
    """
    with jax.named_scope("causal_bias"):
        visible = jnp.tril(jnp.ones((1, 1, length, length), bool))
        if attention_mask is not None:
            visible = visible & (jnp.asarray(attention_mask) != 0)[:, None, None, :]
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(visible, 0.0, lowest).astype(jnp.float32)


def logits(
    hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"], vocab_size: int | None = None
) -> Float[Array, "B T tokens"]:
    """Scores every token of a vocabulary by its embedding, the tied language model head.

    Args:
      hidden: Normalised hidden states.
      embedding: The embedding of every token; further rows may follow.
      vocab_size: Number of tokens; None = all rows.
    """
    scores = jnp.einsum("BTD,VD->BTV", hidden, embedding)
    return scores if vocab_size in (None, embedding.shape[0]) else scores[..., :vocab_size]


def lengthen(table: nnx.Embed, multiple: int) -> None:
    """Pads a table to a multiple of rows; the new rows are NaN, as ids outside must give NaN."""
    rows, features = table.embedding.shape
    more = jnp.full((-rows % multiple, features), jnp.nan, table.embedding.dtype)
    table.embedding = nnx.Param(jnp.concatenate([table.embedding[...], more]))


def look_up(table: nnx.Embed, ids: Integer[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the rows of a table; NaN for an id outside it, never another row."""
    # nnx.Embed would read a negative id from the end of the table.
    rows = table.embedding[...].at[ids]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def embed(rows: int, features: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Embed:
    """Makes a fresh embedding table."""
    init = nnx.initializers.normal(INIT_STDDEV)
    return nnx.Embed(rows, features, dtype=dtype, param_dtype=dtype, embedding_init=init, rngs=rngs)


def linear(
    inputs: int, outputs: int, dtype: DTypeLike, rngs: nnx.Rngs, *, use_bias: bool = True
) -> Linear:
    """Makes a fresh Linear."""
    return Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=nnx.initializers.normal(INIT_STDDEV),
        rngs=rngs,
    )


def part_of(joined: Linear, columns: slice | Integer[np.ndarray, " N"]) -> Linear:
    """Returns a Linear with some columns of another."""
    kernel = joined.kernel[...][:, columns]
    bias = None if joined.bias is None else joined.bias[...][columns]
    return Linear(
        *kernel.shape,
        use_bias=bias is not None,
        dtype=joined.dtype,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        bias_init=lambda *_: bias,
        rngs=nnx.Rngs(0),
    )


def joined(parts: Sequence[Linear]) -> Linear:
    """Returns one Linear with the columns of several Linears without bias, in order."""
    kernel = jnp.concatenate([part.kernel[...] for part in parts], axis=1)
    return Linear(
        *kernel.shape,
        use_bias=False,
        dtype=parts[0].dtype,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        rngs=nnx.Rngs(0),
    )


def layer_norm(features: int, eps: float, dtype: DTypeLike, rngs: nnx.Rngs) -> LayerNorm:
    """Makes a fresh LayerNorm."""
    return LayerNorm(
        features,
        epsilon=eps,
        dtype=jnp.float32,
        param_dtype=dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


def check_tokens(
    model: str,
    ids: tuple[int, ...],
    others: Mapping[str, tuple[int, ...]],
    max_seq_len: int | None,
) -> None:
    """Raises InputError unless the shapes of a call fit together and into the model.

    Args:
      model: The name of the model, for messages.
      ids: The shape of input_ids.
      others: The shapes of the other inputs by name.
      max_seq_len: The longest sequence; None = any.
    """
    if len(ids) != 2:
        raise InputError(
            f"{model}(input_ids): shape is {ids}; [batch, length] is needed; add the missing axis"
        )
    if not 1 <= ids[1] <= (max_seq_len or ids[1]):
        possible = "1 or more" if max_seq_len is None else f"1 to {max_seq_len}"
        action = "give a token" if not ids[1] else "truncate"
        raise InputError(
            f"{model}(input_ids): length is {ids[1]}; {possible} is possible; {action}"
        )
    for name, shape in others.items():
        if shape != ids:
            raise InputError(
                f"{model}({name}): shape is {shape}; it must be that of input_ids, {ids};"
                " pad both alike"
            )
