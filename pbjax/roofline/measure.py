"""Device seconds of every stage of a program, by a profiler's trace of the whole program.

Each operation runs inside a scope that names its stage; the compiler keeps scopes with its
instructions, and the trace names the instruction of each kernel. So the program runs unchanged,
fused across stages where the compiler chooses. A fused kernel belongs to the stage of its matrix
product, or else of its result, or else of most of its operations. A product whose scope the
compiler has dropped, as where it splits the sum over K, belongs to the stage that reads its
weights.
"""

import glob
import logging
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from pbjax.errors import DeviceError
from pbjax.graph.trace import Atom, Graph, Operation, evaluate, loop_body, scan_parts
from pbjax.roofline.points import Measured, OperationKind

_LOG = logging.getLogger(__name__)
MARK = "pbjax_stage_"
# The device is busy for WARM_S before anything counts: a GPU's clock falls within a fraction of a
# second of hard work. Traces of more calls than MAX_CALLS take longer to read than to make.
WARM_S, TRACED_S, MAX_CALLS, MIN_CALLS = 0.4, 0.4, 200, 6
SAMPLES = 5
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}

# Instructions whose time is that of the instructions inside them.
_OUTER = ("while", "call", "conditional")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+.*? ([\w\-]+)\(([^)]*)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_ARGUMENT = re.compile(r'op_name="([^"]*)"')
_SCOPE = re.compile(r'op_name="[^"]*?' + MARK + r"(\d+)")
_BODY = re.compile(r"\bcalls=%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{\s*$")
_PRODUCTS = ("dot", "convolution", "custom-call")
_VIEWS = ("bitcast", "get-tuple-element")


# Stage, group of operations in it, and the group's kind.
type Place = tuple[str, str, OperationKind]
type _Arrays = Sequence[Array | np.ndarray]
type _Program = Callable[[_Arrays], tuple[list[Array], list[Array]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A graph whose operations know their stages.

    Attributes:
      graph: The graph.
      stages: Place of each operation; None for a loop whose body is staged itself.
      loops: Bodies of such loops, by the position of the loop.
    """

    graph: Graph
    stages: list[Place | None]
    loops: dict[int, "Staged"]

    def on(self, graph: Graph) -> "Staged":
        """The same stages on another graph of the same operations."""
        operations = graph.operations
        loops = {i: loop.on(loop_body(operations[i])) for i, loop in self.loops.items()}
        return Staged(graph=graph, stages=self.stages, loops=loops)

    def places(self) -> list[Place]:
        """Places in program order, each once."""
        found: dict[Place, None] = {}
        for position, place in enumerate(self.stages):
            inner = self.loops[position].places() if place is None else [place]
            found |= dict.fromkeys(inner)
        return list(found)


def measure_stages(
    staged: Staged,
    leaves: _Arrays,
    carried: Mapping[int, int],
    turn: AbstractContextManager[object],
) -> Measured:
    """Runs a program and measures its stages and the groups in them.

    Args:
      staged: The program.
      leaves: Weights without captured arrays, then inputs. Those that are carried are used up.
      carried: Leaves that the program updates in place: number of the output, by that of the leaf
        in the graph.
      turn: Context manager entered after the compilation, while the device is measured.

    Raises:
      DeviceError: The trace does not name the instruction of a kernel.
    """
    graph, places = staged.graph, staged.places()
    tags = {place: f"{MARK}{index}" for index, place in enumerate(places)}
    first_input = graph.num_weights - len(graph.constants)
    values = [*leaves[:first_input], *graph.constants, *leaves[first_input:]]
    kept_numbers = [i for i in range(len(values)) if i not in carried]

    def program(kept: _Arrays, changed: _Arrays) -> list[Array]:
        numbers = (*kept_numbers, *carried)
        found = dict(zip(numbers, (*kept, *changed), strict=True))
        return _run(staged, [found[i] for i in range(len(values))], tags)

    kept, changed = [values[i] for i in kept_numbers], [values[i] for i in carried]
    lowered = jax.jit(program, donate_argnums=1).lower(kept, changed)
    as_it_runs = lowered.compile()
    # A GPU's profiler does not name the instruction of a kernel inside a CUDA graph.
    apart = lowered.compile(NO_GRAPHS) if jax.default_backend() == "gpu" else as_it_runs

    def call(compiled: Callable, changed: _Arrays) -> tuple[list[Array], list[Array]]:
        outputs = compiled(kept, changed)
        return outputs, [outputs[place] for place in carried.values()]

    with turn:
        seconds, changed = _wall_seconds(partial(call, as_it_runs), changed)
        calls = max(MIN_CALLS, min(MAX_CALLS, round(TRACED_S / seconds)))
        with tempfile.TemporaryDirectory() as folder:
            _trace(partial(call, apart), changed, calls, folder)
            trace = _read(folder)
    events = _events(trace, calls)
    readers = _readers(staged, {n: f"kept[{i}]" for i, n in enumerate(kept_numbers)})
    numbers = {place: index for index, place in enumerate(places)}
    owners = instruction_stages(
        apart.as_text() or "", {name: numbers[place] for name, place in readers.items()}
    )
    found = _seconds_by_place(events, owners, calls)
    stages: dict[str, float] = {}
    kinds: dict[str, float] = {}
    groups: dict[str, float] = {}
    for index, (stage, group, kind) in enumerate(places):
        names = (stages, stage), (kinds, kind), (groups, f"{stage}/{group}")
        for table, name in names:
            table[name] = table.get(name, 0.0) + found.get(index, 0.0)
    return Measured(
        device_kind=jax.devices()[0].device_kind,
        seconds=seconds,
        stages=stages,
        kinds=kinds,
        groups=groups,
        other_s=found.get(None, 0.0),
        calls=calls,
    )


def _run(staged: Staged, values: _Arrays, tags: Mapping[Place, str]) -> list[Array]:
    env = {i: jax.numpy.asarray(value) for i, value in enumerate(values)}
    for position, operation in enumerate(staged.graph.operations):
        place = staged.stages[position]
        if place is None:
            _run_loop(operation, staged.loops[position], env, tags)
        else:
            evaluate([replace(operation, scope=tags[place])], env)
    return [_value(atom, env) for atom in staged.graph.outputs]


def _run_loop(
    operation: Operation, staged: Staged, env: dict[int, Array], tags: Mapping[Place, str]
) -> None:
    parts, body = scan_parts(operation), staged.graph
    roles = parts.consts, parts.carry, parts.xs
    consts, carry, xs = ([_value(atom, env) for atom in role] for role in roles)

    def step(state: list[Array], rows: list[Array]) -> tuple[list[Array], list[Array]]:
        results = _run(staged, [*body.constants, *consts, *state, *rows], tags)
        return results[: len(carry)], results[len(carry) :]

    params = operation.params
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    last, collected = lax.scan(step, carry, xs, **options)
    env.update(zip((*parts.carry_out, *parts.ys), (*last, *collected), strict=True))


def _value(atom: Atom, env: Mapping[int, Array]) -> Array:
    return jax.numpy.asarray(atom.val) if isinstance(atom, Literal) else env[atom]


def _readers(staged: Staged, names: Mapping[int, str]) -> dict[str, Place]:
    """Places that are the only reader of a leaf, by the leaf's name."""
    found: dict[str, set[Place | None]] = {}
    for operation, place in zip(staged.graph.operations, staged.stages, strict=True):
        for atom in operation.inputs:
            if isinstance(atom, int) and atom in names:
                found.setdefault(names[atom], set()).add(place)
    single = {name: next(iter(places)) for name, places in found.items() if len(places) == 1}
    return {name: place for name, place in single.items() if place is not None}


def _wall_seconds(call: _Program, changed: _Arrays) -> tuple[float, _Arrays]:
    """Seconds of a call, one of many in a row, after the device has been busy for a while."""
    begin = time.perf_counter()
    outputs, changed = call(changed)
    jax.block_until_ready(outputs)
    each = max(1, round(WARM_S / SAMPLES / max(time.perf_counter() - begin, 1e-6)))
    samples = []
    for _ in range(2 * SAMPLES):
        begin = time.perf_counter()
        for _ in range(each):
            outputs, changed = call(changed)
        jax.block_until_ready(outputs)
        samples.append((time.perf_counter() - begin) / each)
    return statistics.median(samples[SAMPLES:]), changed


def _trace(call: _Program, changed: _Arrays, calls: int, folder: str) -> None:
    outputs, changed = call(changed)
    jax.block_until_ready(outputs)
    with jax.profiler.trace(folder):
        for _ in range(calls):
            outputs, changed = call(changed)
        jax.block_until_ready(outputs)


def _read(folder: str) -> jax.profiler.ProfileData:
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    return jax.profiler.ProfileData.from_file(path)


def _events(trace: jax.profiler.ProfileData, calls: int) -> list[tuple[str, float]]:
    """Instruction and seconds of every kernel that ran, in the order of their starts."""
    on_gpu = jax.default_backend() == "gpu"
    device, row = ("/device:GPU:", "Stream") if on_gpu else ("/host:CPU", "")
    found = []
    with warnings.catch_warnings():
        # The binding's own types warn; where warnings are errors, that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in trace.planes:
            lines = plane.lines if plane.name.startswith(device) else ()
            for event in (e for line in lines if line.name.startswith(row) for e in line.events):
                instruction = next((str(v) for key, v in event.stats if key == "hlo_op"), "")
                if instruction or on_gpu:
                    found.append((event.start_ns, instruction, event.duration_ns * 1e-9))
    if not any(instruction for _, instruction, _ in found):
        raise DeviceError(
            f"measure: a trace of {calls} calls names no instruction in {len(found)} kernels; a "
            "profiler that names them is needed; update jax and its plugin, or leave out measure="
        )
    return [(instruction, seconds) for _, instruction, seconds in sorted(found)]


def _seconds_by_place(
    events: Sequence[tuple[str, float]], owners: Mapping[str, int], calls: int
) -> dict[int | None, float]:
    """Seconds of a call by place, or None for kernels without one; the mean of the later calls."""
    by_instruction: dict[str, list[float]] = {}
    for instruction, seconds in events:
        by_instruction.setdefault(instruction, []).append(seconds)
    found: dict[int | None, float] = {}
    for instruction, seconds in by_instruction.items():
        if instruction.split(".")[0] in _OUTER:
            continue
        later = seconds[len(seconds) // 2 :]
        each = len(seconds) / calls * sum(later) / len(later)
        owner = owners.get(instruction)
        _LOG.debug(
            "%s of place %s: %.4g us in %d runs", instruction, owner, each * 1e6, len(seconds)
        )
        found[owner] = found.get(owner, 0.0) + each
    return found


class _Instruction(NamedTuple):
    """A line of a compiled program.

    Attributes:
      computation: Name of the computation that it is in.
      name: Name of its result.
      kind: Kind of operation.
      operands: Names of its operands.
      body: Name of the computation that it calls; empty if none.
      stage: Number of its scope's stage; None without a scope.
      argument: Name of the argument that it is; empty if it is none.
    """

    computation: str
    name: str
    kind: str
    operands: list[str]
    body: str
    stage: int | None
    argument: str


def _instructions(text: str) -> Iterator[_Instruction]:
    computation = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head.group(1)
        elif instruction := _INSTRUCTION.match(line):
            name, kind, operands = instruction.groups()
            scope, body = _SCOPE.search(line), _BODY.search(line)
            argument = _ARGUMENT.search(line) if kind == "parameter" else None
            yield _Instruction(
                computation=computation,
                name=name,
                kind=kind,
                operands=_NAME.findall(operands),
                body=body.group(1) if body else "",
                stage=int(scope.group(1)) if scope else None,
                argument=argument.group(1) if argument else "",
            )


def instruction_stages(text: str, arguments: Mapping[str, int] | None = None) -> dict[str, int]:
    """Number of the stage of each instruction of a compiled program.

    Args:
      text: The program as XLA prints it, with the scopes of `MARK`.
      arguments: Number of the only stage that reads an argument, by its name in the program.
    """
    found = list(_instructions(text))
    own = {i.name: i.stage for i in found if i.stage is not None}
    bodies = {i.name: i.body for i in found if i.body}
    inside: dict[str, Counter[int]] = {}
    for i in found:
        if i.stage is not None:
            inside.setdefault(i.computation, Counter())[i.stage] += 1
    most = {name: count.most_common(1)[0][0] for name, count in inside.items()}
    products = [i for i in found if i.kind in _PRODUCTS]
    named = {i.computation: i.stage for i in products if i.stage is not None}
    nameless = {i.computation for i in products if i.stage is None}
    following = _following(found, arguments or {})
    guessed = {name: most[body] for name, body in bodies.items() if body in most}
    lost = {n: following[n] for n, body in bodies.items() if body in nameless and n in following}
    fused = {name: named[body] for name, body in bodies.items() if body in named}
    return following | guessed | lost | own | fused


def _following(found: Iterable[_Instruction], arguments: Mapping[str, int]) -> dict[str, int]:
    """Stages of instructions without a scope that depend on an argument of a single stage."""
    reading: dict[str, int] = {}  # arguments, and views of them
    following: dict[str, int] = {}
    for i in found:
        weights = [reading[name] for name in i.operands if name in reading]
        origins = weights or [following[name] for name in i.operands if name in following]
        if i.argument in arguments:
            reading[i.name] = arguments[i.argument]
        elif i.kind in _VIEWS and weights:
            reading[i.name] = weights[0]
        elif i.stage is None and origins:
            following[i.name] = origins[0]
    return following
