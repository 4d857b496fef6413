"""The networks and the data that the lessons share: plain PyTorch, to be read.

Four networks, one of each kind that memory-saving techniques meet: `GPT` (attention), `ResNet` (convolution and
BatchNorm), `LSTM` (recurrence), `MLP` (a bare chain). Each is a stem, repeated blocks and a head, so that "checkpoint
the blocks" means the same in all; the LSTM alone keeps its repetition inside one operator. Two sorts of real data need
no download: the text of Python's own manual, and scikit-learn's handwritten digits.

    step = gpt_step(batch=8, depth=6)       # network, data, loss and AdamW, ready to be measured

Shapes are written with B samples, T tokens a sample, V tokens in the vocabulary, W width. Networks and data depend on
their arguments alone: the same seed gives the same weights, and nobody else's random stream moves.
"""

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import MemlabError
from .step import TrainingStep

# ---------------------------------------------------------------------------------------------------------- networks


class GPT(nn.Module):
    """A decoder-only transformer: int64 tokens (B, T), T <= context, to logits (B, T, V) for the token after each.

    Pre-norm blocks as in GPT-2 (Radford et al. 2019). `tied=True` makes the head's weight that of the token embedding.
    """

    def __init__(
        self,
        vocab: int = 256,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # small weights: the first guess is close to uniform over the vocabulary
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then an MLP, each reading a normalised copy and adding what it finds: (B, T, W) to (B, T, W)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Attention(nn.Module):
    """Each token looks at itself and at those before it, with several heads: (B, T, W) to (B, T, W)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise MemlabError(f"a width of {width} does not divide into {heads} heads: choose a multiple of {heads}")
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        # (B, T, 3W) to queries, keys and values, (B, heads, T, W / heads) each.
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        mixed: Tensor = self.drop(self.proj(y.transpose(1, 2).flatten(2)))
        return mixed


class ResNet(nn.Module):
    """A residual CNN with BatchNorm (He et al. 2015): images (B, channels, height, width) to logits (B, classes)."""

    def __init__(self, channels: int = 1, width: int = 32, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions whose result is added to their input: (B, W, height, width) to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        out: Tensor = self.relu(x + y)
        return out


class LSTM(nn.Module):
    """A recurrent language model: int64 tokens (B, T) to logits (B, T, V) for the token after each."""

    def __init__(self, vocab: int = 256, width: int = 128, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=depth, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits


class MLP(nn.Module):
    """A chain of linear layers and ReLUs: inputs (B, ...) of `inputs` values a sample to logits (B, classes)."""

    def __init__(self, inputs: int = 64, width: int = 256, depth: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for a, b in pairwise([inputs] + [width] * depth):
            linear = nn.Linear(a, b)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")  # or the signal fades in a long chain
            self.layers.append(nn.Sequential(linear, nn.ReLU()))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x.flatten(1)))
        return logits


# -------------------------------------------------------------------------------------------------------------- data


def text_batch(batch: int, context: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Passages of Python's manual, one byte a token: inputs and targets, int64 (batch, context) each, values 0 to 255.

    The target of each token is the token after it. The text is that of the running Python (`help("for")` prints some),
    so it differs a little from version to version.
    """
    text = _manual()
    draw = random.Random(seed)
    starts = [draw.randrange(len(text) - context) for _ in range(batch)]
    inputs = [list(text[start : start + context]) for start in starts]
    targets = [list(text[start + 1 : start + context + 1]) for start in starts]
    return torch.tensor(inputs), torch.tensor(targets)


@cache
def _manual() -> bytes:
    """The reference manual that every Python carries for `help()`, about 460 kB of English and code."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def digits_batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Handwritten digits: images, float32 (n, 1, 8, 8) from 0 to 1, and labels, int64 (n,).

    Drawn with replacement from scikit-learn's 1,797, so that a batch may have any size.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MemlabError(
            "digits_batch takes its images from scikit-learn, which is not installed: `pip install scikit-learn`"
        ) from None
    digits = load_digits()
    chosen = random.Random(seed).choices(range(len(digits.target)), k=n)
    images = torch.tensor(digits.images[chosen], dtype=torch.float32) / 16
    return images.unsqueeze(1), torch.tensor(digits.target[chosen], dtype=torch.int64)


# ------------------------------------------------------------------------------------------------------------ losses


def gpt_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over all B x T tokens of a batch from `text_batch`, in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over the B samples of a batch from `digits_batch`, in nats."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


# ------------------------------------------------------------------------------------------------------------- steps

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
AdamW = torch.optim.AdamW


def gpt_step(
    *, batch: int = 16, context: int = 128, seed: int = 0, optimizer: MakeOptimizer = AdamW, **sizes: Any
) -> TrainingStep:
    """A `GPT` on `batch` passages of `context` bytes of text; `sizes` are the network's."""
    return _step(GPT, text_batch(batch, context, seed), gpt_loss, optimizer, seed, context=context, **sizes)


def lstm_step(
    *, batch: int = 16, context: int = 128, seed: int = 0, optimizer: MakeOptimizer = AdamW, **sizes: Any
) -> TrainingStep:
    """An `LSTM` on `batch` passages of `context` bytes of text; `sizes` are the network's."""
    return _step(LSTM, text_batch(batch, context, seed), gpt_loss, optimizer, seed, **sizes)


def resnet_step(*, batch: int = 64, seed: int = 0, optimizer: MakeOptimizer = AdamW, **sizes: Any) -> TrainingStep:
    """A `ResNet` on `batch` digits; `sizes` are the network's."""
    return _step(ResNet, digits_batch(batch, seed), classification_loss, optimizer, seed, **sizes)


def mlp_step(*, batch: int = 64, seed: int = 0, optimizer: MakeOptimizer = AdamW, **sizes: Any) -> TrainingStep:
    """An `MLP` on `batch` digits; `sizes` are the network's."""
    return _step(MLP, digits_batch(batch, seed), classification_loss, optimizer, seed, **sizes)


def _step(
    network: Callable[..., nn.Module],
    batch: tuple[Tensor, Tensor],
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor],
    optimizer: MakeOptimizer,
    seed: int,
    lazy: bool = False,
    **sizes: Any,
) -> TrainingStep:
    """With `lazy` the network is built when it is first needed, and by `simulate` without data: any size will do."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which reseeds every accelerator too
            return network(**sizes)

    return TrainingStep(build if lazy else build(), batch, loss, optimizer)
