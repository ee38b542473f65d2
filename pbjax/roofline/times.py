"""Seconds of attention, products and launches on a device.

A datasheet has one rate for all contractions; measured ceilings distinguish attention from
products, since no fused attention reaches the rate of a large product.
"""

import math
from collections.abc import Mapping
from functools import cache
from operator import mul

from pallas_kernels.decode_attention.splits import choose_splits
from pallas_kernels.gemm import tiles
from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.operation import arguments_of
from pbjax.device import Device
from pbjax.graph.cost import bodies, equation_cost
from pbjax.graph.trace import Operation, body_graph
from pbjax.planning.ceilings import ATTENTION_TOKENS
from pbjax.roofline.points import OperationKind
from pbjax.roofline.traffic import CONTRACTIONS

# Rows of queries, and of keys, in a tile of fused attention.
TILE = 128
# A product of this size fills any device.
LARGE = 8192
# Kernels that join the parts of a split cache: weights of the parts, their sum, its layout.
JOINING = 3
_PRODUCTS = ("gemm", "gated_gemm", "normed_gemm", "gemm_for_norm")
_CONTRACTIONS = CONTRACTIONS | {KERNEL, "dot_product_attention_fwd_wrapper"}
_ATTENTIONS = ("attention", "dot_product_attention_fwd_wrapper")


def bandwidth(device: Device, kind: OperationKind) -> float:
    """Bytes a second that a group of operations of a kind can move."""
    products = device.weight_bytes_per_s or device.memory_bytes_per_s
    return products if kind == "dense" else device.memory_bytes_per_s


def attention_slowdown(operation: Operation, device: Device) -> float:
    """Seconds of a contraction inside fused attention over those of a product at its peak.

    A tile of queries goes through its tiles of keys one by one. Nothing overlaps before the first
    and after the last, which costs about one tile more: few tiles reach a lower rate.

    Args:
      operation: A contraction between activations, a kernel of a whole attention, or a loop or
        branch with such inside.
      device: The device; without a rate of attention nothing is slower.
    """
    if inside := contractions_inside(operation):
        flops = [equation_cost(each.equation).flops for each in inside]
        slowed = [attention_slowdown(each, device) for each in inside]
        return sum(map(mul, flops, slowed)) / sum(flops) if any(flops) else 1.0
    if operation.primitive not in _CONTRACTIONS:
        return 1.0
    share, steps = _executed(operation)
    rates = device.attention_flops_per_s
    if not rates:
        return share
    width = min(_sizes(operation))
    rate = rates[min(rates, key=lambda known: abs(known - width))]
    dtype = str(getattr(operation.equation.invars[0].aval, "dtype", ""))
    ends = (1 + 1 / steps) / (1 + TILE / ATTENTION_TOKENS)
    return share * ends * device.contraction_flops_per_s(dtype) / rate


def contractions_inside(operation: Operation) -> list[Operation]:
    """The contractions in the bodies of a loop or branch; none for any other operation."""
    _, inner = bodies(operation.equation)
    found: list[Operation] = []
    for body in (*inner, *operation.params.get("branches", ())):
        for each in body_graph(body, operation).operations:
            found += [each] if each.primitive in _CONTRACTIONS else contractions_inside(each)
    return found


def product_s(operation: Operation, device: Device) -> float:
    """Seconds of a product kernel of ours by its tiles; 0 for anything else.

    Few rows make few tiles, which leave most of the device idle; where that costs much, the product
    is left to XLA. The table that chooses tiles has rates of short runs; where the device sustains
    less, all take longer.

    Args:
      operation: Any operation.
      device: The device; the result is 0 unless it has measured rates.
    """
    if operation.primitive != KERNEL or operation.params["name"] not in _PRODUCTS:
        return 0.0
    if not device.launch_s:
        return 0.0
    given = arguments_of(operation.params, [atom.aval for atom in operation.equation.invars])
    product = _product(given)
    if _is_left_to_xla(*product, device.num_sms):
        return 0.0
    heavy = any(given.get(term) is not None for term in ("w_gate", "residual", "activation"))
    slower = _large_rate(device.num_sms) / device.contraction_flops_per_s(str(given["x"].dtype))
    return slower * _tiled_s(*product, heavy, device.num_sms)


def launches_s(operation: Operation, device: Device) -> float:
    """Seconds of the launches of an operation that is a kernel, or ends one.

    Where a product is left to XLA, the operations after it are a kernel of their own. XLA also
    joins the parts where decode attention splits each cache.
    """
    if operation.primitive != KERNEL:
        return device.launch_s
    name, ours = operation.params["name"], device.pallas_launch_s or device.launch_s
    given = arguments_of(operation.params, [atom.aval for atom in operation.equation.invars])
    if name in _PRODUCTS and _is_left_to_xla(*_product(given), device.num_sms):
        return _xla_kernels(given) * device.launch_s
    if name != "decode_attention":
        return ours
    cache, pages = given["k"].shape, given["page_table"]
    num_keys = cache[1] if pages is None else pages.shape[1] * cache[1]
    splits = choose_splits(given["q"].shape[0] * cache[2], num_keys, device.num_sms)
    return ours + (JOINING * device.launch_s if splits > 1 else 0.0)


def _product(given: Mapping) -> tuple[int, int, int, bool]:
    """Rows, columns and depth of a product, and whether it has two weights."""
    depth, columns = given["w"].shape
    gated = given.get("w_gate") is not None
    return math.prod(given["x"].shape[:-1]), columns, depth, gated


def _xla_kernels(given: Mapping) -> int:
    """Number of kernels that XLA makes of a product of ours and of the operations after it."""
    if given.get("w_gate") is not None:
        return 3
    following = ("bias", "activation", "residual", "row_scale")
    return 1 + any(given.get(term) is not None for term in following) + ("eps" in given)


@cache
def _is_left_to_xla(m: int, n: int, k: int, gated: bool, num_sms: int) -> bool:
    return tiles.is_left_to_xla((m,), n, k, gated=gated, num_sms=num_sms)


def _large_rate(num_sms: int) -> float:
    return 2 * LARGE**3 / _tiled_s(LARGE, LARGE, LARGE, False, False, num_sms)


@cache
def _tiled_s(m: int, n: int, k: int, gated: bool, heavy: bool, num_sms: int) -> float:
    return tiles.predicted_s((m,), n, k, gated=gated, heavy=heavy, ctas=num_sms, num_sms=num_sms)


def _executed(operation: Operation) -> tuple[float, float]:
    """The computed share of all scores, and the tiles of keys that a tile of queries runs through.

    A causal kernel skips the tiles above the diagonal.
    """
    params: Mapping = operation.params
    name = params["name"] if operation.primitive == KERNEL else operation.primitive
    if name not in _ATTENTIONS:
        return 1.0, float(_tiles(max(_sizes(operation))))
    causal = operation.primitive == KERNEL and dict(params["arguments"])["causal"]
    queries, keys = (_shape(atom)[1] for atom in operation.equation.invars[:2])
    steps = float(_tiles(keys))
    whole = TILE**2 * _tiles(queries) * steps / (queries * keys)
    if not causal and "CAUSAL" not in str(params.get("mask_type", "")):
        return whole, steps
    lower = (1 + min(1.0, TILE / keys)) / 2
    return whole * lower, max(1.0, steps * lower)


def _tiles(tokens: int) -> int:
    return -(-tokens // TILE)


def _sizes(operation: Operation) -> list[int]:
    """The width of an attention's head, and its numbers of tokens where it is a contraction."""
    query, key = (_shape(atom) for atom in operation.equation.invars[:2])
    if operation.primitive != "dot_general":
        return [query[-1]]
    contracted, batch = operation.params["dimension_numbers"]
    sizes = [query[i] for i in contracted[0]]
    for shape, used in zip((query, key), zip(contracted, batch, strict=True), strict=True):
        taken = {i for pair in used for i in pair}
        sizes += [size for i, size in enumerate(shape) if i not in taken]
    return sizes


def _shape(atom: object) -> tuple[int, ...]:
    return getattr(getattr(atom, "aval", None), "shape", ())
