"""Makes a frozen dataclass of arrays a JAX tree under its field names."""

import dataclasses

import jax


def register_output[T: type](cls: T) -> T:
    """Registers a dataclass as a tree whose children are its fields; a decorator."""
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten(output):
        return tuple((jax.tree_util.GetAttrKey(n), getattr(output, n)) for n in names), None

    def unflatten(_, children):
        # The constructor is not called: jax also puts shapes, axes and None into a tree.
        output = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(output, name, child)
        return output

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
