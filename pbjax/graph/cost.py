"""FLOPs and bytes of one traced equation: the only place that counts them.

FLOPs are counted as XLA counts them, so that whole programs agree with its cost analysis: two for
each multiply-add, one for each element of an elementwise operation, and none for the transcendental
functions, which have a count of their own. Other than by XLA, complex numbers count as the real
arithmetic that they take: eight for each multiply-add, six for a product, two for a sum. Each input
is read once and each output written once; look-ups and slices count only the bytes they touch.
`classify` decides how long a device takes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.operation import arguments_of
from pbjax.graph.convolution import conv_flops
from pbjax.graph.kernel_costs import flops_instead, share_of_pairs, unread_bytes
from pbjax.graph.linear_algebra import DIRECT, ITERATIVE
from pbjax.graph.moved_bytes import (
    SCATTERS,
    TOUCHED_BYTES,
    all_bytes,
    num_elements,
    shape_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The work and the bytes of an operation.

    Attributes:
      flops: Arithmetic operations, without transcendental functions.
      bytes: Bytes read and written.
      transcendentals: Evaluations of exp, log, tanh, sqrt and the like.
      exact: False where a trip count or a branch is not known before the run: a loop without a
        known length counts once, a branch as its costliest, eigenvalues by their usual iterations.
      known: False if the primitive is not counted here; its FLOPs are then missing.
    """

    flops: float = 0.0
    bytes: float = 0.0
    transcendentals: float = 0.0
    exact: bool = True
    known: bool = True

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs and transcendental functions per byte."""
        work = self.flops + self.transcendentals
        return work / self.bytes if self.bytes else (math.inf if work else 0.0)

    def __add__(self, other: "Cost") -> "Cost":
        """The cost of doing both."""
        return Cost(
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            transcendentals=self.transcendentals + other.transcendentals,
            exact=self.exact and other.exact,
            known=self.known and other.known,
        )

    def times(self, count: int) -> "Cost":
        """The cost of doing it `count` times."""
        return Cost(
            flops=count * self.flops,
            bytes=count * self.bytes,
            transcendentals=count * self.transcendentals,
            exact=self.exact,
            known=self.known,
        )


def equation_cost(equation: JaxprEqn) -> Cost:
    """Counts one equation; a loop, branch or call by its body.

    Args:
      equation: Any equation of a jaxpr.

    Returns:
      Its cost. An unknown primitive has known=False, no FLOPs, and the bytes of its operands.
    """
    name = equation.primitive.name
    if name in _NESTED:
        return _NESTED[name](equation)
    if name in CALLS:
        return _body_cost(equation.params[CALLS[name]])
    if name in VIEWS:
        return Cost()
    moved = float(TOUCHED_BYTES.get(name, all_bytes)(equation))
    parts = _real_parts(equation)
    elements = float(_out_elements(equation))
    if name in ITERATIVE:
        products = parts**2 * float(ITERATIVE[name](equation))
        return Cost(flops=products, bytes=moved, exact=False)
    if name in _TRANSCENDENTAL:
        elements *= parts
        extra, functions = _TRANSCENDENTAL[name]
        return Cost(flops=extra * elements, transcendentals=functions * elements, bytes=moved)
    if name in _ELEMENTWISE:
        each = 1 if parts == 1 else _COMPLEX.get(name, 2)
        return Cost(flops=each * elements, bytes=moved)
    if name in _PRODUCTS:
        return Cost(flops=parts**2 * float(_PRODUCTS[name](equation)), bytes=moved)
    if name in _FLOPS:
        return Cost(flops=float(_FLOPS[name](equation)), bytes=moved)
    return Cost(bytes=moved, known=name in _MOVES)


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The sum of costs; zero if there are none."""
    return sum(costs, Cost())


def _real_parts(equation: JaxprEqn) -> int:
    """2 where an operation computes with complex numbers, else 1."""
    dtypes = (getattr(atom.aval, "dtype", None) for atom in (*equation.invars, *equation.outvars))
    return 2 if any(getattr(dtype, "kind", "") == "c" for dtype in dtypes) else 1


def _out_elements(equation: JaxprEqn) -> int:
    return num_elements(equation.outvars[0])


# FLOPs of primitives that do not count one for each element.


def _dot_flops(equation: JaxprEqn) -> int | float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    shape = shape_of(equation.invars[0])
    return 2 * _out_elements(equation) * math.prod(shape[int(axis)] for axis in contracting)


def _ragged_dot_flops(equation: JaxprEqn) -> int | float:
    return 2 * _out_elements(equation) * shape_of(equation.invars[0])[-1]


def _step_flops(equation: JaxprEqn) -> int | float:
    """FLOPs of a step of a reduction: of its own body, or of a sum or product."""
    if "jaxpr" in equation.params:
        return _body_cost(equation.params["jaxpr"]).flops
    if _real_parts(equation) == 1:
        return 1
    return 6 if "prod" in equation.primitive.name else 2


def _reduce_flops(equation: JaxprEqn) -> int | float:
    reduced = num_elements(equation.invars[0]) - _out_elements(equation)
    return _step_flops(equation) * reduced


def _window_flops(equation: JaxprEqn) -> int | float:
    steps = math.prod(equation.params["window_dimensions"]) - 1
    return _step_flops(equation) * _out_elements(equation) * steps


def _cumulative_flops(equation: JaxprEqn) -> int | float:
    length = shape_of(equation.invars[0])[equation.params["axis"]]
    steps = num_elements(equation.invars[0]) * (length - 1) / length if length else 0
    return _step_flops(equation) * steps


def _sort_flops(equation: JaxprEqn) -> int | float:
    length = shape_of(equation.invars[0])[equation.params["dimension"]]
    return num_elements(equation.invars[0]) * math.ceil(math.log2(max(length, 2)))


def _top_k_flops(equation: JaxprEqn) -> int | float:
    return num_elements(equation.invars[0]) * math.ceil(math.log2(max(equation.params["k"], 2)))


def _power_flops(equation: JaxprEqn) -> int | float:
    """Multiplications by repeated squaring, and a division where the exponent is negative."""
    exponent = abs(equation.params["y"])
    products = exponent.bit_length() + exponent.bit_count() - 2 if exponent else 0
    product, quotient = (_COMPLEX["mul"], _COMPLEX["div"]) if _real_parts(equation) > 1 else (1, 1)
    each = product * products + quotient * (equation.params["y"] < 0)
    return _out_elements(equation) * each


def _scatter_flops(equation: JaxprEqn) -> int | float:
    return 0 if equation.primitive.name == "scatter" else num_elements(equation.invars[2])


def _random_flops(equation: JaxprEqn) -> int | float:
    """Threefry: 20 rounds of 5 operations make two words."""
    return 50 * sum(map(num_elements, equation.outvars))


def _fft_flops(equation: JaxprEqn) -> int | float:
    """Those of the algorithm of Cooley and Tukey; a real transform takes half of them."""
    points = math.prod(equation.params["fft_lengths"])
    elements = max(num_elements(equation.invars[0]), _out_elements(equation))
    real = equation.params["fft_type"] in (lax.FftType.RFFT, lax.FftType.IRFFT)
    return (2.5 if real else 5) * elements * math.log2(max(points, 2))


def _attention_flops(equation: JaxprEqn) -> int | float:
    """The two products of attention; every score counts, masked or not."""
    query, key = (shape_of(var) for var in equation.invars[:2])
    length = key[2] if equation.params["layout"] else key[1]
    return 4 * math.prod(query) * length


# Of complex numbers, multiply-adds take four of real ones.
_PRODUCTS: Mapping[str, Callable[[JaxprEqn], int | float]] = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": conv_flops,
    "dot_product_attention_fwd_wrapper": _attention_flops,
    **DIRECT,
}

# FLOPs of an elementwise operation on complex numbers; two where none are given.
_COMPLEX: Mapping[str, int] = {"mul": 6, "div": 11, "square": 6, "abs": 3, "conj": 1}

_FLOPS: Mapping[str, Callable[[JaxprEqn], int | float]] = {
    "integer_pow": _power_flops,
    "sort": _sort_flops,
    "top_k": _top_k_flops,
    "approx_top_k": _top_k_flops,
    "fft": _fft_flops,
    **dict.fromkeys(SCATTERS, _scatter_flops),
    **dict.fromkeys(("random_bits", "threefry2x32", "rng_bit_generator"), _random_flops),
    **dict.fromkeys(("random_fold_in", "random_split", "random_seed"), _random_flops),
    "reduce_window": _window_flops,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window_flops),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative_flops),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
            *("reduce_xor", "reduce", "argmax", "argmin"),
        ),
        _reduce_flops,
    ),
}

# FLOPs and transcendental functions for each element: XLA has a few of these functions itself and
# expands the others, logistic(x) to 1 / (1 + exp(-x)) and erfc(x) to polynomials.
_TRANSCENDENTAL: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(
        ("atan", "atan2", "cbrt", "cos", "erf", "exp", "expm1", "log", "log1p", "pow", "rsqrt"),
        (0, 1),
    ),
    **dict.fromkeys(("sin", "sqrt", "tan", "tanh"), (0, 1)),
    "acos": (3, 2),
    "acosh": (7, 4),
    "asin": (5, 2),
    "asinh": (11, 3),
    "atanh": (6, 2),
    "bessel_i0e": (83, 1),
    "bessel_i1e": (83, 1),
    "cosh": (3, 2),
    "digamma": (75, 3),
    "erf_inv": (37, 2),
    "erfc": (60, 1),
    "exp2": (1, 1),
    "lgamma": (52, 4),
    "log2": (1, 1),
    "logistic": (3, 1),
    "sinh": (10, 3),
}

_ELEMENTWISE_NAMES = """
    abs add add_any and ceil clamp clz complex conj convert_element_type div eq eq_to floor ge gt
    is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or
    population_count reduce_precision rem round select_n shift_left shift_right_arithmetic
    shift_right_logical sign square sub xor
"""

# The same bytes under another shape or name: nothing moves.
_VIEW_NAMES = """
    bitcast_convert_type expand_dims layout_constraint name optimization_barrier pvary random_unwrap
    random_wrap reshape sharding_constraint squeeze stop_gradient platform_index
"""

_MOVE_NAMES = """
    broadcast_in_dim concatenate copy copy_p device_put dynamic_slice dynamic_update_slice empty
    empty2 gather imag iota pad random_clone real rev slice split stack tile transpose unstack
    zeros_like
"""

_ELEMENTWISE, VIEWS, _MOVES = (
    frozenset(names.split()) for names in (_ELEMENTWISE_NAMES, _VIEW_NAMES, _MOVE_NAMES)
)

# Primitives that only call, and the parameter that holds the called body.
CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "custom_partitioning": "call",
}


def _body_cost(body: Jaxpr | ClosedJaxpr) -> Cost:
    jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    return total_cost(equation_cost(equation) for equation in jaxpr.eqns)


def bodies(equation: JaxprEqn) -> tuple[int, tuple[Jaxpr | ClosedJaxpr, ...]]:
    """How often a loop, or a call for each device of a mesh, runs, and the bodies that it runs.

    A loop of unknown length is taken to run once. Other operations, and branches, have no bodies.
    """
    params = equation.params
    match equation.primitive.name:
        case "scan":
            return params["length"], (params["jaxpr"],)
        case "while":
            return 1, (params["cond_jaxpr"], params["body_jaxpr"])
        case "shard_map":
            return params["mesh"].size, (params["jaxpr"],)
        case "custom_linear_solve":
            return 1, (params["jaxprs"].solve,)
    return 1, ()


def _repeated_cost(equation: JaxprEqn) -> Cost:
    count, inner = bodies(equation)
    return total_cost(map(_body_cost, inner)).times(count)


def _while_cost(equation: JaxprEqn) -> Cost:
    return _repeated_cost(equation) + Cost(exact=False)


def _cond_cost(equation: JaxprEqn) -> Cost:
    costs = [_body_cost(branch) for branch in equation.params["branches"]]
    costliest = max(costs, key=lambda cost: (cost.flops, cost.transcendentals, cost.bytes))
    return costliest + Cost(exact=costs.count(costliest) == len(costs))


def _pallas_cost(equation: JaxprEqn) -> Cost:
    """The cost that the kernel's author declared; without a declaration it is unknown."""
    estimate = equation.params.get("cost_estimate")
    if estimate is None:
        return Cost(bytes=float(all_bytes(equation)), known=False)
    return Cost(
        flops=float(estimate.flops),
        bytes=float(estimate.bytes_accessed),
        transcendentals=float(estimate.transcendentals),
    )


def _kernel_cost(equation: JaxprEqn) -> Cost:
    """The arithmetic of a kernel, and the bytes of its operands and results alone."""
    params = equation.params
    name, operands = params["name"], [atom.aval for atom in equation.invars]
    given = arguments_of(params, operands)
    plain, share = _body_cost(params["plain"]), share_of_pairs(name, operands)
    return Cost(
        flops=share * plain.flops + flops_instead(name, given),
        bytes=float(all_bytes(equation)) - unread_bytes(name, given),
        transcendentals=share * plain.transcendentals,
        exact=plain.exact and share == 1.0,
        known=plain.known,
    )


_NESTED: Mapping[str, Callable[[JaxprEqn], Cost]] = {
    KERNEL: _kernel_cost,
    "scan": _repeated_cost,
    "shard_map": _repeated_cost,
    "custom_linear_solve": _repeated_cost,
    "while": _while_cost,
    "cond": _cond_cost,
    "pallas_call": _pallas_cost,
}
