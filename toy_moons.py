"""The two-moons study, where the true scores are known: the paper's Tables 1 and A3 and Figures 1, 5 and A1.

    python toy_moons.py                                   # two cores, about five minutes
    python toy_moons.py --seeds 5 --out runs/moons5       # mean and deviation over five trainings

Reads nothing. Prints the tables, the paper's values beside ours, and writes to runs/moons/: table.json, figure1.png, figure5.png,
figureA1.png, and a checkpoint and a log for each network. The same command again continues where it stopped.

Losses, samplers and metrics are those of the images. Two networks are compared: "late" is the paper's, in which σ meets x in the
last layer, so that the gradient of its logits cannot depend on σ; "early" sees both from the first layer.
"""
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from evaluate import prdc
from models import ToyNet, UserError, load_checkpoint, load_model, sigma_at, write_whole
from sample import COLOURS, chart, pc_sampler, posterior_score, save_png
from train_classifier import ce_loss, dlsm_loss, likelihood_score, total_loss
from train_score import Parser, Progress, draw_noise, dsm_loss, fit, from_preset, lock, mix, number, run, say, set_up

PRESETS = {
    # Ours: x / 10 and log σ as inputs and a cosine decay reach the paper's errors with a twentieth of its sample visits.
    "fast": dict(joins=("late", "early"), scaled=True, steps=8_000, batch=1_000, lr=3e-3, lr_classifier=1e-2, cosine=True,
                 samples=10_000),
    # The paper's (Appendix A.6.2). The released code has 1e-5 for the classifier.
    "paper": dict(joins=("late",), scaled=False, steps=40_000, batch=4_000, lr=6.5e-4, lr_classifier=2e-5, cosine=False,
                  samples=10_000),
}
SIGMA_MIN, SIGMA_MAX = 0.01, 10.0  # of the training (A.6.2)
SIGMA = 7.5  # of the tables; not in the paper, read off its code
POWER, LAMBDA = 4, 0.125  # the losses' weight σ⁴ (the paper prints 1/σ⁴, its code multiplies), and λ of L_Total (A.6.2)
NEIGHBOURS = 5  # k of precision and recall (the released code), with 10,000 samples and as many perturbed points a class
PC_STEPS = 100  # from N(0, 10²) at σ = 10 to 7.5: Langevin steps enough to forget that start, which is not the moons' law
METHODS = {  # key: name, loss of the classifier, α, whether re-normalised (Eq. A2)
    "a": ("(a) Base", "ce", 1, False),
    "b": ("(b) Scaling, alpha = 10", "ce", 10, False),
    "renorm": ("(b') Re-normalised, alpha = 10", "ce", 10, True),
    "c": ("(c) Posterior SM", None, 1, False),
    "d": ("(d) Ours", "total", 1, False),
    "e": ("(e) Oracle", None, 1, False),
}
LOSSES = {"ce": "L_CE", "dlsm": "L_DLSM'", "total": "L_Total"}
PAPER = {  # Tables 1 and A3, classes c1 and c2
    "a": dict(D_P=(0.198, 0.197), D_L=(0.190, 0.181), precision=(0.94, 0.93), recall=(1.00, 1.00)),
    "b": dict(D_P=(2.734, 2.627), D_L=(2.730, 2.618), precision=(0.95, 0.94), recall=(0.97, 0.97)),
    "c": dict(D_P=(0.063, 0.060), precision=(0.97, 0.97), recall=(1.00, 1.00)),
    "d": dict(D_P=(0.066, 0.064), D_L=(0.052, 0.052), precision=(0.96, 0.95), recall=(1.00, 1.00)),
    "e": dict(D_P=(0.000, 0.000), D_L=(0.000, 0.000), precision=(1.00, 1.00), recall=(1.00, 1.00)),
    "dlsm": dict(D_P=(0.066, 0.065), D_L=(0.053, 0.053)),
}
PAPER.update(ce=PAPER["a"], total=PAPER["d"])

# ---------------------------------------------------------------------------- method


def moons(n=10_000):
    """Two crescents without noise (A.6.2): points (n, 2), centred, times 20, and labels (n,): 0 is c1, the upper one."""
    t, u = (torch.linspace(0, math.pi, count, dtype=torch.float64) for count in (n // 2, n - n // 2))
    points = torch.cat([torch.stack([t.cos(), t.sin()], 1), torch.stack([1 - u.cos(), 0.5 - u.sin()], 1)])
    return (20 * (points - points.mean(0))).float(), (torch.arange(n) >= n // 2).long()


def oracle_score(x, points, sigma):
    """∇ log p_σ(x) of the Parzen density (Eq. 2): Σᵢ wᵢ (pᵢ − x) / σ², w = softmax(−‖x − pᵢ‖² / 2σ²).

    In log space it is right however far out x lies; the released code adds 1e-8 to the density, 5% off there. Distances come from
    differences: expanding the square would lose the digits that a small σ needs.
    """
    points = points.to(x)
    variance = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).expand(len(x))[:, None] ** 2
    block = max(1, 2**19 // len(points))  # rows of distances that stay in the processor's cache
    scores = []
    for a, v in zip(x.split(block), variance.split(block)):
        distance = (a[:, :1] - points[:, 0]).square_().add_((a[:, 1:] - points[:, 1]).square_())
        scores.append((torch.softmax(distance.mul_(-0.5 / v), 1) @ points - a) / v)
    return torch.cat(scores)


def plane(columns=35, rows=35):
    """Where D_P and D_L are taken: a regular grid of 1,225 points on [−40, 40] × [−25, 25], row by row from below."""
    return torch.cartesian_prod(torch.linspace(-25, 25, rows), torch.linspace(-40, 40, columns)).flip(1)


def true_scores(x):
    """The oracle's prior score at σ = 7.5, and the posterior scores of both classes."""
    points, labels = moons()
    return oracle_score(x, points, SIGMA), [oracle_score(x, points[labels == c], SIGMA) for c in (0, 1)]


def scores_of(key, c, out, join, seed, device="cpu"):
    """Two functions of (x, σ): the posterior score S_P and the likelihood score S_L of a method, or a loss, for class c."""
    points, labels = moons()
    if key == "e":
        return (lambda x, sigma: oracle_score(x, points[labels == c], sigma),
                lambda x, sigma: oracle_score(x, points[labels == c], sigma) - oracle_score(x, points, sigma))
    if key == "c":
        return posterior_score(load_model(out / f"{join}-c{c + 1}-{seed}.pt", device, "score")), None
    _, loss, alpha, renormalize = METHODS.get(key, (None, key, 1, False))
    score_net = load_model(out / f"{join}-score-{seed}.pt", device, "score")
    classifier = load_model(out / f"{join}-{loss}-{seed}.pt", device, "classifier")

    def y(x):
        return torch.full((len(x),), c, device=x.device)

    return (lambda x, sigma: posterior_score(score_net, classifier, y(x), alpha, renormalize)(x, sigma),
            lambda x, sigma: likelihood_score(classifier, x, sigma, y(x), alpha, renormalize))


def score_errors(key, out, join, seed):
    """E[D_P] and E[D_L] (Eq. 7) of both classes: the mean distance to the oracle's score over the grid."""
    x, errors = plane(), dict(D_P=[], D_L=[])
    sigma, (prior, posteriors) = torch.full((len(x),), SIGMA), true_scores(x)
    for c, posterior in enumerate(posteriors):
        S_P, S_L = scores_of(key, c, out, join, seed)
        errors["D_P"].append((S_P(x, sigma) - posterior).norm(dim=1).mean().item())
        errors["D_L"].append((S_L(x, sigma) - (posterior - prior)).norm(dim=1).mean().item() if S_L else None)
    return errors


def sample(report, key, c, out, join, seed, device, count):
    """Draws class c down to σ = 7.5 → precision, recall, density, coverage against data with that noise, and some samples."""
    points, labels = moons()
    generator = torch.Generator().manual_seed(mix(seed, "samples", c))  # the same for every method

    def noise(x):
        return torch.randn(x.shape, generator=generator).to(x)

    real = points[labels == c]
    real = real[torch.randint(len(real), (count,), generator=generator)]
    real = real + SIGMA * noise(real)
    sigmas = sigma_at(torch.linspace(1, 0, PC_STEPS + 1), SIGMA, SIGMA_MAX)
    S_P, _ = scores_of(key, c, out, join, seed, device)
    if key == "e":  # 1,000 points a crescent, 0.06 apart, are as good as 5,000 under a kernel of σ = 7.5, and five times as fast
        few, of_class = moons(2_000)
        S_P = lambda x, sigma: oracle_score(x, few[of_class == c], sigma)
    fake = pc_sampler(S_P, SIGMA_MAX * noise(real.to(device)), sigmas, noise=noise).cpu()
    metrics = prdc(real, fake, k=NEIGHBOURS)
    report(1)
    return metrics, fake[:1500].tolist()


def train(report, out, preset, join, name, seed, device, restart):
    """Trains a score model (on all points, or on c1 or c2 alone) or a classifier (named by its loss), or continues it."""
    points, labels = moons()
    kind, lr = ("classifier", preset["lr_classifier"]) if name in LOSSES else ("score", preset["lr"])
    if name in ("c1", "c2"):
        points, labels = points[labels == int(name[1]) - 1], labels[labels == int(name[1]) - 1]
    score_net = load_model(out / f"{join}-score-{seed}.pt", device, "score") if name in ("dlsm", "total") else None
    torch.manual_seed(mix(seed, name))
    net = ToyNet(2, join=join, scaled=preset["scaled"]).to(device)
    loss = {
        "ce": lambda x, sigma, y, z: ce_loss(net, x, sigma, y, z),
        "dlsm": lambda x, sigma, y, z: dlsm_loss(net, score_net, x, sigma, y, z, POWER),
        "total": lambda x, sigma, y, z: total_loss(net, score_net, x, sigma, y, z, LAMBDA, POWER),
    }.get(name, lambda x, sigma, y, z: dsm_loss(net, x, sigma, z, POWER))

    def draw(generator, step, count=preset["batch"]):
        i = torch.randint(len(points), (count,), generator=generator)
        sigma, z = draw_noise(generator, (count, 2), SIGMA_MIN, SIGMA_MAX)
        return points[i], sigma, labels[i], z

    grid = plane().to(device)
    level = torch.full((len(grid),), SIGMA, device=device)
    prior, posteriors = true_scores(grid)
    held = [v.to(device) for v in draw(torch.Generator().manual_seed(0), 0, 5_000)]

    def inspect(step, ema):
        """For the log, of which Figure 5 is drawn: the score error at σ = 7.5, and the cross-entropy of a fixed sample, all σ."""
        report(step)
        with torch.no_grad():
            if kind == "score":
                truth = dict(score=prior, c1=posteriors[0], c2=posteriors[1])[name]
                return dict(error=(net(grid, level) - truth).norm(dim=1).mean().item())
            S_L = [likelihood_score(net, grid, level, torch.full_like(level, c).long()) for c in (0, 1)]
            D_L = [(s - (posterior - prior)).norm(dim=1).mean().item() for s, posterior in zip(S_L, posteriors)]
            return dict(D_L=sum(D_L) / 2, cross_entropy=ce_loss(net, *held).item())

    settings = dict(data="moons", name=name, join=join, seed=seed, lr=lr, sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX, power=POWER,
                    lam=LAMBDA, **{key: preset[key] for key in ("scaled", "steps", "batch", "cosine")})
    fit(net, draw, loss, out / f"{join}-{name}-{seed}.pt", kind, settings, steps=preset["steps"], lr=lr, cosine=preset["cosine"],
        seed=mix(seed, name), device=device, every=max(1, preset["steps"] // 100), inspect=inspect, restart=restart, quiet=True)


# ---------------------------------------------------------------------------- processes


def worker(pipe):
    """Takes jobs from the pipe and sends what comes of them, until the other end is closed."""
    sys.stdout = open(os.devnull, "w")  # the parent speaks for all
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            job, *arguments = pipe.recv()
            try:
                answer = ("result", job(lambda count: pipe.send(("count", count)), *arguments))
            except (UserError, OSError) as error:
                answer = ("error", error)
            pipe.send(answer)


@contextlib.contextmanager
def processes():
    """Workers, pipe → process: one a core, of one thread each, since these matrices are small.

    They are born deaf to Ctrl-C. The parent hears it and, as at any other end, sends them SIGTERM, upon which `fit` saves.
    """
    context, workers = multiprocessing.get_context("spawn"), {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())):
            ours, theirs = context.Pipe()
            workers[ours] = context.Process(target=worker, args=(theirs,), daemon=True)
            workers[ours].start()
            theirs.close()
        signal.signal(signal.SIGINT, handler)
        yield workers
    except BaseException:
        print(end="\n" * sys.stdout.isatty(), flush=True)  # off the progress line
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
        for process in workers.values():
            process.terminate()
        for pipe, process in workers.items():
            process.join(10)
            pipe.close()  # a SIGTERM in the last step of a training is lost: this ends the wait for another job
            process.join()


def in_parallel(workers, jobs, unit, size=1, counts=()):
    """The results of jobs, each a function and its arguments; it also gets a function to report its count with, up to `size`.

    `counts` is what is done of them already.
    """
    busy, results, waiting, counts = {}, [None] * len(jobs), list(range(len(jobs))), list(counts) or [0] * len(jobs)
    progress = Progress(size * len(jobs), sum(counts), unit, quiet=sum(counts) >= size * len(jobs))
    while waiting or busy:
        for pipe in [pipe for pipe in workers if pipe not in busy][: len(waiting)]:
            busy[pipe] = waiting.pop(0)
            pipe.send(jobs[busy[pipe]])
        for pipe in multiprocessing.connection.wait(list(busy)):
            try:
                what, value = pipe.recv()
            except (EOFError, ConnectionError):
                raise UserError("a worker process was ended, perhaps for want of memory; the same command continues") from None
            if what == "error":
                raise value
            if what == "count":
                counts[busy[pipe]] = value
                progress(sum(counts))
            else:
                results[busy.pop(pipe)] = value
    return results


# ---------------------------------------------------------------------------- tables and pictures


def over_seeds(values):
    """Of dicts of (c1, c2), one a seed: their mean and, of several, the standard deviation as NAME_std; None stays None."""
    summary = {}
    for key in values[0]:
        numbers = np.array([v[key] for v in values], float)  # None becomes NaN
        summary[key] = None if np.isnan(numbers).any() else numbers.mean(0).tolist()
        if len(values) > 1:
            summary[f"{key}_std"] = summary[key] and numbers.std(0, ddof=1).tolist()
    return summary


def print_table(title, rows, names, paper):
    """A line a method and class; [in brackets] what the paper has."""
    def cell(row, name, key, c):
        if row[key] is None:
            return "-"
        theirs = f" [{PAPER[name][key][c]:.{3 if key[0] == 'D' else 2}f}]" if paper and key in PAPER.get(name, ()) else ""
        return f"{row[key][c]:.3f}" + (f" ± {row[key + '_std'][c]:.3f}" if f"{key}_std" in row else "") + theirs

    columns = [key for key in rows[min(rows)] if not key.endswith("_std")]
    lines = [["", "", *(f"E[{key}]" if key[0] == "D" else key for key in columns)]]
    for name, row in rows.items():
        lines += [["" if c else names[name], f"c{c + 1}", *(cell(row, name, key, c) for key in columns)] for c in (0, 1)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    say("\n".join(["", title] + ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]))


def curve(out, join, name, seeds, key):
    """A line of Figure 5 from the logs: steps, the mean over the seeds and, of several, its 95% interval (Student's t)."""
    runs = []
    for seed in seeds:
        path = out / f"{join}-{name}-{seed}.jsonl"
        try:
            runs.append({r["step"]: r[key] for r in map(json.loads, path.read_text().splitlines()) if key in r})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a readable log ({error}); Figure 5 needs it, --restart trains again") from None
    steps = sorted(set.intersection(*map(set, runs)))
    values = np.array([[r[step] for step in steps] for r in runs])
    if len(seeds) == 1:
        return LOSSES[name], steps, values[0]
    import scipy.stats  # a second to load, for this one number
    mean, error = values.mean(0), values.std(0, ddof=1) / len(seeds) ** 0.5 * scipy.stats.t.ppf(0.975, len(seeds) - 1)
    return LOSSES[name], steps, mean, mean - error, mean + error


def draw_figure5(path, out, joins, seeds):
    panels = []
    for join in joins:
        D_L, CE = ([curve(out, join, name, seeds, key) for name in LOSSES] for key in ("D_L", "cross_entropy"))
        top = 1.2 * max(max(line[2]) for line in D_L)
        panels.append(dict(title=f"{join}: score error", x="training step", y="mean D_L at sigma = 7.5", lines=D_L, y_range=(0, top)))
        low, high = min(min(line[2]) for line in CE), max(max(line[2]) for line in CE)  # logarithmic: DLSM' alone may run away
        panels.append(dict(title=f"{join}: cross entropy", x="training step", y="cross entropy, all sigma", lines=CE, log_y=True,
                           y_range=(low / 1.5, 4 * high)))
    chart(path, panels, columns=2)


def draw_figureA1(path):
    """Two Gaussians of mean ∓1.5 and variance 2.25, equally likely; p_α(x|y) ∝ softmax(α log p(y|x)) p(x) (Eqs. A1, A2)."""
    x = torch.linspace(-8, 8, 801, dtype=torch.float64)
    log_p = torch.stack([torch.distributions.Normal(mean, 1.5).log_prob(x) for mean in (-1.5, 1.5)])
    prior, panels = log_p.exp().mean(0), []
    for alpha in (0.2, 1.0, 5.0):
        q = F.softmax(alpha * F.log_softmax(log_p, 0), 0) * prior
        q = q / torch.trapezoid(q, x)[:, None]
        names = "p(x)", "p(x|y1)", "p(x|y2)", "re-normalised p(x|y1)", "re-normalised p(x|y2)"
        lines = [(name, x, y) for name, y in zip(names, (prior, *log_p.exp(), *q))]
        panels.append(dict(title=f"alpha = {alpha:g}", x="x", y="density", lines=lines, y_range=(0, 0.55)))
    chart(path, panels)


def draw_figure1(path, out, join, seed, samples):
    """Posterior scores of c1 and c2 at σ = 7.5, on a shading of their error, and samples; a column a method."""
    K, W, H, left, top, gap = 3, 300, 188, 40, 44, 10  # drawn K times as large, then reduced: antialiased
    keys = [key for key in METHODS if key != "renorm"]
    picture = Image.new("RGB", (K * (left + len(keys) * (W + gap)), K * (top + 3 * (H + gap) + 34)), "white")
    pen, font = ImageDraw.Draw(picture, "RGBA"), ImageFont.load_default(20 * K)
    points, labels = moons()
    crescents = [points[labels == c][::25].tolist() for c in (0, 1)]
    grid, starts = plane(), 0.95 * plane(17, 11)
    truth = true_scores(grid)[1]

    def corner(column, row):
        return K * (left + column * (W + gap)), K * (top + row * (H + gap))

    for column, key in enumerate(keys):
        def place(point):
            return x0 + (point[0] + 42) / 84 * W * K, y0 + (26.3 - point[1]) / 52.6 * H * K

        pen.text((corner(column, 0)[0] + K * W / 2, K * 22), METHODS[key][0], "black", font, anchor="mm")
        for c in (0, 1):
            x0, y0 = corner(column, c)
            S_P = scores_of(key, c, out, join, seed)[0]
            error = (S_P(grid, torch.full((len(grid),), SIGMA)) - truth[c]).norm(dim=1).reshape(35, 35).flip(0)
            shade = (255 - 150 * (error / 0.5).clamp(max=1)).byte().numpy()
            shade = Image.fromarray(np.stack([np.full_like(shade, 255), shade, shade], 2))
            picture.paste(shade.resize((K * W, K * H), Image.Resampling.BICUBIC), (x0, y0))
            pen.line([place(p) for p in crescents[c]], ("#9cc3e2", "#f2c08a")[c], 7 * K, joint="curve")
            s = S_P(starts, torch.full((len(starts),), SIGMA))
            length = s.norm(dim=1, keepdim=True)
            s = s / length * (4.6 * (length / 0.3).tanh()).clamp(min=1.2)  # in units of x; long arrows, as of (b), are cut
            for tail, tip in zip((starts - s / 2).tolist(), (starts + s / 2).tolist()):
                (ax, ay), (bx, by) = place(tail), place(tip)
                angle = math.atan2(by - ay, bx - ax)
                barbs = [(bx - 5 * K * math.cos(angle + turn), by - 5 * K * math.sin(angle + turn)) for turn in (0.42, -0.42)]
                pen.line([(ax, ay), tuple(np.mean(barbs, 0))], "#222222", 4)
                pen.polygon([(bx, by), *barbs], "#222222")
        x0, y0 = corner(column, 2)
        dots = [(*place(p), c) for c in (0, 1) for p in samples[key, c] if abs(p[0]) < 41 and abs(p[1]) < 25.5]
        for i in np.random.default_rng(0).permutation(len(dots)):  # mixed, or the second class would cover the first
            x, y, c = dots[i]
            pen.ellipse([x - 1.5 * K, y - 1.5 * K, x + 1.5 * K, y + 1.5 * K], COLOURS[c] + "90")
        for crescent in crescents:
            pen.line([place(p) for p in crescent], "#333333", 2 * K, joint="curve")
        for x0, y0 in (corner(column, row) for row in range(3)):
            pen.rectangle([x0, y0, x0 + K * W, y0 + K * H], outline="#555555", width=K)
    for row, text in enumerate(("scores, c1", "scores, c2", "samples")):
        label = Image.new("L", (K * H, K * 28))
        ImageDraw.Draw(label).text((K * H / 2, K * 14), text, 255, font, anchor="mm")
        picture.paste("black", (K * 6, corner(0, row)[1]), label.rotate(90, expand=True))
    note = "[-40, 40] x [-25, 25], sigma = 7.5. Red: distance to the oracle score, full at 0.5. Lines: the data, before noise."
    pen.text((K * left, picture.height - 20 * K), note, "#444444", ImageFont.load_default(18 * K), anchor="lm")
    save_png(path, picture.resize((picture.width // K, picture.height // K), Image.Resampling.LANCZOS))


# ---------------------------------------------------------------------------- the study


def make_parser():
    parser = Parser(__doc__)
    parser.flag("--preset", "fast", "fast (two cores, minutes) or paper (the authors' recipe, hours)", choices=list(PRESETS))
    parser.flag("--seeds", 1, "how many trainings to average over, with seeds SEED, SEED + 1, ...", number(int, 1, 1000))
    parser.flag("--seed", 0, "random seed", number(int, 0, 2**62))
    parser.flag("--steps", None, "optimiser steps of each network (default: the preset's)", number(int, 1, 10**9))
    parser.flag("--batch", None, "points a step (default: the preset's)", number(int, 1, 10**6))
    parser.flag("--samples", None, "samples a class, for precision and recall (default: the preset's)", number(int, 10, 10**6))
    parser.flag("--out", "runs/moons", "folder to write to")
    parser.flag("--device", "cpu", "cpu (the fastest for networks this small), cuda, cuda:1, mps, auto")
    parser.flag("--restart", False, "start over instead of continuing")
    return parser


def main():
    args = make_parser().parse_args()
    preset, out, device, begun = from_preset(args, PRESETS), pathlib.Path(args.out), str(set_up(args)), time.monotonic()
    joins, seeds = preset["joins"], range(args.seed, args.seed + args.seeds)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(out / "table.json"))
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written to ({error.strerror}); choose another folder") from None
        workers = stack.enter_context(processes())
        for names in (("score", "c1", "c2", "ce"), ("total", "dlsm")):  # the latter need the first of the former
            runs = [(join, name, seed) for name in names for seed in seeds for join in joins]
            paths = [out / f"{join}-{name}-{seed}.pt" for join, name, seed in runs]
            done = [0 if args.restart or not path.exists() else load_checkpoint(path).get("step", 0) for path in paths]
            say(f"{', '.join(names)}: {len(runs)} networks, {preset['steps']} steps each" + f"; {sum(done)} done" * any(done))
            jobs = [(train, out, preset, *one, device, args.restart) for one in runs]
            in_parallel(workers, jobs, "step", preset["steps"], done)

        sets = [("e", c, seed, joins[0]) for seed in seeds for c in (0, 1)]  # the oracle is the slowest
        sets += [(key, c, seed, join) for key in METHODS if key != "e" for join in joins for seed in seeds for c in (0, 1)]
        say(f"sampling: {len(sets)} sets of {preset['samples']}")
        jobs = [(sample, key, c, out, join, seed, device, preset["samples"]) for key, c, seed, join in sets]
        drawn = dict(zip(sets, in_parallel(workers, jobs, "set")))
        drawn.update({("e", c, seed, join): drawn["e", c, seed, joins[0]] for c in (0, 1) for seed in seeds for join in joins})

        table = {}
        for join in joins:
            measured = {key: [score_errors(key, out, join, seed) for seed in seeds] for key in (*METHODS, *LOSSES)}
            for key in METHODS:
                for values, seed in zip(measured[key], seeds):
                    c1, c2 = (drawn[key, c, seed, join][0] for c in (0, 1))
                    values.update({name: [c1[name], c2[name]] for name in c1})
            table[join] = dict(methods={key: over_seeds(measured[key]) for key in METHODS},
                               losses={key: over_seeds(measured[key]) for key in LOSSES})
            late, names = join == "late", {key: name for key, (name, *_) in METHODS.items()}
            where = "last layer, as in the paper [its values]" if late else "first layer"
            print_table(f"Table 1, {join}: sigma meets x in the {where}", table[join]["methods"], names, late)
            print_table(f"Table A3, {join}: the classifier's loss", table[join]["losses"], LOSSES, late)
            samples = {(key, c): drawn[key, c, args.seed, join][1] for key in METHODS for c in (0, 1)}
            draw_figure1(out / f"figure1{'' if late else '-' + join}.png", out, join, args.seed, samples)
        table["settings"] = dict(
            preset, preset=args.preset, seeds=list(seeds), sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX, sigma=SIGMA, power=POWER,
            lam=LAMBDA, k=NEIGHBOURS, sampler=f"pc, {PC_STEPS} steps from N(0, 10^2)", device=device, torch=torch.__version__)
        write_whole(out / "table.json", json.dumps(table, indent=1).encode())
        draw_figure5(out / "figure5.png", out, joins, seeds)
        draw_figureA1(out / "figureA1.png")
        say(f"\n{out}/: table.json, figure1.png, figure5.png, figureA1.png ({(time.monotonic() - begun) / 60:.1f} minutes)")


if __name__ == "__main__":
    run(main)
