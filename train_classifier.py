"""Stage 2: trains the noise-conditioned classifier p(y|x̃, σ) with cross-entropy, DLSM' or both, on a frozen score model.

    python train_classifier.py --loss total --lam 1       # after train_score.py

    python train_classifier.py --diagnose                 # the score mismatch of all classifiers of a run, per noise level

Reads runs/RUN/score.pt, writes runs/RUN/classifier-LOSS.pt with its log and its loss curve; --diagnose writes
runs/RUN/diagnose.json (with the best guidance scale at each noise level, for sample.py --alpha auto) and diagnose.png.
"""
import json
import math
import pathlib

import torch
import torch.nn.functional as F

from models import NCSNpp, NoisyResNet, UserError, checksum, load_model, sigma_at, write_whole
from train_score import (Parser, fit, from_preset, image_draw, introduce, load_images, lock, mix, network_call, number, process, run, run_folder,
                         say, set_up, shared_flags, spread)

PRESETS = {  # `over`: DLSM' as the mean over pixels, or their sum, beside λ times the cross-entropy
    # What the authors ran (Appendix A.6.3 and their code): ResNet-18, -34 for 100 classes, no flips, no EMA.
    "paper": dict(depth=18, width=64, norm="batch", scaled=False, act="relu", lam=1.0, power=0.0, over="mean",
                  steps=60_000, batch=100, lr=2e-4, cosine=False),
    # One GPU, hours: the same network, its input scaled, smooth; its learning rate decays; DLSM' weighs as the divergence it is (see `carried`).
    "lite": dict(depth=18, width=64, norm="batch", scaled=True, act="silu", lam=1.0, power=2.0, over="sum",
                 steps=60_000, batch=100, lr=2e-4, cosine=True),
    # A CPU, minutes.
    "tiny": dict(depth=18, width=16, norm="batch", scaled=True, act="silu", lam=1.0, power=2.0, over="sum",
                 steps=2_000, batch=100, lr=1e-3, cosine=True),
}

# ---------------------------------------------------------------------------- method


def likelihood_score(classifier, x, sigma, y, alpha=1.0, renormalize=False, create_graph=False, with_log_p=False):
    """α ∇ₓ log p(y|x, σ), or with `renormalize` Eq. A1: ∇ₓ log softmax(α log p)_y = α ∇ log p − ∇ log Z(x).

    The one place where this gradient is taken: DLSM' wants its graph, guidance does not. α is a number or (B,).
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        log_p = F.log_softmax(classifier(x, sigma), 1)
        alpha = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
        log_q = F.log_softmax(alpha.view(-1, 1) * log_p, 1) if renormalize else log_p
        score, = torch.autograd.grad(log_q.gather(1, y[:, None]).sum(), x, create_graph=create_graph)
    if not renormalize:
        score = score * (spread(alpha, x) if alpha.ndim else alpha)
    return (score, log_p) if with_log_p else score


def ce_loss(classifier, x, sigma, y, z):
    """L_CE (Eq. A5 with λ_CE = 1): −log p(y|x̃, σ), x̃ = x + σz; mean over the batch."""
    return F.cross_entropy(classifier(x + spread(sigma, x) * z, sigma), y)


def dlsm_loss(classifier, score_net, x, sigma, y, z, power=0):
    """L_DLSM' (Eqs. 10, A4): ½ σ^power ‖∇ log p(y|x̃) + s(x̃, σ) + z/σ‖²; MEAN over coordinates and batch.

    The paper's λ_DLSM = 1 is power 0 on CIFAR; on the moons it prints 1/σ⁴ and its code multiplies by σ⁴.
    """
    return total_loss(classifier, score_net, x, sigma, y, z, lam=0.0, power=power)


def total_loss(classifier, score_net, x, sigma, y, z, lam=1.0, power=0):
    """L_Total (Eq. 11): L_DLSM' + λ L_CE; one forward pass of the classifier serves both terms."""
    s = spread(sigma, x)
    noisy = x + s * z
    with torch.no_grad():
        target = -score_net(noisy, sigma) - z / s
    g, log_p = likelihood_score(classifier, noisy, sigma, y, create_graph=True, with_log_p=True)
    dlsm = 0.5 * (sigma**power * (g - target).square().flatten(1).mean(1)).mean()
    return dlsm + lam * F.nll_loss(log_p, y)


def diagnose(classifier, score_net, images, labels, sigma_min, sigma_max, bins=10, batch=100, device="cpu"):
    """Accuracy, cross-entropy and the score mismatch on held-out images, in bins over log σ; the same noise for every classifier.

    With g = ∇ log p(y|x̃), s the prior score and t = −z/σ: gain = σ² E[‖s − t‖² − ‖g + s − t‖²], norms over all
    pixels. For an exact s it is σ² (E‖h‖² − E‖g − h‖²), h the true likelihood score (Theorem 1): larger is better, below
    0 guidance harms. α* = E⟨g, t − s⟩ / E‖g‖² is the scale that minimises the mismatch, 1 for a perfect classifier.
    → a dict a bin; `_se` are standard errors
    """
    table = []
    for b in range(bins):
        generator, rows = torch.Generator().manual_seed(b), []
        for x, y in zip(images.split(batch), labels.split(batch)):
            sigma = sigma_at((b + torch.rand(len(x), generator=generator)) / bins, sigma_min, sigma_max).to(device)
            z = torch.randn(x.shape, generator=generator).to(device)
            x, y = x.to(device).float() / 255, y.to(device)
            noisy = x + spread(sigma, x) * z
            with torch.no_grad():
                residual = -z / spread(sigma, x) - score_net(noisy, sigma)  # t − s
            g, log_p = likelihood_score(classifier, noisy, sigma, y, with_log_p=True)
            inner, square = (sigma**2 * (g * v).flatten(1).sum(1) for v in (residual, g))
            right, ce = (log_p.argmax(1) == y).float(), F.nll_loss(log_p, y, reduction="none")
            rows.append(torch.stack([right, ce, 2 * inner - square, inner, square], 1).detach().cpu())
        rows = torch.cat(rows).double()
        mean, se = rows.mean(0), rows.std(0) / len(rows) ** 0.5
        accuracy, ce, gain, inner, square = mean.tolist()
        alpha = inner / square if square > 0 else 0.0
        alpha_se = ((rows[:, 3] - alpha * rows[:, 4]).std() / len(rows) ** 0.5 / max(square, 1e-30)).item()  # of a ratio, to first order
        table.append(dict(
            sigma=sigma_at((b + 0.5) / bins, sigma_min, sigma_max), n=len(rows), accuracy=accuracy, accuracy_se=se[0].item(),
            ce=ce, ce_se=se[1].item(), gain=gain, gain_se=se[2].item(), alpha=alpha, alpha_se=alpha_se))
    return table


def carried(table, sigma_min, sigma_max):
    """The gain over all noise levels, ∫ gain d log σ, in nats, and its standard error: the class information that the guidance carries.

    With exact scores it is what x has of it, I(x; y) ≤ log(classes) (I-MMSE: σ² E‖h‖² is the slope of H(y|x̃) over log σ); what
    g lacks of that is the divergence of the guided diffusion's paths from those of the true posterior (Girsanov).
    """
    width = math.log(sigma_max / sigma_min) / len(table)
    return width * sum(r["gain"] for r in table), width * math.hypot(*(r["gain_se"] for r in table))


def load_image_model(path, device, kind):
    """load_model for the networks of images, with settings that name their noise levels."""
    net = load_model(path, device, kind)
    settings = net.about["settings"] if isinstance(net.about["settings"], dict) else {}
    low, high = (settings.get(key) for key in ("sigma_min", "sigma_max"))
    levels = isinstance(low, float) and isinstance(high, float) and 0 < low < high < math.inf
    if not levels or not isinstance(net, NCSNpp if kind == "score" else NoisyResNet):
        raise UserError(f"{path}: is a {kind} checkpoint of {type(net).__name__}, but not one for images")
    return net


def diagnose_run(folder, score_net, images, labels, device):
    """The diagnosis of every classifier of a run: a table on stdout, diagnose.json, diagnose.png."""
    from sample import chart
    settings = score_net.about["settings"]
    files = sorted(folder.glob("classifier-*.pt"))
    if not files:
        raise UserError(f"{folder}: has no classifier-*.pt; python train_classifier.py --loss ce makes one")
    tables, weights = {}, {}
    for file in files:
        say(f"{file} ...")
        classifier = load_image_model(file, device, "classifier")
        classes, weights[file.stem] = classifier.config["classes"], checksum(classifier.state_dict())[:16]
        tables[file.stem] = diagnose(classifier, score_net, images, labels, settings["sigma_min"], settings["sigma_max"], device=device)
    print(f"\n{len(images)} held-out images a noise level; ± is the standard error\n")
    print("| σ | " + " | ".join(f"{name.removeprefix('classifier-')}: accuracy, CE, gain, α*" for name in tables) + " |")
    print("| --- " * (len(tables) + 1) + "|")
    for rows in zip(*tables.values()):
        cells = ("{accuracy:.3f}, {ce:.3f}, {gain:.3f} ± {gain_se:.3f}, {alpha:.2f} ± {alpha_se:.2f}".format(**row) for row in rows)
        print(f"| {rows[0]['sigma']:.3g} | " + " | ".join(cells) + " |")
    sums = (carried(rows, settings["sigma_min"], settings["sigma_max"]) for rows in tables.values())
    print("| all, in nats | " + " | ".join(f"{nats:.3f} ± {se:.3f} of {math.log(classes):.3f}" for nats, se in sums) + " |")
    whole = dict(**tables, weights=weights)
    write_whole(folder / "diagnose.json", json.dumps(dict(**whole, checksum=checksum(whole)), indent=1).encode())
    titles = dict(accuracy="Accuracy", ce="Cross-entropy", gain="Gain of the likelihood score (larger is better)",
                  alpha="Best guidance scale (1 is right)")

    def line(name, rows, key):  # with a band of two standard errors
        points = ((r["sigma"], r[key], r[key] - 2 * r[f"{key}_se"], r[key] + 2 * r[f"{key}_se"]) for r in rows)
        return name.removeprefix("classifier-"), *zip(*points)

    chart(folder / "diagnose.png", [
        dict(title=title, x="noise level sigma", y=key, log_x=True, lines=[line(*item, key) for item in tables.items()])
        for key, title in titles.items()], columns=2)
    print(f"\n{folder}/diagnose.json and diagnose.png")


def make_parser():
    parser = Parser(__doc__)
    shared_flags(parser, PRESETS)
    parser.flag("--loss", "total", "ce (the base method), dlsm (DLSM' alone) or total (L_DLSM' + λ L_CE)", choices=["ce", "dlsm", "total"])
    parser.flag("--lam", None, "λ, the weight of the cross-entropy in L_Total, beside DLSM' summed over pixels (lite, tiny) or its mean "
                "(paper) (default: the preset's)", number(float, 0, 1e6))
    parser.flag("--power", None, "DLSM' is weighted with σ^POWER (default: the preset's; 0 is the paper's)", number(float, -4, 4))
    parser.flag("--norm", None, "normalisation: batch (the paper's) or group (default: the preset's)", choices=["batch", "group"])
    parser.flag("--act", None, "activation: relu (the paper's) or silu, which is smooth (default: the preset's)", choices=["relu", "silu"])
    parser.flag("--depth", None, "ResNet-18 or -34 (default: 18, the paper preset takes 34 for 100 classes)", int, choices=[18, 34])
    parser.flag("--score", None, "score checkpoint, ours or the authors' (default: runs/RUN/score.pt)")
    parser.flag("--compile", False, "torch.compile the classifier (--loss ce only)")
    parser.flag("--diagnose", False, "no training: the score mismatch of all classifiers of this run on held-out data")
    parser.flag("--diagnose-n", 2000, "held-out images a noise level in a diagnosis; an eighth of it while training", number(int, 8, 10**6))
    parser.flag("--diagnose-every", 5000, "steps between diagnoses on held-out data, logged to the .jsonl", number(int, 1, 10**9))
    return parser


def main():
    args = make_parser().parse_args()
    if args.compile and args.loss != "ce":
        raise UserError(f"--compile with --loss {args.loss}: torch.compile has no double backward, which DLSM' needs; leave it out")
    for flag, losses in (("lam", ["total"]), ("power", ["dlsm", "total"])):
        if getattr(args, flag) is not None and args.loss not in losses:
            raise UserError(f"--{flag} with --loss {args.loss}: has no effect there; leave it out, or choose --loss {losses[-1]}")
    device = set_up(args)
    preset = from_preset(args, PRESETS)
    folder = run_folder(args)
    score_path = pathlib.Path(args.score or folder / "score.pt")
    if not score_path.exists():
        raise UserError(f"{score_path}: no score model; python train_score.py --data {args.data} makes one, or --score FILE names one")
    score_net = load_image_model(score_path, device, "score")
    about = score_net.about["settings"]
    images, labels, names = load_images(args.data, "train", args.size, args.root)
    held_images, held_labels, _ = load_images(args.data, "test", args.size, args.root)
    shape = (score_net.config["channels"], score_net.config["image_size"])
    if (images.shape[1], images.shape[3]) != shape:
        wanted = f"{shape[0]}×{shape[1]}×{shape[1]}"
        raise UserError(f"{score_path} is for {wanted} images, --data {args.data} has {tuple(images.shape[1:])}; see --size")
    score_call = network_call(score_net, args.amp, False, device)
    if args.diagnose:
        if process()[0] == 0:
            with lock(folder / "diagnose.json"):
                diagnose_run(folder, score_net, held_images[: args.diagnose_n], held_labels[: args.diagnose_n], device)
        return
    if args.preset == "paper" and args.depth is None and len(names) == 100:
        preset["depth"] = 34
    torch.manual_seed(mix(args.seed, "weights"))
    net = NoisyResNet(classes=len(names), channels=images.shape[1], **{key: preset[key] for key in ("depth", "width", "norm", "scaled", "act")})
    net = net.to(device)
    settings = dict(
        data=args.data, data_sha=checksum([images, labels])[:16], classes=names, size=images.shape[-1], sigma_min=about["sigma_min"],
        sigma_max=about["sigma_max"], loss=args.loss, score_sha=checksum(score_net.state_dict())[:16], seed=args.seed, amp=args.amp,
        config=net.config, **{key: preset[key] for key in ("batch", "lr", "cosine")})
    if args.loss != "ce":
        settings["power"] = preset["power"]
    if args.loss == "total":
        settings.update(lam=preset["lam"], over=preset["over"])
    lam = preset["lam"] / (images[0].numel() if preset["over"] == "sum" else 1)  # to Adam, sum + λ CE is mean + λ/d CE
    call = network_call(net, False, args.compile, device)
    losses = dict(ce=lambda x, sigma, y, z: ce_loss(call, x, sigma, y, z),
                  dlsm=lambda x, sigma, y, z: dlsm_loss(net, score_call, x, sigma, y, z, preset["power"]),
                  total=lambda x, sigma, y, z: total_loss(net, score_call, x, sigma, y, z, lam, preset["power"]))
    path = folder / f"classifier-{args.loss}{f'-{args.tag}' if args.tag else ''}.pt"
    introduce(path, net, images, f"{len(names)} classes, on {device}")
    if process()[1] > 1 and preset["norm"] == "batch":
        say(f"warning: BatchNorm sees a process's {preset['batch'] // process()[1]} images, not the whole batch; one process or --norm group does not")

    def inspect(step, ema):
        net.eval()
        few = max(args.diagnose_n // 8, 2)  # a standard error needs two
        table = diagnose(net, score_call, held_images[:few], held_labels[:few], about["sigma_min"], about["sigma_max"], device=device)
        shown = ", ".join(f"{r['sigma']:.2g}: {r['accuracy']:.2f} {r['gain']:.2f}" for r in table[1::2])
        say(f"\nstep {step}, held out: accuracy and gain at σ = {shown}")
        return dict(diagnosis=table)

    draw = image_draw(images, labels, preset["batch"], args.seed, about["sigma_min"], about["sigma_max"], flip=False)
    fit(net, draw, losses[args.loss], path, "classifier", settings, steps=preset["steps"], lr=preset["lr"], cosine=preset["cosine"],
        warmup=1000 if len(names) == 100 else 0, clip=1.0, seed=args.seed, device=device, save_every=args.save_every,
        every=args.diagnose_every, inspect=inspect, restart=args.restart)


if __name__ == "__main__":
    run(main)
