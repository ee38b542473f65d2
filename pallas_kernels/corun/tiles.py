"""The tile of a GEMM that leaves a partner enough shared memory, and the GEMM's time with it.

All tiles are cooperative, with as few slots as keep the GEMM near its rate; the remaining memory is
the partner's ring. Seconds of a step, of 64 in K, were measured on an H200 without a partner.
"""

import math
from dataclasses import dataclass

from pallas_kernels.gemm.mosaic_gpu import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    tile: Tile
    step_s: float


def _candidate(step_s: float, **shape) -> _Candidate:
    tile = Tile(schedule="cooperative", store_slots=1, in_flight=0, **shape)
    return _Candidate(tile=tile, step_s=step_s)


_PLAIN = (
    _candidate(0.69e-6, tile_m=128, tile_n=128, pipeline_depth=3),
    _candidate(0.61e-6, tile_m=64, tile_n=192, pipeline_depth=3),
    _candidate(0.385e-6, tile_m=64, tile_n=128, pipeline_depth=4),
    _candidate(0.26e-6, tile_m=64, tile_n=64, pipeline_depth=5),
)
_GATED = (
    _candidate(0.68e-6, tile_m=64, tile_n=128, weights=2, pipeline_depth=3),
    _candidate(0.39e-6, tile_m=64, tile_n=64, weights=2, pipeline_depth=4),
)
WIDE_TILE = _PLAIN[0].tile


def tile_beside(m: int, n: int, k: int, *, gated: bool, ctas: int) -> Tile:
    """The tile with the shortest predicted time.

    Args:
      m: Rows of the input.
      n: Columns of the result.
      k: Columns of the input.
      gated: Whether two weights are multiplied.
      ctas: SMs to fill.
    """
    return _best(m, n, k, gated, ctas).tile


def predicted_s(m: int, n: int, k: int, *, gated: bool, ctas: int) -> float:
    """Seconds of the GEMM alone, by which a partner's work is shared out over several GEMMs."""
    return _seconds(_best(m, n, k, gated, ctas), m, n, k, ctas)


def _best(m: int, n: int, k: int, gated: bool, ctas: int) -> _Candidate:
    return min(_GATED if gated else _PLAIN, key=lambda c: _seconds(c, m, n, k, ctas))


def _seconds(candidate: _Candidate, m: int, n: int, k: int, ctas: int) -> float:
    tile = candidate.tile
    tiles = math.ceil(m / tile.block_m) * math.ceil(n / tile.tile_n)
    return math.ceil(tiles / ctas) * math.ceil(k / tile.tile_k) * candidate.step_s
