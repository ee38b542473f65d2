"""Parameters by dotted path: filling a module with them, casting it, its fingerprint."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from models.errors import CheckpointError
from models.keymap import Family

DTYPES = ("float32", "float16", "bfloat16")
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One variable of a module."""

    path: str
    value: Shaped[Array, "..."]


def canonical_dtype(dtype: DTypeLike, asked: str) -> str:
    """Returns the name of a supported parameter dtype.

    Args:
      dtype: A name such as bfloat16 or bf16, a numpy or jax dtype, or a type such as jnp.bfloat16.
      asked: The operation at hand, for the message.

    Raises:
      CheckpointError: It is not a supported dtype.
    """
    try:
        name = jnp.dtype(SHORT_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in DTYPES:
        raise CheckpointError(
            f"{asked}: dtype is {name}; supported are {', '.join(DTYPES)}; choose one of them"
        )
    return name


def fill[C, M: nnx.Module](
    family: Family[C, M], config: C, dtype: str, parameters: Iterable[Parameter]
) -> M:
    """Builds a module around given values; no value is initialised and none is copied.

    Args:
      family: The family of the model.
      config: The configuration.
      dtype: The dtype of the parameters.
      parameters: Every variable exactly once, in that dtype.

    Returns:
      The module.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family.build(config, dtype)))
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    filled = {}
    for parameter in parameters:
        path, leaf = flat.pop(parameter.path)
        same = (parameter.value.shape, parameter.value.dtype.name) == (leaf.shape, dtype)
        assert same, f"{parameter.path} does not fit"
        filled[path] = leaf.replace(parameter.value)
    assert not flat, f"unfilled: {sorted(flat)}"
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def parameters_of(module: nnx.Module) -> list[Parameter]:
    """Returns every variable of a module, sorted by path."""
    flat = nnx.to_flat_state(nnx.state(module))
    named = ((".".join(map(str, path)), leaf) for path, leaf in flat)
    return [Parameter(path=path, value=leaf[...]) for path, leaf in sorted(named, key=_first)]


def cast[C, M: nnx.Module](family: Family[C, M], config: C, module: M, dtype: str) -> M:
    """Returns a module with all parameters in another dtype; the given one stays as it is."""
    old = parameters_of(module)
    new = (Parameter(path=p.path, value=p.value.astype(dtype)) for p in old)
    return fill(family, config, dtype, new)


def fingerprint(module: nnx.Module) -> str:
    """Returns the SHA-256 over path, shape, dtype and bytes of every variable in sorted order."""
    digest = hashlib.sha256()
    for parameter in parameters_of(module):
        value = np.asarray(jax.device_get(parameter.value))
        digest.update(f"{parameter.path} {list(value.shape)} {value.dtype.name}\n".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    return f"sha256:{digest.hexdigest()}"


def _first[T](pair: tuple[str, T]) -> str:
    return pair[0]
