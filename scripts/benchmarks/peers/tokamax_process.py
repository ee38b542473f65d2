"""Our attention and norms beside tokamax's, for bench_peers.py: device time, outputs compared.

What it prints, and when, is in protocol.py.
"""

import argparse

from .rows import ROWS


def main() -> None:
    """Compiles all, then times one case after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--deadline", type=float, help="time.time() at which compiling ends")
    args = parser.parse_args()
    # Here, so that --help needs neither tokamax nor jax.
    from .tokamax_cases import run

    run(args)


if __name__ == "__main__":
    main()
