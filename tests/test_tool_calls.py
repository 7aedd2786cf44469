"""Tools that are offered and never called are named once; a model that calls now and then is not accused."""

from molt.records.tool_calls import CALLS, MALFORMED, OFFERS, ToolCalls

SILENT = {OFFERS: 4.0}
CALLING = {OFFERS: 4.0, CALLS: 0.1}
BROKEN = {OFFERS: 4.0, MALFORMED: 2.0}


def notices(steps):
    """(number of the step, text) of every notice."""
    tools = ToolCalls()
    found = []
    for number, metrics in enumerate(steps, 1):
        found += [(number, text) for text in tools.look(metrics)]
    return found


def test_tools_that_are_never_called():
    ((step, text),) = notices([SILENT] * 20)
    assert step == 3 and "no call was read" in text and "malformed" not in text


def test_calls_that_are_all_malformed():
    ((step, text),) = notices([BROKEN] * 20)
    assert step == 3 and "every call of the model is malformed" in text and "--rollout.max_new_tokens" in text


def test_a_model_that_forgets_to_call_later():
    ((step, _),) = notices([CALLING] * 10 + [SILENT] * 10)
    assert step == 13


def test_some_calls_are_enough():
    assert notices([SILENT, SILENT, CALLING] * 10) == []
    assert notices([{**BROKEN, CALLS: 0.5}] * 10) == [], "some are malformed"


def test_a_run_without_tools():
    assert notices([{"rollout/reward": 0.0}, {MALFORMED: 1.0}] * 10) == []


def test_after_a_roll_back_steps_are_counted_anew():
    tools = ToolCalls()
    assert tools.look(SILENT) == tools.look(SILENT) == []
    tools.forget()
    assert tools.look(SILENT) == tools.look(SILENT) == []
    assert len(tools.look(SILENT)) == 1
