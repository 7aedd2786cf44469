"""Rules across the settings of RL: one small function each, `(config) -> message or None`.

A decorator registers a function: `@rule` for what is wrong, `@warning` for what is allowed but probably not meant. It
names the commands that keep the rule. An *algorithm rule* also gets the rows of the estimator and the loss: what a row
says decides, not its name, so that it holds for a user's estimator or loss as well. `READ_ONLY_WHEN` is a table of the
settings that only a mode reads.

Ranges of a single setting are checked beside it in `config.py`; what needs files, models or the machine
is in `cli/check.py`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Protocol, TypeVar

from molt.algo.advantage import ADVANTAGES
from molt.algo.loss import LOSSES
from molt.algorithm import Algorithm
from molt.config import ActorConfig, CkptConfig, RLConfig, comma_list
from molt.setting import name_of, names, single_settings, value_of

RL = names(RLConfig)
Command = Literal["rl", "eval", "sft"]
Message = str | None
EVALUATED = re.compile(r"eval/.+/(pass\d+|pass1_low|pass1_high|response_length|truncated)")
"""What an evaluation measures."""

# The rows that a message can recommend.
WITH_CRITIC = [name for name, row in ADVANTAGES.items() if "values" in row.needs]
BY_TOKEN = [name for name, row in ADVANTAGES.items() if row.level == "token"]
WITHOUT_BASELINE = [name for name, row in ADVANTAGES.items() if row.baseline == "none"]
WITH_DUAL_CLIP = [name for name, row in LOSSES.items() if row.reads_dual_clip]


class EvalSection(Protocol):
    """What evaluations of RL and SFT have in common."""

    @property
    def dataset(self) -> str | None: ...


class AnyConfig(Protocol):
    """What the settings of RL and SFT have in common."""

    @property
    def ckpt(self) -> CkptConfig: ...
    @property
    def eval(self) -> EvalSection: ...


PlainRule = TypeVar("PlainRule", bound=Callable[[Any], Message])
AlgorithmRule = TypeVar("AlgorithmRule", bound=Callable[[Any, Algorithm], Message])


@dataclass(frozen=True)
class Registered:
    """One rule and who keeps it."""

    check: Callable[..., Message]
    commands: tuple[Command, ...]
    is_error: bool
    reads_algorithm: bool = False


REGISTRY: list[Registered] = []


def rule(*commands: Command) -> Callable[[PlainRule], PlainRule]:
    """Register `(config) -> message` as an error of these commands."""

    def register(check: PlainRule) -> PlainRule:
        REGISTRY.append(Registered(check, commands, is_error=True))
        return check

    return register


def warning(*commands: Command) -> Callable[[PlainRule], PlainRule]:
    """Register `(config) -> message` as a warning of these commands."""

    def register(check: PlainRule) -> PlainRule:
        REGISTRY.append(Registered(check, commands, is_error=False))
        return check

    return register


def algorithm_rule(check: AlgorithmRule) -> AlgorithmRule:
    """Register `(config, algorithm) -> message` as an error of RL."""
    REGISTRY.append(Registered(check, ("rl",), is_error=True, reads_algorithm=True))
    return check


def algorithm_warning(check: AlgorithmRule) -> AlgorithmRule:
    """Register `(config, algorithm) -> message` as a warning of RL."""
    REGISTRY.append(Registered(check, ("rl",), is_error=False, reads_algorithm=True))
    return check


def errors(command: Command, config: AnyConfig, algorithm: Algorithm | None = None) -> list[str]:
    """What is wrong. Without an algorithm, what depends on it is left out."""
    rules = [registered for registered in REGISTRY if registered.is_error]
    rows = [row for row in READ_ONLY_WHEN if row.is_error]
    return [*_broken(rules, command, config, algorithm), *_unread(rows, command, config, algorithm)]


def warnings(command: Command, config: AnyConfig, algorithm: Algorithm | None = None) -> list[str]:
    """What is allowed but probably not meant. Without an algorithm, what depends on it is left out."""
    rules = [registered for registered in REGISTRY if not registered.is_error]
    rows = [row for row in READ_ONLY_WHEN if not row.is_error]
    return [*_broken(rules, command, config, algorithm), *_unread(rows, command, config, algorithm)]


def _broken(rules: list[Registered], command: Command, config: AnyConfig, algorithm: Algorithm | None) -> Iterator[str]:
    """The messages of the rules that do not hold."""
    for registered in rules:
        if command not in registered.commands:
            continue
        if not registered.reads_algorithm:
            text = registered.check(config)
        elif algorithm is not None:
            text = registered.check(config, algorithm)
        else:
            text = None
        if text is not None:
            yield text


def _unread(
    rows: list["ReadOnlyWhen"], command: Command, config: AnyConfig, algorithm: Algorithm | None
) -> Iterator[str]:
    """The messages about settings that have no effect."""
    for row in rows:
        if command in row.commands:
            text = row.message(config, algorithm)
            if text is not None:
                yield text


def message(config: object, settings: Sequence[object], consequence: str, fix: str) -> str:
    """The values of the settings, the consequence, the fix."""
    values = [f"`{name_of(setting)}` (={value_of(setting, config)})" for setting in settings]
    text = values[0]
    if len(values) > 1:
        text += " with " + " and ".join(values[1:])
    return f"{text}: {consequence}. {fix}."


def required(config: object, setting: object, consequence: str, example: str) -> Message:
    """A message if the setting is empty."""
    if value_of(setting, config):
        return None
    name = name_of(setting)
    return f"`{name}` is not set: {consequence}. Pass --{name} {example}."


@dataclass(frozen=True)
class ReadOnlyWhen:
    """Settings that have no effect while a mode is off. A section stands for all its settings."""

    settings: tuple[object, ...]
    is_read: Callable[[Any, Algorithm | None], bool]
    """Whether the mode is on, from the settings and the algorithm; True where that is not known."""
    mode_settings: tuple[object, ...]
    """The settings that switch the mode."""
    consequence: str
    turn_on: str
    """How to switch the mode on."""
    is_error: bool = False
    commands: tuple[Command, ...] = ("rl",)

    def message(self, config: Any, algorithm: Algorithm | None) -> Message:
        """About the first of the settings that is not its default, if the mode is off."""
        if self.is_read(config, algorithm):
            return None
        default = type(config)()
        for section in self.settings:
            for setting in single_settings(section):
                if value_of(setting, config) != value_of(setting, default):
                    fix = f"{self.turn_on}, or drop --{name_of(setting)}"
                    return message(config, [setting, *self.mode_settings], self.consequence, fix)
        return None


def has_template(c: RLConfig, _: Algorithm | None) -> bool:
    return c.data.apply_chat_template


def evaluates(c: AnyConfig, _: Algorithm | None) -> bool:
    return c.eval.dataset is not None


def can_have_a_best(c: RLConfig, _: Algorithm | None) -> bool:
    return c.eval.dataset is not None or c.ckpt.best_metric_key == "none"


def interrupts_requests(c: RLConfig, _: Algorithm | None) -> bool:
    return c.train.partial_rollout_enable


def reads_reference(_: RLConfig, algorithm: Algorithm | None) -> bool:
    return algorithm is None or algorithm.reads_reference_model


def has_kl(_: RLConfig, algorithm: Algorithm | None) -> bool:
    return algorithm is None or algorithm.kl_coef > 0


def punishes_length(c: RLConfig, _: Algorithm | None) -> bool:
    return c.reward.overlong_buffer_len is not None


def has_scorer(c: RLConfig, _: Algorithm | None) -> bool:
    return c.reward.scorer is not None or c.train.agent_path.startswith("reasoning_gym:")  # which brings its own


def has_token_budget(c: RLConfig, _: Algorithm | None) -> bool:
    return c.train.dynamic_batch_enable


def has_critic(_: RLConfig, algorithm: Algorithm | None) -> bool:
    return algorithm is None or algorithm.needs_critic


def discounts_by_token(_: RLConfig, algorithm: Algorithm | None) -> bool:
    return algorithm is None or algorithm.estimator.level == "token"


def reads_dual_clip(_: RLConfig, algorithm: Algorithm | None) -> bool:
    return algorithm is None or algorithm.loss.reads_dual_clip


READ_ONLY_WHEN: list[ReadOnlyWhen] = [
    ReadOnlyWhen(
        settings=(RL.data.tools_key,),
        is_read=has_template,
        mode_settings=(RL.data.apply_chat_template,),
        consequence="plain text has no place for tools, so none would be offered",
        turn_on="Pass --data.apply_chat_template",
        is_error=True,
        commands=("rl", "eval"),
    ),
    ReadOnlyWhen(
        settings=(RL.vllm.partial_kv,),
        is_read=interrupts_requests,
        mode_settings=(RL.train.partial_rollout_enable,),
        consequence="no request is ever interrupted, so there is no KV to keep",
        turn_on="Pass --train.partial_rollout_enable",
        is_error=True,
    ),
    ReadOnlyWhen(
        settings=(RL.actor.dual_clip,),
        is_read=reads_dual_clip,
        mode_settings=(RL.actor.loss_mode,),
        consequence=f"only {', '.join(WITH_DUAL_CLIP)} has that bound",
        turn_on=f"Use --actor.loss_mode {WITH_DUAL_CLIP[0]}",
        is_error=True,
    ),
    ReadOnlyWhen(
        settings=(RL.actor.freezing_steps,),
        is_read=has_critic,
        mode_settings=(RL.algo.advantage.estimator,),
        consequence="there is no critic, so these steps would train nothing",
        turn_on=f"Use --algo.advantage.estimator {WITH_CRITIC[0]}",
        is_error=True,
    ),
    ReadOnlyWhen(
        settings=(RL.critic,),
        is_read=has_critic,
        mode_settings=(RL.algo.advantage.estimator,),
        consequence="no critic is built",
        turn_on=f"Use --algo.advantage.estimator {WITH_CRITIC[0]}",
    ),
    ReadOnlyWhen(
        settings=(RL.algo.advantage.gamma,),
        is_read=discounts_by_token,
        mode_settings=(RL.algo.advantage.estimator,),
        consequence="this estimator has no such discount, so it is not read",
        turn_on=f"Use --algo.advantage.estimator {BY_TOKEN[0]}",
    ),
    ReadOnlyWhen(
        settings=(RL.algo.advantage.lam,),
        is_read=has_critic,
        mode_settings=(RL.algo.advantage.estimator,),
        consequence="this estimator has no such discount, so it is not read",
        turn_on=f"Use --algo.advantage.estimator {WITH_CRITIC[0]}",
    ),
    ReadOnlyWhen(
        settings=(RL.data.chat_template,),
        is_read=has_template,
        mode_settings=(RL.data.apply_chat_template,),
        consequence="prompts are plain text, so no template is used",
        turn_on="Pass --data.apply_chat_template",
        commands=("rl", "eval"),
    ),
    ReadOnlyWhen(
        settings=(RL.ref,),
        is_read=reads_reference,
        mode_settings=(RL.algo.kl.init_coef, RL.algo.kl.ref),
        consequence="no reference model is built",
        turn_on="Use --algo.kl.init_coef 0.001 --algo.kl.ref model",
    ),
    ReadOnlyWhen(  # a target without a coefficient is an error: `coefficient_can_adapt`
        settings=(RL.algo.kl.estimator, RL.algo.kl.use_loss, RL.algo.kl.ref, RL.algo.kl.horizon),
        is_read=has_kl,
        mode_settings=(RL.algo.kl.init_coef,),
        consequence="no KL is computed",
        turn_on="Use --algo.kl.init_coef 0.001",
    ),
    ReadOnlyWhen(
        settings=(RL.reward.overlong_penalty_factor,),
        is_read=punishes_length,
        mode_settings=(RL.reward.overlong_buffer_len,),
        consequence="no answer is too long, so nothing is punished",
        turn_on="Set --reward.overlong_buffer_len, to a quarter of --data.max_len for instance",
    ),
    ReadOnlyWhen(
        settings=(RL.reward.scorer_timeout_s, RL.reward.num_scorers, RL.reward.cache_dir),
        is_read=has_scorer,
        mode_settings=(RL.reward.scorer,),
        consequence="the agent gives the reward, and there is no scorer",
        turn_on="Set --reward.scorer FILE.py",
        commands=("rl", "eval"),
    ),
    ReadOnlyWhen(
        settings=(RL.train.max_tokens_per_gpu,),
        is_read=has_token_budget,
        mode_settings=(RL.train.dynamic_batch_enable,),
        consequence="micro-batches have `train.micro_batch_size` samples, and the budget is not read",
        turn_on="Pass --train.dynamic_batch_enable",
    ),
    ReadOnlyWhen(
        settings=(RL.eval.steps,),
        is_read=evaluates,
        mode_settings=(RL.eval.dataset,),
        consequence="nothing is evaluated",
        turn_on="Pass --eval.dataset FILE.jsonl",
        commands=("rl", "sft"),
    ),
    ReadOnlyWhen(
        settings=(RL.eval.eval_at_start,),
        is_read=evaluates,
        mode_settings=(RL.eval.dataset,),
        consequence="nothing is evaluated",
        turn_on="Pass --eval.dataset FILE.jsonl",
    ),
    ReadOnlyWhen(
        settings=(RL.ckpt.best_metric_key,),
        is_read=can_have_a_best,
        mode_settings=(RL.eval.dataset,),
        consequence="nothing is evaluated, so no version is the best",
        turn_on="Pass --eval.dataset FILE.jsonl",
    ),
]


# What a run cannot do without.


@rule("rl", "eval")
def rl_needs_a_model(c: RLConfig) -> Message:
    consequence = "there is nothing to evaluate" if c.eval.eval_only else "there is nothing to train"
    return required(c, RL.actor.model_name_or_path, consequence, "DIR")


@rule("rl")
def rl_needs_prompts(c: RLConfig) -> Message:
    return required(c, RL.data.prompt_dataset, "no rollout can start", "FILE.jsonl")


@rule("rl", "eval")
def rl_needs_an_agent(c: RLConfig) -> Message:
    return required(c, RL.train.agent_path, "nothing computes a reward", "FILE.py")


@rule("eval")
def eval_needs_a_dataset(c: RLConfig) -> Message:
    return required(c, RL.eval.dataset, "there is nothing to evaluate the model on", "FILE.jsonl")


# Data and lengths.


@rule("rl")
def shares_mix_the_datasets(c: RLConfig) -> Message:
    return wrong_shares(c, RL.data.prompt_probs, RL.data.prompt_dataset)


def wrong_shares(config: object, shares_setting: object, datasets_setting: object) -> Message:
    """A message if these are not shares that mix these datasets."""
    shares = value_of(shares_setting, config)
    names_of_datasets = comma_list(value_of(datasets_setting, config))
    if shares is None or not names_of_datasets:
        return None

    items = comma_list(shares)
    n = len(names_of_datasets)
    example = ",".join(["1"] * n)
    fix = f"Give {n} numbers above 0, such as {example}"
    unusable = [item for item in items if not _is_share(item)]
    if n == 1:
        consequence = "one dataset has nothing to be mixed with"
        fix = "Drop the shares, or name another dataset"
    elif len(items) != n:
        consequence = f"{len(items)} shares cannot mix {n} datasets"
    elif unusable:
        consequence = f"{unusable[0]!r} is not a share, so no mixture can be drawn"
    else:
        return None
    return message(config, [shares_setting, datasets_setting], consequence, fix)


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


@rule("rl", "eval")
def answer_fits_the_context(c: RLConfig) -> Message:
    limits = [(RL.rollout.max_new_tokens, c.rollout.max_new_tokens), (RL.eval.max_new_tokens, c.eval.max_new_tokens)]
    for setting, limit in limits:
        if limit is not None and limit >= c.data.max_len:
            fix = f"Use --{name_of(setting)} {max(1, c.data.max_len // 2)}, or raise --data.max_len"
            return message(c, [setting, RL.data.max_len], "the context has no room for a prompt", fix)
    return None


@rule("rl")
def one_length_penalty(c: RLConfig) -> Message:
    if c.reward.overlong_buffer_len is None or c.reward.stop_properly_penalty_coef is None:
        return None
    return message(
        c,
        [RL.reward.overlong_buffer_len, RL.reward.stop_properly_penalty_coef],
        "a truncated answer would be punished twice",
        "Drop --reward.overlong_buffer_len, or --reward.stop_properly_penalty_coef",
    )


@warning("rl")
def warn_masked_rollouts_escape_the_penalty(c: RLConfig) -> Message:
    """The overlong penalty grows up to the length at which a rollout is left out."""
    penalties: list[tuple[object, object]] = [
        (RL.reward.overlong_buffer_len, c.reward.overlong_buffer_len),
        (RL.reward.stop_properly_penalty_coef, c.reward.stop_properly_penalty_coef),
    ]
    for setting, value in penalties:
        if c.reward.mask_truncated and value is not None:
            return message(
                c,
                [RL.reward.mask_truncated, setting],
                "a rollout that a length limit cuts is left out, so the longest answers escape the penalty",
                f"Drop --reward.mask_truncated, or --{name_of(setting)}",
            )
    return None


@algorithm_warning
def warn_masked_rollouts_could_teach(c: RLConfig, algorithm: Algorithm) -> Message:
    if not c.reward.mask_truncated or "teacher" not in algorithm.estimator.needs:
        return None
    return message(
        c,
        [RL.reward.mask_truncated, RL.algo.advantage.estimator],
        "no reward is read, so the tokens of a cut answer teach as well as any others, and they would be left out",
        "Drop --reward.mask_truncated",
    )


@rule("rl")
def buffer_fits_the_context(c: RLConfig) -> Message:
    buffer = c.reward.overlong_buffer_len
    if buffer is None or buffer < c.data.max_len:
        return None
    fix = f"Use --reward.overlong_buffer_len {max(1, c.data.max_len // 4)}, or raise --data.max_len"
    return message(c, [RL.reward.overlong_buffer_len, RL.data.max_len], "every answer would be too long", fix)


# Groups and batches.


@algorithm_rule
def baseline_needs_a_group(c: RLConfig, algorithm: Algorithm) -> Message:
    baseline = algorithm.estimator.baseline
    groups_compared = {"none": inf, "group": 1, "batch": c.rollout.batch_size}
    if c.rollout.n_samples_per_prompt * groups_compared[baseline] > 1:
        return None
    return message(
        c,
        [RL.rollout.n_samples_per_prompt, RL.algo.advantage.estimator],
        "a single rollout has no baseline, so every advantage would be 0",
        f"Use --rollout.n_samples_per_prompt 8, or --algo.advantage.estimator {WITHOUT_BASELINE[0]}",
    )


@rule("rl")
def filter_needs_a_group(c: RLConfig) -> Message:
    if not c.algo.dynamic_filtering_enable or c.rollout.n_samples_per_prompt > 1:
        return None
    return message(
        c,
        [RL.algo.dynamic_filtering_enable, RL.rollout.n_samples_per_prompt],
        "the mean of one score is that score, so every right and every wrong answer would be discarded",
        "Use --rollout.n_samples_per_prompt 8, or drop --algo.dynamic_filtering_enable",
    )


@rule("rl")
def scheme_needs_a_group(c: RLConfig) -> Message:
    if c.rollout.scheme is None or c.rollout.n_samples_per_prompt > 1:
        return None
    return message(
        c,
        [RL.rollout.scheme, RL.rollout.n_samples_per_prompt],
        "one rollout has no other that it could follow",
        "Use --rollout.n_samples_per_prompt 8, or drop --rollout.scheme",
    )


@rule("rl")
def steps_split_by_groups(c: RLConfig) -> Message:
    size = c.rollouts_per_step
    n = c.rollout.n_samples_per_prompt
    groups = c.rollout.batch_size
    if size % n == 0 and c.rollouts_per_batch % size == 0:
        return None

    def distance(candidate: int) -> int:
        return abs(candidate - size)

    divisors = [d for d in range(1, groups + 1) if groups % d == 0]
    sizes_that_fit = [n * d for d in divisors]
    nearest = sorted(sizes_that_fit, key=distance)[:3]
    choices = " or ".join(str(candidate) for candidate in sorted(nearest))
    return message(
        c,
        [RL.train.batch_size, RL.rollout.batch_size, RL.rollout.n_samples_per_prompt],
        f"it must be a multiple of {n} and divide {groups} * {n} = {c.rollouts_per_batch}, "
        "or a group would be split or rollouts dropped",
        f"Use --train.batch_size {choices}",
    )


@rule("rl")
def on_policy_is_one_epoch(c: RLConfig) -> Message:
    if not c.train.force_on_policy or c.train.max_epochs == 1:
        return None
    return message(
        c,
        [RL.train.force_on_policy, RL.train.max_epochs],
        "every epoch after the first would train a policy that has moved away from its rollouts",
        "Use --train.max_epochs 1, or drop --train.force_on_policy",
    )


# The KL and its reference.


@algorithm_rule
def kl_reaches_the_advantage(c: RLConfig, algorithm: Algorithm) -> Message:
    if not algorithm.kl_in_reward or algorithm.estimator.level != "group":
        return None
    return message(
        c,
        [RL.algo.kl.init_coef, RL.algo.advantage.estimator, RL.algo.kl.use_loss],
        "the KL of a token is no reward of its rollout, so this estimator would never read it",
        f"Use --algo.kl.use_loss --algo.kl.estimator k3, or --algo.advantage.estimator {BY_TOKEN[0]}",
    )


@algorithm_rule
def reference_reaches_the_advantage(c: RLConfig, algorithm: Algorithm) -> Message:
    if "ref_logprobs" not in algorithm.estimator.needs or algorithm.kl_in_reward:
        return None
    return message(
        c,
        [RL.algo.advantage.estimator, RL.algo.kl.init_coef, RL.algo.kl.use_loss],
        "the KL that this estimator learns from would be 0",
        "Use --algo.kl.init_coef 1, and not --algo.kl.use_loss",
    )


@algorithm_rule
def distillation_needs_a_teacher(c: RLConfig, algorithm: Algorithm) -> Message:
    if "teacher" not in algorithm.estimator.needs:
        return None
    if c.ref.model_name_or_path in ("", c.actor.model_name_or_path):
        return message(
            c,
            [RL.ref.model_name_or_path, RL.algo.advantage.estimator],
            "the student would be its own teacher, so there would be nothing to learn",
            "Pass --ref.model_name_or_path DIR",
        )

    consequence = "the advantage is log teacher - log student, and nothing else leads to the teacher"
    if c.algo.kl.ref != "model":
        return message(c, [RL.algo.kl.ref, RL.algo.advantage.estimator], consequence, "Use --algo.kl.ref model")
    if c.algo.kl.estimator != "k1":
        return message(
            c, [RL.algo.kl.estimator, RL.algo.advantage.estimator], consequence, "Use --algo.kl.estimator k1"
        )
    return None


@rule("rl")
def kl_loss_has_a_gradient(c: RLConfig) -> Message:
    if not c.algo.kl.use_loss or c.algo.kl.estimator != "k1":
        return None
    return message(
        c,
        [RL.algo.kl.use_loss, RL.algo.kl.estimator],
        "the gradient of k1 is 0 on average, so the loss would not hold the policy",
        "Use --algo.kl.estimator k2 or --algo.kl.estimator k3, or drop --algo.kl.use_loss",
    )


@algorithm_rule
def coefficient_can_adapt(c: RLConfig, algorithm: Algorithm) -> Message:
    kl = c.algo.kl
    if kl.target is None:
        return None
    if algorithm.kl_coef == 0:
        return message(
            c,
            [RL.algo.kl.target, RL.algo.kl.init_coef],
            "the coefficient is adapted by a factor, and 0 times it is 0",
            "Use --algo.kl.init_coef 0.001, or drop --algo.kl.target",
        )
    if kl.ref == "rollout" and kl.estimator == "k1":
        return message(
            c,
            [RL.algo.kl.target, RL.algo.kl.ref, RL.algo.kl.estimator],
            "over tokens of the reference the mean of k1 is minus a KL, so the coefficient would only shrink",
            "Use --algo.kl.estimator k3, or --algo.kl.ref model",
        )
    if kl.horizon < c.rollouts_per_batch:
        return message(
            c,
            [RL.algo.kl.horizon, RL.algo.kl.target],
            f"one batch of {c.rollouts_per_batch} rollouts would move it by more than a fifth, or below 0",
            f"Use --algo.kl.horizon {20 * c.rollouts_per_batch}",
        )
    return None


@algorithm_warning
def warn_reward_kl(c: RLConfig, algorithm: Algorithm) -> Message:
    if not algorithm.kl_in_reward or c.algo.kl.estimator == "k1":
        return None
    return message(
        c,
        [RL.algo.kl.estimator, RL.algo.kl.use_loss],
        "in the reward only k1 has the gradient of the KL",
        "Use --algo.kl.estimator k1, or --algo.kl.use_loss",
    )


@algorithm_rule
def turn_rewards_need_rewards_of_tokens(c: RLConfig, algorithm: Algorithm) -> Message:
    row = algorithm.estimator
    if not c.algo.advantage.turn_rewards or (row.level == "token" and "teacher" not in row.needs):
        return None
    by_token = [name for name in BY_TOKEN if "teacher" not in ADVANTAGES[name].needs]
    return message(
        c,
        [RL.algo.advantage.turn_rewards, RL.algo.advantage.estimator],
        "it gives a whole rollout one number, so a turn cannot have its own",
        f"Use --algo.advantage.estimator {' or '.join(by_token)}, or drop --algo.advantage.turn_rewards",
    )


@rule("rl")
def turn_rewards_are_the_agents(c: RLConfig) -> Message:
    if not c.algo.advantage.turn_rewards or c.reward.scorer is None:
        return None
    return message(
        c,
        [RL.algo.advantage.turn_rewards, RL.reward.scorer],
        "the scorer's reward takes the place of what the turns gave, which would still be credited",
        "Drop --algo.advantage.turn_rewards, or use --reward.scorer None",
    )


# The policy loss.


@algorithm_rule
def ceiling_keeps_fresh_tokens(c: RLConfig, algorithm: Algorithm) -> Message:
    _, high = algorithm.low_high
    if algorithm.loss.bounds != "weight" or high >= 1:
        return None
    return message(
        c,
        [RL.actor.eps_clip_low_high, RL.actor.loss_mode],
        "its high is the ceiling of the ratio itself, and below 1 it would shrink even fresh tokens",
        _own_bounds(algorithm),
    )


@algorithm_warning
def warn_sample_ratio_never_clips(c: RLConfig, algorithm: Algorithm) -> Message:
    if algorithm.loss.bounds != "sample_ratio" or max(algorithm.low_high) <= 0.05:
        return None
    return message(
        c,
        [RL.actor.eps_clip_low_high, RL.actor.loss_mode],
        "the mean over a sample hardly leaves 1, so nothing would be clipped",
        _own_bounds(algorithm),
    )


def _own_bounds(algorithm: Algorithm) -> str:
    low, high = algorithm.loss.low_high
    return f"Use --actor.eps_clip_low_high {low:g} {high:g}, or leave it out"


@rule("rl")
def one_loss(c: RLConfig) -> Message:
    if c.algo.loss is None:
        return None
    if ":" not in c.algo.loss:
        fix = "Use FILE.py:function, or --actor.loss_mode for one of molt's"
        return message(c, [RL.algo.loss], "it names no function of yours", fix)
    if c.actor.loss_mode != ActorConfig.loss_mode:
        fix = "Drop --actor.loss_mode, or --algo.loss"
        return message(c, [RL.algo.loss, RL.actor.loss_mode], "only one of the two losses would be used", fix)
    return None


# Score centering takes the place of loss and correction.


@rule("rl")
def centering_is_the_loss(c: RLConfig) -> Message:
    centering = RL.algo.advantage.score_centering_top_k
    if c.algo.advantage.score_centering_top_k == 0:
        return None
    off = "or use --algo.advantage.score_centering_top_k 0"
    for setting in (RL.algo.loss, RL.actor.loss_mode, RL.actor.eps_clip_low_high, RL.actor.dual_clip):
        if value_of(setting, c) != value_of(setting, RLConfig()):
            fix = f"Drop --{name_of(setting)}, {off}"
            return message(c, [centering, setting], "score centering is a loss of its own, which has no ratio", fix)
    if c.train.max_epochs > 1:
        consequence = "in a second epoch its tokens are no longer what the sampler's distribution was centred for"
        return message(c, [centering, RL.train.max_epochs], consequence, f"Use --train.max_epochs 1, {off}")
    return None


@rule("rl")
def centering_needs_the_whole_distribution(c: RLConfig) -> Message:
    centering = RL.algo.advantage.score_centering_top_k
    if c.algo.advantage.score_centering_top_k == 0 or (c.rollout.top_p == 1 and c.rollout.top_k < 1):
        return None
    return message(
        c,
        [centering, RL.rollout.top_p, RL.rollout.top_k],
        "the engine renormalises what it samples from, the trainer does not: the center would be that of another "
        "distribution",
        "Use --rollout.top_p 1 --rollout.top_k -1",
    )


@rule("rl")
def centering_corrects_by_token(c: RLConfig) -> Message:
    advantage = c.algo.advantage
    by_token = advantage.is_correction_level in ("off", "token") and advantage.is_correction_gating == "ratio"
    if advantage.score_centering_top_k == 0 or by_token:
        return None
    return message(
        c,
        [
            RL.algo.advantage.score_centering_top_k,
            RL.algo.advantage.is_correction_level,
            RL.algo.advantage.is_correction_gating,
        ],
        "each candidate is corrected by its own ratio, which says nothing of the rest of the sample",
        "Use --algo.advantage.is_correction_level token (or off) --algo.advantage.is_correction_gating ratio",
    )


# The importance sampling correction.


@rule("rl")
def band_holds_fresh_tokens(c: RLConfig) -> Message:
    advantage = c.algo.advantage
    if advantage.is_correction_level == "off" or advantage.is_correction_gating != "ratio":
        return None
    low, high = advantage.band
    if low <= 1 <= high:
        return None
    return message(
        c,
        [RL.algo.advantage.is_correction_threshold, RL.algo.advantage.is_correction_level],
        "a token that trainer and engine agree on has ratio 1, so all would be dropped or rescaled",
        "Use --algo.advantage.is_correction_threshold 0.5 5",
    )


@rule("rl")
def divergence_gates_a_mask(c: RLConfig) -> Message:
    advantage = c.algo.advantage
    if advantage.is_correction_gating == "ratio":
        return None
    if advantage.is_correction_mode != "mask" or advantage.is_correction_level not in ("token", "seq"):
        return message(
            c,
            [
                RL.algo.advantage.is_correction_gating,
                RL.algo.advantage.is_correction_level,
                RL.algo.advantage.is_correction_mode,
            ],
            "a divergence can only decide which tokens or samples are dropped",
            "Use --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode mask, or "
            "--algo.advantage.is_correction_gating ratio",
        )
    low, _ = advantage.band
    if low > 0:
        return message(
            c,
            [RL.algo.advantage.is_correction_gating, RL.algo.advantage.is_correction_threshold],
            "where trainer and engine agree the divergence is 0, so just those tokens would be dropped",
            "Use --algo.advantage.is_correction_threshold 0 0.05",
        )
    return None


@rule("rl")
def whole_samples_are_masked(c: RLConfig) -> Message:
    advantage = c.algo.advantage
    if advantage.is_correction_level not in ("seq", "geo") or advantage.is_correction_mode == "mask":
        return None
    return message(
        c,
        [RL.algo.advantage.is_correction_level, RL.algo.advantage.is_correction_mode],
        "one number per sample says whether it is trained, it is not a ratio of a token to be bounded",
        "Use --algo.advantage.is_correction_mode mask, or --algo.advantage.is_correction_level token",
    )


@algorithm_rule
def ratios_need_the_whole_distribution(c: RLConfig, algorithm: Algorithm) -> Message:
    sampling: list[object] = []
    if c.rollout.top_p < 1:
        sampling.append(RL.rollout.top_p)
    if c.rollout.top_k > 0:
        sampling.append(RL.rollout.top_k)

    readers: list[object] = []
    without_readers: list[str] = []
    if algorithm.kl_coef > 0 and c.algo.kl.ref == "rollout":
        readers.append(RL.algo.kl.ref)
        without_readers.append("--algo.kl.ref model")
    if c.algo.advantage.is_correction_level != "off":
        readers.append(RL.algo.advantage.is_correction_level)
        without_readers.append("--algo.advantage.is_correction_level off")

    if not sampling or not readers:
        return None
    return message(
        c,
        [*sampling, *readers],
        "the engine renormalises what it samples from, the trainer does not: every ratio would be wrong",
        f"Use --rollout.top_p 1 --rollout.top_k -1, or {' '.join(without_readers)}",
    )


# Asynchrony.


@rule("rl")
def stale_tokens_need_correction(c: RLConfig) -> Message:
    if c.algo.advantage.is_correction_level != "off":
        return None
    if c.train.partial_rollout_enable and c.train.async_queue_size > 0:
        return message(
            c,
            [RL.train.partial_rollout_enable, RL.algo.advantage.is_correction_level],
            "tokens of one rollout are of several policies and would be trained as if they were of one",
            "Use --algo.advantage.is_correction_level token, or drop --train.partial_rollout_enable",
        )
    if c.train.staleness_bound > 1:
        setting: object = RL.train.async_queue_size
        if c.train.async_queue_size <= 1:
            setting = RL.train.max_staleness
        return message(
            c,
            [setting, RL.algo.advantage.is_correction_level],
            f"tokens up to {c.train.staleness_bound} batches old would be trained as if they were fresh",
            f"Use --algo.advantage.is_correction_level token, or --{name_of(setting)} 1",
        )
    return None


@warning("rl")
def warn_uncorrected(c: RLConfig) -> Message:
    if c.train.staleness_bound != 1 or c.algo.advantage.is_correction_level != "off":
        return None
    return message(
        c,
        [RL.train.async_queue_size, RL.algo.advantage.is_correction_level],
        "tokens may be one batch old and are trained as if they were fresh",
        "Use --algo.advantage.is_correction_level token, or --train.async_queue_size 0",
    )


@rule("rl")
def staleness_covers_the_queue(c: RLConfig) -> Message:
    bound = c.train.staleness_bound
    queue = c.train.async_queue_size
    if bound >= queue:
        return None
    return message(
        c,
        [RL.train.max_staleness, RL.train.async_queue_size],
        "groups that the queue lets start would be too old to be trained",
        f"Use --train.max_staleness {queue}, or --train.async_queue_size {max(bound, 0)}",
    )


@rule("rl")
def determinism_needs_one_version(c: RLConfig) -> Message:
    if not c.train.full_determinism_enable or c.train.async_queue_size == 0:
        return None
    return message(
        c,
        [RL.train.full_determinism_enable, RL.train.async_queue_size],
        "which rollouts meet which weight sync is a matter of time, so two runs would differ",
        "Use --train.async_queue_size 0, or drop --train.full_determinism_enable",
    )


@warning("rl")
def warn_more_in_flight_than_open(c: RLConfig) -> Message:
    room = (1 + c.train.async_queue_size) * c.rollout.batch_size
    in_flight = c.rollout.vllm_generate_batch_size
    if in_flight is None or in_flight <= room:
        return None
    return message(
        c,
        [RL.rollout.vllm_generate_batch_size, RL.train.async_queue_size, RL.rollout.batch_size],
        f"at most (1 + queue) * batch = {room} groups may be open",
        f"Use --rollout.vllm_generate_batch_size {room}, or raise --train.async_queue_size",
    )


@rule("rl", "eval")
def transfer_fits_the_device(c: RLConfig) -> Message:
    if c.fsdp.device == "cpu" and c.vllm.weight_transfer in ("nccl", "ipc"):
        return message(
            c,
            [RL.vllm.weight_transfer, RL.fsdp.device],
            "it copies between GPUs, so no weights would arrive",
            "Use --vllm.weight_transfer auto",
        )
    if c.actor.num_nodes > 1 and c.vllm.weight_transfer in ("shm", "ipc"):
        return message(
            c,
            [RL.vllm.weight_transfer, RL.actor.num_nodes],
            "nodes share no memory, so no weights would arrive",
            "Use --vllm.weight_transfer nccl",
        )
    return None


# What a run leaves behind.


@rule("rl")
def replay_has_no_engines(c: RLConfig) -> Message:
    if c.train.rollout_replay_dir is None or not c.eval.dataset:
        return None
    return message(
        c,
        [RL.train.rollout_replay_dir, RL.eval.dataset],
        "a replay starts no engines, so nothing could answer the evaluation",
        "Drop one of them; `molt eval` measures the model that a replay leaves",
    )


@rule("rl")
def best_is_of_an_evaluation(c: RLConfig) -> Message:
    key = c.ckpt.best_metric_key
    if key in ("", "none") or EVALUATED.fullmatch(key):
        return None
    return message(
        c,
        [RL.ckpt.best_metric_key],
        "no evaluation measures that, so no version could be the best",
        "Use eval/<data source>/pass1, or none",
    )


@warning("rl", "sft")
def warn_nothing_saved(c: AnyConfig) -> Message:
    if not c.ckpt.disable_final_save or c.ckpt.save_steps != -1:
        return None
    return message(
        c,
        [RL.ckpt.disable_final_save, RL.ckpt.save_steps],
        "nothing is saved unless something stops the run, or an evaluation may find the best",
        "Drop --ckpt.disable_final_save, or use --ckpt.save_steps 20",
    )
