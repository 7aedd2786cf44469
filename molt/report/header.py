"""What an RL run does, in words and in the formulas in force: the head of its output and of its page."""

import math
import re

from molt.algo.advantage import Estimator
from molt.algo.importance import describe
from molt.algo.kl import FORMULAS as KL
from molt.algo.plugin import load_estimator, load_loss
from molt.algo.reduce import AGGREGATIONS
from molt.config import RewardConfig, RLConfig

Rows = dict[str, str]
"""A name and what it is."""


def header(config: RLConfig, total_steps: int) -> str:
    """The run in a few lines, names aligned; what has no effect under these settings is left out.

    total_steps: training batches of the whole run. Raises `ConfigError` for an estimator or a loss that cannot be used.
    """
    rollout, estimator, kept = config.rollout, load_estimator(config.algo.advantage.estimator), {}
    if config.algo.dynamic_filtering_enable:
        low, high = config.algo.dynamic_filtering_range
        kept = {"batch": f"groups with {low:g} < mean(score) < {high:g}; the others are replaced"}
    words = set(re.findall(r"\w+", estimator.formula))
    rows = kept | _advantage(config, estimator, words) | _loss(config) | _kl(config, words)
    if "values" in estimator.needs:
        rows["critic"] = _critic(config)
    width = max(map(len, rows))
    return "\n".join(
        [
            f"molt rl  {config.actor.model_name_or_path}  agent {config.train.agent_path}",
            f"  {total_steps} steps of {rollout.batch_size} x {rollout.n_samples_per_prompt} rollouts, "
            f"no token older than {config.train.staleness_bound} batches",
            *(f"  {name:<{width}} = {text}" for name, text in rows.items()),
            f"  {_steps(config)}",
            f"  output {config.ckpt.output_dir}",
        ]
    )


def _shaped(reward: RewardConfig, max_len: int) -> str:
    text, (low, high) = "reward", reward.clip_range
    coef, buffer = reward.stop_properly_penalty_coef, reward.overlong_buffer_len
    if buffer is not None:
        text += (
            f" - {reward.overlong_penalty_factor:g} clip(longest segment - {max_len - buffer}, 0, {buffer}) / {buffer}"
        )
    elif coef is not None:
        text = f"{coef:g}{'' if coef < 0 else ' reward'} if truncated else reward"
    return f"clip({text}, {low:g}, {high:g})"


def _advantage(config: RLConfig, estimator: Estimator, words: set[str]) -> Rows:
    """words: the names in the estimator's formula; what they stand for is said too."""
    settings, rows = config.algo.advantage, {}
    if ":" in settings.estimator or words & {"R", "r_u"}:  # the user's own need not have a formula
        rows["R"] = _shaped(config.reward, config.data.max_len)
    if "r_u" in words:
        last = "R at the last generated token of a segment"
        rows["r_u"] = f"-beta KL_u, plus {last}" if config.algo.kl_in_reward else f"{last}, else 0"
    whitened = ", whitened over the batch" if estimator.whiten and not settings.no_whiten else ""
    discounts = (f", {name} = {getattr(settings, name):g}" for name in ("gamma", "lam") if name in words)
    return rows | {"A": f"{estimator.formula}{whitened}    [{settings.estimator}{''.join(discounts)}]"}


def _loss(config: RLConfig) -> Rows:
    actor, algo, settings = config.actor, config.algo, config.algo.advantage
    name, (low, high) = algo.loss or actor.loss_mode, actor.eps_clip_low_high
    scalars = {"low": low, "high": high, "dual_clip": actor.dual_clip}
    formula = load_loss(name).formula.format(**scalars)
    policy, _, where = (f"({formula})", "", "") if algo.loss else formula.partition(" [")
    corrected = settings.is_correction_level != "off"
    terms = [policy + (" * c" if corrected else "")]
    if algo.kl.use_loss and algo.kl_coef:
        terms.append("+ beta KL")
    if actor.entropy_coef:
        terms.append(f"{'-' if actor.entropy_coef > 0 else '+'} {abs(actor.entropy_coef):g} H")
    inner = " ".join(terms)
    balance = f" + {actor.aux_loss_coef:g} mean(balance)" if actor.aux_loss_coef else ""
    bound = f", at most {actor.dual_clip:g} |A| where A < 0" if actor.dual_clip and not algo.loss else ""
    total = f"sum_t {AGGREGATIONS[actor.loss_agg_mode].formula} * {f'({inner})' if len(terms) > 1 else inner}{balance}"
    rows = {"loss": f"{total}    [{name}{bound}]"}
    if not algo.loss:
        rows["r"] = "exp(logprob - old)"
    if where:  # what else a formula names, as "s = exp(...)"
        rows |= [where.rstrip("]").split(" = ")]
    if corrected:
        gate = settings.is_correction_mode, settings.is_correction_gating
        rows |= {"c": describe(settings.is_correction_level, *gate, *settings.band), "w": "exp(old - rollout)"}
    return rows


def _kl(config: RLConfig, words: set[str]) -> Rows:
    kl = config.algo.kl
    if not config.algo.kl_coef:
        return {}
    # The direction in which the tokens were sampled; see `kl_per_token`.
    turned = (kl.ref, kl.estimator) == ("rollout", "k3")
    formula = "exp(d) - 1 - d" if turned else KL[kl.estimator]
    ref = "teacher" if "teacher" in words else "ref"
    beta = f"beta = {config.algo.kl_coef:g}" + (f" at first, adapted towards KL = {kl.target:g}" if kl.target else "")
    model = config.ref.model_name_or_path or config.actor.model_name_or_path
    return {
        "KL": f"{formula}    [{kl.estimator}, {beta}]",
        "d": f"{'logprob' if kl.use_loss else 'old'} - {ref}",
        ref: f"{model}, frozen" if kl.ref == "model" else "the policy that sampled the token",
    }


def _critic(config: RLConfig) -> str:
    critic, alone = config.critic, config.actor.freezing_steps
    model = critic.model_name_or_path or config.actor.model_name_or_path
    warm_up = f", trained alone for the first {alone} batches" if alone else ""
    return f"{model}, V clipped to V_old +- {critic.value_clip:g}{warm_up}"


def _steps(config: RLConfig) -> str:
    steps = math.ceil(config.rollouts_per_batch / config.rollouts_per_step) * config.train.max_epochs
    if steps > 1:
        return f"{steps} optimizer steps per batch; old is of before the first"
    clip = "" if config.algo.loss else ": r = 1, so the clip has no effect"
    region = "" if config.algo.advantage.is_correction_level == "off" else "; c is the trust region"
    return f"one optimizer step per batch{clip}{region}"
