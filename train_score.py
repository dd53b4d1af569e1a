"""Stage 1: trains the unconditional score model s(x, σ) by denoising score matching.

    python train_score.py --data cifar10                  # one GPU, about a day
    python train_score.py --data shapes --preset tiny     # a CPU, minutes, no download

Reads a data set; writes runs/RUN/score.pt (RUN is the data set's name), its log score.jsonl, its
loss curve score.png and sample pictures score-samples.png. The same command continues where it
stopped. Several GPUs: torchrun --nproc-per-node=8 -- train_score.py ... (the -- keeps torchrun
from reading our flags).
"""
import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import signal
import sys
import time
import types

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps

from models import (EMA, ExactScore, NCSNpp, UserError, append_dims, checksum, load_checkpoint, reading,
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
    the end, or never (0); the dict it returns is logged. → the EMA, or None
    """
    path, device = pathlib.Path(path), torch.device(device)
    average = EMA(net, plan.ema) if plan.ema else None
    optimizer = torch.optim.Adam(net.parameters(), lr=plan.lr, fused=True)
    start, log, losses, unread = 0, [], [], []
    with lock(path), caught_signals() as stop:
        if path.exists() and not restart:
            start, log = resume(path, kind, net, settings, plan, optimizer, average, device)
        progress = Progress(plan.steps, start)
        for step in range(start, plan.steps):
            rate = learning_rate(step, plan)
            optimizer.param_groups[0]["lr"] = rate
            torch.manual_seed(derive_seed(plan.seed, step, RANK))  # for dropout
            whole = batch(torch.Generator().manual_seed(derive_seed(plan.seed, step)), step)
            share = [v.tensor_split(WORLD)[RANK] for v in whole]
            if device.type == "cuda":
                share = [v.pin_memory() for v in share]  # else the copy would not run beside the host
            share = [v.to(device, non_blocking=True) for v in share]
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
            inspects = inspect and plan.inspect_every and (ends or done % plan.inspect_every == 0)
            saves = ends or done % plan.save_every == 0
            unread.append(torch.cat([numbers, norm.view(1)]))
            # To read a number is to wait for the GPU; several processes must read at the same steps.
            due = device.type == "cpu" or done % 20 == 0 or stop and WORLD == 1
            if not (due or logs or inspects or saves):
                continue
            values, signals, norms = torch.stack(unread).T.tolist()
            unread.clear()
            losses.extend(values)
            stopping = sum(signals) > 0
            finite = math.isfinite(sum(losses + norms))
            if saves or stopping:  # BatchNorm's statistics may be broken where the loss is not
                finite &= torch.stack([v.isfinite().all() for v in net.state_dict().values()]).all().item()
            if not finite:
                where = f"step {step}, σ = {share[1].min().item():.3g} to {share[1].max().item():.3g}"
                kept = f"{path} keeps step {start}" if start else "nothing was saved"
                raise UserError(f"loss or weights are not finite at {where}; {kept}; try a smaller --lr")
            mean = sum(losses) / len(losses)
            progress(done, loss=mean, lr=rate)
            if logs:
                seconds = round(time.monotonic() - progress.begun, 2)
                log.append(dict(step=done, loss=mean, lr=rate, seconds=seconds))
                losses.clear()
            if inspects and RANK == 0:
                log.append(dict(step=done, **(inspect(done, average) or {})))
            if saves or stopping:
                start = done
                save(path, kind, net, {**settings, "steps": plan.steps}, done, log, optimizer, average)
            if stopping and not ends:
                say(f"{path}: stopped at step {done} and saved; the same command continues")
                sys.exit(128 + (stop[0] if stop else signal.SIGTERM))
    return average


def image_batches(images, labels, batch, seed, sigma_min, sigma_max, flip, drop=0.0):
    """→ batch(generator, step) for `fit`: x in [0, 1], σ, y, z. An epoch takes every image once, shuffled.

    A share `drop` of the labels becomes the one after the last class, which stands for no class.
    """
    n, no_class = len(images), int(labels.max()) + 1
    if batch < WORLD:
        raise UserError(f"--batch {batch}: fewer than the {WORLD} processes that share it")

    @functools.lru_cache(2)
    def order(epoch):
        return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch)))

    def one_batch(generator, step):
        low, high = step * batch, (step + 1) * batch
        epochs = range(low // n, (high - 1) // n + 1)
        index = torch.cat([order(e)[max(low - e * n, 0) : high - e * n] for e in epochs])
        x, y = images[index].float() / 255, labels[index]
        if flip:
            x = torch.where(torch.rand(batch, 1, 1, 1, generator=generator) < 0.5, x, x.flip(3))
        sigma, z = sample_noise(generator, x.shape, sigma_min, sigma_max)
        if drop:
            y = torch.where(torch.rand(batch, generator=generator) < drop, no_class, y)
        return x, sigma, y, z

    return one_batch


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, PRESETS)
    parser.group("the score model")
    parser.flag("--sigma-max", 50.0, "largest noise level, pixels being in [0, 1]", bounded(float, 0.1, 1e4))
    parser.flag("--conditional", False, "s(x, σ, y): the paper's method (c), for sample.py --guidance free")
    parser.flag("--drop", 0.1, "share of labels dropped, so that it is s(x, σ) too", bounded(float, 1e-3, 1))
    parser.flag("--no-flip", False, "no random mirror images (fashion has none: its shoes all point one way)")
    parser.flag("--compile", False, "torch.compile the network")
    parser.flag("--sample-every", 5000, "steps between sample pictures; 0: none", bounded(int, 0, 10**9))
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    if args.preset == "exact":
        parser.refuse(args, "with --preset exact", "steps", "batch", "lr", "width", "save_every", "amp",
                      "conditional", "no_flip", "compile", "sample_every")
    if not args.conditional:
        parser.refuse(args, "without --conditional", "drop")
    device = set_up(args)
    path = run_folder(args) / f"score{args.tag or ''}.pt"
    images, labels, names = load_images(args.data, "train", args.size, args.root)
    size = images.shape[-1]
    settings = dict(data=args.data, data_sha=checksum([images, labels])[:16], classes=names, size=size,
                    sigma_min=SIGMA_MIN, sigma_max=args.sigma_max)
    if args.preset == "exact":
        net = ExactScore(images, labels)
        with lock(path):
            if path.exists() and not args.restart:
                resume(path, "score", net, settings, Plan(steps=0, lr=0.0))
            else:
                save(path, "score", net, settings)
                say(f"{path}: the exact score of {len(images)} images")
        return
    preset = from_preset(args, PRESETS)
    flip = not args.no_flip and pathlib.Path(args.data).stem != "fashion"
    torch.manual_seed(derive_seed(args.seed, "weights"))
    shape = {key: preset[key] for key in ("width", "mults", "blocks", "attention", "dropout", "edm")}
    net = NCSNpp(size, images.shape[1], **shape, classes=len(names) if args.conditional else 0).to(device)
    settings.update(flip=flip, seed=args.seed, amp=args.amp, config=net.config,
                    **{key: preset[key] for key in ("batch", "lr", "warmup", "cosine", "ema")})
    if args.conditional:
        settings["drop"] = args.drop
    introduce(path, net, images, labels, names, device)
    call = network_call(net, args.amp, args.compile, device)
    batch = image_batches(images, labels, preset["batch"], args.seed, SIGMA_MIN, args.sigma_max, flip,
                          args.drop if args.conditional else 0)

    def loss(x, sigma, y, z):
        score = functools.partial(call, y=y) if args.conditional else call
        return dsm_loss(score, x, sigma, z)

    from sample import draw_curve, sample_pictures  # here, since that file imports this one

    def inspect(step, ema):
        draw_curve(path)
        with ema.applied():
            net.eval()
            pictures = path.with_name(f"{path.stem}-samples.png")
            sample_pictures(call, pictures, images.shape[1:], args.sigma_max, device)

    plan = Plan(preset["steps"], preset["lr"], preset["warmup"], preset["cosine"], CLIP, preset["ema"],
                args.seed, preset["save_every"], args.sample_every)
    fit(net, batch, loss, path, "score", settings, plan, device, inspect, args.restart)
    draw_curve(path)


# ------------------------------------------------------------ 2. what it needs: image data

NAMED = {  # torchvision's class, and the files that it would download
    "cifar10": ("CIFAR10", "cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a) into {}/"),
    "cifar100": ("CIFAR100", "cifar-100-python.tar.gz (md5 eb9058c3a382ffc7106e4002c42a8d85) into {}/"),
    "fashion": ("FashionMNIST", "the four *-ubyte.gz files into {}/FashionMNIST/raw/")}
SHAPES = {  # the radii of the corners, which stand at equal angles, and the size of a hole
    "circle": ([1] * 40, 0), "ring": ([1] * 40, 0.55), "half": ([1] * 21 + [0] * 19, 0),
    "pie": ([1] * 31 + [0] * 9, 0), "triangle": ([1] * 3, 0), "square": ([1] * 4, 0),
    "frame": ([1] * 4, 0.55), "rhombus": ([1, 0.35] * 2, 0), "star": ([1, 0.4] * 5, 0),
    "cross": ([1, 0.3] * 4, 0)}
CLASSES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "fashion": "T-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot".split(","),
    "shapes": list(SHAPES)}
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def load_images(data, split="train", size=None, root="data"):
    """→ images (N, C, H, W) uint8, labels (N,) int64, class names.

    `split` is train or test: the data set's own, or a seeded tenth of the images where it has none.
    """
    names = CLASSES.get(data)
    path = pathlib.Path(root, f"{data}.npz") if data in NAMED else pathlib.Path(data)
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
        raise UserError(f"--data {data}: not {', '.join(NAMED)}, shapes, an .npz or a folder that is there")
    images, labels = check_images(path, found)
    classes = len(names) if names else int(labels.max()) + 1
    generator = torch.Generator().manual_seed(0)
    if "test_images" in found:
        test_images, test_labels = check_images(path, found, "test_")
    else:
        held = torch.zeros(len(images), dtype=torch.bool)
        held[torch.randperm(len(images), generator=generator)[: max(1, len(images) // 10)]] = True
        if split == "train":
            say(f"{data}: {held.sum()} of {len(images)} images are held out as its test split")
        test_images, test_labels = images[held], labels[held]
        images, labels = images[~held], labels[~held]
    present = labels.unique()
    if not torch.equal(present, torch.arange(min(classes, len(labels) + 1))):
        wanted = f"labels must be 0 to {classes - 1}, each class with at least one training image"
        raise UserError(f"{path}: {wanted}; found are {present.tolist()[:20]}")
    if test_images.shape[1:] != images.shape[1:] or test_labels.max() >= classes:
        trouble = f"test images of {tuple(test_images.shape[1:])}, test labels up to {test_labels.max()}"
        raise UserError(f"{path}: {trouble} do not fit {tuple(images.shape[1:])} and {classes} classes")
    images, labels = dict(train=(images, labels), test=(test_images, test_labels))[split]
    if split == "test" and (labels.diff() >= 0).all():  # sorted by class: a diagnosis takes the first ones
        order = torch.randperm(len(images), generator=generator)
        images, labels = images[order], labels[order]
    return resized(images, size), labels, names or [str(i) for i in range(classes)]


def check_images(path, found, prefix=""):
    """`images` (N, H, W, C) uint8 and `labels` as tensors (N, C, H, W) and (N,), or an error."""
    for key in (prefix + "images", prefix + "labels"):
        if key not in found:
            raise UserError(f"{path}: has no '{key}' but {sorted(found)}; expected images and labels")
    images, labels = np.asarray(found[prefix + "images"]), np.asarray(found[prefix + "labels"])
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or not images.size:
        what = f"{images.dtype} of shape {images.shape}"
        if images.dtype.kind == "f" and images.size:
            what += f", {images.min():.3g} to {images.max():.3g}"
        wanted = "uint8 from 0 to 255 of shape (N, H, W, C), C 3 or 1; scale and round them"
        raise UserError(f"{path}: {prefix}images are {what}; expected {wanted}")
    whole = labels.shape == (len(images),) and labels.dtype.kind in "iu"
    if not whole or labels.min() < 0 or labels.max() >= 2**31:
        what = f"{labels.dtype} of shape {labels.shape} for {len(images)} images"
        raise UserError(f"{path}: {prefix}labels are {what}; expected whole numbers from 0, one per image")
    images = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return images, torch.from_numpy(labels.astype(np.int64))


def resized(images, size):
    """Cut to a square and resized with antialiasing, where a size is asked for."""
    height, width = images.shape[2:]
    side = min(height, width)
    if size is None and height != width:
        raise UserError(f"the images are {height}×{width}; --size N cuts them square and resizes them")
    if size in (None, height) and height == width:
        return images
    top, left = (height - side) // 2, (width - side) // 2
    parts = images[:, :, top : top + side, left : left + side].split(4096)
    parts = [F.interpolate(part.float(), (size, size), mode="bicubic", antialias=True) for part in parts]
    return torch.cat([part.round().clamp(0, 255).byte() for part in parts])


def read_npz(path):
    with reading(path, ".npz"), np.load(path) as file:
        return {key: file[key] for key in file.files}


def read_recipe(path, found):
    """How the samples in a file were made."""
    with reading(path, "recipe of samples"):
        return dict(json.loads(str(found.get("recipe", "{}"))))


def read_folder(folder, size):
    """One sub-folder per class, any pictures inside; hidden files and folders are passed over."""
    images, labels = [], []
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    loose = [p.name for p in folder.iterdir() if p.suffix.lower() in PICTURES and not p.name.startswith(".")]
    if names and loose:
        say(f"warning: {folder}: {len(loose)} pictures beside the sub-folders are passed over")
    names = names or ["."]  # a flat folder: no classes, which is enough for evaluate.py
    for label, name in enumerate(names):
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in PICTURES
                       and not any(part.startswith(".") for part in p.relative_to(folder).parts))
        if not files:
            raise UserError(f"{folder / name}: a class without pictures ({' '.join(PICTURES)})")
        for file in files:
            with reading(file, "picture"):
                picture = read_picture(file)
            if size:
                side = min(picture.size)
                left, top = (picture.width - side) // 2, (picture.height - side) // 2
                picture = picture.crop((left, top, left + side, top + side))
                picture = picture.resize((size, size), Image.Resampling.BICUBIC)
            images.append(picture)
            labels.append(label)
    sizes = sorted({f"{p.width}×{p.height}" for p in images})
    if len(sizes) > 1:
        raise UserError(f"{folder}: mixed sizes, {', '.join(sizes[:9])}; --size N makes them equal")
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
    """torchvision; without its meta kernels where they fail, beside a torch of another build (CUDA, CPU)."""
    try:
        import torchvision
    except RuntimeError:
        sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")
        import torchvision
    return torchvision


def from_torchvision(data, root):
    kind, files = NAMED[data]
    try:
        with contextlib.suppress(OSError):  # a folder that cannot be written may have it all
            os.makedirs(root, exist_ok=True)
            held = open(pathlib.Path(root) / f".{data}.lock", "w")
            fcntl.flock(held, fcntl.LOCK_EX)  # one process downloads, the others wait
        load = getattr(import_torchvision().datasets, kind)
        train, test = (load(root, train=train, download=True) for train in (True, False))
    except Exception as error:  # no network, a proxy's refusal, a cut connection, no torchvision
        why = (str(error) or type(error).__name__).splitlines()[0]
        cure = f"put {files.format(root)}, or make {root}/{data}.npz (images, labels, test_images, ...)"
        raise UserError(f"--data {data}: no download ({why}); {cure}; --data shapes needs none") from None
    found = dict(images=train.data, labels=train.targets, test_images=test.data, test_labels=test.targets)
    if data == "fashion":  # 28×28 grey, padded to 32×32
        for key in ("images", "test_images"):
            found[key] = np.pad(found[key], ((0, 0), (2, 2), (2, 2)))[..., None]
    return found, CLASSES.get(data) or train.classes


def make_shapes(n=12_000, test=2_000):
    """Ten classes of shapes of any colour, place, size and angle."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low, high, *shape):
        return (low + (high - low) * torch.rand(n, *shape, generator=generator)).numpy()

    labels, kinds, masks = np.arange(n) % len(SHAPES), list(SHAPES.values()), []
    for label, place, size, turn in zip(labels, uniform(11, 21, 2), uniform(7, 11), uniform(0, 2 * np.pi)):
        radii, hole = kinds[label]
        angles = turn + 2 * np.pi * np.arange(len(radii)) / len(radii)
        outline = size * np.multiply(radii, [np.cos(angles), np.sin(angles)]).T
        mask = Image.new("L", (128, 128))  # four times as large as the image, for smooth edges
        pen = ImageDraw.Draw(mask)
        pen.polygon((4 * (place + outline)).ravel().tolist(), fill=255)
        if hole:
            pen.polygon((4 * (place + hole * outline)).ravel().tolist(), fill=0)
        masks.append(np.asarray(mask.reduce(4)))
    inside = np.stack(masks)[..., None] / np.float32(255)
    back = uniform(0, 1, 1, 1, 3)
    ink = (back + uniform(0.3, 0.7, 1, 1, 3)) % 1  # another colour, so that the shape is visible
    images = (255 * (back + (ink - back) * inside)).round().astype(np.uint8)
    return dict(images=images[test:], labels=labels[test:],
                test_images=images[:test], test_labels=labels[:test])


# ------------------------------------------------------------ 3. machinery: processes, the command line

WORLD = int(os.environ.get("WORLD_SIZE") or 1)  # processes that torchrun has started, and this one's number
RANK = int(os.environ.get("RANK") or 0) if WORLD > 1 else 0
LOST = "peer|Connection|NCCL|gloo|timed out"  # in errors of a process that waits for one that is gone


def save(path, kind, net, settings, step=0, log=(), optimizer=None, average=None):
    """The log first: where the checkpoint says that the run is, it is complete."""
    if RANK > 0:
        return
    if log:
        write_whole(path.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in log).encode())
    ema = dict(shadow=average.shadow, updates=average.updates) if average else None
    about = dict(kind=kind, network=type(net).__name__, config=net.config, step=step, log=json.dumps(log))
    save_checkpoint(path, dict(**about, settings=settings, weights=net.state_dict(), ema=ema,
                               optimizer=optimizer and optimizer.state_dict()))


def resume(path, kind, net, settings, plan, optimizer=None, average=None, device="cpu"):
    """Fills network, optimizer and EMA from a checkpoint made with the same settings → its step and log."""
    checkpoint = load_checkpoint(path, device)
    cure = f"--{'out DIR' if settings.get('data') == 'moons' else 'tag T'} keeps both, --restart starts over"
    new = dict(kind=kind, network=type(net).__name__)
    old = {key: checkpoint.get(key) for key in new}
    if changed := difference({**old, **(checkpoint.get("settings") or {})}, {**new, **settings}):
        raise UserError(f"{path} was made with {changed}; {cure}")
    try:
        net.load_state_dict(checkpoint["weights"])
        if optimizer:
            optimizer.load_state_dict(checkpoint["optimizer"])
        if average:
            torch._foreach_copy_(average.shadow, checkpoint["ema"]["shadow"])
            average.updates = checkpoint["ema"]["updates"]
        step, log = checkpoint["step"], json.loads(checkpoint.get("log", "[]"))
    except Exception as error:  # exported, another version's, or a stranger's: it can fail in any way
        what = f"holds no training that can go on ({type(error).__name__})"
        raise UserError(f"{path}: {what}; {cure}") from None
    planned = checkpoint["settings"].get("steps")
    if step >= plan.steps:
        say(f"{path}: finished already ({step} steps); --restart starts over")
    else:
        say(f"{path}: continuing at step {step} of {plan.steps}")
        if plan.cosine and planned != plan.steps:
            say(f"warning: its learning rate decayed towards step {planned}, from here towards {plan.steps}")
    return step, log


def difference(old, new):
    """What a file was made with and is not asked for now, in words; "" where nothing differs."""
    old, new = ({**(settings.get("config") or {}), **settings} for settings in (old, new))
    words = dict.fromkeys(("score", "score_sha"), "another score model: it has changed since")
    words["data_sha"] = "other images: those of --data have changed since"
    words["drop"] = "another --drop, or without --conditional"
    for key, value in new.items():
        if key not in ("config", "data") and old.get(key) != value:
            return words.get(key, f"{key} = {old.get(key)}, not {value}")
    return ""


def derive_seed(*parts):
    """A seed from several numbers and words."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def add_gradients(net, value, stop):
    """Sums gradients over all processes → the sums of the losses and of the caught signals, not read yet."""
    numbers = torch.stack([value, torch.full_like(value, sum(stop))])
    if WORLD > 1:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        flat = torch.cat([*(g.reshape(-1) for g in grads), numbers])
        dist.all_reduce(flat)
        *parts, numbers = flat.split([*(g.numel() for g in grads), 2])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])
    return numbers


@contextlib.contextmanager
def caught_signals():
    """Within this block Ctrl-C and SIGTERM are appended to a list; a second Ctrl-C interrupts at once."""
    stop = []

    def catch(number, frame):
        stop.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if RANK == 0:
            os.write(1, b"\nstopping soon; what is done is saved (Ctrl-C again: at once)\n")

    old = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def lock(path):
    """Holds `path` for this job; the system lets go when the process ends, however it ends."""
    if RANK > 0:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cure = "wait, or choose another --tag or --out"
            raise UserError(f"{path}: another process writes it; {cure}") from None
        except OSError:  # a file system that has no locks
            pass
        for end in (path.suffix, ".jsonl", ".png", "-samples.png", "-strip.png"):
            for stale in path.parent.glob(f".{path.stem}{end}-*[0-9]"):  # what a kill in write_whole left
                stale.unlink(missing_ok=True)
        yield


def say(text):
    if RANK == 0:
        print(text, flush=True)


class Progress:
    """One line: count, numbers, speed, time left. Rewritten on a terminal, else shown twice a minute."""

    def __init__(self, total, start=0, unit="step"):
        self.total, self.start, self.unit, self.begun = total, start, unit, time.monotonic()
        self.next = self.begun + 3

    def __call__(self, done, **numbers):
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if RANK > 0 or done < self.total and now < self.next:
            return
        self.next = now + (0.5 if terminal else 30)
        speed = (done - self.start) / max(now - self.begun, 1e-9)
        left = min((self.total - done) / max(speed, 1e-9), 1e10)
        line = f"{self.unit} {done:.0f}/{self.total}  "
        line += "".join(f"{key} {value:.4g}  " for key, value in numbers.items())
        line += f"{speed:.3g}/s  {datetime.timedelta(seconds=round(left))} left"
        if terminal:  # over the line before
            line = f"\r{line}\033[K"
        print(line, end="" if terminal and done < self.total else "\n", flush=True)


def bounded(kind, low, high):
    """An argparse type: a whole number (kind int) or a number (float) from low to high."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not from {low:g} to {high:g}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def text(value):
    """An argparse type: not empty, as an unset variable in a shell script would be."""
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty")
    return value


def file_part(text):
    """An argparse type: part of a file's name, with the dash before it."""
    if not re.fullmatch(r"[\w.,+=@-]{1,100}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not up to 100 letters, digits and .,+=@-_")
    return f"-{text}"


class Parser(argparse.ArgumentParser):
    """argparse with defaults in --help and errors in one line."""

    def __init__(self, doc):
        super().__init__(usage="%(prog)s [flags]", description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.place = self

    def group(self, title):
        """Flags from here on stand under this title."""
        self.place = self.add_argument_group(title)

    def flag(self, name, default, help, type=text, **more):
        if default is False:
            self.place.add_argument(name, help=help, action="store_true")
            return
        shown = "" if default is None else f" (default: {default})"
        more.setdefault("metavar", name.split("-")[-1].upper())
        self.place.add_argument(name, help=help + shown, type=type, default=default, **more)

    def refuse(self, args, beside, *keys):
        """An error where one of these flags was given: it has no effect beside another."""
        for key in keys:
            if getattr(args, key) != self.get_default(key):
                raise UserError(f"--{key.replace('_', '-')} {beside}: has no effect; leave it out")

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def run(main):
    """Calls main(); bad input, a full disk, SIGTERM or Ctrl-C end in one line on stderr."""
    def terminate(number, frame):
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, terminate)
    kept, code = "finished work is kept, the same command continues", 2
    try:
        main()
        if dist.is_initialized():  # not after an error: it would wait for processes that wait for this one
            dist.destroy_process_group()
        return
    except UserError as error:
        message = str(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        cure = "make room or give access; --run or --out writes elsewhere"
        message = f"{where}{error.strerror or error}; {cure}"
    except (MemoryError, RuntimeError) as error:
        reason = repr(error)
        if re.search("MemoryError|out of memory|allocate memory", reason):
            message = f"out of memory; try a smaller --batch, --size or --width; {kept}"
        elif "BrokenProcessPool" in reason or dist.is_initialized() and re.search(LOST, reason):
            message = f"another process of this job is lost ({reason[:80]}); {kept}"
        elif re.search("Inductor|CxxCompiler", reason):
            message = f"--compile: found no compiler that works ({reason[:80]}); leave it out"
        else:
            raise
    except KeyboardInterrupt as error:
        message, code = f"interrupted; {kept}", 128 + (error.args[0] if error.args else signal.SIGINT)
    if RANK > 0 and code != 2:  # a signal, which all have heard
        sys.exit(code)
    if RANK > 0:  # of several processes the first one to speak is heard: torchrun then ends the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    print(f"{pathlib.Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def shared_flags(parser, presets=None):
    parser.group("data and run")
    parser.flag("--data", "cifar10", "cifar10, cifar100, fashion, shapes, an .npz or a folder of folders")
    parser.flag("--root", "data", "folder of the named sets, as NAME.npz or downloaded")
    parser.flag("--size", None, "resize the images to SIZE×SIZE pixels", bounded(int, 4, 4096))
    parser.flag("--run", None, "name, for runs/RUN, or folder (default: the data's name)")
    parser.flag("--seed", 0, "random seed", bounded(int, 0, 2**62))
    parser.flag("--device", "auto", "auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps")
    parser.flag("--restart", False, "start over instead of continuing")
    if presets:
        parser.group("training; the preset gives the defaults")
        parser.flag("--preset", "lite", f"{', '.join(presets)}: see top of the file", choices=list(presets))
        parser.flag("--steps", None, "optimizer steps", bounded(int, 1, 10**9))
        parser.flag("--batch", None, "images per step, over all processes", bounded(int, 1, 10**6))
        parser.flag("--lr", None, "Adam's learning rate", bounded(float, 1e-12, 1e3))
        parser.flag("--width", None, "channels of the first level", bounded(int, 4, 4096))
        parser.flag("--save-every", None, "steps between checkpoints", bounded(int, 1, 10**9))
        parser.flag("--tag", None, "adds -TAG to the name of the output, for variants", file_part)
        parser.flag("--amp", False, "the score network in bfloat16 (CUDA)")


def from_preset(args, presets):
    """The preset's values, each replaced by the flag of its name where that was given."""
    given = {key: value for key, value in vars(args).items() if value is not None}
    return {key: given.get(key, value) for key, value in presets[args.preset].items()}


def run_folder(args):
    if args.run:
        return pathlib.Path(args.run) if "/" in args.run else pathlib.Path("runs") / args.run
    path = pathlib.Path(args.data or "cifar10")
    name = path.stem if path.suffix == ".npz" else path.resolve().name
    return pathlib.Path("runs") / (f"{name}-{args.size}" if args.size else name)


def set_up(args):
    """Joins the other processes of a torchrun → the device of this one."""
    name = args.device
    if name == "auto":
        here = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
        name = next(name for name, there in here.items() if there)
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"--device {args.device}: not on this machine ({why}); --device cpu works") from None
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32, as convolutions have it; the metrics turn it off
    if getattr(args, "amp", False) and not (cuda and torch.cuda.is_bf16_supported(including_emulation=False)):
        raise UserError(f"--amp: bfloat16 needs a CUDA device that has it, this is {device}; leave it out")
    if WORLD > 1 and not dist.is_initialized():
        # torchrun ends all when one dies; who waits for a slow one may wait long.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(days=7))
    return device


def network_call(net, amp, compiled, device):
    """net(x, σ, ...), compiled or in bfloat16 where asked for; its result is in float32."""
    call = torch.compile(net) if compiled else net
    if amp:
        call = torch.autocast(device.type, torch.bfloat16)(call.__call__)
    return call


def introduce(path, net, images, labels, names, device):
    count = sum(p.numel() for p in net.parameters()) / 1e6
    hint = "; --preset tiny is made for a CPU" if device.type == "cpu" and count > 5 else ""
    say(f"{path}: {count:.2f} M parameters, on {device}{hint}")
    counts = [f"{name} {n}" for name, n in zip(names, labels.bincount().tolist())]
    shown = ", ".join(counts[:12]) + (", …" if len(counts) > 12 else "")
    say(f"{len(images)} images {'×'.join(map(str, images.shape[1:]))}, {len(names)} classes: {shown}")


if __name__ == "__main__":
    run(main)
