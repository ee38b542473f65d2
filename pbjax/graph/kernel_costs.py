"""Costs of kernels that differ from those of their plain JAX code.

The plain code of most kernels does the kernel's arithmetic. Some is written for XLA: it multiplies
by zeros, throws scores away, or scores all pairs of sequences; and some kernels read only a part of
a cache. The differences are counted here from the shapes of the arguments.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels.attention.tile import ROWS
from pallas_kernels.depthwise.xla import BLOCK

# Arguments of the public function by name; arrays as their avals.
type Given = Mapping[str, Any]


def flops_instead(name: str, given: Given) -> float:
    """FLOPs of a kernel less those of its plain code.

    Args:
      name: Name of its public function.
      given: Its arguments; empty where they are not known.
    """
    return _FLOPS[name](given) if name in _FLOPS and given else 0.0


def unread_bytes(name: str, given: Given) -> float:
    """Bytes of a kernel's operands that it does not read."""
    if name != "decode_attention" or not given:
        return 0.0
    held, pages = given["k"], given["page_table"]
    rows = math.prod(held.shape[:2])
    looked_at = held.shape[1] * (given["q"].shape[0] if pages is None else math.prod(pages.shape))
    per_row = math.prod(held.shape[2:]) * held.dtype.itemsize
    return 2.0 * max(0, rows - looked_at) * per_row


def share_of_pairs(name: str, operands: Sequence[Any]) -> float:
    """The share of all pairs of tokens that attention scores over packed sequences of one length.

    The lengths are known only at run time; unequal ones have more pairs.

    Args:
      name: Name of the kernel's public function.
      operands: Avals of the operation's operands; the integer vector holds the sequences' offsets.
    """
    if name != "attention_packed":
        return 1.0
    (offsets,) = [aval for aval in operands if aval.ndim == 1 and aval.dtype.kind in "iu"]
    return 1 / max(1, offsets.shape[0] - 1)


def _depthwise_flops(given: Given) -> float:
    """Multiply-adds of each weight with each existing frame, less those of a banded matrix."""
    (batch_size, length, features), width = given["x"].shape, given["kernel"].shape[0]
    before = (width - 1) // 2
    needed = sum(max(0, length - abs(tap - before)) for tap in range(width))
    seen = -(-(BLOCK + width - 1) // 16) * 16
    banded = -(-length // BLOCK) * BLOCK * seen
    return 2.0 * batch_size * features * (needed - banded)


def _attention_flops(given: Given) -> float:
    """Scores by relative position within the tiles of queries and keys, less those of all rows."""
    if given["relative_rows"] is None:
        return 0.0
    batch_size, num_queries, num_heads, head_dim = given["q"].shape
    num_keys = given["k"].shape[1]
    keys = 128 if head_dim <= 64 else 64  # keys of a tile, see docs/design/attention.md
    scored = num_keys * (ROWS + keys) / keys
    rows = num_queries + num_keys
    return 2.0 * batch_size * num_heads * num_queries * head_dim * (scored - rows)


_FLOPS: Mapping[str, Callable[[Given], float]] = {
    "attention": _attention_flops,
    "depthwise_convolution": _depthwise_flops,
}
