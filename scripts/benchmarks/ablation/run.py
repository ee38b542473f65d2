"""The ablation of bench_ablation.py: what is switched on and off, the table, the JSON file."""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pbjax.text_tables import table_text

from .. import pool
from .programs import Group, Variant, measure, prepare
from .search import search_ablation

FIGURE = Path(__file__).parents[3] / "docs" / "figures" / "ablation"
BATCHES = {"bert": 96, "conformer": 32}


def run(args: argparse.Namespace) -> None:
    """Runs the ablation."""
    if args.figure:
        from .figure import draw  # matplotlib, which a GPU machine may lack

        draw(json.loads(args.figure.read_text()), FIGURE)
        return
    if args.search:
        document = json.loads(args.search.read_text()) | {"search": search_ablation()}
        print(table(document))
        args.search.write_text(json.dumps(document, indent=1) + "\n")
        return
    start = time.time()
    rows = []
    # More processes only wait for a core, once each has imported jax.
    workers = min(args.workers, os.cpu_count() or 1) if args.tiny else args.workers
    for group, result in pool.run(prepare, measure, groups(args), workers, quiet=True):
        failed = isinstance(result, str)
        rows += [{"model": group.model, "error": result}] if failed else result
        print(f"{time.time() - start:5.0f} s  {group.model}: {len(rows)} rows", flush=True)
    document = {
        "schema_version": 1,
        "provenance": provenance(args),
        "rows": sorted(one_unsplit(rows), key=lambda row: (row["model"], row.get("seconds", 1e9))),
    }
    print(table(document))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"bench": "ablation", "rows": len(rows)}))


def groups(args: argparse.Namespace) -> list[Group]:
    """The groups that the processes compile, the longest first."""
    deadline = time.time() + args.ready_within
    found = []
    for model in args.models:
        batch = 6 if args.tiny else BATCHES[model]
        # A trace costs seconds in each process: only two groups have one.
        parts = [(variants, i < 2) for i, variants in enumerate(ablation(batch))]
        parts += [(variants, False) for variants in sweep(batch)] if args.sweep else []
        if args.tiny:  # analysed, and compiled unsplit, once
            parts = [([variant for variants, _ in parts for variant in variants], False)]
        found += [
            Group(
                model=model,
                variants=tuple(variants),
                traced=traced,
                tiny=args.tiny,
                deadline=deadline,
            )
            for variants, traced in parts
        ]
    if not args.no_pair:
        pair = Group(model="pair", variants=(), traced=True, tiny=args.tiny, deadline=deadline)
        found.append(pair)
    return found


def ablation(batch: int) -> list[list[Variant]]:
    """The programs with each part switched on and off, in groups that share kernels."""
    halves, thirds = (batch // 2,) * 2, tuple((batch + i) // 3 for i in (2, 1, 0))
    unequal = (batch - batch // 3, batch // 3)
    return [
        [
            Variant(sizes=(batch,), staggers=(0,), overlap=False),
            Variant(sizes=halves, staggers=(0, 0), overlap=False),
            Variant(sizes=halves, staggers=(0, 0)),
            Variant(sizes=halves, staggers=(1, 0)),
        ],
        [
            Variant(sizes=halves, staggers=(1, 0), tensor_sms=84, memory_sms=48),
            Variant(sizes=halves, staggers=(1, 0), tensor_sms=108, memory_sms=24),
        ],
        [
            Variant(sizes=unequal, staggers=(2, 0)),
            Variant(sizes=unequal, staggers=(2, 0), unroll=2),
            Variant(sizes=unequal, staggers=(2, 0), unroll=99),
        ],
        [
            Variant(sizes=thirds, staggers=(2, 1, 0)),
            Variant(sizes=thirds, staggers=(0, 0, 0), overlap=False),
        ],
    ]


def sweep(batch: int) -> list[list[Variant]]:
    """Splits of many sizes and staggers, and of some budgets, in groups that share kernels."""
    sixths = [batch * i // 6 for i in (3, 4, 5)]
    pairs = [(size, batch - size) for size in (*sixths, batch * 7 // 12, batch * 3 // 4)]
    found = []
    for sizes in pairs:
        staggers = [(1, 0), (2, 0), (0, 1), (0, 2)] if sizes[0] != sizes[1] else [(2, 0), (0, 0)]
        found.append([Variant(sizes=sizes, staggers=each) for each in staggers])
        budgets = [Variant(sizes=sizes, staggers=staggers[0], tensor_sms=84, memory_sms=48)]
        found[-1] += budgets if sizes[0] != sizes[1] else []
    three = (batch // 2, batch // 4, batch // 4)
    for sizes in (three, tuple((batch + i) // 3 for i in (2, 1, 0))):
        staggers = [(0, 1, 2), (0, 2, 1), (1, 0, 0)]
        found.append([Variant(sizes=sizes, staggers=each) for each in staggers])
    return found


def one_unsplit(rows: list[dict]) -> list[dict]:
    """Keeps the median of each model's unsplit rows (one a process), with their range."""
    found = [row for row in rows if row.get("label") != "unsplit"]
    for model in dict.fromkeys(row["model"] for row in rows):
        same = [r for r in rows if (r["model"], r.get("label")) == (model, "unsplit")]
        same.sort(key=lambda row: row["seconds"])
        if same:
            seconds = {"range_s": [same[0]["seconds"], same[-1]["seconds"]]}
            found.append(same[len(same) // 2] | seconds)
    return found


def table(document: dict) -> str:
    """Everything that was measured, as text."""
    cells = [
        (
            row["model"],
            row["label"],
            f"{1e3 * row['seconds']:.3f}",
            f"{1e3 * row['spread_s']:.3f}",
            f"{row['over_unsplit']:.3f}",
            f"{row['overlapped_share']:.0%}" if "overlapped_share" in row else "-",
            f"{row['temporary_bytes'] / 1e6:,.0f}",
            f"{row['relative_rms']:.1e}",
        )
        for row in document["rows"]
        if "error" not in row
    ]
    columns = ("model", "program", "ms", "spread", "x", "hidden", "temp MB", "rms")
    lines = [
        table_text("", columns, cells, left=("program",)),
        "x: unsplit over this, of one process; hidden: share of the memory-bound kernels'",
        "time in which a Tensor-Core kernel ran too, from a device trace",
    ]
    lines += [f"{row['model']} FAILED {row['error']}" for row in document["rows"] if "error" in row]
    for row in document.get("search", {}).get("rows", []):
        lines.append(", ".join(f"{name} {value}" for name, value in row.items()))
    return "\n".join(lines)


def provenance(args: argparse.Namespace) -> dict:
    """The device, software and command of the measurement."""
    import jax

    from pbjax.runtime.provenance import provenance_here

    words = [Path(word).name if Path(word) == args.out else word for word in sys.argv]
    found = asdict(provenance_here(jax.devices()[0].device_kind, " ".join(["python", *words])))
    return found | ({"commit": args.commit} if args.commit else {})
