"""Compares samples with real images: FID, IS, precision, recall, density, coverage, the same class by class, and CAS.

    python evaluate.py runs/cifar10/samples-base.npz runs/cifar10/samples-dlsm.npz --data cifar10

Reads sample files (our .npz, guided-diffusion's, folders of pictures), prints the paper's Table 2 for them, a column each, and
writes it as evaluation.md, the recipe of each number as evaluation.json, Figure 4, and the first images of each file in a row
of their own (side-by-side.png), all beside the first file. Features and classifiers are kept in ROOT/features by content:
nothing is computed twice. In Python: evaluate(images, labels, ...).
"""
import functools
import hashlib
import json
import math
import pathlib
import urllib.request

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from models import NoisyResNet, UserError, checksum, load_checkpoint, save_checkpoint, write_whole
from sample import chart, npz_bytes, save_grid
from train_classifier import ce_loss
from train_score import (Parser, Progress, check_images, fit, image_draw, import_torchvision, load_images, mix, number,
                         read_folder, read_npz, run, run_folder, say, set_up, shared_flags)

OWN = dict(depth=18, width=16, batch=128, lr=2e-3, cosine=True)  # ours: minutes on a CPU for 16×16 images
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
PRECISIONS = (torch.float32, torch.float64)  # of the products: the second where the digits of the first do not do
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
            a, b = real[i : i + TILE], fake[j : j + TILE]
            for dtype in PRECISIONS[a.shape[1] < 64 :]:
                block = squared_distances(a, b, center, dtype)
                near_real = pairs_inside(*block, real_radii[i : i + TILE, None], a, b)
                near_fake = pairs_inside(*block, fake_radii[None, j : j + TILE], a, b)
                if near_real and near_fake:
                    break
            in_balls[j : j + TILE] += torch.bincount(near_real[1], minlength=len(b))
            covered[near_real[0] + i] = recalled[near_fake[0] + i] = True
            del block  # before the next is made
    precision, recall, coverage = (mask.double().mean().item() for mask in (in_balls > 0, recalled, covered))
    return dict(precision=precision, recall=recall, density=in_balls.sum().item() / (k * len(fake)), coverage=coverage)


def as_points(values, k):
    values = torch.as_tensor(values).detach()
    values = values.reshape(len(values), -1).to(values.dtype if values.dtype in PRECISIONS else torch.float64)
    if len(values) <= k or k < 1:
        raise UserError(f"prdc: k = {k} neighbours need k ≥ 1 and at least k + 1 points, there are {len(values)}")
    if not values.sum(0).isfinite().all():
        raise UserError("prdc: the points hold NaN or infinite values")
    return values


def squared_distances(a, b, center, dtype):
    """‖a‖² + ‖b‖² − 2ab of all pairs by one matrix product, around a center, where it cancels less; bounds of its error.

    The error of a pair is below the sum of its row's bound and its column's, √d ε ‖·‖²: several times the largest one seen.
    """
    a, b = ((v - center.to(torch.promote_types(v.dtype, dtype))).to(dtype) for v in (a, b))
    a2, b2 = (torch.linalg.vector_norm(v, dim=1).square() for v in (a, b))
    epsilon = max(a.shape[1], 16) ** 0.5 * torch.finfo(dtype).eps
    return torch.addmm(b2, a, b.T, alpha=-2).add_(a2[:, None]), epsilon * a2, epsilon * b2


def pair_distances(a, b, i, j):
    """‖a_i − b_j‖² of some pairs, from differences in float64."""
    parts = [(a[u].double() - b[v].double()).square().sum(1) for u, v in zip(i.split(256), j.split(256))]
    return torch.cat(parts) if parts else i.double()


def knn_radii(points, k):
    """Squared distance of each point to its k-th nearest other one; exact distances decide the order around the k-th place."""
    n, m, center = len(points), min(k + SPARE, len(points) - 1), points.mean(0)
    for dtype in PRECISIONS[points.shape[1] < 64 :]:
        best, error = points.new_full((n, m), math.inf, dtype=dtype), points.new_zeros(n, dtype=dtype)
        index = torch.zeros(n, m, dtype=torch.int64, device=points.device)
        for i in range(0, n, TILE):
            for j in range(i, n, TILE):  # distances are symmetric: half of the blocks do
                distance, error[i : i + TILE], _ = squared_distances(points[i : i + TILE], points[j : j + TILE], center, dtype)
                if i == j:
                    distance.fill_diagonal_(math.inf)  # a point is not its own neighbour
                for row, column, values in ((i, j, distance), (j, i, distance.T.contiguous()))[: 1 + (i != j)]:
                    rows = slice(row, row + TILE)
                    value, at = values.topk(min(m, values.shape[1]), largest=False)
                    value, at = torch.cat([best[rows], value], 1), torch.cat([index[rows], at + column], 1)
                    best[rows], order = value.topk(m, largest=False)
                    index[rows] = at.gather(1, order)
                del distance, values  # before the next are made
        bound = error[:, None] + error[index]
        unsure = (best - best[:, k - 1 : k]).abs() <= bound + bound[:, k - 1 : k]
        best = best.double()
        best[unsure] = pair_distances(points, points, unsure.nonzero()[:, 0], index[unsure])
        radii = best.sort(1).values[:, k - 1]
        if not (unsure[:, -1] & (radii > 0)).any() or m == n - 1:  # else a neighbour beyond the spare ones may be nearer
            break
    return radii


def pairs_inside(distance, row_error, column_error, radius, a, b):
    """Pairs (i, j) with distance < radius, both squared; exact distances decide near ties, or None if float32 leaves too many.

    The same pair computed twice may differ in the last digit and must not be inside its own radius: hence 1e-12.
    """
    limit = (radius + row_error.max() + column_error.max()).to(distance.dtype)
    flat = (distance < limit).view(-1).nonzero()[:, 0]
    i, j = flat // len(b), flat % len(b)
    radius, distance = radius.expand(distance.shape)[i, j], distance.view(-1)[flat]
    inside = (distance < radius) & (radius > 0)  # rounding can take a distance below 0
    unsure = ((distance - radius).abs() <= row_error[i] + column_error[j]) & (radius > 0)
    if distance.dtype == torch.float32 and unsure.sum() > 16 * TILE:
        return None
    inside[unsure] = pair_distances(a, b, i[unsure], j[unsure]) < radius[unsure] * (1 - 1e-12)
    return i[inside], j[inside]


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

    With S1 = L Lᵀ, tr (S1 S2)^½ is the sum of the roots of the eigenvalues of Lᵀ S2 L, which is symmetric. Cholesky's L is the
    quickest. With fewer samples than features there is none; then the null space of S1, which adds nothing, is left out, as the
    root would magnify its rounding errors.
    """
    mu1, cov1, mu2, cov2 = (torch.as_tensor(v).double() for v in (mu1, cov1, mu2, cov2))
    (root, failed), epsilon = torch.linalg.cholesky_ex(cov1), len(cov1) * torch.finfo(torch.float64).eps
    if failed or root.diagonal().min() ** 2 < epsilon * root.diagonal().max() ** 2:
        values, vectors = torch.linalg.eigh(cov1)
        keep = values > epsilon * values[-1]
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
        raise UserError(f"FID's Inception weights cannot be had ({error}); get {WEIGHTS_URL} and put it at {path}, or name it "
                        "with --weights; --features own needs none") from None
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
        trouble = " ".join(str(error).split())[:90]
        raise UserError(f"{path}: not FID's Inception ({trouble}…); the usual file is {WEIGHTS}") from None
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
        self.args, self.device, self.folder, self.radii = args, set_up(args), pathlib.Path(args.root) / "features", {}
        self.spared = args.metrics is None and self.device.type != "cuda"  # CAS, which would take hours
        args.metrics = args.metrics or ",".join(METRICS[: -1 if self.spared else None])
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
        recipe = dict(OWN, steps=self.args.own_steps)
        net = self.trained("own", NoisyResNet, (OWN["depth"], len(names), OWN["width"], images.shape[1]), images, labels, recipe)

        def call(images):
            x = images.float() / 255
            features = net.features(x, x.new_full(x.shape[:1], CLEAN))
            return features, net.linear(features)

        about = dict(features="own", sha256=checksum(net.state_dict()), test_accuracy=self.accuracy(net), seed=self.args.seed)
        return dict(about, **recipe), net.linear.in_features, call

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

    def compare(self, real, fake, part="all"):
        """prdc; the radii of the real points, most of its work where samples are few, serve all sample files."""
        real, fake = (v.to(self.device if self.device.type == "cuda" else "cpu") for v in (real, fake))  # float64: not on MPS
        if part not in self.radii:
            self.radii[part] = knn_radii(as_points(real, self.args.k), self.args.k)
        return prdc(real, fake, self.args.k, self.radii[part])

    def check(self, where, images, labels=None):
        """Samples, a tensor (N, C, H, W) or an array (N, H, W, C) → tensors, labels perhaps None; or an error with its cure."""
        args, unlabelled = self.args, labels is None
        if isinstance(images, torch.Tensor):
            images = images.detach().cpu().movedim(1, -1).numpy() if images.ndim == 4 else images
        images = np.asarray(images)
        if images.dtype.kind == "f" and images.size:
            low, high = images.min(), images.max()
            if not np.isfinite([low, high]).all():
                raise UserError(f"{where}: the images hold NaN or infinite values; the sampler failed, draw them again")
            cure = "x.clip(0, 255)" if low < -1 or high > 1 else "(127.5 * (x + 1))" if low < 0 else "(255 * x)"
            raise UserError(f"{where}: images are {images.dtype}, {low:.3g} to {high:.3g}; save {cure}.round().astype('uint8')")
        values = np.unique(images.reshape(-1)[: 10**6]).tolist() if images.dtype == np.uint8 else []
        if values in ([0], [1], [0, 1], [0, 1, 255]):
            raise UserError(f"{where}: the only pixel values are {values}, as of floats cast to uint8; scale to 0 to 255 first")
        labels = np.zeros(images.shape[:1], int) if unlabelled else labels.cpu() if isinstance(labels, torch.Tensor) else labels
        images, labels = check_images(where, dict(images=images, labels=labels))
        least = max(2, 10 * ("is" in self.metrics), (args.k + 1) * ("prdc" in self.metrics))
        if len(images) < least:
            raise UserError(f"{where}: {len(images)} samples, --metrics {args.metrics} with --k {args.k} needs at least {least}")
        if not self.needs_real:
            return images, None
        real, real_labels, names = self.images()
        if images.shape[1:] != real.shape[1:]:
            a, b = ("×".join(map(str, v.shape[1:])) for v in (images, real))
            cure = f"--size {images.shape[2]} resizes those" if images.shape[1] == real.shape[1] else "see --data"
            raise UserError(f"{where}: samples are {a} (channels first), the images of --data {args.data} {b}; {cure}")
        if unlabelled:
            return images, None
        counts = torch.bincount(labels, minlength=len(names))
        if len(counts) > len(names):
            raise UserError(f"{where}: labels up to {len(counts) - 1}, --data {args.data} has {len(names)} classes; see --data")
        least = args.k + 1 if "classwise" in self.metrics else int("cas" in self.metrics)
        for count, what in ((counts, "samples"), (torch.bincount(real_labels), "real images")):
            if count.min() < least:
                c = count.argmin().item()
                raise UserError(f"{where}: class {c} ({names[c]}) has {count[c]} {what}, class-wise metrics with k = {args.k} or "
                                f"CAS need {least} in every class; draw more, or leave them out with --metrics fid,is,prdc")
        return images, labels

    def measure(self, images, labels=None, name="samples"):
        """All numbers but CAS → {key: dict(value, recipe...)}."""
        numbers, k, data = {}, self.args.k, self.args.data
        if self.metrics == {"cas"}:
            return numbers
        features, logits = self.features(images, name)

        def put(values, **recipe):
            recipe = dict(n=len(images), **recipe, extractor=self.extractor[0])
            numbers.update({key: dict(value=value, **recipe) for key, value in values.items()})

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
            put(self.compare(real, features), k=k, reference=f"{data}, {len(real)} training images")
        if "classwise" in self.metrics and labels is not None:
            _, real_labels, names = self.images()
            table = [self.compare(self.real_features[real_labels == c], features[labels == c], c) for c in range(len(names))]
            for key in PRDC:
                classes = {name: row[key] for name, row in zip(names, table)}
                mean = sum(classes.values()) / len(classes)
                put({f"cw_{key}": mean}, k=k, reference=f"{data}, the training images of each class", classes=classes)
            if self.args.features == "own":
                put(dict(accuracy=(logits.argmax(1) == labels).double().mean().item()))
        return numbers

    def cas(self, images, labels):
        """Classification Accuracy Score (Ravuri & Vinyals 2019): accuracy on real test images after training on these alone."""
        recipe = dict(CAS, steps=self.args.cas_steps)
        net = self.trained("cas", ResNet, (self.args.cas_model, len(self.images()[2])), images, labels, recipe)
        return dict(value=self.accuracy(net), n=len(images), model=self.args.cas_model, seed=self.args.seed, **recipe)


def evaluate(samples, labels=None, **flags):
    """Numbers of samples in memory → {key: value}; flags as keywords: evaluate(images, labels, data="fashion", metrics="fid")."""
    args = make_parser().parse_args([])
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
        known = {name: i for i, name in enumerate(names)}
        if not set(folders) <= set(known):
            known = {name: int(name) for name in folders if name.isdecimal()}
        if wrong := set(folders) - set(known):
            raise UserError(f"{path}: its sub-folder {min(wrong)!r} is no class of --data; name them {names[0]}… or 0, 1, 2…")
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


def markdown(columns, fid, real=()):
    """The table: rows as in the paper, one column a file; the best of ours (but for `real` images), and of the paper's, in bold."""
    lines = ["| | | " + " | ".join(columns) + " |", "| --- | --- |" + " ---: |" * len(columns)]
    for key, (title, digits, best) in ROWS.items():
        cells = {name: numbers[key] for name, numbers in columns.items() if key in numbers}
        if not any("n" in cell for cell in cells.values()):
            continue
        texts = []
        for name, cell in ((name, cells.get(name)) for name in columns):
            rivals = [round(v["value"], digits) for other, v in cells.items()
                      if cell and not {name, other} & set(real) and ("n" in v) == ("n" in cell)]
            text = f"{cell['value']:.{digits if 'n' in cell else 2}f}" if cell else "–"
            text = f"**{text}**" if best and len(rivals) > 1 and best(rivals) == round(cell["value"], digits) else text
            texts.append(text + (f" ± {cell['deviation']:.2f}" if cell and "deviation" in cell else ""))
        if key == "fid":
            title = f"{fid}@" + "/".join(dict.fromkeys(str(cell["n"]) for cell in cells.values() if "n" in cell))
        lines.append(f"| {title} | {({min: '↓', max: '↑'}).get(best, '')} | {' | '.join(texts)} |")
    return "\n".join(lines)


def paper_columns(data):
    """Table 2 as columns for `markdown`; they have no n, which tells them from ours."""
    keys = [key for key in ROWS if key not in ("is_splits", "cas_real", "accuracy")]
    return {f"{name} (paper)": {key: dict(value=value) for key, value in zip(keys, values)} for name, values in PAPER[data].items()}


def report(files, evaluation, out):
    """Writes evaluation.json, .md, and Figure 4: the sorted class-wise differences to the first file → the table with notes."""
    args, (about, d) = evaluation.args, ({}, 0) if evaluation.metrics == {"cas"} else evaluation.extractor[:2]
    columns, notes = {name: file["numbers"] for name, file in files.items()}, []
    fid = "FD" if args.features == "own" else "FID"
    for n in sorted({file["n"] for file in files.values() if "fid" in file["numbers"] and file["n"] < 10_000}):
        trouble = f"fewer than {d + 1} samples: not comparable" if n <= d else f"few samples: compare with {fid}@{n} only"
        notes.append(f"Warning: {fid}@{n} is of {trouble}")
    if evaluation.spared:
        notes.append("CAS was left out, as there is no GPU; --metrics all includes it")
    for name, file in files.items():
        data = str(file["recipe"].get("data", args.data))
        if pathlib.Path(data).name != pathlib.Path(args.data).name:
            notes.append(f"Warning: {name} was drawn for {data}, not for --data {args.data}")
    whole = dict(data=args.data, size=args.size, features=about, notes=notes, files=files)
    write_whole(out / "evaluation.json", json.dumps(whole, indent=1).encode())
    first, *others = [name for name in files if "cw_recall" in columns[name]] or [None]
    for name in others:
        panels = []
        for key in PRDC:
            a, b = (columns[v][f"cw_{key}"]["classes"] for v in (first, name))
            bars = sorted((b[c] - a[c] for c in a), reverse=True)
            panels.append(dict(title=f"Class-wise {key}", x="classes, sorted", y=f"{name} minus {first}", bars=bars))
        chart(out / f"classwise-{name}-minus-{first}.png", panels, columns=2)
    columns.update(paper_columns(args.data) if args.paper else {})
    what = f"resize {args.resize}" if fid == "FID" else f"test accuracy {about.get('test_accuracy', 0):.4f}"
    title = f"{args.data}, {args.features} features (sha256 {about['sha256'][:8]}, {what}), k = {args.k}" if about else args.data
    real = [name for name, file in files.items() if file["recipe"].get("split") == "test"]
    text = "\n\n".join([title, markdown(columns, fid, real), *notes])
    write_whole(out / "evaluation.md", f"{text}\n".encode())
    return text


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, None)
    parser.add_argument("samples", nargs="*", type=pathlib.Path, help="sample files or folders; Figure 4 compares with the first; test "
                        "stands for held-out real images, as many as the files before it have (default: runs/RUN/samples-*.npz)")
    parser.flag("--metrics", None, f"some of {','.join(METRICS)}, or all (default: all; without a GPU all but cas, which trains "
                "a ResNet for each file and one on real images)")
    parser.flag("--features", "inception", "FID's, or own: of a ResNet trained on the real images", choices=["inception", "own"])
    parser.flag("--own-steps", 1500, "training steps of that ResNet, of 128 images", number(int, 1, 10**9))
    parser.flag("--weights", None, f"Inception's weights (default: ROOT/features/{WEIGHTS}, fetched if need be)")
    parser.flag("--resize", "tf", "to 299×299 for Inception: tf (the paper's) or torch (pytorch-fid's)", choices=["tf", "torch"])
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
    args = make_parser().parse_args()
    if args.paper and args.data not in PAPER:
        raise UserError(f"--paper: the paper has numbers for {' and '.join(PAPER)}, not for --data {args.data}")
    paths, files, samples = args.samples or sorted(run_folder(args).glob("samples-*.npz")), {}, {}
    if not paths:
        raise UserError(f"{run_folder(args)}: has no samples-*.npz; python sample.py makes them, or name your files")
    out, evaluation = args.out or paths[0].absolute().parent, Evaluation(args)
    for path in paths:
        names = evaluation.images()[2] if evaluation.needs_real and path.is_dir() else []
        if str(path) == "test" and not path.exists():
            most = max((file["n"] for file in files.values()), default=None)
            images, labels, recipe = *(v[:most] for v in evaluation.images("test")[:2]), dict(split="test")
        else:
            images, labels, recipe = read_samples(path, names)
        name = path.stem.removeprefix("samples-")
        while name in files:
            name = f"{path.absolute().parent.name}-{name}"
        samples[name] = evaluation.check(path, images, labels)
        files[name] = dict(path=str(path), n=len(images), recipe=recipe)
    for name, file in files.items():
        file["numbers"] = evaluation.measure(*samples[name], name)
    if args.save_stats:
        mu, cov = moments(evaluation.real_features)
        write_whole(args.save_stats, npz_bytes(mu=mu.numpy(), sigma=cov.numpy()))
    save_grid(out / "side-by-side.png", [images[:20] for images, _ in samples.values()], list(samples))
    report(files, evaluation, out)
    labelled = [name for name, file in files.items() if samples[name][1] is not None and file["recipe"].get("split") != "test"]
    if "cas" in evaluation.metrics and labelled:
        say(f"CAS: {len(labelled) + 1} trainings of {args.cas_model}, {args.cas_steps} steps; {out}/evaluation.md has the rest")
        real = evaluation.cas(*evaluation.images()[:2])
        for name in labelled:
            files[name]["numbers"].update(cas=evaluation.cas(*samples[name]), cas_real=real)
    print(f"\n{report(files, evaluation, out)}\n\n{out}/evaluation.json has the recipe of each number")


if __name__ == "__main__":
    run(main)
