"""The paper as tests: each equation and claim; then networks, files, data and the commands in use.

    pytest test_dlsm.py               # all
    pytest test_dlsm.py -k paper      # the paper, in a minute
"""
import contextlib
import copy
import functools
import gc
import http.client
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import evaluate as ev
import sample
import toy_moons
import train_classifier
import train_score
from evaluate import frechet_distance, inception_score, knn_radii, moments, prdc
from models import (EMA, ExactScore, NCSNpp, NoisyResNet, ToyNet, UserError, append_dims, checksum, export,
                    fold_batchnorm, load_checkpoint, load_model, save_checkpoint, sigma_at)
from pytest import approx
from sample import heun_sampler, pc_sampler, posterior_score, sigma_grid
from toy_moons import moons, oracle_score
from train_classifier import ce_loss, diagnose, dlsm_loss, explained_nats, likelihood_score, total_loss
from train_score import (Plan, Progress, caught_signals, dsm_loss, fit, image_batches, import_torchvision,
                         learning_rate, load_images, lock, make_shapes, read_folder, resume, run,
                         sample_noise)

HERE = pathlib.Path(__file__).resolve().parent
OFFICIAL = HERE.parent / "shared" / "official"
SMALL = ("--preset", "tiny", "--width", 8, "--batch", 16)


def start(script, *args, cwd, processes=1, **more):
    """Starts a script as a user does, in a child that hears Ctrl-C even where this process does not."""
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--"]
    return subprocess.Popen(
        [*launch, str(HERE / script), *map(str, args)], cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **more)


def command(script, *args, cwd, code=0, processes=1, seconds=300):
    """Runs a script to its end → its output; with code 2, the one line on stderr."""
    process = start(script, *args, cwd=cwd, processes=processes)
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, out + err
    assert code != 2 or processes > 1 or len(err.strip().splitlines()) == 1, err
    return err if code == 2 else out


@pytest.fixture
def main(monkeypatch, capsys):
    """main(script, *args, cwd=, code=0): a script in this process → its output, or its one line of error."""
    def call(script, *args, cwd, code=0):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        capsys.readouterr()
        if code == 0:
            run(importlib.import_module(script).main)
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            run(importlib.import_module(script).main)
        error = capsys.readouterr().err
        assert stopped.value.code == code and (code != 2 or len(error.strip().splitlines()) == 1), error
        return error

    yield call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """A few hundred of the drawn shapes at 8×8, as an .npz."""
    images, labels, _ = load_images("shapes", "train", 8)
    pixels = images.permute(0, 2, 3, 1).numpy()
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, images=pixels[:300], labels=labels[:300],
             test_images=pixels[300:400], test_labels=labels[300:400])
    return path


@pytest.fixture(scope="session")
def trained(shapes, tmp_path_factory):
    """A folder with runs/small: a score model and two classifiers of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    command("train_score.py", "--data", shapes, *SMALL, "--steps", 12, cwd=folder)
    for loss in ("ce", "total"):
        flags = ("--data", shapes, *SMALL, "--steps", 12, "--loss", loss, "--diagnose-n", 80)
        command("train_classifier.py", *flags, cwd=folder)
    return folder


POINTS = torch.tensor([[-1.5], [-0.4], [0.7], [1.1], [2.0]], dtype=torch.float64)  # where all is known
LABELS = torch.tensor([0, 0, 1, 0, 1])
EXACT = ExactScore(POINTS, LABELS)
LINE = torch.arange(-7, 8, 0.3, dtype=torch.float64)[:, None]  # its sum is a Gaussian's integral, nearly
LEVEL = torch.full((len(LINE),), 0.6, dtype=torch.float64)
MEAN, VARIANCE = torch.tensor([1.0, -2.0]), torch.tensor([0.25, 2.0])  # of a Gaussian to sample


def near(a, b, atol=1e-9):
    return torch.allclose(a, b, rtol=0, atol=atol)


def log_density(x, points, sigma):
    """log p_σ(x) of the Parzen estimate (before Eq. 2), without the constant of the Gaussian."""
    square = (x.flatten(1)[:, None] - points.flatten(1)).square().sum(2)
    return torch.logsumexp(-square / (2 * sigma[:, None] ** 2), 1) - math.log(len(points))


def bayes(points, labels):
    """The exact classifier of a data set: logits whose softmax is p_σ(y|x̃)."""
    parts = [points[labels == c] for c in labels.unique()]
    return lambda x, sigma: torch.stack([log_density(x, v, sigma) + math.log(len(v)) for v in parts], 1)


def gradient(function, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def gaussian_score(x, sigma):
    return (MEAN.to(x) - x) / (VARIANCE.to(x) + sigma[:, None] ** 2)


@pytest.mark.parametrize("kind", ["points", "images"])
def test_paper_eq_2_proposition_1_exact_score_is_the_gradient_of_the_log_density(kind, shapes):
    g = torch.Generator().manual_seed(0)
    data, labels, *_ = moons(22_000) if kind == "points" else load_images(str(shapes))
    mixed = torch.randperm(len(data), generator=g)
    data, labels = data[mixed], labels[mixed]
    points = data.double() if kind == "points" else data.double() / 255
    rows = torch.randint(len(data), (200,), generator=g)  # with 22,000 points two blocks of weights
    sigma = sigma_at(torch.rand(len(rows), generator=g, dtype=torch.float64), 0.01, 50.0)
    z = torch.randn(points[rows].shape, generator=g, dtype=torch.float64)
    x, y = points[rows] + append_dims(sigma, z) * z, labels[rows]
    x[0], x[1] = 400, points[7]  # far out, where p is 0 in float64, and on a point
    prior, posterior = gradient(lambda x: log_density(x, points, sigma), x), torch.zeros_like(x)
    for c in labels.unique():
        own = y == c
        posterior[own] = gradient(lambda x: log_density(x, points[labels == c], sigma[own]), x[own])
    single, double = ExactScore(data, labels), ExactScore(points, labels)
    p = torch.softmax(bayes(points, labels)(x, sigma), 1)
    mixture = sum(append_dims(p[:, c], x) * double(x, sigma, torch.full_like(y, c)) for c in labels.unique())
    for name, found, truth, limit in (
            ("prior", double(x, sigma), prior, 1e-9), ("posterior", double(x, sigma, y), posterior, 1e-9),
            ("Bayes", mixture, prior, 1e-9), ("float32", single(x.float(), sigma.float()), prior, 1e-3),
            ("float32, y", single(x.float(), sigma.float(), y), posterior, 1e-3)):
        size = truth.flatten(1).norm(dim=1) + 1 / sigma  # 1/σ is about the score of a noisy point
        assert ((found - truth).flatten(1).norm(dim=1) / size).max() < limit, name


@pytest.mark.parametrize("equations", ["3 and 4", "8 and 9"])
def test_paper_theorem_1_denoising_and_explicit_losses_have_equal_gradients(equations):
    """Of the true score, or of the true classifier, plus a wave; E is a sum over the points and the line."""
    def losses(x, sigma, y, z):
        noisy = x + sigma[:, None] * z
        if equations == "3 and 4":
            score = lambda x, sigma: EXACT(x, sigma) + amount * torch.sin(2 * x)
            error = score(noisy, sigma) - EXACT(noisy, sigma)
            return dsm_loss(score, x, sigma, z, 0), error.square().sum() / 2
        wave = lambda x: amount * torch.cat([torch.sin(2 * x), 0 * x], 1)
        logits = lambda x, sigma: bayes(POINTS, LABELS)(x, sigma) + wave(x)
        truth = EXACT(noisy, sigma, y) - EXACT(noisy, sigma)  # Eq. 5
        error = likelihood_score(logits, noisy, sigma, y, create_graph=True) - truth
        return dlsm_loss(logits, EXACT, x, sigma, y, z), error.square().sum() / 2

    for start in (0.0, 0.3):
        amount, total = torch.tensor(start).double().requires_grad_(), 0
        for point, label in zip(POINTS, LABELS):
            z = (LINE - point) / LEVEL[0]
            for one, weight in zip(z, torch.softmax(-0.5 * z[:, 0] ** 2, 0) / len(POINTS)):
                if weight > 1e-14:
                    pair = losses(point[None], LEVEL[:1], label[None], one[None])
                    total = total + weight * torch.stack(pair)
        denoising, explicit = (torch.autograd.grad(v, amount, retain_graph=True)[0].item() for v in total)
        assert abs(denoising - explicit) < 1e-9
        assert abs(denoising) < 1e-9 if start == 0 else denoising > 0.02  # smallest at the truth


def test_paper_eq_5_and_6_posterior_score_is_likelihood_plus_prior():
    classifier, prior = bayes(POINTS, LABELS), EXACT(LINE, LEVEL)
    for c in (0, 1):
        want, rows = EXACT(LINE, LEVEL, torch.full((len(LINE),), c)), [c] * len(LINE)
        for y in (c, torch.tensor(c), [c], rows, torch.tensor(rows)):
            assert near(posterior_score(EXACT, classifier, y)(LINE, LEVEL), want)
            assert near(posterior_score(EXACT, None, y)(LINE, LEVEL), want)
    assert torch.equal(posterior_score(EXACT, classifier)(LINE, LEVEL), prior)
    for guide in (classifier, None):  # None: a conditional score model, method (c)
        for alpha in (10.0, lambda sigma: 10 * sigma / 0.6):
            got = posterior_score(EXACT, guide, 1, alpha)(LINE, LEVEL)
            assert near(got, prior + 10 * (want - prior), 1e-8)
        for low, high, guided in ((0.6, 2, True), (0.1, 0.6, True), (0.61, 2, False), (0.1, 0.59, False)):
            got = posterior_score(EXACT, guide, 1, interval=(low, high))(LINE, LEVEL)
            assert near(got, want if guided else prior)
        for y in ([0, 1], torch.zeros(len(LINE) + 1, dtype=torch.long), 0.0, torch.zeros(len(LINE))):
            with pytest.raises(UserError, match=f"one class, or one for each of the {len(LINE)} images"):
                posterior_score(EXACT, guide, y)(LINE, LEVEL)
    images, level, y = torch.rand(5, 1, 3, 4), torch.full((5,), 2.0), torch.tensor([2, 0, 1, 2, 2])
    net = lambda x, sigma, y=0 * y: append_dims(y, x) - x
    got = posterior_score(net, None, y, lambda sigma: 1.5 * sigma)(images, level)
    assert near(got, 3 * append_dims(y, images) - images, 1e-6)  # α(σ) beside images


def test_paper_eq_7_the_distances_of_table_1_on_the_moons(monkeypatch):
    """Networks with known errors: the prior is off by (3, 4), the logit of c1 is 0.1 x."""
    monkeypatch.setattr(toy_moons, "moons", lambda n=None: moons(300))
    (points, labels), grid, shift = moons(300), toy_moons.GRID.double(), torch.tensor([3.0, 4.0])
    assert len(grid.unique(dim=0)) == 1225 and grid.abs().amax(0).tolist() == [40, 25]
    assert near(grid.view(35, 35, 2).diff(dim=0)[..., 1], torch.tensor(50 / 34).double(), 1e-5)
    wrong = lambda x, sigma: oracle_score(x, points, sigma) + shift
    logits = lambda x, sigma: torch.stack([0.1 * x[:, 0], 0 * x[:, 0]], 1)
    nets = types.SimpleNamespace(device="cpu", load=dict(score=wrong, c1=wrong, c2=wrong, ce=logits).get)
    level, p = torch.full((1225,), 7.5).double(), torch.sigmoid(0.1 * grid[:, 0])
    prior = gradient(lambda x: log_density(x, points.double(), level), grid)
    for key, alpha in (("a", 1), ("b", 10), ("ce", 1)):
        errors = toy_moons.score_errors(key, nets)
        for c, slope in ((0, 0.1 * (1 - p)), (1, -0.1 * p)):
            S_L = alpha * torch.stack([slope, 0 * slope], 1)
            posterior = gradient(lambda x: log_density(x, points[labels == c].double(), level), grid)
            D_P, D_L = prior + shift + S_L - posterior, S_L - (posterior - prior)
            assert errors["D_P"][c] == approx(D_P.norm(dim=1).mean().item(), rel=1e-4)
            assert errors["D_L"][c] == approx(D_L.norm(dim=1).mean().item(), rel=1e-4)
    assert toy_moons.score_errors("e", nets) == dict(D_P=[0.0, 0.0], D_L=[0.0, 0.0])
    assert toy_moons.score_errors("c", nets)["D_L"] == [None, None]


def test_paper_eq_4_10_11_a3_a4_a5_losses_by_hand():
    """x̃ = (2, 1) and (2, −2), s = −x̃/2, logits (x̃₁, 0); ∇ log p is (1 − p, 0) for y = 0, (−p, 0) for 1."""
    x, z = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 2.0], [1.0, -2.0]])
    sigma, y, p, calls = torch.tensor([0.5, 2.0]), torch.tensor([0, 1]), 1 / (1 + math.exp(-2)), []

    def score(noisy, level):
        assert noisy.tolist() == [[2, 1], [2, -2]] and level is sigma and torch.is_grad_enabled() == learning
        return -noisy / 2

    def logits(x, sigma):
        calls.append(1)
        return torch.stack([x[:, 0], 0 * x[:, 0]], 1)

    ce = -(math.log(p) + math.log(1 - p)) / 2
    dsm = 3**2 + 3.5**2, 0.5**2  # ‖s + z/σ‖²: (−1 + 4, −½ + 4) and (−1 + ½, 1 − 1)
    dlsm = (3 + 1 - p) ** 2 + 3.5**2, (0.5 + p) ** 2
    for power, reduce in itertools.product((0, 2, 4), ("mean", "sum")):
        weigh = lambda squares: (0.5**power * squares[0] + 2**power * squares[1]) / 4
        learning = True
        assert dsm_loss(score, x, sigma, z, power).item() == approx(weigh(dsm))
        learning = False  # the score model is frozen
        want = weigh(dlsm) / (2 if reduce == "mean" else 1)
        assert dlsm_loss(logits, score, x, sigma, y, z, power, reduce).item() == approx(want)
        assert total_loss(logits, score, x, sigma, y, z, 3.0, power, reduce).item() == approx(want + 3 * ce)
    assert len(calls) == 12  # one forward pass for each loss
    assert ce_loss(logits, x, sigma, y, z).item() == approx(ce)
    assert dlsm_loss(logits, score, x, sigma, y, z).item() == approx(sum(dlsm) / 8)
    assert total_loss(logits, score, x, sigma, y, z).item() == approx(sum(dlsm) / 8 + ce)
    learning = True
    assert dsm_loss(score, x, sigma, z).item() == approx(0.25 * dsm[0] / 4 + dsm[1])


def test_paper_likelihood_score_against_finite_differences_where_p_is_1e_minus_30():
    torch.manual_seed(0)
    weights, x = torch.randn(2, 3, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    classifier = lambda x, sigma: 40 * x @ weights.to(x) + torch.sin(3 * x @ weights.to(x))
    y, alpha = classifier(x, None).argmin(1), torch.linspace(0, 3, 50, dtype=torch.float64)
    log_p = lambda x: F.log_softmax(classifier(x, None), 1)[range(50), y]
    assert log_p(x).min() < math.log(1e-30)
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    numeric = torch.stack([(log_p(x + step) - log_p(x - step)) / 2e-5 for step in steps], 1)
    single = likelihood_score(classifier, x.float(), None, y)
    assert near(likelihood_score(classifier, x, None, y), numeric, 1e-5) and not single.requires_grad
    assert near(likelihood_score(classifier, x, None, y, alpha), alpha[:, None] * numeric, 1e-5)
    assert near(single.double(), numeric, 0.1) and numeric.abs().max() > 100


def test_paper_proposition_2_and_eq_a1_a2_renormalised_likelihood_keeps_the_gradient_of_z():
    y = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    wide, narrow = (torch.exp(-(y**2) / (2 * v)) / math.sqrt(2 * math.pi * v) for v in (1.0, 0.5))
    for x, z in ((-1, 1 / math.sqrt(2 * math.pi)), (1, 1 / math.sqrt(4 * math.pi))):  # no constant Z for p²
        p = ((x + 1) ** 2 * wide + (x - 1) ** 2 * narrow) / (2 * (x**2 + 1))
        assert torch.trapezoid(p, y).item() == approx(1) and torch.trapezoid(p**2, y).item() == approx(z)
    classifier, y = bayes(POINTS, LABELS), torch.ones(len(LINE), dtype=torch.long)
    for alpha in (1.0, 5.0):
        grad_z = gradient(lambda x: torch.logsumexp(alpha * F.log_softmax(classifier(x, LEVEL), 1), 1), LINE)
        want = alpha * likelihood_score(classifier, LINE, LEVEL, y) - grad_z
        assert grad_z.abs().max() > 0.1 if alpha > 1 else near(grad_z, 0 * grad_z)
        for a in (alpha, torch.full_like(LEVEL, alpha)):
            assert near(likelihood_score(classifier, LINE, LEVEL, y, a, renormalize=True), want)
        a2 = posterior_score(EXACT, classifier, y, alpha, renormalize=True)(LINE, LEVEL)
        assert near(a2, want + EXACT(LINE, LEVEL))


def test_paper_a_6_noise_levels_and_learning_rate():
    assert near(sigma_at(torch.linspace(0, 1, 3)), torch.tensor([0.01, 0.5**0.5, 50.0]), 1e-5)
    assert sigma_at(0.5, 0.1, 10.0) == approx(1)
    assert sigma_grid(5, 0.01, 100.0).tolist() == approx([100, 10, 1, 0.1, 0.01, 0])
    assert sigma_grid(3, 1, 2**7, rho=7).tolist() == approx([128, 1.5**7, 1, 0])
    sigma, z = sample_noise(torch.Generator().manual_seed(0), (100_000, 2), 0.01, 50.0)
    g = torch.Generator().manual_seed(0)
    t = 1e-5 + (1 - 1e-5) * torch.rand(100_000, generator=g)
    assert torch.allclose(sigma, 0.01 * 5000**t, rtol=2e-6)
    assert torch.equal(z, torch.randn(100_000, 2, generator=g))
    for plan, wanted in (
            (Plan(10, 0.1, warmup=4), {0: 0.025, 1: 0.05, 3: 0.1, 4: 0.1, 9: 0.1}),
            (Plan(10, 0.1, cosine=True), {0: 0.1, 5: 0.05, 9: 0.05 - 0.05 * math.cos(math.pi / 10)}),
            (Plan(8, 0.1, 4, True), {0: 0.025, 2: 0.075 * (0.5 + 0.125**0.5), 4: 0.05})):
        assert {step: learning_rate(step, plan) for step in wanted} == approx(wanted)


def test_paper_algorithm_1_by_hand():
    """‖s‖ = 5, 10 and ‖z‖ = 10, 10: √(2ε) = 2 snr ‖z‖/‖s‖ is 0.32 · 10 / 7.5, per sample 0.64 and 0.32."""
    x, s = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    z, walk, calls, noises = torch.tensor([[6.0, 8.0], [-8.0, 6.0]]), [], [], []
    for per_sample, root in ((False, torch.tensor(0.64 / 1.5)), (True, torch.tensor([[0.64], [0.32]]))):
        got = pc_sampler(lambda x, sigma: s, x, [2.0, 2.0], per_sample=per_sample, noise=lambda x: z)
        assert near(got, x + root**2 / 2 * s + root * z, 1e-5)

    def score(x, sigma):
        calls.extend([sigma.item(), x.item()])
        return -x

    def noise(x):
        noises.append(1)
        return torch.ones_like(x)

    at = 10.0
    for sigma, variance in ((2.0, 3), (1.0, 1)):  # correctors, then the predictor, as released
        for _ in range(2):
            walk += [sigma, at]
            root = 2 * 0.1 / abs(at)
            at = at - root**2 / 2 * at + root
        walk += [sigma, at]
        at = at - variance * at + (math.sqrt(3) if sigma == 2 else 0)  # the last mean has no noise
    got = pc_sampler(score, torch.tensor([[10.0]]), torch.tensor([2.0, 1.0, 0.0]), 0.1, 2, noise=noise)
    assert got.item() == approx(at, abs=1e-5) and calls == approx(walk, rel=1e-5) and len(noises) == 5


def test_paper_heun_by_hand_its_order_and_a_score_of_zero():
    def score(x, sigma):
        levels.append(sigma.item())
        return -x / 4

    for gamma, raised in ((0.0, [4, 2, 1]), (0.5, [4, 3, 1.5]), (9.0, [4, 4, 4])):  # never above the first
        levels, x = [], 8.0
        for sigma, at, below in zip((4, 2, 1), raised, (2, 1, 0)):
            x = x + math.sqrt(at**2 - sigma**2) * 0.5
            slope = at * x / 4
            ahead = x + (below - at) * slope
            x = x + (below - at) * (slope + below * ahead / 4) / 2 if below else ahead
        got = heun_sampler(score, torch.tensor([[8.0]]), [4, 2, 1, 0], gamma, lambda x: 0.5 + 0 * x)
        assert got.item() == approx(x, rel=1e-5) and levels == [raised[0], 2, raised[1], 1, raised[2]]
    x, error = torch.linspace(-20, 20, 10, dtype=torch.float64)[:, None].expand(10, 2), {}
    exact = MEAN + (x - MEAN) * ((VARIANCE + 0.01) / (VARIANCE + 100)).sqrt()
    for n in (20, 40, 80):
        ends = heun_sampler(gaussian_score, x, sigma_grid(n, 0.1, 10.0, rho=7)[:-1])
        error[n] = (ends - exact).abs().max().item()
    assert 3.2 < error[20] / error[40] < 5 and 3.5 < error[40] / error[80] < 4.6, error
    for sampler in (pc_sampler, heun_sampler):
        with pytest.raises(UserError, match="the score is zero at step 0, σ = 0.3"):
            sampler(lambda x, sigma: 0 * x, torch.ones(3, 2), [0.3, 0.1])


@pytest.mark.parametrize("sampler, end", [("eq 1", 1), ("pc", 0), ("pc", 1), ("heun", 0), ("gamma", 1)])
def test_paper_eq_1_and_the_samplers_on_a_gaussian(sampler, end):
    torch.manual_seed(0)
    x = MEAN + (VARIANCE + 100).sqrt() * torch.randn(10_000, 2)
    sigmas = sigma_grid(200, max(end, 0.01), 10.0, rho=None if sampler == "pc" else 7)
    sigmas = sigmas if end == 0 else sigmas[:-1]
    if sampler == "eq 1":  # Langevin diffusion at a constant noise level, from another law
        x = pc_sampler(gaussian_score, x / 3, [1.0] * 500, snr=0.1)
    elif sampler == "pc":  # the corrector's bias grows as snr²: 5% at 0.16 in two dimensions
        x = pc_sampler(gaussian_score, x, sigmas, snr=0.08)
    else:
        x = heun_sampler(gaussian_score, x, sigmas, gamma=0.4 if sampler == "gamma" else 0.0)
    assert near(x.mean(0), MEAN, 0.1) and torch.allclose(x.var(0), VARIANCE + end**2, rtol=0.08)


def test_paper_moons_and_the_samplers_with_their_oracle():
    """Langevin steps forget a start that is not the moons' law, N(0, 10²); an ODE cannot."""
    (points, labels), centres, g = moons(), [], torch.Generator().manual_seed(1)
    assert labels.bincount().tolist() == [5_000] * 2 and near(points.mean(0), torch.zeros(2), 1e-4)
    for c, side in ((0, 1), (1, -1)):  # half circles of radius 20, c1 the upper one, evenly spaced
        arc = points[labels == c]
        centres.append((arc[0] + arc[-1]) / 2)
        assert ((arc - centres[c]).norm(dim=1) - 20).abs().max() < 1e-3
        assert (side * (arc - centres[c])[:, 1]).min() > -1e-3
        assert (arc.double().diff(dim=0).norm(dim=1) - 20 * math.pi / 4999).abs().max() < 1e-4
    assert near(centres[1] - centres[0], torch.tensor([20.0, 10.0]), 1e-3)
    arc = moons(600)[0][:300]
    oracle = lambda x, sigma: oracle_score(x, arc, sigma)
    noise = lambda x: torch.randn(x.shape, generator=g)
    noisy = lambda sigma: arc.repeat(4, 1) + sigma * torch.randn(1_200, 2, generator=g)
    real, start = noisy(7.5), torch.randn(1_200, 2, generator=g)
    same, pc, heun, ode = (ev.prdc(real, x, k=5)["coverage"] for x in (
        noisy(7.5), pc_sampler(oracle, 10 * start, torch.linspace(10, 7.5, 101), noise=noise),
        heun_sampler(oracle, 200 * start, 200 * 0.0375 ** torch.linspace(0, 1, 21)),
        heun_sampler(oracle, 10 * start, torch.linspace(10, 7.5, 21))))
    assert min(pc, heun) > same - 0.03 and ode < 0.85, (same, pc, heun, ode)
    for x in (heun_sampler(oracle, 200 * start, sigma_grid(20, 0.01, 200, rho=7)),
              pc_sampler(oracle, noisy(10), sigma_grid(50, 0.01, 10), noise=noise)):
        distance, nearest = torch.cdist(x, arc).min(1)
        share = (nearest // 60).bincount(minlength=5) / 1_200
        assert distance.max() < 0.2 and 0.15 < share.min() and share.max() < 0.25, share


def test_paper_theorem_1_on_images_the_diagnosis_by_hand(shapes):
    images, labels, _ = load_images(str(shapes))
    images, labels, seen = images[:100], labels[:100], []
    exact, perfect = ExactScore(images, labels), bayes(images.float() / 255, labels)
    images, labels = images.repeat(5, 1, 1, 1), labels.repeat(5)
    waves = 0.1 * torch.randn(192, 10, generator=torch.Generator().manual_seed(0))

    def classifier(x, sigma):  # right in part
        seen.append((x.detach(), sigma))
        return 0.6 * perfect(x, sigma) + torch.sin(x.flatten(1) @ waves / (1 + sigma[:, None]))

    table = diagnose(classifier, exact, images, labels, 0.01, 50.0, truth=exact)
    noisy = [torch.cat(part) for part in zip(*seen)]
    for b, row in enumerate(table):
        x, sigma = (v[500 * b : 500 * b + 500] for v in noisy)
        t = 10 * (sigma / 0.01).log() / math.log(5000) - b
        assert -1e-4 < t.min() < 0.1 and 0.9 < t.max() < 1 + 1e-4
        assert row["sigma"] == approx(0.01 * 5000 ** (b / 10 + 0.05)) and row["n"] == 500
        logits, g = classifier(x, sigma), likelihood_score(classifier, x, sigma, labels).flatten(1).double()
        prior = exact(x, sigma)
        h = (exact(x, sigma, labels) - prior).flatten(1).double()
        residual = ((images / 255 - x) / append_dims(sigma, x) ** 2 - prior).flatten(1).double()  # t − s
        inner, square = sigma**2 * (g * residual).sum(1), sigma**2 * (g * g).sum(1)
        gain, alpha = 2 * inner - square, inner.mean() / square.mean()
        truth = dict(gain=gain, h=h.norm(dim=1), h_nats=sigma**2 * h.square().sum(1), D_L=(g - h).norm(dim=1),
                     ce=F.cross_entropy(logits, labels, reduction="none").detach().double(),
                     accuracy=(logits.argmax(1) == labels).double())
        if square.mean() > 1e-12:
            truth["alpha"] = alpha + (inner - alpha * square) / square.mean()
        for key, value in truth.items():
            want = value.mean().item(), value.std().item() / 500**0.5
            assert (row[key], row[f"{key}_se"]) == approx(want, rel=0.01, abs=1e-4), (key, b)
        theorem = gain - sigma**2 * (h.square().sum(1) - (g - h).square().sum(1))
        assert abs(theorem.mean()) < 4 * theorem.std() / 500**0.5 + 1e-4
    total, error = sum(row["gain"] for row in table), sum(row["gain_se"] ** 2 for row in table) ** 0.5
    width = math.log(5000) / 10
    assert explained_nats(table, 0.01, 50.0) == approx((width * total, width * error))


def test_paper_nats_promise_class_accuracy_and_the_oracle_draws_training_images(shapes, monkeypatch):
    """g = α h lacks (1 − α)² log(10) nats: a sample of the guided SDE is of its class with p ≥ exp(−lack)."""
    images, labels, _ = load_images(str(shapes))
    exact, y = ExactScore(images[:100], labels[:100]), labels[:100].repeat(30)
    monkeypatch.setattr(train_classifier, "NCSNpp", ExactScore)  # as a conditional score model its g is h
    table = diagnose(exact, exact, images[:100].repeat(30, 1, 1, 1), y, 0.01, 50.0, batch=1000, truth=exact)
    assert max(row["D_P"] for row in table) < 1e-2 and "accuracy" not in table[0]
    shifted = diagnose(exact, lambda x, sigma: exact(x, sigma) + 1, images[:100], y, 0.1, 50.0, truth=exact)
    assert [row["D_P"] for row in shifted] == approx([math.sqrt(192)] * 10, rel=1e-4)  # s is off, h is not
    assert [row["D_L"] for row in shifted] == [0] * 10
    for key in ("gain", "h_nats"):
        nats, error = explained_nats(table, 0.01, 50.0, key)
        assert abs(nats - math.log(10)) < 4 * error + 0.01 and error < 0.06  # the images tell their class
    torch.manual_seed(0)
    for alpha in (0.0, 0.5, 1.0):
        score, bound = posterior_score(exact, None, y[:300], alpha), 0.1 ** ((1 - alpha) ** 2)
        x = pc_sampler(score, 50 * torch.randn(300, 3, 8, 8), sigma_grid(200, 0.01, 50.0), corrector_steps=0)
        nearest = torch.cdist(x.flatten(1), exact.images.flatten(1) / 255).argmin(1)
        accuracy = (exact.labels[nearest] == y[:300]).double().mean().item()
        assert accuracy > bound - 0.07
        assert alpha == 0.5 or accuracy == approx(bound, abs=0.07)  # equal at both ends
    score, y = posterior_score(ExactScore(images, labels), y=labels[:100]), labels[:100].tolist()
    x = heun_sampler(score, 50 * torch.randn(100, 3, 8, 8), sigma_grid(40, 0.01, 50.0, rho=7), gamma=1.0)
    known = {(v.numpy().tobytes(), c): i for i, (v, c) in enumerate(zip(images, labels.tolist()))}
    drawn = [known.get((v.numpy().tobytes(), c)) for v, c in zip((255 * x).round().to(torch.uint8), y)]
    assert None not in drawn and len(set(drawn)) > 78  # ten draws from the thirty of each class give 86


def test_paper_a_6_constants_of_the_paper_and_the_release():
    flags = lambda module: vars(module.make_parser().parse_args([]))
    for found, wanted in (
            (train_score.PRESETS["paper"], dict(
                width=128, mults=(1, 2, 2, 2), blocks=8, attention=(16,), dropout=0.1, edm=False,
                steps=950_000, batch=128, lr=2e-4, warmup=5_000, cosine=False, ema=0.999)),
            (train_classifier.PRESETS["paper"], dict(
                depth=18, width=64, norm="batch", scaled=False, act="relu", lam=1.0, power=0.0, reduce="mean",
                steps=60_000, batch=100, lr=2e-4, cosine=False)),
            (toy_moons.PRESETS["paper"], dict(
                joins=("late",), scaled=False, steps=40_000, batch=4_000, lr=6.5e-4, lr_classifier=2e-5,
                cosine=False, samples=10_000)),
            (vars(toy_moons), dict(WIDTHS=(128, 64, 32), SIGMA_MIN=0.01, SIGMA_MAX=10.0, SIGMA=7.5, POWER=4,
                                   LAMBDA=0.125, NEIGHBOURS=5)),
            ({key: method[1:] for key, method in toy_moons.METHODS.items()}, dict(
                a=("ce", 1, False), b=("ce", 10, False), renorm=("ce", 10, True), d=("total", 1, False))),
            (sample.GUIDANCE, dict(
                base=("ce", 1, False), scaling=("ce", 10, False), renorm=("ce", 10, True),
                dlsm=("total", 1, False), **dict.fromkeys(("none", "free", "oracle"), (None, 1, False)))),
            (vars(train_score), dict(SIGMA_MIN=0.01, CLIP=1.0)),
            (flags(train_score), dict(sigma_max=50.0, drop=0.1)),
            (flags(sample), dict(snr=0.16, corrector_steps=1, per_sample=False)),
            (flags(ev), dict(k=3, cas_model="resnet50")), (ev.CAS, dict(batch=150, lr=2e-4))):
        assert {key: found[key] for key in wanted} == wanted


def test_paper_a_6_initial_values_as_released():
    torch.manual_seed(0)
    nets = NoisyResNet(width=8).embed, NCSNpp(8, 3, 16, (1, 2), 1, attention=(8,))
    for name, p in itertools.chain(*(net.named_parameters() for net in nets)):
        if name.endswith(("conv1.weight", "out.weight", "last.weight", "bias")):
            assert not p.any(), name
        elif p.ndim > 1:  # Xavier, uniform; with variance scale 0.1 in attention
            bound = math.sqrt(6 / (p[0].numel() + p[:, 0].numel()))
            if name.endswith(("query.weight", "key.weight", "value.weight")):
                bound *= math.sqrt(0.1)
            assert 0.9 < p.abs().max() / bound < 1.0001, name
    assert 8 < nets[0].W.std() < 24 and 8 < nets[1].embed.W.std() < 24  # 16 randn


@pytest.fixture
def caught(main, monkeypatch, tmp_path):
    """caught(classes, *command line): what reaches `fit` or the sampler; with `caught.nets` as its models."""
    torch.manual_seed(0)
    nets = dict(score=NCSNpp(8, 3, 8, (1, 2), 1, edm=True).eval(), classifier=NoisyResNet(width=8).eval())
    for kind, net in nets.items():
        net.about = dict(kind=kind, settings=dict(sigma_min=0.01, sigma_max=50.0, data="x"), sha="", step=0)

    def call(classes, *command_line):
        got, images = [], torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8)
        for module in (train_score, train_classifier, sample):
            for name, stand_in in dict(
                    fit=lambda *inputs: got.extend(inputs), make_samples=lambda *inputs: got.extend(inputs),
                    load_image_model=lambda path, device, kind, maker: nets[kind],
                    load_images=lambda *_: (images, torch.arange(200) % classes, ["name"] * classes)).items():
                monkeypatch.setattr(module, name, stand_in, raising=False)
        main(*command_line, "--device", "cpu", cwd=tmp_path)
        return images, got

    call.nets = nets
    return call


@pytest.mark.parametrize("classes, loss, preset", [
    (10, None, "paper"), (10, "ce", "paper"), (10, "dlsm", "paper"), (10, "total", "paper"),
    (100, "total", "paper"), (10, "dlsm", "tiny"), (10, "total", "tiny")])
def test_paper_a_6_training_runs_the_presets(classes, loss, preset, caught):
    script = ["train_classifier", "--loss", loss] if loss else ["train_score"]
    images, got = caught(classes, *script, "--preset", preset, "--width", 8)
    net, batch, loss_of, _, _, _, plan, *_ = got
    x, sigma, y, z = batch(torch.Generator().manual_seed(0), 0)
    value, known = loss_of(x, sigma, y, z).item(), {(v / 255).numpy().tobytes() for v in images}
    upright = sum(v.numpy().tobytes() in known for v in x) / len(x)
    numbers = plan.steps, plan.lr, plan.warmup, plan.cosine, plan.clip, plan.ema
    assert 0.01 <= sigma.min() < 0.05 and 10 < sigma.max() <= 50 and len(x) == (100 if loss else 128)
    if loss is None:  # the network starts at zero
        assert numbers == (950_000, 2e-4, 5_000, False, 1.0, 0.999) and 0.3 < upright < 0.7  # mirror images
        assert value == approx(z.square().flatten(1).sum(1).mean().item() / 2, rel=1e-5)
        return
    paper = preset == "paper"
    assert upright == 1 and net.config["depth"] == (34 if classes == 100 else 18)
    assert not paper or numbers == (60_000, 2e-4, 1_000 if classes == 100 else 0, False, 1.0, 0.0)
    power, reduce, size = (0, "mean", 1) if paper else (2, "sum", 192)  # a sum is divided by d, with λ's term
    dlsm = dlsm_loss(net, caught.nets["score"], x, sigma, y, z, power, reduce).item()
    ce = ce_loss(net, x, sigma, y, z).item()
    assert value == approx(dict(ce=ce, dlsm=dlsm, total=dlsm + ce)[loss] / size, rel=1e-3)


def test_paper_a_6_sampling_runs_algorithm_1_as_stated(caught):
    x, sigma, y = torch.rand(2, 3, 8, 8), torch.full((2,), 0.5), torch.tensor([3, 4])
    wanted = dict(steps=1000, snr=0.16, corrector_steps=1, per_sample=False, sigma_min=0.01, sigma_max=50.0)
    for guidance, alpha in (("scaling", 10), ("base", 1), ("dlsm", 1), ("none", 0)):
        _, (_, recipe, score_for, *_) = caught(10, "sample", "--guidance", guidance, "--sampler", "pc")
        assert {key: recipe[key] for key in wanted} == wanted
        h = likelihood_score(caught.nets["classifier"], x, sigma, y)
        want = caught.nets["score"](x, sigma) + alpha * h
        assert torch.allclose(score_for(y)(x, sigma), want, rtol=1e-3, atol=1e-4) and h.abs().max() > 1e-3


def test_paper_a_6_the_moons_run_the_preset(monkeypatch):
    got, score = [], lambda x, sigma: -x / 50
    nets = types.SimpleNamespace(join="late", seed=0, device="cpu", load=lambda _: score, path=pathlib.Path)
    monkeypatch.setattr(toy_moons, "fit", lambda *inputs: got.extend(inputs))
    monkeypatch.setattr(toy_moons, "oracle_score", lambda x, points, sigma: x)
    for name in ("score", "c2", "ce", "dlsm", "total"):
        got.clear()
        toy_moons.train(nets, name, toy_moons.PRESETS["paper"])
        net, batch, loss, _, kind, _, plan, *_ = got
        x, sigma, y, z = batch(torch.Generator().manual_seed(0), 0)
        assert len(x) == 4_000 and 0.01 <= sigma.min() < 0.0102 and 9.9 < sigma.max() <= 10
        assert y.unique().tolist() == ([1] if name == "c2" else [0, 1])
        assert net.config == dict(outputs=2, widths=(128, 64, 32), join="late", scaled=False)
        assert (plan.steps, plan.warmup, plan.clip, plan.ema, plan.cosine) == (40_000, 0, math.inf, 0, False)
        assert (plan.lr, kind) == ((2e-5, "classifier") if name in toy_moons.LOSSES else (6.5e-4, "score"))
        dsm, dlsm = dsm_loss(net, x, sigma, z, 4).item(), dlsm_loss(net, score, x, sigma, y, z, 4).item()
        ce = ce_loss(net, x, sigma, y, z).item()
        want = dict(ce=ce, dlsm=dlsm, total=dlsm + 0.125 * ce).get(name, dsm)
        assert loss(x, sigma, y, z).item() == approx(want, rel=1e-6)


def test_paper_a_6_the_moons_are_sampled_to_7_5_and_compared_with_real_points_of_that_noise(monkeypatch):
    def oracle(x, points, sigma):
        levels.append(sigma[0].item())
        return oracle_score(x, points, sigma)

    levels, (points, labels) = [], moons(200)
    monkeypatch.setattr(toy_moons, "oracle_score", oracle)
    monkeypatch.setattr(toy_moons, "moons", lambda n=None: (points, labels))
    monkeypatch.setattr(toy_moons, "score_errors", lambda *_: {})
    monkeypatch.setattr(toy_moons, "prdc", lambda real, fake, k: dict(seen=(real, fake, k)))
    row, _ = toy_moons.measure("e", types.SimpleNamespace(device="cpu", seed=0), 2_000)
    assert len(levels) == 400 and levels[:2] == approx([10, 10]) and 7.5 < levels[-1] < 7.55
    for c, (real, fake, k) in enumerate(row["seen"]):
        arc = points[labels == c]
        assert k == 5 and len(real) == len(fake) == 2_000
        for x in (real, fake):
            assert near(x.mean(0), arc.mean(0), 2.5)
            assert torch.allclose(x.var(0), arc.var(0) + 7.5**2, rtol=0.15)


@pytest.mark.parametrize("name, clip", [("dsm", 0.7), ("ce", 0.5), ("dlsm", 0.04), ("total", 0.1)])
def test_paper_training_steps_by_hand_in_float64(name, clip, tmp_path):
    """Three steps of `fit`: gradient, clip, Adam, warm-up and cosine, EMA; the losses written out anew."""
    torch.manual_seed(1)
    net, s = ToyNet(2, (8, 4), "early", scaled=False), lambda x, sigma: -x / 2
    twin = copy.deepcopy(net).double()
    batches = [(2 * torch.randn(6, 2), torch.rand(6) + 0.3, torch.randint(2, (6,)), torch.randn(6, 2))
               for _ in range(3)]
    losses = dict(dsm=lambda x, sigma, y, z: dsm_loss(net, x, sigma, z),
                  ce=lambda *batch: ce_loss(net, *batch),
                  dlsm=lambda *batch: dlsm_loss(net, s, *batch, power=2),
                  total=lambda *batch: total_loss(net, s, *batch, lam=0.125, power=2))
    plan, path = Plan(3, 0.01, warmup=2, cosine=True, clip=clip, ema=0.26), tmp_path / "net.pt"
    average = fit(net, lambda generator, step: batches[step], losses[name], path, "score", {}, plan)

    def by_hand(x, sigma, y, z):
        noisy = (x + sigma[:, None] * z).requires_grad_()
        out = twin(noisy, sigma)
        log_p = out[range(6), y] - out.logsumexp(1)
        g, = torch.autograd.grad(log_p.sum(), noisy, create_graph=True)
        dlsm = (sigma[:, None] * (g - noisy / 2) + z).square().sum() / 24
        dsm = (sigma[:, None] * out + z).square().sum() / 12
        return dict(dsm=dsm, ce=-log_p.mean(), dlsm=dlsm, total=dlsm - 0.125 * log_p.mean())[name]

    weights, factors = list(twin.parameters()), []
    m, v, shadow = ([w.detach() * times for w in weights] for times in (0, 0, 1))
    for k, (rate, decay) in enumerate(((0.005, 2 / 11), (0.0075, 3 / 12), (0.0025, 0.26)), 1):
        x, sigma, y, z = batches[k - 1]
        grads = torch.autograd.grad(by_hand(x.double(), sigma.double(), y, z.double()), weights)
        factors.append(min(1, clip / math.sqrt(sum(g.square().sum().item() for g in grads))))
        for i, g in enumerate(grads):
            m[i] = 0.9 * m[i] + 0.1 * factors[-1] * g
            v[i] = 0.999 * v[i] + 0.001 * (factors[-1] * g) ** 2
            weights[i].data -= rate * m[i] / (1 - 0.9**k) / ((v[i] / (1 - 0.999**k)).sqrt() + 1e-8)
            shadow[i] = decay * shadow[i] + (1 - decay) * weights[i].detach()
    assert min(factors) < 0.9 and max(factors) == 1
    state, loaded = load_checkpoint(path)["optimizer"]["state"], list(load_model(path).parameters())
    for i, p in enumerate(net.parameters()):
        assert near(p.double(), weights[i], 3e-6)
        assert near(loaded[i].double(), shadow[i], 3e-6) and torch.equal(loaded[i], average.shadow[i])
        assert torch.allclose(state[i]["exp_avg"].double(), m[i], rtol=1e-3, atol=1e-6)
        assert set(state[i]) == {"step", "exp_avg", "exp_avg_sq"}  # Adam's, no AMSGrad


RELEASED = HERE / ".ci" / "released.npz"  # names and shapes of the released entries, inputs and outputs


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def as_trained(net):
    """No weight is left at an initial zero; evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return net.eval()


def assert_near(a, b):
    assert a.shape == b.shape and (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("preset, count", [("paper", 107_586_947), ("lite", 15_716_291), ("tiny", 984_315)])
def test_preset_sizes(preset, count):
    keys = ("width", "mults", "blocks", "attention", "edm")
    with torch.device("meta"):
        net = NCSNpp(**{key: train_score.PRESETS[preset][key] for key in keys})
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.parametrize("size, channels, edm", [(16, 1, True), (24, 3, False)])
def test_ncsnpp_of_any_size_its_first_output_and_its_form(size, channels, edm):
    net = NCSNpp(size, channels, width=8, mults=(1, 2, 2), blocks=1, attention=(size // 2,), edm=edm).eval()
    x, sigma, seen = torch.rand(4, channels, size, size), torch.tensor([0.01, 0.3, 2.0, 50.0]), {}
    u, s = 2 * x - 1, sigma.view(-1, 1, 1, 1)
    assert_near(net(x, sigma), (0.5 - x) / (0.0625 + s**2) if edm else 0 * x)  # EDM: the score of N(½, ¼²)
    net.stem.register_forward_hook(lambda module, inputs, output: seen.update(first=inputs[0]))
    net.last.register_forward_hook(lambda module, inputs, output: seen.update(last=output))
    out = as_trained(net)(x, sigma)
    total = (0.25 + 4 * s**2).sqrt()
    denoised = 0.25 * u / total**2 + s * seen["last"] / total  # EDM: c_skip u + c_out F
    assert_near(seen["first"], u / total if edm else u)
    assert_near(out * s, (denoised - u) / (2 * s) if edm else seen["last"])
    assert_near(torch.cat([net(x[i : i + 1], sigma[i : i + 1]) for i in range(4)]), out)
    with pytest.raises(UserError, match="multiple of 4"):
        NCSNpp(size + 2, channels, width=8, mults=(1, 2, 2), blocks=1)


def test_conditional_ncsnpp():
    net = NCSNpp(8, 1, width=8, mults=(1, 2), blocks=1, attention=(4,), classes=3)
    assert net.label.weight.shape == (4, 32) and not net.label.weight.any()
    x, sigma, y = torch.rand(3, 1, 8, 8), torch.tensor([0.1, 1.0, 9.0]), torch.tensor([2, 0, 3])
    mixed = as_trained(net)(x, sigma, y)
    assert torch.equal(net(x, sigma), net(x, sigma, torch.full((3,), 3)))
    for i, c in enumerate(y.tolist()):
        assert_near(mixed[i], net(x, sigma, torch.full((3,), c))[i])
        assert torch.allclose(mixed[i], net(x, sigma)[i], rtol=1e-3) == (c == 3)
    del net.config["classes"]  # as in older files
    assert not hasattr(NCSNpp(**net.config), "label")


@pytest.mark.parametrize("depth, norm, act", [(18, "batch", "silu"), (34, "batch", "relu"), (18, "", "relu")])
def test_noisy_resnet_double_backward_independence_of_the_batch_and_folding(depth, norm, act):
    net = NoisyResNet(depth, classes=3, width=8, channels=1, norm=norm, scaled=True, act=act).double()
    x, y = torch.rand(6, 1, 16, 16, dtype=torch.float64), torch.arange(6) % 3
    sigma = torch.tensor([0.01, 0.1, 0.5, 1, 10, 50], dtype=torch.float64)
    total_loss(net, lambda x, s: 0 * x, x, sigma, y, torch.randn_like(x)).backward()  # moves statistics
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    folded, together = fold_batchnorm(net.eval()), likelihood_score(net, x, sigma, y)
    alone = [likelihood_score(net, x[i : i + 1], sigma[i : i + 1], y[i : i + 1]) for i in range(6)]
    assert_near(torch.cat(alone), together)
    assert_near(likelihood_score(folded, x, sigma, y), together)
    assert_near(folded(x, sigma), net.linear(net.features(x, sigma)))
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in folded.modules())


def test_joined_late_the_gradient_of_a_toy_network_cannot_depend_on_sigma():
    x = (20 * torch.randn(64, 2)).requires_grad_()
    for join, same in (("late", True), ("early", False)):
        net = ToyNet(2, join=join)
        a, b = (torch.autograd.grad(net(x, torch.full((64,), s))[:, 0].sum(), x)[0] for s in (0.1, 9.0))
        assert torch.allclose(a, b, atol=1e-6) == same


def test_ema_applies_its_weights_and_gives_the_others_back():
    net = torch.nn.Linear(1, 1, bias=False)
    ema = EMA(net)
    torch.nn.init.constant_(net.weight, 2)
    ema.update()
    with pytest.raises(KeyError), ema.applied():
        assert net.weight.item() == ema.shadow[0].item() != 2
        raise KeyError
    assert net.weight.item() == 2


# ------------- files of the release and of ours


def released_value(key, shape, seed):
    """Noise of numpy's RandomState(seed), scaled so that a deep network stays in range."""
    noise = np.random.RandomState(seed).standard_normal(shape)
    if len(shape) > 1:
        return noise * np.sqrt(2 / np.prod(shape[1:]))
    known = dict(W=16 * noise, weight=1 + noise / 10, running_var=(1 + noise**2) / 2, num_batches_tracked=7)
    return known.get(key.split(".")[-1], noise / 10)


def released_checkpoint(name):
    """The dict in a released file: entry i has seed i, and its average, in a score model, seed 10,000 + i."""
    model, averages = {}, []
    for i, line in enumerate(np.load(RELEASED)[f"{name}/entries"]):
        key, sides, dtype = line.split()
        shape, dtype = () if sides == "-" else tuple(map(int, sides.split(","))), getattr(torch, dtype)
        model[key] = torch.as_tensor(released_value(key, shape, i), dtype=dtype)
        if name.startswith("score") and not key.endswith(("sigmas", "modules.0.W")):
            averages.append(torch.as_tensor(released_value(key, shape, 10_000 + i), dtype=dtype))
    return dict(model=model, ema=dict(shadow_params=averages), optimizer=dict(state={}), step=7)


@pytest.mark.parametrize("name", "score_small classifier_cifar10 score_cifar10 classifier_cifar100".split())
def test_the_authors_released_files_load(name, tmp_path, monkeypatch):
    known, make = np.load(RELEASED), released_checkpoint
    if f"{name}/out" not in known:
        if not OFFICIAL.exists():
            pytest.skip("the large networks are in ../shared/official")
        monkeypatch.syspath_prepend(OFFICIAL)
        known, make = np.load(OFFICIAL / "expected.npz"), importlib.import_module("fill").official_checkpoint
    checkpoint = make(name)
    torch.save(checkpoint, tmp_path / "released.pth")
    net = load_model(tmp_path / "released.pth", kind=name.split("_")[0])
    x, sigma, out = (torch.from_numpy(known[f"{name}/{key}"]) for key in ("x", "sigma", "out"))
    for ours, theirs in zip(net(x, sigma), out, strict=True):
        assert_near(ours, theirs)
    if name == "classifier_cifar10":
        checkpoint["model"]["module.classifier.classifier.dense_2.weight"] = torch.zeros(128, 127)
        torch.save(checkpoint, tmp_path / "released.pth")
        with pytest.raises(UserError, match="dense_2"):
            load_model(tmp_path / "released.pth")


@pytest.fixture
def toy(tmp_path):
    """A small checkpoint as training writes it, with an EMA; beside it data.npz."""
    net = ToyNet(2, widths=(8, 8), join="early")
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", images=images, labels=labels, test_images=images, test_labels=1 - labels)
    fit(net, lambda generator, step: [torch.randn(4, 2, generator=generator), torch.ones(4)],
        lambda *batch: net(*batch).square().sum(), tmp_path / "toy.pt", "score", {}, Plan(3, 0.1, ema=0.5))
    return tmp_path / "toy.pt"


def content(path):
    """All that is read from a file: images, or a network and where its training resumes."""
    if path.suffix == ".npz":
        return checksum([load_images(str(path), split) for split in ("train", "test")])
    out = load_model(path, kind="score")(torch.eye(2), torch.tensor([0.1, 10.0]))
    net = ToyNet(2, widths=(8, 8), join="early")
    optimizer, average = torch.optim.Adam(net.parameters(), fused=True), EMA(net)
    found = resume(path, "score", net, {}, Plan(3, 0.1), optimizer, average, "cpu")
    net(torch.eye(2), torch.ones(2)).sum().backward()
    optimizer.step()  # moments that do not fit would fail here
    return checksum([out, *found, net.state_dict(), average.shadow, average.updates])


def content_with(path, data):
    """What is read where `path` holds `data`; None if that is refused, in one line and without a warning."""
    path.write_bytes(data)
    with warnings.catch_warnings(action="error", category=UserWarning):
        try:
            return content(path)
        except UserError as error:
            assert path.name in str(error) and "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize("name", ["toy.pt", "data.npz"])
def test_spoilt_files_are_refused_or_harmless_and_hostile_ones_run_nothing(name, toy, tmp_path):
    path, ran, made = tmp_path / name, tmp_path / "ran", tmp_path / "made.npz"
    good, right = path.read_bytes(), content(path)
    places = range(5, len(good), len(good) // 25)
    flipped = [content_with(path, good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]) for at in places]
    assert set(flipped) <= {None, right} and flipped.count(None) > 10
    hostile = type("Hostile", (), dict(__reduce__=lambda self: (os.mkdir, (str(ran),))))()
    np.savez(made, images=np.array([hostile] * 40), labels=np.arange(40) % 2)
    files = [made.read_bytes(), b"{}", b"PK\x05\x06" + bytes(18)]
    files += [good[:cut] for cut in (0, 10, len(good) // 2, len(good) - 1)]
    for value in (hostile, {"weights": hostile}, {"model": hostile}, {"kind": "score", "config": hostile}):
        for zipped in (True, False):
            torch.save(value, made, _use_new_zipfile_serialization=zipped)
            files.append(made.read_bytes())
        files.append(pickle.dumps(value))
    assert {content_with(path, data) for data in files} == {None} and not ran.exists()
    pickle.loads(files[-1])  # it would have
    assert ran.exists()


def test_nothing_is_unpickled():
    texts = [path.read_text() for path in HERE.glob("*.py") if not path.name.startswith("test_")]
    assert len(texts) >= 6 and not any("allow_pickle" in text or "import pickle" in text for text in texts)
    assert all(text.count("torch.load(") == text.count("weights_only=True)") for text in texts)


def test_checkpoints_of_the_wrong_kind_shape_or_type(toy, tmp_path):
    good = load_checkpoint(toy)
    weights, averages, state, last = good["weights"], good["ema"]["shadow"], good["optimizer"], "last.weight"
    odd = [-3, math.nan, "x", [{}], {"a": 1}, torch.zeros(2), torch.zeros(1).expand(2**45)]
    changes = [{key: value} for key in ("network", "config", "weights", "ema", "optimizer") for value in odd]
    for key, values in dict(outputs=(None, -1, 5, 2**40), widths=("x", (), (2**20, 2**20))).items():
        changes += [dict(config={**good["config"], key: value}) for value in values]
    for value in (torch.zeros(7), weights[last].double(), weights[last].to(torch.complex64), "x"):
        changes.append(dict(ema=None, weights={**weights, last: value}))
    changes += [dict(ema=dict(shadow=averages[:-1])), dict(ema=dict(shadow=[v[:1] for v in averages]))]
    moments = {**state["state"], 0: {**state["state"][0], "exp_avg": torch.zeros(1)}}
    changes += [dict(optimizer={**state, "state": value}) for value in ({}, moments)]
    for change in changes:
        torch.save({**good, **change}, tmp_path / "x")
        assert content_with(toy, (tmp_path / "x").read_bytes()) is None, change
        if "optimizer" not in change:
            with pytest.raises(UserError):
                load_model(toy)
    torch.save(good, toy)
    for name, words in (("toy.pt", "score checkpoint, a classifier checkpoint"), ("none.pt", "no such file")):
        with pytest.raises(UserError, match=words):
            load_model(tmp_path / name, kind="classifier")


def test_export_older_checkpoints_and_the_bundled_weights(toy, tmp_path):
    right, checkpoint = content(toy), load_checkpoint(toy)
    export(toy, tmp_path / "slim.pt")
    slim = load_model(tmp_path / "slim.pt")
    assert slim.about == load_model(toy).about and "optimizer" not in load_checkpoint(tmp_path / "slim.pt")
    for weight, average in ((slim.last.weight, True), (checkpoint["weights"]["last.weight"], False)):
        assert torch.equal(weight, checkpoint["ema"]["shadow"][-2]) == average
    torch.save({**checkpoint, "checksum": "0" * 64}, toy)  # older files carry one
    assert content(toy) == right
    files = list((HERE / "docs" / "pretrained").glob("*/*.pt"))
    for path in files:
        net = load_model(path, kind="score" if path.stem == "score" else "classifier")
        x = torch.rand(2, net.config["channels"], 16, 16)
        out = net(x, torch.tensor([0.1, 5.0]))
        assert out.isfinite().all() and out.shape == (x.shape if path.stem == "score" else (2, 10))
    assert len(files) == 6


def test_exact_score_checkpoints(tmp_path):
    x, sigma, y = torch.rand(4, 1, 8, 8), torch.tensor([0.1, 1, 0.5, 9]), torch.tensor([1, 2, 0, 1])
    for data, z in (((255 * torch.rand(9, 1, 8, 8)).byte(), x), (torch.randn(9, 2), x[:, 0, 0, :2])):
        net = ExactScore(data, torch.tensor([2, 0, 1] * 3))
        about = dict(kind="score", network="ExactScore", config=net.config, settings={}, step=0)
        save_checkpoint(tmp_path / "exact.pt", dict(**about, weights=net.state_dict(), ema=None))
        again = load_model(tmp_path / "exact.pt")
        for more in ((), (y,)):
            assert torch.equal(net(z, sigma, *more), again(z, sigma, *more))


# ------------- data


def test_images_from_npz_and_folder_and_a_held_out_tenth(tmp_path, capsys):
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 1), np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "grey.npz", images=images, labels=labels)
    for i in range(40):
        folder = tmp_path / "my.tree" / f"class {labels[i]}" / ("sub" if i % 3 else "")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[i, ..., 0]).save(folder / f"{i}.{'PNG' if i % 2 else 'bmp'}")
    for data, prefix in (("grey.npz", ""), ("my.tree", "class ")):
        train, test = (load_images(str(tmp_path / data), split) for split in ("train", "test"))
        pairs = [(bytes(x.numpy()), y.item()) for part in (train, test) for x, y in zip(*part[:2])]
        assert sorted(pairs) == sorted((bytes(x), y) for x, y in zip(images, labels.tolist()))
        assert train[0].shape == (36, 1, 12, 12) and train[2] == test[2] == [f"{prefix}{i}" for i in range(4)]
        assert "4 of 40 images are held out" in capsys.readouterr().out
    own = dict(test_images=images.repeat(5, 0), test_labels=np.sort(labels.repeat(5)))
    np.savez(tmp_path / "own.npz", images=images, labels=labels, **own)
    test = load_images(str(tmp_path / "own.npz"), "test")[1]
    assert len(load_images(str(tmp_path / "own.npz"))[0]) == 40 and len(test) == 200
    assert set(test[:16].tolist()) == {0, 1, 2, 3}  # sorted in the file; a diagnosis takes the first ones


def test_pictures_of_several_sizes_are_cut_to_the_centre_and_resized(tmp_path):
    (tmp_path / "x").mkdir()
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = np.arange(8)[:, None, None] % 2 * 255  # the centre: rows of 0 and 255
    Image.fromarray(wide).save(tmp_path / "x" / "wide.png")
    Image.new("L", (16, 16), 9).save(tmp_path / "x" / "grey.png")
    np.savez(tmp_path / "wide.npz", images=np.stack([wide] * 2), labels=np.zeros(2, int))
    with pytest.raises(UserError, match="mixed sizes.*16×16.*24×8.*--size"):
        load_images(str(tmp_path))
    for size, low, high in ((8, 0, 255), (3, 80, 175)):  # smaller: antialiased
        grey, cut = read_folder(tmp_path, size)[0]["images"]
        assert (grey == 9).all() and grey.shape == (size, size, 3)
        for pixels in (cut, load_images(str(tmp_path / "wide.npz"), size=size)[0].numpy()):
            assert low <= pixels.min() < pixels.max() <= high and abs(pixels.mean() - 127.5) < 9


def test_pictures_arrive_as_they_are_seen(tmp_path):
    ramp, exif = np.arange(256).reshape(16, 16), Image.Exif()
    chip = ramp[:2, :4].astype(np.uint8)
    glass = Image.new("RGBA", (3, 1))
    glass.putdata([(0, 0, 0, 0), (0, 0, 0, 128), (120, 120, 120, 255)])  # black: not seen, half seen; grey
    index = Image.fromarray(np.array([[0, 9, 120]], np.uint8)).convert("P")
    frames = dict(save_all=True, append_images=[Image.new("L", (4, 4), 200)])
    cases = [("x.png", Image.fromarray((257 * ramp).astype(np.uint16)), {}, ramp),
             ("x.tif", Image.fromarray((257 * ramp).astype(np.int32)), {}, ramp),
             ("x.png", glass, {}, [[255, 127, 120]]), ("x.png", glass.convert("LA"), {}, [[255, 127, 120]]),
             ("x.png", index, dict(transparency=0), [[255, 9, 120]]),
             ("x.GIF", Image.new("L", (4, 4), 10), frames, [[10] * 4] * 4),
             ("x.tiff", Image.new("L", (4, 4), 10), frames, [[10] * 4] * 4)]
    for orientation, turns in ((1, 0), (3, 2), (6, -1), (8, 1)):  # how the camera was held
        exif[0x112] = orientation
        cases.append(("x.png", Image.fromarray(chip), dict(exif=exif.tobytes()), np.rot90(chip, turns)))
    for number, (name, picture, more, expected) in enumerate(cases):
        (tmp_path / str(number) / "class").mkdir(parents=True)
        picture.save(tmp_path / str(number) / "class" / name, **more)
        found = read_folder(tmp_path / str(number), None)[0]["images"][0]
        assert found.dtype == np.uint8 and (found == np.asarray(expected)[..., None]).all(), (number, name)


def test_hidden_files_and_folders_are_passed_over_and_bad_ones_named(tmp_path):
    for folder in ("b", "a", ".ipynb_checkpoints", "a/.thumbnails"):
        (tmp_path / folder).mkdir()
        Image.effect_noise((32, 32), 50).save(tmp_path / folder / "x.png")
    for junk in ("a/._x.png", "a/notes.txt"):
        (tmp_path / junk).write_bytes(b"no picture")
    found, names = read_folder(tmp_path, None)
    assert names == ["a", "b"] and found["labels"].tolist() == [0, 1] and len(found["images"]) == 2
    (tmp_path / "c" / "empty").mkdir(parents=True)
    (tmp_path / "d" / "cut").mkdir(parents=True)
    (tmp_path / "d" / "cut" / "cut.png").write_bytes((tmp_path / "a" / "x.png").read_bytes()[:-300])
    for data, words in (("none.npz", "no such file"), ("nowhere", "named set"), ("b", "sub-folder"),
                        ("c", "empty.* pictures"), ("d", "cut.png")):
        with pytest.raises(UserError, match=words):
            load_images(str(tmp_path / data))


PIXELS, TWO = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1])


@pytest.mark.parametrize("words, changes", [
    ("shape", [dict(images=PIXELS[..., 0]), dict(images=PIXELS[..., :2]), dict(images=PIXELS[:, :0])]),
    ("uint8", [dict(images=PIXELS / 255)]), ("readable", [dict(images=np.array([{}] * 4))]),
    ("--size", [dict(images=PIXELS[:, 1:])]), ("no 'test_labels'", [dict(test_images=PIXELS)]),
    ("labels are", [dict(labels=labels) for labels in (
        TWO[1:], TWO - 1, TWO / 1, TWO[:, None], list("abcd"), 10**12 * TWO, TWO.astype(np.uint64) << 63)]),
    ("each class", [dict(labels=2 * TWO), dict(labels=10**9 * TWO)]),
    ("test labels up to 2", [dict(test_images=PIXELS, test_labels=2 * TWO)])])
def test_bad_data_is_named_before_training(words, changes, tmp_path):
    for change in changes:
        np.savez(tmp_path / "bad.npz", **{**dict(images=PIXELS, labels=TWO), **change})
        with pytest.raises(UserError, match=words):
            load_images(str(tmp_path / "bad.npz"), "test" if "test_images" in change else "train")


def test_shapes(monkeypatch):
    first, again = make_shapes(400, 100), make_shapes(400, 100)
    assert all((first[key] == again[key]).all() for key in first)
    assert np.unique(np.vstack([first["images"], first["test_images"]]), axis=0).shape == (400, 32, 32, 3)
    assert (np.bincount(first["labels"]) == 30).all() and (np.bincount(first["test_labels"]) == 10).all()
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, 0.5))  # one colour
    outlines = make_shapes(20, 10)["images"].astype(int)
    differ = (abs(outlines[:, None] - outlines).max(-1) > 64).sum((2, 3))
    assert (differ + 99 * np.eye(10) > 20).all()


def test_an_epoch_takes_every_image_once_and_a_batch_is_what_it_says():
    images = torch.arange(10 * 6, dtype=torch.uint8).view(10, 1, 2, 3)

    def drawn(batch, steps, flip=False):
        draw = image_batches(images, torch.arange(10), batch, 0, 0.01, 50.0, flip)
        return [torch.cat(v) for v in zip(*(draw(torch.Generator().manual_seed(s), s) for s in range(steps)))]

    x, sigma, y, z = drawn(4, 5)
    assert sorted(y[:10].tolist()) == sorted(y[10:].tolist()) == list(range(10)) and (y[:10] != y[10:]).any()
    assert torch.equal(y, drawn(20, 1)[2]) and torch.equal(x, images[y] / 255) and z.shape == x.shape
    assert 0.01 <= sigma.min() and sigma.max() <= 50 and len(sigma.unique()) == 20
    x, _, y, _ = drawn(50, 4, flip=True)
    mirrored = (x == images[y].flip(3) / 255).flatten(1).all(1)
    assert 60 < mirrored.sum() < 140 and torch.equal(x[~mirrored], images[y[~mirrored]] / 255)


def test_torchvision_without_its_operators(monkeypatch, tmp_path):
    """As where a CUDA build of torchvision lies beside a CPU build of torch."""
    library = types.SimpleNamespace(defined=[])
    library.define = lambda text: library.defined.append(text.split("(")[0])
    monkeypatch.setattr(torch.library, "Library", lambda *names: library)
    for name in ["torchvision", *(name for name in sys.modules if name.startswith("torchvision."))]:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torchvision.py").write_text(
        "import torch\nif not torch.library.Library().defined:\n    raise RuntimeError('no nms')\n")
    assert import_torchvision().__file__ == str(tmp_path / "torchvision.py")
    assert library.defined == ["nms", "qnms"]


@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("not found\nor corrupted")])
def test_named_sets_from_torchvision_from_a_file_or_not_at_all(error, monkeypatch, tmp_path):
    def fashion(root, train, download):
        data = torch.full((20, 28, 28), 255 if train else 7, dtype=torch.uint8)
        return types.SimpleNamespace(data=data, targets=torch.arange(20) % 10)

    def offline(*args, **more):
        raise error

    fake = types.SimpleNamespace(datasets=types.SimpleNamespace(FashionMNIST=fashion, CIFAR10=offline))
    monkeypatch.setattr(train_score, "import_torchvision", lambda: fake)
    images, labels, names = load_images("fashion", "test", root=str(tmp_path))
    assert images.shape == (20, 1, 32, 32) and (images[:, :, 2:30, 2:30] == 7).all()
    assert images.sum() == 7 * 20 * 28 * 28 and names[9] == "ankle boot"  # padded with zeros
    np.savez(tmp_path / "fashion.npz", images=np.zeros((30, 8, 8, 1), np.uint8), labels=np.arange(30) % 10)
    assert load_images("fashion", "test", root=str(tmp_path))[0].shape == (3, 1, 8, 8)
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz \(md5 .*/cifar10.npz .*--data shapes"):
        load_images("cifar10", root=str(tmp_path))


def test_pictures_of_floats_are_refused(tmp_path):
    (tmp_path / "class").mkdir()
    pixels = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "class" / "float.tif")
    with pytest.raises(UserError, match="float.tif"):
        read_folder(tmp_path, None)


def test_an_uncompressed_tif_is_turned_upright(tmp_path):
    (tmp_path / "class").mkdir()
    chip, exif = np.arange(8, dtype=np.uint8).reshape(2, 4), Image.Exif()
    exif[0x112] = 6
    Image.fromarray(chip).save(tmp_path / "class" / "x.tif", exif=exif)
    assert np.array_equal(read_folder(tmp_path, None)[0]["images"][0, ..., 0], np.rot90(chip, -1))


def test_a_picture_is_cut_before_it_is_resized(tmp_path):
    (tmp_path / "class").mkdir()
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 255
    Image.fromarray(wide).save(tmp_path / "class" / "x.png")
    assert (read_folder(tmp_path, 4)[0]["images"] == 255).all()


@pytest.mark.parametrize("count, classes", [(1, 1), (4, 4)])
def test_a_class_that_is_wholly_held_out_is_named(count, classes, tmp_path):
    images = np.zeros((count, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(count) % classes)
    with pytest.raises(UserError, match="x.npz"):
        load_images(str(tmp_path / "x.npz"))


@pytest.mark.parametrize("error", [OSError(), ImportError("no torchvision"), http.client.IncompleteRead(b"")])
def test_every_failed_download_names_the_cure(error, monkeypatch, tmp_path):
    def offline(*args, **more):
        raise error

    fake = types.SimpleNamespace(datasets=types.SimpleNamespace(CIFAR10=offline))
    monkeypatch.setattr(train_score, "import_torchvision", lambda: fake)
    with pytest.raises(UserError, match="--data shapes"):
        load_images("cifar10", root=str(tmp_path))


def test_an_own_folder_named_like_a_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes" / "class").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "shapes" / "class" / "a.png")
    Image.new("L", (8, 8)).save(tmp_path / "shapes" / "class" / "b.png")
    data = train_score.make_parser().parse_args(["--data", "./shapes"]).data
    assert load_images(data)[2] == ["class"]


def test_splits_that_do_not_fit_together_and_unknown_ones(tmp_path):
    images, labels = np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int)
    other = images[:, 2:, 2:, :1]
    np.savez(tmp_path / "x.npz", images=images, labels=labels, test_images=other, test_labels=labels)
    with pytest.raises(UserError, match="x.npz"):
        load_images(str(tmp_path / "x.npz"), "test")
    with pytest.raises((UserError, ValueError, KeyError), match="val"):
        load_images("shapes", "val")


def test_a_class_without_images_has_no_exact_score():
    net = ExactScore(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 2]))
    for y in (1, 3):
        with pytest.raises(UserError, match="class"):
            net(torch.rand(1, 1, 4, 4), torch.ones(1), torch.tensor([y]))


@pytest.fixture
def one_thread():
    """For what is compared bit for bit with a child, which has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def copied(trained, folder, *names):
    """→ a new runs/small in `folder` with these files of `trained`"""
    runs = folder / "runs" / "small"
    runs.mkdir(parents=True)
    for name in names:
        shutil.copy(trained / "runs" / "small" / name, runs)
    return runs


def wait_for(condition, process):
    while not condition() and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def in_one_child(folder, jobs, first="after = lambda: None", **environment):
    """Starts a process that runs these commands one after the other, so that torch is loaded only once."""
    code = f"""{first}
import os, sys, train_score, train_classifier, sample, evaluate, toy_moons
for i, (name, *flags) in enumerate({[[str(item) for item in job] for job in jobs]}):
    sys.argv = [name + ".py", *flags]
    os.environ["MASTER_PORT"] = os.environ.get("PORTS", "0 " * 99).split()[i]
    train_score.run(sys.modules[name].main)
    after()"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **environment}
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def two_processes(folder, *jobs):
    """As torchrun starts them."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in jobs]
    ports = " ".join(str(s.getsockname()[1]) for s in sockets)
    for s in sockets:
        s.close()
    shared = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", PORTS=ports)
    return [in_one_child(folder, jobs, RANK=rank, LOCAL_RANK=rank, **shared) for rank in "01"]


@pytest.mark.parametrize("stage, number", [("score", signal.SIGINT), ("classifier-total", signal.SIGTERM)])
def test_resume_is_exact_after_kill_and_signal(stage, number, main, one_thread, shapes, trained, tmp_path):
    script, more, before = "train_score", ["--sample-every", 0], []
    if stage != "score":
        script, more, before = "train_classifier", ["--diagnose-n", 8], ["score.pt"]
    flags = ["--data", shapes, *SMALL, "--steps", 30, "--save-every", 5, *more]
    whole, killed = (copied(trained, tmp_path / n, *before) / f"{stage}.pt" for n in ("whole", "killed"))
    main(script, *flags, cwd=tmp_path / "whole")
    for sent in (signal.SIGKILL, number):
        old = killed.stat().st_mtime_ns if killed.exists() else 0
        process = start(f"{script}.py", *flags, cwd=tmp_path / "killed")
        wait_for(lambda: killed.exists() and killed.stat().st_mtime_ns > old, process)
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and not err, out + err
    assert "stopping soon" in out and "and saved; the same command continues" in out
    assert 5 < load_checkpoint(killed)["step"] < 30
    assert "continuing at step" in main(script, *flags, cwd=tmp_path / "killed")
    for key in ("step", "settings", "weights", "ema", "optimizer"):
        ours, theirs = (torch.utils._pytree.tree_leaves(load_checkpoint(p)[key]) for p in (whole, killed))
        assert len(ours) == len(theirs) and all(np.array_equal(*pair) for pair in zip(ours, theirs)), key
    assert "finished already (30 steps); --restart" in main(script, *flags, cwd=tmp_path / "killed")


def test_two_processes_take_the_path_of_one(main, one_thread, shapes, trained, tmp_path):
    small, train = trained / "runs" / "small", ["--data", shapes, *SMALL, "--steps", 3]
    classifier = ["train_classifier", *train, "--score", small / "score.pt", "--diagnose-n", 16, "--run"]
    jobs = [["train_score", *train, "--sample-every", 0, "--run", "two"],
            [*classifier, "two", "--norm", "group"],
            ["sample", "--run", small, "--n", 30, "--batch", 7, "--steps", 4, "--out", "two"]]
    processes = two_processes(tmp_path, *jobs, [*classifier, "batch", "--steps", 1])
    (out, err), (quiet, _) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], err
    assert not re.sub(r"\[Gloo\].*\n", "", quiet)  # older versions of torch speak there
    assert "BatchNorm sees a process's 8 images" in out
    for job in jobs:
        main(*("one" if item == "two" else item for item in job), cwd=tmp_path)
    for name in ("score.pt", "classifier-total.pt"):
        one, two = (load_checkpoint(tmp_path / "runs" / run / name)["weights"] for run in ("one", "two"))
        assert all(torch.allclose(value, two[key], atol=1e-4) for key, value in one.items())
    one, two = (np.load(tmp_path / folder / "samples-dlsm.npz")["images"] for folder in ("one", "two"))
    assert np.array_equal(one, two)


def test_a_lost_worker_and_a_mistake_under_torchrun(shapes, tmp_path):
    path = tmp_path / "runs" / "small" / "score.pt"
    job = ["train_score", "--data", shapes, *SMALL, "--save-every", 1, "--sample-every", 0, "--steps", 10**6]
    left, lost = two_processes(tmp_path, job)
    wait_for(path.exists, left)
    lost.kill()
    lost.communicate()
    _, err = left.communicate(timeout=60)
    assert left.returncode == 2 and "another process of this job is lost" in err and err.count("\n") == 1, err
    assert load_checkpoint(path)["step"] >= 1
    process = start("train_score.py", "--data", "nowhere", cwd=tmp_path, processes=2)
    _, err = process.communicate(timeout=120)
    lines = [line for line in err.splitlines() if line.startswith("train_score.py: --data nowhere: neither")]
    assert process.returncode == 1 and len(lines) == 1 and err.count("Traceback") == 1, err  # torchrun's


def test_other_settings_are_an_error_and_tag_and_restart_are_the_ways_out(main, shapes, trained, tmp_path):
    runs = copied(trained, tmp_path, "score.pt", "classifier-total.pt")
    score = ["train_score", "--data", shapes, *SMALL, "--sample-every", 0, "--steps", 12]
    classifier = ["train_classifier", "--data", shapes, *SMALL, "--diagnose-n", 8, "--steps", 12]
    words = "runs/small/score.pt was made with lr = 0.001, not 0.5; --tag T keeps both, --restart starts over"
    assert words in main(*score, "--lr", 0.5, cwd=tmp_path, code=2)
    assert "lam = 1.0, not 7.0; --tag" in main(*classifier, "--lam", 7, cwd=tmp_path, code=2)
    main(*classifier, "--steps", 1, "--lam", 7, "--tag", "lam7", cwd=tmp_path)
    assert load_model(runs / "classifier-total-lam7.pt").about["settings"]["lam"] == 7
    main(*score, "--lr", 0.002, "--steps", 2, "--restart", cwd=tmp_path)
    assert load_model(runs / "score.pt").about["settings"]["lr"] == 0.002
    assert "another score model: it has changed since; --tag" in main(*classifier, cwd=tmp_path, code=2)
    out = main("sample", "--data", shapes, "--n", 10, "--steps", 2, cwd=tmp_path)
    assert "the score model has changed since runs/small/classifier-total.pt was trained" in out
    assert "from here towards 3" in main(*score, "--lr", 0.002, "--steps", 3, cwd=tmp_path)  # the cosine
    checkpoint = load_checkpoint(runs / "score.pt")
    checkpoint["step"], checkpoint["settings"]["steps"] = 2, 300_000
    save_checkpoint(runs / "score.pt", checkpoint)
    shutil.copy(runs / "classifier-total.pt", runs / "classifier-ce.pt")
    shutil.copy(runs / "classifier-total.pt", runs / "classifier-ce-s1.pt")
    base = ["sample", "--data", shapes, "--guidance", "base", "--n", 10, "--steps", 2, "--tag"]
    for tag, name in (("s1", "ce-s1"), ("s2", "ce")):
        out = main(*base, tag, cwd=tmp_path)
        assert re.search(r"score.pt: score [0-9a-f]{8}, .*at step 2 of 300,000", out), out
        assert re.search(rf"classifier-{name}.pt: classifier [0-9a-f]{{8}}, step 12\n", out), out


def test_broken_numbers_stop_with_step_and_sigma_and_are_never_saved(main, shapes, tmp_path):
    explode = ["train_score", "--data", shapes, *SMALL, "--steps", 50, "--lr", 1e3, "--tag", "new"]
    words = r"not finite at step \d+, σ = [\d.]+ to [\d.]+; nothing was saved; try a smaller --lr"
    assert re.search(words, main(*explode, cwd=tmp_path, code=2))
    assert not list(tmp_path.rglob("score-new*"))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net.config = {}

    def loss(x, sigma):
        if x[0, 0] > 2:  # step 3: the loss is finite, the running mean is not
            net[1].running_mean.fill_(math.inf)
        return net(x).square().mean()

    def batch(generator, step):
        return [torch.full((4, 2), float(step)), torch.ones(4)]

    with pytest.raises(UserError, match="weights are not finite at step 3, σ = 1 to 1; .*pt keeps step 3"):
        fit(net, batch, loss, tmp_path / "net.pt", "score", {}, Plan(9, 1e-3, save_every=1))
    assert load_checkpoint(tmp_path / "net.pt")["step"] == 3


def test_compile_is_for_the_score_network_with_every_loss(main, shapes, trained, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda net: compiled.append(type(net).__name__) or net)
    copied(trained, tmp_path, "score.pt")
    train = ["--data", shapes, *SMALL, "--steps", 1, "--tag", "c", "--compile"]
    main("train_score", *train, "--sample-every", 0, cwd=tmp_path)
    for loss in ("dlsm", "ce"):
        main("train_classifier", *train, "--loss", loss, "--diagnose-n", 8, cwd=tmp_path)
    assert compiled == ["NCSNpp", "NCSNpp", "NCSNpp", "NoisyResNet"]


def test_memory_stays_flat(tmp_path):
    """300 steps with the double backward and a sampling every 75: neither tensors nor megabytes are added."""
    classifier, score_net, seen = ToyNet(2, join="early"), ToyNet(2, join="early"), []

    def batch(generator, step):
        x, z = torch.randn(2, 16, 2, generator=generator)
        return [x, torch.rand(16, generator=generator) + 0.1, torch.arange(16) % 2, z]

    def inspect(*_):
        score, sigmas = sample.posterior_score(score_net, classifier, 0), sample.sigma_grid(5, 0.1, 9)
        sample.pc_sampler(score, sample.heun_sampler(score, torch.randn(64, 2), sigmas), sigmas)
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        seen.append((tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))

    plan = Plan(300, 1e-4, ema=0.99, inspect_every=75)
    loss = functools.partial(total_loss, classifier, score_net)
    fit(classifier, batch, loss, tmp_path / "x.pt", "classifier", {}, plan, inspect=inspect)
    assert seen[-1][0] == seen[1][0] and seen[-1][1] < seen[1][1] + 4, seen


def test_the_exact_score_as_a_user_has_it(main, shapes, tmp_path):
    common = ["--data", shapes, "--run", "exact"]
    assert "the exact score of 300 images" in main("train_score", *common, "--preset", "exact", cwd=tmp_path)
    main("train_classifier", *common, *SMALL, "--steps", 6, "--diagnose-n", 16, cwd=tmp_path)
    out = main("train_classifier", *common, "--diagnose", "--diagnose-n", 100, cwd=tmp_path)
    assert "| σ | accuracy | ce | gain | alpha | h | D_P | D_L |" in out and "nats" in out
    main("sample", *common, "--guidance", "oracle", "--n", 100, cwd=tmp_path)
    found, data = np.load(tmp_path / "runs" / "exact" / "samples-oracle.npz"), np.load(shapes)
    pixels, images = (v.reshape(len(v), -1).astype(int) for v in (data["images"], found["images"]))
    nearest = [abs(pixels - image).max(1).argmin() for image in images]
    assert abs(pixels[nearest] - images).max() <= 2
    assert np.array_equal(data["labels"][nearest], found["labels"])
    assert len(set(nearest)) > 70  # of ten draws among thirty images 8.6 are expected to differ
    assert json.loads(str(found["recipe"]))["exact"] is True


def test_a_conditional_score_guides_without_a_classifier(main, shapes, tmp_path):
    common = ["--data", shapes, "--run", "conditional"]
    main("train_score", *common, *SMALL, "--conditional", "--steps", 12, "--sample-every", 0, cwd=tmp_path)
    out = main("train_classifier", *common, "--diagnose", "--diagnose-n", 50, cwd=tmp_path)
    assert "\nscore\n\n| σ | gain | alpha |" in out  # a table as the classifiers have, without accuracy
    draws = ["--guidance", "free", "--alpha", "1,2,auto", "--n", 20, "--steps", 4]
    out = main("sample", *common, *draws, cwd=tmp_path)
    assert re.findall(r"(\d+) of the score", out) == ["7", "14", "14"] and "of the classifier" not in out
    assert len(list(tmp_path.glob("runs/conditional/samples-free*.npz"))) == 3


def test_the_diagnosis_gives_scale_and_interval(main, shapes, trained, tmp_path):
    runs = copied(trained, tmp_path, "score.pt", "classifier-ce.pt")
    main("train_classifier", "--data", shapes, "--diagnose", "--diagnose-n", 80, cwd=tmp_path)
    assert Image.open(runs / "diagnose.png").width > 800
    tables = json.loads((runs / "diagnose.json").read_text())
    rows = tables["classifier-ce"]
    level = torch.tensor([rows[4]["sigma"]])
    assert sample.best_scale(rows, "cpu")(level).item() == pytest.approx(max(rows[4]["alpha"], 0), abs=1e-5)
    assert sample.best_scale([dict(sigma=s, alpha=-1.0) for s in (0.1, 1)], "cpu")(level) == 0
    gains = [dict(sigma=10.0**i, gain=gain) for i, gain in enumerate([0.1, -1, 0.2, 0.5, 0.1, -0.1])]
    assert sample.levels_with_gain(gains) == pytest.approx((10**1.5, 10**4.5))
    draws = ["sample", "--data", shapes, "--guidance", "base", "--n", 10, "--steps", 12]

    def evaluations(*flags):
        out = main(*draws, *flags, cwd=tmp_path)
        return [int(n) for n in re.search(r"(\d+) of the score and (\d+) of the classifier", out).groups()]

    for row in rows:
        row["gain"] = 1.0 if 0.5 < row["sigma"] < 5 else -1.0
    (runs / "diagnose.json").write_text(json.dumps(tables))
    assert evaluations("--alpha", "auto") == evaluations("--guide-sigma", "0,1e4", "--tag", "all") == [23, 23]
    for levels in ("0.5,5", "auto"):
        score, classifier = evaluations("--guide-sigma", levels, "--tag", "some" + levels[0])
        assert score == 23 and 0 < classifier < 15
    assert "guide_sigma = [0.5, 5.0], not None" in main(*draws, "--tag", "some0", cwd=tmp_path, code=2)
    tables["weights"]["classifier-ce"] = "of another training"
    (runs / "diagnose.json").write_text(json.dumps(tables))
    assert "other weights of classifier-ce" in main(*draws, "--guide-sigma", "auto", cwd=tmp_path, code=2)
    (runs / "diagnose.json").unlink()
    assert "train_classifier.py --diagnose makes it" in main(*draws, "--alpha", "auto", cwd=tmp_path, code=2)


def draw(main, trained, out, *flags, code=0):
    """Samples of the run `small` → what was printed, and the files."""
    common = ["--run", trained / "runs" / "small", "--out", out, "--steps", 4]
    printed = main("sample", *common, *flags, cwd=trained, code=code)
    return printed, {path.stem: np.load(path) for path in out.glob("samples-*.npz")}


def test_samples_depend_neither_on_a_kill_nor_on_the_batch(main, one_thread, trained, tmp_path):
    flags = ["--n", 30, "--seed", 3, "--batch", 7]
    whole = draw(main, trained, tmp_path / "whole", *flags)[1]["samples-dlsm"]
    assert whole["images"].shape == (30, 8, 8, 3) and whole["images"].dtype == np.uint8
    assert np.array_equal(whole["labels"], np.arange(30) % 10)
    common = ["--run", trained / "runs" / "small", "--out", tmp_path / "killed", "--steps", 4]
    process = start("sample.py", *common, *flags, cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob("killed/*.parts/000000.npz")), process)
    process.kill()
    process.communicate()
    part, = tmp_path.glob("killed/*.parts/000000.npz")
    part.write_bytes(part.read_bytes()[:-100])  # drawn again
    again = draw(main, trained, tmp_path / "killed", *flags)[1]["samples-dlsm"]
    assert np.array_equal(whole["images"], again["images"]) and not list(tmp_path.glob("killed/*.parts"))
    more = [main, trained, tmp_path / "more", "--n", 40, "--seed"]
    images = draw(*more, 3)[1]["samples-dlsm"]["images"]
    assert abs(whole["images"].astype(int) - images[:30]).max() <= 1  # image i keeps its noise and class
    assert "seed = 3, not 4; --tag" in draw(*more, 4, code=2)[0]


def test_every_guidance_sampler_and_scale(main, trained, tmp_path, monkeypatch):
    for guidance in ("none", "base", "scaling", "renorm"):
        draw(main, trained, tmp_path, "--guidance", guidance, "--n", 10)
    out, _ = draw(main, trained, tmp_path, "--alpha", "0.5,1", "--classes", "3,5", "--n", 11)
    assert "--n 11: 12 images, equally many of the 2 classes" in out
    batches, original = [], sample.sample_batch
    monkeypatch.setattr(sample, "sample_batch", lambda *v: batches.append(v[1]) or original(*v))
    pc = ["--guidance", "base", "--sampler", "pc", "--tag", "pc", "--n", 20, "--batch", 2]
    _, found = draw(main, trained, tmp_path, *pc)
    assert set(found) == {f"samples-{n}" for n in "none base scaling renorm dlsm dlsm-a0.5 base-pc".split()}
    assert "labels" not in found["samples-none"] and found["samples-dlsm"]["labels"].tolist() == [3, 5] * 6
    names = "none", "base", "scaling", "renorm", "base-pc"
    assert len({found[f"samples-{name}"]["images"][:10].tobytes() for name in names}) == 5
    # The Langevin norms of a batch are those of one class, as released.
    labels = found["samples-base-pc"]["labels"]
    assert [len(set(labels[numbers])) for numbers in batches] == [1] * 10
    # What is finished is not drawn again for its pictures.
    before = (tmp_path / "samples-dlsm.npz").stat().st_mtime_ns
    out, _ = draw(main, trained, tmp_path, "--classes", "3,5", "--n", 12, "--png", "--watch")
    assert "finished already (12 images)" in out
    assert before == (tmp_path / "samples-dlsm.npz").stat().st_mtime_ns
    assert len(list((tmp_path / "samples-dlsm").glob("[35]/*.png"))) == 12
    assert Image.open(tmp_path / "samples-dlsm-strip.png").height == 2 * 66


def test_bundled_weights_own_folders_and_hints(main, tmp_path):
    bundled = HERE / "docs" / "pretrained" / "fashion-16"
    before = sorted(bundled.iterdir())
    main("sample", "--run", bundled, "--classes", "bag,ankle boot", "--n", 2, "--steps", 2, cwd=tmp_path)
    assert np.load(tmp_path / "runs" / "fashion-16" / "samples-dlsm.npz")["labels"].tolist() == [8, 9]
    assert sorted(bundled.iterdir()) == before
    wrong = ["sample", "--run", bundled, "--classes", "bag,hat"]
    assert "--classes bag,hat: must be" in main(*wrong, cwd=tmp_path, code=2)
    for i in range(20):
        file = tmp_path / "my data" / "v1.5" / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
    train = ["train_score", "--size", 8, *SMALL, "--steps", 1, "--sample-every", 0, "--data"]
    out = main(*train, "my data/v1.5/", cwd=tmp_path)
    assert "2 of 20 images are held out" in out and re.search(r"2 classes: cat \d+, dog \d+", out)
    assert "runs/v1.5-8/score.pt: finished already" in main(*train, "my data/v1.5", cwd=tmp_path)
    message = main("sample", "--data", "my data/v1.5", cwd=tmp_path, code=2)  # without --size
    for words in ("runs/v1.5/score.pt: no such score; python train_score.py --data 'my data/v1.5' makes it",
                  "there are runs/v1.5-8", f"python sample.py --run {shlex.quote(str(bundled))}"):
        assert words in message, message
    message = main("sample", "--data", "my data/v1.5", "--size", 8, cwd=tmp_path, code=2)
    assert "python train_classifier.py --loss total --data 'my data/v1.5' --size 8 makes it" in message


def test_sampling_speaks_and_stops_within_seconds(trained, tmp_path):
    flags = ["--out", tmp_path, "--n", 1000, "--batch", 1000, "--steps", 1000]  # one batch, of many minutes
    process = start("sample.py", "--run", trained / "runs" / "small", *flags, cwd=tmp_path)
    line = next(line for line in process.stdout if line.startswith("samples-dlsm: image "))
    assert re.search(r"image \d+/1000 .*/s  .* left", line), line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and not err and "stopping soon" in out, out + err
    assert "samples-dlsm.npz: stopped, 0 of 1 batches are done; the same command continues" in out


def test_a_signal_when_all_batches_are_done_finishes_the_file(main, trained, tmp_path, monkeypatch):
    original = sample.write_whole

    def write(path, data):
        original(path, data)
        if path.name == "000000.npz":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sample, "write_whole", write)
    _, found = draw(main, trained, tmp_path, "--n", 10, "--alpha", "1,2", code=128 + signal.SIGTERM)
    assert list(found) == ["samples-dlsm"]  # the second file is not begun


def test_signals_before_any_work_and_a_second_ctrl_c(main, capsys, monkeypatch):
    def send(number, block, times):
        with block():
            for _ in range(times):
                os.kill(os.getpid(), number)

    monkeypatch.setattr(sys, "argv", ["x.py"])
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    for job in ((signal.SIGINT, contextlib.nullcontext, 1), (signal.SIGTERM, contextlib.nullcontext, 1),
                (signal.SIGINT, caught_signals, 2)):
        with pytest.raises(SystemExit, match=f"^{128 + job[0]}$"):
            run(lambda: send(*job))
        error = capsys.readouterr().err
        assert error == "x.py: interrupted; finished work is kept, the same command continues\n"
    signal.signal(signal.SIGINT, old)


def test_a_full_disk_and_a_read_only_folder_name_the_way_out(main, shapes, trained, tmp_path):
    path = copied(trained, tmp_path, "score.pt", "classifier-total.pt") / "score.pt"
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    train = ["train_score", "--data", shapes, *SMALL, "--sample-every", 0, "--steps", 13]
    draws = ["sample", "--data", shapes, "--n", 300, "--steps", 2, "--batch", 300]
    for name, flags in (("score.pt", train), ("parts/000000.npz", draws)):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            message = main(*flags, cwd=tmp_path, code=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"{name}: File too large; " in message and "--run or --out writes elsewhere" in message
    assert path.read_bytes() == before and not list(path.parent.glob(f".*-{os.getpid()}"))
    assert "continuing at step 12" in main(*train, cwd=tmp_path)
    (tmp_path / "file").touch()
    for folder in ("/sys/dlsm", tmp_path / "file" / "run"):  # where not even root may write
        message = main(*train, "--run", folder, cwd=tmp_path, code=2)
        assert str(folder) in message and "--run or --out writes elsewhere" in message


def test_two_at_once_and_what_a_kill_left(main, shapes, trained, tmp_path):
    runs = copied(trained, tmp_path, "score.pt", "classifier-total.pt")
    before = {path: path.read_bytes() for path in runs.iterdir()}
    for name, script, *flags in (["score.pt", "train_score", *SMALL, "--steps", 20],
                                 ["samples-dlsm.npz", "sample"],
                                 ["classifier-total.pt", "train_classifier", *SMALL, "--steps", 20],
                                 ["diagnose.json", "train_classifier", "--diagnose"]):
        with lock(runs / name):
            message = main(script, "--data", shapes, *flags, cwd=tmp_path, code=2)
        assert f"{name}: process {os.getpid()} on " in message and "choose another" in message
    assert before == {path: path.read_bytes() for path in runs.iterdir() if not path.name.endswith(".lock")}
    stale, other = runs / ".score.pt-4711", runs / ".score-b.pt-4711"  # perhaps of a run with --tag b
    for file in (stale, other):
        file.write_text("half a checkpoint")
    with lock(runs / "score.pt"):
        assert not stale.exists() and other.exists()


def test_progress_names_days_and_the_preset_for_a_cpu(capsys):
    progress = Progress(10**6, 0, "step", torch.device("cpu"))
    progress.begun -= 10
    for done in (1, 2, 0):  # nothing done is no error
        progress.next = 0
        progress(done, loss=2.0)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert re.match(r"step 1/1000000  loss 2  0.1/s  11\d days, .* left.*--preset tiny", first)
    assert "--preset" not in second


NOT_NUMBERS = ["", " ", "x", "nan", "inf", "-inf", "1,2", "1e400", "9" * 5000, "-" + "9" * 400]
EDGES = ["-999999999999", "-1", "-1e-30", "0", "1e-300", "1.5", "1e13", "9" * 25]
LISTS = dict(alphas=["-1", "1,-1", "1,", ",", "1;2", "1,nan"], file_part=["a/b", "../x", "a b", "x" * 101],
             noise_levels=["1", "1,", "5,1", "1,2,3", "-1,2", "1,nan"])


@pytest.mark.parametrize("script", ["train_score", "train_classifier", "sample", "evaluate", "toy_moons"])
def test_every_flag_refuses_what_is_outside_its_range_in_one_line(script, capsys):
    module, accepted = importlib.import_module(script), []
    for action in module.make_parser()._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        flag, kind = action.option_strings[-1], getattr(action.type, "kind", None)
        values = ["", " ", *LISTS.get(getattr(action.type, "__name__", ""), [])]
        if kind or action.choices:
            values = list(NOT_NUMBERS)
        for text in EDGES if kind else []:
            whole = text.lstrip("-").isdigit()
            if kind is int and not whole or not action.type.low <= kind(text) <= action.type.high:
                values.append(text)
        for value in values:
            try:
                module.make_parser().parse_args([f"{flag}={value}"])
                accepted.append(f"{flag}={value[:30]!r}")
            except SystemExit as stopped:
                message = capsys.readouterr().err
                assert stopped.code == 2 and flag in message and message.count("\n") == 1, message
    assert not accepted


@pytest.mark.parametrize("words, command_line", [
    ("--device meta", "train_score --device meta"), ("--device cuda:99", "train_score --device cuda:99"),
    ("--amp: bfloat16", "train_score --device cpu --amp"), ("--drop", "train_score --drop 0.2"),
    ("--preset exact", "train_score --preset exact --lr 1"), ("--size", "train_classifier --size 16"),
    ("--lam with", "train_classifier --loss ce --lam 2"),
    ("--power with", "train_classifier --loss ce --power 2"),
    ("--classes 1,1", "sample --classes 1,1"), ("--classes 10", "sample --classes 10"),
    ("--alpha with", "sample --guidance none --alpha 2"), ("--snr with", "sample --snr 0.1"),
    ("--guide-sigma with", "sample --guidance none --guide-sigma 1,2"),
    ("--gamma with", "sample --sampler pc --gamma 0"),
    ("a score checkpoint is needed", "sample --score RUN/ce.pt"),
    ("train_score.py --conditional", "sample --guidance free"),
    ("train_score.py --preset exact", "sample --guidance oracle")])
def test_flags_that_contradict_each_other(words, command_line, main, shapes, trained):
    small = trained / "runs" / "small"
    script, *flags = command_line.replace("RUN/", f"{small}/classifier-").split()
    assert words in main(script, "--data", shapes, "--run", small, *flags, cwd=trained, code=2)


MOONS = ("--preset", "paper", "--steps", 3, "--batch", 50, "--samples", 20, "--out", "moons")


def without_pool(monkeypatch):
    """toy_moons.py in this process, with fewer points and steps of sampling."""
    moons = toy_moons.moons
    monkeypatch.setattr(toy_moons, "worker_pool", contextlib.nullcontext)
    monkeypatch.setattr(toy_moons, "PC_STEPS", 3)
    monkeypatch.setattr(toy_moons, "moons", lambda n=400: moons(400))


@pytest.fixture(scope="session")
def moons_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return folder, command("toy_moons.py", *MOONS, cwd=folder)


def test_the_moons_study_as_a_user_runs_it(moons_run, main, monkeypatch):
    folder, printed = moons_run
    out = folder / "moons"
    assert "Table 1, late" in printed and "[0.198]" in printed and "Table A3, late" in printed
    for name in ("figure1", "figure5", "figureA1"):
        assert Image.open(out / f"{name}.png").width > 800
    files = {path: path.stat().st_mtime_ns for path in out.glob("*.pt")}
    rows, losses = json.loads((out / "table.json").read_text())["late"].values()
    assert set(rows) == {"a", "b", "renorm", "c", "d", "e"} and set(losses) == {"ce", "dlsm", "total"}
    assert rows["a"]["D_L"] == losses["ce"]["D_L"] and rows["d"]["D_P"] == losses["total"]["D_P"]
    assert rows["c"]["D_L"] is None and max(rows["e"]["D_P"]) < 1e-5 and len(files) == 6
    without_pool(monkeypatch)
    assert "finished already (3 steps)" in main("toy_moons", *MOONS, cwd=folder)
    assert "steps = 3, not 4" in main("toy_moons", *MOONS, "--steps", 4, cwd=folder, code=2)
    assert files == {path: path.stat().st_mtime_ns for path in files}  # nothing was trained twice


def test_moons_mistakes_and_ctrl_c(main, tmp_path):
    (tmp_path / "FILE").write_text("kept")
    for flags in (["--preset", "big"], ["--device", "abacus"], ["--out", "FILE/below"], ["--out", "FILE"]):
        message = main("toy_moons", *flags, cwd=tmp_path, code=2)
        assert all(word in message for word in flags), message
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    flags = ["--steps", 10**6, "--batch", 10, "--out", "moons"]
    process = start("toy_moons.py", *flags, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob("moons/.late-*.lock")), process)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("\n") == 1 and "the same command continues" in err, err
    assert [load_checkpoint(path)["step"] for path in tmp_path.glob("moons/*.pt")]
    assert not [path for path in tmp_path.glob("moons/.*") if path.suffix != ".lock"]  # no half-written files


@pytest.mark.parametrize("rank, flag, index", [
    ("", "auto", 0), ("", "cuda", 0),
    ("", "cuda:1", 1), ("0", "cuda", 0), ("1", "cuda", 1), ("1", "auto", 1)])
def test_a_gpu_is_chosen(monkeypatch, rank, flag, index):
    """torch.cuda with two GPUs, as far as `set_up` asks; bfloat16 is emulated at first."""
    zeros, chosen, backends = torch.zeros, [], []

    def fake_zeros(*shape, device):
        if (torch.device(device).index or 0) > 1:
            raise RuntimeError("CUDA error: invalid device ordinal\nKernel errors might be reported later")
        return zeros(*shape)

    monkeypatch.setattr(torch, "zeros", fake_zeros)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)  # under torch's set_device
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **more: backends.append(name))
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if rank:
            monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else rank)

    def set_up(*flags):
        return train_score.set_up(train_score.make_parser().parse_args(flags))

    assert set_up("--device", flag) == torch.device("cuda", index)
    assert (chosen, backends) == ([index], ["nccl"] if rank else [])
    for flags in ("--device cuda:2", f"--device {flag} --amp"):
        with pytest.raises(UserError, match=f"^({flags}|--amp): .*$"):
            set_up(*flags.split())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert set_up("--device", flag, "--amp") == torch.device("cuda", index)


def numbers(path):
    found = []
    json.loads(path.read_text(), parse_float=lambda text: found.append(float(text)))
    return found


@pytest.mark.skipif(not hasattr(torch._C, "_acc"), reason="this torch knows no device written in Python")
def test_every_stage_gives_on_another_device_what_it_gives_on_the_cpu(tmp_path):
    """On the pretend device, without float64; and the host waits at most once per step and evaluation."""
    data = ["--data", "data.npz", "--run", "runs/small", "--device"]
    tiny = [*SMALL[:-1], 8, "--steps"]
    draws = ["--n", 10, "--steps"]

    def jobs(device):
        return [
            ["train_score", *data, device, "--sample-every", 0, *tiny, 3],
            ["train_classifier", *data, device, "--diagnose-n", 8, *tiny, 3],
            ["sample", *data, device, *draws, 4],
            ["train_classifier", *data, device, "--diagnose", "--diagnose-n", 8],
            ["sample", *data, device, *draws, 3, "--sampler", "pc", "--alpha", "auto", "--watch"],
            ["evaluate", *data, device, "--features", "own", "--own-steps", 2, "--metrics", "fid,is"],
            ["toy_moons", *MOONS, "--device", device]]

    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    # Each of these has two training steps, or evaluations of a batch, fewer than its twin.
    fewer = [[*jobs("pretend")[i][:-1], steps, "--tag", "fewer"] for i, steps in ((0, 1), (1, 1), (2, 3))]
    first = f"""import contextlib, sys; sys.path.insert(0, {str(HERE / '.ci')!r})
import pretend_device; pretend_device.activate()
import toy_moons; toy_moons.PC_STEPS, moons, toy_moons.moons = 3, toy_moons.moons, lambda n=400: moons(400)
toy_moons.worker_pool = contextlib.nullcontext
after = lambda: print("waits", pretend_device.WAITS.total())"""
    children = []
    for device, more in (("cpu", []), ("pretend", fewer)):
        (tmp_path / device).mkdir()
        np.savez(tmp_path / device / "data.npz", images=pixels, labels=np.arange(60) % 5)
        children.append(in_one_child(tmp_path / device, jobs(device) + more, first, PRETEND_NO_FLOAT64="1"))
    for child in children:
        out, err = child.communicate(timeout=600)
        assert child.returncode == 0, out + err
    for file in (tmp_path / "cpu").glob("*/**/*.*"):
        twin = tmp_path / "pretend" / file.relative_to(tmp_path / "cpu")
        if file.suffix == ".pt" and "features" not in file.parts:
            ours, theirs = (load_checkpoint(path)["weights"] for path in (twin, file))
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4, msg=str(file))
        elif file.match("samples-*.npz"):
            assert abs(np.load(twin)["images"].astype(int) - np.load(file)["images"]).max() <= 1, file
        elif file.suffix == ".json":
            ours, theirs = numbers(twin), numbers(file)
            assert len(ours) > 5 and ours == pytest.approx(theirs, rel=1e-2, abs=1e-4), file
    waits = np.diff([0, *map(int, re.findall(r"^waits (\d+)$", out, re.M))])
    assert set(waits[:3] - waits[-3:]) <= {1, 2}, waits


# ------------- evaluate.py: the metrics, Inception, the command


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_frechet_distance_and_moments_closed_forms():
    a, b, mu = torch.tensor([[4.0, 9, 0.25, 1e-5], [1.0, 16, 0, 4e-5], [1.0, -2, 0.5, 0]]).double()
    turn = torch.linalg.qr(normal(4, 4).double())[0]
    turned = frechet_distance(0 * mu, turn * a @ turn.T, mu, turn * b @ turn.T)
    assert turned == pytest.approx((mu**2 + (a.sqrt() - b.sqrt()) ** 2).sum().item(), rel=1e-7)
    assert frechet_distance([0.0], [[4.0]], [3.0], [[1.0]]) == pytest.approx(10)
    x = normal(5000, 7) + 3e3  # sums of squares in float32 would lose all
    assert np.allclose(moments(x)[0], x.double().mean(0), rtol=1e-12)
    assert np.allclose(moments(x)[1], np.cov(x.double().numpy().T), rtol=1e-9)


@pytest.mark.parametrize("n1, n2", [(450, 350), (30, 700), (30, 50), (700, 30), (2, 40)])
def test_frechet_distance_of_samples(n1, n2):
    """tr (S1 S2)^½ is the nuclear norm of X1 X2ᵀ / √((n1 − 1)(n2 − 1)), X centred; of few samples, too."""
    x1, x2 = (normal(n, 120, seed=n).double() * torch.linspace(0.1, 3, 120) + n / 100 for n in (n1, n2))
    (m1, s1), (m2, s2) = moments(x1), moments(x2)
    overlap = torch.linalg.svdvals((x1 - m1) @ (x2 - m2).T).sum().item() / math.sqrt((n1 - 1) * (n2 - 1))
    rest = ((m1 - m2).square().sum() + s1.trace() + s2.trace()).item()
    assert frechet_distance(m1, s1, m2, s2) == pytest.approx(rest - 2 * overlap, rel=1e-6)
    assert frechet_distance(m1, s1, m1, s1) == pytest.approx(0, abs=1e-6)
    if min(n1, n2) > 120:
        linalg = pytest.importorskip("scipy.linalg")
        assert np.trace(linalg.sqrtm((s1 @ s2).numpy())).real == pytest.approx(overlap, rel=1e-6)


def test_inception_score():
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double()
    two = math.exp((p * (p / p.mean(0)).log()).sum().item() / 2)
    sure = 200 * torch.eye(10).repeat(60, 1)
    for logits, splits, expected in ((torch.zeros(100, 8), 10, 1), (sure, 1, 10), (p.log(), 1, two)):
        assert inception_score(logits, splits) == pytest.approx((expected, 0))
    logits = 3 * torch.eye(10).repeat_interleave(50, 0) + normal(500, 10)  # stored class by class
    assert inception_score(logits)[0] > 0.85 * inception_score(logits, splits=1)[0] > 2


def brute_force(x, y, k=3):
    x, y = (v.reshape(len(v), -1).double() for v in (x, y))
    xx, yy, xy = (torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
                  for a, b in ((x, x), (y, y), (x, y)))
    real = xy < xx.fill_diagonal_(math.inf).kthvalue(k, 1).values[:, None]
    fake = xy < yy.fill_diagonal_(math.inf).kthvalue(k, 1).values
    return dict(precision=real.any(0).double().mean().item(), recall=fake.any(1).double().mean().item(),
                density=real.sum().item() / (k * len(y)), coverage=real.any(1).double().mean().item())


A, B, CENTERS = normal(900, 80), normal(900, 80, seed=1), 1000 * normal(5, 80, seed=2).repeat(180, 1)
CLOUDS = {
    "plane": (A[:, :2], 1.1 * B[:700, :2]), "few": (A[:6, :3], B[:9, :3]), "line": (A[:500, 0], B[:400, 0]),
    "many dimensions": (normal(900, 700), 0.97 * normal(400, 700, seed=1)),
    "float64": (A.double() / 3, B.double() / 3), "float32 and float64": (A, B.double() / 3 * 2.9),
    "far from zero": (A + 1e4, B + 1e4), "far apart": (A + CENTERS, B + CENTERS),
    "lattice": ((3 * A[:, :3]).long(), (3 * B[:, :3]).long()), "cube": ((A > 0) + 0.1, (B > 0) + 0.1),  # ties
    "duplicates": (A[:90].repeat(10, 1), B[:90].repeat(10, 1)), "one point": (A, B[:1].repeat(900, 1)),
    "modes": ((A + CENTERS)[:, :2], B[:, :2] + CENTERS[0, :2]), "outlier": (A, torch.cat([B, 1e6 + B[:1]])),
    "almost": (A, A + 1e-6 * B), "copy": (A, A.flip(0)), "copy in the plane": (A[:, :2], A[:, :2].flip(0)),
    "copy in float64": (A.double() / 3, A.flip(0).double() / 3)}


@pytest.mark.parametrize("name", CLOUDS)
def test_prdc_is_brute_force(name, monkeypatch):
    monkeypatch.setattr(ev, "BLOCK", 256)
    x, y = CLOUDS[name]
    found = prdc(x, y)
    assert found == pytest.approx(brute_force(x, y), abs=1e-12)
    if "copy" in name:  # a density of 4/3 would be that of ≤
        assert set(found.values()) == {1.0}
    if name == "modes":  # one of five: the first argument is the real one
        assert found["precision"] > 0.9 and found["recall"] <= 0.2 and found["coverage"] <= 0.2
    assert prdc(x.numpy(), y.numpy(), 5, knn_radii(x, 5)) == pytest.approx(brute_force(x, y, 5), abs=1e-12)


@pytest.mark.parametrize("words, call, args", [
    ("k = 3", prdc, (A, A[:3])), ("coordinates, fake", prdc, (A, A[:, 1:])), ("k ≥ 1", prdc, (A, A, 0)),
    ("NaN or infinite", prdc, (A, A / 0)), ("7 samples", inception_score, (A[:7],))])
def test_what_a_metric_cannot_do(words, call, args):
    with pytest.raises(UserError, match=words):
        call(*args)


def test_prdc_has_its_exact_expectations():
    """Two sets of one law, whichever: density has mean 1, coverage 1 − C(N−1, k) / C(N+M−1, k)."""
    N, M, k, results, g = 150, 210, 4, [], torch.Generator().manual_seed(0)
    for i in range(200):
        found = prdc(*((1 - torch.rand(n, 2 if i % 2 else 70, generator=g)).log() for n in (N, M)), k)
        results.append([found["density"], found["coverage"]])
    error = 4 * np.std(results, 0) / len(results) ** 0.5
    off = np.mean(results, 0) - [1, 1 - math.comb(N - 1, k) / math.comb(N + M - 1, k)]
    assert (abs(off) < error).all() and (error < 0.05).all()


def test_prdc_memory_is_linear():
    """In blocks of 512² distances; one matrix of 5,000² in float64 would take 200 MB."""
    code = """if True:
        import resource, torch, evaluate
        evaluate.BLOCK, x, y = 512, torch.randn(5000, 8), torch.randn(5000, 8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        evaluate.prdc(x, y)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60


def test_inception_is_fids_own(main, tmp_path):
    """Features and numbers, with statistics in place of data; IS needs a head; the paper's columns."""
    known, weights = np.load(RELEASED), released_checkpoint("inception")["model"]
    np.savez(tmp_path / "unit.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    np.savez(tmp_path / "x.npz", images=np.concatenate(4 * [known["inception/images"]]))
    torch.save(weights, tmp_path / "w.pth")
    for rule, metrics in (("torch", "is"), ("tf", "fid,is")):
        flags = f"x.npz --stats unit.npz --weights w.pth --resize {rule} --root {rule} --metrics {metrics}"
        out = main("evaluate", *flags.split(), "--paper", "--device", "cpu", cwd=tmp_path)
        kept = load_checkpoint(*(tmp_path / rule / "features").glob("*.pt"))
        x = torch.from_numpy(known[f"inception/features_{rule}"]).repeat(4, 1)
        assert ((kept["features"] - x).abs().amax(1) < 1e-4 * x.abs().amax(1)).all()
    found, roots = numbers_of(tmp_path, "x"), torch.linalg.svdvals(x - x.mean(0)) / 11**0.5
    fid = x.mean(0).square().sum() + (roots - 1).square().sum() + 2048 - len(roots)
    score = inception_score(known["inception/logits_unbiased_tf"], 1)[0]
    assert (found["fid"], found["is"]) == pytest.approx((fid.item(), score), rel=1e-3)
    for words in ("resize tf", "…, not FID's 6726825d…", "FID@12 is of fewer than 2049 samples: not com",
                  f"| FID@12 | ↓ | {found['fid']:.2f} | 4.10 | 12.48 | **2.25** |"):
        assert words in out
    assert "CAS" not in out and ev.paper_columns("cifar100")["ours (paper)"]["cw_coverage"]["value"] == 0.52
    torch.save(dict(weights, **{"fc.weight": torch.zeros(1008, 2048)}), tmp_path / "w.pth")
    error = main("evaluate", *flags.split(), cwd=tmp_path, code=2)
    assert "w.pth: weights without a head" in error and error.strip().endswith("--metrics fid")


def test_inception_weights_are_checked(tmp_path, monkeypatch):
    def answer(*args, **more):
        if not served:
            raise urllib.error.URLError("no route")
        return io.BytesIO(served)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    path = tmp_path / "features" / ev.WEIGHTS
    for served, words in ((b"", "no route.*fid_weights/pt_inc.*features/pt_inc.*--weights; --features own"),
                          (b"other", "sha256.*try again")):
        with pytest.raises(UserError, match=words):
            ev.inception_weights(None, tmp_path)
    assert not path.exists()
    monkeypatch.setattr(ev, "WEIGHTS_SHA", ev.hashlib.sha256(b"other").hexdigest())
    assert ev.inception_weights(None, tmp_path) == (path, ev.WEIGHTS_SHA) and path.read_bytes() == b"other"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="sha256.*delete it"):
        ev.inception_weights(None, tmp_path)


FLAGS = "--root . --features own --own-steps 15 --device cpu --data greys.npz".split()
KEYWORDS = dict(root=".", features="own", own_steps=15, device="cpu", data="greys.npz")
GOOD, BAD = "samples-good.npz", "samples-bad.npz"
UNIT = np.random.default_rng(0).random((30, 8, 8, 1)).astype(np.float32)
BYTES = (255 * UNIT).astype(np.uint8)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with grey images of three classes (dark, grey, bright) as data, and samples."""
    folder, rng = tmp_path_factory.mktemp("evaluate"), np.random.default_rng(0)

    def draw(n, noise):
        labels = np.arange(n) % 3
        images = rng.normal(70 + 40 * labels, noise, (1, 8, 8, n)).T
        return dict(images=images.clip(0, 255).astype(np.uint8), labels=labels)

    real, held_out = draw(240, 20), draw(60, 20)
    np.savez(folder / "greys.npz", **real, **{f"test_{key}": value for key, value in held_out.items()})
    copies = dict(images=real["images"][np.r_[:30, :24]] ^ 1, labels=real["labels"][np.r_[1:7, 6:30, :24]])
    for name, samples, recipe in (("good", draw(150, 20), dict(data="greys.npz", size=8, sampler="pc")),
                                  ("bad", draw(120, 45), dict(data="fashion")),
                                  ("exact", copies, dict(data="greys.npz", exact=True))):
        np.savez(folder / f"samples-{name}.npz", **samples, recipe=json.dumps(recipe))
    return folder


def numbers_of(folder, name):
    numbers = json.loads((folder / "evaluation.json").read_text())["files"][name]["numbers"]
    return {key: number["value"] for key, number in numbers.items()}


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_whole_evaluation(work, main):
    flags = f"{BAD} {GOOD} --root root --metrics all --cas-model resnet18 --cas-steps 2 --out out".split()
    out, folder = main("evaluate", *FLAGS, *flags, cwd=work), work / "out"
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [row[0][2:] for row in table[2:]] == [
        "FD@120/150", "IS", "IS, ten splits", "Precision", "Recall", "Density", "Coverage", "CAS",
        "CAS of real images", "Class accuracy", "(CW) FD", *(f"(CW) {key.capitalize()}" for key in ev.PRDC)]
    assert "**" not in table[2][2] and "**" in table[2][3] and table[2][1] == "↓"
    for words in ("| bad | good |", "±", "Warning: FD@150 is of few samples", "real images: image 240/240  ",
                  "Warning: bad was drawn for fashion", "Warning: (CW) FD is of 50 samples per class",
                  (folder / "evaluation.md").read_text().strip()):
        assert words in out
    assert "good was drawn" not in out and Image.open(folder / "side-by-side.png").height == 2 * 66
    assert Image.open(folder / "classwise-good-minus-bad.png").width > 600
    good = json.loads((folder / "evaluation.json").read_text())["files"]["good"]
    numbers = good["numbers"]
    assert good["recipe"]["sampler"] == "pc" and numbers["recall"]["k"] == 3 and numbers["cas"]["steps"] == 2
    assert numbers["fid"]["reference"] == "greys.npz, 240 training images"
    parts = [load_checkpoint(path) for path in (work / "root" / "features").glob("own-*.pt")]
    kept = {len(part["features"]): part for part in parts if "features" in part}
    real, fake, logits = kept[240]["features"], kept[150]["features"], kept[150]["logits"]
    pairs = {"all": (real, fake), **{c: (real[int(c) :: 3], fake[int(c) :: 3]) for c in "012"}}
    expected = {c: dict(brute_force(x, y), fid=frechet_distance(*moments(x), *moments(y)))
                for c, (x, y) in pairs.items()}
    for key, value in expected.pop("all").items():
        classes = {c: row[key] for c, row in expected.items()}
        assert numbers[key]["value"] == pytest.approx(value, abs=1e-7)
        assert numbers[f"cw_{key}"]["classes"] == pytest.approx(classes)
        assert numbers[f"cw_{key}"]["value"] == pytest.approx(sum(classes.values()) / 3)
    assert numbers["is"]["value"] == pytest.approx(inception_score(logits, 1)[0])
    assert 0 <= numbers["cas"]["value"] <= 1
    assert numbers["accuracy"]["value"] == (logits.argmax(1) == torch.arange(150) % 3).double().mean()
    before = snapshot(work / "root")
    main("evaluate", *FLAGS, *flags, cwd=work)
    assert snapshot(work / "root") == before  # nothing is computed twice
    assert json.loads((folder / "evaluation.json").read_text())["files"]["good"] == good


def test_held_out_images_exact_copies_and_a_recipe(work, main):
    """`test` has as many images as the file before it; --data and --size come from the recipe."""
    flags = [*FLAGS[:-2], "--metrics", "fid,prdc"]
    out = main("evaluate", "samples-exact.npz", "test", *flags, "--out", "exact", cwd=work)
    direct = ev.evaluate(load_images("greys.npz", "test")[0][:54], metrics=("fid", "prdc"), **KEYWORDS)
    assert numbers_of(work / "exact", "test") == pytest.approx(direct) and set(direct) == {"fid", *ev.PRDC}
    assert numbers_of(work / "exact", "exact")["exact_accuracy"] == pytest.approx(48 / 54)
    chance = sum(80 * (1 - (1 - 1 / 80) ** drawn) for drawn in (18, 18, 18))
    for words in ("--data greys.npz, as in the recipe", "| exact | test |", "| FD@54 |",
                  f"| Distinct images |  | 30 of {chance:.1f} expected | – |"):
        assert words in out
    out = main("evaluate", GOOD, *flags, "--out", "recipe", cwd=work)
    assert "--data greys.npz --size 8, as in the recipe" in out


def test_files_of_others_and_tensors_give_the_same_numbers(work, main):
    images, labels = (np.load(work / GOOD)[key] for key in ("images", "labels"))
    np.savez(work / "guided.npz", images, labels)  # arr_0 and arr_1
    for i, (image, label) in enumerate(zip(images, labels)):
        for folder in (work / "by-class" / str(label), work / "flat"):
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0]).save(folder / f"{i:03d}.png")
    flags = f"{GOOD} guided.npz by-class flat --save-stats stats.npz --out others".split()
    main("evaluate", *FLAGS, *flags, cwd=work)
    good, guided, by_class, flat = (numbers_of(work / "others", name)
                                    for name in ("good", "guided", "by-class", "flat"))
    assert guided == good and by_class == pytest.approx(good, rel=1e-3)  # in another order
    assert flat == pytest.approx({key: good[key] for key in good if key != "accuracy" and key[:3] != "cw_"})
    flags = [*FLAGS, *"guided.npz --out stats --metrics fid --stats".split()]
    main("evaluate", *flags, "stats.npz", cwd=work)
    assert numbers_of(work / "stats", "guided")["fid"] == pytest.approx(good["fid"], rel=1e-9)
    np.savez(work / "three.npz", mu=np.zeros(3), sigma=np.eye(3))
    error = main("evaluate", *flags, "three.npz", cwd=work, code=2)
    assert "three.npz: holds mu (3,), sigma (3, 3)" in error and "mu (128,)" in error
    last = torch.from_numpy(images)
    for same in (images, last, last.permute(0, 3, 1, 2)):
        assert ev.evaluate(same, torch.from_numpy(labels), **KEYWORDS) == good
    for wrong, more, words in (
            (last, dict(metric="fid"), "no flag metric; there are"), (last, dict(features="dino"), "dino"),
            (last, dict(metrics=["fid", "prd"]), "fid,prd: must be all"), (last, dict(k=0), "k: '0' is not"),
            (last.repeat(1, 1, 1, 2), {}, r"shape \(150, 8, 8, 2\)"), (last / 255, {}, r"save \(255 \* x\)")):
        with pytest.raises(UserError, match=words):
            ev.evaluate(wrong, **dict(KEYWORDS, **more))


WRONG = {  # words of the error: images of a sample file, or all its arrays, or a command
    "float32, |to 1; save (255 * x).round()": UNIT, "(127.5 * (x + 1)).round()": 2 * UNIT - 1,
    "x.clip(0, 255).round()": 255 * UNIT, "NaN or infinite": np.where(UNIT > 0.9, np.nan, UNIT),
    "[0, 1]|scale to 0 to 255 first": UNIT.round().astype(np.uint8), "[0]|scale to": 0 * BYTES,
    "[0, 1, 255]|scale to": (3 * UNIT - 1.5).round().astype(np.int8).astype(np.uint8),
    "(30, 1, 8, 8)|(N, H, W, C)": BYTES.transpose(0, 3, 1, 2), "5 samples|at least 10": BYTES[:5],
    "1×16×16|1×8×8; --size 16 resizes": BYTES.repeat(2, 1).repeat(2, 2),
    "3×8×8|save one channel, images[..., :1]": BYTES.repeat(3, 3),
    "class 1 (1) has 3 samples|need 4 in every class|--metrics fid,is,prdc":
        dict(images=BYTES, labels=np.arange(30) % 3 * (np.arange(30) < 9)),
    "labels up to 3|has 3 classes": dict(images=BYTES, labels=np.arange(30) % 4),
    "holds pixels|arr_0": dict(pixels=BYTES), "go to --stats": dict(mu=UNIT, sigma=UNIT),
    "recipe is not a JSON object": dict(images=BYTES, recipe="[1"),
    "no.npz: no such file": ["no.npz"], "x.npy: an array without names|np.savez": ["x.npy"],
    "strange: its sub-folder 'cat'|0, 1, 2": ["strange"], "--paper: the paper has cifar10": [GOOD, "--paper"],
    "runs/greys: has no|sample.py": [], "--k: '0' is not a whole number of 1 to 1000": [GOOD, "--k", 0],
    "--metrics fid,prd: |fid,is,prdc,classwise,cas": [GOOD, "--metrics", "fid,prd"],
    "greys.npz: cannot be written|--out": [GOOD, "--out", "greys.npz"],
    "greys.npz/features: cannot be written|--root": [GOOD, "--root", "greys.npz"],
    "no.pth|fid_weights|--features own": [GOOD, "--features", "inception", "--weights", "no.pth"],
    "not a readable checkpoint": [GOOD, "--features", "inception", "--weights", GOOD]}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_are_told_with_the_cure(words, work, main):
    args = WRONG[words]
    (work / "strange" / "cat").mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8)).save(work / "strange" / "cat" / "0.png")
    if not isinstance(args, list):
        np.savez(work / "wrong.npz", **(args if isinstance(args, dict) else dict(images=args)))
        args, words = ["wrong.npz"], f"wrong.npz: |{words}"
    before = snapshot(work)
    error = main("evaluate", *FLAGS, *args, cwd=work, code=2)
    assert all(word in error for word in words.split("|")), error
    assert snapshot(work) == before  # nothing was written


RESULTS, PRETRAINED = HERE / "docs" / "results", HERE / "docs" / "pretrained"


def read_json(path):
    return json.loads(path.read_text())


def moons_rows():
    """The tables of the two moons: first cell → {column: text}."""
    results = read_json(RESULTS / "moons.json")
    assert results["settings"]["seeds"] == [0, 1, 2, 3, 4]

    def pair(join, group, key, metric):
        value = results[join][group][key][metric]
        return "" if value is None else " / ".join(f"{v:.3f}" for v in value)

    names = dict(a="(a) base", b="(b) scaling, α = 10", renorm="(b') re-normalised, α = 10",
                 c="(c) posterior SM", d="(d) ours", e="(e) oracle")
    columns = {2: ("late", "D_P"), 4: ("late", "D_L"), 5: ("late", "recall"), 6: ("late", "coverage"),
               7: ("early", "D_P"), 8: ("early", "D_L"), 9: ("early", "coverage")}
    for key, name in names.items():
        yield name, 10, {i: pair(join, "methods", key, metric) for i, (join, metric) in columns.items()}
    columns = {2: ("late", "D_P"), 4: ("late", "D_L"), 5: ("early", "D_P"), 6: ("early", "D_L")}
    for key, name in dict(ce="L_CE", dlsm="L_DLSM'", total="L_Total").items():
        yield name, 7, {i: pair(join, "losses", key, metric) for i, (join, metric) in columns.items()}


def seed_rows():
    """The table of three classifiers each, and of the samplers; of several runs mean ± standard deviation."""
    results = read_json(RESULTS / "fashion-16-seeds.json")["files"]
    tables = {**read_json(PRETRAINED / "fashion-16" / "diagnose.json"),
              **read_json(RESULTS / "fashion-16-seeds-diagnose.json")}

    def cell(values, digits):
        deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
        return f"{np.mean(values):.{digits}f}{deviation}" if values else ""

    def row(names, classifiers=()):
        cells = [f"{results[names[0]]['n']:,}"]
        cells.append(cell([explained_nats(tables[f"classifier-{c}"], 0.01, 20.0)[0] for c in classifiers], 2))
        for key in ("fid", "is", "accuracy", *(f"cw_{key}" for key in ev.PRDC)):
            numbers = [results[name]["numbers"] for name in names]
            values = [number[key]["value"] for number in numbers if key in number]
            cells.append(cell(values, 2 if key in ("fid", "is") else 3))
        return dict(enumerate(cells, 1))

    for name, loss in (("base", "ce"), ("dlsm", "total")):
        names = [f"{name}-s{i}" for i in range(3)]
        yield f"{name}, three classifiers", 10, row(names, [loss, f"{loss}-s1", f"{loss}-s2"])
    yield "none", 10, row(["none-s0"])
    samplers = {"Heun, 24 steps": ("heun", "none base dlsm"),
                "Heun, 40 steps, gamma 1": ("heun40", "none base dlsm"),
                "PC, 100 steps": ("pc", "base dlsm"), "PC, 1,000 steps": ("pc1000", "dlsm")}
    for sampler, (key, names) in samplers.items():
        for name in names.split():
            yield f"{name}, {sampler}", 10, row([f"{name}-{key}"])


def diagnosis_rows():
    """The table of classifiers on Fashion-MNIST; at σ = 1.4, where most of the class is decided."""
    tables = {2000: read_json(PRETRAINED / "fashion-16" / "diagnose.json"),
              1000: read_json(RESULTS / "fashion-16-short.json")}
    for name, key, steps in (("L_CE", "ce", 2000), ("L_DLSM'", "dlsm", 2000), ("L_Total", "total", 2000),
                             ("L_CE", "ce", 1000), ("L_Total", "total", 1000),
                             ("L_CE, ReLU", "ce-relu", 1000),
                             ("L_Total, the paper's weights", "total-paper", 1000)):
        table = tables[steps][f"classifier-{key}"]
        nats, error = explained_nats(table, 0.01, 20.0)
        numbers = [f"{table[6][key]:.3f}" for key in ("accuracy", "ce", "gain")]
        cells = [f"{steps:,}", f"{nats:.2f} ± {error:.2f}", *numbers, f"{table[6]['alpha']:.2f}"]
        yield name, 7, dict(enumerate(cells, 1))


def real_rows():
    for name, result in read_json(RESULTS / "cifar10-16-real.json").items():
        n, reference, numbers = result["n"], result["reference"], result["numbers"]
        values = [f"{numbers['fid']['value']:.2f}", *(f"{numbers[key]['value']:.3f}" for key in ev.PRDC)]
        expected = f"{1 - (reference / (reference + n)) ** 3:.3f}"
        yield name, 9, dict(enumerate([f"{n:,}", f"{reference:,}", *values, expected], 1))


def test_the_readme_says_what_the_result_files_say():
    text = (HERE / "README.md").read_text()
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines]
    for source in (moons_rows, seed_rows, diagnosis_rows, real_rows):
        for name, width, cells in source():
            found = [row for row in rows if row[0] == name and len(row) == width]
            assert any(all(row[i] == cell for i, cell in cells.items()) for row in found), (name, cells)
    for name, paper in (("fashion-16", {}), ("cifar10-16", ev.paper_columns("cifar10"))):
        files = read_json(RESULTS / f"{name}.json")["files"]
        columns = {key: file["numbers"] for key, file in files.items()}
        assert ev.markdown({**columns, **paper}, "FD", real=["test"]) in text
    tables = read_json(PRETRAINED / "cifar10-16" / "diagnose.json")
    nats = [v for key in ("ce", "total") for v in explained_nats(tables[f"classifier-{key}"], 0.01, 25.0)]
    assert "L_CE carries {:.2f} ± {:.2f} of at most 2.30 nats, L_Total {:.2f} ± {:.2f},".format(*nats) in text
    for target in re.findall(r"\]\((docs/[^)]+)\)", text):
        assert (HERE / target).exists(), target
    for name in re.findall(r"`(test_\w+)`", text):
        assert name in globals(), name


def test_the_bundled_weights_sample_what_the_readme_says(tmp_path):
    """Needs no data: the README's one command, its images judged by the other bundled classifier."""
    box = PRETRAINED / "fashion-16"
    command("sample.py", "--run", box, cwd=tmp_path)
    found = np.load(tmp_path / "runs" / "fashion-16" / "samples-dlsm.npz")
    images = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).float() / 255
    logits = load_model(box / "classifier-ce.pt", kind="classifier")(images, torch.full((100,), 0.01))
    right = (logits.argmax(1).numpy() == found["labels"]).sum()
    stated = read_json(RESULTS / "fashion-16.json")["box"]["recognised"]
    assert abs(right - stated) <= 2 and f"{stated} of the 100" in (HERE / "README.md").read_text()
    assert sum(file.stat().st_size for file in box.iterdir()) < 10 * 2**20
