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
    (one,), (other,) = (accuracy.train(plan, seed=0, steps=plan.every) for plan in plans)
    assert one[1] == other[1]


def test_results_of_a_task_reach_equally_far_back():
    for task in accuracy.TASKS:
        assert len({plan.every for plan in accuracy.PLANS.values() if plan.task == task}) == 1


def test_the_difference_is_that_of_pairs():
    found = accuracy.difference([90.0, 80.0], [91.0, 83.0])
    assert (found.mean, found.error) == (2.0, pytest.approx(1.0))
    assert str(found) == "+2.00 ± 1.00, no difference seen"


@pytest.mark.parametrize(
    ("mean", "error", "more_is_better", "less_is_better"),
    [
        (3.1, 1.0, "better", "worse"),
        (-3.1, 1.0, "worse", "better"),
        (3.0, 1.0, "no difference seen", "no difference seen"),
        (0.0, 0.0, "no difference seen", "no difference seen"),
        (2.0, 0.0, "better", "worse"),
    ],
)
def test_a_verdict_is_beyond_three_errors(mean, error, more_is_better, less_is_better):
    assert accuracy.Difference(mean, error, better=1).verdict == more_is_better
    assert accuracy.Difference(mean, error, better=-1).verdict == less_is_better


@pytest.mark.parametrize("unit", ["seconds", "flops"])
@pytest.mark.parametrize("other", ["digits: checkpoint", "digits: micro-batches, depth 12"])
def test_equal_cost_is_as_many_steps_as_fit(other, unit):
    name = "digits: plain, depth 3"
    one, its = (STORED["costs"][plan][unit] for plan in (name, other))
    steps, its_steps = accuracy.equal(name, other, unit)
    assert steps <= accuracy.PLANS[name].steps
    assert its_steps <= accuracy.PLANS[other].steps
    assert steps * one <= its_steps * its < (steps + 1) * one
    assert its_steps == accuracy.PLANS[other].steps or steps + its / one >= accuracy.PLANS[name].steps


def test_a_winner_has_its_name():
    verdicts = {1.0: "large", -1.0: "small", 0.1: "no difference seen"}
    for mean, winner in verdicts.items():
        assert accuracy.Difference(mean, 0.1, better=1).winner("small", "large") == winner
