"""``python -m launch.tiny_model OUT``: a tiny Llama, its tokenizer and chat template, made here without a download.

Why it is built and not drawn at random: a cache policy must never change an output, and tests check that by comparing
greedy tokens of cached, recomputed and batched runs. In a random model the two best logits are now and then closer
than float noise, and the batch's shape alone flips a token. So one part of this model is a digital circuit, and its
other part an ordinary random transformer that is too weak to overrule it:

- *digital*: each token has an 11-bit code. In each of the 3 layers, 12 attention heads pick the tokens at 12 fixed
  distances (RoPE phases, see ``_PICK_WEIGHTS``) and rotate their codes, each head by another number of bits. The MLP
  takes the parity of these and the own code, bit by bit, and the result, back at +-1, is the code for the next layer.
  The distances (1..12, 13 x 1..12, 169 x 1..12) make the final code depend on each of the last 2,197 tokens: one wrong
  token among them changes the output. The token that the final code stands for gets the top logit; all others are at
  least 2 lower, before the second part.
- *random*: the other channels are random embeddings, attention heads and MLP units as in any random model. They reach
  the logits with a deviation near ``SOFT_LOGIT_STD`` and depend smoothly on every token of the context.

The text that it writes is noise. Special tokens are never the best choice, so a greedy generation ends by its token
limit. It wants float32.

Size: 3 layers, width 512, 16 heads over 4 KV heads, 2,056 tokens; 97 MiB on disk, 3 KiB of KV per token.

Measured with ``--measure`` (2026-11-30; 2 cores of an Intel Xeon; SGLang 0.5.23, torch 2.13.0):

- 5,120 greedy tokens, each computed three ways (nothing cached, all cached, 8 requests at once): 0 differ; smallest
  margin between the best two logits 1.12, median 1.77; largest difference of a log probability between the ways
  6.8e-5. Margin over noise: 16,000. 1,877 different tokens were written.
- One wrong KV row in a context of 300 (another token's, in all layers): the largest change of a logit is 1.0e-3 at
  least, 3.9e-3 in the median, and 71 % of 80-token outputs change.
- Time to the first token over HTTP, 300 tokens: miss 98 ms, hit 15 ms, ratio 6.4 (medians of 60; the best were 86 and
  14 ms). Decode: 9 ms per token.
"""

import argparse
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

CODE_BITS = 11
ORDINARY_TOKENS = 2**CODE_BITS
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|tool|>", "<|unused0|>", "<|unused1|>")
VOCAB = ORDINARY_TOKENS + len(SPECIAL_TOKENS)
LAYERS = 3
WIDTH = 512
MLP_WIDTH = 4608
HEADS = 16
KV_HEADS = 4
HEAD_DIM = 32
MAX_POSITIONS = 32768
ROPE_THETA = 1000.0
SEED = 20240607

PICKS = 12  # picking heads per layer: those of the first three KV heads
SOFT_LOGIT_STD = 0.12  # in units where the best code leads the second best by 2

# A picking head scores distance x from its target as PICK_SCALE * sum_f w_f cos(theta_f x). These weights (one per RoPE
# frequency) solve the linear programme "fall by at least g with each step up to 2,100, stay 3 g below the top beyond":
# g = 1.35e-4. So the head finds its target among 32,768 positions, and where the context is too short to have it, the
# first token, each time ahead of all others by PICK_SCALE * g = 35 in the exponent.
_PICK_WEIGHTS = (
    *(0.00016, 0.00011, 0.00018, 0.00015, 0.00038, 0.00084, 0.0, 0.00157),
    *(0.00424, 0.00293, 0.00387, 0.00478, 0.0, 0.14301, 0.0, 0.83777),
)
PICK_SCALE = 2.6e5

# Channels of the residual stream: one constant, the codes that enter each layer and leave the last one, each layer's
# sums of picked codes, and the rest for the random part.
_CONST = 0
_CODE = [1 + CODE_BITS * layer for layer in range(LAYERS + 1)]
_SUM = [1 + CODE_BITS * (LAYERS + 1 + layer) for layer in range(LAYERS)]
_SOFT = 1 + CODE_BITS * (2 * LAYERS + 1)
# The constant is so large that it alone decides the RMS: RMSNorm becomes a fixed scale (the norm weights undo it), and
# the picking heads' scores depend on positions only.
_CONST_VALUE = 2.0**15
# Slope of the gates where a bit is cut back to +-1; silu of +-_STEEP / 2 is relu to within float32.
_STEEP = 64.0


def pick_distances(layer: int) -> list[int]:
    """How far back the picking heads of a layer look, in tokens."""
    return [(PICKS + 1) ** layer * step for step in range(1, PICKS + 1)]


def turn(layer: int, head: int) -> int:
    """By how many bits a picking head rotates the code that it brings.

    Without it a context shorter than the longest reach had only its plain parity to go by, which the next token
    depends on alone: generations then ran into cycles of some 50 tokens.
    """
    return (head + 1) * (2 * layer + 1) % CODE_BITS


def _normal(rng: np.random.Generator, rows: int, columns: int, std: float) -> Array:
    return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)


def _codes(rng: np.random.Generator) -> Array:
    """One +-1 code per token, all different for ordinary tokens: ``[VOCAB, CODE_BITS]``."""
    numbers = np.concatenate([rng.permutation(ORDINARY_TOKENS), rng.integers(0, ORDINARY_TOKENS, len(SPECIAL_TOKENS))])
    bits = (numbers[:, None] >> np.arange(CODE_BITS)[None, :]) & 1
    return (2 * bits - 1).astype(np.float32)


def _attention(rng: np.random.Generator, layer: int) -> dict[str, Array]:
    soft = WIDTH - _SOFT
    query, key, value = (np.zeros((n * HEAD_DIM, WIDTH), np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    out = np.zeros((WIDTH, HEADS * HEAD_DIM), np.float32)
    half = HEAD_DIM // 2
    group = HEADS // KV_HEADS
    frequencies = [ROPE_THETA ** (-2 * f / HEAD_DIM) for f in range(half)]
    amplitudes = [math.sqrt(PICK_SCALE * weight * math.sqrt(HEAD_DIM)) for weight in _PICK_WEIGHTS]
    for kv_head in range(PICKS // group):
        base = kv_head * HEAD_DIM
        key[base : base + half, _CONST] = amplitudes
        for bit in range(CODE_BITS):
            value[base + bit, _CODE[layer] + bit] = 1
    for head, distance in enumerate(pick_distances(layer)):
        base = head * HEAD_DIM
        # RoPE turns the pair (f, f + half) by position * theta_f; this phase turns the query back by the distance.
        phases = [-distance * frequency for frequency in frequencies]
        query[base : base + half, _CONST] = [a * math.cos(p) for a, p in zip(amplitudes, phases)]
        query[base + half : base + HEAD_DIM, _CONST] = [a * math.sin(p) for a, p in zip(amplitudes, phases)]
        for bit in range(CODE_BITS):
            out[_SUM[layer] + (bit + turn(layer, head)) % CODE_BITS, base + bit] = 1
    # Random heads. Their scores have a deviation of 2: each looks at some tokens much more than at others.
    queries, keys = slice(PICKS * HEAD_DIM, None), slice(PICKS // group * HEAD_DIM, None)
    scale = 1 / math.sqrt(soft)
    query[queries, _SOFT:] = _normal(rng, (HEADS - PICKS) * HEAD_DIM, soft, math.sqrt(2) * scale)
    key[keys, _SOFT:] = _normal(rng, (KV_HEADS - PICKS // group) * HEAD_DIM, soft, math.sqrt(2) * scale)
    value[keys, _SOFT:] = _normal(rng, (KV_HEADS - PICKS // group) * HEAD_DIM, soft, scale)
    out[_SOFT:, queries] = _normal(rng, soft, (HEADS - PICKS) * HEAD_DIM, 0.6 / math.sqrt((HEADS - PICKS) * HEAD_DIM))
    return {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}


def _mlp(rng: np.random.Generator, layer: int) -> dict[str, Array]:
    soft = WIDTH - _SOFT
    gate, up = np.zeros((MLP_WIDTH, WIDTH), np.float32), np.zeros((MLP_WIDTH, WIDTH), np.float32)
    down = np.zeros((WIDTH, MLP_WIDTH), np.float32)
    inputs = PICKS + 1
    unit = 0
    for bit in range(CODE_BITS):
        target = _CODE[layer + 1] + bit
        # Parity of `inputs` +-1 values as a function of their sum: it changes sign at each even number between two
        # possible sums. Each change is a ramp of width 1, the difference of two relus, flat around the possible sums.
        sign = 2.0 * (-1) ** inputs
        for change in range(2 - inputs - 1, inputs, 2):
            sign = -sign
            for offset, slope in ((-0.5, sign), (0.5, -sign)):
                gate[unit, [_SUM[layer] + bit, _CODE[layer] + bit]] = _STEEP
                gate[unit, _CONST] = -_STEEP * (change + offset)
                up[unit, _CONST] = 1 / _STEEP
                down[target, unit] = slope
                unit += 1
    # The value at the lowest sum, from one unit that is always on.
    gate[unit, _CONST], up[unit, _CONST] = _STEEP, 1 / _STEEP
    down[_CODE[layer + 1] : _CODE[layer + 1] + CODE_BITS, unit] = (-1) ** inputs
    unit += 1
    gate[unit:, _SOFT:] = _normal(rng, MLP_WIDTH - unit, soft, 1 / math.sqrt(soft))
    up[unit:, _SOFT:] = _normal(rng, MLP_WIDTH - unit, soft, 1 / math.sqrt(soft))
    down[_SOFT:, unit:] = _normal(rng, soft, MLP_WIDTH - unit, 0.5 / math.sqrt(MLP_WIDTH - unit))
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def weights() -> dict[str, Array]:
    """All tensors by their Hugging Face names; the same bits on every call."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    norm = np.full(WIDTH, _CONST_VALUE / math.sqrt(WIDTH), np.float32)
    norm[_CONST] = 1 / math.sqrt(WIDTH)
    embedding = _normal(rng, VOCAB, WIDTH, 1.0)
    embedding[:, :_SOFT] = 0
    embedding[:, _CONST] = _CONST_VALUE
    embedding[:, _CODE[0] : _CODE[0] + CODE_BITS] = _codes(rng)
    # Which token a final code means has nothing to do with which token carries it at the input.
    head = _normal(rng, VOCAB, WIDTH, SOFT_LOGIT_STD / math.sqrt(WIDTH - _SOFT))
    head[:, :_SOFT] = 0
    head[:ORDINARY_TOKENS, _CODE[LAYERS] : _CODE[LAYERS] + CODE_BITS] = _codes(rng)[:ORDINARY_TOKENS]
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": head}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{name}.weight": value for name, value in _attention(rng, layer).items()}
        tensors |= {f"{prefix}mlp.{name}.weight": value for name, value in _mlp(rng, layer).items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = norm.copy()
    return tensors


def config() -> dict[str, Any]:
    """The model's ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": ORDINARY_TOKENS + SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": ORDINARY_TOKENS + SPECIAL_TOKENS.index("</s>"),
        "pad_token_id": ORDINARY_TOKENS + SPECIAL_TOKENS.index("<pad>"),
        "torch_dtype": "float32",
    }


_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _training_text() -> str:
    """English prose, tables and code that every Python has: the language reference behind ``help()``."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def _write_tokenizer(folder: Path) -> None:
    # With one thread the trainer breaks ties the same way each time.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ORDINARY_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_training_text().splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != ORDINARY_TOKENS:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {ORDINARY_TOKENS}")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make(folder: str | os.PathLike[str]) -> Path:
    """Write the model into ``folder`` (made if needed) and return it; the same bytes each time on one Python."""
    from safetensors.numpy import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(target)
    _write_json(target / "config.json", config())
    ids = config()
    _write_json(
        target / "generation_config.json",
        {name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"do_sample": False},
    )
    save_file(weights(), str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def fingerprint() -> str:
    """Short hash of everything that decides the model's bytes; use it as a cache key."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(sys.version.encode())
    for package in ("numpy", "tokenizers"):
        from importlib.metadata import version

        digest.update(f"{package}={version(package)}".encode())
    return digest.hexdigest()[:12]


def cached(root: str | os.PathLike[str]) -> Path:
    """The model under ``root`` (such as ``out/models``), made only where it is not yet; safe for several processes."""
    target = Path(root) / f"tiny-{fingerprint()}"
    if not target.is_dir():
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        make(partial)
        try:
            partial.rename(target)
        except OSError:
            # Another process was faster; its bytes are the same.
            for file in partial.iterdir():
                file.unlink()
            partial.rmdir()
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.tiny_model", description="Make the tiny model; no download."
    )
    parser.add_argument("out", type=Path, help="folder of the model; made if needed")
    parser.add_argument("--measure", action="store_true", help="also measure margins, noise and times (4 minutes)")
    options = parser.parse_args(arguments)
    try:
        make(options.out)
    except OSError as error:
        print(f"cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{options.out}: {sum(f.stat().st_size for f in options.out.iterdir()) / 2**20:.1f} MiB")
    if options.measure:
        from launch import measure

        measure.main(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
