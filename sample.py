"""Draws class-conditional samples: the posterior score (guidance), the paper's PC sampler, a fast Heun sampler.

    python sample.py --guidance dlsm                      # after the two training commands

    python sample.py --guidance dlsm --sampler pc         # the paper's sampler: 2,000 score evaluations an image

Reads runs/RUN/score.pt and a classifier, writes runs/RUN/samples-GUIDANCE.npz (images, labels, the recipe) and .png.
Every finished batch is on disk at once: the same command continues. Several processes share the batches under torchrun.
"""
import contextlib
import io
import json
import math
import pathlib
import re
import shutil

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont

from models import UserError, checksum, fold_batchnorm, sigma_at, write_whole
from train_classifier import likelihood_score, load_image_model
from train_score import (CLASSES, Parser, Progress, caught_signals, label, lock, mix, network_call, number, peers, process, read_npz, run,
                         run_folder, say, set_up, shared_flags, spread)

GUIDANCE = {  # the classifier it takes, its own α, re-normalised or not
    "none": (None, 1.0, False),
    "base": ("ce", 1.0, False),
    "scaling": ("ce", 10.0, False),  # α = 10: Table 2
    "dlsm": ("total", 1.0, False),
    "renorm": ("ce", 10.0, True),  # Eqs. A1 and A2
}

SAMPLERS = {"heun": ["churn"], "pc": ["snr", "corrector_steps", "per_sample"]}  # and the flags that are theirs alone

# ---------------------------------------------------------------------------- method


def posterior_score(score_net, classifier=None, y=None, alpha=1.0, renormalize=False):
    """∇ log p(x|y) = s(x, σ) + α ∇ log p(y|x, σ) (Eqs. 5, 6; Eq. A2 with `renormalize`) as a function of (x, σ).

    `alpha` is a number or a function of σ. Without a classifier it is the prior score.
    """
    def score(x, sigma):
        with torch.no_grad():
            s = score_net(x, sigma)
        if classifier is None:
            return s
        a = alpha(sigma) if callable(alpha) else alpha
        return s + likelihood_score(classifier, x, sigma, y, a, renormalize)

    return score


def checked(value, step, sigma):
    """The score `value`, or an error that names step and σ where it is zero, infinite or NaN."""
    size = value.abs().amax()
    if not (math.isfinite(size) and size > 0):
        trouble = "zero" if size == 0 else "not finite"
        raise UserError(f"the score is {trouble} at step {step}, σ = {sigma:.4g}; try a smaller --alpha or more --steps")
    return value


def pc_sampler(score, x, sigmas, snr=0.16, corrector_steps=1, per_sample=False, noise=torch.randn_like):
    """Algorithm 1, in the order of the released code: at each σ_i Langevin steps, then the predictor to σ_{i+1}.

    Langevin step ε = 2 (snr ‖z‖/‖s‖)², norms averaged over the batch as released, or of each sample. Decreasing
    `sigmas` that end with 0 return the last mean without noise, else a sample at the last σ. Equal ones: Eq. 1.
    """
    sigmas = torch.as_tensor(sigmas, device=x.device, dtype=x.dtype)
    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        level = sigma.expand(len(x))
        for _ in range(corrector_steps):
            s, z = checked(score(x, level), i, sigma), noise(x)
            norm_s, norm_z = s.flatten(1).norm(dim=1), z.flatten(1).norm(dim=1)
            if not per_sample:
                norm_s, norm_z = norm_s.mean(), norm_z.mean()
            epsilon = 2 * (snr * norm_z / norm_s) ** 2
            if per_sample:
                epsilon = spread(epsilon, x)
            x = x + epsilon * s + (2 * epsilon).sqrt() * z
        if below < sigma:
            variance = sigma**2 - below**2
            x = x + variance * checked(score(x, level), i, sigma)
            if below > 0:
                x = x + variance.sqrt() * noise(x)
    return x


def heun_sampler(score, x, sigmas, churn=0.0, noise=torch.randn_like):
    """Heun's method on the probability-flow ODE dx/dσ = −σ s(x, σ); with churn > 0 EDM's stochastic sampler.

    Churn raises σ to (1 + churn) σ with fresh noise before each step, never above the first σ. Sigmas that end with
    0 end with one Euler step, onto the denoised mean. 2 evaluations a step.
    """
    sigmas = torch.as_tensor(sigmas, device=x.device, dtype=x.dtype)

    def slope(x, sigma, step):
        return -sigma * checked(score(x, sigma.expand(len(x))), step, sigma)

    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        if churn > 0 and i > 0:
            raised = torch.minimum((1 + churn) * sigma, sigmas[0])
            x, sigma = x + (raised**2 - sigma**2).sqrt() * noise(x), raised
        d = slope(x, sigma, i)
        ahead = x + (below - sigma) * d
        x = ahead if below == 0 else x + (below - sigma) * (d + slope(ahead, below, i)) / 2
    return x


def sigma_grid(steps, sigma_min, sigma_max, rho=None):
    """steps + 1 noise levels from σ_max over σ_min to 0: geometric (the paper's), or EDM's with ρ (7) for few steps."""
    t = torch.linspace(1, 0, steps, dtype=torch.float64)
    if rho:
        sigmas = (sigma_min ** (1 / rho) + t * (sigma_max ** (1 / rho) - sigma_min ** (1 / rho))) ** rho
    else:
        sigmas = sigma_at(t, sigma_min, sigma_max)
    return torch.cat([sigmas, sigmas.new_zeros(1)])


# ---------------------------------------------------------------------------- pictures

COLOURS = ["#1f6fb4", "#e07b1a", "#2c9150", "#c23b3b", "#7b56a8", "#7a7a7a", "#b8860b", "#2aa6b0"]


def save_png(path, image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    write_whole(path, buffer.getvalue())


def save_grid(path, rows, names=None, zoom=None):
    """A picture of images (uint8, C×H×W), one row each of `rows`, with the rows' names on the left."""
    size = rows[0][0].shape[-1]
    zoom = zoom or max(1, 64 // size)
    font = ImageFont.load_default(15)
    left = 10 + int(max(font.getlength(name) for name in names)) if names else 0
    step = size * zoom + 2
    picture = Image.new("RGB", (left + step * max(map(len, rows)), step * len(rows)), "white")
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            pixels = image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()
            picture.paste(Image.fromarray(pixels).resize((size * zoom,) * 2, Image.Resampling.NEAREST), (left + j * step, i * step))
        if names:
            ImageDraw.Draw(picture).text((left - 6, i * step + step // 2), names[i], "black", font, anchor="rm")
    save_png(path, picture)


def nice_ticks(low, high, log):
    """About five round numbers from low to high."""
    if log:
        a, b = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**k for k in range(a, b + 1, max(1, (b - a) // 5)) if low * 0.999 <= 10.0**k <= high * 1.001]
    raw = (high - low) / 5
    step = min((m * 10 ** math.floor(math.log10(raw)) for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def chart(path, panels, columns=None):
    """Panels side by side: dict(title, x, y, lines=[(name, xs, ys[, low, high])], bars=[values], log_x, log_y, y_range)."""
    K, W, H = 3, 460, 340  # drawn K times as large, then reduced: antialiased
    columns = columns or len(panels)
    picture = Image.new("RGB", (K * W * columns, K * H * -(-len(panels) // columns)), "white")
    pen = ImageDraw.Draw(picture, "RGBA")
    font, bold = ImageFont.load_default(13 * K), ImageFont.load_default(15 * K)
    for n, panel in enumerate(panels):
        x0, y0 = K * (W * (n % columns) + 62), K * (H * (n // columns) + 34)
        x1, y1 = x0 + K * (W - 82), y0 + K * (H - 90)
        lines = [([v[0]] + [[float(a) for a in s] for s in v[1:]]) for v in panel.get("lines", [])]
        bars = [float(v) for v in panel.get("bars", [])]
        logs = (panel.get("log_x", False), panel.get("log_y", False))
        xs = [a for v in lines for a in v[1]] or [-0.5, len(bars) - 0.5]
        ys = [a for v in lines for s in v[2:] for a in s if math.isfinite(a) and (a > 0 or not logs[1])] + (bars and [0.0, *bars]) or [0, 1]
        low, high = panel.get("y_range") or (min(ys), max(ys))
        if not panel.get("y_range"):
            pad = (high / low) ** 0.05 if logs[1] else 0.06 * (high - low) or 1
            low, high = (low / pad, high * pad) if logs[1] else (low - pad, high + pad)
        spans = ((min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1), (low, high if high > low else low + 1))

        def place(value, axis):
            a, b = spans[axis]
            if logs[axis]:
                value, a, b = math.log(max(value, 1e-300)), math.log(a), math.log(b)
            part = min(max((value - a) / (b - a), -0.02), 1.02)
            return x0 + part * (x1 - x0) if axis == 0 else y1 - part * (y1 - y0)

        for axis in (0, 1):
            for tick in nice_ticks(*spans[axis], logs[axis]) if not (bars and axis == 0) else []:
                p = place(tick, axis)
                pen.line([(p, y0), (p, y1)] if axis == 0 else [(x0, p), (x1, p)], "#e4e4e4", K)
                at, anchor = ((p, y1 + 5 * K), "mt") if axis == 0 else ((x0 - 6 * K, p), "rm")
                pen.text(at, f"{tick:g}" if abs(tick) < 1e4 else f"{tick / 1000:g}k", "black", font, anchor=anchor)
        for i, value in enumerate(bars):
            edges = sorted([place(0, 1), place(value, 1)])
            pen.rectangle([place(i - 0.4, 0), edges[0], place(i + 0.4, 0), edges[1]], COLOURS[0] if value >= 0 else COLOURS[3])
        if bars:
            pen.line([(x0, place(0, 1)), (x1, place(0, 1))], "black", K)
        for i, (name, x, y, *band) in enumerate(lines):
            colour = COLOURS[i % len(COLOURS)]
            if band:
                edge = list(zip(x, band[0])) + list(zip(x, band[1]))[::-1]
                pen.polygon([(place(a, 0), place(b, 1)) for a, b in edge], colour + "38")
            points = [(place(a, 0), place(b, 1)) for a, b in zip(x, y) if math.isfinite(b)]
            pen.line(points, colour, 2 * K, joint="curve")
            if len(points) <= 12:
                for a, b in points:
                    pen.ellipse([a - 3.5 * K, b - 3.5 * K, a + 3.5 * K, b + 3.5 * K], colour)
        pen.rectangle([x0, y0, x1, y1], outline="#555555", width=K)
        named = [(v[0], COLOURS[i % len(COLOURS)]) for i, v in enumerate(lines) if v[0]]
        if named and panel.get("legend", True):  # in the upper corner that fewer points reach
            wide = max(font.getlength(name) for name, _ in named) + 34 * K
            tall = 17 * K * len(named) + 6 * K
            corners = [(a, b) for b in (y0 + 6 * K, y1 - tall - 6 * K) for a in (x0 + 6 * K, x1 - wide - 6 * K)]
            dots = [(place(a, 0), place(b, 1)) for v in lines for a, b in zip(v[1], v[2]) if math.isfinite(b)]
            a, b = min(corners, key=lambda c: sum(c[0] <= p <= c[0] + wide and c[1] <= q <= c[1] + tall for p, q in dots))
            pen.rectangle([a, b, a + wide, b + tall], "#ffffffd8")
            for i, (name, colour) in enumerate(named):
                middle = b + K * (11 + 17 * i)
                pen.line([(a + 5 * K, middle), (a + 25 * K, middle)], colour, 3 * K)
                pen.text((a + 30 * K, middle), name, "black", font, anchor="lm")
        pen.text(((x0 + x1) / 2, y0 - 8 * K), panel.get("title", ""), "black", bold, anchor="mb")
        pen.text(((x0 + x1) / 2, y1 + 38 * K), panel.get("x", ""), "black", font, anchor="ms")
        label = Image.new("L", (y1 - y0, 20 * K))
        ImageDraw.Draw(label).text(((y1 - y0) / 2, 10 * K), panel.get("y", ""), 255, font, anchor="mm")
        label = label.rotate(90, expand=True)
        picture.paste("black", (x0 - 62 * K, y0), label)
    save_png(path, picture.resize((picture.width // K, picture.height // K), Image.Resampling.LANCZOS))


# ---------------------------------------------------------------------------- the stage itself


def image_noise(seed, first, count, shape, device):
    """→ noise(x): image i draws from a generator of its own, given by seed and i alone."""
    generators = [torch.Generator().manual_seed(mix(seed, "image", i)) for i in range(first, first + count)]
    return lambda x: torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)


def counted(score, counts):
    def call(x, sigma):
        counts["evaluations"] += 1
        return score(x, sigma)

    return call


def watched(score, frames, sigmas, count):
    """Keeps the first images' denoised means x + σ² s as σ passes each of `sigmas`, for the strip picture."""
    def call(x, sigma):
        s = score(x, sigma)
        if len(frames) < len(sigmas) and sigma[0] <= sigmas[len(frames)] * 1.0001:
            frames.append((x + spread(sigma, x) ** 2 * s)[:count])
        return s

    return call


def to_uint8(x):
    return (255 * x.clamp(0, 1)).round().to(torch.uint8).cpu()


def npz_bytes(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def parse_alphas(text):
    """'3' or '0.5,1,3' or 'auto' → a list of numbers, or of 'auto'."""
    check = number(float, 0, 1e4)
    return list(dict.fromkeys(item if item == "auto" else check(item) for item in text.split(",")))


def parse_classes(text):
    check = number(int, 0, 10**6)
    return [check(item) for item in text.split(",")]


def calibrated(folder, name, weights, device):
    """α*(σ) of a classifier, as train_classifier.py --diagnose measured it on these weights: linear in log σ, never below 0."""
    path = folder / "diagnose.json"
    try:
        tables = json.loads(path.read_text())
        if tables.pop("checksum") != checksum(tables) or tables.get("weights", {}).get(name, weights) != weights:
            raise ValueError
        table = np.array([[math.log(row["sigma"]), max(row["alpha"], 0.0)] for row in tables[name]])
    except FileNotFoundError:
        raise UserError(f"--alpha auto: {path} is missing; python train_classifier.py --diagnose makes it") from None
    except Exception:
        cure = "python train_classifier.py --diagnose makes it anew"
        raise UserError(f"--alpha auto: {path} is damaged or does not know this {name}; {cure}") from None

    def alpha(sigma):
        return torch.as_tensor(np.interp(sigma.log().cpu().double().numpy(), *table.T), dtype=sigma.dtype, device=device)

    return alpha, checksum(table.tolist())[:16]


def parse_recipe(path, text):
    """The recipe in a sample file or beside its batches; an error that names the file where it is no such thing."""
    try:
        return dict(json.loads(str(text)))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{path}: its recipe is not readable, the file is damaged; --restart draws the samples anew") from None


def read_batch(path, labels, shape):
    """The images of a batch on disk; None where it is missing, damaged or another batch, and has to be drawn."""
    try:
        found = read_npz(path)
        images = found["images"]
        whole = images.dtype == np.uint8 and images.shape == (len(labels), *shape[1:], shape[0]) and found["labels"].dtype == labels.dtype
        return images if whole and np.array_equal(found["labels"], labels) else None
    except (UserError, KeyError):
        return None


def sample(path, recipe, score_for, shape, device, restart, progress):
    """All batches of `recipe` that are not on disk yet, this process's share of them → images, labels."""
    shards, (rank, world) = path.with_suffix(".parts"), process()
    n, batch = recipe["n"], recipe["batch"]
    if rank == 0:
        claim = shards / "recipe.json"
        if restart or not claim.exists():  # batches without their recipe could be anyone's
            shutil.rmtree(shards, ignore_errors=True)
        elif any(shards.glob("*.npz")) and parse_recipe(claim, claim.read_bytes().decode(errors="replace")) != recipe:
            raise UserError(f"{shards} holds batches of another recipe; --tag T keeps both, --restart starts over")
        write_whole(claim, json.dumps(recipe).encode())
    if world > 1:
        with peers():
            dist.barrier()
    labels = np.resize(np.array(recipe["classes"], dtype=np.int64), n)
    firsts = range(0, n, batch)
    stop = []
    with caught_signals(stop):
        for b, first in enumerate(firsts):
            shard = shards / f"{b:06d}.npz"
            if b % world == rank and read_batch(shard, labels[first : first + batch], shape) is None:
                y = torch.from_numpy(labels[first : first + batch]).to(device)
                noise = image_noise(recipe["seed"], first, len(y), shape, device)
                x = recipe["sigma_max"] * noise(None)
                sigmas = sigma_grid(recipe["steps"], recipe["sigma_min"], recipe["sigma_max"], 7 if recipe["sampler"] == "heun" else None)
                if recipe["sampler"] == "heun":
                    x = heun_sampler(score_for(y, b), x, sigmas, recipe["churn"], noise)
                else:
                    x = pc_sampler(score_for(y, b), x, sigmas, recipe["snr"], recipe["corrector_steps"], recipe["per_sample"], noise)
                if not x.isfinite().all():
                    where = f"step {recipe['steps'] - 1}, σ = {recipe['sigma_min']:.4g}"
                    raise UserError(f"the images are not finite after {where}; try a smaller --alpha or more --steps")
                write_whole(shard, npz_bytes(images=to_uint8(x).permute(0, 2, 3, 1).numpy(), labels=y.cpu().numpy()))
            progress(min(first + batch, n))
            if stop:
                say(f"\n{path}: stopped, {len(list(shards.glob('*.npz')))} of {len(firsts)} batches are done; the same command continues")
                raise SystemExit(128 + stop[0])
    if world > 1:
        with peers():
            dist.barrier()
    if rank:
        return None, labels
    parts = [read_batch(shards / f"{b:06d}.npz", labels[first : first + batch], shape) for b, first in enumerate(firsts)]
    if any(part is None for part in parts):
        raise UserError(f"{shards}: a batch is gone or damaged; the same command draws it again")
    return np.concatenate(parts), labels


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, None)
    parser.flag("--guidance", "dlsm", "none, base (L_CE), scaling (L_CE, α = 10), dlsm (L_Total: ours), renorm (L_CE re-normalised, "
                "α = 10)", choices=list(GUIDANCE))
    parser.flag("--alpha", None, "guidance scale, a list of them (0.5,1,3), or auto: the scale --diagnose measured (default: the "
                "guidance's own)", parse_alphas)
    parser.flag("--score", None, "score checkpoint, ours or the authors' (default: runs/RUN/score.pt)")
    parser.flag("--classifier", None, "classifier checkpoint, ours or the authors' (default: runs/RUN/classifier-LOSS.pt)")
    parser.flag("--out", None, "folder of the output (default: that of the run)", pathlib.Path)
    parser.flag("--tag", None, "adds -TAG to the output's name, for variants", label)
    parser.flag("--n", None, "images in all, equally many a class (default: ten a class)", number(int, 1, 10**7))
    parser.flag("--classes", None, "only these classes, as 3,5 (default: all)", parse_classes)
    parser.flag("--batch", 100, "images a batch; part of the recipe", number(int, 1, 10**5))
    parser.flag("--sampler", "heun", "heun (few steps) or pc (the paper's predictor-corrector)", choices=list(SAMPLERS))
    parser.flag("--steps", None, "sampler steps (default: 40 for heun, 1000 for pc)", number(int, 2, 10**6))
    parser.flag("--churn", 1.0, "heun: fresh noise before each step; 0 is the probability-flow ODE", number(float, 0, 10))
    parser.flag("--snr", 0.16, "pc: signal-to-noise ratio of the Langevin steps", number(float, 1e-6, 10))
    parser.flag("--corrector-steps", 1, "pc: Langevin steps a noise level", number(int, 0, 1000))
    parser.flag("--per-sample", False, "pc: norms of each image by itself, not of the batch as released")
    parser.flag("--watch", False, "also a strip picture: one image a class at a dozen noise levels on the way down, denoised")
    parser.flag("--png", False, "also single pictures, a sub-folder a class")
    parser.flag("--amp", False, "the score network in bfloat16 (CUDA)")
    parser.flag("--compile", False, "torch.compile the score network")
    return parser


def main():
    args = make_parser().parse_args()
    for sampler, key in ((sampler, key) for sampler, keys in SAMPLERS.items() for key in keys if sampler != args.sampler):
        if getattr(args, key) != make_parser().get_default(key):
            flag = key.replace("_", "-")
            raise UserError(f"--{flag} with --sampler {args.sampler}: has no effect there; leave it out, or choose --sampler {sampler}")
    if args.alpha and args.guidance == "none":
        raise UserError("--alpha with --guidance none: there is nothing to scale; leave one of them out")
    device = set_up(args)
    folder = run_folder(args)
    out = args.out or folder
    loss, own_alpha, renormalize = GUIDANCE[args.guidance]

    def model(given, default, kind, command):
        path = pathlib.Path(given or folder / default)
        if not path.exists():
            raise UserError(f"{path}: no such {kind}; {command} makes it, or --{kind} FILE names one")
        return load_image_model(path, device, kind), path

    where = f"--data {args.data}{f' --size {args.size}' if args.size else ''}{f' --run {args.run}' if args.run else ''}"
    score_net, _ = model(args.score, "score.pt", "score", f"python train_score.py {where}")
    settings, config = score_net.about["settings"], score_net.config
    shape = (config["channels"], config["image_size"], config["image_size"])
    classifier, classes = None, settings.get("classes") or CLASSES.get(settings["data"], [])
    if loss:
        maker = f"python train_classifier.py --loss {loss} {where}"
        classifier, classifier_path = model(args.classifier, f"classifier-{loss}.pt", "classifier", maker)
        channels, total = classifier.config["channels"], classifier.config["classes"]
        if channels != shape[0]:
            raise UserError(f"{classifier_path}: takes {channels} channels, the score model {shape[0]}; they must be of the same data")
        classes = classes if len(classes) == total else [str(i) for i in range(total)]
    chosen = args.classes or list(range(len(classes) if classes else 10))
    if classes and max(chosen) >= len(classes) or len(set(chosen)) < len(chosen):
        raise UserError(f"--classes {','.join(map(str, chosen))}: must be different whole numbers from 0 to {len(classes) - 1}")
    n = args.n or 10 * len(chosen)
    if n % len(chosen):
        raise UserError(f"--n {n}: not a multiple of the {len(chosen)} classes; {n - n % len(chosen) + len(chosen)} is")
    steps = args.steps or (40 if args.sampler == "heun" else 1000)
    call, guide = network_call(score_net, args.amp, args.compile, device), classifier and fold_batchnorm(classifier)
    for alpha in args.alpha or [own_alpha]:
        ends = [f"-a{alpha}" if alpha == "auto" else f"-a{alpha:g}" if alpha != own_alpha else "", f"-{args.tag}" if args.tag else ""]
        name = f"samples-{args.guidance}{''.join(ends)}"
        path, strip = out / f"{name}.npz", out / f"{name}-strip.png"
        recipe = dict(
            guidance=args.guidance, alpha=alpha, renormalize=renormalize, n=n, classes=chosen, seed=args.seed, batch=args.batch,
            sampler=args.sampler, steps=steps, sigma_min=settings["sigma_min"], sigma_max=settings["sigma_max"], amp=args.amp,
            score=checksum(score_net.state_dict())[:16], classifier=classifier and checksum(classifier.state_dict())[:16],
            data=settings["data"], size=shape[1], **{key: getattr(args, key) for key in SAMPLERS[args.sampler]})
        scale = alpha
        if alpha == "auto":
            scale, recipe["alpha_sha"] = calibrated(folder, classifier_path.stem, recipe["classifier"], device)
        if not args.restart and finished(path, recipe, shape):
            say(f"{path}: finished already ({n} images); --restart starts over")
            continue
        frames, counts, levels = [], dict(evaluations=0, batches=0), sigma_grid(12, settings["sigma_min"], settings["sigma_max"], 7)[:-1]

        def score_for(y, b):
            counts["batches"] += 1
            score = counted(posterior_score(call, guide, y, scale, renormalize), counts)
            return watched(score, frames, levels, len(chosen)) if args.watch and b == 0 else score

        with lock(path) if process()[0] == 0 else contextlib.nullcontext():
            if args.watch and process()[0] == 0 and not strip.exists():  # it is made as batch 0 is drawn
                (path.with_suffix(".parts") / "000000.npz").unlink(missing_ok=True)
            images, labels = sample(path, recipe, score_for, shape, device, args.restart, Progress(n, 0, f"{name}: image"))
            if process()[0]:
                continue
            names = [classes[c] for c in chosen] if classes else None
            if frames:
                save_grid(strip, [[to_uint8(f[i]) for f in frames] for i in range(len(frames[0]))], names and names[: len(frames[0])])
            finish(path, images, labels, recipe, names, args.png)
        each = counts["evaluations"] // max(1, counts["batches"])
        say(f"{path}: {n} images" + f", {each} score{' and classifier' * bool(loss)} evaluations an image" * (each > 0))


def finished(path, recipe, shape):
    """Whether `path` holds the samples of this recipe already; an error where it holds others."""
    if not path.exists():
        return False
    found = read_npz(path)
    made = parse_recipe(path, found.get("recipe", "{}"))
    for key, value in recipe.items():
        if made.get(key) != value:
            raise UserError(f"{path} was made with {key} = {made.get(key)}, not {value}; --tag T keeps both, --restart starts over")
    if found.get("images", np.empty(0)).shape != (recipe["n"], *shape[1:], shape[0]):
        raise UserError(f"{path}: does not hold the {recipe['n']} images of its recipe, the file is damaged; --restart draws them anew")
    if process()[0] == 0 and path.with_suffix(".parts").exists():  # it was stopped before it could clear away
        with lock(path):
            shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)
    return True


def finish(path, images, labels, recipe, names, png):
    """The picture grid, single pictures where asked for, then the sample file: where it is, all is there. Then the batches go."""
    arrays = dict(images=images, recipe=np.array(json.dumps(recipe)))
    if recipe["guidance"] != "none":
        arrays["labels"] = labels
    pixels, shown = torch.from_numpy(images).permute(0, 3, 1, 2), names if recipe["guidance"] != "none" else None
    save_grid(path.with_suffix(".png"), [pixels[labels == c][:16] for c in recipe["classes"]], shown)
    if png:
        for i, (image, y) in enumerate(zip(images, labels)):
            name = names[recipe["classes"].index(y)] if names else str(y)
            file = path.with_suffix("") / re.sub(r"[/\\]|^\.+", "_", name) / f"{i:06d}.png"  # names come from a file, perhaps a stranger's
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.squeeze()).save(file)
    write_whole(path, npz_bytes(**arrays))
    shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)


if __name__ == "__main__":
    run(main)
