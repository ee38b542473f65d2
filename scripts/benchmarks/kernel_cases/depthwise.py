"""Depthwise convolutions of Conformers with BatchNorm and SiLU, against matrix products by XLA."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.depthwise import depthwise_convolution, depthwise_convolution_reference
from pallas_kernels.depthwise.shapes import MODELS, RAGGED, DepthwiseShape

from . import Case


def cases() -> list[Case]:
    """Models on all SMs and Conformer-L on half of them, and ragged shapes in both dtypes."""
    found = [_case(shape, "bfloat16", None, timed=True) for shape in MODELS]
    found.append(_case(MODELS[0], "bfloat16", 66, timed=True))
    for dtype in ("bfloat16", "float16"):
        found += [_case(shape, dtype, 7, timed=False) for shape in RAGGED]
    return found


def _case(shape: DepthwiseShape, dtype: str, sm_budget: int | None, *, timed: bool) -> Case:
    def call(f, **extra):
        return functools.partial(f, activation=shape.activation, **extra)

    values = shape.batch_size * shape.length * shape.features
    opponents = {}
    if timed:
        opponents = {
            "xla": call(depthwise_convolution, implementation="xla"),
            "cudnn": functools.partial(_cudnn, shape),
        }
    return Case(
        kernel="depthwise",
        name=shape.name if sm_budget is None else f"{shape.name}, {sm_budget} SMs",
        dtype=dtype,
        make=functools.partial(_make, shape, dtype),
        run=call(depthwise_convolution, implementation="mosaic_gpu", sm_budget=sm_budget),
        reference=call(depthwise_convolution_reference),
        close=({"reduction": shape.width},),
        opponents=opponents,
        flops=2 * shape.width * values if timed else 0,
        num_bytes=4 * values,
    )


def _cudnn(shape: DepthwiseShape, x, kernel, offset):
    """The library's convolution, and what follows it as XLA fuses it."""
    before = (shape.width - 1) // 2
    y = jax.lax.conv_general_dilated(
        x,
        kernel[:, None].astype(x.dtype),
        window_strides=(1,),
        padding=[(before, shape.width - 1 - before)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=shape.features,
    )
    return jax.nn.silu(y.astype(jnp.float32) + offset[None, None]).astype(x.dtype)


def _make(shape: DepthwiseShape, dtype: str, key):
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (shape.batch_size, shape.length, shape.features), dtype)
    kernel = jax.random.normal(keys[1], (shape.width, shape.features)) * shape.width**-0.5
    offset = jax.random.normal(keys[2], (shape.features,)) if shape.offset else None
    return x, kernel, offset
