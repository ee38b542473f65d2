"""The values of the fixed forward pass that conversions store and compare."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

OUTPUTS = ("last_hidden_state", "pooler_output", "logits")


def probe(model: Any, inputs: Mapping[str, Array | np.ndarray]) -> dict[str, Array]:
    """Returns the hidden states around the first block and every output of the model.

    Args:
      model: Any model of this package: its `hidden_states` takes the arguments of a call.
      inputs: The arguments of a call.
    """
    states = model.hidden_states(**inputs)
    output = model(**inputs)
    values = {"hidden_embedding": states[0], "hidden_block_0": states[1]}
    found = {name: getattr(output, name, None) for name in OUTPUTS}
    return values | {name: value for name, value in found.items() if value is not None}
