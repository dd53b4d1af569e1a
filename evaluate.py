"""Compares samples with real images: FID, IS, precision, recall, density, coverage, class by class, and CAS.

    python evaluate.py runs/cifar10/samples-base.npz runs/cifar10/samples-dlsm.npz --data cifar10

Reads samples (our .npz, guided-diffusion's arr_0 and arr_1, a folder of pictures), prints the paper's Table 2 for them, one
column a file, and writes evaluation.json with the recipe of each number and Figure 4, beside the first file or to --out.
Features and trained networks are kept in ROOT/features, by content: nothing is computed twice.

    from evaluate import evaluate; evaluate(images, labels, data="fashion", features="own")     # tensors; flags as keywords
"""
import contextlib
import functools
import hashlib
import io
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
from train_classifier import ce_loss
from train_score import (Parser, Progress, chart, check_images, fit, image_draw, import_torchvision, load_images, mix, number, read_folder,
                         read_npz, run, say, set_up, shared_flags)

# The classifier behind `--features own`, ours: on a CPU minutes for 16×16 images, and 0.90 on Fashion-MNIST's test images.
OWN = dict(depth=18, width=16, steps=2000, batch=128, lr=2e-3, cosine=True)
# The paper's recipe for CAS; it does not say for how long: 30 epochs of 50,000 images, and no augmentation, are our choice.
CAS = dict(lr=2e-4, batch=150)
ROWS = {  # of the table: the metric that brings each, its name, and whether more is better; the order is that of Table 2
    "fid": ("fid", "FID", False), "is": ("is", "IS", True), "is_splits": ("is", "IS, ten splits", True),
    **{key: ("prdc", key.capitalize(), True) for key in ("precision", "recall", "density", "coverage")},
    "cas": ("cas", "CAS", True), "cas_real": ("cas", "CAS, trained on real images", None), "accuracy": ("classwise", "Class accuracy", True),
    **{f"cw_{key}": ("classwise", f"(CW) {key.capitalize()}", True) for key in ("precision", "recall", "density", "coverage")},
}
METRICS = ("fid", "is", "prdc", "classwise", "cas")
PAPER = {  # Table 2: FID, IS, P, R, D, C, CAS, class-wise P, R, D, C
    "cifar10": {"base": (4.10, 9.08, 0.67, 0.61, 1.05, 0.80, 0.38, 0.51, 0.59, 0.63, 0.60),
                "scaling": (12.48, 9.37, 0.75, 0.49, 1.36, 0.75, 0.46, 0.70, 0.42, 1.23, 0.66),
                "ours": (2.25, 9.90, 0.65, 0.62, 0.96, 0.81, 0.58, 0.56, 0.61, 0.76, 0.71)},
    "cifar100": {"base": (4.52, 11.53, 0.62, 0.62, 0.84, 0.71, 0.15, 0.33, 0.68, 0.30, 0.38),
                 "scaling": (12.58, 11.59, 0.65, 0.52, 0.93, 0.61, 0.24, 0.59, 0.41, 0.78, 0.51),
                 "ours": (3.86, 11.62, 0.61, 0.63, 0.82, 0.71, 0.28, 0.42, 0.68, 0.43, 0.52)},
}

# ---------------------------------------------------------------------------- precision, recall, density, coverage

TILE = 2048  # points a side of a block of distances: 16 MB
SPARE = 8  # neighbours kept beyond the k-th, in case rounding changed their order


def prdc(real, fake, k=3):
    """Precision, recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020) of two sets of points → dict.

    B(x) is the open ball around x out to x's k-th nearest neighbour in its own set, x not counted. precision: share of fakes in some
    B(real). recall: share of reals in some B(fake). density: pairs of a fake in a B(real), over k · fakes. coverage: share of reals
    with a fake in their ball. Arrays or tensors, a point a row. Exact: as brute force in float64; time quadratic, memory linear.
    """
    real, fake = as_points(real, "real"), as_points(fake, "fake")
    (N, d), (M, e) = real.shape, fake.shape
    if d != e:
        raise UserError(f"prdc: real points have {d} coordinates, fake ones {e}; both must come from the same extractor")
    if min(N, M) <= k or k < 1:
        raise UserError(f"prdc: {N} real and {M} fake points; k = {k} neighbours need k ≥ 1 and at least k + 1 points of each")
    center = real.mean(0)  # around the mean ‖x‖² + ‖y‖² − 2xy cancels less
    for dtype in (torch.float32, torch.float64)[d < 64 :]:  # float64 costs little in few dimensions
        real_radii, fake_radii = knn_radii(real, center, dtype, k), knn_radii(fake, center, dtype, k)
        if real_radii is not None and fake_radii is not None:
            break
    in_balls = torch.zeros(M, dtype=torch.int64, device=real.device)  # how many B(real) each fake is in
    covered, recalled = torch.zeros(2, N, dtype=torch.bool, device=real.device)
    for i in range(0, N, TILE):
        a = block(real, center, dtype, i)
        for j in range(0, M, TILE):
            b = block(fake, center, dtype, j)
            distance = squared_distances(a, b)
            rows, columns = pairs_inside(distance, real_radii[i : i + TILE, None], a, b)
            in_balls[j : j + TILE] += torch.bincount(columns, minlength=len(b[0]))
            covered[rows + i] = True
            rows, columns = pairs_inside(distance, fake_radii[None, j : j + TILE], a, b)
            recalled[rows + i] = True
    precision, recall, coverage = (mask.double().mean().item() for mask in (in_balls > 0, recalled, covered))
    return dict(precision=precision, recall=recall, density=in_balls.sum().item() / (k * M), coverage=coverage)


def as_points(values, name):
    values = torch.as_tensor(values).detach()
    values = values.reshape(len(values), -1).to(values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float64)
    if not values.sum(0).isfinite().all():
        raise UserError(f"prdc: the {name} points hold NaN or infinite values")
    return values


def block(points, center, dtype, start):
    """Points from start on: centred and in `dtype`, their squared norms, and as they are."""
    exact = points[start : start + TILE]
    near = (exact - center.to(torch.promote_types(exact.dtype, dtype))).to(dtype)
    return near, near.square().sum(1), exact


def squared_distances(a, b):
    """‖a‖² + ‖b‖² − 2ab of all pairs of two blocks: one matrix product, off by at most `rounding`."""
    return torch.addmm(b[1], a[0], b[0].T, alpha=-2).add_(a[1][:, None])


def rounding(d, a2, b2):
    """√d ε (‖a‖² + ‖b‖²): several times the largest error seen in such a product over d coordinates."""
    return max(d, 16) ** 0.5 * torch.finfo(a2.dtype).eps * (a2 + b2)


def pair_distances(a, b, i, j):
    """‖a_i − b_j‖² of some pairs, from differences in float64."""
    parts = [(a[u].double() - b[v].double()).square().sum(1) for u, v in zip(i.split(1024), j.split(1024))]
    return torch.cat(parts) if parts else i.double()


def knn_radii(points, center, dtype, k):
    """Squared distance of each point to its k-th nearest other, or None where float32 has too few digits to tell which that is.

    Distances are symmetric, so half of the blocks do. Exact distances decide the order around the k-th place.
    """
    n, m = len(points), min(k + SPARE, len(points) - 1)
    best, index = (torch.full((n, m), value, dtype=kind, device=points.device) for value, kind in ((math.inf, dtype), (0, torch.int64)))
    norms = []
    for i in range(0, n, TILE):
        a = block(points, center, dtype, i)
        norms.append(a[1])
        for j in range(i, n, TILE):
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
    lost = unsure[:, -1] & (radii > 0) & (m < n - 1)  # a neighbour beyond the spare ones may be nearer
    return None if lost.any() and dtype == torch.float32 else radii


def pairs_inside(distance, radius, a, b):
    """Pairs (i, j) with distance < radius, both squared. Where rounding could decide, exact distances do.

    The same pair computed twice may differ in the last digit and must not be inside its own radius: hence 1e-12.
    """
    d, limit = a[0].shape[1], radius + rounding(a[0].shape[1], a[1].max(), b[1].max())
    flat = (distance < limit.to(distance.dtype)).view(-1).nonzero()[:, 0]
    i, j = flat // distance.shape[1], flat % distance.shape[1]
    radius, distance = radius.expand(distance.shape)[i, j], distance.view(-1)[flat]
    inside = distance < radius
    unsure = (distance - radius).abs() <= rounding(d, a[1][i], b[1][j])
    inside[unsure] = pair_distances(a[2], b[2], i[unsure], j[unsure]) < radius[unsure] * (1 - 1e-12)
    return i[inside], j[inside]
