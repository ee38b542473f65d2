#!/usr/bin/env python3
"""Times the six models at full size beside what is installed of their peers, on one GPU.

Every row of benchmarks/peers/rows.py has a process for ours and one or more for its peers: PyTorch
eager, Inductor, max-autotune and reduce-overhead, ONNX Runtime's providers and TensorRT; tokamax's
kernels have one beside ours. All compile at the same time; once all are ready they measure one
after the other, a row's side by side. Weights, inputs and batches are the same, and outputs are
compared. What does not run says why.

    python scripts/bench_peers.py --out profiles/nvidia_h200/bench_peers.json
    python scripts/bench_peers.py --rows bert --scenario server --latency-ms 50
    python scripts/bench_peers.py --tiny --peer-python OTHER_PYTHON    # a try without a GPU
"""

import argparse
import sys

from benchmarks.output_paths import new_file
from benchmarks.peers.protocol import add_scenario, check_scenario
from benchmarks.peers.rows import ROWS
from benchmarks.peers.run import ONNX, PEERS, TORCH, run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--variants", nargs="+", default=["with_kernels"], help="of ours")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=[*TORCH, *ONNX, "tokamax"])
    parser.add_argument("--trace", nargs="*", default=[], help="variants whose kernels are listed")
    add_scenario(parser)
    parser.add_argument("--server-rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--ready-within", type=int, default=300, help="seconds for compiling")
    parser.add_argument("--split", type=int, default=1, help="processes for the variants of a row")
    parser.add_argument("--peer-python", default=sys.executable, help="that has the peers")
    parser.add_argument("--tiny", action="store_true", help="small models, to try without a GPU")
    parser.add_argument("--commit", default="", help="recorded; read from git if not given")
    parser.add_argument("--out", type=new_file)
    args = parser.parse_args()
    check_scenario(parser, args)
    run(args)


if __name__ == "__main__":
    main()
