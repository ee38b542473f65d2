"""Causal attention of pre-norm decoders whose query, key and value are one product."""

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.attention import Keys, attention
from models.decoder import Heads
from models.folding import Hidden
from models.layers import Linear, layer_norm, linear, part_of
from models.pre_norm import PreNorm, Products


class FusedQkvAttention(PreNorm):
    """LayerNorm, causal multi-head attention, and the residual; families order the columns.

    Attributes:
      query_key_value: The joint product, as checkpoints hold it.
      parts: Separate products for query, key and value, as kernels want them; None before
        `arrange_weights`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        norm_eps: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the fresh parameters."""
        self.norm = layer_norm(embed_dim, norm_eps, dtype, rngs)
        self.query_key_value = linear(embed_dim, 3 * embed_dim, dtype, rngs)
        self.output = linear(embed_dim, embed_dim, dtype, rngs)
        self.parts: nnx.List[Linear] | None = nnx.data(None)
        self.num_heads = num_heads

    def split[A: (Array, np.ndarray)](self, columns: A) -> list[A]:
        """Returns query, key and value, each [..., N, H], of a product's columns [..., 3 N H]."""
        raise NotImplementedError

    def arrange_weights(self) -> None:
        """Splits the joint product into one product each for query, key and value."""
        if self.parts is not None:
            return
        joined = self.query_key_value
        columns = self.split(np.arange(joined.out_features))
        self.parts = nnx.List([part_of(joined, part.reshape(-1)) for part in columns])
        del self.query_key_value

    def products(self) -> Products:
        """Returns the products that norms can be folded into."""
        return Products(self.parts or [self.query_key_value], self.output)

    def __call__(self, x: Hidden, keys: Keys) -> Hidden:
        """Attends over the keys that each token sees."""
        with jax.named_scope("attention"):
            return self.join(x, attention(*self.heads(x), keys))

    def heads(self, x: Hidden) -> Heads:
        """Returns query, key and value of every head."""
        inner = self.normalise(x)
        if self.parts is None:
            query, key, value = self.split(self.query_key_value.after_norm(inner))
        else:
            shape = (*x.shape[:2], self.num_heads, -1)
            query, key, value = (part.after_norm(inner).reshape(shape) for part in self.parts)
        return query, key, value

    def join(self, x: Hidden, context: Float[Array, "B T N H"]) -> Hidden:
        """Projects the output of the heads and adds it to the hidden states."""
        return self.output.add_to(x, context.reshape(x.shape))
