"""Writes the model folder file by file through renames, so that a reader never sees half a file."""

import copy
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from models.build.tokenizer import END_OF_TEXT_ID, IM_END_ID
from models.build.wordnet import Entry


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Stores weights (as bfloat16), configuration and tokenizer in `folder`; leaves its other files alone.

    The configuration names float32: half the size on disk, and the same tokens on every machine that loads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = copy.deepcopy(model).bfloat16()
    stored.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID
    )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-") as staging:
        stored.save_pretrained(staging)
        config_path = Path(staging) / "config.json"
        config = json.loads(config_path.read_text())
        config_path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
        tokenizer.save_pretrained(staging)
        for path in sorted(Path(staging).iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def export_texts(entries: Sequence[Entry], licence: str, folder: Path) -> None:
    """Writes the words with their glosses, one a line, and the licence they come under, beside the model."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{entry.word}\t{entry.pos}\t{entry.gloss}\n" for entry in entries]
    (folder / "glosses.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "LICENSE-WordNet").write_text(licence, encoding="utf-8")
