"""The command `pbjax generate`: texts continued by a decoder."""

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.model_folder import Shape, find_folder, load
from pbjax.cli.options import Folder, Json, StoredDtype, input_option
from pbjax.errors import InputError
from pbjax.text_tables import printable

if TYPE_CHECKING:
    from pbjax.inference.generation import Completion, Token
    from pbjax.runtime.compile_clock import CompileClock


def continues_text(shape: Shape) -> bool:
    """Whether it is a decoder with its head."""
    return "decode" in shape.phases


def generate(
    model: Folder,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue, or to answer; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None, input_option(help="Such texts, one a line; - is standard input.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each prompt is a user's message, by the folder's template."),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="Message of the system before it, for --chat.")
    ] = None,
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
    dtype: StoredDtype = None,
    as_json: Json = False,
) -> None:
    """Continue texts by a GPT-2, BLOOM or LLaMA; one prompt is printed as it grows."""
    prompt = _texts(prompt, prompts)
    if system is not None and not chat:
        raise InputError(
            f"generate(--system {system!r}): no chat; it is allowed with --chat; add it, or leave "
            "--system out"
        )
    models = import_module("models")
    shape = find_folder(model, "generate", continues_text, "a GPT-2, BLOOM or LLaMA with its head")
    tokenizer = models.load_tokenizer(model)
    from pbjax.inference.generation import stream
    from pbjax.runtime.compile_clock import CompileClock

    asked = partial(
        stream,
        prompts=None if chat else prompt,
        messages=_messages(prompt, system) if chat else None,
        chat_template=models.load_chat_template(model) if chat else None,
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
    decoder = load(model, dtype)
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
            print(f"--- {shown(text)}\n{shown(completion.text or '')}")
    print(times, file=sys.stderr)


def _texts(prompt: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, or of a file."""
    if (file is None) == (not prompt):
        raise InputError(
            "generate(): --prompt and --prompts are both given or both absent; one of them is "
            "needed; give a text by --prompt TEXT or a file by --prompts FILE"
        )
    if file is None:
        return list(prompt or ())
    from pbjax.inference.texts import read_lines

    return read_lines(file, "--prompts")


def _messages(prompts: list[str], system: str | None) -> list[list[dict[str, object]]]:
    """A conversation for each prompt."""
    first: list[dict[str, object]] = []
    if system is not None:
        first = [{"role": "system", "content": system}]
    return [[*first, {"role": "user", "content": prompt}] for prompt in prompts]


def shown(text: str) -> str:
    """A text of several lines as it may go to a terminal."""
    return printable(text, keep="\n\t")


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
            print(shown(token.text or ""), end="", flush=True)
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
