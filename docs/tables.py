"""Fills the tables of README.md and docs/*.md from docs/results/*.json: no number in them is typed.

    python docs/tables.py            # rewrites the pages, and draws fashion-16/exact-nats.png
    python docs/tables.py --check    # exit code 1, and their names, where pages say something else

A table stands between the lines <!-- table NAME --> and <!-- end -->; NAME is a function of this file.
"""
import json
import pathlib
import re
import statistics
import sys

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS / "results"
sys.path.insert(0, str(DOCS.parent))
from evaluate import PAPER as TABLE_2, PRDC  # noqa: E402
from sample import chart  # noqa: E402
from toy_moons import PAPER  # noqa: E402
from train_classifier import explained_nats  # noqa: E402


def read(path):
    return json.loads((DOCS / path).read_text())


def table(header, rows):
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pair(values):
    """c1 / c2."""
    return "" if values is None else " / ".join(f"{value:.3f}" for value in values)


def with_deviation(values, digits):
    """The mean, and of several ± their standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


# ------------------------------------------------------------ the two moons

METHODS = dict(a="(a) base", b="(b) scaling, α = 10", renorm="(b') re-normalised, α = 10",
               c="(c) posterior SM", d="(d) ours", e="(e) oracle")
LOSSES = dict(ce="L_CE", dlsm="L_DLSM'", total="L_Total")


def moons_errors(group, names, metric):
    ours, authors = read("results/moons.json"), read("results/moons-paper.json")
    rows = []
    for key, name in names.items():
        cells = [PAPER.get(key, {}).get(metric)]
        for results, join in ((authors, "late"), (ours, "late"), (ours, "early")):
            cells.append(results[join][group][key][metric])
        rows.append([name, *map(pair, cells)])
    return table([metric, "the paper", "`--preset paper`", "late, 5 seeds", "early, 5 seeds"], rows)


def moons_D_P():
    return moons_errors("methods", METHODS, "D_P")


def moons_D_L():
    return moons_errors("methods", {key: METHODS[key] for key in METHODS if key != "c"}, "D_L")


def moons_A3():
    return moons_errors("losses", LOSSES, "D_L")


def moons_coverage():
    ours = read("results/moons.json")
    rows = []
    for key, name in METHODS.items():
        cells = [ours[join]["methods"][key][metric]
                 for join in ("late", "early") for metric in ("recall", "coverage")]
        rows.append([name, *map(pair, cells)])
    return table(["", "recall, late", "coverage, late", "recall, early", "coverage, early"], rows)


# ------------------------------------------------------------ images

QUALITY = {key: (f"{key.capitalize()} ↑", 3) for key in PRDC}
QUALITY |= {"cw_fid": ("(CW) FD ↓", 2), **{f"cw_{key}": (f"(CW) {key.capitalize()} ↑", 3) for key in PRDC}}


def seeds_of(files, name):
    """The files of a guidance: NAME, NAME-s1, NAME-s2, ..."""
    return [file for key, file in files.items() if re.fullmatch(rf"{name}(-s\d)?", key)]


def paired_difference(ours, base, digits):
    """Of ours and base, seed by seed: the mean ± its standard error."""
    pairs = [a - b for a, b in zip(ours, base)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"{statistics.mean(pairs):+.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def over_seeds(name, titles, rows):
    """Table 2, a column per guidance with all its seeds, the last one ours less base where there are several."""
    files = read(f"results/{name}.json")["files"]
    groups = {title: seeds_of(files, key) for key, title in titles.items() if key in files}
    header = [f"{title}, {len(group)} seeds" if len(group) > 1 else title for title, group in groups.items()]
    paired = len(groups["(d) ours"]) > 1
    lines = []
    for key, (title, digits) in rows.items():
        values = {name: [file["numbers"][key]["value"] for file in group if key in file["numbers"]]
                  for name, group in groups.items()}
        lines.append([title, *(with_deviation(group, digits) for group in values.values())])
        if paired:
            lines[-1].append(paired_difference(values["(d) ours"], values["(a) base"], digits))
    return table(["", *header, *["(d) − (a)"] * paired], lines)


def trainings(name, key):
    """The diagnoses of all seeds of a classifier: KEY, KEY-s1, KEY-s2, as levels of noise."""
    tables = read(f"results/{name}.json")
    return [tables[one] for one in (key, f"{key}-s1", f"{key}-s2") if one in tables]


def all_nats(found, sigma_max=20.0):
    return [explained_nats(levels, 0.01, sigma_max)[0] for levels in found]


# ------------------------------------------------------------ images with a trained score model

TRAINED = {"none": "no guidance", "base": "(a) base", "scaling": "(b) scaling", "dlsm": "(d) ours",
           "dlsm-a10": "(d) + scaling", "free": "(c) posterior SM", "free-a1.5": "classifier-free, α = 1.5",
           "test": "real images"}
TRAINED_ROWS = {"fid": ("FD ↓", 2), "is": ("IS ↑", 2), "accuracy": ("Class accuracy ↑", 3), **QUALITY}


def fashion_samples():
    return over_seeds("fashion-16", TRAINED, TRAINED_ROWS)


def fashion_eta():
    """The reverse SDE without further Langevin diffusion, three seeds."""
    shown = ("fid", "accuracy", "recall", "density", "cw_fid", "cw_density")
    rows = {key: TRAINED_ROWS[key] for key in shown}
    return over_seeds("fashion-16-eta1", {"base-e1": "(a) base", "dlsm-e1": "(d) ours"}, rows)


def fashion_cas():
    """CAS: three trainings a column, for base and ours one on the samples of each seed."""
    runs, cells, real = read("results/fashion-16-cas.json"), {}, []
    for run in runs:
        files = run["files"]
        for name, title in TRAINED.items():
            found = [file["numbers"] for file in seeds_of(files, name)]
            cells.setdefault(title, []).extend(one["cas"]["value"] for one in found if "cas" in one)
        real.append(next(iter(files.values()))["numbers"]["cas_real"]["value"])
    ours, base = cells["(d) ours"], cells["(a) base"]
    cells = {title: with_deviation(values, 3) for title, values in cells.items() if values}
    cells |= {"real images": with_deviation(real, 3), "(d) − (a)": paired_difference(ours, base, 3)}
    return table(["", *cells], [["CAS ↑", *cells.values()]])


OTHERS = {"base": "(a) base", "base-aauto": "α\\*(σ)", "base-a3": "α = 3", "base-a3-interval": "α = 3, limited",
          "scaling": "(b) scaling", "renorm": "re-normalised, α = 10"}


def seed_0():
    """All samples of the trained score model that seed 0 drew, Table 2's and those of other α."""
    return {**read("results/fashion-16.json")["files"], **read("results/fashion-16-alpha.json")["files"]}


def fashion_others():
    """Other ways to guide with the same classifier, seed 0."""
    files = seed_0()
    rows = [[title, *(f"{files[name]['numbers'][key]['value']:.{digits}f}" for name in OTHERS)]
            for key, (title, digits) in TRAINED_ROWS.items()]
    return table(["", *OTHERS.values()], rows)


def fashion_lambda():
    """Table A4 in the order of the paper, with our weight of DLSM' and with the paper's; samples of three."""
    tables = read("results/fashion-16-lambda.json")
    files = read("results/fashion-16-lambda-samples.json")["files"]
    rows = []
    for tag, weight in (("lam", "σ², sum over pixels"), ("mean", "the paper's: mean over pixels")):
        for lam in ("2", "1", "0.5", "0.125"):
            levels = tables[f"classifier-total-{tag}{lam}"]
            nats, error = explained_nats(levels, 0.01, 20.0)
            rows.append([weight, lam, f"{nats:.2f} ± {error:.2f}".replace("-", "−"),
                         *(f"{levels[6][key]:.3f}" for key in ("accuracy", "ce", "gain", "alpha")),
                         f"{levels[1]['accuracy']:.3f}"])
            numbers = files.get(f"dlsm-{tag}{lam}", dict(numbers={}))["numbers"]
            for key, digits in (("fid", 2), ("accuracy", 3), ("cw_fid", 2)):
                rows[-1].append(f"{numbers[key]['value']:.{digits}f}" if numbers else "")
    columns = ["nats", "σ = 1.4: accuracy", "cross-entropy", "gain", "α\\*", "σ = 0.03: accuracy",
               "samples: FD", "class accuracy", "(CW) FD"]
    return table(["DLSM' weighted", "λ", *columns], rows)


def fashion_samplers():
    """Base and ours, and the oracle of an exact score model, by several samplers (seed 0)."""
    files = read("results/fashion-16-samplers.json")["files"]
    columns = {key: TRAINED_ROWS[key] for key in ("fid", "accuracy", "recall", "density", "cw_fid")}
    rows = []
    for file in files.values():
        recipe, numbers = file["recipe"], file["numbers"]
        steps, sampler = recipe["steps"], recipe["sampler"]
        name = dict(pc="PC", heun="Heun, γ = {gamma:g}", sde="SDE, η = {eta:g}")[sampler].format(**recipe)
        evaluations = dict(pc=2 * steps, heun=2 * steps - 1, sde=steps)[sampler]
        guidance = dict(base="base", dlsm="ours", oracle="oracle, exact score")[recipe["guidance"]]
        rows.append([guidance, name, f"{evaluations:,}", *(f"{numbers[key]['value']:.{digits}f}"
                                                           for key, (_, digits) in columns.items())])
    return table(["guidance", "sampler", "evaluations", *(title for title, _ in columns.values())], rows)


def fashion_alpha():
    """Table A5: a row per guidance scale, base / ours, seed 0."""
    files = seed_0()
    columns = {"fid": "FD ↓", "accuracy": "Class accuracy ↑", "precision": "Precision ↑", "recall": "Recall ↑",
               "cw_precision": "(CW) Precision ↑", "cw_recall": "(CW) Recall ↑"}
    rows = []
    for alpha in ("0.5", "1", "3", "5", "10", "20"):
        base = {"1": "base", "10": "scaling"}.get(alpha, f"base-a{alpha}")
        both = [files[base], files["dlsm" if alpha == "1" else f"dlsm-a{alpha}"]]
        cells = [alpha]
        for key in columns:
            digits = 2 if key == "fid" else 3
            cells.append(" / ".join(f"{file['numbers'][key]['value']:.{digits}f}" for file in both))
        rows.append(cells)
    return table(["α", *columns.values()], rows)


def fashion_diagnosis():
    """At σ = 1.4, where most of the class is decided; by score model and length of the training."""
    groups = (("24,000", "4,000", "fashion-16-diagnose", {"ce": "L_CE", "total": "L_Total"}),
              ("24,000", "", "fashion-16-diagnose", {"score-cond": "(c): s(x, y) − s(x)"}),
              ("6,000", "2,000", "fashion-16-seeds-diagnose", LOSSES),
              ("6,000", "1,000", "fashion-16-short",
               {"ce": "L_CE", "total": "L_Total", "ce-relu": "L_CE, ReLU",
                "total-paper": "L_Total, the paper's weights"}))
    rows = []
    for score_steps, steps, name, classifiers in groups:
        for key, title in classifiers.items():
            found = trainings(name, key if key == "score-cond" else f"classifier-{key}")
            cells = [title, score_steps, steps, str(len(found)), with_deviation(all_nats(found), 2)]
            for column in ("accuracy", "ce", "gain", "alpha"):
                values = [levels[6][column] for levels in found if column in levels[6]]
                cells.append(with_deviation(values, 3))
            rows.append(cells)
    return table(["classifier", "steps of the score model", "of the classifier", "trainings", "nats",
                  "σ = 1.4: accuracy", "cross-entropy", "gain", "α\\*"], rows)


def fid_of_real_images():
    rows = []
    for rule, measured in read("results/cifar10-fid.json").items():
        number = measured["files"]["test"]["numbers"]["fid"]
        rows.append([f"`--resize {rule}`", f"{number['n']:,}", "50,000", f"{number['value']:.3f}"])
    return table(["", "test images", "training images", "FID"], rows)


def real_against_real():
    rows = []
    for name, result in read("results/cifar10-16-real.json").items():
        n, reference, numbers = result["n"], result["reference"], result["numbers"]
        cells = [f"{n:,}", f"{reference:,}", f"{numbers['fid']['value']:.2f}"]
        cells += [f"{numbers[key]['value']:.3f}" for key in PRDC]
        rows.append([name, *cells, f"{1 - (reference / (reference + n)) ** 3:.3f}"])
    header = ["real images", "n", "N", "FD", "Precision", "Recall", "Density", "Coverage", "expected"]
    return table(header, rows)


# ------------------------------------------------------------ images with an exact score model

EXACT_ROWS = {"fid": ("FD ↓", 2), "exact_accuracy": ("Class accuracy, exact ↑", 3),
              "distinct": ("Distinct images", 0), **QUALITY}
del EXACT_ROWS["precision"]  # 1, as every sample is a training image
EXACT = {"base": "(a) base", "scaling": "(b) scaling", "dlsm": "(d) ours", "oracle": "(e) oracle"}
RELU = {"base-relu": "(a) base", "scaling-relu": "(b) scaling", "dlsm-relu": "(d) ours", "oracle": "(e) oracle"}
VARIANTS = {"": "", "-long": ", 10,000 steps", "-relu": ", ReLU, raw input",
            "-relu-4000": ", ReLU, raw input, 4,000 steps", "-paper": ", ReLU, raw input, the paper's weights"}


def exact_table_2():
    return over_seeds("fashion-16-exact", EXACT, EXACT_ROWS)


def exact_table_2_relu():
    return over_seeds("fashion-16-exact", RELU, EXACT_ROWS)


def cifar_exact_table_2():
    return over_seeds("cifar10-16-exact", EXACT, EXACT_ROWS)


def exact_table_1(data="fashion-16", sigma_max=20.0):
    """The diagnosis: nats, and the distance to the true likelihood score at three noise levels."""
    rows = []
    for tag, network in VARIANTS.items():
        for loss, title in LOSSES.items():
            found = trainings(f"{data}-exact-diagnose", f"classifier-{loss}{tag}")
            if not found:
                continue
            sigma = [f"{found[0][i]['sigma']:.2g}" for i in (5, 6, 7)]
            cells = [with_deviation(all_nats(found, sigma_max), 2)]
            for i in (5, 6, 7):
                relative = statistics.mean(levels[i]["D_L"] / levels[i]["h"] for levels in found)
                cells.append(f"{with_deviation([levels[i]['D_L'] for levels in found], 3)} ({relative:.2f})")
            for key in ("accuracy", "alpha"):
                cells.append(with_deviation([levels[6][key] for levels in found], 3))
            rows.append([title.removesuffix("'") + network, str(len(found)),
                         *(cell.replace("-", "−") for cell in cells)])
    header = ["classifier", "trainings", "nats", *(f"D_L at σ = {value}" for value in sigma)]
    return table([*header, f"accuracy at σ = {sigma[1]}", "α\\* there"], rows)


def cifar_exact_table_1():
    return exact_table_1("cifar10-16", 25.0)


def cifar_32_exact_table_1():
    return exact_table_1("cifar10-32", 50.0)


def draw_nats():
    """Figure 5 on images: nats over training, the mean over trainings ± two standard errors."""
    curves, panels = read("results/fashion-16-exact-curves.json"), []
    for title, more in (("Our network: SiLU, scaled input", ("", ", 10,000 steps")),
                        ("The paper's: ReLU, raw input", (", ReLU",))):
        lines = []
        for name in (f"{loss}{end}" for end in more for loss in ("L_CE", "L_DLSM", "L_Total")):
            if name in curves:
                nats = list(zip(*curves[name]["nats"]))  # a step's
                mean = [statistics.mean(values) for values in nats]
                error = [2 * statistics.stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in nats]
                band = [[m + sign * e for m, e in zip(mean, error)] for sign in (-1, 1)]
                lines.append((name, curves[name]["step"], mean, *band))
        panels.append(dict(title=title, x="training step", y="nats", lines=lines))
    chart(DOCS / "fashion-16" / "exact-nats.png", panels, columns=2)


def gpu():
    measured = read("results/gpu.json")
    return table(measured["header"], measured["rows"])


def benchmark():
    rows = read("results/benchmark.json")["rows"]
    compared = [row[:4] for row in rows if row[3] and "moons" not in row[0]]
    return table(["what", "ours", "reference", "ratio"], compared)


# ------------------------------------------------------------ the README


def FD_and_nats(title, name, sigma_max=20.0, tag=""):
    """A row of the README: FD of base, scaling and ours, nats of the two classifiers, over the seeds."""
    files = read(f"results/{name}.json")["files"]
    FD = [[file["numbers"]["fid"]["value"] for file in seeds_of(files, guidance + tag)]
          for guidance in ("base", "scaling", "dlsm")]
    found = [trainings(f"{name}-diagnose", f"classifier-{loss}{tag}") for loss in ("ce", "total")]
    nats = [with_deviation(all_nats(each, sigma_max), 2).replace("-", "−") for each in found]
    return [f"{title}, {len(FD[0])} seeds", *(with_deviation(values, 2) for values in FD), *nats]


def glance():
    rows = [["two moons, D_L: the paper", *(pair(PAPER[key]["D_L"]) for key in "abd"), "", ""]]
    for name, title in (("moons", "5 seeds"), ("moons-paper", "`--preset paper`")):
        methods = read(f"results/{name}.json")["late"]["methods"]
        rows.append([f"... {title}", *(pair(methods[key]["D_L"]) for key in "abd"), "", ""])
    FID = [f"{TABLE_2['cifar10'][method][0]:.2f}" for method in ("base", "scaling", "ours")]
    rows.append(["CIFAR-10 at 32×32, FID: the paper", *FID, "", ""])
    rows.append(FD_and_nats("Fashion-MNIST, FD: exact scores", "fashion-16-exact"))
    rows.append(FD_and_nats("... the paper's network", "fashion-16-exact", tag="-relu"))
    rows.append(FD_and_nats("... trained score model", "fashion-16"))
    rows.append(FD_and_nats("CIFAR-10, FD: exact scores", "cifar10-16-exact", 25.0))
    header = ["", "base: L_CE", "scaling: α = 10", "ours: L_Total", "nats, L_CE", "nats, L_Total"]
    return table(header, rows)


# ------------------------------------------------------------ the pages


def filled(text):
    """The page with every table made anew."""
    def replace(match):
        return f"<!-- table {match[1]} -->\n\n{globals()[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def main():
    stale = []
    for page in [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]:
        text = page.read_text()
        if filled(text) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(filled(text))
    if "--check" not in sys.argv:
        draw_nats()
    if stale:
        print("changed:" if "--check" not in sys.argv else "not what the result files say:", *stale)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
