# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks: what hears of a training by the Trainer, and optimizers made for it."""

import copy
import math
import warnings

import pytest
import torch
from equivalence.trainer_cases import Model, data_of
from multiprocess.cases_checkpoints import folder
from multiprocess.replicas import close, share, whole
from multiprocess.steps import train_step
from soak import some
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import lamina
from lamina.errors import ConfigError
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD
from lamina.trainer import (
    Callback,
    ComposerClassifier,
    Evaluator,
    Event,
    HuggingFaceModel,
    Trainer,
    loggers,
    monitors,
    schedulers,
)
from lamina.trainer.gradient_clipping import GradientClipping
from lamina.trainer.optimizers import DecoupledAdamW, DecoupledSGDW

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
LAYOUTS = ({}, {"shard_optimizer_state": True}, SHARDED)


def trainer_of(keys, loggers=None, **options):
    model, data = Model("mean"), data_of(12, 1)
    loader = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
    options = {"max_duration": "1ep", "optimizers": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)} | options
    given = {"model": model, "train_dataloader": loader} | options
    return Trainer(loggers=loggers, seed=1, lamina_config={"timeout_s": 60} | keys, **given)


def by_hand(clip=None, rates=(0.1, 0.1, 0.1)):
    """One process that trains with the batches of both ranks. Returns the norms of gradients of each batch, and the
    model."""
    model, data, norms = Model("mean"), data_of(12, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch, rate in zip(DataLoader(data, 4), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model.loss(model(batch), batch).mean().backward()
        if clip is not None:
            clip(model.parameters())
        norms.append({name: parameter.grad.norm().item() for name, parameter in model.named_parameters()})
        optimizer.step()
    return norms, model


def require_trains_like(expected, keys, **options):
    trainer = trainer_of(keys, **options)
    trainer.fit()
    state = trainer.state.model.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
    trainer.close()


def case_norms_of_gradients_are_those_of_one_process():
    expected, _ = by_hand()
    for keys in LAYOUTS:
        memory = loggers.InMemoryLogger()
        trainer = trainer_of(keys, memory, callbacks=[monitors.OptimizerMonitor(), monitors.LRMonitor()])
        trainer.fit()
        for name in expected[0]:
            found = [value for _, value in memory.data[f"l2_norm/grad/{name}"]]
            assert found == pytest.approx([norms[name] for norms in expected], rel=1e-12)
        total = [math.hypot(*norms.values()) for norms in expected]
        assert [value for _, value in memory.data["l2_norm/grad/global"]] == pytest.approx(total, rel=1e-12)
        assert [(time.batch, rate) for time, rate in memory.data["lr-SGD/group0"]] == [(1, 0.1), (2, 0.1), (3, 0.1)]
        trainer.close()


class Parts(Model):
    """Its losses have names; copy 1 has one more, before the others."""

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch).mean()
        own = {"own": loss.detach()} if lamina.rank() == 1 and self.has_own else {}
        return {**own, "half": loss / 2, "total": loss}


def case_losses_of_copies_are_added_up_by_name():
    for has_own in (False, True):
        model, data = Parts("mean"), data_of(12, 1)
        model.has_own = has_own
        loader = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = trainer_of({}, model=model, train_dataloader=loader, optimizers=optimizer)
        trainer.fit()
        losses = trainer.state.total_loss_dict
        assert list(losses) == ["loss/train/half", "loss/train/total"]
        assert losses["loss/train/total"] == pytest.approx(2 * losses["loss/train/half"], rel=1e-12)
        assert len(set(allgather(tuple(losses.items()), WORLD))) == 1
        trainer.close()


def case_clipping_is_that_of_one_process():
    clips = {
        GradientClipping("norm", 0.05): lambda parameters: clip_grad_norm_(parameters, 0.05),
        GradientClipping("value", 0.01): lambda parameters: clip_grad_value_(parameters, 0.01),
    }
    for algorithm, clip in clips.items():
        _, expected = by_hand(clip)
        for keys in LAYOUTS:
            require_trains_like(expected, keys, algorithms=algorithm)


class Follows(Callback):
    """Steps a schedule as a loop does."""

    def __init__(self, *given):
        self.given = given

    def fit_start(self, state, logger):
        state.schedulers = schedulers.bound_schedulers(self.given, state)

    def batch_end(self, state, logger):
        for scheduler in state.schedulers:
            scheduler.step()


def case_a_schedule_is_that_of_one_process():
    _, expected = by_hand(rates=[0.1 * part * 0.5 for part in (1, 2 / 3, 1 / 3)])
    for keys in LAYOUTS:
        follows = Follows(schedulers.LinearScheduler(), lambda state: 0.5)
        require_trains_like(expected, keys, callbacks=follows)


class RatesOfBatches(Callback):
    def __init__(self):
        self.rates = []

    def batch_start(self, state, logger):
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def case_a_schedule_is_that_of_the_time_and_the_duration_that_fit_has_set():
    seen = RatesOfBatches()
    trainer = trainer_of({}, schedulers=schedulers.LinearScheduler(), callbacks=seen)
    trainer.fit()
    trainer.fit(duration="3ba")
    trainer.fit(reset_time=True)
    rates = [3 / 3, 2 / 3, 1 / 3, 3 / 6, 2 / 6, 1 / 6, *(left / 6 for left in (6, 5, 4, 3, 2, 1))]
    assert seen.rates == pytest.approx([0.1 * rate for rate in rates])
    trainer.close()


def measured_by_hand():
    """The measures of DecoupledAdamW in one process, of each update; from values before and after it."""
    model, data, seen = Model("mean"), data_of(12, 1), []
    optimizer = DecoupledAdamW(model.parameters(), lr=0.1, weight_decay=9e-4)
    for batch, rate in zip(DataLoader(data, 4), (0.1, 0.05, 0.025), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model.loss(model(batch), batch).mean().backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        measures = {}
        for name, parameter in model.named_parameters():
            gradient, value, moments = parameter.grad, parameter.detach(), optimizer.state[parameter]
            moment, update = moments["exp_avg"], before[name] - value
            cosine = nn.functional.cosine_similarity
            measures |= {
                f"l2_norm/moment/{name}": moment.norm(),
                f"l2_norm_ratio/moment_grad/{name}": gradient.norm() / moment.norm(),
                f"cosine/moment_grad/{name}": cosine(gradient.flatten(), moment.flatten(), dim=0),
                f"l2_norm/param/{name}": value.norm(),
                f"l2_norm/second_moment_sqrt/{name}": moments["exp_avg_sq"].norm().sqrt(),
                f"l2_norm/update/{name}": update.norm(),
                f"cosine/update_grad/{name}": cosine(gradient.flatten(), update.flatten(), dim=0),
                f"l2_norm_ratio/update_param/{name}": update.norm() / value.norm(),
            }
        seen.append({name: value.item() for name, value in measures.items()})
    return seen


class Halves(Callback):
    def batch_end(self, state, logger):
        state.optimizers[0].param_groups[0]["lr"] /= 2


def case_moments_and_updates_are_those_of_one_process():
    expected = measured_by_hand()
    for keys in (*LAYOUTS, SHARDED | {"sdp_param_persistence_threshold": 20}):
        model, memory, data = Model("mean"), loggers.InMemoryLogger(), data_of(12, 1)
        options = {"optimizers": DecoupledAdamW(model.parameters(), lr=0.1, weight_decay=9e-4)}
        options |= {"lamina_config": {"timeout_s": 60} | keys, "callbacks": [Halves(), monitors.OptimizerMonitor()]}
        loader = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
        trainer = Trainer(model=model, train_dataloader=loader, loggers=memory, max_duration="1ep", seed=1, **options)
        trainer.fit()
        for name in expected[0]:
            found = [value for _, value in memory.data[name]]
            assert found == pytest.approx([measures[name] for measures in expected], rel=1e-9), name
        trainer.close()


def decoupled(kind, parameters):
    return kind(parameters, lr=0.1, weight_decay=9e-4, **({"momentum": 0.9} if kind is DecoupledSGDW else {}))


def case_decoupled_decays_are_those_of_one_process():
    for keys in LAYOUTS:
        for kind in (DecoupledSGDW, DecoupledAdamW):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
            theirs = decoupled(kind, plain.parameters())
            lamina.init(ddp=True, microbatches=1, timeout_s=60, **keys)
            model = lamina.DistributedModel(copy.deepcopy(plain))
            ours = lamina.DistributedOptimizer(decoupled(kind, model.parameters()))
            step = train_step(model)
            for rate in (0.1, 0.05, 0.1):
                for optimizer in (theirs, ours):
                    optimizer.zero_grad()
                    optimizer.param_groups[0]["lr"] = rate
                plain(whole()).square().mean().backward()
                step(share())
                theirs.step()
                ours.step()
            for name, value in model.state_dict().items():
                close(value, plain.state_dict()[name])
            lamina.shutdown()


def case_masters_decay_in_full_precision():
    for keys in ({}, {"shard_optimizer_state": True}):
        torch.manual_seed(0)
        lamina.init(ddp=True, microbatches=1, timeout_s=60, bf16=True, **keys)
        model = lamina.DistributedModel(nn.Linear(6, 5, bias=False))
        before = model.module.weight.detach().float().clone()
        optimizer = DecoupledSGDW(model.parameters(), lr=0.1, weight_decay=5e-4)
        optimizer = lamina.DistributedOptimizer(optimizer)
        step = train_step(model)
        for _ in range(20):  # each changes half values by less than they are rounded by
            optimizer.zero_grad()
            step(torch.zeros(2, 6))
            optimizer.step()
        (master,) = optimizer.state_dict()["masters"].values()
        torch.testing.assert_close(master, before * (1 - 5e-4) ** 20, rtol=1e-6, atol=0)
        torch.testing.assert_close(model.module.weight.detach(), master.bfloat16(), rtol=0, atol=0)
        lamina.shutdown()


class Stops(Callback):
    def __init__(self):
        self.values = iter((0.5, 0.6, 0.55, 0.58, 0.59, 0.9))

    def batch_end(self, state, logger):
        state.train_metric_values = {"accuracy": next(self.values)}


def case_a_training_ends_when_it_has_not_become_better():
    stopper = monitors.EarlyStopper("accuracy", "train", patience="2ba")
    trainer = trainer_of({}, callbacks=[Stops(), stopper], max_duration="6ba")
    trainer.fit()
    assert trainer.state.timestamp.batch == 5 and stopper.best.item() == pytest.approx(0.6)
    again = monitors.EarlyStopper("accuracy", "train")
    again.load_state_dict(stopper.state_dict())
    assert again.best == stopper.best and again.best_occurred == stopper.best_occurred
    threshold = monitors.ThresholdStopper("accuracy", "train", 0.57, stop_on_batch=True)
    trainer = trainer_of({}, callbacks=[Stops(), threshold], max_duration="6ba")
    trainer.fit()
    assert trainer.state.timestamp.batch == 2
    trainer = trainer_of({}, callbacks=monitors.EarlyStopper("other", "train", patience="2ba"))
    with pytest.raises(ConfigError, match="'train' has no metric 'other'; it has loss/train/total"):
        trainer.fit()
    trainer.close()


def case_an_evaluation_ends_a_training():
    data = data_of(6, 2)
    options = {"eval_dataloader": DataLoader(data, 2, sampler=lamina.dist.get_sampler(data)), "max_duration": "4ep"}
    stopper = monitors.EarlyStopper("loss", "eval", comp=lambda value, best: value > best + 100, patience="1ep")
    memory = loggers.InMemoryLogger()
    trainer = trainer_of({}, memory, callbacks=[stopper, monitors.SpeedMonitor(2), monitors.MemoryMonitor()], **options)
    trainer.fit()
    assert trainer.state.timestamp.epoch == 3  # two after the first
    samples = allgather({name: values for name, values in memory.data.items() if name.startswith("memory/")}, WORLD)
    assert samples[0] == samples[1] and samples[0]["memory/peak_process_mem"][0][1] > 2**20
    names = [f"wall_clock/{name}" for name in ("train", "val", "total")]
    train, val, total = (memory.get_timeseries(name)[name] for name in names)
    assert (train + val == total).all() and val[-1] > 0 and (val[:3] == 0).all()
    for ranks in zip(*allgather([train.tolist(), val.tolist()], WORLD), strict=True):
        assert ranks[0] == ranks[1]
    (_, speed), *_ = memory.data["throughput/samples_per_sec"]
    assert speed > 0
    trainer.close()


def case_every_rank_has_a_file_of_its_own():
    with folder() as path:
        logger = loggers.FileLogger(f"{path}/{{run_name}}-{{rank}}.txt")
        print(f"rank {lamina.dist.get_global_rank()} begins")
        trainer = trainer_of({}, logger, run_name="named")
        trainer.fit()
        trainer.close()
        lines = (path / f"named-{lamina.dist.get_global_rank()}.txt").read_text().splitlines()
        lamina.init(timeout_s=60)
        lamina.barrier()  # the first that leaves takes the folder away
    assert lines[0] == f"[stdout]: rank {lamina.dist.get_global_rank()} begins"
    assert [line for line in lines if "global_step" in line] == [
        f"[metric][batch={batch}]: trainer/global_step: {batch} " for batch in range(3)
    ]


class RaisesAt(Callback):
    def __init__(self, event, ranks):
        self.event, self.ranks = event, ranks

    def run_event(self, event, state, logger):
        if event is self.event and lamina.dist.get_global_rank() in self.ranks:
            raise ArithmeticError(f"planted in {event}")


IN_A_STEP = [Event(name) for name in ("before_forward", "after_forward", "before_loss", "after_loss")]
IN_A_STEP += [Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD]


def case_a_trainer_follows_one_whose_callback_raised():
    _, expected = by_hand()
    every = [(event, (0, 1)) for event in Event] + [(event, (1,)) for event in IN_A_STEP]
    for event, ranks in some(every, 4):
        for keys in ({}, SHARDED):
            data = data_of(6, 2)
            evaluated = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
            with pytest.raises(ArithmeticError, match=f"planted in {event}"):
                trainer = trainer_of(keys, callbacks=RaisesAt(event, ranks), eval_dataloader=evaluated)
                trainer.fit()
                trainer.predict(evaluated)
            require_trains_like(expected, keys)


class Classified(Dataset):
    """Points of four classes, 11 of them: ranks have 6 and 5."""

    def __len__(self):
        return 11

    def __getitem__(self, number):
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return x, x[:4].argmax()


def classifier(**options):
    torch.manual_seed(0)
    model, data = ComposerClassifier(nn.Linear(8, 4), num_classes=4), Classified()
    of = {"sampler": lamina.dist.get_sampler(data)}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"train_dataloader": DataLoader(data, 2, **of), "max_duration": "2ep", "optimizers": optimizer} | options
    return Trainer(model=model, seed=1, lamina_config={"timeout_s": 60}, progress_bar=False, **given)


def case_metrics_are_found_by_their_old_and_their_new_names():
    data, memory = Classified(), loggers.InMemoryLogger()
    stoppers = [monitors.EarlyStopper(name, "eval", patience=9) for name in ("Accuracy", "MulticlassAccuracy")]
    loader = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
    for named in "Accuracy", "MulticlassAccuracy":
        evaluator = Evaluator(label="eval", dataloader=loader, metric_names=[named])
        trainer = classifier(eval_dataloader=evaluator, callbacks=stoppers, loggers=memory)
        trainer.fit()
        values, metrics = trainer.state.eval_metric_values, trainer.state.eval_metrics["eval"]
        assert list(values) == [named]
        assert values["Accuracy"] == values["MulticlassAccuracy"] == values.get("Accuracy")
        assert metrics["Accuracy"] is metrics["MulticlassAccuracy"]
        assert "CrossEntropy" not in metrics and "BinaryF1Score" not in values
        for path in "metrics/eval/Accuracy", "metrics/eval/MulticlassAccuracy":
            assert memory.most_recent_values[path] == values["Accuracy"]
            assert len(memory.get_timeseries(path)[path]) >= 2
        trainer.close()


def case_a_checkpoint_by_hand_is_loaded():
    with folder() as path:
        trainer = classifier(max_duration="3ba")
        with pytest.raises(ConfigError, match="needs none"):
            trainer.save_checkpoint_to_save_folder()
        trainer.fit()
        place = trainer.save_checkpoint(str(path / "{run_name}" / "at-ba{batch}-rank{rank}.pt"))
        weights = trainer.save_checkpoint(str(path / "weights.pt"), weights_only=True)
        assert trainer.saved_checkpoints == [place, weights]
        run = trainer.state.run_name
        assert place == str(path / run / "at-ba3")
        trainer.fit(duration="2ba")
        expected = trainer.state.model.state_dict()
        trainer.close()
        trainer = classifier(max_duration="5ba", load_path=place)
        assert trainer.state.timestamp.batch.value == 3
        trainer.fit()
        assert all(torch.equal(expected[name], value) for name, value in trainer.state.model.state_dict().items())
        trainer.close()
        trainer = classifier(max_duration="1ba", load_path=weights, load_weights_only=True)
        assert trainer.state.timestamp.batch.value == 0
        trainer.close()


def case_no_checkpoint_stays_where_none_is_to_be_kept():
    with folder() as path:
        trainer = classifier(
            save_folder=str(path / "saved"), save_num_checkpoints_to_keep=0, load_exclude_algorithms=[]
        )
        trainer.fit()
        trainer.close()
        assert [each.name for each in path.rglob("*.safetensors")] == []


class Predicted(Callback):
    def __init__(self):
        self.heard = []

    def run_event(self, event, state, logger):
        if event.is_predict:
            self.heard.append(event.value)


def case_predictions_are_those_of_the_model():
    data, heard = Classified(), Predicted()
    for keys in {}, {"partitions": 2}, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": None}:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        plain = copy.deepcopy(layers).eval()
        model = ComposerClassifier(layers, num_classes=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = {"lamina_config": {"timeout_s": 60} | keys, "callbacks": [heard], "max_duration": "1ep"}
        trainer = Trainer(model=model, optimizers=optimizer, **given)
        heard.heard.clear()
        found = trainer.predict(DataLoader(data, 2, sampler=lamina.dist.get_sampler(data)))
        copies = 1 if "partitions" in keys else 2
        own = range(lamina.rank() if copies == 2 else 0, 11, copies)
        expected = plain(torch.stack([data[number][0] for number in own])).split(2)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert heard.heard.count("predict_batch_end") == -(-11 // (2 * copies))
        assert heard.heard[0] == "predict_start" and heard.heard[-1] == "predict_end"
        assert (
            trainer.predict(DataLoader(data, 2, sampler=lamina.dist.get_sampler(data)), 1, return_outputs=False) == []
        )
        trainer.close()


def case_modules_that_a_tuple_hides_are_named_where_ranks_have_others():
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = (nn.ModuleList([nn.Linear(4, 4)]),)
            self.head = nn.Linear(4, 4)

    for is_alike in False, True:
        lamina.init(ddp=True, timeout_s=60)
        torch.manual_seed(0 if is_alike else lamina.rank())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lamina.DistributedModel(nn.Sequential(Hiding()))
        texts = [str(each.message) for each in told]
        assert any(text.startswith("0.blocks: modules in a list") for text in texts) == (not is_alike), texts
        lamina.shutdown()


def case_a_model_of_transformers_is_made_anew_of_its_checkpoint():
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    sizes = {"vocab_size": 4, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    with folder() as path:
        torch.manual_seed(0)
        model = HuggingFaceModel(GPT2LMHeadModel(GPT2Config(**sizes)), fast)
        data = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 4
        loader = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
        given = {"optimizers": torch.optim.SGD(model.parameters(), 0.1), "lamina_config": {"timeout_s": 60}}
        options = {"max_duration": "1ep", "save_folder": str(path / "saved"), "progress_bar": False}
        trainer = Trainer(model=model, train_dataloader=loader, **given, **options)
        trainer.fit()
        trainer.close()
        place = str(path / "saved" / "latest-rank0.pt")
        made, with_it = HuggingFaceModel.hf_from_composer_checkpoint(place)
        assert type(made) is GPT2LMHeadModel and made.config.n_embd == 8
        assert with_it("b a")["input_ids"] == fast("b a")["input_ids"] == [2, 1]
        kind = "transformers.AutoModelForSequenceClassification"
        other, _ = HuggingFaceModel.hf_from_composer_checkpoint(place, kind, {"num_labels": 3, "pad_token_id": 0})
        assert type(other).__name__ == "GPT2ForSequenceClassification" and other.score.out_features == 3
        again = HuggingFaceModel(other, with_it)
        given |= {"optimizers": torch.optim.SGD(again.parameters(), 0.1), "max_duration": 1}
        trainer = Trainer(model=again, load_path=place, load_weights_only=True, progress_bar=False, **given)
        loaded = again.state_dict()["model.transformer.wte.weight"]
        trainer.close()
        assert torch.equal(loaded, model.model.transformer.wte.weight)
        # As Composer's files have it.
        file = path / f"composers{lamina.dist.get_global_rank()}.pt"
        torch.save({"state": {"integrations": {"huggingface": model.get_metadata()}}}, file)
        made, with_it = HuggingFaceModel.hf_from_composer_checkpoint(file)
        assert type(made) is GPT2LMHeadModel and with_it("b a")["input_ids"] == [2, 1]
        torch.save({"state": {}}, file)
        with pytest.raises(ConfigError, match="it has no model of transformers"):
            HuggingFaceModel.hf_from_composer_checkpoint(file)
        torch.save({"state": Classified()}, file)
        with pytest.raises(ConfigError, match="cannot be read without executing"):
            HuggingFaceModel.hf_from_composer_checkpoint(file)


def case_metrics_that_an_evaluator_names_are_added():
    model = HuggingFaceModel(GPT2LMHeadModel(GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=2)))
    model.add_eval_metrics(Evaluator(label="eval", dataloader=[], metric_names=["LanguageCrossEntropy"]))
    assert list(model.get_metrics()) == ["LanguageCrossEntropy"] and not model.get_metrics(is_train=True)
    with pytest.raises(ConfigError, match="'MIoU' is no metric that is made without arguments"):
        model.add_eval_metrics(Evaluator(label="eval", dataloader=[], metric_names=["MIoU"]))


def case_names_of_composers_say_what_is_there_in_their_place():
    trainer = classifier(fsdp_config={}, deepspeed_config=None)
    assert trainer.fsdp_enabled and not trainer.deepspeed_enabled and trainer.state.fsdp_enabled
    assert trainer.state.previous_timestamp == trainer.state.timestamp
    assert not hasattr(trainer.state, "state_dict") and not hasattr(trainer, "nothing_like_it")
    for of, name in (
        (trainer, "export_for_inference"),
        (trainer.state, "load_state_dict"),
        (trainer.engine, "register_pass"),
    ):
        with pytest.raises(ConfigError, match=f"{name} of Composer's is not there: "):
            getattr(of, name)
    trainer.logger.upload_file("there.txt", "here.txt")  # nobody does
    assert not trainer.logger.has_file_upload_destination()
    assert Event.PREDICT_START.is_predict and Event.EVAL_END.is_after_event and Event.BATCH_START.is_before_event
    assert Event.BEFORE_FORWARD.canonical_name == "forward" and Event.EVAL_BATCH_END.canonical_name == "eval_batch"
    trainer.close()
