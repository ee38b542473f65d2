"""The choice of a kernel's implementation, and the device that it would run on."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Literal

import jax

from pallas_kernels.arguments import whole
from pallas_kernels.operation import as_operation

Implementation = Literal["mosaic_gpu", "xla"]

# The value that stands for None inside `with default_...(value):`; jit traces anew if it changes.
# So a caller chooses for kernels deep in a model.
default_implementation = jax.make_user_context(None)
default_sm_budget = jax.make_user_context(None)

# The SM count of an H100 or H200 (SXM), for code that is traced or lowered without a GPU.
HOPPER_SMS = 132


def dispatch[Out](
    kernel: str,
    implementation: Implementation | None,
    candidates: Mapping[Implementation, Callable[[], Out]],
    arguments: Mapping[str, object] | None = None,
) -> Out:
    """Calls the named implementation, or else the first candidate that can answer.

    A candidate raises NotImplementedError only if its backend cannot do what is asked. Without a
    named implementation, a program traced for a Hopper GPU gets one operation, whatever its shape,
    with XLA's implementation as its meaning; a program for any other device gets XLA's
    implementation itself.

    Args:
      kernel: The name of the public function, for messages.
      implementation: The implementation to use, which then fails loudly. None takes
        `default_implementation`, or if that is None too, the best that can.
      candidates: The implementations, best first; the last is "xla", which always can.
      arguments: The arguments of the public function, for whoever takes the traced operation
        apart; without those of the launch (budget, tile, implementation).

    Returns:
      The result of the candidate.

    Raises:
      ValueError: The kernel has no such implementation.
      NotImplementedError: The named implementation cannot do what is asked.
    """
    if implementation is None:
        implementation = default_implementation.value
    if implementation is None:
        if not targets_hopper():
            return candidates["xla"]()
        return as_operation(kernel, lambda: _first(candidates), candidates["xla"], arguments or {})
    if implementation not in candidates:
        raise ValueError(
            f"{kernel}(implementation={implementation!r}): unknown implementation; choices are "
            f"{', '.join(map(repr, candidates))} and None for the best that can; choose one"
        )
    if implementation == "xla":
        return candidates["xla"]()
    return _launch(kernel, candidates[implementation])


def run_kernel[Out](
    kernel: str,
    *,
    launch: Callable[[int], Out],
    plain: Callable[[], Out],
    sm_budget: int | None,
    implementation: Implementation | None,
    arguments: Mapping[str, object] | None = None,
) -> Out:
    """Answers a call with checked operands, by its kernel or in plain JAX.

    Args:
      kernel: The name of the public function, for messages.
      launch: Launches the kernel on so many SMs; raises NotImplementedError if it cannot.
      plain: Computes the same in plain JAX.
      sm_budget: The caller's budget; see `check_sm_budget`.
      implementation: The caller's choice; see `dispatch`.
      arguments: See `dispatch`.

    Returns:
      The result of the kernel or of plain JAX.

    Raises:
      TypeError: The budget is no integer.
      ValueError: The budget exceeds the device's SMs, or the implementation is unknown.
      NotImplementedError: The named implementation cannot do what is asked.
    """
    sms = check_sm_budget(kernel, sm_budget)

    def by_kernel() -> Out:
        if implementation is None:
            require_hopper(kernel)
        return launch(sms)

    return dispatch(kernel, implementation, {"mosaic_gpu": by_kernel, "xla": plain}, arguments)


def _launch[Out](kernel: str, candidate: Callable[[], Out]) -> Out:
    """Returns the result of a named kernel, or refuses by name on a device that cannot run it.

    A program that is traced for another device than the default one, such as an H200 from a
    machine without a GPU, is not run, and therefore not refused.
    """
    if jax.sharding.get_abstract_mesh().abstract_device is None and (
        _default_device().platform == "gpu"
    ):
        require_hopper(kernel)
    try:
        return candidate()
    except ValueError as error:
        # jax's message for any kernel on a CPU outside of the interpreter.
        if "interpret mode" in str(error):
            require_hopper(kernel)
        raise


def _first[Out](candidates: Mapping[Implementation, Callable[[], Out]]) -> Out:
    """Returns the result of the first candidate that can do what is asked."""
    *kernels, plain = candidates.values()
    for candidate in kernels:
        with contextlib.suppress(NotImplementedError):
            return candidate()
    return plain()


def require_hopper(kernel: str) -> None:
    """Raises NotImplementedError unless the program being traced is for a Hopper GPU.

    Raises:
      NotImplementedError: The target is no Hopper GPU.
    """
    if not targets_hopper():
        raise NotImplementedError(
            f"{kernel}(implementation='mosaic_gpu'): the device is {_target_kind()!r}; the kernel "
            "needs a Hopper GPU (sm_90a); use implementation='xla'"
        )


def targets_hopper() -> bool:
    """Whether the program being traced is for a Hopper GPU."""
    return any(name in _target_kind() for name in ("H100", "H200", "H800", "GH200", "H20"))


def targets_cpu() -> bool:
    """Whether the program being traced is for a CPU."""
    return _target_kind() == "cpu"


def num_sms() -> int:
    """Returns the SM count of the target GPU, or of an H200 without a GPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or HOPPER_SMS
    device = _default_device()
    return device.core_count if device.platform == "gpu" else HOPPER_SMS


def check_sm_budget(kernel: str, sm_budget: int | None) -> int:
    """Returns the number of SMs a persistent kernel may fill.

    This is sm_budget; None stands for `default_sm_budget`, or if that is None too, for all SMs.

    Raises:
      TypeError: The budget is no integer.
      ValueError: The budget is below 1 or above what the device has.
    """
    available = num_sms()
    if sm_budget is None:
        sm_budget = default_sm_budget.value
    if sm_budget is None:
        return available
    sm_budget = whole(kernel, "sm_budget", sm_budget)
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
