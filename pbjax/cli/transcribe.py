"""The command `pbjax transcribe`: speech as text."""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pbjax.cli.exits import FileByFile
from pbjax.cli.model_folder import Shape, find_folder, load, run, trace
from pbjax.cli.options import Folder, Json, StoredDtype, path_argument
from pbjax.errors import FileError

if TYPE_CHECKING:
    import numpy as np


def writes_speech(shape: Shape) -> bool:
    """Whether it has a CTC head."""
    return hasattr(shape.config, "blank_id") and bool(shape.config.vocab_size)


def transcribe(
    model: Folder,
    audio: Annotated[
        list[Path],
        path_argument(help="Files: 16-bit WAV of one channel; with pbjax[audio] any audio."),
    ],
    dtype: StoredDtype = None,
    as_json: Json = False,
) -> None:
    """Write down speech by a wav2vec2-conformer, Parakeet or LASR with a CTC head, greedily."""
    models = import_module("models")
    shape = find_folder(model, "transcribe", writes_speech, "a model of speech with a CTC head")
    settings, vocabulary = models.load_preprocessor(model), models.load_vocabulary(model)
    from pbjax.inference.audio import feature_extractor
    from pbjax.inference.audio_files import read_audio
    from pbjax.inference.preprocessor import positive_integer

    rate = positive_integer(settings, "sampling_rate", 16000, str(model))
    extract = feature_extractor(settings, str(model))
    each, heard, found = FileByFile(), [], []
    for path in audio:
        with each.file(path):
            samples = read_audio(path, rate)
            features = extract(samples)
            trace(shape.module, features)
            heard.append((path, len(samples) / rate, features))
    if not heard:
        each.finish()
    network = load(model, dtype)
    for path, seconds, features in heard:
        with each.file(path):
            entries = _entries(network, features, path, seconds)
            text = vocabulary.decode(entries)
            found.append({"file": str(path), "seconds": seconds, "text": text})
            if not as_json:
                print(f"{path}: {text}" if len(audio) > 1 else text)
    if as_json:
        print(json.dumps({"transcripts": found} | each.in_document()))
    each.finish()


def _entries(network, features: "np.ndarray", path: Path, seconds: float) -> list[int]:
    import jax
    import numpy as np

    from pbjax.inference.audio import ctc_greedy

    try:
        scores = np.asarray(run(network, features).logits, np.float32)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise FileError(
            f"{path}: {seconds:.0f} s of audio need more memory than there is; attention takes the "
            "square of the length; cut it into shorter files"
        ) from error
    return ctc_greedy(scores[0], network.config.blank_id)
