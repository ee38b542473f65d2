"""Optimises a BERT encoder with random weights, and prints the report and one JSON line.

The programs that are timed run the same kernels: the whole batch at once (unsplit), the sub-batches
one after the other (sequential) and staggered (split), without and with SM budgets and unrolling.
"""

import argparse

from benchmarks.split import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("minilm", "base", "large"), default="base")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seq", type=int, default=384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--unroll", type=int, help="blocks in one step of the loop; several tried")
    parser.add_argument("--kernels", action="store_true", help="call pallas_kernels where they can")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
