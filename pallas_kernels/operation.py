"""A kernel as one JAX operation that carries its meaning in plain JAX with it.

What looks at a traced program sees one operation with a name, the operands and `plain`, the same
result as a jaxpr of ordinary primitives, rather than a launch it cannot read. On a GPU the kernel
runs; on any other platform the plain form does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxtyping import Array

# Name of the primitive in a traced program. Its parameters are `name`, that of the public function;
# `kernel`, a `Kernel`; `plain`, a closed jaxpr of the same operands and results; and `arguments`,
# those of the public function by name, an `Operand` standing for an array.
PRIMITIVE = "pallas_kernel"

_kernel_p = Primitive(PRIMITIVE)
_kernel_p.multiple_results = True


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument of a kernel that is an operand of its operation.

    Attributes:
      index: Its place among the operands.
    """

    index: int


class Kernel:
    """A traced launch, equal to no other and always printed alike: its code has no stable text."""

    def __init__(self, jaxpr: ClosedJaxpr):
        """Takes the launch as it was traced, all operands being arguments."""
        self._run = jaxpr_as_fun(jaxpr)

    def __call__(self, *operands: Array) -> Sequence[Array]:
        """Runs it."""
        return self._run(*operands)

    def __repr__(self) -> str:
        """The same for all: what is computed stands in `plain`."""
        return "Kernel()"


def as_operation[Out](
    name: str,
    kernel: Callable[[], Out],
    plain: Callable[[], Out],
    arguments: Mapping[str, object],
) -> Out:
    """Calls a kernel as one operation.

    Args:
      name: Of the public function.
      kernel: Launches the kernel on the arrays that it closes over.
      plain: Computes the same, from the same arrays, in plain JAX.
      arguments: Of the public function: arrays, and hashable values.

    Returns:
      What `kernel` returns, or `plain` where the program is lowered for no GPU. Where nothing is
      being traced, the kernel is called as it is.
    """
    launch, out_shape = jax.make_jaxpr(kernel, return_shape=True)()
    meaning, meant_shape = jax.make_jaxpr(plain, return_shape=True)()
    if out_shape != meant_shape:
        raise AssertionError(f"{name}: the kernel gives {out_shape}, plain JAX {meant_shape}")
    given = [x for x in arguments.values() if _is_array(x)]
    # In an order that does not depend on what the launch does at this shape. Its numpy arrays are
    # tables made of the shape alone, and no operands: they stay in its code.
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
    """The arguments of the public function, from an operation's parameters and operands.

    Args:
      params: Of the operation.
      operands: Its operands, or what stands for them.
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
    """The jaxpr with those of the operands as arguments that it closed over, in their order."""
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
    # The public function takes no such axis, so the arguments are not its own any more.
    results = as_operation(
        f"vmap of {name}", lambda: mapped(*operands), lambda: meant(*operands), {}
    )
    return results, [0] * len(results)


_kernel_p.def_impl(_eager)
_kernel_p.def_abstract_eval(lambda *_, plain, **__: plain.out_avals)
batching.primitive_batchers[_kernel_p] = _vmapped
mlir.register_lowering(_kernel_p, mlir.lower_fun(_run_plain, multiple_results=True))
mlir.register_lowering(_kernel_p, mlir.lower_fun(_run, multiple_results=True), platform="cuda")
