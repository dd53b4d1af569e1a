"""Stage 1: trains the unconditional score model s(x, σ) by denoising score matching.

    python train_score.py --data cifar10                  # one GPU, about a day
    python train_score.py --data shapes --preset tiny     # a CPU, minutes, no download

Reads a data set, writes runs/RUN/score.pt (RUN is the data set's name), its log score.jsonl, a loss curve score.png
and pictures sampled on the way, score-samples.png. The same command again continues where it stopped. Several
GPUs: torchrun --nproc-per-node=8 train_score.py ...

This file also holds what the later stages share: image data, the training loop `fit`, pictures, the command line.
"""
import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import pathlib
import platform
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from models import EMA, NCSNpp, UserError, checksum, header, load_checkpoint, save_checkpoint, sigma_at, write_whole

PRESETS = {
    # What the authors ran: NCSN++ deep, continuous (Song et al. 2021), 107.6 M parameters.
    "paper": dict(width=128, mults=(1, 2, 2, 2), blocks=8, attention=(16,), dropout=0.1, edm=False,
                  steps=950_000, batch=128, lr=2e-4, warmup=5_000, ema=0.999),
    # One GPU, about a day: the same network, narrower and shallower, predicting as EDM does.
    "lite": dict(width=96, mults=(1, 2, 2, 2), blocks=2, attention=(16,), dropout=0.1, edm=True,
                 steps=300_000, batch=128, lr=2e-4, warmup=5_000, ema=0.9999),
    # A CPU: minutes for a first look, an hour for recognisable pictures.
    "tiny": dict(width=32, mults=(1, 2, 2), blocks=1, attention=(8,), dropout=0.0, edm=True,
                 steps=4_000, batch=64, lr=1e-3, warmup=200, ema=0.999),
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
    computes on its share and the gradients are summed. So a resumed run, on any number of processes, takes the same
    path. (DistributedDataParallel could not differentiate twice.) `settings` must match those in the file.
    `inspect(step, ema)` runs every `every` steps and at the end; what it returns is logged. → the EMA, or None
    """
    path = pathlib.Path(path)
    rank, world = process()
    average = EMA(net, ema) if ema else None
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
    log_path, start, losses, stop = path.with_suffix(".jsonl"), 0, [], []
    with lock(path) if rank == 0 else contextlib.nullcontext():
        if path.exists() and not restart:
            start = resume(path, kind, net, settings, optimizer, average, device)
            if start >= steps:
                quiet or say(f"{path}: finished already ({start} steps); --restart starts over")
                return average
            quiet or say(f"{path}: continuing at step {start} of {steps}")
        log = [] if start == 0 or not log_path.exists() else [r for r in map(json.loads, open(log_path)) if r["step"] <= start]
        progress = Progress(steps, start, "step", quiet)

        def save(step):
            if rank == 0:
                state = None if average is None else dict(shadow=average.shadow, updates=average.updates)
                save_checkpoint(path, dict(**header(net, kind), settings={**settings, "steps": steps}, step=step,
                                           weights=net.state_dict(), ema=state, optimizer=optimizer.state_dict()))
                write_whole(log_path, "".join(json.dumps(record) + "\n" for record in log).encode())

        with caught_signals(stop):
            for step in range(start, steps):
                rate = lr * min(1.0, (step + 1) / max(warmup, 1)) * (0.5 + 0.5 * math.cos(math.pi * step / steps) if cosine else 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                torch.manual_seed(mix(seed, step, rank))  # dropout
                whole = draw(torch.Generator().manual_seed(mix(seed, step)), step)
                share = [v.tensor_split(world)[rank].to(device, non_blocking=True) for v in whole]
                net.train()
                value = loss(*share) * (len(share[0]) / len(whole[0]))
                optimizer.zero_grad()
                value.backward()
                value = add_gradients(net, value.detach())
                norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)
                losses.append(float(value))
                if not math.isfinite(losses[-1]) or not math.isfinite(norm):
                    ones = ([v[i : i + 1] for v in share] for i in range(len(share[0])))
                    culprit = next((one[1].item() for one in ones if not math.isfinite(loss(*one))), share[1].min().item())
                    kept = f"{path} keeps step {start}" if path.exists() and not restart else "nothing was saved"
                    raise UserError(f"the loss or its gradient is not finite at step {step}, σ = {culprit:.3g}; {kept}; try a smaller --lr")
                optimizer.step()
                if average:
                    average.update()
                done = step + 1
                numbers = dict(loss=sum(losses) / len(losses), lr=rate)
                progress(done, **numbers)
                if done % max(steps // 200, 1) == 0 or done == steps:
                    log.append(dict(step=done, **numbers, seconds=round(progress.seconds, 2)))
                    losses.clear()
                if inspect and (every and done % every == 0 or done == steps):
                    log.append(dict(step=done, **(inspect(done, average) or {})))
                if done % save_every == 0 or done == steps or stop:
                    save(done)
                    start, restart = done, False
                if stop:
                    say(f"\n{path}: stopped at step {done} and saved; the same command continues")
                    sys.exit(128 + stop[0])
    return average


def resume(path, kind, net, settings, optimizer, average, device):
    """Fills network, optimizer and EMA from a checkpoint → its step; an error if it was made with other settings."""
    checkpoint = load_checkpoint(path, device)
    if checkpoint.get("kind") != kind:
        raise UserError(f"{path}: holds no {kind} of ours ({checkpoint.get('kind', 'unknown')}); --tag T writes elsewhere, --restart overwrites it")
    old = {**checkpoint["settings"], "steps": 0}
    for key, value in settings.items():
        if old.get(key) != value and key != "steps":
            raise UserError(f"{path} was made with {key} = {old.get(key)}, not {value}; --tag T keeps both, --restart starts over")
    net.load_state_dict(checkpoint["weights"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if average:
        torch._foreach_copy_(average.shadow, checkpoint["ema"]["shadow"])
        average.updates = checkpoint["ema"]["updates"]
    return checkpoint["step"]


# ---------------------------------------------------------------------------- plumbing: processes, signals, progress


def process():
    """(rank, number of processes): (0, 1) unless torchrun started us."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mix(*parts):
    """A seed from several whole numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def add_gradients(net, value):
    """Sums the gradients, and the loss, of all processes."""
    if process()[1] > 1:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads] + [value.reshape(1)])
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads] + [1])):
            g.copy_(part.view_as(g))
        value = flat[-1]
    return value


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
        except OSError:
            file.seek(0)
            raise UserError(f"{path}: {file.read().strip() or 'another process'} is writing it; wait, or choose another --tag") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
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
        left = time.strftime("%H:%M:%S", time.gmtime((self.total - done) / max(speed, 1e-9) % 86400))
        days = f"{int((self.total - done) / max(speed, 1e-9) // 86400)}d " if (self.total - done) / max(speed, 1e-9) >= 86400 else ""
        line = f"{self.unit} {done}/{self.total}" + "".join(f"  {k} {v:.4g}" for k, v in numbers.items()) + f"  {speed:.3g}/s  {days}{left} left"
        print("\r" * tty + line, end="\n" if done == self.total or not tty else "\033[K", flush=True)


# ---------------------------------------------------------------------------- plumbing: the command line


def number(kind, low, high=math.inf):
    """An argparse type: a whole number (kind int) or a finite number (float) from low to high."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or not math.isfinite(value):
            top = f" to {high:g}" if high < math.inf else " or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number of {low:g}{top}")
        return value

    parse.kind, parse.low, parse.high = kind, low, high
    return parse


class Parser(argparse.ArgumentParser):
    """argparse with defaults in --help and errors in one line."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def flag(self, name, default, help, type=str, **more):
        shown = "" if default in (None, False) else f" (default: {default})"
        action = dict(action="store_true") if default is False else dict(type=type, default=default)
        self.add_argument(name, help=help + shown, **{**action, **more})

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def run(main):
    """Calls main(); bad input, a full disk or Ctrl-C end in one line on stderr."""
    name = pathlib.Path(sys.argv[0]).name
    try:
        main()
    except UserError as error:
        sys.exit(print(f"{name}: {error}", file=sys.stderr) or 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(print(f"{name}: {where}{error.strerror or error}; finished work is kept, the same command continues", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(print(f"{name}: interrupted; finished work is kept, the same command continues", file=sys.stderr) or 130)
    finally:
        if dist.is_initialized():
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
        parser.flag("--tag", None, "adds -TAG to the output's name, for variants")
        parser.flag("--save-every", 1000, "steps between checkpoints", number(int, 1, 10**9))
        parser.flag("--amp", False, "the score network in bfloat16")


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
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        if choice == "cuda":
            choice = f"cuda:{os.environ['LOCAL_RANK']}"
        dist.init_process_group("nccl" if choice.startswith("cuda") else "gloo")
    try:
        device = torch.device(choice)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device}: not on this machine ({str(error).splitlines()[0]}); --device cpu always works") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    return device


def network_call(net, amp, compiled, device):
    """net(x, σ), compiled or in bfloat16 where asked for; its result in float32."""
    net = torch.compile(net) if compiled else net

    def call(x, sigma):
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            return net(x, sigma).float()

    return call if amp else net
