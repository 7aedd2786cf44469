"""What is allowed but probably not meant; rules as in `rules.py`, said by `molt check` and `molt rl`."""

from typing import Any

from molt.config import RLConfig
from molt.rules import NEED_A_GROUP, Message, Rule, message


def warn_uncorrected(c: RLConfig) -> Message:
    if c.train.staleness_bound == 1 and c.algo.advantage.is_correction_level == "off":
        consequence = "tokens may be one batch old and are trained as if they were fresh"
        fix = "Use --algo.advantage.is_correction_level token, or --train.async_queue_size 0"
        return message(c, "train.async_queue_size algo.advantage.is_correction_level", consequence, fix)


def warn_more_in_flight_than_open(c: RLConfig) -> Message:
    room = (1 + c.train.async_queue_size) * c.rollout.batch_size
    if (c.rollout.vllm_generate_batch_size or 0) > room:
        names = "rollout.vllm_generate_batch_size train.async_queue_size rollout.batch_size"
        fix = f"Use --rollout.vllm_generate_batch_size {room}, or raise --train.async_queue_size"
        return message(c, names, f"at most (1 + queue) * batch = {room} groups may be open", fix)


def warn_eval_without_dataset(c: Any) -> Message:
    if c.eval.dataset is None and (c.eval.steps > 0 or getattr(c.eval, "eval_at_start", False)):
        return message(c, "eval.dataset eval.steps", "nothing is evaluated", "Pass --eval.dataset FILE.jsonl")


def warn_template_unused(c: RLConfig) -> Message:
    if c.data.chat_template and not c.data.apply_chat_template:
        consequence = "prompts are plain text, so no template is used"
        return message(c, "data.chat_template data.apply_chat_template", consequence, "Pass --data.apply_chat_template")


def warn_gamma_unused(c: RLConfig) -> Message:
    if c.algo.advantage.gamma < 1 and c.algo.advantage.estimator in NEED_A_GROUP:
        fix = "Use --algo.advantage.gamma 1, or --algo.advantage.estimator reinforce"
        return message(
            c, "algo.advantage.gamma algo.advantage.estimator", "one number per rollout has no discount", fix
        )


def warn_nothing_saved(c: Any) -> Message:
    if c.ckpt.disable_final_save and c.ckpt.save_steps == -1:
        consequence = "nothing is saved unless SIGTERM stops the run"
        fix = "Drop --ckpt.disable_final_save, or use --ckpt.save_steps 20"
        return message(c, "ckpt.disable_final_save ckpt.save_steps", consequence, fix)


WARNINGS: list[Rule] = [
    warn_uncorrected,
    warn_more_in_flight_than_open,
    warn_eval_without_dataset,
    warn_template_unused,
    warn_gamma_unused,
    warn_nothing_saved,
]
