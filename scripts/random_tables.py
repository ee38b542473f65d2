"""Programs and measured seconds that are made up or drawn at random, for trials of the search.

No device is needed, and no figure of a device is meant.
"""

import random
from collections.abc import Sequence
from hashlib import sha256

from pbjax.device import ResourceClass
from pbjax.planning.profiling import ProgramSummary, Row, StageInfo

SHAPES = ("rising", "ragged", "plateau", "cliff", "straight")


def stage(
    name: str, resource: ResourceClass = ResourceClass.CUDA, held_bytes_per_row: float = 0.0
) -> StageInfo:
    """A stage of which the search knows its name, its class, and what it holds."""
    return StageInfo(
        name=name,
        fingerprint=sha256(name.encode()).hexdigest()[:12],
        resource=resource,
        dtype="float32",
        shape=(4,),
        flops_per_row=1.0,
        bytes_per_row=1.0,
        weight_bytes=0,
        held_bytes_per_row=held_bytes_per_row,
    )


def random_rows(
    chance: random.Random,
    summary: ProgramSummary,
    shape: str,
    sizes: Sequence[int],
    tiles: Sequence[int],
) -> list[Row]:
    """Rows of every stage, each of a curve of its own."""
    return [
        Row.of(each, size, seconds)
        for each in summary.stages
        for size, seconds in zip(sizes, curve(chance, shape, sizes, tiles), strict=True)
    ]


def curve(
    chance: random.Random, shape: str, sizes: Sequence[int], tiles: Sequence[int]
) -> list[float]:
    """Random seconds over the batch size, of one kind of shape.

    Args:
      chance: What draws.
      shape: One of SHAPES.
      sizes: Batch sizes.
      tiles: Rows of a step of a plateau, one of which is drawn.
    """
    base, slope = chance.uniform(0, 3), chance.uniform(0.01, 0.2)
    tile, edge = chance.choice(tiles), chance.choice(sizes)
    shapes = {
        "rising": lambda b: base + slope * b,
        "ragged": lambda b: chance.uniform(0.2, 1) * (base + slope * b),
        "plateau": lambda b: base + slope * tile * -(-b // tile),
        "cliff": lambda b: (base + slope * b) * (1 if b <= edge else 1.6),
        "straight": lambda b: slope * b,
    }
    return [shapes[shape](size) * 1e-4 for size in sizes]
