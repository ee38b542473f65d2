"""The command line as a whole: help, usage, exit codes, and options that name paths."""

import inspect

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from pbjax.cli.app import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_names_the_commands_and_what_their_exit_codes_mean():
    text = " ".join(invoke("--help").stdout.split())
    for command in app.registered_commands:
        assert command.callback.__name__ in text
    for words in ("Exit codes: 0 done", "2 a wrong argument or file", "130 interrupted"):
        assert words in text


@pytest.mark.parametrize("arguments", [("--help",), ("optimize", "--help"), ("convert", "--help")])
def test_help_answers(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("arguments", [("fly",), ("optimize",), ("optimize", "x", "--batch", "0")])
def test_wrong_usage_is_refused(arguments):
    assert invoke(*arguments).exit_code == 2


def path_options():
    """Every option of every command that is a path, as (command, option)."""
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        for each in get_command(app).commands[name].params:
            hint = str(inspect.signature(command.callback).parameters[each.name].annotation)
            if "pathlib" in hint and each.opts[0].startswith("--"):
                yield name, each.opts[0]


OPTIONS = list(path_options())


def test_options_that_are_paths_are_found():
    written = ("--save-plan", "--trace", "--figures", "--html")
    assert {("optimize", option) for option in written} <= set(OPTIONS)
    assert {("profile", "--out"), ("calibrate", "--out"), ("search", "--profile")} <= set(OPTIONS)


PATHS = [
    *OPTIONS,
    *((command,) for command in ("convert", "optimize", "embed", "roofline")),
    *((command, "a model") for command in ("convert", "classify", "transcribe")),
    *((command, "--model") for command in ("profile", "search")),
    ("roofline", "gpt2", "--draft"),
]
READ = ("--texts", "--ids", "--prompts")  # "-" is standard input.
NO_PATHS = [(path, "", "it is empty") for path in PATHS]
NO_PATHS += [(path, "-", "- is neither standard") for path in PATHS if path[-1] not in READ]


@pytest.mark.parametrize(
    ("arguments", "text", "found"),
    NO_PATHS,
    ids=[" ".join((*path, text or "empty")) for path, text, _ in NO_PATHS],
)
def test_an_empty_text_and_a_dash_are_no_paths(arguments, text, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, text)
    assert result.exit_code == 2
    assert found in result.stderr
    assert "is allowed; give" in " ".join(result.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
