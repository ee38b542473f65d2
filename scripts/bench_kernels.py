#!/usr/bin/env python3
"""Times every kernel and its opponents on the GPU, in one run, on random data.

Seconds are the device time of all launches of a call, from CUPTI; kernel and opponents take turns,
and the median over the turns counts. Inputs smaller than the L2 cache rotate among several sets.
Where a case asks for it, calls back to back for a second are timed by the wall clock too, with the
SMs' clock and the joules of a call: a long run is bound by the power that the card may draw.

    python scripts/bench_kernels.py [--kernels gemm norm] [--pattern bert] [--out FILE]
"""

import argparse

from benchmarks.kernel_cases import MODULES
from benchmarks.kernels import run
from benchmarks.output_paths import new_file


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=MODULES)
    parser.add_argument("--pattern", default="", help="only cases whose name holds this")
    parser.add_argument(
        "--sustained", action="store_true", help="a second back to back for every case"
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--commit", default="", help="recorded; read from git if not given")
    parser.add_argument("--out", type=new_file)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
