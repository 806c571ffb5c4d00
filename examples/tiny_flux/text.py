"""The tokenizers and frozen text encoders of tiny-flux, built here from the captions alone.

The encoders keep their random initial weights: random vectors tell words apart well. What random weights
cannot do is tell "a red circle on a blue background" from "a blue circle on a red background", so the T5
encoder's relative position biases are set by hand: each head looks at one neighbour of a word. That also
keeps a caption's embedding nearly independent of how much padding follows it, which matters because
FluxPipeline pads every prompt to `max_sequence_length` without a mask.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import torch
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 64  # of both encoders
HEAD_OFFSETS = (-1, 1, -2, 2)  # the neighbour that each T5 head looks at
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-"


def _words(captions: Sequence[str]) -> list[str]:
    return sorted(set(re.findall(r"[a-z]+", " ".join(captions))))


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, the most frequent pair first, until every word is one piece."""
    split = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while pairs := Counter(pair for pieces in split for pair in itertools.pairwise(pieces)):
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(pair)
        for pieces in split:
            for i in range(len(pieces) - 2, -1, -1):
                if (pieces[i], *pieces[i + 1 : i + 2]) == pair:
                    pieces[i : i + 2] = ["".join(pair)]
    return merges


def build_clip_tokenizer(captions: Sequence[str]) -> CLIPTokenizer:
    """A byte-level BPE in which every caption word is one token; any other text falls back to pieces."""
    special = ["<|startoftext|>", "<|endoftext|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(_words(captions))
    pieces = [*special, *letters, *(letter + "</w>" for letter in letters), *map("".join, merges)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocab, merges=merges, unk_token=special[1], model_max_length=77)


def build_t5_tokenizer(captions: Sequence[str]) -> T5TokenizerFast:
    """A unigram tokenizer of the caption words, lower-case and capitalised, and of single letters."""
    words = _words(captions)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("▁" + word, -3.0) for word in words]
    pieces += [("▁" + word.capitalize(), -3.0) for word in words]
    pieces += [("▁", -8.0)] + [(letter, -10.0) for letter in _LETTERS]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=512)


def build_clip_encoder(tokenizer: CLIPTokenizer, seed: int = 1) -> CLIPTextModel:
    """A small random CLIP text model; its pooled output mixes all words of the caption."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval().requires_grad_(False)


def build_t5_encoder(tokenizer: T5TokenizerFast, seed: int = 2) -> T5EncoderModel:
    """A small random T5 encoder whose heads each look at one neighbouring word (see the module's text)."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=WIDTH // len(HEAD_OFFSETS),
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=len(HEAD_OFFSETS),
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
        is_encoder_decoder=False,
    )
    encoder = T5EncoderModel(config).eval().requires_grad_(False)
    bias = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    bias.zero_()
    bias[0] = 8.0  # the word itself, where the neighbour does not exist
    for head, offset in enumerate(HEAD_OFFSETS):
        bucket = -offset if offset < 0 else config.relative_attention_num_buckets // 2 + offset
        bias[bucket, head] = 16.0
    table, vocab = encoder.shared.weight, tokenizer.get_vocab()
    for piece, index in vocab.items():  # a capitalised word means what the plain one does
        if piece.lower() != piece and piece.lower() in vocab:
            table[index] = table[vocab[piece.lower()]]
    return encoder
