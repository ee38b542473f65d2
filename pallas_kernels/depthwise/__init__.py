"""Depthwise convolution over time with what follows it: offset and activation."""

from pallas_kernels.depthwise.api import depthwise_convolution as depthwise_convolution
from pallas_kernels.depthwise.reference import (
    depthwise_convolution_reference as depthwise_convolution_reference,
)
