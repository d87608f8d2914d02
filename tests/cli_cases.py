"""What the tests of the command line run on: models in a file, and how to run commands on them."""

import importlib.util
import json
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "ascend.md"
compilers = pytest.mark.skipif(
    importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("triton") is None,
    reason="needs triton-ascend and ascendnpu-ir")

MODELS = '''
import functools
import warnings
import torch
from torch import nn

class Strided(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.register_buffer("offset", torch.zeros(dim))
        self.norm, self.table = nn.LayerNorm(dim), torch.ones(1)

    def forward(self, qkv, scale=1.0):
        q, _, _ = qkv.view(-1, 3, 4, 128).unbind(1)
        return self.norm(q) * scale + self.offset.to(q.dtype)

def positional():
    print("a word from the model")
    return Strided().bfloat16(), [torch.randn(50, 1536, dtype=torch.bfloat16)]
def keywords(): return Strided(), {"qkv": torch.randn(50, 1536), "scale": 2.0}
def tensor(): return Strided(), torch.randn(50, 1536)
def function(): return torch.nn.functional.layer_norm, (torch.randn(4, 8), (8,))
def huge():  # 86 GB of weights
    pairs = [nn.Sequential(nn.Linear(4096, 65536), nn.Linear(65536, 4096)) for _ in range(40)]
    return nn.Sequential(*pairs, nn.LayerNorm(4096)), torch.randn(3, 4096)
def breaks():
    def model(x):
        y = nn.functional.layer_norm(x, (8,))
        torch._dynamo.graph_break()
        return nn.functional.rms_norm(y.relu(), (8,))
    return model, torch.randn(4, 8)
def wide(): return nn.LayerNorm(64).double(), torch.randn(3, 64, dtype=torch.double)
def plain(): return nn.ReLU(), torch.randn(3)
def values():
    class Model(nn.Module):
        def forward(self, x): return x * int(x.sum().item())
    return Model(), torch.randn(3)
def mismatch(): return nn.Linear(8, 8), torch.randn(3, 7)
class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x): return self.linear(x)  # the line to blame
def inside(): return Wrong(), torch.randn(3, 7)
class Resumed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        x = self.norm(x * cached(3))
        torch._dynamo.graph_break()
        x = self.norm(x * cached(4))
        torch._dynamo.graph_break()
        warnings.warn("the model's own word")
        return self.norm(x)
@functools.lru_cache
def cached(number): return number
def resumed(): return Resumed(), torch.randn(3, 8)
def long_rows():
    return nn.Sequential(nn.LayerNorm(12288), nn.ReLU(), nn.RMSNorm(12288)).bfloat16(), \
        torch.randn(64, 1024, 12288, dtype=torch.bfloat16)
class Left(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = torch.compiler.disable(first), second
    def forward(self, x): return self.second(self.first(x))
def long_rows_left():
    (first, _, second), x = long_rows()
    return Left(first, second), x
def tensor_once(): return nn.LayerNorm(128), torch.randn(4096, 128)
def ragged(): return nn.LayerNorm(128).bfloat16(), torch.randn(211, 128).bfloat16()
class Ffn(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(64), nn.Linear(64, 256), nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
def ffn(): return Ffn().bfloat16(), torch.randn(2, 33, 64).bfloat16()
class Channels(nn.Module):
    def forward(self, x):
        mean = x.pow(2).mean(1, keepdim=True)
        written = x * torch.rsqrt(mean + 1e-6)
        return written, nn.functional.layer_norm(x.permute(0, 2, 3, 1), (24,))
def channels(): return Channels(), torch.randn(2, 24, 8, 8)
class Tokens(nn.Module):
    """A stream that lies across memory, and a cat of all pieces of it."""
    def forward(self, x):
        x = (x * 2).transpose(1, 2)
        for _ in range(3):
            x = x + nn.functional.layer_norm(x, (64,))
        whole = x + nn.functional.layer_norm(x, (64,))
        y = (whole * 2).contiguous()
        return nn.functional.layer_norm(torch.cat([y[:, :5], y[:, 5:]], 1), (64,))
def tokens(): return Tokens(), torch.randn(2, 64, 32)
class Cast(nn.Module):
    def __init__(self, *devices, enabled=True):
        super().__init__()
        self.norm, self.devices, self.enabled = nn.LayerNorm(8), devices, enabled
    def forward(self, x):
        for device in self.devices:
            with torch.autocast(device, torch.bfloat16, enabled=self.enabled):
                x = self.norm(x)
        return x
def cast_npu(): return Cast("npu"), torch.randn(3, 8)
def cast_elsewhere(): return Cast("cuda", "cpu", "cuda"), torch.randn(3, 8)
def cast_nowhere(): return Cast("npu", "cuda", enabled=False), torch.randn(3, 8)
class Holder:
    def __init__(self, module): self.held = [module]
    def run(self, x): return self.held[0](x)
    def __call__(self, x): return self.run(x)
in_this_file = nn.LayerNorm(8)
def closure():
    norm = nn.LayerNorm(8)
    inner = lambda x: norm(x)
    return (lambda x: inner(x)), torch.randn(3, 8)
def of_the_file(): return (lambda x: in_this_file(x)), torch.randn(3, 8)
def bound(): return Holder(nn.LayerNorm(8)).run, torch.randn(3, 8)
def callable_object(): return Holder(nn.LayerNorm(8)), torch.randn(3, 8)
def partial():
    apply = lambda module, x: module(x)
    return functools.partial(apply, nn.Sequential(nn.LayerNorm(8))), torch.randn(3, 8)
class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(8.0)
    def forward(self, x): return x + self.table
def constant(): return Constant(), torch.randn(3, 8)
def fails(): raise KeyError("no such config")
def takes(size): return None
def nothing(): return None
def number(): return 3, torch.randn(3)
def text(): return nn.ReLU(), "x"
a_number = 3
a_model = nn.ReLU()
'''


LINE_TO_BLAME = 1 + MODELS[:MODELS.index("# the line to blame")].count("\n")

#: Answers commands, one a line, in one process: importing torch costs more than most of them.
SERVER = """
import json, sys, warnings
from click.testing import CliRunner
from ascend_ln_fuse.cli import main
for line in sys.stdin:
    done = CliRunner().invoke(main, json.loads(line), prog_name="ascend-ln-fuse")
    print(json.dumps([done.exit_code, done.stdout, done.stderr, repr(done.exception)]), flush=True)
"""


def explained(cli, name, *more):
    return json.loads(cli("explain", f"models.py:{name}", "--json", *more)[0])["reports"]
