"""Into how many parts the kernel splits each cache, for it and for what predicts it."""

STREAMS = 2  # Of an SM.
LEAST_KEYS = 256  # Of a part: two tiles.


def choose_splits(heads: int, num_keys: int, sms: int) -> int:
    """Splits each cache so that every stream has work, in parts of at least two tiles.

    Args:
      heads: Key-value heads of all sequences.
      num_keys: Keys that a cache has room for.
      sms: That the kernel may fill.
    """
    return max(1, min(STREAMS * sms // heads, -(-num_keys // LEAST_KEYS)))
