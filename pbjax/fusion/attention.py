"""Attention: the product of a softmax with values, whose scores are a product of queries and keys.

It is read backwards from the result: out = weights v, weights = exp(z) / sum(exp(z)), z = a sum of
one product q k^T, which may be capped by a tanh, and of biases, with masks anywhere between. Terms
that all keys of a query share, such as the subtracted maximum, are dropped: they do not change a
softmax. `heads` hands the operands to the kernel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pbjax.fusion.axes import Axes, Axis, Layout, contract, labels_of
from pbjax.fusion.heads import Side, attention_match
from pbjax.fusion.masks import NEVER, Part, Term
from pbjax.fusion.reading import Reading
from pbjax.fusion.rewriting import Match, Mismatch
from pbjax.graph.trace import Atom

# The most operations between the product and the softmax that a near miss is reported for.
NEAR = 6


@dataclass(slots=True)
class Scores:
    """The arguments of a softmax: products and biases, and masks."""

    terms: list[Term] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Softmax:
    """exp(factor * scores) over its sum: the scores, their layout, the labels of the sum."""

    scores: Atom
    layout: Layout
    factor: float
    keys: Axis


def find_attention(reading: Reading, value: int) -> Match | None:
    """Matches a value that is attention's result, or a transposition or reshape of it.

    Raises:
      Mismatch: It is an attention that the kernel does not compute.
    """
    axes = Axes(reading)
    layout = axes.label(reading.shape(value))
    core, at = axes.pull(value, layout, narrowing=True)
    operation = reading.maker(core)
    if operation is None or operation.primitive != "dot_general":
        return None
    if set(axes.cut(labels_of(layout))) != set(labels_of(at)):
        return None  # A broadcast of it.
    sides = list(zip(operation.inputs, contract(axes, operation, at), strict=True))
    for (weights, weights_at), (values, values_at) in (sides, sides[::-1]):
        softmax = _softmax(axes, weights, weights_at)
        if softmax is None:
            continue
        scores = Scores()
        _collect(axes, softmax.scores, softmax.layout, softmax.factor, softmax.keys, scores)
        product = _product(reading, scores)
        if product is None:
            continue
        keys = axes.cut(softmax.keys)
        _check_sums(axes, keys, (weights_at, values_at), at)
        q, k, scale = _queries_and_keys(axes, product, keys)
        softcap = None if product.cap is None else abs(product.cap)
        biases = [term for term in scores.terms if term is not product]
        _check_masks(reading, [*scores.parts, *biases], product)
        return attention_match(
            axes,
            (value, layout),
            (q, k, Side(*axes.pull(values, values_at))),
            (scores.parts, biases),
            keys=keys,
            scale=scale,
            softcap=softcap,
            anchor=reading.position(product.value),
        )
    return None


def _softmax(axes: Axes, weights: Atom, layout: Layout) -> _Softmax | None:
    reading = axes.reading
    weights, layout = axes.pull(weights, layout, narrowing=True)
    product = reading.product(weights)
    powers = {(reading.primitive(v), power): v for v, power in product.powers.items()}
    total = powers.pop(("reduce_sum", -1.0), None)
    if total is None or len(product.powers) != 2 or product.coefficient != 1:
        return None
    ((name, power), top) = powers.popitem()
    if name not in ("exp", "exp2") or power != 1.0:
        return None
    summing = reading.operation(total)
    if reading.uncast(summing.inputs[0]) != top or reading.shape(top) != reading.shape(weights):
        return None
    return _Softmax(
        scores=reading.operation(top).inputs[0],
        layout=layout,
        factor=math.log(2.0) if name == "exp2" else 1.0,
        keys=labels_of([layout[int(i)] for i in summing.params["axes"]]),
    )


def _collect(axes, atom: Atom, layout: Layout, factor: float, keys: Axis, scores: Scores) -> None:
    """Adds the terms and masks of factor * atom, without those that all keys of a query share."""
    reading = axes.reading
    shared = reading.scalar(atom) is not None
    atom, layout = axes.pull(atom, axes.current(layout), narrowing=True)
    if shared or not set(labels_of(layout)) & set(axes.cut(keys)):
        return

    def go_on(inner: Atom, by: float = 1.0) -> None:
        _collect(axes, inner, axes.aligned(layout, inner), factor * by, keys, scores)

    operation = reading.maker(atom)
    inputs: Sequence[Atom] = operation.inputs if operation is not None else ()
    numbers = [reading.scalar(a) for a in inputs]
    hidden = _hidden_case(numbers, factor)
    match reading.primitive(atom):
        case "add" | "add_any" | "sub" as name if numbers == [None, None]:
            go_on(inputs[0])
            go_on(inputs[1], -1.0 if name == "sub" else 1.0)
        case "neg":
            go_on(inputs[0], -1.0)
        case "mul" | "div" as name if numbers[1]:
            go_on(inputs[0], numbers[1] if name == "mul" else 1 / numbers[1])
        case "mul" if numbers[0]:
            go_on(inputs[1], numbers[0])
        case "tanh" if (inner := _uncapped(axes, inputs[0], layout, factor)) is not None:
            scores.terms.append(inner)
        case "select_n" if hidden is not None:
            at = axes.aligned(layout, inputs[0])
            scores.parts.append(Part(value=inputs[0], layout=at, visible=hidden == 0))
            go_on(inputs[2 - hidden])
        case _:
            scores.terms.append(Term(value=atom, layout=layout, factor=factor))


def _uncapped(axes: Axes, atom: Atom, layout: Layout, cap: float) -> Term | None:
    """The product of queries and keys in cap * tanh(factor / cap * product), and nothing else.

    Terms that all keys of a query share change a tanh, unlike a softmax.
    """
    inner, by = _unscaled(axes, atom, axes.aligned(layout, atom), narrowing=True)
    if not _is_product(axes.reading, inner.value):
        return None
    return Term(value=inner.value, layout=inner.layout, factor=cap * by, cap=cap)


def _hidden_case(numbers: Sequence[float | None], factor: float) -> int | None:
    """The case of a select that hides a key; None if none does."""
    cases = numbers[1:] if len(numbers) == 3 else ()
    for case, number in enumerate(cases):
        if number is not None and number * factor <= NEVER:
            return case
    return None


def _product(reading: Reading, scores: Scores) -> Term | None:
    """The term that is the product of queries and keys.

    Raises:
      Mismatch: There is one, but with an operation after it that is no scale, bias or mask.
    """
    for term in scores.terms:
        if _is_product(reading, term.value):
            return term
    for term in scores.terms:
        if _is_near_product(reading, term.value):
            raise Mismatch(f"the scores go through {reading.description(term.value)}")
    return None


def _is_product(reading: Reading, atom: Atom) -> bool:
    operation = reading.maker(atom)
    if operation is None or operation.primitive != "dot_general":
        return False
    return all(reading.is_float(a) and not reading.is_weight(a) for a in operation.inputs)


def _is_near_product(reading: Reading, atom: Atom) -> bool:
    for _ in range(NEAR):
        operation = reading.maker(reading.core(atom))
        inputs = [a for a in (operation.inputs if operation else ()) if _is_data(reading, a)]
        if not inputs:
            return False
        atom = reading.core(inputs[0])
        if _is_product(reading, atom):
            return True
    return False


def _is_data(reading: Reading, atom: Atom) -> bool:
    """Whether a value may be scores: no weight, no number such as a cap, no mask."""
    return reading.is_float(atom) and not reading.is_weight(atom) and reading.scalar(atom) is None


def _check_sums(axes: Axes, keys: Axis, sides: Sequence[Layout], out: Layout) -> None:
    kept = set(axes.cut(labels_of(out)))
    if any(set(axes.cut(labels_of(side))) - kept != set(keys) for side in sides):
        raise Mismatch("the softmax runs over another axis than the product with the values")


def _check_masks(reading: Reading, masks: Sequence[Part | Term], product: Term) -> None:
    for x in masks:
        if isinstance(product.value, int) and reading.depends(x.value, product.value):
            what = "mask" if isinstance(x, Part) else "bias"
            by = reading.description(x.value)
            raise Mismatch(f"the {what} is a function of the scores, by {by}")


def _queries_and_keys(axes: Axes, product: Term, keys: Axis) -> tuple[Side, Side, float]:
    """Queries and keys before they were scaled, and the scale.

    Raises:
      Mismatch: The scale is not a positive number.
    """
    operation = axes.reading.operation(product.value)
    sides = list(zip(operation.inputs, contract(axes, operation, product.layout), strict=True))
    if set(axes.cut(labels_of(sides[0][1]))) & set(keys):
        sides.reverse()
    (q, by_q), (k, by_k) = (_unscaled(axes, *side) for side in sides)
    scale = product.factor * by_q * by_k
    if not (math.isfinite(scale) and scale > 0):
        raise Mismatch(f"its scale is {scale}; the kernel takes positive ones")
    return q, k, scale


def _unscaled(
    axes: Axes, atom: Atom, layout: Layout, *, narrowing: bool = False
) -> tuple[Side, float]:
    reading, factor = axes.reading, 1.0
    while True:
        atom, layout = axes.pull(atom, layout, narrowing=narrowing)
        name = reading.primitive(atom)
        if name not in ("mul", "div"):
            return Side(atom, layout), factor
        a, b = reading.operation(atom).inputs
        by_a, by_b = reading.scalar(a), reading.scalar(b)
        if by_b:
            atom, factor = a, factor * (by_b if name == "mul" else 1 / by_b)
        elif by_a and name == "mul":
            atom, factor = b, factor * by_a
        else:
            return Side(atom, layout), factor
