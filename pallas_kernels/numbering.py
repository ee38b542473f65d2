"""Removes jax's numbers from kernels, so that equal kernels have equal code in every program.

jax numbers the kernels of a process for the names of dump files, and leaves the number in the code
that it hashes. So a kernel in two programs would be compiled twice, and the key of a program in the
compilation cache would depend on what was lowered before it.
"""

from jax.experimental.mosaic.gpu import core

# The attribute with the number; a kernel without it gets one when it is dumped.
NUMBER = "mosaic_gpu.dump_basename"

_serialise = core._run_serde_pass


def _serialise_unnumbered(module, *, serialize: bool, **options):
    attributes = module.operation.attributes
    if serialize and NUMBER in attributes:
        del attributes[NUMBER]
    return _serialise(module, serialize=serialize, **options)


def drop_numbers() -> None:
    """Makes jax lower kernels without their number, from here on; there is no option for it."""
    core._run_serde_pass = _serialise_unnumbered
