"""What a run says once when tools are offered and the model calls none that can be read."""

from collections.abc import Mapping

STEPS_WITHOUT_CALL = 3
"""In a row, from the start or later. A model that can call a tool does so in some of a few batches."""
OFFERS = "rollout/info/chat_tool_offers"
CALLS = "rollout/info/chat_tool_calls"
MALFORMED = "rollout/info/chat_malformed_calls"


class ToolCalls:
    """Looks at the metrics of a run in order. Its notice is due at most once."""

    def __init__(self) -> None:
        self._steps = 0
        """In a row with offers and without a call, up to now."""
        self._steps_with_malformed = 0
        """Of these."""
        self._is_given = False

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """The notice, if it is due after this step."""
        if not metrics.get(OFFERS):
            return []
        if metrics.get(CALLS):
            self.forget()
            return []
        self._steps += 1
        self._steps_with_malformed += bool(metrics.get(MALFORMED))
        if self._steps < STEPS_WITHOUT_CALL or self._is_given:
            return []
        self._is_given = True
        return [self._text()]

    def forget(self) -> None:
        """The steps so far do not count any more; what was said stays said."""
        self._steps = 0
        self._steps_with_malformed = 0

    def _text(self) -> str:
        start = f"tools were offered for {self._steps} steps in a row, and "
        if self._steps_with_malformed:
            return (
                f"{start}every call of the model is malformed (`{MALFORMED}`), so no tool ever ran. Look at the "
                "rollouts in the report: raise --rollout.max_new_tokens if calls are cut, else teach the format by "
                "some SFT."
            )
        return (
            f"{start}no call was read (`{CALLS}`). Look at the rollouts in the report: if the model does call, its "
            "format is not the one that the chat template teaches and molt parses (`molt check` names it); use a model "
            "or a --data.chat_template where they agree. If it does not, say in the prompt when to call."
        )
