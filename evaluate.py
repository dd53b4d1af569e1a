"""Compares samples with real images: FID, IS, precision, recall, density, coverage, class by class, and CAS.

    python evaluate.py runs/cifar10/samples-base.npz runs/cifar10/samples-dlsm.npz

Reads sample files (our .npz, guided-diffusion's, folders of pictures), prints the paper's Table 2 with one
column per file, and writes beside the first file: evaluation.md, evaluation.json (the recipe of each number),
Figure 4, side-by-side.png. Features and classifiers are kept in ROOT/features, so nothing is computed twice.
In Python: evaluate(images, labels, data="cifar10", metrics="fid,prdc").
"""
import argparse
import hashlib
import json
import math
import pathlib
import tempfile
import urllib.request

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from models import NoisyResNet, UserError, checksum, load_checkpoint, save_checkpoint, write_whole
from sample import chart, npz_bytes, save_grid
from train_classifier import ce_loss
from train_score import (Parser, Plan, Progress, bounded, check_images, derive_seed, fit, image_batches,
                         import_torchvision, load_images, read_folder, read_npz, run, run_folder, say, set_up,
                         shared_flags, text)

# ------------------------------------------------------------ 1. the story: the metrics, then the stage

OWN = dict(depth=18, width=16, batch=128, lr=2e-3, cosine=True)  # our extractor: minutes on a CPU at 16×16
CAS = dict(batch=150, lr=2e-4, cosine=False, inputs="0 to 1")  # Appendix A.6.3; no augmentation
CLEAN = 0.01  # the σ that these classifiers of images without noise are told
METRICS = ("fid", "is", "prdc", "classwise", "cas")
PRDC = ("precision", "recall", "density", "coverage")
BLOCK = 2048  # points per side of a block of distances: 16 MB in float32
SPARE = 8  # neighbours kept beyond the k-th, in case rounding changed their order


def prdc(real, fake, k=3, real_radii=None):
    """Precision, recall (Kynkäänniemi et al. 2019), density, coverage (Naeem et al. 2020) of points → dict.

    B(x) is the open ball around x out to its k-th nearest neighbour in its own set, x not counted. precision:
    share of fakes in some B(real). recall: share of reals in some B(fake). density: pairs of a fake in a
    B(real), over k · fakes. coverage: share of reals with a fake in their ball. Arrays or tensors, one point
    per row; `real_radii` as knn_radii gives them. Equal to brute force in float64; memory linear.
    """
    real, fake = as_points(real, k), as_points(fake, k)
    if real.shape[1] != fake.shape[1]:
        raise UserError(f"prdc: real points have {real.shape[1]} coordinates, fake ones {fake.shape[1]}")
    real_radii = knn_radii(real, k) if real_radii is None else real_radii
    fake_radii = knn_radii(fake, k)
    center = real.mean(0)
    error = max(rounding_error(real, center), rounding_error(fake, center))
    if real.dtype != fake.dtype or real.dtype == torch.float32 and error > 0.01 * real_radii.median():
        return prdc(real.double(), fake.double(), k, real_radii)  # else most pairs would need exact distances
    in_balls = torch.zeros(len(fake), dtype=torch.int64, device=real.device)  # B(real) around each fake
    covered, recalled = torch.zeros(2, len(real), dtype=torch.bool, device=real.device)
    for i in range(0, len(real), BLOCK):
        for j in range(0, len(fake), BLOCK):
            a, b = real[i : i + BLOCK], fake[j : j + BLOCK]
            distance = squared_distances(a, b, center)
            rows, columns = pairs_inside(distance, real_radii[i : i + BLOCK, None], error, a, b)
            in_balls[j : j + BLOCK] += torch.bincount(columns, minlength=len(b))
            covered[rows + i] = True
            rows, _ = pairs_inside(distance, fake_radii[None, j : j + BLOCK], error, a, b)
            recalled[rows + i] = True
            del distance  # before the next block is made
    return dict(precision=(in_balls > 0).double().mean().item(), recall=recalled.double().mean().item(),
                density=in_balls.sum().item() / (k * len(fake)), coverage=covered.double().mean().item())


def knn_radii(points, k):
    """Squared distance of each point to its k-th nearest other one; exact distances decide near ties."""
    points = as_points(points, k)
    n, m, center = len(points), min(k + SPARE, len(points) - 1), points.mean(0)
    nearest = points.new_full((n, m), math.inf)
    index = torch.zeros(n, m, dtype=torch.int64, device=points.device)
    for i in range(0, n, BLOCK):
        for j in range(i, n, BLOCK):  # distances are symmetric: half of the blocks is enough
            distance = squared_distances(points[i : i + BLOCK], points[j : j + BLOCK], center)
            blocks = [(i, j, distance)]
            if i == j:
                distance.fill_diagonal_(math.inf)  # a point is not its own neighbour
            else:
                blocks.append((j, i, distance.T.contiguous()))
            for start, first, block in blocks:
                rows = slice(start, start + BLOCK)
                values, at = block.topk(min(m, block.shape[1]), largest=False)
                values, at = torch.cat([nearest[rows], values], 1), torch.cat([index[rows], at + first], 1)
                nearest[rows], order = values.topk(m, largest=False)
                index[rows] = at.gather(1, order)
            del distance, blocks, block  # before the next ones are made
    unsure = (nearest - nearest[:, k - 1 : k]).abs() <= 2 * rounding_error(points, center)
    nearest = nearest.double()
    nearest[unsure] = exact_distances(points, points, unsure.nonzero()[:, 0], index[unsure])
    radii = nearest.sort(1).values[:, k - 1]
    if points.dtype == torch.float32 and m < n - 1 and (unsure[:, -1] & (radii > 0)).any():
        return knn_radii(points.double(), k)  # neighbours beyond the spare ones may be nearer
    return radii


def as_points(values, k):
    """(N, d) in float32, or in float64 where that is as fast (small d) or the values have more digits."""
    values = torch.as_tensor(values).detach()
    values = values.reshape(len(values), -1)
    if values.dtype != torch.float32 or values.shape[1] < 64:
        values = values.double()
    if len(values) <= k or k < 1:
        raise UserError(f"prdc: k = {k} neighbours need k ≥ 1 and at least k + 1 points, not {len(values)}")
    if not values.sum(0).isfinite().all():
        raise UserError("prdc: the points hold NaN or infinite values")
    return values


def squared_distances(a, b, center):
    """‖a‖² + ‖b‖² − 2ab of all pairs by one matrix product, around a center, where less cancels."""
    a, b = a - center, b - center
    return torch.addmm(b.square().sum(1), a, b.T, alpha=-2).add_(a.square().sum(1)[:, None])


def rounding_error(points, center):
    """A bound of the error of squared_distances: √d ε (‖a‖² + ‖b‖²), several times the largest error seen."""
    largest = max((part - center).square().sum(1).max().item() for part in points.split(BLOCK))
    return 2 * max(len(center), 16) ** 0.5 * torch.finfo(points.dtype).eps * largest


def exact_distances(a, b, i, j):
    """‖a_i − b_j‖² of some pairs, from differences in float64."""
    pairs = zip(i.split(512), j.split(512))
    return torch.cat([(a[u].double() - b[v].double()).square().sum(1) for u, v in pairs])


def pairs_inside(distance, radius, error, a, b):
    """Pairs (i, j) with distance < radius, both squared; near ties are decided by exact distances."""
    near = (distance < (radius + error).to(distance.dtype)).view(-1).nonzero()[:, 0]
    i, j = near // len(b), near % len(b)
    distance, radius = distance.view(-1)[near], radius.expand(distance.shape)[i, j]
    inside = distance <= radius - error
    unsure = ~inside
    limit = radius[unsure] * (1 - 1e-12)  # a distance computed twice may differ in its last digit
    inside[unsure] = exact_distances(a, b, i[unsure], j[unsure]) < limit
    return i[inside], j[inside]


def moments(features):
    """Mean and covariance (over n − 1) in float64, in one pass over blocks of rows (Chan et al. 1983)."""
    n, mean, scatter = 0, 0.0, 0.0
    for part in torch.as_tensor(features).split(BLOCK):
        part = part.double()
        m, center = len(part), part.mean(0)
        step, part = center - mean, part - center
        scatter = scatter + part.T @ part + (n * m / (n + m)) * torch.outer(step, step)
        mean, n = mean + step * (m / (n + m)), n + m
    return mean, scatter / max(n - 1, 1)


def frechet_distance(mu1, cov1, mu2, cov2):
    """‖μ1 − μ2‖² + tr(S1 + S2 − 2 (S1 S2)^½) of two Gaussians (Heusel et al. 2017), in float64.

    With S1 = L Lᵀ, tr (S1 S2)^½ is the sum of the roots of the eigenvalues of Lᵀ S2 L, which is symmetric.
    Cholesky's L is the quickest. With fewer samples than features there is none; then the null space of S1,
    which adds nothing, is left out, as the root would magnify its rounding errors.
    """
    mu1, mu2 = torch.as_tensor(mu1).double(), torch.as_tensor(mu2).to(torch.as_tensor(mu1).device).double()
    cov1, cov2 = torch.as_tensor(cov1).to(mu1).double(), torch.as_tensor(cov2).to(mu1).double()
    root, failed = torch.linalg.cholesky_ex(cov1)
    epsilon = len(cov1) * torch.finfo(torch.float64).eps
    if failed or root.diagonal().min() ** 2 < epsilon * root.diagonal().max() ** 2:
        values, vectors = torch.linalg.eigh(cov1)
        keep = values > epsilon * values[-1]
        root = vectors[:, keep] * values[keep].sqrt()
    overlap = torch.linalg.eigvalsh(root.T @ cov2 @ root).clamp(min=0).sqrt().sum()
    return max(((mu1 - mu2).square().sum() + cov1.trace() + cov2.trace() - 2 * overlap).item(), 0.0)


def inception_score(logits, splits=10):
    """exp E KL(p(y|x) ‖ p(y)) (Salimans et al. 2016): mean and deviation over parts; the paper's has one.

    KL = Σ p log p − Σ p̄ log p̄, in float64. A shuffle with a fixed seed comes first: samples that are stored
    class by class do not make parts of one class each.
    """
    logits, scores = torch.as_tensor(logits), []
    if len(logits) < splits:
        raise UserError(f"inception_score: {len(logits)} samples cannot make {splits} parts")
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))
    for part in order.tensor_split(splits):
        p = logits[part.to(logits.device)].double().softmax(1)
        mean = p.mean(0)
        scores.append((torch.xlogy(p, p).sum() / len(p) - torch.xlogy(mean, mean).sum()).exp())
    return torch.stack(scores).mean().item(), torch.stack(scores).std(correction=0).item()


def make_parser():
    parser = Parser(__doc__)
    parser.add_argument("samples", nargs="*", type=pathlib.Path,
                        help="files or folders; test: held-out real images (default: runs/RUN/samples-*.npz)")
    shared_flags(parser)
    parser.set_defaults(data=None)
    steps = dict(type=bounded(int, 1, 10**9), metavar="N")
    path = dict(type=lambda value: pathlib.Path(text(value)), metavar="PATH")
    parser.group("metrics; default --data and --size: those in the recipe of the sample files")
    parser.flag("--metrics", None, f"of {','.join(METRICS)} (default: all; cas only on GPUs)", metavar="LIST")
    parser.flag("--k", 3, "neighbours for precision, recall, density, coverage", bounded(int, 1, 1000))
    parser.flag("--stats", None, "FID's reference: an .npz with mu, sigma", **path)
    parser.flag("--save-stats", None, "write such a file, of the training images", **path)
    parser.flag("--paper", False, "the paper's columns beside ours (cifar10, cifar100)")
    parser.flag("--out", None, "folder for the results (default: that of the first file)", **path)
    parser.group("features and classifiers")
    parser.flag("--features", "inception", "FID's, or of a ResNet trained here", choices=["inception", "own"])
    parser.flag("--own-steps", 1500, "training steps of that ResNet, of 128 images", **steps)
    parser.flag("--weights", None, "Inception's weights (default: in ROOT/features, else fetched)", **path)
    parser.flag("--resize", "tf", "tf: the paper's rule; torch: pytorch-fid's", choices=["tf", "torch"])
    parser.flag("--batch", 100, "images per pass", bounded(int, 1, 10**5), metavar="N")
    parser.flag("--cas-model", "resnet50", "network of CAS", choices=["resnet18", "resnet34", "resnet50"])
    parser.flag("--cas-steps", 10_000, "of 150 images; the release trains 400,001 steps", **steps)
    return parser


def main():
    args = make_parser().parse_args()
    folder = run_folder(argparse.Namespace(**{**vars(args), "data": args.data or "cifar10"}))
    paths = args.samples or sorted(folder.glob("samples-*.npz"))
    if not paths:
        raise UserError(f"{folder}: has no samples-*.npz; python sample.py makes them, or name your files")
    files = {}
    for path in paths:
        name = path.stem.removeprefix("samples-")
        while name in files:
            name = f"{path.absolute().parent.name}-{name}"
        files[name] = read_samples(path)
    use_recipe(args, files)
    if args.paper and args.data not in PAPER:
        raise UserError(f"--paper: the paper has {' and '.join(PAPER)}, not --data {args.data}")
    device, metrics, real = prepare(files, args)
    out = args.out or paths[0].absolute().parent
    try_folder(out, "--out names another")
    about, dim = measure(files, real, args, metrics, device)
    save_grid(out / "side-by-side.png", [file["images"][:20] for file in files.values()], list(files))
    table = report(files, about, dim, args, metrics, out)
    if "cas" in metrics:
        say(f"CAS: {args.cas_model}, {args.cas_steps} steps per file; {out}/evaluation.md has the rest")
        measure_cas(files, real, args, device)
        table = report(files, about, dim, args, metrics, out)
    say(f"\n{table}\n\n{out}/evaluation.json has the recipe of each number")


def evaluate(images, labels=None, **flags):
    """Numbers of samples in memory → {key: value}; flags as keywords: data="fashion", metrics=["fid"]."""
    def refuse(message):
        raise UserError(f"evaluate: {message}")

    parser, line = make_parser(), []
    parser.error = refuse
    known = set(vars(parser.parse_args([]))) - {"samples"}
    for key, value in flags.items():
        if key not in known:
            refuse(f"no flag {key}; there are {', '.join(sorted(known))}")
        if isinstance(value, (list, tuple)):
            value = ",".join(value)
        if value is not None and value is not False:
            line.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    args = parser.parse_args(line)
    files = {"samples": dict(path="samples", images=images, labels=labels, recipe={}, folders=None)}
    use_recipe(args, files)
    device, metrics, real = prepare(files, args)
    measure(files, real, args, metrics, device)
    if "cas" in metrics:
        measure_cas(files, real, args, device)
    return {key: number["value"] for key, number in files["samples"]["numbers"].items()}


def prepare(files, args):
    """Checks everything before anything is computed → device, metrics, real images, labels and names."""
    device = set_up(args)
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    metrics = set(METRICS if args.metrics in (None, "all") else args.metrics.split(","))
    if not metrics <= set(METRICS):
        raise UserError(f"--metrics {args.metrics}: must be all, or some of {','.join(METRICS)}")
    if args.metrics is None and device.type != "cuda":
        metrics.remove("cas")  # which would take hours
    real, most = None, None
    if args.features == "own" or args.save_stats or metrics - ({"is", "fid"} if args.stats else {"is"}):
        real = load_images(args.data, "train", args.size, args.root)
    for file in files.values():
        if file["recipe"].get("split") == "test":  # as many as the files before it have
            images, labels, _ = load_images(args.data, "test", args.size, args.root)
            file.update(images=images[:most], labels=labels[:most])
        check_samples(file, real, args, metrics)
        file.update(n=len(file["images"]), numbers={})
        most = max(most or 0, file["n"])
    return device, metrics, real


def measure(files, real, args, metrics, device):
    """All numbers but CAS, each with its recipe, into file["numbers"] → the features' recipe and number."""
    try_folder(pathlib.Path(args.root) / "features", "--root names another")
    if args.save_stats:
        try_folder(args.save_stats.absolute().parent, "--save-stats names another")
    if metrics == {"cas"} and not args.save_stats:
        return {}, 0
    images, real_labels, names = real or ((), None, None)
    about, dim, network = make_extractor(real, args, metrics, device)
    reference, radii = read_stats(args.stats, dim) if args.stats else None, {}
    training = f"{args.data}, {len(images)} training images"
    if args.save_stats or metrics & {"prdc", "classwise"} or "fid" in metrics and not args.stats:
        real_features, _ = extract(images, about, network, args, device, "real images")
    if args.save_stats or "fid" in metrics and not args.stats:
        mu, cov = moments(real_features)
        reference = reference or (mu, cov)
    if args.save_stats:
        write_whole(args.save_stats, npz_bytes(mu=mu.cpu().numpy(), sigma=cov.cpu().numpy()))

    def compare(points, fake, c=None):
        """prdc; the radii of the real points, most of the work, serve all files."""
        if c not in radii:
            radii[c] = knn_radii(points, args.k)
        return prdc(points, fake, args.k, radii[c])

    for name, file in files.items():
        labels, n = file["labels"], file["n"]
        features, logits = extract(file["images"], about, network, args, device, name)

        def put(key, value, **recipe):
            file["numbers"][key] = dict(value=value, n=n, **recipe)

        if "fid" in metrics:
            fid = frechet_distance(*moments(features), *reference)
            put("fid", fid, reference=str(args.stats or training), extractor=about)
        if "is" in metrics:
            put("is", inception_score(logits, 1)[0], splits=1, extractor=about)
            mean, deviation = inception_score(logits)
            put("is_splits", mean, splits=10, deviation=deviation, extractor=about)
        if "prdc" in metrics:
            say(f"{name}: precision, recall, density, coverage of {n} samples, {len(images)} real images")
            for key, value in compare(real_features, features).items():
                put(key, value, k=args.k, reference=training, extractor=about)
        if "classwise" in metrics and labels is not None:
            rows = {}
            for c, class_name in enumerate(names):
                points, fake = real_features[real_labels == c], features[labels == c]
                fid = frechet_distance(*moments(points), *moments(fake))
                rows[class_name] = dict(compare(points, fake, c), fid=fid)
            for key in ("fid", *PRDC):
                classes = {class_name: row[key] for class_name, row in rows.items()}
                put(f"cw_{key}", sum(classes.values()) / len(classes), n_per_class=labels.bincount().tolist(),
                    classes=classes, k=args.k, reference=f"{args.data}, the training images of each class",
                    extractor=about)
            if args.features == "own":
                right = (logits.argmax(1).cpu() == labels).double().mean().item()
                put("accuracy", right, extractor=about)
        if file["recipe"].get("exact") is True and real and labels is not None:
            nearest = nearest_images(file["images"], images, features.device)
            counts = zip(labels.bincount().tolist(), real_labels.bincount().tolist())
            expected = sum(total * (1 - (1 - 1 / total) ** drawn) for drawn, total in counts)
            recipe = dict(nearest="by the distance of pixels", reference=training)
            right = (real_labels[nearest] == labels).double().mean().item()
            put("exact_accuracy", right, **recipe)
            put("distinct", len(nearest.unique()), expected=expected, **recipe)
    return about, dim


def measure_cas(files, real, args, device):
    """Classification Accuracy Score (Ravuri & Vinyals 2019): real test accuracy after training on samples."""
    recipe, config = dict(CAS, steps=args.cas_steps), (args.cas_model, len(real[2]))

    def cas(images, labels):
        _, accuracy = train_clean("cas", ResNet, config, images, labels, recipe, args, device)
        return dict(value=accuracy, n=len(images), model=args.cas_model, seed=args.seed, **recipe)

    of_real = None
    for file in files.values():
        if file["labels"] is not None and file["recipe"].get("split") != "test":
            of_real = of_real or cas(*real[:2])
            file["numbers"].update(cas=cas(file["images"], file["labels"]), cas_real=of_real)


# ------------------------------------------------------------ 2. what it needs: networks, features, samples

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
WEIGHTS_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{WEIGHTS}"
WEIGHTS_SHA = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


def nearest_images(images, real, device):
    """The index of the training image nearest to each sample; whole numbers are exact in float64."""
    found = []
    for part in images.flatten(1).split(500):
        part, distances = part.to(device).double(), []
        for block in real.flatten(1).split(BLOCK):
            block = block.to(device).double()
            distances.append(torch.addmm(block.square().sum(1), part, block.T, alpha=-2))
        found.append(torch.cat(distances, 1).argmin(1).cpu())
    return torch.cat(found)


def resize_for_inception(images, resize):
    """uint8 → 299×299, three channels, about −1 to 1.

    "tf" is TensorFlow's old bilinear rule (source = target × size / 299, no half-pixel centres), then
    (x − 128) / 128: the paper's FID. "torch" is pytorch-fid's: today's rule, then 2x − 1.
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
        raise UserError(f"FID's Inception weights cannot be had ({error}); get {WEIGHTS_URL} and put it at "
                        f"{path}, or name it with --weights; --features own needs none") from None
    sha = hashlib.sha256(data).hexdigest()
    trouble = f"sha256 {sha[:8]}…, not FID's {WEIGHTS_SHA[:8]}…"
    if sha != WEIGHTS_SHA and given:
        say(f"warning: --weights {path}: {trouble}; the numbers compare with nobody else's")
    elif sha != WEIGHTS_SHA:
        raise UserError(f"{path}: damaged, {trouble}; delete it if it is there, and try again")
    if fetch:
        write_whole(path, data)
    return path, sha


def load_inception(path):
    """FID's Inception network with the weights in a file."""
    settings = dict(num_classes=1008, aux_logits=False, transform_input=False, init_weights=False)
    net = import_torchvision().models.inception_v3(weights=None, **settings).eval()
    try:
        net.load_state_dict(load_checkpoint(path))
    except (RuntimeError, AttributeError):
        raise UserError(f"{path}: not FID's Inception; the usual file is {WEIGHTS}") from None
    return Inception(net).requires_grad_(False).to(memory_format=torch.channels_last)  # much faster on a CPU


class Inception(nn.Module):
    """torchvision's layers, every BatchNorm folded into its convolution, FID's arithmetic → 2048 features.

    Average pools leave the padding out of the mean, and the last block has a max pool.
    """

    def __init__(self, net):
        super().__init__()
        names = [name for name, _ in net.named_children() if name.startswith(("Conv2d", "maxpool", "Mixed"))]
        self.layers, self.head = nn.ModuleDict({name: getattr(net, name) for name in names}), net.fc
        for layer in self.layers.modules():
            if hasattr(layer, "bn"):
                layer.conv, layer.bn = nn.utils.fuse_conv_bn_eval(layer.conv, layer.bn), nn.Identity()

    def forward(self, x):
        for name, layer in self.layers.items():
            x = self.block(layer, x, name == "Mixed_7c") if name.startswith("Mixed") else layer(x)
        return x.mean((2, 3))

    def block(self, layers, x, last):
        """Branches side by side. NAME_1, NAME_2, ... follow each other; NAME_3a, NAME_3b share an input."""
        inputs, outputs = {}, {}
        for name, layer in layers.named_children():
            branch, _, step = name.partition("_")
            if step == "pool" and last:
                outputs[name] = layer(F.max_pool2d(x, 3, 1, 1))
            elif step == "pool":  # after the 1×1 convolution: it commutes with a mean, has fewer channels
                outputs[name] = F.avg_pool2d(layer.conv(x), 3, 1, 1, count_include_pad=False).relu_()
            elif step.endswith(("a", "b")):
                outputs.pop(branch, None)
                outputs[name] = layer(inputs[branch])
            else:
                inputs[branch] = outputs[branch] = layer(inputs.get(branch, x))
        if "branch_pool" not in outputs:
            outputs["pool"] = F.max_pool2d(x, 3, 2)
        return torch.cat(list(outputs.values()), 1)


def make_extractor(real, args, metrics, device):
    """→ the recipe of the features, their number, and network(images) → features, logits."""
    if args.features == "own":
        images, labels, names = real
        config = (OWN["depth"], len(names), OWN["width"], images.shape[1])
        recipe = dict(OWN, steps=args.own_steps)
        net, accuracy = train_clean("own", NoisyResNet, config, images, labels, recipe, args, device)
        sha = checksum(net.state_dict())
        about = dict(features="own", sha256=sha, test_accuracy=accuracy, seed=args.seed, **recipe)

        def own(images):
            x = images.float() / 255
            features = net.features(x, x.new_full(x.shape[:1], CLEAN))
            return features, net.linear(features)

        return about, net.linear.in_features, own
    path, sha = inception_weights(args.weights, args.root)
    inception = load_inception(path).to(device)
    if "is" in metrics and not inception.head.weight.any():
        raise UserError(f"{path}: weights without a head, which IS needs; without IS: --metrics fid")

    def network(images):
        parts = images.split(10 if device.type == "cpu" else len(images))  # ten suit the cache of a CPU
        features = torch.cat([inception(resize_for_inception(part, args.resize)) for part in parts])
        return features, features @ inception.head.weight.T  # FID's logits leave out the last bias

    return dict(features="inception", sha256=sha, resize=args.resize), 2048, network


class ResNet(nn.Module):
    """torchvision's ResNet with its ImageNet stem, for CAS; called as our networks are."""

    def __init__(self, model, classes):
        super().__init__()
        self.config = dict(model=model, classes=classes)
        self.net = getattr(import_torchvision().models, model)(num_classes=classes)

    def forward(self, x, sigma):
        return self.net(x.expand(-1, 3, -1, -1))


def train_clean(kind, network, config, images, labels, recipe, args, device):
    """A classifier of images without noise, kept by content, trained once → it, its test accuracy."""
    torch.manual_seed(derive_seed(args.seed, kind))
    net = network(*config).to(device)
    settings = dict(recipe, seed=args.seed, config=net.config)
    path = pathlib.Path(args.root) / "features" / f"{kind}-{checksum([images, labels, settings])[:24]}.pt"
    batch = image_batches(images, labels, recipe["batch"], args.seed, CLEAN, CLEAN, flip=False)
    plan = Plan(recipe["steps"], recipe["lr"], cosine=recipe["cosine"], seed=args.seed)
    fit(net, batch, lambda x, sigma, y, z: ce_loss(net, x, sigma, y, 0.0), path, kind, settings, plan, device,
        restart=args.restart)
    net.eval().requires_grad_(False)
    images, labels, _ = load_images(args.data, "test", args.size, args.root)
    right = 0
    for x, y in zip(images.split(args.batch), labels.split(args.batch)):
        x = x.to(device).float() / 255
        right += (net(x, x.new_full(y.shape, CLEAN)).argmax(1).cpu() == y).sum().item()
    return net, right / len(images)


def extract(images, about, network, args, device, name):
    """Features and logits, kept by content, 5,000 images per file: a run that was stopped continues."""
    key = [about["features"], about["sha256"], about.get("resize")]
    parts, progress, done = [], None, 0
    for part in images.split(5000):
        path = pathlib.Path(args.root) / "features" / f"{about['features']}-{checksum([part, key])[:24]}.pt"
        try:
            parts.append(load_checkpoint(path))
            done += len(part)
            continue
        except UserError:  # not there, or damaged
            progress = progress or Progress(len(images), done, f"{name}: image")
        rows = []
        for batch in part.split(args.batch):
            with torch.no_grad():
                rows.append([v.cpu() for v in network(batch.to(device))])
            done += len(batch)
            progress(done)
        features, logits = map(torch.cat, zip(*rows))
        if not features.isfinite().all():
            raise UserError(f"{name}: features that are not finite; the weights of the extractor are damaged")
        parts.append(dict(features=features, logits=logits))
        save_checkpoint(path, parts[-1])
    where = device if device.type == "cuda" else "cpu"  # the metrics need float64, which MPS has not
    return [torch.cat([part[key] for part in parts]).to(where) for key in ("features", "logits")]


def read_stats(path, dim):
    """Mean and covariance for FID from a file of pytorch-fid's kind."""
    found = read_npz(path)
    mu, cov = (np.asarray(found.get(key, np.nan)) for key in ("mu", "sigma"))
    finite = np.isfinite(mu).all() and np.isfinite(cov).all()
    if mu.shape != (dim,) or cov.shape != (dim, dim) or not finite:
        shapes = ", ".join(f"{key} {value.shape}" for key, value in found.items())
        wanted = f"finite mu ({dim},) and sigma ({dim}, {dim}), as --save-stats writes them"
        raise UserError(f"--stats {path}: holds {shapes}; these features need {wanted}")
    return mu, cov


def read_samples(path):
    """Our .npz, guided-diffusion's, a folder or `test` → dict(path, images, labels, recipe, folders)."""
    file = dict(path=str(path), images=None, labels=None, recipe={}, folders=None)
    if path.is_dir():
        found, folders = read_folder(path, None)
        if folders == ["."]:
            return dict(file, images=found["images"])
        return dict(file, **found, folders=folders)
    if str(path) == "test" and not path.exists():
        return dict(file, recipe=dict(split="test"))
    if path.suffix == ".npy":
        raise UserError(f"{path}: an array without names; save np.savez('x.npz', images=..., labels=...)")
    found = read_npz(path)
    images = found.get("images", found.get("arr_0"))
    if images is None:
        hint = "FID statistics go to --stats" if "mu" in found else "expected images, labels or arr_0, arr_1"
        raise UserError(f"{path}: holds {', '.join(found) or 'nothing'}; {hint}")
    try:
        recipe = dict(json.loads(str(found.get("recipe", "{}"))))
    except (ValueError, TypeError):
        raise UserError(f"{path}: its recipe is not a JSON object; it is damaged, sample again") from None
    return dict(file, images=images, labels=found.get("labels", found.get("arr_1")), recipe=recipe)


# ------------------------------------------------------------ 3. machinery: checks, arguments, the table


def check_samples(file, real, args, metrics):
    """Makes the images a tensor (N, C, H, W) and the labels one, or None; or an error that names the cure."""
    path, images, labels = file["path"], file["images"], file["labels"]
    if real and file["folders"]:
        labels = folder_labels(path, labels, file["folders"], real[2])
    if isinstance(images, torch.Tensor):
        images = images.detach().cpu()
        if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
            images = images.movedim(1, -1)
    images = np.asarray(images)
    if images.dtype.kind == "f" and images.size:
        low, high = images.min(), images.max()
        if not np.isfinite([low, high]).all():
            raise UserError(f"{path}: the images hold NaN or infinite values; the sampler failed, try again")
        cure = "x.clip(0, 255)" if low < -1 or high > 1 else "(127.5 * (x + 1))" if low < 0 else "(255 * x)"
        cure += ".round().astype('uint8')"
        raise UserError(f"{path}: images are {images.dtype}, {low:.3g} to {high:.3g}; save {cure}")
    values = np.unique(images.reshape(-1)[: 10**6]).tolist() if images.dtype == np.uint8 else []
    if values in ([0], [1], [0, 1], [0, 1, 255]):  # floats cast to uint8
        raise UserError(f"{path}: the only pixel values are {values}; scale to 0 to 255 first")
    if isinstance(labels, torch.Tensor):
        labels = labels.cpu()
    given = np.zeros(images.shape[:1], int) if labels is None else labels
    images, given = check_images(path, dict(images=images, labels=given))
    least = max(2, 10 if "is" in metrics else 0, args.k + 1 if "prdc" in metrics else 0)
    if len(images) < least:
        raise UserError(f"{path}: {len(images)} samples, the metrics with --k {args.k} need at least {least}")
    file.update(images=images, labels=None)
    if not real:
        return
    real_images, _, names = real
    if images.shape[1:] != real_images.shape[1:]:
        ours, theirs = ("×".join(map(str, v.shape[1:])) for v in (images, real_images))
        cure = f"--size {images.shape[2]} resizes those"
        if images.shape[1] != real_images.shape[1]:
            cure = "see --data"
            if images.shape[1] == 3:
                cure = "save one channel, images[..., :1], or see --data"
        raise UserError(f"{path}: samples are {ours}, the images of --data {args.data} {theirs}; {cure}")
    if labels is None:
        return
    file["labels"] = given
    if given.max() >= len(names):
        classes = f"--data {args.data} has {len(names)} classes"
        raise UserError(f"{path}: labels up to {given.max()}, {classes}; see --data")
    least = args.k + 1 if "classwise" in metrics else 1 if "cas" in metrics else 0
    counts = given.bincount(minlength=len(names))
    if counts.min() < least:
        c = counts.argmin().item()
        cure = f"need {least} in every class; sample more, or leave them out with --metrics fid,is,prdc"
        trouble = f"class {c} ({names[c]}) has {counts[c]} samples"
        raise UserError(f"{path}: {trouble}, class-wise metrics with k = {args.k} or CAS {cure}")


def folder_labels(path, labels, folders, names):
    """Labels by the names of the sub-folders: class names, or numbers."""
    known = {name: c for c, name in enumerate(names)}
    if not set(folders) <= set(known):
        known = {name: int(name) for name in folders if name.isdecimal()}
    if wrong := set(folders) - set(known):
        cure = f"name them {names[0]}… or 0, 1, 2…"
        raise UserError(f"{path}: its sub-folder {min(wrong)!r} is no class of --data; {cure}")
    return np.array([known[name] for name in folders])[labels]


def use_recipe(args, files):
    """Takes --data and --size from the first recipe that has them, where they are not given."""
    recipes = [file["recipe"] for file in files.values() if isinstance(file["recipe"].get("data"), str)]
    recipe = recipes[0] if recipes else {}
    data, size = args.data or recipe.get("data"), args.size
    if recipe and size is None and pathlib.Path(data).name == pathlib.Path(recipe["data"]).name:
        size = recipe.get("size") if isinstance(recipe.get("size"), int) else None
    if (data, size) != (args.data, args.size):
        say(f"--data {data}" + (f" --size {size}" if size else "") + ", as in the recipe of the samples")
    args.data, args.size = data or "cifar10", size


def try_folder(folder, cure):
    """A folder that cannot be written is an error before the first computation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); {cure}") from None


ROWS = {  # of the table, in the paper's order: title, digits, which value is best
    "fid": ("FID", 2, min), "is": ("IS", 2, max), "is_splits": ("IS, ten splits", 2, max),
    **{key: (key.capitalize(), 3, max) for key in PRDC},
    "cas": ("CAS", 3, max), "cas_real": ("CAS of real images", 3, None),
    "accuracy": ("Class accuracy", 3, max), "exact_accuracy": ("Class accuracy, exact", 3, max),
    "distinct": ("Distinct images", 0, None), "cw_fid": ("(CW) FID", 2, min),
    **{f"cw_{key}": (f"(CW) {key.capitalize()}", 3, max) for key in PRDC}}
PAPER_ROWS = ("fid", "is", *PRDC, "cas", *(f"cw_{key}" for key in PRDC))
PAPER = {  # Table 2
    "cifar10": {"base": (4.10, 9.08, 0.67, 0.61, 1.05, 0.80, 0.38, 0.51, 0.59, 0.63, 0.60),
                "scaling": (12.48, 9.37, 0.75, 0.49, 1.36, 0.75, 0.46, 0.70, 0.42, 1.23, 0.66),
                "ours": (2.25, 9.90, 0.65, 0.62, 0.96, 0.81, 0.58, 0.56, 0.61, 0.76, 0.71)},
    "cifar100": {"base": (4.52, 11.53, 0.62, 0.62, 0.84, 0.71, 0.15, 0.33, 0.68, 0.30, 0.38),
                 "scaling": (12.58, 11.59, 0.65, 0.52, 0.93, 0.61, 0.24, 0.59, 0.41, 0.78, 0.51),
                 "ours": (3.86, 11.62, 0.61, 0.63, 0.82, 0.71, 0.28, 0.42, 0.68, 0.43, 0.52)}}


def paper_columns(data):
    """Table 2 as columns for `markdown`; they have no n, which tells them from ours."""
    return {f"{name} (paper)": {key: dict(value=value) for key, value in zip(PAPER_ROWS, values)}
            for name, values in PAPER[data].items()}


def markdown(columns, fid, real=()):
    """The paper's rows, one column per file. Bold: the best of ours but `real`, and of the paper."""
    lines = ["| | | " + " | ".join(columns) + " |", "| --- | --- |" + " ---: |" * len(columns)]
    for key, (title, digits, best) in ROWS.items():
        cells = {name: numbers[key] for name, numbers in columns.items() if key in numbers}
        counts = dict.fromkeys(str(cell["n"]) for cell in cells.values() if "n" in cell)
        if not counts:  # no number of ours
            continue
        title = title.replace("FID", fid)
        if key == "fid":
            title += f"@{'/'.join(counts)}"
        rounded = {name: round(cell["value"], digits) for name, cell in cells.items() if name not in real}
        texts = []
        for name in columns:
            if name not in cells:
                texts.append("–")
                continue
            cell = cells[name]
            text = f"{cell['value']:.{digits if 'n' in cell else 2}f}"
            rivals = [value for other, value in rounded.items() if ("n" in cells[other]) == ("n" in cell)]
            if best and len(rivals) > 1 and rounded.get(name) == best(rivals):
                text = f"**{text}**"
            if "deviation" in cell:
                text += f" ± {cell['deviation']:.2f}"
            if "expected" in cell:
                text += f" of {cell['expected']:.1f} expected"
            texts.append(text)
        arrow = {min: "↓", max: "↑", None: ""}[best]
        lines.append(f"| {title} | {arrow} | {' | '.join(texts)} |")
    return "\n".join(lines)


def figure_4(columns, out):
    """The sorted differences of the class-wise numbers to those of the first file, one picture per file."""
    first, *others = [name for name in columns if "cw_recall" in columns[name]] or [None]
    for name in others:
        panels = []
        for key in PRDC:
            a, b = (columns[v][f"cw_{key}"]["classes"] for v in (first, name))
            bars = sorted((b[c] - a[c] for c in a), reverse=True)
            y = f"{name} minus {first}"
            panels.append(dict(title=f"Class-wise {key}", x="classes, sorted", y=y, bars=bars))
        chart(out / f"classwise-{name}-minus-{first}.png", panels, columns=2)


def report(files, about, dim, args, metrics, out):
    """Writes evaluation.json, evaluation.md and Figure 4 → the table with its notes."""
    columns, notes = {name: file["numbers"] for name, file in files.items()}, []
    fid = "FD" if args.features == "own" else "FID"
    for n in sorted({v["fid"]["n"] for v in columns.values() if "fid" in v and v["fid"]["n"] < 10_000}):
        trouble = f"few samples: compare with {fid}@{n} only"
        if n <= dim:
            trouble = f"fewer than {dim + 1} samples: not comparable"
        notes.append(f"Warning: {fid}@{n} is of {trouble}")
    for n in sorted({min(v["cw_fid"]["n_per_class"]) for v in columns.values() if "cw_fid" in v}):
        notes.append(f"Warning: (CW) {fid} is of {n} samples per class, few: compare with as few only")
    if args.metrics is None and "cas" not in metrics:
        notes.append("CAS was left out, as there is no GPU; --metrics all includes it")
    for name, file in files.items():
        data = str(file["recipe"].get("data", args.data))
        if pathlib.Path(data).name != pathlib.Path(args.data).name:
            notes.append(f"Warning: {name} was drawn for {data}, not for --data {args.data}")
    shown = ("path", "n", "recipe", "numbers")
    kept = {name: {key: file[key] for key in shown} for name, file in files.items()}
    content = dict(data=args.data, size=args.size, features=about, notes=notes, files=kept)
    write_whole(out / "evaluation.json", json.dumps(content, indent=1).encode())
    figure_4(columns, out)
    title = args.data
    if about:
        what = f"resize {args.resize}" if fid == "FID" else f"test accuracy {about['test_accuracy']:.4f}"
        title += f", {args.features} features (sha256 {about['sha256'][:8]}, {what}), k = {args.k}"
    if args.paper:
        columns.update(paper_columns(args.data))
    real = [name for name, file in files.items() if file["recipe"].get("split") == "test"]
    text = "\n\n".join([title, markdown(columns, fid, real), *notes])
    write_whole(out / "evaluation.md", f"{text}\n".encode())
    return text


if __name__ == "__main__":
    run(main)
