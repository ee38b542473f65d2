"""Outputs that follow from a ranking: near-ties may fall either way.

The indices that argmax, top-k or argsort return differ wholly where two values nearly tie, although
each value is right. Such an output is traced back to what was ranked. It is right if it is what the
model returns when it takes, in place of what it chose, a candidate of nearly the same value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jaxtyping import Array, Bool

from pbjax.graph.trace import Atom, Aval, Graph, Operation, evaluate

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Candidates, on each side of the one that was chosen, that are looked at.
MAX_TIES = 1024

# The largest difference of two values of a dtype, the largest of them given, that nearly tie.
type Allowed = Callable[[np.dtype, float], float]


def near_ties(
    graph: Graph, values: Sequence[Array], output: int, allowed: Allowed
) -> Iterator[Array]:
    """What an output would be if near-ties fell otherwise; nothing if it follows from no ranking.

    Each array takes other candidates for all of its elements at once: an element is right if it is
    that of any of them. The walk back from the output ends at matrix products and loops.

    Args:
      graph: The model.
      values: Its weights and inputs, in their order.
      output: Number of the output.
      allowed: Says what nearly ties.
    """
    atom = graph.outputs[output]
    between, rankings = _walk_back(graph, atom)
    for operation in rankings:
        after = _dependent(graph, operation, between)
        read = {a for o in (*after, operation) for a in _numbers(o.inputs)}
        written = {value for o in (*after, operation) for value in o.outputs}
        outer = _evaluated(graph, values, (read - written) | set(_numbers(operation.inputs)))
        ranking = _Ranking.of(operation, [_value(a, outer) for a in operation.inputs])

        def returned(chosen, outer, after=after, operation=operation):
            env = {**outer, **dict(zip(operation.outputs, chosen, strict=True))}
            evaluate(after, env)
            return env[atom]

        run = jax.jit(returned)
        for chosen in ranking.alternatives(allowed):
            yield run(chosen, outer)


def _walk_back(graph: Graph, output: Atom) -> tuple[set[int], list[Operation]]:
    """Positions of operations between rankings and an output, and the rankings."""
    producers = {v: i for i, o in enumerate(graph.operations) for v in o.outputs}
    waiting, seen, rankings = [output], set[int](), dict[int, Operation]()
    while waiting:
        atom = waiting.pop()
        position = producers.get(atom) if isinstance(atom, int) else None
        if position is None or position in seen:
            continue
        operation = graph.operations[position]
        if _is_ranking(operation):
            rankings[position] = operation
        elif operation.primitive not in CONTRACTIONS and not _has_body(operation):
            seen.add(position)
            waiting += operation.inputs
    return seen, list(rankings.values())


def _dependent(graph: Graph, source: Operation, positions: set[int]) -> list[Operation]:
    """The operations at some positions that read, through one another, what another one writes."""
    reached, found = set(source.outputs), []
    for position in sorted(positions):
        operation = graph.operations[position]
        if reached.intersection(_numbers(operation.inputs)):
            reached.update(operation.outputs)
            found.append(operation)
    return found


def _evaluated(graph: Graph, values: Sequence[Array], wanted: set[int]) -> dict[int, Array]:
    """Values of a graph by their numbers."""
    numbers = sorted(wanted)

    def run(leaves):
        env = dict(enumerate(leaves))
        evaluate(graph.operations, env)
        return [env[number] for number in numbers]

    return dict(zip(numbers, jax.jit(run)(tuple(values)), strict=True))


def _has_body(operation: Operation) -> bool:
    return next(iter(jaxprs_in_params(operation.params)), None) is not None


def _numbers(atoms: Sequence[Atom]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


def _value(atom: Atom, env: Mapping[int, Array]) -> Array:
    return jnp.asarray(atom.val) if isinstance(atom, Literal) else env[atom]


def _key_place(operation: Operation) -> int | None:
    """The first float operand that a sort compares; None if it compares none."""
    avals = [cast(Aval, x.aval) for x in operation.equation.invars[: operation.params["num_keys"]]]
    floats = (i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.floating))
    return next(floats, None)


def _is_ranking(operation: Operation) -> bool:
    """Whether an operation chooses or orders by comparing floats."""
    if operation.primitive == "sort":
        return _key_place(operation) is not None
    if operation.primitive not in ("argmax", "argmin", "top_k", "approx_top_k"):
        return False
    return jnp.issubdtype(cast(Aval, operation.equation.invars[0].aval).dtype, jnp.floating)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    """A ranking: its candidates in order, along the last axis.

    Attributes:
      keys: What is compared, the best first: integers that must be equal, and one float.
      payload: What is returned of the candidates, in the order of the results.
      num_chosen: How many of them are returned.
      finish: Makes the results of what is returned of the chosen ones.
    """

    keys: tuple[Array, ...]
    payload: tuple[Array, ...]
    num_chosen: int
    finish: Callable[[Sequence[Array]], tuple[Array, ...]]

    @classmethod
    def of(cls, operation: Operation, operands: Sequence[Array]) -> "_Ranking":
        if operation.primitive == "sort":
            return cls._of_sort(operation, operands)
        (ranked,), params = operands, operation.params
        if operation.primitive in ("argmax", "argmin"):
            (axis,), num_chosen = params["axes"], 1
        else:
            axis = params.get("axis", params.get("reduction_dimension"))
            num_chosen = params["k"]
        largest = operation.primitive in ("argmax", "top_k") or params.get("is_max_k", False)
        ranked = jnp.moveaxis(ranked, axis, -1)
        count = min(ranked.shape[-1], num_chosen + MAX_TIES)
        keys, places = lax.top_k(ranked if largest else -ranked, count)

        def finish(chosen):
            if num_chosen == 1 and operation.primitive in ("argmax", "argmin"):
                return (chosen[1][..., 0].astype(params["index_dtype"]),)
            values, indices = (jnp.moveaxis(x, -1, axis) for x in chosen)
            return (values if largest else -values, indices)

        return cls(keys=(keys,), payload=(keys, places), num_chosen=num_chosen, finish=finish)

    @classmethod
    def _of_sort(cls, operation: Operation, operands: Sequence[Array]) -> "_Ranking":
        axis, num_keys = operation.params["dimension"], operation.params["num_keys"]
        place = cast(int, _key_place(operation))
        moved = [jnp.moveaxis(x, axis, -1) for x in operands]
        ordered = lax.sort(moved, num_keys=num_keys, is_stable=operation.params["is_stable"])
        return cls(
            keys=tuple(ordered[: place + 1]),
            payload=tuple(ordered),
            num_chosen=moved[0].shape[-1],
            finish=lambda chosen: tuple(jnp.moveaxis(x, -1, axis) for x in chosen),
        )

    def alternatives(self, allowed: Allowed) -> Iterator[tuple[Array, ...]]:
        """Results with the next better and worse candidates, while any of them nearly tie."""
        *equal, ranked = self.keys
        magnitude = float(jnp.max(jnp.abs(ranked), initial=0, where=jnp.isfinite(ranked)))
        # Of two values that nearly tie each may be off by what is allowed.
        bound = 2 * allowed(ranked.dtype, magnitude)
        yield self._moved(0, jnp.ones((*ranked.shape[:-1], self.num_chosen), bool))
        sides = [1, -1]
        for distance in range(1, MAX_TIES + 1):
            for side in tuple(sides):
                ties = self._ties(side * distance, equal, ranked, bound)
                if not jnp.any(ties):
                    sides.remove(side)
                    continue
                yield self._moved(side * distance, ties)
            if not sides:
                return

    def _places(self, offset: int) -> np.ndarray:
        return np.arange(self.num_chosen) + offset

    def _ties(
        self, offset: int, equal: Sequence[Array], ranked: Array, bound: float
    ) -> Bool[Array, "... K"]:
        """Whether the candidate at an offset from each chosen one nearly ties with it."""
        places = self._places(offset)
        inside = (places >= 0) & (places < ranked.shape[-1])
        places = np.clip(places, 0, ranked.shape[-1] - 1)
        one, other = ranked[..., : self.num_chosen], ranked[..., places]
        wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (one, other)]
        alike = (one == other) | (jnp.abs(wide[0] - wide[1]) <= bound)
        for key in equal:
            alike &= key[..., : self.num_chosen] == key[..., places]
        return alike & np.broadcast_to(inside, alike.shape)

    def _moved(self, offset: int, where: Array) -> tuple[Array, ...]:
        """The results with the candidates at an offset, where these are allowed."""
        last = self.keys[0].shape[-1] - 1
        places = np.clip(self._places(offset), 0, last)
        chosen = [jnp.where(where, x[..., places], x[..., : self.num_chosen]) for x in self.payload]
        return self.finish(chosen)
