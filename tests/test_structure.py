"""The shape of the code: who imports whom, how long files and functions are, what is committed."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from lines import family_lines

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "transformers_neuronx"
FAMILIES = sorted(path.parent.name for path in PACKAGE.glob("*/model.py"))
# Each imports only what stands before it. Families stand beside each other; what they may import is in SHARED.
ORDER = [
    "errors", "version", "env", "support", "config", "pyhlo", "hlo", "neuron", "compiler", "weights", "layers",
    "runtimes", "engine", "serving", "models", "FAMILY", "families", "speculation", "huggingface",
    "analysis", "original", "trace", "server", "cli", "__main__", "__init__",
]  # fmt: skip
# In these packages, each file imports only those before it. The package itself, `__init__`, comes last.
INSIDE = {
    "support": ["progress", "files", "arguments", "turns", "entropy", "user_cache", "interrupts", "torch_threads"],
    "config": [
        "constants", "sparse_attention", "token_trees", "kept", "attributes", "multimodal", "declarations", "workers",
        "switches", "gguf_metadata", "gguf_positions", "gguf_gemma", "gguf", "published",
    ],
    "pyhlo": [
        "hlo_pb2", "dtypes", "opcodes", "shapes", "computations", "tensors", "literals", "scribe", "rewriting",
    ],
    "weights": [
        "layouts", "codes", "packed", "loops", "bits", "panels", "splits", "one_pass", "rows", "quantization",
        "other_formats", "formats", "words", "coded", "gguf_file", "gguf_blocks", "gguf_names", "gguf", "published",
        "directories", "saving", "stored_module", "checkpoint", "adapters", "origin", "outputs", "parameters",
        "reading", "lora", "quantizing",
    ],
    "engine": [
        "keys", "kv_cache", "loops", "family", "images", "programs", "rectangles", "compile_cache", "loading", "store",
        "adapters", "encoding", "tower", "rules", "outputs", "inputs", "decoder", "feeding", "slots", "profiling",
        "metrics", "manifest", "descriptions", "artifact_weights", "artifact_saving", "artifacts",
    ],
    "serving": [
        "text", "structured", "adapters", "drafting", "limits", "request", "pages", "kv_cache", "scheduler",
        "step_writer", "steps", "blocks", "choices", "pooling", "paged", "step_times", "paged_slots", "slots",
        "guesses", "draft_models", "draft_heads", "loop", "calls", "records", "handles", "parts", "head_calls",
        "engine",
    ],
    "models": [
        "weight_loading", "block_calls", "generation", "base", "methods", "sampling", "encoder_decoder", "vision",
        "worker",
    ],
    "speculation": ["acceptors", "drafts", "trees", "fused", "eagle"],
    "huggingface": ["auto", "tokenizers", "device_cache", "speech", "vision", "adapter"],
    "server": [
        "errors", "fields", "settings", "logs", "tool_formats", "calls", "tools", "parameters", "pictures", "prompts",
        "answers", "scores", "models", "embeddings", "gate", "metrics", "openapi", "page", "app", "running", "on_ray",
    ],
    "analysis": ["inspection", "planning", "comparison", "perplexity"],
}  # fmt: skip
MOST_ENTRIES = 25  # at the top of the package, besides families
FILE_LINES, FUNCTION_LINES = 400, 40
CLASS_LINES = 250  # without docstrings: callers read those of public classes first
# Of families with LLaMA's graph.
DIFFERENT = set("alone bases convolution delta feedforward hybrid latent like mamba mixture routed scaled".split())
SHARED = {f"transformers_neuronx.llama.{name}" for name in DIFFERENT | {"graph", "weights"}}
# What families in one file may import: graphs, weight tables and configurations of these.
BASES = {f"transformers_neuronx.{family}" for family in ("llama", "gpt2", "gptj")}
BASES |= SHARED | {f"{base}.{part}" for base in BASES for part in ("config", "graph", "weights")}
# A tower for images is a model of its own, with sizes, rows and a forward pass in one file.
# An encoder takes 20 lines of weights. LLaMA's describe 50 families: what these have different is in more files.
FAMILY_LINES = {"config.py": 40, "graph.py": 100, "weights.py": 80, "model.py": 40, "tower.py": 160}
OF_LLAMA = {f"{name}.py" for name in DIFFERENT}
FAMILY_LINES |= dict.fromkeys(OF_LLAMA, 80)
CONFIG_LINES = {"gemma4text": 120, "llama4text": 70}  # of more than 40: what differs in each kind of layer
ONE_FILE_LINES = 80

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.endswith("_pb2.py"))


def room(module):
    """The top-level name under the package, and its place in the order."""
    name = module.split(".")[1] if "." in module else "__init__"
    place = "FAMILY" if name in FAMILIES else name
    assert place in ORDER, f"{name} has no place in the order: add it to ORDER or FAMILIES"
    return name, ORDER.index(place)


def inside(module):
    """The place of a module in its package, and its name there; the package itself comes last."""
    _, package, name, *_ = [*module.split("."), "__init__"]
    names = [*INSIDE[package], "__init__"]
    assert name in names, f"{module} has no place in {package}: add it to INSIDE"
    return names.index(name), name


@cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path):
    """Yield the modules that a file imports, and all names that it takes from the package itself."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = {name for name in full if node.module == PACKAGE.name or is_module(name)}
            yield from inner if inner == full else {node.module, *inner}


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    name, place = room(module)
    for other in imported(path):
        if not other.startswith(PACKAGE.name + "."):
            continue
        other_name, other_place = room(other)
        if other_name == name:
            beside = name == "families" and not module.endswith(name)  # they stand beside each other
            allowed = not beside and (
                name not in INSIDE or inside(other) < inside(module) or inside(other)[1:] == inside(module)[1:]
            )
        elif name == "families" and other_name in FAMILIES:
            allowed = other in BASES
        else:
            allowed = other_place < place or (name in FAMILIES and other in SHARED)
        assert allowed, f"{module} imports {other}, which it may not import"


def test_the_guide_lists_what_there_is_in_this_order():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    packages, *insides = guide.split("\n| file | owns |\n")[1:]

    def rows(table):
        lines = re.findall(r"^\| (`[^|]*`)[^|]*\|", table.split("\n\n")[0], re.M)
        return [name for row in lines for name in re.findall(r"`(\w+)/?`", row)]

    wanted = [name for name in ORDER[:-2] if name != "FAMILY"]
    assert [name for name in rows(packages) if name not in FAMILIES] == wanted
    assert [rows(table) for table in insides] == list(INSIDE.values())


def test_the_top_of_the_package_is_short():
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    entries -= {*FAMILIES, "families"}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def docstring_lines(node):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not ast.get_docstring(node):
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_classes_and_functions_keep_their_budget(path):
    text = path.read_text()
    limit = FAMILY_LINES[path.name] if path.parent.name in FAMILIES and path.name in FAMILY_LINES else FILE_LINES
    limit = ONE_FILE_LINES if path.parent.name == "families" else limit
    limit = CONFIG_LINES.get(path.parent.name, limit) if path.name == "config.py" else limit
    assert text.count("\n") <= limit
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{node.name} has {lines} lines"
        elif isinstance(node, ast.ClassDef):
            lines = node.end_lineno - node.lineno + 1 - sum(map(docstring_lines, ast.walk(node)))
            assert lines <= CLASS_LINES, f"{node.name} has {lines} lines without docstrings"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_graph_and_weights_of_its_own_or_those_of_llama(family):
    files = set(family_lines()[family])
    assert {"config.py", "model.py"} <= files <= set(FAMILY_LINES) - (OF_LLAMA if family != "llama" else set())
    used = set(imported(PACKAGE / family / "model.py"))
    for part in ("graph", "weights"):
        home = family if f"{part}.py" in files else "llama"
        assert f"{PACKAGE.name}.{home}.{part}" in used, f"{family}/model.py does not import {home}.{part}"


def test_half_of_the_families_have_at_most_a_hundred_lines():
    lines = [sum(files.values()) for files in family_lines().values()]
    assert median(lines) <= 100


def test_the_list_of_models_has_every_class():
    listed = re.findall(r"`([\w.]+)\.\w+ForSampling` \|", (ROOT / "docs" / "models.md").read_text())
    files = [f"families.{path.stem}" for path in PACKAGE.glob("families/*.py") if path.stem != "__init__"]
    assert sorted(listed) == sorted([*(f"{name}.model" for name in FAMILIES), *files])


def test_the_guide_has_the_lines_of_llama():
    guide = (ROOT / "docs" / "adding-a-model.md").read_text()
    for name, lines in family_lines()["llama"].items():
        assert re.search(rf"llama/{name}`\]\(\S+\) \| {lines} \|", guide), f"llama/{name} has {lines} lines"


@pytest.mark.parametrize(
    ("engine", "homes"),
    [
        ("jaxlib", {f"runtimes/{name}.py" for name in ("xla", "xla_arrays", "xla_clients")}),
        ("os.environ", {"env.py"}),
        ("torch_neuronx", {"runtimes/neuron.py", "neuron/presence.py"}),
        ("libneuronxla", {"neuron/through_libneuronxla.py"}),
    ],
)
def test_engines_and_environment_have_one_home(engine, homes):
    def uses(path):
        names = {
            node.value.id + "." + node.attr
            for node in nodes(path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        return engine in names or any(name.split(".")[0] == engine for name in imported(path) if name)

    users = {str(path.relative_to(PACKAGE)) for path in SOURCES if uses(path)}
    assert users <= homes


def test_what_is_committed_is_small():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listing.split("\0") if name and (ROOT / name).exists()}
    assert sizes, "git lists no files"
    assert max(sizes.values()) <= 4_000_000
    assert sum(sizes.values()) <= 30_000_000
