"""What an RL run does, in words and in the formulas in force: the head of its output and of its page."""

import math

from molt.algo import kl as kl_formulas
from molt.algo.importance import describe
from molt.algo.reduce import AGGREGATIONS
from molt.algorithm import Algorithm, load_algorithm, reward_shaping
from molt.config import RLConfig, TrainConfig

Definitions = dict[str, str]
"""A name and its formula or meaning, in the order in which they are shown."""


def header(config: RLConfig, total_steps: int) -> str:
    """The run in a few lines, names aligned; a setting without effect is left out.

    total_steps: training batches of the run. Raises `ConfigError` for an estimator or a loss that cannot be used.
    """
    algorithm = load_algorithm(config.algo, config.actor)
    definitions = _batch(config)
    definitions |= _advantage(config, algorithm)
    definitions |= _loss(config, algorithm)
    definitions |= _kl(config, algorithm)
    if algorithm.needs_critic:
        definitions["critic"] = _critic(config)

    rollout = config.rollout
    lines = [
        f"molt rl  {config.actor.model_name_or_path}  agent {config.train.agent_path}",
        f"  {total_steps} steps of {rollout.batch_size} x {rollout.n_samples_per_prompt} rollouts, "
        f"{_staleness(config.train)}",
    ]
    if rollout.scheme is not None:
        lines.append(f"  rollouts of a group by {rollout.scheme}")
    width = max(len(name) for name in definitions)
    for name, text in definitions.items():
        lines.append(f"  {name:<{width}} = {text}")
    lines.append(f"  {_steps(config)}")
    lines.append(f"  output {config.ckpt.output_dir}")
    return "\n".join(lines)


def _staleness(train: TrainConfig) -> str:
    bound = train.staleness_bound
    if bound == 0:
        return "on-policy"
    if bound == 1:
        return "at most 1 batch off-policy"
    return f"at most {bound} batches off-policy"


def _batch(config: RLConfig) -> Definitions:
    """Which groups and rollouts are trained, where some are not."""
    algo = config.algo
    definitions = {}
    if algo.dynamic_filtering_enable:
        low, high = algo.dynamic_filtering_range
        definitions["batch"] = f"groups with {low:g} < mean(score) < {high:g}; the others are replaced"
    if config.reward.mask_truncated:
        definitions["group"] = "rollouts that no length limit cut; with too few of them it is replaced"
    return definitions


def _advantage(config: RLConfig, algorithm: Algorithm) -> Definitions:
    """`A`, and the names in its formula that depend on the settings."""
    settings = config.algo.advantage
    estimator = algorithm.estimator
    symbols = estimator.symbols
    definitions = {}

    is_users = ":" in settings.estimator  # a formula of the user's need not name R
    if is_users or "R" in symbols or "r_u" in symbols:
        definitions["R"] = reward_shaping(config.reward, config.data.max_len).formula
    if "r_u" in symbols:
        definitions["r_u"] = _token_reward(algorithm)

    text = estimator.formula
    if estimator.whiten and not settings.no_whiten:
        text += ", whitened over the batch"
    label = settings.estimator
    if "gamma" in symbols:
        label += f", gamma = {settings.gamma:g}"
    if "lam" in symbols:
        label += f", lam = {settings.lam:g}"
    definitions["A"] = f"{text}    [{label}]"
    return definitions


def _token_reward(algorithm: Algorithm) -> str:
    last = "R at the last generated token of a segment"
    if algorithm.algo.advantage.turn_rewards:
        last = "a turn's reward at its last token, the rest of R at the last of a segment"
    if algorithm.kl_in_reward:
        return f"-beta KL_u, plus {last}"
    return f"{last}, else 0"


def _centered_loss(config: RLConfig, algorithm: Algorithm) -> Definitions:
    """`loss` of score centering, and the names in its formula."""
    advantage = config.algo.advantage
    k = advantage.score_centering_top_k
    per_token = _with_regularisers("-A (f(p/q) logprob - center)", algorithm)
    total = f"sum_t {AGGREGATIONS[config.actor.loss_agg_mode].formula} * {per_token}"
    if config.actor.aux_loss_coef:
        total += f" + {config.actor.aux_loss_coef:g} mean(balance)"
    f = "1"
    if advantage.is_correction_level != "off":
        low, high = advantage.band
        f = describe("token", advantage.is_correction_mode, "ratio", low, high).replace("w", "p/q")
    return {
        "loss": f"{total}    [score centering]",
        "center": f"sum of (q f(p/q) - alpha p) log p over the engine's {k} likeliest tokens v",
        "f(p/q)": f,
        "p, q": "exp(logprob) now, exp(rollout)",
    }


def _loss(config: RLConfig, algorithm: Algorithm) -> Definitions:
    """`loss`, and the names in its formula."""
    if config.algo.advantage.score_centering_top_k:
        return _centered_loss(config, algorithm)
    actor = config.actor
    algo = config.algo
    advantage = algo.advantage
    is_corrected = advantage.is_correction_level != "off"

    loss = algorithm.loss
    low, high = algorithm.low_high
    bounds = {"low": low, "high": high, "dual_clip": actor.dual_clip}
    formula = loss.formula.format(**bounds)
    if algo.loss:
        formula = f"({formula})"
    if is_corrected:
        formula += " * c"

    per_token = _with_regularisers(formula, algorithm)
    total = f"sum_t {AGGREGATIONS[actor.loss_agg_mode].formula} * {per_token}"
    if actor.aux_loss_coef:
        total += f" + {actor.aux_loss_coef:g} mean(balance)"
    label = algo.loss or actor.loss_mode
    if actor.dual_clip and not algo.loss:
        label += f", at most {actor.dual_clip:g} |A| where A < 0"

    definitions = {"loss": f"{total}    [{label}]"}
    if not algo.loss:
        definitions["r"] = "exp(logprob - old)"
    if loss.where is not None:
        symbol, meaning = loss.where
        definitions[symbol] = meaning.format(**bounds)
    if is_corrected:
        low, high = advantage.band
        definitions["c"] = describe(
            advantage.is_correction_level,
            advantage.is_correction_mode,
            advantage.is_correction_gating,
            low,
            high,
        )
        definitions["w"] = "exp(old - rollout)"
    return definitions


def _with_regularisers(formula: str, algorithm: Algorithm) -> str:
    """The loss of a token: the policy's, the KL and the entropy."""
    actor = algorithm.actor
    terms = [formula]
    if algorithm.algo.kl.use_loss and algorithm.kl_coef:
        terms.append("+ beta KL")
    if actor.entropy_coef > 0:
        terms.append(f"- {actor.entropy_coef:g} H")
    if actor.entropy_coef < 0:
        terms.append(f"+ {-actor.entropy_coef:g} H")

    if len(terms) == 1:
        return formula
    return f"({' '.join(terms)})"


def _kl(config: RLConfig, algorithm: Algorithm) -> Definitions:
    """`KL` and the names in its formula, where its coefficient is not 0."""
    kl = config.algo.kl
    coef = algorithm.kl_coef
    if not coef:
        return {}

    # The direction in which the tokens were sampled; see `kl_per_token`.
    formula = kl_formulas.FORMULAS[kl.estimator]
    if kl.ref == "rollout" and kl.estimator == "k3":
        formula = kl_formulas.FORWARD_K3
    beta = f"beta = {coef:g}"
    if kl.target:
        beta += f" at first, adapted towards KL = {kl.target:g}"

    reference = "the policy that sampled the token"
    if kl.ref == "model":
        model = config.ref.model_name_or_path or config.actor.model_name_or_path
        reference = f"{model}, frozen"
    reference_name = "teacher" if "teacher" in algorithm.estimator.symbols else "ref"
    trained_name = "logprob" if kl.use_loss else "old"
    return {
        "KL": f"{formula}    [{kl.estimator}, {beta}]",
        "d": f"{trained_name} - {reference_name}",
        reference_name: reference,
    }


def _critic(config: RLConfig) -> str:
    model = config.critic.model_name_or_path or config.actor.model_name_or_path
    text = f"{model}, V clipped to V_old +- {config.critic.value_clip:g}"
    alone = config.actor.freezing_steps
    if alone:
        text += f", trained alone for the first {alone} batches"
    return text


def _steps(config: RLConfig) -> str:
    """How many optimizer steps a batch has, and how that changes the part of the clip and of `c`."""
    per_epoch = math.ceil(config.rollouts_per_batch / config.rollouts_per_step)
    steps = per_epoch * config.train.max_epochs
    if steps > 1:
        return f"{steps} optimizer steps per batch; old is computed before the first"

    text = "one optimizer step per batch"
    if not config.algo.loss:
        text += ": r = 1, so the clip has no effect"
    if config.algo.advantage.is_correction_level != "off":
        text += "; c is the trust region"
    return text
