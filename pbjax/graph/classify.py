"""The resource class of each operation, from its cost alone, by the roofline.

An operation takes the longer of the seconds of its arithmetic and of its bytes, and that one names
its class. Operations are taken one by one: where XLA fuses several, values that stay in registers
are charged too. Nothing is measured here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.device import Device, ResourceClass
from pbjax.graph.cost import Cost, bodies, equation_cost
from pbjax.graph.trace import Graph, Operation, body_graph

# A contraction reaches tensor cores only if one of its free sides fills their tiles: a Hopper
# warpgroup multiplies 64 rows at a time, and the sides can be swapped.
MIN_ROWS = 64

# FLOPs of the peak, which counts a fused multiply-add as two, that one operation takes: an addition
# takes the slot of a multiply-add, a special function that of eight.
FLOPS_PER_OPERATION = 2
FLOPS_PER_TRANSCENDENTAL = 16

# Kernels whose products are multiply-adds of CUDA cores.
_MULTIPLY_ADDS = frozenset(("depthwise_convolution",))

_CONTRACTIONS = frozenset(
    (
        KERNEL,
        "dot_general",
        "conv_general_dilated",
        "ragged_dot_general",
        "dot_product_attention_fwd_wrapper",
        "pallas_call",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The cost of one operation on a device.

    Attributes:
      resource: The resource that bounds it.
      cost: Its FLOPs and bytes.
      seconds: Its roofline time, a lower bound.
      unit: The unit that computes it, TENSOR or CUDA, whether or not that bounds it.
      compute_s: Seconds of its arithmetic alone.
    """

    resource: ResourceClass
    cost: Cost
    seconds: float
    unit: ResourceClass
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """The operations of one resource class, together.

    Attributes:
      resource: The class.
      operations: How many operations there are.
      flops: FLOPs of the operations, transcendental functions among them.
      bytes: Bytes that they move.
      seconds: Sum of their roofline times.
    """

    resource: ResourceClass
    operations: int
    flops: float
    bytes: float
    seconds: float


def classify(graph: Graph, device: Device) -> tuple[Label, ...]:
    """Labels every operation of a graph.

    A contraction with MIN_ROWS or more in one of its free sides is TENSOR if its arithmetic
    intensity lies above the device's ridge point, else MEMORY. Any other operation is MEMORY if
    moving its bytes takes as long as its arithmetic or longer, else CUDA. A loop or branch has the
    class of most of its time. An operation of unknown cost is MEMORY.

    Args:
      graph: Any graph.
      device: The device whose peak rates decide.

    Returns:
      One label for each operation.
    """
    return tuple(_label(operation, device) for operation in graph.operations)


def class_shares(labels: Iterable[Label]) -> tuple[ClassShare, ...]:
    """Sums labels by class; one entry for each class, in the order of ResourceClass."""
    listed = tuple(labels)
    return tuple(_share(resource, listed) for resource in ResourceClass)


def _share(resource: ResourceClass, labels: Sequence[Label]) -> ClassShare:
    own = [label for label in labels if label.resource == resource]
    return ClassShare(
        resource=resource,
        operations=len(own),
        flops=sum((label.cost.flops + label.cost.transcendentals for label in own), 0.0),
        bytes=sum((label.cost.bytes for label in own), 0.0),
        seconds=sum((label.seconds for label in own), 0.0),
    )


def _label(operation: Operation, device: Device) -> Label:
    params: Mapping = operation.params
    cost = equation_cost(operation.equation)
    count, inner = bodies(operation.equation)
    if inner:
        return _nested(inner, cost, count, device)
    if operation.primitive == "cond":
        labels = [_nested([branch], cost, 1, device) for branch in params["branches"]]
        return max(labels, key=lambda label: label.seconds)
    if operation.primitive == KERNEL and params["name"] in _MULTIPLY_ADDS:
        return _other(operation, cost, device, slots=1)
    if operation.primitive == KERNEL and not _contracts(params["plain"]):
        return _other(operation, cost, device)
    if operation.primitive in _CONTRACTIONS and cost.known:
        return _contraction(operation, cost, device)
    return _other(operation, cost, device)


def _nested(bodies: Sequence, cost: Cost, count: int, device: Device) -> Label:
    labels = [label for body in bodies for label in classify(body_graph(body), device)]
    shares = class_shares(labels)
    units = {unit: 0.0 for unit in (ResourceClass.TENSOR, ResourceClass.CUDA)}
    for label in labels:
        units[label.unit] += count * label.compute_s
    return Label(
        resource=max(shares, key=lambda share: share.seconds).resource,
        cost=cost,
        seconds=count * sum(share.seconds for share in shares),
        unit=max(units, key=lambda unit: units[unit]),
        compute_s=sum(units.values()),
    )


def _contraction(operation: Operation, cost: Cost, device: Device) -> Label:
    dtype = str(getattr(operation.equation.invars[0].aval, "dtype", ""))
    if _free_rows(operation) < MIN_ROWS:
        return _other(operation, cost, device)
    memory_s = cost.bytes / device.memory_bytes_per_s
    compute_s = cost.flops / device.contraction_flops_per_s(dtype)
    bound = cost.intensity > device.ridge_point(dtype)
    resource = ResourceClass.TENSOR if bound else ResourceClass.MEMORY
    return _computed(resource, cost, memory_s, ResourceClass.TENSOR, compute_s)


def _contracts(body: ClosedJaxpr) -> bool:
    return any(o.primitive in _CONTRACTIONS for o in body_graph(body).operations)


def _free_rows(operation: Operation) -> int:
    """The longer side of the result's matrix; MIN_ROWS for a whole kernel."""
    params: Mapping = operation.params
    sides = [_shape(atom) for atom in operation.equation.invars[:2]]
    out = _shape(operation.equation.outvars[0])
    if operation.primitive == "dot_general":
        taken = [set(map(int, (*a, *b))) for a, b in zip(*params["dimension_numbers"], strict=True)]
        pairs = zip(sides, taken, strict=True)
        return max(math.prod(n for i, n in enumerate(s) if i not in t) for s, t in pairs)
    if operation.primitive == "conv_general_dilated":
        features = out[params["dimension_numbers"].out_spec[1]]
        groups = params["feature_group_count"] * params["batch_group_count"]
        return max(math.prod(out) // features, features // groups)
    return max(out) if operation.primitive == "ragged_dot_general" else MIN_ROWS


def _shape(atom: object) -> tuple[int, ...]:
    return getattr(getattr(atom, "aval", None), "shape", ())


def _other(
    operation: Operation, cost: Cost, device: Device, *, slots: int = FLOPS_PER_OPERATION
) -> Label:
    memory_s = cost.bytes / device.memory_bytes_per_s
    work = slots * cost.flops + FLOPS_PER_TRANSCENDENTAL * cost.transcendentals
    compute_s = work / device.cuda_flops_per_s
    if operation.primitive in device.functions_per_s:
        evaluations = math.prod(_shape(operation.equation.outvars[0]))
        compute_s = evaluations / device.functions_per_s[operation.primitive]
    resource = ResourceClass.MEMORY if memory_s >= compute_s else ResourceClass.CUDA
    return _computed(resource, cost, memory_s, ResourceClass.CUDA, compute_s)


def _computed(
    resource: ResourceClass, cost: Cost, memory_s: float, unit: ResourceClass, compute_s: float
) -> Label:
    seconds = max(memory_s, compute_s)
    return Label(resource=resource, cost=cost, seconds=seconds, unit=unit, compute_s=compute_s)
