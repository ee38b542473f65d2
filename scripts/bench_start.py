#!/usr/bin/env python3
"""Times two starts of LLaMA3-8B: with nothing on disk, and again from the programs of the first.

Each start is a process: it makes random weights, optimises the forward pass by a plan, calls it,
and generates. The plan is made by the first start, without measuring, and read by the second.

    python scripts/bench_start.py [--layers 32] --out profiles/nvidia_h200/bench_start.json
    python scripts/bench_start.py --tiny    # a try without a GPU
"""

import argparse
from pathlib import Path

from benchmarks.output_paths import new_file
from benchmarks.start import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--split", type=int, nargs="*", default=[4, 4], help="of the plan")
    parser.add_argument("--generate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiny", action="store_true", help="small widths")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    parser.add_argument("--start", choices=("cold", "second"), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if sum(args.split) != args.batch:
        parser.error(
            f"--split {args.split}: adds up to {sum(args.split)}; the sizes must add up to --batch "
            f"{args.batch}; change one of the two"
        )
    run(args)


if __name__ == "__main__":
    main()
