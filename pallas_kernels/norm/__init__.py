"""LayerNorm and RMSNorm, with a residual added in and the sum out."""

from pallas_kernels.norm.api import AddNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["AddNorm", "add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
