"""Writes what Hugging Face generates and preprocesses: references of the tests of generation.

Runs in the environment of make_reference.py, with pillow and librosa besides:

    ref/bin/python scripts/make_generation_reference.py tests/data

`generation.json` has greedy continuations by the tiny decoders of tests/data, of a batch padded on
the left and, one sequence at a time, with a penalty of repetitions; `margin` is the least distance
between the best and the second score of all choices, far above what rounding can change.
`preprocessing.npz` has an image, audio, and what the feature extractors make of them.
"""

import argparse
from pathlib import Path

from references.generation import write


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description="Write the references of generation.")
    parser.add_argument("target", type=Path, help="the folder, usually tests/data")
    write(parser.parse_args().target)


if __name__ == "__main__":
    main()
