"""What to write in one's own script to get what a strategy does.

The PyTorch text is one complete training loop with all parts of a sum in it; it assumes the names `model`,
`optimizer`, `loader` (batches are tuples of tensors with the samples first) and `loss_fn(model, batch)`, a mean over
samples. The others are arguments of the framework's Trainer, with a comment wherever it has none for a technique.
"""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any, TypeVar

from .errors import MemlabError
from .strategies import (
    Checkpoint,
    LowPrecision,
    MicroBatch,
    MixedPrecision,
    OptimizerInBackward,
    Strategy,
)
from .strategies.precision import DTYPES
from .strategies.regions import AUTO, regex

Part = TypeVar("Part", bound=Strategy)


def to_code(strategy: Strategy, framework: str = "pytorch") -> str:
    """The text for "pytorch", "transformers" or "lightning"."""
    writers = {"pytorch": _pytorch, "transformers": _transformers, "lightning": _lightning}
    if framework not in writers:
        raise MemlabError(f"no code for {framework!r}: choose {', '.join(map(repr, writers))}")
    return writers[framework](strategy)


def _part(strategy: Strategy, kind: type[Part]) -> Part | None:
    return next((part for part in strategy.parts if isinstance(part, kind)), None)


def _text(*paragraphs: str) -> str:
    return "\n\n".join(paragraph.strip("\n") for paragraph in paragraphs if paragraph) + "\n"


def _block(text: str, **values: Any) -> str:
    text = dedent(text).strip("\n")
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return text


# ------------------------------------------------------------------------------------------------------------ pytorch


def _pytorch(strategy: Strategy) -> str:
    checkpoint, low = _part(strategy, Checkpoint), _part(strategy, LowPrecision)
    mixed, in_backward = _part(strategy, MixedPrecision), _part(strategy, OptimizerInBackward)
    setup = [
        _imports(strategy),
        "# Yours: model, optimizer, loader (batches are tuples of tensors, samples first), loss_fn(model, batch).",
    ]
    if checkpoint is not None:
        setup += _checkpoint(checkpoint)
    if low is not None:
        setup.append(_block(_LOWER, dtype=_dtype(low)))
    if in_backward is not None:
        setup.append(_block(_CONSUME))
    if mixed is not None:
        lines = ["device_type = next(model.parameters()).device.type"]
        lines += (
            ["scaler = torch.amp.GradScaler(device_type)  # fp16's range is narrow"] if mixed.dtype == "fp16" else []
        )
        setup.append("\n".join(lines))
    return _text(*setup, _loop(strategy))


def _imports(strategy: Strategy) -> str:
    checkpoint = _part(strategy, Checkpoint)
    if checkpoint is None:
        return "import torch"
    names = ["checkpoint"]
    lines = ["import torch"]
    if checkpoint.save is not None:
        names = ["CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts"]
        lines.insert(0, "import functools")
    if checkpoint.modules != AUTO and checkpoint.segments is None:
        lines.insert(len(lines) - 1, "import re")
    return "\n".join([*lines[:-1], *([""] if len(lines) > 1 else []), lines[-1]]) + (
        f"\nfrom torch.utils.checkpoint import {', '.join(names)}"
    )


def _loop(strategy: Strategy) -> str:
    micro, mixed = _part(strategy, MicroBatch), _part(strategy, MixedPrecision)
    low, in_backward = _part(strategy, LowPrecision), _part(strategy, OptimizerInBackward)
    scaled = mixed is not None and mixed.dtype == "fp16"
    batch, loss = "batch", "loss"
    if micro is not None:
        batch, loss = "micro_batch", "loss * share"
    lines = [f"loss = loss_fn(model, {batch})"]
    if mixed is not None:
        lines = [f"with torch.autocast(device_type, dtype={_dtype(mixed)}):", f"    {lines[0]}"]
    if micro is not None:
        lines.append(
            "share = len(micro_batch[0]) / len(batch[0])  # of the loss terms; of a token loss, count the tokens"
        )
    lines.append(f"scaler.scale({loss}).backward()" if scaled else f"{_bracketed(loss)}.backward()")
    if micro is not None:
        lines.append("del loss  # or its graph stays while the next forward pass runs")
        cut = f"t.tensor_split({micro.count})" if micro.size is None else f"t.split({micro.size})"
        lines = [f"for micro_batch in zip(*({cut} for t in batch)):", *(f"    {line}" for line in lines)]
    if low is not None:
        lines.insert(0, f"batch = tuple(t.to({_dtype(low)}) if t.is_floating_point() else t for t in batch)")
    if in_backward is None:
        lines += ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
        lines.append("optimizer.zero_grad()")
    return "for batch in loader:\n" + indent("\n".join(lines), "    ")


def _bracketed(expression: str) -> str:
    return f"({expression})" if " " in expression else expression


def _dtype(part: MixedPrecision | LowPrecision) -> str:
    return str(DTYPES[part.dtype])


_LOWER = """
    # Everything in low precision, before the first step: gradients and optimizer state follow the parameters.
    model.to(<dtype>)
"""

_CONSUME = """
    # The optimizer in backward: each gradient is used and freed as it is born. No clipping by global norm.
    singles = {
        parameter: type(optimizer)([{**group, "params": [parameter]}])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


    def consume(parameter):
        singles[parameter].step()
        parameter.grad = None


    for parameter in singles:
        parameter.register_post_accumulate_grad_hook(consume)
"""


def _checkpoint(part: Checkpoint) -> list[str]:
    options = "" if part.save is None else ", context_fn=context_fn"
    patterns = (part.modules,) if isinstance(part.modules, str) else tuple(part.modules)
    policy = [] if part.save is None else [_policy(part.save)]
    if part.segments is not None:
        return [*policy, _block(_SEGMENTS, container=_container(patterns), count=part.segments, options=options)]
    choose = _block(_EACH_BLOCK)
    if part.modules != AUTO:
        choose = _block(_EACH_MATCH, regex="|".join(regex(pattern) for pattern in patterns))
    return [*policy, _block(_CHECKPOINTED, options=options), choose]


def _container(patterns: tuple[str, ...]) -> str:
    """The Sequential that patterns such as "body.*" speak of, as far as names alone tell."""
    if patterns == ("*",):
        return "model"
    path = re.fullmatch(r"([\w.]+?)(\.\*)?", patterns[0])
    if path is None or patterns == (AUTO,):
        return "model.blocks  # your nn.Sequential of blocks"
    return f'model.get_submodule("{path[1]}")'


def _policy(save: Any) -> str:
    if callable(save):
        name = getattr(save, "__name__", "")
        keeps = f"{name if name.isidentifier() else 'keeps'}(operator)  # your predicate"
    else:
        saved = "".join(f"torch.ops.{name}, " for name in save).strip()
        keeps = f"{{operator, operator.overloadpacket}} & {{{saved.rstrip(',')}}}"
    return _block(_POLICY, keeps=keeps)


_POLICY = """
    def policy(ctx, operator, *args, **kwargs):
        keep = <keeps>
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
"""

_CHECKPOINTED = """
    # Activation checkpointing: keep a block's inputs only, and run the block again in backward.
    def checkpointed(forward):
        def run(*args, **kwargs):
            return checkpoint(forward, *args, use_reentrant=False<options>, **kwargs)

        return run
"""

_EACH_BLOCK = """
    for block in model.blocks:  # put your model's repeated blocks in place of model.blocks
        block.forward = checkpointed(block.forward)
"""

_EACH_MATCH = """
    for name, module in model.named_modules():
        if re.fullmatch(r"<regex>", name):
            module.forward = checkpointed(module.forward)
"""

_SEGMENTS = """
    # Activation checkpointing in <count> segments: keep each segment's input only, and run it again in backward.
    container = <container>
    layers = list(container)
    ends = [len(layers) * n // <count> for n in range(<count> + 1)]
    segments = [torch.nn.Sequential(*layers[start:stop]) for start, stop in zip(ends, ends[1:])]


    def forward(x):
        for segment in segments:
            x = checkpoint(segment, x, use_reentrant=False<options>)
        return x


    container.forward = forward
"""


# ------------------------------------------------------------------------------------------------------- transformers


def _transformers(strategy: Strategy) -> str:
    arguments, before = ['output_dir="output"'], []
    for part in strategy.parts:
        if isinstance(part, Checkpoint):
            arguments += ["gradient_checkpointing=True", 'gradient_checkpointing_kwargs={"use_reentrant": False}']
            if part.modules != AUTO or part.segments is not None or part.save is not None:
                before.append(
                    "# Trainer checkpoints every layer that the model class marks for it: patterns, segments and\n"
                    "# selective saving have no argument there. For those, patch the model: to_code('pytorch')."
                )
        elif isinstance(part, MicroBatch):
            before.append("# batch_size: the samples of one optimizer step on one device.")
            arguments += [
                f"per_device_train_batch_size={part.size or f'batch_size // {part.count}'}",
                f"gradient_accumulation_steps={part.count or f'batch_size // {part.size}'}",
            ]
        elif isinstance(part, MixedPrecision):
            arguments.append(f"{part.dtype}=True")
        elif isinstance(part, LowPrecision):
            before.append(
                "# Pure low precision is the model's own dtype; bf16=True or fp16=True would be autocast.\n"
                f"model.to(torch.{_dtype(part).removeprefix('torch.')})"
            )
        elif isinstance(part, OptimizerInBackward):
            before.append(
                "# Trainer has no argument for this: it steps its optimizer after backward. (Its optim='lomo' and\n"
                "# optim='adalomo' do step in backward, but are optimizers of their own.) Write the loop yourself:\n"
                "# to_code('pytorch')."
            )
    imports = "from transformers import Trainer, TrainingArguments"
    if _part(strategy, LowPrecision) is not None:
        imports = f"import torch\n{imports}"
    call = "arguments = TrainingArguments(\n" + indent(",\n".join(arguments), "    ") + ",\n)"
    return _text(imports, *before, f"{call}\ntrainer = Trainer(model=model, args=arguments, train_dataset=dataset)")


# ---------------------------------------------------------------------------------------------------------- lightning


def _lightning(strategy: Strategy) -> str:
    checkpoint = _part(strategy, Checkpoint)
    imports, before, arguments = "from lightning.pytorch import Trainer", [], []
    if checkpoint is not None:
        imports = _imports(Checkpoint(checkpoint.modules, segments=checkpoint.segments, save=checkpoint.save))
        imports += "\n\nfrom lightning.pytorch import Trainer"
        before += [
            "# The Trainer has no argument for this: patch the LightningModule, here `model`, before fit.",
            *_checkpoint(checkpoint),
        ]
    for part in strategy.parts:
        if isinstance(part, MicroBatch):
            size = part.size or f"batch_size // {part.count}"
            before.append(
                f"# Give the DataLoader batch_size={size}, with batch_size the samples of one optimizer step.\n"
                "# Each micro-batch counts the same here: right where all hold equally many loss terms."
            )
            arguments.append(f"accumulate_grad_batches={part.count or f'batch_size // {part.size}'}")
        elif isinstance(part, MixedPrecision | LowPrecision):
            suffix = "mixed" if isinstance(part, MixedPrecision) else "true"
            arguments.append(f'precision="{part.dtype.replace("fp16", "16")}-{suffix}"')
        elif isinstance(part, OptimizerInBackward):
            before.append(
                "# The Trainer has no argument for this. In the LightningModule set\n"
                "# self.automatic_optimization = False, call only self.manual_backward(loss) in training_step, and\n"
                "# register these hooks in on_train_start (there, optimizer = self.optimizers().optimizer):\n"
                + indent(_block(_CONSUME), "# ", lambda line: True).replace("# \n", "#\n")
            )
    call = f"trainer = Trainer({', '.join(arguments)})\ntrainer.fit(model, loader)"
    return _text(imports, *before, call)
