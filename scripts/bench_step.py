#!/usr/bin/env python3
"""Times decode steps of LLaMA3-8B layers: the whole batch, and two woven sub-batches.

Random weights and caches at full width, few layers, a small vocabulary so that layers are what is
timed. Each case is a process: all compile at the same time, then one after the other measures. As
each is done its report is printed and the JSON file written; the table comes last.

    python scripts/bench_step.py [--layers 8] [--cases 1024x512 768x512:384+384] [--out FILE]
"""

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path

# Batch x context, and sizes of the sub-batches where the search is not to choose them.
CASES = ["1024x512", "768x512", "768x512:384+384", "512x1024:256+256", "256x2048:128+128"]


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=CASES, help="batch x context[:sizes]")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the script")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    rows = []
    for provenance, row, report in measured(args.cases, args.layers, command, tiny=args.tiny):
        print(report, flush=True)
        rows.append(row)
        result = {"schema_version": 2, "provenance": provenance, "rows": rows}
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{args.layers} layers; ms, ratios over unsplit; tokens/s are of the fastest for 32")
    print("batch context      sizes  unsplit  sequential  woven  ratio  bound  rides  tokens/s")
    for row in rows:
        print(line(row))


def measured(cases: list[str], num_layers: int, command: str, *, tiny: bool):
    """Yields provenance, row and report of each case, in the order in which they are measured.

    Raises:
      SystemExit: A process died.
    """
    # Several processes share the memory of the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    compiled, turn, queue = context.Barrier(len(cases)), context.Lock(), context.Queue()
    processes = [
        context.Process(
            target=measure, args=(case, num_layers, command, tiny, compiled, turn, queue)
        )
        for case in cases
    ]
    for process in processes:
        process.start()
    for _ in cases:
        found = queue.get()
        if isinstance(found, str):
            for process in processes:
                process.terminate()
            raise SystemExit(found)
        yield found
    for process in processes:
        process.join()


def measure(case: str, num_layers: int, command: str, tiny: bool, compiled, turn, queue) -> None:
    """A process: measures a case when all have compiled and it is its turn."""
    try:
        # Only here: the parent starts processes sooner without JAX.
        from step_case import run

        queue.put(run(case, num_layers, command, tiny=tiny, compiled=compiled, turn=turn))
    except BaseException as error:
        compiled.abort()
        queue.put(f"bench_step({case}): {type(error).__name__}: {error}")
        raise


def line(row: dict) -> str:
    """One row of the table."""
    unsplit, sequence, woven = (
        1e3 * row["seconds"].get(name, float("nan")) for name in ("unsplit", "sequential", "woven")
    )
    return (
        f"{row['batch']:5d} {row['context']:7d} {'+'.join(map(str, row['sizes'])):>10s} "
        f"{unsplit:8.3f} {sequence:11.3f} {woven:6.3f} {unsplit / woven:5.3f}x "
        f"{unsplit / (1e3 * row['bound_s']['woven']):5.2f}x {row['riding']:5.0%} "
        f"{row['tokens_per_s_at_32_layers']:9,d}"
    )


if __name__ == "__main__":
    main()
