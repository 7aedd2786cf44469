"""An advantage estimator: the baseline is the median of the group, which one lucky rollout does not move.

    molt rl ... --rollout.n_samples_per_prompt 8 \\
        --algo.advantage.estimator examples/python/algorithms/group_median.py:group_median

rewards float64 [R] and groups int64 [R] have one entry per rollout of the training batch, as have `ctx.scores`,
`ctx.lengths` and `ctx.truncated`. What is returned is spread over the generated tokens of the rollout.
"""


def group_median(rewards, groups, ctx):
    advantages = rewards.clone()
    for group in groups.unique():
        inside = groups == group
        advantages[inside] -= rewards[inside].quantile(0.5)
    return advantages


group_median.formula = "R - median(group)"
group_median.whiten = True
