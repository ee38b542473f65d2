"""The provenance of a measurement: device, driver, clocks, versions, commit, command."""

import datetime
import subprocess
from pathlib import Path

import jax

from pbjax.planning.profiling import Provenance


def provenance_here(device_kind: str, command: str) -> Provenance:
    """Describes a measurement that begins now on the first device of JAX.

    Args:
      device_kind: Kind of the device.
      command: The command that measures again.
    """
    driver, clock_mhz, power_limit_w = _gpu_state() if jax.default_backend() == "gpu" else _NO_GPU
    return Provenance(
        device_kind=device_kind,
        driver=driver,
        jax=jax.__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        clock_mhz=clock_mhz,
        power_limit_w=power_limit_w,
        command=command,
    )


_NO_GPU = ("", 0, 0)


def _gpu_state() -> tuple[str, int, int]:
    """Driver, highest SM clock in MHz, power limit in W; empty and 0 without nvidia-smi."""
    query = ["--query-gpu=driver_version,clocks.max.sm,power.limit", "--id=0"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
        )
        driver, clock, limit = done.stdout.split(", ")
        return driver, round(float(clock)), round(float(limit))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return _NO_GPU


def _commit() -> str:
    """Commit of the repository that pbjax runs from; empty for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return ""
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
