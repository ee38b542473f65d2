"""Times the search for a split; prints the conditions and a JSON line for each limit.

The tables are drawn at random from a seed, in five shapes: no device is needed, and no figure of a
device is meant. Each is searched without a memory limit and under limits that are shares of what
the unsplit batch needs. The search must take less than 0.5 s for a batch of 4,096, with a limit or
without.
"""

import argparse
import json
import os
import platform
import random
import statistics

from random_tables import SHAPES, random_rows, stage

from pbjax.device import ResourceClass
from pbjax.planning.candidates import SearchOptions
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.profiling import CorunRow, Profile, ProgramSummary, Provenance, Row, grid
from pbjax.planning.search import search

# Rows that a kernel takes at once.
TILES = (64, 128, 256)
# SMs of stages of the classes TENSOR, CUDA and MEMORY, on a device of 132.
BUDGETS = ((72, 20, 40), (84, 8, 32), (60, 12, 60))
# Of what the unsplit batch needs: no limit; all fits; splits without staggers; such in thirds.
LIMITS = (None, 2.0, 1.0, 0.7)


def main():
    """Searches every table under each limit; prints the slowest, the median, the evaluations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4096, help="rows of the batch")
    parser.add_argument("--stages", type=int, default=8, help="stages of the block")
    parser.add_argument("--blocks", type=int, default=12, help="how often the block repeats")
    parser.add_argument("--tables", type=int, default=20, help="how many random tables")
    parser.add_argument("--budgets", type=int, default=2, help="choices of SM budgets in a table")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tables")
    args = parser.parse_args()
    summary = program(args.stages, args.blocks)
    chance = random.Random(args.seed)
    choices = BUDGETS[: args.budgets]
    tables = [
        table(chance, summary, args.batch, SHAPES[i % 5], choices) for i in range(args.tables)
    ]
    whole = predicted_bytes(summary, (args.batch,), (0,))
    conditions = conditions_of(args)
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    for limit in LIMITS:
        options = SearchOptions(memory_limit_bytes=None if limit is None else int(limit * whole))
        results = [search(summary, each, args.batch, options) for each in tables]
        figures = {"memory_limit": limit, **figures_of(results)}
        print(json.dumps({"bench": "search", **conditions, **figures}))


def conditions_of(args):
    """What the figures hold for."""
    return {
        "batch": args.batch,
        "stages": args.stages,
        "blocks": args.blocks,
        "tables": args.tables,
        "budgets": args.budgets,
        "seed": args.seed,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def figures_of(results):
    """Seconds, and what was computed in them."""
    seconds = [result.seconds for result in results]
    work = [result.evaluations + result.bounds for result in results]
    return {
        "median_s": round(statistics.median(seconds), 4),
        "max_s": round(max(seconds), 4),
        "median_evaluations": statistics.median(result.evaluations for result in results),
        "median_bounds": statistics.median(result.bounds for result in results),
        "max_evaluations_and_bounds": max(work),
        "median_dropped": statistics.median(result.dropped for result in results),
    }


def program(num_stages, num_blocks):
    """A program whose stages take turns in class, and hold the more memory the later they are."""
    classes = list(ResourceClass)
    return ProgramSummary(
        prologue=stage("prologue", ResourceClass.MEMORY),
        block=tuple(stage(f"stage_{i}", classes[i % 3], 1e6 * (1 + i)) for i in range(num_stages)),
        epilogue=stage("epilogue", ResourceClass.TENSOR),
        num_blocks=num_blocks,
    )


def table(chance, summary, batch_size, shape, budgets=()):
    """Random seconds for every stage, and random slowdowns for every pair of classes.

    Within budgets a stage takes up to a fifth longer; it was measured so at three sizes.
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
    pairs = [
        CorunRow.of((a, b), (m, n), (chance.uniform(1, 2.2), chance.uniform(1, 2.2)))
        for i, a in enumerate(summary.stages)
        for b in summary.stages[i + 1 :]
        if a.resource != b.resource
        for m in measured
        for n in measured
    ]
    pairs += [
        CorunRow.of(
            (a, b),
            (m, m),
            (chance.uniform(1, 1.2), chance.uniform(1, 1.2)),
            (share[a.resource], share[b.resource]),
        )
        for share in shares
        for i, a in enumerate(summary.block)
        for b in summary.block[i + 1 :]
        if a.resource != b.resource
        for m in measured
    ]
    provenance = Provenance(
        device_kind="none",
        driver="",
        jax="",
        commit="",
        date="",
        clock_mhz=0,
        power_limit_w=0,
        command="scripts/bench_search.py",
    )
    return Profile(provenance=provenance, rows=tuple(rows), corun=tuple(pairs))


if __name__ == "__main__":
    main()
