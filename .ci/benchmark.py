"""Times this project against a straightforward implementation of the same things, in one run, as a Markdown table.

    python .ci/benchmark.py            # about 40 minutes on two free cores
    python .ci/benchmark.py --quick    # small sizes, a minute: shows that it runs, not how fast

"As released" is our network with the parts that the authors' release does otherwise: resampling with each channel as a
batch element of a one-channel convolution after inserting zeros, attention by einsum, an unfused optimizer,
the EMA as a Python loop. "Limit" is the floating-point work of convolutions and matrix products over the measured speed of a large one.
Ours and the reference take turns; a ratio is that of the medians.
"""
import argparse
import contextlib
import importlib.util
import io
import json
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
from evaluate import frechet_distance, load_inception, moments, prdc  # noqa: E402
from models import EMA, NCSNpp, NoisyResNet, append_dims, fold_batchnorm, load_model  # noqa: E402
from sample import pc_sampler, posterior_score, sde_sampler, sigma_grid  # noqa: E402
from train_classifier import likelihood_score, total_loss  # noqa: E402
from train_score import dsm_loss, image_batches, import_torchvision  # noqa: E402

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
    h = self.conv1(F.dropout(F.silu(self.norm1(h)), self.dropout.p, self.training))
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
    fast = NCSNpp(**net.config).eval().requires_grad_(False).to(memory_format=torch.channels_last)  # as load_model gives it
    fast.load_state_dict(net.state_dict())

    @torch.no_grad()
    def evaluate(net, released=False):
        with as_released() if released else contextlib.nullcontext():
            return net(x, sigma)

    assert torch.allclose(evaluate(fast), evaluate(net, True), atol=1e-3 * evaluate(net).abs().max()), "the reference computes something else"
    a, b = times(lambda: evaluate(fast), lambda: evaluate(net, True), rounds=2 * rounds)
    limit = flops(lambda: evaluate(net)) / speed
    row(f"score evaluation, s (batch {batch})", a, b, f"{a / limit:.2f}× the limit")

    classifier = NoisyResNet(18, width=16 if quick else 32)
    y = torch.arange(batch) % 10
    adam, slow = torch.optim.Adam(classifier.parameters(), lr=0.0, fused=True), torch.optim.Adam(classifier.parameters(), lr=0.0, foreach=False)

    a, b = times(lambda: our_step(classifier, lambda: total_loss(classifier, net, x, sigma, y, z), adam, None),
                 lambda: released_step(classifier, lambda: released_total(classifier, net, x, sigma, y, z), slow, []), rounds=rounds)
    row(f"DLSM' training step, s (batch {batch})", a, b)
    if pathlib.Path("/proc/self/status").exists():
        row("... its peak memory above the start, MB", *(in_process(kind, quick)[1] for kind in ("ours", "released")))

    classifier.eval().requires_grad_(False)
    folded = fold_batchnorm(classifier).to(memory_format=torch.channels_last)
    plain = NoisyResNet(**classifier.config).eval()
    plain.load_state_dict(classifier.state_dict())

    def released_guidance():
        inner = x.detach().requires_grad_()
        log_p = torch.log(F.softmax(plain(inner, sigma), 1) + 1e-8)
        return torch.autograd.grad(log_p, inner, F.one_hot(y, 10))[0]

    a, b = times(lambda: likelihood_score(folded, x, sigma, y), released_guidance, rounds=2 * rounds)
    row(f"guidance gradient, s (batch {batch})", a, b)

    images = torch.randint(0, 256, (2000 if quick else 50_000, 3, 32, 32), dtype=torch.uint8)
    batch_of = image_batches(images, torch.zeros(len(images), dtype=torch.long), batch, 0, 0.01, 50.0, True)
    seconds = times(lambda: batch_of(torch.Generator().manual_seed(1), 3), rounds=9)[0]
    row("cutting a batch, noise included, s", seconds, 0, f"{100 * seconds / ours_step_seconds(ours):.1f}% of a score training step")


def ours_step_seconds(ours):
    ours[0].train().requires_grad_(True)
    return times(lambda: our_step(*ours), rounds=3)[0]


def full_prdc(real, fake, k=3):
    """The `prdc` package where it is installed, else the same with full distance matrices in NumPy, as that package does it."""
    with contextlib.suppress(ImportError):
        from prdc import compute_prdc
        with contextlib.redirect_stdout(None):
            return compute_prdc(real, fake, nearest_k=k)

    def distances(x, y):
        return np.sqrt(np.maximum((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T, 0))

    def radii(x):
        return np.partition(distances(x, x), k, 1)[:, : k + 1].max(1)

    r, f, d = radii(real), radii(fake), distances(real, fake)
    return dict(precision=(d < r[:, None]).any(0).mean(), recall=(d < f).any(1).mean(), density=(d < r[:, None]).sum(0).mean() / k, coverage=(d.min(1) < r).mean())


def clouds(n, d=2048):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, d, generator=g) * torch.linspace(0.1, 2, d) for _ in range(2)]


def metrics(quick):
    """P/R/D/C and the Fréchet distance."""
    n, d = (1000, 256) if quick else (10_000, 2048)
    real, fake = clouds(n, d)
    a, b = times(lambda: prdc(real, fake), lambda: full_prdc(real.numpy(), fake.numpy()), rounds=1 if quick else 2)
    ours, theirs = prdc(real, fake), full_prdc(real.numpy(), fake.numpy())
    package = "the prdc package" if importlib.util.find_spec("prdc") else "full matrices in NumPy"
    row(f"P/R/D/C, {n} × {d}, s", a, b, f"against {package}; largest difference {max(abs(ours[key] - theirs[key]) for key in ours):.1g}")
    sizes = (n // 2, n) if quick else (n, 50_000)
    measured = {size: in_process("prdc", quick, size) for size in sizes}
    if not quick:
        row(f"... peak memory above the data, MB ({n})", measured[n][1], in_process("full_prdc", quick, n)[1])
    (t1, m1), (t2, m2) = measured[sizes[0]], measured[sizes[1]]
    row(f"... {sizes[1]} × {d}, s", t2, 0, f"{m2:.0f} MB; {sizes[1] / sizes[0]:.0f}× the points: {t2 / t1:.1f}× the time, {m2 / max(m1, 1):.1f}× the memory")

    features(quick)
    import scipy.linalg
    (m1, s1), (m2, s2) = (moments(v[: 4 * d]) for v in (real, fake))

    def by_sqrtm():
        return ((m1 - m2) ** 2).sum().item() + np.trace((s1 + s2).numpy() - 2 * scipy.linalg.sqrtm((s1 @ s2).numpy()).real)

    a, b = times(lambda: frechet_distance(m1, s1, m2, s2), by_sqrtm, rounds=1, warm=0 if not quick else 1)
    row(f"Fréchet distance, {d}, s", a, b, f"relative difference {abs(frechet_distance(m1, s1, m2, s2) / by_sqrtm() - 1):.1g}")


def features(quick):
    """Inception's features with random weights, against pytorch-fid where it is installed, else against its layers."""
    torch.manual_seed(0)
    settings = dict(weights=None, num_classes=1008, aux_logits=False, transform_input=False, init_weights=False)
    plain = import_torchvision().models.inception_v3(**settings).eval().requires_grad_(False)
    weights = plain.state_dict()
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save(weights, file.name)
        ours, _ = load_inception(file.name)
    images = torch.rand(2 if quick else 50, 3, 299, 299)
    plain.fc, note = torch.nn.Identity(), "against its layers as pytorch-fid runs them"
    if importlib.util.find_spec("pytorch_fid"):
        from pytorch_fid import inception
        with mock.patch.object(inception, "load_state_dict_from_url", lambda *_, **__: weights):
            plain = inception.InceptionV3(resize_input=False, normalize_input=False).eval()
        theirs = plain(images[:2])[0][..., 0, 0]
        difference = ((ours(images[:2]) - theirs).abs().max() / theirs.abs().max()).item()
        note = f"against pytorch-fid; largest difference {difference:.1g} of the largest feature"
    a, b = times(lambda: [ours(part) for part in images.split(10)], lambda: plain(images), rounds=1 if quick else 3)
    row(f"Inception features of {len(images)} images, s", a, b, note)


def quality(real, x):
    found = prdc(real, x, k=5)
    return " / ".join(f"{found[key]:.3f}" for key in ("precision", "recall", "coverage"))


def sampling(quick):
    """The SDE sampler against PC on one crescent, with the exact score and with trained networks, down to σ = 1."""
    import toy_moons
    points, labels = toy_moons.moons()
    data, count = points[labels == 0], 200 if quick else 2000
    preset = dict(toy_moons.PRESETS["fast"], **(dict(steps=50, batch=50) if quick else {}))
    pc_steps, sde_steps, end = (50, 5, 1.0) if quick else (1000, 100, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for join, name in (("early", "score"), ("early", "total"), ("late", "score"), ("late", "total")):
            with contextlib.redirect_stdout(io.StringIO()):
                toy_moons.train(toy_moons.Nets(folder, join, 0, "cpu"), name, preset, False)
        visits = preset["steps"] * preset["batch"]
        paper = toy_moons.PRESETS["paper"]["steps"] * toy_moons.PRESETS["paper"]["batch"]
        D_L = sum(toy_moons.score_errors("total", toy_moons.Nets(folder, "late", 0, "cpu"))["D_L"]) / 2
        row("two moons, sample visits a network, millions", visits / 1e6, paper / 1e6, f"L_Total, late: D_L {D_L:.3f}; the paper's 0.052")
        nets = toy_moons.Nets(folder, "early", 0, "cpu")
        for name, key in (("oracle", "e"), ("trained, early, L_Total", "d")):
            score, calls = toy_moons.method_scores(key, 0, nets)[0], []
            generator = torch.Generator().manual_seed(0)
            noise = lambda x: torch.randn(x.shape, generator=generator)
            counted = lambda x, sigma: (calls.append(1), score(x, sigma))[1]
            real, second = (data[torch.randint(len(data), (count,), generator=generator)] + end * noise(torch.empty(count, 2)) for _ in range(2))
            deviation = torch.linalg.cholesky(data.T.cov() + 100 * torch.eye(2))
            fast = sde_sampler(counted, data.mean(0) + noise(real) @ deviation.T, sigma_grid(sde_steps, end, 10.0)[:-1], noise=noise)
            evaluations = [len(calls)]
            pc = pc_sampler(counted, 10 * noise(real), sigma_grid(pc_steps, end, 10.0)[:-1], noise=noise)
            evaluations.append(len(calls) - evaluations[0])
            row(f"a guided sample, {name}: evaluations, SDE and PC", *evaluations,
                f"precision / recall / coverage {quality(real, fast)}, PC {quality(real, pc)}, a second sample of the data {quality(real, second)}")
        draws = [times(lambda: sde_sampler(score, 10 * torch.randn(n, 2), sigma_grid(sde_steps, end, 10.0)[:-1]), rounds=3)[0]
                 for n, score in ((n, toy_moons.method_scores("e", 0, nets)[0]) for n in (count, 2 * count))]
        row("... twice the images, s", draws[1], 0, f"{draws[1] / draws[0]:.2f}× the time")


def images(quick):
    """The same on images: Fashion-MNIST from the bundled weights, guided by L_Total, judged by the features of the other classifier."""
    box, sigma_max = HERE / "docs" / "pretrained" / "fashion-16", 20.0
    score_net, guide, judge = (load_model(box / f"{name}.pt") for name in ("score", "classifier-total", "classifier-ce"))
    guide, (count, pc_steps, sde_steps) = fold_batchnorm(guide), (20, 10, 3) if quick else (100, 1000, 100)
    y, found = torch.arange(count) % 10, {}
    for seed, name in enumerate(("SDE", "SDE again", "PC")):
        calls, parts, generator = [], [], torch.Generator().manual_seed(seed)
        noise = lambda x: torch.randn(x.shape, generator=generator)
        for labels in y.split(100):
            score = posterior_score(lambda x, sigma: (calls.append(len(x)), score_net(x, sigma))[1], guide, labels)
            x = sigma_max * noise(torch.empty(len(labels), 1, 16, 16))
            if name == "PC":
                parts.append(pc_sampler(score, x, sigma_grid(pc_steps, 0.01, sigma_max), noise=noise))
            else:
                parts.append(sde_sampler(score, x, sigma_grid(sde_steps, 0.01, sigma_max), eta=12.0, noise=noise))
        with torch.no_grad():
            features = judge.features(torch.cat(parts).clamp(0, 1), torch.full((count,), 0.01))
            found[name] = features, (judge.linear(features).argmax(1) == y).double().mean().item(), sum(calls) // count
    note = [f"{name}: class accuracy {found[name][1]:.3f}, against SDE density {m['density']:.3f}, coverage {m['coverage']:.3f}"
            for name in ("PC", "SDE again") for m in [prdc(found["SDE"][0], found[name][0])]]
    row(f"a guided image ({count} of each): evaluations, SDE and PC", found["SDE"][2], found["PC"][2],
        f"SDE: class accuracy {found['SDE'][1]:.3f}; {'; '.join(note)}; two samples of one law: 1 and 0.875")


def start_up():
    for script in ("train_score", "train_classifier", "sample", "evaluate", "toy_moons"):
        a = times(lambda: subprocess.run([sys.executable, HERE / f"{script}.py", "--help"], capture_output=True, check=True), rounds=3)[0]
        row(f"{script}.py --help, s", a, 0, "below 3 s")


def in_process(kind, quick, n=0):
    """Seconds and peak MB above the start of one job in a process of its own."""
    command = [sys.executable, __file__, "--job", kind, "--n", str(n)] + ["--quick"] * quick
    return [float(v) for v in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def job(kind, n, quick):
    def high_water():  # ru_maxrss would carry over what the parent process had
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

    if kind.endswith("prdc"):
        real, fake = clouds(n, 256 if quick else 2048)
        work = (lambda: prdc(real, fake)) if kind == "prdc" else (lambda: full_prdc(real.numpy(), fake.numpy()))
    else:
        work = dlsm_job(kind, quick)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the data
    start, begun = high_water(), time.perf_counter()
    work()
    print(time.perf_counter() - begun, high_water() - start)


def dlsm_job(kind, quick):
    batch = 8 if quick else 64
    net, classifier = NCSNpp(width=32, blocks=1).eval().requires_grad_(False), NoisyResNet(18, width=16 if quick else 32)
    x, z, sigma, y = torch.rand(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32), torch.rand(batch) + 0.1, torch.arange(batch) % 10

    def work():
        for _ in range(3):
            classifier.zero_grad()
            if kind == "ours":
                total_loss(classifier, net, x, sigma, y, z).backward()
            else:
                with as_released():
                    loss = released_total(classifier, net, x, sigma, y, z)
                loss.backward()

    return work


def released_total(classifier, net, x, sigma, y, z):
    noisy = (x + append_dims(sigma, x) * z).requires_grad_()
    with torch.no_grad():
        s = net(noisy, sigma)
    out = classifier(noisy, sigma)
    g, = torch.autograd.grad(torch.log(F.softmax(out, 1) + 1e-8), noisy, F.one_hot(y, 10), create_graph=True)
    return (0.5 * (g + s + z / append_dims(sigma, x)).square()).mean() + F.cross_entropy(out, y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--only", choices=["networks", "metrics", "sampling", "images", "start_up"], help="one part of the table")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--n", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, args.n, args.quick)
    else:
        print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n\n| what | ours | reference | ratio | note |\n| --- | --- | --- | --- | --- |")
        for part in (networks, metrics, sampling, images):
            if args.only in (None, part.__name__):
                part(args.quick)
        if args.only in (None, "start_up"):
            start_up()
        if args.json:
            about = dict(torch=torch.__version__, threads=torch.get_num_threads(), quick=args.quick)
            args.json.write_text(json.dumps(dict(about, rows=ROWS), indent=1))
