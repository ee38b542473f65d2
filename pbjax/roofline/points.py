"""The parts of a roofline as plain data: points, totals, memory, measurements.

A point is a group of operations of one stage, over all repetitions of the layer it belongs to. Its
seconds are the longest of three: tensor cores, other arithmetic, memory; the longest names its
class. `report` makes points from a traced model, and `result` holds them; nothing here knows of a
model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from pbjax.arguments import check_finite
from pbjax.device import ResourceClass

# The kind of a group of operations: a contraction with weights; attention, whose operands all
# depend on the input; anything else.
OperationKind = Literal["dense", "attention", "other"]
Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes read from and written to device memory, by their contents.

    Attributes:
      weights: Bytes of parameters, and of values computed from parameters alone.
      activations: Bytes of inputs, results of operations and outputs.
      kv_cache: Bytes of keys and values kept between calls.
    """

    weights: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.activations + self.kv_cache

    def __add__(self, other: "Traffic") -> "Traffic":
        """The bytes of both."""
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in _PARTS})

    def times(self, count: int | float) -> "Traffic":
        """The bytes of doing it `count` times."""
        return self.scaled(weights=count, activations=count, kv_cache=count)

    def scaled(
        self, *, weights: int | float = 1, activations: int | float = 1, kv_cache: int | float = 1
    ) -> "Traffic":
        """The bytes with each part multiplied."""
        return Traffic(
            weights=weights * self.weights,
            activations=activations * self.activations,
            kv_cache=kv_cache * self.kv_cache,
        )


_PARTS = fields(Traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A group of operations of one stage, over all its repetitions.

    Attributes:
      stage: Name of the stage.
      name: Name of the group, unique in its stage.
      kind: Kind of the group.
      repeats: How often a call runs it: once for each layer.
      operations: Number of operations of one repetition.
      dtype: Dtype of a contraction's operands; empty if it contracts nothing.
      flops: FLOPs, transcendental functions among them.
      traffic: Bytes moved.
      tensor_s: Seconds of tensor cores at their peak.
      cuda_s: Seconds of other arithmetic at its peak.
      memory_s: Seconds that the bytes take at peak bandwidth.
      launch_s: Seconds that its kernels take beside their work: launches, and tiles that leave most
        of the device idle; 0 by a datasheet.
    """

    stage: str
    name: str
    kind: OperationKind
    repeats: int
    operations: int
    dtype: str
    flops: float
    traffic: Traffic
    tensor_s: float
    cuda_s: float
    memory_s: float
    launch_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of the three times, which a kernel can overlap, plus launch_s."""
        return max(self.tensor_s, self.cuda_s, self.memory_s) + self.launch_s

    @property
    def resource(self) -> ResourceClass:
        """The resource that takes longest."""
        if self.memory_s >= max(self.tensor_s, self.cuda_s):
            return ResourceClass.MEMORY
        return ResourceClass.TENSOR if self.tensor_s >= self.cuda_s else ResourceClass.CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Points taken together: a stage, a kind, or a whole program.

    Attributes:
      name: Name of the stage, kind or program.
      points: The points.
    """

    name: str
    points: tuple[Point, ...]

    @property
    def flops(self) -> float:
        """FLOPs of all points."""
        return sum((point.flops for point in self.points), 0.0)

    @property
    def traffic(self) -> Traffic:
        """Bytes of all points."""
        return sum((point.traffic for point in self.points), Traffic())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/byte; 0 if nothing moves."""
        moved = self.traffic.total
        return self.flops / moved if moved else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all points, one after the other."""
        return sum((point.seconds for point in self.points), 0.0)

    @property
    def attainable_flops_per_s(self) -> float:
        """The rate that all points together can reach."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def resource(self) -> ResourceClass:
        """The class in which it spends most of its time."""
        spent = {
            resource: sum((p.seconds for p in self.points if p.resource == resource), 0.0)
            for resource in ResourceClass
        }
        return max(spent, key=lambda resource: spent[resource])

    @property
    def bound(self) -> Bound:
        """Whether its arithmetic or its bytes take longer."""
        return "memory" if self.resource == ResourceClass.MEMORY else "compute"

    @property
    def repeats(self) -> int:
        """How often a call runs it."""
        return max((point.repeats for point in self.points), default=0)

    def row(self) -> dict[str, object]:
        """The total as JSON-compatible data."""
        return {
            "name": self.name,
            "repeats": self.repeats,
            "flops": self.flops,
            "bytes": {**asdict(self.traffic), "total": self.traffic.total},
            "intensity_flop_per_byte": self.intensity,
            "class": str(self.resource),
            "bound": self.bound,
            "attainable_flops_per_s": self.attainable_flops_per_s,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Device memory that a call needs at its peak.

    Attributes:
      weight_bytes: Bytes of parameters and captured arrays.
      input_bytes: Bytes of the call's inputs without the KV cache.
      kv_cache_bytes: Bytes of the KV cache, which is updated in place.
      temporary_bytes: Bytes of results of operations, outputs among them, when most are alive;
        values that stay inside a kernel do not count.
    """

    weight_bytes: int
    input_bytes: int
    kv_cache_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of all four together."""
        return self.weight_bytes + self.input_bytes + self.kv_cache_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured seconds of one call.

    Attributes:
      device_kind: Kind of the device.
      seconds: Seconds of a call by the wall clock, many in a row.
      stages: Device seconds of each stage: the sum of its kernels.
      kinds: Device seconds of dense layers, attention and the rest.
      other_s: Device seconds of kernels that belong to no stage, such as copies.
      calls: How many calls the device seconds are the mean of.
      groups: Device seconds of each group, by "stage/group". A kernel that a compiler made of
        several groups belongs to one of them.
    """

    device_kind: str
    seconds: float
    stages: Mapping[str, float]
    kinds: Mapping[str, float]
    other_s: float
    calls: int
    groups: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        """Refuses seconds that no clock gives."""
        tables = {"stages": self.stages, "kinds": self.kinds, "groups": self.groups}
        each = {f"{name}[{key}]": s for name, table in tables.items() for key, s in table.items()}
        seconds = {"seconds": self.seconds, "other_s": self.other_s, **each}
        check_finite("Measured", seconds, "measure again")

    @property
    def device_s(self) -> float:
        """Device seconds of all kernels of a call."""
        return sum(self.stages.values()) + self.other_s


def grouped(points: Iterable[Point], key: Literal["stage", "kind"]) -> tuple[Total, ...]:
    """Points that share a stage or kind, taken together, in order of appearance."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(getattr(point, key), []).append(point)
    return tuple(Total(name=name, points=tuple(group)) for name, group in found.items())


def merged(points: Sequence[Point]) -> tuple[Point, ...]:
    """Adds up points that share stage and name; they must share the kind, dtype and repeats."""
    found: dict[tuple[str, str], Point] = {}
    for point in points:
        key = point.stage, point.name
        found[key] = _sum(found[key], point) if key in found else point
    return tuple(found.values())


def _sum(a: Point, b: Point) -> Point:
    added: Mapping[str, float] = {
        name: getattr(a, name) + getattr(b, name)
        for name in ("flops", "tensor_s", "cuda_s", "memory_s", "launch_s")
    }
    return Point(
        stage=a.stage,
        name=a.name,
        kind=a.kind,
        repeats=max(a.repeats, b.repeats),
        operations=a.operations + b.operations,
        dtype=a.dtype or b.dtype,
        traffic=a.traffic + b.traffic,
        **added,
    )
