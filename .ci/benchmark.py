"""Times this project against a straightforward implementation of the same things, in one run, as a Markdown table.

    python .ci/benchmark.py            # about 15 minutes on two free cores
    python .ci/benchmark.py --quick    # small sizes, a minute: shows that it runs, not how fast

"As released" is our network with the parts that the authors' release does otherwise: resampling with each channel as a
batch element of a one-channel convolution after inserting zeros, attention by einsum, an unfused optimizer, the EMA as a
Python loop. "Limit" is the floating-point work of convolutions and matrix products over the measured speed of a large one.
Ours and the reference take turns; a ratio is that of the medians.
"""
import argparse
import contextlib
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import models  # noqa: E402
from models import EMA, NCSNpp, NoisyResNet, fold_batchnorm  # noqa: E402
from train_classifier import likelihood_score, total_loss  # noqa: E402
from train_score import dsm_loss, image_draw, spread  # noqa: E402

ROWS = []


def row(name, ours, reference, note=""):
    ratio = f"{reference / ours:.2f}×" if reference else ""
    ROWS.append((name, f"{ours:.4g}", f"{reference:.4g}" if reference else "", ratio, note))
    print("| " + " | ".join(ROWS[-1]) + " |", flush=True)


def times(*functions, rounds=7, warm=1):
    """Median seconds of each function; they take turns, so that a busy machine slows all of them alike."""
    seconds = [[] for _ in functions]
    for i in range(rounds + warm):
        for function, list_ in zip(functions, seconds):
            begun = time.perf_counter()
            function()
            if i >= warm:
                list_.append(time.perf_counter() - begun)
    return [statistics.median(list_) for list_ in seconds]


def released_filter(x, resample):
    """Insert zeros, pad, one 4×4 filter on each channel as an image of its own, take every second pixel."""
    tap = torch.tensor([1.0, 3.0, 3.0, 1.0])
    kernel = (tap[:, None] * tap / 64 * (4 if resample == "up" else 1))[None, None]
    n, c, h, w = x.shape
    up, pads = (2, (2, 1)) if resample == "up" else (1, (1, 1) if resample == "down" else (2, 2))
    x = x.reshape(n * c, 1, h, 1, w, 1)
    x = F.pad(x, (0, up - 1, 0, 0, 0, up - 1)).reshape(n * c, 1, h * up, w * up)
    x = F.conv2d(F.pad(x, pads * 2), kernel)
    x = x[:, :, ::2, ::2] if resample == "down" else x
    return x.reshape(n, c, *x.shape[2:])


def released_attention(self, x):
    h = self.norm(x)
    q, k, v = (torch.einsum("bchw,dc->bdhw", h, f.weight) + f.bias[:, None, None] for f in (self.query, self.key, self.value))
    w = torch.einsum("bchw,bcij->bhwij", q, k) * x.shape[1] ** -0.5
    w = F.softmax(w.flatten(3), -1).reshape(w.shape)
    h = torch.einsum("bhwij,bcij->bchw", w, v)
    h = torch.einsum("bchw,dc->bdhw", h, self.out.weight) + self.out.bias[:, None, None]
    return (x + h) / math.sqrt(2)


def released_block(self, x, e):
    """The 1×1 shortcut after the filter, where up-sampling makes it four times as dear."""
    h = F.silu(self.norm0(x))
    if self.resample:
        h, x = released_filter(h, self.resample), released_filter(x, self.resample)
    h = self.conv0(h) + self.project(e)[:, :, None, None]
    h = self.conv1(self.dropout(F.silu(self.norm1(h))))
    return ((self.shortcut(x) if hasattr(self, "shortcut") else x) + h) / math.sqrt(2)


@contextlib.contextmanager
def as_released():
    with mock.patch.object(models, "fir_filter", released_filter), mock.patch.object(models.Attention, "forward", released_attention), \
            mock.patch.object(models.ResBlock, "forward", released_block):
        yield


def released_step(net, loss, optimizer, shadow):
    with as_released():
        optimizer.zero_grad()
        loss().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False)
    optimizer.step()
    with torch.no_grad():
        for s, p in zip(shadow, net.parameters()):
            s.sub_(0.001 * (s - p))


def our_step(net, loss, optimizer, ema):
    optimizer.zero_grad()
    loss().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if ema:
        ema.update()


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def gemm_speed(size):
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / times(lambda: a @ b, rounds=9)[0]


def networks(quick):
    """Score training and evaluation, DLSM' training, the guidance gradient."""
    batch, rounds = (8, 2) if quick else (32, 9)
    speed = gemm_speed(512 if quick else 2048)
    print(f"| matrix product, GFLOP/s | {speed / 1e9:.4g} | | | |")
    torch.manual_seed(0)
    net = NCSNpp(width=32, blocks=1)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.05) if p.ndim > 1 else None
    x, z, sigma = torch.rand(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32), torch.rand(batch) + 0.1
    ours = (net, lambda: dsm_loss(net, x, sigma, z), torch.optim.Adam(net.parameters(), lr=0.0, fused=True), EMA(net))
    theirs = (net, ours[1], torch.optim.Adam(net.parameters(), lr=0.0, foreach=False), [p.detach().clone() for p in net.parameters()])
    a, b = times(lambda: our_step(*ours), lambda: released_step(*theirs), rounds=rounds)
    limit = flops(lambda: our_step(*ours)) / speed
    row(f"score training step, s (width 32, batch {batch})", a, b, f"{a / limit:.2f}× the limit")
    twice = [v.repeat_interleave(2, 0) for v in (x, sigma, z)]
    double = times(lambda: our_step(net, lambda: dsm_loss(net, *twice), *ours[2:]), rounds=max(2, rounds // 2))[0]
    row("... the same with twice the batch, s", double, 0, f"{double / a:.2f}× the time")

    net.eval().requires_grad_(False)
    fast = NCSNpp(**net.config).eval().requires_grad_(False).to(memory_format=torch.channels_last)
    fast.load_state_dict(net.state_dict())

    @torch.no_grad()
    def evaluate(net, released=False):
        with as_released() if released else contextlib.nullcontext():
            return net(x, sigma)

    assert torch.allclose(evaluate(net), evaluate(net, True), atol=1e-3 * evaluate(net).abs().max()), "the reference computes something else"
    a, c, b = times(lambda: evaluate(net), lambda: evaluate(fast), lambda: evaluate(net, True), rounds=2 * rounds)
    limit = flops(lambda: evaluate(net)) / speed
    row(f"score evaluation, s (batch {batch})", a, b, f"{a / limit:.2f}× the limit; channels-last {a / c:.2f}×")

    classifier = NoisyResNet(18, width=16 if quick else 32)
    y = torch.arange(batch) % 10
    adam, slow = torch.optim.Adam(classifier.parameters(), lr=0.0, fused=True), torch.optim.Adam(classifier.parameters(), lr=0.0, foreach=False)

    def released_loss():
        noisy = (x + spread(sigma, x) * z).requires_grad_()
        with torch.no_grad():
            s = net(noisy, sigma)
        out = classifier(noisy, sigma)
        g, = torch.autograd.grad(torch.log(F.softmax(out, 1) + 1e-8), noisy, F.one_hot(y, 10), create_graph=True)
        return (0.5 * (g + s + z / spread(sigma, x)).square()).mean() + F.cross_entropy(out, y)

    a, b = times(lambda: our_step(classifier, lambda: total_loss(classifier, net, x, sigma, y, z), adam, None),
                 lambda: released_step(classifier, released_loss, slow, []), rounds=rounds)
    row(f"DLSM' training step, s (batch {batch})", a, b)
    if pathlib.Path("/proc/self/status").exists():
        row("... its peak memory above the start, MB", *peak_memory(quick))

    classifier.eval().requires_grad_(False)
    folded = fold_batchnorm(classifier)
    plain = NoisyResNet(**classifier.config).eval()
    plain.load_state_dict(classifier.state_dict())

    def released_guidance():
        inner = x.detach().requires_grad_()
        log_p = torch.log(F.softmax(plain(inner, sigma), 1) + 1e-8)
        return torch.autograd.grad(log_p, inner, F.one_hot(y, 10))[0]

    a, b = times(lambda: likelihood_score(folded, x, sigma, y), released_guidance, rounds=2 * rounds)
    row(f"guidance gradient, s (batch {batch})", a, b)

    images = torch.randint(0, 256, (2000 if quick else 50_000, 3, 32, 32), dtype=torch.uint8)
    draw = image_draw(images, torch.zeros(len(images), dtype=torch.long), batch, 0, 0.01, 50.0, True)
    seconds = times(lambda: draw(torch.Generator().manual_seed(1), 3), rounds=9)[0]
    row("cutting a batch, noise included, s", seconds, 0, f"{100 * seconds / ours_step_seconds(ours):.1f}% of a score training step")


def ours_step_seconds(ours):
    ours[0].train().requires_grad_(True)
    return times(lambda: our_step(*ours), rounds=3)[0]


def peak_memory(quick):
    """Peak resident memory of three DLSM' steps, ours and as released, each in a process of its own."""
    return [float(subprocess.run([sys.executable, __file__, "--memory", kind] + ["--quick"] * quick, capture_output=True, text=True, check=True).stdout) for kind in ("ours", "released")]


def memory(kind, quick):
    batch = 8 if quick else 64
    net, classifier = NCSNpp(width=32, blocks=1).eval().requires_grad_(False), NoisyResNet(18, width=16 if quick else 32)
    x, z, sigma, y = torch.rand(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32), torch.rand(batch) + 0.1, torch.arange(batch) % 10

    def high_water():  # ru_maxrss would carry over what the parent process had
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

    start = high_water()
    for _ in range(3):
        classifier.zero_grad()
        if kind == "ours":
            total_loss(classifier, net, x, sigma, y, z).backward()
        else:
            noisy = (x + spread(sigma, x) * z).requires_grad_()
            with torch.no_grad(), as_released():
                s = net(noisy, sigma)
            out = classifier(noisy, sigma)
            g, = torch.autograd.grad(torch.log(F.softmax(out, 1) + 1e-8), noisy, F.one_hot(y, 10), create_graph=True)
            ((0.5 * (g + s + z / spread(sigma, x)).square()).mean() + F.cross_entropy(out, y)).backward()
    print(high_water() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--memory", choices=["ours", "released"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        memory(args.memory, args.quick)
    else:
        print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n\n| what | ours | reference | ratio | note |\n| --- | --- | --- | --- | --- |")
        networks(args.quick)
