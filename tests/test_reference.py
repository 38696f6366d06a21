"""The public API, as docs/public.py lists it, is documented and typed."""

import ast
import inspect
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import transformers_neuronx

ROOT = Path(__file__).parents[1]
PROGRAM = """
import torch
import transformers_neuronx as neuronx
from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import GenerationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.errors import TransformersNeuronxError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.pyhlo import HloScribe, Tensor
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.speculation.drafts import SpeculativeGenerator


def made(path: str) -> ForSampling:
    switches = NeuronConfig(quant=QuantizationConfig("s8"), on_device_generation=GenerationConfig(top_k=1))
    model = neuronx.LlamaForSampling.from_pretrained(path, n_positions=128, tp_degree=2, neuron_config=switches)
    try:
        model.to_neuron()
    except TransformersNeuronxError as error:
        raise SystemExit(str(error)) from error
    return model


def text(model: ForSampling, prompt: torch.Tensor) -> list[int]:
    tokens = model.sample(prompt, sequence_length=64, seed=0)
    reveal_type(model.metrics.tokens_per_second)
    reveal_type(SpeculativeGenerator(None, model).target)
    return [int(token) for token in tokens[0]]


def doubled(scribe: HloScribe) -> Tensor:
    return hlo.sum(scribe.f32[8].Parameter(parameter_number=0) * 2.0, axes=0)


program = get_runtime("cpu", degree=1).compile(compile_py_func(doubled))
reveal_type(program)
reveal_type(GPT2ForSampling.from_pretrained("gpt2"))
reveal_type(neuronx.NeuronAutoModelForCausalLM.from_pretrained("gpt2"))
made("gpt2").sample([[1]], sequence_length="64")
neuronx.LamaForSampling
"""


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import public
    finally:
        sys.path.pop(0)
    return public


def lacking(name, value):
    """What a function or a class of the package, with the methods that it defines, lacks of docstrings and types."""
    if inspect.isclass(value):
        if not vars(value).get("__doc__") or (is_dataclass(value) and value.__doc__.startswith(f"{value.__name__}(")):
            yield f"{name}: no docstring"
        made_here = {field.name for field in fields(value)} if is_dataclass(value) else set()
        for member, attribute in vars(value).items():
            function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
            if inspect.isfunction(function) and not member.startswith("_") and member not in made_here:
                yield from lacking(f"{name}.{member}", function)
        return
    if not inspect.getdoc(value):
        yield f"{name}: no docstring"
    for parameter in inspect.signature(value).parameters.values():
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls"):
            yield f"{name}: no type of {parameter.name}"
    if inspect.signature(value).return_annotation is inspect.Signature.empty:
        yield f"{name}: no type of what it returns"


def test_every_public_name_has_a_docstring_and_types(reference):
    names = []
    for module in reference.modules().values():
        assert module.__doc__, module
        for name in module.__all__:
            value = getattr(module, name)
            if value.__module__.startswith(reference.PACKAGE):  # and is not one of Transformers' or protobuf's
                names.append(f"{module.__name__}.{name}")
                assert not list(lacking(names[-1], value))
    assert {"transformers_neuronx.hlo.sum", "transformers_neuronx.llama.model.LlamaForSampling"} <= set(names)


def test_what_is_lacking_is_found():
    class Bare:
        """With a docstring."""

        def method(self, value) -> None:
            pass

        @property
        def typed(self) -> int:
            """With all that is wanted."""
            return 0

    assert list(lacking("Bare", Bare)) == ["Bare.method: no docstring", "Bare.method: no type of value"]
    assert list(lacking("f", lambda: None)) == ["f: no docstring", "f: no type of what it returns"]


@pytest.mark.slow
def test_a_typed_program_is_checked(tmp_path):
    """By a type checker that is strict, as what is installed says its types with `py.typed`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--strict", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    environment = {"MYPYPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    told = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("program.py")]
    package = "transformers_neuronx"
    assert told.pop().startswith('error: Module has no attribute "LamaForSampling"; maybe "LlamaForSampling"')
    assert told == [
        'note: Revealed type is "float"',
        f'note: Revealed type is "{package}.models.sampling.ForSampling"',
        f'note: Revealed type is "{package}.runtimes.base.Executable"',
        f'note: Revealed type is "{package}.gpt2.model.GPT2ForSampling"',
        f'note: Revealed type is "{package}.models.sampling.ForSampling"',
        'error: Argument "sequence_length" to "sample" of "ForSampling" has incompatible type "str"; expected "int"  '
        "[arg-type]",
    ], done.stdout


def test_names_at_the_top_have_types():
    """What a type checker imports is what is imported when it is asked for."""
    tree = ast.parse((ROOT / "transformers_neuronx" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body for alias in node.names if alias.asname == alias.name}
    assert typed == {name: f"transformers_neuronx.{home}" for name, home in transformers_neuronx._HOMES.items()}
    assert all(getattr(transformers_neuronx, name).__name__ == name for name in typed)


def test_what_is_installed_says_that_it_has_types(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    built = {path.name for path in (tmp_path / "transformers_neuronx").iterdir()}
    assert {"py.typed", "__init__.py", "cli"} <= built
