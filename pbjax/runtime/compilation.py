"""Programs on their way to the device: what each runs, lowered, compiled, and what memory it needs.

How a call without state is lowered stands in `tuning.calls`, a step that carries state in
`decode.programs`. Nothing is timed or compared here.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.stages import Compiled, Lowered, Wrapped
from jaxtyping import Array

from pbjax.planning.program_summary import Layers
from pbjax.program.analysis import Analysis
from pbjax.program.stages import graph_fingerprint
from pbjax.runtime.measured_programs import program_label
from pbjax.runtime.program_cache import program_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """A program to run a batch with.

    Attributes:
      sizes: Rows of each sub-batch.
      staggers: How many stages each sub-batch runs ahead.
      predicted_s: Predicted seconds; None if nothing predicts it.
      plain: Whether it is the model as it was given, where fusion has put kernels into it.
      interleaved: Whether the launches of a step's two sub-batches alternate.
      layers: How the whole batch runs equal layers; sub-batches always run them in one loop.
      sm_budgets: SMs by resource class, as in `Plan`.
      unroll: Blocks in one step of the sub-batches' loop.
      compiler_options: Options of XLA, by name.
    """

    sizes: tuple[int, ...]
    staggers: tuple[int, ...]
    predicted_s: float | None = None
    plain: bool = False
    interleaved: bool = False
    layers: Layers = "as given"
    sm_budgets: Mapping[str, int] = field(default_factory=dict, hash=False)
    unroll: int = 1
    compiler_options: Mapping[str, str | int | bool] = field(default_factory=dict, hash=False)

    @property
    def is_whole(self) -> bool:
        """Whether the batch runs as one."""
        return len(self.sizes) == 1

    @property
    def name(self) -> str:
        """The name in reports: plain, unsplit, sequential, split or interleaved."""
        if self.is_whole:
            return "plain" if self.plain else "unsplit"
        if self.interleaved:
            return "interleaved"
        return "split" if any(self.staggers) else "sequential"

    @property
    def variant(self) -> str:
        """How the whole batch runs otherwise than as the model is written; empty if it does not."""
        if not self.is_whole:
            return ""
        layers = () if self.layers == "as given" else (self.layers,)
        return ", ".join((*layers, *(("one graph",) if self.compiler_options else ())))

    @property
    def label(self) -> str:
        """The name and what is chosen beside sizes and staggers."""
        return program_label(self.name, self.sm_budgets, self.unroll, self.variant)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """A program that can be called.

    Attributes:
      spec: The spec of the program.
      program: The executable; its first argument is the weights.
      weights: Its weights, made of the model's own params.
      temporary_bytes: Device memory beside weights, inputs and outputs.
      weight_bytes: Device memory of weights that it holds apart from the user's own.
      needed_bytes: Device memory while it runs: all of the model's weights, inputs, outputs,
        temporaries and code; 0 where the compiler does not say.
      compile_s: Seconds that lowering and compiling took.
      key: Identifies program and model where programs are kept; else empty.
    """

    spec: ProgramSpec
    program: Callable
    weights: tuple[Array, ...]
    temporary_bytes: int
    weight_bytes: int
    needed_bytes: int
    compile_s: float
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredProgram:
    """A program before compilation.

    Attributes:
      analysis: The model.
      spec: The spec of the program.
      lowered: The program.
      own_weights: Makes its weights of the model's own params.
      lower_s: Seconds that lowering took.
    """

    analysis: Analysis
    spec: ProgramSpec
    lowered: Lowered
    own_weights: Callable[[], tuple[Array, ...]]
    lower_s: float

    def compile(self) -> tuple[Compiled, float]:
        """The compiled program and its seconds; takes no lock of Python's, so threads may do it."""
        start = time.perf_counter()
        return self.lowered.compile(), time.perf_counter() - start

    def finish(self, program: Compiled, compile_s: float) -> CompiledProgram:
        """What `compile` returned, with its weights and the memory that it needs."""
        analysis, weights = self.analysis, self.own_weights()
        params = jax.tree.leaves(analysis.model.params)
        first = len(analysis.weights) - len(analysis.graph.constants)
        own = {id(leaf) for leaf in (*params, *analysis.weights[first:])}
        memory = program.memory_analysis()
        held = {id(w) for w in weights}
        beside = sum(leaf.nbytes for leaf in params if id(leaf) not in held)
        options = sorted(self.spec.compiler_options.items())
        return CompiledProgram(
            spec=self.spec,
            program=program,
            weights=weights,
            temporary_bytes=memory.temp_size_in_bytes if memory else 0,
            weight_bytes=sum(w.nbytes for w in weights if id(w) not in own),
            needed_bytes=beside + _bytes_while_running(memory) if memory else 0,
            compile_s=self.lower_s + compile_s,
            key=program_key(self.lowered, options, graph_fingerprint(analysis.source)),
        )


def lower(
    analysis: Analysis,
    spec: ProgramSpec,
    jitted: Wrapped,
    arguments: Sequence[object],
    own_weights: Callable[[], tuple[Array, ...]],
) -> LoweredProgram:
    """Lowers a jitted function.

    Args:
      analysis: The model.
      spec: The spec that the function implements.
      jitted: The function.
      arguments: Arrays or shapes of its arguments.
      own_weights: Makes its first argument of the model's own params.
    """
    start = time.perf_counter()
    lowered = jitted.lower(*arguments)
    return LoweredProgram(
        analysis=analysis,
        spec=spec,
        lowered=lowered,
        own_weights=own_weights,
        lower_s=time.perf_counter() - start,
    )


def compile_all(
    lower: Sequence[Callable[[], LoweredProgram]], progress: Callable[[int, int, str], None]
) -> list[CompiledProgram]:
    """Compiles programs in threads while the next ones are lowered.

    Args:
      lower: Lowers each program.
      progress: Called as progress(done, total, item).
    """
    with ThreadPoolExecutor() as pool:
        compiling = []
        for make in lower:
            lowered = make()
            spec = lowered.spec
            progress(len(compiling), len(lower), f"{spec.label} {spec.sizes}")
            compiling.append((lowered, pool.submit(lowered.compile)))
        return [lowered.finish(*done.result()) for lowered, done in compiling]


def _bytes_while_running(memory: Any) -> int:
    """Bytes of a program's arguments, results, temporaries and code together."""
    parts = ("argument", "output", "temp", "generated_code")
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts)
    return total - memory.alias_size_in_bytes
