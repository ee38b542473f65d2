"""A kernel as one JAX operation that carries its meaning in plain JAX.

A reader of a traced program sees one operation with a name, the operands and `plain`, a jaxpr of
ordinary primitives with the same result, instead of an opaque launch. On a GPU the kernel runs; on
any other platform the plain form does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxtyping import Array

# The name of the primitive in a traced program. Its parameters are `name`, the name of the public
# function; `kernel`, a `Kernel`; `plain`, a closed jaxpr of the same operands and results; and
# `arguments`, the arguments of the public function by name, with an `Operand` for each array.
PRIMITIVE = "pallas_kernel"

_kernel_p = Primitive(PRIMITIVE)
_kernel_p.multiple_results = True


@dataclass(frozen=True, slots=True)
class Operand:
    """A stand-in for an array among the arguments of a kernel.

    Attributes:
      index: The index of the array among the operands.
    """

    index: int


class Kernel:
    """A traced launch, equal to no other and always printed alike: its code has no stable text."""

    def __init__(self, jaxpr: ClosedJaxpr):
        """Takes the traced launch, with all operands as arguments."""
        self._run = jaxpr_as_fun(jaxpr)

    def __call__(self, *operands: Array) -> Sequence[Array]:
        """Runs it."""
        return self._run(*operands)

    def __repr__(self) -> str:
        """Returns the same text for all kernels: `plain` shows what is computed."""
        return "Kernel()"


def as_operation[Out](
    name: str,
    kernel: Callable[[], Out],
    plain: Callable[[], Out],
    arguments: Mapping[str, object],
) -> Out:
    """Calls a kernel as one operation.

    Args:
      name: The name of the public function.
      kernel: Launches the kernel on the arrays that it closes over.
      plain: Computes the same, from the same arrays, in plain JAX.
      arguments: The arguments of the public function: arrays, and hashable values.

    Returns:
      The result of `kernel`, or of `plain` in a program that is not lowered for a GPU. Outside of
      tracing the kernel is called directly.
    """
    launch, out_shape = jax.make_jaxpr(kernel, return_shape=True)()
    meaning, meant_shape = jax.make_jaxpr(plain, return_shape=True)()
    if out_shape != meant_shape:
        raise AssertionError(f"{name}: the kernel gives {out_shape}, plain JAX {meant_shape}")
    given = [x for x in arguments.values() if _is_array(x)]
    # The order does not depend on the launch at this shape. The launch's numpy arrays are tables
    # made from the shape alone; they stay in its code and are no operands.
    captured = [x for x in launch.consts if not isinstance(x, np.ndarray)]
    operands = list({id(x): x for x in (*given, *meaning.consts, *captured)}.values())
    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        return kernel()
    results = _kernel_p.bind(
        *operands,
        name=name,
        kernel=Kernel(_over(launch, operands)),
        plain=_over(meaning, operands),
        arguments=_named(arguments, operands),
    )
    return jax.tree.unflatten(jax.tree.structure(out_shape), results)


def arguments_of(params: Mapping, operands: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of the public function from an operation's parameters and operands.

    Args:
      params: The parameters of the operation.
      operands: The operands of the operation, or stand-ins for them.
    """
    return {
        name: operands[x.index] if isinstance(x, Operand) else x for name, x in params["arguments"]
    }


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _named(arguments: Mapping[str, object], operands: Sequence[Any]) -> tuple:
    places = {id(x): i for i, x in enumerate(operands)}
    return tuple(
        (name, Operand(places[id(x)]) if _is_array(x) else x) for name, x in arguments.items()
    )


def _over(closed: ClosedJaxpr, operands: Sequence[Any]) -> ClosedJaxpr:
    """Returns the jaxpr with the operands that it closed over as arguments, in order."""
    places = {id(x): i for i, x in enumerate(operands)}

    def run(*operands):
        consts = [operands[places[id(x)]] if id(x) in places else x for x in closed.consts]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))()

    return jax.make_jaxpr(run)(*operands)


def _run(*operands, kernel, **_):
    return kernel(*operands)


def _run_plain(*operands, plain, **_):
    return jaxpr_as_fun(plain)(*operands)


def _eager(*operands, **params):
    return jax.jit(lambda *operands: _kernel_p.bind(*operands, **params))(*operands)


def _vmapped(operands, axes, *, name, kernel, plain, arguments):
    mapped, meant = (jax.vmap(f, in_axes=axes) for f in (kernel, jaxpr_as_fun(plain)))
    # The public function takes no such axis, so its arguments are left out.
    results = as_operation(
        f"vmap of {name}", lambda: mapped(*operands), lambda: meant(*operands), {}
    )
    return results, [0] * len(results)


_kernel_p.def_impl(_eager)
_kernel_p.def_abstract_eval(lambda *_, plain, **__: plain.out_avals)
batching.primitive_batchers[_kernel_p] = _vmapped
mlir.register_lowering(_kernel_p, mlir.lower_fun(_run_plain, multiple_results=True))
mlir.register_lowering(_kernel_p, mlir.lower_fun(_run, multiple_results=True), platform="cuda")
