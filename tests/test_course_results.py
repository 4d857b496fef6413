"""The stored results of lesson 09 are those of the code as it stands."""

import dataclasses

import pytest
import torch

import memlab
from memlab.course.results import accuracy

STORED = accuracy.results()
every_plan = pytest.mark.parametrize("name", accuracy.PLANS)


@every_plan
def test_each_plan_has_all_its_runs(name):
    plan = accuracy.PLANS[name]
    runs = [run for run in STORED["runs"] if run["name"] == name]
    assert [run["seed"] for run in runs] == [*range(plan.seeds)]
    for run in runs:
        assert run["plan"] == str(plan), "made by other settings: run the command again"
        assert [step for step, _, _ in run["points"]] == [*range(plan.every, plan.steps + 1, plan.every)]
    assert STORED["costs"].keys() == accuracy.PLANS.keys()


def test_it_says_where_it_comes_from():
    assert STORED["made"].keys() == {"command", "date", "torch", "python", "machine"}


@pytest.mark.parametrize("name", ["digits: checkpoint", "digits: pure bf16", "text: plain"])
def test_the_first_score_comes_out_again(name):
    plan = accuracy.PLANS[name]
    ((step, score, _),) = accuracy.train(plan, seed=0, steps=plan.every)
    stored_step, stored_score, _ = accuracy.curves(name)[0][0]
    assert step == stored_step
    assert score == pytest.approx(stored_score, abs={"digits": 6, "text": 0.1}[plan.task])


@pytest.mark.parametrize("name", ["digits: plain", "digits: checkpoint", "digits: micro-batches, depth 12"])
def test_its_peaks_are_those_of_today(name):
    cost = accuracy.cost(accuracy.PLANS[name])
    assert cost == {key: STORED["costs"][name][key] for key in cost}


@pytest.mark.parametrize("task", accuracy.TASKS)
def test_the_same_gradients_are_the_same_run(task):
    plain = accuracy.curves(f"{task}: plain")
    assert accuracy.curves(f"{task}: checkpoint") == accuracy.curves(f"{task}: optimizer in backward") == plain


def test_a_longer_run_begins_as_a_shorter_one():
    shorter, longer = accuracy.curves("text: plain"), accuracy.curves("text: plain, longer")
    assert [curve[: len(shorter[0])] for curve in longer] == shorter


@pytest.mark.parametrize("task", accuracy.TASKS)
def test_no_run_is_trained_on_what_is_scored(task):
    (inputs, _), (held_out, _) = accuracy.TASKS[task].data()
    seen = {tuple(sample.flatten().tolist()) for sample in inputs}
    twice = sum(tuple(sample.flatten().tolist()) in seen for sample in held_out)
    assert twice <= len(held_out) // 50, "passages of blanks or rulers may be there twice"


def test_each_sample_is_drawn_once_before_any_is_drawn_again():
    plan, count = accuracy.PLANS["digits: plain"], len(accuracy.digits()[0][1])
    drawn = accuracy.batches(plan, seed=3)
    first = torch.cat([next(drawn) for _ in range(-(-count // plan.batch))])
    assert sorted(first[:count].tolist()) == [*range(count)]


def test_float64_keeps_micro_batches_with_the_plain_run():
    plans = [
        dataclasses.replace(accuracy.PLANS["digits: plain"], dtype=torch.float64, strategy=strategy)
        for strategy in (memlab.Baseline(), memlab.MicroBatch(size=16))
    ]
    (one,), (other,) = (accuracy.train(plan, seed=0, steps=20) for plan in plans)
    assert one[1] == other[1]


def test_the_difference_is_that_of_pairs():
    assert accuracy.difference([90.0, 80.0], [91.0, 83.0]) == (2.0, pytest.approx(1.0))
