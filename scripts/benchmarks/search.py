"""What bench_search.py times: the search for a split, on tables drawn at random."""

import argparse
import json
import os
import platform
import random
import statistics

from pbjax.planning.candidates import SearchOptions
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.search import search

from .random_tables import BUDGETS, SHAPES, program, table

# Shares of what the unsplit batch needs: no limit; all fits; splits without staggers; some thirds.
LIMITS = (None, 2.0, 1.0, 0.7)


def run(args: argparse.Namespace) -> None:
    """Searches every table under each limit; prints the slowest, the median, the evaluations."""
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
        found = {"memory_limit": limit, **summarize(results)}
        print(json.dumps({"bench": "search", **conditions, **found}))


def conditions_of(args):
    """The conditions of the results."""
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


def summarize(results):
    """Seconds of the searches, and how much they computed."""
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
