"""Samples images of given classes with the posterior score, by the paper's sampler or a fast one.

    python sample.py --guidance dlsm                  # after the two training commands
    python sample.py --guidance dlsm --sampler pc     # the paper's: 2,000 evaluations per image

Reads runs/RUN/score.pt and a classifier; writes runs/RUN/samples-GUIDANCE.npz and .png. Finished
batches are on disk at once: the same command continues. Under torchrun processes share them.
"""
import contextlib
import itertools
import json
import math
import pathlib
import re
import shutil

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont

from models import ExactScore, UserError, append_dims, checksum, fold_batchnorm, sigma_at, write_whole
from train_classifier import BUNDLED, likelihood_score, load_image_model, warn_of_other_data
from train_score import (CLASSES, RANK, WORLD, Parser, Progress, bounded, derive_seed, difference, file_part,
                         lock, network_call, read_npz, read_recipe, run, run_folder, say, set_up,
                         shared_flags)

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
SAMPLERS = {"sde": ["eta"], "pc": ["snr", "corrector_steps", "per_sample"]}  # their flags
STEPS = {"sde": 100, "pc": 1000}


def posterior_score(score_net, classifier=None, y=None, alpha=1.0, renormalize=False, interval=None):
    """∇ log p(x|y) as a function of (x, σ): s(x, σ) + α ∇ log p(y|x, σ) (Eqs. 5, 6; A2 with `renormalize`).

    `classifier(x, sigma)` gives logits (B, classes). y is one class for all or one for each: a number, a list
    or a tensor (B,). α is a number or a function of σ. With y but no classifier `score_net(x, sigma, y)` is
    asked: s + α (s(x, σ, y) − s(x, σ)). Without y it is the prior score. `interval` = (low, high) guides
    between these noise levels only (Kynkäänniemi et al. 2024).
    """
    @torch.no_grad()
    def score(x, sigma):
        if y is None or interval and not interval[0] <= sigma[0].item() <= interval[1]:
            return score_net(x, sigma)
        labels = torch.as_tensor(y, device=x.device).expand(len(x))
        if classifier is None and alpha == 1:
            return score_net(x, sigma, labels)
        s = score_net(x, sigma)
        a = alpha(sigma) if callable(alpha) else alpha
        if classifier is not None:
            return s + likelihood_score(classifier, x, sigma, labels, a, renormalize)
        return s + append_dims(a, x) * (score_net(x, sigma, labels) - s)

    return score


def check(score, step, sigma):
    """An error where a score is zero, infinite or NaN: a GPU's one wait per evaluation, beside `interval`."""
    if not 0 < score.abs().amax().item() < math.inf:
        where = f"at step {step}, σ = {sigma:.4g}"
        raise UserError(f"the score is zero or not finite {where}; try a smaller --alpha or more --steps")


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
            epsilon = append_dims(2 * (snr * norm_z / norm_s) ** 2, x)
            x = x + epsilon * s + (2 * epsilon).sqrt() * z
        if below < sigma:
            variance = sigma**2 - below**2
            s = score(x, level)
            z = noise(x) if below > 0 else 0.0
            check(s, i, sigma)
            x = x + variance * s + math.sqrt(variance) * z
    return x


def sde_sampler(score, x, sigmas, eta=1.0, noise=torch.randn_like):
    """The reverse diffusion dx = −(1 + η) σ s dσ + √(2ησ) dw by a multistep method: one evaluation per step.

    Every η has the same marginals: 0 is the probability-flow ODE, 1 the reverse SDE; more adds Langevin
    diffusion at each level, which forgets the errors of a score model (sample.py takes 12). The denoised
    image D = x + σ² s is taken half a step ahead, on the line through the last two in log σ; the rest is
    solved exactly: DPM-Solver++ (2M) SDE (Lu et al. 2022).
    Sigmas that end with 0 return the last D, else a sample at the last σ.
    """
    sigmas, last = torch.as_tensor(sigmas).tolist(), None
    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        s = score(x, x.new_full((len(x),), sigma))
        z = noise(x) if eta > 0 and below > 0 else 0.0  # while a GPU computes
        check(s, i, sigma)
        denoised = x + sigma**2 * s
        if below == 0:
            return denoised
        h, ahead = math.log(sigma / below), denoised
        if last is not None:  # the line, half a step further on
            ahead = denoised + h / (2 * last[0]) * (denoised - last[1])
        shrink, last = math.exp(-(1 + eta) * h), (h, denoised)
        x = shrink * x + (1 - shrink) * ahead + below * math.sqrt(-math.expm1(-2 * eta * h)) * z
    return x


def sigma_grid(steps, sigma_min, sigma_max):
    """steps + 1 noise levels, the paper's: geometric from σ_max to σ_min, then 0."""
    sigmas = sigma_at(torch.linspace(1, 0, steps, dtype=torch.float64), sigma_min, sigma_max)
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
    sampler = dict(sde=sde_sampler, pc=pc_sampler)[recipe["sampler"]]
    return sampler(score, high * noise(None), sigma_grid(steps, low, high), noise=noise, **own)


def to_uint8(x):
    return (255 * x.clamp(0, 1)).round().to(torch.uint8).cpu()


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser)
    parser.group("guidance")
    parser.flag("--guidance", "dlsm", "none, base (L_CE), scaling (L_CE, α = 10), dlsm (L_Total), renorm "
                "(L_CE, Eq. A2), free (conditional score) or oracle (exact score)", choices=list(GUIDANCE))
    parser.flag("--alpha", None, "guidance scale, a list (0.5,1,3), or auto, as --diagnose measured", floats)
    parser.flag("--guide-sigma", None, "guide only from σ = A to B: A,B, or auto, where it gains", floats)
    parser.flag("--score", None, "score checkpoint, ours or the authors' (default: runs/RUN/score.pt)")
    parser.flag("--classifier", None, "classifier checkpoint (default: runs/RUN/classifier-LOSS.pt)")
    parser.group("samples")
    parser.flag("--out", None, "folder of the output (default: the run's; for bundled weights runs/NAME)")
    parser.flag("--tag", None, "adds -TAG to the output's name, and the classifier's if there", file_part)
    parser.flag("--n", None, "images in all, as many per class (default: ten each)", bounded(int, 1, 10**7))
    parser.flag("--classes", None, "only these classes, numbers or names: 3,5 or cat,dog (default: all)")
    parser.flag("--batch", 100, "images per batch, sorted by class", bounded(int, 1, 10**5))
    parser.flag("--watch", False, "also a strip: one image per class, denoised at a dozen noise levels")
    parser.flag("--png", False, "also single pictures, one sub-folder per class")
    parser.group("sampler")
    parser.flag("--sampler", "sde", "sde (few steps) or pc (the paper's)", choices=list(SAMPLERS))
    parser.flag("--steps", None, "sampler steps (default: 100 sde, 1000 pc)", bounded(int, 2, 10**6))
    parser.flag("--eta", 12.0, "sde: fresh noise; 0 is the ODE, 1 the reverse SDE", bounded(float, 0, 1000))
    parser.flag("--snr", 0.16, "pc: signal-to-noise ratio of the Langevin steps", bounded(float, 1e-6, 10))
    parser.flag("--corrector-steps", 1, "pc: Langevin steps per noise level", bounded(int, 0, 1000))
    parser.flag("--per-sample", False, "pc: norms of each image by itself, not the batch's mean as released")
    parser.flag("--amp", False, "the score network in bfloat16 (CUDA)")
    parser.flag("--compile", False, "torch.compile the score network")
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    check_flags(args, parser)
    device, folder = set_up(args), run_folder(args)
    loss, own_alpha, renormalize = GUIDANCE[args.guidance]
    path = pathlib.Path(args.score or folder / "score.pt")
    score_net = load_image_model(path, device, "score", "train_score.py", args)
    settings, config, exact = score_net.about["settings"], score_net.config, isinstance(score_net, ExactScore)
    if args.guidance == "oracle" and not exact:
        raise UserError("--guidance oracle: needs a score model of train_score.py --preset exact")
    if args.guidance == "free" and "classes" not in config:
        cure = "train_score.py --conditional --tag cond makes one that does, --score FILE names it"
        raise UserError(f"--guidance free: {path} knows no classes; {cure}")
    own = dict(data=pathlib.Path(settings.get("data", args.data)).stem, size=config["image_size"])
    for key, given in (("data", pathlib.Path(args.data).stem), ("size", args.size)):
        if given not in (parser.get_default(key), own[key]):
            raise UserError(f"--{key} {given}: {path} is for {own[key]}; leave it out")
    classifier = None
    if loss:
        tagged, plain = folder / f"classifier-{loss}{args.tag or ''}.pt", folder / f"classifier-{loss}.pt"
        path = pathlib.Path(args.classifier or (tagged if tagged.exists() else plain))
        if path == plain != tagged:
            say(f"note: there is no {tagged.name}, so --tag names the samples only")
        maker = f"train_classifier.py --loss {loss}"
        classifier = fold_batchnorm(load_image_model(path, device, "classifier", maker, args))
        if classifier.config["channels"] != config["channels"]:
            raise UserError(f"--classifier {path}: is not for images of {config['channels']} channels")
        for key in ("size", "sigma_min", "sigma_max"):
            is_for, wanted = classifier.about["settings"].get(key), settings.get(key)
            if is_for != wanted:
                raise UserError(f"--classifier {path}: is for {key} = {is_for}, the score model for {wanted}")
        if classifier.about["settings"].get("score_sha", score_net.about["sha"]) != score_net.about["sha"]:
            say(f"warning: the score model has changed since {path} was trained")
        warn_of_other_data(path, classifier, settings.get("data_sha"))
    known = (classifier or score_net).about["settings"]
    names = known.get("classes") or CLASSES.get(known.get("data"))
    names = list(map(str, names or range((classifier or score_net).config.get("classes", 10))))
    chosen = choose_classes(args.classes, names)
    n = args.n or 10 * len(chosen)
    if n % len(chosen):
        n += len(chosen) - n % len(chosen)
        say(f"--n {args.n}: {n} images, equally many of the {len(chosen)} classes")
    rows, interval = [], args.guide_sigma
    if "auto" in (args.alpha or []) + (interval or []):
        rows = read_diagnosis(folder, path.stem, (classifier or score_net).about["sha"],
                              score_net.about["sha"])
    if interval == ["auto"]:
        interval = levels_with_gain(rows)
    shape = (config["channels"], config["image_size"], config["image_size"])
    recipe = dict(guidance=args.guidance, renormalize=renormalize, n=n, classes=chosen, seed=args.seed,
                  batch=args.batch, sampler=args.sampler, steps=args.steps or STEPS[args.sampler],
                  sigma_min=settings["sigma_min"], sigma_max=settings["sigma_max"],
                  data=known.get("data", args.data),  # a released score model does not say it
                  size=shape[1], amp=args.amp, score=score_net.about["sha"],
                  classifier=classifier and classifier.about["sha"], guide_sigma=interval and list(interval),
                  **{key: getattr(args, key) for key in SAMPLERS[args.sampler]})
    if exact:
        recipe["exact"] = True
    score_call = network_call(score_net, args.amp and not exact, args.compile and not exact, device)
    bundled = folder.resolve().parent == BUNDLED.resolve()
    out = pathlib.Path(args.out or (f"runs/{folder.name}" if bundled else folder))
    for alpha in args.alpha or [own_alpha]:
        one, scale = {**recipe, "alpha": alpha}, alpha
        if alpha == "auto":
            one["alpha_sha"] = checksum([[row["sigma"], row["alpha"]] for row in rows])[:16]
            scale = best_scale(rows, device)

        def score_for(labels):
            y = None if args.guidance == "none" else torch.as_tensor(labels, device=device)
            return posterior_score(score_call, classifier, y, scale, renormalize, interval)

        end = "" if alpha == own_alpha else f"-a{alpha}".removesuffix(".0")
        path = out / f"samples-{args.guidance}{end}{args.tag or ''}.npz"
        make_samples(path, one, score_for, shape, device, args, names)


# ------------------------------------------------------------ 2. what it needs: files, diagnosis, pictures


def make_samples(path, recipe, score_for, shape, device, args, names):
    """One file of samples with its pictures; what is there already is not made again."""
    labels = np.resize(np.array(recipe["classes"], dtype=np.int64), recipe["n"])
    parts = path.with_name(f"{path.stem}-{checksum(recipe)[:8]}.parts")  # other recipes: elsewhere
    strip = path.with_name(f"{path.stem}-strip.png")
    with lock(path):  # which only the first process takes
        if args.restart or not path.exists():
            sample(path, parts, recipe, labels, score_for, shape, device, args.restart)
            for old in (strip, *path.with_suffix("").rglob("[0-9]*.png")) if RANK == 0 else ():
                old.unlink(missing_ok=True)  # pictures of other samples
            say(f"{path}: {recipe['n']} images")
        elif changed := difference(read_recipe(path, read_npz(path)), recipe):
            raise UserError(f"{path} was made with {changed}; --tag T keeps both, --restart starts over")
        else:
            say(f"{path}: finished already ({recipe['n']} images); --restart starts over")
        if RANK > 0:
            return
        shutil.rmtree(parts, ignore_errors=True)  # also where a kill came between the file and this
        images = read_npz(path)["images"]
        shown = None
        if recipe["guidance"] != "none":  # a number where the font may lack letters of the name
            shown = [names[c] if names[c].isascii() else str(c) for c in recipe["classes"]]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        save_grid(path.with_suffix(".png"), [pixels[labels == c][:16] for c in recipe["classes"]], shown)
        if args.watch and not strip.exists():
            save_grid(strip, watch(recipe, score_for, shape, device), shown)
        for i, (image, c) in enumerate(zip(images, labels)) if args.png else ():
            name = re.sub(r"[/\\]|^\.+", "_", names[c]) if shown else "."  # names may be a stranger's
            file = path.with_suffix("") / name / f"{i:06d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.squeeze()).save(file)


def sample(path, parts, recipe, labels, score_for, shape, device, restart):
    """Samples this process's share of the batches that are not on disk yet, then writes the file."""
    n, batch = recipe["n"], recipe["batch"]
    # Sorted by class, as released: the Langevin norms of a batch are then one class's mean, where it fits.
    batches = np.split(np.argsort(labels, kind="stable"), range(batch, n, batch))
    files = [parts / f"{b:06d}.npz" for b in range(len(batches))]
    missing = [b for b in range(len(batches)) if restart or not readable(files[b])]
    done = n - sum(len(batches[b]) for b in missing)
    progress = Progress(n, done, f"{path.stem}: image")
    evaluations = recipe["steps"] * (1 + recipe.get("corrector_steps", 0))
    for b in missing:
        score, calls = score_for(labels[batches[b]]), itertools.count()

        def one_evaluation(x, sigma):
            progress(min(done + len(x) * next(calls) / evaluations, n - 1))
            return score(x, sigma)

        if b % WORLD == RANK:
            x = sample_batch(one_evaluation, batches[b], recipe, shape, device)
            pixels = to_uint8(x).permute(0, 2, 3, 1).numpy()
            write_whole(files[b], lambda file: np.savez(file, images=pixels))
        done += len(batches[b])
    if WORLD > 1:
        dist.barrier()
    if RANK > 0:
        return
    images = np.empty((n, *shape[1:], shape[0]), np.uint8)
    for file, numbers in zip(files, batches):
        images[numbers] = read_npz(file)["images"]
    arrays = dict(images=images, recipe=np.array(json.dumps(recipe)))
    if recipe["guidance"] != "none":
        arrays["labels"] = labels
    write_whole(path, lambda file: np.savez(file, **arrays))
    progress(n)


def watch(recipe, score_for, shape, device):
    """The first image of each class, sampled by itself → its denoised means x + σ² s at twelve levels."""
    levels = sigma_grid(12, 0.1, recipe["sigma_max"])[:-1].tolist()  # below 0.1 nothing changes to the eye
    score, frames = score_for(recipe["classes"]), []

    def call(x, sigma):
        s = score(x, sigma)
        if len(frames) < len(levels) and sigma[0].item() <= levels[len(frames)] * 1.0001:
            frames.append(to_uint8(x + append_dims(sigma, x) ** 2 * s))
        return s

    sample_batch(call, range(len(recipe["classes"])), recipe, shape, device)
    return list(zip(*frames))


def sample_pictures(score, path, shape, sigma_max, device):
    """A grid of 32 images while a score model trains."""
    recipe = dict(seed=0, sampler="sde", steps=50, eta=12.0, sigma_min=0.01, sigma_max=sigma_max)
    with contextlib.suppress(UserError), torch.no_grad():  # an untrained network may give no score at all
        save_grid(path, list(to_uint8(sample_batch(score, range(32), recipe, shape, device)).split(8)))


def read_diagnosis(folder, name, sha, prior):
    """What train_classifier.py --diagnose measured for these weights: one dict per noise level."""
    path, cure = folder / "diagnose.json", "python train_classifier.py --diagnose makes it anew"
    with contextlib.suppress(OSError, ValueError, KeyError):
        tables = json.loads(path.read_text())
        if tables["weights"][name] == sha and tables.get("prior", prior) == prior:
            return tables[name]
    raise UserError(f"auto: {path} is missing, damaged, or without {name} as it is now; {cure}")


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
    best = max(range(len(rows)), key=lambda i: rows[i]["gain"])
    if rows[best]["gain"] <= 0:
        raise UserError("--guide-sigma auto: the diagnosis found no gain at any noise level")
    *_, lowest = itertools.takewhile(lambda row: row["gain"] > 0, rows[best::-1])
    *_, highest = itertools.takewhile(lambda row: row["gain"] > 0, rows[best:])
    half_bin = (rows[1]["sigma"] / rows[0]["sigma"]) ** 0.5
    return lowest["sigma"] / half_bin, highest["sigma"] * half_bin


COLOURS = ["#1f6fb4", "#e07b1a", "#2c9150", "#c23b3b", "#7b56a8", "#7a7a7a", "#b8860b", "#2aa6b0"]


def save_grid(path, rows, names=None):
    """A picture of images (uint8, C×H×W), one row for each of `rows`, with the rows' names on the left."""
    size, font = rows[0][0].shape[-1], ImageFont.load_default(15)
    side = size * max(1, 64 // size)
    left = 10 + int(max(map(font.getlength, names))) if names else 0
    picture = Image.new("RGB", (left + (side + 2) * max(map(len, rows)), (side + 2) * len(rows)), "white")
    for i, row in enumerate(rows):
        top = i * (side + 2)
        for j, image in enumerate(row):
            pixels = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy())
            pixels = pixels.resize((side, side), Image.Resampling.NEAREST)
            picture.paste(pixels, (left + j * (side + 2), top))
        if names:
            ImageDraw.Draw(picture).text((left - 6, top + side // 2), names[i], "black", font, anchor="rm")
    write_whole(path, lambda file: picture.save(file, "PNG", optimize=True))


def draw_curve(path):
    """The loss over the steps, from a training's log, as a picture beside it."""
    log = path.with_suffix(".jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    curve = [(record["step"], record["loss"]) for record in records if "loss" in record]
    if curve and RANK == 0:
        panel = dict(title=path.name, x="step", y="loss", log_y=True, lines=[("", *zip(*curve))])
        chart(path.with_suffix(".png"), [panel], columns=1)


def chart(path, panels, columns):
    """Panels of dict(lines=[(name, xs, ys[, low, high])] or bars, title, x, y, log_x, log_y, y_range)."""
    picture = Image.new("RGB", (460 * columns, 385 * math.ceil(len(panels) / columns)), "white")
    for i, panel in enumerate(panels):
        picture.paste(draw_panel(**panel).reduce(3), (i % columns * 460, i // columns * 385))
    write_whole(path, lambda file: picture.save(file, "PNG", optimize=True))


def draw_panel(lines=(), bars=(), title="", x="", y="", log_x=False, log_y=False, y_range=None):
    """One plot, three times as large as in the file: antialiased when it is reduced."""
    picture = Image.new("RGB", (1380, 1155), "white")
    x0, y0, x1, y1 = 186, 150, 1320, 852  # its frame
    pen, font = ImageDraw.Draw(picture, "RGBA"), ImageFont.load_default(39)
    place_x, x_ticks = axis([line[1] for line in lines] or [[-0.5, len(bars) - 0.5]], log_x, x0, x1)
    values = [y_range] if y_range else [ys for line in lines for ys in line[2:]] or [[0, *bars]]
    place_y, y_ticks = axis(values, log_y, y1, y0, margin=0.0 if y_range else 0.06)

    def points(xs, ys):
        return [(a, b) for a, b in zip(place_x(xs), place_y(ys)) if not math.isnan(b)]

    for number, at in y_ticks:
        pen.line([(x0, at), (x1, at)], "#e4e4e4", 3)
        pen.text((x0 - 18, at), number, "black", font, anchor="rm")
    for number, at in x_ticks if lines else ():  # bars have no numbers
        pen.line([(at, y0), (at, y1)], "#e4e4e4", 3)
        pen.text((at, y1 + 15), number, "black", font, anchor="mt")
    for i, value in enumerate(bars):
        (left, right), (top, bottom) = place_x([i - 0.4, i + 0.4]), sorted(place_y([0, value]))
        pen.rectangle([left, top, right, bottom], COLOURS[0] if value >= 0 else COLOURS[3])
    for i, (name, xs, ys, *band) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        if band and (outline := points(xs, band[0]) + points(xs, band[1])[::-1]):
            pen.polygon(outline, colour + "38")
        pen.line(points(xs, ys), colour, 6, joint="curve")
        if name:  # the legend: two names to a row, below the plot
            left, row = x0 + 570 * (i % 2), y1 + 150 + 45 * (i // 2)
            pen.line([(left, row), (left + 54, row)], colour, 9)
            pen.text((left + 66, row), name, "black", font, anchor="lm")
    pen.rectangle([x0, y0, x1, y1], outline="#555555", width=3)
    pen.text(((x0 + x1) / 2, 24), title, "black", ImageFont.load_default(45), anchor="mt")
    pen.text((x0, y0 - 18), y, "black", font, anchor="ls")
    pen.text(((x0 + x1) / 2, y1 + 108), x, "black", font, anchor="ms")
    return picture


def axis(values, log, start, end, margin=0.0):
    """→ a function from values to pixels between start and end, and about five numbers with their pixels."""
    def scaled(values):
        with np.errstate(divide="ignore"):
            return np.log10(np.maximum(values, 0)) if log else np.asarray(values, float)

    def place(values):
        part = (scaled(values) - low) / (high - low)
        return start + (end - start) * part.clip(-0.02, 1.02)  # what is outside, as log 0, ends at the edge

    known = np.ma.masked_invalid(scaled(np.concatenate(values)))  # without log 0
    low, high = (known.min(), known.max()) if known.count() else (0.0, 1.0)
    space = margin * (high - low) if high > low else 0.5
    low, high = low - space, high + space
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = max(power * m for m in (1, 2, 5) if power * m <= (high - low) / 4)
    if log and high - low > 2:  # powers of ten
        step = max(step, 1.0)
    ticks = step * np.arange(math.ceil(low / step - 1e-9), high / step + 1e-9)
    numbers = [f"{10**tick:.3g}" if log else f"{tick:g}" for tick in ticks]
    return place, list(zip(numbers, place(10**ticks if log else ticks)))


# ------------------------------------------------------------ 3. machinery: files and flags


def readable(path):
    with contextlib.suppress(UserError):
        return bool(read_npz(path))
    return False


def floats(text):
    """An argparse type: '3' or '0.5,1,3' or 'auto' → a list of numbers, or of 'auto'."""
    number = bounded(float, 0, 1e4)
    return list(dict.fromkeys(item if item == "auto" else number(item) for item in text.split(",")))


floats.__name__ = "list of numbers"  # argparse says "invalid list of numbers value"


def choose_classes(text, names):
    """--classes as a list of numbers."""
    if not text:
        return list(range(len(names)))
    numbers = {**{str(i): i for i in range(len(names))}, **{name: i for i, name in enumerate(names)}}
    chosen = [numbers.get(item.strip()) for item in text.split(",")]
    if None in chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"--classes {text}: must be different names, or numbers from 0 to {len(names) - 1}")
    return chosen


def check_flags(args, parser):
    """An error where a flag has no effect beside this sampler or this guidance."""
    unguided = ["alpha", "guide_sigma", "classifier"]
    useless = dict(none=[*unguided, "classes"], oracle=unguided, free=["classifier"])
    parser.refuse(args, f"with {args.guidance}", *useless.get(args.guidance, []))
    others = set(itertools.chain(*SAMPLERS.values())) - set(SAMPLERS[args.sampler])
    parser.refuse(args, f"with {args.sampler}", *sorted(others))
    levels = args.guide_sigma
    if levels not in (None, ["auto"]) and (len(levels) != 2 or "auto" in levels or levels[0] >= levels[1]):
        raise UserError("--guide-sigma: must be auto, or LOW,HIGH with LOW below HIGH")


if __name__ == "__main__":
    run(main)
