"""Stage 1: trains the unconditional score model s(x, σ) by denoising score matching.

    python train_score.py --data cifar10                  # one GPU, about a day
    python train_score.py --data shapes --preset tiny     # a CPU, minutes, no download

Reads a data set, writes runs/RUN/score.pt (RUN is the data set's name), its log score.jsonl, a loss curve score.png
and pictures sampled on the way, score-samples.png. The same command again continues where it stopped. Several
GPUs: torchrun --nproc-per-node=8 -- train_score.py ... (the -- keeps torchrun from reading our flags).

This file also holds what the later stages share: image data, the training loop `fit`, pictures, the command line.
"""
import argparse
import contextlib
import datetime
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
from PIL import Image

from models import EMA, NCSNpp, UserError, check_zip, checksum, header, load_checkpoint, save_checkpoint, sigma_at, write_whole

PRESETS = {
    # What the authors ran: NCSN++ deep, continuous (Song et al. 2021), 107.6 M parameters.
    "paper": dict(width=128, mults=(1, 2, 2, 2), blocks=8, attention=(16,), dropout=0.1, edm=False,
                  steps=950_000, batch=128, lr=2e-4, warmup=5_000, cosine=False, ema=0.999),
    # One GPU, about a day: the same network at half the width and depth, 15.7 M, predicting as EDM does.
    "lite": dict(width=64, mults=(1, 2, 2, 2), blocks=4, attention=(16,), dropout=0.1, edm=True,
                 steps=300_000, batch=128, lr=2e-4, warmup=5_000, cosine=False, ema=0.9999),
    # A CPU, 1 M: minutes for a first look, an hour for good pictures at 16×16.
    "tiny": dict(width=28, mults=(1, 2, 2), blocks=1, attention=(8,), dropout=0.0, edm=True,
                 steps=6_000, batch=64, lr=1e-3, warmup=200, cosine=True, ema=0.999),
}


# ---------------------------------------------------------------------------- method


def dsm_loss(score_net, x, sigma, z, power=2):
    """L_DSM (Eqs. 4, A3): ½ σ^power ‖s(x̃, σ) + z/σ‖², x̃ = x + σz; sum over coordinates, mean over the batch.

    z/σ is −∇ log p_σ(x̃|x). The paper prints λ = 1/σ²; its code, and we, multiply by σ².
    """
    s = spread(sigma, x)
    error = (score_net(x + s * z, sigma) + z / s).square().flatten(1).sum(1)
    return 0.5 * (sigma**power * error).mean()


def spread(value, x):
    """(B,) → (B, 1, ...), to multiply x with."""
    return value.view(-1, *[1] * (x.ndim - 1))


def draw_noise(generator, shape, sigma_min, sigma_max):
    """σ(t) with t uniform on [1e-5, 1], and z ~ N(0, I)."""
    t = 1e-5 + (1 - 1e-5) * torch.rand(shape[0], generator=generator)
    return sigma_at(t, sigma_min, sigma_max), torch.randn(shape, generator=generator)


def fit(net, draw, loss, path, kind, settings, *, steps, lr, warmup=0, cosine=False, clip=0.0, ema=0.0, seed=0,
        device="cpu", save_every=1000, every=0, inspect=None, restart=False, quiet=False):
    """Adam on `loss(*draw(generator, step))`, from the checkpoint at `path` if there is one, to step `steps`.

    `draw` gives the whole batch, x and σ first, from a generator that depends on seed and step alone; every process
    computes on its share and the gradients are summed. So a resumed run takes the same path, and on any number of processes
    too, but for what each has of its own: dropout masks, BatchNorm's statistics. (DistributedDataParallel could not
    differentiate twice.) `settings` must match those in the file.
    `inspect(step, ema)` runs every `every` steps and at the end; what it returns is logged. → the EMA, or None
    """
    path = pathlib.Path(path)
    rank, world = process()
    average = EMA(net, ema) if ema else None
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
    start, losses, log, stop = 0, [], [], []
    reseed = torch.manual_seed if torch.device(device).type != "cpu" else torch.default_generator.manual_seed  # which saves 0.7 ms
    with lock(path) if rank == 0 else contextlib.nullcontext():
        if path.exists() and not restart:
            start, log, planned = resume(path, kind, net, settings, optimizer, average, device)
            if start >= steps:
                quiet or say(f"{path}: finished already ({start} steps); --restart starts over")
                return average
            quiet or say(f"{path}: continuing at step {start} of {steps}")
            if cosine and planned != steps:
                quiet or say(f"warning: its learning rate decayed towards step {planned}, from here towards {steps}; --restart starts over")
        progress = Progress(steps, start, "step", quiet)

        def save(step):
            """Log and curve first: where the checkpoint says that the run is, they are complete."""
            if rank == 0:
                write_whole(path.with_suffix(".jsonl"), "".join(json.dumps(record) + "\n" for record in log).encode())
                curve = [(r["step"], r["loss"]) for r in log if "loss" in r]
                if curve and not quiet:
                    from sample import chart
                    chart(path.with_suffix(".png"), [dict(title=path.name, x="step", y="loss", log_y=True, lines=[("", *zip(*curve))])])
                state = None if average is None else dict(shadow=average.shadow, updates=average.updates)
                save_checkpoint(path, dict(**header(net, kind), settings={**settings, "steps": steps}, step=step, log=json.dumps(log),
                                           weights=net.state_dict(), ema=state, optimizer=optimizer.state_dict()))

        def broken(what, step, share):
            """The error for numbers that went wrong; σ is that of the first sample of `share` whose own loss is not finite."""
            pairs = ([v[[i, i]] for v in share] for i in range(len(share[0])))  # twice: BatchNorm refuses a single value
            culprit = next((pair[1][0].item() for pair in pairs if not math.isfinite(loss(*pair).item())), share[1].min().item())
            kept = f"{path} keeps step {start}" if path.exists() and not restart else "nothing was saved"
            return UserError(f"{what} not finite at step {step}, σ = {culprit:.3g}; {kept}; try a smaller --lr")

        with caught_signals(stop):
            for step in range(start, steps):
                rate = lr * min(1.0, (step + 1) / max(warmup, 1)) * (0.5 + 0.5 * math.cos(math.pi * step / steps) if cosine else 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                reseed(mix(seed, step, rank))  # dropout
                whole = draw(torch.Generator().manual_seed(mix(seed, step)), step)
                if len(whole[0]) < world:
                    raise UserError(f"--batch {len(whole[0])}: fewer than the {world} processes that share it")
                share = [v.tensor_split(world)[rank].to(device, non_blocking=True) for v in whole]
                net.train()
                value = loss(*share) * (len(share[0]) / len(whole[0]))
                optimizer.zero_grad()
                value.backward()
                value, stopping = add_gradients(net, value.detach(), stop)
                norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)
                losses.append(float(value))
                if not math.isfinite(losses[-1]) or not math.isfinite(norm):
                    raise broken("the loss or its gradient is", step, share)
                optimizer.step()
                if average:
                    average.update()
                done = step + 1
                numbers = dict(loss=sum(losses) / len(losses), lr=rate)
                progress(done, **numbers)
                if done % max(steps // 200, 1) == 0 or done == steps:
                    log.append(dict(step=done, **numbers, seconds=round(progress.seconds, 2)))
                    losses.clear()
                if inspect and rank == 0 and (every and done % every == 0 or done == steps):
                    log.append(dict(step=done, **(inspect(done, average) or {})))
                if done % save_every == 0 or done == steps or stopping:
                    if not all(v.isfinite().all() for v in net.state_dict().values()):
                        raise broken("the weights are", step, share)
                    save(done)
                    start, restart = done, False
                if stopping and done < steps:
                    say(f"\n{path}: stopped at step {done} and saved; the same command continues")
                    sys.exit(128 + stopping)
    return average


def resume(path, kind, net, settings, optimizer, average, device):
    """Fills network, optimizer and EMA from a checkpoint → its step, log and planned steps; an error if it was made with other settings."""
    checkpoint, parameters = load_checkpoint(path, device), list(net.parameters())
    cure = "--tag T writes elsewhere, --restart overwrites it"
    if checkpoint.get("kind") != kind or not isinstance(checkpoint.get("settings"), dict):
        raise UserError(f"{path}: holds no {kind} of ours; {cure}")
    old, new = ({**s, **(s.get("config") or {})} for s in (checkpoint["settings"], settings))
    for key, value in new.items():
        if old.get(key) != value and key != "config":
            raise UserError(f"{path} was made with {key} = {old.get(key)}, not {value}; --tag T keeps both, --restart starts over")
    try:
        net.load_state_dict(checkpoint["weights"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if average:
            for mine, value in zip(average.shadow, checkpoint["ema"]["shadow"], strict=True):
                mine.copy_(value.view_as(mine))
            average.updates = int(checkpoint["ema"]["updates"])
        fits = all(optimizer.state[p][key].shape == p.shape for p in parameters for key in ("exp_avg", "exp_avg_sq"))
        step, log = int(checkpoint["step"]), json.loads(checkpoint.get("log", "[]"))
    except Exception as error:  # another version's, or a stranger's: it can fail in any way
        raise UserError(f"{path}: holds no {kind} that fits this network ({type(error).__name__}); {cure}") from None
    if not fits or step < 1:
        raise UserError(f"{path}: its optimizer does not fit this network; {cure}")
    return step, log, checkpoint["settings"].get("steps")


# ---------------------------------------------------------------------------- data

NAMED = {  # torchvision's class, and what to fetch by hand where there is no network
    "cifar10": ("CIFAR10", "cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a) into {}/"),
    "cifar100": ("CIFAR100", "cifar-100-python.tar.gz (md5 eb9058c3a382ffc7106e4002c42a8d85) into {}/"),
    "fashion": ("FashionMNIST", "the four *-ubyte.gz files into {}/FashionMNIST/raw/"),
}
CLASSES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "fashion": "T-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot".split(","),
    "shapes": "circle ring crescent half bar triangle square frame star plus".split(),
}


def load_images(data, split="train", size=None, root="data"):
    """→ images (N, C, H, W) uint8, labels (N,) int64, class names. `split` is train or test: the set's own, else a seeded tenth."""
    path, names = pathlib.Path(data), CLASSES.get(data)
    if data in NAMED:
        path = pathlib.Path(root) / f"{data}.npz"
    if data == "shapes":
        found = draw_shapes()
    elif data in NAMED and not path.exists():
        found, names = from_torchvision(data, root)
    elif path.suffix == ".npz":
        found = read_npz(path)
    elif path.is_dir():
        found, names = read_folder(path, size)
        if names == ["."]:
            raise UserError(f"--data {data}: expected one sub-folder a class with pictures inside, found none")
    else:
        raise UserError(f"--data {data}: neither a named set ({', '.join([*NAMED, 'shapes'])}) nor an .npz or a folder that is there")
    own_test = "test_images" in found
    images, labels = check_images(path, found)
    classes = len(names) if names else int(labels.max()) + 1
    if split == "test" and own_test:
        images, labels = check_images(path, found, "test_")
    present = labels.unique()
    if not torch.equal(present, torch.arange(min(classes, len(labels) + 1))):
        raise UserError(f"{path}: labels must be 0 to {classes - 1}, each class with at least one image; found are {present.tolist()[:20]}")
    generator = torch.Generator().manual_seed(0)
    if not own_test:
        held = torch.zeros(len(images), dtype=torch.bool)
        held[torch.randperm(len(images), generator=generator)[: max(1, len(images) // 10)]] = True
        keep = held if split == "test" else ~held
        images, labels = images[keep], labels[keep]
    if split == "test" and (labels.diff() >= 0).all():  # sorted by class: mixed, since a diagnosis takes the first ones
        order = torch.randperm(len(images), generator=generator)
        images, labels = images[order], labels[order]
    return resized(images, size), labels, names or [str(i) for i in range(classes)]


def check_images(path, found, prefix=""):
    """`images` (N, H, W, C) uint8 with `labels`, as tensors (N, C, H, W) and (N,), or an error that names the file."""
    for key in (prefix + "images", prefix + "labels"):
        if key not in found:
            raise UserError(f"{path}: has no '{key}' but {sorted(found)}; expected images (N, H, W, C) uint8 and labels (N,)")
    images, labels = np.asarray(found[prefix + "images"]), np.asarray(found[prefix + "labels"])
    if images.ndim != 4 or images.shape[3] not in (1, 3) or not images.size:
        raise UserError(f"{path}: images have shape {images.shape}; expected (N, H, W, C) with C 3 or 1")
    if images.dtype != np.uint8:
        cure = "from [0, 1]: (255 * images).round().astype('uint8')"
        raise UserError(f"{path}: images are {images.dtype}; expected uint8, 0 to 255 ({cure})")
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= 2**31:
        found = f"{labels.dtype} {labels.shape} for {len(images)} images"
        raise UserError(f"{path}: labels are {found}; expected whole numbers from 0, one an image")
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), torch.from_numpy(labels.astype(np.int64))


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
    parts = (F.interpolate(part.float(), (size, size), mode="bicubic", antialias=True) for part in images.split(4096))
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])


def read_npz(path):
    try:
        check_zip(path)
        with np.load(path) as file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # a damaged or hostile file can fail in any way
        raise UserError(f"{path}: not a readable .npz, perhaps cut off or damaged ({type(error).__name__}); get it again") from None


def read_folder(folder, size):
    """One sub-folder a class, any pictures inside."""
    images, labels, shapes = [], [], {}
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) or ["."]  # a flat folder: no classes, which evaluate.py can do with
    for label, name in enumerate(names):
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".bmp"))
        if not files:
            raise UserError(f"{folder / name}: holds no pictures (.png, .jpg, .webp, .bmp); every sub-folder is a class")
        for file in files:
            try:
                picture = Image.open(file)
                picture = picture.convert("L" if picture.mode in ("1", "L", "I;16") else "RGB")
            except Exception:  # a damaged one can fail in any way
                raise UserError(f"{file}: not a readable picture; delete it or replace it") from None
            if size:
                side = min(picture.size)
                left, top = (picture.width - side) // 2, (picture.height - side) // 2
                picture = picture.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
            shapes[picture.size] = file
            images.append(picture)
            labels.append(label)
    if len(shapes) > 1:
        (a, first), (b, second) = list(shapes.items())[:2]
        raise UserError(f"{folder}: mixed sizes, {first.name} is {a[0]}×{a[1]}, {second.name} {b[0]}×{b[1]}; --size N makes them equal")
    mode = "RGB" if any(p.mode == "RGB" for p in images) else "L"
    pixels = np.stack([np.asarray(p.convert(mode)).reshape(p.height, p.width, -1) for p in images])
    return dict(images=pixels, labels=np.array(labels)), names


def import_torchvision():
    """torchvision; where its compiled operators do not fit this torch (a CUDA build beside a CPU one), without them: we need none."""
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision
        torchvision._operators = library  # the definitions live as long as this object
    return torchvision


def from_torchvision(data, root):
    kind, files = NAMED[data]
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # one process downloads, the others wait; who cannot write here does neither
                os.makedirs(root, exist_ok=True)
                fcntl.flock(stack.enter_context(open(pathlib.Path(root) / f".{data}.lock", "w")), fcntl.LOCK_EX)
            sets = [getattr(import_torchvision().datasets, kind)(root, train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"--data {data}: cannot be downloaded ({why}); put {files.format(root)}, or make {root}/{data}.npz with "
                        "images, labels, test_images, test_labels; --data shapes needs no download") from None
    found = {}
    for prefix, part in zip(("", "test_"), sets):
        images = np.asarray(part.data)
        if images.ndim == 3:  # Fashion-MNIST: 28×28 grey, padded to 32×32
            images = np.pad(images[..., None], ((0, 0), (2, 2), (2, 2), (0, 0)))
        found.update({f"{prefix}images": images, f"{prefix}labels": np.asarray(part.targets)})
    return found, CLASSES.get(data) or list(sets[0].classes)


def draw_shapes(n=12_000, test=2_000):
    """Ten classes of coloured shapes, any place, size, angle and colours, on a shaded background; the last `test` are the test split."""
    g = torch.Generator().manual_seed(0)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(n, *shape, generator=g)

    labels = torch.arange(n) % 10
    axis = torch.arange(32) + 0.5
    cx, cy, r, turn = (v[:, None, None] for v in (uniform(11, 21), uniform(11, 21), uniform(7, 10.5), uniform(0, 2 * math.pi)))
    dx, dy = axis[None, None, :] - cx, axis[None, :, None] - cy
    u, v = (dx * turn.cos() + dy * turn.sin()) / r, (dy * turn.cos() - dx * turn.sin()) / r

    def fold(u, v, corners):  # polar coordinates, the angle from the middle of its sector
        return (u**2 + v**2).sqrt(), ((torch.atan2(v, u) + math.pi) % (2 * math.pi / corners) - math.pi / corners).abs()

    def box(u, v, width, height):
        return torch.maximum(u.abs() - width, v.abs() - height)

    def triangle(u, v):
        radius, angle = fold(u, v, 3)
        return radius * angle.cos() - 0.5

    def star(u, v):  # the edge from a point (1 at angle 0) to a notch (0.42 at π/5)
        radius, angle = fold(u, v, 5)
        return radius * (0.35 * angle.cos() + 0.937 * angle.sin()) - 0.35

    shapes = [  # distances in units of r, below zero inside, in the order of CLASSES["shapes"]
        lambda u, v: torch.hypot(u, v) - 0.9, lambda u, v: (torch.hypot(u, v) - 0.75).abs() - 0.2,
        lambda u, v: torch.maximum(torch.hypot(u, v) - 1, 0.8 - torch.hypot(u - 0.55, v)),
        lambda u, v: torch.maximum(torch.hypot(u, v) - 1, u - 0.1),
        lambda u, v: box(u, v, 1.1, 0.25), triangle, lambda u, v: box(u, v, 0.75, 0.75), lambda u, v: (box(u, v, 0.68, 0.68)).abs() - 0.17,
        star, lambda u, v: torch.minimum(box(u, v, 1, 0.3), box(u, v, 0.3, 1))]
    inside = torch.empty(n, 1, 32, 32)
    for c, shape in enumerate(shapes):
        inside[c::10, 0] = (0.5 - shape(u[c::10], v[c::10]) * r[c::10]).clamp(0, 1)
    back, other, ink = uniform(0, 1, 3), uniform(0, 1, 3), uniform(0, 1, 3)
    near = (ink - (back + other) / 2).abs().amax(1, keepdim=True) < 0.35  # keep the shape visible
    ink = torch.where(near, ((back + other) / 2 + 0.5) % 1, ink)
    slope = uniform(0, 2 * math.pi)[:, None, None]
    shade = ((axis[None, None, :] * slope.cos() + axis[None, :, None] * slope.sin()) / 45 + 0.5).clamp(0, 1)[:, None]
    image = back[:, :, None, None] * (1 - shade) + other[:, :, None, None] * shade
    image = image * (1 - inside) + ink[:, :, None, None] * inside + uniform(-0.02, 0.02, 3, 32, 32)
    images, labels = (255 * image.clamp(0, 1)).round().to(torch.uint8).permute(0, 2, 3, 1).numpy(), labels.numpy()
    return dict(images=images[:-test], labels=labels[:-test], test_images=images[-test:], test_labels=labels[-test:])


# ---------------------------------------------------------------------------- plumbing: processes, signals, progress


def process():
    """(rank, number of processes): (0, 1) unless torchrun started us."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mix(*parts):
    """A seed from several whole numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def peers():
    """For what waits for the other processes: when one dies, gloo and NCCL fail in many ways; here it is one line."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[\S*\] ", "", " ".join(str(error).split()))[:80]
        raise UserError(f"another process of this job is lost ({reason}); finished work is kept, the same command continues") from None


def add_gradients(net, value, stop):
    """Sums gradients and loss over all processes → the loss, and the signal that one of them caught: all stop at the same step."""
    caught = stop[0] if stop else 0
    if process()[1] > 1:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads] + [value.reshape(1), value.new_full((1,), caught)])
        with peers():
            dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads] + [2])):
            g.copy_(part.view_as(g))
        value, caught = flat[-2], caught or int(flat[-1] > 0) * signal.SIGTERM
    return value, caught


@contextlib.contextmanager
def caught_signals(stop):
    """Within this block Ctrl-C and SIGTERM append their number to `stop`; a second Ctrl-C interrupts at once."""
    def catch(number, frame):
        if number in stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.append(number)

    old = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
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
            raise UserError(f"{path}: {file.read().strip() or 'another process'} is writing it; wait, or choose another --tag") from None
        except OSError:  # a file system that has no locks
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        for end in (path.suffix, ".jsonl", ".png", "-samples.png", "-strip.png"):  # what a kill in write_whole left
            for stale in path.parent.glob(f".{glob.escape(path.stem + end)}-????????"):
                stale.unlink(missing_ok=True)
        yield


def say(text):
    if process()[0] == 0:
        print(text, flush=True)


class Progress:
    """One line with the count, the numbers, the speed and the time left: rewritten on a terminal, else twice a minute."""

    def __init__(self, total, start=0, unit="step", quiet=False):
        self.total, self.start, self.unit, self.quiet = total, start, unit, quiet or process()[0] > 0
        self.begun = self.shown = time.monotonic()

    @property
    def seconds(self):
        return time.monotonic() - self.begun

    def __call__(self, done, **numbers):
        now, tty = time.monotonic(), sys.stdout.isatty()
        if self.quiet or done < self.total and now - self.shown < (0.5 if tty else 30):
            return
        self.shown = now
        speed = (done - self.start) / max(self.seconds, 1e-9)
        minutes, seconds = divmod(round((self.total - done) / max(speed, 1e-9)), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
        line = f"{self.unit} {done}/{self.total}" + "".join(f"  {k} {v:.4g}" for k, v in numbers.items()) + f"  {speed:.3g}/s  {left}"
        print("\r" * tty + line, end="\n" if done == self.total or not tty else "\033[K", flush=True)


# ---------------------------------------------------------------------------- plumbing: the command line


def number(kind, low, high=math.inf):
    """An argparse type: a whole number (kind int) or a finite number (float) from low to high."""
    def parse(text):
        try:
            value = kind(text)
            good = low <= value <= high and math.isfinite(value)
        except (ValueError, OverflowError):
            good = False
        if not good:
            top = f" to {high:g}" if high < math.inf else " or more"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a {'whole ' * (kind is int)}number of {low:g}{top}")
        return value

    parse.kind, parse.low, parse.high = kind, low, high
    return parse


def label(text):
    """An argparse type: part of a file's name."""
    if not re.fullmatch(r"[\w.,+=@-]{1,100}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not made of up to 100 letters, digits and .,+=@-_")
    return text


def filled(kind):
    """An argparse type: a text or path that is not empty, as an unset variable in a shell script would make it."""
    def parse(text):
        if not text.strip():
            raise argparse.ArgumentTypeError("is empty")
        return kind(text)

    return parse


class Parser(argparse.ArgumentParser):
    """argparse with defaults in --help and errors in one line."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def flag(self, name, default, help, type=str, **more):
        shown = "" if default is None or default is False else f" (default: {default})"
        type = filled(type) if type in (str, pathlib.Path) else type
        action = dict(action="store_true") if default is False else dict(type=type, default=default)
        self.add_argument(name, help=help + shown, **{**action, **more})

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def run(main):
    """Calls main(); bad input, a full disk, SIGTERM or Ctrl-C end in one line on stderr."""
    name, kept = pathlib.Path(sys.argv[0]).name, "finished work is kept, the same command continues"

    def terminate(number, frame):
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        main()
    except UserError as error:
        sys.exit(print(f"{name}: {error}", file=sys.stderr) or 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(print(f"{name}: {where}{error.strerror or error}; {kept}", file=sys.stderr) or 2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        sys.exit(print(f"{name}: out of memory; try a smaller --batch, --size or --width; {kept}", file=sys.stderr) or 2)
    except KeyboardInterrupt as error:
        sys.exit(print(f"{name}: interrupted; {kept}", file=sys.stderr) or 128 + (error.args or [signal.SIGINT])[0])
    if dist.is_initialized():  # not after an error: it would wait for processes that wait for this one
        dist.destroy_process_group()


def shared_flags(parser, presets):
    parser.flag("--data", "cifar10", "cifar10, cifar100, fashion, shapes, an .npz or a folder with one sub-folder a class")
    parser.flag("--root", "data", "folder of the named data sets: ROOT/NAME.npz if there, else downloaded to it")
    parser.flag("--size", None, "resize the images to SIZE×SIZE pixels", number(int, 4, 4096))
    parser.flag("--run", None, "the run's name, for runs/NAME, or its folder (default: the data set's name, with -SIZE if resized)")
    parser.flag("--seed", 0, "random seed", number(int, 0, 2**62))
    parser.flag("--device", "auto", "auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps")
    parser.flag("--restart", False, "start over instead of continuing")
    if presets:
        parser.flag("--preset", "lite", "paper (the authors' settings), lite (one GPU, a day), tiny (a CPU)", choices=list(presets))
        parser.flag("--steps", None, "optimiser steps (default: the preset's)", number(int, 1, 10**9))
        parser.flag("--batch", None, "images a step, over all processes (default: the preset's)", number(int, 1, 10**6))
        parser.flag("--lr", None, "Adam's learning rate (default: the preset's)", number(float, 1e-12, 1e3))
        parser.flag("--width", None, "channels of the first level (default: the preset's)", number(int, 4, 4096))
        parser.flag("--tag", None, "adds -TAG to the output's name, for variants", label)
        parser.flag("--save-every", 1000, "steps between checkpoints", number(int, 1, 10**9))
        parser.flag("--amp", False, "the score network in bfloat16 (CUDA)")


def from_preset(args, presets):
    """The preset's values, each overridden by the flag of its name where that was given."""
    return {key: value if getattr(args, key, None) is None else getattr(args, key) for key, value in presets[args.preset].items()}


def run_folder(args):
    name = args.run or pathlib.Path(args.data.rstrip("/")).stem + (f"-{args.size}" if args.size else "")
    return pathlib.Path(name) if "/" in name else pathlib.Path("runs") / name


def set_up(args):
    """Joins the other processes of a torchrun → the device of this one."""
    choice = args.device
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if choice == "cuda" and "LOCAL_RANK" in os.environ:
        choice = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(choice)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device}: not on this machine ({str(error).splitlines()[0]}); --device cpu always works") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if getattr(args, "amp", False) and not (device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)):  # some CPUs end the process
        raise UserError(f"--amp: bfloat16 needs a CUDA device that has it, this is {device}; leave it out")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():  # torchrun ends all when one dies; who waits for a slow one may wait long
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(hours=2))
    return device


def network_call(net, amp, compiled, device):
    """net(x, σ), compiled or in bfloat16 where asked for; its result in float32."""
    net = torch.compile(net) if compiled else net

    def call(x, sigma):
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            return net(x, sigma).float()

    return call if amp else net


# ---------------------------------------------------------------------------- the stage itself


def image_draw(images, labels, batch, seed, sigma_min, sigma_max, flip):
    """→ draw(generator, step) for `fit`: x in [0, 1], σ, y, z. Each epoch takes every image once, in an order given by the seed."""
    n = len(images)

    @functools.lru_cache(2)
    def order(epoch):
        return torch.randperm(n, generator=torch.Generator().manual_seed(mix(seed, "epoch", epoch)))

    def draw(generator, step):
        low, high = step * batch, (step + 1) * batch
        index = torch.cat([order(e)[max(low - e * n, 0) : high - e * n] for e in range(low // n, (high - 1) // n + 1)])
        x = images[index].float() / 255
        if flip:
            x = torch.where(torch.rand(batch, 1, 1, 1, generator=generator) < 0.5, x, x.flip(3))
        sigma, z = draw_noise(generator, x.shape, sigma_min, sigma_max)
        return x, sigma, labels[index], z

    return draw


def introduce(path, net, images, more):
    count = sum(p.numel() for p in net.parameters()) / 1e6
    say(f"{path}: {count:.2f} M parameters, {len(images)} images {tuple(images.shape[1:])}, {more}")


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, PRESETS)
    parser.flag("--sigma-max", 50.0, "largest noise level, in units of pixels in [0, 1]", number(float, 0.1, 1e4))
    parser.flag("--no-flip", False, "no random mirror images (fashion has none: its shoes all point one way)")
    parser.flag("--compile", False, "torch.compile the network")
    parser.flag("--sample-every", 5000, "steps between sample pictures; 0: none", number(int, 0, 10**9))
    return parser


def main():
    args = make_parser().parse_args()
    device = set_up(args)
    preset = from_preset(args, PRESETS)
    images, labels, names = load_images(args.data, "train", args.size, args.root)
    path = run_folder(args) / f"score{f'-{args.tag}' if args.tag else ''}.pt"
    flip = not args.no_flip and args.data != "fashion"
    torch.manual_seed(mix(args.seed, "weights"))
    shape = {key: preset[key] for key in ("width", "mults", "blocks", "attention", "dropout", "edm")}
    net = NCSNpp(images.shape[-1], images.shape[1], **shape).to(device)
    settings = dict(
        data=args.data, data_sha=checksum([images, labels])[:16], classes=names, size=images.shape[-1], sigma_min=0.01,
        sigma_max=args.sigma_max, flip=flip, seed=args.seed, amp=args.amp, config=net.config,
        **{key: preset[key] for key in ("batch", "lr", "warmup", "cosine", "ema")})
    introduce(path, net, images, f"on {device}")
    call = network_call(net, args.amp, args.compile, device)

    def pictures(step, ema):
        from sample import heun_sampler, save_grid, sigma_grid
        generator = torch.Generator().manual_seed(0)

        def noise(x):
            return torch.randn(x.shape, generator=generator).to(device)

        with torch.no_grad(), ema.applied():
            net.eval()
            x = args.sigma_max * noise(torch.empty(32, *images.shape[1:]))
            try:
                x = heun_sampler(call, x, sigma_grid(33, 0.01, args.sigma_max, rho=7), churn=0.4, noise=noise)
            except UserError:  # an untrained network may give no score at all
                return
        save_grid(path.with_name(path.stem + "-samples.png"), list((255 * x.clamp(0, 1)).round().to(torch.uint8).split(8)))

    draw = image_draw(images, labels, preset["batch"], args.seed, 0.01, args.sigma_max, flip)
    fit(net, draw, lambda x, sigma, y, z: dsm_loss(call, x, sigma, z), path, "score", settings, steps=preset["steps"], lr=preset["lr"],
        warmup=preset["warmup"], cosine=preset["cosine"], clip=1.0, ema=preset["ema"], seed=args.seed, device=device,
        save_every=args.save_every, every=args.sample_every, inspect=pictures if args.sample_every else None, restart=args.restart)


if __name__ == "__main__":
    run(main)
