"""What check_kernels.py and bench_kernels.py run: a module per kernel, each with `cases()`.

A module lists its kernel's shapes (pallas_kernels/<kernel>/shapes.py) as `Case`s. A new kernel adds
a module here and its name to MODULES.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODULES = ("gemm", "gemm_8bit", "norm", "corun", "attention", "decode_attention", "depthwise")

# Measured on an H200: a large bf16 product, and a large copy counting bytes read and written.
PEAK_FLOPS_PER_S = 790e12
PEAK_BYTES_PER_S = 4.3e12


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape.

    Attributes:
      kernel: Name of the module.
      name: The name of the case, unique in its kernel.
      dtype: The dtype of the inputs.
      make: Draws the inputs from a jax key.
      run: The kernel, given the inputs.
      reference: The truth in float32, given the inputs; the same tree of results as run.
      close: For each result, the arguments of `pallas_kernels.testing.tolerance` but dtype and
        magnitude.
      opponents: The functions that it is timed against, by name; none: it is only checked.
      flops: FLOPs of one run.
      num_bytes: Least bytes that one run reads and writes.
      peak_flops_per_s: The rate above which no kernel of its types runs.
      sustained: Whether to time calls back to back for a second too, with clock and energy.
    """

    kernel: str
    name: str
    dtype: str
    make: Callable[[Any], tuple[Any, ...]]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    close: tuple[dict[str, Any], ...]
    opponents: dict[str, Callable[..., Any]] = field(default_factory=dict)
    flops: int = 0
    num_bytes: int = 0
    peak_flops_per_s: float = PEAK_FLOPS_PER_S
    sustained: bool = False

    @property
    def bound_s(self) -> float:
        """The time below which no kernel runs."""
        return max(self.flops / self.peak_flops_per_s, self.num_bytes / PEAK_BYTES_PER_S)


def load_cases(kernels: tuple[str, ...], pattern: str = "") -> list[Case]:
    """Returns the cases of the named kernels whose name holds the pattern."""
    unknown = set(kernels) - set(MODULES)
    if unknown:
        raise SystemExit(f"no kernel {sorted(unknown)}; there are {', '.join(MODULES)}")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in kernels]
    return [case for module in modules for case in module.cases() if pattern in case.name]
