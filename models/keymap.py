"""The declarations of a model family about its checkpoints: names, layouts, unused tensors.

Nothing here reads a file; `models.keys` matches the declarations with the tensors of a folder.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

from models.hf_config import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of the file and the parameter it fills.

    Attributes:
      key: Name in the file, without the base prefix, in the current spelling.
      path: Name of the parameter in the module, joined by dots.
      axes: The configuration field behind each axis of the stored tensor, for messages.
      permutation: Order in which the stored axes are taken; None keeps them.
      num_unit_axes: Axes of length 1 at the end of the stored tensor that the parameter lacks.
      statistic: Whether it is a statistic of the training data instead of a parameter; it is loaded
        but not counted.
    """

    key: str
    path: str
    axes: tuple[str, ...]
    permutation: tuple[int, ...] | None = None
    num_unit_axes: int = 0
    statistic: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the file must hold for a parameter of the given shape."""
        stored = list(shape)
        for position, axis in enumerate(self.permutation or ()):
            stored[axis] = shape[position]
        return (*stored, *(1,) * self.num_unit_axes)

    def arrange(self, tensor: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Brings a stored tensor into the module's layout, on the tensor's device."""
        return arrange(tensor, self.permutation, self.num_unit_axes)


def arrange(
    tensor: Shaped[Array, "..."], permutation: tuple[int, ...] | None, num_unit_axes: int
) -> Shaped[Array, "..."]:
    """Drops axes of length 1 at the end of a tensor, and takes the others in a new order."""
    if num_unit_axes:
        tensor = tensor.reshape(tensor.shape[:-num_unit_axes])
    return tensor if permutation is None else jnp.transpose(tensor, permutation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Tensors that a file may hold and the model does not use.

    Attributes:
      label: Short name in the report.
      pattern: Regular expression that must match the whole key.
    """

    label: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A dropped tensor that must equal another one of the same file while embeddings are tied."""

    key: str
    equals: str


def attention_mask(_: object, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns the mask among the inputs of a forward pass; each of its positions is one token."""
    return inputs.get("attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family[C, M: nnx.Module]:
    """Everything that loading and converting need to know about one kind of model.

    Attributes:
      model_type: The name in config.json.
      config: The configuration class.
      schema: Defaults and further names of the fields of config.json.
      parse: Reads (fields of config.json, origin) into a configuration.
      complete: Adds what only the tensors show: (configuration, fields, keys) to configuration.
      build: Builds the module from (configuration, parameter dtype).
      describe: Returns one line for the report.
      num_layers: Returns the number of blocks.
      leaves: Returns the total key map.
      prefix: The prefix of the base model in files of a task class, with its dot.
      base: The first parts of the keys that belong to the base model.
      dropped: Further tensors that a file may hold.
      ties: Dropped tensors that must equal another tensor.
      token_mask: Returns the mask of real tokens from (configuration, inputs); None = all.
      example: Returns fixed inputs of a forward pass.
      probe: Returns named intermediate and final values of a forward pass on such inputs.
    """

    model_type: str
    config: type[C]
    schema: Schema
    parse: Callable[[Mapping[str, object], str], C]
    complete: Callable[[C, Mapping[str, object], frozenset[str]], C]
    build: Callable[[C, str], M]
    describe: Callable[[C], str]
    num_layers: Callable[[C], int]
    leaves: Callable[[C], tuple[Leaf, ...]]
    prefix: str
    base: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    ties: tuple[Tie, ...]
    example: Callable[[C], dict[str, np.ndarray]]
    probe: Callable[[M, Mapping[str, Array | np.ndarray]], dict[str, Array]]
    token_mask: Callable[[C, Mapping[str, np.ndarray]], np.ndarray | None] = attention_mask

    def field_names(self) -> list[str]:
        """Returns the names of the configuration's fields."""
        return list(inspect.signature(self.config).parameters)


def linear(
    key: str, path: str, *, outputs: str, inputs: str, bias: bool = True
) -> tuple[Leaf, ...]:
    """Returns the leaves of a torch Linear: weight [out, in] and, with a bias, bias [out]."""
    weight = Leaf(
        key=f"{key}.weight", path=f"{path}.kernel", axes=(outputs, inputs), permutation=(1, 0)
    )
    if not bias:
        return (weight,)
    return weight, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(outputs,))


def conv1d(key: str, path: str, *, outputs: str, inputs: str) -> tuple[Leaf, ...]:
    """Returns the two leaves of GPT-2's Conv1D: weight [in, out], in our layout, and bias."""
    weight = Leaf(key=f"{key}.weight", path=f"{path}.kernel", axes=(inputs, outputs))
    return weight, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(outputs,))


def scale_norm(key: str, path: str, *, features: str) -> Leaf:
    """Returns the leaf of a torch LayerNorm without bias, or of an RMSNorm."""
    return Leaf(key=f"{key}.weight", path=f"{path}.scale", axes=(features,))


def norm(key: str, path: str, *, features: str) -> tuple[Leaf, Leaf]:
    """Returns the two leaves of a torch LayerNorm."""
    scale = scale_norm(key, path, features=features)
    return scale, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(features,))


def pointwise(
    key: str, path: str, *, outputs: str, inputs: str, bias: bool = False, num_axes: int = 1
) -> tuple[Leaf, ...]:
    """Returns the leaves of a torch Conv1d or Conv2d of width 1, [out, in, 1], as a Linear's."""
    weight = Leaf(
        key=f"{key}.weight",
        path=f"{path}.kernel",
        axes=(outputs, inputs, *(inputs,) * num_axes),
        permutation=(1, 0),
        num_unit_axes=num_axes,
    )
    if not bias:
        return (weight,)
    return weight, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(outputs,))


def batch_norm(key: str, path: str, *, features: str) -> tuple[Leaf, ...]:
    """Returns the leaves of a torch BatchNorm: two parameters and two statistics."""
    mean, var = (
        Leaf(key=f"{key}.running_{name}", path=f"{path}.{name}", axes=(features,), statistic=True)
        for name in ("mean", "var")
    )
    return (*norm(key, path, features=features), mean, var)


def embedding(key: str, path: str, *, rows: str, features: str) -> Leaf:
    """Returns the leaf of a torch Embedding."""
    return Leaf(key=f"{key}.weight", path=f"{path}.embedding", axes=(rows, features))


def abstract_parameters(
    module: nnx.Module, kind: type[nnx.Variable] = nnx.Variable
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every variable of a kind, by its dotted path."""
    flat = nnx.to_flat_state(nnx.state(module, kind))
    return {".".join(map(str, path)): tuple(variable.shape) for path, variable in flat}


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the number of values in all the given shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
