"""The command `pbjax embed`: texts as vectors."""

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.model_folder import ENCODERS, encodes_text, find_folder, load
from pbjax.cli.options import Folder, Json, StoredDtype, path_option
from pbjax.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

# Numbers of an embedding that a line of text shows.
SHOWN = 4


def embed(
    model: Folder,
    texts: Annotated[Path | None, path_option(help="Texts to embed, one a line.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to embed; may be repeated.")
    ] = None,
    similar: Annotated[
        int | None,
        typer.Option(min=1, help="Print this many of the most similar pairs, and no vectors."),
    ] = None,
    dtype: StoredDtype = None,
    as_json: Json = False,
) -> None:
    """Turn texts into vectors of length one by a text encoder: the means of its token vectors."""
    if (texts is None) == (not text):
        raise InputError(
            "embed(): --texts and --text are both given or both absent; one of them is needed; "
            "give a file by --texts FILE or a text by --text TEXT"
        )
    from pbjax.inference.texts import read_sentences

    sentences = read_sentences(texts, None) if texts is not None else list(text or ())
    find_folder(model, "embed", encodes_text, ENCODERS)
    tokenizer = import_module("models").load_tokenizer(model)
    encoder = load(model, dtype)
    vectors = _embed(encoder, tokenizer, sentences)
    if similar is not None:
        _print_similar(sentences, vectors, similar, as_json=as_json)
    elif as_json:
        rows = zip(sentences, vectors.tolist(), strict=True)
        print(json.dumps({"embeddings": [{"text": t, "vector": vector} for t, vector in rows]}))
    else:
        for sentence, vector in zip(sentences, vectors, strict=True):
            numbers = " ".join(f"{value:7.4f}" for value in vector[:SHOWN])
            print(f"{numbers} ... ({len(vector)})  {sentence}")


def _print_similar(
    sentences: list[str], vectors: "np.ndarray", count: int, *, as_json: bool
) -> None:
    from pbjax.inference.texts import most_similar

    pairs = most_similar(sentences, vectors, count)
    if as_json:
        print(json.dumps({"similar": [asdict(pair) for pair in pairs]}))
        return
    print(f"the {len(pairs)} most similar pairs of {len(sentences)} texts, by cosine:")
    for pair in pairs:
        print(f"  {pair.cosine:.3f}  {pair.first}\n         {pair.second}")


def _embed(encoder, tokenizer: "tokenizers.Tokenizer", texts: list[str]) -> "np.ndarray":
    from pbjax.inference.embedding import embed as run
    from pbjax.progress import ProgressPrinter

    with ProgressPrinter() as progress:
        return run(
            encoder,
            texts,
            tokenizer=tokenizer,
            progress=lambda done, total: progress("embed", done, total, "texts"),
        )
