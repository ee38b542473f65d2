#!/usr/bin/env python3
"""Runs all of `pbjax.optimize` on plain BERT-Base and writes its report.

PBJAX_CACHE_DIR=off python scripts/bench_optimize.py --out FILE
"""

import argparse

from benchmarks.optimize import run
from benchmarks.output_paths import new_file


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seq", type=int, default=384)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--out", type=new_file, help="text file to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
