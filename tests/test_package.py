"""The package as a whole: what it exports, what importing it loads, how its errors read."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pbjax
from pbjax import errors

SOURCE = Path(pbjax.__file__).parent
MODULES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
CLASSES = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
ERRORS = {name for name, value in CLASSES.items() if not issubclass(value, Warning)}
SETTINGS = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
CONTRACTS = {rule["name"]: rule for rule in SETTINGS["tool"]["importlinter"]["contracts"]}
PURE = CONTRACTS["planning and other pure modules know neither jax nor flax"]["source_modules"]


def loaded_after(statement):
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_pure_modules_load_no_jax():
    names = [*PURE, *(f"pbjax.planning.{p.stem}" for p in (SOURCE / "planning").glob("[a-z]*.py"))]
    loaded = loaded_after("import " + ", ".join(names))
    assert not loaded & {"jax", "jaxlib", "flax", "pydantic", "rich", "typer"}


def test_package_alone_loads_nothing_of_ours():
    loaded = {name for name in loaded_after("import pbjax") if name.startswith("pbjax")}
    assert loaded == {"pbjax"}


def test_help_loads_no_jax():
    loaded = loaded_after(
        "import pbjax.cli.app, typer.testing; "
        "r = typer.testing.CliRunner().invoke(pbjax.cli.app.app, ['optimize', '--help']); "
        "assert r.exit_code == 0"
    )
    assert not loaded & {"jax", "jaxlib", "flax", "models"}


def test_public_names_are_few_and_resolve():
    assert len(pbjax.__all__) <= 12
    assert sorted(pbjax.__all__) == list(pbjax.__all__)
    for name in pbjax.__all__:
        assert getattr(pbjax, name).__name__ == name
        assert name in dir(pbjax)


def test_no_public_name_hides_a_module():
    assert not set(pbjax.__all__) & {Path(name).parts[0].removesuffix(".py") for name in MODULES}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        _ = pbjax.fly


def test_every_error_is_a_pbjax_error():
    for name in ERRORS:
        assert issubclass(getattr(errors, name), pbjax.PbjaxError)


def raised():
    """(file, line, error class, literal text) of every place that raises an error of ours."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = getattr(node.exc.func, "id", "")
                if name in ERRORS:
                    pieces = ast.walk(node.exc)
                    texts = [p.value for p in pieces if isinstance(p, ast.Constant)]
                    text = "".join(t for t in texts if isinstance(t, str))
                    yield f"{path.name}:{node.lineno}", name, text


def test_every_message_has_the_house_form():
    """asked: found; allowed; what to do. Messages that pass on a remedy count what they show."""
    places = list(raised())
    assert len(places) > 30
    wrong = [place for place, _, text in places if text.count(";") < _separators(place)]
    assert not wrong
    assert not [place for place, _, text in places if "\n" in text or "!" in text]


# Where the allowed and the remedy come in as one text, with the separator inside.
REMEDY_PASSED_IN = ("files.py", "profile_table.py")


def _separators(place):
    return 1 if place.startswith(REMEDY_PASSED_IN) else 2


def test_only_our_errors_are_raised():
    """And AssertionError for what cannot happen, and what Python, typer and fusion catch.

    A SplitError is a ModelError that makes its text of the operation that it is given; functions
    whose names end in error or unwritable return one of ours.
    """
    caught = {"AttributeError", "Exit", "BadParameter", "refusal", "Mismatch", "SplitError"}
    allowed = (
        ERRORS
        | caught
        | {"AssertionError", "FloatingPointError", "OutputError", "_error", "_unwritable"}
    )
    found = {
        f"{path.name}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if (getattr(node.exc.func, "id", "") or getattr(node.exc.func, "attr", "")) not in allowed
    }
    assert not found


@pytest.mark.parametrize("name", MODULES)
def test_files_are_of_a_readable_size(name):
    assert len((SOURCE / name).read_text().splitlines()) <= 400
