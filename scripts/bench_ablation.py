#!/usr/bin/env python3
"""What splitting, staggers, SM budgets and unrolling gain or cost, on BERT-Base and Conformer-L.

Every program is compared with the unsplit model with the same kernels, timed in turn with it in one
process. Prints one table, writes it as JSON, and draws one figure.

    python scripts/bench_ablation.py --out profiles/nvidia_h200/bench_ablation.json
    python scripts/bench_ablation.py --sweep --out ...      # at least 30 splits of each model too
    python scripts/bench_ablation.py --search FILE.json     # adds the search; needs no GPU
    python scripts/bench_ablation.py --figure FILE.json     # draws it
    python scripts/bench_ablation.py --tiny                 # a try without a GPU, half a minute
"""

import argparse
from pathlib import Path

from benchmarks.ablation.run import BATCHES, run
from benchmarks.output_paths import new_file


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*BATCHES], choices=[*BATCHES])
    parser.add_argument("--sweep", action="store_true", help="30 splits of each model and more")
    parser.add_argument("--no-pair", action="store_true", help="leave out the decode step's pair")
    parser.add_argument("--workers", type=int, default=24, help="processes that compile")
    parser.add_argument("--ready-within", type=float, default=90.0, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="small models, without a GPU")
    parser.add_argument("--figure", type=Path, help="draw this file's figure; measure nothing")
    parser.add_argument("--search", type=new_file, help="add the search's ablation to this file")
    parser.add_argument("--commit", default="", help="of the code that runs, for the record")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
