"""The command `pbjax embed`: texts as vectors."""

import io
import json
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.model_folder import ENCODERS, encodes_text, find_folder, load
from pbjax.cli.options import Folder, Json, StoredDtype, input_option, path_option
from pbjax.errors import InputError
from pbjax.files import check_writable, write_atomically
from pbjax.text_tables import printable

if TYPE_CHECKING:
    import numpy as np

# Numbers of an embedding that a line of text shows.
SHOWN = 4


def embed(
    model: Folder,
    texts: Annotated[
        Path | None, input_option(help="Texts to embed, one a line; - is standard input.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to embed; may be repeated.")
    ] = None,
    similar: Annotated[
        int | None,
        typer.Option(min=1, help="Print this many of the most similar pairs, and no vectors."),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="Name of the folder's prompt that stands before each text."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What stands before each text, in place of such a prompt.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken, or several with"
            " commas, in place of the folder's."
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut texts after so many tokens, in place of the folder's.")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Vectors of length one or not; else as the folder."
        ),
    ] = None,
    out: Annotated[
        Path | None, path_option(help="Write the vectors into this file (.npy), a row for a text.")
    ] = None,
    dtype: StoredDtype = None,
    as_json: Json = False,
) -> None:
    """Turn texts into vectors by a text encoder, as its folder says (sentence-transformers).

    A folder that says nothing gives the means of the token vectors, of length one.
    """
    if (texts is None) == (not text):
        raise InputError(
            "embed(): --texts and --text are both given or both absent; one of them is needed; "
            "give a file by --texts FILE or a text by --text TEXT"
        )
    check_writable("--out", out)
    from pbjax.inference.embedding import embed as run

    lines = _lines(texts) if texts is not None else list(text or ())
    models = import_module("models")
    settings = models.load_sentence_settings(model)
    find_folder(model, "embed", encodes_text, ENCODERS)
    asked = partial(
        run,
        texts=lines,
        tokenizer=models.load_tokenizer(model),
        settings=settings,
        prompt_name=prompt_name,
        prompt=prompt,
        pooling=None if pooling is None else pooling.split(","),
        max_tokens=max_length,
        normalize=normalize,
    )
    vectors = _embed(load(model, dtype), asked)
    if out is not None:
        _save(out, vectors)
    if similar is not None:
        _print_similar(lines, vectors, similar, as_json=as_json)
    elif as_json:
        rows = zip(lines, vectors.tolist(), strict=True)
        print(json.dumps({"embeddings": [{"text": t, "vector": vector} for t, vector in rows]}))
    elif out is not None:
        print(f"{out}: {len(vectors):,} vectors of {vectors.shape[1]:,} numbers, f32")
    else:
        for line, vector in zip(lines, vectors, strict=True):
            numbers = " ".join(f"{value:7.4f}" for value in vector[:SHOWN])
            print(f"{numbers} ... ({len(vector)})  {printable(line)}")


def _lines(path: Path) -> list[str]:
    """Every line of a file, so that row and line have one number; says how many are blank."""
    from pbjax.errors import warn
    from pbjax.inference.texts import read_lines

    lines = read_lines(path)
    if blank := sum(not line.strip() for line in lines):
        warn(
            f"--texts {path}: {blank} of {len(lines)} lines are blank; they are embedded as empty "
            "texts, so that row and line agree; remove them if they are none"
        )
    return lines


def _save(path: Path, vectors: "np.ndarray") -> None:
    import numpy as np

    content = io.BytesIO()
    np.save(content, vectors)
    write_atomically(path, content.getvalue())


def _print_similar(lines: list[str], vectors: "np.ndarray", count: int, *, as_json: bool) -> None:
    from pbjax.inference.texts import most_similar

    said = [index for index, line in enumerate(lines) if line.strip()]
    pairs = most_similar([lines[index] for index in said], vectors[said], count)
    if as_json:
        print(json.dumps({"similar": [asdict(pair) for pair in pairs]}))
        return
    print(f"the {len(pairs)} most similar pairs of {len(said)} texts, by cosine:")
    for pair in pairs:
        print(f"  {pair.cosine:.3f}  {printable(pair.first)}\n         {printable(pair.second)}")


def _embed(encoder, asked: partial) -> "np.ndarray":
    from pbjax.progress import ProgressPrinter

    with ProgressPrinter() as progress:
        return asked(encoder, progress=lambda done, total: progress("embed", done, total, "texts"))
