"""The seam to Flax: any model becomes apply(params, *inputs) and its params.

After this file nnx and linen no longer exist. The user's object is read, never changed.
`check_state` refuses a model whose state changes in a call (running statistics, random counters,
caches); it traces but runs nothing. `trace` turns the function into a graph.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval

from pbjax.errors import InputError, InputTypeError, ModelError, warn
from pbjax.graph.placement import home, is_elsewhere, placed

type Model = nnx.Module | nn.Module | Callable

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Functional:
    """A model as a function.

    Attributes:
      apply: Called as apply(params, *inputs); pure if `check_state` passes.
      params: Pytree of everything the model holds, parameters and other state alike.
      name: The class or function name, for reports.
      apply_and_update: Called like apply; returns the output and the params after the call. None
        where the model has no state that a call could change.
    """

    apply: Callable
    params: object
    name: str
    apply_and_update: Callable | None = None


def functional(model: Model, variables: Mapping[str, object] | None = None) -> Functional:
    """Turns a model into a function of its params and inputs.

    Args:
      model: An nnx module, a linen module (bound, or together with variables), a method of one, or
        any callable.
      variables: The variables that linen's `init` returned; for an unbound linen module only.

    Returns:
      The function, its params and its name. The params of a callable are empty: JAX finds the
      arrays that it captured.

    Raises:
      InputError: variables is missing, or given for a model that holds its own.
      InputTypeError: The model is a class or cannot be called.
    """
    if isinstance(model, type) or not callable(model):
        found = (
            f"the class {model.__name__}"
            if isinstance(model, type)
            else f"a {type(model).__name__}"
        )
        raise InputTypeError(
            f"functional(model): the model is {found}; an nnx module, a linen module or a function "
            "is allowed; pass an instance that can be called"
        )
    owner = getattr(model, "__self__", None) if inspect.ismethod(model) else model
    if isinstance(owner, nn.Module):
        return _from_linen(owner, _method(model), variables)
    if variables is not None:
        raise InputError(
            f"functional(model, variables): {_name(model)} is not a linen module; variables are "
            "for linen modules only; leave out variables="
        )
    return _from_nnx(owner, _method(model)) if isinstance(owner, nnx.Module) else _plain(model)


def shared_method(model: object, name: str) -> Functional:
    """Turns a method of an nnx module into a function that modules of one structure share.

    As a static argument of a jitted function it does not cause a second compilation.

    Args:
      model: The module.
      name: Name of the method.

    Returns:
      The function; its params are a tuple of arrays, which is quick to pass to a jitted function.

    Raises:
      InputTypeError: The model is not an nnx module.
    """
    if not isinstance(model, nnx.Module):
        raise InputTypeError(
            f"shared_method(model): a {type(model).__name__}; an nnx module is allowed; pass one"
        )
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(_on_device(state))
    apply = _shared_apply(graphdef, treedef, name)
    return Functional(apply=apply, params=tuple(leaves), name=_name(model, name))


@functools.lru_cache(maxsize=64)
def _shared_apply(graphdef: nnx.GraphDef, treedef: object, name: str) -> Callable:
    def apply(params, *inputs):
        state = jax.tree.unflatten(treedef, params)
        return getattr(nnx.merge(graphdef, state, copy=True), name)(*inputs)

    return apply


def check_state(model: Functional, *inputs: object) -> None:
    """Refuses a model whose state changes in a call; traces it, runs nothing.

    Args:
      model: A result of `functional`.
      *inputs: Inputs of a call, or their shapes and dtypes.

    Raises:
      ModelError: A call changes a variable, named by its path, or needs state that is not there.
    """
    if model.apply_and_update is None:
        jax.eval_shape(model.apply, model.params, *inputs)
        return
    closed, out_shape = jax.make_jaxpr(model.apply_and_update, return_shape=True)(
        model.params, *inputs
    )
    before = dict(zip(_paths(model.params), closed.jaxpr.invars, strict=False))
    after = _paths(out_shape[1])
    num_results = len(closed.jaxpr.outvars) - len(after)
    after = dict(zip(after, closed.jaxpr.outvars[num_results:], strict=True))
    unused = _unused_counts(model.params, closed.jaxpr, num_results)
    changed = [
        path
        for path in sorted({*before, *after} - unused)
        if path not in before
        or path not in after
        or _origin(closed.jaxpr, after[path]) is not before[path]
    ]
    if changed:
        raise ModelError(
            f"{model.name}: a call changes its state ({', '.join(changed)}); only models whose "
            "state stays the same can run in sub-batches; call model.eval() first, or pass caches "
            "as inputs and return them as outputs"
        )


def _method(model: Model) -> str:
    return getattr(model, "__name__", "") if inspect.ismethod(model) else "__call__"


def _from_nnx(model: nnx.Module, method: str) -> Functional:
    graphdef, state = nnx.split(model)
    state = _on_device(state)  # also copies the tree, which shares the model's variables
    name = _name(model, method)

    def apply(params, *inputs):
        return getattr(nnx.merge(graphdef, params, copy=True), method)(*inputs)

    def apply_and_update(params, *inputs):
        module = nnx.merge(graphdef, params, copy=True)
        return getattr(module, method)(*inputs), nnx.state(module)

    return Functional(
        apply=_translating(apply, name),
        params=state,
        name=name,
        apply_and_update=_translating(apply_and_update, name),
    )


def _from_linen(
    model: nn.Module, method: str, variables: Mapping[str, object] | None
) -> Functional:
    name = _name(model, method)
    if model.scope is not None and variables is None:
        model, variables = model.unbind()
    if variables is None:
        raise InputError(
            f"functional(model): the linen module {name} is not bound; a linen module needs its "
            "variables; pass variables=, or bind it with model.bind(variables)"
        )
    if model.scope is not None:
        raise InputError(
            f"functional(model, variables): the linen module {name} is bound and variables are "
            "given too; one source of variables is allowed; leave out variables=, or pass the "
            "unbound module"
        )

    def apply(params, *inputs):
        return model.apply(params, *inputs, method=method, mutable=False)

    return Functional(apply=_translating(apply, name), params=_on_device(variables), name=name)


def _on_device(tree: object) -> object:
    """The tree on the device where programs run, so that calls do not copy it there."""
    elsewhere = [leaf for leaf in jax.tree.leaves(tree) if is_elsewhere(leaf)]
    if elsewhere:
        devices = {str(d) for leaf in elsewhere for d in leaf.sharding.device_set}
        warn(
            f"the model's weights lie on {', '.join(sorted(devices))}; programs run on {home()} "
            "alone: the weights are copied there; place them there first to hold them once"
        )
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else placed(leaf)
        ),
        tree,
    )


def _plain(function: Callable) -> Functional:
    def apply(params, *inputs):
        return function(*inputs)

    name = _name(function)
    return Functional(apply=_translating(apply, name), params=(), name=name)


def _translating(apply: Callable, name: str) -> Callable:
    """Wraps apply so that Flax's errors about state become a `ModelError`."""

    def translated(params, *inputs):
        try:
            return apply(params, *inputs)
        except flax.errors.FlaxError as error:
            reason = str(error).split(" (https://")[0].rstrip(".").replace("\n", " ")
            raise ModelError(
                f"{name}: Flax cannot call it as a pure function: {reason}; a call may read the "
                "model's variables and change none; use evaluation mode (model.eval(), "
                "use_running_average=True, deterministic=True) and complete variables"
            ) from error
        except ValueError as error:
            if "different trace level" not in str(error):
                raise
            raise ModelError(
                f"{name}: it captures an nnx module whose transformations then cannot be traced; "
                "a module is allowed as the model itself; pass the module or a method of it "
                "instead of a function that calls it"
            ) from error

    return translated


def _name(model: Model, method: str = "__call__") -> str:
    inner = model.func if isinstance(model, functools.partial) else model
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if method == "__call__" else f"{name}.{method}"


def _paths(tree: object) -> list[str]:
    """Names of the leaves of a state, as a user writes them."""
    return [_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _path(path: Sequence[object]) -> str:
    names = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path)
    return ".".join(str(name) for name in names).removesuffix(".value")


def _unused_counts(state: object, jaxpr: Jaxpr, num_results: int) -> set[str]:
    """Random counters that no result depends on, as when a layer draws a seed but uses zeros."""
    needed = [i < num_results for i in range(len(jaxpr.outvars))]
    _, used = partial_eval.dce_jaxpr(jaxpr, needed)
    variables = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )[0]
    counts = {_path(path) for path, leaf in variables if isinstance(leaf, nnx.RngCount)}
    return {path for path, use in zip(_paths(state), used, strict=False) if not use} & counts


def _origin(jaxpr: Jaxpr, atom: Var | Literal) -> Var | Literal:
    """The value that an output is a copy of, followed through calls and loops."""
    writers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    while not isinstance(atom, Literal) and atom in writers:
        equation = writers[atom]
        source = _passed_through(equation, equation.outvars.index(atom))
        if source is None:
            return atom
        atom = source
    return atom


def _passed_through(equation: JaxprEqn, result: int) -> Var | Literal | None:
    """The operand that a call or loop returns unchanged as the numbered result; None if none."""
    params = equation.params
    body = next((params[key] for key in _CALLS if key in params), None)
    if body is None:
        return None
    body = getattr(body, "jaxpr", body)
    inner = _origin(body, body.outvars[result])
    if isinstance(inner, Literal) or inner not in body.invars:
        return None
    operand = body.invars.index(inner)
    if equation.primitive.name == "scan":
        positions = params["ft_in"].update(range(len(equation.invars))).unpack()
        consts, carry, xs = (tuple(role) for role in positions)
        returned = xs if result >= len(carry) else (len(consts) + result,)
        if operand not in returned:
            return None
    return equation.invars[operand]
