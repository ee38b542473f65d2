"""Which tile a GEMM runs with: a count of waves, and rates measured on an H200."""

import dataclasses
from dataclasses import dataclass

from pallas_kernels.gemm.mosaic_gpu import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A tile, the rate it reaches where tiles fill the SMs, and what a tile costs beside its steps.

    Rates are TFLOP/s on 132 SMs; overhead is in steps of tile_k. Both were fitted to 22 shapes,
    docs/kernels.md.
    """

    tile: Tile
    rate: float
    overhead: float


_PLAIN = (
    _Candidate(tile=Tile(cluster="m"), rate=800.0, overhead=1.3),
    _Candidate(
        tile=Tile(tile_n=192, pipeline_depth=4, cluster="m", store_slots=3),
        rate=830.0,
        overhead=0.5,
    ),
    _Candidate(
        tile=Tile(pipeline_depth=4, schedule="cooperative", cluster="n", in_flight=0),
        rate=845.0,
        overhead=1.9,
    ),
)
# A cooperative tile for gated products compiles clean too, but has not been timed.
_GATED = (
    _Candidate(
        tile=Tile(tile_m=64, pipeline_depth=5, weights=2, cluster="m", store_slots=1),
        rate=790.0,
        overhead=1.0,
    ),
)


def tile_for(m: int, n: int, k: int, *, gated: bool, ctas: int, num_sms: int) -> Tile:
    """Chooses the tile with the shortest predicted time.

    Clusters are used only with every SM: beside another kernel, whose CTAs stand on single SMs,
    pairs of free neighbours are rare, and a second wave costs more than multicast saves.

    Args:
      m: Rows of the input.
      n: Columns of the result.
      k: Columns of the input.
      gated: Whether two weights are multiplied.
      ctas: SMs to fill.
      num_sms: SMs of the device.

    Returns:
      The tile.
    """
    clusters = ctas == num_sms and ctas % 2 == 0
    tiles = [
        (predicted_time(c, m, n, k, ctas, clusters), c.tile) for c in (_GATED if gated else _PLAIN)
    ]
    tile = min(tiles, key=lambda timed: timed[0])[1]
    return tile if clusters else dataclasses.replace(tile, cluster=None)


def predicted_time(
    candidate: _Candidate, m: int, n: int, k: int, ctas: int, clusters: bool
) -> float:
    """Waves times the work of one tile over its rate; in no unit that matters."""
    tile = candidate.tile
    rows, cols, workers = tile.block_m, tile.tile_n, ctas
    if clusters:
        rows, cols, workers = (
            rows * (1 + (tile.cluster == "m")),
            cols * (1 + (tile.cluster == "n")),
            ctas // 2,
        )
    waves = -(-(-(-m // rows) * -(-n // cols)) // workers)
    steps = -(-k // tile.tile_k) + candidate.overhead
    return waves * tile.block_m * tile.tile_n * tile.weights * steps / candidate.rate
