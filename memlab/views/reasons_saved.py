"""Why autograd saves a tensor: a sentence for each operator and slot.

Sentences say what the derivative needs, as PyTorch's `derivatives.yaml` has it: an *input* that its own gradient
depends on, a *factor* that only the other's gradient is made with, an *output* in terms of which the derivative is
written. Slots that are not in the table get a sentence by their name, which says no more than the name does: autograd
calls `result` what an operator returned, and by their own names what it was given.
"""

from __future__ import annotations

import re

from ..trace import SavedTensor

INPUT = "the input: the derivative depends on it"
OUTPUT = "the output: the derivative is written in terms of it"
LEFT = "the left matrix (a layer's input): the gradient of the right one (its weight) is made with it"
RIGHT = "the right matrix (a layer's weight): the gradient of the left one (its input) is made with it"
FACTOR = "one factor: the gradient of the other is made with it"
_SHAPE = "the input: only its shape and type are needed, but it is kept whole"
_POSITIONS = "which elements were taken: their gradients go back there"
_WHICH = "which elements were chosen: the gradient goes through those"
_LAYER_INPUT = "the input: needed for the weight's gradient"
_LAYER_WEIGHT = "the weight: needed for the input's gradient"
_NORM_INPUT = "the input: normalised again in backward"
_NORM_WEIGHT = "the weight: needed for the input's gradient"
_MEAN = "the mean, to normalise again"
_SCALE = "one over the standard deviation, to normalise again"
_RUNNING = "a running statistic: used instead of the batch's where the layer is in eval mode"
_LOGSUMEXP = "the log of each softmax sum: the attention weights are made again from it instead of being saved"
_RANDOM = "the random state, to draw the same dropout mask again"
_TARGET = "the target: the error is measured against it"
_CLASS_WEIGHT = "the weights of the classes or samples in the loss"
_GATES = "the gates before their activation: the derivative depends on them"

_ATTENTION = {
    "query": "the queries: needed for the keys' gradient, and for the attention weights, which are made again",
    "key": "the keys: needed for the queries' gradient, and for the attention weights, which are made again",
    "value": "the values: needed for the gradient of the attention weights",
    "output": "the output: the derivative of the softmax is written in terms of it",
    "logsumexp": _LOGSUMEXP,
    "log_sumexp": _LOGSUMEXP,
    "attn_mask": "the mask: the attention weights are made again with it",
    "attn_bias": "the mask or bias: the attention weights are made again with it",
    "rng_state": _RANDOM,
    "philox_seed": _RANDOM,
    "philox_offset": _RANDOM,
    "unused": "nothing that is needed: a slot of the kernel's",
    "cum_seq_q": "where each sequence of queries begins",
    "cum_seq_k": "where each sequence of keys begins",
}
_NORM = {"input": _NORM_INPUT, "weight": _NORM_WEIGHT, "result1": _MEAN, "result2": _SCALE}
_BATCH_NORM = _NORM | {"running_mean": _RUNNING, "running_var": _RUNNING}
_LAYER = {"input": _LAYER_INPUT, "self": _LAYER_INPUT, "weight": _LAYER_WEIGHT}
_NLL = {
    "self": "the log-probabilities: only their shape and type are needed, but they are kept whole",
    "target": "the target: tells which log-probability gets a gradient",
    "weight": _CLASS_WEIGHT,
    "total_weight": "the number of terms in the mean (their weights' sum)",
}
_LOSS = {
    "self": "the prediction: the derivative depends on how far off it is",
    "target": _TARGET,
    "weight": _CLASS_WEIGHT,
    "pos_weight": "the weight of positive samples in the loss",
}
_FURTHER_INPUT = "an input: all gradients depend on it"
_LARGEST = {"self": "the input: compared with the result to find which elements it came from", "result": OUTPUT}

# By operator without its number, then by slot.
SENTENCES: dict[str, dict[str, str]] = {
    "Addmm": {"mat1": LEFT, "mat2": RIGHT},
    "Mm": {"self": LEFT, "mat2": RIGHT},
    "Bmm": {"self": LEFT, "mat2": RIGHT},
    "Baddbmm": {"batch1": LEFT, "batch2": RIGHT},
    "Addbmm": {"batch1": LEFT, "batch2": RIGHT},
    "Mv": {"self": FACTOR, "vec": FACTOR},
    "Addmv": {"mat": FACTOR, "vec": FACTOR},
    "Dot": {"self": FACTOR, "tensor": FACTOR},
    "Mul": {"self": FACTOR, "other": FACTOR},
    "Addcmul": {"tensor1": FACTOR, "tensor2": FACTOR},
    "Linear": _LAYER,
    "Convolution": _LAYER,
    "CudnnConvolution": _LAYER,
    "MkldnnConvolution": _LAYER,
    "NativeLayerNorm": _NORM | {"bias": "the bias: its gradient takes its shape"},
    "NativeGroupNorm": _NORM,
    "NativeBatchNorm": _BATCH_NORM,
    "CudnnBatchNorm": _BATCH_NORM | {"result3": "what cuDNN reserves for its own backward"},
    "FusedRmsNorm": {
        "input": _NORM_INPUT,
        "weight": _NORM_WEIGHT,
        "result1": "one over the root of the mean square, to normalise again",
    },
    "NativeDropout": {"result1": "the mask: what was dropped gets no gradient"},
    "Div": {"self": "the numerator: the gradient of the denominator is made with it", "other": "the denominator: both "
            "gradients are divided by it"},
    "Pow": {
        "self": "the base: the derivative depends on it",
        "exponent": "the exponent: the derivative depends on it",
        "result": "the output: the gradient of the exponent is written in terms of it",
    },
    **{name: {"self": INPUT} for name in (
        "Gelu", "Silu", "Mish", "Softplus", "Hardswish", "Hardsigmoid", "Hardtanh", "Abs", "Log", "Log2", "Log1P",
        "Sin", "Cos", "Erf", "Clamp", "ClampMin", "ClampMax", "Threshold", "Glu", "Var", "VarMean", "RreluWithNoise",
    )},
    **{name: {"self": INPUT, "result": OUTPUT} for name in (
        "Elu", "LeakyRelu", "Std", "Logsumexp", "Norm", "LinalgVectorNorm", "Prod",
    )},
    **{name: {"result": OUTPUT} for name in (
        "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Rsqrt", "Reciprocal", "Softmax", "SafeSoftmax", "LogSoftmax",
    )},
    "LogSigmoid": {"self": INPUT, "buffer": "an intermediate result that the CPU's kernel uses again"},
    "PreluKernel": {"self": "the input: needed for its own gradient and the slope's", "weight": "the slope where the "
                    "input is negative: needed for the input's gradient"},
    "Max": _LARGEST | {"indices": _WHICH},
    "Min": _LARGEST | {"indices": _WHICH},
    "Amax": _LARGEST,
    "Amin": _LARGEST,
    **{name: {"self": "compared with the other to find which was chosen", "other": "compared with the first to find "
              "which was chosen"} for name in ("Maximum", "Minimum")},
    "Sort": {"indices": "where each element came from: its gradient goes back there"},
    "Topk": {"indices": _WHICH},
    "Embedding": {"indices": "which rows were looked up: only those get a gradient"},
    "EmbeddingBag": {
        "indices": "which rows were looked up: only those get a gradient",
        "offsets": "where each bag begins",
        "weight": "the table: needed for the gradient of the samples' weights",
        "per_sample_weights": "the samples' weights: needed for the table's gradient",
        "result1": "which bag each index belongs to",
        "result2": "how many indices are in each bag",
        "result3": "which index was the largest in each bag",
    },
    "Index": {"indices": _POSITIONS},
    "IndexSelect": {"index": _POSITIONS},
    "Gather": {"index": _POSITIONS, "self": _SHAPE},
    "Scatter": {"index": "where elements were written: their gradients are taken from there"},
    "MaskedFill": {"mask": "the mask: what was filled gets no gradient"},
    "Where": {"condition": "the condition: which of the two each element's gradient belongs to"},
    "MaxPool2DWithIndices": {"self": _SHAPE, "result1": "where each maximum was: its gradient goes back there"},
    "AvgPool2D": {"self": _SHAPE},
    "AdaptiveAvgPool2D": {"self": _SHAPE},
    "NllLoss": _NLL,
    "NllLoss2D": _NLL,
    "MseLoss": _LOSS,
    "SmoothL1Loss": _LOSS,
    "HuberLoss": _LOSS,
    "BinaryCrossEntropy": _LOSS,
    "BinaryCrossEntropyWithLogits": _LOSS,
    "ScaledDotProductFlashAttentionForCpu": _ATTENTION,
    "ScaledDotProductFlashAttention": _ATTENTION,
    "ScaledDotProductEfficientAttention": _ATTENTION,
    "ScaledDotProductCudnnAttention": _ATTENTION,
    "MkldnnRnnLayer": {
        "input": "the input: needed for the weights' gradients",
        **{f"weight{number}": "a weight: needed for the gradients" for number in range(4)},
        "hx_": "the state at the start",
        "cx_": "the cell's state at the start",
        "result0": "the output at each step, which is the input of the next",
        "result1": "the state at the end",
        "result2": "the cell's state at the end",
        "result3": "oneDNN's workspace: gates and states of each step",
    },
    "CudnnRnn": {
        "input": "the input: needed for the weights' gradients",
        "weight": "the weights: needed for the gradients",
        "hx": "the state at the start",
        "cx": "the cell's state at the start",
        "dropout_state": _RANDOM,
        "result0": "the output at each step, which is the input of the next",
        "result3": "what cuDNN reserves for its own backward: gates and states of each step",
        "result4": "the weights in cuDNN's own order",
    },
    "ThnnFusedLstmCell": {
        "input_gates": _GATES,
        "hidden_gates": _GATES,
        "cx": "the cell's state before the step",
        "result1": "the cell's state after the step",
        "result2": "what the kernel keeps of the gates",
    },
    "GridSampler2D": {"input": _FURTHER_INPUT, "grid": _FURTHER_INPUT},
    "Checkpoint": {
        "input": "an input of the checkpointed region, which runs again from it in backward",
        "rng_state": "the random state before the checkpointed region, so that it draws the same numbers again",
        "policy": "what the policy keeps, so that it is not computed again",
    },
}  # fmt: skip

# By what a slot is called: first what an operator returns, then what it is given.
_BY_NAME = (
    (r"result\d*", "what the operator returned: its derivative is written in terms of it"),
    (r".*mask.*|condition", "a mask: which elements it concerns"),
    (r".*ind(ex|ices).*", "positions: which elements it concerns"),
    (r"weight\d*", "the weight: the derivative is made with it"),
    (r"targets?", _TARGET),
    (
        r"self|input|other|tensor\d*|mat\d*|batch\d*|vec\d*|x\d*",
        "an input of the operator: the derivative is made with it",
    ),
)
_OF_AUTOGRAD = re.compile(
    r"(\w+?)Backward\d+(?:_copy)?"
)  # a node that PyTorch generates; a Python function's has no number
_UNSEEN = "alive when backward began, and explained by nothing but this operator, which does not show what it saves"


def why(tensor: SavedTensor) -> str:
    """One plain sentence: why autograd saves what is in this slot of this operator."""
    if tensor.state == "unseen":
        return _UNSEEN
    slot = re.sub(r"\[\d+\]$", "", tensor.slot.rpartition(".")[2])
    node = _OF_AUTOGRAD.fullmatch(tensor.operator)
    if node is None and tensor.operator not in SENTENCES:
        how = "saved with ctx.save_for_backward" if slot == "saved" else f"kept as ctx.{slot}"
        return f"{how} by the function itself, for its own backward"
    known = SENTENCES.get(node[1] if node else tensor.operator, {}).get(slot)
    derived = (sentence for name, sentence in _BY_NAME if re.fullmatch(name, slot))
    return known or next(derived, f"`{slot}` of the operator: its derivative is made with it")
