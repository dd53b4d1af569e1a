"""Fills the tables of README.md and docs/*.md from docs/results/*.json: no number in them is typed.

    python docs/tables.py            # rewrites the pages
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
from evaluate import PRDC, markdown, paper_columns  # noqa: E402
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


def table_2(name, columns=None, paper=None):
    """The rows of the paper's Table 2 from an evaluation.json, all columns or some of them."""
    files = read(f"results/{name}.json")["files"]
    shown = {key: files[key]["numbers"] for key in columns or files}
    shown.update(paper_columns(paper) if paper else {})
    return markdown(shown, "FD", real=["test"])


def fashion_alpha_1():
    return table_2("fashion-16", ["base", "dlsm", "renorm", "base-aauto", "test"])


def fashion_scaled():
    return table_2("fashion-16", ["base-a3", "dlsm-a3", "scaling", "dlsm-a10"])


def cifar_alpha_1():
    return table_2("cifar10-16", ["base", "dlsm", "scaling", "test"], paper="cifar10")


def cifar_scaled():
    return table_2("cifar10-16", ["base-aauto", "base-a3", "dlsm-a3", "dlsm-a10"])


def diagnosis_row(name, steps, rows, level=6):
    nats, error = explained_nats(rows, 0.01, 20.0)
    numbers = [f"{rows[level][key]:.3f}" for key in ("accuracy", "ce", "gain")]
    return [name, f"{steps:,}", f"{nats:.2f} ± {error:.2f}", *numbers, f"{rows[level]['alpha']:.2f}"]


def fashion_diagnosis():
    """At σ = 1.4, where most of the class is decided."""
    long, short = read("pretrained/fashion-16/diagnose.json"), read("results/fashion-16-short.json")
    names = (("L_CE", "ce", 2000), ("L_DLSM'", "dlsm", 2000), ("L_Total", "total", 2000),
             ("L_CE", "ce", 1000), ("L_Total", "total", 1000), ("L_CE, ReLU", "ce-relu", 1000),
             ("L_Total, the paper's weights", "total-paper", 1000))
    rows = [diagnosis_row(name, steps, (long if steps == 2000 else short)[f"classifier-{key}"])
            for name, key, steps in names]
    header = ["classifier", "steps", "all noise levels, nats", "σ = 1.4: accuracy", "cross-entropy", "gain",
              "α\\*"]
    return table(header, rows)


def numbers_row(title, files, nats=()):
    numbers = [file["numbers"] for file in files]
    cells = [title, f"{files[0]['n']:,}", with_deviation(nats, 2)]
    for key in ("fid", "accuracy", "cw_precision", "cw_recall", "cw_density"):
        values = [number[key]["value"] for number in numbers if key in number]
        cells.append(with_deviation(values, 2 if key == "fid" else 3))
    return cells


SEED_COLUMNS = ["", "images", "nats", "FD", "Class accuracy", "(CW) Precision", "(CW) Recall", "(CW) Density"]


def fashion_seeds():
    files = read("results/fashion-16-seeds.json")["files"]
    tables = {**read("pretrained/fashion-16/diagnose.json"),
              **read("results/fashion-16-seeds-diagnose.json")}
    rows = []
    for name, loss in (("base", "ce"), ("dlsm", "total")):
        names = [f"classifier-{loss}{tag}" for tag in ("", "-s1", "-s2")]
        nats = [explained_nats(tables[key], 0.01, 20.0)[0] for key in names]
        group = [files[f"{name}-s{i}"] for i in range(3)]
        rows.append(numbers_row(f"{name}, three classifiers", group, nats))
    rows.append(numbers_row("none", [files["none-s0"]]))
    samplers = {"Heun, 24 steps": ("heun", "none base dlsm"),
                "Heun, 40 steps, γ = 1": ("heun40", "none base dlsm"),
                "PC, 100 steps": ("pc", "base dlsm"), "PC, 1,000 steps": ("pc1000", "dlsm")}
    for sampler, (key, names) in samplers.items():
        for name in names.split():
            rows.append(numbers_row(f"{name}, {sampler}", [files[f"{name}-{key}"]]))
    return table(SEED_COLUMNS, rows)


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
              "distinct": ("Distinct images", 0), "precision": ("Precision ↑", 3), "recall": ("Recall ↑", 3),
              "density": ("Density ↑", 3), "coverage": ("Coverage ↑", 3), "cw_fid": ("(CW) FD ↓", 2),
              **{f"cw_{key}": (f"(CW) {key.capitalize()} ↑", 3) for key in PRDC}}
EXACT = {"base": "(a) base", "scaling": "(b) scaling", "renorm": "(b') re-normalised", "dlsm": "(d) ours",
         "oracle": "(e) oracle", "base-relu": "(a) base, ReLU", "dlsm-relu": "(d) ours, ReLU"}


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
    header = [f"{title}, {len(group)} seed{'s' if len(group) > 1 else ''}" for title, group in groups.items()]
    paired = len(groups["(d) ours"]) > 1
    lines = []
    for key, (title, digits) in rows.items():
        values = {name: [file["numbers"][key]["value"] for file in group if key in file["numbers"]]
                  for name, group in groups.items()}
        lines.append([title, *(with_deviation(group, digits) for group in values.values())])
        if paired:
            lines[-1].append(paired_difference(values["(d) ours"], values["(a) base"], digits))
    return table(["", *header, *["(d) − (a)"] * paired], lines)


def exact_table_2():
    return over_seeds("fashion-16-exact", EXACT, EXACT_ROWS)


def cifar_exact_table_2():
    return over_seeds("cifar10-16-exact", EXACT, EXACT_ROWS)


def trainings(loss, tag="", data="fashion-16"):
    """The diagnoses of all seeds of a classifier: classifier-LOSS[-TAG], then those with -s1, -s2."""
    tables, name = read(f"results/{data}-exact-diagnose.json"), f"classifier-{loss}{tag}"
    return [tables[key] for key in (name, f"{name}-s1", f"{name}-s2") if key in tables]


def exact_table_1(data="fashion-16", sigma_max=20.0):
    """The diagnosis: nats, and the distance to the true likelihood score at three noise levels."""
    rows = []
    for tag, network in (("", ""), ("-relu", ", ReLU, raw input")):
        for loss, title in LOSSES.items():
            found = trainings(loss, tag, data)
            if not found:
                continue
            cells = [with_deviation([explained_nats(levels, 0.01, sigma_max)[0] for levels in found], 2)]
            for i in (5, 6, 7):
                relative = statistics.mean(levels[i]["D_L"] / levels[i]["h"] for levels in found)
                cells.append(f"{with_deviation([levels[i]['D_L'] for levels in found], 3)} ({relative:.2f})")
            for key in ("accuracy", "alpha"):
                cells.append(with_deviation([levels[6][key] for levels in found], 3))
            rows.append([title.removesuffix("'") + network, str(len(found)),
                         *(cell.replace("-", "−") for cell in cells)])
    sigma = [f"{trainings('ce', '', data)[0][i]['sigma']:.2g}" for i in (5, 6, 7)]
    header = ["classifier", "trainings", "nats", *(f"D_L at σ = {value}" for value in sigma)]
    return table([*header, f"accuracy at σ = {sigma[1]}", "α\\* there"], rows)


def cifar_exact_table_1():
    return exact_table_1("cifar10-16", 25.0)


def gpu():
    measured = read("results/gpu.json")
    return table(measured["header"], measured["rows"])


def benchmark():
    rows = read("results/benchmark.json")["rows"]
    return table(["what", "ours", "reference", "ratio"], [row[:4] for row in rows if "--help" not in row[0]])


# ------------------------------------------------------------ the README


def exact_glance():
    """Of the exact score model: D_L where most of the class is decided, nats, FD of samples."""
    rows, name = [], "Fashion-MNIST at 16×16, exact score model"
    both = [trainings("ce"), trainings("total")]
    cells = [with_deviation([levels[6]["D_L"] for levels in found], 3) for found in both]
    rows.append([f"{name}, {len(both[0])} seeds: D_L at σ = 1.4", *cells, ""])
    cells = [with_deviation([explained_nats(levels, 0.01, 20.0)[0] for levels in found], 2) for found in both]
    rows.append(["the same: nats", *cells, ""])
    files = read("results/fashion-16-exact.json")["files"]
    scaling = files["scaling"]["numbers"]["fid"]["value"]
    cells = [with_deviation([file["numbers"]["fid"]["value"] for file in seeds_of(files, name)], 2)
             for name in ("base", "dlsm")]
    cells[0] += f" ({scaling:.2f})"
    n = files["base"]["n"]
    rows.append([f"the same: FD@{n} of samples (with α = 10)", *cells, "FID 4.10 (12.48) → 2.25"])
    return rows


def glance():
    moons, authors = read("results/moons.json")["late"], read("results/moons-paper.json")["late"]
    rows = []
    for results, title in ((moons, "two moons, 5 seeds: D_L"), (authors, "the same, `--preset paper`")):
        ours = [pair(results["losses"][loss]["D_L"]) for loss in ("ce", "total")]
        paper = " → ".join(pair(PAPER[key]["D_L"]) for key in ("a", "d"))
        rows.append([title, *ours, paper])
    rows += exact_glance()
    tables = read("results/fashion-16-seeds-diagnose.json")
    tables.update(read("pretrained/fashion-16/diagnose.json"))
    nats = [[explained_nats(tables[f"classifier-{loss}{tag}"], 0.01, 20.0)[0] for tag in ("", "-s1", "-s2")]
            for loss in ("ce", "total")]
    rows.append(["the same, trained score model, 3 seeds: nats", *(with_deviation(v, 2) for v in nats), ""])
    files = read("results/fashion-16-seeds.json")["files"]
    cells = [with_deviation([files[f"{name}-s{i}"]["numbers"]["fid"]["value"] for i in range(3)], 2)
             for name in ("base", "dlsm")]
    rows.append(["the same: FD@2500 of samples, α = 1", *cells, "FID 4.10 → 2.25 (CIFAR-10)"])
    tables = read("pretrained/cifar10-16/diagnose.json")
    nats = [explained_nats(tables[f"classifier-{loss}"], 0.01, 25.0) for loss in ("ce", "total")]
    cells = [f"{value:.2f} ± {error:.2f}" for value, error in nats]
    rows.append(["CIFAR-10 at 16×16, one seed: nats", *cells, ""])
    return table(["", "L_CE", "L_Total, ours", "the paper"], rows)


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
    if stale:
        print("changed:" if "--check" not in sys.argv else "not what the result files say:", *stale)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
