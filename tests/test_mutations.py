"""Mutations: a wrong line in a script must turn the test red that is there for it.

Each entry is (file, the text as it is, the text gone wrong, the test that must fail). The script is copied, changed,
imported under its own name, and the one test runs against it in a pytest inside this one.
"""

import importlib
import shutil
import sys

import pytest
from conftest import ROOT

STEP = "test_scripts.py::test_one_step_equals_the_plain_update"
MOPD_STEP = "test_scripts.py::test_one_mopd_step_equals_the_plain_update"

MUTATIONS = {
    # ---- the loss
    "the end token falls out of the mask": (
        "grpo_expert.py",
        "mask = torch.arange(T, device=device) < lengths[:, None]  #",
        "mask = torch.arange(T, device=device) < lengths[:, None] - 1  #",
        "test_maths.py::test_completion_logprobs_equal_the_left_padded_forward[llama]",
    ),
    "the mask comes from the token's value": (
        "grpo_expert.py",
        "mask = torch.arange(T, device=device) < lengths[:, None]  #",
        "mask = tokens[:, :T] != pad_id  #",
        "test_maths.py::test_completion_logprobs_equal_the_left_padded_forward[llama]",
    ),
    "hidden states off by one": (
        "grpo_expert.py",
        "where += [(place, len(prompt) - 1)] + [(place, len(ids) + t) for t in range(len(completion) - 1)]",
        "where += [(place, len(prompt))] + [(place, len(ids) + t + 1) for t in range(len(completion) - 1)]",
        "test_maths.py::test_completion_logprobs_equal_the_left_padded_forward[gpt2]",
    ),
    "completions of a group see each other": (
        "grpo_expert.py",
        "seen = (block[:, None, :] == 0) | (block[:, None, :] == block[:, :, None])",
        "seen = block[:, None, :] >= 0",
        "test_maths.py::test_gradient_does_not_depend_on_packing[llama]",
    ),
    "positions do not start again behind the prompt": (
        "grpo_expert.py",
        "position += range(len(prompt), len(prompt) + len(completion))",
        "position += range(len(ids), len(ids) + len(completion))",
        "test_maths.py::test_gradient_does_not_depend_on_packing[qwen2]",
    ),
    "a pack crosses into the next group": (
        "grpo_expert.py",
        "packs[-1][0] // num_generations == row // num_generations",
        "packs[-1][0] >= 0",
        "test_maths.py::test_pack_groups",
    ),
    "the temperature is forgotten": (
        "grpo_expert.py",
        "logits = logits if temperature == 1 else logits / temperature\n        return",
        "return",
        "test_maths.py::test_token_logprobs[0.7-4]",
    ),
    "the advantage's sign flips": (
        "grpo_expert.py",
        "advantages = rewards - rewards.mean(-1, keepdim=True)",
        "advantages = rewards.mean(-1, keepdim=True) - rewards",
        "test_maths.py::test_advantages_none",
    ),
    "the baseline is the batch's mean": (
        "grpo_expert.py",
        "advantages = rewards - rewards.mean(-1, keepdim=True)",
        "advantages = rewards - rewards.mean()",
        "test_maths.py::test_advantages_none",
    ),
    "the deviation divides by n": (
        "grpo_expert.py",
        "return advantages / (rewards.std(-1, keepdim=True) + 1e-4)",
        "return advantages / (rewards.std(-1, keepdim=True, correction=0) + 1e-4)",
        "test_maths.py::test_advantages_group",
    ),
    "the loss's sign flips": (
        "grpo_expert.py",
        "return -(weights * surrogate * mask / normalizer).sum()",
        "return (weights * surrogate * mask / normalizer).sum()",
        "test_maths.py::test_policy_loss_by_hand",
    ),
    "the clip takes the maximum": (
        "grpo_expert.py",
        "surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])",
        "surrogate = torch.maximum(ratio * advantages[:, None], clipped * advantages[:, None])",
        "test_maths.py::test_clip_truth_table[1.0-2.0-False]",
    ),
    "the clip stands alone": (
        "grpo_expert.py",
        "surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])",
        "surrogate = clipped * advantages[:, None]",
        "test_maths.py::test_clip_truth_table[1.0-0.5-True]",
    ),
    "the upper clip is the lower one's": (
        "grpo_expert.py",
        "clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)",
        "clipped = ratio.clamp(1 - epsilon, 1 + epsilon)",
        "test_maths.py::test_clip_truth_table[1.0-1.25-True]",
    ),
    "the KL runs the other way": (
        "grpo_expert.py",
        "difference = ref_logprobs - logprobs",
        "difference = logprobs - ref_logprobs",
        "test_maths.py::test_reference_kl",
    ),
    # ---- the loop
    "the normaliser is the micro-batch's": (
        "grpo_expert.py",
        "normalizer=normalizer[rows], weights=",
        "normalizer=mask.sum(), weights=",
        f"{STEP}[grpo_expert-changes3]",
    ),
    "skipped groups leave the normaliser": (
        "grpo_expert.py",
        '"token": (rollouts.lengths * counted).sum()',
        '"token": rollouts.lengths[needed].sum()',
        "test_scripts.py::test_skipped_groups_stay_in_the_normalizer",
    ),
    "cut rows carry loss and ended rows none": (
        "grpo_expert.py",
        "counted = rollouts.finished | (not args.mask_truncated)",
        "counted = ~rollouts.finished | (not args.mask_truncated)",
        f"{STEP}[grpo_expert-changes3]",
    ),
    "gradients pile up over iterations": (
        "grpo_expert.py",
        "                optimizer.zero_grad()\n",
        "",
        f"{STEP}[grpo_expert-changes4]",
    ),
    "rejected prompts are drawn alike again": (
        "grpo_expert.py",
        "first_row=(attempt * P + P * rank // world) * G",
        "first_row=0",
        "test_scripts.py::test_dynamic_sampling_replaces_groups_without_signal",
    ),
    "importance weights have no cap": (
        "grpo_expert.py",
        ".exp().clamp(max=args.tis_cap)",
        ".exp()",
        "test_scripts.py::test_importance_weights_of_a_bfloat16_sampler",
    ),
    "the KL is left out of the loss": (
        "mix_rl.py",
        "loss = loss + args.beta * (kl * mask / normalizer[rows]).sum()",
        "pass",
        f"{STEP}[mix_rl-changes6]",
    ),
    "a resumed run meets the first tasks again": (
        "grpo_expert.py",
        '"position": position, "bad_steps"',
        '"position": 0, "bad_steps"',
        "test_scripts.py::test_resume_gives_the_same_run[grpo_expert]",
    ),
    "a resumed run forgets Adam's moments": (
        "mopd.py",
        'optimizer.load_state_dict(state["optimizer"])',
        "pass",
        "test_scripts.py::test_resume_gives_the_same_run[mopd]",
    ),
    "a domain's place never moves": (
        "mix_rl.py",
        "position[domain] += 1",
        "position[domain] += 0",
        "test_scripts.py::test_an_epoch_meets_every_task[mix_rl]",
    ),
    "the bfloat16 sampler is never updated": (
        "grpo_expert.py",
        "low.data.copy_(full.data)",
        "pass",
        "test_scripts.py::test_bfloat16_keeps_float32_weights[grpo_expert]",
    ),
    # ---- proportions
    "natural proportions are uniform": (
        "mix_rl.py",
        '"natural": 1, "uniform": 0',
        '"natural": 0, "uniform": 0',
        "test_maths.py::test_domain_weights",
    ),
    "small domains are rounded away": (
        "mix_rl.py",
        "(np.arange(count) + uniform) / count",
        "(np.arange(count) + 0.5) / count",
        "test_maths.py::test_draw_domains",
    ),
    "dads draws more of what succeeds": (
        "mix_rl.py",
        "math.exp((1 - reward) / tau) + eps",
        "math.exp(reward / tau) + eps",
        "test_maths.py::test_doctests[mix_rl]",
    ),
    "a domain that was not drawn is forgotten": (
        "mix_rl.py",
        "if d in mean_rewards else old for d",
        "if d in mean_rewards else alpha * old for d",
        "test_maths.py::test_doctests[mix_rl]",
    ),
    "the domain's deviation is the batch's": (
        "mix_rl.py",
        "advantages[mine] / (rewards[mine].std() + 1e-4)",
        "advantages[mine] / (rewards.std() + 1e-4)",
        "test_maths.py::test_scale_by_domain",
    ),
    # ---- MOPD
    "every row goes to one teacher": (
        "mopd.py",
        "load_weights(teacher, teachers[domain])",
        "load_weights(teacher, teachers[min(teachers)])",
        f"{MOPD_STEP}[changes0]",
    ),
    "the teacher is loaded once": (
        "mopd.py",
        "if resident != teachers[domain]:",
        "if resident is None:",
        f"{MOPD_STEP}[changes1]",
    ),
    "the log-ratio is differentiated": (
        "mopd.py",
        "advantages = (teacher_logprobs - logprobs).detach().clamp(",
        "advantages = (teacher_logprobs - logprobs).clamp(",
        "test_maths.py::test_sampled_gradient_is_the_exact_one_in_expectation[False]",
    ),
    "the student flees its teacher": (
        "mopd.py",
        "advantages = (teacher_logprobs - logprobs).detach()",
        "advantages = (logprobs - teacher_logprobs).detach()",
        "test_maths.py::test_sampled_gradient_is_the_exact_one_in_expectation[True]",
    ),
    "the gate is open below": (
        "mopd.py",
        "weights = weights * ((weights >= 0.5) & (weights <= 2))",
        "weights = weights * (weights <= 2)",
        "test_maths.py::test_sampled_kl_gate[0.49-False]",
    ),
    "the KL is the forward one": (
        "mopd.py",
        "return (student.exp() * (student - teacher).detach()).sum(-1)",
        "return (teacher.exp() * (teacher - student)).sum(-1)",
        "test_maths.py::test_full_kl_equals_the_definition",
    ),
    "Adam meets rounding errors": (  # right but for a rest of some 1e-9, which Adam scales up to the learning rate
        "mopd.py",
        "return (student.exp() * (student - teacher).detach()).sum(-1)",
        "return (student.exp() * (student - teacher)).sum(-1)",
        "test_scripts.py::test_teachers_that_equal_the_student_change_nothing[full]",
    ),
    "domains weigh as their tokens": (
        "mopd.py",
        '"equal": torch.tensor([[len(tokens) * tokens[task["domain"]]] for task in owners]',
        '"equal": torch.tensor([[sampled] for task in owners]',
        f"{MOPD_STEP}[changes2]",
    ),
    # ---- merging
    "TIES elects the minority": (
        "merge.py",
        "sign = ((weights if votes is None else votes) @ taus).sign_()",
        "sign = -((weights if votes is None else votes) @ taus).sign_()",
        "test_maths.py::test_doctests[merge]",
    ),
    "TIES divides by all experts": (
        "merge.py",
        "count = weights @ agreeing.sign_()",
        "count = weights @ torch.ones_like(agreeing)",
        "test_maths.py::test_doctests[merge]",
    ),
    "DARE does not scale up what it keeps": (
        "merge.py",
        "return torch.from_numpy(taus.numpy() * keep).mul_(65536 / below)",
        "return torch.from_numpy(taus.numpy() * keep)",
        "test_maths.py::test_doctests[merge]",
    ),
    "DELLA keeps the small ones": (
        "merge.py",
        "density - epsilon + 2 * epsilon * rank.nan_to_num(0.5)",
        "density + epsilon - 2 * epsilon * rank.nan_to_num(0.5)",
        "test_maths.py::test_doctests[merge]",
    ),
    "the k-th largest is one place off": (
        "merge.py",
        "held, rank = np.concatenate(held), k - above",
        "held, rank = np.concatenate(held), k - above + 1",
        "test_maths.py::test_doctests[merge]",
    ),
    # ---- the sampler
    "the left padding is attended to": (
        "eval.py",
        "mask = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + T) for p in batch], device=device)",
        "mask = torch.ones((len(batch), longest + T), dtype=torch.long)",
        "test_sampler.py::test_greedy_equals_generate[llama]",
    ),
    "positions count the padding": (
        "eval.py",
        "position = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)",
        "position = torch.arange(longest, device=device).expand(len(batch), -1)",
        "test_sampler.py::test_greedy_equals_generate[gpt2]",
    ),
    "finished rows take the wrong cache along": (
        "eval.py",
        "cache.batch_select_indices(order)",
        "cache.batch_select_indices(order.flip(0))",
        "test_sampler.py::test_logprobs_equal_a_full_forward[llama-1.0]",
    ),
    "draws ignore the temperature": (
        "eval.py",
        "logits = logits if temperature == 1 else logits / temperature\n    if top_k:",
        "if top_k:",
        "test_sampler.py::test_draw_inverts_the_cdf[0.5]",
    ),
    "a uniform of 0 draws what is impossible": (
        "eval.py",
        "torch.searchsorted(cdf, target[:, None], right=True)",
        "torch.searchsorted(cdf, target[:, None], right=False)",
        "test_sampler.py::test_a_token_of_probability_zero_is_never_drawn[0.0]",
    ),
    "a uniform near 1 draws the last token": (
        "eval.py",
        "place = torch.minimum(place, torch.searchsorted(cdf, cdf[:, -1:].clone()))",
        "place = place.clamp(max=cdf.shape[1] - 1)",
        "test_sampler.py::test_the_last_uniform_of_a_large_vocabulary_stays_inside",
    ),
    "top-p drops the token that reaches it": (
        "eval.py",
        "dropped = mass.cumsum(-1) - mass >= top_p",
        "dropped = mass.cumsum(-1) >= top_p",
        "test_sampler.py::test_support_of_top_p_and_top_k[how1-kept1]",
    ),
    "chunks share their uniforms": (
        "eval.py",
        "draw(logits.float(), uniforms[rows, t],",
        "draw(logits.float(), uniforms[rows - start, t],",
        "test_sampler.py::test_a_sample_does_not_depend_on_slots[7]",
    ),
    "a cache that has grown is empty": (
        "eval.py",
        "buffer[:, :, :start] = part",
        "buffer[:, :, :start] = 0",
        "test_sampler.py::test_the_cache_grows_beyond_its_first_room[llama]",
    ),
    "rows that have ended are written on": (
        "eval.py",
        "token.where(going, pad_id), logprob * going",
        "token, logprob",
        "test_sampler.py::test_asking_rarely_who_has_ended_changes_nothing[llama]",
    ),
    "a block's mass is the next one's": (
        "eval.py",
        "return block * 256 + token, logprobs.float()",
        "return block * 255 + token, logprobs.float()",
        "test_sampler.py::test_draws_beyond_the_first_block",
    ),
    "processes share their uniforms": (
        "eval.py",
        "key=[seed, first_row + row]",
        "key=[seed, row]",
        "test_sampler.py::test_a_sample_does_not_depend_on_who_shares_the_batch[gpt2]",
    ),
    "the end token is not counted": (
        "eval.py",
        "lengths[rows] += going",
        "lengths[rows] += going & ~ended",
        "test_sampler.py::test_an_end_token_only_cuts",
    ),
    "one cap for all rows": (
        "eval.py",
        "going &= ~ended & (t + 1 < caps[rows])",
        "going &= ~ended & (t + 1 < T)",
        "test_sampler.py::test_one_cap_a_row[sample]",
    ),
    # ---- the report
    "pass@k is the biased one": (
        "eval.py",
        "return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 1.0",
        "return 1.0 - (1.0 - c / n) ** k",
        "test_maths.py::test_pass_at_k_equals_enumeration",
    ),
    "held-out domains count in the average": (
        "eval.py",
        'groups["held-out" if first["held_out"] else "average"].append(domain)',
        'groups["average"].append(domain)',
        "test_eval.py::test_scores",
    ),
    "experts come for free": (
        "eval.py",
        "return fusion(cost, measure) + sum(",
        "return fusion(cost, measure) + 0 * sum(",
        "test_eval.py::test_relative_costs",
    ),
    "validation counts as training": (
        "eval.py",
        'if phase not in ("eval", "total")',
        'if phase not in ("total",)',
        "test_eval.py::test_flops_and_seconds_by_hand",
    ),
    "half a point counts as right": (
        "eval.py",
        "sum(s == 1 for s in scores[rows])",
        "sum(s >= 0 for s in scores[rows])",
        "test_eval.py::test_evaluate_counts_what_is_right",
    ),
    "the evaluation that chose a merge is free": (
        "eval.py",
        'return measure(cost) + measure(cost.get("chosen_by", {}))',
        "return measure(cost)",
        "test_eval.py::test_what_chose_a_merge_counts",
    ),
    "every model draws tasks of its own": (
        "eval.py",
        "100 * bootstrap_weights(len(values), stream) @",
        "100 * bootstrap_weights(len(values), 1000 + int(name)) @",
        "test_eval.py::test_paired_intervals_are_narrower",
    ),
    "the interval is too narrow": (
        "eval.py",
        "[2.5, 97.5]",
        "[10, 90]",
        "test_eval.py::test_intervals_cover_what_they_say",
    ),
    "p looks at one side": (
        "eval.py",
        "min(1.0, 2 * (1 + min(",
        "min(1.0, (1 + min(",
        "test_eval.py::test_p_value_by_hand",
    ),
    "a share of what may be noise": (
        "eval.py",
        "/ gain if interval(gain)[0] > 0 else",
        "/ gain if gain[0] > 0 else",
        "test_eval.py::test_a_share_needs_a_gain_that_stands_out",
    ),
    "no answer is a vote": (
        "eval.py",
        "    del votes[None]\n",
        "",
        "test_eval.py::test_majority_vote[math-4-completions3-scores3-1.0]",
    ),
}


class Outcome:
    """A plugin of the inner pytest: what became of its tests."""

    def __init__(self):
        self.ran, self.failed, self.skipped = 0, 0, 0

    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call"
        self.failed += report.when == "call" and report.failed
        self.skipped += report.skipped


@pytest.fixture
def inner_pytest(tmp_path, monkeypatch, toy):
    """Run one test against one changed script -> its Outcome; modules and paths are put back afterwards."""
    before, path, argv, touched = dict(sys.modules), list(sys.path), list(sys.argv), ["conftest"]
    monkeypatch.setenv("RLVR_TOY", str(toy))  # the toy world need not be made again

    def call(script, test):
        # The changed script under its own name; and the test's module anew, in case it holds the script by name.
        touched.extend([script.stem, test.partition(".py")[0]])
        for name in touched:
            sys.modules.pop(name, None)
        sys.path.insert(0, str(script.parent))
        assert importlib.import_module(script.stem).__file__ == str(script)
        outcome = Outcome()
        flags = ["-q", "-s", "--no-header", "--tb=no", "--assert=plain", f"--basetemp={tmp_path / 'inner'}"]
        for plugin in ("cacheprovider", "faulthandler", "unraisableexception", "hypothesispytest"):  # they take time
            flags += ["-p", f"no:{plugin}"]
        outcome.code = pytest.main([*flags, f"{ROOT / 'tests' / test}"], plugins=[outcome])
        return outcome

    yield call
    for name in touched:
        sys.modules.pop(name, None)
    sys.modules.update({name: before[name] for name in touched if name in before})
    sys.path[:], sys.argv[:] = path, argv


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_turns_its_test_red(inner_pytest, tmp_path, name):
    file, right, wrong, test = MUTATIONS[name]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count(right) == 1, (
        f"{file} holds {text.count(right)} times the text that this mutation changes: {right}"
    )
    (tmp_path / file).write_text(text.replace(right, wrong), encoding="utf-8")
    outcome = inner_pytest(tmp_path / file, test)
    if outcome.skipped:
        pytest.skip(f"{test} is skipped here")
    assert outcome.ran == 1, f"{test} did not run: pytest ended with {outcome.code!r}"
    assert outcome.failed == 1, f"{test} does not notice that {name}"


@pytest.mark.parametrize("file", sorted({file for file, *_ in MUTATIONS.values()}))
def test_without_a_mutation_it_is_green(inner_pytest, tmp_path, file):
    """The inner pytest fails for no reason of its own: one test of each script, unchanged (all run outside as well)."""
    test = next(test for name, *_, test in MUTATIONS.values() if name == file)
    script = shutil.copyfile(ROOT / file, tmp_path / file)
    outcome = inner_pytest(script, test)
    assert outcome.skipped or (outcome.ran, outcome.failed) == (1, 0), outcome.code
