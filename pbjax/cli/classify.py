"""The command `pbjax classify`: what is on images."""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.model_folder import Shape, find_folder, load, run, trace
from pbjax.cli.options import Folder, Json, StoredDtype, path_argument

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

    channels = shape.config.num_channels
    pixels = [read_image(p, settings, num_channels=channels, name=str(model)) for p in image]
    import numpy as np

    batch = np.concatenate(pixels)
    trace(shape.module, batch)
    scores = run(load(model, dtype), batch).logits
    ranked = [_best_classes(row, labels, top) for row in np.asarray(scores, np.float64)]
    if as_json:
        found = zip(image, ranked, strict=True)
        print(json.dumps({"images": [{"file": str(p), "classes": rows} for p, rows in found]}))
        return
    for path, rows in zip(image, ranked, strict=True):
        if len(image) > 1:
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
