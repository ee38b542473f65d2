"""Predicted seconds and memory of operations as a compiler runs them: elementwise chains fused.

`classify` takes operations one by one; here a value between two operations of a chain costs
nothing, which decides where a block is worth cutting.
"""

from collections.abc import Collection, Mapping, Sequence

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.device import Device, ResourceClass
from pbjax.graph.classify import Label
from pbjax.graph.cost import VIEWS
from pbjax.graph.dataflow import nbytes
from pbjax.graph.trace import Atom, Aval, Operation

# Primitives that are kernels of their own; XLA fuses all others into chains.
KERNELS = frozenset(
    (
        KERNEL,
        "conv_general_dilated",
        "cond",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "custom_call",
        "dot_general",
        "dot_product_attention_fwd_wrapper",
        "ffi_call",
        "pallas_call",
        "ragged_dot_general",
        "scan",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter_max",
        "scatter_min",
        "scatter_mul",
        "sort",
        "top_k",
        "while",
    )
)


def fused_seconds(
    operations: Sequence[Operation],
    avals: Sequence[Aval],
    outputs: Sequence[Atom],
    labels: Sequence[Label],
    device: Device,
) -> list[float]:
    """Predicted seconds of each operation, with chains of elementwise operations fused.

    An operation of a chain is charged for the values that must be in memory: those that come from
    outside or from a kernel, once each, and those that a kernel or the outside reads. Kernels, and
    operations that arithmetic bounds, take their roofline time.

    Args:
      operations: In program order.
      avals: Shape and dtype of the values.
      outputs: Values read after the last operation.
      labels: One for each operation.
      device: Whose bandwidth the values cost.
    """
    kernels = [o for o in operations if o.primitive in KERNELS]
    inside = {v for o in operations if o.primitive not in KERNELS for v in o.outputs}
    stored = {atom for o in kernels for atom in o.inputs if isinstance(atom, int)}
    stored.update(atom for atom in outputs if isinstance(atom, int))
    read: set[int] = set()
    seconds = []
    for operation, label in zip(operations, labels, strict=True):
        if operation.primitive in KERNELS or label.resource != ResourceClass.MEMORY:
            seconds.append(label.seconds)
            continue
        values = {atom for atom in operation.inputs if isinstance(atom, int)}
        fresh = {v for v in values if v not in inside or v in stored} - read
        read |= fresh
        moved = sum(nbytes(avals[v]) for v in (*fresh, *stored.intersection(operation.outputs)))
        # A look-up moves what it touches, not its table.
        seconds.append(min(moved / device.memory_bytes_per_s, label.seconds))
    return seconds


def held_bytes(
    operations: Sequence[Operation],
    sizes: Sequence[int],
    needed: Collection[int],
    given: Collection[int],
) -> list[int]:
    """Bytes in memory while each operation runs, with chains of elementwise operations fused.

    Only values that a kernel reads or writes, that are given or that are needed are ever in memory.
    A chain runs at its last operation, and the values that it reads are kept until then.

    Args:
      operations: In program order.
      sizes: Bytes of each value, by its number.
      needed: Values read after the last operation.
      given: Values written before the first; others from outside do not count.

    Returns:
      One figure for each operation.
    """
    if not operations:
        return []
    roots = _roots(operations)
    births = {value: 0 for value in given}
    for position, operation in enumerate(operations):
        births |= {v: position for v in operation.outputs if v not in roots}
    kernels = [o for o in operations if o.primitive in KERNELS]
    touched = [a for o in kernels for a in (*o.inputs, *o.outputs) if isinstance(a, int)]
    kept = {roots.get(v, v) for v in (*touched, *needed, *given)} & births.keys()
    deaths = _deaths(operations, roots, kept, needed)
    held = [0] * len(operations)
    for value in kept:
        for position in range(births[value], max(births[value], deaths.get(value, -1)) + 1):
            held[position] += sizes[value]
    return held


def _roots(operations: Sequence[Operation]) -> dict[int, int]:
    """Maps each value that is another's bytes under another shape to that other value."""
    roots: dict[int, int] = {}
    for operation in operations:
        source = operation.inputs[0] if operation.primitive in VIEWS else None
        if isinstance(source, int) and len(operation.outputs) == 1:
            roots[operation.outputs[0]] = roots.get(source, source)
    return roots


def _deaths(
    operations: Sequence[Operation],
    roots: Mapping[int, int],
    kept: set[int],
    needed: Collection[int],
) -> dict[int, int]:
    """The last operation that each value is read by, whether at once or at the end of a chain."""
    last = len(operations) - 1
    deaths = {roots.get(value, value): last for value in needed}
    for position in reversed(range(len(operations))):
        operation = operations[position]
        inside = [v for v in operation.outputs if v not in kept and v not in roots]
        read = max([position, *(deaths.get(v, position) for v in inside)])
        for atom in operation.inputs:
            if isinstance(atom, int) and operation.outputs[0] not in roots:
                root = roots.get(atom, atom)
                deaths[root] = max(deaths.get(root, -1), read)
    return deaths
