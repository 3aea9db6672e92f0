"""The reading tasks: configs, training on made-up news, the archive's files, asking questions."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import rbn
from rbn.cli.app import app
from rbn.data.cloze import cloze, cloze_questions
from rbn.data.cnn.preprocess import PARTS
from rbn.data.cnn.question import render
from rbn.experiments import config as configs
from rbn.experiments import results, run_folder
from rbn.experiments.attention_page import highlighted, page
from rbn.experiments.build import build, make_trainer
from rbn.experiments.config import CONFIGS, Config, from_mapping, with_settings
from rbn.experiments.paper.numbers import TABLES
from rbn.experiments.paper.paper_tasks import paper_tasks
from rbn.experiments.paper.published import read_results
from rbn.experiments.paper.question_baselines import read_counts
from rbn.experiments.paper.tables import rows
from rbn.experiments.question_answering import Answer, ask
from rbn.experiments.reading import ReadingTask, make_reader
from rbn.experiments.task_kinds import QUESTIONS, READERS
from rbn.training import checkpoint

CPU = torch.device("cpu")


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def small(variant="bn-e**", **settings):
    data = {"sizes": [120, 40, 40], "facts": 2}
    options = {"hidden_size": 6, "batch_size": 20, "population_batch": 60, "data": data}
    return Config("cloze", variant, **{**options, **settings})


@pytest.mark.parametrize(
    "path", [*CONFIGS.glob("c*.yaml"), *CONFIGS.glob("dailymail*.yaml")], ids=lambda path: path.stem
)
def test_every_config_builds_its_readers(path):
    reading = cloze((40, 10, 10))
    for variant in READERS:
        config = from_mapping(configs.for_model(configs.read_yaml(path), variant))
        assert config.kind is QUESTIONS
        reader = make_reader(config, reading.vocabulary)
        assert reader.variant == variant


def test_dailymail_built_has_the_same_settings_for_all_readers():
    found = configs.published("dailymail-built")
    same = {json.dumps(configs.for_model(found, v) | {"model": ""}) for v in READERS}
    assert len(same) == 1


def test_options_of_the_authors_code_from_the_command_line(tmp_path):
    options = ("bilinear=true", "document_skip=true", "initialization=code")
    settings = [f"layer.{option}" for option in options]
    settings += ["hidden_size=4", "batch_size=8", "epochs=1", "data.sizes=[24, 8, 8]"]
    words = [word for setting in settings for word in ("--set", setting)]
    place = ("--variant", "bn-e**", "--device", "cpu", "--out", tmp_path / "run")
    done = call("train", "cloze", *words, *place)
    assert done.exit_code == 0, done.output
    tensors, _ = checkpoint.load(tmp_path / "run" / "final.safetensors")
    assert tensors["model.attention.similarity"].shape == (8, 8)
    assert tensors["model.join.weight_c"].shape == (4, 8)
    assert (tensors["model.document.c0_l0_reverse"] == 0).all()
    done = call(
        "train", "cloze", "--set", "layer.initialization=zeros", *place[:-1], tmp_path / "b"
    )
    assert done.exit_code == 2
    assert re.search("initialization .*orthogonal", done.output)


def test_the_papers_numbers():
    for name, hidden in (("cnn", 240), ("cnn-full", 120), ("cnn-built", 240)):
        found = {
            v: from_mapping(configs.for_model(configs.read_yaml(CONFIGS / f"{name}.yaml"), v))
            for v in READERS
        }
        for variant, config in found.items():
            sequencewise = variant in ("bn-e*", "bn-e**")
            assert config.hidden_size == hidden
            assert config.clip == 10
            assert config.batch_size == (40 if sequencewise else 64)
            assert config.optimizer == {"name": "adam", "lr": 8e-4 if sequencewise else 8e-5}
        assert found["lstm"].data["sentences"] == (None if "full" in name else 4)


def test_models_go_with_their_tasks():
    with pytest.raises(ValueError, match=r"model.*lstm, bi-lstm, bn-lstm, bn-e"):
        Config("cnn", "ln-lstm")
    with pytest.raises(ValueError, match=r"model.*lstm, bn-lstm, ln-lstm"):
        Config("ptb", "bn-e*")


def test_a_task_for_the_trainer():
    task = build(small(), 1, CPU)
    assert (task.batches_per_epoch, task.items_per_step) == (6, 20)
    loss = task.loss(*task.batch(0))
    loss.backward()
    assert torch.equal(task.loss(*task.batch(0)), loss)  # the batch depends on the step only
    document, question, *_ = task.batch(3)
    assert (len(document), len(question)) in task.batches.shapes
    for s in (3, 4):
        task.loss(*task.batch(s))
    task.model.eval()
    found = task.evaluate()
    nats = {"valid_batch_nats", "valid_population_nats"}
    assert set(found) == {"valid_batch", "valid_population", *nats}
    assert 0 <= found["valid_population"] <= 1
    sizes = [len(b.answers) for b in task.population_batches(50)]
    assert sum(sizes) == 120
    assert max(sizes) <= 50


def test_the_error_rate_is_that_of_the_examples_one_by_one():
    task = build(small(), 1, CPU)
    task.loss(*task.batch(0))
    task.model.eval()
    wrong, nats = 0, 0.0
    with torch.no_grad():
        for k in range(40):
            document, question, answer = task.reading.valid.example(k)
            logits, _ = task.model(torch.tensor(document)[:, None], torch.tensor(question)[:, None])
            wrong += int(task.reader.symbols(logits.argmax(1))) != answer
            classes = task.reader.classes(torch.tensor([answer]))
            nats += float(F.cross_entropy(logits, classes))
    found = task.measure("valid")
    assert found.value == pytest.approx(wrong / 40)
    # float32 in batches and one by one: some units of rounding (6e-8) through the network.
    assert found.nats == pytest.approx(nats / 40, rel=1e-5)


def train(task, config, batches):
    """Training steps on the given batches; the loss of each."""
    optimizer = torch.optim.Adam(task.model.parameters(), lr=config.optimizer["lr"])
    for batch in batches:
        loss = task.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), config.clip)
        optimizer.step()
        yield loss.item()


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("variant", READERS)
def test_each_variant_fits_a_batch(variant):
    config = from_mapping(configs.for_model(configs.published("cloze"), variant))
    torch.manual_seed(1)
    task = build(with_settings(config, ["data.sizes=[64,64,64]", "batch_size=32"]), 1, CPU)
    losses = list(train(task, config, [task.batch(0)] * 50))
    assert losses[0] > 2
    assert losses[-1] < 0.2


@pytest.mark.no_cover
@pytest.mark.slow
def test_answers_to_new_questions_are_learned():
    """From chance, a third of the answers, to over 90% of them, with every normalization."""
    config = from_mapping(configs.for_model(configs.published("cloze"), "bn-e**"))
    torch.manual_seed(1)
    task = build(config, 1, CPU)

    def accuracy():
        results.exact_statistics(config, task)
        return 1 - task.measure_with("valid", "population")

    assert accuracy() < 0.45
    for step, loss in enumerate(train(task, config, map(task.batch, range(800)))):
        if step % 50 == 49 and loss < 0.5 and accuracy() > 0.92:
            break
    assert accuracy() > 0.9


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_numbers(stopped_and_whole):
    stopped_and_whole(small(epochs=2, layer={"dropout": 0.3}), 5)


def archive(root, sizes=(60, 20, 20)):
    """Files in the archive's layout and format."""
    for part, found in zip(PARTS, cloze_questions(sizes), strict=True):
        folder = root / "cnn" / "questions" / PARTS[part]
        folder.mkdir(parents=True)
        for k, question in enumerate(found):
            (folder / f"{k}.question").write_text(render(question))
    return root


TINY = ("hidden_size=6", "epochs=2", "evaluate_every=null", "layer.dropout=0.1")


@pytest.mark.slow
def test_the_command_for_table_4_on_files_of_the_archives_format(tmp_path):
    root, out = archive(tmp_path / "data"), tmp_path / "run"
    (root / "cnn" / "questions" / "test" / "bad.question").write_text("nothing")
    settings = [word for setting in TINY for word in ("--set", setting)]
    arguments = ["train", "cnn", "--variant", "bn-e**", "--config", "cnn-full", "--device", "cpu"]
    result = call(*arguments, *settings, "--data-dir", root, "--out", out)
    assert result.exit_code == 0, result.output
    assert re.search(r"1 malformed test files: bad\.question: ", result.stderr)
    found = json.loads((out / "result.json").read_text())
    assert found["metric"] == "error rate"
    assert found["task"] == "cnn"
    assert found["config"]["batch_size"] == 40
    assert 0 <= found["test"] <= 1


@pytest.mark.slow
def test_both_test_sets_are_measured(tmp_path):
    root, out = archive(tmp_path / "data"), tmp_path / "run"
    folder = (root / "cnn").rename(root / "dailymail-built")
    second, _, _ = cloze_questions((30, 0, 0), seed=5)
    (folder / "questions" / "test-cnn").mkdir()
    for k, question in enumerate(second):
        (folder / "questions" / "test-cnn" / f"{k}.question").write_text(render(question))
    (folder / "build.json").write_text("{}")
    settings = [word for setting in TINY for word in ("--set", setting)]
    arguments = ["train", "dailymail-built", "--variant", "bi-lstm", "--device", "cpu"]
    result = call(*arguments, *settings, "--data-dir", root, "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads((out / "result.json").read_text())
    shutil.rmtree(folder / "questions")  # the cache suffices to train and evaluate
    for split, name, count in (("test", "test", 20), ("test-cnn", "test_cnn", 30)):
        assert found[name] * count == pytest.approx(round(found[name] * count))
        command = ("evaluate", out, "--split", split, "--device", "cpu", "--data-dir", root)
        result = call(*command)
        assert f"error rate {100 * found[name]:.2f} % ({split})" in result.output
    result = call("data", "questions", "dailymail-built", "--min-count", 5, "--data-dir", root)
    assert "test-cnn         30" in result.output


def test_a_set_without_a_second_test_set_says_so(tmp_path):
    out = tmp_path / "run"
    settings = [word for setting in TINY for word in ("--set", setting)]
    command = ("train", "cloze", "--variant", "lstm", *settings, "--device", "cpu", "--out", out)
    assert call(*command, "--set", "data.sizes=[40,20,20]").exit_code == 0
    result = call("evaluate", out, "--split", "test-cnn", "--device", "cpu")
    assert "got 'test-cnn'" in result.output
    assert result.output.count("\n") == 1


def test_four_sentences_and_whole_documents_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    archive(tmp_path / "data")
    settings = [word for setting in TINY for word in ("--set", setting)]
    for config in ("cnn", "cnn-full"):
        arguments = ("train", "cnn", "--variant", "lstm", "--config", config, "--device", "cpu")
        result = call(*arguments, *settings, "--data-dir", "data")
        assert result.exit_code == 0, result.output
    assert sorted(p.name for p in Path("runs/cnn").iterdir()) == ["lstm-full-seed1", "lstm-seed1"]


@pytest.mark.slow
@pytest.mark.no_cover
def test_table_4_from_files_of_the_archives_format(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    text = (CONFIGS / "cnn-full.yaml").read_text()
    for large, small in (("hidden_size: 120", "hidden_size: 6"), ("epochs: 68", "epochs: 1")):
        assert large in text
        text = text.replace(large, small)
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    (tmp_path / "cnn-full.yaml").write_text(text)
    root = archive(tmp_path / "data")
    places = ("--results", tmp_path / "results", "--runs", tmp_path / "runs", "--out", tmp_path)
    command = ("reproduce", "table4", "--questions", "cnn", "--seeds", 1, "--device", "cpu")
    result = call(*command, *places, "--data-dir", root)
    assert result.exit_code == 0, result.output
    known = read_results(tmp_path / "results")
    assert {(r.task, r.model, r.tag) for r in known} == {
        *(("cnn", "lstm", "full"), ("cnn", "bn-e**", "full")),
    }
    table = rows(TABLES["table4"], paper_tasks(), known)
    assert [row.entry.paper for row in table] == [45.5, 37.9, 45.0, 36.3]
    for row in table:
        assert row.task.uses_paper_data(row.results)
        value = 100 * float(row.results[0].values[row.entry.field])
        assert row.cells[0].startswith("CNN, whole documents")
        assert row.cells[4:6] == (f"{value:.1f}", f"{value - row.entry.paper:+.1f}")
    result = call(*command, *places, "--data-dir", root, "--dry-run")
    assert "0 of 2 to do" in result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("run")
    config = small(epochs=1)
    torch.manual_seed(0)
    task = build(config, 1, CPU)
    run_folder.create(folder, config, 1)
    trainer = make_trainer(config, task, folder)
    trainer.run()
    assert isinstance(task, ReadingTask)
    results.finish(config, 1, trainer, "")
    return folder


def test_asking_a_run_that_is_not_finished(run, tmp_path):
    """Its model gets its own statistics, like a finished one."""
    shutil.copytree(run, tmp_path / "going")
    (tmp_path / "going" / "final.safetensors").unlink()
    (tmp_path / "a.txt").write_text("Ann won the cup .")
    arguments = "--document", tmp_path / "a.txt", "--question", "@placeholder won the cup"
    finished, going = (call("ask", folder, *arguments) for folder in (run, tmp_path / "going"))
    assert going.exit_code == 0, going.output
    assert going.output == finished.output
    (tmp_path / "going" / "best.safetensors").unlink()  # stopped before the first evaluation
    assert call("ask", tmp_path / "going", *arguments).exit_code == 0


def test_asking(run, tmp_path):
    question = cloze_questions((1, 0, 0), facts=2)[0][0]
    file = tmp_path / "a.question"
    file.write_text(render(question))
    answer = ask(run, file, None)
    assert len(answer.tokens) == len(question.document)
    assert sum(answer.attention) == pytest.approx(1, abs=1e-5)
    assert answer.right == question.entities[question.answer]
    assert [c for _, c in answer.candidates] == sorted((c for _, c in answer.candidates))[::-1]
    # The same in words, with names.
    text = tmp_path / "a.txt"
    words = " ".join(question.document)
    for symbol, name in question.entities.items():
        words = words.replace(f"{symbol} ", f"{name.replace(' ', 'x')} ")
    text.write_text(words)
    asked = " ".join(question.question)
    again = ask(run, text, asked)
    assert again.attention == pytest.approx(answer.attention, rel=1e-4)


def test_what_is_not_in_the_texts_has_none_of_their_names(run, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("@entity4 won the cup . @entity10 left the house .\n")
    answer = ask(run, text, "@placeholder won the cup", limit=100)
    names = [name for name, _ in answer.candidates]
    assert sorted(names) == ["@entity10", "@entity4", "an entity not in the texts"]
    assert sum(chance for _, chance in answer.candidates) == pytest.approx(1, abs=1e-5)
    assert ask(run, text, "@placeholder won the cup", limit=2).candidates == answer.candidates[:2]
    text.write_text("they won the cup .\n")
    ((name, chance),) = ask(run, text, "@placeholder won the cup").candidates
    assert (name, chance) == ("an entity not in the texts", pytest.approx(1, abs=1e-5))


def test_asking_on_the_command_line(run, tmp_path):
    text, html = tmp_path / "a.txt", tmp_path / "a.html"
    text.write_text("Then Ann Lee won the cup. It was <b>fine</b> & <script>x</script>. Bob slept.")
    result = call(
        "ask", run, "--document", text, "--question", "@placeholder won the cup", "--html", html
    )
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "Ann Lee won the cup" in shown
    parts = re.search(r"looked at: (.*?%) @placeholder", shown).group(1).split(", ")
    weights = [float(part.rpartition(" ")[2].rstrip("%")) for part in parts]
    assert len(weights) == 5
    assert weights == sorted(weights, reverse=True)
    assert 0 < sum(weights) <= 100.3  # each rounded
    assert "%" in result.output
    shown = html.read_text()
    assert "<script>" not in shown
    assert "&lt;" in shown
    assert shown.count("<mark") == shown.count("</mark>") > 10


@pytest.mark.parametrize(
    ("text", "question", "sentence"),
    [
        ("Ann won .", "who won ?", "question .*one @placeholder, got 0"),
        ("Ann won .", None, "--question '... @placeholder ...'"),
        ("", "@placeholder won", "empty"),
        ("@entity1 " * 30, "@placeholder won", ""),
        (
            " ".join(f"@entity{k}" for k in range(40)),
            "@placeholder won",
            " 40 .* 12$",
        ),
    ],
)
def test_what_cannot_be_asked(run, tmp_path, text, question, sentence):
    file = tmp_path / "a.txt"
    file.write_text(text)
    extra = [] if question is None else ["--question", question]
    result = call("ask", run, "--document", file, *extra)
    assert result.exit_code == (2 if sentence else 0), result.output
    if sentence:
        assert re.search(sentence, result.output)
        assert result.output.count("\n") == 1


def test_another_question_about_a_question_file(run, tmp_path):
    question = cloze_questions((1, 0, 0), facts=2)[0][0]
    file = tmp_path / "a.question"
    file.write_text(render(question))
    answer = ask(run, file, "@placeholder won the cup")
    assert answer.question == ("@placeholder", "won", "the", "cup")
    assert answer.right is None
    for asked in ("who won ?", "", "@placeholder met @placeholder"):
        result = call("ask", run, "--document", file, "--question", asked)
        assert result.exit_code == 2, result.output
        assert re.search("question .*one @placeholder, got ", result.output)


def test_the_gap_of_another_question_may_have_a_mark_close_to_it(run, tmp_path):
    path = tmp_path / "one.question"
    path.write_text(render(cloze_questions((1, 0, 0))[0][0]))
    assert ask(run, path, "who is @placeholder?").question == ("who", "is", "@placeholder", "?")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.longest=0", "longest .*1, got 0"),
        ("data.padding=2", "padding .*0 .*1, got 2"),
        ("data.longest=abc", "longest .*integer, got str"),
    ],
)
def test_settings_of_batches_are_looked_at_before_the_data(setting, sentence, tmp_path):
    command = ["train", "cnn-built", "--set", setting, "--data-dir", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert re.search(sentence, " ".join(done.output.split()))
    assert not list(tmp_path.iterdir())


def test_fewer_sentences_than_none(tmp_path):
    done = CliRunner().invoke(app, ["data", "questions", "cloze", "--sentences", "-1"])
    assert done.exit_code == 2
    assert re.search("sentences .*1, got -1", done.output)


def test_asking_what_is_no_reader(tmp_path):
    run_folder.create(tmp_path, Config("digits"), 1)
    file = tmp_path / "a.txt"
    file.write_text("word")
    result = call("ask", tmp_path, "--document", file, "--question", "@placeholder")
    assert result.exit_code == 2
    assert re.search("run on digits.*no questions", result.output)
    result = call("ask", tmp_path / "none", "--document", file, "--question", "@placeholder")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1


def test_a_page_escapes_every_word():
    bad = '<img src=x onerror="alert(1)">'
    answer = Answer((bad, "b"), (0.25, 0.75), (bad, "@placeholder"), ((bad, 0.9),), bad)
    shown = page(answer)
    assert "<img" not in shown
    assert shown.count("&lt;img src=x onerror=&#34;alert(1)&#34;&gt;") == 6
    assert "rgba(255, 150, 0, 0.333)" in shown
    text = highlighted(answer)
    assert text.plain == f"{bad} b "
    assert len(text.spans) == 2


@pytest.mark.slow
def test_build_and_count_on_the_command_line(tmp_path):
    file = tmp_path / "articles.jsonl"
    lines = [
        {
            "id": k,
            "part": ("train", "validation", "test")[k % 3],
            "article": f"Then Ann Lee met Bob{k} in Paris. Lee was glad to see the sea.",
            "highlights": [f"Ann Lee was glad to meet Bob{k} at sea"],
        }
        for k in range(9)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "cnn-built"
    result = call("data", "build-cloze", "--articles", file, "--out", out, "--processes", 1)
    assert result.exit_code == 0, result.output
    assert "question  @placeholder was glad to meet @entity" in result.output
    assert "training            3          6" in result.output
    result = call("data", "build-cloze", "--articles", file, "--out", out)
    assert result.exit_code == 2
    assert "already exists" in result.output
    command = ("data", "questions", "cnn-built", "--data-dir", tmp_path, "--processes", 1)
    result = call(*command, "--out", tmp_path / "cnn-built" / "questions.json")
    assert result.exit_code == 0, result.output
    assert "100.0%" in result.output
    counts, _ = read_counts(tmp_path)
    assert [(c.part, c.questions, c.ceiling) for c in counts] == [
        *(("train", 6, 1.0), ("valid", 6, 1.0), ("test", 6, 1.0)),
    ]
    result = call(*command, "--words", 3, "--out", tmp_path / "words" / "questions.json")
    assert f"cnn-built: {4 + 3 + 3} symbols" in result.output
    assert read_counts(tmp_path)[1][-1].endswith("--words 3")
    assert call(*command, "--words", 0).output.startswith("rbn: words ")
    result = call("data", "questions", "cnn", "--data-dir", tmp_path)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    result = call("data", "build-cloze", "--articles", file, "--out", out, "--processes", 0)
    assert result.output.startswith("rbn: processes ")
    file.write_text('{"text": "Ann Lee was glad."}\n')
    none = ("--out", tmp_path / "none", "--processes", 1)
    result = call("data", "build-cloze", "--articles", file, *none)
    assert result.exit_code == 1
    assert "no 'article'" in result.output
    assert "no questions" in result.output


def test_statistics_are_exact_at_the_end():
    config = small()
    task = build(config, 1, CPU)
    results.exact_statistics(config, task)
    counts = [m.count for m in task.model.modules() if isinstance(m, rbn.PopulationStatistics)]
    assert all(int(c.max()) == 2 for c in counts)
