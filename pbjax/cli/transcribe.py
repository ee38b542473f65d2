"""The command `pbjax transcribe`: speech as text."""

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

from pbjax.cli.model_folder import Shape, find_folder, load, run, trace
from pbjax.cli.options import Folder, Json, StoredDtype, path_argument


def writes_speech(shape: Shape) -> bool:
    """Whether it has a CTC head."""
    return hasattr(shape.config, "blank_id") and bool(shape.config.vocab_size)


def transcribe(
    model: Folder,
    wav: Annotated[list[Path], path_argument(help="WAV files of one channel of 16 bits.")],
    dtype: StoredDtype = None,
    as_json: Json = False,
) -> None:
    """Write down speech by a wav2vec2-conformer, Parakeet or LASR with a CTC head, greedily."""
    import numpy as np

    models = import_module("models")
    shape = find_folder(model, "transcribe", writes_speech, "a model of speech with a CTC head")
    settings, vocabulary = models.load_preprocessor(model), models.load_vocabulary(model)
    from pbjax.inference import audio
    from pbjax.inference.preprocessor import positive_integer

    rate = positive_integer(settings, "sampling_rate", 16000, str(model))
    samples = [audio.read_wav(path, rate) for path in wav]
    inputs = [audio.extract_features(values, settings, str(model)) for values in samples]
    for features in inputs:
        trace(shape.module, features)
    network, blank, found = load(model, dtype), shape.config.blank_id, []
    for path, values, features in zip(wav, samples, inputs, strict=True):
        scores = run(network, features).logits
        text = vocabulary.decode(audio.ctc_greedy(np.asarray(scores, np.float32)[0], blank))
        found.append({"file": str(path), "seconds": len(values) / rate, "text": text})
        if not as_json:
            print(f"{path}: {text}" if len(wav) > 1 else text)
    if as_json:
        print(json.dumps({"transcripts": found}))
