"""Writes the reference fixtures of tests/data: tiny Hugging Face models and what they compute.

Runs in an environment of its own, which the project never imports:

    python3.11 -m venv ref && ref/bin/pip install torch transformers==4.57.1 safetensors "numpy<3"
    ref/bin/python scripts/make_reference.py tests/data --minilm FOLDER_OF_ALL_MINILM_L6_V2

Models that only transformers 5 has are made in a second environment, with transformers==5.24.0, and
without --minilm; each run makes those of its own version.

Each family is one entry of FAMILIES in references/families.py, references/audio.py or, for
transformers 5, references/families_v5.py. A fixture is a Hugging Face folder
(config.json, model.safetensors) with reference.npz beside it: inputs, hidden states after the
embeddings, after block 0 and at the end, outputs, and a JSON text `meta` with versions and
command. Expected values come from a run in f64, stored as f32. Weights are random everywhere: a
default initialisation hides dropped biases, a transposed square matrix and a wrong GELU. A second
set at the default scale makes a wrong epsilon visible. A second run writes the same bytes, or
says which tensor changed.
"""

import argparse
from pathlib import Path


def main() -> None:
    """Makes all fixtures and prints what changed."""
    parser = argparse.ArgumentParser(description="Write the reference fixtures of the tests.")
    parser.add_argument("target", type=Path, help="the folder, usually tests/data")
    parser.add_argument("--minilm", type=Path, help="folder of the real all-MiniLM-L6-v2")
    parser.add_argument("--family", action="append", help="one of them; may be repeated")
    options = parser.parse_args()
    # Here, so that --help needs neither torch nor transformers.
    from references.fixtures import FAMILIES, write

    families = options.family or []
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--family {min(unknown)}: there are {', '.join(sorted(FAMILIES))}")
    write(options.target, families, options.minilm)


if __name__ == "__main__":
    main()
