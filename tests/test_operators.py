"""Every operator of PyTorch's own test suite, on the suite's own samples: on tensors without data it gives results of
the same size and saves the same tensors as for real, or is refused in words."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from memlab import ledger
from memlab.errors import MemlabError
from memlab.simulation.fake import Twins
from memlab.simulation.faking import faking

pytest.importorskip("expecttest", reason="PyTorch's own samples need expecttest, which is not installed")
from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 2  # of each operator
AS_LARGE_AS_CAN_BE = {"combinations", "masked_select", "nonzero", "argwhere"}
KNOWN = {
    "sparse.mm": "the positions of the largest, 8 bytes each",
    "nn.functional.embedding_bag": "in bfloat16 the offsets, 8 bytes each",
    "nn.functional.ctc_loss": "the lengths, 8 bytes each: under any dispatch mode, a measurement's too, it saves them",
}


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def seen(result: Any) -> Any:
    """Shapes, types and bytes of the results, and of what is saved for their gradients."""
    sizes = [(t.shape, t.dtype, t.untyped_storage().nbytes()) for t in tensors(result) if is_plain(t)]
    entries = ledger.walk([t for t in tensors(result) if t.grad_fn is not None]).entries
    kept = [(e.slot, e.tensor) for e in entries if e.tensor is not None and is_plain(e.tensor)]
    return sizes, collections.Counter((slot, t.shape, t.dtype, t.untyped_storage().nbytes()) for slot, t in kept)


def twin(value: Any, twins: Twins) -> Any:
    if isinstance(value, torch.Tensor):
        return twins.like(value, twins.tensor(value))
    if type(value) in (list, tuple):
        return type(value)(twin(item, twins) for item in value)
    return {key: twin(item, twins) for key, item in value.items()} if type(value) is dict else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_operator(dtype: torch.dtype) -> None:
    wrong, refused, right = set(), set(), set()
    for operator in op_db:
        if dtype not in operator.supported_dtypes("cpu") or operator.name in AS_LARGE_AS_CAN_BE:
            continue
        differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
        try:
            samples = list(operator.sample_inputs("cpu", dtype, requires_grad=differentiable))[:SAMPLES]
            real = [seen(operator(sample.input, *sample.args, **sample.kwargs)) for sample in samples]
        except Exception:  # samples that this build cannot run
            continue
        for sample, expected in zip(samples, real, strict=True):
            try:
                with faking() as mode:
                    twins = Twins(mode)
                    args = [twin(value, twins) for value in (sample.input, sample.args, sample.kwargs)]
                    found = seen(operator(args[0], *args[1], **args[2]))
            except MemlabError:  # it asks for data, or nobody told PyTorch the shapes of its results
                refused.add(operator.name)
            else:
                (right if found == expected else wrong).add(operator.name)
    assert wrong <= KNOWN.keys()
    assert len(refused) < 0.05 * len(right)
    assert len(right) > 400
