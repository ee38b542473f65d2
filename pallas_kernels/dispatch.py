"""Which implementation of a kernel runs, and the device it would run on."""

from collections.abc import Callable, Mapping
from typing import Literal

import jax

Implementation = Literal["mosaic_gpu", "xla"]

# The SM count of an H100 or H200 (SXM), used where code is traced or lowered without a GPU.
HOPPER_SMS = 132


def dispatch[Out](
    kernel: str,
    implementation: Implementation | None,
    candidates: Mapping[Implementation, Callable[[], Out]],
) -> Out:
    """Calls the implementation that is named, or else the first candidate that can.

    A candidate raises NotImplementedError where its backend cannot do what is asked, and nothing
    else by it.

    Args:
      kernel: Name of the public function, for messages.
      implementation: The one to use, which then fails loudly; None tries the candidates in order.
      candidates: What each implementation would do, best first.

    Returns:
      What the candidate returns.

    Raises:
      ValueError: An implementation that this kernel does not have.
      NotImplementedError: The named implementation cannot.
      ExceptionGroup: None was named and no candidate can; holds each one's NotImplementedError.
    """
    if implementation is not None:
        if implementation not in candidates:
            raise ValueError(
                f"{kernel}(implementation={implementation!r}): no such implementation; there are "
                f"{', '.join(map(repr, candidates))} and None for the best that can; name one of "
                "these"
            )
        return candidates[implementation]()
    refusals = []
    for candidate in candidates.values():
        try:
            return candidate()
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup(f"{kernel}(): no implementation can do this", refusals)


def require_hopper(kernel: str) -> None:
    """Refuses unless the program being traced is for a Hopper GPU.

    Called for implementation=None only: a kernel that is named is traced wherever it stands, for
    the interpreter and for lowering on a machine without a GPU.

    Raises:
      NotImplementedError: The target is no Hopper GPU.
    """
    kind = _target_kind()
    if not any(name in kind for name in ("H100", "H200", "H800", "GH200", "H20")):
        raise NotImplementedError(
            f"{kernel}(implementation='mosaic_gpu'): the device is {kind!r}; the kernel needs a "
            "Hopper GPU (sm_90a); use implementation='xla'"
        )


def num_sms() -> int:
    """Returns the SM count of the target GPU, or that of an H200 where there is no GPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or HOPPER_SMS
    device = _default_device()
    return device.core_count if device.platform == "gpu" else HOPPER_SMS


def check_sm_budget(kernel: str, sm_budget: int | None) -> int:
    """Returns the number of SMs a persistent kernel may fill: sm_budget, or all of them for None.

    Raises:
      TypeError: The budget is no integer.
      ValueError: The budget is below 1 or above what the device has.
    """
    available = num_sms()
    if sm_budget is None:
        return available
    if isinstance(sm_budget, bool) or not isinstance(sm_budget, int):
        raise TypeError(
            f"{kernel}(sm_budget={sm_budget!r}): a {type(sm_budget).__name__}; an int from 1 to "
            f"{available} or None; pass a Python int, it sets the grid"
        )
    if not 1 <= sm_budget <= available:
        raise ValueError(
            f"{kernel}(sm_budget={sm_budget}): the device has {available} SMs; 1 to {available} "
            "are allowed; lower the budget or pass None for all"
        )
    return sm_budget


def _target_kind() -> str:
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.device_kind if abstract is not None else _default_device().device_kind


def _default_device() -> jax.Device:
    chosen = jax.config.jax_default_device  # pyrefly: ignore[missing-attribute]
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]
