#!/usr/bin/env python3
"""Times a decode step as two sub-batches of one CUDA graph, beside the whole batch.

Two series of kernels with SM budgets: while one sub-batch reads its caches, the other multiplies.
With --in-turns each waits for the other's products before its own, and for the other's reading;
without, only data is waited for. docs/design/decode_step.md has what came of it.

    python scripts/bench_graph_step.py --case 1024x512 --budgets 96+36 84+48 --out FILE
"""

import argparse

from benchmarks.output_paths import new_file
from benchmarks.steps.graph_step import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--case", default="1024x512", help="batch x context")
    parser.add_argument("--budgets", nargs="+", default=["96+36"], help="SMs: products + reading")
    parser.add_argument("--in-turns", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the script")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
