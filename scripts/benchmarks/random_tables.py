"""Programs and tables, made up or drawn at random, for benchmarks and tests of the search.

No device is needed, and no figure of a device is meant.
"""

import random
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import combinations

from pbjax.device import ResourceClass
from pbjax.planning.profiling import (
    CorunRow,
    Profile,
    ProgramSummary,
    Provenance,
    Row,
    StageInfo,
    grid,
)

SHAPES = ("rising", "ragged", "plateau", "cliff", "straight")
# Rows that a kernel takes at once.
TILES = (64, 128, 256)
# SMs of stages of the classes TENSOR, CUDA and MEMORY, on a device of 132.
BUDGETS = ((72, 20, 40), (84, 8, 32), (60, 12, 60))
NOWHERE = Provenance(
    device_kind="none",
    driver="",
    jax="",
    commit="",
    date="",
    clock_mhz=0,
    power_limit_w=0,
    command="scripts/bench_search.py",
)


def stage(
    name: str, resource: ResourceClass = ResourceClass.CUDA, held_bytes_per_row: float = 0.0
) -> StageInfo:
    """A stage whose name, class and held memory count; all else is the same for every stage."""
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


def program(
    num_stages: int,
    num_blocks: int,
    ends: Sequence[ResourceClass] = (ResourceClass.MEMORY, ResourceClass.TENSOR),
    held_bytes_per_row: float = 1e6,
) -> ProgramSummary:
    """A program whose stages take turns in class, and hold the more memory the later they are.

    Args:
      num_stages: Stages of the block.
      num_blocks: The number of blocks.
      ends: Classes of prologue and epilogue; none for a program without them.
      held_bytes_per_row: What the first stage holds; the second holds twice as much.
    """
    classes = list(ResourceClass)
    prologue, epilogue = map(stage, ("prologue", "epilogue"), ends) if ends else (None, None)
    block = (
        stage(f"s{i}", classes[i % len(classes)], held_bytes_per_row * (1 + i))
        for i in range(num_stages)
    )
    return ProgramSummary(
        prologue=prologue, block=tuple(block), epilogue=epilogue, num_blocks=num_blocks
    )


def table(
    chance: random.Random,
    summary: ProgramSummary,
    batch_size: int,
    shape: str,
    budgets: Sequence[tuple[int, ...]] = (),
) -> Profile:
    """Random seconds for every stage, and random slowdowns for every pair of classes.

    Within budgets a stage takes up to a fifth longer; it was measured so at three sizes.

    Args:
      chance: The source of random numbers.
      summary: The program.
      batch_size: Rows of the whole batch.
      shape: One of SHAPES.
      budgets: SMs of the classes, a tuple for each choice.
    """
    sizes = grid(batch_size)
    rows = random_rows(chance, summary, shape, sizes, TILES)
    measured = sizes[-4:-1]
    alone = {(r.stage, r.batch_size): r.median_s for r in rows}
    shares = [dict(zip(ResourceClass, sms, strict=True)) for sms in budgets]
    for share in shares:
        rows += [
            Row.of(
                each, size, chance.uniform(1, 1.2) * alone[each.name, size], share[each.resource]
            )
            for each in summary.block
            for size in measured
        ]
    pairs = random_pairs(chance, unlike(summary.stages), measured)
    pairs += [
        CorunRow.of(
            (a, b),
            (size, size),
            (chance.uniform(1, 1.2), chance.uniform(1, 1.2)),
            (share[a.resource], share[b.resource]),
        )
        for share in shares
        for a, b in unlike(summary.block)
        for size in measured
    ]
    return Profile(provenance=NOWHERE, rows=tuple(rows), corun=tuple(pairs))


def unlike(stages: Sequence[StageInfo]) -> list[tuple[StageInfo, StageInfo]]:
    """The pairs of stages of different classes."""
    return [(a, b) for a, b in combinations(stages, 2) if a.resource != b.resource]


def random_pairs(
    chance: random.Random,
    stage_pairs: Iterable[tuple[StageInfo, StageInfo]],
    sizes: Sequence[int],
) -> list[CorunRow]:
    """Pairs at all sizes of both, each slowed down by up to 2.2."""
    return [
        CorunRow.of((a, b), (m, n), (chance.uniform(1, 2.2), chance.uniform(1, 2.2)))
        for a, b in stage_pairs
        for m in sizes
        for n in sizes
        if a is not b or m <= n
    ]


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
      chance: The source of random numbers.
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
