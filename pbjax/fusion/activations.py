"""Recognises activations by their values, however they are written.

The elementwise operations between two values run on a grid of numbers; the result is compared with
the activations of the kernels.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.reference import activate
from pbjax.fusion.reading import Reading
from pbjax.graph.trace import Atom, Operation

# The most operations of an activation; jax.nn.gelu takes 9.
MAX_STEPS = 24
# Activations are compared on this grid: they differ from one another between -4 and 4, and from
# clipped ones, at 6, 10 or 20 as is usual, further out. exp(80) is finite in f32.
GRID = np.unique(np.r_[-80.0:80.0:161j, -8.0:8.0:257j].astype(np.float32))
ACTIVATIONS: tuple[Activation, ...] = ("relu", "silu", "gelu", "gelu_tanh", "sigmoid")

_ARITHMETIC = {"abs", "add", "div", "max", "min", "mul", "neg", "sign", "sub"}
_FUNCTIONS = {"erf", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh"}
_POWERS = {"integer_pow", "pow", "rsqrt", "sqrt", "square"}
_CHOICES = {"and", "clamp", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n"}
_SAME = {"convert_element_type", "copy", "stop_gradient"}
ELEMENTWISE = _ARITHMETIC | _FUNCTIONS | _POWERS | _CHOICES | _SAME


def cones(reading: Reading, value: Atom) -> Iterator[tuple[Atom, tuple[Operation, ...]]]:
    """Yields (u, operations) for every value u of which the given one is an elementwise function.

    The nearest u come first; last comes the value itself, without operations.
    """
    leaves: set[int] = {value} if isinstance(value, int) else set()
    steps: list[Operation] = []
    while len(steps) < MAX_STEPS and leaves:
        latest = max(leaves)
        operation = reading.maker(latest)
        if operation is None or operation.primitive not in ELEMENTWISE:
            break
        read = [a for a in operation.inputs if reading.scalar(a) is None]
        inputs = [a for a in read if isinstance(a, int) and not reading.is_weight(a)]
        if any(reading.shape(a) != reading.shape(latest) for a in inputs) or inputs != read:
            break
        steps.insert(0, operation)
        leaves = leaves - {latest} | set(inputs)
        if len(leaves) == 1:
            yield next(iter(leaves)), tuple(steps)
    yield value, ()


def recognised(reading: Reading, steps: Sequence[Operation]) -> Activation | None:
    """The activation that a cone's operations compute, if the kernels have it.

    They run in f32 whatever their dtype: bfloat16 cannot distinguish several activations. The
    constants of a narrow dtype stay rounded.
    """
    written = {v for operation in steps for v in operation.outputs}
    read = [a for o in steps for a in o.inputs if isinstance(a, int) and a not in written]
    inner = [a for a in read if reading.scalar(a) is None]
    floats = [a for a in (*inner, *written) if reading.is_float(a)]
    if not inner or not all(map(reading.is_float, inner)) or _only_casts(steps):
        return None
    env = {inner[0]: jnp.asarray(GRID)}
    for operation in steps:
        _run(reading, operation, env)
    value = np.asarray(env[steps[-1].outputs[0]], np.float64)
    errors = {name: np.abs(value - _values(name)) for name in ACTIVATIONS}
    best = min(errors, key=lambda name: float(errors[name].sum()))
    rounding = max(float(jnp.finfo(reading.dtype(v)).eps) for v in floats) / 2
    rounding += len(steps) * float(jnp.finfo(jnp.float32).eps)
    return best if np.all(errors[best] <= rounding * np.maximum(np.abs(GRID), 1.0)) else None


def _only_casts(steps: Sequence[Operation]) -> bool:
    return all(operation.primitive in _SAME for operation in steps)


def _run(reading: Reading, operation: Operation, env: dict) -> None:
    """Runs one operation with f32 in place of every float."""

    def argument(atom: Atom):
        if isinstance(atom, int) and atom in env:
            return env[atom]
        dtype = jnp.float32 if reading.is_float(atom) else reading.dtype(atom)
        shape = GRID.shape if reading.shape(atom) else ()
        return jnp.full(shape, np.asarray(reading.scalar(atom)), dtype)

    arguments = [argument(atom) for atom in operation.inputs]
    (value,) = operation.outputs
    if operation.primitive == "convert_element_type" and reading.is_float(value):
        env[value] = arguments[0].astype(jnp.float32)
        return
    primitive = operation.equation.primitive
    env[value] = primitive.bind(*arguments, **primitive.get_bind_params(operation.params))


@cache
def _values(name: Activation) -> np.ndarray:
    return np.asarray(activate(jnp.asarray(GRID), name), np.float64)
