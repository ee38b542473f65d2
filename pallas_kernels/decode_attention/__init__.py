"""Decode attention: a few query tokens against a contiguous or paged KV cache."""

from pallas_kernels.decode_attention.api import decode_attention as decode_attention
from pallas_kernels.decode_attention.reference import (
    decode_attention_reference as decode_attention_reference,
)
