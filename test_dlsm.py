"""The paper as tests: each equation and claim; then networks, files, data and the commands in use.

    pytest test_dlsm.py               # all
    pytest test_dlsm.py -k paper      # the paper, in a minute
"""
import copy
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pytest import approx

import evaluate as ev
import models
import sample
import toy_moons
import train_classifier
import train_score
from evaluate import frechet_distance, inception_score, knn_radii, moments, prdc
from models import (ExactScore, NCSNpp, NoisyResNet, ToyNet, UserError, append_dims, fold_batchnorm,
                    load_checkpoint, load_model, save_checkpoint, sigma_at, write_whole)
from sample import pc_sampler, posterior_score, sde_sampler, sigma_grid
from toy_moons import moons, oracle_score
from train_classifier import ce_loss, diagnose, dlsm_loss, explained_nats, likelihood_score, total_loss
from train_score import Plan, dsm_loss, fit, image_batches, learning_rate, load_images, lock, read_folder, run

HERE = pathlib.Path(__file__).resolve().parent
OFFICIAL = HERE.parent / "shared" / "official"
RELEASED = HERE / ".ci" / "released.npz"  # names and shapes of the released entries, inputs and outputs
SMALL = ("--preset", "tiny", "--width", 8, "--batch", 16)
torch.set_num_threads(1)  # as the children have it, whose results are compared bit for bit


def start(script, *args, cwd, **more):
    """Starts a script as a user does, in a child that hears Ctrl-C even where this process does not."""
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, args)], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **more)


def command(script, *args, cwd):
    """Runs a script to its good end → its output."""
    process = start(script, *args, cwd=cwd)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture
def main(monkeypatch, capsys):
    """main(script, *args, cwd=, code=0): a script in this process → its output, or its line of error."""
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


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """A few hundred of the drawn shapes at 8×8, as an .npz."""
    images, y, _ = load_images("shapes", "train", 8)
    x, path = images.permute(0, 2, 3, 1).numpy(), tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, images=x[:300], labels=y[:300], test_images=x[300:400], test_labels=y[300:400])
    return path


@pytest.fixture(scope="session")
def trained(shapes, tmp_path_factory):
    """A folder with runs/small: a score model and two classifiers of a few steps."""
    folder, flags = tmp_path_factory.mktemp("trained"), ["--data", shapes, *SMALL, "--steps", 12]
    losses = [["train_classifier", *flags, "--loss", loss, "--diagnose-n", 80] for loss in ("ce", "total")]
    child = in_one_child(folder, [["train_score", *flags], *losses])
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, out + err
    return folder


# ------------- the paper

POINTS = torch.tensor([[-1.5], [-0.4], [0.7], [1.1], [2.0]], dtype=torch.float64)  # where all is known
LABELS = torch.tensor([0, 0, 1, 0, 1])
EXACT = ExactScore(POINTS, LABELS)
LINE = torch.arange(-7, 8, 0.3, dtype=torch.float64)[:, None]  # its sum is a Gaussian's integral, nearly
LEVEL = torch.full((len(LINE),), 0.6, dtype=torch.float64)


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
    for more, truth in (((), prior), ((y,), posterior)):
        size = truth.flatten(1).norm(dim=1) + 1 / sigma  # 1/σ is about the score of a noisy point
        in_float32 = single(x.float(), sigma.float(), *more)
        for found, limit in ((double(x, sigma, *more), 1e-9), (in_float32, 1e-3)):
            assert ((found - truth).flatten(1).norm(dim=1) / size).max() < limit


@pytest.mark.parametrize("equations", ["3 and 4", "8 and 9"])
def test_paper_theorem_1_denoising_and_explicit_losses_have_equal_gradients(equations):
    """Of the true score, or of the true classifier, plus a wave; E is a sum over the points and the line."""
    def losses(x, sigma, y, z):
        noisy = x + sigma[:, None] * z
        if equations == "3 and 4":
            score = lambda x, sigma: EXACT(x, sigma) + amount * torch.sin(2 * x)
            error = score(noisy, sigma) - EXACT(noisy, sigma)
            return dsm_loss(score, x, sigma, z, 0), error.square().sum() / 2
        logits = lambda x, sigma: bayes(POINTS, LABELS)(x, sigma) + F.pad(amount * torch.sin(2 * x), (0, 1))
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
        for y in ([0, 1], torch.zeros(len(LINE) + 1, dtype=torch.long)):
            with pytest.raises(RuntimeError):
                posterior_score(EXACT, guide, y)(LINE, LEVEL)


def test_paper_eq_7_the_distances_of_table_1_on_the_moons(monkeypatch):
    """Networks with known errors: the prior is off by (3, 4), the logit of c1 is 0.1 x."""
    monkeypatch.setattr(toy_moons, "moons", lambda n=None: moons(300))
    (points, labels), grid, shift = moons(300), toy_moons.GRID.double(), torch.tensor([3.0, 4.0])
    assert len(grid.unique(dim=0)) == 1225 and grid.abs().amax(0).tolist() == [40, 25]
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

    def frozen(noisy, level):
        assert noisy.tolist() == [[2, 1], [2, -2]] and level is sigma and not torch.is_grad_enabled()
        return -noisy / 2

    def logits(x, sigma):
        calls.append(1)
        return torch.stack([x[:, 0], 0 * x[:, 0]], 1)

    score, ce = lambda x, sigma: -x / 2, -(math.log(p) + math.log(1 - p)) / 2
    dsm = 3**2 + 3.5**2, 0.5**2  # ‖s + z/σ‖²: (−1 + 4, −½ + 4) and (−1 + ½, 1 − 1)
    dlsm = (3 + 1 - p) ** 2 + 3.5**2, (0.5 + p) ** 2
    for power, reduce in itertools.product((0, 2, 4), ("mean", "sum")):
        weigh = lambda squares: (0.5**power * squares[0] + 2**power * squares[1]) / 4
        want = weigh(dlsm) / (2 if reduce == "mean" else 1)
        assert dsm_loss(score, x, sigma, z, power).item() == approx(weigh(dsm))
        assert dlsm_loss(logits, frozen, x, sigma, y, z, power, reduce).item() == approx(want)
        assert total_loss(logits, frozen, x, sigma, y, z, 3.0, power, reduce).item() == approx(want + 3 * ce)
    assert len(calls) == 12  # one forward pass for each loss
    assert ce_loss(logits, x, sigma, y, z).item() == approx(ce)
    assert dlsm_loss(logits, frozen, x, sigma, y, z).item() == approx(sum(dlsm) / 8)
    assert total_loss(logits, frozen, x, sigma, y, z).item() == approx(sum(dlsm) / 8 + ce)
    assert dsm_loss(score, x, sigma, z).item() == approx(0.25 * dsm[0] / 4 + dsm[1])


def test_paper_proposition_2_and_eq_a1_a2_renormalised_likelihood_keeps_the_gradient_of_z():
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
    sigma, z = train_score.sample_noise(torch.Generator().manual_seed(0), (100_000, 2), 0.01, 50.0)
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
    z, at, walk, calls, noises = torch.tensor([[6.0, 8.0], [-8.0, 6.0]]), 10.0, [], [], []
    for more, root in ({}, torch.tensor(0.64 / 1.5)), (dict(per_sample=True), torch.tensor([[0.64], [0.32]])):
        got = pc_sampler(lambda x, sigma: s, x, [2.0, 2.0], noise=lambda x: z, **more)
        assert near(got, x + root**2 / 2 * s + root * z, 1e-5)

    def score(x, sigma):
        calls.extend([sigma.item(), x.item()])
        return -x

    def noise(x):
        noises.append(1)
        return torch.ones_like(x)

    for sigma, variance in ((2.0, 3), (1.0, 1)):  # correctors, then the predictor, as released
        for _ in range(2):
            walk += [sigma, at]
            root = 2 * 0.1 / abs(at)
            at = at - root**2 / 2 * at + root
        walk += [sigma, at]
        at = at - variance * at + (math.sqrt(3) if sigma == 2 else 0)  # the last mean has no noise
    got = pc_sampler(score, torch.tensor([[10.0]]), torch.tensor([2.0, 1.0, 0.0]), 0.1, 2, noise=noise)
    assert got.item() == approx(at, abs=1e-5) and calls == approx(walk, rel=1e-5) and len(noises) == 5


def test_paper_sde_by_hand_exact_for_one_point_and_a_score_of_zero():
    """Two steps written out; and for one data point D is constant, so that any η and grid are exact."""
    levels, z, eta = [8.0, 4.0, 1.0, 0.0], 0.5, 2.0
    x, D = 8.0, lambda x, sigma: x - sigma**2 * x / 100
    first, shrink = D(x, 8), 0.5**3  # (below / σ)^(1 + η)
    x = shrink * x + (1 - shrink) * first + 4 * math.sqrt(1 - 0.5**4) * z
    second, shrink = D(x, 4), 0.25**3
    ahead = second + 0.5 * 2 * (second - first)  # log(4/1) is twice log(8/4)
    x = shrink * x + (1 - shrink) * ahead + math.sqrt(1 - 0.25**4) * z
    got = sde_sampler(lambda x, sigma: -x / 100, torch.tensor([[8.0]]), levels, eta, lambda x: z + 0 * x)
    assert got.item() == approx(D(x, 1), rel=1e-5)
    for eta, low, high in ((0.0, 0.04, 0.06), (1.0, 0.99, 1.01), (30.0, 0.99, 1.01)):
        point, sigma_last = torch.tensor([[1.0, -2.0]]), 0.5
        score = lambda x, sigma: (point - x) / sigma[:, None] ** 2
        x = point + 10 * torch.randn(40_000, 2) * (0.05 if eta == 0 else 1)
        got = sde_sampler(score, x, [10.0, 7.0, 2.0, sigma_last], eta)
        assert low < (got - point).std().item() / sigma_last < high
    for sampler in (pc_sampler, sde_sampler):
        with pytest.raises(UserError, match="zero"):
            sampler(lambda x, sigma: 0 * x, torch.ones(3, 2), [0.3, 0.1])


def test_paper_eq_1_and_the_samplers_on_a_gaussian():
    """Langevin diffusion at one noise level, from another law; and samplers from σ = 10 to 1."""
    mean, variance = torch.tensor([1.0, -2.0]), torch.tensor([0.25, 2.0])
    score = lambda x, sigma: (mean - x) / (variance + sigma[:, None] ** 2)
    start, grid = mean + (variance + 100).sqrt() * torch.randn(10_000, 2), sigma_grid(200, 1.0, 10.0)[:-1]
    for x in (pc_sampler(score, start / 3, [1.0] * 500, snr=0.1), pc_sampler(score, start, grid, snr=0.08),
              *(sde_sampler(score, start, grid, eta) for eta in (0.0, 1.0, 6.0))):
        assert near(x.mean(0), mean, 0.1) and torch.allclose(x.var(0), variance + 1, rtol=0.08)


def test_paper_a_6_the_two_moons():
    (points, labels), t = moons(), torch.linspace(0, math.pi, 5_000).double()
    upper, lower = torch.stack([t.cos(), t.sin()], 1), torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)
    both = 20 * torch.cat([upper, lower])
    assert near(points.double(), both - both.mean(0), 1e-4) and labels.tolist() == [0] * 5_000 + [1] * 5_000


def test_paper_theorem_1_on_images_the_diagnosis_by_hand(shapes, monkeypatch):
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
        prior, posterior = exact(x, sigma), exact(x, sigma, labels)
        h = (posterior - prior).flatten(1).double()
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
    monkeypatch.setattr(train_classifier, "NCSNpp", ExactScore)  # as a conditional score model its g is h
    table = diagnose(exact, lambda x, s: exact(x, s) + 1, images, labels, 0.1, 50.0, truth=exact)
    assert [row["D_P"] for row in table] == approx([math.sqrt(192)] * 10, rel=1e-4)  # s is off, h is not
    assert [row["D_L"] for row in table] == [0] * 10 and "accuracy" not in table[0]


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
            (vars(train_score), dict(SIGMA_MIN=0.01, CLIP=1.0)), (flags(train_score), dict(sigma_max=50.0)),
            (flags(sample), dict(snr=0.16, corrector_steps=1, per_sample=False)),
            (flags(ev), dict(k=3, cas_model="resnet50")), (ev.CAS, dict(batch=150, lr=2e-4))):
        assert {key: found[key] for key in wanted} == wanted
    keys = ("width", "mults", "blocks", "attention", "edm")
    for preset, count in dict(paper=107_586_947, lite=15_716_291, tiny=984_315).items():
        with torch.device("meta"):
            net = NCSNpp(**{key: train_score.PRESETS[preset][key] for key in keys})
        assert sum(p.numel() for p in net.parameters()) == count


def test_paper_a_6_initial_values_as_released():
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
    nets = dict(score=NCSNpp(8, 3, 8, (1, 2), 1, edm=True).eval(), classifier=NoisyResNet(width=8).eval())
    for kind, net in nets.items():
        net.about = dict(kind=kind, settings=dict(sigma_min=0.01, sigma_max=50.0, data="x"), sha="", step=0)

    def call(classes, script, *flags):
        images, got = torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8), []
        found = images, torch.arange(200) % classes, ["name"] * classes
        catch = lambda *inputs: got.extend(inputs)
        load = lambda path, device, kind, *_: nets[kind]
        stand_ins = dict(load_images=lambda *_: found, load_image_model=load, fit=catch, make_samples=catch)
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(importlib.import_module(script), name, stand_in, raising=False)
        main(script, *flags, "--device", "cpu", cwd=tmp_path)
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
    points, labels = moons(200)
    monkeypatch.setattr(toy_moons, "moons", lambda n=None: (points, labels))
    monkeypatch.setattr(toy_moons, "score_errors", lambda *_: {})
    monkeypatch.setattr(toy_moons, "prdc", lambda real, fake, k: dict(seen=(real, fake, k)))
    row, _ = toy_moons.measure("e", types.SimpleNamespace(device="cpu", seed=0), 2_000)
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
    with pytest.raises(KeyError), average.applied():
        assert all(torch.equal(*pair) for pair in zip(net.parameters(), average.shadow))
        raise KeyError  # an error gives the weights back, too
    state, loaded = load_checkpoint(path)["optimizer"]["state"], list(load_model(path).parameters())
    for i, p in enumerate(net.parameters()):
        assert near(p.double(), weights[i], 3e-6)
        assert near(loaded[i].double(), shadow[i], 3e-6) and torch.equal(loaded[i], average.shadow[i])
        assert torch.allclose(state[i]["exp_avg"].double(), m[i], rtol=1e-3, atol=1e-6)
        assert set(state[i]) == {"step", "exp_avg", "exp_avg_sq"}  # Adam's, no AMSGrad


# ------------- networks


def as_trained(net):
    """No weight is left at an initial zero; evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return net.eval()


def read_json(path):
    return json.loads(path.read_text())


def assert_near(a, b):
    assert a.shape == b.shape and (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("size, channels, edm, classes", [(16, 1, True, 0), (24, 3, False, 3)])
def test_ncsnpp_of_any_size_its_first_output_its_form_and_its_classes(size, channels, edm, classes):
    net = NCSNpp(size, channels, 8, (1, 2, 2), 1, (size // 2,), edm=edm, classes=classes).eval()
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
    if classes:
        mixed = net(x, sigma, torch.tensor([2, 3, 0, 3]))
        assert [torch.allclose(*pair, rtol=1e-3) for pair in zip(mixed, out)] == [False, True, False, True]


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


def test_joined_late_the_gradient_of_a_toy_network_cannot_depend_on_sigma():
    x = (20 * torch.randn(64, 2)).requires_grad_()
    for join, same in (("late", True), ("early", False)):
        net = ToyNet(2, join=join)
        a, b = (torch.autograd.grad(net(x, torch.full((64,), s))[:, 0].sum(), x)[0] for s in (0.1, 9.0))
        assert torch.allclose(a, b, atol=1e-6) == same


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
    if name == "score_small":  # the released ones are all of one size
        monkeypatch.setitem(models.NETWORKS, "NCSNpp", functools.partial(NCSNpp, width=16, blocks=1))
    checkpoint = make(name)
    torch.save(checkpoint, tmp_path / "released.pth")
    net = load_model(tmp_path / "released.pth", kind=name.split("_")[0])
    x, sigma, out = (torch.from_numpy(known[f"{name}/{key}"]) for key in ("x", "sigma", "out"))
    for ours, theirs in zip(net(x, sigma), out, strict=True):
        assert_near(ours, theirs)
    if name == "classifier_cifar10":
        checkpoint["model"]["module.classifier.classifier.dense_2.weight"] = torch.zeros(128, 127)
        torch.save(checkpoint, tmp_path / "released.pth")
        with pytest.raises(UserError, match="dense.1"):
            load_model(tmp_path / "released.pth")


def fit_toy(path, steps=3):
    """A small training, whose checkpoint has an EMA; it continues where there is one."""
    net = ToyNet(2, widths=(8, 8), join="early")
    batch = lambda generator, step: [torch.randn(4, 2, generator=generator), torch.ones(4)]
    loss = lambda x, sigma: net(x, sigma).square().sum()
    fit(net, batch, loss, path, "score", {}, Plan(steps, 0.1, ema=0.5))
    return load_checkpoint(path)


def test_hostile_and_cut_files_are_refused_and_run_nothing(tmp_path):
    ran, made = tmp_path / "ran", tmp_path / "made.npz"
    hostile = type("Hostile", (), dict(__reduce__=lambda self: (os.mkdir, (str(ran),))))()
    torch.save(fit_toy(tmp_path / "toy.pt"), made)
    files = [b"{}", b"PK\x05\x06" + bytes(18), *(made.read_bytes()[:cut] for cut in (0, 10, 1000, -1))]
    np.savez(made, images=np.array([hostile] * 40), labels=np.arange(40) % 2)
    files.append(made.read_bytes())
    for value, zipped in itertools.product((hostile, {"model": hostile}, {"kind": hostile}), (True, False)):
        torch.save(value, made, _use_new_zipfile_serialization=zipped)
        files += [made.read_bytes(), pickle.dumps(value)]
    for data, (name, read) in itertools.product(files, (("x.pt", load_model), ("x.npz", load_images))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"^.*{name}.*$"):  # one line
            read(str(tmp_path / name))
    assert not ran.exists()
    pickle.loads(files[-1])  # it would have
    assert ran.exists()


def test_checkpoints_of_the_wrong_kind_shape_or_type_older_and_exported_ones(tmp_path):
    path, slim, last = tmp_path / "toy.pt", tmp_path / "slim.pt", "last.weight"
    good = fit_toy(path)
    weights, averages = good["weights"], good["ema"]["shadow"]
    net = load_model(path)
    save_checkpoint(slim, dict(**net.about, weights=net.state_dict(), ema=None))  # docs/python.md
    assert load_model(slim).about == load_model(path).about and "optimizer" not in load_checkpoint(slim)
    torch.save({**good, "checksum": "0" * 64}, path)  # older files carry one
    for file in (path, slim):
        assert torch.equal(load_model(file).last.weight, averages[-2])
    for file in PRETRAINED.glob("*/*.pt"):
        assert load_model(file, kind=file.stem.split("-")[0]).about["step"] > 0
    odd = [-3, "x", [{}], {"a": 1}, torch.zeros(2), torch.zeros(1).expand(2**45)]
    changes = [{key: value} for key in ("network", "config", "weights", "ema", "optimizer") for value in odd]
    changes += [dict(config={**good["config"], "outputs": value}) for value in (None, -1, 5, 2**40)]
    changes += [dict(ema=None, weights={**weights, last: value}) for value in (torch.zeros(7), "x")]
    changes += [dict(ema=dict(shadow=[v[:1] for v in averages]))]
    for change in changes:
        torch.save({**good, **change}, path)
        with pytest.raises(UserError, match="^.*toy.pt.*$"):
            fit_toy(path, 4) if "optimizer" in change else load_model(path)
    for name in ("slim.pt", "none.pt"):  # it is a score model; there is none
        with pytest.raises(UserError, match=name):
            load_model(tmp_path / name, kind="classifier")


# ------------- data


def test_images_from_npz_and_folder_and_a_held_out_tenth(tmp_path):
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
    sorted_by_class = dict(test_images=images.repeat(5, 0), test_labels=np.sort(labels.repeat(5)))
    np.savez(tmp_path / "own.npz", images=images, labels=labels, **sorted_by_class)
    test = load_images(str(tmp_path / "own.npz"), "test")[1]
    assert len(test) == 200 and set(test[:16].tolist()) == {0, 1, 2, 3}  # a diagnosis takes the first


def test_pictures_arrive_as_they_are_seen(tmp_path):
    wide, exif, glass = np.zeros((8, 24, 3), np.uint8), Image.Exif(), Image.new("RGBA", (3, 1))
    wide[:, 8:16] = 200  # the centre
    exif[0x112] = 6  # how the camera was held
    glass.putdata([(0, 0, 0, 0), (0, 0, 0, 128), (120, 120, 120, 255)])  # black: not seen, half seen; grey
    ramp = np.arange(256).reshape(16, 16)
    chip, turned = ramp[:2, :4].astype(np.uint8), dict(exif=exif.tobytes())
    for i, (end, picture, more, size, expected) in enumerate((
            ("png", Image.fromarray((257 * ramp).astype(np.uint16)), {}, None, ramp),
            ("png", glass, {}, None, [[255, 127, 120]]),
            ("png", Image.fromarray(wide), {}, 4, np.full((4, 4), 200)),  # cut before it is resized
            ("png", Image.fromarray(chip), turned, None, np.rot90(chip, -1)),
            ("tif", Image.fromarray(chip), turned, None, np.rot90(chip, -1)))):
        (tmp_path / str(i) / "class" / ".hidden").mkdir(parents=True)
        for name in ("x", ".hidden/y"):
            picture.save(tmp_path / str(i) / "class" / f"{name}.{end}", **more)
        found = read_folder(tmp_path / str(i), size)[0]["images"]
        assert len(found) == 1 and (found[0] == np.asarray(expected)[..., None]).all(), i
    (tmp_path / "0" / "class" / "cut.png").write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match="cut.png"):
        load_images(str(tmp_path / "0"))


def test_bad_data_is_named_before_training(tmp_path):
    pixels, two = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1])
    changes = [dict(images=v) for v in (pixels[..., 0], pixels[..., :2], pixels[:, :0], pixels / 255,
                                        np.array([{}] * 4), pixels[:, 1:])]
    changes += [dict(labels=v) for v in (two[1:], two - 1, two / 1, two[:, None], list("abcd"), 10**12 * two,
                                         two.astype(np.uint64) << 63, 2 * two, 10**9 * two, np.arange(4))]
    changes += [dict(test_images=pixels), dict(test_images=pixels, test_labels=2 * two),
                dict(test_images=pixels[:, 2:, 2:], test_labels=two)]
    for change in changes:
        np.savez(tmp_path / "bad.npz", **{**dict(images=pixels, labels=two), **change})
        with pytest.raises(UserError, match="bad.npz|--size"):
            load_images(str(tmp_path / "bad.npz"), "test" if "test_images" in change else "train")


def test_named_sets_from_torchvision_from_a_file_or_not_at_all(monkeypatch, tmp_path):
    def fashion(root, train, download):
        data = torch.full((20, 28, 28), 255 if train else 7, dtype=torch.uint8)
        return types.SimpleNamespace(data=data, targets=torch.arange(20) % 10)

    fake = types.SimpleNamespace(datasets=types.SimpleNamespace(FashionMNIST=fashion))
    monkeypatch.setattr(train_score, "import_torchvision", lambda: fake)
    images, _, names = load_images("fashion", "test", root=str(tmp_path))  # padded with zeros to 32×32
    assert images.sum() == images[:, :, 2:30, 2:30].sum() == 7 * 20 * 28 * 28 and names[9] == "ankle boot"
    np.savez(tmp_path / "fashion.npz", images=np.zeros((30, 8, 8, 1), np.uint8), labels=np.arange(30) % 10)
    assert load_images("fashion", "test", root=str(tmp_path))[0].shape == (3, 1, 8, 8)
    with pytest.raises(UserError, match="^--data cifar10.*--data shapes.*$"):  # which cannot be had here
        load_images("cifar10", root=str(tmp_path))


def test_an_epoch_takes_every_image_once_and_a_batch_is_what_it_says():
    images = torch.arange(10 * 6, dtype=torch.uint8).view(10, 1, 2, 3)

    def drawn(batch, steps, flip=False):
        draw = image_batches(images, torch.arange(10), batch, 0, 0.01, 50.0, flip)
        return [torch.cat(v) for v in zip(*(draw(torch.Generator().manual_seed(s), s) for s in range(steps)))]

    x, sigma, y, z = drawn(4, 5)
    assert sorted(y[:10].tolist()) == sorted(y[10:].tolist()) == list(range(10)) and (y[:10] != y[10:]).any()
    assert torch.equal(y, drawn(20, 1)[2]) and torch.equal(x, images[y] / 255) and len(sigma.unique()) == 20
    x, _, y, _ = drawn(50, 4, flip=True)
    mirrored = (x == images[y].flip(3) / 255).flatten(1).all(1)
    assert 60 < mirrored.sum() < 140 and torch.equal(x[~mirrored], images[y[~mirrored]] / 255)


# ------------- the commands as a user runs them, and damage


def in_one_child(folder, jobs, first="after = lambda: None", **environment):
    """Starts a process that runs these commands one after the other, so that torch is loaded only once."""
    code = f"""{first}
import sys, train_score, train_classifier, sample, evaluate, toy_moons
for name, *flags in {[[str(item) for item in job] for job in jobs]}:
    sys.argv = [name + ".py", *flags]
    sys.modules[name].main()
    after()"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **environment}
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_resume_is_exact_after_signals_and_broken_numbers_are_never_saved(tmp_path, capsys):
    def train(path, at=None, event=None):
        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout())
        net.config = {}

        def batch(generator, step):
            if step == at:
                event(net)
            return [torch.randn(4, 2, generator=generator), torch.ones(4)]

        plan = Plan(12, 0.1, warmup=5, cosine=True, ema=0.9, save_every=5)
        fit(net, batch, lambda x, sigma: net(x).square().mean(), path, "score", {}, plan)

    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    train(whole)
    torch.manual_seed(0)
    for number, step in ((signal.SIGTERM, 3), (signal.SIGINT, 7)):
        with pytest.raises(SystemExit, match=f"^{128 + number}$"):
            train(stopped, step, lambda net: os.kill(os.getpid(), number))
        assert load_checkpoint(stopped)["step"] == step + 1
    for broken in (lambda net: net[1].running_mean, lambda net: net[0].bias.data):
        with pytest.raises(UserError, match="not finite at step .*σ = 1"):
            train(stopped, 8, lambda net: broken(net).fill_(math.inf))
    for words in ("continuing at step 8", "finished already"):
        train(stopped)
        assert words in capsys.readouterr().out
    for key in ("step", "weights", "ema", "optimizer"):
        ours, theirs = (torch.utils._pytree.tree_leaves(load_checkpoint(p)[key]) for p in (whole, stopped))
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True)), key


def test_two_processes_take_the_path_of_one(main, shapes, trained, tmp_path):
    small, train = trained / "runs" / "small", ["--data", shapes, *SMALL, "--steps", 3]
    classifier = ["--score", small / "score.pt", "--norm", "group", "--diagnose-n", 16]
    jobs = [["train_score", *train, "--sample-every", 0, "--run", "two"],
            ["train_classifier", *train, *classifier, "--run", "two"],
            ["sample", "--run", small, "--n", 30, "--batch", 7, "--steps", 4, "--out", "two"]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    processes = [in_one_child(tmp_path, jobs, RANK=rank, LOCAL_RANK=rank, **shared) for rank in "01"]
    (_, err), (quiet, _) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], err
    assert not re.sub(r"\[Gloo\].*\n", "", quiet)  # older versions of torch speak there
    for job in jobs:
        main(*("one" if item == "two" else item for item in job), cwd=tmp_path)
    for name in ("score.pt", "classifier-total.pt"):
        one, two = (load_checkpoint(tmp_path / "runs" / run / name)["weights"] for run in ("one", "two"))
        assert all(torch.allclose(value, two[key], atol=1e-4) for key, value in one.items())
    one, two = (np.load(tmp_path / folder / "samples-dlsm.npz")["images"] for folder in ("one", "two"))
    assert np.array_equal(one, two)


def test_other_settings_are_an_error_and_tag_and_restart_are_the_ways_out(main, shapes, trained, tmp_path):
    runs = shutil.copytree(trained / "runs", tmp_path / "runs") / "small"
    score = ["train_score", "--data", shapes, *SMALL, "--sample-every", 0, "--steps", 12]
    classifier = ["train_classifier", "--data", shapes, *SMALL, "--diagnose-n", 8, "--steps", 12]
    draws = ["sample", "--data", shapes, "--n", 10, "--steps", 2]
    main(*draws, cwd=tmp_path)
    for key, line in (("lr", [*score, "--lr", 0.5]), ("seed", [*draws, "--seed", 4]),
                      ("lam", [*classifier, "--lam", 7])):
        assert re.search(f"{key} = .*--tag.*--restart", main(*line, cwd=tmp_path, code=2))
    main(*classifier, "--steps", 1, "--lam", 7, "--tag", "lam7", cwd=tmp_path)
    assert load_model(runs / "classifier-total-lam7.pt").about["settings"]["lam"] == 7
    main("train_classifier", "--data", shapes, "--diagnose", "--diagnose-n", 8, cwd=tmp_path)
    main(*score, "--lr", 0.002, "--steps", 2, "--restart", cwd=tmp_path)
    assert "--diagnose" in main(*draws, "--alpha", "auto", cwd=tmp_path, code=2)  # of the score before
    assert load_model(runs / "score.pt").about["settings"]["lr"] == 0.002
    assert "score" in main(*classifier, cwd=tmp_path, code=2)  # it has changed since
    out = main(*draws, "--tag", "new", cwd=tmp_path)
    assert "score model has changed" in out and "there is no classifier-total-new.pt" in out
    other = ["train_classifier", "--data", "shapes", "--size", 8, "--run", runs, "--tag", "other"]
    out = main(*other, *SMALL, "--steps", 1, "--diagnose-n", 8, cwd=tmp_path)
    assert f"{runs / 'score.pt'} was trained on other images or labels" in out
    main(*score, "--sigma-max", 40, "--steps", 1, "--restart", cwd=tmp_path)
    message = main(*draws, "--tag", "x", cwd=tmp_path, code=2)
    assert "for sigma_max = 50.0, the score model for 40.0" in message


def test_exact_and_conditional_scores_and_the_diagnosis(main, shapes, tmp_path, monkeypatch):
    exact, free = (["--data", shapes, "--run", run] for run in ("exact", "free"))
    main("train_score", *exact, "--preset", "exact", cwd=tmp_path)
    main("train_classifier", *exact, *SMALL, "--steps", 6, "--diagnose-n", 16, cwd=tmp_path)
    main("train_classifier", *exact, "--diagnose", "--diagnose-n", 100, cwd=tmp_path)
    rows = read_json(tmp_path / "runs" / "exact" / "diagnose.json")["classifier-total"]
    main("sample", *exact, "--guidance", "oracle", "--n", 100, cwd=tmp_path)
    found, data = np.load(tmp_path / "runs" / "exact" / "samples-oracle.npz"), np.load(shapes)
    pixels, images = (v.reshape(len(v), -1).astype(int) for v in (data["images"], found["images"]))
    nearest = [abs(pixels - image).max(1).argmin() for image in images]
    assert abs(pixels[nearest] - images).max() <= 2  # the oracle gives training images of the class
    assert np.array_equal(data["labels"][nearest], found["labels"]) and len(set(nearest)) > 70
    main("train_score", *free, *SMALL, "--conditional", "--steps", 12, "--sample-every", 0, cwd=tmp_path)
    main("train_classifier", *free, "--diagnose", "--diagnose-n", 50, cwd=tmp_path)
    free += ["--guidance", "free", "--alpha", "1,2,auto", "--n", 20, "--steps", 4]
    forward, calls = NCSNpp.forward, []
    monkeypatch.setattr(NCSNpp, "forward", lambda *inputs: calls.append(1) or forward(*inputs))
    main("sample", *free, cwd=tmp_path)
    assert len(calls) == 4 + 8 + 8  # with α = 1 the prior score is not needed
    rows[2]["alpha"] = -1.0  # taken as 0
    for i, row in enumerate(rows):
        row["gain"] = 1.0 if 3 < i < 7 else -1.0
        scale = sample.best_scale(rows, "cpu")(torch.tensor([row["sigma"]]))
        assert scale.item() == approx(max(row["alpha"], 0), abs=1e-5)
    low, high = (math.sqrt(rows[i]["sigma"] * rows[i + 1]["sigma"]) for i in (3, 6))  # halfway, in log σ
    assert sample.levels_with_gain(rows) == approx((low, high)) and "D_P" in rows[0]


def draw(main, trained, out, *flags):
    """Samples of the run `small` → all files in `out`."""
    main("sample", "--run", trained / "runs" / "small", "--out", out, "--steps", 4, *flags, cwd=trained)
    return {path.stem: np.load(path) for path in out.glob("samples-*.npz")}


def test_samples_depend_neither_on_damaged_parts_nor_on_the_batch(main, trained, tmp_path, monkeypatch):
    flags = ["--n", 30, "--seed", 3, "--batch", 7]
    monkeypatch.setattr(sample.shutil, "rmtree", lambda *args, **more: None)  # the finished batches stay
    whole = draw(main, trained, tmp_path, *flags)["samples-dlsm"]["images"]
    assert whole.shape == (30, 8, 8, 3) and whole.dtype == np.uint8
    monkeypatch.undo()
    (tmp_path / "samples-dlsm.npz").unlink()
    first, *_, last = sorted(tmp_path.glob("*.parts/*.npz"))
    first.write_bytes(first.read_bytes()[:-100])
    last.unlink()
    again = draw(main, trained, tmp_path, *flags)["samples-dlsm"]
    assert np.array_equal(again["images"], whole) and np.array_equal(again["labels"], np.arange(30) % 10)
    assert not list(tmp_path.glob("*.parts"))
    more = draw(main, trained, tmp_path, "--n", 40, "--seed", 3, "--restart")["samples-dlsm"]["images"]
    assert abs(whole.astype(int) - more[:30]).max() <= 1  # image i keeps its noise and class


def test_every_guidance_sampler_and_scale(main, trained, tmp_path, monkeypatch):
    for guidance in ("none", "base", "scaling", "renorm"):
        draw(main, trained, tmp_path, "--guidance", guidance, "--n", 10)
    draw(main, trained, tmp_path, "--alpha", "0.5,1", "--classes", "3,5", "--n", 11)  # 12: as many of each
    batches, original = [], sample.sample_batch
    monkeypatch.setattr(sample, "sample_batch", lambda *v: batches.append(v[1]) or original(*v))
    pc = ["--guidance", "base", "--sampler", "pc", "--tag", "pc", "--n", 20, "--batch", 2]
    found = draw(main, trained, tmp_path, *pc)
    assert set(found) == {f"samples-{n}" for n in "none base scaling renorm dlsm dlsm-a0.5 base-pc".split()}
    assert "labels" not in found["samples-none"] and found["samples-dlsm"]["labels"].tolist() == [3, 5] * 6
    assert len({file["images"][:10].tobytes() for file in found.values()}) == len(found)
    labels = found["samples-base-pc"]["labels"]
    assert [len(set(labels[numbers])) for numbers in batches] == [1] * 10  # batches of one class, as released
    draw(main, trained, tmp_path, "--classes", "3,5", "--n", 12, "--png", "--watch")
    assert len(batches) == 11  # for the strip; what is finished is not drawn again for its pictures
    assert len(list(tmp_path.glob("samples-dlsm/[35]/*.png"))) == 12
    assert Image.open(tmp_path / "samples-dlsm-strip.png").height == 2 * 66
    draw(main, trained, tmp_path, "--classes", "5", "--n", 2, "--png", "--restart")  # no pictures of others
    left = {path.name for path in tmp_path.rglob("samples-dlsm*/*/*.png")}
    assert left == {"000000.png", "000001.png"} and not (tmp_path / "samples-dlsm-strip.png").exists()


def test_a_full_disk_a_folder_that_cannot_be_written_and_two_at_once(main, shapes, trained, tmp_path):
    path = shutil.copytree(trained / "runs", tmp_path / "runs") / "small" / "score.pt"
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    train = ["train_score", "--data", shapes, *SMALL, "--sample-every", 0, "--steps", 13]
    draws = ["sample", "--data", shapes, "--n", 300, "--steps", 2, "--batch", 300]
    for name, flags in (("score.pt", train), ("000000.npz", draws)):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            message = main(*flags, cwd=tmp_path, code=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"{name}: File too large" in message
    assert "/sys/x" in main(*train, "--run", "/sys/x", cwd=tmp_path, code=2)  # where not even root may write
    diagnose = ["train_classifier", "--data", shapes, "--diagnose"]
    for name, flags in (("score.pt", train), ("samples-dlsm.npz", draws), ("diagnose.json", diagnose)):
        with lock(path.with_name(name)):
            assert f"{name}: another process writes it" in main(*flags, cwd=tmp_path, code=2)
    assert path.read_bytes() == before and not list(path.parent.glob(f".*-{os.getpid()}"))
    assert "continuing at step 12" in main(*train, cwd=tmp_path)


@pytest.mark.parametrize("line", [
    "train_score --device meta", "train_score --device cuda:99", "train_score --device cpu --amp",
    "train_score --drop 0.2", "train_score --preset exact --lr 1", "train_classifier --size 16",
    "train_score --preset exact --no-flip", "train_classifier --diagnose --loss ce",
    "train_classifier --diagnose --truth runs/small/score.pt", "sample --guidance none --classes 2",
    "train_classifier --loss ce --lam 2", "train_classifier --loss ce --power 2", "sample --classes 1,1",
    "sample --classes 10", "sample --guidance none --alpha 2", "sample --guidance none --guide-sigma 1,2",
    "sample --guide-sigma 5,1", "sample --tag a/b", "sample --snr 0.1", "sample --sampler pc --eta 0",
    "sample --data fashion", "sample --size 16", "train_score --drop 0",
    "sample --guidance free", "sample --guidance oracle", "toy_moons --device x", "toy_moons --out /sys/x",
    "train_score --data nowhere", "train_score --size 12", "train_score --run=", "train_score --lr nan",
    "train_score --steps 0", "train_classifier --lam 1e400", "sample --alpha 1,-1", "evaluate --k 0"])
def test_what_cannot_be_done_is_an_error_that_names_the_flag(line, main, shapes, trained):
    script, *flags = line.split()
    if script != "toy_moons":
        flags = ["--data", shapes, "--run", trained / "runs" / "small", *flags]
    flag = [item for item in map(str, flags) if item.startswith("--")][-1].strip("=")
    assert flag in main(script, *flags, cwd=trained, code=2)


def test_the_moons_study_as_a_user_runs_it_and_ctrl_c(tmp_path):
    flags, out = ["--steps", 3, "--batch", 50, "--samples", 20], tmp_path / "runs" / "moons"
    printed = command("toy_moons.py", "--preset", "paper", *flags, cwd=tmp_path)
    assert "Table 1, late" in printed and "[0.198]" in printed and "Table A3, late" in printed
    for name in ("figure1", "figure5", "figureA1"):
        assert Image.open(out / f"{name}.png").width > 800
    rows, losses = read_json(out / "table.json")["late"].values()
    assert set(rows) == {"a", "b", "renorm", "c", "d", "e"} and set(losses) == {"ce", "dlsm", "total"}
    assert rows["a"]["D_L"] == losses["ce"]["D_L"] and rows["d"]["D_P"] == losses["total"]["D_P"]
    assert rows["c"]["D_L"] is None and max(rows["e"]["D_P"]) < 1e-5
    process = start("toy_moons.py", "--steps", 10**6, "--out", "long", cwd=tmp_path, start_new_session=True)
    while not list(tmp_path.glob("long/.late-*.lock")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("\n") == 1 and "the same command continues" in err, err
    assert [load_checkpoint(path)["step"] for path in tmp_path.glob("long/*.pt")]


# ------------- devices


def test_each_process_of_torchrun_has_its_gpu(monkeypatch):
    chosen, one = [], torch.ones(1)
    cuda = types.SimpleNamespace(is_available=lambda: True, set_device=chosen.append,
                                 is_bf16_supported=lambda including_emulation: False)
    stand_ins = dict(cuda=cuda, zeros=lambda *_, device: one, set_float32_matmul_precision=lambda _: None)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch, name, stand_in)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for flag, index in (("auto", 1), ("cuda", 1), ("cuda:0", 0)):
        args = train_score.make_parser().parse_args(["--device", flag])
        assert train_score.set_up(args) == chosen.pop() == torch.device("cuda", index)
    with pytest.raises(UserError, match="^--amp: .*bfloat16"):  # which this GPU only emulates
        train_score.set_up(train_score.make_parser().parse_args(["--amp"]))
    cuda.is_bf16_supported = lambda including_emulation: True
    assert train_score.set_up(train_score.make_parser().parse_args(["--amp"])).type == "cuda"


def test_compile_is_for_the_score_network_with_every_loss(main, shapes, trained, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda net: compiled.append(type(net).__name__) or net)
    shutil.copytree(trained / "runs", tmp_path / "runs")
    train = ["--data", shapes, *SMALL, "--steps", 1, "--tag", "c", "--compile"]
    main("train_score", *train, "--sample-every", 0, cwd=tmp_path)
    for loss in ("dlsm", "ce"):
        main("train_classifier", *train, "--loss", loss, "--diagnose-n", 8, cwd=tmp_path)
    assert compiled == ["NCSNpp", "NCSNpp", "NCSNpp", "NoisyResNet"]


@pytest.mark.skipif(not hasattr(torch._C, "_acc"), reason="this torch knows no device written in Python")
def test_every_stage_gives_on_another_device_what_it_gives_on_the_cpu(tmp_path):
    """On the pretend device, without float64; and the host waits at most once per step and evaluation."""
    def jobs(device):
        data = ["--data", "data.npz", "--run", "runs/small", "--device", device]
        tiny = ["--preset", "tiny", "--width", 8, "--batch", 8, "--steps"]
        return [
            ["train_score", *data, "--sample-every", 0, *tiny, 3],
            ["train_classifier", *data, "--diagnose-n", 8, *tiny, 3],
            ["sample", *data, "--n", 10, "--steps", 4],
            ["train_classifier", *data, "--diagnose", "--diagnose-n", 8],
            ["sample", *data, "--n", 10, "--sampler", "pc", "--alpha", "auto", "--watch", "--steps", 3],
            ["evaluate", *data, "--features", "own", "--own-steps", 2, "--metrics", "fid,is"],
            ["toy_moons", "--steps", 2, "--batch", 8, "--samples", 20, "--device", device]]

    def numbers(path):
        found = []
        json.loads(path.read_text(), parse_float=lambda text: found.append(float(text)))
        return found

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
            assert len(numbers(file)) > 5 and numbers(twin) == approx(numbers(file), rel=1e-2, abs=1e-4), file
    waits = np.diff([0, *map(int, re.findall(r"^waits (\d+)$", out, re.M))])
    assert set(waits[:3] - waits[-3:]) <= {1, 2}, waits


# ------------- evaluate.py: the metrics, Inception, the command


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_frechet_distance_and_moments_closed_forms():
    a, b, mu = torch.tensor([[4.0, 9, 0.25, 1e-5], [1.0, 16, 0, 4e-5], [1.0, -2, 0.5, 0]]).double()
    turn = torch.linalg.qr(normal(4, 4).double())[0]
    turned = frechet_distance(0 * mu, turn * a @ turn.T, mu, turn * b @ turn.T)
    assert turned == approx((mu**2 + (a.sqrt() - b.sqrt()) ** 2).sum().item(), rel=1e-7)
    x = normal(5000, 7) + 3e3  # sums of squares in float32 would lose all
    assert np.allclose(moments(x)[0], x.double().mean(0), rtol=1e-12)
    assert np.allclose(moments(x)[1], np.cov(x.double().numpy().T), rtol=1e-9)
    for n1, n2 in ((450, 350), (30, 700), (700, 30), (2, 40)):  # of few samples, too
        x1, x2 = (normal(n, 120, seed=n).double() * torch.linspace(0.1, 3, 120) + n / 100 for n in (n1, n2))
        (m1, s1), (m2, s2) = moments(x1), moments(x2)
        # tr (S1 S2)^½ is the nuclear norm of X1 X2ᵀ / √((n1 − 1)(n2 − 1)), X centred.
        overlap = torch.linalg.svdvals((x1 - m1) @ (x2 - m2).T).sum() / math.sqrt((n1 - 1) * (n2 - 1))
        want = (m1 - m2).square().sum() + s1.trace() + s2.trace() - 2 * overlap
        assert frechet_distance(m1, s1, m2, s2) == approx(want.item(), rel=1e-6)


def test_inception_score():
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double()
    two = math.exp((p * (p / p.mean(0)).log()).sum().item() / 2)
    for logits, splits, want in ((torch.zeros(99, 8), 9, 1), (200 * torch.eye(10), 1, 10), (p.log(), 1, two)):
        assert inception_score(logits, splits) == approx((want, 0))
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
    "float32 and float64": (A, B.double() / 3 * 2.9), "far from zero": (A + 1e4, B + 1e4),
    "lattice": ((3 * A[:, :3]).long(), (3 * B[:, :3]).long()), "cube": ((A > 0) + 0.1, (B > 0) + 0.1),  # ties
    "far apart": (A + CENTERS, B + CENTERS), "outlier": (A, torch.cat([B, 1e6 + B[:1]])),
    "duplicates": (A[:90].repeat(10, 1), B[:90].repeat(10, 1)), "one point": (A, B[:1].repeat(900, 1)),
    "modes": ((A + CENTERS)[:, :2], B[:, :2] + CENTERS[0, :2]), "almost": (A, A + 1e-6 * B),
    "copy": (A, A.flip(0)), "copy in float64": (A.double() / 3, A.flip(0).double() / 3)}


@pytest.mark.parametrize("name", CLOUDS)
def test_prdc_is_brute_force(name, monkeypatch):
    monkeypatch.setattr(ev, "BLOCK", 256)
    x, y = CLOUDS[name]
    found = prdc(x, y)
    assert found == approx(brute_force(x, y), abs=1e-12)
    if "copy" in name:  # a density of 4/3 would be that of ≤
        assert set(found.values()) == {1.0}
    assert prdc(x.numpy(), y.numpy(), 5, knn_radii(x, 5)) == approx(brute_force(x, y, 5), abs=1e-12)


def test_inception_is_fids_own(main, tmp_path):
    """Features and numbers, with statistics in place of data; the paper's columns; weights are checked."""
    known = np.load(RELEASED)
    np.savez(tmp_path / "unit.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    np.savez(tmp_path / "x.npz", images=np.concatenate(4 * [known["inception/images"]]))
    torch.save(released_checkpoint("inception")["model"], tmp_path / "w.pth")
    for rule, metrics in (("torch", "is"), ("tf", "fid,is --stats unit.npz")):
        flags = f"x.npz --weights w.pth --resize {rule} --root {rule} --metrics {metrics}"
        out = main("evaluate", *flags.split(), "--paper", "--device", "cpu", cwd=tmp_path)
        kept = load_checkpoint(*(tmp_path / rule / "features").glob("*.pt"))
        x = torch.from_numpy(known[f"inception/features_{rule}"]).repeat(4, 1)
        assert ((kept["features"] - x).abs().amax(1) < 1e-4 * x.abs().amax(1)).all()
    found, roots = numbers_of(tmp_path, "x"), torch.linalg.svdvals(x - x.mean(0)) / 11**0.5
    fid = x.mean(0).square().sum() + (roots - 1).square().sum() + 2048 - len(roots)
    score = inception_score(known["inception/logits_unbiased_tf"], 1)[0]
    assert (found["fid"], found["is"]) == approx((fid.item(), score), rel=1e-3)
    assert f"| FID@12 | ↓ | {found['fid']:.2f} | 4.10 | 12.48 | **2.25** |" in out and "not FID's" in out
    assert ev.paper_columns("cifar100")["ours (paper)"]["cw_coverage"]["value"] == 0.52
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / ev.WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(UserError, match="sha256"):
        ev.inception_weights(None, tmp_path)


FLAGS = "--root . --features own --own-steps 15 --device cpu --data greys.npz".split()
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
                                  ("exact", copies, dict(exact=True))):
        np.savez(folder / f"samples-{name}.npz", **samples, recipe=json.dumps(recipe))
    return folder


def numbers_of(folder, name):
    numbers = read_json(folder / "evaluation.json")["files"][name]["numbers"]
    return {key: number["value"] for key, number in numbers.items()}


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_whole_evaluation(work, main):
    flags = f"{BAD} {GOOD} --root root --metrics all --cas-model resnet18 --cas-steps 2 --out out".split()
    out, folder = main("evaluate", *FLAGS, *flags, cwd=work), work / "out"
    assert "| FD@120/150 | ↓ |" in out and "bad was drawn for fashion" in out
    assert Image.open(folder / "classwise-good-minus-bad.png").width > 600
    good = read_json(folder / "evaluation.json")["files"]["good"]
    numbers = good["numbers"]
    assert good["recipe"]["sampler"] == "pc" and numbers["recall"]["k"] == 3 and numbers["cas"]["steps"] == 2
    parts = [load_checkpoint(path) for path in (work / "root" / "features").glob("own-*.pt")]
    kept = {len(part["features"]): part for part in parts if "features" in part}
    real, fake, logits = kept[240]["features"], kept[150]["features"], kept[150]["logits"]
    pairs = {"all": (real, fake), **{c: (real[int(c) :: 3], fake[int(c) :: 3]) for c in "012"}}
    expected = {c: dict(brute_force(x, y), fid=frechet_distance(*moments(x), *moments(y)))
                for c, (x, y) in pairs.items()}
    for key, value in expected.pop("all").items():
        classes = {c: row[key] for c, row in expected.items()}
        assert numbers[key]["value"] == approx(value, abs=1e-7)
        assert numbers[f"cw_{key}"]["classes"] == approx(classes)
        assert numbers[f"cw_{key}"]["value"] == approx(sum(classes.values()) / 3)
    assert numbers["is"]["value"] == approx(inception_score(logits, 1)[0])
    assert numbers["accuracy"]["value"] == (logits.argmax(1) == torch.arange(150) % 3).double().mean()
    before = snapshot(work / "root")
    main("evaluate", *FLAGS, *flags, cwd=work)
    assert snapshot(work / "root") == before  # nothing is computed twice
    extractor, = (path for path in (work / "root" / "features").glob("own-*.pt") if path.stat().st_size > 1e6)
    shutil.copy(extractor, work / "own.pt")
    line = f"{GOOD} --root other --own-steps 1500 --weights own.pt --metrics fid,prdc --out kept".split()
    main("evaluate", *FLAGS, *line, cwd=work)  # the same features, and no training
    again = numbers_of(work / "kept", "good")
    assert again == approx({key: numbers[key]["value"] for key in again}, rel=1e-4) and len(again) > 4
    line = "test --data shapes --size 8 --own-steps 1500 --weights own.pt --metrics fid".split()
    assert "(size, channels, classes) [8, 1, 3]" in main("evaluate", *FLAGS, *line, cwd=work, code=2)


def test_files_of_others_statistics_exact_copies_and_held_out_images(work, main):
    images, labels = (np.load(work / GOOD)[key] for key in ("images", "labels"))
    np.savez(work / "guided.npz", images, labels)  # arr_0 and arr_1
    for i, (image, label) in enumerate(zip(images, labels)):
        (work / "tree" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(work / "tree" / str(label) / f"{i:03d}.png")
    main("evaluate", *FLAGS, GOOD, "guided.npz", "tree", "--save-stats", "stats.npz", "--out", "a", cwd=work)
    good, guided, tree = (numbers_of(work / "a", name) for name in ("good", "guided", "tree"))
    assert guided == good and tree == approx(good, rel=1e-3)  # in another order
    main("evaluate", *FLAGS, GOOD, "--metrics", "fid", "--stats", "stats.npz", "--out", "b", cwd=work)
    assert numbers_of(work / "b", "good")["fid"] == approx(good["fid"], rel=1e-9)
    other = [GOOD, "--metrics", "fid", "--stats", "stats.npz", "--own-steps", 1]
    assert "is of other features" in main("evaluate", *FLAGS, *other, cwd=work, code=2)
    np.savez(work / "bare.npz", **{key: np.load(work / "stats.npz")[key] for key in ("mu", "sigma")})
    other = [GOOD, "--metrics", "fid", "--stats", "bare.npz", "--out", "d"]
    assert "bare.npz does not say its features" in main("evaluate", *FLAGS, *other, cwd=work)
    for shift, note in ((1, "has 2 of 3 classes"), (7, "its labels are not those of --data greys.npz")):
        np.savez(work / "shifted.npz", images=images[labels < 2], labels=labels[labels < 2] + shift)
        assert note in main("evaluate", *FLAGS, "shifted.npz", "--metrics", "fid", "--out", "d", cwd=work)
    exact = ["samples-exact.npz", "test", "--metrics", "fid,prdc", "--out", "c"]
    out = main("evaluate", *FLAGS, *exact, cwd=work)
    assert "| FD@54 |" in out and f"30 of {240 * (1 - (1 - 1 / 80) ** 18):.1f} expected" in out
    assert numbers_of(work / "c", "exact")["exact_accuracy"] == approx(48 / 54)
    held_out = load_images("greys.npz", "test")[0][:54]  # as many as the file before it has
    keywords = dict(root=".", features="own", own_steps=15, device="cpu", data="greys.npz")
    direct = ev.evaluate(held_out.movedim(1, 3), metrics="fid,prdc", **keywords)
    assert numbers_of(work / "c", "test") == approx(direct)


@pytest.mark.parametrize("words, samples", [  # the arrays of a file, or a command
    ("uint8", dict(images=UNIT)), ("0 to 255", dict(images=2 * UNIT - 1)),
    ("(N, H, W, C)", dict(images=BYTES.transpose(0, 3, 1, 2))), ("at least 10", dict(images=BYTES[:5])),
    ("nan to nan", dict(images=np.nan * UNIT)), ("--size 16", dict(images=BYTES.repeat(2, 1).repeat(2, 2))),
    ("class 1 has 3", dict(images=BYTES, labels=np.arange(30) % 3 * (np.arange(30) < 9))),
    ("3 classes", dict(images=BYTES, labels=np.arange(30) % 4)), ("--stats", dict(mu=UNIT, sigma=UNIT)),
    ("no.npz", ["no.npz"]), ("sample.py", []), ("--paper", [GOOD, "--paper"]),
    ("--metrics", [GOOD, "--metrics", "fid,prd"]), ("greys.npz", [GOOD, "--out", "greys.npz"]),
    ("readable", [GOOD, "--own-steps", "1500", "--features", "inception", "--weights", GOOD]),
    ("--own-steps", [GOOD, "--weights", GOOD]), ("--resize", [GOOD, "--resize", "torch"]),
    ("--cas-steps", [GOOD, "--cas-steps", "5"]), ("--stats", [GOOD, "--metrics", "prdc", "--stats", GOOD])])
def test_mistakes_are_told_with_the_cure(words, samples, work, main):
    if isinstance(samples, dict):
        np.savez(work / "wrong.npz", **samples)
        samples = ["wrong.npz"]
    before = snapshot(work)
    assert words in main("evaluate", *FLAGS, *samples, cwd=work, code=2)
    assert snapshot(work) == before  # nothing was written


# ------------- the pages


RESULTS, PRETRAINED = HERE / "docs" / "results", HERE / "docs" / "pretrained"
PAGES = [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]


def code_blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_pages_say_what_the_result_files_say(monkeypatch):
    monkeypatch.syspath_prepend(HERE / "docs")
    import tables
    for page in PAGES:
        assert tables.filled(page.read_text()) == page.read_text(), f"{page.name}: python docs/tables.py"


def test_the_readme_is_short_its_links_lead_somewhere_and_its_tests_exist():
    lines = (HERE / "README.md").read_text().splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 110
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
    section = "\n".join(lines).split("equation by equation")[1].split("## ")[0]
    tests = [name for name in globals() if name.startswith("test_")]
    for row in section.splitlines():
        for words in re.findall(r"\| `([\w ]+)` \|$", row):
            for word in words.split(" or "):
                assert any(word in name for name in tests), word


def test_the_readme_shows_the_code_itself():
    block, = code_blocks(HERE / "README.md", "python")
    source = inspect.getsource(dlsm_loss)
    assert block in source and source.endswith(block) and len(block.splitlines()) < 13


def test_the_python_page_runs():
    block, = code_blocks(HERE / "docs" / "python.md", "python")
    names = {}
    torch.manual_seed(0)
    exec(block, names)
    for samples in (names["fast"], names["paper"]):
        assert (samples.sum(1) > 0).float().mean() > 0.8  # class 1 lies around (2, 2)
    assert names["gradient"].shape == (200, 2)


def test_an_interrupt_inside_a_zip_is_still_an_interrupt(tmp_path, monkeypatch):
    def interrupted(handle):
        raise KeyboardInterrupt(15)

    monkeypatch.setattr("zipfile._ZipWriteFile.close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x.npz", lambda file: np.savez(file, a=np.zeros(9)))


def test_the_bundled_weights_sample_what_the_page_says(tmp_path):
    """Needs no data: the README's command, its images judged by the other bundled classifier."""
    box = PRETRAINED / "fashion-16"
    command("sample.py", "--run", box, cwd=tmp_path)
    found = np.load(tmp_path / "runs" / "fashion-16" / "samples-dlsm.npz")
    images = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).float() / 255
    logits = load_model(box / "classifier-ce.pt", kind="classifier")(images, torch.full((100,), 0.01))
    right = (logits.argmax(1).numpy() == found["labels"]).sum()
    stated = read_json(RESULTS / "fashion-16.json")["box"]["recognised"]
    page = (HERE / "docs" / "fashion-16.md").read_text()
    assert abs(right - stated) <= 2 and f"{stated} of the 100" in page
    assert sum(file.stat().st_size for file in box.iterdir()) < 10 * 2**20
