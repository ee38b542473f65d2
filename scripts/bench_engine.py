"""Times what pbjax adds on the host; prints the conditions and one JSON line.

- tracing, classifying and staging BERT-Base at batch 96, sequence 384 (target: under 3 s);
- importing pbjax and all it needs beyond jax (target: under 1.5 s);
- calling an Optimized, beyond calling the compiled program itself (target: under 50 microseconds).
"""

import argparse

from benchmarks.engine import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each measurement")
    run(parser.parse_args().repeats)


if __name__ == "__main__":
    main()
