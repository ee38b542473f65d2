"""Kernels in a profiler's trace: when each ran on the GPU, and how much they overlapped.

Reads the Chrome trace that `jax.profiler` writes beside its own format; `timing` takes the traces.
"""

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pbjax.errors import FileError

type Interval = tuple[float, float]

# Compute kernels by parts of their names: ours, cuBLAS's, cuDNN's, XLA's. Decode attention reads a
# cache and multiplies little: alone it counts as a memory kernel.
_TENSOR = re.compile(r"gemm|nvjet|xmma|cutlass|fprop|attention|sdpa|fmha", re.IGNORECASE)
_MEMORY = re.compile(r"(?<!beside_)decode_attention", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch on the device.

    Attributes:
      name: Name of the kernel as the profiler writes it.
      start_s: Start in seconds on the trace's clock.
      end_s: End in seconds on the trace's clock.
      program: The HLO module that launched it, as "jit_f"; empty where the trace names none.
    """

    name: str
    start_s: float
    end_s: float
    program: str = ""

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether its name is that of a matrix product or of attention over whole sequences."""
        return bool(_TENSOR.search(self.name)) and not _MEMORY.search(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much of the memory kernels' time overlaps with compute kernels.

    Attributes:
      tensor_s: Seconds in which a compute kernel, one of the Tensor Cores, ran.
      memory_s: Seconds in which another kernel ran: copies, norms, elementwise work.
      both_s: Seconds in which one of each ran.
      span_s: Seconds from the first start to the last end.
    """

    tensor_s: float
    memory_s: float
    both_s: float
    span_s: float

    @property
    def share(self) -> float:
        """Overlapped share of the memory kernels' seconds; 0 where there are none."""
        return self.both_s / self.memory_s if self.memory_s > 0 else 0.0


def read_kernels(path: Path) -> tuple[Kernel, ...]:
    """The kernels of a trace in the order of their starts.

    Args:
      path: A `*.trace.json.gz`, or a folder with one in it, as given to `jax.profiler.trace`.

    Raises:
      FileError: There is not exactly one trace, or the file is not a trace.
    """
    found = sorted(path.rglob("*.trace.json.gz")) if path.is_dir() else [path]
    if len(found) != 1:
        raise FileError(
            f"read_kernels({path}): {len(found)} traces; one *.trace.json.gz is allowed; name the "
            "file, or trace into an empty folder"
        )
    try:
        with gzip.open(found[0], "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return kernels_of(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"read_kernels({found[0]}): {type(error).__name__}: {error}; a whole Chrome trace of "
            "jax.profiler is allowed; take the trace again"
        ) from error


def kernels_of(events: Sequence[dict[str, Any]]) -> tuple[Kernel, ...]:
    """The kernels among a Chrome trace's events, which are in microseconds, ordered by start."""
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    kernels = [
        Kernel(
            name=str(event["name"]),
            start_s=event["ts"] * 1e-6,
            end_s=(event["ts"] + event.get("dur", 0.0)) * 1e-6,
            program=str(event.get("args", {}).get("hlo_module", "")),
        )
        for event in events
        if event.get("ph") == "X"
        and names.get(("process_name", event["pid"], None), "").startswith("/device:GPU:")
        and names.get(("thread_name", event["pid"], event["tid"]), "").startswith("Stream")
    ]
    return tuple(sorted(kernels, key=lambda kernel: (kernel.start_s, kernel.end_s)))


def overlap(kernels: Iterable[Kernel]) -> Overlap:
    """Measures how much of the memory kernels' time overlaps with compute kernels."""
    tensor, memory = [], []
    for kernel in kernels:
        kind = tensor if kernel.uses_tensor_cores else memory
        kind.append((kernel.start_s, kernel.end_s))
    both = [*tensor, *memory]
    # |A and B| = |A| + |B| - |A or B|.
    tensor_s, memory_s, any_s = union_length(tensor), union_length(memory), union_length(both)
    return Overlap(
        tensor_s=tensor_s,
        memory_s=memory_s,
        both_s=max(0.0, tensor_s + memory_s - any_s),
        span_s=max(end for _, end in both) - min(start for start, _ in both) if both else 0.0,
    )


def union_length(intervals: Sequence[Interval]) -> float:
    """Length of the union of intervals (start, end): overlaps count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
