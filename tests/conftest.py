"""What the tests share: no network, one thread, the repository's root on the path, small random models, a toy world.

Environment: RLVR_DATA names a folder with local copies of public data sets, RLVR_CASES one with verifier cases,
RLVR_SMOLLM2 a folder with SmolLM2-135M; tests that need one of them skip without it.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ["TQDM_DISABLE"] = "1"  # so that stderr holds messages only
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
LETTERS = "abcdefgh"


def named_folder(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set")
    if not (folder := Path(os.environ[variable])).is_dir():
        pytest.skip(f"{variable} names no folder: {folder}")
    return folder


@pytest.fixture(scope="session")
def data_folder():
    return named_folder("RLVR_DATA")


@pytest.fixture(scope="session")
def case_folder():
    return named_folder("RLVR_CASES")


@pytest.fixture(scope="session")
def smollm2_folder():
    return named_folder("RLVR_SMOLLM2")


@pytest.fixture(scope="session")
def tiny_base():
    if not (ROOT / "tiny/base/config.json").exists():
        pytest.skip("tiny/base holds no model")
    return str(ROOT / "tiny/base")


def build_model(kind="llama", seed=0, vocab_size=61, spread=0.3):
    """A random model of two layers in float32, with logits that differ by a few nats (a fresh model's hardly do)."""
    rope = dict(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    ids = dict(bos_token_id=None, eos_token_id=0, pad_token_id=0)
    config = {
        "llama": lambda: transformers.LlamaConfig(**rope, **ids),
        "qwen2": lambda: transformers.Qwen2Config(**rope, **ids),
        "qwen3": lambda: transformers.Qwen3Config(**rope, **ids, head_dim=16),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=128, **ids
        ),
        # A window of 5 tokens: shorter than every prompt plus completion below, so the sliding cache does slide.
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **rope, **ids, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        ),
        # What these do to the lm_head's result is stronger than in the published models, so that leaving it out shows.
        "gemma2": lambda: transformers.Gemma2Config(
            **rope, **ids, head_dim=8, sliding_window=5, final_logit_softcapping=2.0
        ),
        "granite": lambda: transformers.GraniteConfig(**rope, **ids, logits_scaling=3.0),
        "cohere": lambda: transformers.CohereConfig(**rope, **ids, logit_scale=0.3),
        # Older ones, whose positions or windows are inside the attention.
        "gpt_neo": lambda: transformers.GPTNeoConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            max_position_embeddings=128,
            attention_types=[[["global", "local"], 1]],
            window_size=5,
            **ids,
        ),
        "bloom": lambda: transformers.BloomConfig(vocab_size=vocab_size, hidden_size=32, n_layer=2, n_head=4, **ids),
        "falcon": lambda: transformers.FalconConfig(
            vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, **ids
        ),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    spread = spread / 2 if kind.startswith("gemma") else spread  # its embeddings are scaled up by sqrt(hidden_size)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(spread * noise if weight.dim() > 1 else weight + 0.3 * spread * noise)
    return model


@pytest.fixture(scope="session")
def make_model():
    """build_model, each model built once; tests do not change its weights and clear the gradients they make."""
    made = {}

    def make(kind="llama", **how):
        key = (kind, *sorted(how.items()))
        if key not in made:
            made[key] = build_model(kind, **how)
        made[key].zero_grad()
        return made[key]

    return make


# ------------------------------------------------------------------------------------------------------ toy world


def save_toy_model(folder, seed, spread=0.15, vocab_size=9, chat_template=None, letters=LETTERS):
    """A random model whose tokens are the letters a to h and the end, which is the padding too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<end>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    build_model(seed=seed, vocab_size=vocab_size, spread=spread).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A folder with base, math, code (random models of one tokenizer) and math.jsonl, code.jsonl, both.jsonl."""
    if "RLVR_TOY" in os.environ:  # the one of the outer pytest, see test_mutations.py
        return Path(os.environ["RLVR_TOY"])
    folder = tmp_path_factory.mktemp("toy")
    for seed, name in enumerate(("base", "math", "code")):
        save_toy_model(folder / name, seed)
    prompts = {"math": ["ab", "b", "cde", "fgh", "hg", "dead"], "code": ["a", "bcd", "gg", "face"]}
    rows = {
        domain: [
            {"prompt": prompt, "domain": domain, "verifier": "exact", "answer": prompt[0], "id": f"{domain}-{i}"}
            for i, prompt in enumerate(members)
        ]
        for domain, members in prompts.items()
    }
    rows["both"] = rows["math"] + rows["code"]
    for name, members in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in members))
    return folder
