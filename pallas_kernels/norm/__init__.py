"""LayerNorm and RMSNorm, with a residual added in and the sum out, and quantised results."""

from pallas_kernels.norm.api import (
    AddNorm,
    QuantizedNorm,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    quantized_layer_norm,
    quantized_rms_norm,
    rms_norm,
)

__all__ = [
    "AddNorm",
    "QuantizedNorm",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "quantized_layer_norm",
    "quantized_rms_norm",
    "rms_norm",
]
