"""Turns and samples from loose arrays, as tests write them down."""

import numpy as np

from molt.columns import token_columns
from molt.types import Sample, Turn


def turn_from(prompt_ids, token_ids, logprobs, versions, finish_reason) -> Turn:
    return Turn(np.asarray(prompt_ids, np.int32), token_columns(token_ids, versions, logprobs), finish_reason)


def sample_from(token_ids, versions, logprobs, media=()) -> Sample:
    return Sample(token_columns(token_ids, versions, logprobs), media)
