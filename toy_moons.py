"""The two-moons study, where the true scores are known: Tables 1 and A3, Figures 1, 5 and A1.

    python toy_moons.py                                 # two cores, about five minutes
    python toy_moons.py --seeds 5 --out runs/moons5     # mean and deviation over five trainings

Prints the tables, the paper's values beside ours; writes runs/moons/: table.json, figure1.png,
figure5.png, figureA1.png, and a checkpoint and a log of each network. The same command continues
where it stopped.

Losses, samplers and metrics are those of the images. Two networks are compared: "late" is the
paper's, in which σ meets x in the last layer, so that the gradient of its logits cannot depend on
σ; "early" sees both from the first layer.
"""
import concurrent.futures
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import typing

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from evaluate import prdc
from models import ExactScore, ToyNet, UserError, load_checkpoint, load_model, sigma_at, write_whole
from sample import COLOURS, chart, pc_sampler, posterior_score
from train_classifier import ce_loss, dlsm_loss, likelihood_score, total_loss
from train_score import (WORLD, Parser, Plan, Progress, bounded, derive_seed, dsm_loss, fit, from_preset,
                         lock, run, sample_noise, say, set_up)

# ------------------------------------------------------------ 1. the story

PRESETS = {
    # Ours: x / 10 and log σ as inputs, a cosine decay, and a twentieth of the paper's sample visits.
    "fast": dict(joins=("late", "early"), scaled=True, steps=8_000, batch=1_000, lr=3e-3, lr_classifier=1e-2,
                 cosine=True, samples=10_000),
    # The paper's (Appendix A.6.2). The released code has 1e-5 for the classifier.
    "paper": dict(joins=("late",), scaled=False, steps=40_000, batch=4_000, lr=6.5e-4, lr_classifier=2e-5,
                  cosine=False, samples=10_000),
}
WIDTHS = (128, 64, 32)  # A.6.2; the released networks have 256, 128, 64
SIGMA_MIN, SIGMA_MAX = 0.01, 10.0  # of training (A.6.1; released: 0.001), t uniform on [1e-5, 1] as released
SIGMA = 7.5  # where D_P and D_L are taken and samples end; not in the paper, read off its code
POWER = 4  # the weight σ⁴ of DSM and DLSM'; the paper prints 1/σ⁴ (A.6.2), its code multiplies by σ⁴
LAMBDA = 0.125  # of L_Total (A.6.2), with a mean over the two coordinates in L_DLSM', as released
NEIGHBOURS = 5  # k of precision and recall (released), with 10,000 samples and as many real points per class
# From N(0, 10²) at σ = 10 to 7.5; the paper has T = 1,000. 100 steps nearly forget that start, not quite: the
# mean of c1 stays off by about 1.3.
PC_STEPS = 100
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
# Where D_P and D_L are taken: 35×35 points on [−40, 40] × [−25, 25], regular as released, from below.
GRID = torch.cartesian_prod(torch.linspace(-25, 25, 35), torch.linspace(-40, 40, 35)).flip(1)
LEVEL = torch.full((len(GRID),), SIGMA)


def moons(n=10_000):
    """Two crescents (A.6.2), centred, times 20, no noise: points (n, 2), labels (n,); 0 is c1, the upper."""
    t, u = (torch.linspace(0, math.pi, count, dtype=torch.float64) for count in (n // 2, n - n // 2))
    points = torch.cat([torch.stack([t.cos(), t.sin()], 1), torch.stack([1 - u.cos(), 0.5 - u.sin()], 1)])
    return (20 * (points - points.mean(0))).float(), (torch.arange(n) >= n // 2).long()


def oracle_score(x, points, sigma):
    """∇ log p_σ(x) of the Parzen density of `points` (Eq. 2), by the code that images have."""
    # In log space: the released code adds 1e-8 to the density and is 5% off far out.
    labels = torch.zeros(len(points), dtype=torch.long, device=points.device)
    sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).expand(len(x))
    return ExactScore(points.to(x.dtype), labels).to(x.device)(x, sigma)


class Nets(typing.NamedTuple):
    """The networks of one seed: the score models "score", "c1" and "c2", and a classifier for each loss."""
    out: pathlib.Path
    join: str
    seed: int
    device: str = "cpu"

    def path(self, name):
        return self.out / f"{self.join}-{name}-{self.seed}.pt"

    def load(self, name):
        return load_model(self.path(name), self.device, "classifier" if name in LOSSES else "score")


def method_scores(key, c, nets, n=10_000):
    """S_P and S_L of Table 1, functions of (x, σ): a method's posterior and likelihood score of class c.

    `key` may also be a loss (Table A3). `n` is the number of points behind the oracle.
    """
    if key == "e":
        points, labels = moons(n)
        of_class = points[labels == c]
        return (lambda x, sigma: oracle_score(x, of_class, sigma),
                lambda x, sigma: oracle_score(x, of_class, sigma) - oracle_score(x, points, sigma))
    if key == "c":
        return posterior_score(nets.load(f"c{c + 1}")), None
    _, loss, alpha, renormalize = METHODS.get(key, (None, key, 1, False))
    classifier = nets.load(loss)

    def S_L(x, sigma):
        return likelihood_score(classifier, x, sigma, torch.full_like(sigma, c).long(), alpha, renormalize)

    return posterior_score(nets.load("score"), classifier, c, alpha, renormalize), S_L


def score_errors(key, nets):
    """E[D_P] and E[D_L] (Eq. 7) of both classes: the mean distance to the oracle's scores over the grid."""
    x, sigma = GRID.to(nets.device), LEVEL.to(nets.device)
    errors = dict(D_P=[], D_L=[])
    for c in (0, 1):
        for name, score, truth in zip(errors, method_scores(key, c, nets), method_scores("e", c, nets)):
            distance = (score(x, sigma) - truth(x, sigma)).norm(dim=1).mean().item() if score else None
            errors[name].append(distance)
    return errors


def make_parser():
    parser = Parser(__doc__)
    parser.flag("--preset", "fast", "fast (minutes) or paper (the authors', hours)", choices=list(PRESETS))
    parser.flag("--seeds", 1, "number of trainings: seeds SEED, SEED + 1, ...", bounded(int, 1, 1000))
    parser.flag("--seed", 0, "random seed", bounded(int, 0, 2**62))
    parser.flag("--steps", None, "steps of each network (default: the preset's)", bounded(int, 1, 10**9))
    parser.flag("--batch", None, "points per step (default: the preset's)", bounded(int, 1, 10**6))
    parser.flag("--samples", None, "samples per class (default: the preset's)", bounded(int, 10, 10**6))
    parser.flag("--out", "runs/moons", "folder to write to")
    parser.flag("--device", "cpu", "cpu (the fastest: one process per core), cuda, cuda:1, mps, auto")
    parser.flag("--restart", False, "start over instead of continuing")
    return parser


def main():
    args = make_parser().parse_args()
    if WORLD > 1:
        raise UserError("torchrun: the moons take one process per core by themselves; start them with python")
    device, begun = str(set_up(args)), time.monotonic()
    preset = from_preset(args, PRESETS)
    out, joins = pathlib.Path(args.out), preset["joins"]
    seeds = range(args.seed, args.seed + args.seeds)
    runs = [Nets(out, join, seed, device) for seed in seeds for join in joins]
    with lock(out / "table.json"), worker_pool() if device == "cpu" else contextlib.nullcontext() as pool:
        for names in (("score", "c1", "c2", "ce"), ("total", "dlsm")):  # these two need "score"
            tasks = [(nets, name, preset, args.restart) for name in names for nets in runs]
            say(f"{', '.join(names)}: {len(tasks)} networks, {preset['steps']} steps each")
            in_parallel(pool, train, tasks, "network")
        tasks = [(key, nets, preset["samples"]) for key in reversed(METHODS) for nets in runs]
        say(f"sampling: {len(tasks)} sets of {preset['samples']} points per class")
        measured = {task[:2]: result for task, result in zip(tasks, in_parallel(pool, measure, tasks, "set"))}
    table = {}
    for join in joins:
        group = [nets for nets in runs if nets.join == join]
        methods = {key: over_seeds([measured[key, nets][0] for nets in group]) for key in METHODS}
        losses = {key: over_seeds([score_errors(key, nets) for nets in group]) for key in LOSSES}
        table[join] = dict(methods=methods, losses=losses)
        where = "last layer, as in the paper [its values]" if join == "late" else "first layer"
        print_table(f"Table 1, {join}: sigma meets x in the {where}", methods, join == "late")
        print_table(f"Table A3, {join}: the loss of the classifier", losses, join == "late")
        name = "figure1.png" if join == "late" else f"figure1-{join}.png"
        paint_figure1(out / name, group[0], {key: measured[key, group[0]][1] for key in METHODS})
    table["settings"] = dict(
        preset, preset=args.preset, seeds=list(seeds), sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX, sigma=SIGMA,
        power=POWER, lam=LAMBDA, k=NEIGHBOURS, sampler=f"pc, {PC_STEPS} steps from N(0, 10^2)", device=device,
        torch=torch.__version__)
    write_whole(out / "table.json", json.dumps(table, indent=1).encode())
    paint_figure5(out / "figure5.png", runs, joins)
    paint_figureA1(out / "figureA1.png")
    minutes = (time.monotonic() - begun) / 60
    say(f"\n{out}/: table.json, figure1.png, figure5.png, figureA1.png ({minutes:.1f} minutes)")


# ------------------------------------------------------------ 2. what it needs: training, tables, figures


def train(nets, name, preset, restart=False):
    """Trains one network of `nets`, or continues it."""
    points, labels = moons()
    if name in ("c1", "c2"):
        of_class = labels == int(name[1]) - 1
        points, labels = points[of_class], labels[of_class]
    score_net = nets.load("score") if name in ("dlsm", "total") else None
    torch.manual_seed(derive_seed(nets.seed, name))
    net = ToyNet(2, WIDTHS, nets.join, preset["scaled"]).to(nets.device)

    def batch(generator, step, count=preset["batch"]):
        i = torch.randint(len(points), (count,), generator=generator)
        sigma, z = sample_noise(generator, (count, 2), SIGMA_MIN, SIGMA_MAX)
        return points[i], sigma, labels[i], z

    def loss(x, sigma, y, z):
        if name == "ce":
            return ce_loss(net, x, sigma, y, z)
        if name == "dlsm":
            return dlsm_loss(net, score_net, x, sigma, y, z, POWER, reduce="mean")
        if name == "total":
            return total_loss(net, score_net, x, sigma, y, z, LAMBDA, POWER, reduce="mean")
        return dsm_loss(net, x, sigma, z, POWER)

    grid, level = GRID.to(nets.device), LEVEL.to(nets.device)
    truths = [method_scores("e", c, nets)[1](grid, level) for c in (0, 1)]
    fixed = [v.to(nets.device) for v in batch(torch.Generator().manual_seed(0), 0, 5_000)]

    def inspect(step, ema):  # for Figure 5: mean D_L at σ = 7.5, cross-entropy of fixed points at all σ
        scores = [likelihood_score(net, grid, level, torch.full_like(level, c).long()) for c in (0, 1)]
        D_L = [(score - truth).norm(dim=1).mean().item() for score, truth in zip(scores, truths)]
        with torch.no_grad():
            return dict(D_L=sum(D_L) / 2, cross_entropy=ce_loss(net, *fixed).item())

    kind, lr = ("classifier", preset["lr_classifier"]) if name in LOSSES else ("score", preset["lr"])
    settings = dict(data="moons", name=name, join=nets.join, seed=nets.seed, lr=lr, sigma_min=SIGMA_MIN,
                    sigma_max=SIGMA_MAX, power=POWER, lam=LAMBDA,
                    **{key: preset[key] for key in ("scaled", "steps", "batch", "cosine")})
    plan = Plan(preset["steps"], lr, cosine=preset["cosine"], seed=derive_seed(nets.seed, name),
                inspect_every=max(1, preset["steps"] // 100))
    fit(net, batch, loss, nets.path(name), kind, settings, plan, nets.device,
        inspect if kind == "classifier" else None, restart)


def measure(key, nets, count):
    """A row of Table 1, each number for c1 and c2, and samples of both classes at σ = 7.5 for Figure 1."""
    row, samples = score_errors(key, nets), []
    points, labels = moons()
    sigmas = sigma_at(torch.linspace(1, 0, PC_STEPS + 1), SIGMA, SIGMA_MAX)
    for c in (0, 1):
        generator = torch.Generator().manual_seed(derive_seed(nets.seed, "samples", c))  # for all methods

        def noise(x):
            return torch.randn(x.shape, generator=generator).to(x)

        real = points[labels == c]
        real = real[torch.randint(len(real), (count,), generator=generator)]
        real = real + SIGMA * noise(real)
        S_P, _ = method_scores(key, c, nets, n=2_000)  # points 0.06 apart are dense enough for σ = 7.5
        fake = pc_sampler(S_P, SIGMA_MAX * noise(real.to(nets.device)), sigmas, noise=noise).cpu()
        for name, value in prdc(real, fake, k=NEIGHBOURS).items():
            row.setdefault(name, []).append(value)
        samples.append(fake[:1500].tolist())
    return row, samples


def over_seeds(rows):
    """The mean of rows, one per seed, and the standard deviation of several as NAME_std; None stays None."""
    summary = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows], float)  # None becomes NaN
        summary[name] = None if np.isnan(values).any() else values.mean(0).tolist()
        if len(rows) > 1:
            summary[f"{name}_std"] = summary[name] and values.std(0, ddof=1).tolist()
    return summary


def print_table(title, rows, with_paper):
    """Two lines per method or loss, for c1 and c2; what the paper has [in brackets]."""
    columns = [name for name in rows[min(rows)] if not name.endswith("_std")]
    lines = [["", "", *(f"E[{name}]" if name in ("D_P", "D_L") else name for name in columns)]]
    for (key, row), c in itertools.product(rows.items(), (0, 1)):
        line = [LOSSES[key] if key in LOSSES else METHODS[key][0], f"c{c + 1}"]
        for name in columns:
            cell = "-" if row[name] is None else f"{row[name][c]:.3f}"
            if row.get(f"{name}_std"):
                cell += f" ± {row[f'{name}_std'][c]:.3f}"
            if with_paper and name in PAPER.get(key, {}):
                cell += f" [{PAPER[key][name][c]:.{3 if name in ('D_P', 'D_L') else 2}f}]"
            line.append(cell)
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    say("\n".join(["", title, *("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)]))


def paint_figure1(path, nets, samples):
    """Posterior scores of c1 and c2 at σ = 7.5, shaded where they err, and samples; one column per method."""
    K, W, H, left, top = 11, 84, 53, 270, 132  # three times as large as the file: K pixels per unit of x
    keys = [key for key in METHODS if key != "renorm"]
    picture = Image.new("RGB", (left + len(keys) * (K * W + 30), top + 3 * (K * H + 30) + 102), "white")
    pen, font = ImageDraw.Draw(picture, "RGBA"), ImageFont.load_default(60)
    grid, level, (points, labels) = GRID.to(nets.device), LEVEL.to(nets.device), moons(400)
    for row, (column, key) in itertools.product(range(3), enumerate(keys)):
        x0, y0 = left + column * (K * W + 30), top + row * (K * H + 30)

        def pixels(points):
            return [(x0 + K * (W / 2 + x), y0 + K * (H / 2 - y)) for x, y in points]

        if row < 2:
            score, truth = (method_scores(k, row, nets)[0](grid, level).cpu() for k in (key, "e"))
            shade = (255 - 300 * (score - truth).norm(dim=1).clamp(max=0.5)).byte().view(35, 35).flip(0)
            shade = torch.stack([torch.full_like(shade, 255), shade, shade], 2).numpy()
            picture.paste(Image.fromarray(shade).resize((K * W, K * H), Image.Resampling.BICUBIC), (x0, y0))
            pen.line(pixels(points[labels == row]), ("#9cc3e2", "#f2c08a")[row], 21, joint="curve")
            middle, along = (v.view(35, 35, 2)[2::3, 1::2].reshape(-1, 2) for v in (GRID, score))
            length = along.norm(dim=1, keepdim=True)
            half = along / length * (2.3 * (length / 0.3).tanh()).clamp(min=0.6)  # long ones are cut
            across = along.flip(1) / length * torch.tensor([-0.5, 0.5])
            for arrow in zip(*map(pixels, (middle - half + across, middle + half, middle - half - across))):
                pen.polygon(arrow, "#222222")
        else:
            for c in (0, 1):
                for x, y in pixels(samples[key][c]):
                    if x0 < x < x0 + K * W and y0 < y < y0 + K * H:
                        pen.ellipse([x - 4.5, y - 4.5, x + 4.5, y + 4.5], COLOURS[c] + "90")
                pen.line(pixels(points[labels == c]), "#333333", 6, joint="curve")
        pen.rectangle([x0, y0, x0 + K * W, y0 + K * H], outline="#555555", width=3)
        pen.text((x0 + K * W / 2, 66), METHODS[key][0], "black", font, anchor="mm")
        text = ("scores\nof c1", "scores\nof c2", "samples")[row]
        pen.text((left / 2, y0 + K * H / 2), text, "black", font, anchor="mm", align="center")
    note = "84 x 53 units, sigma = 7.5. Red: distance to the oracle score, full at 0.5. Lines: the data."
    pen.text((left, picture.height - 60), note, "#444444", font, anchor="lm")
    write_whole(path, lambda file: picture.reduce(3).save(file, "PNG", optimize=True))


def paint_figure5(path, runs, joins):
    """Score error and cross-entropy during training: the mean over seeds, its 95% interval (Student's t)."""
    import scipy.stats  # takes a second to load
    panels = []
    for join, column in itertools.product(joins, ("D_L", "cross_entropy")):
        lines = []
        for name in LOSSES:
            logs = [json.loads(load_checkpoint(nets.path(name))["log"]) for nets in runs if nets.join == join]
            steps = [record["step"] for record in logs[0] if column in record]
            values = np.array([[record[column] for record in log if column in record] for log in logs])
            mean, band = values.mean(0), []
            if len(logs) > 1:
                error = scipy.stats.sem(values) * scipy.stats.t.ppf(0.975, len(logs) - 1)
                band = [mean - error, mean + error]
            lines.append((LOSSES[name], steps, mean, *band))
        y = "mean D_L at sigma = 7.5" if column == "D_L" else "cross entropy, all sigma"
        panels.append(dict(title=f"{join}: {y}", x="training step", lines=lines, log_y=column != "D_L"))
    chart(path, panels, columns=2)


def paint_figureA1(path):
    """N(∓1.5, 1.5²), equally likely, and p(x) softmax(α log p(y|x)), re-normalised (Eqs. A1, A2)."""
    x = torch.linspace(-8, 8, 801, dtype=torch.float64)
    log_p = torch.stack([torch.distributions.Normal(mean, 1.5).log_prob(x) for mean in (-1.5, 1.5)])
    prior, panels = log_p.exp().mean(0), []
    names = "p(x)", "p(x|y1)", "p(x|y2)", "re-normalised p(x|y1)", "re-normalised p(x|y2)"
    for alpha in (0.2, 1.0, 5.0):
        q = torch.softmax(alpha * torch.log_softmax(log_p, 0), 0) * prior
        q = q / torch.trapezoid(q, x)[:, None]
        lines = [(name, x, density) for name, density in zip(names, (prior, *log_p.exp(), *q))]
        panels.append(dict(title=f"alpha = {alpha:g}", x="x", y="density", lines=lines, y_range=(0, 0.55)))
    chart(path, panels, columns=3)


# ------------------------------------------------------------ 3. machinery: worker processes


@contextlib.contextmanager
def worker_pool():
    """One process per core, of one thread each, since these matrices are small."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(16, cores), spawn, start_worker) as pool:
        try:
            yield pool
        except BaseException:
            # Upon SIGTERM `fit` saves. It is sent until they are gone: one in its last step takes a new task.
            while workers := multiprocessing.active_children():
                for worker in workers:
                    worker.terminate()
                time.sleep(0.1)
            raise


def in_parallel(pool, job, tasks, unit):
    """The results of job(*task), in the order of the tasks; without a pool they are computed here."""
    if pool is None:
        return [job(*task) for task in tasks]
    # Workers inherit the blocked SIGINT: a Ctrl-C in the terminal reaches this process alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    futures = [pool.submit(job, *task) for task in tasks]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    progress = Progress(len(tasks), 0, unit)
    for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
        future.result()  # or its error
        progress(done)
    return [future.result() for future in futures]


def start_worker():
    """A worker is silent, since the parent speaks for all, and ends with it, even if that is killed."""
    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    sys.exit = os._exit  # where `fit` has saved upon a signal, not only this task ends, but the process
    threading.Thread(target=end_with_parent, daemon=True).start()


if __name__ == "__main__":
    run(main)
