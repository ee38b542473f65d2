"""The pass itself: patterns over a graph, in order; what was found, and what was nearly found."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pbjax.errors import InputError
from pbjax.fusion.attention import find_attention
from pbjax.fusion.gemms import find_gated, find_gemm
from pbjax.fusion.norms import find_norm
from pbjax.fusion.reading import Reading
from pbjax.fusion.rewriting import Match, Mismatch, Miss, rewrite
from pbjax.trace import Graph, describe

PATTERNS = ("attention", "gated_gemm", "gemm", "layer_norm", "rms_norm", "add_norm")

type Patterns = Literal["all", "none"] | Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """A graph with kernels in it, and what became of it.

    Attributes:
      graph: Computes the same.
      matches: What was replaced, in program order.
      misses: What looked like a pattern and was left alone.
    """

    graph: Graph
    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]


def fuse(graph: Graph, patterns: Patterns = "all") -> Fusion:
    """Replaces what kernels can compute by these kernels.

    What is found depends on the graph's structure alone, so that graphs of one function at several
    batch sizes are rewritten alike.

    Args:
      graph: A traced function.
      patterns: "all", "none", or names out of `PATTERNS`.

    Returns:
      The rewritten graph with matches and misses.

    Raises:
      InputError: There is no such pattern.
    """
    enabled = names_of(patterns)
    reading = Reading(graph)
    search = _Search(reading)
    search.run("attention", find_attention, enabled, views=True)
    search.run("gated_gemm", find_gated, enabled)
    search.run("gemm", find_gemm, enabled)
    add_norm = "add_norm" in enabled
    takes_sum = partial(search.is_free, enabled=add_norm)
    search.run("norm", partial(find_norm, takes_sum=takes_sum), enabled)
    matches = sorted(search.matches, key=lambda m: min(m.outputs))
    return Fusion(
        graph=rewrite(graph, matches) if matches else graph,
        matches=tuple(matches),
        misses=search.misses(),
    )


def names_of(patterns: Patterns) -> frozenset[str]:
    """The names that an argument means.

    Raises:
      InputError: There is no such pattern.
    """
    if isinstance(patterns, str):
        known = {"all": PATTERNS, "none": ()}
        names = known.get(patterns, (patterns,))
    else:
        names = tuple(patterns)
    unknown = sorted(set(names) - set(PATTERNS))
    if unknown:
        raise InputError(
            f"fusion={patterns!r}: no pattern {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(PATTERNS)}; name some of these, or pass 'all' or 'none'"
        )
    return frozenset(names)


class _Search:
    """What has been matched so far; later patterns take what earlier ones have left."""

    def __init__(self, reading: Reading):
        self.reading = reading
        self.matches: list[Match] = []
        self._missed: list[tuple[Miss, frozenset[int]]] = []
        self._taken: set[int] = set()

    def is_free(self, value: int, *, enabled: bool = True) -> bool:
        """Whether no match has taken the operation that writes a value."""
        return enabled and self.reading.makers.get(value) not in self._taken

    def run(
        self, name: str, find: Callable, enabled: Collection[str], *, views: bool = False
    ) -> None:
        """Tries a pattern at every operation, the last first: the whole before its parts."""
        operations = self.reading.graph.operations
        for index in range(len(operations) - 1, -1, -1):
            if index in self._taken or len(operations[index].outputs) != 1:
                continue
            (value,) = operations[index].outputs
            if self.reading.uncast(value, widened=True) != value:
                continue
            if self.reading.is_view(value) and not views:
                continue
            try:
                found = find(self.reading, value)
            except Mismatch as mismatch:
                if self.reading.is_view(value):
                    continue  # what it is a view of says it again
                miss = Miss(pattern=name, where=describe(operations[index]), reason=str(mismatch))
                self._missed.append((miss, mismatch.anchors))
                continue
            if found is None or found.pattern not in enabled or found.replaced & self._taken:
                continue
            self._take(found)

    def _take(self, found: Match) -> None:
        """Notes a match and what nobody reads any more, such as queries that were scaled before."""
        self.matches.append(found)
        self._taken |= found.replaced | {self.reading.makers[v] for v in found.outputs}
        for index in reversed(found.operations):
            values = self.reading.graph.operations[index].outputs
            readers = {i for v in values for i in self.reading.readers.get(v, ())}
            if readers <= self._taken and not self.reading.returned.intersection(values):
                self._taken.add(index)

    def misses(self) -> tuple[Miss, ...]:
        """What was nearly found, but for what another match has taken since."""
        return tuple(miss for miss, anchors in self._missed if not anchors & self._taken)
