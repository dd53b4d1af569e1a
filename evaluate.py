"""Compares samples with real images: FID, IS, P/R/D/C, their class-wise averages, CAS.

    python evaluate.py runs/cifar10/samples-base.npz runs/cifar10/samples-dlsm.npz

Reads sample files (our .npz, guided-diffusion's, folders of pictures). Prints the paper's Table 2
with one column per file, and writes beside the first file: evaluation.md, evaluation.json (the
recipe of each number), Figure 4, side-by-side.png. Features and classifiers are kept in
ROOT/features: nothing is computed twice. In Python: evaluate(images, labels, data="cifar10",
metrics="fid,prdc").
"""
import hashlib
import json
import math
import pathlib
import tempfile
import urllib.request

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn

from models import (NoisyResNet, UserError, checksum, fold_batchnorm, load_checkpoint, load_model,
                    save_checkpoint, write_whole)
from sample import chart, save_grid
from train_classifier import ce_loss
from train_score import (WORLD, Parser, Plan, Progress, bounded, check_images, derive_seed, fit,
                         image_batches, import_torchvision, load_images, read_folder, read_npz, read_recipe,
                         run, run_folder, say, set_up, shared_flags)

# ------------------------------------------------------------ 1. the story: the metrics, then the stage

OWN = dict(depth=18, width=16, batch=128, lr=2e-3, cosine=True)  # our extractor: minutes on a CPU at 16×16
CAS = dict(batch=150, lr=2e-4, cosine=False, inputs="0 to 1")  # Appendix A.6.3; no augmentation
CLEAN = 0.01  # the σ that these classifiers of images without noise are told
METRICS = ("fid", "is", "prdc", "classwise", "cas")
PRDC = ("precision", "recall", "density", "coverage")
BLOCK = 2048  # BLOCK² distances are held at a time: 16 MB in float32
SPARE = 8  # neighbours kept beyond the k-th, in case rounding changed their order


def prdc(real, fake, k=3, real_radii=None):
    """Precision, recall (Kynkäänniemi et al. 2019), density, coverage (Naeem et al. 2020) of points → dict.

    B(x) is the open ball around x out to its k-th nearest neighbour in its own set. precision: share of fakes
    in some B(real). recall: share of reals in some B(fake). density: pairs of a fake in a B(real), over
    k · fakes. coverage: share of reals with a fake in their ball. Equal to brute force in float64.
    """
    real, fake = as_points(real, k), as_points(fake, k)
    if real.dtype != fake.dtype:
        real, fake = real.double(), fake.double()
    real_radii = knn_radii(real, k) if real_radii is None else real_radii
    fake_radii = knn_radii(fake, k)
    in_balls, covered, recalled = 0, 0, 0  # the first: in how many B(real) each fake is
    rows = max(BLOCK**2 // len(fake), 1)
    for i in range(0, len(real), rows):
        part = real[i : i + rows]
        distance, error = squared_distances(part, fake)
        if real.dtype == torch.float32 and error > 0.01 * real_radii.median():  # most pairs are near ties
            return prdc(real.double(), fake.double(), k, real_radii)
        inside = inside_balls(distance, real_radii[i : i + rows, None], error, part, fake)
        in_balls = in_balls + inside.sum(0, dtype=torch.int32)  # ten times as fast as int64
        covered += inside.any(1).sum().item()
        recalled += inside_balls(distance, fake_radii, error, part, fake).any(1).sum().item()
    return dict(precision=(in_balls > 0).double().mean().item(), recall=recalled / len(real),
                density=in_balls.sum().item() / (k * len(fake)), coverage=covered / len(real))


def knn_radii(points, k):
    """Squared distance of each point to its k-th nearest other one; exact distances decide near ties."""
    points = as_points(points, k)
    n, m, error = len(points), min(k + SPARE, len(points) - 1), 0.0
    nearest = points.new_full((n, m), math.inf)
    index = torch.zeros(n, m, dtype=torch.int64, device=points.device)
    rows = max(BLOCK**2 // n, 1)
    for i in range(0, n, rows):  # these rows against all points from here on: each pair once
        distance, bound = squared_distances(points[i : i + rows], points[i:])
        distance.fill_diagonal_(math.inf)  # a point is not its own neighbour
        error = max(error, bound)
        for start, block in ((i, distance), (i + rows, distance[:, rows:].T)):
            to = slice(start, start + len(block))
            nearest[to], order = torch.cat([nearest[to], block], 1).topk(m, largest=False)
            kept = index[to].gather(1, order.clamp(max=m - 1))
            index[to] = torch.where(order < m, kept, order - m + i)
    unsure = (nearest - nearest[:, k - 1 : k]).abs() <= 2 * error
    if points.dtype == torch.float32 and m < n - 1 and unsure[:, -1].any():
        return knn_radii(points.double(), k)  # points beyond the spare ones may be nearer
    nearest = nearest.double()
    nearest[unsure] = exact_distances(points, points, unsure.nonzero()[:, 0], index[unsure])
    return nearest.kthvalue(k, 1).values


def as_points(values, k):
    """(N, d) in float32, or in float64 where that is as fast (small d) or the values have more digits."""
    values = torch.as_tensor(values).detach()
    values = values.reshape(len(values), -1)
    if not 1 <= k < len(values) or not values.sum(0).isfinite().all():
        raise UserError(f"prdc: k = {k}, {len(values)} points; needs 1 ≤ k < points, none NaN or infinite")
    return values if values.dtype == torch.float32 and values.shape[1] >= 64 else values.double()


def squared_distances(a, b):
    """‖a‖² + ‖b‖² − 2ab of all pairs by one matrix product, and several times its largest error seen."""
    a2, b2 = (torch.linalg.vector_norm(points, dim=1).square() for points in (a, b))
    error = 2 * max(a.shape[1], 16) ** 0.5 * torch.finfo(a.dtype).eps * max(a2.max(), b2.max())
    return torch.addmm(b2, a, b.T, alpha=-2).add_(a2[:, None]), error


def inside_balls(distance, radius, error, a, b):
    """distance < radius, both squared, for all pairs; near ties are decided by exact distances."""
    inside = distance < (radius - error).to(distance.dtype)
    i, j = (inside ^ (distance < (radius + error).to(distance.dtype))).nonzero().T
    limit = radius.expand(distance.shape)[i, j] * (1 - 1e-12)  # a distance computed twice may differ a little
    inside[i, j] = exact_distances(a, b, i, j) < limit
    return inside


def exact_distances(a, b, i, j):
    """‖a_i − b_j‖² of some pairs, from differences in float64."""
    pairs = zip(i.split(512), j.split(512))
    return torch.cat([(a[u].double() - b[v].double()).square().sum(1) for u, v in pairs])


def moments(features):
    """Mean and covariance (over n − 1) in float64, by blocks of rows."""
    parts, n = torch.as_tensor(features).split(BLOCK), len(features)
    mean = sum(part.double().sum(0) for part in parts) / n
    centered = (part.double() - mean for part in parts)
    return mean, sum(part.T @ part for part in centered) / max(n - 1, 1)


def frechet_distance(mu1, cov1, mu2, cov2):
    """‖μ1 − μ2‖² + tr(S1 + S2 − 2 (S1 S2)^½) of two Gaussians (Heusel et al. 2017), in float64.

    With S1 = L Lᵀ, tr (S1 S2)^½ is the sum of the roots of the eigenvalues of Lᵀ S2 L, which is symmetric.
    With fewer samples than features Cholesky finds no L; then the null space of S1 is left out, which adds
    nothing, but whose rounding errors the root would magnify.
    """
    device = torch.as_tensor(mu1).device
    mu1, cov1, mu2, cov2 = (torch.as_tensor(v).to(device).double() for v in (mu1, cov1, mu2, cov2))
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
                        help="files, folders; test: held-out images (default: runs/RUN/samples-*.npz)")
    parser.usage = "%(prog)s [flags] [samples ...]"
    shared_flags(parser)
    parser.set_defaults(data=None)
    parser.group("metrics; default --data and --size: those in the recipe of the sample files")
    parser.flag("--metrics", None, f"of {','.join(METRICS)} (default: all; cas only on GPUs)", metavar="LIST")
    parser.flag("--k", 3, "neighbours for precision, recall, density, coverage", bounded(int, 1, 1000))
    parser.flag("--stats", None, "FID's reference: an .npz with mu, sigma")
    parser.flag("--save-stats", None, "write such a file, of the training images")
    parser.flag("--paper", False, "the paper's columns beside ours (cifar10, cifar100)")
    parser.flag("--out", None, "folder for the results (default: that of the first file)")
    parser.group("features and classifiers")
    parser.flag("--features", "inception", "own: of a ResNet trained here", choices=["inception", "own"])
    parser.flag("--own-steps", 1500, "training steps of that ResNet, of 128 images", bounded(int, 1, 10**9))
    parser.flag("--weights", None, "Inception's (default: in ROOT/features, else fetched), or those of own")
    parser.flag("--resize", "tf", "tf: the paper's rule; torch: pytorch-fid's", choices=["tf", "torch"])
    parser.flag("--batch", 100, "images per pass", bounded(int, 1, 10**5), metavar="N")
    networks = ["resnet18", "resnet34", "resnet50"]
    parser.flag("--cas-model", "resnet50", f"network of CAS: {', '.join(networks)}", choices=networks)
    parser.flag("--cas-steps", 10_000, "of 150 images; the release trains 400,001", bounded(int, 1, 10**9))
    return parser


def main():
    args = make_parser().parse_args()
    folder = run_folder(args)
    paths = args.samples or sorted(folder.glob("samples-*.npz"))
    if not paths:
        raise UserError(f"{folder}: has no samples-*.npz; python sample.py makes them, or name your files")
    files = {}
    for path in paths:
        name = (path.name if path.is_dir() else path.stem).removeprefix("samples-")
        while name in files:
            name = f"{path.absolute().parent.name}-{name}"
        files[name] = read_samples(path)
    there = [path.absolute().parent for path in paths if path.exists()]  # `test` is no path
    measure(files, args, pathlib.Path(args.out or (there or [folder])[0]))


def evaluate(images, labels=None, **flags):
    """Numbers of samples in memory → {key: value}; flags as keywords: data="fashion", metrics="fid,prdc"."""
    line = []
    for key, value in flags.items():
        if isinstance(value, (list, tuple)):
            value = ",".join(value)
        if value is not None and value is not False:
            line.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    args = make_parser().parse_args(line)
    images = torch.as_tensor(images).detach().cpu()
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        images = images.movedim(1, -1)
    labels = None if labels is None else torch.as_tensor(labels).cpu()
    file = dict(path="samples", images=images, labels=labels, recipe={})
    measure({"samples": file}, args)
    return {key: number["value"] for key, number in file["numbers"].items()}


def measure(files, args, out=None):
    """Every metric of every file into file["numbers"], and the tables into the folder `out`."""
    device, metrics, real, reference = prepare(files, args, out)
    about = {}
    if metrics != {"cas"} or args.save_stats:
        about = compare_features(files, real, reference, args, metrics, device)
        if out:
            report(files, about, args, metrics, out)
    if "cas" in metrics:
        measure_cas(files, real, args, device)
        if out:
            report(files, about, args, metrics, out)


def compare_features(files, real, reference, args, metrics, device):
    """All but CAS, each number with its recipe → the recipe of the features."""
    about, network = make_extractor(real, args, metrics, device)
    images, real_labels, names = real or ((), None, None)
    training = f"{args.data}, {len(images)} training images"
    mark = " ".join(map(str, (about["features"], about["sha256"], about.get("resize", ""))))
    if reference:
        *reference, theirs = reference
        if theirs not in ("", mark):
            raise UserError(f"--stats {args.stats}: is of other features ({theirs}), these are {mark}")
        if not theirs:
            note = f"Warning: {args.stats} does not say its features; pytorch-fid's need --resize torch"
            next(iter(files.values()))["notes"].append(note)
    if real:
        real_features, _ = extract(images, about, network, args, device, "real images")
        mu, cov = moments(real_features)
        reference = reference or (mu, cov)
    if args.save_stats:
        arrays = dict(mu=mu.cpu(), sigma=cov.cpu(), extractor=mark)
        write_whole(args.save_stats, lambda file: np.savez(file, **arrays))
    if "prdc" in metrics:
        radii = knn_radii(real_features, args.k)  # a large part of the work, which serves all files
    if "classwise" in metrics and any(file["labels"] is not None for file in files.values()):
        of_class = [real_features[real_labels == c] for c in range(len(names))]
        class_radii = [knn_radii(points, args.k) for points in of_class]
    for name, file in files.items():
        labels, numbers, n = file["labels"], file["numbers"], file["n"]
        recipe = dict(n=n, extractor=about)
        features, logits = extract(file["images"], about, network, args, device, name)
        if "fid" in metrics:
            fid = frechet_distance(*moments(features), *reference)
            numbers["fid"] = dict(recipe, value=fid, reference=str(args.stats or training))
        if "is" in metrics:
            numbers["is"] = dict(recipe, value=inception_score(logits, 1)[0], splits=1)
            mean, deviation = inception_score(logits)
            numbers["is_splits"] = dict(recipe, value=mean, splits=10, deviation=deviation)
        if "prdc" in metrics:
            say(f"{name}: precision, recall, density, coverage of {n} samples, {len(images)} real images")
            for key, value in prdc(real_features, features, args.k, radii).items():
                numbers[key] = dict(recipe, value=value, k=args.k, reference=training)
        if "classwise" in metrics and labels is not None:
            classes = {}
            for c, class_name in enumerate(names):
                points, fake = of_class[c], features[labels == c]
                fid = frechet_distance(*moments(points), *moments(fake))
                classes[class_name] = dict(prdc(points, fake, args.k, class_radii[c]), fid=fid)
            for key in ("fid", *PRDC):
                values = {class_name: row[key] for class_name, row in classes.items()}
                numbers[f"cw_{key}"] = dict(recipe, value=sum(values.values()) / len(values), classes=values,
                                            k=args.k, n_per_class=labels.bincount().tolist(),
                                            reference=f"{args.data}, the training images of each class")
            if args.features == "own":
                right = (logits.argmax(1).cpu() == labels).double().mean().item()
                numbers["accuracy"] = dict(recipe, value=right)
        if file["recipe"].get("exact") is True and real and labels is not None:
            for key, number in match_pixels(file["images"], labels, images, real_labels).items():
                numbers[key] = dict(number, n=n, nearest="by the distance of pixels", reference=training)
    return about


def match_pixels(images, labels, real_images, real_labels):
    """Samples of an exact score end on training images: are these of the right class, and how many differ?"""
    nearest = []
    for part in images.flatten(1).double().split(500):  # whole numbers are exact in float64
        distances = [torch.cdist(part, block.double()) for block in real_images.flatten(1).split(BLOCK)]
        nearest.append(torch.cat(distances, 1).argmin(1))
    nearest = torch.cat(nearest)
    counts = zip(labels.bincount().tolist(), real_labels.bincount().tolist())
    expected = sum(total * (1 - (1 - 1 / total) ** drawn) for drawn, total in counts)
    right = (real_labels[nearest] == labels).double().mean().item()
    return dict(exact_accuracy=dict(value=right),
                distinct=dict(value=len(nearest.unique()), expected=expected))


def measure_cas(files, real, args, device):
    """Classification Accuracy Score (Ravuri & Vinyals 2019): real test accuracy after training on samples."""
    recipe, config = dict(CAS, steps=args.cas_steps), (args.cas_model, len(real[2]))

    def cas(images, labels):
        net = train_clean("cas", ResNet, config, images, labels, recipe, args, device)
        return dict(value=test_accuracy(net, args, device), n=len(images), model=args.cas_model,
                    seed=args.seed, **recipe)

    of_real = None
    for file in files.values():
        if file["labels"] is not None and file["recipe"].get("split") != "test":
            of_real = of_real or cas(*real[:2])
            file["numbers"].update(cas=cas(file["images"], file["labels"]), cas_real=of_real)


# ------------------------------------------------------------ 2. what it needs: networks and features

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
WEIGHTS_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{WEIGHTS}"
WEIGHTS_SHA = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


def resize_for_inception(images, resize):
    """uint8 → 299×299, three channels, about −1 to 1.

    "tf" is TensorFlow's old bilinear rule (source = target × size / 299, no half-pixel centres), then
    (x − 128) / 128: the paper's FID. "torch" is pytorch-fid's: today's rule, then 2x − 1.
    """
    x = images.expand(-1, 3, -1, -1).float()
    if resize == "torch":
        return 2 * F.interpolate(x / 255, (299, 299), mode="bilinear", align_corners=False) - 1
    x = F.pad(x, (0, 1, 0, 1), mode="replicate")  # from corner to corner, size steps become 299
    x = F.interpolate(x, (300, 300), mode="bilinear", align_corners=True)
    return (x[:, :, :299, :299] - 128) / 128


def inception_weights(given, root):
    """The path of the weights, given or in ROOT/features and fetched if need be, and their sha256."""
    path = pathlib.Path(given or pathlib.Path(root) / "features" / WEIGHTS)
    try:
        if not given and not path.exists():
            say(f"fetching {WEIGHTS_URL} (96 MB) to {path}")
            with urllib.request.urlopen(WEIGHTS_URL, timeout=30) as answer:
                write_whole(path, answer.read())
        sha = hashlib.sha256(path.read_bytes()).hexdigest()
    except Exception as error:  # no network, a proxy's refusal, a cut connection, no such file
        raise UserError(f"FID's Inception weights cannot be had ({error}); get {WEIGHTS_URL} and put it at "
                        f"{path}, or name it with --weights; --features own needs none") from None
    trouble = f"{path}: sha256 {sha[:8]}…, not FID's {WEIGHTS_SHA[:8]}…"
    if sha != WEIGHTS_SHA and not given:
        raise UserError(f"{trouble}: damaged; delete it and try again")
    if sha != WEIGHTS_SHA:
        say(f"warning: {trouble}; the numbers compare with nobody else's")
    return path, sha


def load_inception(path):
    """FID's Inception → 2048 features, and its head: torchvision's, but for the pools inside its blocks.

    FID's average pools leave the padding out of the mean, and the last one is a max pool. For speed every
    BatchNorm is folded into its convolution, and an average pool comes after the 1×1 convolution that
    follows it: that commutes with a mean and has fewer channels.
    """
    settings = dict(num_classes=1008, aux_logits=False, transform_input=False, init_weights=False)
    net = import_torchvision().models.inception_v3(weights=None, **settings).eval()
    try:
        net.load_state_dict(load_checkpoint(path))
    except (RuntimeError, AttributeError):
        raise UserError(f"{path}: not FID's Inception; the usual file is {WEIGHTS}") from None
    head, net.fc = net.fc, nn.Identity()
    net = fx.symbolic_trace(fold_batchnorm(net))
    *pools, last = [node for node in net.graph.nodes if node.target is F.avg_pool2d]
    last.target = F.max_pool2d
    for pool in pools:
        pool.update_kwarg("count_include_pad", False)
        conv = next(iter(pool.users))
        conv.replace_all_uses_with(pool)
        conv.args, pool.args = pool.args, (conv,)
        conv.append(pool)
    net.recompile()
    return net.to(memory_format=torch.channels_last), head.requires_grad_(False)  # much faster on a CPU


def make_extractor(real, args, metrics, device):
    """→ the recipe of the features, and network(images) → features, logits."""
    if args.features == "own":
        images, labels, names = real
        if args.weights:  # of an earlier evaluation, from its ROOT/features
            net = load_model(args.weights, device, "own")
        else:
            config = (OWN["depth"], len(names), OWN["width"], images.shape[1])
            recipe = dict(OWN, steps=args.own_steps)
            net = train_clean("own", NoisyResNet, config, images, labels, recipe, args, device)
        recipe = dict(net.about["settings"])
        config = recipe.pop("config")
        found = [recipe.get("size"), config["channels"], config["classes"]]
        wanted = [images.shape[-1], images.shape[1], len(names)]
        if found != wanted:
            is_for = f"is for (size, channels, classes) {found}, not {wanted}"
            raise UserError(f"--weights {args.weights}: {is_for}")
        about = dict(features="own", sha256=checksum(net.state_dict()),
                     test_accuracy=test_accuracy(net, args, device), **recipe)

        def own(images):
            x = images.float() / 255
            features = net.features(x, x.new_full(x.shape[:1], CLEAN))
            return features, net.linear(features)

        return about, own
    path, sha = inception_weights(args.weights, args.root)
    net, head = (part.to(device) for part in load_inception(path))
    if "is" in metrics and not head.weight.any():
        raise UserError(f"{path}: weights without a head, which IS needs; without IS: --metrics fid")

    def inception(images):
        parts = images.split(10 if device.type == "cpu" else len(images))  # ten suit the cache of a CPU
        features = torch.cat([net(resize_for_inception(part, args.resize)) for part in parts])
        return features, features @ head.weight.T  # FID's logits leave out the last bias

    return dict(features="inception", sha256=sha, resize=args.resize), inception


def extract(images, about, network, args, device, name):
    """Features and logits, kept by content, 5,000 images per file: a run that was stopped continues."""
    key = [about["features"], about["sha256"], about.get("resize")]
    progress, parts = Progress(len(images), 0, f"{name}: image"), []
    for part in images.split(5000):
        path = pathlib.Path(args.root) / "features" / f"{about['features']}-{checksum([part, key])[:24]}.pt"
        try:
            parts.append(load_checkpoint(path))
        except UserError:  # not there, or damaged
            rows = []
            for batch in part.split(args.batch):
                rows.append([v.cpu() for v in network(batch.to(device))])
                progress(5000 * len(parts) + sum(len(features) for features, _ in rows))
            features, logits = map(torch.cat, zip(*rows))
            parts.append(dict(features=features, logits=logits))
            save_checkpoint(path, parts[-1])
    where = device if device.type == "cuda" else "cpu"  # the metrics need float64, which MPS has not
    return [torch.cat([part[key] for part in parts]).to(where) for key in ("features", "logits")]


class ResNet(nn.Module):
    """torchvision's ResNet with its ImageNet stem, for CAS; called as our networks are."""

    def __init__(self, model, classes):
        super().__init__()
        self.config = dict(model=model, classes=classes)
        self.net = getattr(import_torchvision().models, model)(num_classes=classes)

    def forward(self, x, sigma):
        return self.net(x.expand(-1, 3, -1, -1))


def train_clean(kind, network, config, images, labels, recipe, args, device):
    """A classifier of images without noise, kept by content, trained once."""
    torch.manual_seed(derive_seed(args.seed, kind))
    net = network(*config).to(device)
    settings = dict(recipe, seed=args.seed, size=images.shape[-1], config=net.config)
    path = pathlib.Path(args.root) / "features" / f"{kind}-{checksum([images, labels, settings])[:24]}.pt"
    settings["data"] = args.data  # a name only, which `difference` passes over
    batch = image_batches(images, labels, recipe["batch"], args.seed, CLEAN, CLEAN, flip=False)
    plan = Plan(recipe["steps"], recipe["lr"], cosine=recipe["cosine"], seed=args.seed)
    fit(net, batch, lambda x, sigma, y, z: ce_loss(net, x, sigma, y, 0.0), path, kind, settings, plan, device,
        restart=args.restart)
    net.about = dict(settings=settings)
    return net.eval().requires_grad_(False)


def test_accuracy(net, args, device):
    images, labels, _ = load_images(args.data, "test", args.size, args.root)
    right = 0
    for x, y in zip(images.split(args.batch), labels.split(args.batch)):
        x = x.to(device).float() / 255
        right += (net(x, x.new_full(y.shape, CLEAN)).argmax(1).cpu() == y).sum().item()
    return right / len(images)


# ------------------------------------------------------------ 3. machinery: files, checks, the table


def read_samples(path):
    """Our .npz, guided-diffusion's, a folder or `test` → dict(path, images, labels, recipe[, folders])."""
    file = dict(path=str(path), labels=None, recipe={})
    if str(path) == "test" and not path.exists():
        return dict(file, recipe=dict(split="test"))
    if path.is_dir():
        found, folders = read_folder(path, None)
        labels = None if folders == ["."] else found["labels"]
        return dict(file, images=found["images"], labels=labels, folders=folders)
    found = read_npz(path)
    images, labels = found.get("images", found.get("arr_0")), found.get("labels", found.get("arr_1"))
    if images is None:
        raise UserError(f"{path}: has no images (or arr_0) but {list(found)}; mu and sigma go to --stats")
    return dict(file, images=images, labels=labels, recipe=read_recipe(path, found))


def prepare(files, args, out):
    """Completes args, checks all before the work starts → device, metrics, real images, FID's reference."""
    if WORLD > 1:
        raise UserError("torchrun: an evaluation is one process; start it with python")
    device = set_up(args)
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    recipe = next((file["recipe"] for file in files.values() if "data" in file["recipe"]), {})
    if recipe and args.data in (None, recipe["data"]) and None in (args.data, args.size):
        args.data, args.size = recipe["data"], args.size or recipe.get("size")
        say(f"--data {args.data} --size {args.size}, as in the recipe of the samples")
    args.data = args.data or "cifar10"
    metrics = set(METRICS if args.metrics in (None, "all") else args.metrics.split(","))
    if not metrics <= set(METRICS):
        raise UserError(f"--metrics {args.metrics}: must be all, or some of {','.join(METRICS)}")
    if args.metrics is None and device.type != "cuda":
        metrics.remove("cas")  # which would take hours
    parser, own = make_parser(), args.features == "own"
    parser.refuse(args, f"with --features {args.features}", *(["resize", "paper"] if own else ["own_steps"]))
    if own and args.weights:
        parser.refuse(args, "with --weights", "own_steps")
    if "fid" not in metrics:
        parser.refuse(args, "without fid among --metrics", "stats")
    if "cas" not in metrics:
        parser.refuse(args, "without cas among --metrics", "cas_model", "cas_steps")
    if args.paper and args.data not in PAPER:
        raise UserError(f"--paper: the paper has {' and '.join(PAPER)}, not --data {args.data}")
    reference, real, most = None, None, None
    if args.stats:
        found = read_npz(args.stats)
        d = 8 * OWN["width"] if own else 2048
        if [np.shape(found.get(key)) for key in ("mu", "sigma")] != [(d,), (d, d)]:
            wanted = f"--features {args.features} needs mu ({d},), sigma ({d}, {d}); --save-stats makes it"
            raise UserError(f"--stats {args.stats}: {wanted}")
        reference = found["mu"], found["sigma"], str(found.get("extractor", ""))
    if own or args.save_stats or metrics - ({"is", "fid"} if args.stats else {"is"}):
        real = load_images(args.data, "train", args.size, args.root)
    for file in files.values():
        if file["recipe"].get("split") == "test":  # as many as the files before it have
            images, labels, _ = load_images(args.data, "test", args.size, args.root)
            file.update(images=images[:most].movedim(1, -1), labels=labels[:most])
        check_samples(file, real, args, metrics)
        most = max(most or 0, file["n"])
    stats = args.save_stats and pathlib.Path(args.save_stats).absolute().parent
    for folder in filter(None, (out, pathlib.Path(args.root) / "features", stats)):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # what cannot be written is an error now, not in hours
    return device, metrics, real, reference


def check_samples(file, real, args, metrics):
    """Makes the images a tensor (N, C, H, W) and the labels one, or None; or an error that names the cure."""
    path, given = file["path"], file["labels"]
    labels = np.zeros(np.shape(file["images"])[:1], int) if given is None else given
    images, labels = check_images(path, dict(images=file["images"], labels=labels))
    least = max(10, args.k + 1)
    if len(images) < least or images.max() <= 1:
        trouble = f"{len(images)} samples with pixel values up to {images.max()}"
        raise UserError(f"{path}: {trouble}; --k {args.k} needs at least {least}, with values from 0 to 255")
    file.update(images=images, labels=None, n=len(images), numbers={}, notes=[])
    if real and images.shape[1:] != real[0].shape[1:]:
        ours, theirs = list(images.shape[1:]), list(real[0].shape[1:])
        cure = f"choose --data, or --size {ours[1]}"
        raise UserError(f"{path}: samples are {ours}, the images of --data {args.data} {theirs}; {cure}")
    if given is None or not real:
        return
    names = real[2]
    if "folders" in file:  # class names, or numbers
        try:
            classes = [names.index(name) if name in names else int(name) for name in file["folders"]]
            if min(classes) < 0:
                raise ValueError
        except ValueError:
            raise UserError(f"{path}: its sub-folders must be named {names[0]}… or 0, 1, 2…") from None
        labels = torch.tensor(classes)[labels]
    counts, real_counts = (v.bincount(minlength=len(names)) for v in (labels, real[1]))
    least = args.k + 1 if "classwise" in metrics else 1 if "cas" in metrics else 0
    if least == 0 and len(counts) > len(names):
        file["notes"].append(f"{path}: its labels are not those of --data {args.data}, and left out")
        return
    file["labels"] = labels
    if (counts == 0).any():
        few = f"{(counts > 0).sum()} of {len(names)} classes"
        file["notes"].append(f"Warning: {path} has {few}, and is compared with images of all")
    if len(counts) > len(names) or counts.min() < least:
        trouble = f"labels up to {labels.max()}, class {counts.argmin()} has {counts.min()} samples"
        wanted = f"--data {args.data} has {len(names)} classes, and class-wise metrics need {least} samples"
        raise UserError(f"{path}: {trouble}; {wanted} of each; sample more, or --metrics fid,is,prdc")
    if real_counts.min() < least:
        few = f"class {names[real_counts.argmin()]} has {real_counts.min()} training images"
        raise UserError(f"--data {args.data}: {few}, class-wise metrics need {least}; --metrics fid,is,prdc")


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
        ours = [name for name in cells if "n" in cells[name]]
        if not ours:
            continue
        texts = {name: f"{cells[name]['value']:.{digits if name in ours else 2}f}" for name in cells}
        for rivals in (set(ours) - set(real), set(cells) - set(ours)):
            values = {name: float(texts[name]) for name in rivals}
            if best and len(values) > 1:
                top = best(values.values())
                texts.update({name: f"**{texts[name]}**" for name in rivals if values[name] == top})
        for name, cell in cells.items():
            if "deviation" in cell:
                texts[name] += f" ± {cell['deviation']:.2f}"
            if "expected" in cell:
                texts[name] += f" of {cell['expected']:.1f} expected"
        if key == "fid":
            title += "@" + "/".join(dict.fromkeys(str(cells[name]["n"]) for name in ours))
        arrow = {min: "↓", max: "↑", None: ""}[best]
        row = " | ".join(texts.get(name, "–") for name in columns)
        lines.append(f"| {title.replace('FID', fid)} | {arrow} | {row} |")
    return "\n".join(lines)


def figure_4(columns, out):
    """The sorted differences of the class-wise numbers to those of the first file, one picture per file."""
    first, *others = [name for name in columns if "cw_recall" in columns[name]] or [None]
    for name in others:
        panels, difference = [], f"{name} minus {first}"
        for key in PRDC:
            a, b = (columns[v][f"cw_{key}"]["classes"] for v in (first, name))
            bars = sorted((b[c] - a[c] for c in a), reverse=True)
            panels.append(dict(title=f"Class-wise {key}", x="classes, sorted", y=difference, bars=bars))
        chart(out / f"classwise-{name}-minus-{first}.png", panels, columns=2)


def report(files, about, args, metrics, out):
    """Prints the table with its notes; writes it, each number with its recipe, and the pictures."""
    fid, notes, title = "FD" if args.features == "own" else "FID", [], args.data
    if args.metrics is None and "cas" not in metrics:
        notes.append("CAS was left out, as there is no GPU; --metrics all includes it")
    for name, file in files.items():
        n, numbers, data = file["n"], file["numbers"], file["recipe"].get("data", args.data)
        if n < 10_000 and {"fid", "cw_fid"} & set(numbers):
            limit = "not comparable" if fid == "FID" and n < 2049 else f"compare with {fid}@{n} only"
            notes.append(f"Warning: {fid}@{n} is of few samples, class-wise of fewer: {limit}")
        if pathlib.Path(data).name != pathlib.Path(args.data).name:
            notes.append(f"Warning: {name} was drawn for {data}, not for --data {args.data}")
        notes.extend(file["notes"])
        if file["labels"] is None and metrics & {"classwise", "cas"}:
            notes.append(f"{name}: has no labels, so neither class-wise numbers nor CAS")
    if pathlib.Path(about.get("data", args.data)).name != pathlib.Path(args.data).name:
        notes.append(f"Warning: the features are those of --data {about['data']}")
    notes = list(dict.fromkeys(notes))
    shown = ("path", "n", "recipe", "numbers")
    shown = {name: {key: file[key] for key in shown} for name, file in files.items()}
    content = dict(data=args.data, size=args.size, features=about, notes=notes, files=shown)
    write_whole(out / "evaluation.json", json.dumps(content, indent=1).encode())
    columns = {name: file["numbers"] for name, file in files.items()}
    figure_4(columns, out)
    save_grid(out / "side-by-side.png", [file["images"][:20] for file in files.values()], list(files))
    if about:
        what = f"resize {args.resize}" if fid == "FID" else f"test accuracy {about['test_accuracy']:.4f}"
        title += f", {args.features} features (sha256 {about['sha256'][:8]}, {what}), k = {args.k}"
    if args.paper:
        columns.update(paper_columns(args.data))
    real = [name for name, file in files.items() if file["recipe"].get("split") == "test"]
    table = "\n\n".join([title, markdown(columns, fid, real), *notes])
    write_whole(out / "evaluation.md", f"{table}\n".encode())
    say(f"\n{table}\n\n{out}/evaluation.json has the recipe of each number")


if __name__ == "__main__":
    run(main)
