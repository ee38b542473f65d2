"""The kernels that can share a launch, and the launch made from the calls of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.corun.api import gemm_beside_decode_attention
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gated_gemm, gemm

# Work items of a memory kernel that give every SM of a Hopper GPU one, nearly.
ITEMS_OF_A_PART = 128

HOSTS = ("gemm", "gated_gemm")
GUESTS = ("decode_attention",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a public kernel function.

    Attributes:
      name: The name of the function.
      arguments: The arguments by name: arrays, or only their shapes for counting parts.
    """

    name: str
    arguments: Mapping[str, Any]


def num_parts(memory: Call) -> int:
    """Parts of nearly equal work that a memory kernel can be divided into."""
    return -(-memory.arguments["q"].shape[0] // _sequences_of_a_part(memory))


def _sequences_of_a_part(memory: Call) -> int:
    """Enough sequences to keep all SMs busy with a key-value head each; fewer of a small batch."""
    batch_size, num_kv_heads = memory.arguments["q"].shape[0], memory.arguments["k"].shape[2]
    return max(1, min(ITEMS_OF_A_PART // num_kv_heads, batch_size // 8))


def part(memory: Call, first: int, count: int) -> Array:
    """Parts first .. first + count - 1 of a memory kernel, by itself."""
    return decode_attention(**_part(memory, first, count))


def join(parts: Sequence[Array]) -> Array:
    """A memory kernel's result from those of all its parts in order."""
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _part(memory: Call, first: int, count: int) -> dict[str, Any]:
    """The arguments of a part: few queries, and all of the cache."""
    given, unit = dict(memory.arguments), _sequences_of_a_part(memory)
    batch_size = given["q"].shape[0]
    start, stop = first * unit, min((first + count) * unit, batch_size)
    rows = slice(start, stop)
    given |= {name: given[name][rows] for name in ("q", "lengths")}
    if given["page_table"] is not None:
        return given | {"page_table": given["page_table"][rows]}
    return given | {"first_sequence": given["first_sequence"] + start}


def beside(compute: Call, memory: Call, first: int, count: int) -> tuple[Any, Array]:
    """A compute kernel and parts of a memory kernel.

    They are one launch, unless the cache is paged or the scores are capped.
    """
    if memory.arguments["page_table"] is not None or memory.arguments["softcap"] is not None:
        compute_kernels = {"gemm": gemm, "gated_gemm": gated_gemm}
        return compute_kernels[compute.name](**compute.arguments), part(memory, first, count)
    given = _part(memory, first, count)
    given["attention_scale"] = given.pop("scale")
    del given["page_table"], given["softcap"]
    both = gemm_beside_decode_attention(**compute.arguments, **given)
    return both.product, both.attended
