"""The effect of the search's decay, saturation and memory limit: evaluations, seconds, findings.

The tables are those of bench_search.py, drawn at random: no device is needed.
"""

import os
import platform
import random
import statistics

from pbjax.planning.candidates import SearchOptions
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.search import search

from ..random_tables import SHAPES, program, table

STAGES, BLOCKS, TABLES = 4, 12, 10
BATCHES = (96, 4096)
# Every split of the smaller batch is predicted, to know the best.
BEST_OF_ALL = "every split"
WITHIN = "within a limit"


def search_ablation() -> dict:
    """Conditions and rows: medians over the tables, for each batch and each part left out."""
    rows = [row for batch in BATCHES for row in _rows(batch)]
    conditions = {
        "stages": STAGES,
        "blocks": BLOCKS,
        "tables": TABLES,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    return {"conditions": conditions, "rows": rows}


def _rows(batch: int) -> list[dict]:
    summary = program(STAGES, BLOCKS)
    chance = random.Random(0)
    tables = [table(chance, summary, batch, SHAPES[i % len(SHAPES)]) for i in range(TABLES)]
    # Over it are the whole batch and sub-batches that may overlap; those in turns are not.
    limit = predicted_bytes(summary, (batch,), (0,)) * 8 // 10
    searches = {
        "all": SearchOptions(),
        "no decay": SearchOptions(decay=1e-9),
        "no saturation": SearchOptions(saturation_rounds=10**6),
        WITHIN: SearchOptions(memory_limit_bytes=limit),
    }
    found = {
        name: [search(summary, each, batch, options) for each in tables]
        for name, options in searches.items()
    }
    if batch == min(BATCHES):
        every = [search(summary, each, batch, policy="exhaustive") for each in tables]
        found[BEST_OF_ALL] = every
    return [_row(batch, name, found, limit) for name in found]


def _row(batch: int, name: str, found: dict, limit: int) -> dict:
    results = found[name]
    # The best that any of the searches found, table by table.
    best = [
        min(r.best.prediction.makespan_s for r in each)
        for each in zip(*found.values(), strict=True)
    ]
    gaps = [
        result.best.prediction.makespan_s / least - 1
        for result, least in zip(results, best, strict=True)
    ]
    over = [
        predicted_bytes(program(STAGES, BLOCKS), r.best.split.sizes, r.best.staggers) > limit
        for r in results
    ]
    return {
        "batch": batch,
        "search": name,
        "evaluations": statistics.median(r.evaluations + r.bounds for r in results),
        "dropped": statistics.median(r.dropped for r in results),
        "seconds": round(statistics.median(r.seconds for r in results), 4),
        "worst_gap_percent": round(100 * max(gaps), 3),
        "found_best": sum(gap <= 1e-9 for gap in gaps),
        "over_limit": sum(over),
    }
