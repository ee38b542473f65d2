"""Compares each match with the operations it replaces, on random operands."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.stages import Lowered
from jaxtyping import Array

from pallas_kernels.testing import assert_close
from pbjax.errors import FusionError
from pbjax.fusion.fusing import Fusion
from pbjax.fusion.rewriting import Match, Operand
from pbjax.graph.trace import Aval, Graph, Operation, evaluate


def verify(fusion: Fusion, *, seed: int = 0) -> None:
    """Runs each match and the operations it replaces on the same random operands.

    Matches of equal operations, such as those of equal layers, are verified once. The kernels run
    if the device has them, else their plain JAX code. The tolerance is that of `assert_close`.

    Args:
      fusion: A result of `fuse`.
      seed: Seed of the operands.

    Raises:
      FusionError: Results differ by more than their dtype allows.
    """
    checks = [
        _Check.of(graph, found, seed=seed + number)
        for number, (graph, found) in enumerate(_unlike(fusion))
    ]
    with ThreadPoolExecutor() as pool:  # Compilation runs without Python's lock.
        programs = list(pool.map(_Check.compile, checks))
    for check, (kernel, plain) in zip(checks, programs, strict=True):
        _compare(check, kernel(*check.operands), plain(*check.operands))


def _unlike(fusion: Fusion) -> Iterator[tuple[Graph, Match]]:
    """One match of each name, with the graph it is in."""
    for found in {m.name: m for m in reversed(fusion.matches)}.values():
        yield fusion.source, found
    for loop in fusion.loops:
        yield from _unlike(loop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """A match, random operands, and the two programs that compute its results."""

    graph: Graph
    found: Match
    operands: tuple[Array, ...]
    kernel: Lowered
    plain: Lowered

    @classmethod
    def of(cls, graph: Graph, found: Match, *, seed: int) -> "_Check":
        rng = np.random.default_rng(seed)
        drawn = {o.value: _drawn(rng, graph.avals[o.value], o) for o in found.operands}
        operands = tuple(drawn[o.value] for o in found.operands)
        return cls(
            graph=graph,
            found=found,
            operands=operands,
            kernel=jax.jit(found.function).lower(*operands),
            plain=jax.jit(partial(_plain, graph, found)).lower(*operands),
        )

    def compile(self) -> tuple[Callable, Callable]:
        return self.kernel.compile(), self.plain.compile()


def _compare(check: _Check, actual: Sequence[Array], expected: Sequence[Array]) -> None:
    graph, found = check.graph, check.found
    operations = [graph.operations[i] for i in found.operations]
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
            raise FusionError(
                f"fusion of {found.name} at {found.where}: {error}; kernel and model must "
                f"agree; leave it out by fuse='all,-{found.name}', and please report the model"
            ) from None


def _plain(graph: Graph, found: Match, *given: Array) -> list[Array]:
    operations = [graph.operations[i] for i in found.operations]
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
        mask[..., :1] = True  # every query sees a key: results without one are undefined
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
    """The dtype to which a product rounds: on a GPU float32 means TF32, 10 bits as in f16."""
    on_tensor_cores = jax.default_backend() == "gpu" and dtype == np.float32
    return np.dtype(np.float16) if on_tensor_cores else dtype
