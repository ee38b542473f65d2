"""The programs of bench_graph_step.py: two sub-batches' kernels in one CUDA graph."""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal
from jaxtyping import Array

from pallas_kernels.dispatch import default_sm_budget
from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.relaunch import can_relaunch, relaunch
from pbjax.decode.interleave import Role
from pbjax.decode.interleaved_program import role_of
from pbjax.decode.programs import StepWorkload
from pbjax.device import find_device
from pbjax.graph.trace import Graph, Operation, evaluate
from pbjax.program.analysis import analyse
from pbjax.runtime.compilation import CompiledProgram, ProgramSpec
from pbjax.runtime.execution import overlap_options
from pbjax.runtime.provenance import provenance_here
from pbjax.runtime.verification import error_and_magnitude
from pbjax.text_tables import table_text
from pbjax.tuning.request import Request

from .case import example, make, parsed

CALLS, SAMPLES = 40, 3


def run(args: argparse.Namespace) -> None:
    """Compiles, compares and times the programs."""
    batch_size, context, _ = parsed(args.case)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(args.layers, tiny=args.tiny)))
    model, inputs = example(graph, shapes, batch_size, context)
    kind = jax.devices()[0].device_kind
    analysis = analyse(model.decode, inputs, device=find_device(kind), fuse="none")
    workload = StepWorkload.of(Request.of(model.decode, inputs, state=1, fuse="none"), analysis)
    names = ["unsplit", *args.budgets]
    lowered = [workload.lower(ProgramSpec(sizes=(batch_size,), staggers=(0,)))]
    sizes = (batch_size - batch_size // 2, batch_size // 2)
    graphs = tuple(analysis.traced_at(size).graph for size in sizes)
    for budgets in args.budgets:
        products, reading = map(int, budgets.split("+"))
        program = InterleavedGraphs(graphs, products, reading, args.in_turns)
        spec = ProgramSpec(sizes=sizes, staggers=(0, 0), compiler_options=overlap_options())
        lowered.append(workload.lower_pair(spec, program))
    programs = [each.finish(*each.compile()) for each in lowered]
    rows = [
        {"name": name, **timed(workload, program)}
        for name, program in zip(names, programs, strict=True)
    ]
    expected = logits(workload, programs[0])
    for row, program in zip(rows, programs, strict=True):
        row["max_difference"] = float(error_and_magnitude(logits(workload, program), expected)[0])
    print(table(f"{args.case}, {args.layers} layers", rows))
    found = {"case": args.case, "layers": args.layers, "in_turns": args.in_turns, "rows": rows}
    provenance = asdict(provenance_here(kind, " ".join(["python", *sys.argv])))
    if args.out:
        document = {"schema_version": 1, "provenance": provenance, **found}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


def table(subject: str, rows: list[dict]) -> str:
    """The programs as text, the whole batch first."""
    cells = (
        (
            row["name"],
            f"{1e3 * row['median_s']:.3f}",
            f"{rows[0]['median_s'] / row['median_s']:.2f}x",
            f"{row['max_difference']:.2g}",
        )
        for row in rows
    )
    title = f"{subject}; ms a call, of calls that follow each other"
    return table_text(title, ("program", "ms", "speedup", "difference"), cells)


def logits(workload: StepWorkload, program: CompiledProgram) -> Array:
    """The results of a call beside the state."""
    return jax.tree.leaves(workload.call(program, workload.start(program))[0])[0]


def timed(workload: StepWorkload, program: CompiledProgram) -> dict:
    """Seconds of a call, of many that follow each other."""
    outputs, pieces = jax.block_until_ready(workload.call(program, workload.start(program)))
    seconds = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(CALLS):
            outputs, pieces = workload.call(program, pieces)
        jax.block_until_ready((outputs, pieces))
        seconds.append((time.perf_counter() - start) / CALLS)
    return {"median_s": statistics.median(seconds), "samples_s": seconds}


@dataclass(frozen=True, slots=True)
class InterleavedGraphs:
    """The operations of two sub-batches; between two readings of a cache lies a segment.

    Attributes:
      graphs: The operations of each sub-batch.
      products_sms: SMs of the kernels of a segment.
      reading_sms: SMs of the kernels that read a cache.
      in_turns: Whether a sub-batch waits for the other's segment and reading.
    """

    graphs: tuple[Graph, Graph]
    products_sms: int
    reading_sms: int
    in_turns: bool

    def __call__(self, weights, first, second) -> tuple[list[Array], list[Array]]:
        """The outputs of both."""
        inputs = zip(self.graphs, (first, second), strict=True)
        a, b = (SubBatchRun(graph, weights, given) for graph, given in inputs)
        last_read, multiplied = None, a.segment(None, None)
        while a.reads:
            for reader, other in ((a, b), (b, a)):
                last_read = reader.read(self.reading_sms, last_read if self.in_turns else None)
                token = multiplied if self.in_turns else None
                multiplied = other.segment(self.products_sms, token)
        b.segment(None, multiplied if self.in_turns else None)
        return a.outputs(), b.outputs()


class SubBatchRun:
    """One sub-batch's operations as they run, and the values so far."""

    def __init__(self, graph: Graph, weights, inputs):
        """Starts with the weights and the sub-batch's inputs."""
        self._graph, self._next = graph, 0
        self._values = dict(zip(graph.weights, weights, strict=True))
        self._values.update(zip(graph.inputs, inputs, strict=True))

    @property
    def reads(self) -> bool:
        """Whether a reading of a cache is next."""
        return self._next < len(self._graph.operations)

    def read(self, sms: int, token: Array | None) -> Array:
        """Reads a cache; returns what it gives."""
        operation = self._graph.operations[self._next]
        self._next += 1
        self._run(operation, sms, token)
        return self._values[operation.outputs[0]]

    def segment(self, sms: int | None, token: Array | None) -> Array | None:
        """Runs all up to the next reading; returns the last product."""
        product = None
        for operation in self._graph.operations[self._next :]:
            if role_of(operation) == Role.MEMORY:
                break
            norm = operation.primitive == KERNEL and "norm" in operation.params["name"]
            self._run(operation, sms, token if norm else None)
            token = None if norm else token
            self._next += 1
            if role_of(operation) == Role.COMPUTE:
                product = self._values[operation.outputs[0]]
        return product

    def outputs(self) -> list[Array]:
        """The results of the step for this sub-batch."""
        return [self._value(atom) for atom in self._graph.outputs]

    def _run(self, operation: Operation, sms: int | None, token: Array | None) -> None:
        if operation.primitive != KERNEL or not can_relaunch(operation.params):
            evaluate([operation], self._values)
            return
        operands = after(token, [self._value(atom) for atom in operation.inputs])
        with default_sm_budget(sms):
            results = relaunch(operation.params, operands)
        self._values.update(zip(operation.outputs, results, strict=True))

    def _value(self, atom: int | Literal) -> Array:
        return atom.val if isinstance(atom, Literal) else self._values[atom]


def after(token: Array | None, operands: list[Array]) -> list[Array]:
    """The operands, the first vector of them made to depend on a token.

    A CUDA graph's nodes wait for data alone: zero times a number of the token is added.
    """
    index = next((i for i, x in enumerate(operands) if x.ndim == 1 and x.size > 1), None)
    if token is None or index is None:
        return operands
    zero = 0.0 * token.reshape(-1)[:1].astype(jnp.float32)
    vector = operands[index] + zero.astype(operands[index].dtype)
    return [*operands[:index], vector, *operands[index + 1 :]]
