"""Peak rates of the devices that a program can be planned for.

The rates are datasheet peaks without sparsity, with accumulation in float32; measured rates stand
in `planning.ceilings`. The kind comes in as a string, so that a plan can be made for a device that
is not there.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from math import inf
from pkgutil import iter_modules

from pbjax.errors import DeviceError, InputError, InputTypeError


def check_platforms() -> None:
    """Says what is missing where JAX_PLATFORMS asks for a GPU alone and JAX has no plugin for one.

    JAX itself ends in an AssertionError without a text.

    Raises:
      DeviceError: The plugin is not installed.
    """
    asked = os.environ.get("JAX_PLATFORMS", "")
    if not set(asked.split(",")) <= {"cuda", "gpu"}:
        return
    places = find_spec("jax_plugins")
    names = iter_modules(places.submodule_search_locations) if places else ()
    if not any(name.name.startswith("xla_cuda") for name in names):
        raise DeviceError(
            f"JAX_PLATFORMS={asked}: JAX has no CUDA plugin; an installed platform is allowed;"
            ' pip install "pbjax[cuda]", or set JAX_PLATFORMS=cpu'
        )


class ResourceClass(StrEnum):
    """The resource that bounds an operation: tensor cores, other arithmetic, or bandwidth."""

    TENSOR = "TENSOR"
    CUDA = "CUDA"
    MEMORY = "MEMORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak rates and capacities of one device kind.

    Attributes:
      kind: The device kind as `jax.Device.device_kind` says it.
      slug: Name of its folder under profiles/.
      tensor_flops_per_s: Peak rate of contractions by dtype name; float32 means TF32 on a GPU.
      cuda_flops_per_s: Peak float32 rate of everything that is not a contraction.
      memory_bytes_per_s: Peak memory bandwidth.
      num_sms: Streaming multiprocessors, or cores of a CPU.
      memory_bytes: Size of the device memory.
      source: The origin of the rates, and how far to trust them.
      link_bytes_per_s: Peak rate at which it sends to other devices of its kind while it receives
        as much: NVLink where there is one, else PCIe; None if it stands alone.
      attention_flops_per_s: Rate of fused attention by the head's width; empty to use the rate of
        a contraction. A datasheet has none.
      functions_per_s: Evaluations of a transcendental function by its JAX primitive; a missing one
        takes as long as in `classify`. A datasheet has none.
      weight_bytes_per_s: Bandwidth of a product that waits for its operands; None to use the
        memory's.
      launch_s: Seconds that each kernel takes beside its work; 0 in a datasheet.
      pallas_launch_s: Seconds that a kernel of `pallas_kernels` takes beside its work; None to use
        launch_s.
    """

    kind: str
    slug: str
    tensor_flops_per_s: Mapping[str, float] = field(hash=False)
    cuda_flops_per_s: float
    memory_bytes_per_s: float
    num_sms: int
    memory_bytes: int
    source: str
    link_bytes_per_s: float | None = None
    attention_flops_per_s: Mapping[int, float] = field(default_factory=dict, hash=False)
    functions_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    weight_bytes_per_s: float | None = None
    launch_s: float = 0.0
    pallas_launch_s: float | None = None

    def __post_init__(self):
        """Refuses rates and capacities that no device has.

        Raises:
          InputTypeError: A value is not a number.
          InputError: A value is not positive and finite; only launch_s may be 0.
        """
        values = {name: getattr(self, name) for name in _NUMBERS}
        for table in ("tensor_flops_per_s", "attention_flops_per_s", "functions_per_s"):
            values |= {f"{table}[{key}]": rate for key, rate in getattr(self, table).items()}
        for name, value in values.items():
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int | float):
                raise InputTypeError(
                    f"Device(kind={self.kind!r}): {name} is of type {type(value).__name__}; a "
                    "number is allowed; give the one of its datasheet"
                )
            if not (0 < value < inf or (name == "launch_s" and value == 0)):
                raise InputError(
                    f"Device(kind={self.kind!r}): {name} is {value:g}; a finite number above 0 is "
                    "allowed; give the one of its datasheet"
                )

    def contraction_flops_per_s(self, dtype: str) -> float:
        """Peak rate of a contraction; a dtype that no tensor core takes runs at the vector rate."""
        return self.tensor_flops_per_s.get(dtype, self.cuda_flops_per_s)

    def ridge_point(self, dtype: str) -> float:
        """Arithmetic intensity in FLOP/byte above which a contraction is compute-bound.

        Args:
          dtype: Name of the operands' dtype, such as "bfloat16".

        Returns:
          The peak rate of contractions in that dtype over the peak bandwidth.
        """
        return self.contraction_flops_per_s(dtype) / self.memory_bytes_per_s


_OPTIONAL = ("link_bytes_per_s", "weight_bytes_per_s", "pallas_launch_s")
_NUMBERS = (
    *("cuda_flops_per_s", "memory_bytes_per_s", "num_sms", "memory_bytes", "launch_s"),
    *_OPTIONAL,
)


def find_device(kind: str, num_cores: int = 1) -> Device:
    """The peak rates and capacities of a device kind.

    Args:
      kind: A device kind as jax names it, such as "NVIDIA H200" or "cpu", its slug, or words of it
        that no other kind has, such as "nvidia-h200" or "rtx 4090".
      num_cores: How many cores a CPU program may use; GPUs ignore it.

    Returns:
      The device; the rates of a CPU are those of one core times num_cores.

    Raises:
      DeviceError: Nothing is known about the kind.
      InputError: num_cores is not positive.
      InputTypeError: The kind is not a text.
    """
    if not isinstance(kind, str):
        raise InputTypeError(
            f"find_device(kind): a {type(kind).__name__}; a text such as 'NVIDIA H200' is allowed; "
            "pass what jax.devices()[0].device_kind says"
        )
    found = matching_devices(kind)
    if len(found) != 1:
        known = ", ".join(repr(device.kind) for device in found or _DEVICES)
        raise DeviceError(
            f"find_device({kind!r}): {'several kinds' if found else 'no rates for this kind'}; "
            f"known kinds are {known}; name one of them, or pass device=pbjax.Device(...) with the "
            "rates of its datasheet"
        )
    if num_cores < 1:
        raise InputError(
            f"find_device({kind!r}): num_cores is {num_cores}; it must be 1 or more; "
            "pass the number of cores that the program may use"
        )
    return found[0] if found[0] is not _CPU_CORE else _scaled(found[0], num_cores)


def check_sm_budgets(asked: str, budgets: Mapping[str, int], device_kind: str) -> None:
    """Refuses budgets that kernels running side by side cannot have.

    Args:
      asked: The call that the budgets are given to, for the message.
      budgets: SMs for each resource class that has a budget, by the class's name.
      device_kind: The device kind as jax names it; a CPU and an unknown kind take any number.

    Raises:
      InputError: A class is unknown, or the device has fewer SMs.
    """
    sms = {device.kind: device.num_sms for device in _DEVICES if device is not _CPU_CORE}
    limit = sms.get(device_kind)
    classes = {kind.value for kind in ResourceClass}
    fits = limit is None or sum(budgets.values()) <= limit
    if fits and classes >= budgets.keys() and all(budget >= 1 for budget in budgets.values()):
        return
    most = "" if limit is None else f", together at most {limit} on {device_kind!r},"
    raise InputError(
        f"{asked}: sm_budgets {dict(budgets)}; budgets of 1 SM or more{most} for "
        f"{', '.join(ResourceClass)} are allowed; correct them, or leave them out for no budget"
    )


def devices() -> tuple[Device, ...]:
    """All devices whose rates are known; a CPU as one core."""
    return _DEVICES


def matching_devices(words: str) -> tuple[Device, ...]:
    """The devices that a kind, a slug or some words of a slug may mean: none, one, or several."""
    exact = tuple(device for device in _DEVICES if words in (device.kind, device.slug))
    return exact or tuple(device for device in _DEVICES if _has_words(device.slug, words))


def _has_words(slug: str, kind: str) -> bool:
    words = "_".join(kind.lower().replace("-", " ").replace("_", " ").split())
    return f"_{words}_" in f"_{slug}_"


def _scaled(core: Device, num_cores: int) -> Device:
    rates = {dtype: rate * num_cores for dtype, rate in core.tensor_flops_per_s.items()}
    return replace(
        core,
        tensor_flops_per_s=rates,
        cuda_flops_per_s=core.cuda_flops_per_s * num_cores,
        memory_bytes_per_s=core.memory_bytes_per_s * num_cores,
        num_sms=num_cores,
        memory_bytes=core.memory_bytes * num_cores,
    )


def _tensor_rates(
    *, half: float, tf32: float, byte_float: float | None, int8: float, float64: float | None
) -> dict[str, float]:
    rates = {
        "bfloat16": half,
        "float16": half,
        "float32": tf32,
        "float8_e4m3fn": byte_float,
        "float8_e5m2": byte_float,
        "int8": int8,
        "float64": float64,
    }
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


_HOPPER = _tensor_rates(half=989e12, tf32=494e12, byte_float=1979e12, int8=1979e12, float64=67e12)
_AMPERE = _tensor_rates(half=312e12, tf32=156e12, byte_float=None, int8=624e12, float64=19.5e12)

_CPU_CORE = Device(
    kind="cpu",
    slug="cpu",
    tensor_flops_per_s={"bfloat16": 50e9, "float16": 50e9, "float32": 50e9, "float64": 25e9},
    cuda_flops_per_s=25e9,
    memory_bytes_per_s=10e9,
    num_sms=1,
    memory_bytes=4 << 30,
    source="rough: an x86 core's order of magnitude, several-fold off for some; only times count",
)

_DEVICES = (
    Device(
        kind="NVIDIA H200",
        slug="nvidia_h200",
        tensor_flops_per_s=_HOPPER,
        cuda_flops_per_s=67e12,
        memory_bytes_per_s=4.8e12,
        num_sms=132,
        memory_bytes=141_000_000_000,
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM), halved where it counts sparsity",
        link_bytes_per_s=450e9,
    ),
    Device(
        kind="NVIDIA H100 80GB HBM3",
        slug="nvidia_h100_80gb_hbm3",
        tensor_flops_per_s=_HOPPER,
        cuda_flops_per_s=67e12,
        memory_bytes_per_s=3.35e12,
        num_sms=132,
        memory_bytes=80_000_000_000,
        source="NVIDIA H100 Tensor Core GPU datasheet (SXM), halved where it counts sparsity",
        link_bytes_per_s=450e9,
    ),
    Device(
        kind="NVIDIA A100-SXM4-80GB",
        slug="nvidia_a100_sxm4_80gb",
        tensor_flops_per_s=_AMPERE,
        cuda_flops_per_s=19.5e12,
        memory_bytes_per_s=2.039e12,
        num_sms=108,
        memory_bytes=80_000_000_000,
        source="NVIDIA A100 80GB Tensor Core GPU datasheet (SXM)",
        link_bytes_per_s=300e9,
    ),
    Device(
        kind="NVIDIA A100-SXM4-40GB",
        slug="nvidia_a100_sxm4_40gb",
        tensor_flops_per_s=_AMPERE,
        cuda_flops_per_s=19.5e12,
        memory_bytes_per_s=1.555e12,
        num_sms=108,
        memory_bytes=40_000_000_000,
        source="NVIDIA A100 Tensor Core GPU datasheet (40GB SXM)",
        link_bytes_per_s=300e9,
    ),
    Device(
        kind="NVIDIA L40S",
        slug="nvidia_l40s",
        tensor_flops_per_s=_tensor_rates(
            half=362e12, tf32=183e12, byte_float=733e12, int8=733e12, float64=None
        ),
        cuda_flops_per_s=91.6e12,
        memory_bytes_per_s=864e9,
        num_sms=142,
        memory_bytes=48_000_000_000,
        source="NVIDIA L40S datasheet, halved where it counts sparsity; PCIe Gen4 x16",
        link_bytes_per_s=32e9,
    ),
    Device(
        kind="NVIDIA GeForce RTX 4090",
        slug="nvidia_geforce_rtx_4090",
        tensor_flops_per_s=_tensor_rates(
            half=165.2e12, tf32=82.6e12, byte_float=330.3e12, int8=660.6e12, float64=None
        ),
        cuda_flops_per_s=82.6e12,
        memory_bytes_per_s=1.008e12,
        num_sms=128,
        memory_bytes=24_000_000_000,
        source="NVIDIA Ada GPU Architecture, V2.01, appendix A, float32 accumulation",
        link_bytes_per_s=32e9,
    ),
    Device(
        kind="NVIDIA GeForce RTX 5090",
        slug="nvidia_geforce_rtx_5090",
        tensor_flops_per_s=_tensor_rates(
            half=209.5e12, tf32=104.8e12, byte_float=419e12, int8=838e12, float64=None
        ),
        cuda_flops_per_s=104.8e12,
        memory_bytes_per_s=1.792e12,
        num_sms=170,
        memory_bytes=32_000_000_000,
        source="NVIDIA RTX Blackwell GPU Architecture, V1.1, appendix A, float32 accumulation",
        link_bytes_per_s=64e9,
    ),
    Device(
        kind="NVIDIA B200",
        slug="nvidia_b200",
        tensor_flops_per_s=_tensor_rates(
            half=2250e12, tf32=1100e12, byte_float=4500e12, int8=4500e12, float64=37e12
        ),
        cuda_flops_per_s=75e12,
        memory_bytes_per_s=7.7e12,
        num_sms=148,
        memory_bytes=180_000_000_000,
        source="NVIDIA Blackwell (HGX B200) datasheet, per GPU, halved where it counts sparsity",
        link_bytes_per_s=900e9,
    ),
    _CPU_CORE,
)
