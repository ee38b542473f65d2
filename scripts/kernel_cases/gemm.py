"""GEMMs of the six models: the product alone, and with the model's epilogue."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels.gemm import gated_gemm, gemm, grouped_gemm, reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.gemm.shapes import GROUPED, RAGGED, SHAPES, GemmShape


def cases() -> list[Case]:
    """Every shape with its epilogue, each product alone, sub-batches, ragged shapes on few SMs."""
    plain = {(s.m, s.k, s.n): s for s in SHAPES if not s.gated}
    products = [
        GemmShape(name=f"{s.name}, product alone", m=s.m, k=s.k, n=s.n) for s in plain.values()
    ]
    found = [_case(shape, "bfloat16", None) for shape in [*products, *SHAPES]]
    found += [_grouped(ms, shape) for ms, shape in GROUPED]
    for shape in RAGGED:
        found += [_case(shape, "bfloat16", 50), _case(shape, "float16", 1)]
    return found


def _case(shape: GemmShape, dtype: str, sm_budget: int | None) -> Case:
    options = {"activation": shape.activation}
    names = ["x", "w_gate", "w"] if shape.gated else ["x", "w"]
    if not shape.gated:
        options["scale"] = shape.scale
        names += ["bias"] * shape.bias + ["residual"] * shape.residual
    function, truth = (gated_gemm, reference.gated_gemm) if shape.gated else (gemm, reference.gemm)

    def call(f, extra):
        return lambda *inputs: f(**dict(zip(names, inputs, strict=True)), **options, **extra)

    small = sm_budget is not None
    weights = 2 if shape.gated else 1
    moved = shape.m * (shape.k + shape.n * (1 + shape.residual)) + weights * shape.k * shape.n
    return Case(
        kernel="gemm",
        name=f"{shape.name}, {sm_budget} SMs" if small else shape.name,
        dtype=dtype,
        make=functools.partial(_make, shape, tuple(names), dtype),
        run=call(function, {"implementation": "mosaic_gpu", "sm_budget": sm_budget}),
        reference=call(truth, {}),
        close=({"reduction": shape.k, "function_error": GELU_ERROR},),
        opponents={} if small else {"cublaslt": call(function, {"implementation": "xla"})},
        flops=2 * weights * shape.m * shape.k * shape.n,
        num_bytes=2 * moved,
    )


def _grouped(ms: tuple[int, ...], shape: GemmShape) -> Case:
    """Sub-batches in one launch against a launch, or a library call, for each."""
    shared = 1 + shape.bias
    options = {"activation": shape.activation, "scale": shape.scale}

    def given(arrays):
        w, *bias = arrays[:shared]
        rows = arrays[shared:]
        xs, residuals = rows[: len(ms)], rows[len(ms) :]
        return xs, w, bias[0] if bias else None, residuals or None

    def together(*arrays):
        xs, w, bias, residuals = given(arrays)
        sub_batches = {"bias": bias, "residuals": residuals, **options}
        return grouped_gemm(xs, w, **sub_batches, implementation="mosaic_gpu")

    def apart(function, *arrays):
        xs, w, bias, residuals = given(arrays)
        added = residuals or [None] * len(xs)
        return [
            function(x, w, bias=bias, residual=r, **options) for x, r in zip(xs, added, strict=True)
        ]

    def make(key):
        shapes = [(shape.k, shape.n), *([(shape.n,)] * shape.bias)]
        shapes += [(m, shape.k) for m in ms]
        shapes += [(m, shape.n) for m in ms] if shape.residual else []
        keys = jax.random.split(key, len(shapes))
        arrays = [jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=True)]
        arrays[0] *= shape.k**-0.5
        return tuple(a.astype("bfloat16") for a in arrays)

    moved = shape.m * (shape.k + shape.n * (1 + shape.residual)) + shape.k * shape.n
    by = {name: functools.partial(gemm, implementation=name) for name in ("mosaic_gpu", "xla")}
    return Case(
        kernel="gemm",
        name=f"{shape.name} as {len(ms)} sub-batches",
        dtype="bfloat16",
        make=make,
        run=together,
        reference=functools.partial(apart, reference.gemm),
        close=({"reduction": shape.k, "function_error": GELU_ERROR},) * len(ms),
        opponents={
            "cublaslt, one each": functools.partial(apart, by["xla"]),
            "our gemm, one each": functools.partial(apart, by["mosaic_gpu"]),
        },
        flops=2 * shape.m * shape.k * shape.n,
        num_bytes=2 * moved,
    )


def _make(shape: GemmShape, names, dtype, key):
    shapes = {
        "x": (shape.m, shape.k),
        "w": (shape.k, shape.n),
        "w_gate": (shape.k, shape.n),
        "bias": (shape.n,),
        "residual": (shape.m, shape.n),
    }
    scales = {"w": shape.k**-0.5, "w_gate": 2 * shape.k**-0.5}
    keys = jax.random.split(key, len(names))
    return tuple(
        (jax.random.normal(k, shapes[name], jnp.float32) * scales.get(name, 1.0)).astype(dtype)
        for k, name in zip(keys, names, strict=True)
    )
