"""What a user gets wrong, on the command line or in a file: one message, with the value, the consequence and the fix.

Nothing is started or written. What goes wrong later is tested where it happens: an agent that raises, hangs or returns
NaN in `tests/test_loop.py`, checkpoints that are torn or of another run in `tests/train/test_checkpoint.py` and
`tests/test_resume.py`, a full disk in `tests/train/test_checkpoint.py`.
"""

import json
import shlex
from pathlib import Path

import pytest

from molt.cli.main import main
from tests.cli.conftest import as_given
from tests.tiny import ALPHABET, char_tokenizer

RL = (
    "--actor.model_name_or_path model --data.prompt_dataset prompts.jsonl --data.label_key label "
    "--data.apply_chat_template --data.max_len 64 --train.agent_path agent.py --fsdp.device cpu "
    "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --vllm.num_engines 1"
)
SFT = "--model.model_name_or_path model --data.dataset prompts.jsonl --data.output_key label --data.max_len 64"
EVAL = (
    "--actor.model_name_or_path model --eval.dataset prompts.jsonl --data.label_key label --data.apply_chat_template "
    "--data.max_len 64 --train.agent_path agent.py --fsdp.device cpu"
)
FLAGS = {"rl": RL, "sft": SFT, "eval": EVAL}

# command, wrong flags, value, consequence, fix
WRONG = [
    # the command line
    ("rl", "--rollout.batchsize 4", "unknown flag `--rollout.batchsize`", "", "Did you mean '--rollout.batch_size'?"),
    ("rl", "--rollout.batch_size many", "`rollout.batch_size` (=many)", "nothing was started", "Write one"),
    (
        "rl",
        "--algo.advantage.estimator grop",
        "`algo.advantage.estimator` (=grop)",
        "nothing was started",
        "Did you mean 'grpo'? Use one of: reinforce",
    ),
    ("rl", "--data.apply_chat_template yes", "`--data.apply_chat_template`", "takes no value", "Write the flag alone"),
    ("rl", "--ckpt.save_steps 0", "`ckpt.save_steps` (=0)", "nothing would ever be saved", "Use a positive cadence"),
    ("rl", "--rollout.temperature 0", "`rollout.temperature` (=0.0)", "no log-probs to learn from", "Use 1.0"),
    ("sft", "--train.max_epochs 0", "`train.max_epochs` (=0)", "nothing would be trained", "Use a value >= 1"),
    ("rl", "--config nowhere.toml", "`--config` (=nowhere.toml)", "cannot be read", "Name a config.toml"),
    ("rl", "--config old.toml", "unknown setting `rollout.batchsize`", "", "Did you mean 'rollout.batch_size'?"),
    # the model
    ("rl", "--actor.model_name_or_path modle", "(=modle)", "no tokenizer to load", "Did you mean 'model'?"),
    ("rl", "--actor.model_name_or_path no/such", "(=no/such)", "no prompt can be tokenised", "Give a directory with"),
    ("rl", "--actor.model_name_or_path empty", "(=empty)", "no prompt can be tokenised", "Give a directory with"),
    ("rl", "--actor.model_name_or_path bert", "(=bert) is ['BertForMaskedLM']", "cannot generate text", "Use one"),
    ("rl", "--actor.model_name_or_path head16", "heads have size 16", "engine would die", "size 32, 64, 80"),
    ("rl", "--actor.model_name_or_path step_000020", "(=step_000020)", "cannot be loaded", "--ckpt.save_hf"),
    ("sft", "--model.model_name_or_path granite", "scales its logits", "log-probs would be wrong", "Use another model"),
    ("rl", "--data.max_len 4096", "`data.max_len` (=4096)", "never seen such positions", "Use --data.max_len 2048"),
    ("rl", "--fsdp.attn_implementation te", "(=te) on cpu", "runs on GPUs only", "Use auto"),
    ("rl", "--data.chat_template nowhere.jinja", "(=nowhere.jinja)", "cannot be rendered", "Give the path"),
    ("rl", "--data.chat_template fixed.jinja", "`data.chat_template`", "cannot be continued", "Pass another template"),
    (
        "sft",
        "--data.chat_template silent.jinja",
        "`data.input_key` (=input)",
        "no row is left to train on",
        "another `data.chat_template`",
    ),
    # the data
    ("rl", "--data.prompt_dataset promts.jsonl", "(=promts.jsonl)", "nothing to load", "Did you mean 'prompts.jsonl'?"),
    ("rl", "--data.prompt_dataset no/such", "(=no/such)", "nothing to load", "Correct the path or the name"),
    ("rl", "--data.prompt_dataset empty.jsonl", "(=empty.jsonl)", "no rows to learn from", "at least one row"),
    ("rl", "--data.prompt_dataset broken.jsonl", "broken.jsonl, line 2", "cannot be read", "one object per line"),
    ("rl", "--data.prompt_dataset ragged.csv", "ragged.csv, line 3", "cannot be read", "put fields that hold commas"),
    ("rl", "--data.prompt_dataset torn.parquet", "torn.parquet: not parquet", "no row can be read", "Write it again"),
    ("rl", "--data.prompt_dataset notes.md", "unknown kind '.md'", "nothing to load", "that ends in .json, .jsonl"),
    ("rl", "--data.prompt_dataset empty", "(=empty)", "nothing to load", "Put files that end in"),
    (
        "rl",
        "--data.prompt_dataset splits --data.prompt_split tset",
        "`data.prompt_split` (=tset)",
        "nothing to load",
        "Did you mean 'test'? Use one of: test",
    ),
    (
        "rl",
        "--data.prompt_dataset prompts.jsonl,more.jsonl --data.prompt_probs 1",
        "`data.prompt_probs` (=1)",
        "`data.prompt_dataset` (=prompts.jsonl,more.jsonl)",
        "share",
    ),
    (
        "sft",
        "--data.dataset prompts.jsonl,more.jsonl --data.dataset_probs 0.5,-1",
        "`data.dataset_probs` (=0.5,-1)",
        "",
        "share",
    ),
    ("rl", "--data.input_key inputs", "`data.input_key` (=inputs)", "no row could be used", "Did you mean 'input'?"),
    ("rl", "--data.label_key lable", "`data.label_key` (=lable)", "no row could be used", "Did you mean 'label'?"),
    ("sft", "--data.output_key lable", "`data.output_key` (=lable)", "no row could be used", "Did you mean 'label'?"),
    ("rl", "--data.max_len 8", "not shorter than `data.max_len` (=8)", "no prompt is left", "raise it"),
    ("eval", "--eval.dataset nowhere.jsonl", "`eval.dataset` (=nowhere.jsonl)", "nothing to load", "Give the path"),
    (
        "eval",
        "--eval.dataset ''",
        "`eval.dataset` is not set",
        "nothing to evaluate the model on",
        "Pass --eval.dataset",
    ),
    # the agent
    ("rl", "--train.agent_path agnt.py", "(=agnt.py)", "nothing to run", "Did you mean 'agent.py'?"),
    ("rl", "--train.agent_path no_runner.py", "no_runner.py", "no `AgentRunner`", "class AgentRunner(StepEnvRunner)"),
    ("rl", "--train.agent_path raises.py", "raises.py", "cannot be imported", "ZeroDivisionError"),
    ("rl", "--rollout.scheme schem.py", "(=schem.py)", "nothing to run", "Give the path of a FILE.py"),
    ("rl", "--rollout.scheme agent.py", "(=agent.py)", "no rollout would start", "Add `async def run_group"),
    # settings against each other
    ("rl", "--train.batch_size 12", "`train.batch_size` (=12)", "a group would be split", "4 or 8 or 16"),
    (
        "rl",
        "--rollout.n_samples_per_prompt 1 --algo.advantage.estimator grpo",
        "(=1)",
        "every advantage would be 0",
        "Use --rollout.n_samples_per_prompt 8",
    ),
    (
        "rl",
        "--train.async_queue_size 3 --algo.advantage.is_correction_level off",
        "(=3)",
        "as if they were fresh",
        "--algo.advantage.is_correction_level token",
    ),
    ("rl", "--rollout.top_p 0.9", "`rollout.top_p` (=0.9)", "every ratio would be wrong", "Use --rollout.top_p 1"),
    (
        "rl",
        "--algo.advantage.is_correction_level geo --algo.advantage.is_correction_mode clip",
        "(=geo)",
        "not a ratio of a token",
        "--algo.advantage.is_correction_mode mask",
    ),
    # the algorithm
    (
        "rl",
        "--algo.advantage.estimator grpo --algo.kl.init_coef 0.1",
        "`algo.kl.init_coef` (=0.1)",
        "would never read it",
        "Use --algo.kl.use_loss --algo.kl.estimator k3",
    ),
    ("rl", "--algo.kl.use_loss --algo.kl.init_coef 0.1", "(=k1)", "is 0 on average", "Use --algo.kl.estimator k2"),
    ("rl", "--algo.kl.init_coef -1", "`algo.kl.init_coef` (=-1.0)", "away from its reference", "Use a value >= 0"),
    ("rl", "--algo.kl.target 0.1", "`algo.kl.target` (=0.1)", "0 times it is 0", "Use --algo.kl.init_coef 0.001"),
    (
        "rl",
        "--algo.advantage.estimator on_policy_distill",
        "`ref.model_name_or_path` (=)",
        "its own teacher",
        "Pass --ref.model_name_or_path",
    ),
    (
        "rl",
        "--algo.advantage.estimator on_policy_distill --ref.model_name_or_path shifted --algo.kl.ref rollout",
        "`algo.kl.ref` (=rollout)",
        "nothing else leads to the teacher",
        "Use --algo.kl.ref model",
    ),
    (
        "rl",
        "--actor.freezing_steps 3",
        "`actor.freezing_steps` (=3)",
        "train nothing",
        "--algo.advantage.estimator gae",
    ),
    ("rl", "--actor.loss_mode gsop", "`actor.loss_mode` (=gsop)", "nothing was started", "Did you mean 'gspo'?"),
    ("rl", "--actor.dual_clip 1", "`actor.dual_clip` (=1.0)", "lose their gradient at once", "Use 3.0, or unset"),
    (
        "rl",
        "--actor.dual_clip 3 --actor.loss_mode gspo",
        "(=gspo)",
        "only ppo has that bound",
        "drop --actor.dual_clip",
    ),
    (
        "rl",
        "--actor.loss_agg_mode token-maen",
        "`actor.loss_agg_mode` (=token-maen)",
        "nothing was started",
        "Did you mean 'token-mean'? Use one of: token-mean, seq-mean-token-mean",
    ),
    (
        "rl",
        "--actor.loss_mode cispo --actor.eps_clip_low_high 0.2 0.2",
        "(=(0.2, 0.2))",
        "shrink even fresh",
        "Use --actor.eps_clip_low_high 0.2 5",
    ),
    ("rl", "--actor.aux_loss_coef 0.001", "(=0.001)", "nothing would be balanced", "Use 0, or a model of type"),
    (
        "rl",
        "--algo.advantage.is_correction_gating tv",
        "`algo.advantage.is_correction_gating` (=tv)",
        "just those tokens would be dropped",
        "Use --algo.advantage.is_correction_threshold 0 0.05",
    ),
    (
        "rl",
        "--algo.dynamic_filtering_enable --rollout.n_samples_per_prompt 1",
        "`algo.dynamic_filtering_enable` (=True)",
        "every right and every wrong answer would be discarded",
        "Use --rollout.n_samples_per_prompt 8",
    ),
    (
        "rl",
        "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 1 0",
        "`algo.dynamic_filtering_range` (=(1.0, 0.0))",
        "every group would be discarded",
        "Use LOW HIGH with LOW < HIGH",
    ),
    (
        "rl",
        "--reward.overlong_buffer_len 8 --reward.stop_properly_penalty_coef 0.5",
        "`reward.overlong_buffer_len` (=8)",
        "punished twice",
        "Drop --reward.overlong_buffer_len",
    ),
    ("rl", "--reward.overlong_buffer_len 64", "(=64)", "every answer would be too long", "overlong_buffer_len 16"),
    # plug-ins
    (
        "rl",
        "--algo.advantage.estimator plugns.py:mean",
        "`algo.advantage.estimator` (=plugns.py)",
        "nothing to run",
        "Did you mean 'plugins.py'?",
    ),
    (
        "rl",
        "--algo.advantage.estimator plugins.py:maen",
        "`algo.advantage.estimator` (=plugins.py:maen)",
        "nothing was started",
        "Did you mean 'mean'?",
    ),
    (
        "rl",
        "--algo.advantage.estimator plugins.py:mean",
        "`algo.advantage.estimator` (=plugins.py:mean)",
        "returns torch.float64 of shape []",
        "Return a tensor of floats of shape [4]",
    ),
    (
        "rl",
        "--algo.advantage.estimator plugins.py:good --algo.kl.init_coef 0.1",
        "(=plugins.py:good)",
        "would never read it",
        "Use --algo.kl.use_loss",
    ),
    ("rl", "--algo.loss plugins.py:mean", "`algo.loss` (=plugins.py:mean)", "other arguments", "Write `def f(logprobs"),
    ("rl", "--algo.loss plugins.py:detached", "`algo.loss` (=plugins.py:detached)", "gradient of size 0", "detach()"),
    ("rl", "--algo.loss cispo", "`algo.loss` (=cispo)", "no function of yours", "or --actor.loss_mode"),
    # the models that score
    (
        "rl",
        "--algo.kl.init_coef 0.1 --ref.model_name_or_path modle",
        "`ref.model_name_or_path` (=modle)",
        "",
        "'model'?",
    ),
    (
        "rl",
        "--algo.advantage.estimator gae --critic.model_name_or_path bert",
        "(=bert)",
        "cannot generate text",
        "Use one",
    ),
    (
        "rl",
        "--algo.kl.init_coef 0.1 --ref.model_name_or_path shifted",
        "`ref.model_name_or_path` (=shifted) has another vocabulary than `actor.model_name_or_path` (=model)",
        "first at id 3: the ids of a rollout are another text there",
        "Use a model with the actor's tokenizer",
    ),
    (
        "rl",
        "--algo.advantage.estimator gae --critic.model_name_or_path shifted",
        "`critic.model_name_or_path` (=shifted)",
        "another text",
        "Use a model with the actor's tokenizer",
    ),
    # the output
    ("rl", "--ckpt.output_dir a_run", "(=a_run) holds a run", "would be overwritten", "--ckpt.load_enable"),
    ("sft", "--ckpt.output_dir a_run", "(=a_run) holds a run", "would be overwritten", "another --ckpt.output_dir"),
    ("rl", "--ckpt.output_dir agent.py/out", "is a file", "nothing of the run could be saved", "Use a directory"),
    ("rl", "--ckpt.output_dir /proc/out", "/proc is not writable", "could be saved", "Use a directory"),
]


PLUGINS = """
def good(rewards, groups, ctx):
    return rewards


def mean(rewards, groups, ctx):
    return rewards.mean()


def detached(logprobs, old_logprobs, advantages, mask, **_):
    return -advantages * logprobs.detach()
"""


@pytest.fixture
def wrong(run, model) -> Path:
    """What the flags name, beside the good model, prompts and agent."""
    texts = {
        "old.toml": "[rollout]\nbatchsize = 4\n",
        "empty.jsonl": "",
        "broken.jsonl": '{"input": "a", "label": "b"}\n{"input": \n',
        "more.jsonl": '{"input": "a", "label": "b"}\n' * 20,
        "ragged.csv": "input,label\na,b\na,b,c\n",
        "torn.parquet": "PAR1 and no more",
        "notes.md": "not data",
        "no_runner.py": "x = 1\n",
        "raises.py": "1 / 0\n",
        "fixed.jinja": "{{ 'always the same' }}",
        "silent.jinja": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "splits/test.jsonl": '{"input": "a", "label": "b"}\n',
        "a_run/run/metrics.jsonl": "{}\n",
        "step_000020/manifest.json": "{}",
        "empty/.keep": "",
        "plugins.py": PLUGINS,
    }
    for name, text in texts.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    config = json.loads((model / "config.json").read_text())
    configs = {
        "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "granite": {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0},
        "head16": config | {"head_dim": 16},
    }
    for name, changed in configs.items():
        char_tokenizer().save_pretrained(run / name)
        (run / name / "config.json").write_text(json.dumps(changed))
    char_tokenizer(alphabet="z" + ALPHABET.replace("z", "")).save_pretrained(run / "shifted")
    (run / "shifted" / "config.json").write_text(json.dumps(config))
    return run


@pytest.mark.parametrize(("command", "flags", "value", "consequence", "fix"), WRONG, ids=[row[1] for row in WRONG])
def test_a_wrong_input_is_one_message_with_value_consequence_and_fix(
    command, flags, value, consequence, fix, wrong, capsys
):
    before = sorted(wrong.rglob("*"))
    code = main(["check", command, *FLAGS[command].split(), *shlex.split(flags)])
    out, err = capsys.readouterr()
    said = [line for line in as_given(out + err).splitlines() if line.startswith("error")]
    assert code in (1, 2) and len(said) == 1 and "Traceback" not in err, out + err
    assert value in said[0] and consequence in said[0] and fix in said[0], said[0]
    assert sorted(wrong.rglob("*")) == before, "it wrote something"


def test_they_are_many():
    assert len({flags for _, flags, *_ in WRONG}) >= 40
