"""Which flag an unknown one points to: by other frameworks' words, by letters where they are near, else none."""

import pytest

from molt.cli.args import flags
from molt.cli.flag_hints import ALIASES, flag_hint
from molt.config import RLConfig
from molt.config_sft import SftConfig

RL = flags(RLConfig)
SFT = flags(SftConfig)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("learning_rate", RL, "actor.adam.lr"),
        ("actor.learning_rate", RL, "actor.adam.lr"),
        ("critic.learning_rate", RL, "critic.adam.lr"),
        ("lr", RL, "actor.adam.lr"),
        ("learning_rate", SFT, "adam.lr"),
        ("num_generations", RL, "rollout.n_samples_per_prompt"),
        ("rollout.n", RL, "rollout.n_samples_per_prompt"),
        ("kl_coef", RL, "algo.kl.init_coef"),
        ("algo.kl.coef", RL, "algo.kl.init_coef"),
        ("beta", RL, "algo.kl.init_coef"),
        ("per_device_train_batch_size", RL, "train.micro_batch_size"),
        ("per_device_train_batch_size", SFT, "train.micro_batch_size"),
        ("max_completion_length", RL, "rollout.max_new_tokens"),
        ("data.train_batch_size", RL, "rollout.batch_size"),
        ("train_batch_size", SFT, "train.batch_size"),
        ("data.train_files", RL, "data.prompt_dataset"),
        ("num_train_epochs", RL, "train.num_episodes"),
        ("num_train_epochs", SFT, "train.max_epochs"),
        ("ckpt.save_stesp", RL, "ckpt.save_steps"),
        ("train.steps", RL, "train.max_steps"),
        ("train.steps", SFT, "train.max_steps"),
        ("steps", RL, "train.max_steps"),
        ("ckpt.steps", RL, "ckpt.save_steps"),
        ("logger.steps", RL, "logger.logging_steps"),
        ("rollout.max_tokens", RL, "rollout.max_new_tokens"),
        ("ckpt.dir", RL, "ckpt.output_dir"),
        ("train.lr", RL, "actor.adam.lr"),
        ("actor.lr", RL, "actor.adam.lr"),
        ("data.seed", RL, "train.seed"),
        ("temperature", RL, "rollout.temperature"),
        ("top_p", RL, "rollout.top_p"),
        ("max_epochs", RL, "train.max_epochs"),
        ("trainer.n_gpus_per_node", RL, "actor.num_gpus_per_node"),
        ("critic.num_gpu_per_node", RL, "critic.num_gpus_per_node"),
        ("eval.temprature", RL, "eval.temperature"),
    ],
)
def test_a_word_of_another_framework_points_to_ours(name, known, meant):
    assert flag_hint(name, known) == f" Did you mean '--{meant}'?"


@pytest.mark.parametrize("name", ["rollout.sampler_kind", "xyz", "fsdp.cp_size", "train.colocate_all", "use_vllm"])
def test_a_far_flag_is_no_hint(name):
    assert flag_hint(name, RL) == ""


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("actor.lora.rank", "LoRA"),
        ("actor.lora_dim", "LoRA"),
        ("lora_r", "LoRA"),
        ("peft_config", "LoRA"),
        ("actor.muon.lr", "Muon"),
        ("actor.muon.momentum", "Muon"),
        ("train.routing_replay", "routing replay"),
        ("routing_replay", "routing replay"),
    ],
)
def test_what_is_not_built_is_said(name, feature):
    assert flag_hint(name, RL) == f" molt has no {feature} yet."


def test_every_alias_leads_to_a_flag():
    for word, targets in ALIASES.items():
        assert set(targets) <= RL.keys() | SFT.keys(), word
