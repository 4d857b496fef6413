"""65 empty_selection | kind c/f
SOURCE pytorch/pytorch#70348, EleutherAI/bergson#461 (empty share of a batch)
SYMPTOM only foreground rows go through the second head; one micro-batch has none: saved tensors with 0 elements (data_ptr 0, percentage of 0), mean over nothing = NaN, parameters of the second head get zero or no gradient.
EXPECT  no division by zero in tables, 0-byte tensors listed or skipped consistently; micro row NaN is explained by "micro-batch 2 selects no rows", baseline unaffected.
"""
import torch
from torch import nn
from _ref import *


class Det(nn.Module):
    def __init__(self):
        super().__init__(); self.stem, self.box = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x, fg):
        h = self.stem(x).relu()
        return self.box(h[fg])


def make():
    torch.manual_seed(0)
    fg = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0]).bool()
    return Det(), {"args": (torch.randn(8, 6), fg), "target": 1.0}, lambda o, t: (o - t).abs().mean()


def check():
    m, b, f = make()
    l0, g0 = plain(m, b, f)
    r = dict(full_loss=l0, full_gnorm=gnorm(m))
    x, fg = b["args"]; out = []
    for s in (slice(0, 4), slice(4, 8)):
        mb = {"args": (x[s], fg[s]), "target": 1.0}
        d = measure(m, mb, f, backward=False); out.append(dict(loss=str(d["loss"]), packs=d["packs"], act=d["act_noinput"]))
    r["micro"] = out
    all_empty = {"args": (x[:0], fg[:0]), "target": 1.0}
    d = measure(m, all_empty, f); r["batch_of_zero"] = dict(loss=str(d["loss"]), packs=d["packs"], act=d["act"])
    assert out[1]["loss"] == "nan"
    return r


if __name__ == "__main__":
    run(check)
