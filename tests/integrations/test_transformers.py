"""Hugging Face Transformers: `Trainer`, `save_pretrained` and `from_pretrained`."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import rbn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from rbn.integrations.transformers import ExactStatistics, GrowingStatistics  # noqa: E402

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 against float64, through seven steps

DATA = torch.Generator().manual_seed(5)
X = torch.randn(44, 7, 3, generator=DATA)
N = torch.randint(2, 8, (44,), generator=DATA)
Y = (X[:, 0, 0] > 0).long()


class Config(transformers.PretrainedConfig):
    model_type = "rbn-test"

    def __init__(self, hidden_size=5, zoneout=0.0, steps=None, **options):
        self.hidden_size, self.zoneout, self.steps = hidden_size, zoneout, steps
        super().__init__(**options)


class Fixed(transformers.PreTrainedModel):
    """A class without anything from rbn; statistics have a fixed length on request."""

    config_class = Config
    main_input_name = "x"

    def __init__(self, config):
        super().__init__(config)
        zoneout = (config.zoneout, config.zoneout)
        self.layer = rbn.BatchNormLSTM(
            3, config.hidden_size, batch_first=True, zoneout=zoneout, max_length=config.steps
        )
        self.head = nn.Linear(config.hidden_size, 2)
        self.evaluated = []
        self.post_init()

    def forward(self, x, lengths=None, labels=None):
        if not self.training:
            self.evaluated.append(copy.deepcopy(self.state_dict()))
        logits = self.head(self.layer(x, lengths=lengths)[1][0][-1])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Growing(GrowingStatistics, Fixed):
    pass


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return {"x": X[index], "lengths": N[index], "labels": Y[index]}


def trained(model_class=Growing, **options):
    torch.manual_seed(0)
    model = model_class(Config(**options))
    for _ in range(3):
        model(torch.randn(6, 7, 3))
        model(torch.randn(6, 4, 3))
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(X[:9], lengths=N[:9])["logits"]


@pytest.mark.parametrize(
    ("model_class", "options"), [(Growing, {}), (Growing, {"steps": 10}), (Fixed, {"steps": 10})]
)
def test_a_model_that_is_saved_and_loaded_gives_the_same(model_class, options, tmp_path):
    model = trained(model_class, **options)
    model.save_pretrained(tmp_path)
    new, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not new.training
    assert torch.equal(logits(new), logits(model))
    assert new.layer.stats_h_l0.count.tolist() == model.layer.stats_h_l0.count.tolist()
    new.train()
    assert new(torch.randn(4, 12, 3))["logits"].isfinite().all()  # longer sequences than before


def test_what_happens_without_either(tmp_path):
    """The reason for `GrowingStatistics`."""
    trained(Fixed).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatched"):
        Fixed.from_pretrained(tmp_path)


def test_shards_types_and_a_state_dict(tmp_path):
    model = trained()
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(Growing.from_pretrained(tmp_path)), logits(model))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    new = Growing.from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(logits(new), logits(model))
    half = Growing.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16
    assert torch.equal(half.layer.stats_h_l0.mean, model.layer.stats_h_l0.mean)  # not rounded
    found = half(X[:9].bfloat16(), lengths=N[:9])["logits"]
    # Weights and states of 8 bits, values of at most 1.
    torch.testing.assert_close(found.float(), logits(model), rtol=0.1, atol=0.05)


def test_a_checkpoint_without_the_layer(tmp_path):
    """A new layer starts as usual if `_init_weights` says so."""

    class WithStart(Growing):
        def _init_weights(self, module):
            super()._init_weights(module)
            if isinstance(module, rbn.BatchNormLSTM):
                module.reset_parameters()

    model = trained(WithStart)
    state = {k: v for k, v in model.state_dict().items() if k.startswith("head")}
    torch.manual_seed(3)
    new = WithStart.from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(new.head.weight, model.head.weight)
    w = new.layer.weight_ih_l0
    torch.testing.assert_close(w.T @ w, torch.eye(3))  # orthogonal, as new layers are
    assert new.layer.stats_h_l0.count.numel() == 0
    new.train()
    assert new(X)["logits"].isfinite().all()


def fitted(folder, callbacks=(), zoneout=0.0, **options):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = Growing(Config(zoneout=zoneout))
    options = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(44),
        eval_dataset=Rows(10),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def losses(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_exact(state, batches):
    """In float64: the average over these batches at these weights."""
    model = Growing(Config()).double()
    model.load_state_dict(state)
    rbn.update_population_stats(model, batches)
    for name, value in model.state_dict().items():
        if name.endswith("count"):
            assert torch.equal(state[name], value), name
        elif "stats_" in name:
            torch.testing.assert_close(state[name].double(), value, **TOLERANCE)


@pytest.mark.parametrize("callback", [False, True])
def test_every_way_to_evaluate_gives_the_same(callback, tmp_path):
    """During training, afterwards, and with a model loaded from the checkpoint."""
    callbacks = [ExactStatistics()] if callback else []
    trainer = fitted(tmp_path, callbacks)
    expected = losses(trainer, "eval_loss")
    assert len(expected) == 2
    assert trainer.evaluate()["eval_loss"] == expected[-1]
    wanted = logits(trainer.model.eval())
    trainer.save_model(tmp_path / "last")
    for path in ("last", f"checkpoint-{trainer.state.global_step}"):
        assert torch.equal(logits(Growing.from_pretrained(tmp_path / path)), wanted)


@pytest.mark.slow
def test_resuming_and_the_best_model(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = fitted(tmp_path, [ExactStatistics()], **options)
    found = trainer.evaluate()["eval_loss"]
    assert found == min(losses(trainer, "eval_loss"))
    trainer.args.num_train_epochs = 3
    trainer.train(resume_from_checkpoint=True)
    assert len(losses(trainer, "eval_loss")) == 3


def test_statistics_are_exact_when_they_are_used(tmp_path):
    rounds = []

    def run(model, batch):
        if model.layer.stats_h_l0.count.sum() == 0:  # the first of a pass
            rounds.append([])
        rounds[-1].append({"x": batch["x"].double(), "lengths": batch["lengths"]})
        return model(batch["x"], lengths=batch["lengths"])

    options = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    trainer = fitted(tmp_path, [ExactStatistics(forward=run)], save_strategy="no", **options)
    assert len(rounds) == 3
    states = trainer.model.evaluated[::2]  # each evaluation has two batches
    assert len(states) == 3
    for state, batches in zip(states, rounds, strict=True):
        assert sum(len(batch["x"]) for batch in batches) == 44
        check_exact(state, batches)


OPTIONS = {
    "within the epoch": {"eval_strategy": "steps", "eval_steps": 2},
    "accumulated": {"gradient_accumulation_steps": 4},
    "workers that stay": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_is_as_without_the_callback(options, tmp_path):
    found = []
    for callbacks in ([], [ExactStatistics()]):
        trainer = fitted(tmp_path / str(len(callbacks)), callbacks, 0.1, **options)
        random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
        weights = list(trainer.model.parameters())
        found.append((losses(trainer, "loss"), weights, random_states))
    plain, with_callback = found
    assert len(plain[0]) > 3
    assert plain[0] == with_callback[0]
    assert all(map(torch.equal, plain[1], with_callback[1]))
    assert torch.equal(plain[2][0], with_callback[2][0])
    assert plain[2][1] == with_callback[2][1]
    assert (plain[2][2] == with_callback[2][2]).all()


@pytest.mark.slow
def test_own_batches_and_limits(tmp_path):
    rows = [slice(0, 8), slice(8, 20)]
    batches = [{"x": X[r], "lengths": N[r], "labels": Y[r]} for r in rows]
    wide = [{"x": X[r].double(), "lengths": N[r]} for r in rows]
    trainer = fitted(tmp_path, [ExactStatistics(batches=batches)])
    check_exact(trainer.model.evaluated[-1], wide)
    trainer = fitted(tmp_path, [ExactStatistics(batches=batches, max_batches=1)])
    check_exact(trainer.model.evaluated[-1], wide[:1])
    trainer = fitted(tmp_path, [ExactStatistics(max_batches=4)])
    assert trainer.model.layer.stats_h_l0.count.max() == 4


def test_bfloat16(tmp_path):
    trainer = fitted(tmp_path, [ExactStatistics()], bf16=True)
    state = trainer.model.evaluated[-1]
    assert state["layer.stats_h_l0.mean"].dtype == torch.float32
    assert state["layer.stats_h_l0.count"][0] == 6
    assert trainer.evaluate()["eval_loss"] == losses(trainer, "eval_loss")[-1]


def test_integers_that_may_be_lengths_are_refused(tmp_path):
    """If taken for targets, padding would enter the statistics of a model trained with lengths."""
    with pytest.raises(TypeError, match="lengths"):
        fitted(tmp_path, [ExactStatistics(batches=[(X, N)])])
