"""Stage 2: trains the noise-conditioned classifier p(y|x̃, σ) with cross-entropy, DLSM' or both.

    python train_classifier.py --loss total --lam 1     # after train_score.py
    python train_classifier.py --diagnose               # the score mismatch of a run's classifiers

In runs/RUN/ it reads score.pt, writes classifier-LOSS.pt and its log, or diagnose.json and .png.
"""
import json
import math
import pathlib
import shlex

import numpy as np
import torch
import torch.nn.functional as F

from models import (ExactScore, NCSNpp, NoisyResNet, UserError, append_dims, checksum, load_model, sigma_at,
                    write_whole)
from train_score import (CLIP, RANK, WORLD, Parser, Plan, bounded, derive_seed, fit, from_preset,
                         image_batches, introduce, load_images, lock, network_call, run, run_folder, say,
                         set_up, shared_flags)

# ------------------------------------------------------------ 1. the story: likelihood score matching

PRESETS = {  # reduce: DLSM' as the mean over pixels, or as their sum, beside λ times the cross-entropy
    # What the authors ran (Appendix A.6.3, their code): ResNet-18, -34 for 100 classes, no flips, no EMA. The
    # batch is as printed, the release has 150; with 100 classes it warms up over 1,000 steps, and so do we.
    "paper": dict(depth=18, width=64, norm="batch", scaled=False, act="relu", lam=1.0, power=0.0,
                  reduce="mean", steps=60_000, batch=100, lr=2e-4, cosine=False, save_every=5_000),
}
# One GPU, hours: the same network, its input scaled, smooth; the learning rate decays; DLSM' weighs as the
# divergence that it is (see `explained_nats`).
PRESETS["lite"] = dict(PRESETS["paper"], scaled=True, act="silu", power=2.0, reduce="sum", cosine=True)
# A CPU, minutes.
PRESETS["tiny"] = dict(PRESETS["lite"], width=16, steps=2_000, lr=1e-3, save_every=1_000)
WEIGHTS = {"ce": [], "dlsm": ["power", "reduce"], "total": ["power", "reduce", "lam"]}  # what a loss heeds


def likelihood_score(classifier, x, sigma, y, alpha=1.0, renormalize=False, create_graph=False):
    """α ∇ₓ log p(y|x, σ); with `renormalize` Eq. A1: ∇ₓ log softmax(α log p)_y = α ∇ log p − ∇ log Z(x).

    The one place where this gradient is taken: DLSM' wants its graph, guidance does not. `classifier(x, σ)`
    gives logits (B, classes), y is (B,), α a number or (B,).
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        log_p = F.log_softmax(classifier(x, sigma), 1)
        if renormalize:
            log_p = F.log_softmax(append_dims(alpha, log_p) * log_p, 1)
        score, = torch.autograd.grad(log_p.gather(1, y[:, None]).sum(), x, create_graph=create_graph)
    return score if renormalize else append_dims(alpha, x) * score


def ce_loss(classifier, x, sigma, y, z):
    """L_CE (Eq. A5 with λ_CE = 1): −log p(y|x̃, σ), x̃ = x + σz; mean over the batch."""
    return F.cross_entropy(classifier(x + append_dims(sigma, x) * z, sigma), y)


def dlsm_loss(classifier, score_net, x, sigma, y, z, power=0, reduce="mean"):
    """L_DLSM' (Eqs. 10, A4): ½ σ^power ‖∇ log p(y|x̃) + s(x̃, σ) − ∇ log p_σ(x̃|x)‖², x̃ = x + σz.

    `reduce` is "mean" (the release) or "sum" (as printed) over coordinates; mean over the batch. λ_DLSM = 1
    is power 0, on CIFAR; on the moons the paper prints 1/σ⁴ and its code multiplies by σ⁴. With an exact
    score in place of s it is L_DLSM (Eq. 9).
    """
    s = append_dims(sigma, x)
    noisy = x + s * z
    with torch.no_grad():
        prior = score_net(noisy, sigma)
    likelihood = likelihood_score(classifier, noisy, sigma, y, create_graph=True)
    kernel = -z / s  # ∇ log p_σ(x̃|x)
    square = (likelihood + prior - kernel).square().flatten(1)
    square = square.mean(1) if reduce == "mean" else square.sum(1)
    return 0.5 * (sigma**power * square).mean()


def total_loss(classifier, score_net, x, sigma, y, z, lam=1.0, power=0, reduce="mean"):
    """L_Total (Eq. 11): L_DLSM' + λ L_CE; one forward pass of the classifier serves both terms."""
    classifier, logits = recorded(classifier)
    dlsm = dlsm_loss(classifier, score_net, x, sigma, y, z, power, reduce)
    return dlsm + lam * F.cross_entropy(logits[0], y)


def recorded(classifier):
    """→ the classifier, and the list of the logits that it gives."""
    logits = []

    def call(x, sigma):
        logits.append(classifier(x, sigma))
        return logits[-1]

    return call, logits


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, PRESETS)
    parser.group("the classifier")
    parser.flag("--loss", "total", "ce (base), dlsm or total (L_DLSM' + λ L_CE)", choices=list(WEIGHTS))
    parser.flag("--lam", None, "λ, the weight of the cross-entropy in L_Total", bounded(float, 0, 1e6))
    parser.flag("--power", None, "DLSM' is weighted with σ^POWER (paper: 0)", bounded(float, -4, 4))
    parser.flag("--reduce", None, "DLSM' as mean (paper) or sum over the pixels", choices=["mean", "sum"])
    parser.flag("--norm", None, "normalisation: batch (paper) or group", choices=["batch", "group"])
    parser.flag("--act", None, "activation: relu (paper) or silu, which is smooth", choices=["relu", "silu"])
    parser.flag("--raw", False, "the classifier sees x̃ as it is (paper), not divided by its deviation")
    parser.flag("--depth", None, "ResNet-18 or -34 (paper: 34 for 100 classes)", int, choices=[18, 34])
    parser.flag("--score", None, "score checkpoint, ours or the authors' (default: runs/RUN/score.pt)")
    parser.flag("--compile", False, "torch.compile the score network and, with --loss ce, the classifier")
    parser.group("diagnosis")
    parser.flag("--diagnose", False, "no training: the score mismatch of all classifiers of this run")
    parser.flag("--truth", None, "an exact score (train_score.py --preset exact): D_P and D_L of Table 1")
    parser.flag("--diagnose-n", 2000, "images per noise level; in training an eighth", bounded(int, 8, 10**6))
    parser.flag("--diagnose-every", 5000, "steps between diagnoses in training", bounded(int, 1, 10**9))
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    if args.diagnose:
        parser.refuse(args, "with --diagnose, which takes all classifiers of the run", "loss", "tag")
    parser.refuse(args, f"with --loss {args.loss}", *set(WEIGHTS["total"]) - set(WEIGHTS[args.loss]))
    device, folder, preset = set_up(args), run_folder(args), from_preset(args, PRESETS)
    score_path = args.score or folder / "score.pt"
    score_net = load_image_model(score_path, device, "score", "train_score.py", args)
    exact, about = isinstance(score_net, ExactScore), score_net.about
    truth = score_net if exact else None
    if args.truth:
        truth = load_image_model(args.truth, device, "score", "train_score.py --preset exact", args)
    sigmas = about["settings"]["sigma_min"], about["settings"]["sigma_max"]
    images, labels, names = load_images(args.data, "train", args.size, args.root)
    data_sha, channels, size = checksum([images, labels])[:16], images.shape[1], images.shape[3]
    wanted = score_net.config["channels"], score_net.config["image_size"]
    if (channels, size) != wanted:
        raise UserError(f"--data {args.data}: has images of (channels, size) {channels, size}, the score "
                        f"model is for {wanted}; see --size")
    if truth and (not isinstance(truth, ExactScore) or truth.about["settings"].get("data_sha") != data_sha):
        which = f"--truth {args.truth}" if args.truth else score_path
        raise UserError(f"{which}: is no exact score of these training images; train_score.py --preset exact "
                        "makes it")
    warn_of_other_data(score_path, score_net, data_sha)
    if truth:  # Theorem 1 speaks of p_σ of the data of the exact score: the training images, at random
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        held, held_labels = images[order], labels[order]
    else:
        held, held_labels, _ = load_images(args.data, "test", args.size, args.root)
    if args.diagnose:
        if RANK == 0:
            with lock(folder / "diagnose.json"):
                some = held[: args.diagnose_n], held_labels[: args.diagnose_n]
                diagnose_run(folder, score_net, *some, sigmas, names, data_sha, device, truth)
        return

    if args.preset == "paper" and args.depth is None and len(names) == 100:
        preset["depth"] = 34
    if args.raw:
        preset["scaled"] = False
    torch.manual_seed(derive_seed(args.seed, "weights"))
    shape = {key: preset[key] for key in ("depth", "width", "norm", "scaled", "act")}
    net = NoisyResNet(classes=len(names), channels=channels, **shape).to(device)
    settings = dict(data=args.data, data_sha=data_sha, classes=names, size=size,
                    sigma_min=sigmas[0], sigma_max=sigmas[1], loss=args.loss, seed=args.seed, amp=args.amp,
                    config=net.config, **{key: preset[key] for key in ("batch", "lr", "cosine")})
    weights = {key: preset[key] for key in WEIGHTS[args.loss]}
    if weights:
        settings.update(weights, score_sha=about["sha"])
    path = folder / f"classifier-{args.loss}{args.tag or ''}.pt"
    introduce(path, net, images, labels, names, device)
    if WORLD > 1 and preset["norm"] == "batch":
        say(f"warning: BatchNorm sees a process's {preset['batch'] // WORLD} images; --norm group sees none")
    score_call = network_call(score_net, args.amp and not exact, args.compile and not exact, device)
    classifier_call = network_call(net, False, args.compile and args.loss == "ce", device)
    # Divided by the d pixels of a sum: Adam does not mind, and the clip at norm 1 acts as it does on a mean.
    scale = 1 / images[0].numel() if preset["reduce"] == "sum" else 1.0

    def loss(x, sigma, y, z):
        if args.loss == "ce":
            return ce_loss(classifier_call, x, sigma, y, z)
        score_matching = dlsm_loss if args.loss == "dlsm" else total_loss
        return scale * score_matching(net, score_call, x, sigma, y, z, **weights)

    from sample import draw_curve  # here, since that file imports this one

    def inspect(step, ema):
        draw_curve(path)
        net.eval()
        few = max(args.diagnose_n // 8, 2)  # a standard error needs two
        table = diagnose(net, score_call, held[:few], held_labels[:few], *sigmas, device=device, truth=truth)
        nats, error = explained_nats(table, *sigmas)
        accuracies = ", ".join(f"{row['sigma']:.2g}: {row['accuracy']:.2f}" for row in table[1::2])
        say(f"\nstep {step}: explains {nats:.2f} ± {error:.2f} of {math.log(len(names)):.2f} nats; "
            f"accuracy at σ = {accuracies}")
        return dict(nats=nats, nats_se=error, diagnosis=table)

    plan = Plan(preset["steps"], preset["lr"], 1000 if len(names) == 100 else 0, preset["cosine"], CLIP,
                seed=args.seed, save_every=preset["save_every"], inspect_every=args.diagnose_every)
    batch = image_batches(images, labels, preset["batch"], args.seed, *sigmas, flip=False)
    fit(net, batch, loss, path, "classifier", settings, plan, device, inspect, args.restart)
    draw_curve(path)


# ------------------------------------------------------------ 2. what it needs: the diagnosis


@torch.no_grad()
def diagnose(classifier, score_net, images, labels, sigma_min, sigma_max, device="cpu", truth=None, bins=10):
    """Accuracy, cross-entropy and the score mismatch in bins over log σ; the same noise for every classifier.

    With g = ∇ log p(y|x̃), s the prior score and t = −z/σ: gain = σ² E[‖s − t‖² − ‖g + s − t‖²], norms over
    all pixels. For an exact s it is σ² (E‖h‖² − E‖g − h‖²), h the true likelihood score (Theorem 1): larger
    is better, below 0 guidance harms. α* = E⟨g, t − s⟩ / E‖g‖² is the scale that minimises the mismatch, 1
    for a perfect classifier. A conditional score model is taken as g = s(x̃, σ, y) − s(x̃, σ).
    `truth`, an ExactScore, knows h: E‖h‖, σ² E‖h‖² (h_nats), and the distances D_P and D_L (Eq. 7).
    → one dict per bin; `_se` are standard errors
    """
    table = []
    for b in range(bins):
        generator, rows = torch.Generator().manual_seed(b), []
        for x, y in zip(images.split(100), labels.split(100)):
            t = (b + torch.rand(len(x), generator=generator)) / bins
            sigma = sigma_at(t, sigma_min, sigma_max).to(device)
            z = torch.randn(x.shape, generator=generator).to(device)
            x, y = x.to(device).float() / 255, y.to(device)
            s = append_dims(sigma, x)
            noisy = x + s * z
            prior, row = score_net(noisy, sigma), {}
            if isinstance(classifier, NCSNpp):
                g = classifier(noisy, sigma, y) - classifier(noisy, sigma)
            else:
                call, logits = recorded(classifier)
                g = likelihood_score(call, noisy, sigma, y)
                row["accuracy"] = (logits[0].argmax(1) == y).float()
                row["ce"] = F.cross_entropy(logits[0], y, reduction="none")
            residual = -z / s - prior  # t − s
            inner, square = (sigma**2 * (g * v).flatten(1).sum(1) for v in (residual, g))
            row.update(gain=2 * inner - square, inner=inner, square=square)
            if truth:
                posterior = truth(noisy, sigma, y)
                h = posterior - (prior if truth is score_net else truth(noisy, sigma))
                row["h_nats"] = sigma**2 * h.flatten(1).square().sum(1)
                for key, vector in (("h", h), ("D_P", g + prior - posterior), ("D_L", g - h)):
                    row[key] = vector.flatten(1).norm(dim=1)
            rows.append({key: value.detach().cpu().double() for key, value in row.items()})
        values = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        root = len(values["gain"]) ** 0.5
        inner, square = values.pop("inner"), values.pop("square")
        alpha = (inner.mean() / square.mean()).item() if square.mean() > 1e-12 else 0.0
        alpha_se = (inner - alpha * square).std() / root / square.mean().clamp(min=1e-30)  # of a ratio
        middle = sigma_at((b + 0.5) / bins, sigma_min, sigma_max)
        line = dict(sigma=middle, n=len(images), alpha=alpha, alpha_se=alpha_se.item())
        for key, value in values.items():
            line.update({key: value.mean().item(), f"{key}_se": value.std().item() / root})
        table.append(line)
    return table


def explained_nats(table, sigma_min, sigma_max, key="gain"):
    """∫ gain d log σ over all noise levels, in nats, and its standard error: the class information in g.

    With exact scores it is at most what x has of it, I(x; y) ≤ log(classes) (I-MMSE: σ² E‖h‖² is the slope of
    H(y|x̃) over log σ). What g lacks of that is the divergence of the guided diffusion from that of the
    true posterior (Girsanov); so a sample is of its class with probability ≥ exp(−lack) (data processing).
    """
    width = math.log(sigma_max / sigma_min) / len(table)
    return width * sum(r[key] for r in table), width * math.hypot(*(r[f"{key}_se"] for r in table))


def diagnose_run(folder, score_net, images, labels, sigmas, names, data_sha, device, truth):
    """The diagnosis of every classifier of a run: a table on stdout, diagnose.json, diagnose.png."""
    from sample import chart
    titles = dict(accuracy="Accuracy", ce="Cross-entropy", alpha="Best guidance scale (1 is right)",
                  gain="Gain of the likelihood score (larger is better)")
    tables, weights, lines = {}, {}, {key: [] for key in titles}
    print(f"\n{len(images)} images per noise level; ± is the standard error; in brackets: relative to h")
    for file in sorted(folder.glob("classifier-*.pt")) + sorted(folder.glob("score*.pt")):
        net = load_model(file, device)
        if not isinstance(net, NoisyResNet) and "classes" not in net.config:
            continue
        warn_of_other_data(file, net, data_sha)
        if net.config["classes"] != len(names):
            raise UserError(f"{file}: is for {net.config['classes']} classes, the data have {len(names)}")
        table = diagnose(net, score_net, images, labels, *sigmas, device=device, truth=truth)
        tables[file.stem], weights[file.stem] = table, checksum(net.state_dict())[:16]
        print_diagnosis(file.stem, table, *explained_nats(table, *sigmas), math.log(len(names)))
        level = np.array([row["sigma"] for row in table])
        for key in titles.keys() & table[0].keys():  # with a band of two standard errors
            value, error = (np.array([row[k] for row in table]) for k in (key, f"{key}_se"))
            name = file.stem.removeprefix("classifier-")
            lines[key].append((name, level, value, value - 2 * error, value + 2 * error))
    if not tables:
        raise UserError(f"{folder}: has no classifier-*.pt; python train_classifier.py --loss ce makes one")
    if len(tables) > 8:
        say(f"\n{folder}/diagnose.png shows the first eight only")
    content = dict(**tables, weights=weights, prior=score_net.about["sha"])
    write_whole(folder / "diagnose.json", json.dumps(content, indent=1).encode())
    chart(folder / "diagnose.png", columns=2, panels=[
        dict(title=title, x="noise level sigma", y=key, log_x=True, lines=lines[key][:8])
        for key, title in titles.items() if lines[key]])
    print(f"\n{folder}/diagnose.json and diagnose.png")


def print_diagnosis(name, table, nats, error, total):
    keys = [key for key in ("accuracy", "ce", "gain", "alpha", "h", "D_P", "D_L") if key in table[0]]
    print(f"\n{name}\n\n| σ | {' | '.join(keys)} |\n{'| --- ' * (len(keys) + 1)}|")
    for row in table:
        cells = [f"{row['sigma']:.3g}"]
        for key in keys:
            relative = ""
            if key in ("D_P", "D_L") and row["h"] > 1e-3:
                relative = f" ({row[key] / row['h']:.2g})"
            cells.append(f"{row[key]:.3g} ± {row[f'{key}_se']:.1g}{relative}")
        print(f"| {' | '.join(cells)} |")
    print(f"\n{nats:.3f} ± {error:.3f} of {total:.3f} nats; with exact scores at least "
          f"{math.exp(min(nats - total, 0)):.2f} of the samples are then of their class")


# ------------------------------------------------------------ 3. machinery: finding models

BUNDLED = pathlib.Path(__file__).parent / "docs" / "pretrained"


def load_image_model(path, device, kind, maker, args):
    """load_model for the networks of images; says which file it is or, where there is none, what to do."""
    path = pathlib.Path(path)
    if not path.exists():
        if path in [pathlib.Path(getattr(args, key, None) or "") for key in ("score", "classifier", "truth")]:
            raise UserError(f"{path}: no such file")
        given = {key: getattr(args, key) for key in ("data", "size", "run") if getattr(args, key)}
        maker += "".join(f" --{key} {shlex.quote(str(value))}" for key, value in given.items())
        runs = ", ".join(str(p.parent) for p in pathlib.Path("runs").glob("*/score.pt")) or "no runs"
        bundled = shlex.quote(str(BUNDLED / "fashion-16"))
        raise UserError(f"{path}: no such {kind}; python {maker} makes it, --{kind} FILE names another; "
                        f"there are {runs} (--run); bundled weights: python sample.py --run {bundled}")
    net = load_model(path, device, kind)
    if not isinstance(net, (NCSNpp, ExactScore) if kind == "score" else NoisyResNet):
        raise UserError(f"{path}: is a {kind} checkpoint of {type(net).__name__}, but not one for images")
    net.about["sha"] = checksum(net.state_dict())[:16]
    step, planned = net.about["step"], net.about["settings"].get("steps") or 0
    warning = f"; warning: it was to be {planned}" if step and step < planned else ""
    say(f"{path}: {kind} {net.about['sha'][:8]}, step {step}{warning}")
    return net


def warn_of_other_data(path, net, data_sha):
    """A classifier may well have other labels than the score model, or fewer images; but not unnoticed."""
    if data_sha and net.about["settings"].get("data_sha", data_sha) != data_sha:
        say(f"warning: {path} was trained on other images or labels: {net.about['settings']['data']}")


if __name__ == "__main__":
    run(main)
