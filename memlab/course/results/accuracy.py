"""Lesson 09's long results: what training to a real score comes to with each technique, and under one memory limit.

    python -m memlab.course.results.accuracy                    # all that is not there yet: half an hour of one core
    python -m memlab.course.results.accuracy --only text --seeds 0 1
    python -m memlab.course.results.accuracy --fresh            # from the beginning

Each run that is finished is stored in `accuracy.json` at once, so that a run that was broken off goes on where it was.
The lesson's cells train with the same `train`, for a few steps; `tests/test_course_results.py` holds the file to it.

Rule 1. A plan and a seed decide the result. The seed gives the initial weights and the order of the data, and plans of
        one network and one batch size have these in common: their runs differ by the technique alone.
Rule 2. The score is that of samples that no run is trained on, the same ones for all.
Rule 3. The learning rate is constant. So the first half of a run is what a run of half the length would be, and a curve
        can be read at equal steps, at equal samples and at equal time.
Rule 4. A result is the mean of five scores, and these lie equally far apart in all runs of a task.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import zoo
from ...measure import measure
from ...step import TrainingStep
from ...strategies import Baseline, Checkpoint, MicroBatch, MixedPrecision, OptimizerInBackward, Strategy

FILE = Path(__file__).with_suffix(".json")
Batch = tuple[Tensor, Tensor]

# -------------------------------------------------------------------------------------------------------------- tasks

CONTEXT = 64


@dataclass(frozen=True)
class Task:
    """What is learnt: samples as inputs and targets, and how well a model does on a batch of them."""

    data: Callable[[], tuple[Batch, Batch]]  # for training, held out
    network: Callable[..., nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[nn.Module, Batch], float]
    unit: str
    better: int  # 1 where more is better, -1 where less is
    digits: int  # of a score, after the point


def _split(inputs: Tensor, targets: Tensor, every: int, most: int) -> tuple[Batch, Batch]:
    """Every n-th sample is held out, and at most so many of them are."""
    held_out = torch.arange(len(inputs)) % every == 0
    return (inputs[~held_out], targets[~held_out]), (inputs[held_out][:most], targets[held_out][:most])


@cache
def digits() -> tuple[Batch, Batch]:
    """scikit-learn's 1,797 handwritten digits: images (n, 1, 8, 8) from 0 to 1, and labels; every third is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return _split(images, torch.tensor(data.target, dtype=torch.int64), every=3, most=599)


@cache
def characters() -> tuple[str, dict[str, int]]:
    """The manual that every Python carries for `help()`, and a number for each of its characters."""
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())
    return text, {character: number for number, character in enumerate(sorted(set(text)))}


@cache
def text() -> tuple[Batch, Batch]:
    """The manual in passages of `CONTEXT` characters, each with the characters after its own; every tenth passage is
    held out, and 160 of these are scored."""
    whole, numbers = characters()
    coded = torch.tensor([numbers[character] for character in whole])
    passages = coded[: (len(coded) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    targets = coded[1 : passages.numel() + 1].view(-1, CONTEXT)
    stride = len(passages[::10]) // 160  # from all over the manual
    (inputs, outputs), (held_out, its) = _split(passages, targets, every=10, most=len(passages))
    return (inputs, outputs), (held_out[::stride][:160], its[::stride][:160])


def entropies() -> tuple[float, float]:
    """What a model would reach on the manual, in bits per character, that knows how often each character is, and one
    that knows how often each follows each: of the text itself, so neither is to be beaten by counting."""
    whole, _ = characters()
    single, pairs = Counter(whole[:-1]), Counter(pairwise(whole))
    total = pairs.total()
    unigram = -sum(n / total * math.log2(n / total) for n in single.values())
    bigram = -sum(n / total * math.log2(n / single[first]) for (first, _), n in pairs.items())
    return unigram, bigram


def conv_net(norm: str = "group", **sizes: int) -> nn.Module:
    """The zoo's ResNet, with GroupNorm (each sample by itself) in place of BatchNorm unless that is asked for."""
    model = zoo.ResNet(**sizes)
    if norm == "group":
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(4, child.num_features))
    return model


def gpt(**sizes: Any) -> nn.Module:
    """The zoo's GPT over the manual's characters; with larger weights, as a small width wants."""
    model = zoo.GPT(vocab=len(characters()[1]), context=CONTEXT, **sizes)
    for parameter in model.blocks.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of the images whose digit is named right, in per cent."""
    images, labels = batch
    return 100 * float((model(images).argmax(dim=1) == labels).double().mean())


def bits(model: nn.Module, batch: Batch) -> float:
    """Cross-entropy in bits per character."""
    return float(zoo.gpt_loss(model, batch)) / math.log(2)


TASKS = {
    "digits": Task(digits, conv_net, zoo.classification_loss, accuracy, "% of held-out digits right", 1, 2),
    "text": Task(text, gpt, zoo.gpt_loss, bits, "bits per held-out character", -1, 4),
}

# -------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Plan:
    """All that decides a training but its seed. A score is taken every `every` steps; `dtype` is that of everything."""

    task: str
    sizes: tuple[tuple[str, Any], ...]
    batch: int
    steps: int
    every: int
    seeds: int
    rate: float
    strategy: Strategy = field(default_factory=Baseline)
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.task}, {sizes}, {self.strategy!r}, batch {self.batch}, rate {self.rate:g}, {kind}"


def _plans() -> Iterator[tuple[str, Plan]]:
    deep = Plan("digits", (("width", 8), ("depth", 8)), batch=60, steps=640, every=40, seeds=4, rate=2e-3)
    small = Plan("text", (("width", 64), ("depth", 2)), batch=16, steps=1000, every=50, seeds=4, rate=3e-3)
    for plain, micro in ((deep, MicroBatch(size=16)), (small, MicroBatch(size=4))):
        of = plain.task
        yield f"{of}: plain", plain
        yield f"{of}: checkpoint", replace(plain, strategy=Checkpoint())
        yield f"{of}: micro-batches", replace(plain, strategy=micro)
        yield f"{of}: optimizer in backward", replace(plain, strategy=OptimizerInBackward())
        yield f"{of}: bf16 autocast", replace(plain, strategy=MixedPrecision("bf16"))
        yield f"{of}: pure bf16", replace(plain, dtype=torch.bfloat16)
        yield f"{of}: batch / 4", replace(plain, batch=plain.batch // 4, steps=4 * plain.steps)
    yield "digits: checkpoint + micro-batches", replace(deep, strategy=Checkpoint() + MicroBatch(size=16))
    yield "digits: small rate", replace(deep, rate=3e-4)
    yield "digits: small rate, pure bf16", replace(deep, rate=3e-4, dtype=torch.bfloat16)
    norm = replace(deep, sizes=(*deep.sizes, ("norm", "batch")), seeds=3)
    yield "digits: BatchNorm", norm
    yield "digits: BatchNorm, checkpoint", replace(norm, strategy=Checkpoint())
    yield "digits: BatchNorm, micro-batches", replace(norm, strategy=MicroBatch(size=6))

    # Under one limit: the largest that fit, and the plain one for as long as the larger ones take.
    deeper, wide = (("width", 8), ("depth", 12)), (("width", 124), ("depth", 2))
    yield "digits: plain, depth 3", replace(deep, sizes=(("width", 8), ("depth", 3)), steps=4 * deep.steps)
    yield "digits: micro-batches, depth 12", replace(deep, sizes=deeper, strategy=MicroBatch(size=16))
    yield "text: plain, longer", replace(small, steps=4 * small.steps)
    yield "text: checkpoint, depth 7", replace(small, sizes=(("width", 64), ("depth", 7)), strategy=Checkpoint())
    yield "text: micro-batches, width 124", replace(small, sizes=wide, strategy=MicroBatch(size=4))


PLANS = dict(_plans())

# ----------------------------------------------------------------------------------------------------------- training

Point = tuple[int, float, str]  # after so many steps: the score, and a fingerprint of the weights


def make_step(plan: Plan, seed: int) -> TrainingStep:
    """The network with the seed's weights, its optimizer, and a batch to begin with."""
    task = TASKS[plan.task]
    (inputs, targets), _ = task.data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.network(**dict(plan.sizes)).to(plan.dtype)
    first = _cast(inputs[: plan.batch], plan.dtype), targets[: plan.batch]
    return TrainingStep(model, first, task.loss, torch.optim.AdamW(model.parameters(), lr=plan.rate))


def batches(plan: Plan, seed: int) -> Iterator[Tensor]:
    """Which samples each step learns from, for ever: all of them once, in random order, then all again."""
    count, left = len(TASKS[plan.task].data()[0][1]), torch.empty(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    while True:
        if len(left) < plan.batch:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[: plan.batch]
        left = left[plan.batch :]


def train(plan: Plan, seed: int, steps: int | None = None) -> list[Point]:
    """Train by a plan, for `steps` steps or as many as it says: the points of its curve."""
    task, step, points = TASKS[plan.task], make_step(plan, seed), list[Point]()
    (inputs, targets), held_out = task.data()
    for number, chosen in enumerate(islice(batches(plan, seed), steps or plan.steps), start=1):
        step.batch = _cast(inputs[chosen], plan.dtype), targets[chosen]
        with plan.strategy.applied(step) as runner:
            runner.run()
        if number % plan.every == 0:
            points.append((number, _score(task, step.model, held_out), fingerprint(step.model)))
    return points


def _score(task: Task, model: nn.Module, held_out: Batch) -> float:
    """In eval mode, and in the precision of the model's weights."""
    dtype = next(model.parameters()).dtype
    model.eval()
    with torch.no_grad():
        score = task.score(model, (_cast(held_out[0], dtype), held_out[1]))
    model.train()
    return round(score, 4)


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def fingerprint(model: nn.Module) -> str:
    """Equal for models whose parameters are equal to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


# --------------------------------------------------------------------------------------------------------------- cost


def cost(plan: Plan) -> dict[str, int]:
    """Of one step: tensor peak in bytes, floating-point operations; and the parameters' number."""
    step = make_step(plan, seed=0)
    trace = measure(step, plan.strategy, allocator=False)
    count = sum(parameter.numel() for parameter in step.model.parameters())
    return {"parameters": count, "peak": trace.tensor_peak_bytes, "flops": trace.flops}


def seconds(plans: dict[str, Plan], rounds: int = 15) -> dict[str, float]:
    """Of one step: the median over rounds in which each plan runs one after the other, so that what else the machine
    does meets all alike."""
    steps = {name: make_step(plan, seed=0) for name, plan in plans.items()}
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            start = time.process_time()
            with plan.strategy.applied(steps[name]) as runner:
                runner.run()
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(its[2:]) for name, its in taken.items()}


# --------------------------------------------------------------------------------------------------------------- file


def results() -> dict[str, Any]:
    """What is stored: `made`, `entropies`, `costs` by the plan's name, and `runs`, a record each."""
    return json.loads(FILE.read_text("utf-8")) if FILE.exists() else {"made": {}, "costs": {}, "runs": []}


def curves(name: str) -> list[list[Point]]:
    """A plan's curve for each of its seeds, in order."""
    runs = sorted((run["seed"], run["points"]) for run in results()["runs"] if run["name"] == name)
    return [[(step, score, weights) for step, score, weights in points] for _, points in runs]


def scores(name: str, step: int | None = None) -> list[float]:
    """A plan's result for each seed after so many steps, or at its end: the mean of the last five scores up to there.

    One score alone would jump with the last few steps, since the learning rate is constant (Rule 3).
    """
    step = step or PLANS[name].steps
    return [statistics.mean([score for at, score, _ in curve if at <= step][-5:]) for curve in curves(name)]


@dataclass(frozen=True)
class Difference:
    """How much more one plan has than another, in the mean over seeds, and the standard error of that.

    Its text ends in a verdict: better or worse where the mean is more than three standard errors away from 0.
    """

    mean: float
    error: float
    better: int  # 1 where more is better, -1 where less is
    digits: int = 2  # after the point

    @property
    def verdict(self) -> str:
        if abs(self.mean) <= 3 * self.error:
            return "no difference seen"
        return "better" if self.mean * self.better > 0 else "worse"

    def winner(self, first: str, second: str) -> str:
        """The verdict in these names."""
        return {"better": second, "worse": first}.get(self.verdict, self.verdict)

    def __str__(self) -> str:
        mean = round(self.mean, self.digits) + 0.0  # no -0.00
        return f"{mean:+.{self.digits}f} ± {self.error:.{self.digits}f}, {self.verdict}"


def difference(one: list[float], other: list[float], better: int = 1, digits: int = 2) -> Difference:
    """The second's scores beside the first's, seed by seed."""
    pairs = torch.tensor(other, dtype=torch.float64) - torch.tensor(one, dtype=torch.float64)
    return Difference(pairs.mean().item(), pairs.std().item() / math.sqrt(len(one)), better, digits)


def compare(name: str, other: str, steps: int | None = None, its_steps: int | None = None) -> Difference:
    """The second plan beside the first of the same task, each at its end or after so many steps."""
    task = TASKS[PLANS[name].task]
    return difference(scores(name, steps), scores(other, its_steps or steps), task.better, task.digits)


def ratio(name: str, other: str, unit: str) -> float:
    """What a step of the second costs beside one of the first: in "seconds", "flops", "peak" or "parameters"."""
    costs = results()["costs"]
    return float(costs[other][unit] / costs[name][unit])


def equal(name: str, other: str, unit: str) -> tuple[int, int]:
    """After how many steps both have cost the same, in "seconds" or "flops": at most as many as there are of each."""
    dearer = ratio(name, other, unit)
    its_steps = min(PLANS[other].steps, int(PLANS[name].steps / dearer))
    return int(its_steps * dearer), its_steps


def fair(name: str, other: str) -> dict[str, tuple[int, int]]:
    """Steps of both at which they can be compared, up to the second's end, by what is equal there."""
    steps = PLANS[other].steps
    at = {"steps, half": (steps // 2, steps // 2), "steps": (steps, steps)}
    return at | {"time": equal(name, other, "seconds"), "arithmetic": equal(name, other, "flops")}


def _store(**parts: Any) -> None:
    """Put these parts into the file, whole or not at all; `runs` are added to those that are there."""
    stored = results()
    new = {(run["name"], run["seed"]): run for run in stored["runs"] + parts.get("runs", []) if run["name"] in PLANS}
    parts["runs"] = sorted(new.values(), key=_place)
    stored |= parts
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in stored.items() if key != "runs"]
    runs = ",\n".join(map(json.dumps, stored["runs"]))
    text = "{\n" + ",\n".join([*lines, f'"runs": [\n{runs}\n]']) + "\n}\n"
    beside = FILE.with_suffix(".part")
    beside.write_text(text, "utf-8")
    beside.replace(FILE)


def _place(run: dict[str, Any]) -> tuple[int, int]:
    return [*PLANS].index(run["name"]), run["seed"]


def _made() -> dict[str, Any]:
    """Where the results come from."""
    return {
        "made": {
            "command": f"python -m {__spec__.name}",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"one core of a {platform.machine()} processor, no accelerator",
        },
        "entropies": entropies(),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", metavar="WORDS", help="plans whose name has these words in it")
    options.add_argument("--seeds", type=int, nargs="+", help="these seeds alone")
    options.add_argument("--fresh", action="store_true", help="forget what is stored")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.fresh:
        FILE.unlink(missing_ok=True)
    there = {(run["name"], run["plan"], run["seed"]) for run in results()["runs"]}
    to_do = [
        (name, plan, seed)
        for seed in chosen.seeds or range(max(plan.seeds for plan in PLANS.values()))
        for name, plan in PLANS.items()
        if chosen.only in name and seed < plan.seeds and (name, str(plan), seed) not in there
    ]
    from tqdm import tqdm

    for name, plan, seed in (bar := tqdm(to_do, unit="run")):
        bar.set_description(f"{name}, seed {seed}")
        points = train(plan, seed)
        _store(runs=[{"name": name, "seed": seed, "plan": str(plan), "points": points}], **_made())
    if not chosen.only and results()["costs"].keys() != PLANS.keys():
        taken = seconds(PLANS)
        _store(costs={name: cost(plan) | {"seconds": round(taken[name], 5)} for name, plan in PLANS.items()})


if __name__ == "__main__":
    main()
