"""jax's Mosaic GPU, loaded when a kernel is first traced.

Loading it takes 0.2 s, and most programs that import kernels, above all on machines without a GPU,
never trace one. Kernels take `plgpu` from here instead of importing it.
"""

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax.experimental.pallas.mosaic_gpu as plgpu


class Deferred(ModuleType):
    """A module that is imported when one of its names is first read."""

    def __getattr__(self, name: str) -> object:
        """Returns the value of a name in the module itself."""
        return getattr(_loaded(self.__name__), name)


@functools.cache
def _loaded(name: str) -> ModuleType:
    """Returns the module, which lowers kernels; their numbers are dropped first."""
    module = importlib.import_module(name)
    importlib.import_module("pallas_kernels.numbering").drop_numbers()
    return module


if not TYPE_CHECKING:
    plgpu = Deferred("jax.experimental.pallas.mosaic_gpu")
