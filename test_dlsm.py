"""The paper as tests: each equation and claim, then the networks, the data and the four commands as a user runs them.

    pytest test_dlsm.py
"""
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from models import EMA, NCSNpp, NoisyResNet, ToyNet, UserError, fold_batchnorm, load_checkpoint, load_model, save_checkpoint, sigma_at
from sample import heun_sampler, pc_sampler, posterior_score, sigma_grid
from train_classifier import PRESETS as CLASSIFIER_PRESETS
from train_classifier import ce_loss, diagnose, dlsm_loss, likelihood_score, total_loss
from train_score import PRESETS as SCORE_PRESETS
from train_score import dsm_loss, fit, image_draw, load_images

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
    for name in ("score.pt", "classifier-total.pt"):
        one, two = (load_checkpoint(tmp_path / n / name) for n in "12")
        for key, value in one["weights"].items():
            assert torch.allclose(value, two["weights"][key], atol=1e-4), key


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
    assert "not a readable checkpoint" in train_classifier(shapes, tmp_path, 3, "ce", "--score", shapes, code=2)


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


def test_diagnose_command_writes_table_picture_and_scales(trained, shapes):
    out = command("train_classifier.py", "--data", shapes, "--diagnose", "--diagnose-n", 80, cwd=trained)
    assert "| σ | ce: accuracy" in out and len([line for line in out.splitlines() if line.startswith("| ")]) == 12
    tables = json.loads((trained / "runs" / "small" / "diagnose.json").read_text())
    assert {"classifier-ce", "classifier-total"} <= set(tables) and len(tables["classifier-ce"]) == 10
    assert Image.open(trained / "runs" / "small" / "diagnose.png").size[0] > 800


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
