"""The table of the original's names, walked: each imports, and is called or says why not."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from transformers_neuronx.errors import NotSupportedError, TransformersNeuronxError
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.original import names
from transformers_neuronx.support import arguments

MODULES = list(names.modules().values())
NAMES = [name for module in MODULES for name in module.names.values()]


def found(name):
    """Import what a line of the table names, as a program would: a name of a module, or a member of a class in it."""
    owner, _, member = name.name.partition(".")
    thing = getattr(importlib.import_module(name.module), owner)
    if owner == "NeuronModelBase":
        thing = LlamaForSampling  # some of its methods belong to the models that derive from it
    return getattr(thing, member) if member else thing


def wanted(name):
    """The original's arguments by position and by name alone."""
    given = ast.parse(f"def f{name.arguments}: ...").body[0].args
    return [each.arg for each in given.args], [each.arg for each in given.kwonlyargs]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.path)
def test_every_module_imports_and_every_refused_name_has_a_reason(module):
    importlib.import_module(module.path)
    for name in module.names.values():
        assert name.verdict in names.VERDICTS
        assert name.note or name.verdict in (names.WORKS, names.IDLE), f"{name.path} does not say why"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.path)
def test_every_name_is_there(module):
    for name in module.names.values():
        thing = found(name)
        if name.verdict == names.REFUSED:
            with pytest.raises(NotSupportedError) as caught:
                thing()
            assert str(caught.value).endswith(f".{name.name.split('.')[-1]}: {name.note}")


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.verdict in (names.WORKS, names.IDLE) and n.arguments], ids=lambda name: name.path
)
def test_what_works_takes_the_original_s_arguments(name):
    thing, (by_position, by_name) = found(name), wanted(name)
    if name.name in arguments.ORDERS:
        assert arguments.ORDERS[name.name].split()[: len(by_position) - 1] == by_position[1:]
        return
    own = list(inspect.signature(thing).parameters.values())
    own = own[1:] if "." in name.name and own and own[0].name == "self" else own
    kinds = {each.kind for each in own}
    named = {each.name for each in own}
    placed = [each.name for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    renamed = {"pretrained_model_name_or_path": "path_or_name", "pretrained_model_path": "path_or_name"}
    by_position = [renamed.get(each, each) for each in by_position]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        assert placed[: len(by_position)] == by_position
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        assert named.issuperset(by_position + by_name)


@pytest.mark.parametrize("name", ["HLOKernel", "ParallelKernel.profile", "Kernel.load"])
def test_a_refused_class_can_be_derived_from_and_its_members_say_why(name):
    compiler = importlib.import_module("transformers_neuronx.compiler")
    owner, _, member = name.partition(".")
    refused = getattr(compiler, owner)
    assert not isinstance(3, refused) and issubclass(type("Own", (refused,), {}), refused)
    with pytest.raises(NotSupportedError, match=f"^transformers_neuronx.compiler.{name}: here a module is run"):
        (getattr(refused, member) if member else refused)(1, tp_degree=2)


def test_the_pages_tell_the_table():
    docs = Path(__file__).parents[2] / "docs"
    assert subprocess.run([sys.executable, docs / "names.py", "--check"]).returncode == 0, "run python docs/names.py"
    counts = [len([name for name in NAMES if name.verdict == verdict]) for verdict in names.VERDICTS]
    told = (docs / "compatibility.md").read_text().replace("\n", " ")
    assert f"{len(NAMES)} in {len(MODULES)} modules. Of these, {counts[0]} work, {counts[1]} have no effect" in told
    assert f"{counts[2]} differ in what their line says, and {counts[3]} are refused" in told


def test_other_names_are_missing_as_usual():
    hlo = importlib.import_module("transformers_neuronx.hlo")
    with pytest.raises(AttributeError, match=r"module 'transformers_neuronx.hlo' has no attribute 'nonsense'"):
        _ = hlo.nonsense
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformers_neuronx.nonsense")
    assert not hasattr(hlo, "__path_of_nothing__") and issubclass(NotSupportedError, TransformersNeuronxError)
