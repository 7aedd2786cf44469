"""Tiny tokenizers and models, built in memory: nothing is downloaded, nothing takes more than a second.

    from tests.tiny import char_tokenizer, save_tiny, tiny_qwen3

`char_tokenizer` is the one to reach for: one token per character, so ids can be read and expected
masks written by hand. Ids: 0 `<|pad|>`, 1 `<|im_start|>`, 2 `<|im_end|>`, 3 newline, 4.. printable
ASCII from space to tilde (99 tokens). Any other character raises: there is no unknown token.
"""

from pathlib import Path

PAD_ID, START_ID, END_ID = 0, 1, 2
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

# As Qwen3's own: reasoning before the last user message is dropped, the last answer always has a think block,
# consecutive tool messages are merged into one user message.
QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(query=messages | length - 1, searching=true) %}
{%- for m in messages[::-1] %}{%- if ns.searching and m.role == 'user' %}
{%- set ns.searching = false %}{%- set ns.query = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- set content, reasoning = m.content or '', m.reasoning_content or '' %}
{%- if '</think>' in content %}{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>' + m.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# ChatML that says itself what the assistant generates.
MARKED = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}{%- generation %}"
    "{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def char_tokenizer(chat_template: str | None = CHATML, alphabet: str = ALPHABET):
    """One token per character; specials as in ChatML; eos `<|im_end|>`; decode returns exactly the text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<none>"))  # not in the vocabulary: unknown text raises
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return _fast(PreTrainedTokenizerFast, backend, "<|pad|>", SPECIALS, chat_template)


def bpe_tokenizer(chat_template: str | None = CHATML, vocab_size: int = 400):
    """A byte-level BPE (as Qwen's), trained on a few lines: any text, several characters per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [
        "the quick brown fox jumps over the lazy dog",
        "what is 12 + 34 ? the answer is 46",
        "\n\n user assistant",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus * 5, trainer)
    specials = [*SPECIALS, "<think>", "</think>"]
    return _fast(PreTrainedTokenizerFast, backend, "<|pad|>", specials, chat_template)


def _fast(cls, backend, pad: str, specials: list[str], chat_template: str | None):
    tokenizer = cls(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token=pad,
        additional_special_tokens=specials,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_qwen3(
    vocab_size: int = len(SPECIALS) + len(ALPHABET),
    tie: bool = True,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
):
    """A random float32 `Qwen3ForCausalLM`; the same seed gives the same weights. About 0.1M parameters.

    Weights have standard deviation `hidden ** -0.5`, so that logits spread enough for a test to see a
    wrong weight. `head_dim` 32 is the smallest that vLLM's CPU attention accepts.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        initializer_range=hidden**-0.5,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def tiny_moe(kind: str = "qwen3_moe", vocab_size: int = len(SPECIALS) + len(ALPHABET), seed: int = 0, **settings):
    """A random float32 mixture of 4 experts, top 2, with about 0.1M parameters.

    kind: qwen3_moe; or deepseek_v3 (latent attention) or glm4_moe, whose first layer is dense and whose second has
    a shared expert.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "qwen3_moe": {"num_experts": 4, "head_dim": 32, "num_key_value_heads": 1, "norm_topk_prob": True},
        "glm4_moe": {"n_routed_experts": 4, "head_dim": 32, "num_key_value_heads": 1, "use_qk_norm": True},
        "deepseek_v3": {
            "n_routed_experts": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32,
            "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "num_key_value_heads": 2,
        },
    }[kind]  # fmt: skip
    if kind != "qwen3_moe":
        sizes |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "initializer_range": 64**-0.5,
            "pad_token_id": PAD_ID,
            "eos_token_id": END_ID,
            "bos_token_id": None,
            "dtype": "float32",
            **sizes,
            **settings,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).float().eval()


def save_tiny(path: str | Path, model=None, tokenizer=None, **model_args) -> Path:
    """Save a model and its tokenizer as a Hugging Face directory; the defaults are the tiny ones."""
    tokenizer = tokenizer or char_tokenizer()
    model = model or tiny_qwen3(**{"vocab_size": len(tokenizer), **model_args})
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)
