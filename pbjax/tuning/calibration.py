"""Measures what this machine reaches: `Ceilings` of its products, bandwidth, functions, launches.

Each figure is that of a program that runs for a while, back to back, by the wall clock: a GPU that
multiplies for long falls back to what its power allows, and so do models. Power depends on the
numbers too, so these are as those of models are: of a normal distribution. Compiling all programs
takes longer than running them, so they compile side by side.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.attention import attention
from pallas_kernels.norm import rms_norm
from pbjax.errors import DeviceError
from pbjax.planning.ceilings import ATTENTION_TOKENS, Ceilings
from pbjax.runtime.provenance import provenance_here

COMMAND = "pbjax calibrate"
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "erf": lax.erf,
    "erfc": lax.erfc,
    "exp": lax.exp,
    "log": lax.log,
    "logistic": lax.logistic,
    "rsqrt": lax.rsqrt,
    "sin": lax.sin,
    "sqrt": lax.sqrt,
    "tanh": lax.tanh,
}
# In one kernel, so that reading and writing the numbers is nothing beside it.
EVALUATIONS, MULTIPLY_ADDS = 32, 512
CHAIN = 64  # kernels that wait for each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
      products: Rows and columns of square matrices, by dtype name.
      thin: Rows of a product whose weights are read, their inner and outer size.
      elements: Numbers that functions are evaluated of.
      copied: Numbers of float32 that are copied.
      heads: Widths of attention's heads; none where nothing fuses it.
      seconds: How long each program runs.
    """

    products: dict[str, int]
    thin: tuple[int, int, int]
    elements: int
    copied: int
    heads: tuple[int, ...]
    seconds: float


GPU = Sizes(
    products={d: 8192 for d in ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")},
    thin=(16, 8192, 65536),
    elements=1 << 24,
    copied=1 << 28,
    heads=(64, 128),
    seconds=0.5,
)
CPU = Sizes(
    products={"bfloat16": 512, "float32": 1024},
    thin=(16, 2048, 8192),
    elements=1 << 20,
    copied=1 << 25,
    heads=(),
    seconds=0.2,
)
ATTENTION = (16, ATTENTION_TOKENS, 16)  # rows, tokens and heads
# Products of these take the second matrix by its columns; as rows it would be transposed each time.
NARROW = ("int8", "float8_e4m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A program and how much of what it does.

    Attributes:
      name: What is measured, as the table and key of a field of `Ceilings`; of several of one name
        the fastest counts.
      function: The program.
      shapes: Shapes of its operands.
      amount: FLOPs, bytes, evaluations or kernels of one call.
      optional: Whether a device may be without it.
      between: Bounds of the numbers, evenly spread; None for those of a normal distribution.
    """

    name: tuple[str, str]
    function: Callable[..., Array]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    amount: int
    optional: bool = False
    between: tuple[float, float] | None = None


def calibrate(
    device_kind: str,
    progress: Callable[[str, int, int, str], None] | None = None,
    *,
    sizes: Sizes | None = None,
    turn: AbstractContextManager[object] | None = None,
) -> Ceilings:
    """Measures the first device of JAX.

    Args:
      device_kind: Name of the device, as in `Device.kind`.
      progress: Called as progress(phase, done, total, item).
      sizes: How much is measured; None takes what suits a GPU or a CPU.
      turn: Entered once all is compiled, for as long as the device is measured.

    Returns:
      The ceilings. A dtype that nothing on the device multiplies is left out.

    Raises:
      DeviceError: Something that every device does fails on this one.
    """
    sizes = sizes or (GPU if jax.default_backend() == "gpu" else CPU)
    say = progress or (lambda phase, done, total, item: None)
    cases = _cases(sizes)
    say("compile", 0, len(cases), "")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(_compiled, cases))
    found: dict[str, dict[str, float]] = {}
    with turn or nullcontext():
        for done, (case, program) in enumerate(zip(cases, programs, strict=True)):
            say("measure", done, len(cases), "/".join(filter(None, case.name)))
            if program is not None:
                table, key = case.name
                seconds = _sustained(program, _operands(case), sizes.seconds)
                rates = found.setdefault(table, {})
                rates[key] = max(rates.get(key, 0.0), _four_digits(case.amount / seconds))
    single = {table: rates[""] for table, rates in found.items() if "" in rates}
    ours = single.get("pallas launches")
    return Ceilings(
        provenance=provenance_here(device_kind, COMMAND),
        tensor_flops_per_s=found["products"],
        attention_flops_per_s={int(h): r for h, r in found.get("attention", {}).items()},
        cuda_flops_per_s=single["multiply-adds"],
        functions_per_s=found["functions"],
        memory_bytes_per_s=single["copy"],
        weight_bytes_per_s=single["weights"],
        launch_s=_four_digits(1 / single["launches"]),
        pallas_launch_s=_four_digits(1 / ours) if ours else None,
    )


def _cases(sizes: Sizes) -> list[_Case]:
    vector = (jax.ShapeDtypeStruct((sizes.elements,), jnp.float32),)
    cases = [_product(dtype, n) for dtype, n in sizes.products.items()]
    cases += [_attention(width, fused) for width in sizes.heads for fused in (_cudnn, _kernel)]
    cases += [
        _Case(
            name=("functions", name),
            function=_repeated(function, EVALUATIONS),
            shapes=vector,
            amount=EVALUATIONS * sizes.elements,
            # Here no function leaves the numbers that it is defined for, however often repeated.
            between=(0.01, 0.99),
        )
        for name, function in FUNCTIONS.items()
    ]
    rows, inner, outer = sizes.thin
    half = jnp.bfloat16
    thin = jax.ShapeDtypeStruct((rows, inner), half), jax.ShapeDtypeStruct((inner, outer), half)
    tiny = jax.ShapeDtypeStruct((64, 64), half)
    row = jax.ShapeDtypeStruct((rows, inner), half), jax.ShapeDtypeStruct((inner,), half)
    return [
        *cases,
        _Case(
            name=("multiply-adds", ""),
            function=_repeated(lambda x: x * 0.75 + 0.25, MULTIPLY_ADDS),
            shapes=vector,
            # XLA makes two instructions of each: a GPU reaches half of its datasheet at most.
            amount=2 * MULTIPLY_ADDS * sizes.elements,
        ),
        _Case(
            name=("copy", ""),
            function=jnp.negative,
            shapes=(jax.ShapeDtypeStruct((sizes.copied,), jnp.float32),),
            amount=2 * 4 * sizes.copied,
        ),
        _Case(name=("weights", ""), function=jnp.dot, shapes=thin, amount=2 * inner * outer),
        _Case(name=("launches", ""), function=_chain, shapes=(tiny, tiny), amount=CHAIN),
        _Case(
            name=("pallas launches", ""),
            function=_norms,
            shapes=row,
            amount=CHAIN,
            optional=True,
        ),
    ]


def _product(dtype: str, size: int) -> _Case:
    whole = jnp.issubdtype(dtype, jnp.integer)
    wide = jnp.int32 if whole else jnp.float32 if dtype == "float32" else jnp.bfloat16
    operand = jax.ShapeDtypeStruct((size, size), jnp.dtype(dtype))
    contracted = ((1,), (1 if dtype in NARROW else 0,)), ((), ())
    return _Case(
        name=("products", dtype),
        function=lambda a, b: lax.dot_general(a, b, contracted, preferred_element_type=wide),
        shapes=(operand, operand),
        amount=2 * size**3,
        optional=dtype not in ("bfloat16", "float32"),
    )


def _cudnn(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _kernel(q: Array, k: Array, v: Array) -> Array:
    return attention(q, k, v, implementation="mosaic_gpu")


def _attention(width: int, fused: Callable[..., Array]) -> _Case:
    rows, tokens, heads = ATTENTION
    operand = jax.ShapeDtypeStruct((rows, tokens, heads, width), jnp.bfloat16)
    return _Case(
        name=("attention", str(width)),
        function=fused,
        shapes=(operand,) * 3,
        amount=4 * rows * heads * tokens**2 * width,
        optional=True,
    )


def _repeated(function: Callable[[Array], Array], times: int) -> Callable[[Array], Array]:
    """The function of its own result, over and over: a compiler keeps it in registers."""

    def run(x: Array) -> Array:
        for _ in range(times):
            x = function(x)
        return x

    return run


def _chain(x: Array, y: Array) -> Array:
    """Small products, each of the one before: no compiler makes one kernel of them."""
    for _ in range(CHAIN):
        x = jnp.dot(x, y)
    return x


def _norms(x: Array, scale: Array) -> Array:
    """Norms of a few rows by our kernel, each of the one before."""
    for _ in range(CHAIN):
        x = rms_norm(x, scale, eps=1e-5, implementation="mosaic_gpu")
    return x


def _compiled(case: _Case) -> Callable[..., Array] | None:
    try:
        return jax.jit(case.function).lower(*case.shapes).compile()
    except Exception as error:  # a compiler may raise anything
        if case.optional:
            return None
        reason = str(error).strip().split("\n")[0]
        raise DeviceError(
            f"calibrate: {'/'.join(case.name)} does not compile: {reason}; a device that runs JAX "
            "programs is needed; check the installation of jax"
        ) from error


def _operands(case: _Case) -> list[Array]:
    """Random numbers: zeros need less power, and finish sooner."""
    keys = jax.random.split(jax.random.key(0), len(case.shapes))
    return [_random(*pair, case.between) for pair in zip(keys, case.shapes, strict=True)]


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: Array, shape: jax.ShapeDtypeStruct, between: tuple[float, float] | None) -> Array:
    if between is not None:
        return jax.random.uniform(key, shape.shape, jnp.float32, *between).astype(shape.dtype)
    numbers = jax.random.normal(key, shape.shape, jnp.float32)
    if jnp.issubdtype(shape.dtype, jnp.integer):  # the largest of many is four deviations away
        numbers = jnp.clip(jnp.round(32 * numbers), -127, 127)
    return numbers.astype(shape.dtype)


def _sustained(program: Callable[..., Array], args: Sequence[Array], seconds: float) -> float:
    """Seconds of a call, the median over the second half of a while."""
    jax.block_until_ready(program(*args))
    calls, start = 0, time.perf_counter()
    while calls < 2 or time.perf_counter() - start < 0.02:
        jax.block_until_ready(program(*args))
        calls += 1
    each = max(1, calls // 2)
    samples, end = [], time.perf_counter() + seconds
    while len(samples) < 6 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(each - 1):
            program(*args)
        jax.block_until_ready(program(*args))
        samples.append((time.perf_counter() - begin) / each)
    return statistics.median(samples[len(samples) // 2 :])


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
