"""The seam to Flax: any model becomes apply(params, *inputs) and its params.

After this file nnx and linen no longer exist. The user's object is read, never changed. A model
whose state would change in a call (running statistics, random counters, caches) is refused by
`check_state`, which traces but runs nothing. How a function becomes a graph is in `trace`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import flax.errors
import flax.linen as nn
import jax
from flax import nnx
from jax.extend.core import Jaxpr, Literal, Var

from pbjax.errors import InputError, InputTypeError, ModelError

type Model = nnx.Module | nn.Module | Callable

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Functional:
    """A model as a function.

    Attributes:
      apply: Called as apply(params, *inputs); pure if `check_state` passes.
      params: Pytree of everything the model holds, parameters and other state alike.
      name: The class or function name, for reports.
      apply_and_update: Called like apply; returns the output and params as they are after the call.
        None where the model has no state that a call could change.
    """

    apply: Callable
    params: object
    name: str
    apply_and_update: Callable | None = None


def functional(model: Model, variables: Mapping[str, object] | None = None) -> Functional:
    """Turns a model into a function of its params and inputs.

    Args:
      model: An nnx module, a linen module (bound, or together with variables), or any callable.
      variables: What linen's `init` returned; for an unbound linen module only.

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
            f"functional(model): the model is {found}; allowed are an nnx module, a linen module "
            "or a function; pass an instance that can be called"
        )
    if isinstance(model, nn.Module):
        return _from_linen(model, variables)
    if variables is not None:
        raise InputError(
            f"functional(model, variables): {_name(model)} is no linen module; variables are for "
            "linen modules only; leave out variables="
        )
    return _from_nnx(model) if isinstance(model, nnx.Module) else _from_callable(model)


def check_state(model: Functional, *inputs: object) -> None:
    """Refuses a model whose state changes in a call; traces it, runs nothing.

    Args:
      model: What `functional` returned.
      *inputs: Inputs of a call, or their shapes and dtypes.

    Raises:
      ModelError: A call changes a variable, named by its path, or needs state that is not there.
    """
    if model.apply_and_update is None:
        jax.eval_shape(model.apply, model.params, *inputs)
        return
    paths = [_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(model.params)[0]]
    closed, out_shape = jax.make_jaxpr(model.apply_and_update, return_shape=True)(
        model.params, *inputs
    )
    after = [_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(out_shape[1])[0]]
    before = dict(zip(paths, closed.jaxpr.invars, strict=False))
    outvars = closed.jaxpr.outvars[len(closed.jaxpr.outvars) - len(after) :]
    changed = [
        path
        for path, var in zip(after, outvars, strict=True)
        if path not in before or _origin(closed.jaxpr, var) is not before[path]
    ]
    changed += [path for path in paths if path not in after]
    if changed:
        raise ModelError(
            f"{model.name}: a call changes its state ({', '.join(changed)}); only models whose "
            "state stays the same can run in sub-batches; call model.eval() first, or pass caches "
            "as inputs and return them as outputs"
        )


def _from_nnx(model: nnx.Module) -> Functional:
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda leaf: leaf, state)  # split shares the model's variables; these not

    def apply(params, *inputs):
        return nnx.merge(graphdef, params, copy=True)(*inputs)

    def apply_and_update(params, *inputs):
        module = nnx.merge(graphdef, params, copy=True)
        return module(*inputs), nnx.state(module)

    return Functional(
        apply=_translating(apply, _name(model)),
        params=state,
        name=_name(model),
        apply_and_update=_translating(apply_and_update, _name(model)),
    )


def _from_linen(model: nn.Module, variables: Mapping[str, object] | None) -> Functional:
    name = _name(model)
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
        return model.apply(params, *inputs, mutable=False)

    return Functional(apply=_translating(apply, name), params=variables, name=name)


def _from_callable(function: Callable) -> Functional:
    def apply(params, *inputs):
        return function(*inputs)

    name = _name(function)
    return Functional(apply=_translating(apply, name), params=(), name=name)


def _translating(apply: Callable, name: str) -> Callable:
    """Wraps apply so that Flax's complaints about state reach the user in our form."""

    def translated(params, *inputs):
        try:
            return apply(params, *inputs)
        except flax.errors.FlaxError as error:
            reason = str(error).split(" (https://")[0].rstrip(".").replace("\n", " ")
            raise ModelError(
                f"{name}: Flax cannot call it as a pure function: {reason}; a call may read only "
                "the model's variables and change none; use evaluation mode (model.eval(), "
                "use_running_average=True, deterministic=True) and complete variables"
            ) from error

    return translated


def _name(model: Model) -> str:
    inner = getattr(model, "func", model)
    return getattr(inner, "__name__", type(inner).__name__)


def _path(path: tuple[object, ...]) -> str:
    names = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path)
    return ".".join(str(name) for name in names).removesuffix(".value")


def _origin(jaxpr: Jaxpr, atom: Var | Literal) -> Var | Literal:
    """The value that an output is a mere copy of, looking through nested calls."""
    writers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    while not isinstance(atom, Literal) and atom in writers:
        equation = writers[atom]
        body = next((equation.params[key] for key in _CALLS if key in equation.params), None)
        if equation.primitive.name in ("scan", "while", "cond") or body is None:
            return atom
        body = getattr(body, "jaxpr", body)
        inner = _origin(body, body.outvars[equation.outvars.index(atom)])
        if isinstance(inner, Literal) or inner not in body.invars:
            return atom
        atom = equation.invars[body.invars.index(inner)]
    return atom
