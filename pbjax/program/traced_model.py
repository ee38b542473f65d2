"""The model as a graph at any batch size, with kernels for the operations that they can compute.

A graph that calls kernels is made for a Hopper GPU; on a CPU it computes the same in plain JAX.
"""

import math
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxtyping import Array

from pallas_kernels.dispatch import HOPPER_SMS, targets_hopper
from pallas_kernels.operation import PRIMITIVE
from pbjax.batch_axes.propagation import SplitError
from pbjax.device import Device
from pbjax.errors import DeviceError, FusionError, ModelError, PbjaxError
from pbjax.fusion import Fusion, FusionReport, Hoisted, Selection, fuse, hoist, listed, verify
from pbjax.graph.dataflow import signature
from pbjax.graph.difference import difference
from pbjax.graph.functional import Functional
from pbjax.graph.source_lines import raising_line
from pbjax.graph.trace import Atom, Aval, Graph, evaluate, trace

# Programs of at least this size have the operations of every larger one; of one row they may not.
PROBE_SIZE = 2

# The device that kernels are made for where there is no GPU.
HOPPER_KIND = "NVIDIA H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """The model as a graph at one batch size.

    Attributes:
      graph: The graph that runs; its weights are the params, then prepared ones, then captured
        arrays.
      fusion: The matches that were found; None where none were looked for.
      hoisted: The preparation of weights; None where the graph is the model's own.
      reason: The reason why no matches were looked for; empty if they were.
    """

    graph: Graph
    fusion: Fusion | None = None
    hoisted: Hoisted | None = None
    reason: str = ""

    @property
    def source(self) -> Graph:
        """The model's own graph."""
        return self.graph if self.fusion is None else self.fusion.source

    def prepare(self, params: Sequence[Array]) -> tuple[Array, ...]:
        """The weights of the graph, from the leaves of any params of the model."""
        weights = [*params, *map(jnp.asarray, self.graph.constants)]
        return tuple(weights if self.hoisted is None else self.hoisted.prepare(weights))

    @property
    def read(self) -> tuple[int, ...]:
        """Numbers of the weights that the graph reads."""
        graph = self.graph
        atoms = {a for o in graph.operations for a in _numbers(o.inputs)}
        atoms.update(_numbers(graph.outputs))
        return tuple(weight for weight in graph.weights if weight in atoms)

    def shares_weights(self, other: "TracedModel") -> bool:
        """Whether the same weights serve both graphs: always, but for a graph of one row."""
        if self.hoisted is None or other.hoisted is None:
            return self.hoisted is other.hoisted
        a, b = self.hoisted.preparation, other.hoisted.preparation
        same = difference(a, b) is None and self.graph.num_weights == other.graph.num_weights
        return same and all(
            signature(x, a.avals) == signature(y, b.avals)
            for x, y in zip(a.operations, b.operations, strict=True)
        )

    def pack(self, params: Sequence[Array]) -> tuple[Array, ...]:
        """The weights that the graph reads, from the leaves of any params of the model."""
        weights = self.prepare(params)
        return tuple(weights[i] for i in self.read)

    def run(self, weights: Sequence[Array], leaves: Sequence[Array]) -> list[Array]:
        """Outputs of the graph, flattened.

        Args:
          weights: The weights that `pack` returned.
          leaves: Leaves of the inputs.
        """
        env = dict(zip((*self.read, *self.graph.inputs), (*weights, *leaves), strict=True))
        evaluate(self.graph.operations, env)
        return [env[a] if isinstance(a, int) else _array(a) for a in self.graph.outputs]

    def verify(self) -> None:
        """Runs each match and what it replaces on random operands.

        Raises:
          FusionError: Results differ by more than their dtype allows.
        """
        if self.fusion is not None:
            verify(self.fusion)

    def report(self) -> FusionReport:
        """The report on what was found, or on why nothing was looked for."""
        if self.fusion is None:
            return FusionReport(reason=self.reason)
        return listed(self.fusion, len(self.graph.operations))


def make_tracer(
    seam: Functional,
    inputs_at: Callable[[int], tuple[object, ...]],
    selection: Selection,
    device: Device,
    batch_size: int,
) -> Callable[[int], TracedModel]:
    """Makes the function that traces a model at any batch size, once each, with kernels.

    Its weights are not prepared yet, and nothing is compared: see `prepared` and `check_alike`. At
    another size than the example's the function raises a SplitError where the model raises.

    Args:
      seam: The model.
      inputs_at: Shapes of the inputs at a batch size.
      selection: The patterns to replace by kernels.
      device: The device that programs are for.
      batch_size: Rows of the example.

    Raises:
      DeviceError: Kernels are asked for by name on a GPU that cannot run them.
    """
    hopper = _is_hopper(device.kind)
    if selection.patterns and not selection.auto and not hopper and jax.default_backend() == "gpu":
        raise DeviceError(
            f"optimize(fuse=...): the device is {device.kind!r}; the kernels need a Hopper GPU, or "
            "a CPU for their plain form; leave out fuse="
        )
    wanted = hopper if selection.auto else bool(selection.patterns)

    @cache
    def fused_at(size: int) -> TracedModel:
        raising = translated if size == batch_size else _needing_its_size
        with _target(device.kind if hopper else HOPPER_KIND) if hopper or wanted else nullcontext():
            with raising(seam, size):
                graph = trace(seam.apply, seam.params, *inputs_at(size))
            return _fused(graph, selection, device.kind, wanted=wanted)

    return fused_at


def prepared(traced: TracedModel, keep: Set[int]) -> TracedModel:
    """The same model, with what it computes from weights alone moved into their preparation.

    Args:
      traced: The model with kernels.
      keep: Numbers of values that stay in the graph.
    """
    if traced.fusion is None or traced.fusion.graph is traced.fusion.source:
        return traced
    hoisted = hoist(traced.graph, keep)
    return replace(traced, graph=hoisted.graph, hoisted=hoisted)


def _fused(graph: Graph, selection: Selection, kind: str, *, wanted: bool) -> TracedModel:
    """The model with kernels, its weights not prepared yet."""
    if not selection.patterns:
        return TracedModel(graph=graph, reason=selection.reason or "it is switched off")
    if not wanted:
        return TracedModel(
            graph=graph, reason=f"{kind} is no Hopper GPU; fuse='all' takes plain forms"
        )
    if selection.auto and any(_calls_kernel(o.equation) for o in graph.operations):
        return TracedModel(
            graph=graph, reason="the model calls kernels itself; fuse='all' looks for more"
        )
    fusion = fuse(graph, selection)
    return TracedModel(graph=fusion.graph, fusion=fusion)


def varying(graph: Graph, other: Graph) -> frozenset[int]:
    """The values whose shapes depend on the batch size: they are no weights."""
    pairs = enumerate(zip(graph.avals, other.avals, strict=True))
    return frozenset(number for number, (a, b) in pairs if a.shape != b.shape)


def outgrowing(graph: Graph) -> frozenset[int]:
    """The values made of weights that have more elements than these together, as for each row.

    They tell weights that are repeated along the batch where there is no other batch size.
    """
    sources = {weight: frozenset((weight,)) for weight in graph.weights}
    found = set()
    for operation in graph.operations:
        read = frozenset[int]().union(*(sources.get(a, ()) for a in _numbers(operation.inputs)))
        elements = sum(math.prod(graph.avals[weight].shape) for weight in read)
        for value in operation.outputs:
            sources[value] = read
            if math.prod(graph.avals[value].shape) > elements:
                found.add(value)
    return frozenset(found)


def _numbers(atoms: Sequence[Atom]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


def _array(number: Literal) -> Array:
    return jnp.asarray(number.val, cast(Aval, number.aval).dtype)


def _calls_kernel(equation: JaxprEqn) -> bool:
    if equation.primitive.name == PRIMITIVE:
        return True
    bodies = jaxprs_in_params(equation.params)
    return any(_calls_kernel(inner) for body in bodies for inner in body.eqns)


def check_alike(seam: Functional, first: TracedModel, traced: TracedModel, size: int) -> None:
    """Compares the model traced at another batch size with the first trace.

    Args:
      seam: The model.
      first: The first trace.
      traced: The other one.
      size: The other one's batch size.

    Raises:
      SplitError: The model has other operations.
      FusionError: Only with kernels it has.
    """
    changed = difference(first.source, traced.source)
    if changed:
        raise SplitError(
            f"at batch size {size} {seam.name} computes something else than at another: {changed}",
            "the operations must be the same at every batch size; take sizes from the inputs' "
            "shapes and do not compute with the batch size",
        )
    changed = difference(first.graph, traced.graph)
    if changed:
        raise FusionError(
            f"{seam.name}: at batch size {size} other kernels are found than at another: "
            f"{changed}; they must be the same at every batch size; pass fuse='none', and please "
            "report the model"
        )


def _is_hopper(kind: str) -> bool:
    with use_abstract_mesh(_mesh(kind)):
        return targets_hopper()


def _target(kind: str):
    """Makes programs that are traced inside programs for a device of that kind."""
    return nullcontext() if targets_hopper() else use_abstract_mesh(_mesh(kind))


def _mesh(kind: str) -> AbstractMesh:
    return AbstractMesh((), (), abstract_device=AbstractDevice(kind, HOPPER_SMS, "cuda"))


@contextmanager
def translated(seam: Functional, batch_size: int) -> Generator[None]:
    """Turns an error that a model raises when it is traced into a ModelError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, PbjaxError):
            raise
        raise ModelError(
            f"{seam.name}: {_raised(error, batch_size)}; a model must take inputs of the example's "
            "kind, as a pure JAX function; correct the example, or what the message names in the "
            "model"
        ) from error


@contextmanager
def _needing_its_size(seam: Functional, batch_size: int) -> Generator[None]:
    """Turns an error that a model raises at another size than the example's into a SplitError."""
    try:
        yield
    except Exception as error:
        raise SplitError(
            f"{seam.name} {_raised(error, batch_size)}",
            "a model must take inputs of the example's kind at every batch size; take sizes from "
            "the inputs' shapes in the model",
        ) from error


def _raised(error: Exception, batch_size: int) -> str:
    line = raising_line(error)
    where = f" ({line})" if line else ""
    return f"raises at batch size {batch_size}{where}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.split("\n")[0].rstrip(".")
