"""The command `pbjax classify`: what is on images."""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.exits import FileByFile
from pbjax.cli.model_folder import Shape, find_folder, load, run, trace
from pbjax.cli.options import Folder, Json, StoredDtype, path_argument
from pbjax.errors import FileError

if TYPE_CHECKING:
    import numpy as np


def classifies_images(shape: Shape) -> bool:
    """Whether it takes images and has a classification head."""
    return hasattr(shape.config, "image_size") and bool(shape.config.num_labels)


def classify(
    model: Folder,
    image: Annotated[list[Path], path_argument(help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="Classes to print.")] = 5,
    dtype: StoredDtype = None,
    as_json: Json = False,
) -> None:
    """Tell what is on images by a Vision Transformer with a classification head."""
    models = import_module("models")
    shape = find_folder(model, "classify", classifies_images, "a ViT with a classification head")
    settings, labels = models.load_preprocessor(model), models.load_labels(model)
    from pbjax.inference.images import read_image

    channels, each, pixels = shape.config.num_channels, FileByFile(), []
    for path in image:
        with each.file(path, FileError):
            one = read_image(path, settings, num_channels=channels, name=str(model))
            pixels.append((path, one))
    if not pixels:
        each.finish()
    import numpy as np

    batch = np.concatenate([one for _, one in pixels])
    trace(shape.module, batch)
    scores = run(load(model, dtype), batch).logits
    ranked = [_best_classes(row, labels, top) for row in np.asarray(scores, np.float64)]
    found = [(path, rows) for (path, _), rows in zip(pixels, ranked, strict=True)]
    if as_json:
        classes = [{"file": str(path), "classes": rows} for path, rows in found]
        print(json.dumps({"images": classes} | each.in_document()))
    else:
        _print_classes(found, named=len(image) > 1)
    each.finish()


def _print_classes(found: list[tuple[Path, list[dict]]], *, named: bool) -> None:
    for path, rows in found:
        if named:
            print(path)
        for row in rows:
            print(f"{row['probability']:6.4f}  {row['label']}")


def _best_classes(scores: "np.ndarray", labels: tuple[str, ...], top: int) -> list[dict]:
    import numpy as np

    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    best = np.argsort(-probabilities, kind="stable")[:top]
    return [
        {
            "index": int(index),
            "label": labels[index] if labels else str(index),
            "probability": float(probabilities[index]),
        }
        for index in best
    ]
