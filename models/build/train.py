"""Training: AdamW with warm-up and cosine decay over packed conversations, in bfloat16 with float32 weights."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from models.build.corpus import IGNORED, Batch, Corpus
from models.build.tokenizer import END_OF_TEXT_ID, IM_END_ID
from models.build.wordnet import Entry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out, beside the text."""

    seed: int = 20
    num_words: int = 2000
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 8192
    num_steps: int = 3200
    num_warmup_steps: int = 200
    peak_rate: float = 2e-3
    weight_decay: float = 0.05
    batch_tokens: int = 2048
    row_tokens: int = 256
    long_row_tokens: int = 2048
    long_every_steps: int = 10
    num_threads: int = 2


def new_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """An untrained model of the recipe's shape."""
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def train(
    recipe: Recipe,
    entries: Sequence[Entry],
    tokenizer: PreTrainedTokenizerFast,
    checkpoint: Callable[[Qwen3ForCausalLM], None],
    checkpoint_every_s: float,
) -> Qwen3ForCausalLM:
    """The trained model. `checkpoint` is called with the unfinished one about every `checkpoint_every_s` seconds."""
    torch.set_num_threads(recipe.num_threads)
    model = new_model(recipe)
    corpus = Corpus(entries, tokenizer, recipe.seed)
    optimizer = _optimizer(model, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    log.info("training %.2fM parameters for %d steps", model.num_parameters() / 1e6, recipe.num_steps)
    started_s = saved_s = time.monotonic()
    mean_loss, mean_correct = math.log(recipe.vocab_size), 0.0
    for step in range(1, recipe.num_steps + 1):
        loss, correct = _loss(model, _batch(corpus, recipe, step))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean_loss += (loss.item() - mean_loss) * 0.02
        mean_correct += (correct - mean_correct) * 0.02
        now_s = time.monotonic()
        if step % 50 == 0:
            left_min = (now_s - started_s) / step * (recipe.num_steps - step) / 60
            log.info("step %d: loss %.4f, tokens right %.4f, %.1f min left", step, mean_loss, mean_correct, left_min)
        if now_s - saved_s > checkpoint_every_s:
            checkpoint(model)
            saved_s = now_s
    return model.eval()


def _batch(corpus: Corpus, recipe: Recipe, step: int) -> Batch:
    if step % recipe.long_every_steps == 0:
        return corpus.long(recipe.batch_tokens // recipe.long_row_tokens, recipe.long_row_tokens)
    return corpus.packed(recipe.batch_tokens // recipe.row_tokens, recipe.row_tokens)


def _loss(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """Mean cross-entropy over the labelled positions, and the share of them predicted right."""
    wanted = batch.labels != IGNORED
    targets = batch.labels[wanted]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.ids, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[wanted])
    logits = logits.float()
    correct = (logits.detach().argmax(-1) == targets).float().mean().item()
    return functional.cross_entropy(logits, targets), correct


def _optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    scales = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=True)


def _rate(step: int, recipe: Recipe) -> float:
    """The share of the peak rate at a step: linear warm-up, then a cosine down to zero."""
    if step < recipe.num_warmup_steps:
        return (step + 1) / recipe.num_warmup_steps
    done = (step - recipe.num_warmup_steps) / (recipe.num_steps - recipe.num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
