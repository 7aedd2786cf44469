"""Turns, samples and buffers as tests write them down."""

import numpy as np

from molt.columns import token_columns
from molt.rollout.buffer import described, read_arrays, read_groups, write_arrays, write_records
from molt.types import Sample, Turn


def turn_from(prompt_ids, token_ids, logprobs, versions, finish_reason) -> Turn:
    return Turn(np.asarray(prompt_ids, np.int32), token_columns(token_ids, versions, logprobs), finish_reason)


def sample_from(token_ids, versions, logprobs, media=()) -> Sample:
    return Sample(token_columns(token_ids, versions, logprobs), media)


def save_buffer(directory, groups, samples) -> None:
    """Both halves of a buffer, as driver and keeper write them."""
    write_arrays(directory, samples)
    write_records(directory, groups)


def load_buffer(directory, prompt_at):
    """The groups of a buffer, and their samples."""
    samples = read_arrays(directory)
    return read_groups(directory, prompt_at, described(samples)), samples
