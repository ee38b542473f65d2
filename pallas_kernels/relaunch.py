"""New launches of traced kernels, for an SM budget that is decided after tracing.

A traced kernel holds its original launch, with grid and tile. Its operation also holds the
arguments of the public function, which can be called again.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array

from pallas_kernels.attention import attention
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.depthwise import depthwise_convolution
from pallas_kernels.gemm import gated_gemm, gemm, gemm_for_norm, normed_gemm
from pallas_kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from pallas_kernels.operation import arguments_of

_FUNCTIONS = {
    function.__name__: function
    for function in (
        attention,
        decode_attention,
        depthwise_convolution,
        gated_gemm,
        gemm,
        gemm_for_norm,
        normed_gemm,
        add_layer_norm,
        add_rms_norm,
        layer_norm,
        rms_norm,
    )
}


def can_relaunch(params: Mapping[str, Any]) -> bool:
    """Whether a kernel operation with these parameters can be launched anew.

    Quantised norms, products of several inputs and kernels under `vmap` cannot; they run with their
    original launch.
    """
    return params["name"] in _FUNCTIONS and bool(params["arguments"])


def relaunch(params: Mapping[str, Any], operands: Sequence[Array]) -> list[Array]:
    """Returns the results of a kernel operation by a new launch.

    The launch respects `dispatch.default_sm_budget` like any call, and chooses its tile anew.

    Args:
      params: The parameters of the operation; `can_relaunch` holds for them.
      operands: The operands of the operation.
    """
    function = _FUNCTIONS[params["name"]]
    given = arguments_of(params, operands)
    taken = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    results = jax.tree.leaves(function(**taken))
    shapes = (aval.shape for aval in params["plain"].out_avals)
    return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]
