"""Stage 1: trains the unconditional score model s(x, σ) by denoising score matching.

    python train_score.py --data cifar10                  # one GPU, about a day
    python train_score.py --data shapes --preset tiny     # a CPU, minutes, no download

Reads a data set; writes runs/RUN/score.pt (RUN is the data set's name), its log score.jsonl, its loss curve
score.png and sample pictures score-samples.png. The same command continues where it stopped. Several GPUs:
torchrun --nproc-per-node=8 -- train_score.py ... (the -- keeps torchrun from reading our flags).

Three parts: stage 1 itself, image data, and the machinery that all commands share.
"""
import argparse
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import pathlib
import platform
import re
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps

from models import (EMA, ExactScore, NCSNpp, UserError, append_dims, check_zip, checksum, load_checkpoint,
                    save_checkpoint, sigma_at, write_whole)

# ------------------------------------------------------------ 1. the story: denoising score matching

PRESETS = {
    # What the authors ran: NCSN++ deep, continuous (Song et al. 2021), 107.6 M parameters.
    "paper": dict(width=128, mults=(1, 2, 2, 2), blocks=8, attention=(16,), dropout=0.1, edm=False, batch=128,
                  steps=950_000, lr=2e-4, warmup=5_000, cosine=False, ema=0.999, save_every=10_000),
    # One GPU, about a day: the same network at half the width and depth, 15.7 M, predicting as EDM does.
    "lite": dict(width=64, mults=(1, 2, 2, 2), blocks=4, attention=(16,), dropout=0.1, edm=True, batch=128,
                 steps=300_000, lr=2e-4, warmup=5_000, cosine=False, ema=0.9999, save_every=5_000),
    # A CPU, 1 M: minutes for a first look, an hour for good pictures at 16×16.
    "tiny": dict(width=28, mults=(1, 2, 2), blocks=1, attention=(8,), dropout=0.0, edm=True, batch=64,
                 steps=6_000, lr=1e-3, warmup=200, cosine=True, ema=0.999, save_every=1_000),
    # No network, no training: the exact score of the training images (Eq. 2), which are kept in score.pt.
    "exact": {},
}
SIGMA_MIN = 0.01  # in units of pixels in [0, 1]; σ_max is a flag, the paper's 50 by default (Appendix A.6.1)
CLIP = 1.0  # norm of the gradient, as released, in both stages


def dsm_loss(score_net, x, sigma, z, power=2):
    """L_DSM (Eqs. 4, A3): ½ σ^power ‖s(x̃, σ) + z/σ‖², x̃ = x + σz; summed over pixels, mean over the batch.

    z/σ is −∇ log p_σ(x̃|x). The paper prints λ = 1/σ²; its code, and we, multiply by σ².
    """
    s = append_dims(sigma, x)
    error = (score_net(x + s * z, sigma) + z / s).square().flatten(1).sum(1)
    return 0.5 * (sigma**power * error).mean()


def sample_noise(generator, shape, sigma_min, sigma_max):
    """σ(t) with t uniform on [1e-5, 1], as released, and z ~ N(0, I)."""
    t = 1e-5 + (1 - 1e-5) * torch.rand(shape[0], generator=generator)
    return sigma_at(t, sigma_min, sigma_max), torch.randn(shape, generator=generator)


@dataclasses.dataclass
class Plan:
    """How `fit` trains."""

    steps: int
    lr: float
    warmup: int = 0  # steps over which the learning rate rises
    cosine: bool = False  # whether it then falls to zero over half a cosine
    clip: float = math.inf  # largest norm of the gradient
    ema: float = 0.0  # decay of the weights' moving average; 0: there is none
    seed: int = 0
    save_every: int = 1000
    inspect_every: int = 0


def learning_rate(step, plan):
    rate = plan.lr * min(1.0, (step + 1) / max(plan.warmup, 1))
    if plan.cosine:
        rate = rate * (0.5 + 0.5 * math.cos(math.pi * step / plan.steps))
    return rate


def fit(net, batch, loss, path, kind, settings, plan, device="cpu", inspect=None, restart=False):
    """Adam on `loss(*batch(generator, step))`, from the checkpoint at `path` if there is one.

    `batch` gives x and σ first, from a generator that depends on seed and step alone; each process computes
    its share, and the gradients are summed (DistributedDataParallel has no double backward). So a resumed run
    takes the same path, and one on several processes too, but for dropout masks and BatchNorm's statistics.
    `settings` must match those in the file. `inspect(step, ema)` runs every `plan.inspect_every` steps and at
    the end; the dict it returns is logged. → the EMA, or None
    """
    path, device = pathlib.Path(path), torch.device(device)
    rank, world = rank_and_world()
    average = EMA(net, plan.ema) if plan.ema else None
    optimizer = torch.optim.Adam(net.parameters(), lr=plan.lr, fused=True)
    start, log, losses, unread, mean = 0, [], [], [], math.nan

    def read(keep):
        """Reads the numbers of all but the last `keep` steps → whether a process was told to stop."""
        stopping = False
        while len(unread) > keep:
            step, sigma, numbers = unread.pop(0)
            value, signals, norm = numbers()
            if not math.isfinite(value) or not math.isfinite(norm):
                raise broken("the loss or its gradient is", step, sigma)
            losses.append(value)
            stopping = stopping or signals > 0
        return stopping

    def broken(what, step, sigma):
        kept = f"{path} keeps step {start}" if start else "nothing was saved"
        levels = f"σ = {sigma.min().item():.3g} to {sigma.max().item():.3g}"
        return UserError(f"{what} not finite at step {step}, {levels}; {kept}; try a smaller --lr")

    with lock(path) if rank == 0 else contextlib.nullcontext(), caught_signals() as stop:
        if path.exists() and not restart:
            start, log = resume(path, kind, net, settings, plan, optimizer, average, device)
            if start >= plan.steps:
                say(f"{path}: finished already ({start} steps); --restart starts over")
                return average
            say(f"{path}: continuing at step {start} of {plan.steps}")
        progress = Progress(plan.steps, start, "step", device)
        for step in range(start, plan.steps):
            rate = learning_rate(step, plan)
            for group in optimizer.param_groups:
                group["lr"] = rate
            torch.manual_seed(derive_seed(plan.seed, step, rank))  # for dropout
            whole = batch(torch.Generator().manual_seed(derive_seed(plan.seed, step)), step)
            share = own_share(whole, device)
            net.train()
            optimizer.zero_grad()
            value = loss(*share) * (len(share[0]) / len(whole[0]))
            value.backward()
            numbers = add_gradients(net, value.detach(), stop)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), plan.clip)
            optimizer.step()
            if average:
                average.update()

            done = step + 1
            ends = done == plan.steps
            logs = ends or done % max(plan.steps // 200, 1) == 0
            inspects = inspect and (ends or plan.inspect_every and done % plan.inspect_every == 0)
            saves = ends or done % plan.save_every == 0
            # The numbers of a step are read while the next one computes: a GPU never waits for the host.
            unread.append((step, share[1], read_later(torch.cat([numbers, norm.view(1)]))))
            now = device.type == "cpu" or logs or inspects or saves or stop and world == 1
            stopping = read(keep=0 if now else 1)
            mean = sum(losses) / len(losses) if losses else mean
            progress(done, loss=mean, lr=rate)
            if logs:
                log.append(dict(step=done, loss=mean, lr=rate, seconds=round(progress.seconds, 2)))
                losses.clear()
            if inspects and rank == 0:
                log.append(dict(step=done, **(inspect(done, average) or {})))
            if saves or stopping:
                read(keep=0)
                if not torch.stack([v.isfinite().all() for v in net.state_dict().values()]).all():
                    raise broken("the weights are", step, share[1])
                if rank == 0:
                    save(path, kind, net, settings, plan, done, log, optimizer, average)
                start = done
            if stopping and not ends:
                say(f"{path}: stopped at step {done} and saved; the same command continues")
                sys.exit(128 + (stop[0] if stop else signal.SIGTERM))
    return average


def image_batches(images, labels, batch, seed, sigma_min, sigma_max, flip):
    """→ batch(generator, step) for `fit`: x in [0, 1], σ, y, z. An epoch takes every image once, shuffled."""
    n = len(images)

    @functools.lru_cache(2)
    def order(epoch):
        return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch)))

    def one_batch(generator, step):
        low, high = step * batch, (step + 1) * batch
        epochs = range(low // n, (high - 1) // n + 1)
        index = torch.cat([order(e)[max(low - e * n, 0) : high - e * n] for e in epochs])
        x = images[index].float() / 255
        if flip:
            x = torch.where(torch.rand(batch, 1, 1, 1, generator=generator) < 0.5, x, x.flip(3))
        sigma, z = sample_noise(generator, x.shape, sigma_min, sigma_max)
        return x, sigma, labels[index], z

    return one_batch


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, PRESETS)
    parser.group("the score model")
    parser.flag("--sigma-max", 50.0, "largest noise level, pixels being in [0, 1]", bounded(float, 0.1, 1e4))
    parser.flag("--conditional", False, "s(x, σ, y): the paper's method (c), for sample.py --guidance free")
    parser.flag("--drop", 0.1, "share of labels dropped, so that it is s(x, σ) too", bounded(float, 0, 1))
    parser.flag("--no-flip", False, "no random mirror images (fashion has none: its shoes all point one way)")
    parser.flag("--compile", False, "torch.compile the network")
    parser.flag("--sample-every", 5000, "steps between sample pictures; 0: none", bounded(int, 0, 10**9))
    return parser


def main():
    args = make_parser().parse_args()
    check_flags(args)
    device = set_up(args)
    path = run_folder(args) / f"score{tag_of(args)}.pt"
    images, labels, names = load_images(args.data, "train", args.size, args.root)
    size = images.shape[-1]
    settings = dict(data=args.data, data_sha=checksum([images, labels])[:16], classes=names, size=size,
                    sigma_min=SIGMA_MIN, sigma_max=args.sigma_max)
    if args.preset == "exact":
        save_exact(path, images, labels, settings, args.restart)
        return
    preset = from_preset(args, PRESETS)
    flip = not args.no_flip and args.data != "fashion"
    torch.manual_seed(derive_seed(args.seed, "weights"))
    shape = {key: preset[key] for key in ("width", "mults", "blocks", "attention", "dropout", "edm")}
    net = NCSNpp(size, images.shape[1], **shape, classes=len(names) if args.conditional else 0).to(device)
    settings.update(flip=flip, seed=args.seed, amp=args.amp, config=net.config,
                    **{key: preset[key] for key in ("batch", "lr", "warmup", "cosine", "ema")})
    if args.conditional:
        settings["drop"] = args.drop
    introduce(path, net, images, labels, names, device)
    call = network_call(net, args.amp, args.compile, device)
    all_labels = image_batches(images, labels, preset["batch"], args.seed, SIGMA_MIN, args.sigma_max, flip)

    def batch(generator, step):
        x, sigma, y, z = all_labels(generator, step)
        drop = torch.rand(len(y), generator=generator) < args.drop
        return x, sigma, torch.where(drop, len(names), y), z

    def loss(x, sigma, y, z):
        if args.conditional:
            return dsm_loss(lambda x, sigma: call(x, sigma, y), x, sigma, z)
        return dsm_loss(call, x, sigma, z)

    from sample import draw_curve, sample_pictures  # here, since that file imports this one

    def inspect(step, ema):
        draw_curve(path)
        with ema.applied():
            net.eval()
            pictures = path.with_name(f"{path.stem}-samples.png")
            sample_pictures(call, pictures, images.shape[1:], args.sigma_max, device)

    plan = Plan(preset["steps"], preset["lr"], preset["warmup"], preset["cosine"], CLIP, preset["ema"],
                args.seed, preset["save_every"], args.sample_every)
    inspect = inspect if args.sample_every else None
    fit(net, batch, loss, path, "score", settings, plan, device, inspect, args.restart)
    if rank_and_world()[0] == 0:
        draw_curve(path)


def check_flags(args):
    flags = ("steps", "batch", "lr", "width", "save_every", "conditional")
    given = [key for key in flags if getattr(args, key)]
    if args.preset == "exact" and given:
        raise UserError(f"--{given[0].replace('_', '-')} with --preset exact: has no effect; leave it out")
    if args.drop != make_parser().get_default("drop") and not args.conditional:
        raise UserError("--drop without --conditional: has no effect; leave it out")


def save_exact(path, images, labels, settings, restart):
    """The exact score of the training images as a score model: nothing to train."""
    if rank_and_world()[0]:
        return
    if path.exists() and not restart:
        if changed := difference(load_checkpoint(path).get("settings") or {}, settings):
            raise UserError(f"{path} was made with {changed}; --tag T keeps both, --restart starts over")
        say(f"{path}: finished already; --restart starts over")
        return
    net = ExactScore(images, labels)
    with lock(path):
        about = dict(kind="score", network="ExactScore", config=net.config, settings=settings)
        save_checkpoint(path, dict(**about, step=0, weights=net.state_dict(), ema=None))
    say(f"{path}: the exact score of {len(images)} images")


# ------------------------------------------------------------ 2. what it needs: image data

NAMED = {  # torchvision's class, and what to fetch by hand where there is no network
    "cifar10": ("CIFAR10", "cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a) into {}/"),
    "cifar100": ("CIFAR100", "cifar-100-python.tar.gz (md5 eb9058c3a382ffc7106e4002c42a8d85) into {}/"),
    "fashion": ("FashionMNIST", "the four *-ubyte.gz files into {}/FashionMNIST/raw/"),
}
SHAPES = {  # corners, radius between them, height, and a hole of the same outline: its scale and its shift
    "circle": (60, 1, 1, 0.01, 9), "ring": (60, 1, 1, 0.55, 0), "crescent": (60, 1, 1, 0.8, 0.55),
    "half": (60, 1, 1, 50, 50.1), "bar": (4, 0.71, 0.3, 0.01, 9), "triangle": (3, 0.5, 1, 0.01, 9),
    "square": (4, 0.71, 1, 0.01, 9), "frame": (4, 0.71, 1, 0.6, 0), "star": (5, 0.42, 1, 0.01, 9),
    "plus": (4, 0.35, 1, 0.01, 9)}
CLASSES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "fashion": "T-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot".split(","),
    "shapes": list(SHAPES),
}
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def load_images(data, split="train", size=None, root="data"):
    """→ images (N, C, H, W) uint8, labels (N,) int64, class names.

    `split` is train or test: the data set's own, or a seeded tenth of the images where it has none.
    """
    path, names = pathlib.Path(data), CLASSES.get(data)
    if split not in ("train", "test"):
        raise UserError(f"split {split!r}: must be train or test")
    if data in NAMED:
        path = pathlib.Path(root) / f"{data}.npz"
    if data == "shapes":
        found = make_shapes()
    elif data in NAMED and not path.exists():
        found, names = from_torchvision(data, root)
    elif path.suffix == ".npz":
        found = read_npz(path)
    elif path.is_dir():
        found, names = read_folder(path, size)
        if names == ["."]:
            raise UserError(f"--data {data}: expected one sub-folder per class with pictures, found none")
    else:
        known = ", ".join([*NAMED, "shapes"])
        raise UserError(f"--data {data}: neither a named set ({known}) nor an .npz or a folder that is there")
    own_test = "test_images" in found
    images, labels = check_images(path, found)
    classes = len(names) if names else int(labels.max()) + 1
    if split == "test" and own_test:
        shape = images.shape[1:]
        images, labels = check_images(path, found, "test_")
        if images.shape[1:] != shape:
            raise UserError(f"{path}: test images of {tuple(images.shape[1:])}, others of {tuple(shape)}")
    generator = torch.Generator().manual_seed(0)
    if not own_test:
        held = torch.zeros(len(images), dtype=torch.bool)
        held[torch.randperm(len(images), generator=generator)[: max(1, len(images) // 10)]] = True
        if split == "train":
            say(f"{data}: {held.sum()} of {len(images)} images are held out as its test split")
        keep = held if split == "test" else ~held
        images, labels = images[keep], labels[keep]
    present = labels.unique()
    if split == "train" and not torch.equal(present, torch.arange(min(classes, len(labels) + 1))):
        wanted = f"labels must be 0 to {classes - 1}, each class with at least one training image"
        raise UserError(f"{path}: {wanted}; found are {present.tolist()[:20]}")
    if labels.max() >= classes:
        raise UserError(f"{path}: test labels up to {labels.max()}, but there are {classes} classes")
    if split == "test" and (labels.diff() >= 0).all():  # sorted by class: a diagnosis takes the first ones
        order = torch.randperm(len(images), generator=generator)
        images, labels = images[order], labels[order]
    return resized(images, size), labels, names or [str(i) for i in range(classes)]


def check_images(path, found, prefix=""):
    """`images` (N, H, W, C) uint8 and `labels` as tensors (N, C, H, W) and (N,), or an error."""
    for key in (prefix + "images", prefix + "labels"):
        if key not in found:
            wanted = "images (N, H, W, C) uint8 and labels (N,)"
            raise UserError(f"{path}: has no '{key}' but {sorted(found)}; expected {wanted}")
    images, labels = np.asarray(found[prefix + "images"]), np.asarray(found[prefix + "labels"])
    if images.ndim != 4 or images.shape[3] not in (1, 3) or not images.size:
        raise UserError(f"{path}: images have shape {images.shape}; expected (N, H, W, C) with C 3 or 1")
    if images.dtype != np.uint8:
        cure = "from [0, 1]: (255 * images).round().astype('uint8')"
        raise UserError(f"{path}: images are {images.dtype}; expected uint8, 0 to 255 ({cure})")
    whole = labels.shape == (len(images),) and labels.dtype.kind in "iu"
    if not whole or labels.min() < 0 or labels.max() >= 2**31:
        what = f"{labels.dtype} {labels.shape} for {len(images)} images"
        raise UserError(f"{path}: labels are {what}; expected whole numbers from 0, one per image")
    images = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return images, torch.from_numpy(labels.astype(np.int64))


def resized(images, size):
    """Cut to a square and resized with antialiasing, where a size is asked for."""
    height, width = images.shape[2:]
    if size is None:
        if height != width:
            raise UserError(f"the images are {height}×{width}; --size N cuts them square and resizes them")
        return images
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    images = images[:, :, top : top + side, left : left + side]
    if side == size:
        return images
    parts = [F.interpolate(part.float(), (size, size), mode="bicubic", antialias=True)
             for part in images.split(4096)]
    return torch.cat([part.round().clamp(0, 255).byte() for part in parts])


def read_npz(path):
    try:
        check_zip(path)
        with np.load(path) as file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # a damaged or hostile file can fail in any way
        what = f"not a readable .npz, perhaps cut off or damaged ({type(error).__name__})"
        raise UserError(f"{path}: {what}; get it again") from None


def read_folder(folder, size):
    """One sub-folder per class, any pictures inside; hidden files and folders are passed over."""
    images, labels, shapes = [], [], {}
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    names = names or ["."]  # a flat folder: no classes, which is enough for evaluate.py
    for label, name in enumerate(names):
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in PICTURES
                       and not any(part.startswith(".") for part in p.relative_to(folder).parts))
        if not files:
            raise UserError(f"{folder / name}: a class without pictures ({' '.join(PICTURES)})")
        for file in files:
            try:
                picture = read_picture(file)
            except Exception:  # a damaged one can fail in any way
                raise UserError(f"{file}: not a readable picture; delete it or replace it") from None
            if size:
                side = min(picture.size)
                left, top = (picture.width - side) // 2, (picture.height - side) // 2
                box = (left, top, left + side, top + side)
                picture = picture.crop(box).resize((size, size), Image.Resampling.BICUBIC)
            shapes[picture.size] = file
            images.append(picture)
            labels.append(label)
    if len(shapes) > 1:
        (a, first), (b, second) = list(shapes.items())[:2]
        what = f"{first.name} is {a[0]}×{a[1]}, {second.name} {b[0]}×{b[1]}"
        raise UserError(f"{folder}: mixed sizes, {what}; --size N makes them equal")
    mode = "RGB" if any(p.mode == "RGB" for p in images) else "L"
    pixels = np.stack([np.asarray(p.convert(mode)).reshape(p.height, p.width, -1) for p in images])
    return dict(images=pixels, labels=np.array(labels)), names


def read_picture(file):
    """A picture in 8-bit grey or RGB: first frame, upright, 16 bits scaled to 8, transparency on white."""
    with open(file, "rb") as stream:  # given a name, Pillow maps some files to memory and does not turn them
        picture = ImageOps.exif_transpose(Image.open(stream))
        picture.load()
    if picture.mode == "F":
        raise ValueError("floating-point pixels of unknown range")
    if picture.mode.startswith("I"):
        return Image.fromarray((np.asarray(picture).clip(0, 65535) / 257).round().astype(np.uint8))
    grey = picture.mode in ("1", "L", "LA")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("L" if grey else "RGB")


def import_torchvision():
    """torchvision; without its compiled operators where they do not fit (a CUDA build beside a CPU torch)."""
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision
        torchvision._operators = library  # the definitions live as long as this object
    return torchvision


def from_torchvision(data, root):
    kind, files = NAMED[data]
    try:
        os.makedirs(root, exist_ok=True)
        with open(pathlib.Path(root) / f".{data}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one process downloads, the others wait
            load = getattr(import_torchvision().datasets, kind)
            sets = {split: load(root, train=split == "train", download=True) for split in ("train", "test")}
    except Exception as error:  # no network, a proxy's refusal, a cut connection, no torchvision
        why = (str(error) or type(error).__name__).splitlines()[0]
        cure = f"put {files.format(root)}, or make {root}/{data}.npz (images, labels, test_images, ...)"
        raise UserError(f"--data {data}: no download ({why}); {cure}; --data shapes needs none") from None
    found = {}
    for split, prefix in (("train", ""), ("test", "test_")):
        images = np.asarray(sets[split].data)
        if images.ndim == 3:  # Fashion-MNIST: 28×28 grey, padded to 32×32
            images = np.pad(images[..., None], ((0, 0), (2, 2), (2, 2), (0, 0)))
        found.update({f"{prefix}images": images, f"{prefix}labels": np.asarray(sets[split].targets)})
    return found, CLASSES.get(data) or list(sets["train"].classes)


def make_shapes(n=12_000, test=2_000):
    """Ten classes of coloured shapes at any place, size and angle, on a shaded background."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    labels, axis = torch.arange(n) % len(SHAPES), torch.arange(32) + 0.5
    corners, notch, height, hole, shift = torch.tensor(list(SHAPES.values()))[labels].T[:, :, None, None]
    dx, dy = axis[None, None, :] - uniform(11, 21, 1, 1), axis[None, :, None] - uniform(11, 21, 1, 1)
    radius, turn = uniform(7, 11, 1, 1), uniform(0, 2 * math.pi, 1, 1)
    u, v = (dx * turn.cos() + dy * turn.sin()) / radius, (dy * turn.cos() - dx * turn.sin()) / radius

    def outside(u, v):
        """Distance from the outline, whose corners (radius 1) and notches are joined by straight lines."""
        sector = math.pi / corners
        angle = ((torch.atan2(v / height, u) + sector) % (2 * sector) - sector).abs()
        edge = notch * sector.sin() / (notch * angle.sin() + (sector - angle).sin())
        return torch.hypot(u, v / height) - edge

    distance = torch.maximum(outside(u, v), -hole * outside((u - shift) / hole, v / hole))
    inside = (0.5 - distance * radius).clamp(0, 1)[:, None]
    back, other, ink = (uniform(0, 1, 3, 1, 1) for _ in range(3))
    middle = (back + other) / 2
    near = (ink - middle).abs().amax(1, keepdim=True) < 0.35  # keep the shape visible
    ink = torch.where(near, (middle + 0.5) % 1, ink)
    slope = uniform(0, 2 * math.pi, 1, 1)
    shade = axis[None, None, :] * slope.cos() + axis[None, :, None] * slope.sin()
    shade = (shade / 45 + 0.5).clamp(0, 1)[:, None]
    images = (back + (other - back) * shade) * (1 - inside) + ink * inside + uniform(-0.02, 0.02, 3, 32, 32)
    images = (255 * images.clamp(0, 1)).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    labels = labels.numpy()
    return dict(images=images[test:], labels=labels[test:],
                test_images=images[:test], test_labels=labels[:test])


# ------------------------------------------------------------ 3. machinery: processes, the command line


def save(path, kind, net, settings, plan, step, log, optimizer, average):
    """The log first: where the checkpoint says that the run is, it is complete."""
    write_whole(path.with_suffix(".jsonl"), "".join(json.dumps(record) + "\n" for record in log).encode())
    ema = dict(shadow=average.shadow, updates=average.updates) if average else None
    about = dict(kind=kind, network=type(net).__name__, config=net.config, step=step, log=json.dumps(log))
    save_checkpoint(path, dict(**about, settings={**settings, "steps": plan.steps}, weights=net.state_dict(),
                               ema=ema, optimizer=optimizer.state_dict()))


def resume(path, kind, net, settings, plan, optimizer, average, device):
    """Fills network, optimizer and EMA from a checkpoint made with the same settings → its step and log."""
    checkpoint = load_checkpoint(path, device)
    cure = "--tag T keeps both, --restart starts over"
    old = checkpoint.get("settings")
    if checkpoint.get("kind") != kind or not isinstance(old, dict):
        raise UserError(f"{path}: holds no {kind} of ours; {cure}")
    if changed := difference(old, settings):
        raise UserError(f"{path} was made with {changed}; {cure}")
    try:
        net.load_state_dict(checkpoint["weights"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for p in net.parameters():
            if any(optimizer.state[p][key].shape != p.shape for key in ("exp_avg", "exp_avg_sq")):
                raise ValueError
        if average:
            for mine, value in zip(average.shadow, checkpoint["ema"]["shadow"], strict=True):
                if mine.shape != value.shape:
                    raise ValueError
                mine.copy_(value)
            average.updates = int(checkpoint["ema"]["updates"])
        step, log = int(checkpoint["step"]), json.loads(checkpoint.get("log", "[]"))
    except Exception as error:  # another version's, or a stranger's: it can fail in any way
        what = f"holds no {kind} that fits this network ({type(error).__name__})"
        raise UserError(f"{path}: {what}; {cure}") from None
    planned = old.get("steps")
    if plan.cosine and step < plan.steps != planned:
        say(f"warning: its learning rate decayed towards step {planned}, from here towards {plan.steps}")
    return step, log


def difference(old, new):
    """What a file was made with and is not asked for now, in words; "" where nothing differs."""
    old, new = ({**settings, **(settings.get("config") or {})} for settings in (old, new))
    for key, value in new.items():
        if old.get(key) != value and key != "config":
            if key in ("score", "score_sha"):
                return "another score model: it has changed since"
            if key == "data_sha":
                return "other images: those of --data have changed since"
            return f"{key} = {old.get(key)}, not {value}"
    return ""


def rank_and_world():
    """This process's number and how many there are: 0 and 1 unless torchrun started us."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def derive_seed(*parts):
    """A seed from several numbers and words."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def own_share(batch, device):
    """This process's part of a batch, on its device."""
    rank, world = rank_and_world()
    if len(batch[0]) < world:
        raise UserError(f"--batch {len(batch[0])}: fewer than the {world} processes that share it")
    parts = [v.tensor_split(world)[rank] for v in batch]
    if device.type == "cuda":
        parts = [v.pin_memory() for v in parts]  # else the copy would not run beside the host
    return [v.to(device, non_blocking=True) for v in parts]


def add_gradients(net, value, stop):
    """Sums gradients over all processes → the sums of the losses and of the caught signals, not read yet."""
    numbers = torch.stack([value, torch.full_like(value, sum(stop))])
    if rank_and_world()[1] > 1:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        flat = torch.cat([*(g.reshape(-1) for g in grads), numbers])
        dist.all_reduce(flat)
        *parts, numbers = flat.split([*(g.numel() for g in grads), 2])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])
    return numbers


def read_later(values):
    """→ a function that gives the values as a list; on CUDA it does not wait for what was launched since."""
    if values.device.type != "cuda":
        return values.tolist
    on_host = values.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read():
        copied.synchronize()
        return on_host.tolist()

    return read


@contextlib.contextmanager
def caught_signals():
    """Within this block Ctrl-C and SIGTERM are appended to a list; a second Ctrl-C interrupts at once."""
    stop = []

    def catch(number, frame):
        if number in stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.append(number)
        if rank_and_world()[0] == 0:
            os.write(1, b"\nstopping soon; what is done is saved (Ctrl-C again: at once)\n")

    old = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def lock(path):
    """Holds `path` for this process; the system lets go when the process ends, however it ends."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise UserError(f"{path}: {owner} is writing it; wait, or choose another --tag") from None
        except OSError:  # a file system that has no locks
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        for stale in path.parent.glob(f".{glob.escape(path.name)}-*[0-9]"):  # what a kill in write_whole left
            stale.unlink(missing_ok=True)
        yield


def say(text):
    if rank_and_world()[0] == 0:
        print(text, flush=True)


class Progress:
    """One line: count, numbers, speed, time left. Rewritten on a terminal, else shown twice a minute."""

    def __init__(self, total, start=0, unit="step", device=None):
        self.total, self.start, self.unit, self.begun = total, start, unit, time.monotonic()
        self.next = self.begun + 3
        self.hint = "; --preset tiny is made for a CPU" if device and device.type == "cpu" else ""

    @property
    def seconds(self):
        return time.monotonic() - self.begun

    def __call__(self, done, **numbers):
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if rank_and_world()[0] > 0 or done < self.total and now < self.next:
            return
        self.next = now + (0.5 if terminal else 30)
        speed = (done - self.start) / max(self.seconds, 1e-9)
        left = min((self.total - done) / max(speed, 1e-9), 1e10)
        line = f"{self.unit} {done:.0f}/{self.total}  "
        line += "".join(f"{key} {value:.4g}  " for key, value in numbers.items())
        line += f"{speed:.3g}/s  {datetime.timedelta(seconds=round(left))} left"
        if left > 86400:
            line, self.hint = line + self.hint, ""  # once
        if terminal:  # over the line before
            line = f"\r{line}\033[K"
        print(line, end="" if terminal and done < self.total else "\n", flush=True)


def bounded(kind, low, high=math.inf):
    """An argparse type: a whole number (kind int) or a finite number (float) from low to high."""
    def parse(text):
        try:
            value = kind(text)
            good = low <= value <= high and math.isfinite(value)
        except (ValueError, OverflowError):
            good = False
        if not good:
            what = "a whole number" if kind is int else "a number"
            top = f" to {high:g}" if high < math.inf else " or more"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what} of {low:g}{top}")
        return value

    parse.kind, parse.low, parse.high = kind, low, high
    return parse


def text(value):
    """An argparse type: not empty, as an unset variable in a shell script would be."""
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty")
    return value


def data_name(value):
    """An argparse type: a name, or a path without a slash at its end; ./fashion is a folder."""
    path = os.path.normpath(text(value))
    return f"./{path}" if value.startswith("./") and path in (*NAMED, "shapes") else path


def file_part(text):
    """An argparse type: part of a file's name."""
    if not re.fullmatch(r"[\w.,+=@-]{1,100}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not up to 100 letters, digits and .,+=@-_")
    return text


class Parser(argparse.ArgumentParser):
    """argparse with defaults in --help and errors in one line."""

    def __init__(self, doc):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=layout, allow_abbrev=False)
        self.place = self

    def group(self, title):
        """Flags from here on stand under this title."""
        self.place = self.add_argument_group(title)
        return self

    def flag(self, name, default, help, type=text, **more):
        if default is False:
            self.place.add_argument(name, help=help, action="store_true")
            return
        shown = "" if default is None else f" (default: {default})"
        self.place.add_argument(name, help=help + shown, type=type, default=default, **more)

    def error(self, message):
        leave(self.prog, f"{message} (--help lists the flags)", 2)


def leave(name, message, code):
    """Ends this process with one line. Of several processes the first one to speak is heard."""
    rank = int(os.environ.get("RANK", 0))
    if rank:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # torchrun ends the others when one has left
        time.sleep(3)
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun repeats what stands there
        content = dict(message=dict(message=str(message), extraInfo=dict(timestamp=str(int(time.time())))))
        pathlib.Path(report).write_text(json.dumps(content))
    sys.exit(code)


def run(main):
    """Calls main(); bad input, a full disk, SIGTERM or Ctrl-C end in one line on stderr."""
    name, kept = pathlib.Path(sys.argv[0]).name, "finished work is kept, the same command continues"

    def terminate(number, frame):
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        main()
    except UserError as error:
        leave(name, error, 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        cure = kept
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
                           errno.ENOTDIR, errno.EEXIST):
            cure = "make it writable or make room; --run or --out writes elsewhere"
        leave(name, f"{where}{error.strerror or error}; {cure}", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)):
            leave(name, f"out of memory; try a smaller --batch, --size or --width; {kept}", 2)
        if dist.is_initialized() and re.search("peer|Connection|NCCL|gloo|timed out", str(error)):
            reason = " ".join(str(error).split())[:80]
            leave(name, f"another process of this job is lost ({reason}); {kept}", 2)
        raise
    except KeyboardInterrupt as error:
        leave(name, f"interrupted; {kept}", 128 + (error.args[0] if error.args else signal.SIGINT))
    if dist.is_initialized():  # not after an error: it would wait for processes that wait for this one
        dist.destroy_process_group()


def shared_flags(parser, presets=None):
    parser.group("data and run")
    parser.flag("--data", "cifar10", "cifar10, cifar100, fashion, shapes, an .npz, or a folder with one "
                "sub-folder per class", data_name)
    parser.flag("--root", "data", "folder of the named sets: ROOT/NAME.npz if there, else downloaded to it")
    parser.flag("--size", None, "resize the images to SIZE×SIZE pixels", bounded(int, 4, 4096))
    parser.flag("--run", None, "name, for runs/RUN, or folder (default: the data's name)")
    parser.flag("--seed", 0, "random seed", bounded(int, 0, 2**62))
    parser.flag("--device", "auto", "auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps")
    parser.flag("--restart", False, "start over instead of continuing")
    if presets:
        parser.group("training; the preset gives the defaults")
        parser.flag("--preset", "lite", "paper (the authors' settings), lite (one GPU), tiny (a CPU)",
                    choices=list(presets))
        parser.flag("--steps", None, "optimizer steps", bounded(int, 1, 10**9))
        parser.flag("--batch", None, "images per step, over all processes", bounded(int, 1, 10**6))
        parser.flag("--lr", None, "Adam's learning rate", bounded(float, 1e-12, 1e3))
        parser.flag("--width", None, "channels of the first level", bounded(int, 4, 4096))
        parser.flag("--save-every", None, "steps between checkpoints", bounded(int, 1, 10**9))
        parser.flag("--tag", None, "adds -TAG to the name of the output, for variants", file_part)
        parser.flag("--amp", False, "the score network in bfloat16 (CUDA)")


def from_preset(args, presets):
    """The preset's values, each replaced by the flag of its name where that was given."""
    given = {key: getattr(args, key, None) for key in presets[args.preset]}
    return {key: value if given[key] is None else given[key] for key, value in presets[args.preset].items()}


def tag_of(args):
    return f"-{args.tag}" if args.tag else ""


def run_folder(args):
    if args.run:
        return pathlib.Path(args.run) if "/" in args.run else pathlib.Path("runs") / args.run
    path = pathlib.Path(args.data)
    name = path.stem if path.suffix == ".npz" else path.resolve().name
    return pathlib.Path("runs") / (f"{name}-{args.size}" if args.size else name)


def set_up(args):
    """Joins the other processes of a torchrun → the device of this one."""
    choice = args.device
    if choice == "auto":
        here = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
        choice = next(name for name, there in here.items() if there)
    if choice == "cuda":  # set_device wants an index
        choice = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(choice)
        torch.zeros(1, device=device).item()
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"--device {args.device}: not on this machine ({why}); --device cpu works") from None
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32, as convolutions have it; the metrics turn it off
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if getattr(args, "amp", False) and not has_bfloat16:
        raise UserError(f"--amp: bfloat16 needs a CUDA device that has it, this is {device}; leave it out")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        # torchrun ends all when one dies; who waits for a slow one may wait long.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))
    return device


def network_call(net, amp, compiled, device):
    """net(x, σ, ...), compiled or in bfloat16 where asked for; its result in float32."""
    if compiled:
        net = torch.compile(net)
    if not amp:
        return net

    def call(*inputs):
        with torch.autocast(device.type, torch.bfloat16):
            return net(*inputs).float()

    return call


def introduce(path, net, images, labels, names, device):
    count = sum(p.numel() for p in net.parameters()) / 1e6
    say(f"{path}: {count:.2f} M parameters, on {device}")
    counts = [f"{name} {n}" for name, n in zip(names, labels.bincount().tolist())]
    more = f", … {len(counts) - 12} more" if len(counts) > 12 else ""
    shape = "×".join(map(str, images.shape[1:]))
    say(f"{len(images)} images {shape}, {len(names)} classes: {', '.join(counts[:12])}{more}")


if __name__ == "__main__":
    run(main)
