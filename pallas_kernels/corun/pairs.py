"""Which kernels can share a launch, and the launch made from the calls of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gated_gemm, gemm

HOSTS = ("gemm", "gated_gemm")
GUESTS = ("decode_attention",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a public kernel function.

    Attributes:
      name: Of the function.
      arguments: By their names; arrays, or only their shapes where parts are counted.
    """

    name: str
    arguments: Mapping[str, Any]


def num_parts(guest: Call) -> int:
    """Into how many parts of equal work a guest can be divided: its sequences."""
    return guest.arguments["q"].shape[0]


def part(guest: Call, first: int, count: int) -> Array:
    """Parts first .. first + count - 1 of a guest, by itself."""
    return decode_attention(**_part(guest, first, count))


def join(parts: Sequence[Array]) -> Array:
    """A guest's result from those of all its parts in order."""
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _part(guest: Call, first: int, count: int) -> dict[str, Any]:
    """The arguments of a part: few queries, and all of the cache."""
    given = dict(guest.arguments)
    rows = slice(first, first + count)
    given |= {name: given[name][rows] for name in ("q", "lengths")}
    if given["page_table"] is not None:
        return given | {"page_table": given["page_table"][rows]}
    return given | {"first_sequence": given["first_sequence"] + first}


def beside(host: Call, guest: Call, first: int, count: int) -> tuple[Any, Array]:
    """A host, and parts of a guest."""
    return {"gemm": gemm, "gated_gemm": gated_gemm}[host.name](**host.arguments), part(
        guest, first, count
    )
