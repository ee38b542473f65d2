"""The roofline of a deep model from those of two shallow ones: its layers are alike.

Building, tracing and costing a layer takes 20 to 50 ms. Whatever a report adds up lies on a line
over the number of layers, so two points of it give any depth.
"""

from collections.abc import Callable
from dataclasses import replace

from pbjax.errors import InputError
from pbjax.roofline.points import Memory, Point, Traffic
from pbjax.roofline.result import Roofline

# A deeper model is traced with this many layers, and with one less: the others are like the last.
# In three a Conformer's layers are not yet found to repeat as they do in nine.
TRACED_LAYERS = 5


def deep_report(report_at: Callable[[int], Roofline], num_layers: int) -> Roofline:
    """The report of a model of any depth, of which at most `TRACED_LAYERS` layers are traced.

        deep_report(lambda n: pbjax.roofline_report(build(n), ids, device="h200"), num_layers=126)

    Args:
      report_at: Makes the report of the model with a number of layers; every layer must be alike,
        and the call the same.
      num_layers: How many layers the model has.

    Returns:
      The report, whose figures are those of a traced one but for rounding.

    Raises:
      InputError: It has no layers.
    """
    if num_layers < 1:
        raise InputError(
            f"deep_report(num_layers={num_layers}): not a number of layers; 1 or more is allowed; "
            "give the number that the model has"
        )
    if num_layers <= TRACED_LAYERS:
        return report_at(num_layers)
    shallow, next_one = report_at(TRACED_LAYERS - 1), report_at(TRACED_LAYERS)
    return deepened(shallow, next_one, num_more=num_layers - TRACED_LAYERS + 1)


def deepened(shallow: Roofline, next_one: Roofline, num_more: int) -> Roofline:
    """A report of a model with more layers of the same kind.

    Args:
      shallow: The report of the model with a few layers.
      next_one: The report of the same with one more, in a call of the same sizes.
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
