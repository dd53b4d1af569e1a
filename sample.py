"""Samples images of given classes: guidance by the posterior score, the paper's sampler, a fast sampler.

    python sample.py --guidance dlsm                  # after the two training commands
    python sample.py --guidance dlsm --sampler pc     # the paper's sampler: 2,000 evaluations per image

Reads runs/RUN/score.pt and a classifier; writes runs/RUN/samples-GUIDANCE.npz (images, labels, recipe), .png.
Finished batches are on disk at once: the same command continues. Under torchrun processes share the batches.
"""
import argparse
import contextlib
import io
import itertools
import json
import math
import pathlib
import re
import shutil
import sys

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont

from models import ExactScore, UserError, append_dims, checksum, fold_batchnorm, sigma_at, write_whole
from train_classifier import BUNDLED, likelihood_score, load_image_model, where
from train_score import (CLASSES, Parser, Progress, bounded, caught_signals, derive_seed, difference,
                         file_part, lock, network_call, rank_and_world, read_npz, run, run_folder, say,
                         set_up, shared_flags, tag_of)

# ------------------------------------------------------------ 1. the story: guidance and samplers

GUIDANCE = {  # the loss of the classifier that it takes, its own α, whether re-normalised
    "none": (None, 1.0, False),
    "base": ("ce", 1.0, False),  # (a)
    "scaling": ("ce", 10.0, False),  # (b); α = 10: Table 2
    "free": (None, 1.0, False),  # (c): train_score.py --conditional; with another α classifier-free
    "dlsm": ("total", 1.0, False),  # (d)
    "oracle": (None, 1.0, False),  # (e): the exact posterior score of train_score.py --preset exact
    "renorm": ("ce", 10.0, True),  # Eqs. A1 and A2
}
SAMPLERS = {"heun": ["gamma"], "pc": ["snr", "corrector_steps", "per_sample"]}  # and the flags of theirs
STEPS = {"heun": 40, "pc": 1000}


def posterior_score(score_net, classifier=None, y=None, alpha=1.0, renormalize=False, interval=None):
    """∇ log p(x|y) as a function of (x, σ): s(x, σ) + α ∇ log p(y|x, σ) (Eqs. 5, 6; A2 with `renormalize`).

    `classifier(x, sigma)` gives logits (B, classes). y is one class for all or one for each: a number, a list
    or a tensor (B,). α is a number or a function of σ. With y but no classifier `score_net(x, sigma, y)` is
    asked: s + α (s(x, σ, y) − s(x, σ)). Without y it is the prior score. `interval` = (low, high) guides
    between these noise levels only (Kynkäänniemi et al. 2024).
    """
    def score(x, sigma):
        guided = y is not None and (interval is None or interval[0] <= sigma[0].item() <= interval[1])
        with torch.no_grad():
            if guided and classifier is None and not callable(alpha) and alpha == 1:
                return score_net(x, sigma, one_class_per_row(y, x))
            s = score_net(x, sigma)
            if not guided:
                return s
            a = alpha(sigma) if callable(alpha) else alpha
            if classifier is None:
                a = append_dims(a, x) if callable(alpha) else a
                return s + a * (score_net(x, sigma, one_class_per_row(y, x)) - s)
        return s + likelihood_score(classifier, x, sigma, one_class_per_row(y, x), a, renormalize)

    return score


def one_class_per_row(y, x):
    y = torch.as_tensor(y, device=x.device)
    if y.numel() == 1:
        y = y.reshape(1).expand(len(x))
    if y.shape != x.shape[:1] or y.is_floating_point():
        what = f"{tuple(y.shape)} {y.dtype}"
        raise UserError(f"y is {what}; expected one class, or one for each of the {len(x)} images")
    return y


def check(score, step, sigma):
    """An error where a score is zero, infinite or NaN: the one wait of an evaluation on a GPU."""
    size = score.abs().amax().item()
    if not math.isfinite(size) or size == 0:
        trouble = "zero" if size == 0 else "not finite"
        cure = "try a smaller --alpha or more --steps"
        raise UserError(f"the score is {trouble} at step {step}, σ = {sigma:.4g}; {cure}")


def pc_sampler(score, x, sigmas, snr=0.16, corrector_steps=1, per_sample=False, noise=torch.randn_like):
    """Algorithm 1, in the order of the released code: at each σ Langevin steps, then the predictor.

    Langevin step ε = 2 (snr ‖z‖/‖s‖)², norms averaged over the batch as released, or those of each sample.
    Decreasing `sigmas` that end with 0 return the last mean without noise, else a sample at the last σ. With
    equal ones it is Eq. 1.
    """
    sigmas = torch.as_tensor(sigmas).tolist()
    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        level = x.new_full((len(x),), sigma)
        for _ in range(corrector_steps):
            s = score(x, level)
            z = noise(x)  # while a GPU computes the score
            check(s, i, sigma)
            norm_s, norm_z = s.flatten(1).norm(dim=1), z.flatten(1).norm(dim=1)
            if not per_sample:
                norm_s, norm_z = norm_s.mean(), norm_z.mean()
            epsilon = 2 * (snr * norm_z / norm_s) ** 2
            if per_sample:
                epsilon = append_dims(epsilon, x)
            x = x + epsilon * s + (2 * epsilon).sqrt() * z
        if below < sigma:
            variance = sigma**2 - below**2
            s = score(x, level)
            z = noise(x) if below > 0 else 0.0
            check(s, i, sigma)
            x = x + variance * s + math.sqrt(variance) * z
    return x


def heun_sampler(score, x, sigmas, gamma=0.0, noise=torch.randn_like):
    """Heun's method on the probability-flow ODE dx/dσ = −σ s(x, σ); with gamma > 0 EDM's stochastic sampler.

    Before each step σ is raised to (1 + gamma) σ with fresh noise, never above the first σ. gamma = 0, the
    default here, is the ODE, which a small or briefly trained model does not survive; sample.py takes 1.
    Sigmas that end with 0 end with one Euler step, onto the denoised mean. Two evaluations per step.
    """
    sigmas, z = torch.as_tensor(sigmas).tolist(), None
    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        if z is not None:
            raised = min((1 + gamma) * sigma, sigmas[0])
            x = x + math.sqrt(raised**2 - sigma**2) * z
            sigma = raised
        s = score(x, x.new_full((len(x),), sigma))
        z = noise(x) if gamma > 0 and i + 2 < len(sigmas) else None  # for the next step, while a GPU computes
        check(s, i, sigma)
        slope = -sigma * s
        ahead = x + (below - sigma) * slope
        if below > 0:
            s = score(ahead, x.new_full((len(x),), below))
            check(s, i, below)
            ahead = x + (below - sigma) * (slope - below * s) / 2
        x = ahead
    return x


def sigma_grid(steps, sigma_min, sigma_max, rho=None):
    """steps + 1 noise levels from σ_max over σ_min to 0: geometric (the paper's), or EDM's with ρ = 7."""
    t = torch.linspace(1, 0, steps, dtype=torch.float64)
    if rho:
        sigmas = (sigma_min ** (1 / rho) + t * (sigma_max ** (1 / rho) - sigma_min ** (1 / rho))) ** rho
    else:
        sigmas = sigma_at(t, sigma_min, sigma_max)
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def sample_batch(score, numbers, recipe, shape, device):
    """The images with these numbers. Image i has noise of its own, given by the seed and i alone."""
    seeds = [derive_seed(recipe["seed"], "image", int(i)) for i in numbers]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def noise(x):
        z = torch.stack([torch.randn(shape, generator=g) for g in generators])
        if device.type == "cuda":
            z = z.pin_memory()
        return z.to(device, non_blocking=True)

    steps, low, high = recipe["steps"], recipe["sigma_min"], recipe["sigma_max"]
    own = {key: recipe[key] for key in SAMPLERS[recipe["sampler"]]}
    if recipe["sampler"] == "heun":
        x = heun_sampler(score, high * noise(None), sigma_grid(steps, low, high, rho=7), noise=noise, **own)
    else:
        x = pc_sampler(score, high * noise(None), sigma_grid(steps, low, high), noise=noise, **own)
    if not x.isfinite().all():
        raise UserError(f"the images are not finite after the last step, σ = {low}; try a smaller --alpha")
    return x


def to_uint8(x):
    return (255 * x.clamp(0, 1)).round().to(torch.uint8).cpu()


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser)
    parser.group("guidance")
    parser.flag("--guidance", "dlsm", "base (L_CE), scaling (L_CE, α = 10), dlsm (L_Total), renorm (L_CE, "
                "re-normalised), free (conditional score), oracle (exact score)", choices=list(GUIDANCE))
    parser.flag("--alpha", None, "guidance scale, a list (0.5,1,3), or auto: as --diagnose measured it "
                "(default: the guidance's own)", alphas)
    parser.flag("--guide-sigma", None, "guide only between the noise levels LOW,HIGH; auto: where --diagnose "
                "found a gain", noise_levels)
    parser.flag("--score", None, "score checkpoint, ours or the authors' (default: runs/RUN/score.pt)")
    parser.flag("--classifier", None, "classifier checkpoint (default: runs/RUN/classifier-LOSS[-TAG].pt)")
    parser.group("samples")
    parser.flag("--out", None, "folder of the output (default: the run's; for bundled weights runs/NAME)")
    parser.flag("--tag", None, "adds -TAG to the name of the output, for variants", file_part)
    parser.flag("--n", None, "images in all, as many per class (default: ten each)", bounded(int, 1, 10**7))
    parser.flag("--classes", None, "only these classes, numbers or names: 3,5 or cat,dog (default: all)")
    parser.flag("--batch", 100, "images per batch, sorted by class", bounded(int, 1, 10**5))
    parser.flag("--watch", False, "also a strip: one image per class, denoised at a dozen noise levels")
    parser.flag("--png", False, "also single pictures, one sub-folder per class")
    parser.group("sampler")
    parser.flag("--sampler", "heun", "heun (few steps) or pc (the paper's)", choices=list(SAMPLERS))
    parser.flag("--steps", None, "sampler steps (default: 40 for heun, 1000 for pc)", bounded(int, 2, 10**6))
    parser.flag("--gamma", 1.0, "heun: fresh noise before each step; 0 is the ODE", bounded(float, 0, 10))
    parser.flag("--snr", 0.16, "pc: signal-to-noise ratio of the Langevin steps", bounded(float, 1e-6, 10))
    parser.flag("--corrector-steps", 1, "pc: Langevin steps per noise level", bounded(int, 0, 1000))
    parser.flag("--per-sample", False, "pc: norms of each image by itself, not the batch's mean as released")
    parser.flag("--amp", False, "the score network in bfloat16 (CUDA)")
    parser.flag("--compile", False, "torch.compile the score network")
    return parser


def main():
    args = make_parser().parse_args()
    check_flags(args)
    device, folder = set_up(args), run_folder(args)
    loss, own_alpha, renormalize = GUIDANCE[args.guidance]
    maker = f"train_score.py {where(args)}"
    score_net = load_image_model(args.score or folder / "score.pt", device, "score", maker)
    settings, config, exact = score_net.about["settings"], score_net.config, isinstance(score_net, ExactScore)
    shape = (config["channels"], config["image_size"], config["image_size"])
    names = settings.get("classes") or CLASSES.get(settings["data"]) or [str(i) for i in range(10)]
    classifier = None
    if loss:
        path = args.classifier or folder / f"classifier-{loss}{tag_of(args)}.pt"
        if not args.classifier and not path.exists():
            path = folder / f"classifier-{loss}.pt"
        maker = f"train_classifier.py --loss {loss} {where(args)}"
        classifier = load_image_model(path, device, "classifier", maker)
        channels, classes = classifier.config["channels"], classifier.config["classes"]
        if channels != shape[0]:
            raise UserError(f"{path}: takes {channels} channels, the score model {shape[0]}")
        if classifier.about["settings"].get("score_sha", score_net.about["sha"]) != score_net.about["sha"]:
            say(f"warning: the score model has changed since {path} was trained")
        if len(names) != classes:
            names = [str(i) for i in range(classes)]
    if args.guidance == "oracle" and not exact:
        raise UserError("--guidance oracle: needs a score model of train_score.py --preset exact")
    if args.guidance == "free" and "classes" not in config:
        raise UserError("--guidance free: needs a score model of train_score.py --conditional")
    chosen = choose_classes(args.classes, names)
    n = args.n or 10 * len(chosen)
    if n % len(chosen):
        n += len(chosen) - n % len(chosen)
        say(f"--n {args.n}: {n} images, equally many of the {len(chosen)} classes")
    rows = []
    if args.guide_sigma == "auto" or "auto" in (args.alpha or []):
        net, file = (classifier, path) if loss else (score_net, args.score or "score.pt")
        rows = read_diagnosis(folder, pathlib.Path(file).stem, net.about["sha"])
    limits = levels_with_gain(rows) if args.guide_sigma == "auto" else args.guide_sigma
    recipe = dict(guidance=args.guidance, renormalize=renormalize, n=n, classes=chosen, seed=args.seed,
                  batch=args.batch, sampler=args.sampler, steps=args.steps or STEPS[args.sampler],
                  sigma_min=settings["sigma_min"], sigma_max=settings["sigma_max"], data=settings["data"],
                  size=shape[1], amp=args.amp, score=score_net.about["sha"],
                  classifier=classifier and classifier.about["sha"], guide_sigma=limits and list(limits),
                  **{key: getattr(args, key) for key in SAMPLERS[args.sampler]})
    if exact:
        recipe["exact"] = True
    counts = dict(score=0, classifier=0)
    call = network_call(score_net, args.amp and not exact, args.compile and not exact, device)
    call = counted(call, counts, "score")
    guide = counted(fold_batchnorm(classifier), counts, "classifier") if classifier else None
    out = pathlib.Path(args.out) if args.out else sample_folder(folder)
    with caught_signals() as stop:
        for alpha in args.alpha or [own_alpha]:
            if stop:
                say("stopped; the same command continues with the next --alpha")
                sys.exit(128 + stop[0])
            one, scale = {**recipe, "alpha": alpha}, alpha
            if alpha == "auto":
                one["alpha_sha"] = checksum([[row["sigma"], row["alpha"]] for row in rows])[:16]
                scale = best_scale(rows, device)

            def score_for(labels):
                y = None if args.guidance == "none" else torch.as_tensor(labels, device=device)
                return posterior_score(call, guide, y, scale, renormalize, limits)

            end = "" if alpha == own_alpha else f"-a{alpha}".removesuffix(".0")
            path = out / f"samples-{args.guidance}{end}{tag_of(args)}.npz"
            make_samples(path, one, score_for, shape, device, args, names, counts, stop)


# ------------------------------------------------------------ 2. what it needs: files, diagnosis, pictures


def make_samples(path, recipe, score_for, shape, device, args, names, counts, stop):
    """One file of samples with its pictures; what is there already is not made again."""
    rank, _ = rank_and_world()
    with lock(path) if rank == 0 else contextlib.nullcontext():
        if path.exists() and not args.restart:
            found = read_samples(path, recipe, shape)
            say(f"{path}: finished already ({recipe['n']} images); --restart starts over")
        else:
            counts.update(score=0, classifier=0)
            found = sample(path, recipe, score_for, shape, device, args.restart, stop)
            work = " and ".join(f"{count} of the {key}" for key, count in counts.items() if count)
            say(f"{path}: {recipe['n']} images; evaluations of a batch: {work or 'none'}")
        if rank:
            return
        guided = recipe["guidance"] != "none"
        images, labels = torch.from_numpy(found["images"]).permute(0, 3, 1, 2), labels_of(recipe)
        shown = [names[c] for c in recipe["classes"]] if guided else None
        rows = [images[labels == c][:16] for c in recipe["classes"]]
        save_grid(path.with_suffix(".png"), rows, shown, recipe["classes"])
        strip = path.with_name(f"{path.stem}-strip.png")
        if args.watch and (args.restart or not strip.exists()):
            save_grid(strip, watch(recipe, score_for, shape, device), shown, recipe["classes"])
        if args.png:
            for i, (image, c) in enumerate(zip(found["images"], labels)):
                name = re.sub(r"[/\\]|^\.+", "_", names[c]) if guided else "."  # names may be a stranger's
                file = path.with_suffix("") / name / f"{i:06d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.squeeze()).save(file)


def labels_of(recipe):
    return np.resize(np.array(recipe["classes"], dtype=np.int64), recipe["n"])


def sample(path, recipe, score_for, shape, device, restart, stop):
    """This process's share of the batches that are not on disk yet → the arrays of the whole file."""
    rank, world = rank_and_world()
    n, labels = recipe["n"], labels_of(recipe)
    # Sorted by class, as released: the Langevin norms of a batch are then one class's mean, where it fits.
    batches = np.split(np.argsort(labels, kind="stable"), range(recipe["batch"], n, recipe["batch"]))
    parts = path.with_name(f"{path.stem}-{checksum(recipe)[:8]}.parts")  # other recipes: elsewhere
    if restart and rank == 0:
        shutil.rmtree(parts, ignore_errors=True)
    wait_for_others()
    files = [parts / f"{b:06d}.npz" for b in range(len(batches))]
    missing = [b for b in range(len(batches)) if read_batch(files[b], batches[b], shape) is None]
    done = n - sum(len(batches[b]) for b in missing)
    progress = Progress(n, done, f"{path.stem}: image")
    evaluations = recipe["steps"] * (1 + recipe.get("corrector_steps", 1))
    for b in missing:
        score, calls = score_for(labels[batches[b]]), itertools.count()

        def one_evaluation(x, sigma):
            if stop:
                ready = f"{sum(file.exists() for file in files)} of {len(files)} batches are done"
                say(f"{path}: stopped, {ready}; the same command continues")
                sys.exit(128 + stop[0])
            progress(min(done + len(x) * next(calls) / evaluations, n - 1))
            return score(x, sigma)

        if b % world == rank:
            x = sample_batch(one_evaluation, batches[b], recipe, shape, device)
            pixels = to_uint8(x).permute(0, 2, 3, 1).numpy()
            write_whole(files[b], npz_bytes(images=pixels, numbers=batches[b]))
        done += len(batches[b])
    wait_for_others()
    if rank:
        return None
    images = np.empty((n, *shape[1:], shape[0]), np.uint8)
    for file, numbers in zip(files, batches):
        part = read_batch(file, numbers, shape)
        if part is None:
            raise UserError(f"{file}: a batch is gone or damaged; the same command samples it again")
        images[numbers] = part
    arrays = dict(images=images, recipe=np.array(json.dumps(recipe)))
    if recipe["guidance"] != "none":
        arrays["labels"] = labels
    write_whole(path, npz_bytes(**arrays))
    shutil.rmtree(parts, ignore_errors=True)
    progress(n)
    return arrays


def wait_for_others():
    if rank_and_world()[1] > 1:
        dist.barrier()


def read_batch(path, numbers, shape):
    """The images of a batch on disk; None where it is missing, damaged or another batch."""
    try:
        found = read_npz(path)
        images = found["images"]
        fits = images.dtype == np.uint8 and images.shape == (len(numbers), *shape[1:], shape[0])
        return images if fits and np.array_equal(found["numbers"], numbers) else None
    except (UserError, KeyError):
        return None


def read_samples(path, recipe, shape):
    """The arrays of a finished sample file; an error where it holds samples of another recipe."""
    found, cure = read_npz(path), "--tag T keeps both, --restart starts over"
    try:
        made = dict(json.loads(str(found.get("recipe", "{}"))))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{path}: its recipe is not readable, the file is damaged; {cure}") from None
    if changed := difference(made, recipe):
        raise UserError(f"{path} was made with {changed}; {cure}")
    if found.get("images", np.empty(0)).shape != (recipe["n"], *shape[1:], shape[0]):
        raise UserError(f"{path}: does not hold the images of its recipe, the file is damaged; {cure}")
    return found


def watch(recipe, score_for, shape, device):
    """The first image of each class, sampled by itself → its denoised means x + σ² s at twelve levels."""
    levels = sigma_grid(12, recipe["sigma_min"], recipe["sigma_max"], rho=7)[:-1].tolist()
    score, frames = score_for(recipe["classes"]), []

    def call(x, sigma):
        s = score(x, sigma)
        if len(frames) < len(levels) and sigma[0].item() <= levels[len(frames)] * 1.0001:
            frames.append(to_uint8(x + append_dims(sigma, x) ** 2 * s))
        return s

    sample_batch(call, range(len(recipe["classes"])), recipe, shape, device)
    return [[frame[i] for frame in frames] for i in range(len(recipe["classes"]))]


def sample_pictures(score, path, shape, sigma_max, device):
    """A grid of 32 images while a score model trains."""
    recipe = dict(seed=0, sampler="heun", steps=33, gamma=0.4, sigma_min=0.01, sigma_max=sigma_max)
    with contextlib.suppress(UserError), torch.no_grad():  # an untrained network may give no score at all
        save_grid(path, list(to_uint8(sample_batch(score, range(32), recipe, shape, device)).split(8)))


def read_diagnosis(folder, name, sha):
    """What train_classifier.py --diagnose measured for these weights: one dict per noise level."""
    path, cure = folder / "diagnose.json", "python train_classifier.py --diagnose makes it anew"
    try:
        tables = json.loads(path.read_text())
        if tables["weights"][name] != sha:
            raise UserError(f"auto: {path} was measured with other weights of {name}; {cure}")
        return [{key: float(row[key]) for key in ("sigma", "alpha", "gain")} for row in tables[name]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"auto: {path} is missing, damaged or does not know {name}; {cure}") from None


def best_scale(rows, device):
    """α*(σ): linear in log σ, never below 0; computed where σ is."""
    at = torch.tensor([math.log(row["sigma"]) for row in rows], device=device)
    alpha = torch.tensor([max(row["alpha"], 0.0) for row in rows], device=device)

    def scale(sigma):
        right = torch.searchsorted(at, sigma.log()).clamp(1, len(at) - 1)
        part = (sigma.log() - at[right - 1]) / (at[right] - at[right - 1])
        return alpha[right - 1].lerp(alpha[right], part.clamp(0, 1))

    return scale


def levels_with_gain(rows):
    """The widest range of noise levels around the largest gain in which the gain is above 0."""
    first = last = max(range(len(rows)), key=lambda i: rows[i]["gain"])
    if rows[first]["gain"] <= 0:
        raise UserError("--guide-sigma auto: the diagnosis found no gain at any noise level")
    while first > 0 and rows[first - 1]["gain"] > 0:
        first -= 1
    while last < len(rows) - 1 and rows[last + 1]["gain"] > 0:
        last += 1
    half_bin = (rows[1]["sigma"] / rows[0]["sigma"]) ** 0.5
    return rows[first]["sigma"] / half_bin, rows[last]["sigma"] * half_bin


COLOURS = ["#1f6fb4", "#e07b1a", "#2c9150", "#c23b3b", "#7b56a8", "#7a7a7a", "#b8860b", "#2aa6b0"]


def save_png(path, image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    write_whole(path, buffer.getvalue())


def save_grid(path, rows, names=None, numbers=None):
    """A picture of images (uint8, C×H×W), one row for each of `rows`, with the rows' names on the left.

    A name in a script that the font lacks becomes its number.
    """
    size = rows[0][0].shape[-1]
    zoom = max(1, 64 // size)
    font, left, step = ImageFont.load_default(15), 0, size * zoom + 2
    if names:
        unknown = bytes(font.getmask("\U0010ffff"))
        names = [str(n) if any(bytes(font.getmask(letter)) == unknown for letter in name) else name
                 for n, name in zip(numbers or itertools.count(), names)]
        left = 10 + int(max(font.getlength(name) for name in names))
    picture = Image.new("RGB", (left + step * max(map(len, rows)), step * len(rows)), "white")
    pen = ImageDraw.Draw(picture)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            pixels = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy())
            pixels = pixels.resize((size * zoom, size * zoom), Image.Resampling.NEAREST)
            picture.paste(pixels, (left + j * step, i * step))
        if names:
            pen.text((left - 6, i * step + step // 2), names[i], "black", font, anchor="rm")
    save_png(path, picture)


def draw_curve(path):
    """The loss over the steps, from a training's log, as a picture beside it."""
    log = path.with_suffix(".jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    curve = [(record["step"], record["loss"]) for record in records if "loss" in record]
    if curve:
        panel = dict(title=path.name, x="step", y="loss", log_y=True, lines=[("", *zip(*curve))])
        chart(path.with_suffix(".png"), [panel])


def chart(path, panels, columns=None):
    """Panels of dict(title, x, y, lines=[(name, xs, ys[, low, high])], bars, log_x, log_y, y_range)."""
    k, width, height = 3, 460, 370  # drawn three times as large, then reduced: antialiased
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    picture = Image.new("RGB", (k * width * columns, k * height * rows), "white")
    for n, panel in enumerate(panels):
        left, top = k * width * (n % columns), k * height * (n // columns)
        box = left + 62 * k, top + 34 * k, left + (width - 20) * k, top + (height - 86) * k
        draw_panel(picture, box, k, panel)
    save_png(path, picture.resize((width * columns, height * rows), Image.Resampling.LANCZOS))


def draw_panel(picture, box, k, panel):
    """One plot: grid and numbers, bars, bands and lines, titles, and below it the names of the lines."""
    (x0, y0, x1, y1), pen = box, ImageDraw.Draw(picture, "RGBA")
    font, bold = ImageFont.load_default(13 * k), ImageFont.load_default(15 * k)
    lines = [(name, *(np.asarray(v, float) for v in values)) for name, *values in panel.get("lines", [])]
    bars = [float(v) for v in panel.get("bars", [])]
    logs = panel.get("log_x", False), panel.get("log_y", False)
    xs, ys = np.array([-0.5, len(bars) - 0.5]), np.array([0.0, *bars])
    if lines:
        xs = np.concatenate([line[1] for line in lines])
        ys = np.concatenate([values for line in lines for values in line[2:]])
    ys = ys[np.isfinite(ys) & (ys > (0 if logs[1] else -np.inf))]
    low, high = panel.get("y_range") or ((ys.min(), ys.max()) if ys.size else (1, 2))
    if not panel.get("y_range"):
        pad = (high / low) ** 0.05 if logs[1] else 0.06 * (high - low)
        low, high = (low / pad, high * pad) if logs[1] else (low - pad, high + pad)
    spans = [(a, b if b > a else a + 1) for a, b in ((xs.min(), xs.max()), (low, high))]

    def place(value, axis):
        a, b = spans[axis]
        if logs[axis]:
            value, a, b = math.log(max(value, 1e-300)), math.log(a), math.log(b)
        part = min(max((value - a) / (b - a), -0.02), 1.02)
        return x0 + part * (x1 - x0) if axis == 0 else y1 - part * (y1 - y0)

    def points(x, y):
        return [(place(a, 0), place(b, 1)) for a, b in zip(x, y) if math.isfinite(b)]

    for axis in (1,) if bars else (0, 1):
        for tick in nice_ticks(*spans[axis], logs[axis]):
            p = place(tick, axis)
            pen.line([(p, y0), (p, y1)] if axis == 0 else [(x0, p), (x1, p)], "#e4e4e4", k)
            at, anchor = ((p, y1 + 5 * k), "mt") if axis == 0 else ((x0 - 6 * k, p), "rm")
            number = f"{tick:g}" if abs(tick) < 1e4 else f"{tick / 1000:g}k"
            pen.text(at, number, "black", font, anchor=anchor)
    for i, value in enumerate(bars):
        top, bottom = sorted([place(0, 1), place(value, 1)])
        colour = COLOURS[0] if value >= 0 else COLOURS[3]
        pen.rectangle([place(i - 0.4, 0), top, place(i + 0.4, 0), bottom], colour)
    left, row = x0, y1 + 52 * k
    for (name, x, y, *band), colour in zip(lines, COLOURS * 9):
        if band:
            pen.polygon(points(x, band[0]) + points(x, band[1])[::-1], colour + "38")
        pen.line(points(x, y), colour, 2 * k, joint="curve")
        for a, b in points(x, y) if len(x) <= 12 else []:
            pen.ellipse([a - 3.5 * k, b - 3.5 * k, a + 3.5 * k, b + 3.5 * k], colour)
        if name:
            if left + font.getlength(name) > x1 - 6 * k:
                left, row = x0, row + 16 * k
            pen.line([(left, row), (left + 18 * k, row)], colour, 3 * k)
            pen.text((left + 22 * k, row), name, "black", font, anchor="lm")
            left += font.getlength(name) + 36 * k
    pen.rectangle([x0, y0, x1, y1], outline="#555555", width=k)
    pen.text(((x0 + x1) / 2, y0 - 8 * k), panel.get("title", ""), "black", bold, anchor="mb")
    pen.text(((x0 + x1) / 2, y1 + 38 * k), panel.get("x", ""), "black", font, anchor="ms")
    upright = Image.new("L", (y1 - y0, 20 * k))
    ImageDraw.Draw(upright).text(((y1 - y0) / 2, 10 * k), panel.get("y", ""), 255, font, anchor="mm")
    picture.paste("black", (x0 - 62 * k, y0), upright.rotate(90, expand=True))


def nice_ticks(low, high, log):
    """About five round numbers from low to high."""
    if log:
        a, b = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = [10.0**k for k in range(a, b + 1, max(1, (b - a) // 5))]
        return [p for p in powers if low * 0.999 <= p <= high * 1.001]
    raw = (high - low) / 5
    sizes = [m * 10 ** math.floor(math.log10(raw)) for m in (1, 2, 2.5, 5, 10)]
    step = min(sizes, key=lambda size: abs(size - raw))
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


# ------------------------------------------------------------ 3. machinery: flags and folders


def npz_bytes(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def counted(net, counts, key):
    def call(*inputs):
        counts[key] += 1
        return net(*inputs)

    return call


def sample_folder(folder):
    """Where the samples of a run go: beside its models, but for bundled weights to runs/NAME."""
    return pathlib.Path("runs") / folder.name if folder.resolve().parent == BUNDLED.resolve() else folder


def alphas(text):
    """An argparse type: '3' or '0.5,1,3' or 'auto' → a list of numbers, or of 'auto'."""
    number = bounded(float, 0, 1e4)
    return list(dict.fromkeys(item if item == "auto" else number(item) for item in text.split(",")))


def noise_levels(text):
    """An argparse type: 'LOW,HIGH' → two numbers; or 'auto'."""
    if text == "auto":
        return text
    levels = tuple(bounded(float, 0, 1e4)(item) for item in text.split(","))
    if len(levels) != 2 or levels[0] >= levels[1]:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not LOW,HIGH with LOW below HIGH")
    return levels


def choose_classes(text, names):
    """--classes as a list of numbers."""
    if not text:
        return list(range(len(names)))
    numbers = {**{str(i): i for i in range(len(names))}, **{name: i for i, name in enumerate(names)}}
    chosen = [numbers.get(item.strip()) for item in text.split(",")]
    if None in chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"--classes {text}: must be different names, or numbers from 0 to {len(names) - 1}")
    return chosen


def check_flags(args):
    for sampler, keys in SAMPLERS.items():
        for key in keys:
            if sampler != args.sampler and getattr(args, key) != make_parser().get_default(key):
                flag = f"--{key.replace('_', '-')} with --sampler {args.sampler}"
                raise UserError(f"{flag}: has no effect there; leave it out, or choose --sampler {sampler}")
    for key, without in (("alpha", ("none", "oracle")), ("guide_sigma", ("none", "oracle")),
                         ("classifier", ("none", "oracle", "free"))):
        if getattr(args, key) and args.guidance in without:
            flag = f"--{key.replace('_', '-')} with --guidance {args.guidance}"
            raise UserError(f"{flag}: has no effect; leave it out")


if __name__ == "__main__":
    run(main)
