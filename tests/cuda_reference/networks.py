"""The networks behind reference.json."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class GPTBlock(nn.Module):
    def __init__(s, d, h, drop=0.0):
        super().__init__()
        s.h = h
        s.ln1 = nn.LayerNorm(d)
        s.qkv = nn.Linear(d, 3 * d)
        s.proj = nn.Linear(d, d)
        s.ln2 = nn.LayerNorm(d)
        s.fc1 = nn.Linear(d, 4 * d)
        s.fc2 = nn.Linear(4 * d, d)
        s.drop = nn.Dropout(drop)

    def attn(s, x):
        B, T, C = x.shape
        q, k, v = s.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, s.h, C // s.h).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(s, x):
        x = x + s.drop(s.attn(s.ln1(x)))
        return x + s.drop(s.fc2(F.gelu(s.fc1(s.ln2(x)))))


class GPT(nn.Module):
    def __init__(s, vocab=1000, d=128, h=4, n=4, T=128, ckpt=False, drop=0.0):
        super().__init__()
        s.emb = nn.Embedding(vocab, d)
        s.pos = nn.Embedding(T, d)
        s.blocks = nn.ModuleList(GPTBlock(d, h, drop) for _ in range(n))
        s.ln = nn.LayerNorm(d)
        s.head = nn.Linear(d, vocab, bias=False)
        s.ckpt = ckpt

    def forward(s, idx, tgt=None):
        x = s.emb(idx) + s.pos.weight[: idx.shape[1]]
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False) if s.ckpt else b(x)
        lg = s.head(s.ln(x))
        return F.cross_entropy(lg.view(-1, lg.shape[-1]), tgt.view(-1)) if tgt is not None else lg


class ResBlock(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c1 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        s.b1 = nn.BatchNorm2d(c)
        s.c2 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        s.b2 = nn.BatchNorm2d(c)
        s.act = nn.ReLU(inplace=True)

    def forward(s, x):
        y = s.act(s.b1(s.c1(x)))
        y = s.b2(s.c2(y))
        return s.act(x + y)


class CNN(nn.Module):
    def __init__(s, c=32, n=3, ncls=10, ckpt=False):
        super().__init__()
        s.stem = nn.Conv2d(3, c, 3, padding=1)
        s.blocks = nn.ModuleList(ResBlock(c) for _ in range(n))
        s.pool = nn.MaxPool2d(2)
        s.fc = nn.Linear(c * 16 * 16, ncls)
        s.ckpt = ckpt

    def forward(s, x, y=None):
        x = s.stem(x)
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False) if s.ckpt else b(x)
        x = s.fc(s.pool(x).flatten(1))
        return F.cross_entropy(x, y) if y is not None else x


# ---- Llama-like in plain torch
class RMSNorm(nn.Module):
    def __init__(s, d, eps=1e-5):
        super().__init__()
        s.w = nn.Parameter(torch.ones(d))
        s.eps = eps

    def forward(s, x):
        v = x.float()
        return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + s.eps)).type_as(x) * s.w


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaBlock(nn.Module):
    def __init__(s, d, h, ff, kv=None):
        super().__init__()
        s.h = h
        s.hd = d // h
        s.kv = kv or h
        s.n1 = RMSNorm(d)
        s.q = nn.Linear(d, d, bias=False)
        s.k = nn.Linear(d, s.kv * s.hd, bias=False)
        s.v = nn.Linear(d, s.kv * s.hd, bias=False)
        s.o = nn.Linear(d, d, bias=False)
        s.n2 = RMSNorm(d)
        s.g = nn.Linear(d, ff, bias=False)
        s.u = nn.Linear(d, ff, bias=False)
        s.dn = nn.Linear(ff, d, bias=False)

    def forward(s, x, cos, sin):
        B, T, C = x.shape
        y = s.n1(x)
        q = s.q(y).view(B, T, s.h, s.hd).transpose(1, 2)
        k = s.k(y).view(B, T, s.kv, s.hd).transpose(1, 2)
        v = s.v(y).view(B, T, s.kv, s.hd).transpose(1, 2)
        q, k = rope(q, cos, sin).type_as(v), rope(k, cos, sin).type_as(v)
        if s.kv != s.h:
            k, v = (t.repeat_interleave(s.h // s.kv, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + s.o(a)
        y = s.n2(x)
        return x + s.dn(F.silu(s.g(y)) * s.u(y))


class Llama(nn.Module):
    def __init__(s, vocab=32000, d=4096, h=32, n=32, ff=11008, T=4096, kv=None, ckpt=False):
        super().__init__()
        s.emb = nn.Embedding(vocab, d)
        s.blocks = nn.ModuleList(LlamaBlock(d, h, ff, kv) for _ in range(n))
        s.n = RMSNorm(d)
        s.head = nn.Linear(d, vocab, bias=False)
        s.ckpt = ckpt
        fr = 1.0 / (10000 ** (torch.arange(0, d // h, 2).float() / (d // h)))
        t = torch.outer(torch.arange(T).float(), fr)
        t = torch.cat((t, t), -1)
        s.register_buffer("cos", t.cos())
        s.register_buffer("sin", t.sin())

    def forward(s, idx, tgt=None):
        x = s.emb(idx)
        T = idx.shape[1]
        cos, sin = s.cos[:T], s.sin[:T]
        for b in s.blocks:
            x = checkpoint(b, x, cos, sin, use_reentrant=False) if s.ckpt else b(x, cos, sin)
        lg = s.head(s.n(x))
        return F.cross_entropy(lg.view(-1, lg.shape[-1]).float(), tgt.view(-1)) if tgt is not None else lg


class Encoder(nn.Module):
    def __init__(s, drop=0.1):
        super().__init__()
        s.e, s.h = nn.Embedding(500, 64), nn.Linear(64, 500)
        s.t = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, drop, batch_first=True, activation="gelu") for _ in range(2)
        )

    def forward(s, x, y):
        z = s.e(x)
        for layer in s.t:
            z = layer(z)
        return F.cross_entropy(s.h(z).flatten(0, 1), y.flatten())


def build(kind, device):
    """(model, inputs) of a reference case, whose first word is `kind`; the model's output on them is the loss."""

    def ids(*shape):
        return torch.zeros(*shape, dtype=torch.long, device=device)

    with torch.device(device):
        if kind in ("gpt", "gptdrop"):
            return GPT(n=2, drop=0.1 if kind == "gptdrop" else 0.0), (ids(8, 128), ids(8, 128))
        if kind == "cnn":
            return CNN(), (torch.empty(8, 3, 32, 32, device=device), ids(8))
        if kind == "llama":
            return Llama(n=2, d=512, h=8, ff=1376, vocab=1000, T=512), (ids(8, 512), ids(8, 512))
        if kind in ("enc", "enc_nodrop"):
            return Encoder(0.0 if kind == "enc_nodrop" else 0.1), (ids(8, 50), ids(8, 50))
