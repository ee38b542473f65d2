"""GEMMs of the six models: the product alone, and with the model's epilogue."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels.gemm import gated_gemm, gemm, reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.gemm.shapes import RAGGED, SHAPES, GemmShape


def cases() -> list[Case]:
    """Every shape with its epilogue, each product alone, and ragged shapes on few SMs."""
    plain = {(s.m, s.k, s.n): s for s in SHAPES if not s.gated}
    products = [
        GemmShape(name=f"{s.name}, product alone", m=s.m, k=s.k, n=s.n) for s in plain.values()
    ]
    found = [_case(shape, "bfloat16", None) for shape in [*products, *SHAPES]]
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
