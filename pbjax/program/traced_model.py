"""The model as a graph at any batch size, with kernels in place of what they can compute.

A graph that calls kernels is made for a Hopper GPU; on a CPU it computes the same in plain JAX.
"""

from collections.abc import Callable, Generator, Sequence
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
from pbjax.device import Device
from pbjax.errors import DeviceError, FusionError, ModelError, PbjaxError
from pbjax.fusion import Fusion, FusionReport, Hoisted, Selection, fuse, hoist, listed, verify
from pbjax.graph.dataflow import signature
from pbjax.graph.functional import Functional
from pbjax.graph.trace import Aval, Graph, difference, evaluate, trace

# Programs of at least this size have the operations of every larger one; of one row they may not.
PROBE_SIZE = 2

# What kernels are made for where there is no GPU.
HOPPER_KIND = "NVIDIA H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """The model as a graph at one batch size.

    Attributes:
      graph: What runs. Its weights are the params, then prepared ones, then captured arrays.
      fusion: What was found; None where nothing was looked for.
      hoisted: What prepares weights; None where the graph is the model's own.
      reason: Why nothing was looked for; empty if something was.
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
        atoms = {a for o in graph.operations for a in o.inputs if isinstance(a, int)}
        atoms |= {a for a in graph.outputs if isinstance(a, int)}
        return tuple(weight for weight in graph.weights if weight in atoms)

    def shares_weights(self, other: "TracedModel") -> bool:
        """Whether the same weights serve both graphs, as but for one row they always do."""
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
          weights: What `pack` returned.
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
        """What was found, or why nothing was looked for."""
        if self.fusion is None:
            return FusionReport(reason=self.reason)
        return listed(self.fusion, len(self.graph.operations))


def former(
    seam: Functional,
    inputs_at: Callable[[int], tuple[object, ...]],
    selection: Selection,
    device: Device,
    size: int,
) -> Callable[[int], TracedModel]:
    """Makes the model's form at any batch size, once each, and checks that it stays the same model.

    Args:
      seam: The model.
      inputs_at: Shapes of the inputs at a batch size.
      selection: What to replace by kernels.
      device: What programs are for.
      size: A batch size other than PROBE_SIZE; what differs between the two depends on the batch.

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
    first: list[TracedModel] = []

    @cache
    def fused_at(batch_size: int) -> TracedModel:
        traced_for = device.kind if hopper else HOPPER_KIND
        with _target(traced_for) if hopper or wanted else nullcontext():
            with translated(seam, batch_size):
                graph = trace(seam.apply, seam.params, *inputs_at(batch_size))
            traced = _fused(graph, selection, device.kind, wanted=wanted)
        if batch_size >= PROBE_SIZE:
            first.append(traced)
            _check_alike(seam, first[0], traced, batch_size)
        return traced

    @cache
    def traced_at(batch_size: int) -> TracedModel:
        traced = fused_at(batch_size)
        if traced.fusion is None or traced.fusion.graph is traced.fusion.source:
            return traced
        hoisted = hoist(traced.graph, _varying(fused_at(size).graph, fused_at(PROBE_SIZE).graph))
        return replace(traced, graph=hoisted.graph, hoisted=hoisted)

    return traced_at


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


def _varying(graph: Graph, other: Graph) -> frozenset[int]:
    """The values whose shapes depend on the batch size: they are no weights."""
    pairs = enumerate(zip(graph.avals, other.avals, strict=True))
    return frozenset(number for number, (a, b) in pairs if a.shape != b.shape)


def _array(number: Literal) -> Array:
    return jnp.asarray(number.val, cast(Aval, number.aval).dtype)


def _calls_kernel(equation: JaxprEqn) -> bool:
    if equation.primitive.name == PRIMITIVE:
        return True
    bodies = jaxprs_in_params(equation.params)
    return any(_calls_kernel(inner) for body in bodies for inner in body.eqns)


def _check_alike(
    seam: Functional, first: TracedModel, traced: TracedModel, batch_size: int
) -> None:
    changed = difference(first.source, traced.source)
    if changed:
        raise ModelError(
            f"{seam.name}: at batch size {batch_size} it computes something else than at another: "
            f"{changed}; the operations must be the same at every batch size; take sizes from the "
            "inputs' shapes and do not compute with the batch size"
        )
    changed = difference(first.graph, traced.graph)
    if changed:
        raise FusionError(
            f"{seam.name}: at batch size {batch_size} other kernels are found than at another: "
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
    """Makes what a model raises when it is traced an error of ours."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, PbjaxError):
            raise
        raise ModelError(
            f"{seam.name}: raises at batch size {batch_size}: {_first_line(error)}; a model must "
            "take inputs of the example's kind at every batch size, as a pure JAX function; "
            "correct the example, or what the message names in the model"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
