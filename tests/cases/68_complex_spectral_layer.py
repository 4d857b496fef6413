"""68 complex_spectral_layer | kind e
SOURCE pytorch/pytorch#91631 (complex autograd needs conj of saved tensors)
SYMPTOM Fourier layer with a complex parameter: saved complex64 tensors take 8 bytes per element, some are lazily conjugated views of parameters (same storage), .item()/histogram/abs-max code for real tensors fails, autocast
        and .half() do not apply to them.
EXPECT  bytes by element_size (8), conj/real views recognised as the parameter's storage; statistics of complex tensors use abs() or are skipped; half-precision row says complex layers stay complex64.
"""
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from _ref import *


class Spectral(nn.Module):
    def __init__(self, c=8, modes=12):
        super().__init__(); self.w, self.modes, self.skip = nn.Parameter(torch.randn(c, c, modes, dtype=torch.cfloat) * 0.1), modes, nn.Conv1d(c, c, 1)

    def forward(self, x):
        z = torch.fft.rfft(x)
        z = torch.einsum("bim,iom->bom", z[..., :self.modes], self.w)
        return nn.functional.gelu(torch.fft.irfft(z, n=x.shape[-1]) + self.skip(x))


def make():
    torch.manual_seed(0)
    return nn.Sequential(Spectral(), Spectral()), {"args": (torch.randn(4, 8, 64),), "target": torch.zeros(4, 8, 64)}, nn.functional.mse_loss


def check():
    m, b, f = make()
    r = measure(m, b, f, backward=True)
    got = []
    with saved_tensors_hooks(lambda t: got.append(t) or t, lambda t: t):
        loss = f(call(m, b), b["target"])
    r["complex_saved"] = sum(t.is_complex() for t in got); r["complex_bytes_naive"] = sum(t.numel() * t.element_size() for t in got if t.is_complex())
    r["param_bytes"] = sum(p.numel() * p.element_size() for p in m.parameters())
    assert r["complex_saved"] > 0
    return r


if __name__ == "__main__":
    run(check)
