"""The sizes of a call of the attention kernel and of one CTA; plain numbers, no arrays."""

from dataclasses import dataclass

ROWS = 64  # query rows of a consumer warpgroup: the M of WGMMA
ALIGNMENT = 8  # rows that TMA moves between swizzled tiles as one
SMEM_BYTES = 232_448
BARRIER_BYTES = 1024  # more than all barriers of a CTA
L2_SHARE_BYTES = 24 << 20  # keys and values that may be live in L2 at a time
NEVER = -1e30  # a key with this bias, or one below, does not count
REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a consumer's and of the TMA warpgroup's threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The sizes of one CTA: warpgroups of 64 query rows each, and rings of key and value tiles.

    Args:
      consumers: Consumer warpgroups, 2 or 3. With 3 a thread has 160 registers, which head sizes to
        64 fit in.
      block_kv: Keys of a tile; a multiple of 64, since WGMMA takes the probabilities 64 columns at
        a time.
      depth: Tiles in the ring of keys and in the ring of values.
      query_slots: With 2 the queries of the next item load while this one runs.
      holds: Whether a step waits for its values only after the softmax. ptxas moves that wait
        before the softmax, which is slower for some loops and faster for others.
    """

    consumers: int = 2
    block_kv: int = 128
    depth: int = 2
    query_slots: int = 2
    holds: bool = False

    def __post_init__(self):
        """Raises ValueError for sizes that the hardware cannot hold."""
        if self.consumers not in REGISTERS:
            raise ValueError(
                f"Tile(consumers={self.consumers}): 2 or 3 share the registers of an SM"
            )
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(
                f"Tile(block_kv={self.block_kv}): a multiple of 64 up to 256, the limit of a TMA "
                "box"
            )
        if self.depth < 1:
            raise ValueError(f"Tile(depth={self.depth}): at least 1")
        if self.query_slots not in (1, 2):
            raise ValueError(f"Tile(query_slots={self.query_slots}): 1 or 2")

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return self.consumers * ROWS

    @property
    def relative_window(self) -> int:
        """Tiles of rows of differences that a key tile meets; the next key tile needs one more."""
        return self.block_q // self.block_kv + 1

    @property
    def relative_depth(self) -> int:
        """Tiles in the ring of rows of differences: as many come early as of keys."""
        return self.relative_window - 1 + self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The static part of a call: shapes after padding, and which terms the scores have.

    For packed sequences the batch is one, and queries and keys are all tokens.
    """

    batch_size: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool = False
    window: int | None = None
    has_lengths: bool = False
    has_query_lengths: bool = False
    has_starts: bool = False
    has_alibi: bool = False
    bias_batch: int = 0
    has_key_bias: bool = False
    has_relative: bool = False
    packed: bool = False
    softcap: float | None = None

    @property
    def unit(self) -> float:
        """Factor that makes scores of what the softmax takes: products, or their capped tanh."""
        return self.scale if self.softcap is None else self.softcap

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    def smem_bytes(self, tile: Tile) -> int:
        """Shared memory of a CTA, without barriers."""
        rows = tile.block_q * self.head_dim * (tile.query_slots + self.packed)
        rings = 2 * tile.depth * tile.block_kv * self.head_dim
        bias = tile.block_q * tile.block_kv if self.bias_batch else 0
        relative = tile.relative_depth * tile.block_kv * self.head_dim if self.has_relative else 0
        return 2 * (rows + rings + bias + relative)

    def masks_last(self, tile: Tile) -> bool:
        """Whether the last key tile of an item may need a mask."""
        ragged = self.packed or self.has_lengths or self.has_query_lengths
        return self.causal or ragged or bool(self.num_keys % tile.block_kv)

    def masks_two(self, tile: Tile) -> bool:
        """Whether every item has two key tiles at least, and its last two alone need a mask.

        A masked step of its own compiles where a loop of masked steps would make ptxas serialise
        the products of three consumers (C7513).
        """
        given = self.has_lengths or self.has_query_lengths or self.has_starts or self.packed
        plain = self.causal and self.window is None and not given
        fits = tile.block_kv < tile.block_q <= tile.block_kv + ROWS
        return plain and fits and self.num_keys > tile.block_kv

    def masks_beyond_last(self, tile: Tile) -> bool:
        """Whether a key tile before the last may need a mask: the causal edge crosses several."""
        aligned = not self.has_starts and tile.block_kv % tile.block_q == 0
        return self.causal and not aligned

    def masks_first(self) -> bool:
        """Whether the first key tiles of an item may need a mask."""
        return self.packed or self.window is not None

    def heads_per_section(self) -> int:
        """Heads that run their query tiles, longest first, before the next heads start."""
        heads = self.batch_size * self.num_heads
        if not self.causal:
            return self.group
        room = L2_SHARE_BYTES * self.group // (4 * self.num_keys * self.head_dim)
        return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= max(room, 1))


def choose_tile(problem: Problem) -> Tile:
    """Picks the tile by measurements on an H200 (docs/design/attention.md)."""
    has_bias = bool(problem.bias_batch)
    if problem.has_relative:
        return Tile() if problem.head_dim <= 64 else Tile(block_kv=64)
    if problem.head_dim <= 64:
        three = Tile(consumers=3, depth=4)
        plain = not (problem.has_alibi or has_bias or problem.packed)
        long = problem.num_queries > 2048 and problem.masks_two(three)
        if plain and (long if problem.causal else problem.num_queries > 4 * ROWS):
            return three
        return Tile(depth=4, holds=problem.causal and not problem.packed)
    if problem.head_dim <= 128 and problem.has_alibi and problem.has_key_bias:
        return Tile(block_kv=64, depth=4)  # With 128 keys the registers hold no room for both.
    if problem.head_dim <= 128 and not has_bias:
        return Tile(holds=problem.causal and problem.packed)
    if problem.head_dim <= 192:
        return Tile(block_kv=64, query_slots=1 if has_bias or problem.packed else 2)
    return Tile(block_kv=64, depth=1 if has_bias or problem.packed else 2, query_slots=1)
