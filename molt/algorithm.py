"""The algorithm of a run: the table rows that its settings name, and what settings and rows say together."""

from dataclasses import dataclass

from molt.algo.advantage import Estimator
from molt.algo.loss import LOSSES, PolicyLoss
from molt.algo.plugin import load_estimator, load_loss, unknown_row
from molt.algo.shaping import Shaping
from molt.config import ActorConfig, AlgoConfig, RewardConfig


@dataclass(frozen=True)
class Algorithm:
    """An estimator, a loss, and the settings that both are used with."""

    estimator: Estimator
    loss: PolicyLoss
    algo: AlgoConfig
    actor: ActorConfig

    @property
    def low_high(self) -> tuple[float, float]:
        """The bounds of the loss: those of the settings, or else its own."""
        return self.actor.eps_clip_low_high or self.loss.low_high

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL before anything adapts it: that of the settings, or else the estimator's own."""
        if self.algo.kl.init_coef is None:
            return self.estimator.kl_coef
        return self.algo.kl.init_coef

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and not self.algo.kl.use_loss

    @property
    def reads_reference_model(self) -> bool:
        return self.kl_coef > 0 and self.algo.kl.ref == "model"

    @property
    def needs_critic(self) -> bool:
        return "values" in self.estimator.needs


def load_algorithm(algo: AlgoConfig, actor: ActorConfig) -> Algorithm:
    """Raises `ConfigError` for a name that no row has, and for a user's file that cannot be used."""
    estimator = load_estimator(algo.advantage.estimator)
    return Algorithm(estimator, policy_loss(algo, actor), algo, actor)


def policy_loss(algo: AlgoConfig, actor: ActorConfig) -> PolicyLoss:
    """The user's loss, if there is one, else the row that `actor.loss_mode` names. Raises `ConfigError`."""
    if algo.loss is not None:
        return load_loss(algo.loss)
    if actor.loss_mode not in LOSSES:
        raise unknown_row("actor.loss_mode", actor.loss_mode, LOSSES)
    return LOSSES[actor.loss_mode]


def reward_shaping(reward: RewardConfig, max_len: int) -> Shaping:
    """How rewards are shaped. max_len: tokens of the context."""
    return Shaping(
        max_len=max_len,
        clip_range=reward.clip_range,
        overlong_buffer_len=reward.overlong_buffer_len,
        overlong_penalty_factor=reward.overlong_penalty_factor,
        stop_properly_penalty_coef=reward.stop_properly_penalty_coef,
    )
