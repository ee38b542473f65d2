"""Measures what generation costs beside the model: generate and stream against bare decode steps.

    python scripts/bench_generation.py [--layers 4] [--width 256] [--batch 4] [--tokens 128]

A GPT-2 with random weights generates greedily. *Bare* is a Python loop over the jitted model.decode
with a donated cache, which chooses no token and reads nothing back. Results are of one step, from
the fastest of the runs, without prefill and compiling; other programs disturb the time of
processors less than the time on the wall.
"""

import argparse

from benchmarks.generation import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description="Measure what generation costs.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
