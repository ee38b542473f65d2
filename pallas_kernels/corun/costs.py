"""Predicted seconds of kernel calls on a Hopper GPU, alone and two in one launch.

Only shapes count. The measurements of the constants are in docs/design/corun.md; the seconds of
products come from the tables that choose their tiles.
"""

import functools
import math
from typing import Any

from pallas_kernels import dispatch
from pallas_kernels.corun import tiles
from pallas_kernels.corun.pairs import GUESTS, HOSTS, Call
from pallas_kernels.gemm import tiles as gemm_tiles

# Shares of the datasheet's bandwidth: of decode attention by itself, and of a launch that reads
# weights and caches side by side. On an H200 4.5 and 3.85 TB/s.
READ_SHARE, TOGETHER_SHARE = 0.94, 0.80
# The share of the shorter partner's time that a launch takes beyond the longer partner's.
COLLISION = 0.6


def alone_s(call: Call, peak_bytes_per_s: float) -> float:
    """Seconds of a compute or memory kernel in a launch of its own, with every SM.

    Args:
      call: A call of a function in `pairs.HOSTS` or `pairs.GUESTS`.
      peak_bytes_per_s: Bandwidth of the device's datasheet.

    Raises:
      ValueError: It is a call of something else.
    """
    if call.name in GUESTS:
        return num_bytes(call) / (READ_SHARE * peak_bytes_per_s)
    m, n, k, gated = _product(call)
    heavy = gated or any(call.arguments[name] is not None for name in ("residual", "activation"))
    return _product_s(m, n, k, gated, heavy, dispatch.num_sms())


def paired_s(call: Call) -> float:
    """Seconds of a compute kernel with the tile that leaves room for a memory kernel."""
    m, n, k, gated = _product(call)
    return tiles.predicted_s(m, n, k, gated=gated, ctas=dispatch.num_sms())


def together_s(
    compute_s: float, memory_s: float, total_bytes: float, peak_bytes_per_s: float
) -> float:
    """Seconds of a compute kernel and a memory kernel in one launch.

    Args:
      compute_s: Seconds of the compute kernel, by `paired_s`.
      memory_s: Seconds of the memory kernel's part, by `alone_s`.
      total_bytes: Bytes that both read and write.
      peak_bytes_per_s: Bandwidth of the device's datasheet.
    """
    computing_s = max(compute_s, memory_s) + COLLISION * min(compute_s, memory_s)
    return max(computing_s, total_bytes / (TOGETHER_SHARE * peak_bytes_per_s))


def num_bytes(call: Call) -> float:
    """Bytes that a call reads and writes; a cache counts whole, since lengths are no shapes.

    Raises:
      ValueError: It is no call of a compute or memory kernel.
    """
    given = call.arguments
    if call.name in GUESTS:
        q, k, table = given["q"], given["k"], given["page_table"]
        keys = k.shape[1] * (q.shape[0] if table is None else math.prod(table.shape))
        return float(
            (2 * keys * math.prod(k.shape[2:]) + 2 * math.prod(q.shape)) * q.dtype.itemsize
        )
    m, n, k, gated = _product(call)
    residual = 0 if gated or given["residual"] is None else m * n
    return float(((1 + gated) * k * n + m * (k + n) + residual) * given["x"].dtype.itemsize)


def _product(call: Call) -> tuple[int, int, int, bool]:
    """Rows, columns and depth of a compute kernel's product, and whether it has two weights."""
    if call.name not in HOSTS:
        raise ValueError(
            f"costs({call.name}): unknown kernel; choices are {', '.join((*HOSTS, *GUESTS))}; "
            "predict other operations by their bytes"
        )
    x, w = (call.arguments[name] for name in ("x", "w"))
    return math.prod(x.shape[:-1]), *reversed(w.shape), call.name == "gated_gemm"


@functools.cache
def _product_s(*shape: Any) -> float:
    m, n, k, gated, heavy, sms = shape
    if gemm_tiles.is_left_to_xla((m,), n, k, gated=gated, num_sms=sms):
        return gemm_tiles.by_xla_s(m, n, k, gated=gated, num_sms=sms)
    return gemm_tiles.predicted_s((m,), n, k, gated=gated, heavy=heavy, ctas=sms, num_sms=sms)
