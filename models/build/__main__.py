"""`python -m models.build make` makes the demo model again; `python -m models.build evaluate` measures it.

`make` goes through: download WordNet, choose the words, train the tokenizer, train, export, evaluate.
"""

import argparse
import logging
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from models.build import wordnet
from models.build.corpus import Corpus
from models.build.evaluate import evaluate
from models.build.export import export, export_texts
from models.build.tokenizer import train_tokenizer
from models.build.train import Recipe, new_model, train

HERE = Path(__file__).parent


def main() -> None:
    """Parses the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="python -m models.build", description=__doc__)
    parser.add_argument("command", choices=("make", "evaluate"))
    parser.add_argument("--wordnet", type=Path, help="the unpacked dict-wn package; downloaded with apt if not given")
    parser.add_argument("--work", type=Path, default=Path(".kvrelay/demo-build"), help="where downloads go")
    parser.add_argument("--out", type=Path, default=HERE.parent / "demo", help="the model folder")
    parser.add_argument("--report", type=Path, default=HERE / "evaluation.json", help="where the measurements go")
    parser.add_argument(
        "--checkpoint-every-s", type=float, default=300.0, help="how often an unfinished model is saved"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    recipe = Recipe()
    root = arguments.wordnet or wordnet.fetch(arguments.work)
    entries = wordnet.select_entries(root, recipe.num_words)
    if arguments.command == "make":
        tokenizer = train_tokenizer(entries, recipe.vocab_size, recipe.max_positions)
        export_texts(entries, wordnet.licence_text(root), arguments.out)
        model = new_model(recipe)
        for number, phase in enumerate(recipe.phases):
            checkpoint = partial(export, tokenizer=tokenizer, folder=arguments.out)
            corpus = Corpus(entries, tokenizer, recipe.seed + number)
            train(model, recipe, phase, corpus, checkpoint, arguments.checkpoint_every_s)
            export(model, tokenizer, arguments.out)
            model = Qwen3ForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    evaluate(arguments.out, entries, arguments.report, recipe.num_threads)


if __name__ == "__main__":
    main()
