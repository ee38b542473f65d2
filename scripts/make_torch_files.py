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
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def state_dict() -> "dict[str, torch.Tensor]":
    """Returns a state dict as modules have them, with what it says of their versions."""
    import torch

    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    state = torch.nn.BatchNorm1d(4).state_dict()
    state["f32"] = base
    state["view"] = base.t()[1:3]
    state["f16"] = base.half()
    state["bf16"] = base.bfloat16()
    state["i64"] = torch.arange(5)
    state["mask"] = torch.tril(torch.ones(3, 3, dtype=torch.bool))
    state["parameter"] = torch.nn.Parameter(base[:2].clone())
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(0, 3)
    return state


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description="Write the PyTorch files of the tests.")
    parser.add_argument("target", type=Path, help="the folder, usually tests/data/torch")
    target = parser.parse_args().target
    import torch

    target.mkdir(parents=True, exist_ok=True)
    state = state_dict()
    torch.save(state, target / "state.bin")
    torch.save(state, target / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(1, 1, bias=False), target / "module.bin")
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    values = {name: tensor.detach().float().numpy() for name, tensor in floats.items()}
    np.savez_compressed(target / "expected.npz", **values)


if __name__ == "__main__":
    main()
