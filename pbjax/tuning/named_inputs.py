"""Inputs by the names of the model's own arguments, as in fast(**batch)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax

from pbjax.errors import InputTypeError

_BY_PLACE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputNames:
    """The names of a model's inputs.

    Attributes:
      names: One for each input, in order; fewer where the model does not name them.
      left_out: Names of inputs that may be left out, and are then None.
    """

    names: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Callable) -> "InputNames":
        """Those of all arguments that a model takes by their place."""
        try:
            parameters = inspect.signature(model).parameters.values()
        except (TypeError, ValueError):  # a function of C has no signature
            return cls()
        placed = [p for p in parameters if p.kind in _BY_PLACE]
        return cls(
            names=tuple(p.name for p in placed),
            left_out=frozenset(p.name for p in placed if p.default is None),
        )

    def planned(self, inputs: Sequence[object]) -> "InputNames":
        """Those of the example's inputs."""
        names = self.names[: len(inputs)]
        pairs = zip(names, inputs, strict=False)
        empty = frozenset(name for name, x in pairs if not jax.tree.leaves(x))
        return InputNames(names=names, left_out=empty)

    def are_keys_of(self, inputs: Sequence[object]) -> bool:
        """Whether the one input is a dictionary of inputs by these names."""
        if len(inputs) != 1 or not isinstance(inputs[0], Mapping) or len(self.names) < 2:
            return False
        keys = set(inputs[0])
        return self.names[0] in keys and keys <= set(self.names)

    def in_order(
        self, asked: str, inputs: Sequence[object], named: Mapping[str, object]
    ) -> tuple[object, ...]:
        """The inputs by their place, from some by place and others by name.

        Args:
          asked: The call, for the message.
          inputs: The first ones.
          named: The others by name.

        Raises:
          InputTypeError: A name is no input's, or given twice, or one is missing.
        """
        rest = self.names[len(inputs) :]
        unknown = [name for name in named if name not in rest]
        last = max((rest.index(name) for name in named if name in rest), default=-1)
        asked_for = rest if asked == "call" else rest[: last + 1]
        missing = [name for name in asked_for if name not in {*named, *self.left_out}]
        if unknown or missing:
            found = f"{unknown[0]}= is given" if unknown else f"{missing[0]}= is missing"
            allowed = ", ".join(self.names) or "none"
            raise InputTypeError(
                f"{asked}: {found}; the inputs that were planned for are {allowed}; pass each once,"
                " by place or by name"
            )
        return (*inputs, *(named.get(name) for name in asked_for))
