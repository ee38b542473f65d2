"""Reads a graph backwards: writers and readers of a value, constants, sums and products.

Operations that do not change a value's meaning are skipped here and nowhere else: casts between
floats, axes of size one, broadcasts, and operations with their neutral element. The patterns see
sums of terms and products of powers, in any order of the program.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from pbjax.graph.trace import Atom, Aval, Graph, Operation, describe, evaluate

# Sums and products are followed this many operations deep.
MAX_DEPTH = 16

# Operations with the scalar that leaves the other operand unchanged; for the last two only on the
# right side.
_NEUTRAL = {"add": 0.0, "add_any": 0.0, "mul": 1.0, "max": -math.inf, "and": 1.0, "or": 0.0}
_NEUTRAL_ON_THE_RIGHT = {"sub": 0.0, "div": 1.0}
VIEWS = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims")
_SAME = ("copy", "copy_p", "stop_gradient")
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}


class Source(IntEnum):
    """The most variable thing that a value depends on."""

    CONSTANT = 0
    WEIGHTS = 1
    INPUTS = 2


@dataclass(frozen=True, slots=True)
class Product:
    """coefficient * product of value ** power."""

    coefficient: float
    powers: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sum:
    """constant + sum of coefficient * value."""

    constant: float
    terms: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Reading:
    """A graph with the facts that patterns need.

    Attributes:
      graph: The graph.
      held: Inputs that count as weights, as in the body of a loop over layers.
    """

    graph: Graph
    held: frozenset[int] = frozenset()

    @cached_property
    def makers(self) -> dict[int, int]:
        """The position of the operation that writes each value."""
        return {
            value: index
            for index, operation in enumerate(self.graph.operations)
            for value in operation.outputs
        }

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """The positions of the operations that read each value."""
        found = defaultdict(list)
        for index, operation in enumerate(self.graph.operations):
            for value in {atom for atom in operation.inputs if isinstance(atom, int)}:
                found[value].append(index)
        return {value: tuple(indices) for value, indices in found.items()}

    @cached_property
    def returned(self) -> frozenset[int]:
        """The values that the program returns."""
        return frozenset(atom for atom in self.graph.outputs if isinstance(atom, int))

    @cached_property
    def _sources(self) -> list[Source]:
        graph = self.graph
        held = graph.num_weights - len(graph.constants)
        sources = [Source.WEIGHTS] * held + [Source.CONSTANT] * len(graph.constants)
        sources += [Source.WEIGHTS if i in self.held else Source.INPUTS for i in graph.inputs]
        for operation in graph.operations:
            found = max(map(self._known(sources), operation.inputs), default=Source.CONSTANT)
            sources += [found] * len(operation.outputs)
        return sources

    @staticmethod
    def _known(sources):
        return lambda atom: Source.CONSTANT if isinstance(atom, Literal) else sources[atom]

    @cached_property
    def _constants(self) -> dict[int, np.ndarray | None]:
        return {}

    def source(self, atom: Atom) -> Source:
        """The source of a value; captured arrays are constants."""
        if isinstance(atom, Literal):
            return Source.CONSTANT
        return self._sources[atom]

    @property
    def weights(self) -> frozenset[int]:
        """All values that do not depend on a call's inputs."""
        return frozenset(i for i, found in enumerate(self._sources) if found < Source.INPUTS)

    def is_weight(self, atom: Atom) -> bool:
        """Whether the value does not depend on a call's inputs."""
        return self.source(atom) < Source.INPUTS

    def maker(self, atom: Atom) -> Operation | None:
        """The operation that writes the value; None for literals, weights and inputs."""
        if isinstance(atom, Literal) or atom not in self.makers:
            return None
        return self.graph.operations[self.makers[atom]]

    def position(self, atom: Atom) -> int:
        """The position of the operation that writes a value; there must be one."""
        if isinstance(atom, Literal):
            raise AssertionError(f"no operation writes {atom}")
        return self.makers[atom]

    def operation(self, atom: Atom) -> Operation:
        """The operation that writes a value; there must be one."""
        return self.graph.operations[self.position(atom)]

    def primitive(self, atom: Atom) -> str:
        """Name of the primitive that writes the value; empty if there is none."""
        operation = self.maker(atom)
        return operation.primitive if operation is not None else ""

    def description(self, atom: Atom) -> str:
        """The origin of a value, for messages."""
        operation = self.maker(atom)
        if operation is not None:
            return describe(operation)
        return str(atom) if isinstance(atom, Literal) else self.graph.names[atom]

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(
            np.shape(atom.val) if isinstance(atom, Literal) else self.graph.avals[atom].shape
        )

    def dtype(self, atom: Atom) -> np.dtype:
        """The dtype of a value that is an array of numbers."""
        return self._aval(atom).dtype

    def is_float(self, atom: Atom) -> bool:
        """Whether the value is a float of any width."""
        return jnp.issubdtype(self._aval(atom).dtype, jnp.floating)

    def is_view(self, atom: Atom) -> bool:
        """Whether the value shows another one without loss, so that it can be skipped."""
        return self.primitive(atom) in VIEWS or self.uncast(atom, widened=True) != atom

    def _aval(self, atom: Atom) -> Aval:
        return cast(Aval, atom.aval if isinstance(atom, Literal) else self.graph.avals[atom])

    def _is_bool(self, atom: Atom) -> bool:
        return self._aval(atom).dtype == np.dtype(bool)

    def depends(self, atom: Atom, on: int) -> bool:
        """Whether a value is computed from another."""
        seen, waiting = set(), [atom]
        while waiting:
            value = waiting.pop()
            if value == on:
                return True
            if isinstance(value, int) and value > on and value not in seen:
                seen.add(value)
                waiting.extend(self.operation(value).inputs)
        return False

    def constant(self, atom: Atom) -> np.ndarray | None:
        """The value where it depends on neither inputs nor weights."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if self.source(atom) != Source.CONSTANT:
            return None
        if atom not in self._constants:
            self._constants[atom] = self._computed(atom)
        return self._constants[atom]

    def _computed(self, atom: int) -> np.ndarray | None:
        if jnp.issubdtype(self._aval(atom).dtype, jax.dtypes.extended):
            return None  # Random keys are no numbers.
        operation = self.maker(atom)
        if operation is None:
            first = self.graph.num_weights - len(self.graph.constants)
            return np.asarray(self.graph.constants[atom - first])
        env: dict[int, jax.Array] = {}
        for operand in operation.inputs:
            if isinstance(operand, int):
                value = self.constant(operand)
                if value is None:
                    return None
                env[operand] = jnp.asarray(value)
        evaluate([operation], env)
        return np.asarray(env[atom])

    def scalar(self, atom: Atom) -> float | None:
        """The number that all elements equal; None if they differ or are unknown."""
        while (operation := self.maker(atom)) is not None:
            if operation.primitive not in ("broadcast_in_dim", "reshape", "squeeze"):
                break
            atom = operation.inputs[0]
        if self.source(atom) != Source.CONSTANT or math.prod(self.shape(atom)) != 1:
            return None
        if not jnp.issubdtype(self._aval(atom).dtype, jnp.number) and not self._is_bool(atom):
            return None
        value = self.constant(atom)
        return None if value is None or np.iscomplexobj(value) else float(value.reshape(()))

    def uncast(self, atom: Atom, *, widened: bool = False) -> Atom:
        """The value before casts between floats, copies and neutral operations.

        Args:
          atom: The value.
          widened: Whether to skip only casts to a wider float, which lose nothing.
        """
        while (before := self._before(atom, widened)) is not None:
            atom = before
        return atom

    def _before(self, atom: Atom, widened: bool) -> Atom | None:
        operation = self.maker(atom)
        if operation is None or not operation.inputs:
            return None
        before = operation.inputs[0]
        if operation.primitive in _SAME:
            return before
        if operation.primitive == "convert_element_type":
            if not (self.is_float(before) and self.is_float(atom)):
                return None
            narrow = self.dtype(before).itemsize < self.dtype(atom).itemsize
            return before if narrow or not widened else None
        if operation.primitive == "select_n":
            chosen = self.scalar(before)
            return None if chosen is None else operation.inputs[1 + int(chosen)]
        return self._without_neutral(operation)

    def _without_neutral(self, operation: Operation) -> Atom | None:
        neutral = _NEUTRAL.get(operation.primitive)
        right = _NEUTRAL_ON_THE_RIGHT.get(operation.primitive, neutral)
        if right is None:
            return None
        if operation.primitive in ("and", "or") and not self._is_bool(operation.outputs[0]):
            return None
        a, b = operation.inputs
        shape = self.shape(operation.outputs[0])
        if self.scalar(b) == right and self.shape(a) == shape:
            return a
        if neutral is not None and self.scalar(a) == neutral and self.shape(b) == shape:
            return b
        return None

    def core(self, atom: Atom) -> Atom:
        """The value before what `uncast` skips, broadcasts, and changes of axes of size one."""
        while True:
            atom = self.uncast(atom)
            operation = self.maker(atom)
            if operation is None:
                return atom
            if operation.primitive == "reshape":
                if _wide(self.shape(operation.inputs[0])) != _wide(self.shape(atom)):
                    return atom
            elif operation.primitive not in VIEWS or operation.primitive == "transpose":
                return atom
            atom = operation.inputs[0]

    def product(self, atom: Atom, depth: int = MAX_DEPTH) -> Product:
        """The value as a product of powers, in any order the program multiplies them."""
        number = self.scalar(atom)
        if number is not None:
            return Product(number)
        core = self.core(atom)
        if isinstance(core, Literal):
            return Product(math.nan)  # An array literal: no pattern has one.
        operation = self.maker(core)
        if operation is None or depth == 0:
            return Product(1.0, {core: 1.0})

        def of(operand, power=1.0):
            return _raised(self.product(operand, depth - 1), power)

        name, inputs = operation.primitive, operation.inputs
        if name == "mul":
            found = _times(of(inputs[0]), of(inputs[1]))
        elif name == "div":
            found = _times(of(inputs[0]), of(inputs[1], -1.0))
        elif name == "neg":
            found = _times(Product(-1.0), of(inputs[0]))
        elif name == "integer_pow":
            found = of(inputs[0], float(operation.params["y"]))
        elif name == "pow":
            power = self.scalar(inputs[1])
            found = None if power is None else of(inputs[0], power)
        elif name in _POWERS:
            found = of(inputs[0], _POWERS[name])
        else:
            found = None
        return found if found is not None else Product(1.0, {core: 1.0})

    def sum(self, atom: Atom, depth: int = MAX_DEPTH) -> Sum:
        """The value as a sum of terms, in any order the program adds them."""
        number = self.scalar(atom)
        if number is not None:
            return Sum(number)
        core = self.core(atom)
        if isinstance(core, Literal):
            return Sum(math.nan)
        operation = self.maker(core)
        if operation is None or depth == 0:
            return Sum(0.0, ((1.0, core),))

        def of(operand, factor=1.0):
            return _scaled(self.sum(operand, depth - 1), factor)

        name, inputs = operation.primitive, operation.inputs
        if name in ("add", "add_any"):
            return _plus(of(inputs[0]), of(inputs[1]))
        if name == "sub":
            return _plus(of(inputs[0]), of(inputs[1], -1.0))
        if name == "neg":
            return of(inputs[0], -1.0)
        if name in ("mul", "div"):
            a, b = map(self.scalar, inputs)
            if b is not None and (b or name == "mul"):
                return of(inputs[0], b if name == "mul" else 1 / b)
            if a is not None and name == "mul":
                return of(inputs[1], a)
        return Sum(0.0, ((1.0, core),))


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _raised(product: Product | None, power: float) -> Product | None:
    if product is None or (product.coefficient <= 0 and power != round(power)):
        return None
    if product.coefficient == 0 and power < 0:
        return None
    if power != round(power) and any(p % 2 == 0 and p * power % 2 for p in product.powers.values()):
        return None  # sqrt(x ** 2) is abs(x), not a power of x.
    powers = {value: p * power for value, p in product.powers.items()}
    return Product(product.coefficient**power, powers)


def _times(a: Product | None, b: Product | None) -> Product | None:
    if a is None or b is None:
        return None
    powers = dict(a.powers)
    for value, power in b.powers.items():
        powers[value] = powers.get(value, 0.0) + power
    return Product(a.coefficient * b.coefficient, {v: p for v, p in powers.items() if p})


def _scaled(total: Sum, factor: float) -> Sum:
    return Sum(total.constant * factor, tuple((c * factor, v) for c, v in total.terms))


def _plus(a: Sum, b: Sum) -> Sum:
    return Sum(a.constant + b.constant, a.terms + b.terms)
