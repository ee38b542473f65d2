"""The command `pbjax convert`: a Hugging Face folder as a checkpoint that loads faster."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from pbjax.arguments import dtype_name
from pbjax.cli.model_folder import MB
from pbjax.cli.options import Json, path_argument, path_option


def convert(
    source: Annotated[Path, path_argument(help="A Hugging Face model folder.")],
    target: Annotated[Path, path_argument(help="The Orbax checkpoint to write; must not exist.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Store weights as this dtype: bf16, fp16, fp32.", parser=dtype_name),
    ] = None,
    reference: Annotated[
        Path | None, path_option(help="Inputs and outputs to check against (.npz).")
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read pytorch_model.bin where there are no safetensors: its tensors alone, without"
            " running the program that such a file is.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face folder into a checkpoint that loads without transposing."""
    from pbjax.progress import ProgressPrinter

    with ProgressPrinter() as progress:
        report = import_module("models").convert(
            source,
            target,
            dtype,
            allow_pickle=allow_pickle,
            reference=reference,
            report=(lambda line: None) if as_json else print,
            progress=lambda done, total: progress("convert", done // MB, total // MB, "MB"),
        )
    if as_json:
        for text in report.warnings:
            print(f"warning: {text}", file=sys.stderr)
        print(json.dumps(report.as_dict(), default=str))
