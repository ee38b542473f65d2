"""Hands the operands of an attention to the kernel, after finding the role of each axis.

The kernel has a batch, heads of keys, heads of queries that share one, positions of queries and of
keys, and features. The operands that have a label give its role: queries, keys and values share
batch and heads; keys and values alone share their positions; the other labels of the queries are
their positions, and heads that share keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import attention
from pallas_kernels.decode_attention import decode_attention
from pbjax.fusion.axes import Axes, Axis, Layout, labels_of
from pbjax.fusion.masks import (
    Part,
    Term,
    VisibleKeys,
    by_key,
    full_bias,
    key_bias,
    read_keys,
    read_slopes,
)
from pbjax.fusion.rewriting import Match, Mismatch, Operand, match, named, operand
from pbjax.graph.trace import Atom


class Side(NamedTuple):
    """A value and its layout."""

    value: Atom
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Labels by their role: batch, key heads, query heads that share one, positions, features."""

    batch: Axis
    kv_heads: Axis
    group: Axis
    queries: Axis
    keys: Axis
    features: Axis

    @property
    def heads(self) -> Axis:
        """All heads of the queries: those that share a head of keys lie together."""
        return (*self.kv_heads, *self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionCall:
    """A call of the kernel, with its operands and options."""

    axes: Axes
    out: tuple[int, Layout]
    qkv: tuple[Side, Side, Side]
    heads: Heads
    keys: VisibleKeys
    scale: float
    softcap: float | None
    slopes: np.ndarray | None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the kernel's operands and result."""
        dtypes = (self.axes.reading.dtype(side.value) for side in self.qkv)
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def by_key(self) -> tuple[bool, ...]:
        """Whether each bias or mask goes into a number for each key."""
        return by_key(self.axes, self.keys, self.heads.batch, self.heads.keys)

    @property
    def decodes(self) -> bool:
        """Whether it is one token for each sequence over a cache."""
        keys, axes = self.keys, self.axes
        plain = not (keys.causal or keys.remaining or self.slopes is not None)
        return plain and keys.lengths is not None and axes.size(self.heads.queries) == 1

    @property
    def name(self) -> str:
        """The kernel's name with the options in use."""
        keys, heads = self.keys, self.heads
        parts: dict[str | None, object] = {
            "causal": keys.causal,
            "window": keys.window,
            "lengths": keys.lengths,
            "grouped": bool(heads.group and heads.kv_heads),
            "softcap": self.softcap is not None,
            "alibi": self.slopes,
            "bias": not all(self.by_key),
            "key_bias": any(self.by_key),
        }
        return named("decode_attention" if self.decodes else "attention", parts)

    @property
    def operands(self) -> list[Operand]:
        """The operands of the call: queries, keys, values, lengths, biases, masks."""
        found = [operand(side.value) for side in self.qkv]
        if self.keys.lengths is not None:
            spread = float(max(self.axes.size(self.heads.keys) - 1, 1))
            found.append(operand(self.keys.lengths[0], spread))
        return found + [operand(x.value) for x in self.keys.remaining]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array]:
        """Runs the kernel on the operands and arranges its result in the program's layout."""
        axes, heads, keys = self.axes, self.heads, self.keys
        reading = axes.reading
        dtype = self.dtype
        of_keys = (heads.batch, heads.keys, heads.kv_heads)
        of_queries = (heads.batch, heads.queries, heads.heads)
        over = axes.cut(tuple(i for i in labels_of(self.qkv[0].layout) if i in self._summed()))
        wanted = ((*of_queries, over), (*of_keys, over), (*of_keys, heads.features))
        q, k, v = (
            axes.arrange(x, side.layout, layout).astype(dtype)
            for x, side, layout in zip(arrays, self.qkv, wanted, strict=False)
        )
        others, lengths = list(arrays[3:]), None
        if keys.lengths is not None:
            _, layout, more = keys.lengths
            lengths = axes.arrange(others.pop(0), layout, (heads.batch,)).astype(jnp.int32) + more
        if lengths is not None and self.decodes:
            out = decode_attention(q, k, v, lengths, scale=self.scale, softcap=self.softcap)
        else:
            bias, key_numbers = self._biases(others)
            out = attention(
                q,
                k,
                v,
                causal=keys.causal,
                window=keys.window,
                lengths=lengths,
                query_starts=jnp.full(len(q), keys.start, jnp.int32) if keys.start else None,
                alibi_slopes=None if self.slopes is None else jnp.asarray(self.slopes),
                scale=self.scale,
                softcap=self.softcap,
                bias=bias,
                key_bias=key_numbers,
            )
        out = axes.arrange(out, (*of_queries, heads.features), self.out[1])
        return (out.astype(reading.dtype(self.out[0])),)

    def _biases(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array | None, jax.Array | None]:
        """The remaining masks and biases: those of full size, and those for each key."""
        axes, heads, full, of_keys = self.axes, self.heads, None, None
        given = list(zip(self.by_key, self.keys.remaining, arrays, strict=True))
        if not all(self.by_key):
            scores = (heads.batch, heads.heads, heads.queries, heads.keys)
            others = [(x, array) for alone, x, array in given if not alone]
            full = full_bias(axes, others, scores, self.dtype)
        if any(self.by_key):
            alone = [(x, array) for alone, x, array in given if alone]
            of_keys = key_bias(axes, alone, (heads.batch, heads.keys))
        return full, of_keys

    def _summed(self) -> set[int]:
        q, k = (set(self.axes.cut(labels_of(side.layout))) for side in self.qkv[:2])
        return (q & k) - {*self.heads.batch, *self.heads.kv_heads}


def attention_match(
    axes: Axes,
    out: tuple[int, Layout],
    qkv: tuple[Side, Side, Side],
    masks: tuple[Sequence[Part], Sequence[Term]],
    *,
    keys: Axis,
    scale: float,
    softcap: float | None,
    anchor: int,
) -> Match:
    """Makes the match of an attention.

    Args:
      axes: The labels of the match.
      out: The result.
      qkv: Queries, keys and values.
      masks: Masks and biases.
      keys: The labels of the keys' positions.
      scale: Scale of the scores.
      softcap: Bound of the scaled scores; None if there is none.
      anchor: Position of the product of queries and keys.

    Raises:
      Mismatch: The kernel cannot compute it, or a value in between is read elsewhere.
    """
    shared = labels_of((*qkv[1].layout, *qkv[2].layout))
    seen = read_keys(axes, *masks, keys, shared)
    q, k, v = (Side(side.value, axes.current(side.layout)) for side in qkv)
    heads = _sorted(axes, out[1], (q, k, v), seen, axes.cut(keys))
    slopes = _take_slopes(axes, seen, heads)
    call = _AttentionCall(
        axes=axes,
        out=out,
        qkv=(q, k, v),
        heads=heads,
        keys=seen,
        scale=scale,
        softcap=softcap,
        slopes=slopes,
    )
    return match(
        axes.reading,
        "attention",
        call.name,
        anchors=[anchor],
        operands=call.operands,
        outputs=out[:1],
        gives=call.dtype,
        function=lambda *arrays: call(*arrays),
    )


def _sorted(axes: Axes, out: Layout, qkv: Sequence[Side], seen: VisibleKeys, keys: Axis) -> Heads:
    in_q, in_k, in_v = (labels_of(side.layout) for side in qkv)
    in_out = axes.cut(labels_of(out))
    over = [i for i in in_q if i not in in_out]
    features = tuple(i for i in in_out if i in in_v and i not in in_q and i not in in_k)
    if axes.size(tuple(over)) != axes.size(features):
        raise Mismatch(
            f"queries have heads of {axes.size(tuple(over))} features, values of "
            f"{axes.size(features)}; the kernel takes one size"
        )
    rows = [i for i in dict.fromkeys((*in_q, *in_out)) if i not in (*over, *features)]
    shared = [i for i in rows if i in in_k or i in in_v]
    free = [i for i in rows if i not in shared]
    queries = _query_labels(axes, qkv[0], seen, free, shared)
    batch = tuple(shared[:-1] or shared)
    if seen.lengths is not None:
        batch = axes.cut(labels_of(seen.lengths[1])) or batch
        if not set(batch) <= set(shared):
            raise Mismatch("the number of keys differs between the queries of a sequence")
    return Heads(
        batch=batch,
        kv_heads=tuple(i for i in shared if i not in batch),
        group=tuple(i for i in free if i not in queries),
        queries=queries,
        keys=keys,
        features=features,
    )


def _query_labels(axes: Axes, q: Side, seen: VisibleKeys, free: Sequence[int], shared) -> Axis:
    """The label of the query positions among those that keys and values do not have.

    The others are heads that share keys. Without a mask that decides, a label counts as a head if
    it is or was in one axis with the heads of the keys. To confuse the two is no error, since both
    only count queries.
    """
    if seen.queries is not None:
        return axes.cut((seen.queries,))

    def is_head(label: int) -> bool:
        together = any(label in axis and set(axis) & set(shared) for axis in q.layout)
        return together or any(axes.siblings(label, i) for i in shared)

    return tuple([i for i in free if not is_head(i)][:1])


def _take_slopes(axes: Axes, seen: VisibleKeys, heads: Heads) -> np.ndarray | None:
    """ALiBi's slopes, if one of the biases is ALiBi; removes that bias."""
    order = (heads.heads, heads.queries, heads.keys)
    for term in () if seen.start else tuple(seen.terms):
        slopes = read_slopes(axes, term, order, causal=seen.causal)
        if slopes is not None:
            seen.terms.remove(term)
            return slopes.astype(np.float32)
    return None
