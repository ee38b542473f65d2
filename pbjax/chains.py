"""Predicted seconds of operations as a compiler runs them: elementwise chains fused.

`classify` takes operations one by one; here a value between two links of a chain costs nothing,
which is what decides where a block is worth cutting.
"""

from collections.abc import Sequence

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.classify import Label
from pbjax.dataflow import nbytes
from pbjax.device import Device, ResourceClass
from pbjax.trace import Atom, Aval, Operation

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

    A link of a chain is charged for the values that must be in memory: those that come from
    outside or from a kernel, once each, and those that a kernel or the outside reads. Kernels, and
    links that arithmetic bounds, take their roofline time.

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
