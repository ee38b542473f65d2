"""What Hugging Face generates and preprocesses, for make_generation_reference.py."""

import json
from pathlib import Path

# torch and transformers are imported where they are used, so that --help needs neither.
import numpy as np

SEED = 20
LENGTHS = (3, 8, 5)
NEW_TOKENS = {"gpt2": 8, "bloom": 20, "llama": 24}
PENALTY = 1.3


def generate(folder: Path, num_tokens: int) -> dict[str, object]:
    """Returns prompts and their continuations by one tiny decoder."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = np.random.default_rng(SEED)
    prompts = [generator.integers(1, 96, length).tolist() for length in LENGTHS]
    longest = max(LENGTHS)
    ids = [[0] * (longest - len(p)) + p for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    greedy, margin = run(model, ids, mask, num_tokens)
    found = [run(model, [p], [[1] * len(p)], num_tokens, PENALTY) for p in prompts]
    return {
        "prompts": prompts,
        "greedy": greedy,
        "repetition_penalty": PENALTY,
        "penalised": [sequences[0] for sequences, _ in found],
        "margin": min(margin, *(m for _, m in found)),
    }


def run(model, ids, mask, num_tokens, penalty=1.0) -> tuple[list[list[int]], float]:
    """Returns the new tokens of each row and the least margin of all choices."""
    import torch

    with torch.no_grad():
        output = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=num_tokens,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    best = torch.stack(output.scores).topk(2, dim=-1).values
    return output.sequences[:, len(ids[0]) :].tolist(), float((best[..., 0] - best[..., 1]).min())


def preprocess() -> dict[str, np.ndarray]:
    """Returns inputs of ViT, wav2vec2-conformer and Parakeet, and what they become."""
    import transformers
    from PIL import Image

    generator = np.random.default_rng(SEED)
    pixels = generator.integers(0, 256, (31, 23, 3)).astype(np.uint8)
    images = {}
    for name, resample in (("bilinear", 2), ("bicubic", 3)):
        processor = transformers.ViTImageProcessor(size={"height": 20, "width": 20})
        processor.resample = resample
        given = Image.fromarray(pixels)
        images[f"image.{name}"] = processor(given, return_tensors="np")["pixel_values"][0]
    time = np.arange(2400) / 16000
    audio = 0.3 * np.sin(2 * np.pi * (200 + 900 * time) * time) + 0.02 * generator.normal(size=2400)
    samples = np.round(audio * 32767).astype(np.int16)
    values = (samples / 32768).astype(np.float32)
    raw = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    mels = transformers.ParakeetFeatureExtractor(feature_size=24)
    given = {"sampling_rate": 16000, "return_tensors": "np"}
    return {
        "pixels": pixels,
        **images,
        "samples": samples,
        "audio.normalised": raw(values, **given)["input_values"][0],
        "audio.mels": np.asarray(
            mels(values, sampling_rate=16000, return_tensors="pt")["input_features"][0]
        ),
    }


def write(target: Path) -> None:
    """Writes both files."""
    import PIL
    import torch
    import transformers

    torch.set_num_threads(1)
    versions = {
        "origin": f"transformers {transformers.__version__}",
        "torch": torch.__version__,
        "pillow": PIL.__version__,
        "command": "python scripts/make_generation_reference.py tests/data",
    }
    found = {name: generate(target / name, count) for name, count in NEW_TOKENS.items()}
    text = json.dumps({"meta": versions} | found)
    (target / "generation.json").write_text(text + "\n")
    np.savez_compressed(target / "preprocessing.npz", **preprocess(), meta=json.dumps(versions))
