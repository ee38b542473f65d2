#!/usr/bin/env python3
"""Measures the tables of the six models, at the sizes of the README, in one run on one GPU.

Every model has a process of its own, or several that share its sub-batches where kernels are slow
to lower. All compile at the same time; once all are ready they measure one after the other. A file
that is there is completed: delete it to measure all of its rows again. With --programs the whole
models are run as well, back to back: what they take stands beside what their tables predict.

    PYTHONPATH=. python scripts/profile_models.py --out profiles/nvidia_h200 \
        --programs profiles/nvidia_h200/bench_predicted.json
"""

import argparse

from benchmarks.model_tables import BATCHES, run
from benchmarks.output_paths import new_file, new_folder


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--out", type=new_folder, required=True, help="folder of the tables")
    parser.add_argument("--programs", type=new_file, help="JSON of predicted and measured seconds")
    parser.add_argument("--ready-within", type=float, default=200, help="seconds for compiling")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
