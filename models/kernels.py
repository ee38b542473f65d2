"""The choice of the kernels that a model's layers call.

A new or loaded model is plain JAX: it runs anywhere and under any transformation, and
`pbjax.optimize` takes it apart in this form. `with_kernels` returns another module with the same
weights whose layers call `pallas_kernels` for the shapes and dtypes that these support, and plain
JAX elsewhere. `models.layers` acts on the choice.
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
    """The implementation of each kind of operation; "xla" is plain JAX.

    Attributes:
      attention: Attention over all tokens.
      ragged_attention: Attention over a number of tokens that is no multiple of 8, as ViT's 197.
      causal_attention: Attention of decoders.
      alibi_attention: Attention of decoders with ALiBi, which cuDNN takes only as a bias.
      gemm: Matrix products with their epilogue of bias, activation, gate and residual; also
        depthwise convolutions with BatchNorm and activation.
      norm: LayerNorm and RMSNorm. "folded" folds a norm into the products before and after it if
        only products read it (`models.folding`), as in ViT and the decoders.
    """

    attention: Attention = "xla"
    ragged_attention: Attention = "xla"
    causal_attention: Attention = "xla"
    alibi_attention: Attention = "xla"
    gemm: Other = "xla"
    norm: Norm = "xla"

    def __post_init__(self) -> None:
        """Raises InputError for an unknown choice, or folded norms without kernels' products."""
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if value not in choices:
                raise InputError(
                    f"Kernels({field.name}={value!r}): unknown choice;"
                    f" choices are {', '.join(map(repr, choices))}; choose one"
                )
        if self.norm == "folded" and self.gemm != "pallas":
            raise InputError(
                f"Kernels(norm='folded', gemm={self.gemm!r}): folded norms are a part of the"
                " kernels' products; gemm is 'pallas' then; set it, or another norm"
            )


PLAIN = Kernels()
# The fastest choices measured on an H200: docs/design/models.md.
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
    """A module whose checkpoint holds weights in another layout than kernels want."""

    def arrange_weights(self) -> None:
        """Brings the weights into the layout that kernels want; a second call changes nothing."""


@runtime_checkable
class Folds(Protocol):
    """A module with a norm that can be folded into its products."""

    @property
    def has_folded(self) -> bool:
        """Whether the norm is folded already."""
        ...

    def fold_norms(self) -> None:
        """Replaces the norm and the weights it is folded into; a second call changes nothing."""


def with_kernels[M: nnx.Module](model: M, kernels: Kernels | None = None) -> M:
    """Returns the model with its layers calling kernels.

    The given model stays as it is, and both share their weights. Only weights whose layout kernels
    want otherwise are copied: the joint query, key and value of GPT-2 and BLOOM, which is split;
    GPT-2's table of 50,257 tokens, which is lengthened; and a Conformer's depthwise weights, into
    which the BatchNorm is folded. One copy costs nothing later, while slicing the joint product
    would cost a pass over it in every layer. LLaMA's query, key and value are joined: the rotation
    makes that pass anyway, and one product fills a GPU with fewer rows than three. Folded norms
    copy the weights that they are folded into.

    Args:
      model: Any model of this package.
      kernels: The kernels to call; None chooses the fastest measured ones if the program being
        traced is for a Hopper GPU, else plain JAX.

    Returns:
      A module with the same calls and, up to rounding, the same results.

    Raises:
      InputError: The model's norms are folded already, and the choice is another one.
    """
    if kernels is None:
        kernels = HOPPER if targets_hopper() else PLAIN
    copy = nnx.merge(*nnx.split(model))
    modules = [module for _, module in nnx.iter_modules(copy)]
    folds = [module for module in modules if isinstance(module, Folds)]
    if kernels.norm != "folded" and any(module.has_folded for module in folds):
        raise InputError(
            f"with_kernels(Kernels(norm={kernels.norm!r})): the model's norms are folded into its"
            " products, which cannot be undone; only norm='folded' is possible; pass the model"
            " as it was loaded"
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
