"""The sampler against model.generate and a plain forward, its draws against the distribution, and its contract."""

import importlib
import inspect
import math

import numpy as np
import pytest
import torch

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17], [3, 3]]  # ragged, one of a single token
KINDS = ["llama", "qwen2", "qwen3", "gpt2", "gemma3", "gemma2", "gpt_neo", "bloom", "falcon"]


@pytest.fixture(scope="module")
def sampler():
    """The module that holds sample, sample_hf and draw; the training scripts' copies have the same text (test_copies)."""
    return importlib.import_module("eval")


def settings(**changes):
    return dict(num_generations=3, max_completion_length=10, eos_ids=[], pad_id=0, seed=5) | changes


def generate(model, prompt, count, eos_ids=()):
    """Greedy tokens of one prompt by model.generate, nothing padded."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=count, eos_token_id=list(eos_ids) or None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def rows_of(rollouts):
    return [row[:n].tolist() for row, n in zip(rollouts.tokens, rollouts.lengths.tolist())]


@torch.no_grad()
def forward_logprobs(model, prompt, row, temperature=1.0):
    logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(row)[:, None]).squeeze(-1)


def same(left, right):
    assert torch.equal(left.tokens, right.tokens)
    assert torch.equal(left.lengths, right.lengths)
    assert torch.equal(left.finished, right.finished)
    torch.testing.assert_close(left.logprobs, right.logprobs, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------- against the oracles


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(sampler, make_model, kind):
    model = make_model(kind)
    free = sampler.sample(model, PROMPTS, **settings(num_generations=1, temperature=0)).tokens
    eos_ids = [60, int(free[0, 6]), int(free[2, 3])]  # tokens that do come up: rows end at different places
    expected = [generate(model, prompt, 10, eos_ids) for prompt in PROMPTS]
    assert len({len(row) for row in expected}) > 1
    how = settings(num_generations=1, temperature=0, eos_ids=eos_ids)
    batch = sampler.sample(model, PROMPTS, **how)
    assert rows_of(batch) == expected
    assert batch.finished.tolist() == [row[-1] in eos_ids for row in expected]
    assert torch.equal(batch.logprobs, torch.zeros_like(batch.logprobs))  # all the mass is on the token
    for prompt, row in zip(PROMPTS, expected):
        assert rows_of(sampler.sample(model, [prompt], **how)) == [row]


def test_greedy_equals_generate_on_smollm2(sampler, smollm2_folder):
    """64 prompts of 1 to 64 words side by side, against each of them alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    words = (importlib.import_module("eval").__doc__ * 2).split()
    prompts = tokenizer([" ".join(words[start : start + start % 64 + 1]) for start in range(64)]).input_ids
    expected = [generate(model, prompt, 4, [2]) for prompt in prompts]
    how = settings(num_generations=1, max_completion_length=4, eos_ids=[2], temperature=0)
    assert rows_of(sampler.sample(model, prompts, **how)) == expected


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_forward(sampler, make_model, kind, temperature):
    model = make_model(kind)
    free = sampler.sample(model, PROMPTS, **settings(temperature=temperature)).tokens
    eos_ids = [int(free[0, 4]), int(free[3, 2]), int(free[8, 7])]
    out = sampler.sample(model, PROMPTS, **settings(temperature=temperature, eos_ids=eos_ids, slots=7))
    assert len(set(out.lengths.tolist())) > 2  # rows left the batch at different places
    for row, tokens in enumerate(rows_of(out)):
        expected = forward_logprobs(model, PROMPTS[row // 3], tokens, temperature)
        torch.testing.assert_close(out.logprobs[row, : len(tokens)], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_cache_grows_beyond_its_first_room(sampler, make_model, kind):
    """Slots makes room for 64 tokens at a time; rows leave before, between and after."""
    model = make_model(kind)
    caps = torch.tensor([3, 140, 70, 64, 65, 66, 139, 1, 100, 2, 63, 129])
    out = sampler.sample(model, PROMPTS, **settings(max_completion_length=caps))
    assert out.lengths.tolist() == caps.tolist()
    for row, tokens in enumerate(rows_of(out)):
        expected = forward_logprobs(model, PROMPTS[row // 3], tokens)
        torch.testing.assert_close(out.logprobs[row, : len(tokens)], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_asking_rarely_who_has_ended_changes_nothing(sampler, make_model, kind):
    """On a GPU ended rows stay in the batch for up to 8 tokens. The same lines, run on the CPU."""
    source = inspect.getsource(sampler.sample)
    rarely = source.replace('device.type == "cpu" or ', "")
    assert rarely != source
    namespace = dict(vars(sampler))
    exec(rarely, namespace)
    model = make_model(kind)
    free = sampler.sample(model, PROMPTS, **settings(max_completion_length=30)).tokens
    how = settings(max_completion_length=torch.arange(18, 30), eos_ids=[int(free[0, 4]), int(free[5, 9])], slots=7)
    same(namespace["sample"](model, PROMPTS, **how), sampler.sample(model, PROMPTS, **how))


def test_other_caches_are_left_to_generate(sampler, make_model, capsys):
    from transformers import FalconH1Config, FalconH1ForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel

    assert sampler.cache_fits(make_model("gemma3")) and sampler.cache_fits(make_model("gpt2"))
    assert capsys.readouterr().out == ""
    small = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    small |= dict(
        num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8
    )
    model = FalconH1ForCausalLM(FalconH1Config(**small))
    assert not sampler.cache_fits(model)
    assert capsys.readouterr().out.count("\n") == 1
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=61, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    assert not sampler.cache_fits(model)  # it has no cache at all


# ------------------------------------------------------------------------------------------------------- draws


def grid(count):
    """Uniforms in the middle of `count` equal cells: a CDF inverted on them gives each token its share to within one."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def support(tokens):
    return sorted(set(tokens.tolist()))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draw_inverts_the_cdf(sampler, temperature):
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.25, 0.0, 0.05, 0.2])
    logits = probabilities.log() + 3.0
    tokens, logprobs = sampler.draw(logits.expand(20_000, -1), grid(20_000), temperature)
    powers = probabilities ** (1 / temperature)  # softmax(log p / T) is p^(1/T), normalised
    shares = powers / powers.sum()
    counts = torch.bincount(tokens, minlength=7)
    assert (counts - 20_000 * shares).abs().max() <= 2
    torch.testing.assert_close(logprobs, shares.log()[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "how, kept",
    [
        (dict(top_p=0.4), [4]),
        (dict(top_p=0.55), [1, 4]),
        (dict(top_p=0.85), [1, 2, 4]),
        (dict(top_p=0.99), [0, 1, 2, 4]),
        (dict(top_k=1), [4]),
        (dict(top_k=2), [1, 4]),
        (dict(top_k=99), [0, 1, 2, 4]),
        (dict(top_k=3, top_p=0.55), [1, 4]),
        (dict(top_p=0.55, temperature=0.5), [4]),  # the temperature comes first: 25 / 36.5 = .68 of the mass
    ],
)
def test_support_of_top_p_and_top_k(sampler, how, kept):
    probabilities = torch.tensor([0.05, 0.3, 0.15, 0.0, 0.5])
    tokens, logprobs = sampler.draw(probabilities.log().expand(5000, -1), grid(5000), **how)
    assert support(tokens) == kept
    powers = probabilities ** (1 / how.get("temperature", 1))
    shares = torch.zeros(5)
    shares[kept] = powers[kept] / powers[kept].sum()
    assert (torch.bincount(tokens, minlength=5) - 5000 * shares).abs().max() <= 2
    torch.testing.assert_close(logprobs, shares.log()[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-24, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(sampler, uniform):
    never = -math.inf
    logits = torch.tensor([[never, 0.0, never, 0.0, never], [0.0, never, never, -200.0, never]])
    tokens, logprobs = sampler.draw(logits, torch.tensor([uniform, uniform], dtype=torch.float64))
    assert tokens.tolist() == [1 if uniform < 0.5 else 3, 0]  # at .5 the first token's mass is used up
    assert torch.isfinite(logprobs).all()


def test_draws_beyond_the_first_block(sampler):
    """The CDF has two levels: tokens of every block of 256 come up as often as their probability says."""
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [3, 255, 256, 600, 999]] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).log()
    tokens, logprobs = sampler.draw(logits.expand(4000, -1), grid(4000))
    counts = torch.bincount(tokens, minlength=1000)
    assert [int(counts[token]) for token in (3, 255, 256, 600, 999)] == pytest.approx(
        [400, 800, 1200, 600, 1000], abs=2
    )
    torch.testing.assert_close(logprobs, logits[0, tokens], rtol=1e-5, atol=1e-5)


def test_the_last_uniform_of_a_large_vocabulary_stays_inside(sampler):
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0))
    logits[:, -5:] = -math.inf
    tokens, logprobs = sampler.draw(logits, torch.full((8,), 1 - 2**-53, dtype=torch.float64))
    assert (tokens < 49_995).all() and torch.isfinite(logprobs).all()


def test_samples_follow_the_distribution(sampler, make_model):
    """Chi-square of the first two tokens jointly, 11 * 11 cells, against the model's own probabilities."""
    model, count = make_model(vocab_size=11, spread=0.15), 6000
    out = sampler.sample(model, [[4, 5]], **settings(num_generations=count, max_completion_length=2))
    with torch.no_grad():
        first = model(torch.tensor([[4, 5]])).logits[0, -1].softmax(-1)
        second = model(torch.tensor([[4, 5, token] for token in range(11)])).logits[:, -1].softmax(-1)
    expected = (first[:, None] * second).flatten().double() * count
    observed = torch.bincount(out.tokens[:, 0] * 11 + out.tokens[:, 1], minlength=121).double()
    rare = expected < 5  # pooled, as the test's approximation wants
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    keep = expected > 5
    chi_square = ((observed - expected) ** 2 / expected)[keep].sum()
    df = int(keep.sum()) - 1
    limit = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3  # Wilson-Hilferty, 99.9 %
    assert df > 60 and chi_square < limit
    # And too good a fit would mean that rows share their uniforms.
    assert chi_square > df * (1 - 2 / (9 * df) - 3.09 * math.sqrt(2 / (9 * df))) ** 3


# ------------------------------------------------------------------------------- what a sample depends on, and on what not


@pytest.mark.parametrize("slots", [1, 4, 7, 64])
def test_a_sample_does_not_depend_on_slots(sampler, make_model, slots):
    how = settings(eos_ids=[1, 2, 3, 4])
    same(sampler.sample(make_model(), PROMPTS, **how, slots=slots), sampler.sample(make_model(), PROMPTS, **how))


@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_a_sample_does_not_depend_on_who_shares_the_batch(sampler, make_model, kind):
    how, model = settings(eos_ids=[1, 2, 3, 4]), make_model(kind)
    whole = sampler.sample(model, PROMPTS, **how)
    for start, end in ((0, 1), (1, 3), (3, 4)):  # several processes draw what one would
        part = sampler.sample(model, PROMPTS[start:end], **how, first_row=3 * start)
        same(part, type(whole)(*(value[3 * start : 3 * end] for value in whole)))


def test_seeds_rows_and_positions_differ(sampler, make_model):
    def tokens(**how):
        return sampler.sample(make_model(), [[5], [5]], **settings(max_completion_length=16, **how)).tokens

    assert torch.equal(tokens(), tokens())
    assert not torch.equal(tokens(), tokens(seed=6))
    assert not torch.equal(tokens(), tokens(seed=5 + (1 << 32)))  # main() puts the step and the seed into one number
    assert len({tuple(row) for row in tokens().tolist()}) == 6
    assert not torch.equal(tokens()[:3], tokens(first_row=1)[:3])
    assert torch.equal(tokens()[1:], tokens(first_row=1)[:5])


def test_inputs_are_left_alone(sampler, make_model):
    model, prompts, eos_ids = make_model(), [list(prompt) for prompt in PROMPTS], [1, 2]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sampler.sample(model, prompts, **settings(eos_ids=eos_ids))
    assert prompts == PROMPTS and eos_ids == [1, 2] and not model.training
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------ the contract


def test_an_end_token_only_cuts(sampler, make_model):
    """With an end token each row is the row without one, cut behind the first end; the rest is padding."""
    free = sampler.sample(make_model(), PROMPTS, **settings())
    assert free.lengths.tolist() == [10] * 12 and not free.finished.any()
    eos_ids = sorted({int(free.tokens[0, 4]), int(free.tokens[5, 0]), int(free.tokens[7, 9])})
    assert len(eos_ids) == 3
    for pad in (eos_ids[0], 0):  # the padding may be a token that ends
        out = sampler.sample(make_model(), PROMPTS, **settings(eos_ids=eos_ids, pad_id=pad))
        ends = [[t for t, token in enumerate(row) if token in eos_ids] for row in free.tokens.tolist()]
        lengths = [min(end) + 1 if end else 10 for end in ends]
        assert 1 in lengths and max(lengths) == 10
        assert out.lengths.tolist() == lengths
        assert out.finished.tolist() == [bool(end) for end in ends]  # an end at the last place counts as finished
        assert rows_of(out) == [row[:n] for row, n in zip(free.tokens.tolist(), lengths)]
        after = torch.arange(10) >= out.lengths[:, None]
        assert (out.tokens[after] == pad).all() and (out.logprobs[after] == 0).all()
        assert (out.logprobs[~after] < 0).all()


@pytest.mark.parametrize("name", ["sample", "sample_hf"])
def test_shapes_and_types(sampler, make_model, name):
    out = getattr(sampler, name)(make_model(), PROMPTS, **settings(eos_ids=[1, 2, 3]))
    assert out.tokens.shape == out.logprobs.shape == (12, 10)
    assert out.lengths.shape == out.finished.shape == (12,)
    assert [value.dtype for value in out] == [torch.int64, torch.int64, torch.float32, torch.bool]
    assert not out.logprobs.requires_grad


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("name", ["sample", "sample_hf"])
def test_without_an_end_token_every_row_is_full(sampler, make_model, name, temperature):
    model = make_model(vocab_size=11, spread=0.15)  # its config names token 0 as the end, and that comes up
    how = settings(num_generations=8, temperature=temperature)
    out = getattr(sampler, name)(model, [[4, 5], [7], [8, 8], [0]], **how)
    assert out.lengths.tolist() == [10] * 32 and not out.finished.any()
    assert (out.tokens[:, :-1] == 0).any() or temperature == 0


@pytest.mark.parametrize("name", ["sample", "sample_hf"])
def test_the_first_token_may_end(sampler, make_model, name):
    out = getattr(sampler, name)(make_model(), PROMPTS, **settings(eos_ids=list(range(61))))
    assert out.lengths.tolist() == [1] * 12 and out.finished.all()
    assert out.tokens.shape == (12, 10) and (out.tokens[:, 1:] == 0).all() and (out.logprobs[:, 1:] == 0).all()


@pytest.mark.parametrize("name", ["sample", "sample_hf"])
def test_one_token_of_one_completion(sampler, make_model, name):
    out = getattr(sampler, name)(make_model(), [[9]], **settings(num_generations=1, max_completion_length=1))
    assert out.tokens.shape == (1, 1) and out.lengths.tolist() == [1] and not out.finished.any()


@pytest.mark.parametrize("name", ["sample", "sample_hf"])
def test_one_cap_a_row(sampler, make_model, name):
    caps = [3, 10, 1, 10, 2, 2, 7, 4, 10, 1, 1, 9]
    how = settings(eos_ids=[1, 2, 3, 4, 5])
    free = getattr(sampler, name)(make_model(), PROMPTS, **how)
    out = getattr(sampler, name)(make_model(), PROMPTS, **how | {"max_completion_length": torch.tensor(caps)})
    lengths = [min(cap, n) for cap, n in zip(caps, free.lengths.tolist())]
    assert out.lengths.tolist() == lengths and lengths != free.lengths.tolist()
    assert rows_of(out) == [row[:n] for row, n in zip(free.tokens.tolist(), lengths)]
    fits = free.lengths <= torch.tensor(caps)
    assert out.finished.tolist() == (free.finished & fits).tolist()
    assert (out.logprobs[torch.arange(10) >= out.lengths[:, None]] == 0).all()


@pytest.mark.parametrize("temperature, top_p, top_k", [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.7, 0), (1.0, 1.0, 4)])
@pytest.mark.parametrize("name", ["sample", "sample_hf"])
def test_logprobs_are_of_the_distribution_drawn_from(sampler, make_model, name, temperature, top_p, top_k):
    """Both samplers against one plain forward: temperature, then top-k, then top-p, then normalised."""
    model = make_model()
    how = settings(temperature=temperature, top_p=top_p, top_k=top_k, eos_ids=[1, 2, 3], num_generations=2)
    out = getattr(sampler, name)(model, PROMPTS, **how)
    for row, tokens in enumerate(rows_of(out)):
        prompt = PROMPTS[row // 2]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
        probabilities = logits.double().softmax(-1).numpy()
        for t, token in enumerate(tokens):
            order = np.argsort(-probabilities[t])[: top_k or None]
            mass = probabilities[t][order] / probabilities[t][order].sum()
            order = order[: int(np.searchsorted(mass.cumsum(), top_p)) + 1] if top_p < 1 else order
            assert token in order
            expected = math.log(probabilities[t][token] / probabilities[t][order].sum())
            assert float(out.logprobs[row, t]) == pytest.approx(expected, abs=1e-4)


def test_greedy_of_both_samplers_is_the_same(sampler, make_model):
    how = settings(temperature=0, eos_ids=[1, 2, 3, 4, 5, 6], num_generations=2)
    same(sampler.sample(make_model(), PROMPTS, **how), sampler.sample_hf(make_model(), PROMPTS, **how))


def test_the_reference_follows_its_seed(sampler, make_model):
    def tokens(seed):
        return sampler.sample_hf(make_model(), PROMPTS, **settings(seed=seed)).tokens

    state = torch.random.get_rng_state()
    assert torch.equal(tokens(1), tokens(1)) and not torch.equal(tokens(1), tokens(2))
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's random numbers are not disturbed


def test_the_reference_draws_from_the_untruncated_distribution(sampler, make_model):
    """A hub model's generation_config often asks for top-p or a repetition penalty; a sampler's flags decide instead."""
    import copy

    model = copy.deepcopy(make_model())
    plain = sampler.sample_hf(model, PROMPTS, **settings())
    model.generation_config.update(do_sample=True, top_p=0.5, top_k=3, temperature=0.3, repetition_penalty=1.5)
    same(sampler.sample_hf(model, PROMPTS, **settings()), plain)
