"""Energy and clock of the first NVIDIA GPU, read from its driver's library (NVML)."""

import ctypes
from dataclasses import dataclass

_CLOCK_SM = 1  # NVML_CLOCK_SM


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The reading of one moment.

    Attributes:
      joules: Energy used since the driver was loaded.
      clock_mhz: The clock of the SMs.
    """

    joules: float
    clock_mhz: int


class Meter:
    """Reads energy and clock.

    Raises:
      OSError: There is no NVML library, or it refuses.
    """

    def __init__(self):
        """Opens the first device."""
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._device))

    def read(self) -> Reading:
        """Reads both; the energy moves in steps of some 20 to 100 ms."""
        millijoules, clock = ctypes.c_ulonglong(), ctypes.c_uint()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        self._call("nvmlDeviceGetClockInfo", self._device, _CLOCK_SM, ctypes.byref(clock))
        return Reading(joules=1e-3 * millijoules.value, clock_mhz=clock.value)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._nvml, name)(*args)
        if status:
            raise OSError(f"{name}: NVML status {status}")
