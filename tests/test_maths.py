"""The formulas: numbers worked by hand, the clip's truth table, and what must not change a gradient."""

import copy
import doctest
import importlib
import itertools
import math
from fractions import Fraction

import pytest
import torch

SCRIPTS = ("grpo_expert", "mix_rl", "mopd", "merge", "eval")


@pytest.fixture(scope="module")
def grpo():
    return importlib.import_module("grpo_expert")


@pytest.fixture(scope="module")
def mix():
    return importlib.import_module("mix_rl")


@pytest.fixture(scope="module")
def mopd():
    return importlib.import_module("mopd")


@pytest.fixture(scope="module")
def evaluation():
    return importlib.import_module("eval")


def close(actual, expected, rtol=1e-5, atol=1e-6):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", SCRIPTS)
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


# --------------------------------------------------------------------------------------------------- advantages


def test_advantages_none(grpo):
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2], [0.0, 1.0, 0.5, 0.5]])
    before = rewards.clone()
    close(
        grpo.compute_advantages(rewards),
        [[0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0], [-0.5, 0.5, 0, 0]],
    )
    assert torch.equal(rewards, before)


def test_advantages_group(grpo):
    # Bessel: var = (.75^2 + 3 * .25^2) / 3 = .25, std .5; a group of equal rewards has std 0 and stays 0, not nan.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    close(grpo.compute_advantages(rewards, "group"), [[0.75 / 0.5001] + 3 * [-0.25 / 0.5001], [0, 0, 0, 0]])


def test_advantages_batch(grpo):
    # The baseline is the group's, the scale is all rewards': 1 0 1 1 has var (3 * .25^2 + .75^2) / 3 = .25, std .5.
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    close(grpo.compute_advantages(rewards, "batch"), [[0.5 / 0.5001, -0.5 / 0.5001], [0, 0]])


# -------------------------------------------------------------------------------------------------- policy loss


@pytest.mark.parametrize(
    "advantage, ratio, on",
    [
        (+1.0, 0.5, True),  # a good token became less likely: pull it back
        (+1.0, 1.0, True),
        (+1.0, 1.25, True),  # between 1 + epsilon and 1 + epsilon_high
        (+1.0, 2.0, False),  # a good token has gained enough
        (-1.0, 0.5, False),  # a bad token has lost enough
        (-1.0, 0.75, False),  # the lower bound is epsilon's, not epsilon_high's
        (-1.0, 1.0, True),
        (-1.0, 2.0, True),  # a bad token became more likely: push it down
    ],
)
def test_clip_truth_table(grpo, advantage, ratio, on):
    logprobs = torch.tensor([[math.log(0.3 * ratio)]], requires_grad=True)
    loss = grpo.policy_loss(
        logprobs, torch.tensor([[math.log(0.3)]]), torch.tensor([advantage]), torch.ones(1, 1),
        epsilon=0.2, epsilon_high=0.28, normalizer=4,
    )  # fmt: skip
    loss.backward()
    bound = 1.28 if advantage > 0 else 0.8
    close(loss.detach(), -advantage * (ratio if on else bound) / 4)
    close(logprobs.grad, [[-advantage * ratio / 4 if on else 0.0]])  # d ratio / d logp = ratio


def test_policy_loss_by_hand(grpo):
    # Row 0, A = 2: ratios 1, 1.1, 3 -> 2 * (1 + 1.1 + 1.28) = 6.76. Row 1, A = -1: ratios .5 (-> .8), 2, masked.
    ratios = torch.tensor([[1.0, 1.1, 3.0], [0.5, 2.0, 9.0]])
    arguments = (ratios.log(), torch.zeros(2, 3), torch.tensor([2.0, -1.0]), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    clip = dict(epsilon=0.2, epsilon_high=0.28)
    close(grpo.policy_loss(*arguments, **clip, normalizer=5), -(6.76 - 2.8) / 5)  # mean over the batch's tokens
    by_row = torch.tensor([[2.0 * 3], [2.0 * 2]])  # mean over a row's tokens, then over both rows
    close(grpo.policy_loss(*arguments, **clip, normalizer=by_row), -(6.76 / 3 - 2.8 / 2) / 2)
    weights = torch.tensor([[1.0, 0.5, 2.0], [1.0, 0.0, 7.0]])  # row 0: 2 * (1 + .55 + 2.56) = 8.22; row 1: -.8
    close(grpo.policy_loss(*arguments, **clip, normalizer=1, weights=weights), -(8.22 - 0.8))


def test_reference_kl(grpo):
    logprobs, reference = torch.tensor([0.5, 0.5, 0.1]).log(), torch.tensor([0.25, 0.5, 0.2]).log()
    close(grpo.reference_kl(logprobs, reference), [0.5 + math.log(2) - 1, 0, 2 - math.log(2) - 1])


def test_reference_kl_is_unbiased(grpo):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    estimates = grpo.reference_kl(p.log(), q.log())
    assert (estimates > 0).all()
    close((p * estimates).sum(), (p * (p / q).log()).sum())  # the mean over the vocabulary is KL(p || q)


# ----------------------------------------------------------------------------------------------- token logprobs


@pytest.mark.parametrize("chunk", [1, 4, 10, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs(grpo, chunk, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, generator=generator, requires_grad=True)
    head = torch.nn.Linear(6, 13, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(13, 6, generator=generator))
    targets, outside = torch.randint(13, (10,), generator=generator), torch.randn(10, generator=generator)

    plain = (head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    expected = torch.autograd.grad((plain * outside).sum(), (hidden, head.weight))
    values = grpo.token_logprobs(hidden, head, targets, temperature, chunk=chunk)
    gradients = torch.autograd.grad((values * outside).sum(), (hidden, head.weight))
    close(values, plain)
    for actual, wanted in zip(gradients, expected):
        close(actual, wanted, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------- schedules and draws


def test_lr_factor(grpo):
    assert [grpo.lr_factor(s, 6, 2, "constant") for s in range(6)] == [0.5, 1, 1, 1, 1, 1]
    assert [grpo.lr_factor(s, 6, 2, "linear") for s in range(6)] == [0.5, 1, 1, 0.75, 0.5, 0.25]
    cosine = [grpo.lr_factor(s, 4, 0, "cosine") for s in range(4)]  # (1 + cos(pi * s/4)) / 2
    assert cosine == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert [grpo.lr_factor(s, 2, 4, "linear") for s in range(2)] == [0.25, 0.5]  # a warm-up longer than the run


def test_pass_at_k_equals_enumeration(evaluation):
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            exact = Fraction(sum(map(any, subsets)), len(subsets))
            assert evaluation.pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12), (n, c, k)


@pytest.mark.parametrize("n, c, k", [(4, 2, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_pass_at_k_refuses(evaluation, n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        evaluation.pass_at_k(n, c, k)


def test_domain_weights(mix):
    sizes = {"math": 60, "code": 30, "science": 10}
    assert mix.domain_weights(["natural"], sizes) == pytest.approx({"math": 0.6, "code": 0.3, "science": 0.1})
    assert mix.domain_weights(["uniform"], sizes) == pytest.approx(dict.fromkeys(sizes, 1 / 3))
    with pytest.raises(SystemExit):  # hardmath=1 is no weight of math
        mix.domain_weights(["hardmath=1"], {"math": 1, "hardmath": 1})
    explicit = mix.domain_weights(["science=1", "math=2.5", "code=0"], sizes)
    assert explicit == pytest.approx({"math": 2.5 / 3.5, "code": 0, "science": 1 / 3.5})
    assert list(explicit) == list(sizes)


@pytest.mark.parametrize(
    "proportions",
    [
        ["naturel"],
        ["natural", "uniform"],
        ["math=1"],
        ["math=1", "code=1", "poetry=1"],
        ["math=-1", "code=2"],
        ["math=0", "code=0"],
        ["math=1", "code=many"],
        ["math=inf", "code=1"],
        ["math=nan", "code=1"],
    ],
)
def test_domain_weights_refuses(mix, proportions, capsys):
    with pytest.raises(SystemExit) as stopped:
        mix.domain_weights(proportions, {"math": 3, "code": 1})
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "--proportions" in message and message.count("\n") == 1


def test_draw_domains(mix):
    weights = {"math": 0.6, "code": 0.3, "poetry": 0.0, "science": 0.1}
    grid = [(i + 0.5) / 1000 for i in range(1000)] + [0.0, 1 - 2**-53]
    drawn = [mix.draw_domains(weights, 7, uniform) for uniform in grid]
    for domains in drawn:
        assert len(domains) == 7
        assert all(abs(domains.count(domain) - 7 * w) < 1 + 1e-9 for domain, w in weights.items())
    for domain, weight in weights.items():  # the mean over the uniform is the weight: nobody is rounded away
        share = sum(domains.count(domain) for domains in drawn[:1000]) / 7000
        assert share == pytest.approx(weight, abs=1e-3)
    assert not any("poetry" in domains for domains in drawn)


def test_nth_task_visits_each_once_an_epoch(grpo):
    tasks = list(range(20))
    epochs = [[grpo.nth_task(tasks, 20 * epoch + i, seed=3) for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == tasks for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [grpo.nth_task(tasks, i, seed=4) for i in range(20)]


@pytest.mark.parametrize("budget", [1, 8, 20, 21, 1000])
def test_micro_batches(grpo, budget):
    lengths = [5, 1, 9, 4, 4, 7, 2, 10]
    batches = grpo.micro_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(8))
    for batch in batches:  # a row longer than the budget goes alone
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget
        shortest, longest = min(lengths[row] for row in batch), max(lengths[row] for row in batch)
        assert 3 * longest <= 4 * shortest
    if budget == 1000:  # nothing but the padding splits
        assert [[lengths[row] for row in batch] for batch in batches] == [[1], [2], [4, 4, 5], [7, 9], [10]]


# ------------------------------------------------------------------- what must not change a gradient: a GRPO step


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15], [3, 3]]
LENGTHS = [4, 1, 6, 2, 3, 6, 5, 1]  # two completions a prompt
REWARDS = [[1.0, 0.0], [0.0, 0.5], [1.0, 1.0], [0.3, 1.0]]
PAD = 0  # also the token that ends


def batch_of(extra_width=0, pad=PAD):
    """Prompts (B), tokens (B, T), lengths (B,): completions that end with token 0, but for those of 6 tokens."""
    generator, rows = torch.Generator().manual_seed(7), []
    for n in LENGTHS:
        row = torch.randint(1, 61, (n,), generator=generator).tolist()
        rows.append(row if n == 6 else row[:-1] + [0])
    tokens = torch.tensor([row + [pad] * (6 + extra_width - len(row)) for row in rows])
    return [prompt for prompt in PROMPTS for _ in range(2)], tokens, torch.tensor(LENGTHS)


def step_gradient(grpo, model, batch, rewards=REWARDS, budget=10**6, pad=PAD, temperature=0.9):
    """Gradient of one off-policy GRPO step, accumulated over micro-batches -> {name: gradient}."""
    prompts, tokens, lengths = batch
    advantages = grpo.compute_advantages(torch.tensor(rewards), "group").flatten()
    normalizer = lengths.sum()
    model.zero_grad()
    for index in grpo.micro_batches([len(p) + int(n) for p, n in zip(prompts, lengths)], budget):
        which = ([prompts[row] for row in index], tokens[index], lengths[index], pad)
        logprobs, mask = grpo.completion_logprobs(model, *which, temperature)
        # The old policy differs from the new one token by token, so that some ratios are clipped.
        old = logprobs.detach() + 0.4 * torch.sin(tokens[index, : mask.shape[1]].float())
        clip = dict(epsilon=0.2, epsilon_high=0.28, normalizer=normalizer)
        grpo.policy_loss(logprobs, old, advantages[index], mask, **clip).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def same_gradients(actual, expected):
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-3
    for name in expected:  # float32: sums in another order differ by a few units in the last place
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=2e-6 * scale)


@pytest.mark.parametrize("budget", [1, 12, 30])
def test_gradient_does_not_depend_on_micro_batches(grpo, make_model, budget):
    model = make_model()
    whole = step_gradient(grpo, model, batch_of())
    same_gradients(step_gradient(grpo, model, batch_of(), budget=budget), whole)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "granite", "cohere"])
def test_gradient_does_not_depend_on_packing(grpo, make_model, kind):
    """Groups behind one prompt under a block mask, padded side by side, against every row with a prompt of its own."""
    model = make_model(kind)
    prompts, tokens, lengths = (
        PROMPTS * 2,
        torch.randint(1, 60, (12, 6)),
        torch.tensor([4, 1, 6, 2, 3, 6, 5, 1, 3, 3, 2, 6]),
    )
    weights, counts = torch.linspace(-1, 1, 72).view(12, 6), [3, 1, 2, 1, 3, 2]

    def gradient(prompts, counts):
        logprobs, mask = grpo.completion_logprobs(model, prompts, tokens, lengths, 0, 0.7, counts)
        (logprobs * weights * mask).sum().backward()
        found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        model.zero_grad()
        return logprobs.detach(), found

    each = [prompt for prompt, count in zip(prompts, counts) for _ in range(count)]
    (packed, gradients), (rows, expected) = gradient(prompts, counts), gradient(each, None)
    torch.testing.assert_close(packed, rows, rtol=0, atol=1e-5)
    same_gradients(gradients, expected)


def test_gradient_checkpointing_changes_nothing(grpo, make_model):
    """Layers in training mode recompute; what lies below them, dropout for one, is not in training mode."""
    model = make_model("gpt2", seed=9)
    tokens, lengths = torch.randint(1, 60, (4, 6)), torch.tensor([4, 1, 6, 2])
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
            for layer in model.modules():
                layer.training = isinstance(layer, grpo.GradientCheckpointingLayer)
            assert sum(layer.training for layer in model.modules()) == 2
        logprobs, mask = grpo.completion_logprobs(model, PROMPTS, tokens, lengths, 0, 1.0)
        (logprobs * mask).sum().backward()
        found.append([logprobs.detach(), *(weight.grad.clone() for weight in model.parameters())])
        model.zero_grad()
    for plain, recomputed in zip(*found):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)


def test_pack_groups(grpo, make_model):
    model = make_model()
    prompts, lengths = [[1] * 40] * 4 + [[1] * 2] * 4, [3] * 8
    # Long prompts are shared, and a budget below a pack splits it; nothing crosses from one group into the next.
    packs, sizes = grpo.pack_groups(model, [0, 1, 3, 4, 5], prompts, lengths, 4, 46)
    assert packs[:2] == [[0, 1], [3]] and sizes[:2] == [46, 43]
    assert sorted(row for pack in packs for row in pack) == [0, 1, 3, 4, 5]
    # Attention grows with the square: 2*3*weights saved for each token of the prompt, 2*4*layers*width*L*3 paid.
    long = [1000] * 4
    packs, sizes = grpo.pack_groups(model, [0, 1, 2, 3], [[1] * 2] * 4, long, 4, 10**6)
    assert packs == [[0], [1], [2], [3]] and sizes == [1002] * 4
    # Sliding windows, and models with positions or masks of their own, know no block mask.
    for kind in ("gemma3", "gemma2", "gpt_neo", "bloom", "falcon"):
        packs, _ = grpo.pack_groups(make_model(kind), [0, 1], prompts, lengths, 4, 10**6)
        assert packs == [[0], [1]], kind


def test_gradient_does_not_depend_on_padding(grpo, make_model):
    model = make_model()
    whole = step_gradient(grpo, model, batch_of())
    same_gradients(step_gradient(grpo, model, batch_of(extra_width=5)), whole)
    same_gradients(step_gradient(grpo, model, batch_of(pad=44), pad=44), whole)


def test_gradient_does_not_depend_on_order_of_groups(grpo, make_model):
    model = make_model()
    whole = step_gradient(grpo, model, batch_of())
    order = [2, 0, 3, 1]
    rows = [2 * group + i for group in order for i in range(2)]
    prompts, tokens, lengths = batch_of()
    moved = ([prompts[row] for row in rows], tokens[rows], lengths[rows])
    same_gradients(step_gradient(grpo, model, moved, [REWARDS[group] for group in order]), whole)


def left_padded_logprobs(model, prompts, tokens, lengths, temperature):
    """The plain way: prompts padded on the left, the whole (B, width, V) in memory."""
    longest, T = max(map(len, prompts)), tokens.shape[1]
    ids = torch.tensor([[0] * (longest - len(p)) + p + row for p, row in zip(prompts, tokens.tolist())])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + T) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    position_ids = {} if model.config.model_type == "bloom" else {"position_ids": positions}
    logits = model(ids, attention_mask=mask, **position_ids).logits[:, longest - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return logprobs * (torch.arange(T) < lengths[:, None])


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "gpt2", "gemma3", "gemma2", "granite", "cohere", "gpt_neo", "bloom", "falcon"]
)
def test_completion_logprobs_equal_the_left_padded_forward(grpo, make_model, kind):
    model, batch = make_model(kind), batch_of()
    with torch.no_grad():
        logprobs, mask = grpo.completion_logprobs(model, *batch, PAD, 0.7)
        expected = left_padded_logprobs(model, *batch, 0.7)
    assert mask.sum(-1).tolist() == LENGTHS  # the end token counts, though it equals the padding
    close(logprobs, expected, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- MOPD


def test_sampled_kl_by_hand(mopd):
    # Token 0: A = log 2. Token 1: A = log(1/1000), clipped to -5. Token 2: pi/mu = 3, gated. Token 3: masked.
    student = torch.tensor([[0.2, 0.5, 0.3, 0.1]]).log().requires_grad_()
    teacher = torch.tensor([[0.4, 0.0005, 0.6, 0.9]]).log()
    sampler = torch.tensor([[0.25, 0.5, 0.1, 0.1]]).log()  # pi/mu = .8, 1, 3, 1
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    loss = mopd.sampled_kl_loss(student, teacher, sampler, mask, normalizer=3, advantage_clip=5.0)
    loss.backward()
    close(loss.detach(), -(0.8 * math.log(2) * math.log(0.2) - 5 * math.log(0.5)) / 3)
    close(student.grad, [[-0.8 * math.log(2) / 3, 5 / 3, 0, 0]])


@pytest.mark.parametrize("weight, on", [(0.49, False), (0.51, True), (1.99, True), (2.01, False)])
def test_sampled_kl_gate(mopd, weight, on):
    student = torch.tensor([[0.3]]).log().requires_grad_()
    sampler = student.detach() - math.log(weight)
    loss = mopd.sampled_kl_loss(student, student.detach() + 1, sampler, torch.ones(1, 1), normalizer=1)
    loss.backward()
    close(student.grad, [[-weight if on else 0.0]])


def two_policies():
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(1, 6, generator=generator).requires_grad_()  # logits of one position
    return student, torch.randn(1, 6, generator=generator)


def exact_kl_gradient(student, teacher):
    p, q = student.softmax(-1), teacher.softmax(-1)
    kl = (p * (p / q).log()).sum()
    return kl.detach(), torch.autograd.grad(kl, student)[0]


def test_full_kl_equals_the_definition(mopd):
    generator, same = torch.Generator().manual_seed(2), torch.nn.Identity()
    student = torch.randn(5, 6, generator=generator).requires_grad_()
    teacher = torch.randn(5, 6, generator=generator)
    p, q = student.softmax(-1), teacher.softmax(-1)
    plain = (p * (p / q).log()).sum(-1)
    outside = torch.tensor([1.0, 2.0, 0.5, -1.0, 3.0])
    expected = torch.autograd.grad((plain * outside).sum(), student)[0]
    for chunk in (1, 2, 512):
        kl = mopd.full_kl_loss(student, teacher, same, same, chunk=chunk)
        close(kl, plain.detach())
        close(torch.autograd.grad((kl * outside).sum(), student)[0], expected, atol=1e-5)


def test_scale_by_domain():
    mix = importlib.import_module("mix_rl")
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [4.0, 0.0]])
    advantages = rewards - rewards.mean(-1, keepdim=True)
    scaled = mix.scale_by_domain(advantages, rewards, ["math", "math", "code"])
    # math: 1 0 1 1, std = sqrt(3/4 / 3) = 1/2; code: 4 0, std = sqrt(8)
    expected = torch.tensor([[1.0, -1.0], [0.0, 0.0], [2 / 8**0.5, -2 / 8**0.5]])
    torch.testing.assert_close(scaled, expected, rtol=1e-3, atol=1e-4)


def toy_distributions(V=7, tokens=5):
    generator = torch.Generator().manual_seed(3)
    student = torch.randn(tokens, V, generator=generator).requires_grad_()
    return student, torch.randn(tokens, V, generator=generator)


def test_topk_kl_at_the_whole_vocabulary_is_the_full_one(mopd):
    """Both distributions sum to 1, so the Bregman terms cancel; value and gradient are those of full_kl_loss."""
    same = torch.nn.Identity()
    found = []
    for form in (lambda *h: mopd.topk_kl_loss(*h, k=7, chunk=2), mopd.full_kl_loss):
        student, teacher = toy_distributions()
        kl = form(student, teacher, same, same)
        kl.sum().backward()
        found.append((kl.detach(), student.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_topk_kl_is_its_definition(mopd):
    """Value and derivative against autograd through every term; never negative; larger k never gives less."""
    same, k = torch.nn.Identity(), 3
    student, teacher = toy_distributions()
    loss = mopd.topk_kl_loss(student, teacher, same, same, k=k)
    loss.sum().backward()
    copy = student.detach().clone().requires_grad_()
    log_s, top = copy.log_softmax(-1).topk(k)
    log_t = teacher.log_softmax(-1).gather(-1, top)
    expected = (log_s.exp() * (log_s - log_t) - log_s.exp() + log_t.exp()).sum(-1)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(student.grad, copy.grad)
    values = [mopd.topk_kl_loss(student, teacher, same, same, k=k).detach() for k in (1, 3, 7)]
    assert (values[0] >= 0).all() and (values[1] >= values[0]).all() and (values[2] >= values[1] - 1e-6).all()


def test_outcome_advantages_add_up(mopd):
    """With alpha the sampled form's gradient is the teacher's plus the policy gradient of the rewards."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    how = dict(normalizer=2, advantage_clip=5.0, outcome_advantages=torch.tensor([[0.25, 0.25]]))
    teacher = torch.tensor([[-0.5, -2.0]])
    mopd.sampled_kl_loss(logprobs, teacher, logprobs.detach(), torch.ones(1, 2), **how).backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([[0.5 + 0.25, 0.25]]) / 2)


@pytest.mark.parametrize("off_policy", [False, True])
def test_sampled_gradient_is_the_exact_one_in_expectation(mopd, off_policy):
    student, teacher = two_policies()
    _, exact = exact_kl_gradient(student, teacher)
    same = torch.nn.Identity()
    full = torch.autograd.grad(mopd.full_kl_loss(student, teacher, same, same).sum(), student)[0]
    # The sampler mu is the student itself, or a flatter one with pi/mu inside the gate.
    mu = (student.detach() * (0.8 if off_policy else 1.0)).log_softmax(-1)
    ratio = (student.detach().log_softmax(-1) - mu).exp()
    assert 0.5 < ratio.min() and ratio.max() < 2 and (not off_policy or ratio.max() > 1.05)
    expected = torch.zeros_like(student)
    for token in range(6):  # every token, weighted by how often the sampler draws it
        logprobs, target = student.log_softmax(-1)[:, token], teacher.log_softmax(-1)[:, token]
        loss = mopd.sampled_kl_loss(
            logprobs[None], target[None], mu[None, :, token], torch.ones(1, 1), normalizer=1, advantage_clip=100
        )
        expected += mu[0, token].exp() * torch.autograd.grad(loss, student)[0]
    assert exact.norm() > 0.1
    close(full, exact, atol=1e-5)
    close(expected, exact, atol=1e-5)


def test_differentiating_the_log_ratio_teaches_nothing():
    """Why A_t is detached: the expected gradient of d_t = log pi_s - log pi_t is zero whatever the teacher is."""
    student, teacher = two_policies()
    expected = torch.zeros_like(student)
    for token in range(6):
        d = student.log_softmax(-1)[0, token] - teacher.log_softmax(-1)[0, token]
        expected += student.detach().softmax(-1)[0, token] * torch.autograd.grad(d, student)[0]
    assert expected.norm() < 1e-6 < 0.1 < exact_kl_gradient(student, teacher)[1].norm()


@pytest.mark.parametrize("form", ["sampled", "topk", "full"])
def test_an_equal_teacher_gives_no_gradient(mopd, make_model, form):
    student, (prompts, tokens, lengths) = make_model(), batch_of()
    teacher = copy.deepcopy(student).requires_grad_(False)
    hidden, mask = mopd.completion_hidden(student, prompts, tokens, lengths, PAD)
    teacher_hidden, _ = mopd.completion_hidden(teacher, prompts, tokens, lengths, PAD)
    heads = student.get_output_embeddings(), teacher.get_output_embeddings()
    targets = tokens[mask]
    if form == "full":
        loss = mopd.full_kl_loss(hidden, teacher_hidden, *heads, chunk=7).sum()
    elif form == "topk":
        loss = mopd.topk_kl_loss(hidden, teacher_hidden, *heads, k=5, chunk=7).sum()
    else:
        logprobs = mopd.token_logprobs(hidden, heads[0], targets)
        others = mopd.token_logprobs(teacher_hidden, heads[1], targets)
        loss = mopd.sampled_kl_loss(logprobs, others, logprobs.detach(), 1, normalizer=1)
    student.zero_grad()
    loss.backward()
    assert abs(float(loss.detach())) <= 1e-6
    norm = torch.stack([weight.grad.norm() for weight in student.parameters()]).norm()
    assert float(norm) <= 1e-6
