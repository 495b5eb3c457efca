"""A tokenizer, a model that reads its tokens, and text, all made here: nothing is downloaded."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, and five special ones: 261 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_llama(dtype: torch.dtype = torch.float64, seed: int = 0) -> LlamaForCausalLM:
    """A random model over that tokenizer's tokens, with attention far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25)
    return model.to(dtype).eval()


def english(words: int, seed: int = 0) -> str:
    """Sentences of made-up words, about seven characters a word."""
    rng = random.Random(seed)
    text: list[str] = []
    while len(text) < words:
        length = rng.randint(4, 12)
        sentence = ["".join(rng.choice("aeioulnrst") for _ in range(rng.randint(3, 8))) for _ in range(length)]
        text += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return " ".join(text)


def save_tiny_checkpoint(folder: Path, chat: bool = True) -> Path:
    """A folder that `from_pretrained` reads, model and tokenizer."""
    tiny_llama(torch.float32).save_pretrained(folder)
    tiny_tokenizer(chat).save_pretrained(folder)
    return folder


def save_tiny_proxy(folder: Path, target: Path) -> tuple[Path, Path]:
    """A proxy of `save_tiny_checkpoint`'s model, and an untrained mapper for the two; two folders."""
    from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper

    proxy = tiny_llama(torch.float32, seed=1)
    proxy.save_pretrained(folder / "proxy")
    tiny_tokenizer().save_pretrained(folder / "proxy")
    torch.manual_seed(0)
    mapper = HybridAxialMapper.for_models(
        proxy, LlamaForCausalLM.from_pretrained(target, dtype=torch.float32), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, head_dim=8, layer_queries=True,
    )  # fmt: skip
    mapper.save_pretrained(folder / "mapper")
    return folder / "proxy", folder / "mapper"
