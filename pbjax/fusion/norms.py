"""LayerNorm and RMSNorm, alone or of a residual sum.

A norm is z / sqrt(variance + eps) * scale + bias. RMSNorm: z is x and the variance mean(x^2).
LayerNorm: z is x - mean(x) and the variance mean(z^2), or mean(x^2) - mean(x)^2 as in Flax.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from pbjax.fusion.reading import Reading
from pbjax.fusion.rewriting import Match, Mismatch, match, operand
from pbjax.graph.trace import Atom

PATTERNS = ("layer_norm", "rms_norm", "add_norm")


def find_norm(reading: Reading, value: int, *, takes_sum: Callable[[int], bool]) -> Match | None:
    """Matches a value that is a norm.

    Args:
      reading: The graph.
      value: The possible result of a norm.
      takes_sum: Whether the norm may also compute the sum that gives a value.

    Returns:
      The match, or None if the value is no norm.

    Raises:
      Mismatch: It is a norm, but its parts are read elsewhere.
    """
    for body, bias in _bodies(reading, value):
        found = _body(reading, body)
        if found is not None:
            return _match(reading, value, *found, bias, takes_sum)
    return None


def _bodies(reading: Reading, value: int) -> list[tuple[Atom, Atom | None]]:
    """The possible normalised and scaled values, each with the bias added to it."""
    operation = reading.maker(reading.uncast(value))
    if operation is None or operation.primitive not in ("add", "sub", "mul", "div"):
        return []
    if len(reading.shape(value)) < 2:
        return []
    if operation.primitive != "add":
        return [(value, None)]
    a, b = operation.inputs
    width = reading.shape(value)[-1:]
    return [(x, y) for x, y in ((a, b), (b, a)) if _is_feature(reading, y, width)]


def _is_feature(reading: Reading, atom: Atom, width: tuple[int, ...]) -> bool:
    """Whether a value is one number for each feature, the same for all rows."""
    shape = reading.shape(reading.core(atom))
    return reading.is_weight(atom) and shape[-1:] == width and math.prod(shape) == width[0]


def _body(reading: Reading, body: Atom):
    """(x, centred, eps, positions of the sums over the features, scale) of a norm without bias."""
    product = reading.product(body)
    roots = [v for v, power in product.powers.items() if power == -0.5]
    if len(roots) != 1 or not math.isclose(product.coefficient, 1.0):
        return None
    width = reading.shape(body)[-1:]
    others = {v: p for v, p in product.powers.items() if v not in roots}
    scales = [v for v in others if _is_feature(reading, v, width)]
    values = [v for v in others if v not in scales]
    if len(scales) > 1 or len(values) != 1 or set(others.values()) != {1.0}:
        return None
    variance = _variance(reading, roots[0], values[0])
    return None if variance is None else (*variance, scales[0] if scales else None)


def _variance(reading: Reading, root: int, z: int) -> tuple[Atom, bool, float, set[int]] | None:
    total = reading.sum(root)
    terms = [t for c, v in total.terms for t in _clipped(reading, c, v)]
    x, mean = _centred(reading, z)
    if len(terms) == 1:
        square = _mean_of(reading, *terms[0])
        if square is None:
            return None
        inner = reading.product(square[0])
        if inner.coefficient != 1.0 or list(inner.powers.values()) != [2.0]:
            return None
        (base,) = inner.powers
        if base == z and mean is None:
            return z, False, total.constant, {square[1]}
        again, second = _centred(reading, base)
        if mean is None or second is None or again != x:
            return None
        return x, True, total.constant, {square[1], mean, second}
    if len(terms) == 2 and mean is not None:
        sums = _fast_variance(reading, terms, x)
        return None if sums is None else (x, True, total.constant, {*sums, mean})
    return None


def _clipped(reading: Reading, coefficient: float, value: int) -> tuple[tuple[float, int], ...]:
    """The terms of max(0, variance), which a model writes against rounding below zero."""
    operation = reading.maker(value)
    if operation is None or operation.primitive != "max":
        return ((coefficient, value),)
    inner = [a for a in operation.inputs if reading.scalar(a) != 0.0]
    if len(inner) != 1:
        return ((coefficient, value),)
    return tuple((coefficient * c, v) for c, v in reading.sum(inner[0]).terms)


def _fast_variance(reading: Reading, terms, x: Atom) -> set[int] | None:
    """Positions of the sums in mean(x^2) - mean(x)^2."""
    found = set()
    for coefficient, value in terms:
        if coefficient > 0:
            square = _mean_of(reading, coefficient, value)
            if square is None or reading.product(square[0]).powers != {x: 2.0}:
                return None
            found.add(square[1])
        else:
            inner = reading.product(value)
            means = list(inner.powers.items())
            if len(means) != 1 or means[0][1] != 2.0 or inner.coefficient * coefficient >= 0:
                return None
            mean = _mean_of(reading, math.sqrt(-inner.coefficient * coefficient), means[0][0])
            if mean is None or reading.uncast(mean[0]) != x:
                return None
            found.add(mean[1])
    return found if len(found) == 2 else None


def _centred(reading: Reading, z: Atom) -> tuple[Atom, int | None]:
    """(x, position of the sum in its mean) if z is x - mean(x); else (z, None)."""
    operation = reading.maker(z)
    if operation is None or operation.primitive not in ("sub", "add"):
        return z, None
    sign = -1.0 if operation.primitive == "sub" else 1.0
    a, b = operation.inputs
    mean = reading.product(b)
    if len(mean.powers) == 1:
        (value,) = mean.powers
        found = _mean_of(reading, -sign * mean.coefficient, value)
        if found is not None and reading.uncast(found[0]) == reading.uncast(a):
            return reading.uncast(a), found[1]
    return z, None


def _mean_of(reading: Reading, coefficient: float, value: int) -> tuple[Atom, int] | None:
    """(Averaged value, position of its sum) if coefficient * value is a mean over the last axis."""
    operation = reading.maker(value)
    if operation is None or operation.primitive != "reduce_sum":
        return None
    (summed,) = operation.inputs
    shape = reading.shape(summed)
    if tuple(operation.params["axes"]) != (len(shape) - 1,):
        return None
    # A narrow dtype has rounded 1/D; 1/(D - 1), of the unbiased variance, must not pass.
    rounding = max(float(jnp.finfo(reading.dtype(value)).eps), 1e-6)
    if not math.isclose(coefficient * shape[-1], 1.0, rel_tol=rounding):
        return None
    return summed, reading.makers[value]


def _match(reading, value, x, centred, eps, sums, scale, bias, takes_sum) -> Match | None:
    x = reading.uncast(x, widened=True)
    shape = reading.shape(value)
    if reading.shape(x) != shape or len(shape) < 2 or reading.is_weight(x) or not eps >= 0:
        return None
    if not reading.is_float(x):
        return None
    kind = "layer_norm" if centred else "rms_norm"
    if not centred and bias is not None:
        reason = "it adds a bias, which the kernel of RMSNorm does not"
        raise Mismatch(reason, pattern="rms_norm")
    dtype = jnp.promote_types(reading.dtype(x), reading.dtype(value))
    features = [operand(reading.core(a)) for a in (scale, bias) if a is not None]
    results = reading.dtype(value)

    def gains(arrays):
        arrays = [a.reshape(-1) for a in arrays]
        if scale is None:
            arrays.insert(0, jnp.ones(shape[-1:], dtype))
        return arrays

    def alone(x, *arrays):
        norm = layer_norm if centred else rms_norm
        return (norm(x.astype(dtype), *gains(arrays), eps=eps).astype(results),)

    def summed(a, b, *arrays):
        norm = add_layer_norm if centred else add_rms_norm
        normed, total = norm(a, b, *gains(arrays), eps=eps)
        return normed.astype(results), total

    parts = _sum_of(reading, x, dtype) if takes_sum(x) else None
    if parts is None:
        return match(
            reading,
            kind,
            kind,
            anchors=sorted(sums),
            operands=[operand(x), *features],
            outputs=(value,),
            function=alone,
        )
    return match(
        reading,
        "add_norm",
        f"add_{kind}",
        anchors=sorted(sums),
        operands=[*(operand(part) for part in parts), *features],
        outputs=(value, x),
        function=summed,
    )


def _sum_of(reading: Reading, x: Atom, dtype) -> tuple[Atom, Atom] | None:
    """The two values whose sum is x, if both are activations of its shape and dtype."""
    operation = reading.maker(x)
    if operation is None or operation.primitive not in ("add", "add_any"):
        return None
    for part in operation.inputs:
        alike = reading.shape(part) == reading.shape(x) and reading.dtype(part) == dtype
        if reading.is_weight(part) or not alike:
            return None
    a, b = operation.inputs
    return (a, b) if reading.dtype(x) == dtype else None
