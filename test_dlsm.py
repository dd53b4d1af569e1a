"""The paper as tests: each equation and claim, then the networks, the data and the four commands as a user runs them.

    pytest test_dlsm.py
"""
import gc
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
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
from evaluate import evaluate, frechet_distance, inception_score, knn_radii, markdown, moments, prdc
from models import EMA, Dropout, NCSNpp, NoisyResNet, ToyNet, UserError, checksum, export, fold_batchnorm, load_checkpoint, load_model, save_checkpoint, sigma_at
from sample import calibrated, heun_sampler, pc_sampler, posterior_score, sigma_grid
from toy_moons import moons, oracle_score
from train_classifier import carried, ce_loss, diagnose, dlsm_loss, likelihood_score, total_loss
from train_score import PRESETS as SCORE_PRESETS
from train_score import dsm_loss, fit, image_draw, load_images, lock, resume, run

HERE = pathlib.Path(__file__).parent
OFFICIAL = HERE.parent / "shared" / "official"


def command(script, *args, cwd, code=0, processes=1, seconds=300):
    """Runs one of the scripts as a user does; with another exit code than 0, checks for the one line on stderr → its output."""
    start = [sys.executable] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(HERE / script), *map(str, args)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == code, done.stdout + done.stderr
    assert code != 2 or len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stdout if code == 0 else done.stderr


# ---------------------------------------------------------------------------- Sections 2 and 4: a mixture where all is known

POINTS = torch.tensor([[-1.5], [-0.4], [0.7], [1.1], [2.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1, 0, 1])
SIGMA = 0.6
GRID = torch.linspace(-7, 8, 401, dtype=torch.float64)[:, None]  # a common grid: the identities hold at each of its points


def log_density(x, points):
    """log p_σ(x) of a Parzen estimate (before Eq. 2), up to a constant."""
    return torch.logsumexp(-(x - points.T) ** 2 / (2 * SIGMA**2), 1) - math.log(len(points))


def exact_score(points):
    def score(x, sigma=None):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(log_density(x, points).sum(), x)[0]

    return score


def exact_classifier(x, sigma=None):
    """Logits whose softmax is p(y|x̃)."""
    return torch.stack([log_density(x, POINTS[LABELS == y]) + math.log((LABELS == y).double().mean()) for y in (0, 1)], 1)


class SmallNet(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(outputs)
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs)).double()

    def forward(self, x, sigma):
        return self.layers(x)


def expectation(loss):
    """E over p_σ(x̃, x, y) of a loss function, by quadrature: every data point, every point of the grid."""
    total = 0.0
    for point, label in zip(POINTS, LABELS):
        z = (GRID - point) / SIGMA
        weight = torch.exp(-0.5 * z[:, 0] ** 2)
        for one, w in zip(z, weight / weight.sum() / len(POINTS)):
            if w > 1e-14:
                total = total + w * loss(point[None], torch.tensor([SIGMA], dtype=torch.float64), label[None], one[None])
    return total


def gradients(loss, net):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def test_eq_3_and_4_explicit_and_denoising_score_matching_have_equal_gradients():
    net, true = SmallNet(1), exact_score(POINTS)
    denoising = expectation(lambda x, sigma, y, z: dsm_loss(net, x, sigma, z, power=0))
    explicit = expectation(lambda x, sigma, y, z: 0.5 * (net(x + SIGMA * z, sigma) - true(x + SIGMA * z)).square().sum())
    assert torch.allclose(gradients(denoising, net), gradients(explicit, net), rtol=0, atol=1e-6)


def test_eq_5_bayes_the_posterior_score_is_likelihood_plus_prior():
    for y in (0, 1):
        labels = torch.full((len(GRID),), y)
        score = posterior_score(exact_score(POINTS), exact_classifier, labels)
        assert torch.allclose(score(GRID, torch.full((len(GRID),), SIGMA)), exact_score(POINTS[LABELS == y])(GRID), atol=1e-9)


def test_theorem_1_dlsm_and_elsm_have_equal_gradients():
    net, prior = SmallNet(2), exact_score(POINTS)
    denoising = expectation(lambda x, sigma, y, z: dlsm_loss(net, prior, x, sigma, y, z))

    def explicit(x, sigma, y, z):  # Eq. 8, the true likelihood score from Eq. 5
        noisy = x + SIGMA * z
        truth = exact_score(POINTS[LABELS == y])(noisy) - prior(noisy)
        return 0.5 * (likelihood_score(net, noisy, sigma, y, create_graph=True) - truth).square().sum()

    a, b = gradients(denoising, net), gradients(expectation(explicit), net)
    assert a.norm() > 1e-2 and torch.allclose(a, b, rtol=0, atol=1e-6)


def test_dlsm_is_smallest_at_the_true_likelihood_score():
    prior = exact_score(POINTS)

    def loss(amount):
        def classifier(x, sigma):
            return exact_classifier(x) + amount * torch.cat([torch.sin(2 * x), torch.zeros_like(x)], 1)
        return expectation(lambda *batch: dlsm_loss(classifier, prior, *batch[:2], *batch[2:]))

    amount = torch.zeros((), dtype=torch.float64, requires_grad=True)
    at_truth = loss(amount)
    assert torch.autograd.grad(at_truth, amount)[0].abs() < 1e-6
    assert min(loss(-0.1), loss(0.1)) > at_truth + 1e-3


# ---------------------------------------------------------------------------- the losses and the likelihood score


def test_sigma_of_t():
    t = torch.linspace(0, 1, 5)
    assert torch.allclose(sigma_at(t), torch.tensor([0.01, 0.0841, 0.7071, 5.946, 50.0]), rtol=1e-3)
    assert sigma_at(1.0, 0.01, 10.0) == pytest.approx(10)


def test_losses_reduce_as_documented():
    x, z = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    sigma, y = torch.tensor([0.1, 0.5, 1.0, 2.0]), torch.tensor([0, 1, 1, 0])

    def zero(x, sigma):
        return torch.zeros_like(x)

    def flat(x, sigma):
        return torch.stack([0 * x.flatten(1).sum(1)] * 2, 1)

    scale = sigma.view(-1, 1, 1, 1)
    assert dsm_loss(zero, x, sigma, z).item() == pytest.approx(0.5 * z.square().sum().item() / 4, rel=1e-5)
    assert dsm_loss(zero, x, sigma, z, power=0).item() == pytest.approx(0.5 * (z / scale).square().sum().item() / 4, rel=1e-5)
    dlsm = dlsm_loss(flat, zero, x, sigma, y, z, power=4)
    assert dlsm.item() == pytest.approx(0.5 * (scale * z).square().mean().item(), rel=1e-5)
    assert ce_loss(flat, x, sigma, y, z).item() == pytest.approx(math.log(2))
    assert total_loss(flat, zero, x, sigma, y, z, lam=3.0, power=4).item() == pytest.approx(dlsm.item() + 3 * math.log(2), rel=1e-5)


def test_total_loss_takes_one_forward_pass():
    net, calls = ToyNet(2), []
    net.register_forward_hook(lambda *_: calls.append(1))
    x, sigma, y = torch.randn(8, 2), torch.rand(8) + 0.1, torch.randint(2, (8,))
    total_loss(net, ToyNet(2), x, sigma, y, torch.randn(8, 2)).backward()
    assert len(calls) == 1 and all(p.grad is not None for p in net.x_branch.parameters())


def test_likelihood_score_against_finite_differences_even_where_p_is_1e_minus_30():
    torch.manual_seed(0)
    weights = torch.randn(3, 2, dtype=torch.float64)

    def classifier(x, sigma):
        return 40 * x @ weights.T + torch.sin(3 * x @ weights.T)

    x = torch.randn(50, 2, dtype=torch.float64)
    sigma = torch.ones(50, dtype=torch.float64)
    y = classifier(x, sigma).argmin(1)
    log_p = F.log_softmax(classifier(x, sigma), 1).gather(1, y[:, None])
    assert log_p.min() < math.log(1e-30)
    numeric = torch.zeros_like(x)
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[j] = 1e-5
        up, down = (F.log_softmax(classifier(x + s, sigma), 1).gather(1, y[:, None])[:, 0] for s in (step, -step))
        numeric[:, j] = (up - down) / 2e-5
    assert torch.allclose(likelihood_score(classifier, x, sigma, y), numeric, rtol=1e-6, atol=1e-6)
    single = likelihood_score(lambda x, s: classifier(x.double(), s).float(), x.float(), sigma.float(), y)
    assert torch.allclose(single.double(), numeric, rtol=1e-3, atol=1e-3)


def test_proposition_2_no_constant_z_normalises_p_to_the_alpha():
    y = torch.linspace(-12, 12, 20001, dtype=torch.float64)

    def normal(variance):
        return torch.exp(-(y**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)

    def z_of(x):
        p = ((x + 1) ** 2 * normal(1.0) + (x - 1) ** 2 * normal(0.5)) / (2 * (x**2 + 1))
        assert torch.trapezoid(p, y).item() == pytest.approx(1)
        return torch.trapezoid(p**2, y).item()

    assert z_of(-1) == pytest.approx(1 / math.sqrt(2 * math.pi))
    assert z_of(1) == pytest.approx(1 / (2 * math.sqrt(math.pi)))


def test_eq_a1_and_a2_renormalised_likelihood_keeps_the_gradient_of_z():
    x, sigma, y = GRID, torch.full((len(GRID),), SIGMA), torch.ones(len(GRID), dtype=torch.long)
    inner = x.detach().requires_grad_()
    z = torch.logsumexp(5 * F.log_softmax(exact_classifier(inner), 1), 1)  # log Z(x)
    grad_z, = torch.autograd.grad(z.sum(), inner)
    scaled = likelihood_score(exact_classifier, x, sigma, y, alpha=5.0)
    renormalised = likelihood_score(exact_classifier, x, sigma, y, alpha=5.0, renormalize=True)
    assert torch.allclose(renormalised, scaled - grad_z, atol=1e-9) and grad_z.abs().max() > 0.1
    assert torch.allclose(likelihood_score(exact_classifier, x, sigma, y, 1.0, True), likelihood_score(exact_classifier, x, sigma, y), atol=1e-12)
    a2 = posterior_score(exact_score(POINTS), exact_classifier, y, 5.0, renormalize=True)(x, sigma)
    assert torch.allclose(a2, scaled - grad_z + exact_score(POINTS)(x), atol=1e-9)
    by_level = posterior_score(exact_score(POINTS), exact_classifier, y, lambda s: 5 * torch.ones_like(s))(x, sigma)
    assert torch.allclose(by_level, scaled + exact_score(POINTS)(x), atol=1e-9)


# ---------------------------------------------------------------------------- samplers


def gaussian_score(mean, variance):
    return lambda x, sigma: (mean - x) / (variance + sigma[:, None] ** 2)


MEAN, VARIANCE = torch.tensor([1.0, -2.0]), torch.tensor([0.25, 2.0])


def test_eq_1_langevin_diffusion_at_a_constant_noise_level():
    torch.manual_seed(0)
    x = pc_sampler(gaussian_score(MEAN, VARIANCE), 3 * torch.randn(5_000, 2), [0.5] * 1500, snr=0.1)
    want = VARIANCE + 0.25
    assert torch.allclose(x.mean(0), MEAN, atol=0.07) and torch.allclose(x.var(0), want, rtol=0.08)


@pytest.mark.parametrize("sampler", ["pc", "heun", "stochastic heun"])
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_samplers_on_a_gaussian(sampler, end):
    torch.manual_seed(0)
    score = gaussian_score(MEAN, VARIANCE)
    x = MEAN + (VARIANCE + 100).sqrt() * torch.randn(20_000, 2)
    if sampler.startswith("pc"):
        sigmas = sigma_at(torch.linspace(1, 0, 300), max(end, 0.01), 10.0).tolist() + [0.0] * (end == 0)
        x = pc_sampler(score, x, sigmas, snr=0.08)  # the corrector's bias grows as snr²: 5% at 0.16 in two dimensions
    else:
        sigmas = sigma_grid(80, max(end, 0.01), 10.0, rho=7)
        x = heun_sampler(score, x, sigmas if end == 0 else sigmas[:-1], churn=0.4 * (sampler != "heun"))
    want = VARIANCE + end**2
    assert torch.allclose(x.mean(0), MEAN, atol=4 * want.max().sqrt().item() / 140)
    assert torch.allclose(x.var(0), want, rtol=0.05)


def test_per_sample_norms_make_an_image_independent_of_its_batch():
    def score(x, sigma):
        return (0.3 - x) / (0.04 + sigma[:, None] ** 2)

    def noise(x):  # the same for the first rows, whatever the number of rows
        return torch.randn(400, 500, generator=generator)[: len(x)]

    results = []
    for rows in (400, 7):
        generator = torch.Generator().manual_seed(0)
        sigmas = [*sigma_at(torch.linspace(1, 0, 100), 0.01, 10.0).tolist(), 0.0]
        results.append(pc_sampler(score, 10 * noise(torch.empty(rows, 500)), sigmas, per_sample=True, noise=noise))
    assert torch.allclose(results[0][:7], results[1], atol=1e-5)
    assert results[0].mean().item() == pytest.approx(0.3, abs=0.005) and results[0].std().item() == pytest.approx(0.2, rel=0.05)


def test_heun_error_shrinks_with_the_square_of_the_step():
    score, x = gaussian_score(MEAN.double(), VARIANCE.double()), MEAN + 10 * torch.randn(10, 2, dtype=torch.float64)
    exact = MEAN + (x - MEAN) * ((VARIANCE + 0.01) / (VARIANCE + 100)).sqrt()
    errors = [(heun_sampler(score, x, sigma_grid(n, 0.1, 10.0, rho=7)[:-1]) - exact).abs().max().item() for n in (20, 40, 80)]
    assert 3.2 < errors[0] / errors[1] < 5 and 3.5 < errors[1] / errors[2] < 4.6, errors


def test_samplers_end_with_the_mean_and_use_the_noise_they_are_given():
    score, x = gaussian_score(MEAN, VARIANCE), torch.randn(5, 2)
    seen = []
    pc_sampler(score, x, [2.0, 1.0, 0.0], noise=lambda x: seen.append(1) or torch.zeros_like(x) + 0.1)
    assert len(seen) == 3  # two correctors and one predictor: the last step adds none
    last = heun_sampler(score, x, [1.0, 0.0])
    assert torch.allclose(last, x + score(x, torch.ones(5)))


@pytest.mark.parametrize("value, word", [(0.0, "zero"), (math.nan, "not finite"), (math.inf, "not finite")])
def test_a_broken_score_stops_with_step_and_sigma(value, word):
    def score(x, sigma):
        return torch.full_like(x, value if sigma[0] < 0.5 else 1.0)

    for sampler, sigmas in ((pc_sampler, [1.0, 0.3, 0.1]), (heun_sampler, [1.0, 0.9, 0.3, 0.1])):
        with pytest.raises(UserError, match=rf"{word} at step 1, σ = 0.3"):
            sampler(score, torch.ones(3, 2), sigmas)


# ---------------------------------------------------------------------------- networks and their files


def test_ema_warms_up_and_applies():
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    ema = EMA(net, decay=0.9)
    expected = 0.0
    for n in range(1, 200):
        torch.nn.init.constant_(net.weight, n)
        ema.update()
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * n
    assert ema.shadow[0].item() == pytest.approx(expected, rel=1e-5)
    with ema.applied():
        assert net.weight.item() == pytest.approx(expected, rel=1e-5)
    assert net.weight.item() == 199


def test_late_join_has_a_likelihood_score_without_sigma_and_early_has_not():
    x = 20 * torch.randn(64, 2)
    for join, same in (("late", True), ("early", False)):
        net = ToyNet(2, join=join)
        logit = [torch.autograd.grad(net(v := x.clone().requires_grad_(), torch.full((64,), s))[:, 0].sum(), v)[0] for s in (0.1, 9.0)]
        assert torch.allclose(*logit, atol=1e-6) == same


@pytest.mark.parametrize("preset, low, high", [("paper", 107.5, 107.7), ("lite", 10, 20), ("tiny", 0.1, 1.0)])
def test_preset_sizes(preset, low, high):
    config = {key: SCORE_PRESETS[preset][key] for key in ("width", "mults", "blocks", "attention", "dropout", "edm")}
    with torch.device("meta"):
        assert low < sum(p.numel() for p in NCSNpp(**config).parameters()) / 1e6 < high


@pytest.mark.parametrize("size, channels, edm", [(16, 1, True), (24, 3, False)])
def test_ncsnpp_takes_any_size_and_channels(size, channels, edm):
    net = NCSNpp(size, channels, width=8, mults=(1, 2, 2), blocks=1, attention=(size // 2,), edm=edm)
    out = net(torch.rand(2, channels, size, size), torch.tensor([0.1, 5.0]))
    assert out.shape == (2, channels, size, size)
    with pytest.raises(UserError, match="multiple of 4"):
        NCSNpp(size + 2, channels, width=8, mults=(1, 2, 2), blocks=1)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_that_of_torch(p):
    net, x = Dropout(p), torch.rand(3, 7, 11, 101).add_(1).requires_grad_()  # 23,331 values, no multiple of four
    torch.manual_seed(0)
    y, again = net(x), net(x)
    y.sum().backward()
    kept = y != 0
    assert abs(kept.double().mean() - (1 - p)) < 4 * (p * (1 - p) / x.numel()) ** 0.5
    assert torch.allclose(y[kept], x[kept] / (1 - p), rtol=1e-4) and torch.equal(x.grad != 0, kept) and not torch.equal(y, again)
    mask, second = kept.double().flatten(), (again != 0).double().flatten()
    for a, b in ((mask, second), (mask[1:], mask[:-1]), (mask[4:], mask[:-4])):  # the values of a mask, and two masks, are independent
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / x.numel() ** 0.5
    torch.manual_seed(0)
    assert torch.equal(net(x), y) and net.eval()(x) is x


def test_edm_form_starts_as_the_score_of_a_gaussian():
    net = NCSNpp(8, 1, width=8, mults=(1, 2), blocks=1, edm=True)  # its last layer starts at zero
    x, sigma = torch.rand(4, 1, 8, 8), torch.tensor([0.05, 0.3, 2.0, 40.0])
    assert torch.allclose(net(x, sigma), (0.5 - x) / (0.0625 + sigma**2).view(-1, 1, 1, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("depth", [18, 34])
def test_noisy_resnet_double_backward_and_independence_of_the_batch(norm, depth):
    net = NoisyResNet(depth, classes=3, width=8, channels=1, norm=norm, scaled=True)
    x, sigma, y = torch.rand(6, 1, 16, 16), torch.tensor([0.01, 0.1, 0.5, 1, 10, 50]), torch.tensor([0, 1, 2, 0, 1, 2])
    total_loss(net, lambda x, s: 0 * x, x, sigma, y, torch.randn_like(x)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    net.eval()
    together = likelihood_score(net, x, sigma, y)
    alone = torch.cat([likelihood_score(net, x[i : i + 1], sigma[i : i + 1], y[i : i + 1]) for i in range(6)])
    assert torch.allclose(together, alone, rtol=1e-3, atol=1e-5 * together.abs().max().item())
    assert torch.allclose(likelihood_score(fold_batchnorm(net), x, sigma, y), together, rtol=1e-3, atol=1e-5 * together.abs().max().item())


official = pytest.mark.skipif(not OFFICIAL.exists(), reason="needs ../shared/official, the authors' layout with reproducible values")


def official_checkpoint(name, path):
    sys.path.insert(0, str(OFFICIAL))
    import fill
    torch.save(fill.official_checkpoint(name), path)
    return path


@official
@pytest.mark.parametrize("name", ["score_small", "score_cifar10", "classifier_cifar10", "classifier_cifar100"])
def test_the_authors_released_files_load(name, tmp_path):
    expected = np.load(OFFICIAL / "expected.npz")
    net = load_model(official_checkpoint(name, tmp_path / "released.pth"), kind=name.split("_")[0])
    with torch.no_grad():
        out = net(*(torch.from_numpy(expected[f"{name}/{key}"]) for key in ("x", "sigma"))).numpy()
    for ours, theirs in zip(out, expected[f"{name}/out"]):
        assert abs(ours - theirs).max() / abs(theirs).max() < 1e-4


@official
def test_a_released_file_with_a_wrong_entry_is_refused(tmp_path):
    sys.path.insert(0, str(OFFICIAL))
    import fill
    checkpoint = fill.official_checkpoint("classifier_cifar10")
    checkpoint["model"]["module.classifier.classifier.dense_2.weight"] = torch.zeros(128, 127)
    torch.save(checkpoint, tmp_path / "bad.pth")
    with pytest.raises(UserError, match="dense_2"):
        load_model(tmp_path / "bad.pth")


def test_checkpoints_are_whole_checked_and_harmless(tmp_path):
    net = ToyNet(2)
    good = dict(kind="score", network="ToyNet", config=net.config, settings={}, step=3, weights=net.state_dict(), ema=None, optimizer={})
    path = tmp_path / "net.pt"
    save_checkpoint(path, good)
    assert torch.equal(load_model(path).last.weight, net.last.weight)
    with pytest.raises(UserError, match="a classifier checkpoint is needed"):
        load_model(path, kind="classifier")
    data = path.read_bytes()
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.pt").write_bytes(data[:cut])
        with pytest.raises(UserError, match="cut.pt"):
            load_model(tmp_path / "cut.pt")
    torch.save({**torch.load(path, weights_only=True), "step": 4}, tmp_path / "altered.pt")
    with pytest.raises(UserError, match="checksum"):
        load_model(tmp_path / "altered.pt")

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    torch.save({"weights": Hostile()}, tmp_path / "hostile.pt")
    with pytest.raises(UserError, match="hostile.pt"):
        load_model(tmp_path / "hostile.pt")
    assert not (tmp_path / "ran").exists()


def test_export_keeps_the_average_and_drops_the_rest(tmp_path):
    net = ToyNet(2)
    average = EMA(net)
    with torch.no_grad():
        net.last.weight.add_(1.0)
    average.update()
    state = dict(shadow=average.shadow, updates=average.updates)
    optimizer = dict(filler=torch.zeros(10**5))
    save_checkpoint(tmp_path / "net.pt", dict(kind="score", network="ToyNet", config=net.config, settings={"seed": 7}, step=3, weights=net.state_dict(), ema=state, optimizer=optimizer))
    export(tmp_path / "net.pt", tmp_path / "slim.pt")
    whole, slim = load_model(tmp_path / "net.pt"), load_model(tmp_path / "slim.pt")
    assert torch.equal(whole.last.weight, slim.last.weight) and not torch.equal(slim.last.weight, net.last.weight) and slim.about == whole.about
    assert (tmp_path / "slim.pt").stat().st_size < (tmp_path / "net.pt").stat().st_size / 4


# ---------------------------------------------------------------------------- data


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """A few hundred of the drawn shapes at 8×8, as an .npz that the command-line tests train on."""
    images, labels, names = load_images("shapes", "train", 8)
    assert len(torch.unique(load_images("shapes", "test")[0].flatten(1), dim=0)) == 2000 and len(names) == 10
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, images=images[:300].permute(0, 2, 3, 1).numpy(), labels=labels[:300].numpy(),
             test_images=images[300:400].permute(0, 2, 3, 1).numpy(), test_labels=labels[300:400].numpy())
    return path


def test_images_from_npz_folder_and_a_held_out_tenth(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 12, 12, 1), dtype=np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "grey.npz", images=images, labels=labels)
    train, test = (load_images(str(tmp_path / "grey.npz"), split) for split in ("train", "test"))
    assert train[0].shape == (36, 1, 12, 12) and test[0].shape == (4, 1, 12, 12) and train[2] == ["0", "1", "2", "3"]
    both = {bytes(x.numpy()) for x in torch.cat([train[0], test[0]])}
    assert both == {bytes(x) for x in images}
    np.savez(tmp_path / "sorted.npz", images=np.tile(images, (5, 1, 1, 1)), labels=np.sort(np.arange(200) % 4))
    assert set(load_images(str(tmp_path / "sorted.npz"), "test")[1][:8].tolist()) == {0, 1, 2, 3}  # the first are of all classes
    for i, (image, label) in enumerate(zip(images, labels)):
        (tmp_path / "tree" / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(tmp_path / "tree" / f"class{label}" / f"{i}.png")
    folder = load_images(str(tmp_path / "tree"))
    assert folder[0].shape == (36, 1, 12, 12) and folder[2] == ["class0", "class1", "class2", "class3"]
    assert load_images(str(tmp_path / "tree"), size=8)[0].shape == (36, 1, 8, 8)
    Image.new("RGB", (20, 10)).save(tmp_path / "tree" / "class1" / "wide.jpg")
    with pytest.raises(UserError, match="mixed sizes.*--size"):
        load_images(str(tmp_path / "tree"))
    assert load_images(str(tmp_path / "tree"), size=8)[0].shape[1:] == (3, 8, 8)


@pytest.mark.parametrize("trouble, words", [
    (dict(images=np.zeros((4, 8, 8), np.uint8)), "shape"), (dict(images=np.zeros((4, 8, 8, 2), np.uint8)), "shape"),
    (dict(images=np.zeros((4, 8, 8, 3), np.float32)), "uint8"), (dict(labels=np.zeros(3, np.int64)), "labels"),
    (dict(labels=np.array([0, 1, -1, 1])), "labels"), (dict(labels=np.array([0.0, 1, 0, 1])), "labels"),
    (dict(labels=np.array([0, 1, 3, 3])), "each class"), (dict(images=np.zeros((4, 8, 12, 3), np.uint8)), "--size"), (dict(labels=None), "no 'labels'"),
    (dict(images=np.array([{}] * 4, dtype=object)), "readable")])
def test_bad_data_is_named_before_training(trouble, words, tmp_path):
    good = dict(images=np.zeros((4, 8, 8, 3), np.uint8), labels=np.array([0, 1, 0, 1]))
    np.savez(tmp_path / "bad.npz", **{k: v for k, v in {**good, **trouble}.items() if v is not None})
    with pytest.raises(UserError, match=words):
        load_images(str(tmp_path / "bad.npz"))


def test_bad_files_of_data(tmp_path):
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut off")
    for name, words in (("cut.npz", "cut.npz"), ("none.npz", "no such file"), ("nowhere", "named set"), ("", "named set|sub-folder")):
        with pytest.raises(UserError, match=words):
            load_images(str(tmp_path / name) if name else str(tmp_path))
    (tmp_path / "tree" / "empty").mkdir(parents=True)
    with pytest.raises(UserError, match="no pictures"):
        load_images(str(tmp_path / "tree"))
    (tmp_path / "tree" / "empty" / "x.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match="x.png"):
        load_images(str(tmp_path / "tree"))


def test_batches_take_every_image_once_an_epoch():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1)
    draw = image_draw(images, torch.arange(10), 4, 0, 0.01, 50.0, False)
    seen = torch.cat([draw(torch.Generator().manual_seed(step), step)[2] for step in range(5)])
    assert sorted(seen[:10].tolist()) == list(range(10)) == sorted(seen[10:].tolist()) and seen[:10].tolist() != seen[10:].tolist()


# ---------------------------------------------------------------------------- training, as a user runs it

SMALL = ("--preset", "tiny", "--width", 8, "--batch", 16)


def train_score(shapes, cwd, steps, *more, **keywords):
    return command("train_score.py", "--data", shapes, *SMALL, "--steps", steps, *more, cwd=cwd, **keywords)


def train_classifier(shapes, cwd, steps, loss, *more, **keywords):
    return command("train_classifier.py", "--data", shapes, *SMALL, "--steps", steps, "--loss", loss, "--diagnose-n", 80, *more, cwd=cwd, **keywords)


@pytest.fixture(scope="session")
def trained(shapes, tmp_path_factory):
    """A folder with runs/small: a score model and two classifiers of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    train_score(shapes, folder, 12)
    for loss in ("ce", "total"):
        train_classifier(shapes, folder, 12, loss)
    return folder


def assert_equal_checkpoints(a, b):
    a, b = load_checkpoint(a), load_checkpoint(b)
    assert a["step"] == b["step"] and a["settings"] == b["settings"]
    for x, y in ((a["weights"], b["weights"]), (a["ema"] or {}, b["ema"] or {}), (a["optimizer"]["state"], b["optimizer"]["state"])):
        assert str(x) == str(y)  # structure, and a first look
        flat = [list(torch.utils._pytree.tree_leaves(v)) for v in (x, y)]
        assert all(torch.equal(torch.as_tensor(p), torch.as_tensor(q)) for p, q in zip(*flat))


@pytest.mark.parametrize("stage", ["score", "classifier"])
def test_resume_after_a_kill_is_exact(stage, shapes, trained, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        (folder / "runs" / "small").mkdir(parents=True)
        if stage == "classifier":
            (folder / "runs" / "small" / "score.pt").symlink_to(trained / "runs" / "small" / "score.pt")
    script, extra = (("train_score.py", ["--sample-every", 1000]) if stage == "score" else ("train_classifier.py", ["--loss", "total", "--diagnose-n", 8]))
    arguments = ["--data", shapes, *SMALL, "--steps", 60, "--save-every", 7, *extra]
    command(script, *arguments, cwd=whole)
    name = "score.pt" if stage == "score" else "classifier-total.pt"
    for round in range(2):
        process = subprocess.Popen([sys.executable, str(HERE / script), *map(str, arguments)], cwd=killed, env={**os.environ, "OMP_NUM_THREADS": "1"},
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        file, begun = killed / "runs" / "small" / name, time.time()
        before = file.stat().st_mtime_ns if file.exists() else 0
        while time.time() - begun < 60 and process.poll() is None and not (file.exists() and file.stat().st_mtime_ns > before):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL if round == 0 else signal.SIGTERM)
        output = process.communicate()[0].decode()
        assert process.returncode == (-9 if round == 0 else 143), output
        assert round == 0 or "the same command continues" in output
    assert "continuing at step" in command(script, *arguments, cwd=killed)
    assert_equal_checkpoints(whole / "runs" / "small" / name, killed / "runs" / "small" / name)
    assert "finished already" in command(script, *arguments, cwd=killed)


def test_two_processes_take_the_path_of_one(shapes, trained, tmp_path):
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        train_score(shapes, folder.parent, 5, "--run", f"{folder}/", processes=processes)
        train_classifier(shapes, folder.parent, 5, "total", "--norm", "group", "--run", f"{folder}/", "--score", trained / "runs" / "small" / "score.pt", processes=processes)
    mixed = train_classifier(shapes, tmp_path, 1, "total", "--run", f"{tmp_path}/batch/", "--score", trained / "runs" / "small" / "score.pt", processes=2)
    assert "BatchNorm sees a process's 8 images" in mixed
    for name in ("score.pt", "classifier-total.pt"):
        one, two = (load_checkpoint(tmp_path / n / name) for n in "12")
        for key, value in one["weights"].items():
            assert torch.allclose(value, two["weights"][key], atol=1e-4), key
    assert "decayed towards step 5, from here towards 6" in train_score(shapes, tmp_path, 6, "--run", f"{tmp_path}/1/")


def test_other_settings_are_an_error_and_tag_and_restart_are_the_ways_out(shapes, trained):
    assert "lr = 0.001, not 0.5; --tag" in train_score(shapes, trained, 12, "--lr", 0.5, code=2)
    assert "was made with" in train_classifier(shapes, trained, 12, "total", "--lam", 7, code=2)
    train_classifier(shapes, trained, 3, "total", "--lam", 7, "--tag", "lam7")
    assert load_model(trained / "runs" / "small" / "classifier-total-lam7.pt").about["settings"]["lam"] == 7


def test_a_loss_that_explodes_stops_and_keeps_the_last_good_checkpoint(shapes, tmp_path):
    train_score(shapes, tmp_path, 5)
    before = (tmp_path / "runs" / "small" / "score.pt").read_bytes()
    message = train_score(shapes, tmp_path, 50, "--lr", 1e3, "--tag", "absurd", code=2)
    assert "step" in message and "σ =" in message and "--lr" in message
    assert before == (tmp_path / "runs" / "small" / "score.pt").read_bytes()
    assert not (tmp_path / "runs" / "small" / "score-absurd.pt").exists()


def test_training_refuses_what_cannot_work(shapes, trained, tmp_path):
    assert "--compile with --loss total" in train_classifier(shapes, trained, 3, "total", "--compile", code=2)
    assert "train_score.py" in train_classifier(shapes, tmp_path, 3, "ce", code=2)
    assert "--size" in train_classifier("shapes", tmp_path, 3, "ce", "--score", trained / "runs" / "small" / "score.pt", code=2)
    assert "--steps" in train_score(shapes, tmp_path, 0, code=2)
    assert "--device" in train_score(shapes, tmp_path, 3, "--device", "warp", code=2)
    assert "--amp" in train_score(shapes, tmp_path, 3, "--device", "cpu", "--amp", code=2)
    assert "not a readable checkpoint" in train_classifier(shapes, tmp_path, 3, "ce", "--score", shapes, code=2)


def test_lambda_stands_beside_a_sum_or_a_mean_over_pixels(trained, shapes):
    """tiny and lite take DLSM' as printed, a sum over the 192 pixel values, beside λ CE; paper takes their mean, as the authors' code."""
    first = {}
    for loss, more in (("ce", []), ("dlsm", []), ("total", ["--lam", 2]), ("total", ["--lam", 2, "--preset", "paper"]), ("dlsm", ["--preset", "paper"]), ("ce", ["--preset", "paper"])):
        tag = f"first{len(first)}"
        train_classifier(shapes, trained, 1, loss, "--run", "lambda", "--score", trained / "runs" / "small" / "score.pt", "--tag", tag, *more)
        lines = (trained / "runs" / "lambda" / f"classifier-{loss}-{tag}.jsonl").read_text().splitlines()
        first[tag] = json.loads(lines[0])["loss"]
    ce, dlsm, total, paper_total, paper_dlsm, paper_ce = first.values()
    assert total == pytest.approx(dlsm + 2 * ce / 192, rel=1e-4)
    assert paper_total == pytest.approx(paper_dlsm + 2 * paper_ce, rel=1e-4)


def test_diagnosis_knows_a_perfect_classifier():
    """Images of one pixel, 0.2 or 0.8 with the label 0 or 1: prior, posterior and their scores are exact."""
    labels = torch.arange(4000) % 2
    images = (51 + 153 * labels).to(torch.uint8).view(-1, 1, 1, 1)

    def log_joint(x, sigma):
        return torch.cat([-(x.flatten(1) - c) ** 2 / (2 * sigma[:, None] ** 2) for c in (0.2, 0.8)], 1)

    def prior(x, sigma):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.logsumexp(log_joint(x, sigma), 1).sum(), x)[0]

    perfect, steep = (diagnose(lambda x, s: a * log_joint(x, s), prior, images, labels, 0.01, 10.0) for a in (1, 2))
    for right, wrong in list(zip(perfect, steep))[5:]:  # where the two classes overlap
        assert abs(right["alpha"] - 1) < 4 * right["alpha_se"] + 1e-3 and right["gain"] > -4 * right["gain_se"]
        assert right["ce"] < wrong["ce"] and right["gain"] > wrong["gain"]
    middle = perfect[6]  # gain = σ² E h² there, by quadrature over one σ
    sigma = torch.tensor(middle["sigma"])
    x = torch.linspace(-10, 11, 20001)[:, None]
    level = sigma.expand(len(x))
    density = torch.exp(-(x[:, 0] - 0.2) ** 2 / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    h = likelihood_score(log_joint, x, level, torch.zeros(len(x), dtype=torch.long))[:, 0]
    exact = (sigma**2 * torch.trapezoid(density * h**2, x[:, 0])).item()
    assert middle["gain"] == pytest.approx(exact, rel=0.15)
    (nats, se), (less, _) = (carried(table, 0.01, 10.0) for table in (perfect, steep))
    assert abs(nats - math.log(2)) < 4 * se + 0.005 and se < 0.02 and less < nats - 4 * se  # I(x; y) is log 2: the pixel tells the class


def test_diagnose_command_writes_table_picture_and_scales(trained, shapes):
    out = command("train_classifier.py", "--data", shapes, "--diagnose", "--diagnose-n", 80, cwd=trained)
    assert "| σ | ce: accuracy" in out and len([line for line in out.splitlines() if line.startswith("| ")]) == 13
    tables = json.loads((trained / "runs" / "small" / "diagnose.json").read_text())
    assert {"classifier-ce", "classifier-total"} <= set(tables) and len(tables["classifier-ce"]) == 10
    assert Image.open(trained / "runs" / "small" / "diagnose.png").size[0] > 800
    folder, weights = trained / "runs" / "small", tables["weights"]["classifier-ce"]
    alpha, _ = calibrated(folder, "classifier-ce", weights, "cpu")
    middle = tables["classifier-ce"][4]
    assert alpha(torch.tensor([middle["sigma"]])).item() == pytest.approx(max(middle["alpha"], 0), rel=1e-4)
    with pytest.raises(UserError, match="does not know this classifier-ce"):
        calibrated(folder, "classifier-ce", "of another training", "cpu")


# ---------------------------------------------------------------------------- sampling, as a user runs it


def draw_samples(trained, shapes, out, *more, **keywords):
    text = command("sample.py", "--data", shapes, "--run", trained / "runs" / "small", "--out", out, "--steps", 4, *more, cwd=trained, **keywords)
    return text if keywords.get("code") else {p.stem: np.load(p) for p in sorted(pathlib.Path(out).glob("samples-*.npz"))}


def test_samples_do_not_depend_on_resuming_or_processes(trained, shapes, tmp_path):
    arguments = ("--guidance", "dlsm", "--n", 30, "--batch", 7, "--seed", 3)
    one = draw_samples(trained, shapes, tmp_path / "one", *arguments)["samples-dlsm"]
    two = draw_samples(trained, shapes, tmp_path / "two", *arguments, processes=2)["samples-dlsm"]
    assert np.array_equal(one["images"], two["images"]) and one["images"].shape == (30, 8, 8, 3) and one["images"].dtype == np.uint8
    assert np.bincount(one["labels"]).tolist() == [3] * 10 and json.loads(str(one["recipe"]))["seed"] == 3
    parts = tmp_path / "three" / "samples-dlsm.parts"
    process = subprocess.Popen([sys.executable, str(HERE / "sample.py"), *map(str, ("--data", shapes, "--run", trained / "runs" / "small", "--out", parts.parent,
                               "--steps", 4, *arguments))], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    while not (parts / "000001.npz").exists() and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    three = draw_samples(trained, shapes, tmp_path / "three", *arguments)["samples-dlsm"]
    assert np.array_equal(one["images"], three["images"]) and not parts.exists()


def test_every_guidance_sampler_and_scale(trained, shapes, tmp_path):
    for guidance in ("none", "base", "scaling", "renorm"):
        draw_samples(trained, shapes, tmp_path, "--guidance", guidance, "--n", 10)
    command("train_classifier.py", "--data", shapes, "--diagnose", "--diagnose-n", 80, cwd=trained)
    draw_samples(trained, shapes, tmp_path, "--guidance", "dlsm", "--alpha", "0.5,1,auto", "--classes", "3,5", "--n", 6, "--watch", "--png")
    found = draw_samples(trained, shapes, tmp_path, "--guidance", "base", "--sampler", "pc", "--tag", "pc", "--n", 10, "--per-sample")
    assert set(found) == {f"samples-{n}" for n in ("none", "base", "scaling", "renorm", "dlsm", "dlsm-a0.5", "dlsm-aauto", "base-pc")}
    assert "labels" not in found["samples-none"] and found["samples-dlsm"]["labels"].tolist() == [3, 5] * 3
    images = [found[f"samples-{n}"]["images"].astype(int) for n in ("base", "scaling", "renorm", "base-pc")]
    assert all((a != b).any() for a, b in itertools.combinations(images, 2))
    assert len(list((tmp_path / "samples-dlsm").rglob("*.png"))) == 6 and (tmp_path / "samples-dlsm-strip.png").exists() and (tmp_path / "samples-dlsm.png").exists()


def test_sampling_mistakes(trained, shapes, tmp_path):
    def mistake(*more):
        return draw_samples(trained, shapes, tmp_path, *more, code=2)

    assert "20 is" in mistake("--n", 11)
    assert "--classes" in mistake("--classes", "3,12")
    assert "--alpha" in mistake("--alpha", "much")
    draw_samples(trained, shapes, tmp_path, "--guidance", "base", "--n", 10)
    assert "seed = 0, not 1" in mistake("--guidance", "base", "--n", 10, "--seed", 1)
    assert "a score checkpoint is needed" in mistake("--score", trained / "runs" / "small" / "classifier-ce.pt")
    message = command("sample.py", "--data", shapes, "--run", tmp_path / "empty", cwd=trained, code=2)
    assert "python train_score.py" in message


@official
def test_the_authors_weights_sample(tmp_path):
    score, classifier = official_checkpoint("score_small", tmp_path / "s.pth"), official_checkpoint("classifier_cifar10", tmp_path / "c.pth")
    command("sample.py", "--score", score, "--classifier", classifier, "--steps", 3, "--n", 10, "--guidance", "scaling", "--out", tmp_path, cwd=tmp_path)
    assert np.load(tmp_path / "samples-scaling.npz")["images"].shape == (10, 32, 32, 3)


# ---------------------------------------------------------------------------- two moons: the oracle, the samplers fed with it, the study as a user runs it


def study(*flags, **more):
    return subprocess.run([sys.executable, HERE / "toy_moons.py", *map(str, flags)], capture_output=True, text=True, **more)


def one_line(text):
    return len(text.splitlines()) == 1 and "Traceback" not in text


def test_moons_are_two_half_circles_centred_times_20():
    points, labels = moons()
    assert points.shape == (10_000, 2) and points.dtype == torch.float32 and labels.dtype == torch.int64
    assert labels.bincount().tolist() == [5_000, 5_000]
    assert points.mean(0).abs().max() < 1e-4
    upper, lower = points[labels == 0], points[labels == 1]
    a, b = (upper[0] + upper[-1]) / 2, (lower[0] + lower[-1]) / 2  # the circles' centres lie between the crescents' ends
    assert torch.allclose(b - a, torch.tensor([20.0, 10.0]), atol=1e-3)
    assert ((upper - a).norm(dim=1) - 20).abs().max() < 1e-3 and ((lower - b).norm(dim=1) - 20).abs().max() < 1e-3
    assert (upper[:, 1] >= a[1] - 1e-3).all() and (lower[:, 1] <= b[1] + 1e-3).all()
    steps = upper.double().diff(dim=0).norm(dim=1)
    assert (steps - 20 * math.pi / 4999).abs().max() < 1e-4  # evenly spaced
    assert [len(part) for part in moons(101)] == [101, 101]


def test_proposition_1_oracle_is_the_gradient_of_the_log_density():
    generator = torch.Generator().manual_seed(0)
    points = moons(400)[0].double()
    x = 40 * torch.randn(300, 2, dtype=torch.float64, generator=generator)  # also far out, where the density is 0 in float64
    x[0], x[1] = torch.tensor([400.0, -300.0]), points[7]
    sigma = 10 ** (3 * torch.rand(300, dtype=torch.float64, generator=generator) - 2)
    x.requires_grad_()
    exponents = -torch.cdist(x, points, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / (2 * sigma[:, None] ** 2)
    truth, = torch.autograd.grad(torch.logsumexp(exponents, 1).sum(), x)
    ours = oracle_score(x.detach(), points, sigma)
    assert ((ours - truth).norm(dim=1) <= 1e-9 * (1 + truth.norm(dim=1)) / sigma).all()
    single = oracle_score(x.detach().float(), points.float(), sigma.float())
    assert ((single - truth).norm(dim=1) <= 1e-3 * (1 / sigma + truth.norm(dim=1))).all()  # 1/σ: the size of a noisy point's score
    assert torch.equal(oracle_score(x.detach(), points, 7.5), oracle_score(x.detach(), points, torch.full((300,), 7.5)))


# ---------------------------------------------------------------------------- the samplers, fed with the oracle


class Oracle:
    """The exact score of one crescent, counting its evaluations."""

    def __init__(self, n=2_000, c=0, dtype=torch.float32):
        points, labels = moons(n)
        self.points, self.evaluations = points[labels == c].to(dtype), 0

    def __call__(self, x, sigma):
        self.evaluations += 1
        return oracle_score(x, self.points, sigma)

    def noisy(self, count, sigma, generator):
        return self.points[torch.randint(len(self.points), (count,), generator=generator)] + sigma * torch.randn(count, 2, generator=generator)


@pytest.mark.parametrize("sampler", ["pc", "heun", "heun, Gaussian fit", "heun, N(0, 10²)"])
def test_samplers_with_the_oracle_reproduce_the_moons_at_sigma_7_5(sampler):
    generator, count, oracle = torch.Generator().manual_seed(1), 2_000, Oracle()
    noise = lambda x: torch.randn(x.shape, generator=generator)
    start = noise(torch.empty(count, 2))
    if sampler == "pc":
        x = pc_sampler(oracle, 10 * start, torch.linspace(10, 7.5, 101), noise=noise)
    elif sampler == "heun":  # from so much noise that the data do not matter
        x = heun_sampler(oracle, 200 * start, torch.logspace(math.log10(200), math.log10(7.5), 21))
    elif sampler == "heun, Gaussian fit":
        spread = torch.linalg.cholesky(oracle.points.T.cov() + 10**2 * torch.eye(2))
        x = heun_sampler(oracle, oracle.points.mean(0) + start @ spread.T, torch.linspace(10, 7.5, 21))
    else:
        x = heun_sampler(oracle, 10 * start, torch.linspace(10, 7.5, 21))
    real, second = (oracle.noisy(count, 7.5, generator) for _ in range(2))
    ours, theirs = prdc(real, x, k=5), prdc(real, second, k=5)
    off = {key: abs(ours[key] - theirs[key]) for key in ours}
    same = max(off["precision"], off["recall"]) < 0.015 and off["density"] < 0.08 and off["coverage"] < 0.02
    if sampler in ("pc", "heun"):  # sampling error: coverage's deviation is about 0.006, density's 0.02
        assert same, (ours, theirs)
    elif sampler == "heun, Gaussian fit":  # what a trained network, which knows no σ above 10, can start from
        assert ours["coverage"] > 0.9, ours
    else:  # an ODE cannot repair a start that is not the moons' law: so this test can tell
        assert not same and ours["coverage"] < 0.8, ours


def test_samplers_with_the_oracle_land_on_the_crescents_and_heun_needs_40_evaluations():
    generator, count = torch.Generator().manual_seed(2), 400
    noise = lambda x: torch.randn(x.shape, generator=generator)
    for name in ("heun", "pc"):
        oracle = Oracle(1_000)
        if name == "heun":
            x = heun_sampler(oracle, 200 * noise(torch.empty(count, 2)), sigma_grid(20, 0.01, 200, rho=7))
            assert oracle.evaluations <= 40
        else:
            x = pc_sampler(oracle, 10 * noise(torch.empty(count, 2)), sigma_grid(1_000, 0.01, 10), noise=noise)
            assert oracle.evaluations == 2_000
        distance, nearest = torch.cdist(x, oracle.points).min(1)
        assert distance.max() < 0.15, (name, distance.max())  # neighbours on the crescent are 0.126 apart
        share = nearest.div(50, rounding_mode="floor").bincount(minlength=10) / count  # ten equal pieces of the arc
        assert share.min() > 0.05 and share.max() < 0.16, (name, share)


def test_heun_error_shrinks_with_the_square_of_the_step_on_the_moons():
    oracle = Oracle(400, dtype=torch.float64)
    x = 20 * torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ends = {steps: heun_sampler(oracle, x, torch.linspace(20, 5, steps + 1, dtype=torch.float64)) for steps in (20, 40, 80, 1280)}
    coarse, middle, fine = ((ends[steps] - ends[1280]).norm() for steps in (20, 40, 80))
    assert 3.4 < coarse / middle < 4.6 and 3.4 < middle / fine < 4.6


# ---------------------------------------------------------------------------- toy_moons.py as a user runs it


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("moons")
    flags = ("--steps", 400, "--batch", 500, "--samples", 200, "--out", out)
    done = study(*flags)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return out, flags, done.stdout


def test_toy_moons_dlsm_at_least_halves_the_score_error_of_cross_entropy(short_run):
    out, _, printed = short_run
    table = json.loads((out / "table.json").read_text())
    losses, methods = table["late"]["losses"], table["late"]["methods"]
    assert sum(losses["total"]["D_L"]) <= 0.5 * sum(losses["ce"]["D_L"])
    assert sum(losses["dlsm"]["D_L"]) <= 0.6 * sum(losses["ce"]["D_L"])
    assert sum(table["early"]["losses"]["total"]["D_L"]) < sum(table["early"]["losses"]["ce"]["D_L"])
    assert methods["a"]["D_L"] == losses["ce"]["D_L"] and methods["d"]["D_P"] == losses["total"]["D_P"]
    assert sum(methods["b"]["D_L"]) / 2 > 1.5 and methods["c"]["D_L"] is None and max(methods["e"]["D_P"]) < 1e-5
    assert set(methods) == {"a", "b", "renorm", "c", "d", "e"} and set(losses) == {"ce", "dlsm", "total"}
    assert all(len(methods["renorm"][key]) == 2 for key in ("D_P", "D_L", "precision", "recall", "density", "coverage"))
    assert table["settings"]["steps"] == 400 and table["settings"]["seeds"] == [0]
    for name in ("figure1", "figure5", "figureA1"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "Table 1, late" in printed and "[0.198]" in printed and "Table A3, early" in printed


def test_toy_moons_trains_nothing_twice_and_refuses_other_settings(short_run):
    out, flags, _ = short_run
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.pt")}
    first = json.loads((out / "table.json").read_text())
    assert len(before) == 12
    again = study(*flags)
    assert again.returncode == 0, again.stderr
    second = json.loads((out / "table.json").read_text())
    for key, values in first["late"]["methods"].items():  # a point more or less among 200 may be rounding
        for metric, pair in values.items():
            assert second["late"]["methods"][key][metric] == (pair and pytest.approx(pair, abs=1e-4 if metric[0] == "D" else 0.03))
    other = study("--steps", 300, *flags[2:])
    assert other.returncode == 2 and one_line(other.stderr) and "steps = 400, not 300" in other.stderr
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*.pt")}


@pytest.mark.parametrize("flags, words", [
    (["--preset", "big"], ["--preset", "big", "fast"]),
    (["--steps", "0"], ["--steps", "0"]),
    (["--steps", "-5"], ["--steps", "-5"]),
    (["--batch", "many"], ["--batch", "many"]),
    (["--seeds", "0"], ["--seeds", "0"]),
    (["--device", "abacus"], ["--device", "abacus"]),
    (["--out", "FILE/below"], ["--out", "FILE/below"]),
    (["--out", "FILE"], ["--out", "FILE"]),
])
def test_toy_moons_bad_input_is_one_line_and_exit_code_2(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("FILE").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["toy_moons.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        run(toy_moons.main)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and one_line(message) and all(word in message for word in words), message
    assert pathlib.Path("FILE").read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_toy_moons_cut_off_checkpoint(short_run, tmp_path, monkeypatch, capsys):
    whole = (short_run[0] / "late-ce-0.pt").read_bytes()
    (tmp_path / "late-ce-0.pt").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(sys, "argv", ["toy_moons.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        run(toy_moons.main)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and one_line(message) and "late-ce-0.pt" in message, message
    assert (tmp_path / "late-ce-0.pt").read_bytes() == whole[: len(whole) // 2] and not (tmp_path / "table.json").exists()


def test_toy_moons_checkpoint_of_the_wrong_kind(short_run, tmp_path):
    classifier = (short_run[0] / "late-ce-0.pt").read_bytes()
    (tmp_path / "late-score-0.pt").write_bytes(classifier)
    done = study("--steps", 5, "--batch", 10, "--out", tmp_path)
    assert done.returncode == 2 and one_line(done.stderr) and "late-score-0.pt" in done.stderr and "score" in done.stderr, done.stderr
    assert (tmp_path / "late-score-0.pt").read_bytes() == classifier


def test_toy_moons_ctrl_c_is_one_line_and_the_same_command_continues(tmp_path):
    flags = ("--steps", 10**6, "--batch", 10, "--out", tmp_path)
    process = subprocess.Popen([sys.executable, HERE / "toy_moons.py", *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.jsonl")) and time.monotonic() < deadline:  # written with the first checkpoint
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and one_line(errors) and "the same command continues" in errors, errors
    assert max(load_checkpoint(path)["step"] for path in tmp_path.glob("*.pt")) >= 1000  # of two at work one had saved, the other saves now
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".") and not name.endswith(".lock")]  # no half-written files


# ---------------------------------------------------------------------------- Fréchet distance


def gaussian(d, seed, rank=None):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rank or 3 * d, d, generator=g, dtype=torch.float64) * torch.linspace(0.1, 3, d) + torch.randn(d, generator=g)
    return x, *moments(x)


def test_frechet_distance_closed_forms():
    a, b = torch.tensor([4.0, 9.0, 0.25, 1e-5]), torch.tensor([1.0, 16.0, 0.0, 4e-5])
    mu = torch.tensor([1.0, -2.0, 0.5, 0.0])
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    commuting = frechet_distance(torch.zeros(4), turn @ torch.diag(a).double() @ turn.T, mu, turn @ torch.diag(b).double() @ turn.T)
    assert commuting == pytest.approx((mu**2).sum().item() + ((a.sqrt() - b.sqrt()) ** 2).sum().item(), rel=1e-7)
    s1, s2 = np.array([[2.0, 0.7], [0.7, 1.0]]), np.array([[1.0, -0.6], [-0.6, 3.0]])  # they do not commute: tr √ of a 2×2 product
    root = math.sqrt(np.trace(s1 @ s2) + 2 * math.sqrt(np.linalg.det(s1) * np.linalg.det(s2)))
    assert frechet_distance(np.zeros(2), s1, np.ones(2), s2) == pytest.approx(2 + 7 - 2 * root, rel=1e-9)
    assert frechet_distance(np.zeros(1), np.array([[4.0]]), np.array([3.0]), np.array([[1.0]])) == pytest.approx(10)


def test_frechet_distance_is_that_of_sqrtm():
    linalg = pytest.importorskip("scipy.linalg")
    (_, m1, s1), (_, m2, s2) = gaussian(80, 1), gaussian(80, 2)
    expected = ((m1 - m2) ** 2).sum().item() + np.trace((s1 + s2).numpy() - 2 * linalg.sqrtm((s1 @ s2).numpy()).real)
    assert frechet_distance(m1, s1, m2, s2) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(m2, s2, m1, s1) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(m1, s1, m1, s1) == pytest.approx(0, abs=1e-9 * np.trace(s1))


@pytest.mark.parametrize("ranks", [(30, 700), (30, 50), (700, 30), (2, 40)])
def test_frechet_distance_with_fewer_samples_than_features(ranks):
    """tr (S1 S2)^½ is then the nuclear norm of X1 X2ᵀ / √((n1 − 1)(n2 − 1)), X centred: no covariance is needed."""
    (x1, m1, s1), (x2, m2, s2) = gaussian(200, 1, ranks[0]), gaussian(200, 2, ranks[1])
    nuclear = torch.linalg.svdvals((x1 - m1) @ (x2 - m2).T).sum() / math.sqrt((len(x1) - 1) * (len(x2) - 1))
    expected = ((m1 - m2) ** 2).sum() + s1.trace() + s2.trace() - 2 * nuclear
    assert frechet_distance(m1, s1, m2, s2) == pytest.approx(expected.item(), rel=1e-6)


def test_moments_stream_without_loss():
    x = (torch.randn(5000, 7, generator=torch.Generator().manual_seed(0)) + 3e3).float()  # float32 sums of squares would lose all
    mean, cov = moments(x)
    assert np.allclose(mean, x.double().numpy().mean(0), rtol=1e-12) and np.allclose(cov, np.cov(x.double().numpy().T), rtol=1e-9)


# ---------------------------------------------------------------------------- Inception Score


def test_inception_score_closed_forms():
    assert inception_score(torch.zeros(100, 8)) == pytest.approx((1, 0))
    sure = 200 * torch.eye(10).repeat(60, 1)
    assert inception_score(sure, splits=1) == pytest.approx((10, 0))
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double()
    mean = p.mean(0)
    assert inception_score(p.log(), splits=1)[0] == pytest.approx(math.exp((p * (p / mean).log()).sum() / 2))


def test_inception_score_does_not_depend_on_the_order():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat_interleave(50)  # class by class: splits in this order would see one class each
    logits = 3 * torch.eye(10)[labels] + torch.randn(500, 10, generator=g)
    score = inception_score(logits)
    assert inception_score(logits[torch.randperm(500, generator=g)]) == pytest.approx(score, rel=1e-9)
    assert inception_score(logits.flip(0)) == pytest.approx(score, rel=1e-9)
    assert score[0] > 0.85 * inception_score(logits, splits=1)[0]
    with pytest.raises(UserError, match="7 samples"):
        inception_score(logits[:7])


# ---------------------------------------------------------------------------- precision, recall, density, coverage


def brute_force(x, y, k):
    def distances(a, b):
        return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")

    radius = [distances(v, v).fill_diagonal_(math.inf).kthvalue(k, 1).values for v in (x, y)]
    d = distances(x, y)
    real, fake = d < radius[0][:, None], d < radius[1][None]
    return dict(precision=real.any(0).double().mean().item(), recall=fake.any(1).double().mean().item(),
                density=real.sum().item() / (k * len(y)), coverage=real.any(1).double().mean().item())


def clouds(name):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    centers = 1000 * normal(5, 80)
    far = normal(900, 80)
    far[7] = 1e6
    return {
        "plane": (normal(2300, 2), 1.1 * normal(700, 2)), "many dimensions": (normal(2100, 100), 0.97 * normal(400, 100)),
        "numbers of float64": (normal(300, 100).double(), normal(200, 100).double()), "few": (normal(6, 3), normal(9, 3)),
        "far from zero": (normal(900, 80) + 1e4, normal(900, 80) + 1e4), "one coordinate": (normal(500), normal(400)),
        "clusters far apart": (centers.repeat(160, 1) + normal(800, 80), centers.repeat(160, 1) + normal(800, 80)),  # float32 cannot tell
        "lattice, few": (torch.randint(0, 9, (900, 3), generator=g), torch.randint(0, 9, (900, 3), generator=g)),  # ties everywhere
        "lattice, many": (torch.randint(0, 2, (900, 70), generator=g).float() + 0.1, torch.randint(0, 2, (900, 70), generator=g).float() + 0.1),
        "duplicates": (normal(90, 80).repeat(10, 1), normal(90, 80).repeat(10, 1)), "an outlier": (normal(900, 80), far),
        "one point": (normal(900, 80), normal(1, 80).repeat(900, 1)),
    }[name]


@pytest.mark.parametrize("name", ["plane", "many dimensions", "numbers of float64", "few", "far from zero", "one coordinate", "clusters far apart",
                                  "lattice, few", "lattice, many", "duplicates", "an outlier", "one point"])
def test_prdc_is_brute_force(name):
    x, y = clouds(name)
    as_rows = (v.reshape(len(v), -1) for v in (x, y))
    expected = brute_force(*as_rows, 3)
    assert prdc(x, y) == pytest.approx(expected, abs=1e-12)
    assert prdc(x.numpy(), y.numpy(), k=3) == pytest.approx(expected, abs=1e-12)
    if name in ("plane", "few"):
        assert prdc(x, y, 5) == pytest.approx(brute_force(x, y, 5), abs=1e-12)


def test_prdc_takes_radii_that_are_known():
    x, y = clouds("many dimensions")
    assert prdc(x, y, 3, knn_radii(x, 3)) == prdc(x, y, 3)


@pytest.mark.parametrize("k", [3, 5])
def test_prdc_has_its_exact_expectations(k):
    """Whatever the law, density has mean 1 and coverage 1 − C(N−1, k) / C(N+M−1, k) if both sets have the same one."""
    N, M, results, g = 150, 210, [], torch.Generator().manual_seed(k)
    for i in range(150):
        x, y = ((1 - torch.rand(n, 2 if i % 2 else 70, generator=g)).log() for n in (N, M))
        results.append([prdc(x, y, k)[key] for key in ("density", "coverage")])
    results = torch.tensor(results)
    error = 4 * results.std(0) / len(results) ** 0.5
    expected = torch.tensor([1.0, 1 - math.comb(N - 1, k) / math.comb(N + M - 1, k)])
    assert ((results.mean(0) - expected).abs() < error).all() and (error < 0.05).all()


@pytest.mark.parametrize("d", [2, 100, 700])
def test_prdc_of_an_exact_copy_is_one(d):
    """A density of 4/3 would mean that ≤ slipped in, or that a distance was not the same twice."""
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2500, d, generator=torch.Generator().manual_seed(d), dtype=dtype) + 0.3
        copy = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
        assert prdc(x, copy, 3) == dict(precision=1.0, recall=1.0, density=1.0, coverage=1.0)


def test_prdc_knows_which_argument_is_real():
    g = torch.Generator().manual_seed(0)
    real = torch.cat([torch.randn(400, 2, generator=g) + shift for shift in (-20, 20)])
    collapsed = torch.randn(800, 2, generator=g) - 20  # one of the two modes
    result, swapped = prdc(real, collapsed), prdc(collapsed, real)
    assert result["precision"] > 0.95 and 0.4 < result["recall"] < 0.55 and result["coverage"] < 0.55
    assert (swapped["precision"], swapped["recall"]) == (result["recall"], result["precision"])


def test_prdc_refuses_what_it_cannot_do():
    x = torch.randn(20, 4)
    for real, fake, k, words in ((x, x[:3], 3, "k = 3"), (x, x[:, :3], 3, "coordinates"), (x, x / 0, 3, "NaN or infinite"), (x, x, 0, "k ≥ 1")):
        with pytest.raises(UserError, match=words):
            prdc(real, fake, k)


def test_prdc_memory_is_linear(tmp_path):
    """A matrix of 10,000 × 10,000 would take 400 MB."""
    code = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from evaluate import prdc
prdc(torch.randn(3000, 64), torch.randn(3000, 64))
x, y = torch.randn(10000, 64), torch.randn(10000, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prdc(x, y)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code, str(HERE)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 120


# ---------------------------------------------------------------------------- Inception


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory):
    if not OFFICIAL.exists():
        pytest.skip(f"{OFFICIAL} is not there: FID's network cannot be checked")
    sys.path.insert(0, str(OFFICIAL))
    from fill import official_checkpoint
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(official_checkpoint("inception")["model"], path)
    return path


def test_inception_is_the_official_one(inception_file):
    expected = np.load(OFFICIAL / "expected.npz")
    images = torch.from_numpy(expected["inception/images"]).permute(0, 3, 1, 2)
    for resize in ("tf", "torch"):
        args = ev.make_parser().parse_args(["--weights", str(inception_file), "--resize", resize, "--device", "cpu"])
        with torch.no_grad():
            features, logits = ev.Evaluation(args).extractor[2](images)
        pairs = [(features, expected[f"inception/features_{resize}"])]
        if resize == "tf":
            pairs.append((logits, expected["inception/logits_unbiased_tf"]))
        for ours, theirs in pairs:
            assert (np.abs(ours.numpy() - theirs).max(1) / np.abs(theirs).max(1) < 1e-4).all()


def test_resizing_for_inception():
    grey = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for resize in ("tf", "torch"):
        assert torch.equal(ev.resize_for_inception(grey, resize), ev.resize_for_inception(grey.repeat(1, 3, 1, 1), resize))
        same = torch.randint(0, 256, (1, 3, 299, 299), dtype=torch.uint8)
        expected = (same.float() - 128) / 128 if resize == "tf" else same.float() / 127.5 - 1
        assert torch.allclose(ev.resize_for_inception(same, resize), expected, atol=1e-5)
    ramp = torch.arange(0, 160, 10, dtype=torch.uint8).expand(1, 1, 16, 16)
    row = ev.resize_for_inception(ramp, "tf")[0, 0, 0] * 128 + 128
    assert row[0] == 0 and row[1].item() == pytest.approx(160 / 299, rel=1e-3) and row[-1] == 150  # no half-pixel shift; the edge repeats


def test_inception_weights_are_checked(tmp_path, monkeypatch):
    def offline(*args, **more):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    with pytest.raises(UserError, match=r"no route.*fid_weights/pt_inception.*features/pt_inception.*--weights; --features own needs none"):
        ev.inception_weights(None, tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **more: io.BytesIO(b"cut off"))
    with pytest.raises(UserError, match="sha256.*try again"):
        ev.inception_weights(None, tmp_path)
    assert not list(tmp_path.rglob("*.pth"))
    path = tmp_path / "features" / ev.WEIGHTS
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="sha256.*delete it"):
        ev.inception_weights(None, tmp_path)
    monkeypatch.setattr(ev, "WEIGHTS_SHA", ev.hashlib.sha256(b"damaged").hexdigest())
    assert ev.inception_weights(None, tmp_path) == (path, ev.WEIGHTS_SHA)
    with pytest.raises(UserError, match="not a readable checkpoint"):
        ev.load_inception(path)
    torch.save({"fc.weight": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="not FID's Inception"):
        ev.load_inception(path)


# ---------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Three classes of small grey images (a bright row, column or corner) as a data set, and samples of two qualities."""
    folder, rng = tmp_path_factory.mktemp("evaluate"), np.random.default_rng(0)

    def draw(n, noise):
        labels = np.arange(n) % 3
        images = rng.normal(90, noise, (n, 8, 8, 1))
        for i, c in enumerate(labels):
            images[i, slice(0, 3) if c != 1 else slice(None), slice(0, 3) if c != 0 else slice(None)] += 70
        return images.clip(0, 255).round().astype(np.uint8), labels

    (images, labels), (test_images, test_labels) = draw(240, 20), draw(60, 20)
    np.savez(folder / "bars.npz", images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    for name, noise in (("good", 20), ("bad", 45)):
        images, labels = draw(150, noise)
        recipe = np.array(json.dumps(dict(data=str(folder / "bars.npz") if name == "good" else "fashion", sampler="pc", seed=3)))
        np.savez(folder / f"samples-{name}.npz", images=images, labels=labels, recipe=recipe)
    return folder


FLAGS = ("--data", "bars.npz", "--root", ".", "--features", "own", "--own-steps", 15)


def in_process(work, monkeypatch, capsys, *args, code=0):
    """The command without the seconds that a new Python takes → its output."""
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, args)])
    if code == 0:
        run(ev.main)
        return capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        run(ev.main)
    captured = capsys.readouterr()
    assert exit.value.code == code and len(captured.err.strip().splitlines()) == 1, captured.err
    return captured.err


def numbers_of(folder, name):
    return {key: number["value"] for key, number in json.loads((folder / "evaluation.json").read_text())["files"][name]["numbers"].items()}


def test_a_whole_evaluation(work, monkeypatch, capsys):
    out = command("evaluate.py", "samples-bad.npz", "samples-good.npz", *FLAGS, "--metrics", "all", "--cas-model", "resnet18", "--cas-steps", 4,
                  "--out", "out", cwd=work)
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in (line.split("|") for line in out.splitlines()) if len(cells) == 6}
    assert rows[""] == ["", "bad", "good"] and rows["FD@150"][0] == "↓" and rows["Precision"][0] == "↑" and "CAS of real images" in rows
    assert rows["FD@150"][2].startswith("**") and not rows["FD@150"][1].startswith("**") and "±" in rows["IS, ten splits"][1]
    assert {"IS", "Recall", "Density", "Coverage", "CAS", "Class accuracy", "(CW) Precision", "(CW) Recall", "(CW) Density", "(CW) Coverage"} <= set(rows)
    assert "Warning: FD@150 is of few samples" in out and "own features (sha256 " in out and "test accuracy" in out
    assert "Warning: bad was drawn for fashion" in out and "good was drawn" not in out and "real images: image 240/240  " in out
    assert (work / "out" / "evaluation.md").read_text().strip() in out
    with Image.open(work / "out" / "side-by-side.png") as picture:
        assert picture.height == 2 * 66  # a row a file, zoomed to 64 pixels and 2 apart
    with Image.open(work / "out" / "classwise-good-minus-bad.png") as picture:
        assert picture.width > 600
    found = json.loads((work / "out" / "evaluation.json").read_text())
    good = found["files"]["good"]
    assert good["recipe"]["sampler"] == "pc" and good["n"] == 150
    assert good["numbers"]["fid"]["reference"] == "bars.npz, 240 training images" and len(good["numbers"]["fid"]["extractor"]["sha256"]) == 64
    assert good["numbers"]["precision"]["k"] == 3 and good["numbers"]["cas"]["steps"] == 4 and good["numbers"]["cas"]["model"] == "resnet18"
    classes = good["numbers"]["cw_recall"]["classes"]
    assert list(classes) == ["0", "1", "2"] and sum(classes.values()) / 3 == pytest.approx(good["numbers"]["cw_recall"]["value"])
    assert 0 <= good["numbers"]["cas"]["value"] <= 1 and found["features"]["test_accuracy"] > 0.3

    def computed(*args, **more):
        raise AssertionError("computed twice")

    monkeypatch.setattr(ev, "save_checkpoint", computed)  # the same command again: features and classifiers are there
    first = numbers_of(work / "out", "good")
    again = in_process(work, monkeypatch, capsys, "samples-bad.npz", "samples-good.npz", *FLAGS, "--metrics", "all", "--cas-model", "resnet18",
                       "--cas-steps", 4, "--out", "out")
    assert "finished already" in again and numbers_of(work / "out", "good") == pytest.approx(first, rel=1e-5)  # this process may use more threads


def test_held_out_real_images_as_a_column(work, monkeypatch, capsys):
    out = in_process(work, monkeypatch, capsys, "samples-good.npz", "test", *FLAGS, "--metrics", "fid,prdc", "--out", "ceiling")
    images, labels, _ = load_images("bars.npz", "test", root=".")
    good, real = (numbers_of(work / "ceiling", name) for name in ("good", "test"))
    assert "| good | test |" in out and real["coverage"] > 0 and real["fid"] != good["fid"]
    direct = evaluate(images[:150], labels[:150], data="bars.npz", root=".", features="own", own_steps=15, metrics="fid,prdc")
    assert real == pytest.approx(direct)


def test_class_wise_numbers_are_prdc_of_each_class(work, monkeypatch, capsys):
    in_process(work, monkeypatch, capsys, "samples-good.npz", *FLAGS, "--metrics", "prdc,classwise", "--out", "cw")
    args = ev.make_parser().parse_args(list(map(str, FLAGS)))
    evaluation = ev.Evaluation(args)
    samples = np.load("samples-good.npz")
    fake = evaluation.features(evaluation.check("x", samples["images"])[0], "x")[0]
    real, labels = evaluation.real_features, evaluation.images()[1]
    each = [brute_force(real[labels == c], fake[samples["labels"] == c], 3) for c in range(3)]
    found = numbers_of(work / "cw", "good")
    for key in ev.PRDC:
        assert found[f"cw_{key}"] == pytest.approx(np.mean([row[key] for row in each])) and found[key] == pytest.approx(brute_force(real, fake, 3)[key])


def test_other_peoples_files_give_the_same_numbers(work, monkeypatch, capsys):
    samples = np.load(work / "samples-good.npz")
    np.savez(work / "guided.npz", samples["images"], samples["labels"])  # arr_0 and arr_1
    for i, (image, label) in enumerate(zip(samples["images"], samples["labels"])):
        for folder in ("by-class/" + str(label), "flat"):
            (work / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0]).save(work / folder / f"{i:03d}.png")
    out = in_process(work, monkeypatch, capsys, "samples-good.npz", "guided.npz", "by-class", "flat", *FLAGS, "--out", "interop", "--save-stats", "stats.npz")
    good, guided, by_class, flat = (numbers_of(work / "interop", name) for name in ("good", "guided", "by-class", "flat"))
    assert guided == good and by_class == pytest.approx(good, rel=1e-5) and "cw_recall" in good
    assert flat == pytest.approx({key: good[key] for key in flat}, rel=1e-5) and "cw_recall" not in flat and "| – |" in out
    stats = np.load(work / "stats.npz")
    assert stats["mu"].shape == (128,) and stats["sigma"].shape == (128, 128)
    in_process(work, monkeypatch, capsys, "samples-good.npz", *FLAGS, "--out", "stats", "--metrics", "fid", "--stats", "stats.npz")
    assert numbers_of(work / "stats", "good")["fid"] == pytest.approx(good["fid"], rel=1e-9)


def test_tensors_from_python(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    samples = np.load("samples-good.npz")
    images, labels = torch.from_numpy(samples["images"]).permute(0, 3, 1, 2), torch.from_numpy(samples["labels"])
    flags = dict(data="bars.npz", root=".", features="own", own_steps=15)
    found = evaluate(images, labels, **flags)
    in_process(work, monkeypatch, capsys, "samples-good.npz", *FLAGS, "--out", "python")
    assert found == numbers_of(work / "python", "good")
    assert set(evaluate(images, metrics="fid,prdc", **flags)) == {"fid", *ev.PRDC}
    with pytest.raises(UserError, match="no flag metric;"):
        evaluate(images, metric="fid", **flags)
    with pytest.raises(UserError, match=r"images are float32, 0 to 1; save \(255 \* x\)"):
        evaluate(((images - images.min()) / (images.max() - images.min())).float(), **flags)


def test_inception_from_the_command_line(work, inception_file, monkeypatch, capsys):
    """Without the data: statistics stand for it. Fewer samples than features, and weights that are not the usual ones, are told."""
    np.savez(work / "unit.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    np.savez(work / "ten.npz", images=np.load(work / "samples-good.npz")["images"][:10])
    out = in_process(work, monkeypatch, capsys, "ten.npz", "--data", "nowhere", "--root", ".", "--weights", inception_file, "--stats", "unit.npz",
                     "--metrics", "fid,is", "--out", "inception")
    sha = ev.hashlib.sha256(inception_file.read_bytes()).hexdigest()
    assert f"sha256 {sha[:8]}…, not FID's 6726825d" in out and "FID@10 is of fewer than 2049 samples: not comparable" in out and "resize tf" in out
    number = json.loads((work / "inception" / "evaluation.json").read_text())["files"]["ten"]["numbers"]["fid"]
    assert number["reference"] == "unit.npz" and number["extractor"] == dict(features="inception", sha256=sha, resize="tf")


def test_paper_columns():
    for data, columns in ev.PAPER.items():
        keys = [key for key in ev.ROWS if key not in ("is_splits", "cas_real", "accuracy")]
        assert all(len(values) == len(keys) == 11 for values in columns.values())
    table = ev.markdown({"mine": dict(fid=dict(value=3.0, n=50000)), **{f"{name} (paper)": dict(fid=dict(value=values[0]), cas=dict(value=values[6]))
                         for name, values in ev.PAPER["cifar10"].items()}}, "FID")
    assert "| FID@50000 | ↓ | 3.00 | 4.10 | 12.48 | **2.25** |" in table and "CAS" not in table


def samples_with(images=None, labels=None, **more):
    base = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1)).astype(np.uint8) if images is None else images
    return dict(images=base, labels=np.arange(len(base)) % 3 if labels is None else labels, **more)


UNIT = np.random.default_rng(0).random((30, 8, 8, 1)).astype(np.float32)
WRONG = {  # a sample file, and the words of the error that it must bring
    "floats in [0, 1]": (samples_with(UNIT), ["float32, ", "to 1; save (255 * x).round()"]),
    "floats in [-1, 1]": (samples_with(2 * UNIT - 1), ["(127.5 * (x + 1)).round()"]),
    "floats to 255": (samples_with(255 * UNIT), ["x.clip(0, 255).round()"]),
    "NaN": (samples_with(np.where(UNIT > 0.9, np.nan, UNIT)), ["NaN or infinite", "draw them again"]),
    "[0, 1] cast": (samples_with(UNIT.round().astype(np.uint8)), ["[0, 1]", "scale to 0 to 255 first"]),
    "[-1, 1] cast": (samples_with((3 * UNIT - 1.5).round().astype(np.int8).astype(np.uint8)), ["[0, 1, 255]", "scale to 0 to 255 first"]),
    "channels first": (samples_with(np.full((30, 1, 8, 8), 7, np.uint8)), ["(30, 1, 8, 8)", "(N, H, W, C)"]),
    "another size": (samples_with(np.tile(samples_with()["images"], (1, 2, 2, 1))), ["1×16×16", "1×8×8", "--size 16 resizes"]),
    "another number of channels": (samples_with(samples_with()["images"].repeat(3, 3)), ["3×8×8", "see --data"]),
    "too few of a class": (samples_with(labels=np.r_[np.zeros(20, int), np.ones(7, int), np.full(3, 2)]), ["class 2 (2) has 3 samples", "need 4 in every class", "--metrics fid,is,prdc"]),
    "a class too many": (samples_with(labels=np.arange(30) % 4), ["labels up to 3", "has 3 classes"]),
    "labels that are no numbers": (samples_with(labels=np.eye(30)), ["labels are float64 (30, 30)"]),
    "a number in place of images": (dict(images=np.array(7)), ["images have shape ()"]),
    "words in place of images": (samples_with(np.full((30, 8, 8, 1), "a")), ["images are <U1"]),
    "words in place of labels": (samples_with(labels=np.full(30, "a")), ["labels are <U1 (30,)"]),
    "nothing at all": (samples_with(np.zeros((0, 8, 8, 1), np.uint8)), ["(0, 8, 8, 1)"]),
    "black": (samples_with(np.zeros((30, 8, 8, 1), np.uint8)), ["[0]", "scale to 0 to 255"]),
    "too few": (samples_with(samples_with()["images"][:5]), ["5 samples", "at least 10"]),
    "nothing known": (dict(pixels=UNIT), ["holds pixels", "arr_0"]),
    "statistics": (dict(mu=UNIT, sigma=UNIT), ["--stats"]),
    "a recipe that is none": (samples_with(recipe=np.array("[1")), ["recipe is not a JSON object"]),
    "pickles": (dict(images=np.array([None, 1])), ["not a readable .npz"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_samples_are_told_with_the_cure(name, work, monkeypatch, capsys):
    arrays, words = WRONG[name]
    np.savez(work / "wrong.npz", **arrays)
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    error = in_process(work, monkeypatch, capsys, "wrong.npz", *FLAGS, code=2)
    assert all(word in error for word in ["wrong.npz", *words]), error
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before  # nothing was written


def test_wrong_commands_are_told_with_the_cure(work, monkeypatch, capsys):
    (work / "cut.npz").write_bytes((work / "samples-good.npz").read_bytes()[:3000])
    (work / "strange" / "cat").mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8)).save(work / "strange" / "cat" / "0.png")
    np.savez(work / "small.npz", mu=np.zeros(3), sigma=np.eye(3))
    for args, words in [
            (("nowhere.npz",), ["nowhere.npz: no such file"]), (("cut.npz",), ["cut.npz", "cut off"]),
            (("strange",), ["sub-folder 'cat'", "0, 1, 2"]), (("samples-good.npz", "--metrics", "fid,prd"), ["--metrics fid,prd", "fid,is,prdc,classwise,cas"]),
            (("samples-good.npz", "--stats", "small.npz"), ["small.npz", "mu (3,)", "mu (128,)", "--save-stats"]),
            (("samples-good.npz", "--paper"), ["--paper", "cifar10 and cifar100"]), ((), ["runs/bars", "sample.py"]),
            (("samples-good.npz", "--features", "inception", "--weights", "nowhere.pth"), ["nowhere.pth", "fid_weights", "--features own"])]:
        error = in_process(work, monkeypatch, capsys, *args[:1], *FLAGS, *args[1:], code=2)
        assert all(word in error for word in words), error


def test_mistakes_as_a_user_sees_them(work):
    np.savez(work / "floats.npz", **samples_with(UNIT))
    assert "floats.npz: images are float32" in command("evaluate.py", "floats.npz", *FLAGS, cwd=work, code=2)
    assert "--k: '0' is not a whole number of 1 to 1000" in command("evaluate.py", "floats.npz", "--k", 0, cwd=work, code=2)


# ---------------------------------------------------------------------------- it holds up (the long version: .ci/harness.py)

SCRIPTS = ("train_score", "train_classifier", "sample", "evaluate", "toy_moons")


@pytest.fixture
def main(monkeypatch):
    """main(script, *arguments, cwd=...): a script's main() in this process, without the seconds that torch takes to load."""
    def call(script, *args, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        return importlib.import_module(script).main()

    return call


def copied(trained, folder, *names):
    """A folder whose runs/small has these files of `trained`."""
    (folder / "runs" / "small").mkdir(parents=True)
    for name in names:
        shutil.copy(trained / "runs" / "small" / name, folder / "runs" / "small")
    return folder


def test_nothing_is_unpickled():
    for script in [HERE / "models.py", *(HERE / f"{name}.py" for name in SCRIPTS)]:
        text = script.read_text()
        assert "allow_pickle" not in text and "import pickle" not in text and text.count("torch.load(") == text.count("weights_only=True)"), script


NOT_NUMBERS = ["", " ", "x", "nan", "inf", "-inf", "1,2", "1e400", "-1e400", "9" * 400, "9" * 5000, "-" + "9" * 400]
EDGES = ["-999999999999", "-1", "-1e-30", "0", "1e-300", "1.5", "1e13", "9" * 25]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_refuses_what_is_outside_its_range_in_one_line(script, capsys):
    module = importlib.import_module(script)
    tried = 0
    for action in module.make_parser()._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        flag, kind, values = action.option_strings[-1], getattr(action.type, "kind", None), ["", " "]
        if kind:
            def outside(text):
                try:
                    return not action.type.low <= kind(text) <= action.type.high
                except ValueError:
                    return True
            values = NOT_NUMBERS + [text for text in EDGES if outside(text)]
        elif action.choices:
            values = NOT_NUMBERS + EDGES
        elif "parse_" in getattr(action.type, "__name__", ""):  # lists of numbers from 0
            values = [text for text in NOT_NUMBERS if text != "1,2"] + ["-1", "1,-1", "1,", ",", "1;2", "1,nan"]
        for value in values:
            with pytest.raises(SystemExit, match="^2$"):
                module.make_parser().parse_args([f"{flag}={value}"])
                pytest.fail(f"{flag}={value[:30]!r} is accepted")
            message = capsys.readouterr().err
            assert flag in message and len(message.strip().splitlines()) == 1, message
            tried += 1
    assert tried > 50


@pytest.mark.parametrize("words, script, args", [
    ("--device meta", "train_score", ["--device", "meta"]), ("--device cuda:99", "train_score", ["--device", "cuda:99"]), ("--lam with", "train_classifier", ["--loss", "ce", "--lam", 2]),
    ("--power with", "train_classifier", ["--loss", "ce", "--power", 2]), ("--classes 1,1", "sample", ["--classes", "1,1"]), ("--classes 10", "sample", ["--guidance", "none", "--classes", 10, "--n", 1]),
    ("--alpha with", "sample", ["--guidance", "none", "--alpha", 2]), ("--snr with", "sample", ["--snr", 0.1]), ("--churn with", "sample", ["--sampler", "pc", "--churn", 0])])
def test_arguments_that_contradict_each_other(words, script, args, main, trained, shapes):
    with pytest.raises(UserError, match=words):
        main(script, "--data", shapes, *args, cwd=trained)


def test_tags_stay_in_the_folder(capsys):
    for tag in ("a/b", "../x", "", "a b", "x" * 101):
        with pytest.raises(SystemExit, match="^2$"):
            importlib.import_module("train_score").make_parser().parse_args(["--tag", tag])
        assert "--tag" in capsys.readouterr().err


def mutations(data, count, seed=0):
    """The ways in which a disk or a download spoils a file."""
    rng = random.Random(seed)
    for _ in range(count):
        bad, at = bytearray(data), rng.choice([rng.randrange(len(data)), rng.randrange(min(len(data), 300)), len(data) - 1 - rng.randrange(min(len(data), 1500))])
        kind = rng.choice(["flip", "flip", "cut", "zeros", "twice"])
        if kind == "flip":
            bad[at] ^= 1 << rng.randrange(8)
        else:
            bad[at : at if kind == "twice" else len(bad) if kind == "cut" else at + 99] = bad[at : at + 99] if kind == "twice" else bytes(99 * (kind == "zeros"))
        yield bytes(bad)


def refusals(path, files, read):
    """Each of `files` in the place of `path` must give what `path` gave, or one line of error → how many were refused."""
    right, refused = read(), 0
    for n, data in enumerate(files):
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a library's warning would stand beside the one line
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                assert read() == right, f"file {n}: a wrong answer, silently"
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 400, str(error)
                refused += 1
    return refused


@pytest.fixture
def toy(tmp_path):
    """A small checkpoint as training writes it, with an EMA."""
    torch.manual_seed(0)
    net = ToyNet(2, widths=(8, 8), join="early")
    fit(net, lambda generator, step: [torch.randn(4, 2, generator=generator), torch.ones(4)], lambda x, sigma: net(x, sigma).square().mean(), tmp_path / "toy.pt", "score",
        dict(seed=0), steps=3, lr=1e-3, ema=0.9, quiet=True)
    return tmp_path / "toy.pt"


def loaded(path):
    x = torch.linspace(0, 1, 4).view(2, 2)
    return load_model(path, kind="score")(x, torch.tensor([0.1, 10.0])).tolist()


def resumed(path):
    net = ToyNet(2, widths=(8, 8), join="early")
    optimizer, average = torch.optim.Adam(net.parameters(), fused=True), EMA(net)
    step, log, _ = resume(path, "score", net, dict(seed=0), optimizer, average, "cpu")
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # moments that do not fit would fail only here
    return checksum([step, log, net.state_dict(), average.shadow, average.updates])


def test_spoilt_files_are_refused_or_harmless(toy, shapes, tmp_path):
    data, table = tmp_path / "data.npz", {"classifier-ce": [dict(sigma=s, alpha=a) for s, a in ((0.01, 1.5), (1.0, 0.7), (50.0, 0.1))]}
    shutil.copy(shapes, data)
    (tmp_path / "diagnose.json").write_text(json.dumps({**table, "checksum": checksum(table)}))
    for path, read in ((toy, lambda: loaded(toy)), (toy, lambda: resumed(toy)), (tmp_path / "diagnose.json", lambda: calibrated(tmp_path, "classifier-ce", "", "cpu")[1]),
                       (data, lambda: checksum([load_images(str(data), split) for split in ("train", "test")]))):
        good = path.read_bytes()
        assert refusals(path, mutations(good, 200), read) > 120, path
        path.write_bytes(good)


class Hostile:
    """Pickled, it would run a command where it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_hostile_files_run_nothing(toy, shapes, tmp_path):
    data = tmp_path / "data.npz"
    shutil.copy(shapes, data)
    evil, files = Hostile(tmp_path / "ran"), [b"", b"\n", b"{}", b"PK\x05\x06" + bytes(18)]
    for value in (evil, {"weights": evil}, {"model": evil}, {"kind": "score", "config": evil}):
        for zipped in (True, False):
            torch.save(value, tmp_path / "x", _use_new_zipfile_serialization=zipped)
            files.append((tmp_path / "x").read_bytes())
        files.append(pickle.dumps(value))
    np.save(tmp_path / "x.npy", np.array([evil], dtype=object))
    np.savez(tmp_path / "x.npz", images=np.array([evil], dtype=object), labels=np.zeros(1, int))
    files += [(tmp_path / f"x.{end}").read_bytes() for end in ("npy", "npz")]
    assert refusals(toy, files, lambda: loaded(toy)) == len(files) == refusals(data, files, lambda: checksum(load_images(str(data))))
    assert not (tmp_path / "ran").exists()
    pickle.loads(files[6])  # it would have
    assert (tmp_path / "ran").exists()


def test_checkpoints_of_the_wrong_kind_or_shape(toy, tmp_path):
    """Each with a valid checksum: another version's, a hand-made one, one that would fill the memory."""
    good, original, endless = load_checkpoint(toy), toy.read_bytes(), {}
    endless["endless"] = endless
    odd = [None, -3, math.nan, "x", [], {}, {"a": 1}, [{}], torch.zeros(2), torch.zeros(3, dtype=torch.complex64), torch.eye(2).to_sparse(), torch.zeros(1).expand(2**45), endless]
    name, state = "last.weight", good["optimizer"]
    wrong = [{**good, key: value} for key in good if key != "log" for value in odd[key == "ema" :]]  # None is an EMA of ours
    wrong += [{**good, "config": {**good["config"], key: value}} for key in ("outputs", "widths") for value in (None, 0, -1, 5, 2**40, 10**5, "x", (), (10**5, 10**5), math.nan)]
    wrong += [{**good, "weights": {**good["weights"], name: value}} for value in (torch.zeros(7), good["weights"][name].double(), "x")]
    wrong += [{**good, "weights": {**good["weights"], "more": torch.zeros(1)}}, {**good, "weights": {k: v for k, v in good["weights"].items() if k != name}}]
    wrong += [{**good, "ema": {**good["ema"], "shadow": shadow}} for shadow in (good["ema"]["shadow"][:-1], [v[:1] for v in good["ema"]["shadow"]])]
    unfit = [{**state, "state": {}}, {**state, "param_groups": []}, {**state, "state": {**state["state"], 0: {**state["state"][0], "exp_avg": torch.zeros(1)}}}]
    files = []
    for checkpoint in wrong + [{**good, "optimizer": value} for value in unfit]:
        try:
            save_checkpoint(tmp_path / "x", checkpoint)
        except (ValueError, RuntimeError, RecursionError):  # what we would not write
            torch.save({**checkpoint, "checksum": "0"}, tmp_path / "x")
        files.append((tmp_path / "x").read_bytes())
    assert refusals(toy, files, lambda: loaded(toy)) > 80
    toy.write_bytes(original)
    assert refusals(toy, files, lambda: resumed(toy)) > 60
    toy.write_bytes(original)
    assert refusals(toy, files[-len(unfit) :], lambda: resumed(toy)) == len(unfit)
    torch.save(good, toy)
    with pytest.raises(UserError, match="checksum"):  # ours always carry one
        load_model(toy)


def test_networks_of_points_are_not_for_images(main, toy, trained, shapes):
    for script in ("sample", "train_classifier"):
        with pytest.raises(UserError, match="not one for images"):
            main(script, "--data", shapes, "--score", toy, cwd=trained)


def test_labels_that_would_fill_the_memory(tmp_path):
    images = np.zeros((3, 8, 8, 3), np.uint8)
    for labels, more in ((np.array([0, 1, 10**12]), {}), (np.array([0, 1, 2**63], np.uint64), {}), (np.array([0, 1, 2]), dict(test_images=images, test_labels=np.array([0, 1, 10**9]))),
                         (np.array(["a", "b", "c"]), dict(test_images=images, test_labels=np.array([0, 1, 2])))):
        np.savez(tmp_path / "x.npz", images=images, labels=labels, **more)
        with pytest.raises(UserError, match="labels"):
            load_images(str(tmp_path / "x.npz"), "test")
    np.savez(tmp_path / "x.npz", images=images[:, :0], labels=np.arange(3))
    with pytest.raises(UserError, match="shape"):
        load_images(str(tmp_path / "x.npz"))


def test_spoilt_batches_are_drawn_again_and_spoilt_samples_refused(main, trained, shapes, tmp_path):
    def draw(*more):
        return main("sample", "--data", shapes, "--run", trained / "runs" / "small", "--out", tmp_path, "--n", 30, "--batch", 10, "--steps", 2, *more, cwd=tmp_path)

    class Killed(Exception):
        pass

    def killed(*args):
        raise Killed

    draw("--watch")
    path, parts, finish = tmp_path / "samples-dlsm.npz", tmp_path / "samples-dlsm.parts", sample.finish
    good, names = path.read_bytes(), sorted(p.name for p in tmp_path.iterdir())
    try:
        for spoil in [
                lambda p: p.write_bytes(p.read_bytes()[:-100]), lambda p: p.unlink(), lambda p: np.savez(p, images=np.zeros((10, 8, 8, 3)), labels=np.arange(10)),
                lambda p: (np.savez(p, images=np.zeros((10, 8, 8, 3), np.uint8), labels=np.arange(10)), (parts / "recipe.json").unlink())]:  # a --restart killed half-way
            path.unlink()
            (tmp_path / "samples-dlsm-strip.png").unlink()
            sample.finish = killed
            with pytest.raises(Killed):
                draw("--watch")
            sample.finish = finish
            spoil(parts / "000001.npz")
            (tmp_path / "samples-dlsm-strip.png").unlink(missing_ok=True)
            draw("--watch")
            assert path.read_bytes() == good and sorted(p.name for p in tmp_path.iterdir()) == names
    finally:
        sample.finish = finish
    parts.mkdir()  # killed between the sample file and the clearing away
    draw()
    assert not parts.exists()
    content = dict(np.load(path))
    for changed, words in ((dict(recipe=np.array("{")), "recipe"), (dict(recipe=np.array("[1]")), "recipe"), (dict(images=content["images"][:9]), "damaged"),
                           (dict(recipe=np.array("{}")), "was made with")):
        np.savez(path, **{**content, **changed})
        with pytest.raises(UserError, match=words):
            draw()
    path.unlink()
    for text in ("", "\udcff", '{"a": 1}', "[" * 100_000):
        parts.mkdir(exist_ok=True)
        (parts / "000000.npz").touch()
        (parts / "recipe.json").write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match="recipe"):
            draw()
    draw("--restart")
    assert path.read_bytes() == good


def test_a_signal_before_the_first_record_saves_and_stops(tmp_path):
    """And its log is in the checkpoint: a damaged .jsonl is written anew."""
    net = ToyNet(2)

    def train(steps, stop=None):
        def loss(x, sigma):
            if stop is not None and net.last.weight.grad is not None:
                os.kill(os.getpid(), stop)
            return net(x, sigma).square().mean()

        fit(net, lambda generator, step: [torch.randn(4, 2, generator=generator), torch.ones(4)], loss, tmp_path / "net.pt", "score", {}, steps=steps, lr=1e-3)

    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(SystemExit, match=str(128 + number)):
            train(1000, number)
    assert 2 <= load_checkpoint(tmp_path / "net.pt")["step"] < 5
    train(1000)
    whole = (tmp_path / "net.jsonl").read_text().splitlines()
    (tmp_path / "net.jsonl").write_bytes(b"\xff{junk")
    train(1005)
    again = (tmp_path / "net.jsonl").read_text().splitlines()
    assert len(whole) == 200 and again[:200] == whole and len(again) > 200


def test_ctrl_c_ends_sampling_after_the_batch(trained, shapes, tmp_path):
    arguments = ("--data", shapes, "--run", trained / "runs" / "small", "--out", tmp_path, "--n", 5000, "--batch", 10, "--steps", 4)
    process = subprocess.Popen([sys.executable, HERE / "sample.py", *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list((tmp_path / "samples-dlsm.parts").glob("*.npz")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "of 500 batches are done; the same command continues" in out and not err, out + err


def test_ctrl_c_and_sigterm_before_any_work_end_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    old = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("not caught"))
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(SystemExit, match=f"^{128 + number}$"):
            run(lambda: os.kill(os.getpid(), number) or time.sleep(5))
        assert capsys.readouterr().err == "x.py: interrupted; finished work is kept, the same command continues\n"
    signal.signal(signal.SIGTERM, old)


def test_a_full_disk_keeps_the_old_file_and_names_the_new_one(trained, tmp_path, shapes):
    folder = copied(trained, tmp_path, "score.pt")
    path = folder / "runs" / "small" / "score.pt"
    before = path.read_bytes()
    arguments = ["train_score.py", "--data", shapes, *SMALL, "--steps", 14]
    start = ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", sys.executable, HERE / arguments[0], *map(str, arguments[1:])]
    done = subprocess.run(start, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "File too large; finished work is kept" in done.stderr and "runs/small/score" in done.stderr, done.stderr
    assert path.read_bytes() == before and not list(path.parent.glob(".*-????????"))
    assert "continuing at step 12" in command(*arguments, cwd=folder)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(shapes, tmp_path):
    tmp_path.chmod(0o555)
    assert "Permission denied" in train_score(shapes, tmp_path, 3, code=2)
    tmp_path.chmod(0o755)


def test_a_folder_that_cannot_be_made(main, shapes, tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(OSError, match="runs"):
        main("train_score", "--data", shapes, *SMALL, "--steps", 3, cwd=tmp_path)


def test_broken_numbers_stop_with_step_and_sigma(main, trained, shapes, tmp_path):
    for value, network in itertools.product((math.nan, math.inf, 1e38), ("score", "classifier-total")):
        folder = copied(trained, tmp_path / f"{network}-{value}", "score.pt", "classifier-total.pt")
        path = folder / "runs" / "small" / f"{network}.pt"
        checkpoint = load_checkpoint(path)
        for weights in (list(checkpoint["weights"].values()), checkpoint["ema"]["shadow"] if checkpoint["ema"] else []):
            for tensor in weights[-2:]:
                tensor.fill_(value)
        save_checkpoint(path, checkpoint)
        for sampler in ("heun", "pc"):
            with pytest.raises(UserError, match=r"not finite at step \d+, σ = "):
                main("sample", "--data", shapes, "--n", 10, "--steps", 3, "--sampler", sampler, cwd=folder)
        assert not list(folder.rglob("samples-*.npz"))
        if network == "score":
            (path.parent / "classifier-total.pt").unlink()
            with pytest.raises(UserError, match=r"not finite at step 0, σ = .*nothing was saved"):
                main("train_classifier", "--data", shapes, *SMALL, "--steps", 3, cwd=folder)
            assert not (path.parent / "classifier-total.pt").exists()


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net.config = {}

    def loss(x, sigma):
        if x[0, 0] > 2:  # step 3: the loss is finite, the running mean is not
            net[1].running_mean.fill_(math.inf)
        return net(x).square().mean()

    with pytest.raises(UserError, match=rf"weights are not finite at step 3, σ = 1; {tmp_path}/net.pt keeps step 3"):
        fit(net, lambda generator, step: [torch.full((4, 2), float(step)), torch.ones(4)], loss, tmp_path / "net.pt", "score", {}, steps=9, lr=1e-3, save_every=1, quiet=True)
    assert load_checkpoint(tmp_path / "net.pt")["step"] == 3


def test_memory_stays_flat(tmp_path):
    """2,000 steps with the double backward, then 50 batches: neither tensors nor megabytes are added."""
    classifier, score_net, seen = ToyNet(2, join="early"), ToyNet(2, join="early"), []

    def used(*_):
        gc.collect()
        megabytes = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if sys.platform == "linux" else 0
        seen.append((sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), megabytes))

    def draw(generator, step):
        return [torch.randn(16, 2, generator=generator), torch.rand(16, generator=generator) + 0.1, torch.arange(16) % 2, torch.randn(16, 2, generator=generator)]

    fit(classifier, draw, lambda x, sigma, y, z: total_loss(classifier, score_net, x, sigma, y, z), tmp_path / "net.pt", "classifier", {}, steps=2000, lr=1e-4, ema=0.99,
        every=400, inspect=used, quiet=True)
    assert seen[-1][0] == seen[1][0] and seen[-1][1] < seen[1][1] + 4, seen
    seen.clear()
    for batch in range(50):
        score = posterior_score(score_net, classifier, torch.zeros(64, dtype=torch.long))
        (pc_sampler if batch % 2 else heun_sampler)(score, torch.randn(64, 2), sigma_grid(5, 0.1, 10.0))
        if batch % 10 == 9:
            used()
    assert seen[-1][0] <= seen[0][0] and seen[-1][1] < seen[0][1] + 4, seen


def test_a_lost_worker_ends_the_job_and_the_same_command_goes_on(shapes, tmp_path):
    arguments = ["--data", shapes, *SMALL, "--save-every", 2, "--sample-every", 10**6, "--steps"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--", HERE / "train_score.py", *arguments, 10**6]
    job = subprocess.Popen([str(a) for a in start], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    path, lock_file = (tmp_path / "runs" / "small" / name for name in ("score.pt", ".score.pt.lock"))
    while job.poll() is None and not path.exists():
        time.sleep(0.02)
    os.kill(int(lock_file.read_text().split()[1]), signal.SIGKILL)
    output = job.communicate(timeout=60)[0]
    step = load_checkpoint(path)["step"]
    assert job.returncode == 1 and "-9" in output, output
    assert f"continuing at step {step}" in command("train_score.py", *arguments, step + 3, cwd=tmp_path)


def test_two_at_once_and_what_a_kill_left(main, trained, shapes, tmp_path):
    folder = copied(trained, tmp_path, "score.pt", "classifier-total.pt")
    run = folder / "runs" / "small"
    commands = {"score.pt": ("train_score", *SMALL, "--steps", 20), "classifier-total.pt": ("train_classifier", *SMALL, "--steps", 20), "samples-dlsm.npz": ("sample", "--steps", 2),
                "diagnose.json": ("train_classifier", "--diagnose")}
    for name, (script, *args) in commands.items():
        before = (run / name).read_bytes() if (run / name).exists() else None
        with lock(run / name), pytest.raises(UserError, match=f"{name}: process {os.getpid()} on "):
            main(script, "--data", shapes, *args, cwd=folder)
        assert before == ((run / name).read_bytes() if before else None)
    stale, other = run / ".score.pt-abcdefgh", run / ".score-b.pt-abcdefgh"  # the second may be of a run with --tag b
    for file in (stale, other):
        file.write_text("half a checkpoint")
    with lock(run / "score.pt"):
        assert not stale.exists() and other.exists()


def test_a_batch_smaller_than_the_number_of_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("train_score"), "process", lambda: (0, 5))
    with pytest.raises(UserError, match="--batch 4: fewer than the 5 processes"):
        fit(ToyNet(2), lambda generator, step: [torch.zeros(4, 2), torch.ones(4)], None, tmp_path / "net.pt", "score", {}, steps=1, lr=1e-3)


# ---------------------------------------------------------------------------- the README


def seed_rows():
    """The README's table of three classifiers each, and of the samplers: name → cells; of several runs mean ± standard deviation."""
    folder = HERE / "docs" / "results"
    results = json.loads((folder / "fashion-16-seeds.json").read_text())["files"]
    tables = {**json.loads((HERE / "docs" / "pretrained" / "fashion-16" / "diagnose.json").read_text()),
              **json.loads((folder / "fashion-16-seeds-diagnose.json").read_text())}

    def cell(values, digits):
        spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
        return f"{np.mean(values):.{digits}f}{spread}" if values else ""

    def row(names, classifiers):
        keys = [("fid", 2), ("is", 2), ("accuracy", 3), *((f"cw_{key}", 3) for key in ev.PRDC)]
        numbers = ([results[name]["numbers"][key]["value"] for name in names if key in results[name]["numbers"]] for key, _ in keys)
        gains = [carried(tables[f"classifier-{name}"], 0.01, 20.0)[0] for name in classifiers]
        return [f"{results[names[0]]['n']:,}", cell(gains, 2), *(cell(values, digits) for values, (_, digits) in zip(numbers, keys))]

    seeds = {f"{name}, three classifiers": row([f"{name}-s{i}" for i in range(3)], [loss, f"{loss}-s1", f"{loss}-s2"])
             for name, loss in (("base", "ce"), ("dlsm", "total"))}
    samplers = {"Heun, 24 steps": ("heun", "none base dlsm"), "Heun, 40 steps, churn 1": ("heun40", "none base dlsm"),
                "PC, 100 steps": ("pc", "base dlsm"), "PC, 1,000 steps": ("pc1000", "dlsm")}
    return {**seeds, "none": row(["none-s0"], []), **{f"{name}, {sampler}": row([f"{name}-{key}"], [])
            for sampler, (key, names) in samplers.items() for name in names.split()}}


def test_the_readme_says_what_the_result_files_say():
    text = (HERE / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    results = json.loads((HERE / "docs" / "results" / "moons.json").read_text())
    assert results["settings"]["seeds"] == [0, 1, 2, 3, 4]

    def pair(join, group, key, metric):
        value = results[join][group][key][metric]
        return "" if value is None else " / ".join(f"{v:.3f}" for v in value)

    names = dict(a="(a) base", b="(b) scaling", renorm="(b') re-normalised", c="(c) posterior", d="(d) ours", e="(e) oracle")
    for key, name in names.items():
        row = next(r for r in rows if r[0].startswith(name) and len(r) == 10)
        columns = ((2, "late", "D_P"), (4, "late", "D_L"), (5, "late", "recall"), (6, "late", "coverage"), (7, "early", "D_P"), (8, "early", "D_L"), (9, "early", "coverage"))
        assert [row[i] for i, *_ in columns] == [pair(join, "methods", key, metric) for _, join, metric in columns]
    for key, name in dict(ce="L_CE", dlsm="L_DLSM'", total="L_Total").items():
        row = next(r for r in rows if r[0] == name and len(r) == 7)
        assert [row[i] for i in (2, 4, 5, 6)] == [pair(join, "losses", key, metric) for join in ("late", "early") for metric in ("D_P", "D_L")]
    for name, paper in (("fashion-16", {}), ("cifar10-16", ev.paper_columns("cifar10"))):
        files = json.loads((HERE / "docs" / "results" / f"{name}.json").read_text())["files"]
        columns = {key: file["numbers"] for key, file in files.items()}
        assert markdown({**columns, **paper}, "FD", real=["test"]) in text
    tables = json.loads((HERE / "docs" / "pretrained" / "fashion-16" / "diagnose.json").read_text())
    short = json.loads((HERE / "docs" / "results" / "fashion-16-short.json").read_text())
    for name, key, steps in (("L_CE", "ce", 2000), ("L_DLSM'", "dlsm", 2000), ("L_Total", "total", 2000), ("L_CE", "ce", 1000), ("L_Total", "total", 1000), ("L_CE, ReLU", "ce-relu", 1000),
                             ("L_Total, the paper's weights", "total-paper", 1000)):
        table = (tables if steps == 2000 else short)[f"classifier-{key}"]
        row = next(r for r in rows if r[0] == name and r[1] == f"{steps:,}" and len(r) == 7)
        nats, se = carried(table, 0.01, 20.0)
        at = table[6]  # σ = 1.4, where most of the class is decided
        assert row[2:] == [f"{nats:.2f} ± {se:.2f}", *(f"{at[key]:.3f}" for key in ("accuracy", "ce", "gain")), f"{at['alpha']:.2f}"]
    tables = json.loads((HERE / "docs" / "pretrained" / "cifar10-16" / "diagnose.json").read_text())
    assert "L_CE carries {:.2f} ± {:.2f} of at most 2.30 nats, L_Total {:.2f} ± {:.2f},".format(
        *(v for key in ("ce", "total") for v in carried(tables[f"classifier-{key}"], 0.01, 25.0))) in text
    for name, result in json.loads((HERE / "docs" / "results" / "cifar10-16-real.json").read_text()).items():
        n, reference, numbers = result["n"], result["reference"], result["numbers"]
        cells = [f"{n:,}", f"{reference:,}", f"{numbers['fid']['value']:.2f}", *(f"{numbers[key]['value']:.3f}" for key in ev.PRDC)]
        assert next(r for r in rows if r[0] == name)[1:] == [*cells, f"{1 - (reference / (reference + n)) ** 3:.3f}"]
    for name, cells in seed_rows().items():
        assert next(r for r in rows if r[0] == name and len(r) == 10)[1:] == cells
    for target in re.findall(r"\]\((docs/[^)]+)\)", text):
        assert (HERE / target).exists(), target
    for name in re.findall(r"`(test_\w+)`", text):
        assert name in globals(), name


def test_the_weights_in_the_box_draw_what_the_readme_says(tmp_path):
    """Needs no data: the README's one command, its images judged by the other classifier in the box."""
    box = HERE / "docs" / "pretrained" / "fashion-16"
    command("sample.py", "--run", box, "--out", tmp_path, cwd=tmp_path)
    found = np.load(tmp_path / "samples-dlsm.npz")
    images = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).float() / 255
    guess = load_model(box / "classifier-ce.pt", kind="classifier")(images, torch.full((100,), 0.01)).argmax(1).numpy()
    stated = json.loads((HERE / "docs" / "results" / "fashion-16.json").read_text())["box"]["recognised"]
    assert abs((guess == found["labels"]).sum() - stated) <= 2 and f"{stated} of the 100" in (HERE / "README.md").read_text()
    assert sum(file.stat().st_size for file in box.iterdir()) < 10 * 2**20
