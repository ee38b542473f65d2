"""The number of parts that the kernel splits each cache into, also for its prediction."""

STREAMS = 2  # Streams of an SM.
LEAST_KEYS = 256  # The smallest part has two tiles.


def choose_splits(heads: int, num_keys: int, sms: int) -> int:
    """Splits each cache so that every stream has work, in parts of at least two tiles.

    Args:
      heads: The key-value heads of all sequences.
      num_keys: The number of keys that fit into a cache.
      sms: The SMs that the kernel may fill.
    """
    return max(1, min(STREAMS * sms // heads, -(-num_keys // LEAST_KEYS)))
