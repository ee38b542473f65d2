"""Measured rates of a machine, in place of the peaks of its datasheet.

`pbjax calibrate` measures ceilings and writes them to a file; those of some devices ship with
pbjax. Rooflines, classes and predictions take any `Device`: `Ceilings.applied_to` gives one with
measured rates, and `calibrated` finds the file by itself. Nothing is measured here.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from pbjax.arguments import check_finite
from pbjax.device import Device
from pbjax.errors import DeviceError, InputError
from pbjax.files import STRICT, read_json, write_json
from pbjax.planning.profile_rows import Provenance
from pbjax.planning.profiling import find_profile

NAME = "ceilings"
# Number of queries and of keys of the measured attention: its rate depends on them.
ATTENTION_TOKENS = 1024
AGAIN = "measure again by `pbjax calibrate`"
REMEDY = f"ceilings of schema_version 1 are allowed; {AGAIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates that a machine was measured to sustain.

    Attributes:
      provenance: Where and how they were measured.
      tensor_flops_per_s: Rate of a large square product, by dtype name.
      attention_flops_per_s: Rate of fused attention in bfloat16 with `ATTENTION_TOKENS` queries and
        keys, all scores counted, by the head's width; empty where it was not measured.
      cuda_flops_per_s: Rate of multiplications and additions in float32 outside of products, each
        an instruction of its own as XLA compiles them. None where it was not measured.
      functions_per_s: Evaluations of a function in float32, by the name of its JAX primitive; empty
        where they were not measured.
      memory_bytes_per_s: Bytes that a large copy reads and writes, together.
      weight_bytes_per_s: Bandwidth of a product of a few rows, which waits for its weights.
      launch_s: Seconds of a kernel that does next to nothing, behind another.
      pallas_launch_s: Seconds of such a kernel of `pallas_kernels`, which sets up its pipeline
        first; None where none runs.
    """

    provenance: Provenance
    tensor_flops_per_s: Mapping[str, float]
    attention_flops_per_s: Mapping[int, float] = field(default_factory=dict)
    cuda_flops_per_s: float | None = None
    functions_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float
    weight_bytes_per_s: float
    launch_s: float
    pallas_launch_s: float | None = None

    def __post_init__(self):
        """Refuses rates that are not positive, and a table without the rate of a product."""
        tables = {
            name: getattr(self, name)
            for name in ("tensor_flops_per_s", "attention_flops_per_s", "functions_per_s")
        }
        rates = {f"{name}[{key}]": r for name, table in tables.items() for key, r in table.items()}
        rates |= {
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "weight_bytes_per_s": self.weight_bytes_per_s,
            "launch_s": self.launch_s,
        }
        for name in ("cuda_flops_per_s", "pallas_launch_s"):
            if getattr(self, name) is not None:
                rates[name] = getattr(self, name)
        check_finite("Ceilings", rates, AGAIN, zero=False)
        if not self.tensor_flops_per_s:
            raise InputError(
                "Ceilings: tensor_flops_per_s is empty; the rate of a dtype or more is allowed; "
                f"{AGAIN}"
            )

    def applied_to(self, device: Device) -> Device:
        """The device with these rates; dtypes that were not measured scale like the measured ones.

        Args:
          device: The device with the rates of its datasheet.

        Raises:
          DeviceError: The ceilings were measured on another kind of device.
        """
        where = self.provenance
        if where.device_kind != device.kind:
            raise DeviceError(
                f"ceilings of {where.device_kind!r} for {device.kind!r}: another kind; the kind "
                "they were measured on is allowed; measure this one by `pbjax calibrate`"
            )
        peaks, measured = device.tensor_flops_per_s, self.tensor_flops_per_s
        shares = [measured[dtype] / peaks[dtype] for dtype in measured if dtype in peaks]
        share = sum(shares) / len(shares) if shares else 1.0
        return replace(
            device,
            tensor_flops_per_s={d: share * peak for d, peak in peaks.items()} | dict(measured),
            attention_flops_per_s=dict(self.attention_flops_per_s),
            cuda_flops_per_s=self.cuda_flops_per_s or device.cuda_flops_per_s,
            functions_per_s=dict(self.functions_per_s),
            memory_bytes_per_s=self.memory_bytes_per_s,
            weight_bytes_per_s=self.weight_bytes_per_s,
            launch_s=self.launch_s,
            pallas_launch_s=self.pallas_launch_s,
            source=f"measured ceilings, {where.date[:10]}, sustained: {where.command}",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ceilings as JSON.

        Raises:
          FileError: The file cannot be written.
        """
        write_json(path, {"schema_version": 1, "ceilings": asdict(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Ceilings":
        """Reads ceilings that `save` wrote.

        Raises:
          FileError: The file is missing, corrupt or of a foreign schema; the message names the
            place.
        """
        return read_json(path, _File, REMEDY).ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The content of a file."""

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    schema_version: Literal[1]
    ceilings: Ceilings


def user_folder() -> Path:
    """The folder that `pbjax calibrate` writes to unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pbjax" / "profiles"


def calibrated(device: Device) -> Device:
    """The device with its measured rates; unchanged where its kind was never measured.

    Ceilings that `pbjax calibrate` wrote on this machine win over those that ship with pbjax.

    Args:
      device: The device with the rates of its datasheet.

    Raises:
      FileError: The file is corrupt.
    """
    path = find_profile(device.slug, NAME, (user_folder(),)) or find_profile(device.slug, NAME)
    return device if path is None else Ceilings.load(path).applied_to(device)
