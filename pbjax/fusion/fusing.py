"""The fusion pass: tries each pattern on a graph in order, and keeps matches and near misses."""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from pbjax.errors import InputError
from pbjax.fusion.attention import find_attention
from pbjax.fusion.cudnn import find_cudnn_attention
from pbjax.fusion.gemms import find_gated, find_gemm
from pbjax.fusion.joining import find_joint
from pbjax.fusion.loops import body_of, with_body
from pbjax.fusion.norms import find_norm
from pbjax.fusion.reading import VIEWS, Reading
from pbjax.fusion.rewriting import Match, Mismatch, Miss, rewrite, structure
from pbjax.fusion.selection import Patterns, Selection, selection_of
from pbjax.graph.trace import Atom, Graph, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """A graph with kernels in it, and the matches that put them there.

    Attributes:
      source: The graph as it was traced.
      graph: The graph with kernels; it computes the same.
      matches: The replaced parts, in program order.
      misses: Parts that looked like a pattern and were left alone.
      left_out: Matches that the caller asked to leave out.
      loops: The fusion of the body of each scan.
    """

    source: Graph
    graph: Graph
    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]
    left_out: tuple[Match, ...] = ()
    loops: tuple["Fusion", ...] = ()


def fuse(graph: Graph, patterns: Patterns | Selection = "all") -> Fusion:
    """Replaces the parts of a graph that kernels can compute.

    The matches depend on the graph's structure alone, so that graphs of one function at several
    batch sizes are rewritten alike.

    Args:
      graph: A function traced for a Hopper GPU; `fuse` must be called in the same setting, since
        kernels are plain JAX code on any other device.
      patterns: See `selection_of`; "auto" means "all" here.

    Returns:
      The rewritten graph with matches and misses.

    Raises:
      InputError: A pattern or match is unknown.
    """
    selection = selection_of(patterns)
    found = _found(graph, selection.patterns, frozenset())
    names = _name(found, defaultdict(int))
    unknown = sorted(selection.without - names)
    if unknown:
        raise InputError(
            f"fuse=-{unknown[0]}: no match of that name; matches are "
            f"{', '.join(sorted(names)) or 'none'}; name one of these, as report() lists them"
        )
    return _rewritten(found, selection.without)


@dataclass(slots=True, kw_only=True)
class _Found:
    """The matches of a graph, and those of the body of each scan by the position of the scan."""

    graph: Graph
    matches: list[Match]
    misses: tuple[Miss, ...]
    loops: dict[int, "_Found"] = field(default_factory=dict)


def _found(graph: Graph, enabled: frozenset[str], held: frozenset[int]) -> _Found:
    reading = Reading(graph, held)
    search = _Search(reading)
    search.run("attention", find_cudnn_attention, enabled)
    search.run("attention", find_attention, enabled, views=True)
    search.run("gated_gemm", find_gated, enabled)
    search.run("gemm", partial(find_gemm, with_epilogue=True), enabled)
    if "qkv" in enabled:
        search.join()
    search.run("gemm", partial(find_gemm, with_epilogue=False), enabled)
    takes_sum = partial(search.is_free, enabled="add_norm" in enabled)
    search.run("norm", partial(find_norm, takes_sum=takes_sum), enabled)
    matches = sorted(search.matches, key=lambda m: min(m.outputs))
    found = _Found(graph=graph, matches=matches, misses=search.misses())
    for index, operation in enumerate(graph.operations if enabled else ()):
        if operation.primitive == "scan":
            body, weights = body_of(operation, reading.weights)
            # Weights joined in a loop would be joined at every step.
            found.loops[index] = _found(body, enabled - {"qkv"}, weights)
    return found


def _name(found: _Found, counts: dict[str, int]) -> set[str]:
    """Gives equal matches, such as those of equal layers, one name; returns the names."""
    names: dict[object, str] = {}
    for i, m in enumerate(found.matches):
        key = structure(found.graph, m)
        if key not in names:
            counts[m.pattern] += 1
            names[key] = f"{m.pattern}.{counts[m.pattern]}"
        found.matches[i] = replace(m, name=names[key])
    inner = [_name(loop, counts) for loop in found.loops.values()]
    return set(names.values()).union(*inner)


def _rewritten(found: _Found, without: Collection[str]) -> Fusion:
    operations = list(found.graph.operations)
    loops = []
    for index, inner in found.loops.items():
        loops.append(_rewritten(inner, without))
        if loops[-1].graph is not inner.graph:
            operations[index] = with_body(operations[index], loops[-1].graph)
    matches = [m for m in found.matches if m.name not in without]
    changed = matches or any(loop.graph is not loop.source for loop in loops)
    rewritten = replace(found.graph, operations=tuple(operations))
    return Fusion(
        source=found.graph,
        graph=rewrite(rewritten, matches) if changed else found.graph,
        matches=tuple(matches),
        misses=found.misses,
        left_out=tuple(m for m in found.matches if m.name in without),
        loops=tuple(loops),
    )


class _Search:
    """The matches so far; later patterns see the operations that earlier ones have left."""

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
            if self.reading.uncast(value, widened=True) != value or not self._fits(value):
                continue
            if self.reading.is_view(value) and not views:
                continue
            try:
                found = find(self.reading, value)
            except Mismatch as mismatch:
                pattern, where = mismatch.pattern or name, describe(operations[index])
                # A view repeats the mismatch of the value that it shows.
                if pattern not in enabled or self.reading.is_view(value):
                    continue
                miss = Miss(pattern=pattern, where=where, reason=str(mismatch))
                self._missed.append((miss, mismatch.anchors))
                continue
            if found is None or found.pattern not in enabled or found.replaced & self._taken:
                continue
            self._take(found)

    def _fits(self, value: int) -> bool:
        """Whether a kernel could give such a value: a non-empty array of floats."""
        return self.reading.is_float(value) and 0 not in self.reading.shape(value)

    def join(self) -> None:
        """Joins the remaining products of one input.

        Products that only attention reads stay apart: a kernel reads whole arrays, and cutting them
        out of a joined product costs as much as joining saves. With a rotation in between, that
        pass is made anyway.
        """
        attended = {
            self._seen_whole(read.value)
            for found in self.matches
            if found.pattern == "attention"
            for read in found.operands
        }
        for found in tuple(find_joint(self.reading, self.is_free)):
            if not found.replaced & self._taken and not attended.issuperset(found.outputs):
                self._take(found)

    def _seen_whole(self, value: Atom) -> Atom:
        """The value that a view shows."""
        while self.reading.primitive(value) in VIEWS:
            (value,) = self.reading.operation(value).inputs
        return value

    def _take(self, found: Match) -> None:
        """Takes a match, and operations that nothing reads any more, such as scaled queries."""
        self.matches.append(found)
        self._taken |= found.replaced | {self.reading.makers[v] for v in found.outputs}
        for index in reversed(found.operations):
            values = self.reading.graph.operations[index].outputs
            readers = {i for v in values for i in self.reading.readers.get(v, ())}
            if readers <= self._taken and not self.reading.returned.intersection(values):
                self._taken.add(index)

    def misses(self) -> tuple[Miss, ...]:
        """The near misses, without those that another match has taken since."""
        return tuple(miss for miss, anchors in self._missed if not anchors & self._taken)
