"""Presets with few layers: what is tested of them does not depend on how many there are."""

from dataclasses import replace
from functools import cache

from flax import nnx

from models.presets import ModelShape, find_shape


@cache
def few_layers(name: str, num_layers: int = 2) -> ModelShape:
    """A preset's sizes with another number of layers."""
    shape = find_shape(name)
    config = replace(shape.config, num_layers=num_layers)
    module = nnx.eval_shape(lambda: shape.family.build(config, "bfloat16"))
    return replace(shape, config=config, module=module)
