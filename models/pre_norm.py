"""Parts of pre-norm layers: a norm, products that read it, a residual around both.

The norm is computed separately, or folded into the products (`models.folding`); the same code
serves both. Not here: attention (`models.fused_qkv` and the families).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.folding import FoldedNorm, Hidden, values_of
from models.layers import Linear, layer_norm, linear
from pallas_kernels.gemm import ScaledRows, gated_gemm, normed_gemm


@runtime_checkable
class Norm(Protocol):
    """A norm with weights."""

    def __call__(self, x: Float[Array, "B T D"], /) -> Float[Array, "B T D"]:
        """Normalises every token."""
        ...

    def fold_into(self, *linears: Linear) -> FoldedNorm:
        """Folds the norm into all Linears that read it, and returns its replacement."""
        ...


class Products(NamedTuple):
    """The products of a part of a layer.

    Attributes:
      readers: All readers of the norm; they read nothing else.
      last: The product that is added to the residual; a norm of the same kind follows.
    """

    readers: Sequence[Linear]
    last: Linear


class PreNorm(nnx.Module):
    """A part of a layer that begins with a norm and ends with the residual."""

    norm: Norm | FoldedNorm

    def products(self) -> Products:
        """Returns the products that norms can be folded into."""
        raise NotImplementedError

    @property
    def has_folded(self) -> bool:
        """Whether the norm is folded already."""
        return isinstance(self.norm, FoldedNorm)

    def fold_norms(self) -> None:
        """Folds the norm into the products that read it."""
        if isinstance(self.norm, FoldedNorm):
            return
        readers, last = self.products()
        folded = self.norm.fold_into(*readers)
        del self.norm
        self.norm = last.next_norm = folded

    def normalise(self, x: Hidden) -> Hidden:
        """Returns the normalised tokens, or the factors of the tokens if the norm is folded."""
        return self.norm(x) if isinstance(self.norm, FoldedNorm) else self.norm(values_of(x))


class PreNormMlp(PreNorm):
    """LayerNorm, then two Linears with GELU between them, and the residual."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        norm_eps: float,
        activation: Literal["gelu", "gelu_tanh"],
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the fresh parameters."""
        self.norm = layer_norm(embed_dim, norm_eps, dtype, rngs)
        self.up = linear(embed_dim, mlp_dim, dtype, rngs)
        self.down = linear(mlp_dim, embed_dim, dtype, rngs)
        self.activation = activation

    def products(self) -> Products:
        """Returns the products that norms can be folded into."""
        return Products([self.up], self.down)

    def __call__(self, x: Hidden) -> Hidden:
        """Transforms every token by itself."""
        with jax.named_scope("mlp"):
            inner = self.up.after_norm(self.normalise(x), activation=self.activation)
            return self.down.add_to(x, inner)


def gated(x: Hidden, gate: Linear, up: Linear) -> Float[Array, "B T F"]:
    """Computes silu(gate(x)) * up(x) for Linears without bias, by one kernel if possible."""
    weights = {"w_gate": gate.kernel[...], "w": up.kernel[...]}
    if isinstance(x, ScaledRows):
        return normed_gemm(x.values, x.scale, **weights, activation="silu")
    if up.kernels.gemm == "pallas":
        return gated_gemm(x, **weights)
    return gate(x, activation="silu") * up(x)


def run_layers(
    layers: Iterable[Callable[..., Hidden]], x: Float[Array, "B T D"], *terms: object
) -> list[Float[Array, "B T D"]]:
    """Returns the hidden states before and after each layer; each is called with `terms` too."""
    states, hidden = [x], x
    for layer in layers:
        hidden = layer(hidden, *terms)
        states.append(values_of(hidden))
    return states
