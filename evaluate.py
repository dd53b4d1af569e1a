"""Compares samples with real images: FID, IS, precision, recall, density, coverage, the same class by class, and CAS.

    python evaluate.py runs/cifar10/samples-base.npz runs/cifar10/samples-dlsm.npz --data cifar10

Reads sample files (our .npz, guided-diffusion's, folders of pictures), prints the paper's Table 2 for them, a column each, and
writes evaluation.json with the recipe of each number, and Figure 4, beside the first. Features and classifiers are kept in
ROOT/features by content: nothing is computed twice. In Python: evaluate(images, labels, data="fashion", features="own").
"""
import contextlib
import functools
import hashlib
import json
import math
import pathlib
import sys
import urllib.request

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from models import NoisyResNet, UserError, checksum, load_checkpoint, save_checkpoint, write_whole
from sample import chart, npz_bytes
from train_classifier import ce_loss
from train_score import (Parser, Progress, check_images, fit, image_draw, import_torchvision, load_images, mix, number, read_folder,
                         read_npz, run, run_folder, say, set_up, shared_flags)

OWN = dict(depth=18, width=16, steps=2000, batch=128, lr=2e-3, cosine=True)  # ours: minutes on a CPU for 16×16 images
CAS = dict(batch=150, lr=2e-4, cosine=False)  # Appendix A.6.3; it names neither steps (--cas-steps) nor augmentation (none here)
CLEAN = 0.01  # the σ that these classifiers of images without noise are told
METRICS = ("fid", "is", "prdc", "classwise", "cas")
PRDC = ("precision", "recall", "density", "coverage")
ROWS = {  # of the table, in the paper's order: title, digits, which value is best
    "fid": ("FID", 2, min), "is": ("IS", 2, max), "is_splits": ("IS, ten splits", 2, max),
    **{key: (key.capitalize(), 3, max) for key in PRDC}, "cas": ("CAS", 3, max), "cas_real": ("CAS of real images", 3, None),
    "accuracy": ("Class accuracy", 3, max), **{f"cw_{key}": (f"(CW) {key.capitalize()}", 3, max) for key in PRDC}}
PAPER = {  # Table 2; the rows are ROWS without the three that it does not have
    "cifar10": {"base": (4.10, 9.08, 0.67, 0.61, 1.05, 0.80, 0.38, 0.51, 0.59, 0.63, 0.60),
                "scaling": (12.48, 9.37, 0.75, 0.49, 1.36, 0.75, 0.46, 0.70, 0.42, 1.23, 0.66),
                "ours": (2.25, 9.90, 0.65, 0.62, 0.96, 0.81, 0.58, 0.56, 0.61, 0.76, 0.71)},
    "cifar100": {"base": (4.52, 11.53, 0.62, 0.62, 0.84, 0.71, 0.15, 0.33, 0.68, 0.30, 0.38),
                 "scaling": (12.58, 11.59, 0.65, 0.52, 0.93, 0.61, 0.24, 0.59, 0.41, 0.78, 0.51),
                 "ours": (3.86, 11.62, 0.61, 0.63, 0.82, 0.71, 0.28, 0.42, 0.68, 0.43, 0.52)}}
WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
WEIGHTS_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{WEIGHTS}"
WEIGHTS_SHA = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

# ---------------------------------------------------------------------------- precision, recall, density, coverage

TILE = 2048  # points a side of a block of distances: 16 MB
SPARE = 8  # neighbours kept beyond the k-th, in case rounding changed their order


def prdc(real, fake, k=3, real_radii=None):
    """Precision, recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020) of two sets of points → dict.

    B(x) is the open ball around x out to its k-th nearest neighbour in its own set, x not counted. precision: share of fakes
    in some B(real). recall: share of reals in some B(fake). density: pairs of a fake in a B(real), over k · fakes. coverage:
    share of reals with a fake in their ball. Arrays or tensors, a point a row; `real_radii` as knn_radii gives them. Exact,
    as brute force in float64; time quadratic, memory linear.
    """
    real, fake = as_points(real, k), as_points(fake, k)
    if real.shape[1] != fake.shape[1]:
        raise UserError(f"prdc: real points have {real.shape[1]} coordinates, fake ones {fake.shape[1]}")
    real_radii, fake_radii = knn_radii(real, k) if real_radii is None else real_radii, knn_radii(fake, k)
    in_balls = torch.zeros(len(fake), dtype=torch.int64, device=real.device)  # how many B(real) each fake is in
    covered, recalled = torch.zeros(2, len(real), dtype=torch.bool, device=real.device)
    center = real.mean(0)
    for i in range(0, len(real), TILE):
        for j in range(0, len(fake), TILE):
            radii = real_radii[i : i + TILE, None], fake_radii[None, j : j + TILE]
            for dtype in precisions(real):
                a, b = block(real, center, dtype, i), block(fake, center, dtype, j)
                found = [pairs_inside(squared_distances(a, b), radius, a, b) for radius in radii]
                if None not in found:
                    break
            (rows, columns), (recalled_rows, _) = found
            in_balls[j : j + TILE] += torch.bincount(columns, minlength=len(b[0]))
            covered[rows + i], recalled[recalled_rows + i] = True, True
    precision, recall, coverage = (mask.double().mean().item() for mask in (in_balls > 0, recalled, covered))
    return dict(precision=precision, recall=recall, density=in_balls.sum().item() / (k * len(fake)), coverage=coverage)


def as_points(values, k):
    values = torch.as_tensor(values).detach()
    values = values.reshape(len(values), -1).to(values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float64)
    if not values.sum(0).isfinite().all():
        raise UserError("prdc: the points hold NaN or infinite values")
    if len(values) <= k or k < 1:
        raise UserError(f"prdc: k = {k} neighbours need k ≥ 1 and at least k + 1 points, there are {len(values)}")
    return values


def precisions(points):
    """Products are taken in float32, and again in float64 where its digits do not do; in few dimensions at once in float64."""
    return (torch.float32, torch.float64)[points.shape[1] < 64 :]


def block(points, center, dtype, start):
    """Points from start on: around a center, where products cancel less, and in `dtype`; their squared norms; as they are."""
    exact = points[start : start + TILE]
    near = (exact - center.to(torch.promote_types(exact.dtype, dtype))).to(dtype)
    return near, near.square().sum(1), exact


def squared_distances(a, b):
    """‖a‖² + ‖b‖² − 2ab of all pairs of two blocks: one matrix product, off by at most `rounding`."""
    return torch.addmm(b[1], a[0], b[0].T, alpha=-2).add_(a[1][:, None])


def rounding(d, a2, b2):
    """√d ε (‖a‖² + ‖b‖²): several times the largest error seen in a product over d coordinates."""
    return max(d, 16) ** 0.5 * torch.finfo(a2.dtype).eps * (a2 + b2)


def pair_distances(a, b, i, j):
    """‖a_i − b_j‖² of some pairs, from differences in float64."""
    parts = [(a[u].double() - b[v].double()).square().sum(1) for u, v in zip(i.split(1024), j.split(1024))]
    return torch.cat(parts) if parts else i.double()


def knn_radii(points, k):
    """Squared distance of each point to its k-th nearest other one; exact distances decide the order around the k-th place."""
    n, m, center = len(points), min(k + SPARE, len(points) - 1), points.mean(0)
    for dtype in precisions(points):
        best, index = torch.full((n, m), math.inf, dtype=dtype), torch.zeros(n, m, dtype=torch.int64)
        best, index, norms = best.to(points.device), index.to(points.device), []
        for i in range(0, n, TILE):
            a = block(points, center, dtype, i)
            norms.append(a[1])
            for j in range(i, n, TILE):  # distances are symmetric: half of the blocks do
                distance = squared_distances(a, block(points, center, dtype, j) if j > i else a)
                if i == j:
                    distance.fill_diagonal_(math.inf)  # a point is not its own neighbour
                for row, column, values in ((i, j, distance), (j, i, distance.T.contiguous()))[: 1 + (i != j)]:
                    rows = slice(row, row + TILE)
                    value, at = values.topk(min(m, values.shape[1]), largest=False)
                    value, at = torch.cat([best[rows], value], 1), torch.cat([index[rows], at + column], 1)
                    best[rows], order = value.topk(m, largest=False)
                    index[rows] = at.gather(1, order)
        norms = torch.cat(norms)
        error = rounding(points.shape[1], norms[:, None], norms[index])
        unsure = (best - best[:, k - 1 : k]).abs() <= error + error[:, k - 1 : k]
        best = best.double()
        best[unsure] = pair_distances(points, points, unsure.nonzero()[:, 0], index[unsure])
        radii = best.sort(1).values[:, k - 1]
        if not (unsure[:, -1] & (radii > 0)).any() or m == n - 1:  # else a neighbour beyond the spare ones may be nearer
            break
    return radii


def pairs_inside(distance, radius, a, b):
    """Pairs (i, j) with distance < radius, both squared; None if float32 leaves too many undecided. Exact distances decide the rest.

    The same pair computed twice may differ in the last digit and must not be inside its own radius: hence 1e-12.
    """
    d, limit = a[0].shape[1], radius + rounding(a[0].shape[1], a[1].max(), b[1].max())
    flat = (distance < limit.to(distance.dtype)).view(-1).nonzero()[:, 0]
    i, j = flat // distance.shape[1], flat % distance.shape[1]
    radius, distance = radius.expand(distance.shape)[i, j], distance.view(-1)[flat]
    inside = distance < radius
    unsure = (distance - radius).abs() <= rounding(d, a[1][i], b[1][j])
    unsure &= radius > 0  # as an open ball of radius 0 is empty
    if distance.dtype == torch.float32 and unsure.sum() > 16 * TILE:
        return None
    inside[unsure] = pair_distances(a[2], b[2], i[unsure], j[unsure]) < radius[unsure] * (1 - 1e-12)
    return i[inside & (radius > 0)], j[inside & (radius > 0)]


# ---------------------------------------------------------------------------- FID and IS


def moments(features):
    """Mean and covariance (over n − 1) in float64, in one pass over blocks of rows (Chan et al. 1983)."""
    n, mean, scatter = 0, 0.0, 0.0
    for part in torch.as_tensor(features).split(TILE):
        part = part.double()
        m, center = len(part), part.mean(0)
        step, part = center - mean, part - center
        scatter = scatter + part.T @ part + (n * m / (n + m)) * torch.outer(step, step)
        mean, n = mean + step * (m / (n + m)), n + m
    return mean, scatter / max(n - 1, 1)


def frechet_distance(mu1, cov1, mu2, cov2):
    """‖μ1 − μ2‖² + tr(S1 + S2 − 2 (S1 S2)^½) of two Gaussians (Heusel et al. 2017), in float64.

    tr (S1 S2)^½ is the sum of the roots of the eigenvalues of S1^½ S2 S1^½, which is symmetric. The null space of S1, where
    there are fewer samples than features, is left out: it adds nothing, and the root would magnify its rounding errors.
    """
    mu1, cov1, mu2, cov2 = (torch.as_tensor(v).double() for v in (mu1, cov1, mu2, cov2))
    values, vectors = torch.linalg.eigh(cov1)
    keep = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
    root = vectors[:, keep] * values[keep].sqrt()
    overlap = torch.linalg.eigvalsh(root.T @ cov2 @ root).clamp(min=0).sqrt().sum()
    return max(((mu1 - mu2).square().sum() + cov1.trace() + cov2.trace() - 2 * overlap).item(), 0.0)


def inception_score(logits, splits=10):
    """exp E KL(p(y|x) ‖ p(y)) (Salimans et al. 2016): mean and deviation over random parts; splits=1: over all samples.

    KL = Σ p log p − Σ p̄ log p̄, in float64. The parts are the same whatever order the samples come in.
    """
    logits, generator, scores = torch.as_tensor(logits), torch.Generator().manual_seed(0), []
    if len(logits) < splits:
        raise UserError(f"inception_score: {len(logits)} samples cannot make {splits} parts")
    direction = torch.randn(logits.shape[1], generator=generator, dtype=torch.float64)
    order = torch.cat([part.double() @ direction for part in logits.split(TILE)]).argsort()
    for part in order[torch.randperm(len(logits), generator=generator)].tensor_split(splits):
        mean, negentropy = 0.0, 0.0
        for rows in part.split(TILE):
            p = logits[rows].double().softmax(1)
            mean, negentropy = mean + p.sum(0) / len(part), negentropy + torch.xlogy(p, p).sum() / len(part)
        scores.append((negentropy - torch.xlogy(mean, mean).sum()).exp())
    return torch.stack(scores).mean().item(), torch.stack(scores).std(correction=0).item()


# ---------------------------------------------------------------------------- networks


def resize_for_inception(images, resize):
    """uint8 → 299×299, three channels, about −1 to 1.

    "tf" is TensorFlow's old bilinear rule (source = target × size / 299, no half-pixel centres), then (x − 128) / 128: the
    paper's FID. "torch" is pytorch-fid's: today's rule, then 2x − 1.
    """
    x = images.expand(-1, 3, -1, -1).float()
    if resize == "torch":
        return 2 * F.interpolate(x / 255, (299, 299), mode="bilinear", align_corners=False) - 1
    for dim in (2, 3):
        at = torch.arange(299, device=x.device) * (x.shape[dim] / 299)
        low = at.long()
        a, b = x.index_select(dim, low), x.index_select(dim, (low + 1).clamp(max=x.shape[dim] - 1))
        x = a + (b - a) * (at - low).view(-1, *[1] * (3 - dim))
    return (x - 128) / 128


def inception_weights(given, root):
    """The path of the weights, given or in ROOT/features and fetched if need be, and their sha256."""
    path = pathlib.Path(given or pathlib.Path(root) / "features" / WEIGHTS)
    fetch = not given and not path.exists()
    try:
        if fetch:
            say(f"fetching {WEIGHTS_URL} (96 MB) to {path}")
        with urllib.request.urlopen(WEIGHTS_URL, timeout=30) if fetch else open(path, "rb") as file:
            data = file.read()
    except Exception as error:  # no network, a proxy's refusal, a cut connection, no such file
        raise UserError(f"FID's Inception weights cannot be had ({error}); get {WEIGHTS_URL} and put it at {path}, or name it with "
                        "--weights; --features own needs none") from None
    sha = hashlib.sha256(data).hexdigest()
    if sha != WEIGHTS_SHA and not given:
        cure = "not kept, try again" if fetch else "delete it, and it is fetched again"
        raise UserError(f"{WEIGHTS_URL if fetch else path}: damaged, its sha256 is not {WEIGHTS_SHA[:8]}…; {cure}")
    if sha != WEIGHTS_SHA:
        say(f"warning: --weights {path}: sha256 {sha[:8]}…, not FID's {WEIGHTS_SHA[:8]}…; the numbers compare with nobody else's")
    if fetch:
        write_whole(path, data)
    return path, sha


def load_inception(path):
    """FID's Inception on torchvision's blocks. Called, it gives the features; the logits for IS leave out the last bias.

    Its arithmetic is not torchvision's: average pools leave the padding out of the mean, the last block has a max pool. The
    blocks pool inside their forward, so a block's input is noted and its pool branch handed the right pool of that.
    """
    settings = dict(weights=None, num_classes=1008, aux_logits=False, transform_input=False, init_weights=False)
    net = import_torchvision().models.inception_v3(**settings)
    try:
        net.load_state_dict(dict(load_checkpoint(path)))
    except (RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: not FID's Inception ({' '.join(str(error).split())[:90]}…); the usual file is {WEIGHTS}") from None
    for name, part in net.named_children():
        if hasattr(part, "branch_pool"):
            pool = nn.MaxPool2d(3, 1, 1) if name == "Mixed_7c" else nn.AvgPool2d(3, 1, 1, count_include_pad=False)
            part.register_forward_pre_hook(lambda part, inputs: setattr(part, "seen", inputs[0]))
            part.branch_pool.register_forward_pre_hook(lambda _, inputs, part=part, pool=pool: (pool(part.seen),))
    net.head, net.fc = net.fc, nn.Identity()
    return net.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # three times as fast on a CPU


class ResNet(nn.Module):
    """torchvision's ResNet with its ImageNet stem, for CAS; called as our networks are."""

    def __init__(self, model, classes):
        super().__init__()
        self.config = dict(model=model, classes=classes)
        self.net = getattr(import_torchvision().models, model)(num_classes=classes)

    def forward(self, x, sigma):
        return self.net(2 * x.expand(-1, 3, -1, -1) - 1)


# ---------------------------------------------------------------------------- samples against real images


class Evaluation:
    """The real images, their features and the settings, shared by all sample files; each made when it is first needed."""

    def __init__(self, args):
        self.args, self.device, self.folder = args, set_up(args), pathlib.Path(args.root) / "features"
        self.metrics = set(METRICS if args.metrics == "all" else args.metrics.split(","))
        if not self.metrics <= set(METRICS):
            raise UserError(f"--metrics {args.metrics}: must be all, or some of {','.join(METRICS)}")
        self.needs_real = args.features == "own" or args.save_stats or self.metrics - ({"is", "fid"} if args.stats else {"is"})

    @functools.cache
    def images(self, split="train"):
        return load_images(self.args.data, split, self.args.size, self.args.root)

    @functools.cached_property
    def real_features(self):
        return self.features(self.images()[0], "real images")[0]

    @functools.cached_property
    def reference(self):
        """Mean and covariance for FID: of the real features, or from a file of pytorch-fid's kind."""
        path, d = self.args.stats, self.extractor[1]
        if not path:
            return moments(self.real_features)
        found = read_npz(path)
        mu, cov = (np.asarray(found.get(key, np.nan)) for key in ("mu", "sigma"))
        if mu.shape != (d,) or cov.shape != (d, d) or not np.isfinite(mu).all() or not np.isfinite(cov).all():
            raise UserError(f"--stats {path}: holds {', '.join(f'{k} {v.shape}' for k, v in found.items())}; these features need "
                            f"finite mu ({d},) and sigma ({d}, {d}), as --save-stats writes them")
        return mu, cov

    @functools.cached_property
    def extractor(self):
        """What makes the features: its recipe, how many features, a function from uint8 images to features and logits."""
        if self.args.features == "inception":
            path, sha = inception_weights(self.args.weights, self.args.root)
            net = load_inception(path).to(self.device)

            def call(images):
                features = net(resize_for_inception(images, self.args.resize))
                return features, features @ net.head.weight.T

            return dict(features="inception", sha256=sha, resize=self.args.resize), 2048, call
        images, labels, names = self.images()
        net = self.trained("own", NoisyResNet, (OWN["depth"], len(names), OWN["width"], images.shape[1]), images, labels, OWN)

        def call(images):
            x = images.float() / 255
            features = net.features(x, x.new_full(x.shape[:1], CLEAN))
            return features, net.linear(features)

        about = dict(features="own", sha256=checksum(net.state_dict()), test_accuracy=self.accuracy(net), seed=self.args.seed, **OWN)
        return about, net.linear.in_features, call

    def trained(self, kind, network, config, images, labels, recipe):
        """A classifier trained by `fit` on images without noise; kept by content, so resumed and never trained twice."""
        seed = self.args.seed
        torch.manual_seed(mix(seed, kind))
        net = network(*config).to(self.device)
        settings = dict(recipe, seed=seed, config=net.config)
        path = self.folder / f"{kind}-{checksum([images, labels, settings])[:24]}.pt"
        draw = image_draw(images, labels, recipe["batch"], seed, CLEAN, CLEAN, flip=False)
        fit(net, draw, lambda x, sigma, y, z: ce_loss(net, x, sigma, y, 0.0), path, kind, settings, steps=recipe["steps"],
            lr=recipe["lr"], cosine=recipe["cosine"], seed=seed, device=self.device, restart=self.args.restart)
        return net.eval().requires_grad_(False)

    def accuracy(self, net):
        """Share of the real test images that a classifier puts into their class."""
        right, (images, labels, _) = 0, self.images("test")
        for x, y in zip(images.split(self.args.batch), labels.split(self.args.batch)):
            x = x.to(self.device).float() / 255
            right += (net(x, x.new_full(y.shape, CLEAN)).argmax(1).cpu() == y).sum().item()
        return right / len(images)

    def features(self, images, name):
        """Features and logits, kept by content, 5,000 images a file: a run that was stopped goes on."""
        about, _, call = self.extractor
        key, made, progress = [about["features"], about["sha256"], about.get("resize")], [], None
        for n, part in enumerate(images.split(5000)):
            path = self.folder / f"{about['features']}-{checksum([part, key])[:24]}.pt"
            try:
                made.append(load_checkpoint(path))
                continue
            except UserError:  # not there, or damaged
                progress = progress or Progress(len(images), 5000 * n, f"{name}: image")
            rows = []
            for i, batch in enumerate(part.split(self.args.batch)):
                with torch.no_grad():
                    rows.append([v.cpu() for v in call(batch.to(self.device))])
                progress(5000 * n + self.args.batch * i + len(batch))
            made.append(dict(zip(("features", "logits"), map(torch.cat, zip(*rows)))))
            if not made[-1]["features"].isfinite().all():
                raise UserError(f"{name}: {about['features']} features that are not finite; the extractor's weights are damaged")
            save_checkpoint(path, made[-1])
        return tuple(torch.cat([m[key] for m in made]) for key in ("features", "logits"))

    def check(self, where, images, labels=None):
        """Samples, a tensor (N, C, H, W) or an array (N, H, W, C) → tensors, labels perhaps None; or an error with its cure."""
        args, unlabelled = self.args, labels is None
        images = images.detach().cpu().movedim(1, -1).numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
        if images.dtype.kind == "f" and images.size:
            low, high = images.min(), images.max()
            if not np.isfinite([low, high]).all():
                raise UserError(f"{where}: the images hold NaN or infinite values; the sampler failed, draw them again")
            cure = "x.clip(0, 255)" if low < -1 or high > 1 else "(127.5 * (x + 1))" if low < 0 else "(255 * x)"
            raise UserError(f"{where}: the images are {images.dtype}, {low:.3g} to {high:.3g}; save {cure}.round().astype('uint8')")
        values = np.unique(images[:1000]).tolist()
        if values and max(values) <= 1 or values == [0, 1, 255]:
            raise UserError(f"{where}: the pixel values are {values}: floats from 0 or −1 to 1, cast to uint8? Scale to 0…255 first")
        labels = np.zeros(len(images), int) if unlabelled else np.asarray(labels)
        images, labels = check_images(where, dict(images=images, labels=labels))
        least = max(2, 10 * ("is" in self.metrics), (args.k + 1) * ("prdc" in self.metrics))
        if len(images) < least:
            raise UserError(f"{where}: {len(images)} samples; --metrics {args.metrics} with --k {args.k} need at least {least}")
        if not self.needs_real:
            return images, None
        real, real_labels, names = self.images()
        if images.shape[1:] != real.shape[1:]:
            a, b = ("×".join(map(str, v.shape[1:])) for v in (images, real))
            cure = f"--size {images.shape[2]} resizes those" if images.shape[1] == real.shape[1] else "see --data"
            raise UserError(f"{where}: the samples are {a} (channels first), the images of --data {args.data} {b}; {cure}")
        if unlabelled:
            return images, None
        counts = torch.bincount(labels, minlength=len(names))
        if len(counts) > len(names):
            raise UserError(f"{where}: labels up to {len(counts) - 1}, but --data {args.data} has {len(names)} classes; see --data")
        least = args.k + 1 if "classwise" in self.metrics else int("cas" in self.metrics)
        for count, what in ((counts, "samples"), (torch.bincount(real_labels), "real images")):
            if count.min() < least:
                c = count.argmin().item()
                raise UserError(f"{where}: class {c} ({names[c]}) has {count[c]} {what}; class-wise metrics (k = {args.k}) and CAS need "
                                f"{least} in every class: draw more, or leave these out with --metrics fid,is,prdc")
        return images, labels

    def measure(self, images, labels=None, name="samples"):
        """All numbers but CAS → {key: dict(value, recipe...)}."""
        numbers, k, data = {}, self.args.k, self.args.data
        if self.metrics == {"cas"}:
            return numbers
        features, logits = self.features(images, name)
        place = self.device if self.device.type == "cuda" else "cpu"  # prdc needs float64, MPS has none

        def put(values, **recipe):
            numbers.update({key: dict(value=value, n=len(images), **recipe, **self.extractor[0]) for key, value in values.items()})

        if "fid" in self.metrics:
            reference = self.args.stats or f"{data}, {len(self.images()[0])} training images"
            put(dict(fid=frechet_distance(*moments(features), *self.reference)), reference=reference)
        if "is" in self.metrics:
            mean, deviation = inception_score(logits)
            put({"is": inception_score(logits, 1)[0]}, splits=1)
            put(dict(is_splits=mean), splits=10, deviation=deviation)
        if "prdc" in self.metrics:
            real = self.real_features
            say(f"{name}: precision, recall, density, coverage of {len(features)} samples and {len(real)} real images")
            put(prdc(real.to(place), features.to(place), k), k=k, reference=f"{data}, {len(real)} training images")
        if "classwise" in self.metrics and labels is not None:
            _, real_labels, names = self.images()
            parts = ((self.real_features[real_labels == c].to(place), features[labels == c].to(place)) for c in range(len(names)))
            table = dict(zip(names, (prdc(*part, k) for part in parts)))
            for key in PRDC:
                values = {name: row[key] for name, row in table.items()}
                mean = sum(values.values()) / len(values)
                put({f"cw_{key}": mean}, k=k, reference=f"{data}, the training images of each class", classes=values)
            if self.args.features == "own":
                put(dict(accuracy=(logits.argmax(1) == labels).double().mean().item()))
        return numbers

    def cas(self, images, labels):
        """Classification Accuracy Score (Ravuri & Vinyals 2019): accuracy on real test images after training on these alone."""
        recipe = dict(CAS, steps=self.args.cas_steps)
        net = self.trained("cas", ResNet, (self.args.cas_model, len(self.images()[2])), images, labels, recipe)
        return dict(value=self.accuracy(net), n=len(images), model=self.args.cas_model, seed=self.args.seed, **recipe)


def evaluate(samples, labels=None, **flags):
    """Numbers of samples in memory → {key: value}; flags as keywords: evaluate(images, labels, data="fashion", features="own")."""
    args = flags_parser().parse_args([])
    if unknown := set(flags) - set(vars(args)):
        raise UserError(f"evaluate: no flag {min(unknown)}; there are {', '.join(vars(args))}")
    vars(args).update(flags)
    evaluation = Evaluation(args)
    samples, labels = evaluation.check("samples", samples, labels)
    numbers = evaluation.measure(samples, labels)
    if "cas" in evaluation.metrics and labels is not None:
        numbers.update(cas=evaluation.cas(samples, labels), cas_real=evaluation.cas(*evaluation.images()[:2]))
    return {key: number["value"] for key, number in numbers.items()}


# ---------------------------------------------------------------------------- files, table, command line


def read_samples(path, names):
    """Images, labels or None, recipe: of our .npz, guided-diffusion's, or a folder of pictures, in class folders or flat."""
    if path.is_dir():
        found, folders = read_folder(path, None)
        if folders == ["."] or not names:
            return found["images"], None, {}
        known = dict(zip(names, range(len(names)))) if set(folders) <= set(names) else {v: int(v) for v in folders if v.isdecimal()}
        if wrong := set(folders) - set(known):
            raise UserError(f"{path}: sub-folder {min(wrong)!r} is no class of --data; name them {', '.join(names[:3])}… or 0, 1, 2…")
        return found["images"], np.array([known[name] for name in folders])[found["labels"]], {}
    found = read_npz(path)
    images = found.get("images", found.get("arr_0"))
    if images is None:
        hint = "FID statistics go to --stats" if "mu" in found else "expected images and labels, or arr_0 and arr_1"
        raise UserError(f"{path}: holds {', '.join(found) or 'nothing'}; {hint}")
    try:
        recipe = dict(json.loads(str(found.get("recipe", "{}"))))
    except (ValueError, TypeError):
        raise UserError(f"{path}: its recipe is not a JSON object; the file is damaged, draw the samples again") from None
    return images, found.get("labels", found.get("arr_1")), recipe


def markdown(columns, fid):
    """The table: rows as in the paper, one column a file, the best of ours and the best of the paper's in bold."""
    lines = ["| | | " + " | ".join(columns) + " |", "| --- | --- |" + " ---: |" * len(columns)]
    ours = [name for name in columns if not name.endswith("(paper)")]
    for key, (title, digits, best) in ROWS.items():
        cells = {name: numbers[key] for name, numbers in columns.items() if key in numbers}
        texts = {name: f"{cell['value']:.{cell.get('digits', digits)}f}" for name, cell in cells.items()}
        for group in (set(cells) & set(ours), set(cells) - set(ours)):
            top = best and len(group) > 1 and best(float(texts[name]) for name in group)
            texts.update({name: f"**{texts[name]}**" for name in group if best and len(group) > 1 and float(texts[name]) == top})
        if "deviation" in next(iter(cells.values()), {}):
            texts = {name: f"{text} ± {cells[name]['deviation']:.2f}" for name, text in texts.items()}
        if key == "fid":
            counts = {cells[name]["n"] for name in ours if name in cells}
            title = f"{fid}@{min(counts, default=0)}" if len(counts) < 2 else f"{fid}@n"
            texts.update({name: f"{texts[name]} @{cells[name]['n']}" for name in ours if len(counts) > 1})
        if set(cells) & set(ours):
            arrow = {min: "↓", max: "↑"}.get(best, "")
            lines.append(f"| {title} | {arrow} | " + " | ".join(texts.get(name, "–") for name in columns) + " |")
    return "\n".join(lines)


def report(files, evaluation, out):
    """Writes evaluation.json and Figure 4, the sorted class-wise differences to the first file → the table with notes."""
    args, (about, d) = evaluation.args, ({}, 0) if evaluation.metrics == {"cas"} else evaluation.extractor[:2]
    fid, notes, columns = "FD" if args.features == "own" else "FID", [], {name: file["numbers"] for name, file in files.items()}
    for name, file in files.items():
        if "fid" in evaluation.metrics and file["n"] < 10_000:
            trouble = f"fewer than {d + 1} samples, not comparable" if file["n"] <= d else "few samples, compare only with the same n"
            notes.append(f"{fid}@{file['n']} of {name}: {trouble}")
        if file["recipe"].get("data", args.data) != args.data:
            notes.append(f"{name} was drawn for {file['recipe']['data']}, not for --data {args.data}")
    whole = dict(data=args.data, size=args.size, features=about, notes=notes, files=files)
    write_whole(out / "evaluation.json", json.dumps(whole, indent=1).encode())
    first, *others = [name for name in files if "cw_recall" in columns[name]] or [None]
    for name in others:
        pairs = [(key, *(columns[v][f"cw_{key}"]["classes"] for v in (first, name))) for key in PRDC]
        panels = [dict(title=f"Class-wise {key}", x="classes, sorted", y=f"{name} minus {first}", bars=sorted((b[c] - a[c] for c in a), reverse=True))
                  for key, a, b in pairs]
        chart(out / f"classwise-{name}-minus-{first}.png", panels, columns=2)
    if args.paper:
        keys = [key for key in ROWS if key not in ("is_splits", "cas_real", "accuracy")]
        for name, values in PAPER[args.data].items():
            columns[f"{name} (paper)"] = {key: dict(value=v, digits=2) for key, v in zip(keys, values)}
    what = {"inception": f"resize {args.resize}", "own": f"test accuracy {about.get('test_accuracy', 0):.4f}"}[args.features]
    title = f"{args.data}, {args.features} features (sha256 {about.get('sha256', '')[:8]}, {what}), k = {args.k}"
    return "\n\n".join([title, markdown(columns, fid), *notes])


def flags_parser():
    parser = Parser(__doc__)
    shared_flags(parser, None)
    parser.add_argument("samples", nargs="*", type=pathlib.Path, help="sample files or folders of pictures; Figure 4 compares with the "
                        "first (default: runs/RUN/samples-*.npz)")
    parser.flag("--metrics", "all", f"some of {','.join(METRICS)}; cas takes longest: a training a file, and one on real images")
    parser.flag("--features", "inception", "FID's Inception, or own: a ResNet trained here on the real images", choices=["inception", "own"])
    parser.flag("--weights", None, f"Inception's weights (default: ROOT/features/{WEIGHTS}, fetched if need be)")
    parser.flag("--resize", "tf", "to Inception's 299×299: tf (the paper's FID) or torch (pytorch-fid's)", choices=["tf", "torch"])
    parser.flag("--stats", None, "FID's reference: an .npz with mu and sigma, in place of the training images")
    parser.flag("--save-stats", None, "write such a file, of the training images", pathlib.Path)
    parser.flag("--k", 3, "neighbours for precision, recall, density and coverage", number(int, 1, 1000))
    parser.flag("--batch", 100, "images a pass through the extractor", number(int, 1, 10**5))
    parser.flag("--cas-model", "resnet50", "torchvision's network for CAS", choices=["resnet18", "resnet34", "resnet50"])
    parser.flag("--cas-steps", 10_000, "training steps for CAS, of 150 images", number(int, 1, 10**9))
    parser.flag("--paper", False, "the paper's columns beside ours (cifar10, cifar100)")
    parser.flag("--out", None, "folder of evaluation.json and the pictures (default: that of the first file)", pathlib.Path)
    return parser


def main():
    args = flags_parser().parse_args()
    if args.paper and args.data not in PAPER:
        raise UserError(f"--paper: the paper has numbers for {' and '.join(PAPER)}, not for --data {args.data}")
    paths, files, samples = args.samples or sorted(run_folder(args).glob("samples-*.npz")), {}, {}
    if not paths:
        raise UserError(f"{run_folder(args)}: has no samples-*.npz; python sample.py makes them, or name your files")
    out = args.out or paths[0].absolute().parent
    with contextlib.redirect_stdout(sys.stderr):  # only the table goes to stdout
        evaluation = Evaluation(args)
        for path in paths:
            images, labels, recipe = read_samples(path, evaluation.images()[2] if evaluation.needs_real else [])
            name = path.stem.removeprefix("samples-")
            name = f"{path.absolute().parent.name}-{name}" if name in files else name
            samples[name] = evaluation.check(path, images, labels)
            files[name] = dict(path=str(path), n=len(images), recipe=recipe)
        for name, file in files.items():
            file["numbers"] = evaluation.measure(*samples[name], name)
        if args.save_stats:
            mu, cov = moments(evaluation.real_features)
            write_whole(args.save_stats, npz_bytes(mu=mu.numpy(), sigma=cov.numpy()))
        table, labelled = report(files, evaluation, out), [name for name in files if samples[name][1] is not None]
        if "cas" in evaluation.metrics and labelled:
            say(f"{table}\n\nCAS: {len(labelled) + 1} trainings of {args.cas_model} for {args.cas_steps} steps")
            real = evaluation.cas(*evaluation.images()[:2])
            for name in labelled:
                files[name]["numbers"].update(cas=evaluation.cas(*samples[name]), cas_real=real)
            table = report(files, evaluation, out)
        say(f"{out / 'evaluation.json'} has the recipe of each number")
    print(table)


if __name__ == "__main__":
    run(main)
