"""Makes a Llama model directory with random weights and a byte-level BPE tokenizer. Nothing is downloaded.

    VENV/bin/python tiny_model.py DIRECTORY [--preset mid]

Runs in vLLM's environment (torch, safetensors, tokenizers), so it imports nothing of this project. The weights are
seeded; the tokenizer is trained on this Python's standard library, so make a model once and let all replicas share it.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 2048
MAX_POSITION = 32768
CORPUS_BYTES = 3_000_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
# ChatML: text of messages, or the text parts of structured ones.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


PRESETS = {
    "tiny": Shape(64, 2, 4, 2, 32, 128),  # 0.4 M parameters; 4,096 uncached tokens take about 0.07 s on one core
    "mid": Shape(384, 6, 6, 2, 64, 1024),  # 11 M; 0.65 s
    "ttft": Shape(512, 6, 8, 4, 64, 1408),  # 20 M; 1.0 s
    "heavy": Shape(768, 8, 12, 4, 64, 2048),  # 54 M; 2.2 s
}


def corpus() -> Iterator[str]:
    """Source text of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    length = 0
    for path in (*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))):
        if "site-packages" in path.parts or any(part.startswith("test") for part in path.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        length += len(text)
        yield text
        if length > CORPUS_BYTES:
            return


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Train and write the tokenizer; returns the ids of the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: number for number, token in enumerate(SPECIAL)}
    assert all(tokenizer.token_to_id(token) == number for token, number in ids.items())
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITION,
            "chat_template": CHAT_TEMPLATE,
            "added_tokens_decoder": {
                str(number): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for token, number in ids.items()
            },
        },
    )
    return ids


def write_config(directory: Path, shape: Shape, ids: dict[str, int]) -> None:
    """Write config.json and generation_config.json."""
    special = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|pad|>"],
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **special,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", special)


def write_weights(directory: Path, shape: Shape, ids: dict[str, int], seed: int) -> int:
    """Write random weights; returns how many."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    hidden, width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": linear(VOCABULARY, hidden),
    }
    # Answers shall run to max_tokens: the end of a message is made unlikely.
    weights["lm_head.weight"][ids["<|im_end|>"]] = 0
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", width, hidden),
            ("self_attn.k_proj", kv_width, hidden),
            ("self_attn.v_proj", kv_width, hidden),
            ("self_attn.o_proj", hidden, width),
            ("mlp.gate_proj", shape.intermediate, hidden),
            ("mlp.up_proj", shape.intermediate, hidden),
            ("mlp.down_proj", hidden, shape.intermediate),
        ):
            weights[f"{prefix}{name}.weight"] = linear(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return sum(int(weight.numel()) for weight in weights.values())


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make a small model with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="mid")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    shape = PRESETS[arguments.preset]
    ids = write_tokenizer(directory)
    parameters = write_weights(directory, shape, ids, arguments.seed)
    # Last, because it is what tells a finished directory from a started one.
    write_config(directory, shape, ids)
    print(f"{directory}: {arguments.preset}, {parameters / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
