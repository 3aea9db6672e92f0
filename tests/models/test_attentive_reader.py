"""The Attentive Reader: padding, statistics, reversal, sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rbn
from rbn.models import AttentiveReader
from rbn.models.attention import AdditiveAttention
from rbn.models.attentive_reader import VARIANTS
from rbn.nn.batch_norm_term import BatchNormTerm
from rbn.nn.layers import reverse

SYMBOLS, ENTITIES, FIRST = 30, 6, 4
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # a few hundred operations in float64


def make(variant="bn-e**", **options):
    torch.manual_seed(0)
    options = {"hidden_size": 5, "dtype": torch.float64, **options}
    return AttentiveReader(SYMBOLS, ENTITIES, FIRST, variant=variant, **options)


def texts(steps=9, words=5, batch=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(SYMBOLS, (steps, batch), generator=generator)
    question = torch.randint(SYMBOLS, (words, batch), generator=generator)
    return document, question


def normalizations(model):
    return [m for m in model.modules() if isinstance(m, BatchNormTerm)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_and_gradients(variant):
    model = make(variant)
    logits, attention = model(*texts(), [9, 3, 1, 5], [5, 1, 2, 3])
    assert logits.shape == (4, ENTITIES)
    assert attention.shape == (9, 4)
    torch.testing.assert_close(attention.sum(0), torch.ones(4, dtype=torch.float64), **CLOSE)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_what_each_variant_normalizes():
    kinds = {v: type(make(v).document) for v in VARIANTS}
    assert kinds["lstm"] is rbn.LSTM
    assert set(kinds.values()) == {rbn.LSTM, rbn.BatchNormLSTM}
    assert kinds["bi-lstm"] is rbn.LSTM
    assert [len(normalizations(make(v))) for v in VARIANTS] == [0, 0, 0, 4, 4, 4]
    stats = [make(v).question.input_stats for v in list(VARIANTS)[2:]]
    assert stats == ["step", "step", "sequence", "sequence"]
    both = [v for v in VARIANTS if make(v).document.bidirectional]
    assert both == ["bi-lstm", "bn-e**"]
    assert make("bn-e*", bidirectional=True).document.bidirectional
    assert make("bn-lstm", padding="include").document.padding == "include"


@pytest.mark.parametrize("options", [{}, {"bilinear": True, "document_skip": True}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_padding_holds_does_not_matter(variant, options):
    lengths, asked = torch.tensor([9, 3, 1, 5]), torch.tensor([5, 1, 2, 3])
    document, question = texts()
    results = []
    for filler in (0, 7, SYMBOLS - 1):
        model = make(variant, **options)
        filled = torch.where(torch.arange(9)[:, None] < lengths, document, filler)
        other = torch.where(torch.arange(5)[:, None] < asked, question, filler)
        logits, attention = model(filled, other, lengths, asked)
        logits.square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        results.append([logits.detach(), attention.detach(), *model.state_dict().values(), *grads])
        assert (attention[torch.arange(9)[:, None] >= lengths] == 0).all()
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=2, max_size=5),
    seed=st.integers(0, 100),
)
def test_a_padded_batch_equals_its_examples_one_by_one(variant, lengths, seed):
    model = make(variant)
    model(*texts(), [9, 3, 1, 5], [5, 1, 2, 3])
    model.eval()
    documents, asked = (torch.tensor(n) for n in zip(*lengths, strict=True))
    document, question = texts(batch=len(lengths), seed=seed)
    logits, attention = model(document, question, documents, asked)
    for k, (n, m) in enumerate(lengths):
        alone, weights = model(document[:n, k : k + 1], question[:m, k : k + 1])
        torch.testing.assert_close(logits[k], alone[0], **CLOSE)
        torch.testing.assert_close(attention[:n, k], weights[:, 0], **CLOSE)
        assert (attention[n:, k] == 0).all()


AUTHORS = {"bilinear": True, "document_skip": True, "initialization": "code"}


def bn(x, gamma, eps=1e-5):
    """Batch normalization over all but the last dimension, including any padded rows."""
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(0)
    variance = rows.square().mean(0) - mean.square()
    return gamma * (x - mean) / (variance + eps).sqrt()


@pytest.mark.parametrize("options", [{}, {"bilinear": True}, {"document_skip": True}, AUTHORS])
@pytest.mark.parametrize("variant", ["lstm", "bi-lstm", "bn-everywhere", "bn-e**"])
@pytest.mark.parametrize("lengths", [None, [9, 3, 1, 5]])
def test_attention_and_output_by_hand(variant, options, lengths):
    """Each question separately, in loops over positions, from the encoders' states."""
    model = make(variant, **options)
    everywhere = VARIANTS[variant].everywhere
    with torch.no_grad():
        for parameter in (*model.attention.parameters(), *model.join.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    document, question = texts()
    logits, attention = model(document, question, lengths)
    states, _ = model.document(model.embedding(document), lengths=lengths)
    _, (final, _) = model.question(model.embedding(question))
    asked = final.transpose(0, 1).reshape(4, -1)
    match, join = model.attention.match, model.join
    ends = [9] * 4 if lengths is None else lengths
    flat = torch.cat([states[:n, k] for k, n in enumerate(ends)])  # no padding in the statistics
    from_document, from_question = flat @ match.weight_a.T, asked @ match.weight_b.T
    if everywhere:
        from_document = bn(from_document, match.norm_a.gamma)
        from_question = bn(from_question, match.norm_b.gamma)
    read, means = [], []
    for k, part in enumerate(from_document.split(ends)):
        scores = []
        for t, term in enumerate(part):
            total = term + from_question[k] + match.bias
            if options.get("bilinear"):
                m = model.attention.similarity
                total = total + (m @ states[t, k]).dot(m @ asked[k])
            scores.append(torch.tanh(total).dot(model.attention.weight).exp())
        weights = torch.stack(scores) / sum(scores)
        torch.testing.assert_close(attention[: ends[k], k], weights, **CLOSE)
        read.append(sum(w * states[t, k] for t, w in enumerate(weights)))
        means.append(sum(states[t, k] for t in range(ends[k])) / ends[k])
    terms = [(torch.stack(read), "a"), (asked, "b")]
    if options.get("document_skip"):
        terms.append((torch.stack(means), "c"))
    total = join.bias
    for value, name in terms:
        term = value @ getattr(join, f"weight_{name}").T
        total = total + (bn(term, getattr(join, f"norm_{name}").gamma) if everywhere else term)
    expected = torch.tanh(total) @ model.softmax.weight.T + model.softmax.bias
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-9)  # a variance by subtraction


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_start_of_the_authors_code(variant):
    model = make(variant, initialization="code")
    blocks = []
    for name, parameter in model.named_parameters():
        if not name.startswith(("document.", "question.")):
            continue
        kind = name.partition(".")[2]
        if kind.startswith("weight_"):
            blocks += parameter.detach().split(5)
        elif kind.startswith("gamma"):
            assert (parameter == 0.1).all()
        else:
            assert (parameter == 0).all(), name
        assert parameter.requires_grad != kind.startswith("c0")
    assert len(blocks) == 2 * 2 * 4 * (1 + model.document.bidirectional)
    assert all(torch.equal(block, blocks[0]) for block in blocks)
    gram = blocks[0] @ blocks[0].T
    torch.testing.assert_close(gram, 0.05**2 * torch.eye(5, dtype=torch.float64), **CLOSE)
    # The other parts have the usual initialization, and everything except the cells is trained.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits, _ = model(*texts(), [9, 3, 1, 5], [5, 1, 2, 3])
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()
    assert (model.document.c0_l0 == 0).all()
    gates = model.document.weight_hh_l0.split(5)
    assert not any(torch.equal(gates[0], gate) for gate in gates[1:])


@pytest.mark.parametrize("variant", ["lstm", "bn-e**"])
@pytest.mark.parametrize("sizes", [(9, 5, 4), (1, 1, 2)])
def test_the_authors_options_in_bfloat16(variant, sizes):
    steps, words, batch = sizes
    plain = make(variant, dtype=torch.float32, **AUTHORS)
    document, question = texts(steps, words, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = plain(document, question)
    expected, _ = make(variant, dtype=torch.float32, **AUTHORS)(document, question)
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.03)
    logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in plain.parameters() if p.requires_grad)


def test_attention_ignores_padding_exactly():
    torch.manual_seed(0)
    attention = AdditiveAttention(3, 2, 4, normalized=False, normalization={})
    document, question = torch.randn(6, 2, 3), torch.randn(2, 2)
    valid = torch.arange(6)[:, None] < torch.tensor([6, 2])
    found, weights = attention(document, question, valid)
    document[2:, 1] = 1e30
    again, same = attention(document, question, valid)
    assert torch.equal(weights, same)
    assert torch.equal(found, again)
    assert (weights[2:, 1] == 0).all()


def test_the_second_direction_reads_the_unpadded_part_backwards():
    model = make("bn-e**")
    document, question = texts()
    lengths = torch.tensor([9, 3, 1, 5])
    states, _ = model.document(model.embedding(document), lengths=lengths)
    backward = rbn.BatchNormLSTM(5, 5, input_stats="sequence", dtype=torch.float64)
    for name, parameter in backward.named_parameters():
        parameter.data.copy_(model.document.get_parameter(f"{name}_reverse"))
    turned = reverse(model.embedding(document), lengths)
    expected, _ = backward(turned, lengths=lengths)
    torch.testing.assert_close(states[:, :, 5:], reverse(expected, lengths), **CLOSE)
    # The backward question encoder's last state has seen the first word last.
    _, (final, _) = model.question(model.embedding(question), lengths=torch.tensor([5, 1, 2, 3]))
    assert final.shape == (2, 4, 5)


@pytest.mark.parametrize("variant", ["bn-everywhere", "bn-e*", "bn-e**"])
def test_the_attention_has_population_statistics(variant):
    model = make(variant)
    batches = [(*texts(seed=s), [9, 3, 1, 5], [5, 1, 2, 3]) for s in range(3)]

    def forward(m, b):
        return m(*b)

    before = {k: v.clone() for k, v in model.state_dict().items() if "stats" not in k}
    rbn.update_population_stats(model, batches, forward=forward)
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name])
    stats = model.attention.match.norm_a.stats
    assert stats.count.tolist() == [3]
    # The plain average of the results of each batch alone.
    means = []
    for batch in batches:
        single = make(variant)
        rbn.update_population_stats(single, [batch], forward=forward)
        means.append(single.attention.match.norm_a.stats.mean)
    # The weights of the average are float32.
    torch.testing.assert_close(stats.mean, torch.stack(means).mean(0), rtol=1e-6, atol=1e-9)
    model.eval()
    logits, _ = model(*batches[0])
    with rbn.batch_statistics(model):
        other, _ = model(*batches[0])
    assert not torch.allclose(logits, other)
    assert stats.count.tolist() == [3]


def test_statistics_leave_out_padded_positions():
    term = BatchNormTerm(2, gamma=1.0, momentum=None)
    x = torch.tensor([[[1.0, 2.0], [3.0, 6.0]], [[5.0, 4.0], [100.0, 100.0]]])
    valid = torch.tensor([[True, True], [True, False]])
    y = term(x, valid)
    torch.testing.assert_close(term.stats.mean[0], torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(term.stats.var[0], torch.tensor([8 / 3, 8 / 3]))
    torch.testing.assert_close(y[valid].mean(0), torch.zeros(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(y[valid].var(0, correction=0), torch.ones(2), rtol=1e-5, atol=0)
    term.eval()
    torch.testing.assert_close(term(x, valid)[valid], y[valid])


def test_an_untrained_term_uses_the_batch():
    term, x = BatchNormTerm(2).eval(), torch.randn(3, 2)
    with pytest.warns(UserWarning, match="was not trained"):
        found = term(x)
    torch.testing.assert_close(found, term.train()(x))
    with pytest.raises(RuntimeError, match="no population statistics"):
        BatchNormTerm(2).eval()(torch.zeros(1, 2))


def test_saving_and_loading():
    model, other = make("bn-e**"), make("bn-e**", max_document=12)
    model(*texts())
    other.load_state_dict(model.state_dict())
    model.eval()
    other.eval()
    assert torch.equal(model(*texts())[0], other(*texts())[0])


def test_answers_among_entities_or_the_whole_vocabulary():
    entities, words = make(), make(output="vocabulary")
    assert words(*texts())[0].shape == (4, SYMBOLS)
    answers = torch.tensor([4, 9])
    assert entities.classes(answers).tolist() == [0, 5]
    assert words.classes(answers).tolist() == [4, 9]
    assert torch.equal(entities.symbols(entities.classes(answers)), answers)


def test_dropout_in_training_alone():
    model = make("lstm", dropout=0.5)
    torch.manual_seed(1)
    assert not torch.equal(model(*texts())[0], model(*texts())[0])
    model.eval()
    assert torch.equal(model(*texts())[0], model(*texts())[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_token_and_five_thousand(variant):
    model = make(variant, dtype=torch.float32)
    lengths = [1, 5000, 700]
    document, question = texts(steps=5000, words=1, batch=3)
    logits, attention = model(document, question, lengths)
    assert logits.isfinite().all()
    assert attention[0, 0] == 1
    assert attention[1:, 0].sum() == 0
    model.eval()
    with torch.no_grad():
        assert model(document[:1, :1], question[:, :1])[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"variant": "bn"}, "variant.*'lstm', 'bi-lstm'"),
        ({"output": "letters"}, "output.*'entities', 'vocabulary'"),
        ({"dropout": 2.0}, "dropout.* 0.* 1"),
        ({"embedding_size": 0}, "embedding_size.* 1, got 0"),
        ({"variant": "lstm", "padding": "some"}, "padding.*'exclude', 'include'"),
        ({"variant": "lstm", "momentum": 7}, "momentum.* 0.* 1"),
        ({"initialization": "zeros"}, "initialization.*'orthogonal', 'code'"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**options)


def test_bad_switches():
    for name in ("bilinear", "document_skip"):
        with pytest.raises(TypeError, match=f"{name} must be"):
            make(**{name: "yes"})
    with pytest.raises(ValueError, match=r"document_size 3 .*question_size 2"):
        AdditiveAttention(3, 2, 4, bilinear=True, normalized=False, normalization={})


def test_bad_texts():
    with pytest.raises(ValueError, match=r"first_entity.* 0.* 24"):
        AttentiveReader(30, 6, 25)
    document, question = texts()
    with pytest.raises(ValueError, match="with the same B"):
        make()(document, question[:, :2])
    with pytest.raises(ValueError, match=r"lengths.* 1.* 9"):
        make()(document, question, [9, 0, 1, 1])
    with pytest.raises(TypeError, match=r"question.*integer.*symbols, got torch\.float"):
        make()(document, question.double())
    model = make()
    with pytest.raises(ValueError, match=rf"document.*symbols.* 0.*{model.vocabulary - 1}"):
        model(document + model.vocabulary, question)
    with pytest.raises(TypeError, match=r"first_entity.*integer, got float"):
        AttentiveReader(30, 6, 1.5)
