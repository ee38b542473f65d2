"""Which device a command is about: the one that `--device` names, or the first one of JAX."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pbjax.errors import DeviceError, InputError

if TYPE_CHECKING:
    from pbjax.device import Device

RUN_ELSEWHERE = (
    "run it where there is one of them, or in Python pass device=pbjax.Device(...), with the "
    "figures of its datasheet, to pbjax.optimize"
)


def named_device(asked: str, words: str) -> "Device":
    """The device that an option `--device` names.

    Args:
      asked: The command, for the message.
      words: What was given.

    Raises:
      InputError: They name none, or several.
    """
    from pbjax.device import find_device, matching_devices

    found = matching_devices(words)
    if len(found) == 1:
        return find_device(words)
    if found:
        what, allowed = "several devices are called so", _slugs(found)
    else:
        what, allowed = "no figures of such a device", f"{_slugs()}, or a word of one such as l40s,"
    raise InputError(
        f"{asked} --device {words or "''"}: {what}; {allowed} are allowed; give one of them"
    )


def this_device(asked: str, remedy: str = RUN_ELSEWHERE) -> "Device":
    """The first device of JAX with the figures of its datasheet.

    Args:
      asked: The command, for the message.
      remedy: What to do where there are no figures.

    Raises:
      DeviceError: There are none of its kind.
    """
    import jax

    from pbjax.device import find_device, matching_devices

    kind = jax.devices()[0].device_kind
    if len(matching_devices(kind)) != 1:
        raise DeviceError(
            f"{asked}: the first device of JAX is {kind!r}, of which no figures are known; there "
            f"are those of {_slugs()}; {remedy}"
        )
    return find_device(kind, num_cores=os.cpu_count() or 1)


def _slugs(devices: "Sequence[Device]" = ()) -> str:
    """Devices as one writes them after `--device`; all if none are given."""
    from pbjax.device import devices as known

    *others, last = [device.slug.replace("_", "-") for device in devices or known()]
    return f"{', '.join(others)} and {last}"
