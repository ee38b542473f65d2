#!/usr/bin/env python3
"""Times what fusion gains: a model in plain JAX, the same fused, and the same written with kernels.

Each row in a process of its own: all compile at the same time and then measure one after the other.
Before it is timed, each kind of match is verified against what it replaces, and the outputs of both
programs against those of the model in plain JAX. Random weights in bfloat16. Prints one table and
writes JSON.

    python scripts/bench_fusion.py [--rows bert llama] [--layers 8] [--out FILE]
"""

import argparse

from benchmarks.fusion import ROWS, run
from benchmarks.output_paths import new_file


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--layers", type=int, default=8, help="of LLaMA3-8B, which has 32")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
