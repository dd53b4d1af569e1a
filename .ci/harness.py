"""Does the damage for real, many times, at random: kills, spoilt files, a full disk, long runs, lost workers.

    python .ci/harness.py                      # everything, some fifteen minutes on two cores
    python .ci/harness.py --quick              # a minute, for CI
    python .ci/harness.py --only kills --rounds 300 --seed 7

Prints a line a check, ends with code 1 if one fails, leaves nothing behind. What one run can show (arguments, strangers'
files, broken numbers, two at once) is in test_dlsm.py. A `Run` is `python SCRIPT ARGUMENTS` as a fork of this process,
which has torch loaded already: seconds less each. --rounds is the number of kills a script, and a tenth of the mutations a file.
"""
import argparse
import itertools
import os
import pathlib
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
import torch._dynamo  # noqa: E402, F401  Adam imports it: seconds in each fork

import sample  # noqa: E402
import train_classifier  # noqa: E402
import train_score  # noqa: E402
from models import NCSNpp, UserError, checksum, load_checkpoint, load_model  # noqa: E402

WORK = pathlib.Path(tempfile.mkdtemp(prefix="dlsm-harness-"))
DATA, BASE, RUN = WORK / "small.npz", WORK / "base", pathlib.Path("runs", "small")
SMALL = ("--data", DATA, "--preset", "tiny", "--width", 4, "--batch", 8, "--steps", 6, "--save-every", 2)
COMMANDS = {  # the script, its arguments, the file it makes, the files it reads
    "score": (train_score, SMALL, "score.pt", []),
    "classifier": (train_classifier, (*SMALL, "--diagnose-n", 16, "--diagnose-every", 4), "classifier-total.pt", ["score.pt"]),
    "sample": (sample, ("--data", DATA, "--n", 50, "--batch", 10, "--steps", 3, "--watch", "--png"), "samples-dlsm.npz", ["score.pt", "classifier-total.pt"]),
}


class Run:
    """One of the commands in `folder`, with `more` arguments; `before` is called in its process first."""

    def __init__(self, what, folder, *more, before=lambda: None):
        module, args = COMMANDS[what][:2]
        self.texts, self.code = [tempfile.TemporaryFile("w+") for _ in range(2)], None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.chdir(folder)
                os.dup2(self.texts[0].fileno(), 1), os.dup2(self.texts[1].fileno(), 2)
                sys.argv = [f"{module.__name__}.py", *map(str, args + more)]
                before()
                code = train_score.run(module.main) or 0
            except SystemExit as error:
                code = error.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)

    def running(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is None

    def end(self, number=0, seconds=300):
        """Sends a signal if there is a `number`, and waits → exit code, stdout and stderr."""
        limit = time.monotonic() + seconds
        if self.running():
            os.kill(self.pid, number)
        while self.running() and time.monotonic() < limit:
            time.sleep(0.003)
        if hangs := self.running():
            os.kill(self.pid, signal.SIGKILL)
        out, err = (file.seek(0) or file.read() for file in self.texts)
        assert not hangs and "Traceback" not in err, f"hangs: {hangs}; {out[-300:]}{err[-1500:]}"
        return self.code, out, err

    def expect(self, code, *words):
        got, out, err = self.end()
        assert got == code and (code != 2 or err.strip().count("\n") == 0), f"exit code {got}, not {code}, or not one line: {out[-300:]}{err[-1500:]}"
        assert all(word in out + err for word in words), f"{words} not in: {out[-300:]}{err}"


def fresh(what):
    """A folder with what the command reads."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=WORK))
    (folder / RUN).mkdir(parents=True)
    for name in COMMANDS[what][3]:
        shutil.copy(BASE / RUN / name, folder / RUN)
    return folder


def same(what, folder):
    """An error unless this folder and BASE, made undisturbed, agree in weights, average and optimizer, or samples, and in their files."""
    values, names = [], []
    for place in (folder, BASE):
        path = place / RUN / COMMANDS[what][2]
        checkpoint = load_checkpoint(path) if path.suffix == ".pt" else dict.fromkeys(("weights", "ema", "optimizer", "step", "settings"), path.read_bytes())
        values.append(checksum([checkpoint[key] for key in ("weights", "ema", "optimizer", "step", "settings")]))
        kind = path.stem.split("-")[0]
        names.append({str(p.relative_to(place)) for p in place.rglob("*") if p.name.strip(".").startswith(kind) or ".parts" in str(p)})
    assert values[0] == values[1], f"{what}: another result than that of an undisturbed run"
    assert names[0] == names[1], f"{what}: too many files {names[0] - names[1]}, too few {names[1] - names[0]}"
    shutil.rmtree(folder)


# ---------------------------------------------------------------------------- the checks


def kills(rounds, rng):
    """SIGKILL, SIGTERM and Ctrl-C at random times: the same command goes on, to the very same result."""
    done = dict(KILL=0, TERM=0, INT=0)
    for what in COMMANDS:
        begun, path = time.monotonic(), RUN / COMMANDS[what][2]
        Run(what, fresh(what)).expect(0)
        seconds, folder, count = time.monotonic() - begun, fresh(what), 0
        while count < rounds:
            command = Run(what, folder)
            time.sleep(rng.uniform(0, seconds))
            name = rng.choice(["KILL", "KILL", "TERM", "INT"])
            number = getattr(signal, f"SIG{name}")
            code, out, err = command.end(number)
            if code == 0:
                same(what, folder)
                folder = fresh(what)
                continue
            count, done[name] = count + 1, done[name] + 1
            assert code == -number or code == 128 + number and "the same command continues" in out + err, f"{what}, SIG{name}: exit code {code}\n{out}{err}"
            if "stopped at step" in out:
                assert load_checkpoint(folder / path)["step"] == int(out.split("stopped at step ")[1].split()[0]), out
        Run(what, folder).expect(0)
        Run(what, folder).expect(0, "finished already")
        same(what, folder)
    return ", ".join(f"{count} SIG{name}" for name, count in done.items())


def crash_points(rounds, rng):
    """Killed at the n-th touch of a file (open, rename, remove, ...), for every n (every 40th in --quick)."""
    total, stride = 0, 1 if rounds >= 20 else 40
    events = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
    for what in COMMANDS:
        for n in itertools.count(rng.randrange(stride) + 1, stride):
            def die_at_n():
                count = itertools.count(1)
                sys.addaudithook(lambda event, args: event in events and "runs" in str(args[0]) and next(count) == n and os.kill(os.getpid(), 9))

            folder = fresh(what)
            if Run(what, folder, before=die_at_n).end()[0] == 0:
                break
            Run(what, folder).expect(0)
            same(what, folder)
            total += 1
    return f"{total} points"


def mutate(rng, data):
    """One way in which a disk or a download spoils a file."""
    kind, at, data = rng.choice(["cut", "flip", "flip", "flip", "flips", "zeros", "random", "twice"]), rng.randrange(len(data)), bytearray(data)
    if rng.random() < 0.3:  # headers and directories are at the ends
        at = rng.choice([rng.randrange(min(600, len(data))), len(data) - 1 - rng.randrange(min(3000, len(data)))])
    end = at + rng.randrange(1, 200)
    if kind == "cut":
        del data[at:]
    elif kind in ("zeros", "random"):
        data[at:end] = bytes(end - at) if kind == "zeros" else rng.randbytes(end - at)
    elif kind == "twice":
        data[at:at] = data[at:end]
    for place in [at] * (kind == "flip") + [rng.randrange(len(data)) for _ in range(8 * (kind == "flips"))]:
        data[place] ^= 1 << rng.randrange(8)
    return kind, bytes(data)


def bad_files(rounds, rng):
    """Mutated checkpoints, data, diagnoses, and batches and samples: refused in one line, or the identical result."""
    folder, refused, harmless = BASE / RUN, 0, 0
    x, sigma = torch.rand(2, 3, 8, 8), torch.tensor([0.1, 10.0])

    def loaded(path):
        return checksum(load_model(path)(x, sigma))

    def resumed(path):
        net = NCSNpp(**config)
        optimizer = torch.optim.Adam(net.parameters(), fused=True)
        plan = train_score.Plan(1, 1e-3)
        step, log = train_score.resume(path, "score", net, {}, plan, optimizer, None, "cpu")
        return checksum([step, log, net.state_dict(), optimizer.state_dict()])

    config = load_model(folder / "score.pt").config
    for good, read in [(folder / "score.pt", loaded), (folder / "classifier-total.pt", loaded), (folder / "score.pt", resumed),
                       (DATA, lambda path: checksum([train_score.load_images(str(path), split) for split in ("train", "test")]))]:
        path, data, right = WORK / "bad" / good.name, good.read_bytes(), read(good)
        path.parent.mkdir(exist_ok=True)
        for i in range(10 * rounds):
            kind, bad = mutate(rng, data)
            path.write_bytes(bad)
            signal.alarm(60)  # a read that hangs ends all
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # a library's warning would stand beside the one line
                    assert read(path) == right, "a wrong answer, silently"
                harmless += 1
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 500, f"not one line: {error}"
                refused += 1
            except Exception as error:
                raise AssertionError(f"{good.name}, mutation {i} ({kind}): {type(error).__name__}: {error}") from error
            signal.alarm(0)
    for name in ("samples-dlsm-*.parts/000001.npz", "samples-dlsm.npz"):
        for _ in range(max(1, rounds // 2)):
            work = fresh("sample")
            command = Run("sample", work)
            while command.running() and not list((work / RUN).glob("samples-dlsm-*.parts/000002.npz")):
                time.sleep(0.001)
            if name.endswith("parts/000001.npz"):
                command.end(signal.SIGKILL)
            else:
                command.expect(0)
            for path in (work / RUN).glob(name):
                path.write_bytes(mutate(rng, path.read_bytes())[1])
                again = Run("sample", work)
                again.expect(2 if again.end()[0] == 2 else 0)
                refused, harmless = refused + (again.code == 2), harmless + (again.code == 0)
                if again.code == 0:
                    same("sample", work)
    return f"{refused} refused, {harmless} harmless or repaired"


def full_disk(rounds, rng):
    """A disk of 2 MB that fills up, then is read-only: one line, the old checkpoint whole; once it can be written again, it goes on."""
    disk = WORK / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        return "left out: no right to mount a small disk (test_dlsm.py limits the file size instead)"
    try:
        Run("score", disk).expect(0)
        path = disk / RUN / "score.pt"
        before, free = path.read_bytes(), os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - 100_000))
        Run("score", disk, "--steps", 8).expect(2, "No space left", "score.pt")
        assert path.read_bytes() == before and not list(path.parent.glob(".score.pt-*")), "the checkpoint is gone, or a part of the new one is left"
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        Run("score", disk, "--steps", 8).expect(2, "Read-only file system", "score.pt")
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        Run("score", disk, "--steps", 8).expect(0, "continuing at step 6")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    return ""


def memory(rounds, rng):
    """2,000 steps (120 in --quick), one stage with the double backward, and 50 batches of samples: no growth after warm-up."""
    if not pathlib.Path("/proc/self/statm").exists():
        return "left out: no /proc here"
    texts, every = [], 100 if rounds >= 20 else 6
    for what, more, count in (("score", ("--steps", 10**6, "--save-every", every), 20), ("classifier", ("--steps", 10**6, "--save-every", every), 20), ("sample", ("--n", 10**5), 50)):
        folder = fresh(what)
        command, last, seen = Run(what, folder, *more), None, []
        while command.running() and len(seen) < count:  # one look after each checkpoint, or batch
            files = folder.rglob("score.pt" if what == "score" else "classifier-total.pt" if what == "classifier" else "samples-dlsm-*.parts/0*.npz")
            state = sorted((file.name, file.stat().st_mtime_ns) for file in files)
            if state and state != last:
                last = state
                seen.append(int(pathlib.Path(f"/proc/{command.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)
            time.sleep(0.003)
        command.end(signal.SIGKILL)
        growth = max(seen[-5:]) - max(seen[5:10])
        assert len(seen) == count and growth < 6, f"{what}: {growth:.1f} MB more after {len(seen)} looks"
        texts.append(f"{what} {growth:+.1f} MB")
    return ", ".join(texts)


def distributed(rounds, rng):
    """One of two workers killed: the job ends with an error soon; the same command goes on, on one process, two or three."""
    def torchrun(count, *more):
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--", HERE / "train_score.py",
                                 *map(str, COMMANDS["score"][1] + more)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    slowest = 0
    for victim in [0, 1, None][: None if rounds >= 20 else 1]:
        folder = fresh("score")
        job, path = torchrun(2, "--steps", 5000, "--save-every", 3), folder / RUN / "score.pt"
        while not path.exists() and job.poll() is None:
            time.sleep(0.02)
        workers = [int(pid) for pid in pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        begun = time.monotonic()
        os.kill(job.pid if victim is None else workers[victim], signal.SIGTERM if victim is None else signal.SIGKILL)
        try:
            text = job.communicate(timeout=90)[0]
        finally:
            job.kill()
        slowest = max(slowest, time.monotonic() - begun)
        step = load_checkpoint(path)["step"]
        assert job.returncode and (victim is not None or f"stopped at step {step} and saved" in text), text
        again = torchrun({0: 3, 1: 2, None: 1}[victim], "--steps", step + 5)
        text = again.communicate(timeout=120)[0]
        assert again.returncode == 0 and f"continuing at step {step}" in text, text
        Run("score", folder, "--steps", step + 9).expect(0, "continuing at step")
    return f"ended at most {slowest:.1f} s after the loss"


CHECKS = {check.__name__: check for check in (bad_files, full_disk, crash_points, kills, memory, distributed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute: 2 rounds, and the shorter of each check")
    parser.add_argument("--rounds", type=int, help="kills a script; ten times as many mutations a file (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(CHECKS), help="some of %(default)s")
    args = parser.parse_args()
    failed = []
    try:
        found = train_score.make_shapes(400, 100)
        small = {k: train_score.resized(torch.from_numpy(v).permute(0, 3, 1, 2), 8).permute(0, 2, 3, 1).numpy() for k, v in found.items() if "images" in k}
        np.savez(DATA, **{**found, **small})
        (BASE / RUN).mkdir(parents=True)
        for what in COMMANDS:
            Run(what, BASE).expect(0)
        Run("classifier", BASE, "--diagnose").expect(0)
        for name in args.only.split(","):
            begun = time.monotonic()
            try:
                text = CHECKS[name](args.rounds or (2 if args.quick else 40), random.Random(args.seed))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed.append(name)
                text = f"FAILED with --seed {args.seed}: {error}"
            print(f"{name:13}{time.monotonic() - begun:7.1f} s  {text}", flush=True)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
