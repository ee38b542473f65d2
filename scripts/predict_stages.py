#!/usr/bin/env python3
"""Predicts what `bench_roofline.py` and `bench_peers.py` measured: no GPU and no weights.

Each measured call is traced with the kernels of its device and predicted from the ceilings that
ship; whole models also without kernels, and by the datasheet. docs/results/roofline.md has both
sides.

    python scripts/predict_stages.py --table profiles/nvidia_h200/roofline_stages.json \
        --out profiles/nvidia_h200/roofline_predicted.json
"""

import argparse
from pathlib import Path

from benchmarks.output_paths import new_file
from benchmarks.stage_predictions import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, help="what bench_roofline.py wrote")
    parser.add_argument("--out", type=new_file, required=True, help="JSON to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
