"""Which kernels a model's layers call, and how they are turned on.

A model as it is made or loaded is plain JAX: it runs anywhere and under any transformation, and
that is what `pbjax.optimize` takes apart. `with_kernels` gives another module with the same weights
whose layers call `pallas_kernels` where these can do the shape and dtype at hand, and plain JAX
elsewhere. What the layers do with the choice is in `models.layers`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from flax import nnx

from models.errors import InputError
from pallas_kernels.dispatch import targets_hopper

Attention = Literal["pallas", "cudnn", "xla"]
Other = Literal["pallas", "xla"]
Norm = Literal["pallas", "folded", "xla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What computes each kind of operation; "xla" is plain JAX.

    Attributes:
      attention: Attention over all tokens.
      ragged_attention: The same where their number is no multiple of 8, as ViT's 197.
      causal_attention: Attention of decoders.
      alibi_attention: Attention of decoders with ALiBi, which cuDNN can only take as a bias.
      gemm: Matrix products with what follows them: bias, activation, gate, residual. Depthwise
        convolutions with theirs too: BatchNorm, activation.
      norm: LayerNorm and RMSNorm; "folded" into the products by kernels before and after them
        where all that reads the norm is such a product (`models.folding`): ViT and the decoders.
    """

    attention: Attention = "xla"
    ragged_attention: Attention = "xla"
    causal_attention: Attention = "xla"
    alibi_attention: Attention = "xla"
    gemm: Other = "xla"
    norm: Norm = "xla"

    def __post_init__(self) -> None:
        """Raises InputError for a choice that there is not, or folded norms without products."""
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if value not in choices:
                raise InputError(
                    f"Kernels({field.name}={value!r}): there is no such choice;"
                    f" {', '.join(map(repr, choices))} are possible; choose one"
                )
        if self.norm == "folded" and self.gemm != "pallas":
            raise InputError(
                f"Kernels(norm='folded', gemm={self.gemm!r}): folded norms are a part of the"
                " kernels' products; gemm is 'pallas' then; set it, or another norm"
            )


PLAIN = Kernels()
# By measurement on an H200: docs/design/models.md.
HOPPER = Kernels(
    attention="pallas",
    ragged_attention="cudnn",
    causal_attention="pallas",
    alibi_attention="pallas",
    gemm="pallas",
    norm="pallas",
)


@runtime_checkable
class Arranges(Protocol):
    """A module whose checkpoint holds weights otherwise than kernels want them."""

    def arrange_weights(self) -> None:
        """Replaces them by what kernels want: parts of a joined weight, a table of even length.

        Weights that were replaced before stay as they are.
        """


@runtime_checkable
class Folds(Protocol):
    """A module with a norm that can be folded into its products."""

    @property
    def has_folded(self) -> bool:
        """Whether the norm is folded already."""
        ...

    def fold_norms(self) -> None:
        """Replaces the norm, and the weights that it goes into; once."""


def with_kernels[M: nnx.Module](model: M, kernels: Kernels | None = None) -> M:
    """Returns the model with its layers calling kernels.

    Weights are shared with the given model, which stays as it is; copied are only those that a
    checkpoint holds otherwise than kernels want them: query, key and value of GPT-2 and BLOOM,
    which it joins, GPT-2's table of 50,257 tokens, and a Conformer's depthwise weights, into which
    its BatchNorm goes. A copy once costs nothing later; slicing the joined product instead costs a
    pass over it in every layer. Those of LLaMA are joined: the rotation makes that pass anyway, and
    one product fills a GPU with fewer rows than three. Folded norms copy the weights that they go
    into.

    Args:
      model: Any model of this package.
      kernels: What to call; None takes the fastest of measurements on a Hopper GPU where the
        program being traced is for one, else plain JAX.

    Returns:
      A module that is called in the same way and returns the same up to rounding.

    Raises:
      InputError: The model's norms are folded already, and others are asked for.
    """
    if kernels is None:
        kernels = HOPPER if targets_hopper() else PLAIN
    copy = nnx.merge(*nnx.split(model))
    modules = [module for _, module in nnx.iter_modules(copy)]
    folds = [module for module in modules if isinstance(module, Folds)]
    if kernels.norm != "folded" and any(module.has_folded for module in folds):
        raise InputError(
            f"with_kernels(Kernels(norm={kernels.norm!r})): the model's norms are folded into its"
            " products, which cannot be undone; norm='folded' is possible; give the model as it"
            " was loaded"
        )
    if kernels != PLAIN:
        for module in modules:
            if isinstance(module, Arranges):
                module.arrange_weights()
    if kernels.norm == "folded":
        for module in folds:
            module.fold_norms()
    copy.set_attributes(kernels=kernels)
    return copy
