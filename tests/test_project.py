"""The frame of the project: import direction, packaging, and what files may not say."""

import ast
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import jupytext
import pytest

ROOT = pathlib.Path(__file__).parent.parent
# An import may point to a lower rank or stay within its own package.
RANK = {"pallas_kernels": 0, "treewy_jax": 1, "models": 2, "scripts": 3, "colab": 3}
PACKAGES = ("pallas_kernels", "treewy_jax", "models")
GPU_OR_OPTIONAL = ("jax_triton", "triton", "torch", "transformers", "matplotlib")
# Written in Triton's language, so Triton compiles it as it is imported: by its leaf,
# once that has found the package.
IN_TRITON = "pallas_kernels.tree_verify.jax_triton_kernel"


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked_files():
    """Files of the repository, new ones included, ignored ones not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / name for name in names.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def modules(package):
    """Dotted names of a package's modules that import anywhere."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != IN_TRITON:
            yield name


# --- import direction ---------------------------------------------------------------


def imported_names(source):
    """Modules that a source imports, by statement or by a string that names one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[a-z]\w*(\.\w+)+", node.value):
                yield node.value


def wrong_imports(package, source):
    """The imports of a source in `package` that point the wrong way."""
    for name in imported_names(source):
        top = name.split(".")[0]
        other = top != package and RANK.get(top, -1) >= RANK[package]
        if name.startswith(".") or other or top == "tests":
            yield name


@pytest.mark.parametrize("package", RANK)
def test_imports_point_down(package):
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in (ROOT / package).rglob("*.py")
        if (names := list(wrong_imports(package, path.read_text())))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("pallas_kernels", "import treewy_jax.tree"),
        ("treewy_jax", "def f():\n    from models.qwen3_5 import config"),
        ("treewy_jax", "TABLE = {'x': 'models.qwen3_5.model'}"),
        ("models", "from scripts import train"),
        ("models", "from . import checkpoints"),
        ("scripts", "import colab.helpers"),
        ("models", "from tests import helpers"),
    ],
)
def test_wrong_imports_are_found(package, source):
    assert list(wrong_imports(package, source))


# --- packages -----------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_imports_on_this_device(package):
    names = list(modules(package))
    assert package in names
    for name in names:
        importlib.import_module(name)


def test_packages_import_without_optional_libraries():
    names = [name for package in PACKAGES for name in modules(package)]
    code = "\n".join(
        [
            "import importlib, sys",
            f"for name in {GPU_OR_OPTIONAL!r}: sys.modules[name] = None",
            f"for name in {names!r}: importlib.import_module(name)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_wheel_holds_the_packages_and_the_shipped_model():
    config = pyproject()
    wheel = config["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel["packages"]) == sorted(PACKAGES)
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").is_file()
    tracked = {str(path.relative_to(ROOT)) for path in tracked_files()}
    folder = "models/pretrained/tiny/"
    assert {folder + "tokenizer.json", folder + "NOTICE"} <= tracked
    everything = {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    assert everything <= tracked, "files of the shipped model that git ignores"
    assert set(config["project"]["license-files"]) <= tracked


def test_shipped_files_are_small():
    large = [p.name for p in tracked_files() if p.stat().st_size > 15 * 2**20]
    assert large == []


# --- consistency --------------------------------------------------------------------


def test_versions_agree():
    version = pyproject()["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == version
    selected = (ROOT / ".python-version").read_text().strip()
    assert selected == "3.12"
    assert pyproject()["project"]["requires-python"] == f">={selected}"


def test_pins_lie_in_the_ranges():
    """Every core dependency has one exact pin, and its range starts at or below it."""
    config = pyproject()
    pins = dict(pin.split("==") for pin in config["dependency-groups"]["pins"])
    ranges = {}
    for requirement in config["project"]["dependencies"]:
        name, low, high = re.fullmatch(
            r"([\w-]+)>=([\d.]+),<([\d.]+)", requirement
        ).groups()
        ranges[name] = (low, high)
    assert pins.keys() == ranges.keys()
    for name, (low, high) in ranges.items():
        numbers = [[int(x) for x in v.split(".")] for v in (low, pins[name], high)]
        assert numbers == sorted(numbers), name


def documents():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_name_what_exists(path):
    """Make targets and files that a document names, in code, are there."""
    text = path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?=[`\n]| [A-Z]+=|$)", text))
    assert named and named <= targets
    tops = "|".join((*RANK, "tests"))
    for file in set(re.findall(rf"\b(?:{tops})/[\w./-]*\.(?:py|md|json)\b", text)):
        assert (ROOT / file).is_file(), file


def test_notebooks_say_what_their_pairs_say():
    for notebook in (ROOT / "colab").glob("*.ipynb"):
        script = notebook.with_suffix(".py")
        cells = [
            [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]
            for path in (notebook, script)
        ]
        assert cells[0] == cells[1], f"run jupytext --sync {script.name}"


def test_prompts_have_six_categories_and_two_sources():
    lines = (ROOT / "scripts/data/prompts80.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len({row["question_id"] for row in rows}) == 80
    assert len({row["category"] for row in rows}) == 6
    sources = [row["source"] for row in rows]
    assert (sources.count("handwritten"), sources.count("generated")) == (30, 50)


# --- what no file may say -----------------------------------------------------------

FORBIDDEN = re.compile(
    rb"(?<![\w.])/(?:work|tmp|root|farm|home/\w+|opt/(?:wheels|pypi))/"
    rb"|(?:pypi|pythonhosted|npmjs|debian|huggingface)\.(?:org|com|co)\b"
)


def test_no_path_of_a_machine_and_no_host_of_a_registry():
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in tracked_files()
        if path != pathlib.Path(__file__)
        and (match := FORBIDDEN.search(path.read_bytes()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [b"cd /work/main", b"'/tmp/x'", b"https://pypi.org/simple", b"/opt/wheels/a"],
)
def test_paths_and_hosts_are_found(text):
    assert FORBIDDEN.search(text)
