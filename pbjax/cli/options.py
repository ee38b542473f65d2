"""Options that several commands have: paths, dtypes, JSON, and the device that one is about."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbjax.arguments import dtype_name
from pbjax.errors import DeviceError, InputError
from pbjax.files import STDIN, check_named

if TYPE_CHECKING:
    from pbjax.device import Device

RUN_ELSEWHERE = (
    "run it where there is one of them, or in Python pass device=pbjax.Device(...), with the "
    "figures of its datasheet, to pbjax.optimize"
)


def path_option(*names: str, help: str) -> Any:
    """An option that names a file or folder; an empty text and "-" name none.

    Args:
      *names: The option's name, where it is not the parameter's.
      help: What it is for.
    """
    return typer.Option(*names, help=help, parser=to_path)


def input_option(*, help: str) -> Any:
    """An option that names a file to read; "-" is standard input, and an empty text names none.

    Args:
      help: What it is for.
    """
    return typer.Option(help=help, parser=to_input)


def path_argument(*, help: str) -> Any:
    """An argument that names a file or folder; an empty text and "-" name none.

    Args:
      help: What it is for.
    """
    return typer.Argument(help=help, parser=to_path)


def to_path(text: str) -> Path:
    """The path that was given.

    Raises:
      typer.BadParameter: It is empty, or "-".
    """
    return Path(to_source(text))


def to_input(text: str) -> Path:
    """The path of what is to be read, `STDIN` for "-".

    Raises:
      typer.BadParameter: It is empty.
    """
    return STDIN if text == "-" else to_path(text)


def to_source(text: str) -> str:
    """The path or name that was given, as it was written.

    Raises:
      typer.BadParameter: It is empty, or "-".
    """
    try:
        check_named(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    return text


Model = Annotated[
    str,
    typer.Option(
        help="A preset, such as bert-base, or a folder with a config.json.", parser=to_source
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Rows of the batch.")]
Seq = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens or frames of a row; the usual ones of a benchmark if absent."),
]
Folder = Annotated[Path, path_argument(help="A Hugging Face folder, or one of pbjax convert.")]
Dtype = Annotated[
    str, typer.Option(help="Dtype of weights and activations: bf16, fp16, fp32.", parser=dtype_name)
]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Dtype of weights and activations, bf16, fp16 or fp32; the stored one if absent.",
        parser=dtype_name,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Figures = Annotated[
    Path | None,
    path_option("--figures", help="Also write figures (SVG, PNG), CSV and JSON into this folder."),
]
Html = Annotated[
    Path | None,
    path_option("--html", help="Also write a page with figures that needs no network."),
]


def named_device(asked: str, words: str) -> "Device":
    """The device that an option `--device` names.

    Args:
      asked: The command, for the message.
      words: What was given.

    Raises:
      InputError: The words name no device, or several.
    """
    from pbjax.device import find_device, matching_devices

    found = matching_devices(words)
    if len(found) == 1:
        return find_device(words)
    if found:
        what, allowed = "several devices are called so", _slugs(found)
    else:
        what, allowed = "no figures of such a device", f"{_slugs()}, or a word of one such as l40s,"
    raise InputError(
        f"{asked} --device {words or "''"}: {what}; {allowed} are allowed; give one of them"
    )


def this_device(asked: str, remedy: str = RUN_ELSEWHERE) -> "Device":
    """The first device of JAX with the figures of its datasheet.

    Args:
      asked: The command, for the message.
      remedy: What to do where there are no figures.

    Raises:
      DeviceError: There are no figures of its kind.
    """
    import jax

    from pbjax.device import find_device, matching_devices

    kind = jax.devices()[0].device_kind
    if len(matching_devices(kind)) != 1:
        raise DeviceError(
            f"{asked}: the first device of JAX is {kind!r}, of which no figures are known; there "
            f"are those of {_slugs()}; {remedy}"
        )
    return find_device(kind, num_cores=os.cpu_count() or 1)


def _slugs(devices: "Sequence[Device]" = ()) -> str:
    """Devices as one writes them after `--device`; all if none are given."""
    from pbjax.device import devices as known

    *others, last = [device.slug.replace("_", "-") for device in devices or known()]
    return f"{', '.join(others)} and {last}"
