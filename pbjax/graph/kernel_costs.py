"""Where a kernel computes or moves something else than its plain form.

The plain form of most kernels has the kernel's arithmetic. That of some is written for XLA: with
products with zeros, scores that are thrown away, or all pairs of sequences; and of a cache not all
may be looked at. What those do instead is counted here, from the shapes of their arguments.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels.attention.tile import ROWS
from pallas_kernels.depthwise.xla import BLOCK

# By name, arguments of the public function: arrays by their avals.
type Given = Mapping[str, Any]


def flops_instead(name: str, given: Given) -> float:
    """FLOPs of a kernel less those of its plain form.

    Args:
      name: Of its public function.
      given: Its arguments; none where they are not known.
    """
    return _FLOPS[name](given) if name in _FLOPS and given else 0.0


def unread_bytes(name: str, given: Given) -> float:
    """Bytes of a kernel's operands that it has no need to read."""
    if name != "decode_attention" or not given:
        return 0.0
    held, pages = given["k"], given["page_table"]
    rows = math.prod(held.shape[:2])
    looked_at = held.shape[1] * (given["q"].shape[0] if pages is None else math.prod(pages.shape))
    per_row = math.prod(held.shape[2:]) * held.dtype.itemsize
    return 2.0 * max(0, rows - looked_at) * per_row


def share_of_pairs(name: str, operands: Sequence[Any]) -> float:
    """The share of all pairs of tokens that a packed attention scores, in equally long sequences.

    How long they are is known only when it runs; of unequal ones the pairs are more.

    Args:
      name: Of the kernel's public function.
      operands: Avals of the operation's operands: the whole numbers are where sequences begin.
    """
    if name != "attention_packed":
        return 1.0
    (offsets,) = [aval for aval in operands if aval.ndim == 1 and aval.dtype.kind in "iu"]
    return 1 / max(1, offsets.shape[0] - 1)


def _depthwise_flops(given: Given) -> float:
    """A multiply-add for each frame that is there and weight, instead of a banded matrix."""
    (batch_size, length, features), width = given["x"].shape, given["kernel"].shape[0]
    before = (width - 1) // 2
    met = sum(max(0, length - abs(tap - before)) for tap in range(width))
    seen = -(-(BLOCK + width - 1) // 16) * 16
    banded = -(-length // BLOCK) * BLOCK * seen
    return 2.0 * batch_size * features * (met - banded)


def _attention_flops(given: Given) -> float:
    """Of scores by difference: those that a tile of queries and keys meets, instead of all rows."""
    if given["relative_rows"] is None:
        return 0.0
    batch_size, num_queries, num_heads, head_dim = given["q"].shape
    num_keys = given["k"].shape[1]
    keys = 128 if head_dim <= 64 else 64  # of a tile, as docs/design/attention.md has them
    scored = num_keys * (ROWS + keys) / keys
    rows = num_queries + num_keys
    return 2.0 * batch_size * num_heads * num_queries * head_dim * (scored - rows)


_FLOPS: Mapping[str, Callable[[Given], float]] = {
    "attention": _attention_flops,
    "depthwise_convolution": _depthwise_flops,
}
