"""Presets with few layers: what is tested of them does not depend on how many there are."""

import json
from functools import cache
from pathlib import Path

from models.presets import ModelShape, find_shape


@cache
def few_layers(name: str, num_layers: int = 2) -> ModelShape:
    """A preset's sizes with another number of layers."""
    return find_shape(name, num_layers=num_layers)


def long_gpt2(folder: Path) -> Path:
    """Makes a folder of the small GPT-2, with positions enough for the lengths of a study."""
    config = json.loads((Path(__file__).parent / "data" / "gpt2" / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "n_positions": 1024}))
    return folder
