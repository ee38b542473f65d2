"""What the parts of a group take on a device: attention at its own rate, products by their weights.

A datasheet has one rate for all contractions; measured ceilings tell attention from products, since
no fused attention reaches what a large product does.
"""

from collections.abc import Mapping

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.device import Device
from pbjax.roofline_points import Kind
from pbjax.trace import Operation


def bandwidth(device: Device, kind: Kind) -> float:
    """Bytes a second that a group of operations of a kind can move."""
    products = device.weight_bytes_per_s or device.memory_bytes_per_s
    return products if kind == "dense" else device.memory_bytes_per_s


def attention_slowdown(operation: Operation, device: Device) -> float:
    """Seconds of a contraction inside fused attention over those of a product at its peak.

    Args:
      operation: A contraction between activations, or a kernel that is all of attention.
      device: Whose rates count; without one for attention nothing is slower.
    """
    share = _executed_share(operation)
    rates = device.attention_flops_per_s
    if not rates:
        return share
    width = _head_width(operation)
    rate = rates[min(rates, key=lambda known: abs(known - width))]
    dtype = str(getattr(operation.equation.invars[0].aval, "dtype", ""))
    return share * device.contraction_flops_per_s(dtype) / rate


def _executed_share(operation: Operation) -> float:
    """What is computed of all scores: a kernel that is told to be causal skips the upper half."""
    params: Mapping = operation.params
    causal = operation.primitive == KERNEL and dict(params["arguments"]).get("causal")
    return 0.5 if causal or "CAUSAL" in str(params.get("mask_type", "")) else 1.0


def _head_width(operation: Operation) -> int:
    query, key = (_shape(atom) for atom in operation.equation.invars[:2])
    if operation.primitive != "dot_general":
        return query[-1]
    contracted, batch = operation.params["dimension_numbers"]
    sizes = [query[i] for i in contracted[0]]
    for shape, used in zip((query, key), zip(contracted, batch, strict=True), strict=True):
        taken = {i for pair in used for i in pair}
        sizes += [size for i, size in enumerate(shape) if i not in taken]
    return min(sizes)


def _shape(atom: object) -> tuple[int, ...]:
    return getattr(getattr(atom, "aval", None), "shape", ())
