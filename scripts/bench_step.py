#!/usr/bin/env python3
"""Times decode steps of LLaMA3-8B layers: the whole batch, and two interleaved sub-batches.

Random weights and caches at full width, few layers, a small vocabulary so that layers are what is
timed. Each case is a process: all compile at the same time, then one after the other measures, and
ends before the next, so that the device's memory holds the caches of one. As each is done its
report is printed and the JSON file written; the table comes last.

    python scripts/bench_step.py [--layers 6] [--cases 1024x512 768x512:384+384] [--out FILE]
"""

import argparse

from benchmarks.output_paths import new_file
from benchmarks.steps.run import CASES, TINY_CASES, run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--cases", nargs="+", help=f"batch x context[:sizes]; {' '.join(CASES)}")
    parser.add_argument(
        "--tiny", action="store_true", help=f"small widths, and {' '.join(TINY_CASES)}: a try"
    )
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
