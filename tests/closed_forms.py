"""Closed forms: arithmetic intensity of a decoder's parts, critical batch, KV cache.

Letters: b rows of the batch, s tokens of each, h width, e bytes of a number; G query heads share a
key-value head. Each operand is read once, each result written once, and scores stay on chip. The
tests compare these forms with the counts of traced models.
"""

import math

type Number = int | float

# Bytes of a number in bfloat16.
HALF = 2


def dense_intensity(rows: Number, inputs: int, outputs: int, itemsize: Number = HALF) -> float:
    """FLOP/byte of a dense layer: r rows times a weight of k x n.

    A multiply-add is two FLOPs, so there are 2 r k n of them. The rows read are e r k bytes, the
    weight e k n, the result e r n:

        I(r) = 2 r k n / (e (r k + k n + r n))

    In prefill r = b s, in decode r = b: intensity grows with batch times length in the one and with
    the batch alone in the other. While r is far below k and n the weight is all that moves, and
    I = 2 r / e; for large r the weight no longer counts, and I tends to 2 k n / (e (k + n)).

    Args:
      rows: r, tokens that go in: b s in prefill, b in decode.
      inputs: k.
      outputs: n.
      itemsize: e.
    """
    moved = itemsize * (rows * inputs + inputs * outputs + rows * outputs)
    return 2.0 * rows * inputs * outputs / moved


def output_projection_intensity(rows: Number, width: int, itemsize: Number = HALF) -> float:
    """FLOP/byte of the projection of attention's heads back to the width: a square dense layer.

        I(r) = 2 r h / (e (2 r + h)), with r = b s in prefill and r = b in decode

    It grows with the batch in both although it follows attention, which does not.

    Args:
      rows: r.
      width: h.
      itemsize: e.
    """
    return dense_intensity(rows, width, width, itemsize)


def prefill_attention_intensity(seq_len: int, group: int = 1, itemsize: Number = HALF) -> float:
    """FLOP/byte of attention over a whole sequence, its scores kept on chip.

    The two products take 2 b s^2 h FLOPs each. Queries and context are e b s h bytes each, keys and
    values e b s h / G each:

        I(s) = 4 b s^2 h / (e b s h (2 + 2 / G)) = 2 s / (e (1 + 1 / G))

    Neither b nor h is left: every row of the batch brings its own keys, which no other row shares,
    so a larger batch does as much more work on as many more bytes.

    Args:
      seq_len: s.
      group: G.
      itemsize: e.
    """
    return 2.0 * seq_len / (itemsize * (1 + 1 / group))


def unfused_attention_intensity(
    seq_len: int, head_dim: int, group: int = 1, itemsize: Number = HALF
) -> float:
    """FLOP/byte of attention whose scores pass through memory.

    Besides queries, keys, values and context, the h / H heads write s^2 scores each in 4 bytes, a
    softmax reads them and writes weights of e bytes, and the second product reads those:

        I(s) = 4 s^2 h / (e s h (2 + 2 / G) + (h / H) s^2 (4 + 4 + e + e))

    For long sequences I tends to 4 H / (8 + 2 e), whatever b, s and h are.

    Args:
      seq_len: s.
      head_dim: H, the width of a head.
      group: G.
      itemsize: e.
    """
    moved = itemsize * (2 + 2 / group) + seq_len * (8 + 2 * itemsize) / head_dim
    return 4.0 * seq_len / moved


def decode_attention_intensity(num_keys: int, group: int = 1, itemsize: Number = HALF) -> float:
    """FLOP/byte of attention of one new token of each row over its cache of s tokens.

    The two products take 2 b s h FLOPs each. Keys and values are e b s h / G bytes each, the query
    and the context e b h each:

        I(s) = 4 b s h / (e b h (2 s / G + 2)) = 2 s G / (e (s + G))

    b is not left, and s hardly: I tends to 2 G / e, one FLOP for each byte in bfloat16 without
    shared heads. No batch makes decode attention compute-bound.

    Args:
      num_keys: s.
      group: G.
      itemsize: e.
    """
    return 2.0 * num_keys * group / (itemsize * (num_keys + group))


def critical_rows(ridge: Number, inputs: int, outputs: int, itemsize: Number = HALF) -> float:
    """Rows at which a dense layer reaches the ridge point R: `dense_intensity` solved for r.

        2 r k n = R e (r k + k n + r n)   =>   r = R e k n / (2 k n - R e (k + n))

    About R e / 2 where k and n are large; without end where the layer is too narrow to reach R.

    Args:
      ridge: R in FLOP/byte.
      inputs: k.
      outputs: n.
      itemsize: e.

    Returns:
      The rows, infinite if no number is enough. The critical batch is that number in decode, and
      that number over s in prefill.
    """
    room = 2.0 * inputs * outputs - ridge * itemsize * (inputs + outputs)
    return ridge * itemsize * inputs * outputs / room if room > 0 else math.inf


def kv_cache_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, itemsize: Number = HALF
) -> float:
    """Bytes of the keys and values of some tokens: 2 L K H e for each.

    Args:
      num_layers: L.
      num_kv_heads: K.
      head_dim: H.
      num_tokens: b s.
      itemsize: e.
    """
    return 2.0 * num_layers * num_kv_heads * head_dim * num_tokens * itemsize
