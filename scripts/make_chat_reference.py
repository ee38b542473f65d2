"""Writes the ids of transformers' apply_chat_template for the chats of tests, into tests/data.

Needs transformers, which pbjax does not: run it where that is, as
`python scripts/make_chat_reference.py`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chats import CHATS, NAMES, REFERENCE, TEMPLATES, tokenizer


def main() -> None:
    """Makes a folder for each template and keeps the ids of each chat."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from transformers import PreTrainedTokenizerFast  # pyrefly: ignore[missing-import]

    found = {}
    for name, template in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            tokenizer().save(f"{folder}/tokenizer.json")
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
            config |= {"chat_template": template}
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            loaded = PreTrainedTokenizerFast.from_pretrained(folder)
            found[name] = {
                f"{chat} {prompt}": loaded.apply_chat_template(
                    messages, add_generation_prompt=prompt, return_dict=False
                )
                for chat, messages in CHATS.items()
                for prompt in (False, True)
            }
    REFERENCE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
