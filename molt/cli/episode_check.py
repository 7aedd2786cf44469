"""`molt check rl` and `molt check eval` play one episode of the agent, as `molt agent check` does."""

from typing import TYPE_CHECKING

from molt.agents.episode import Episode, EpisodeContext
from molt.agents.load import load_runner
from molt.chat.chat_renderer import load_chat_renderer
from molt.chat.render import load_renderer
from molt.cli.check import first_rows
from molt.cli.episode import DEFAULT_ANSWER, MAX_TURNS, Limit, ScriptedModel, play
from molt.cli.findings import Findings
from molt.config import RLConfig
from molt.data.prompts import PromptDataset
from molt.errors import DataError, MoltError, UnusableRow
from molt.types import ReplaceGroup

if TYPE_CHECKING:
    from molt.types import Prompt

EPISODE_S = 60.0
"""What the episode may take; `rollout.timeout_s` where that is less."""
TRIED_ROWS = 100
"""Of the dataset, until one can be used."""


def check_episode(found: Findings, config: RLConfig) -> None:
    """Add how one episode ends, unless what it needs has errors already."""
    agent = config.train.agent_path
    is_replay = config.train.rollout_replay_dir is not None
    if found.errors or not agent or is_replay:
        return
    try:
        episode = _episode(config)
    except ReplaceGroup as replaced:
        found.add("ok", f"episode: {agent} asks for another prompt ({replaced.reason}: {replaced.detail})")
    except MoltError as error:
        found.add(
            "error",
            f"{error} The check played one episode, in which the model says {DEFAULT_ANSWER!r}. Pass --no_episode if "
            "the agent needs a service or an answer that is not here.",
        )
    else:
        outcome = episode.outcome
        ending = f"{type(outcome).__name__}: reward {outcome.reward:g}, score {outcome.score:g}"
        found.add("ok", f"episode: {agent} plays one; when the model says {DEFAULT_ANSWER!r} it ends as {ending}")
        if not episode.turns:
            found.add(
                "warning",
                f"episode: {agent} ended it without asking the model, so nothing would be trained. If that is no "
                "choice of yours, its client does not reach the session: use ctx.openai_url or ctx.base_url, and let "
                "its errors pass.",
            )


def _episode(config: RLConfig) -> Episode:
    """Raises `ReplaceGroup`, and a MoltError for what would fail a rollout in a run."""
    model = config.actor.model_name_or_path
    template = config.data.chat_template
    runner = load_runner(config.train.agent_path)
    prompt = _first_prompt(config)
    renderer = load_renderer(model, template, apply_chat_template=config.data.apply_chat_template)
    chat = None
    if runner.needs_chat or prompt.tools:
        chat = load_chat_renderer(model, template, thinking_retention=config.rollout.thinking_retention)
    end_ids = chat.eos_ids if chat is not None else renderer.eos_ids
    scripted = ScriptedModel(renderer, [DEFAULT_ANSWER], end_ids[:1])
    context = EpisodeContext(
        prompt=prompt,
        call_model=scripted.answer,
        renderer=renderer,
        seed=0,
        max_len=config.data.max_len,
        max_new_tokens=config.rollout.max_new_tokens,
        max_turns=config.rollout.max_turns or MAX_TURNS,
        chat=chat,
        call_freely=scripted.answer,
    )
    seconds = min(EPISODE_S, config.rollout.timeout_s)
    limit = Limit(seconds, "the time of a check", fix="make it faster")
    return play(runner, context, config.train.agent_path, limit)


def _first_prompt(config: RLConfig) -> "Prompt":
    """The first that can be used. Raises DataError if there is none among the first `TRIED_ROWS`."""
    data = config.data
    paths = data.prompt_dataset
    flag = "data.prompt_dataset"
    split = data.prompt_split
    if config.eval.eval_only:
        paths = config.eval.dataset or ""
        flag = "eval.dataset"
        split = config.eval.split
    rows = first_rows(paths, flag, split, most=TRIED_ROWS)
    dataset = PromptDataset(rows, data)
    for number in range(len(dataset)):
        try:
            return dataset.prompt(number)
        except UnusableRow:
            continue
    raise DataError(
        f"`{flag}` (={paths}): none of the first {TRIED_ROWS} rows can be used, so no episode can be played. Correct "
        "them, or move them to the end."
    )
