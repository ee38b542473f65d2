"""Names for the operations of a graph: stages by scope or module, groups by what they compute.

Names come from the model's own scopes and from the paths of its weights; they change only how a
report reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.graph.trace import Operation
from pbjax.program.fused_costs import KERNELS
from pbjax.roofline.traffic import CONTRACTIONS, UPDATES, Holds, Moved

# Last parts of a weight's path that carry no information.
_PLAIN_PARTS = frozenset(("kernel", "embedding", "weight", "params"))

# Names of fused groups by primitives that identify them; the first that fits.
_FUSED_NAMES: tuple[tuple[str, frozenset[str]], ...] = (
    ("softmax", frozenset(("exp", "reduce_max"))),
    ("norm", frozenset(("rsqrt", "reduce_sum"))),
    ("look-up", frozenset(("gather",))),
    ("positions", frozenset(("cos", "sin"))),
    ("activation", frozenset(("logistic",))),
    ("activation", frozenset(("tanh",))),
    ("activation", frozenset(("erf",))),
    ("activation", frozenset(("erfc",))),
)


def leaf_names(names: Sequence[str], leaves: Sequence[Holds]) -> dict[int, str]:
    """Paths of weights joined by dots, without indices and uninformative endings.

    Args:
      names: Names of weights and inputs, as the graph has them.
      leaves: Contents of the weights and inputs.
    """
    pairs = enumerate(zip(names, leaves, strict=False))
    return {
        i: ".".join(_parts(name))
        for i, (name, holds) in pairs
        if holds == "weights" and not name.startswith("captured")
    }


class Namer:
    """Names for the operations of a section of a graph.

    Attributes:
      stages: Name of each operation's stage.
      groups: Name of each operation's group, unique in its stage for different groups.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        moved: Moved,
        names: Mapping[int, str],
        section: str,
        *,
        start: int,
        taken: frozenset[str],
    ):
        """Finds the names.

        Args:
          operations: Operations of the section.
          moved: Bytes that their graph moves.
          names: Names of weights, by their numbers.
          section: Name of stages that have none.
          start: Position of the first operation in the graph.
          taken: Names of stages of other sections.
        """
        self._moved, self._names, self._start = moved, names, start
        weights = [self._weight(operation) for operation in operations]
        stages = _stages(operations, weights, section)
        self.stages = [f"{s} ({section})" if s in taken else s for s in stages]
        self.groups = self._groups(operations, weights)

    def _weight(self, operation: Operation) -> str:
        """The path of the largest weight that a contraction reads; empty if there is none."""
        if operation.primitive not in KERNELS or operation.primitive in UPDATES:
            return ""
        atoms = [a for a in operation.inputs if isinstance(a, int)]
        roots = [
            r for a in atoms if self._moved.holds[a] == "weights" for r in self._moved.roots[a]
        ]
        named = [self._names[root] for root in roots if root in self._names]
        # Weights come before biases and scales in most kernels.
        return named[0] if named else ""

    def _groups(self, operations: Sequence[Operation], weights: Sequence[str]) -> list[str]:
        names: list[str] = []
        fused: list[int] = []
        for i, operation in enumerate(operations):
            inside = self._moved.regions[self._start + i] is not None
            own = self._own_name(operation, weights[i])
            if inside:
                contracts = "scores, values" if own else "softmax"
                own = "attention" if self._moved.fused else contracts
            if own is None and fused and self.stages[fused[0]] != self.stages[i]:
                self._close(fused, operations, names)
            if own is None:
                fused.append(i)
                names.append("")
            else:
                self._close(fused, operations, names)
                names.append(own)
        self._close(fused, operations, names)
        return names

    def _close(self, fused: list[int], operations: Sequence[Operation], names: list[str]) -> None:
        name = _fused_name({operations[i].primitive for i in fused})
        for i in fused:
            names[i] = name
        fused.clear()

    def _own_name(self, operation: Operation, weight: str) -> str | None:
        """The name of an operation that is not part of a fused group; None if it is."""
        if operation.primitive in UPDATES:
            cached = isinstance(a := operation.inputs[0], int) and (
                self._moved.holds[a] == "kv_cache"
            )
            return "cache write" if cached else None
        if operation.primitive not in KERNELS:
            return None
        name = operation.params["name"] if operation.primitive == KERNEL else operation.primitive
        # A product is named by its weight; a norm or attention, which may read weights too, is not.
        is_product = operation.primitive in CONTRACTIONS or "gemm" in name
        return weight.rsplit(".", 1)[-1] if weight and is_product else name


def _stages(operations: Sequence[Operation], weights: Sequence[str], section: str) -> list[str]:
    scopes = [[part for part in o.scope.split("/") if part.isidentifier()] for o in operations]
    keys = _first_different(scopes)
    if any(keys):
        return _filled_backwards(keys, section)
    keys = _first_different([weight.split(".")[:-1] for weight in weights])
    return _filled_forwards(keys, section)


def _first_different(paths: Sequence[Sequence[str]]) -> list[str]:
    """The part of each path after the common ones, or its last part; empty for an empty path."""
    known = [path for path in paths if path]
    levels = zip(*known, strict=False)
    common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return [path[min(common, len(path) - 1)] if path else "" for path in paths]


def _filled_backwards(keys: Iterable[str], section: str) -> list[str]:
    """Operations without a name belong to the stage before them."""
    filled: list[str] = []
    for key in keys:
        filled.append(key or (filled[-1] if filled else section))
    return filled


def _filled_forwards(keys: Sequence[str], section: str) -> list[str]:
    """Operations without a name belong to the stage after them: a norm to the layer it feeds."""
    following = next((key for key in reversed(keys) if key), section)
    filled: list[str] = []
    for key in reversed(keys):
        following = key or following
        filled.append(following)
    return filled[::-1]


def _fused_name(primitives: set[str]) -> str:
    return next((name for name, marks in _FUSED_NAMES if marks <= primitives), "elementwise")


def _parts(name: str) -> list[str]:
    """The words of a path: params['layers'][0]['norm'].value gives layers, norm."""
    path = name.removesuffix(".value")
    words = "".join(c if c.isalnum() or c == "_" else " " for c in path).split()
    parts = [word for word in words if not word.isdigit()]
    while len(parts) > 1 and parts[-1] in _PLAIN_PARTS:
        parts.pop()
    return parts[1:] if len(parts) > 1 and parts[0] in ("params", "inputs") else parts
