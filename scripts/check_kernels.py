#!/usr/bin/env python3
"""Checks every kernel on the GPU against its float32 reference, on fresh random inputs.

Memory of the size of each result is filled with NaN and freed before each run, so that what a
kernel does not write shows. Runs are repeated, a few at a time back to back, and compared bit for
bit on the device: a difference is a race. Arrays of a known pattern lie around the kernel's and are
read afterwards. Races are rare: with --repeats 2000 a case takes under a second. With --together
the workers do not take turns, and the device switches between them in the middle of kernels.

    python scripts/check_kernels.py [--kernels gemm norm] [--pattern bert] [--repeats 3] [--workers
8] [--together]
"""

import argparse
import secrets
import sys

from benchmarks.kernel_cases import MODULES
from benchmarks.kernel_checks import run


def main() -> int:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=MODULES)
    parser.add_argument("--pattern", default="", help="only cases whose name holds this")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a case, 1 or more")
    parser.add_argument(
        "--workers",
        type=int,
        default=8,
        help="processes; each may keep up to some 9 GB of the device's memory",
    )
    parser.add_argument("--together", action="store_true", help="workers share the GPU in time")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: 1 or more runs are allowed; give 1 or more")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
