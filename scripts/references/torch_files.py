"""The PyTorch files of make_torch_files.py."""

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


def write(target: Path) -> None:
    """Writes the files."""
    import torch

    target.mkdir(parents=True, exist_ok=True)
    state = state_dict()
    torch.save(state, target / "state.bin")
    torch.save(state, target / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(1, 1, bias=False), target / "module.bin")
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    values = {name: tensor.detach().float().numpy() for name, tensor in floats.items()}
    np.savez_compressed(target / "expected.npz", **values)
