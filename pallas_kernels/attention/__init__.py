"""Attention forward: lengths, causal, windows, grouped heads, ALiBi and additive bias."""

from pallas_kernels.attention.api import attention as attention
from pallas_kernels.attention.reference import attention_reference as attention_reference
