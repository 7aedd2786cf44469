"""The two command lines that most people will start from."""

from pathlib import Path

import pytest

from molt.cli.args import parse
from molt.cli.main import main
from molt.config import RLConfig
from molt.config_sft import SftConfig

SFT = """torchrun --standalone --nproc_per_node=8 -m molt.cli.train_sft --model.model_name_or_path M
--data.dataset sft.jsonl --data.input_key input --data.output_key output --ckpt.output_dir ./ckpt/sft
--fsdp.attn_implementation te"""
RL = """python3 -m molt.cli.train_rl_ray --actor.model_name_or_path M --data.prompt_dataset prompts.jsonl
--data.input_key input --train.agent_path examples/python/agents/math.py --vllm.num_engines 2
--vllm.tensor_parallel_size 2 --rollout.batch_size 128 --train.batch_size 128 --train.micro_batch_size 1
--algo.advantage.estimator reinforce --algo.kl.init_coef 0 --fsdp.attn_implementation te
--ckpt.output_dir ./ckpt/rl"""


def flags(command: str) -> list[str]:
    """Without the launcher's words."""
    words = command.split()
    return words[words.index("-m") + 2 :]


def test_sft():
    config = parse(SftConfig, flags(SFT), prog="molt sft")
    assert config.model.model_name_or_path == "M" and config.data.dataset == "sft.jsonl"
    assert (config.data.input_key, config.data.output_key) == ("input", "output")
    assert config.ckpt.output_dir == Path.cwd() / "ckpt/sft" and config.fsdp.attn_implementation == "te"


def test_rl():
    config = parse(RLConfig, flags(RL), prog="molt rl")
    assert config.actor.model_name_or_path == "M" and config.data.prompt_dataset == "prompts.jsonl"
    assert config.data.input_key == "input" and config.train.agent_path == "examples/python/agents/math.py"
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size) == (2, 2)
    assert (config.rollout.batch_size, config.train.batch_size, config.train.micro_batch_size) == (128, 128, 1)
    assert config.algo.advantage.estimator == "reinforce" and config.algo.kl.init_coef == 0
    assert config.ckpt.output_dir == Path.cwd() / "ckpt/rl" and config.fsdp.attn_implementation == "te"


@pytest.mark.parametrize(("trainer", "command"), [("rl", RL), ("sft", SFT)])
def test_on_a_cpu_te_is_refused_by_name_with_the_fix(trainer, command, capsys):
    assert main(["check", trainer, *flags(command), "--fsdp.device", "cpu"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "attn_implementation" in line]
    assert line.startswith("error") and "(=te) on cpu" in line and "Use auto" in line
