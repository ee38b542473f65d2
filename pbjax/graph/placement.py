"""Arrays on the device where programs run: one device, JAX's default."""

from collections.abc import Sequence
from typing import Any

import jax

from pbjax.errors import InputError


def home() -> jax.Device:
    """The device that programs are compiled for."""
    chosen = jax.config.jax_default_device  # pyrefly: ignore[missing-attribute]
    return chosen if isinstance(chosen, jax.Device) else jax.devices()[0]


def is_elsewhere(x: object) -> bool:
    """Whether a value is an array on another device than programs run on, or on several."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return x.sharding.device_set != {home()}


def placed(x: Any) -> Any:
    """An array on the device where programs run; anything else as it is."""
    return jax.device_put(x, home()) if is_elsewhere(x) else x


def refuse_captured(name: str, constants: Sequence[object]) -> None:
    """Refuses a function that captured an array of another device, which it cannot be handed anew.

    Raises:
      InputError: An array lies elsewhere.
    """
    for x in filter(is_elsewhere, constants):
        assert isinstance(x, jax.Array)
        found = ", ".join(sorted(map(str, x.sharding.device_set)))
        raise InputError(
            f"optimize({name}): it captured an array {x.dtype}{list(x.shape)} that lies on {found};"
            f" programs run on {home()}, and so must what a function captures; move it there by "
            "jax.device_put"
        )
