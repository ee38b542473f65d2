"""Times the search for a split; prints the conditions and a JSON line for each limit.

The tables are drawn at random from a seed, in five shapes: no device is needed, and no figure of a
device is meant. Each is searched without a memory limit and under limits that are shares of what
the unsplit batch needs. The search must take less than 0.5 s for a batch of 4,096, with a limit or
without.
"""

import argparse

from benchmarks.search import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4096, help="rows of the batch")
    parser.add_argument("--stages", type=int, default=8, help="stages of the block")
    parser.add_argument("--blocks", type=int, default=12, help="how often the block repeats")
    parser.add_argument("--tables", type=int, default=20, help="how many random tables")
    parser.add_argument("--budgets", type=int, default=2, help="choices of SM budgets in a table")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tables")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
