"""A tiny random Llama that is a real model: a directory with weights, configuration and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 256


def llama(seed: int = 0, **settings: Any) -> nn.Module:
    """Two layers, sharp enough that predictions differ from token to token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    facts = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        **settings,
    }
    return LlamaForCausalLM(LlamaConfig(**facts)).eval()


def tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built)


def directory(path: Path, model: nn.Module | None = None) -> Path:
    """Write a model and the tokenizer as a Hugging Face directory."""
    saved: Any = llama() if model is None else model
    saved.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def sentences(path: Path, count: int = 40) -> Path:
    """A file of text, some 60 bytes a sentence."""
    lines = (f"Sentence {i} of {count} says that {i * i} is the square of {i}, no more.\n" for i in range(count))
    path.write_text("".join(lines), encoding="utf-8")
    return path
