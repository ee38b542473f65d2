"""Measures the host memory that loading takes beside the parameters; prints one JSON line a case.

Makes a sharded Hugging Face folder of a LLaMA with a few billion bytes of weights, loads it in a
process of its own on the CPU, where the parameters lie in host memory too, and compares the peak
of the resident memory with what the process had before and what the parameters need. The target:
at most 1.2 times the largest shard. Resident memory counts pages of the mapped files too, which the
system takes back at any time; the peak of the process's own pages alone, sampled every 5 ms, is
printed beside it. The cases: the dtype of the files; another dtype; our own folder of `convert`.
"""

import argparse

from benchmarks.loading import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18, help="134 MB of bfloat16 each")
    parser.add_argument("--shard-mb", type=int, default=600, help="the most in one file")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "DTYPE"), help="not for you")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
