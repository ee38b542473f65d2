"""Random weights and inputs for a model known by its shapes, for measurements."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from models.kv_cache import KVCache


def fill_module[M: nnx.Module](module: M, seed: int = 0) -> M:
    """Returns a module with random weights in place of shapes; activations stay of size 1.

    Args:
      module: A module of shapes; arrays in it stay as they are.
      seed: The seed of the random numbers.
    """
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    filled = [_weight(leaf, seed + i) for i, leaf in enumerate(leaves)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, filled))


def fill_inputs(inputs: tuple[object, ...], vocab_size: int, seed: int = 0) -> tuple[object, ...]:
    """Returns arrays in place of the shapes of a call's inputs.

    Prompts have the full length; a cache is full but for the room of the new tokens.

    Args:
      inputs: See `models.presets.Call`.
      vocab_size: The number of tokens; ids are below it.
      seed: The seed of the random numbers.
    """
    shapes = [x.shape for x in inputs if isinstance(x, jax.ShapeDtypeStruct)]
    num_tokens = next((shape[1] for shape in shapes if len(shape) > 1), 1)
    return tuple(_input(x, vocab_size, num_tokens, seed + i) for i, x in enumerate(inputs))


def _input(x: object, vocab_size: int, num_tokens: int, seed: int) -> object:
    if isinstance(x, KVCache):
        values = jax.tree.map(lambda leaf: _weight(leaf, seed), x)
        held = jnp.full_like(values.lengths, x.num_keys - num_tokens % x.num_keys)
        return KVCache(keys=values.keys, values=values.values, lengths=held)
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return _normal(seed, x.shape, x.dtype, 1.0)
    if len(x.shape) == 1:
        return jnp.full(x.shape, num_tokens, x.dtype)
    return jax.random.randint(jax.random.key(seed), x.shape, 0, vocab_size, x.dtype)


def _weight(leaf: object, seed: int) -> object:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if len(leaf.shape) < 2:
        return jnp.ones(leaf.shape, leaf.dtype)
    return _normal(seed, leaf.shape, leaf.dtype, leaf.shape[-2] ** -0.5)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(seed: int | Array, shape: tuple[int, ...], dtype: DTypeLike, scale: float) -> Array:
    numbers = jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))
    return (scale * numbers).astype(dtype)
