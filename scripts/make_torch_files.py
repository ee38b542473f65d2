"""Writes the PyTorch files of tests/data/torch: a state dict, and two files that must be refused.

Runs in an environment of its own, which the project never imports:

    python3.11 -m venv ref && ref/bin/pip install torch "numpy<3"
    ref/bin/python scripts/make_torch_files.py tests/data/torch

state.bin holds every kind of tensor that is read, expected.npz its values (bfloat16 as the upper
half of f32); module.bin is a pickled module instead of a state dict, legacy.bin the same state dict
in the format before PyTorch 1.6. A second run writes the same state.bin and expected.npz.
"""

import argparse
from pathlib import Path

from references.torch_files import write


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description="Write the PyTorch files of the tests.")
    parser.add_argument("target", type=Path, help="the folder, usually tests/data/torch")
    write(parser.parse_args().target)


if __name__ == "__main__":
    main()
