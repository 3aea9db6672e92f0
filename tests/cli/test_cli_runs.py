"""Commands for trained runs: evaluate, sample, publish; and several runs at once."""

import csv
import hashlib
import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from rbn.cli.app import app
from rbn.experiments import build, results, run_folder, trained_models
from rbn.experiments import config as configs
from rbn.experiments.config import from_mapping, with_settings
from rbn.experiments.paper import published
from rbn.experiments.tasks import Classification
from rbn.training import checkpoint
from rbn.training.atomic_files import read_checked, write_checked

TEXT = ["--set", "epochs=1", "--set", "hidden_size=16", "--set", "batch_size=64"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def words(output):
    return " ".join(output.split())


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "run"
    done = invoke("train", "pydoc", *TEXT, "--device", "cpu", "--out", folder, "--tensorboard")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def digits_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    settings = ["--set", "epochs=2", "--set", "hidden_size=8", "--set", "evaluate_every=12"]
    done = invoke(
        "train", "digits", *settings, "--device", "cpu", "--seeds", "1,2", "--out", folder
    )
    assert done.exit_code == 0, done.output
    alone = invoke(
        "train", "digits", *settings, "--device", "cpu", "--seed", 2, "--out", folder / "x"
    )
    assert alone.exit_code == 0, alone.output
    return folder


@pytest.mark.slow
def test_several_seeds_give_the_numbers_of_each_alone(digits_runs):
    together, alone = (digits_runs / name for name in ("bn-lstm-seed2", "x"))
    one, other = (json.loads((run / "result.json").read_text()) for run in (together, alone))
    for name in ("test", "valid", "best_step", "seed", "command", "config"):
        assert one[name] == other[name], name
    assert (one["together"], other["together"]) == (2, 1)
    tensors, other_tensors = (
        checkpoint.load(run / "last.safetensors")[0] for run in (together, alone)
    )
    assert all(torch.equal(value, other_tensors[name]) for name, value in tensors.items())


@pytest.mark.slow
def test_measuring_a_classifier_again(digits_runs):
    run = digits_runs / "bn-lstm-seed1"
    result = json.loads((run / "result.json").read_text())
    done = invoke("evaluate", run, "--device", "cpu")
    assert (
        f"digits, bn-lstm: accuracy {100 * result['test']:.2f} % (test, population" in done.output
    )
    done = invoke("evaluate", run, "--split", "valid", "--stats", "batch", "--device", "cpu")
    assert f"accuracy {100 * result['valid_batch']:.2f} % (valid, batch" in done.output
    done = invoke("evaluate", run, "--length", "7", "--device", "cpu")
    assert done.exit_code == 2
    assert "length is for texts" in done.output


@pytest.mark.slow
def test_measuring_the_best_model_so_far(tmp_path, monkeypatch):
    """With its own statistics; the stored ones lag behind, and are not of averaged parameters."""
    settings = ["epochs=6", "hidden_size=8", "evaluate_every=6", "average=0.9"]
    settings.append("layer.hidden_noise=0")  # it would be drawn again
    config = with_settings(from_mapping(configs.published("digits")), settings)
    run_folder.create(tmp_path, config, 1)
    run = build.make_trainer(config, build.build(config, 1, torch.device("cpu")), tmp_path)
    now = run.run()
    (record,) = (r for r in now.history if r["step"] == now.best_step)
    done = invoke("evaluate", tmp_path, "--split", "valid", "--device", "cpu")
    value = 100 * record["valid_population"]
    wanted = f"accuracy {value:.2f} % (valid, population stats, the best model so far)"
    assert wanted in done.output
    done = invoke("evaluate", tmp_path, "--split", "valid", "--stats", "batch", "--device", "cpu")
    wanted = f"accuracy {100 * record['valid_batch']:.2f} % (valid, batch stats, the best"
    assert wanted in done.output
    # Mistakes are reported before any work.
    monkeypatch.setattr(Classification, "estimate_population", lambda *_: pytest.fail("estimated"))
    for option in (("--split", "all"), ("--stats", "both"), ("--length", "7")):
        assert invoke("evaluate", tmp_path, *option, "--device", "cpu").exit_code == 2


@pytest.mark.slow
def test_measuring_a_text(text_run):
    result = json.loads((text_run / "result.json").read_text())
    for options in ((), ("--length", "full")):  # as reported by rbn train
        done = invoke("evaluate", text_run, *options, "--device", "cpu")
        wanted = f"{result['test']:.4f} bits per character (test, population stats, whole sequence)"
        assert wanted in done.output, done.output
    values = {}
    for length in (10, 64):
        done = invoke("evaluate", text_run, "--length", length, "--device", "cpu")
        values[length] = float(done.output.split(": ")[1].split()[0])
    assert values[64] == pytest.approx(result["test_windows"], abs=1e-4)
    assert values[10] > values[64]  # the first characters of a window are the hardest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "exam"], "split .*train, valid, test, got 'exam'"),
        (["--stats", "both"], "stats .*population, batch, got 'both'"),
        (["--length", "1"], "length .*2, or full, got '1'"),
        (["--length", "\u00b2"], "length .*2, or full, got '\u00b2'"),
        (["--length", "full", "--stats", "batch"], "stats population"),
        (["--device", "gpu"], "device .*auto, cpu, cuda or cuda:N, got 'gpu'"),
    ],
)
def test_mistakes_in_measuring(options, message, text_run):
    done = invoke(
        "evaluate", text_run, *(["--device", "cpu"] if "gpu" not in options else []), *options
    )
    assert done.exit_code == 2
    assert re.search(message, words(done.output))


def test_writing_text(text_run):
    options = ["--prompt", "The ", "--length", "40", "--device", "cpu"]
    once, again = (invoke("sample", text_run, *options) for _ in range(2))
    assert once.exit_code == 0, once.output
    assert once.output == again.output
    assert once.output.startswith("The ")
    assert len(once.output) == 45  # and a newline
    other = invoke("sample", text_run, *options, "--seed", "2")
    assert other.output != once.output
    cold = [invoke("sample", text_run, *options, "--temperature", "0", "--seed", s) for s in (1, 2)]
    assert cold[0].output == cold[1].output
    cool = invoke("sample", text_run, *options, "--temperature", "1e-320")
    assert cool.output == cold[0].output


def test_text_is_written_with_the_states_of_what_was_read(text_run):
    """One character at a time matches reading all at once."""
    model, symbols = trained_models.open_language_model(text_run, torch.device("cpu"))
    prompt = "class"
    written = "".join(trained_models.sample(model, symbols, prompt, 6, 0.0, 1))
    numbers = torch.tensor([symbols.index(character) for character in prompt + written])
    with torch.no_grad():
        logits, _ = model(numbers[:, None])
    likeliest = logits[len(prompt) - 1 : -1, 0].argmax(-1)
    assert "".join(symbols[k] for k in likeliest) == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "prompt .*character"),
        (["--prompt", "\u00e9"], "is not one of the"),
        (["--temperature", "-1"], "temperature .*0, got -1"),
        (["--temperature", "nan"], "temperature .*0, got nan"),
        (["--temperature", "inf"], "temperature .*0, got inf"),
        (["--length", "-1"], "length .*negative"),
        (["--seed", "-1"], f"seed .*0 .*{2**63 - 1}, got -1"),
        (["--seed", f"{2**63}"], f"seed .*0 .*{2**63 - 1}, got {2**63}"),
    ],
)
def test_mistakes_in_writing(options, message, text_run):
    done = invoke("sample", text_run, *options, "--device", "cpu")
    assert done.exit_code == 2
    assert re.search(message, words(done.output))


def test_no_text_from_a_classifier(digits_runs, tmp_path):
    done = invoke("sample", digits_runs / "bn-lstm-seed1", "--device", "cpu")
    assert done.exit_code == 2
    assert re.search("run on digits.*not a text", words(done.output))
    done = invoke("evaluate", tmp_path)
    assert done.exit_code == 2
    assert "holds no run: it has no config.json" in words(done.output)


def test_publishing(digits_runs, tmp_path):
    done = invoke("publish", digits_runs / "bn-lstm-seed1", "--to", tmp_path)
    assert done.exit_code == 0, done.output
    target = tmp_path / "digits" / "bn-lstm-seed1.json"
    assert json.loads(target.read_text())["test"] > 0
    with target.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["12", "24"]
    first = ["step", "seconds", "train", "valid_batch", "valid_population"]
    assert list(rows[0]) == [*first, "valid_batch_nats", "valid_population_nats"]
    lines = (digits_runs / "bn-lstm-seed1" / "metrics.jsonl").read_text().splitlines()
    for row, record in zip(rows, map(json.loads, lines), strict=True):
        for name in list(row)[2:]:
            assert float(row[name]) == pytest.approx(record[name], abs=5e-7)  # 6 decimals
    done = invoke("publish", tmp_path)
    assert done.exit_code == 2
    assert "has no result" in done.output


def test_publishing_without_a_curve(digits_runs, tmp_path):
    run, to = tmp_path / "run", tmp_path / "to"
    run.mkdir()
    (run / "result.json").write_bytes((digits_runs / "bn-lstm-seed1/result.json").read_bytes())
    done = invoke("publish", run, "--to", to)
    assert done.exit_code == 2
    assert "no metrics.jsonl" in words(done.output)
    (run / "metrics.jsonl").touch()
    done = invoke("publish", run, "--to", to)
    assert done.exit_code == 2
    assert re.search(r"metrics\.jsonl is empty", words(done.output))
    assert not to.exists()


def test_a_damaged_model_is_made_again(digits_runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(digits_runs / "x", run)
    final = run / "final.safetensors"
    before, _ = checkpoint.load(digits_runs / "x/final.safetensors")
    content = bytearray(final.read_bytes())
    content[-1] ^= 0xFF
    final.write_bytes(content)
    result = json.loads((run / "result.json").read_text())
    done = invoke("resume", run, "--device", "cpu")
    assert done.exit_code == 0, done.output
    after, _ = checkpoint.load(final)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert json.loads((run / "result.json").read_text())["test"] == result["test"]
    done = invoke("resume", run, tmp_path / "run/../run", "--device", "cpu")
    assert done.exit_code == 2
    assert "is named twice" in done.output


def test_another_runs_result_is_not_overwritten(digits_runs, tmp_path):
    run, to = tmp_path / "run", tmp_path / "to"
    run.mkdir()
    for name in ("result.json", "metrics.jsonl"):
        (run / name).write_bytes((digits_runs / "bn-lstm-seed1" / name).read_bytes())
    for _ in range(2):  # its own may be
        assert invoke("publish", run, "--to", to).exit_code == 0
    result = read_checked(run / "result.json")
    result["config"]["epochs"], result["test"] = 1000, 0.25
    write_checked(run / "result.json", result)
    done = invoke("publish", run, "--to", to)
    assert done.exit_code == 2
    assert "other settings" in done.output
    target = to / "digits" / "bn-lstm-seed1.json"
    assert json.loads(target.read_text())["test"] != 0.25
    assert invoke("publish", run, "--to", to, "--replace").exit_code == 0
    assert json.loads(target.read_text())["test"] == 0.25


def test_a_text_is_published_without_a_second_loss(text_run, tmp_path):
    done = invoke("publish", text_run, "--to", tmp_path)
    assert done.exit_code == 0, done.output
    (table,) = tmp_path.rglob("*.csv")
    assert table.read_text().splitlines()[0] == "step,seconds,train,valid_batch,valid_population"


def test_a_run_that_an_older_version_began_is_published(digits_runs, tmp_path):
    """Its first evaluations lack the loss: their cells are empty, and it can be read."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("result.json", "metrics.jsonl"):
        (run / name).write_bytes((digits_runs / "bn-lstm-seed1" / name).read_bytes())
    first, second = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    old = {k: v for k, v in first.items() if not k.endswith("_nats")}
    curve = f"{json.dumps(old)}\n{json.dumps(second)}\n"
    (run / "metrics.jsonl").write_text(curve)
    result = read_checked(run / "result.json")
    result["metrics_sha256"] = hashlib.sha256(curve.encode()).hexdigest()
    write_checked(run / "result.json", result)
    results.publish(run, tmp_path / "to")
    (found,) = published.read_results(tmp_path / "to")
    assert found.curve[0].keys() == set(results.CURVE)
    line = published.mean_curve([found], "valid_batch_nats", "")
    assert (line.x, line.y) == ((24.0,), pytest.approx((second["valid_batch_nats"],), abs=5e-7))


def test_curves_for_tensorboard(text_run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(text_run / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (text_run / "metrics.jsonl").read_text().splitlines()]
    for name in ("train", "valid_batch", "valid_population"):
        scalars = events.Scalars(name)
        assert [(s.step, s.value) for s in scalars] == [
            (line["step"], pytest.approx(line[name])) for line in lines
        ]


@pytest.mark.parametrize("name", configs.names())
def test_every_config_is_one(name):
    found = configs.read_yaml(configs.find(name))
    settings = from_mapping(configs.for_model(found, "bn-lstm"))
    assert name.split("/")[-1].startswith(settings.task)


def test_settings_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--config", "mnist-code", "--seeds", "1,1"]
    done = invoke("train", "mnist", *options)
    assert re.search("seeds .*differ.* got '1,1'", words(done.output))
    done = invoke("train", "mnist", "--seeds", "a")
    assert re.search("seeds .*1,2,3, got 'a'", words(done.output))
    done = invoke("train", "digits", "--precision", "fp4")
    assert re.search("precision .*32-true", words(done.output))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "../../up"),
        ("tag", "../up"),
        ("tag", "/etc/x"),
        ("seed", "1/../../up"),
        ("tag", ".."),
        ("model", "a/b"),
    ],
)
def test_publishing_stays_in_its_folder(name, value, digits_runs, tmp_path):
    run, to = tmp_path / "run", tmp_path / "there" / "to"
    shutil.copytree(digits_runs / "bn-lstm-seed1", run)
    write_checked(run / "result.json", read_checked(run / "result.json") | {name: value})
    before = sorted(tmp_path.rglob("*"))
    done = invoke("publish", run, "--to", to)
    assert done.exit_code == 2
    assert "is not the result" in words(done.output)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_terminal_obeys_no_file(digits_runs, tmp_path):
    run = tmp_path / "runs" / "\x1b[31mred\x1b]0;title\x07"
    shutil.copytree(digits_runs / "bn-lstm-seed1", run)
    write_checked(run / "result.json", read_checked(run / "result.json") | {"steps": "\x1b[2J"})
    for arguments in (["runs", tmp_path / "runs"], ["evaluate", run / "nothing"]):
        assert "\x1b" not in invoke(*arguments).output
