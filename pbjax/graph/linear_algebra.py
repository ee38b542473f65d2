"""FLOPs of factorisations and triangular systems, by their textbook formulas for real matrices.

Those of iterative methods are the counts that Golub and Van Loan give for the usual number of
iterations, which depends on the values.
"""

import math
from collections.abc import Callable, Mapping

from jax.extend.core import JaxprEqn


def _matrix(equation: JaxprEqn) -> tuple[int, int, int]:
    """Number of matrices, and their rows and columns."""
    *batch, rows, columns = equation.invars[0].aval.shape  # pyrefly: ignore[missing-attribute]
    return math.prod(batch), rows, columns


def _eliminated(rows: int, columns: int, steps: int) -> int | float:
    """Multiply-adds of as many steps of elimination, each of which leaves a row and column out."""
    return rows * columns * steps - (rows + columns) * steps**2 / 2 + steps**3 / 3


def _triangular_solve(equation: JaxprEqn) -> int | float:
    """As many FLOPs for each right-hand side as the square of its length, less the divisions."""
    solved = math.prod(equation.invars[1].aval.shape)  # pyrefly: ignore[missing-attribute]
    return solved * (_matrix(equation)[1] - bool(equation.params["unit_diagonal"]))


def _cholesky(equation: JaxprEqn) -> int | float:
    count, size, _ = _matrix(equation)
    return count * size**3 / 3


def _lu(equation: JaxprEqn) -> int | float:
    count, rows, columns = _matrix(equation)
    return 2 * count * _eliminated(rows, columns, min(rows, columns))


def _geqrf(equation: JaxprEqn) -> int | float:
    return 2 * _lu(equation)


def _householder_product(equation: JaxprEqn) -> int | float:
    count, rows, columns = _matrix(equation)
    reflectors = equation.invars[1].aval.shape[-1]  # pyrefly: ignore[missing-attribute]
    return 4 * count * _eliminated(rows, columns, reflectors)


def _qr(equation: JaxprEqn) -> int | float:
    count, rows, columns = _matrix(equation)
    steps = min(rows, columns)
    width = rows if equation.params["full_matrices"] else steps
    return _geqrf(equation) + 4 * count * _eliminated(rows, width, steps)


def _eigh(equation: JaxprEqn) -> int | float:
    count, size, _ = _matrix(equation)
    return count * size**3 * (9 if len(equation.outvars) > 1 else 4 / 3)


def _eig(equation: JaxprEqn) -> int | float:
    count, size, _ = _matrix(equation)
    return count * size**3 * (25 if len(equation.outvars) > 1 else 10)


def _svd(equation: JaxprEqn) -> int | float:
    count, *sides = _matrix(equation)
    rows, columns = max(sides), min(sides)
    if not equation.params["compute_uv"]:
        return count * (4 * rows * columns**2 - 4 * columns**3 / 3)
    return count * (4 * rows**2 * columns + 8 * rows * columns**2 + 9 * columns**3)


DIRECT: Mapping[str, Callable[[JaxprEqn], int | float]] = {
    "triangular_solve": _triangular_solve,
    "cholesky": _cholesky,
    "lu": _lu,
    "qr": _qr,
    "geqrf": _geqrf,
    "householder_product": _householder_product,
}

ITERATIVE: Mapping[str, Callable[[JaxprEqn], int | float]] = {
    "eigh": _eigh,
    "eig": _eig,
    "schur": _eig,
    "svd": _svd,
}
