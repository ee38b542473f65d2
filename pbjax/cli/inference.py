"""The commands that run a model: `pbjax generate`, `embed`, `classify` and `transcribe`.

Results go to stdout, progress and figures to stderr. Imports stand inside the commands, so that
--help answers at once.
"""

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.paths import path_argument, path_option
from pbjax.cli.subject import Shape, find_folder
from pbjax.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

    from pbjax.inference.generation import Completion, Token
    from pbjax.runtime.compile_clock import CompileClock

MB = 1_000_000
# Numbers of an embedding that a line of text shows.
SHOWN = 4
ENCODERS = "a text encoder, such as a BERT,"

Folder = Annotated[Path, path_argument(help="A Hugging Face folder, or one of pbjax convert.")]
Dtype = Annotated[str | None, typer.Option(help="Of weights and activations.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def continues_text(shape: Shape) -> bool:
    """Whether it is a decoder with its head."""
    return "decode" in shape.phases


def encodes_text(shape: Shape) -> bool:
    """Whether it is an encoder of texts."""
    return hasattr(shape.module, "packed_hidden_state")


def classifies_images(shape: Shape) -> bool:
    """Whether it takes images and has a classification head."""
    return hasattr(shape.config, "image_size") and bool(shape.config.num_labels)


def writes_speech(shape: Shape) -> bool:
    """Whether it has a CTC head."""
    return hasattr(shape.config, "blank_id") and bool(shape.config.vocab_size)


def generate(
    model: Folder,
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be repeated.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="What scores are divided by; 0 takes the best token.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many best tokens.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw from the best tokens of this probability together.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens of this part of the best one's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that are there already become less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers of the first prompt.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text to end before; may be repeated.")
    ] = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Continue texts by a GPT-2, BLOOM or LLaMA; one prompt is printed as it grows."""
    models = import_module("models")
    shape = find_folder(model, "generate", continues_text, "a GPT-2, BLOOM or LLaMA with its head")
    tokenizer = models.load_tokenizer(model)
    from pbjax.inference.generation import stream
    from pbjax.runtime.compile_clock import CompileClock

    asked = partial(
        stream,
        prompts=prompt,
        max_new_tokens=max_new_tokens,
        tokenizer=tokenizer,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_tokens=models.load_stop_tokens(model),
        stop_strings=stop or (),
    )
    asked(shape.module)  # It refuses what is wrong before the weights are read.
    start = time.perf_counter()
    decoder = _load(model, dtype)
    print(f"weights loaded in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    start = time.perf_counter()
    tokens = asked(decoder)
    show = len(prompt) == 1 and not as_json
    with CompileClock() as clock:
        times = Times(start, clock)
        completions = _gather(times.of(tokens), len(prompt), show=show)
    if as_json:
        print(json.dumps({"completions": _described(prompt, completions), **times.to_dict()}))
    elif len(prompt) > 1:
        for text, completion in zip(prompt, completions, strict=True):
            print(f"--- {text}\n{completion.text}")
    print(times, file=sys.stderr)


class Times:
    """Seconds to the first token and to the last, and those that making the programs took."""

    def __init__(self, start_s: float, clock: "CompileClock") -> None:
        """Takes the time of the call, and what listens while the tokens come."""
        self._clock = clock
        self._start_s, self._first_s, self._last_s, self._count = start_s, start_s, start_s, 0

    def of(self, tokens: "Iterator[Token]") -> "Iterator[Token]":
        """Passes tokens on and counts them."""
        for token in tokens:
            self._last_s = time.perf_counter()
            if self._count == 0:
                self._first_s = self._last_s
            self._count += 1
            yield token

    def to_dict(self) -> dict[str, object]:
        """Returns the figures under their names."""
        return {
            "num_tokens": self._count,
            "time_to_first_token_s": self._first_s - self._start_s,
            "total_s": self._last_s - self._start_s,
            "making_programs_s": self._clock.seconds,
        }

    def __str__(self) -> str:
        """One line."""
        made = ", ".join(f"{step} {seconds:.2f} s" for step, seconds in self._clock.seconds.items())
        return (
            f"{self._count} tokens in {self._last_s - self._start_s:.2f} s, the first after "
            f"{self._first_s - self._start_s:.2f} s; of it making programs: {made or 'none'}"
        )


def _gather(tokens: "Iterator[Token]", count: int, *, show: bool) -> "list[Completion]":
    """The completions of a stream, whose text is shown as it comes."""
    from pbjax.inference.generation import Completion

    found = [[] for _ in range(count)]
    for token in tokens:
        found[token.sequence].append(token)
        if show:
            print(token.text, end="", flush=True)
    if show:
        print()
    return [Completion.of(tokens) for tokens in found]


def _described(prompts: list[str], completions: "list[Completion]") -> list[dict[str, object]]:
    return [
        {
            "prompt": prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "log_probs": completion.log_probs,
            "finish_reason": completion.finish_reason,
        }
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def embed(
    model: Folder,
    texts: Annotated[Path | None, path_option(help="Texts to embed, one a line.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to embed; may be repeated.")
    ] = None,
    dtype: Dtype = None,
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
    encoder = _load(model, dtype)
    vectors = _embed(encoder, tokenizer, sentences)
    if as_json:
        rows = zip(sentences, vectors.tolist(), strict=True)
        print(json.dumps({"embeddings": [{"text": t, "vector": vector} for t, vector in rows]}))
        return
    for sentence, vector in zip(sentences, vectors, strict=True):
        numbers = " ".join(f"{value:7.4f}" for value in vector[:SHOWN])
        print(f"{numbers} ... ({len(vector)})  {sentence}")


def classify(
    model: Folder,
    image: Annotated[list[Path], path_argument(help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="Classes to print.")] = 5,
    dtype: Dtype = None,
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
    _trace(shape.module, batch)
    scores = _run(_load(model, dtype), batch).logits
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


def transcribe(
    model: Folder,
    wav: Annotated[list[Path], path_argument(help="WAV files of one channel of 16 bits.")],
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Write down speech by a wav2vec2-conformer, Parakeet or LASR with a CTC head, greedily."""
    models = import_module("models")
    shape = find_folder(model, "transcribe", writes_speech, "a model of speech with a CTC head")
    settings, vocabulary = models.load_preprocessor(model), models.load_vocabulary(model)
    from pbjax.inference import audio
    from pbjax.inference.preprocessor import positive_integer

    rate = positive_integer(settings, "sampling_rate", 16000, str(model))
    samples = [audio.read_wav(path, rate) for path in wav]
    inputs = [audio.extract_features(values, settings, str(model)) for values in samples]
    for features in inputs:
        _trace(shape.module, features)
    network, blank, found = _load(model, dtype), shape.config.blank_id, []
    for path, values, features in zip(wav, samples, inputs, strict=True):
        scores = _run(network, features).logits
        text = vocabulary.decode(audio.ctc_greedy(_numpy(scores)[0], blank))
        found.append({"file": str(path), "seconds": len(values) / rate, "text": text})
        if not as_json:
            print(f"{path}: {text}" if len(wav) > 1 else text)
    if as_json:
        print(json.dumps({"transcripts": found}))


def _load(folder: Path, dtype: str | None):
    from pbjax.progress import ProgressPrinter
    from pbjax.runtime.program_cache import keep_programs

    keep_programs()
    with ProgressPrinter() as progress:
        return import_module("models").load(
            folder,
            dtype,
            progress=lambda done, total: progress("load", done // MB, total // MB, "MB"),
        )


def _trace(module, *inputs) -> None:
    """Has a model without weights refuse inputs that it cannot take."""
    import jax

    from pbjax.graph.functional import functional

    function = functional(module)
    jax.eval_shape(function.apply, function.params, *inputs)


def _run(model, *inputs):
    """The model's output by one compiled program."""
    import jax

    from pbjax.graph.functional import functional

    function = functional(model)
    return jax.jit(function.apply)(function.params, *inputs)


def _numpy(array) -> "np.ndarray":
    import numpy as np

    return np.asarray(array, np.float32)


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
