"""SFT's loss is, token by token, the cross entropy of a plain transformers forward over the template's rendering."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from molt.batch.collate import gather
from molt.config import CkptConfig, FsdpConfig, ModelConfig
from molt.config_sft import SftConfig, SftDataConfig, SftTrainConfig
from molt.train.sft import SftRun, negative_log_likelihood
from tests.tiny import bpe_tokenizer, save_tiny

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": "x", "b": 2}}}
ROWS = [
    [("user", "what is 12 + 34 ?"), ("assistant", "the answer is 46"), ("user", "sure?"), ("assistant", "yes. é")],
    [("system", "be brief"), ("user", "the quick brown fox"), ("assistant", "jumps over the lazy dog")],
    [("user", "add"), ("assistant", ""), ("tool", "14"), ("assistant", "it is 14\n")],
]


def conversation(turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    extra = {"tool": {"tool_call_id": "c"}, "assistant": {"tool_calls": [CALL], "reasoning_content": "I call"}}
    return [m | (extra.get(m["role"], {}) if m["content"] in ("", "14") else {}) for m in messages]


@pytest.fixture(scope="module", params=["qwen3", "gemma4"])
def trained(request, tmp_path_factory):
    """A tiny model with the template of a family, and the rows on disk."""
    path = tmp_path_factory.mktemp(request.param)
    tokenizer = bpe_tokenizer((TEMPLATES / f"{request.param}.jinja").read_text())
    specials = ["<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*specials, '<|"|>', "<|im_start|>", "<|im_end|>"]})
    save_tiny(path, tokenizer=tokenizer)
    (path / "rows.jsonl").write_text("".join(json.dumps({"input": conversation(turns)}) + "\n" for turns in ROWS))
    return path, tokenizer


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_every_trained_token_has_the_loss_of_a_plain_forward(trained, mesh, tmp_path, packed):
    path, tokenizer = trained
    config = SftConfig(
        model=ModelConfig(str(path), "none"),
        fsdp=FsdpConfig(device="cpu", packing_samples=packed),
        data=SftDataConfig(dataset=str(path / "rows.jsonl")),
        train=SftTrainConfig(micro_batch_size=2, batch_size=3),
        ckpt=CkptConfig(output_dir=tmp_path),
    )
    run = SftRun(config, mesh, torch.device("cpu"))
    assert len(run.conversations) == len(ROWS) and run.dropped == ""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    expected, total = {}, 0.0
    for turns, one in zip(ROWS, run.conversations, strict=True):
        text = tokenizer.apply_chat_template(conversation(turns), tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        assert one.token_ids.tolist() == ids[0].tolist()
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0]
        losses = cross_entropy(logits[:-1], ids[0, 1:], reduction="none")[torch.from_numpy(one.mask[1:])]
        assert 5 < len(losses) < ids.numel() and not one.mask[0]
        expected[tuple(ids[0].tolist())] = losses
        total += losses.sum().item()
    tokens = sum(len(losses) for losses in expected.values())

    seen, loss = {}, 0.0
    micro_batches = run._micro_batches(run.conversations)
    assert len(micro_batches) == 2
    for m in micro_batches:
        with torch.no_grad():
            logprobs = run.model(m.batch, needed=m.mask).logprobs
            loss += negative_log_likelihood(run.model, m)[0].item()
        parts = (gather(m.batch, values) for values in (m.batch.token_ids, logprobs, m.mask, m.weights))
        for ids, values, mask, weights in zip(*parts, strict=True):
            seen[tuple(ids.tolist())] = -values[mask]
            torch.testing.assert_close(weights, mask / tokens)
    assert seen.keys() == expected.keys()
    for ids, losses in expected.items():
        torch.testing.assert_close(seen[ids], losses, atol=1e-5, rtol=0)
    assert loss == pytest.approx(total / tokens, abs=1e-5)
