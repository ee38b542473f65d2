#!/usr/bin/env python3
"""Times the whole-batch programs that `optimize` compares: as written, scanned, one graph.

Models of the README at small batches, where what starts kernels is not hidden behind them, with
random weights and what fusion finds in them. The programs are verified against the model as it was
given and timed in turn.

    python scripts/bench_whole.py [--cases bert-base:4x128 conformer-l:4x512] [--out FILE]
"""

import argparse

from benchmarks.output_paths import new_file
from benchmarks.whole_batch import CASES, run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="preset:batch, or preset:batch x length"
    )
    parser.add_argument("--commit", default="", help="recorded; read from git if not given")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
