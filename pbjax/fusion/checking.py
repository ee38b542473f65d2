"""Each match against what it replaces, on random operands, by the one tolerance rule."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array

from pallas_kernels.testing import assert_close
from pbjax.errors import VerificationError
from pbjax.fusion.fusing import Fusion
from pbjax.fusion.rewriting import Match, Operand
from pbjax.trace import Aval, Graph, Operation, evaluate


def verify(fusion: Fusion, *, seed: int = 0) -> None:
    """Runs each match and the operations it replaces on the same random operands.

    Matches of equal operations, such as those of equal layers, are verified once. The kernels run
    if the device has them, else their meaning in plain JAX.

    Args:
      fusion: What `fuse` found.
      seed: Of the operands.

    Raises:
      VerificationError: Results differ by more than their dtype allows.
    """
    for loop in fusion.loops:
        verify(loop, seed=seed)
    graph, seen = fusion.source, set()
    for number, found in enumerate(fusion.matches):
        if found.name in seen:
            continue
        seen.add(found.name)
        rng = np.random.default_rng((seed, number))
        drawn = {o.value: _drawn(rng, graph.avals[o.value], o) for o in found.operands}
        _compare(graph, found, [drawn[o.value] for o in found.operands])


def _compare(graph: Graph, found: Match, operands: Sequence[Array]) -> None:
    operations = [graph.operations[i] for i in found.operations]
    expected = jax.jit(lambda *given: _plain(graph, found, operations, given))(*operands)
    actual = jax.jit(found.function)(*operands)
    values = [*_written(operations), *(o.value for o in found.operands)]
    floats = [d for v in values if jnp.issubdtype(d := graph.avals[v].dtype, jnp.floating)]
    for got, want in zip(actual, expected, strict=True):
        try:
            assert_close(
                got,
                want,
                reduction=_longest_sum(graph, operations),
                roundings=len(operations),
                inner_dtype=max(map(_rounds_to, floats), key=lambda d: jnp.finfo(d).eps),
                name=found.kernel,
            )
        except AssertionError as error:
            raise VerificationError(
                f"fusion of {found.name} at {found.where}: {error}; kernel and model must "
                f"agree; leave it out by fuse='all,-{found.name}', and please report the model"
            ) from None


def _plain(graph: Graph, found: Match, operations: Sequence[Operation], given) -> list[Array]:
    first = graph.num_weights - len(graph.constants)
    env = {
        a: jnp.asarray(graph.constants[a - first])
        for operation in operations
        for a in operation.inputs
        if isinstance(a, int) and first <= a < graph.num_weights
    }
    env.update(zip((o.value for o in found.operands), given, strict=True))
    evaluate(operations, env)
    return [env[value] for value in found.outputs]


def _written(operations: Sequence[Operation]) -> list[int]:
    """The values that operations write."""
    return [value for operation in operations for value in operation.outputs]


def _drawn(rng: np.random.Generator, aval: Aval, operand: Operand) -> Array:
    if aval.dtype == bool:
        mask = rng.integers(0, 2, aval.shape).astype(bool)
        mask[..., :1] = True  # no query without a key: of such a one nothing is promised
        return jnp.asarray(mask)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(rng.integers(1, int(operand.spread) + 1, aval.shape), aval.dtype)
    return jnp.asarray(operand.spread * rng.standard_normal(aval.shape, np.float32), aval.dtype)


def _longest_sum(graph: Graph, operations: Sequence[Operation]) -> int:
    """The most terms that one of the operations sums."""
    longest = 1
    for operation in operations:
        if operation.primitive in ("dot_general", "reduce_sum"):
            (operand, *_) = operation.inputs
            shape = (
                np.shape(operand.val)
                if isinstance(operand, Literal)
                else graph.avals[operand].shape
            )
            if operation.primitive == "dot_general":
                axes = operation.params["dimension_numbers"][0][0]
            else:
                axes = operation.params["axes"]
            longest = max(longest, int(np.prod([shape[int(i)] for i in axes])))
    return longest


def _rounds_to(dtype: np.dtype) -> np.dtype:
    """What a product rounds its operands to: on a GPU float32 means TF32, 10 bits as in f16."""
    on_tensor_cores = jax.default_backend() == "gpu" and dtype == np.float32
    return np.dtype(np.float16) if on_tensor_cores else dtype
