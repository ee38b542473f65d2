"""Attention forward: lengths, packing, causal, windows, grouped heads, ALiBi, additive bias."""

from pallas_kernels.attention.api import attention as attention
from pallas_kernels.attention.api import attention_packed as attention_packed
from pallas_kernels.attention.reference import (
    attention_packed_reference as attention_packed_reference,
)
from pallas_kernels.attention.reference import attention_reference as attention_reference
