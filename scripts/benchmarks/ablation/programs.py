"""Programs of the ablation: built and compiled in worker processes, timed alone on the GPU.

A group is compiled in one process and timed in turn with the unsplit model, so that a drift of the
clock hits all of it alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import models
from models.kernels import with_kernels
from pallas_kernels.corun import gemm_beside_decode_attention
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import HOPPER_SMS
from pallas_kernels.gemm import gated_gemm
from pbjax.device import find_device
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import PROBE_SIZE, Analysis, analyse
from pbjax.runtime.device_trace import overlap
from pbjax.runtime.execution import SplitProgram, WeightLayout, overlap_options
from pbjax.runtime.timing import time_alternately, traced_kernels

SAMPLES, TRACED_CALLS = 5, 3
# As the unsplit models run fastest: docs/design/models.md.
PLAIN_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
# Without a GPU only whether it runs is asked: most of a try was LLVM making fast code.
CPU_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# A product and the attention that its launch carries, of a decode step of LLaMA3-8B at 1,024
# sequences of 512 tokens in halves: gate and up beside 272 sequences.
PAIR_ROWS, PAIR_SEQUENCES, PAIR_CONTEXT = 512, 272, 512
PAIR_BUDGETS = (24, 36, 48, 66)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A program of a model's batch.

    Attributes:
      sizes: Rows of each sub-batch.
      staggers: The number of stages that each runs ahead.
      tensor_sms: Budget of TENSOR stages in mixed slots; 0 for none.
      memory_sms: Budget of MEMORY stages; 0 for none.
      unroll: Blocks in one step of the loop.
      overlap: Whether the kernels are one CONCURRENT graph; else they run one after the other.
    """

    sizes: tuple[int, ...]
    staggers: tuple[int, ...]
    tensor_sms: int = 0
    memory_sms: int = 0
    unroll: int = 1
    overlap: bool = True

    @property
    def sm_budgets(self) -> dict[str, int]:
        """The SM budgets as a plan has them."""
        budgets = {"TENSOR": self.tensor_sms, "MEMORY": self.memory_sms}
        return {name: sms for name, sms in budgets.items() if sms}

    @property
    def label(self) -> str:
        """The name in tables."""
        parts = ["+".join(map(str, self.sizes)), ",".join(map(str, self.staggers))]
        parts.append(f"{self.tensor_sms}+{self.memory_sms} SMs" if self.sm_budgets else "all SMs")
        parts += [f"unroll {self.unroll}"] if self.unroll > 1 else []
        return " ".join([*parts, *([] if self.overlap else ["in sequence"])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The programs that one process compiles and times.

    Attributes:
      model: "bert", "conformer", or "pair" for the decode step's pair.
      variants: Programs of the model; those of the pair are fixed.
      traced: Whether a device trace is taken of each.
      tiny: Small sizes, to try the script without a GPU.
      deadline: Seconds since the epoch after which nothing more is compiled.
    """

    model: str
    variants: tuple[Variant, ...]
    traced: bool
    tiny: bool
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A compiled program.

    Attributes:
      label: The name in tables.
      call: Runs it on the group's inputs.
      temporary_bytes: Memory that it needs beside weights, inputs and outputs.
      compile_s: Seconds of lowering and compiling.
      relative_rms: Its difference from the first program of the group.
      variant: None for what is no split of a model.
    """

    label: str
    call: Callable[[], object]
    temporary_bytes: int
    compile_s: float
    relative_rms: float
    variant: Variant | None = None


def prepare(group: Group) -> list[Ready | str]:
    """Compiles the programs of a group, the unsplit one first, and runs each once."""
    return _pair_programs(group) if group.model == "pair" else _model_programs(group)


def measure(group: Group, ready: list[Ready | str]) -> list[dict]:
    """Checks and times what was compiled, in turn."""
    programs = [program for program in ready if isinstance(program, Ready)]
    timings = time_alternately([program.call for program in programs], lambda *_: None, SAMPLES)
    rows = []
    for program, timing in zip(programs, timings, strict=True):
        row = {"model": group.model, "label": program.label}
        if program.variant is not None:
            v = program.variant
            row |= {"sizes": v.sizes, "staggers": v.staggers, "sm_budgets": v.sm_budgets}
            row |= {"unroll": v.unroll, "overlap": v.overlap}
        row |= {
            "seconds": timing.median_s,
            "spread_s": timing.spread_s,
            "over_unsplit": round(timings[0].median_s / timing.median_s, 4),
            "relative_rms": float(f"{program.relative_rms:.2g}"),
            "temporary_bytes": program.temporary_bytes,
            "compile_s": round(program.compile_s, 1),
        }
        rows.append(row | (_traced(program) if group.traced else {}))
    failed = [{"model": group.model, "error": text} for text in ready if isinstance(text, str)]
    return rows + failed


def _traced(program: Ready) -> dict:
    try:
        kernels = traced_kernels(program.call, (), TRACED_CALLS)
    except Exception as error:  # the times are worth keeping
        return {"trace_error": f"{type(error).__name__}: {error}"[:300]}
    found = overlap(kernels)
    return {
        "kernels": len(kernels) // TRACED_CALLS,
        "tensor_s": found.tensor_s / TRACED_CALLS,
        "memory_s": found.memory_s / TRACED_CALLS,
        "busy_s": (found.tensor_s + found.memory_s - found.both_s) / TRACED_CALLS,
        "overlapped_share": round(found.share, 4),
    }


@jax.jit
def _difference(got, want):
    """Root mean square of the difference over that of the values."""
    f32 = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in zip(got, want, strict=True)]
    return (sum(((a - b) ** 2).sum() for a, b in f32) / sum((b**2).sum() for _, b in f32)) ** 0.5


def random_model(name: str, *, tiny: bool) -> tuple[nnx.Module, tuple[jax.Array, ...]]:
    """A model with kernels where the device has them, random weights, and random inputs."""
    rng = np.random.default_rng(0)
    if name == "bert":
        config, batch, length = models.BertConfig.base(), 96, 384
        make = models.BertModel
    else:
        config, batch, length = models.ConformerConfig.conformer_l(), 32, 512
        make = models.ConformerEncoder
    if tiny:
        config = replace(config, num_layers=3, embed_dim=128, mlp_dim=256, num_heads=2)
        batch, length = 6, 16
    model = nnx.eval_shape(lambda: with_kernels(make(config, dtype="bfloat16", rngs=nnx.Rngs(0))))
    graphdef, state = nnx.split(model)
    draws = rng.standard_normal(1 << 22, np.float32)

    def draw(leaf):
        values = np.resize(draws, leaf.shape)
        return jnp.asarray(1 + 0.1 * values if leaf.ndim == 1 else 0.02 * values, leaf.dtype)

    model = nnx.merge(graphdef, jax.tree.map(draw, state))
    if name == "bert":
        ids = jnp.asarray(rng.integers(0, config.vocab_size, (batch, length)), jnp.int32)
        return model, (ids, jnp.ones_like(ids))
    frames = rng.standard_normal((batch, length, config.embed_dim), np.float32)
    return model, (jnp.asarray(frames, jnp.bfloat16),)


def analysed(name: str, *, tiny: bool) -> tuple[nnx.Module, tuple[jax.Array, ...], Analysis]:
    """The model, its inputs, and what the split programs are made from."""
    model, inputs = random_model(name, tiny=tiny)
    device = find_device(jax.devices()[0].device_kind)
    return model, inputs, analyse(model, inputs, device=device)


def _model_programs(group: Group) -> list[Ready | str]:
    model, inputs, analysis = analysed(group.model, tiny=group.tiny)
    graphdef, state = nnx.split(model)

    def unsplit(state, *inputs):
        return nnx.merge(graphdef, state)(*inputs)

    layout = WeightLayout.of(analysis.program_at(PROBE_SIZE))
    weights = layout.pack(analysis.weights)
    plain = _options(overlap=False)
    first = _compiled("unsplit", unsplit, (state, *inputs), plain)
    ready: list[Ready | str] = [first]
    for variant in group.variants:
        if time.time() > group.deadline:
            ready.append(f"{variant.label}: no time was left to compile it")
            continue
        try:
            program = split_program(analysis, layout, variant)
            options = _options(overlap=variant.overlap)
            ready.append(
                _compiled(
                    variant.label,
                    program.__call__,
                    (weights, list(inputs)),
                    options,
                    first=first,
                    variant=variant,
                )
            )
        except Exception as error:  # reported as a row; the others go on
            ready.append(f"{variant.label}: {type(error).__name__}: {error}"[:600])
    return ready


def split_program(analysis: Analysis, layout: WeightLayout, variant: Variant) -> SplitProgram:
    """The function of a variant."""
    return SplitProgram(
        programs=tuple(analysis.program_at(measured_size(size)) for size in variant.sizes),
        sizes=variant.sizes,
        timetable=timetable(analysis.summary, variant.staggers),
        layout=layout,
        in_axes=analysis.batch.axes,
        out_axes=analysis.out_axes,
        unroll=variant.unroll,
        sm_budgets=variant.sm_budgets,
    )


def _options(*, overlap: bool) -> dict:
    if jax.default_backend() != "gpu":
        return CPU_OPTIONS
    return PLAIN_OPTIONS | (overlap_options() if overlap else {})


def _compiled(label: str, function, args, options, *, first=None, variant=None) -> Ready:
    start = time.perf_counter()
    program = jax.jit(function, compiler_options=options or None).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    got = jax.tree.leaves(program(*args))
    want = jax.tree.leaves(first.call()) if first else got
    return Ready(
        label=label,
        call=lambda: program(*args),
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        compile_s=seconds,
        relative_rms=float(_difference(got, want)),
        variant=variant,
    )


def _pair_programs(group: Group) -> list[Ready | str]:
    """Gate and up of LLaMA3-8B beside decode attention: in sequence, as one launch, as a graph."""
    rows, sequences, context, dim, mlp, heads, kv, width = (
        (16, 4, 32, 128, 256, 4, 2, 64)
        if group.tiny
        else (PAIR_ROWS, PAIR_SEQUENCES, PAIR_CONTEXT, 4096, 14336, 32, 8, 128)
    )
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def draw(*shape, scale=1.0):
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * jnp.bfloat16(scale)

    x, gate, up = draw(rows, dim), draw(dim, mlp, scale=0.02), draw(dim, mlp, scale=0.02)
    q = draw(sequences, 1, heads, width)
    k, v = draw(sequences, context, kv, width), draw(sequences, context, kv, width)
    args = (x, gate, up, q, k, v, jnp.full(sequences, context, jnp.int32))

    def two_kernels(gemm_sms, attention_sms):
        def run(x, gate, up, q, k, v, lengths):
            return (
                gated_gemm(x, gate, up, sm_budget=gemm_sms),
                decode_attention(q, k, v, lengths, sm_budget=attention_sms),
            )

        return run

    def one_launch(x, gate, up, q, k, v, lengths):
        both = gemm_beside_decode_attention(x, up, q, k, v, lengths, w_gate=gate, activation="silu")
        return both.product, both.attended

    plain, graph = _options(overlap=False), _options(overlap=True)
    first = _compiled("in sequence", two_kernels(None, None), args, plain)
    programs = [("one launch (co-run kernel)", one_launch, plain)]
    programs.append(("one graph, all SMs", two_kernels(None, None), graph))
    for attention_sms in PAIR_BUDGETS:
        sms = HOPPER_SMS - attention_sms
        run = two_kernels(sms, attention_sms)
        programs.append((f"one graph, {sms} + {attention_sms} SMs", run, graph))
    made = [_compiled(name, run, args, options, first=first) for name, run, options in programs]
    return [first, *made]
