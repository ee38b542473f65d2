"""A function that carries state from call to call, optimised: the state is split once and kept so.

A decode step reads the caches of every layer and adds one entry to each. Handing these in whole
would cut and join gigabytes in every call, so they are held in the pieces of the sub-batches, and
each call writes into them where they lie.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pbjax.errors import InputError, InputTypeError
from pbjax.graph.placement import placed
from pbjax.program.analysis import Analysis
from pbjax.tuning.call_arrays import check_alike, refuse_traced, run_here
from pbjax.tuning.request import Request

type Pieces = tuple[tuple[Array, ...], ...]


class Held:
    """State on the device in the pieces of its sub-batches; a call uses it up."""

    def __init__(self, owner: object, pieces: Pieces):
        """Takes the pieces: for each sub-batch the leaves of its part of the state."""
        self._owner = owner
        self._pieces: Pieces | None = pieces

    def take(self, owner: object) -> Pieces:
        """Hands the pieces out; they are gone from here.

        Raises:
          InputError: They are gone already, or belong to another step.
        """
        if self._pieces is None or self._owner is not owner:
            found = (
                "was used up by an earlier call" if self._pieces is None else "is another step's"
            )
            raise InputError(
                f"step: the state {found}; each call takes the state that the call before it "
                "returned; keep that one, or hold() a state anew"
            )
        pieces, self._pieces = self._pieces, None
        return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Where the state is among the inputs and outputs of a step, and how it is cut.

    Attributes:
      argument: Which input is the state.
      tree: Structure of the state.
      inputs: Its leaves among the leaves of the inputs.
      outputs: Its leaves among the leaves of the outputs.
      axes: Batch axis of each of its leaves; None for one that all rows share.
      sizes: Rows of each sub-batch.
      signature: Shape and dtype of each leaf of the inputs.
      others: Structure of the inputs without the state.
    """

    argument: int
    tree: jax.tree_util.PyTreeDef
    inputs: range
    outputs: range
    axes: tuple[int | None, ...]
    sizes: tuple[int, ...]
    signature: tuple[tuple[tuple[int, ...], jnp.dtype], ...]
    others: jax.tree_util.PyTreeDef

    def check_state(self, leaves: Sequence[object]) -> None:
        """Raises InputError unless leaves are of the planned shapes and dtypes."""
        check_alike("hold: leaf", leaves, self.signature[self.inputs.start : self.inputs.stop])

    def check_others(self, inputs: tuple[object, ...]) -> list[Array]:
        """Returns the leaves of the inputs without the state.

        Raises:
          InputTypeError: They have another structure.
          InputError: They have other shapes or dtypes.
        """
        leaves, tree = jax.tree.flatten(inputs)
        if tree != self.others:
            raise InputTypeError(
                f"step: the inputs beside the state are {tree}; {self.others} was planned for; pass"
                " inputs of the same structure as the example"
            )
        start, stop = self.inputs.start, self.inputs.stop
        check_alike("step: input", leaves, self.signature[:start] + self.signature[stop:])
        return leaves

    def cut(self, leaves: Sequence[Array]) -> Pieces:
        """The state of each sub-batch; of a single one the leaves themselves.

        Each has a copy of what all rows share: a call uses up one buffer for each.
        """
        if len(self.sizes) == 1:
            return (tuple(leaves),)
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return tuple(
            tuple(
                jnp.copy(x) if axis is None else lax.slice_in_dim(x, start, start + size, axis=axis)
                for x, axis in zip(leaves, self.axes, strict=True)
            )
            for start, size in zip(starts, self.sizes, strict=True)
        )

    def join(self, pieces: Pieces) -> list[Array]:
        """The leaves of the whole state."""
        if len(pieces) == 1:
            return list(pieces[0])
        return [
            parts[0] if axis is None else lax.concatenate(parts, axis)
            for axis, parts in zip(self.axes, zip(*pieces, strict=True), strict=True)
        ]


def find_state(analysis: Analysis, request: Request) -> StateLayout:
    """Where the state is in the inputs and outputs of a function.

    Raises:
      InputError: There is no such input, it has no array, or the function does not return its like
        exactly once, the batch in the same axes.
    """
    inputs, argument = request.inputs, request.state
    assert argument is not None
    if not 0 <= argument < len(inputs):
        raise InputError(
            f"optimize(state={argument}): there are {len(inputs)} inputs; a number from 0 to "
            f"{len(inputs) - 1} is allowed; say which input is carried from call to call"
        )
    leaves, tree = jax.tree.flatten(inputs[argument])
    if not leaves:
        raise InputError(
            f"optimize(state={argument}): that input is {tree}, without an array; what is carried "
            "from call to call has one or more; leave out state="
        )
    start = len(jax.tree.leaves(inputs[:argument]))
    stop = start + len(leaves)
    out_tree, graph = analysis.graph.out_tree, analysis.graph
    # The graph's own inputs: of one or two rows it has been traced at more.
    planned = [graph.avals[i] for i in graph.inputs]
    kinds = [(x.shape, x.dtype) for x in planned[start:stop]]
    avals = [graph.avals[a] if isinstance(a, int) else a.aval for a in graph.outputs]

    def is_state(part: object) -> bool:
        if jax.tree.structure(part) != tree:
            return False
        return [(avals[i].shape, avals[i].dtype) for i in jax.tree.leaves(part)] == kinds

    numbered = jax.tree.unflatten(out_tree, range(len(avals)))
    found = [part for part in jax.tree.leaves(numbered, is_leaf=is_state) if is_state(part)]
    if len(found) != 1:
        raise InputError(
            f"optimize(state={argument}): the function returns {len(found)} values like that input "
            f"({tree}); exactly one is the state of the next call; return it once, with the same "
            "structure, shapes and dtypes"
        )
    numbers = jax.tree.leaves(found[0])
    axes = analysis.batch.axes[start:stop]
    returned = tuple(analysis.out_axes[i] for i in numbers)
    if not analysis.unsplittable and returned != axes:
        raise InputError(
            f"optimize(state={argument}): the batch is in the axes {axes} of its leaves, and in "
            f"{returned} of what is returned; both must be alike; return each as it came"
        )
    return StateLayout(
        argument=argument,
        tree=tree,
        inputs=range(start, stop),
        outputs=range(numbers[0], numbers[0] + len(numbers)),
        axes=axes,
        sizes=(analysis.batch.batch_size,),
        signature=tuple(
            (x.shape, aval.dtype) for x, aval in zip(jax.tree.leaves(inputs), planned, strict=True)
        ),
        others=jax.tree.structure((*inputs[:argument], *inputs[argument + 1 :])),
    )


class StepRunner:
    """Runs a step whose state is held in pieces; see `Optimized` for what its methods do."""

    def __init__(
        self,
        program: Callable,
        weights: tuple[Array, ...],
        layout: StateLayout,
        out_tree: jax.tree_util.PyTreeDef,
    ):
        """Wraps a compiled program.

        Args:
          program: Called as program(weights, pieces, others), `others` being the leaves of the
            inputs that are not state; returns such leaves of the outputs, and the new pieces.
          weights: Weights of the program.
          layout: Where the state is, and how it is cut.
          out_tree: Structure of what the function returns.
        """
        self._program: Callable | None = program
        self._weights = weights
        self._layout = layout
        self._out_tree = _with_one_leaf(out_tree, layout)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The one batch size."""
        return (sum(self._layout.sizes),)

    def apply(self, params: object, *inputs: object) -> object:
        """Refuses: a step runs with its own params."""
        raise InputError(
            "apply(params): a step that carries state has the params it was optimized with; "
            "functions without state take others; optimize the step again with the other model"
        )

    def close(self) -> None:
        """Lets go of the weights and the program."""
        self._program, self._weights = None, ()

    def hold(self, state: object) -> Held:
        """Takes a state over."""
        leaves, tree = jax.tree.flatten(state)
        if tree != self._layout.tree:
            raise InputTypeError(
                f"hold: the state is {tree}; {self._layout.tree} was planned for; pass a state "
                "like the example's"
            )
        self._layout.check_state(leaves)
        refuse_traced("hold", leaves)
        if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, Array)):
            raise InputError(
                "hold: an array of the state was used up by an earlier call; a state is held once; "
                "release() what the last call returned, or make the state anew"
            )
        return Held(self, self._layout.cut(_distinct(list(map(placed, leaves)))))

    def release(self, held: object) -> object:
        """The state as a whole again."""
        if not isinstance(held, Held):
            raise InputTypeError(
                f"release: a {type(held).__name__}; a held state is allowed; pass what hold() or a "
                "call returned"
            )
        return jax.tree.unflatten(self._layout.tree, self._layout.join(held.take(self)))

    def __call__(self, *inputs: object) -> object:
        """Runs the step."""
        if self._program is None:
            raise InputError(
                "step: close() has let go of its program; calls before it are allowed; optimize "
                "again"
            )
        argument = self._layout.argument
        held = inputs[argument] if argument < len(inputs) else None
        if not isinstance(held, Held):
            raise InputTypeError(
                f"step: input {argument}, the state, is a {type(held).__name__}; a held state is "
                "allowed; make it by step.hold(state)"
            )
        # Before the state is taken, which would be lost with a call that fails.
        others = self._layout.check_others(inputs[:argument] + inputs[argument + 1 :])
        refuse_traced("step", others)
        outputs, pieces = run_here(self._program, self._weights, held.take(self), tuple(others))
        start = self._layout.outputs.start
        leaves = [*outputs[:start], Held(self, pieces), *outputs[start:]]
        return jax.tree.unflatten(self._out_tree, leaves)


def _distinct(leaves: Sequence[Array]) -> list[Array]:
    """The leaves, an array that occurs again copied: a call uses up one buffer for each."""
    seen: set[int] = set()
    found = []
    for leaf in leaves:
        found.append(jnp.copy(leaf) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return found


def _with_one_leaf(
    out_tree: jax.tree_util.PyTreeDef, layout: StateLayout
) -> jax.tree_util.PyTreeDef:
    """Structure of the outputs with the state as one leaf."""
    numbers = list(layout.outputs)

    def is_state(tree) -> bool:
        return jax.tree.structure(tree) == layout.tree and jax.tree.leaves(tree) == numbers

    numbered = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    return jax.tree.structure(numbered, is_leaf=is_state)
