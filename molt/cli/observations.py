"""Observations of an agent that the model's tokenizer cannot spell: the model would read something else."""

import sys

from molt.chat.render import Renderer, load_renderer


class ObservingRenderer(Renderer):
    """A renderer that remembers the observations it turned into ids."""

    def __init__(self, model: str, *, apply_chat_template: bool):
        loaded = load_renderer(model, None, apply_chat_template=apply_chat_template)
        super().__init__(loaded.tokenizer, apply_chat_template=apply_chat_template, eos_ids=loaded.eos_ids)
        self.observed: list[str] = []

    def continuation_ids(self, generated_ids: list[int], observation: str) -> list[int]:
        self.observed.append(observation)
        return super().continuation_ids(generated_ids, observation)

    def warn_of_lost_text(self) -> None:
        """Print a warning for every observation that does not come back from its ids, but for white space."""
        for observation in self.observed:
            ids = self.tokenizer.encode(observation, add_special_tokens=False)
            read = self.tokenizer.decode(ids)
            if read.split() != observation.split():
                print(
                    f"warning: the tokenizer cannot spell the observation {observation!r}: the model reads {read!r}. "
                    "Use words that the model's tokenizer knows.",
                    file=sys.stderr,
                )
