"""Products with a weight and their epilogues: bias, activation, scale, residual; gated pairs.

They are read backwards from the result, where each step may be absent:
residual + scale * activation(x @ w + bias).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
from jax.extend.core import Literal

from pallas_kernels.gemm import gated_gemm, gemm
from pbjax.fusion.activations import cones, recognised
from pbjax.fusion.axes import Axes, Axis, Layout, contract, labels_of
from pbjax.fusion.reading import Reading
from pbjax.fusion.rewriting import Match, Mismatch, Operand, match, named, operand
from pbjax.graph.trace import Atom


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """x @ w + bias, with the layouts of all of them in the labels of one match.

    Attributes:
      x: Input and its layout.
      w: Weight and its layout.
      bias: Bias and its layout; None without one.
      over: The labels that are summed.
      columns: The labels of the output features.
      rows: The axes of x that remain.
      dot: Position of the product.
      part: Start and stop of the output features that are used; None for all.
    """

    x: tuple[Atom, Layout]
    w: tuple[Atom, Layout]
    bias: tuple[Atom, Layout] | None
    over: Axis
    columns: Axis
    rows: Layout
    dot: int
    part: tuple[int, int] | None = None


def find_gemm(reading: Reading, value: int, *, with_epilogue: bool) -> Match | None:
    """Matches a value that is a product with a weight and at least one step after it.

    Args:
      reading: The graph.
      value: The possible result.
      with_epilogue: True if an activation, a scale or a residual must follow; False if only a bias
        may.

    Raises:
      Mismatch: It is one, but a value in between is read elsewhere.
    """
    axes = Axes(reading)
    layout = axes.label(reading.shape(value))
    for rest, at, residual in _residuals(reading, axes, value, layout):
        for scaled, scaled_at, scale in _scales(reading, axes, rest, at):
            for inner, steps in cones(reading, scaled):
                linear = find_linear(axes, inner, scaled_at)
                if linear is None or not _is_like(reading, residual, linear):
                    continue
                activation = recognised(reading, steps) if steps else None
                epilogue = activation is not None or residual is not None or scale != 1.0
                wanted = epilogue if with_epilogue else not epilogue and linear.bias is not None
                if wanted and (activation is not None) == bool(steps):
                    return _match(axes, value, layout, linear, residual, activation, scale)
    return None


def _is_like(reading: Reading, residual: tuple[Atom, Layout] | None, linear: Linear) -> bool:
    """Whether the residual has the dtype that the kernel takes."""
    return residual is None or reading.dtype(residual[0]) == reading.dtype(linear.x[0])


def _residuals(reading, axes, value, layout):
    """Yields the possible product, its layout, and the residual added to it; None without one."""
    core, at = axes.pull(value, layout, narrowing=True)
    operation = reading.maker(core)
    if operation is not None and operation.primitive in ("add", "add_any"):
        for product, residual in (operation.inputs[::-1], operation.inputs):
            alike = reading.shape(product) == reading.shape(residual) == reading.shape(core)
            if alike and not reading.is_weight(residual) and not reading.is_weight(product):
                yield product, at, axes.pull(residual, at)
    yield core, at, None


def _scales(reading, axes, atom: Atom, at: Layout) -> Iterator[tuple[Atom, Layout, float]]:
    """Yields the value with factor 1, and the value that it is a multiple of with that factor."""
    yield atom, at, 1.0
    atom, at = axes.pull(atom, at, narrowing=True)
    name = reading.primitive(atom)
    if name in ("mul", "div"):
        a, b = reading.operation(atom).inputs
        by_a, by_b = reading.scalar(a), reading.scalar(b)
        if by_b and reading.shape(a) == reading.shape(atom):
            yield a, at, by_b if name == "mul" else 1 / by_b
        elif by_a and name == "mul" and reading.shape(b) == reading.shape(atom):
            yield b, at, by_a


def find_linear(axes: Axes, value: Atom, layout: Layout) -> Linear | None:
    """Reads x @ w, or x @ w + bias, backwards from a value."""
    reading = axes.reading
    core, at = axes.pull(value, layout, narrowing=True)
    operation = reading.maker(core)
    if operation is None or operation.primitive not in ("add", "dot_general"):
        return None
    if operation.primitive == "dot_general":
        return _dot(axes, core, at, None)
    a, b = operation.inputs
    for product, bias in ((a, b), (b, a)):
        if reading.is_weight(bias) and reading.shape(product) == reading.shape(core):
            inner, inner_at = axes.pull(product, at, narrowing=True)
            found = reading.maker(inner)
            if found is not None and found.primitive == "dot_general":
                added = axes.pull(bias, axes.aligned(at, bias), narrowing=True)
                return _dot(axes, inner, inner_at, added)
    return None


def _dot(axes: Axes, value: Atom, at: Layout, bias) -> Linear | None:
    reading, operation = axes.reading, axes.reading.operation(value)
    first, second = operation.inputs
    (over, _), (with_first, _) = operation.params["dimension_numbers"]
    if with_first or reading.is_weight(first) == reading.is_weight(second):
        return None
    layouts = contract(axes, operation, at)
    sides = list(zip((first, second), layouts, strict=True))
    (x, at_x), (w, at_w) = sides if reading.is_weight(second) else sides[::-1]
    numbers = operation.params["dimension_numbers"][0][0 if x is first else 1]
    over = sum((at_x[i] for i in numbers), ())
    rows = tuple(axis for i, axis in enumerate(at_x) if i not in numbers)
    columns = tuple(i for axis in at_w for i in axis if i not in over)
    (x, at_x), (w, at_w) = _narrowed(axes, (x, at_x), (w, at_w))
    if not over or not columns or not rows or reading.dtype(x) != reading.dtype(w):
        return None
    if not reading.is_float(x) or _is_exact(operation.params["precision"]):
        return None
    if bias is not None and set(axes.cut(labels_of(bias[1]))) != set(axes.cut(columns)):
        return None
    dot = reading.position(value)
    return Linear(
        x=(x, at_x), w=(w, at_w), bias=bias, over=over, columns=columns, rows=rows, dot=dot
    )


def _narrowed(axes: Axes, *sides: tuple[Atom, Layout]) -> list[tuple[Atom, Layout]]:
    """Both operands before casts to a wider float, if both were cast from the same dtype."""
    before = [axes.reading.uncast(atom, widened=True) for atom, _ in sides]
    if len({axes.reading.dtype(atom) for atom in before}) > 1:
        return list(sides)
    return [(atom, layout) for atom, (_, layout) in zip(before, sides, strict=True)]


def _is_exact(precision) -> bool:
    """Whether the product must be more precise than Tensor Cores are by default."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(p not in (None, jax.lax.Precision.DEFAULT) for p in asked)


def product_operands(axes: Axes, linear: Linear) -> list[Operand]:
    """Input and weight, with spreads that give their product a spread of one."""
    size = axes.size(axes.cut(linear.over))
    return [operand(linear.x[0]), operand(linear.w[0], size**-0.5)]


def weight_of(axes: Axes, linear: Linear, w: jax.Array) -> jax.Array:
    """The weight in the kernels' layout (K, N)."""
    if linear.part is None:
        return axes.arrange(w, linear.w[1], (linear.over, linear.columns))
    rest = tuple(i for i in labels_of(axes.current(linear.w[1])) if i not in axes.cut(linear.over))
    first, last = linear.part
    return axes.arrange(w, linear.w[1], (linear.over, rest))[:, first:last]


def _match(axes: Axes, value, layout, linear, residual, activation, scale) -> Match:
    reading = axes.reading
    out = (*linear.rows, linear.columns)
    extra = [part for part in (linear.bias, residual) if part is not None]
    dtype = reading.dtype(value)

    def function(x, w, *others):
        x = axes.arrange(x, linear.x[1], (*linear.rows, linear.over))
        w = weight_of(axes, linear, w)
        others, options = list(others), {}
        if linear.bias is not None:
            bias = axes.arrange(others.pop(0), linear.bias[1], (linear.columns,))
            options["bias"] = bias.astype(x.dtype)
        if residual is not None:
            options["residual"] = axes.arrange(others.pop(0), residual[1], out)
        y = gemm(x, w, activation=activation, scale=scale, **options)
        return (axes.arrange(y, out, layout).astype(dtype),)

    parts = {"bias": linear.bias, activation: activation, "residual": residual}
    return match(
        reading,
        "gemm",
        named("gemm", parts | {"scale": None if scale == 1.0 else scale}),
        anchors=[linear.dot],
        operands=[*product_operands(axes, linear), *(operand(a) for a, _ in extra)],
        outputs=(value,),
        gives=reading.dtype(linear.x[0]),
        function=function,
    )


def find_gated(reading: Reading, value: int) -> Match | None:
    """Matches activation(x @ w_gate) * (x @ w).

    Raises:
      Mismatch: It is such a pair, but it has biases, or a value in between is read elsewhere.
    """
    axes = Axes(reading)
    layout = axes.label(reading.shape(value))
    core, at = axes.pull(value, layout, narrowing=True)
    operation = reading.maker(core)
    if operation is None or operation.primitive != "mul" or Literal in map(type, operation.inputs):
        return None
    a, b = operation.inputs
    if not reading.shape(a) == reading.shape(b) == reading.shape(core):
        return None
    for one, other in ((a, b), (b, a)):
        for inner, steps in cones(reading, one):
            gate, up = (_half(axes, half, at) for half in (inner, other))
            if not steps or gate is None or up is None or not _are_pair(gate, up):
                continue
            activation = recognised(reading, steps)
            if activation is None:
                continue
            if gate.bias is not None or up.bias is not None:
                raise Mismatch("the product or its gate has a bias, which the kernel does not add")
            return _gated(axes, value, layout, (gate, up), activation)
    return None


def _half(axes: Axes, value: Atom, at: Layout) -> Linear | None:
    """One side of a gated pair: a product, or a part that the model cuts out of a wider one."""
    linear = find_linear(axes, value, at)
    if linear is not None:
        return linear
    core, at = axes.pull(value, at, narrowing=True)
    cut = _cut_of(axes.reading, core)
    if cut is None:
        return None
    uncut, axis, part = cut
    wide = axes.new(axes.reading.shape(uncut)[axis])
    linear = find_linear(axes, uncut, (*at[:axis], wide, *at[axis + 1 :]))
    if linear is None or axes.cut(linear.columns) != axes.cut(wide):
        return None
    return replace(linear, part=part, columns=at[axis])


def _cut_of(reading: Reading, value: Atom) -> tuple[Atom, int, tuple[int, int]] | None:
    """(Value that the given one was cut out of, axis, (start, stop)); None if it was not cut."""
    operation = reading.maker(value)
    if operation is None or operation.primitive not in ("split", "slice"):
        return None
    (uncut,), params = operation.inputs, operation.params
    if operation.primitive == "split":
        sizes = [int(size) for size in params["sizes"]]
        number = next(i for i, output in enumerate(operation.outputs) if output == value)
        first = sum(sizes[:number])
        return uncut, int(params["axis"]), (first, first + sizes[number])
    first, last = params["start_indices"], params["limit_indices"]
    axes = [i for i, n in enumerate(reading.shape(uncut)) if (first[i], last[i]) != (0, n)]
    if params["strides"] is not None or len(axes) != 1:
        return None
    return uncut, axes[0], (int(first[axes[0]]), int(last[axes[0]]))


def _are_pair(a: Linear, b: Linear) -> bool:
    """Whether two products have one input and sum over the same axes of it."""
    return (a.dot, a.part) != (b.dot, b.part) and input_of(a) == input_of(b)


def input_of(linear: Linear) -> tuple[Atom, list[Axis | None]]:
    """The input of a product with its layout; None for the axes that are summed."""
    value, layout = linear.x
    return value, [axis if not set(axis) & set(linear.over) else None for axis in layout]


def _gated(axes: Axes, value, layout, pair, activation) -> Match:
    gate, up = pair
    out = (*gate.rows, gate.columns)
    dtype = axes.reading.dtype(value)

    def function(x, w_gate, w):
        x = axes.arrange(x, gate.x[1], (*gate.rows, gate.over))
        w_gate, w = weight_of(axes, gate, w_gate), weight_of(axes, up, w)
        y = gated_gemm(x, w_gate, w, activation=activation)
        return (axes.arrange(y, out, layout).astype(dtype),)

    x, w = product_operands(axes, gate)
    return match(
        axes.reading,
        "gated_gemm",
        f"gated_gemm({activation})",
        anchors=[gate.dot, up.dot],
        operands=[x, w, operand(up.w[0], w.spread)],
        outputs=(value,),
        gives=axes.reading.dtype(gate.x[0]),
        function=function,
    )
