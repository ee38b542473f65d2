"""jax's Mosaic GPU, loaded when a kernel is first traced.

Loading it takes 0.2 s, and most of what imports kernels, on a machine without a GPU above all,
never traces one. Kernels take `plgpu` from here instead of importing it.
"""

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax.experimental.pallas.mosaic_gpu as plgpu


class Deferred(ModuleType):
    """A module under its full name that is imported when one of its names is first read."""

    def __getattr__(self, name: str) -> object:
        """What the module itself has under a name."""
        return getattr(_loaded(self.__name__), name)


@functools.cache
def _loaded(name: str) -> ModuleType:
    """The module; whatever is deferred here lowers kernels, which must have no numbers by then."""
    module = importlib.import_module(name)
    importlib.import_module("pallas_kernels.numbering").drop_numbers()
    return module


if not TYPE_CHECKING:
    plgpu = Deferred("jax.experimental.pallas.mosaic_gpu")
