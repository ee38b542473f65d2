"""What a model family declares about its checkpoints: names, layouts, and what may be left out.

Nothing here reads a file; `models.keys` matches these declarations with the tensors of a folder.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of the file and the parameter it fills.

    Attributes:
      key: Name in the file, without the base prefix, in the current spelling.
      path: Name of the parameter in the module, joined by dots.
      axes: The configuration field behind each axis of the stored tensor, for messages.
      permutation: Order in which the stored axes are taken; None keeps them.
    """

    key: str
    path: str
    axes: tuple[str, ...]
    permutation: tuple[int, ...] | None = None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the file must hold for a parameter of the given shape."""
        if self.permutation is None:
            return shape
        stored = [0] * len(shape)
        for position, axis in enumerate(self.permutation):
            stored[axis] = shape[position]
        return tuple(stored)

    def arrange(self, tensor: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Brings a stored tensor into the module's layout, on the tensor's device."""
        return tensor if self.permutation is None else jnp.transpose(tensor, self.permutation)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family[C, M: nnx.Module]:
    """Everything that loading and converting must know about one kind of model.

    Attributes:
      model_type: The name in config.json.
      config: The configuration class.
      parse: Reads (fields of config.json, origin) into a configuration.
      complete: Settles what only the tensors tell: (configuration, fields, keys) to configuration.
      build: Makes the module: (configuration, parameter dtype).
      describe: One line for the report.
      num_layers: Number of blocks.
      leaves: The total key map.
      prefix: Prefix of the base model in files of a task class, with its dot.
      base: First parts of the keys that belong to the base model.
      dropped: What a file may hold besides.
      ties: Which of these must equal another tensor.
      tied_by_default: What an absent tie_word_embeddings means.
      example: Fixed inputs of a forward pass.
      probe: Named intermediate and final values of a forward pass on such inputs.
    """

    model_type: str
    config: type[C]
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
    tied_by_default: bool = True

    def field_names(self) -> list[str]:
        """Returns the names of the configuration's fields."""
        return list(inspect.signature(self.config).parameters)


def linear(
    key: str, path: str, *, outputs: str, inputs: str, bias: bool = True
) -> tuple[Leaf, ...]:
    """Returns the leaves of a torch Linear: weight [out, in] and, unless without, bias [out]."""
    weight = Leaf(
        key=f"{key}.weight", path=f"{path}.kernel", axes=(outputs, inputs), permutation=(1, 0)
    )
    if not bias:
        return (weight,)
    return weight, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(outputs,))


def conv1d(key: str, path: str, *, outputs: str, inputs: str) -> tuple[Leaf, ...]:
    """Returns the two leaves of GPT-2's Conv1D: weight [in, out], which is our layout, and bias."""
    weight = Leaf(key=f"{key}.weight", path=f"{path}.kernel", axes=(inputs, outputs))
    return weight, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(outputs,))


def norm(key: str, path: str, *, features: str) -> tuple[Leaf, Leaf]:
    """Returns the two leaves of a torch LayerNorm."""
    scale = Leaf(key=f"{key}.weight", path=f"{path}.scale", axes=(features,))
    return scale, Leaf(key=f"{key}.bias", path=f"{path}.bias", axes=(features,))


def embedding(key: str, path: str, *, rows: str, features: str) -> Leaf:
    """Returns the leaf of a torch Embedding."""
    return Leaf(key=f"{key}.weight", path=f"{path}.embedding", axes=(rows, features))


def abstract_parameters(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every variable of a module, by its dotted path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): tuple(variable.shape) for path, variable in flat}


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the number of values in all the given shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
