"""The roofline of a model on a device, from its traced operations.

Operations are grouped as they would run: each contraction by itself, attention as one group where
it is fused, and fused groups of everything between them. Groups belong to stages: the scopes that
the model names, or else the modules whose weights they read. FLOPs come from `graph.cost`, bytes
from `traffic`, classes from the longest of three times.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.arguments import check_type, whole_number, whole_numbers
from pbjax.device import Device, ResourceClass, find_device
from pbjax.errors import DeviceError, InputError, ModelError, PbjaxError
from pbjax.graph.classify import Label, classify
from pbjax.graph.cost import equation_cost
from pbjax.graph.dataflow import nbytes
from pbjax.graph.functional import Model, functional
from pbjax.graph.trace import Graph, Operation, loop_body, scan_parts, trace
from pbjax.planning.ceilings import calibrated
from pbjax.program.repetition import Repetition, find_repetition
from pbjax.roofline.measure import Place, Staged, measure_stages
from pbjax.roofline.names import Namer, leaf_names
from pbjax.roofline.points import Memory, OperationKind, Point, Traffic, merged
from pbjax.roofline.result import Roofline
from pbjax.roofline.times import (
    attention_slowdown,
    bandwidth,
    contractions_inside,
    launches_s,
    product_s,
)
from pbjax.roofline.traffic import (
    CONTRACTIONS,
    Holds,
    Moved,
    is_between_activations,
    measure_traffic,
)


def roofline_report(
    model: Model,
    *inputs: object,
    device: Device | str,
    variables: Mapping[str, object] | None = None,
    weights: Sequence[int] = (),
    cache: Sequence[int] = (),
    attention: str = "fused",
    name: str | None = None,
    phase: str = "forward",
    items: int = 0,
    tokens: int = 0,
    cached: int = 0,
    measure: bool = False,
    turn: AbstractContextManager[object] | None = None,
) -> Roofline:
    """Counts the costs of a call and finds the bound of each part; shapes suffice, nothing runs.

    Args:
      model: An nnx or linen module, a method of one, or any callable; its arrays may be
        `jax.ShapeDtypeStruct`s.
      *inputs: Inputs of a call, or their shapes and dtypes.
      device: The device whose peaks bound it; or its kind, for its measured ceilings, else the
        peaks of its datasheet.
      variables: Variables of an unbound linen module.
      weights: Positions of inputs that hold parameters, where a function takes them as inputs.
      cache: Positions of inputs that hold a KV cache, which is taken to be updated in place.
      attention: "fused" if two contractions with a softmax between them run as one kernel, whatever
        the model writes; "unfused" if the scores pass through memory.
      name: Name of the model, for the report; None takes that of its class or function.
      phase: Name of the phase, for the report.
      items: Rows of the batch, for the report; 0 if that means nothing.
      tokens: Tokens that the call takes in, for the report.
      cached: Tokens that a row's cache holds, for the report.
      measure: Also run the call on the first device of JAX, which `device` must be, and measure
        its stages. Weights and inputs must be arrays then; a KV cache among them is used up.
      turn: Context manager entered after the compilation, while the device is measured: a lock lets
        several processes compile at the same time and measure one after the other.

    Returns:
      The report.

    Raises:
      DeviceError: Nothing is known about the device.
      InputError: `weights` or `cache` name a missing input or one input twice, or `attention` is
        unknown.
      InputTypeError: An argument has a wrong type.
      ModelError: The model cannot be traced on such inputs.

    Source: Williams, Waterman and Patterson 2009, Roofline.
    """
    check_type("roofline_report(device)", device, (Device, str), "a pbjax.Device, or its kind,")
    check_type("roofline_report(measure)", measure, (bool,), "True or False")
    for option, value in {"items": items, "tokens": tokens, "cached": cached}.items():
        _check_count(option, whole_number(f"roofline_report({option})", value))
    if turn is not None:
        check_type("roofline_report(turn)", turn, (AbstractContextManager,), "a context manager")
    rated = calibrated(find_device(device)) if isinstance(device, str) else device
    fused = _is_fused(attention)
    weights = whole_numbers("roofline_report(weights)", weights)
    cache = whole_numbers("roofline_report(cache)", cache)
    _check_places(weights, cache, len(inputs))
    seam = functional(model, variables)
    try:
        graph = trace(seam.apply, seam.params, *inputs)
    except PbjaxError:
        raise
    except Exception as error:  # a user's model may raise anything
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ModelError(
            f"roofline_report({seam.name}): cannot be traced: {reason}; a pure JAX function of "
            "inputs of these shapes is allowed; correct the inputs, or the cause that is named"
        ) from error
    values = _arrays(seam.name, seam.params, inputs) if measure else []
    leaves = _leaves(graph, inputs, weights, cache)
    counted = _Counter(device=rated, fuse_attention=fused)
    staged = counted.add(graph, leaves, leaf_names(graph.names, leaves), repeats=1)
    report = Roofline(
        model=name or seam.name,
        phase=phase,
        device=rated,
        points=merged([p for p in counted.points if p.flops or p.traffic.total]),
        memory=_memory(graph, leaves, counted.temporary_bytes),
        attention="fused" if fused else "unfused",
        items=items,
        tokens=tokens,
        cached=cached,
        unknown=tuple(sorted(counted.unknown)),
        exact=counted.exact,
    )
    if not measure:
        return report
    _check_here(rated)
    carried = _carried(graph, leaves)
    return replace(report, measured=measure_stages(staged, values, carried, turn or nullcontext()))


def _check_here(device: Device) -> None:
    here = jax.devices()[0].device_kind
    if device.kind != here:
        raise DeviceError(
            f"roofline_report(device={device.kind!r}, measure=True): programs run on the first "
            f"device of JAX, which is {here!r}; only that can be measured; name it, or leave out "
            "measure="
        )


def _arrays(name: str, params: object, inputs: Sequence[object]) -> list[Array]:
    values = jax.tree.leaves((params, inputs))
    missing = [value for value in values if isinstance(value, jax.ShapeDtypeStruct)]
    if missing:
        raise InputError(
            f"roofline_report({name}, measure=True): {len(missing)} weights or inputs are shapes, "
            f"such as {missing[0]}; arrays are needed to run the call; pass arrays, or leave out "
            "measure="
        )
    return [jnp.asarray(value) for value in values]


def _carried(graph: Graph, leaves: Sequence[Holds]) -> dict[int, int]:
    """Outputs that are an input's cache updated in place, by the number of the input."""
    roots = measure_traffic(graph, leaves, fuse_attention=True).roots
    found: dict[int, int] = {}
    for place, atom in enumerate(graph.outputs):
        if not isinstance(atom, int) or len(roots[atom]) != 1:
            continue
        (root,) = roots[atom]
        cached = root < len(leaves) and leaves[root] == "kv_cache"
        before, after = graph.avals[root], graph.avals[atom]
        if cached and (before.shape, before.dtype) == (after.shape, after.dtype):
            found.setdefault(root, place)
    return found


def _is_fused(attention: str) -> bool:
    if attention not in ("fused", "unfused"):
        raise InputError(
            f"roofline_report(attention={attention!r}): unknown; 'fused' and 'unfused' are "
            "allowed; choose one"
        )
    return attention == "fused"


def _check_count(option: str, count: int) -> None:
    if count < 0:
        raise InputError(
            f"roofline_report({option}={count}): not a number of {option}; 0 or more is allowed; "
            "correct it, or leave it out"
        )


def _check_places(weights: Sequence[int], cache: Sequence[int], num_inputs: int) -> None:
    places = (*weights, *cache)
    if len(set(places)) < len(places) or not set(places) <= set(range(num_inputs)):
        raise InputError(
            f"roofline_report(weights={tuple(weights)}, cache={tuple(cache)}): a position is "
            f"missing or given twice; there are {num_inputs} inputs, counted from 0; name each "
            "that holds parameters or a cache once"
        )


def _leaves(
    graph: Graph, inputs: Sequence[object], weights: Sequence[int], cache: Sequence[int]
) -> list[Holds]:
    held: list[Holds] = ["weights"] * graph.num_weights
    for place, value in enumerate(inputs):
        holds: Holds = "activations"
        if place in weights or place in cache:
            holds = "weights" if place in weights else "kv_cache"
        held.extend(holds for _ in jax.tree.leaves(value))
    return held


def _memory(graph: Graph, leaves: Sequence[Holds], temporary_bytes: int) -> Memory:
    sizes = {"weights": 0, "activations": 0, "kv_cache": 0}
    for aval, holds in zip(graph.avals, leaves, strict=False):
        sizes[holds] += nbytes(aval)
    return Memory(
        weight_bytes=sizes["weights"],
        input_bytes=sizes["activations"],
        kv_cache_bytes=sizes["kv_cache"],
        temporary_bytes=temporary_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Operations of a graph from `start` to `stop`, and the positions where they repeat."""

    name: str
    start: int
    stop: int
    begins: tuple[int, ...]


def _sections(graph: Graph, repetition: Repetition, name: str) -> list[_Section]:
    if repetition.scanned or repetition.count == 1:
        return [_Section(name=name, start=0, stop=len(graph.operations), begins=(0,))]
    first, last = repetition.start, repetition.end
    begins = tuple(range(first, last, repetition.period))
    return [
        _Section(name="prologue", start=0, stop=first, begins=(0,)),
        _Section(name="block", start=first, stop=first + repetition.period, begins=begins),
        _Section(name="epilogue", start=last, stop=len(graph.operations), begins=(last,)),
    ]


class _Counter:
    """Collects the points of a graph, and of the loops inside it."""

    def __init__(self, *, device: Device, fuse_attention: bool):
        self.points: list[Point] = []
        self.unknown: set[str] = set()
        self.exact = True
        self.temporary_bytes = 0
        self._device, self._fuse = device, fuse_attention
        self._stages: set[str] = set()

    def add(
        self,
        graph: Graph,
        leaves: Sequence[Holds],
        names: Mapping[int, str],
        *,
        repeats: int,
        section: str = "program",
    ) -> Staged:
        """Adds the points of a graph.

        Args:
          graph: The graph.
          leaves: The contents of its weights and inputs.
          names: Names of weights, by their numbers.
          repeats: How often it runs.
          section: Name of stages that have none, if nothing in the graph repeats.

        Returns:
          The graph with the stages of its operations.
        """
        labels = classify(graph, self._device)
        moved = measure_traffic(graph, leaves, fuse_attention=self._fuse)
        stages: list[Place | None] = [None] * len(graph.operations)
        staged = Staged(graph=graph, stages=stages, loops={})
        if not graph.operations:
            return staged
        self.temporary_bytes += moved.temporary_bytes
        # Every operation counts the same: by their times the result would depend on the sizes.
        repetition = find_repetition(graph, [1.0] * len(graph.operations), graph)
        for part in _sections(graph, repetition, section):
            self._add_section(staged, part, labels, moved, names, repeats)
        return staged

    def _add_section(
        self,
        staged: Staged,
        section: _Section,
        labels: Sequence[Label],
        moved: Moved,
        names: Mapping[int, str],
        repeats: int,
    ) -> None:
        graph = staged.graph
        operations = graph.operations[section.start : section.stop]
        taken = frozenset(self._stages)
        namer = Namer(operations, moved, names, section.name, start=section.start, taken=taken)
        self._stages.update(namer.stages)
        for i, operation in enumerate(operations):
            places = [begin + i for begin in section.begins]
            if operation.primitive == "scan":
                times = repeats * len(places) * operation.params["length"]
                body = self._add_loop(operation, moved, names, times)
                for place in places:
                    staged.loops[place] = body.on(loop_body(graph.operations[place]))
                continue
            costs = [equation_cost(graph.operations[place].equation) for place in places]
            if not costs[0].known:
                self.unknown.add(operation.primitive)
            self.exact = self.exact and costs[0].exact
            tensor = labels[places[0]].unit == ResourceClass.TENSOR
            compute_s = repeats * sum((labels[place].compute_s for place in places), 0.0)
            traffic = sum((moved.traffic[place] for place in places), Traffic())
            traffic = traffic.times(repeats)
            contracts = tensor or operation.primitive in CONTRACTIONS
            kind = _kind(operation, moved, section.start + i, contracts)
            for place in places:
                staged.stages[place] = namer.stages[i], namer.groups[i], kind
            if kind == "attention" and tensor and self._fuse:
                compute_s *= attention_slowdown(operation, self._device)
            memory_s = traffic.total / bandwidth(self._device, kind)
            tiled_s = repeats * len(places) * product_s(operation, self._device)
            # The measured rate of attention includes its softmax.
            inside = moved.regions[section.start + i] is not None and self._fuse
            measured = inside and bool(self._device.attention_flops_per_s)
            launches = repeats * sum(moved.launches[place] for place in places)
            launch_s = launches * launches_s(operation, self._device) if launches else 0.0
            point = Point(
                stage=namer.stages[i],
                name=namer.groups[i],
                kind=kind,
                repeats=repeats * len(places),
                operations=1,
                dtype=_dtype(operation) if contracts else "",
                flops=repeats * sum(cost.flops + cost.transcendentals for cost in costs),
                traffic=traffic,
                tensor_s=compute_s if tensor else 0.0,
                cuda_s=0.0 if tensor or measured else compute_s,
                memory_s=memory_s,
                # The time by tiles includes the launch.
                launch_s=max(launch_s, tiled_s - max(compute_s, memory_s)),
            )
            self.points.append(point)

    def _add_loop(
        self, operation: Operation, moved: Moved, names: Mapping[int, str], repeats: int
    ) -> Staged:
        body, parts = loop_body(operation), scan_parts(operation)
        leaves: list[Holds] = ["weights"] * body.num_weights
        inner: dict[int, str] = {}
        for number, atom in zip(body.inputs, (*parts.consts, *parts.carry, *parts.xs), strict=True):
            leaves.append(moved.holds[atom] if isinstance(atom, int) else "activations")
            if isinstance(atom, int):
                named = [names[root] for root in moved.roots[atom] if root in names]
                inner |= {number: named[0]} if named else {}
        return self.add(body, leaves, inner, repeats=repeats, section="loop")


def _kind(operation: Operation, moved: Moved, position: int, contracts: bool) -> OperationKind:
    if moved.regions[position] is not None:
        return "attention"
    if not contracts:
        return "other"
    if operation.primitive not in CONTRACTIONS:
        # A whole kernel: attention may read weights too, such as a table of positions or slopes.
        name = operation.params["name"] if operation.primitive == KERNEL else operation.primitive
        if "attention" in name:
            return "attention"
        weights = any(moved.holds[a] == "weights" for a in operation.inputs if isinstance(a, int))
        return "dense" if weights else "attention"
    return "attention" if is_between_activations(operation, moved.holds) else "dense"


def _dtype(operation: Operation) -> str:
    inside = contractions_inside(operation)
    if inside:
        return _dtype(max(inside, key=lambda each: equation_cost(each.equation).flops))
    return str(getattr(operation.equation.invars[0].aval, "dtype", ""))
