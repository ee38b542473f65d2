"""The roofline of a deep model from those of two shallow ones: its layers are alike.

Building, tracing and costing a layer takes 20 to 50 ms. Whatever a report adds up lies on a line
over the number of layers, so that two give that of any depth.
"""

from dataclasses import replace

from pbjax.roofline.points import Memory, Point, Traffic
from pbjax.roofline.result import Roofline


def deepened(shallow: Roofline, next_one: Roofline, num_more: int) -> Roofline:
    """A report of a model with more layers of the same kind.

    Args:
      shallow: Of the model with a few layers.
      next_one: Of the same with one more, in a call of the same sizes.
      num_more: How many more layers than the shallow one it has.

    Returns:
      The report, whose figures are those of a traced one but for rounding.
    """
    reports = (shallow, next_one)
    if len({tuple((p.stage, p.name) for p in report.points) for report in reports}) > 1:
        raise AssertionError("reports of one model have the same groups at every depth")

    def line(low: int, high: int) -> int:
        return low + num_more * (high - low)

    a, b = (report.memory for report in reports)
    pairs = zip(shallow.points, next_one.points, strict=True)
    return replace(
        next_one,
        points=tuple(_point(low, high, num_more) for low, high in pairs),
        memory=Memory(
            weight_bytes=line(a.weight_bytes, b.weight_bytes),
            input_bytes=line(a.input_bytes, b.input_bytes),
            kv_cache_bytes=line(a.kv_cache_bytes, b.kv_cache_bytes),
            temporary_bytes=line(a.temporary_bytes, b.temporary_bytes),
        ),
    )


def _point(low: Point, high: Point, num_more: int) -> Point:
    def line[T: (int, float)](a: T, b: T) -> T:
        return a + num_more * (b - a)

    return replace(
        high,
        repeats=line(low.repeats, high.repeats),
        flops=line(low.flops, high.flops),
        traffic=Traffic(
            weights=line(low.traffic.weights, high.traffic.weights),
            activations=line(low.traffic.activations, high.traffic.activations),
            kv_cache=line(low.traffic.kv_cache, high.traffic.kv_cache),
        ),
        tensor_s=line(low.tensor_s, high.tensor_s),
        cuda_s=line(low.cuda_s, high.cuda_s),
        memory_s=line(low.memory_s, high.memory_s),
        launch_s=line(low.launch_s, high.launch_s),
    )
