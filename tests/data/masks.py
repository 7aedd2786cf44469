"""What the tests of loss masks share: short messages, and a mask as text."""

import numpy as np


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **extra):
    return {"role": "assistant", "content": content, **extra}


def whole(tokenizer, conversation):
    return tokenizer.decode(conversation.token_ids)


def runs(tokenizer, token_ids, mask):
    """The runs of tokens where the mask is on, each as text."""
    found = []
    previous = False
    for token, on in zip(token_ids, mask, strict=True):
        if on:
            found = found if previous else [*found, []]
            found[-1].append(int(token))
        previous = on
    return [tokenizer.decode(run) for run in found]


def trained(tokenizer, conversation):
    """The runs of trained tokens, each as text."""
    assert conversation.token_ids.dtype == np.int32 and conversation.mask.dtype == np.bool_
    assert conversation.token_ids.shape == conversation.mask.shape
    return runs(tokenizer, conversation.token_ids, conversation.mask)
