"""The effect of fewer bits, more GPUs or a draft model, by arithmetic on a report.

No model is changed or run; the effect on a model's outputs is not considered here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pbjax.errors import InputError
from pbjax.roofline.points import Point, Traffic
from pbjax.roofline.result import Roofline

type Number = int | float

# Weights that share a scale of 16 bits in formats of 4 bits.
SCALE_GROUP = 128
FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A changed report.

    Attributes:
      name: The change in words.
      report: The report after the change, for each device.
      note: The assumptions.
    """

    name: str
    report: Roofline
    note: str


def with_weight_bits(report: Roofline, bits: int, *, group: int | None = None) -> Variant:
    """Stores the weights of the repeated layers in fewer bits and widens them where they are read.

    The arithmetic does not change. Embeddings and head keep their bits, as is usual.

    Args:
      report: A report of a model with weights of 16 or 32 bits.
      bits: Bits of a weight.
      group: How many weights share a scale of 16 bits; None = so many that scales do not count.
    """
    factor = (bits + (16 / group if group else 0)) / _bits(report)
    points = tuple(_lighter(p, weights=factor) if _is_layer(p) else p for p in report.points)
    saved = sum(p.traffic.weights for p in report.points if _is_layer(p)) * (1 - factor)
    memory = replace(report.memory, weight_bytes=round(report.memory.weight_bytes - saved))
    scales = f", a scale for {group}" if group else ""
    return Variant(
        name=f"weights in {bits} bits",
        report=replace(report, points=points, memory=memory),
        note=f"dense layers of the blocks{scales}; arithmetic in {report.dtype}",
    )


def with_fp8(report: Roofline) -> Variant:
    """Stores the weights of the repeated layers in FP8 and multiplies in FP8.

    Args:
      report: A report of a model with weights of 16 or 32 bits.

    Raises:
      InputError: The device's tensor cores take no FP8.
    """
    device = report.device
    if FP8 not in device.tensor_flops_per_s:
        raise InputError(
            f"with_fp8({device.kind}): its tensor cores take "
            f"{', '.join(sorted(device.tensor_flops_per_s))}; FP8 is needed; ask for weights of "
            "8 bits instead"
        )
    lighter = with_weight_bits(report, 8).report
    slower = device.contraction_flops_per_s(report.dtype) / device.contraction_flops_per_s(FP8)
    points = tuple(
        replace(p, tensor_s=slower * p.tensor_s) if _is_layer(p) else p for p in lighter.points
    )
    return Variant(
        name="weights and products in FP8",
        report=replace(lighter, points=points),
        note="dense layers of the blocks; their inputs still move in 16 bits",
    )


def with_kv_bits(report: Roofline, bits: int, head_dim: int) -> Variant:
    """Stores the KV cache in fewer bits, with a scale of 16 bits for each head of each token.

    Args:
      report: A report of a call with a KV cache.
      bits: Bits of a number in the cache.
      head_dim: Numbers of a head.

    Raises:
      InputError: The call has no cache.
    """
    if not report.memory.kv_cache_bytes:
        raise InputError(
            f"with_kv_bits({report.model}, {report.phase}): the call has no KV cache; prefill and "
            "decode have one; ask for one of these phases"
        )
    factor = (bits + 16 / head_dim) / _bits(report)
    memory = replace(report.memory, kv_cache_bytes=round(factor * report.memory.kv_cache_bytes))
    points = tuple(_lighter(point, kv_cache=factor) for point in report.points)
    return Variant(
        name=f"KV cache in {bits} bits",
        report=replace(report, points=points, memory=memory),
        note="a scale of 16 bits for each head and token",
    )


def with_tensor_parallel(report: Roofline, degree: int, width: int, num_layers: int) -> Variant:
    """Splits the layers over several devices, each with its share of heads and MLP.

    Each layer has two sums over the devices, after attention and after the MLP, of a row of h
    numbers for each token. In a ring each device sends 2 (t - 1) / t of that, which does not
    overlap with the layers; latency of a message is not counted. Norms and residuals are split over
    the tokens, so that everything is divided by t but the whole rows that enter and leave dense
    layers.

    Args:
      report: A report of one device.
      degree: t, the number of devices.
      width: h.
      num_layers: How many layers there are.

    Returns:
      The report of each of the devices.

    Raises:
      InputError: The degree is below 2, or the device has no link.

    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    link = report.device.link_bytes_per_s
    if degree < 2 or link is None:
        raise InputError(
            f"with_tensor_parallel(degree={degree}): {report.device.kind} with a link of "
            f"{link or 0:,.0f} bytes/s; 2 or more devices with a link are needed; ask for another "
            "degree or device"
        )
    points = tuple(_divided(point, degree) for point in report.points)
    tokens = report.tokens
    moved = 2 * (degree - 1) / degree * tokens * width * _bits(report) / 8
    sums = Point(
        stage="all-reduce",
        name="all-reduce",
        kind="other",
        repeats=2 * num_layers,
        operations=1,
        dtype="",
        flops=0.0,
        traffic=Traffic(),
        tensor_s=0.0,
        cuda_s=0.0,
        memory_s=2 * num_layers * moved / link,
    )
    memory = replace(
        report.memory,
        weight_bytes=math.ceil(report.memory.weight_bytes / degree),
        kv_cache_bytes=math.ceil(report.memory.kv_cache_bytes / degree),
    )
    return Variant(
        name=f"tensor parallel over {degree}",
        report=replace(report, points=(*points, sums), memory=memory),
        note=f"{2 * num_layers} sums of {tokens:,} x {width:,} at {link / 1e9:,.0f} GB/s",
    )


def expected_tokens(acceptance: Number, num_drafted: int) -> float:
    """Tokens that one round of speculative decoding makes on average.

        (1 - a^(g + 1)) / (1 - a)

    Args:
      acceptance: a, the probability that a drafted token is kept.
      num_drafted: g, tokens that the draft model makes each round.

    Raises:
      InputError: The probability is outside 0 .. 1, or nothing is drafted.

    Source: Leviathan et al. 2023, equation 1.
    """
    if not 0 <= acceptance <= 1 or num_drafted < 1:
        raise InputError(
            f"expected_tokens(acceptance={acceptance}, num_drafted={num_drafted}): not a "
            "probability and a number of tokens; 0 to 1, and 1 or more, are allowed; correct them"
        )
    return float(sum(acceptance**i for i in range(num_drafted + 1)))


def speculative_speedup(
    acceptance: Number, num_drafted: int, draft_cost: Number, verify_cost: Number = 1
) -> float:
    """How many times faster tokens come than from plain decoding.

        (1 - a^(g + 1)) / ((1 - a) (g c + v))

    with c and v the seconds of a step of the draft model and of checking g + 1 tokens, over those
    of a plain step. While a step is bound by memory v is 1, as in the theorem; once the batch makes
    it compute-bound v tends to g + 1 and nothing is gained.

    Args:
      acceptance: a.
      num_drafted: g.
      draft_cost: c.
      verify_cost: v.

    Source: Leviathan et al. 2023, theorem 3.8, with v added.
    """
    return expected_tokens(acceptance, num_drafted) / (num_drafted * draft_cost + verify_cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding at one batch.

    Attributes:
      batch_size: Rows of the batch.
      draft_cost: Seconds of a draft step over those of a plain one.
      verify_cost: Seconds of checking all drafted tokens over those of a plain step.
      speedup: Speed-up over plain decoding.
    """

    batch_size: int
    draft_cost: float
    verify_cost: float
    speedup: float


def speculate(
    plain_s: Callable[[int], float],
    verify_s: Callable[[int], float],
    draft_s: Callable[[int], float],
    *,
    acceptance: Number,
    num_drafted: int,
    batches: Sequence[int],
) -> tuple[Speculation, ...]:
    """Predicts speculative decoding over the batch.

    Args:
      plain_s: Seconds of a plain step of the model, by batch.
      verify_s: Seconds of a step with num_drafted + 1 tokens of each row, by batch.
      draft_s: Seconds of a step of the draft model, by batch.
      acceptance: Probability that a drafted token is kept.
      num_drafted: Tokens drafted each round.
      batches: The batches.
    """
    found = []
    for rows in batches:
        plain = plain_s(rows)
        draft, verify = draft_s(rows) / plain, verify_s(rows) / plain
        speedup = speculative_speedup(acceptance, num_drafted, draft, verify)
        found.append(
            Speculation(batch_size=rows, draft_cost=draft, verify_cost=verify, speedup=speedup)
        )
    return tuple(found)


def break_even_batch(speedup: Callable[[int], float], largest: int) -> int | None:
    """The largest batch up to which speculative decoding always gains.

    Args:
      speedup: Speed-up by batch.
      largest: The largest batch to look at.

    Returns:
      The batch before the first at which the speed-up falls below 1; 0 if it does from the start,
      None if it never does.
    """
    gains, rows = 0, 1
    while rows <= largest and speedup(rows) >= 1:
        gains, rows = rows, min(2 * rows, largest) if rows < largest else largest + 1
    if gains == largest:
        return None
    loses = rows
    while loses - gains > 1:
        middle = (gains + loses) // 2
        gains, loses = (middle, loses) if speedup(middle) >= 1 else (gains, middle)
    return gains


def _bits(report: Roofline) -> int:
    return {"float32": 32, "float64": 64}.get(report.dtype, 16)


def _is_layer(point: Point) -> bool:
    return point.kind == "dense" and point.repeats > 1


def _lighter(point: Point, *, weights: Number = 1, kv_cache: Number = 1) -> Point:
    traffic = point.traffic.scaled(weights=weights, kv_cache=kv_cache)
    return replace(point, traffic=traffic, memory_s=_memory_s(point, traffic))


def _divided(point: Point, degree: int) -> Point:
    share = 1 / degree
    whole = 1 if point.kind == "dense" else share
    traffic = point.traffic.scaled(weights=share, kv_cache=share, activations=whole)
    return replace(
        point,
        flops=share * point.flops,
        traffic=traffic,
        tensor_s=share * point.tensor_s,
        cuda_s=share * point.cuda_s,
        memory_s=_memory_s(point, traffic),
    )


def _memory_s(point: Point, traffic: Traffic) -> float:
    """Seconds of the bytes at the point's own bandwidth, which differs for products."""
    return point.memory_s * traffic.total / point.traffic.total if point.traffic.total else 0.0
