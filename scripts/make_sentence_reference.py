"""Writes what sentence-transformers gives for the small folders of tests, as a file of tests/data.

Needs sentence-transformers and torch, which pbjax does not: run it where they are, as
`python scripts/make_sentence_reference.py`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sentence_folders import CASES, REFERENCE, TEXTS, make


def main() -> None:
    """Makes the folders and keeps their vectors."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from sentence_transformers import SentenceTransformer  # pyrefly: ignore[missing-import]

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (contents, asked) in CASES.items():
            path = make(Path(folder) / name, **contents)
            model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
            found[name] = model.encode(list(TEXTS), **asked)
            print(name, found[name].shape)
    np.savez_compressed(REFERENCE, **found)


if __name__ == "__main__":
    main()
