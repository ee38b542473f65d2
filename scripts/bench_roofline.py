#!/usr/bin/env python3
"""Measures this GPU's ceilings and what the stages of models take, for docs/design/roofline.md.

Several processes trace and compile side by side; once all are ready, they measure one after the
other. Weights are random, layers call the kernels that the device has.

    python scripts/bench_roofline.py --out profiles/nvidia_h200
"""

import argparse

from benchmarks.output_paths import new_folder
from benchmarks.roofline import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=new_folder, required=True, help="folder to write to")
    parser.add_argument("--workers", type=int, default=12, help="that compile side by side")
    parser.add_argument("--ready-within", type=float, default=90, help="seconds for compiling")
    parser.add_argument("--no-ceilings", action="store_true", help="measure stages alone")
    parser.add_argument("--only", nargs="*", help="models, or pairs like 'llama3-8b decode'")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
