"""Does the damage for real: kills, bad files, bad arguments, full disks, broken numbers, lost workers, two at once.

    python .ci/harness.py                      # everything, some fifteen minutes on two cores
    python .ci/harness.py --quick              # a minute, for CI
    python .ci/harness.py --only kills --rounds 300 --seed 7

Prints a line a check and ends with code 1 if one fails, leaving nothing behind. Most runs are forks of this process, which
has torch loaded already: `Run` is `python SCRIPT ARGUMENTS` without the seconds of importing. --rounds is the number of
kills a script, and with ten times as many mutations a file.
"""
import argparse
import contextlib
import importlib
import io
import itertools
import json
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # forks must not inherit threads
HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import numpy as np  # noqa: E402
import torch  # noqa: E402

from models import NCSNpp, UserError, checksum, load_checkpoint, load_model, save_checkpoint  # noqa: E402
from sample import calibrated  # noqa: E402
from train_score import draw_shapes, load_images, resized, resume, run  # noqa: E402

SCRIPTS = {name: importlib.import_module(name) for name in ("train_score", "train_classifier", "sample", "evaluate", "toy_moons")
           if (HERE / f"{name}.py").exists()}
WORK = pathlib.Path(tempfile.mkdtemp(prefix="dlsm-harness-"))
DATA, BASE = WORK / "small.npz", WORK / "base"
SMALL = ("--data", DATA, "--preset", "tiny", "--width", 4, "--batch", 8)
COMMANDS = {  # the script, its arguments, the file it makes; the networks before it come from BASE
    "score": ("train_score", (*SMALL, "--steps", 6, "--save-every", 2, "--sample-every", 4), "score.pt"),
    "classifier": ("train_classifier", (*SMALL, "--steps", 6, "--save-every", 2, "--diagnose-n", 8, "--diagnose-every", 4), "classifier-total.pt"),
    "sample": ("sample", ("--data", DATA, "--n", 50, "--batch", 10, "--steps", 3, "--watch", "--png"), "samples-dlsm.npz"),
}
DIAGNOSE = (*SMALL, "--diagnose", "--diagnose-n", 8)


class Run:
    """`python SCRIPT ARGUMENTS` in `cwd`, as a fork; `before` is called in it first."""

    def __init__(self, script, *args, cwd, before=lambda: None):
        self.out, self.err = (tempfile.TemporaryFile("w+", dir=WORK) for _ in range(2))
        sys.stdout.flush()
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            code = 70
            try:
                os.chdir(cwd)
                os.dup2(self.out.fileno(), 1), os.dup2(self.err.fileno(), 2)
                sys.argv = [f"{script}.py", *map(str, args)]
                before()
                code = run(SCRIPTS[script].main) or 0
            except SystemExit as error:
                code = error.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)

    def end(self, number=None, seconds=120):
        """Waits, after sending a signal if there is a `number` → the exit code; one that hangs is killed and is an error."""
        if number and self.code is None:
            os.kill(self.pid, number)
        limit = time.monotonic() + seconds
        while self.code is None and time.monotonic() < limit:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else time.sleep(0.003)
        if self.code is None:
            self.end(signal.SIGKILL)
            raise AssertionError(f"hangs: {' '.join(self.texts())}")
        return self.code

    def texts(self):
        return [file.seek(0) and "" or file.read() for file in (self.out, self.err)]

    def expect(self, code, *words):
        out, err = (self.end(), *self.texts())[1:]
        assert self.code == code and "Traceback" not in err, f"exit code {self.code}, not {code}: {out[-300:]}{err[-1500:]}"
        assert code != 2 or len(err.strip().splitlines()) == 1, f"not one line: {err}"
        assert all(word in out + err for word in words), f"{words} not in: {out[-300:]}{err}"
        return out + err


def fresh(what):
    """A folder with the networks that the command `what` reads."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=WORK)) / what
    (folder / "runs" / "small").mkdir(parents=True)
    for name in {"score": [], "classifier": ["score.pt"], "sample": ["score.pt", "classifier-total.pt"]}[what]:
        shutil.copy(BASE / "runs" / "small" / name, folder / "runs" / "small")
    return folder


def start(what, cwd, *more, before=lambda: None):
    script, args, _ = COMMANDS[what]
    return Run(script, *args, *more, cwd=cwd, before=before)


def result(what, cwd):
    """What must not depend on kills: weights, average, optimizer and step, or the samples; and the names of all files."""
    path = cwd / "runs" / "small" / COMMANDS[what][2]
    names = sorted(str(p.relative_to(cwd)) for p in cwd.rglob("*"))
    if path.suffix == ".npz":
        return path.read_bytes(), names
    checkpoint = load_checkpoint(path)
    return checksum([checkpoint[key] for key in ("weights", "ema", "optimizer", "step", "settings")]), names


# ---------------------------------------------------------------------------- the checks


def kills(rounds, rng):
    """SIGKILL, SIGTERM and Ctrl-C at random times: the same command goes on, to the very same result."""
    done = dict.fromkeys(("kill", "term", "int"), 0)
    for what in COMMANDS:
        folder, begun = fresh(what), time.monotonic()
        start(what, folder).expect(0)
        seconds, whole = time.monotonic() - begun, result(what, folder)
        start(what, folder).expect(0, "finished already")
        folder, count = fresh(what), 0
        while count < rounds:
            command = start(what, folder)
            time.sleep(rng.uniform(0.0, seconds))
            name = rng.choice(["kill", "kill", "term", "int"])
            number = getattr(signal, f"SIG{name.upper()}")
            code = command.end(number)
            out, err = command.texts()
            assert code in (0, -number, 128 + number) and "Traceback" not in err, f"{what}, {name}: exit code {code}\n{out}{err}"
            if code == 128 + number:
                assert "the same command continues" in out + err, f"{what}, {name}: {out}{err}"
            if code > 0 and "stopped at step" in out:  # it says that it saved
                assert load_checkpoint(folder / "runs" / "small" / COMMANDS[what][2])["step"] == int(out.split("stopped at step ")[1].split()[0])
            if code:
                count, done[name] = count + 1, done[name] + 1
            else:
                assert result(what, folder) == whole, f"{what}: another result after kills, or other files: {result(what, folder)[1]}"
                folder = fresh(what)
        start(what, folder).expect(0)
        assert result(what, folder) == whole, f"{what}: another result after kills, or other files: {result(what, folder)[1]}"
    return ", ".join(f"{count} {name}s" for name, count in done.items())


def crash_points(rounds, rng):
    """Killed at the n-th touch of a file (open, rename, remove, ...), for every n: no order of writes is a bad one."""
    total = 0
    for what in COMMANDS:
        folder = fresh(what)
        start(what, folder).expect(0)
        whole = result(what, folder)
        for n in itertools.count(rng.randrange(1, 8) if rounds < 20 else 1, 8 if rounds < 20 else 1):
            def die():
                count = itertools.count(1)
                events = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate"}
                sys.addaudithook(lambda event, args: event in events and "runs" in str(args[0]) and next(count) == n and os.kill(os.getpid(), 9))

            folder = fresh(what)
            if start(what, folder, before=die).end() == 0:
                break
            start(what, folder).expect(0)
            assert result(what, folder) == whole, f"{what}, killed at touch {n}: another result, or other files: {result(what, folder)[1]}"
            total += 1
    return f"{total} points"


def mutate(rng, data):
    """One way in which a disk or a download spoils a file."""
    kind, at, data = rng.choice(["cut", "flip", "flip", "flip", "flips", "zeros", "random", "twice", "empty"]), rng.randrange(len(data)), bytearray(data)
    if rng.random() < 0.3:  # headers and directories are at the ends
        at = rng.choice([rng.randrange(min(600, len(data))), len(data) - 1 - rng.randrange(min(3000, len(data)))])
    length = rng.randrange(1, 200)
    if kind in ("cut", "empty"):
        del data[at if kind == "cut" else 0 :]
    elif kind == "twice":
        data[at:at] = data[at : at + length]
    elif kind in ("zeros", "random"):
        data[at : at + length] = bytes(length) if kind == "zeros" else rng.randbytes(length)
    else:
        for place in [at] + [rng.randrange(len(data)) for _ in range(8 * (kind == "flips"))]:
            data[place] ^= 1 << rng.randrange(8)
    return kind, bytes(data)


class Hostile:
    """Pickled, it would run a command when it is loaded."""

    def __reduce__(self):
        return os.system, (f"touch {WORK}/ran",)


@contextlib.contextmanager
def silent():
    """Nothing may be written to stderr in here (libraries' warnings would stand beside the one line), nor take a minute."""
    with tempfile.TemporaryFile("w+") as file, warnings.catch_warnings():
        warnings.simplefilter("always")
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        signal.alarm(60)
        try:
            yield
        finally:
            signal.alarm(0)
            sys.stderr.flush()
            os.dup2(kept, 2), os.close(kept)
        file.seek(0)
        text = file.read()
        assert not text, f"on stderr: {text[:500]}"


def outcome(read):
    """What `read()` gives, or "refused" for a UserError of one line; anything else goes through."""
    try:
        with silent():
            return read()
    except UserError as error:
        assert "\n" not in str(error).strip() and len(str(error)) < 500, f"not one line: {error}"
        return "refused"


def bad_files(rounds, rng):
    """Mutated, hostile and unfitting checkpoints, data, samples and side files: refused in one line, or the identical result."""
    folder, counts = BASE / "runs" / "small", {}
    config = load_model(folder / "score.pt").config

    def resumed(path):
        net = NCSNpp(**config)
        optimizer = torch.optim.Adam(net.parameters(), fused=True)
        step = resume(path, "score", net, {}, optimizer, None, "cpu")
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # a moment of another shape would fail only here
        return checksum([step, net.state_dict()])

    def sampled(path):
        net = load_model(path)
        return checksum([net.about["kind"], net.config, net.state_dict()])

    readers = {  # a good file, what is read from it
        "score.pt": (folder / "score.pt", sampled), "classifier-total.pt": (folder / "classifier-total.pt", sampled), "resumed": (folder / "score.pt", resumed),
        "data": (DATA, lambda path: checksum([load_images(str(path), split) for split in ("train", "test")])),
        "diagnose.json": (folder / "diagnose.json", lambda path: calibrated(path.parent, "classifier-total", "cpu")[1])}
    for name, (good, read) in readers.items():
        path = WORK / "bad" / good.name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(good, path)
        data, right = path.read_bytes(), outcome(lambda: read(path))
        assert right != "refused", name
        for i in range(10 * rounds):
            kind, bad = mutate(rng, data)
            path.write_bytes(bad)
            try:
                got = outcome(lambda: read(path))
                assert got in (right, "refused"), "a wrong answer, silently"
            except Exception as error:
                raise AssertionError(f"{name}, mutation {i} ({kind}): {type(error).__name__}: {error}") from error
            counts[got == "refused"] = counts.get(got == "refused", 0) + 1
        for trouble in strangers(good):
            path.write_bytes(trouble)
            got = outcome(lambda: read(path))
            assert got in (right, "refused"), f"{name}: a wrong answer from a stranger's file {trouble[:80]}"
            counts[got == "refused"] = counts.get(got == "refused", 0) + 1
        path.unlink()
    for what, name, finished in [("sample", f"samples-dlsm.{end}", end == "npz") for end in ("parts/recipe.json", "parts/000001.npz", "npz")]:
        work, whole = fresh(what), result(what, BASE)[0]
        if finished:
            start(what, work).expect(0)
        for i in range(max(3, rounds // 2)):
            if not finished:
                run = start(what, work)
                while run.code is None and not (work / "runs/small/samples-dlsm.parts/000001.npz").exists():
                    run.code = os.waitpid(run.pid, os.WNOHANG)[0] or None
                run.end(signal.SIGKILL)
            path = work / "runs/small" / name
            if not path.exists():  # it was over before the kill
                continue
            data = path.read_bytes()
            path.write_bytes(rng.choice([mutate(rng, data)[1], *strangers(path)]))
            again = start(what, work)
            again.expect(2 if again.end() == 2 else 0)
            counts[again.code == 2] = counts.get(again.code == 2, 0) + 1
            path.write_bytes(data) if finished else shutil.rmtree(path.parent, ignore_errors=True)
            assert finished or again.code or result(what, work)[0] == whole, f"{name}: other samples, silently"
            finished or (work / "runs/small/samples-dlsm.npz").unlink(missing_ok=True)
    assert not (WORK / "ran").exists(), "a file ran code"
    return f"{counts.get(True, 0)} refused, {counts.get(False, 0)} harmless"


def strangers(good):
    """Files of the wrong kind, the wrong shape, hostile ones, each with valid checksums, in place of the `good` one."""
    buffer = io.BytesIO()

    def made(save, *args, **keywords):
        buffer.seek(0), buffer.truncate()
        save(buffer, *args, **keywords)
        return buffer.getvalue()

    yield from (b"", b"\n", b"PK\x05\x06" + bytes(18), b"[" * 100_000, b"NaN", b"{}", b"\xff\xfe", pickle.dumps(Hostile()), pickle.dumps({"weights": Hostile()}))
    yield made(lambda f: torch.save({"weights": Hostile(), "kind": "score"}, f))
    yield made(lambda f: torch.save({"model": Hostile()}, f, _use_new_zipfile_serialization=False))
    yield made(np.save, np.array([Hostile()], dtype=object), allow_pickle=True)
    yield made(np.savez, images=np.array([Hostile()], dtype=object), labels=np.zeros(1, int))
    if good.suffix == ".pt":
        checkpoint, path = load_checkpoint(good), WORK / "stranger.pt"
        endless, sparse = {}, torch.eye(3).to_sparse()
        endless["endless"] = endless
        odd = [None, -3, math_nan := float("nan"), "x", [], {}, {"a": 1}, [{}], torch.zeros(2), endless, sparse, torch.zeros(1).expand(2**45)]
        for key, value in [(key, value) for key in checkpoint if key != "log" for value in odd] + [("config", {**checkpoint["config"], k: v})
                           for k in checkpoint["config"] for v in (None, 0, -1, 3, 2**40, "x", (), math_nan)]:
            if key in ("kind", "network", "weights", "config", "settings", "optimizer", "ema", "step"):
                with contextlib.suppress(Exception):  # what cannot be summed is saved without a sum
                    save_checkpoint(path, {**checkpoint, key: value})
                    yield path.read_bytes()
                    continue
                yield made(lambda f: torch.save({**checkpoint, key: value, "checksum": "0"}, f))
        names = list(checkpoint["weights"])
        for weights in ({k: v for k, v in checkpoint["weights"].items() if k != names[3]}, {**checkpoint["weights"], names[3]: torch.zeros(7)},
                        {**checkpoint["weights"], "more": torch.zeros(7)}, {**checkpoint["weights"], names[3]: "x"}):
            save_checkpoint(path, {**checkpoint, "weights": weights})
            yield path.read_bytes()
        state = checkpoint["optimizer"]
        for optimizer in ({**state, "state": {}}, {**state, "state": {**state["state"], 0: {**state["state"][0], "exp_avg": torch.zeros(1)}}}, {**state, "param_groups": []}):
            save_checkpoint(path, {**checkpoint, "optimizer": optimizer})
            yield path.read_bytes()
    if good.suffix == ".npz":
        found = dict(np.load(good))
        for key, value in found.items():
            for odd in (None, value[:0] if value.ndim else value[None], value[..., None], np.float64(np.nan), value.astype(str), np.zeros((3, 0, 0, 3), np.uint8),
                        np.full(len(found["images"]), 2**63, np.uint64), np.full(len(found["images"]), 10**12), np.full(len(found["images"]), np.nan)):
                yield made(np.savez, **{k: v for k, v in {**found, key: odd}.items() if v is not None})
        yield made(np.savez, **{**found, "recipe": np.array("{"), "test_labels": found.get("test_labels", 0)})
        yield made(np.savez, **{**found, "recipe": np.array("[1]")})
    if good.suffix == ".json":
        for text in ("null", "[]", '{"classifier-total": []}', '{"classifier-total": [{"sigma": 1}]}', '{"classifier-total": [{"sigma": "1", "alpha": 1}]}',
                     '{"classifier-total": [{"sigma": 1e400, "alpha": 1}, {"sigma": 0, "alpha": NaN}]}', '{"classifier-total": {"a": 1' + "0" * 5000 + "}}"):
            yield text.encode()


BAD = {int: ["-1", "0", "1.5", "", "x", "nan", "inf", "-inf", "1e3", "9" * 25, "9" * 400, "9" * 5000, " ", "1,2", "-999999999999"],
       float: ["-1e-30", "-1", "0", "", "x", "nan", "inf", "-inf", "1e400", "9" * 400, " ", "1,2", "-1e12", "1e-300"],
       list: ["", ",", "1,", "-1", "1,-1", "x", "nan", "1,nan", "inf", "1;2", "1e400", "9" * 400], str: [""]}


def bad_arguments(rounds, rng):
    """For every flag of every parser, values outside its declared range: exit code 2 and a single line that names the flag."""
    count = 0
    for script, module in SCRIPTS.items():
        for action in module.make_parser()._actions if hasattr(module, "make_parser") else []:
            if not action.option_strings or action.nargs == 0:
                continue
            flag, kind = action.option_strings[-1], getattr(action.type, "kind", None)
            if action.choices:
                values = ["", "x", "-1", "nan"]
            elif kind:
                def inside(text):
                    with contextlib.suppress(ValueError):
                        value = kind(text)
                        return value == value and action.type.low <= value <= action.type.high and abs(value) < float("inf")
                values = [text for text in BAD[kind] if not inside(text)]
            else:
                values = BAD[list if getattr(action.type, "__name__", "") in ("parse_alphas", "parse_classes") else str]
            for value in values:
                err = io.StringIO()
                try:
                    with contextlib.redirect_stderr(err):
                        module.make_parser().parse_args([f"{flag}={value}"])
                    raise AssertionError(f"{script}.py {flag}={value[:50]!r} is accepted")
                except SystemExit as error:
                    assert error.code == 2 and flag in err.getvalue() and len(err.getvalue().strip().splitlines()) == 1, f"{script}.py {flag}={value[:50]!r}: {err.getvalue()}"
                count += 1
    for script, *args in (("train_score", "--tag", "a/b"), ("train_score", "--device", "meta"), ("train_score", "--device", "cuda:99"), ("train_score", "--data", "."),
                          ("train_classifier", "--loss", "ce", "--lam", "2"), ("train_classifier", "--loss", "ce", "--power", "2"), ("train_classifier", "--compile"),
                          ("sample", "--classes", "1,1"), ("sample", "--guidance", "none", "--classes", "10"), ("sample", "--guidance", "none", "--alpha", "2"),
                          ("sample", "--sampler", "heun", "--snr", "0.1"), ("sample", "--sampler", "pc", "--churn", "0.1"), ("sample", "--n", "11")):
        Run(script, "--data", DATA, *args, cwd=BASE).expect(2, args[-2] if len(args) > 1 else args[0])
        count += 1
    return f"{count} values"


def full_disk(rounds, rng):
    """No space, a limit on file sizes, a folder that may not be written: one line, the old file whole, then it goes on."""
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY) if what != "sample" else (1000, resource.RLIM_INFINITY))

    def nobody():
        os.setgid(65534), os.setuid(65534)

    done, more = [], {"score": ("--steps", 8), "classifier": ("--steps", 8), "sample": ("--restart",)}
    WORK.chmod(0o755)
    for what in COMMANDS:
        folder = fresh(what)
        start(what, folder).expect(0)
        path = folder / "runs" / "small" / COMMANDS[what][2]
        before = path.read_bytes()
        start(what, folder, *more[what], before=limited).expect(2, "File too large", path.name.split(".")[0], "the same command continues")
        assert path.read_bytes() == before
        if os.getuid() == 0:
            for part in (folder.parent, folder, folder / "runs", path.parent):
                part.chmod(0o555)
            start(what, folder, *more[what], before=nobody).expect(2, "Permission denied", path.name.split(".")[0])
            path.parent.chmod(0o755)
        assert path.read_bytes() == before
        start(what, folder, *more[what]).expect(0)
        assert (path.read_bytes() == before) == (what == "sample")
    done.append("size limit" + ", read-only folder" * (os.getuid() == 0))
    small = WORK / "disk"
    small.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True).returncode:
        return f"{done[0]} (no right to mount a small disk: left out)"
    try:
        start("score", small).expect(0)
        path = small / "runs" / "small" / "score.pt"
        before, free = path.read_bytes(), os.statvfs(small)
        (small / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - 100_000))
        start("score", small, *more["score"]).expect(2, "No space left", "score.pt")
        assert path.read_bytes() == before and not list(path.parent.glob(".score.pt-*"))
        (small / "filler").unlink()
        start("score", small, *more["score"]).expect(0, "continuing at step 6")
    finally:
        subprocess.run(["umount", "-l", small])
    return f"{done[0]}, full disk"


def numbers(rounds, rng):
    """An absurd learning rate, a network that gives NaN or infinities: stopped with step and σ, the last good file kept."""
    for what in ("score", "classifier"):
        folder = fresh(what)
        text = start(what, folder, "--lr", "1000", "--steps", 300, "--save-every", 1, "--diagnose-every" if what == "classifier" else "--sample-every", 1000).expect(2, "step", "σ =", "--lr")
        path = folder / "runs" / "small" / COMMANDS[what][2]
        if path.exists():
            kept = load_checkpoint(path)
            assert f"keeps step {kept['step']}" in text and all(v.isfinite().all() for v in kept["weights"].values())
    for network, value in itertools.product(("score", "classifier-total"), (float("nan"), float("inf"), 1e38)):
        folder = fresh("sample")
        path = folder / "runs" / "small" / f"{network}.pt"
        checkpoint = load_checkpoint(path)
        for weights in (list(checkpoint["weights"].values()), checkpoint["ema"] and checkpoint["ema"]["shadow"] or []):
            weights[-2].fill_(value)  # the last layer's: infinite logits
        save_checkpoint(path, checkpoint)
        for sampler in ("heun", "pc"):
            start("sample", folder, "--sampler", sampler).expect(2, "step", "σ =")
        assert not list(folder.rglob("samples-*.npz"))
    return "learning rate, NaN, infinities"


def memory(rounds, rng):
    """2,000 steps (a tenth in --quick) with the double backward, and 50 batches of samples: no growth after warm-up."""
    def kilobytes(pid):
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() // 1024

    if not pathlib.Path("/proc/self/statm").exists():
        return "left out: no /proc here"
    steps, texts = 2000 if rounds >= 20 else 200, []
    for what, more in (("score", ("--steps", steps, "--save-every", 50, "--sample-every", 10**6)), ("sample", ("--n", 500 if rounds >= 20 else 150)),
                       ("classifier", ("--steps", steps, "--save-every", 50, "--diagnose-every", 10**6))):
        command, seen = start(what, fresh(what), *more), []
        while os.waitpid(command.pid, os.WNOHANG)[0] == 0:
            seen.append(kilobytes(command.pid))
            time.sleep(0.02)
        command.code = 0
        assert "Traceback" not in command.texts()[1], command.texts()[1]
        third = len(seen) // 3  # the last samples may see the process go
        growth = (max(seen[-third:-1]) - max(seen[: 2 * third])) / 1024
        assert growth < 6, f"{what}: {growth:.1f} MB more in the last third"
        texts.append(f"{what} {growth:+.1f} MB")
    return ", ".join(texts)


def distributed(rounds, rng):
    """One of two workers killed: the job ends with an error soon, and goes on with one process, or three."""
    script, args, name = COMMANDS["score"]

    def torchrun(count, *more):
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--", str(HERE / f"{script}.py"), *map(str, (*args, *more))],
                                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def workers(pid):
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    for number, who in [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGTERM, None)][: None if rounds >= 20 else 1]:
        folder = fresh("score")
        job, path = torchrun(2, "--steps", 100_000, "--save-every", 3), folder / "runs" / "small" / name
        while not path.exists() and job.poll() is None:
            time.sleep(0.02)
        begun = time.monotonic()
        os.kill(job.pid if who is None else workers(job.pid)[who], number)
        try:
            text = job.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            job.kill()
            raise AssertionError("a job that lost a worker hangs") from None
        seconds = time.monotonic() - begun
        assert job.returncode, text
        step = load_checkpoint(path)["step"]
        if who is None:
            assert f"stopped at step {step} and saved" in text, text
        else:
            again = torchrun(3 - who, "--steps", step + 5)
            text = again.communicate(timeout=120)[0]
            assert again.returncode == 0 and f"continuing at step {step}" in text, text
        start("score", folder, "--steps", step + 9).expect(0, "continuing at step")
    return f"ended {seconds:.1f} s after the loss"


def two_at_once(rounds, rng):
    """A second process on the same output: one line that says who holds it, and the first ends as if alone."""
    for what in COMMANDS:
        folder, whole = fresh(what), result(what, BASE)[0]
        first = start(what, folder, *(("--steps", 6) if what != "sample" else ()))
        lock = folder / "runs" / "small" / f".{COMMANDS[what][2]}.lock"
        while not (lock.exists() and lock.read_text()) and first.pid:
            time.sleep(0.002)
        os.kill(first.pid, signal.SIGSTOP)  # it holds the file for as long as we look
        start(what, folder).expect(2, f"process {first.pid} on ")
        os.kill(first.pid, signal.SIGCONT)
        first.expect(0)
        assert result(what, folder)[0] == whole
    return ""


CHECKS = {check.__name__: check for check in (bad_arguments, bad_files, numbers, full_disk, two_at_once, crash_points, kills, memory, distributed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute: 4 rounds, and the shorter of each check")
    parser.add_argument("--rounds", type=int, help="kills a script; ten times as many mutations a file (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(CHECKS), help="some of %(default)s")
    args = parser.parse_args()
    rounds = args.rounds or (4 if args.quick else 40)
    failed = []
    try:
        found = draw_shapes(400, 100)
        np.savez(DATA, **{k: resized(torch.from_numpy(v).permute(0, 3, 1, 2), 8).permute(0, 2, 3, 1).numpy() if "images" in k else v for k, v in found.items()})
        BASE.mkdir()
        for what in COMMANDS:
            start(what, BASE).expect(0)
        Run("train_classifier", *DIAGNOSE, cwd=BASE).expect(0)
        for name in args.only.split(","):
            begun = time.monotonic()
            try:
                text = CHECKS[name](rounds, random.Random(args.seed))
            except AssertionError as error:
                failed.append(name)
                text = f"FAILED with --seed {args.seed}: {error}"
            print(f"{name:14}{time.monotonic() - begun:6.1f} s  {text}", flush=True)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
