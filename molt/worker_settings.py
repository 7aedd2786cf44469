"""What each process needs to know, derived from the run's settings: every process gets its sections, never the root."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from molt.agents.load import resolved, scorer_of
from molt.algo.plugin import absolute
from molt.config import AlgoConfig, RewardConfig, RLConfig
from molt.parallel.mesh import DTYPES, param_dtype, resolve_device
from molt.roles import Role
from molt.rollout.agent_host import RunnerSettings
from molt.rollout.engine_worker import EngineSettings
from molt.spec import ProcessSpec
from molt.train.critic import CriticSettings
from molt.train.policy import PolicySettings
from molt.train.reference import ReferenceSettings


def engine_dtype(config: RLConfig) -> torch.dtype:
    """The dtype that the engines hold and the trainer publishes; unset: the trainer's compute dtype."""
    if config.vllm.dtype != "auto":
        return DTYPES[config.vllm.dtype]
    return param_dtype(config.fsdp, resolve_device(config.fsdp.device))


def engine_settings(spec: ProcessSpec) -> EngineSettings:
    config = spec.config
    return EngineSettings(
        model=config.actor.model_name_or_path,
        dtype=str(engine_dtype(config)).removeprefix("torch."),
        max_model_len=config.data.max_len,
        device=spec.device.type,
        vllm=config.vllm,
        weight_transfer=spec.weight_transfer,
        partial_rollouts=config.train.partial_rollout_enable,
        candidates=config.algo.advantage.score_centering_top_k,
        deterministic=config.train.full_determinism_enable,
    )


def runner_settings(config: RLConfig) -> RunnerSettings:
    rollout = config.rollout
    if rollout.scheme is not None:  # runners run in another directory
        rollout = replace(rollout, scheme=str(Path(rollout.scheme).resolve()))
    return RunnerSettings(
        agent_path=resolved(config.train.agent_path),
        model=config.actor.model_name_or_path,
        data=config.data,
        rollout=rollout,
        seed=config.train.seed,
        candidates=config.algo.advantage.score_centering_top_k,
        reward=reward_settings(config),
    )


def reward_settings(config: RLConfig) -> RewardConfig:
    """The reward section for a process that runs in another directory, with the scorer that is in force."""
    scorer = scorer_of(config.train.agent_path, config.reward.scorer)
    if scorer is not None:
        scorer = str(Path(scorer).resolve())
    cache_dir = config.reward.cache_dir
    if cache_dir is not None:
        cache_dir = cache_dir.resolve()
    return replace(config.reward, scorer=scorer, cache_dir=cache_dir)


def policy_settings(spec: ProcessSpec) -> PolicySettings:
    config = spec.config
    trained_batches = spec.total_batches - config.actor.freezing_steps
    return PolicySettings(
        actor=config.actor,
        fsdp=config.fsdp,
        algo=_with_absolute_paths(config.algo),
        train=config.train,
        temperature=config.rollout.temperature,
        max_len=config.data.max_len,
        total_steps=trained_batches * _steps_per_epoch(config) * config.train.max_epochs,
        engine_dtype=engine_dtype(config),
        apply_chat_template=config.data.apply_chat_template,
    )


def reference_settings(spec: ProcessSpec, role: Role) -> ReferenceSettings:
    config = spec.config
    return ReferenceSettings(role.model, config.fsdp, config.rollout.temperature, config.data.max_len)


def critic_settings(spec: ProcessSpec, role: Role) -> CriticSettings:
    config = spec.config
    critic = replace(config.critic, model_name_or_path=role.model)
    total_steps = spec.total_batches * _steps_per_epoch(config) * critic.max_epochs
    return CriticSettings(critic, config.fsdp, config.train, config.data.max_len, total_steps)


def _steps_per_epoch(config: RLConfig) -> int:
    """Optimizer steps of one pass over one training batch."""
    return math.ceil(config.rollouts_per_batch / config.rollouts_per_step)


def _with_absolute_paths(algo: AlgoConfig) -> AlgoConfig:
    """Ranks run in another directory, so the user's files are named from the root."""
    advantage = replace(algo.advantage, estimator=absolute(algo.advantage.estimator))
    loss = absolute(algo.loss) if algo.loss else algo.loss
    return replace(algo, advantage=advantage, loss=loss)
