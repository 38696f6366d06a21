"""The compiler for Neuron as a child process: which one runs, its arguments, and its results.

It is a stand-in, `neuronx-cc` in this directory. The real one has not run here.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from standin_cc import LIBNEURONXLA, binary, doubling

from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.neuron import compiling
from transformers_neuronx.neuron.compiling import (
    compile_module,
    compile_target,
    compiler_version,
    flags,
    has_libneuronxla,
)
from transformers_neuronx.neuron.targets import TARGETS
from transformers_neuronx.pyhlo import HloModuleProto

# Arguments of the compiler.


def test_a_module_becomes_a_neff(neuronx_cc):
    module = doubling()
    assert compile_module(module) == binary(module)
    [note] = neuronx_cc.notes("compile")
    assert note["words"] == [
        *("compile", "--framework=XLA", "--target=trn1", "module.pb", "--output=module.neff"),
        *("--model-type=transformer", "--auto-cast=none"),
    ]
    assert note["directory"].startswith(str(neuronx_cc.temporary)), "the work directory"
    assert not list(neuronx_cc.temporary.iterdir()), "nothing is left"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ["--model-type=transformer", "--auto-cast=none"]),
        ("-O1", ["--model-type=transformer", "--auto-cast=none", "-O1"]),
        ("--auto-cast=matmult", ["--model-type=transformer", "--auto-cast=matmult"]),
        ("--auto-cast matmult", ["--model-type=transformer", "--auto-cast", "matmult"]),
        ("--auto-cast-type=bf16", ["--model-type=transformer", "--auto-cast=none", "--auto-cast-type=bf16"]),
        ("--model-type generic --auto-cast all --lnc=1", "--model-type generic --auto-cast all --lnc=1".split()),
        ("--target=inf2 --lnc=2 --target trn2", ["--model-type=transformer", "--auto-cast=none", "--lnc=2"]),
        ("--cache_dir=/x --no_cache --cache_dir y -O2", ["--model-type=transformer", "--auto-cast=none", "-O2"]),
        ("--logfile='a b'", ["--model-type=transformer", "--auto-cast=none", "--logfile=a b"]),
    ],
)
def test_options_of_the_user_are_added_or_take_the_place_of_ours(neuronx_cc, monkeypatch, given, expected):
    monkeypatch.setenv("NEURON_CC_FLAGS", given)
    assert flags() == expected
    assert flags(TARGETS["inf2"]) == ["--target=inf2", *expected]
    compile_module(doubling())  # the stand-in refuses unknown and repeated options
    [note] = neuronx_cc.notes("compile")
    assert note["words"][5:] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--auto-cast='none", "NEURON_CC_FLAGS must be options as in a shell, got .*: No closing quotation"),
        ("-O1 --output=x.neff", "NEURON_CC_FLAGS must not have --output: this package sets it"),
        ("--framework XLA", "NEURON_CC_FLAGS must not have --framework"),
        ("--target=gpu", "NEURON_CC_FLAGS: --target must be one of trn1, inf2, trn2, got 'gpu'"),
        ("--target", "NEURON_CC_FLAGS: --target must be one of .*, got ''"),
    ],
)
def test_options_that_cannot_be(neuronx_cc, monkeypatch, given, message):
    monkeypatch.setenv("NEURON_CC_FLAGS", given)
    with pytest.raises(ConfigError, match=message):
        compile_module(doubling())
    assert not neuronx_cc.notes("compile") and not list(neuronx_cc.temporary.iterdir())


@pytest.mark.parametrize(
    ("options", "override", "product", "expected"),
    [
        (None, None, None, "trn1"),
        (None, None, "trn1.32xlarge\n", "trn1"),
        (None, None, "trn1n.32xlarge\n", "trn1"),
        (None, None, "inf2.8xlarge\n", "inf2"),
        (None, None, "trn2u.48xlarge\n", "trn2"),
        (None, None, "m5.large\n", "trn1"),
        (None, None, "Not trn2\n", "trn1"),
        (None, "inf2", "trn2.48xlarge\n", "inf2"),
        ("--target=trn2 -O1", "inf2", "inf2.xlarge\n", "trn2"),
        ("--target trn2", "inf2", None, "trn2"),
        ("--target=inf2 --target=trn2", None, None, "trn2"),
        ("-O1", "trn2", None, "trn2"),
    ],
)
def test_the_kind_of_instance(neuronx_cc, monkeypatch, options, override, product, expected):
    if options:
        monkeypatch.setenv("NEURON_CC_FLAGS", options)
    if override:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", override)
    if product:
        compiling.PRODUCT_NAME.write_text(product)
    assert compile_target() is TARGETS[expected]
    compile_module(doubling())
    [note] = neuronx_cc.notes("compile")
    assert note["words"][2] == f"--target={expected}"


def test_a_kind_of_instance_that_there_is_not(neuronx_cc, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(ConfigError, match=r"^NEURON_PLATFORM_TARGET_OVERRIDE must be one of trn1, .*, got 'trn9'"):
        compile_target()


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf", ""])
def test_a_time_limit_that_is_none(neuronx_cc, monkeypatch, seconds):
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", seconds)
    with pytest.raises(ConfigError, match=f"^NEURONX_COMPILE_TIMEOUT must be a number of sec.*, got '{seconds}'$"):
        compile_module(doubling())


def test_no_time_limit(neuronx_cc, monkeypatch):
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", "0")
    assert compile_module(doubling()) == binary(doubling())


# Which compiler is found.


def test_without_a_compiler_the_message_says_what_to_install(neuronx_cc, monkeypatch):
    monkeypatch.setenv("PATH", "")
    advice = re.escape('pip install "transformers-neuronx[neuron]" --extra-index-url https://pip.repos.neuron.')
    with pytest.raises(EngineError, match=f"needs libneuronxla or the program neuronx-cc, .* neither: {advice}"):
        compile_module(doubling())
    with pytest.raises(EngineError, match=advice):
        compiler_version()
    assert not list(neuronx_cc.temporary.iterdir())


def test_a_program_that_cannot_be_started(neuronx_cc):
    neuronx_cc.program.write_text("#!/no/such/interpreter\n")
    with pytest.raises(EngineError, match=r"^doubling: the compiler for Neuron could not be run: .*No such file"):
        compile_module(doubling())
    assert not list(neuronx_cc.temporary.iterdir())


def test_the_version_is_the_packages(neuronx_cc, tmp_path, monkeypatch):
    information = tmp_path / "packages" / "neuronx_cc-2.14.1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 2.14.1\n")
    monkeypatch.syspath_prepend(information.parent)
    assert compiler_version() == "2.14.1"
    assert not neuronx_cc.notes("version")


def test_the_version_is_what_the_program_prints_where_there_is_no_package(neuronx_cc):
    assert compiler_version() == compiler_version() == "2.99.0.1+standin"
    assert len(neuronx_cc.notes("version")) == 1


def test_a_program_that_does_not_say_its_version(neuronx_cc):
    for script, message in [("exit 3", "cannot get the version of .* status 3"), ("echo hello", "got 'hello'")]:
        neuronx_cc.program.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(EngineError, match=message):
            compiler_version()


@pytest.fixture
def libneuronxla(neuronx_cc, monkeypatch):
    """Put the stand-in for that package where this process and its children find it."""
    monkeypatch.syspath_prepend(LIBNEURONXLA)
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(LIBNEURONXLA))  # the child runs in another directory
    monkeypatch.setattr(compiling, "has_libneuronxla", has_libneuronxla)
    return neuronx_cc


def test_through_libneuronxla(libneuronxla, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target=inf2 -O1 --logfile='a b'")
    module = doubling()
    magic, said, data = compile_module(module).split(b"\n", 2)
    assert magic == b"stand-in NEFF of libneuronxla" and HloModuleProto.FromString(data) == module
    said = eval(said, dict(null=None, true=True, false=False))
    assert said.pop("directory").startswith(str(libneuronxla.temporary))
    assert said == dict(
        compiler_flags="--model-type=transformer --auto-cast=none -O1 '--logfile=a b'",
        input_format="hlo",
        platform_target="inf2",
        cache_key=None,
        retry_failed_compilation=False,
        lazy=True,
        use_cache=False,
        cache_dir=None,
    )
    assert not libneuronxla.notes("compile") and not list(libneuronxla.temporary.iterdir())
    assert "libneuronxla" not in sys.modules


@pytest.mark.parametrize(
    ("how", "last"),
    [
        ("fail", "RuntimeError: neuronx-cc failed with 70"),
        ("none", ".*EngineError: neuron_xla_compile must return the bytes of a NEFF, got NoneType"),
    ],
)
def test_libneuronxla_fails(libneuronxla, monkeypatch, how, last):
    monkeypatch.setenv("STANDIN_NEURONX_CC", how)
    with pytest.raises(EngineError) as failed:
        compile_module(doubling())
    lines = str(failed.value).splitlines()
    assert lines[0] == "libneuronxla did not compile doubling for trn1: it exited with status 1. The end of its log:"
    assert re.fullmatch(f"    {last}", lines[-2])


def test_the_empty_package_of_that_name_is_not_taken(neuronx_cc, tmp_path, monkeypatch):
    (tmp_path / "empty" / "libneuronxla").mkdir(parents=True)
    (tmp_path / "empty" / "libneuronxla" / "__init__.py").write_text("raise ImportError('WRONG PACKAGE')\n")
    monkeypatch.syspath_prepend(tmp_path / "empty")
    assert not has_libneuronxla()
    monkeypatch.syspath_prepend(LIBNEURONXLA)
    assert has_libneuronxla()


def test_several_at_once(neuronx_cc, monkeypatch):
    modules = [doubling(size) for size in range(1, 7)]
    here = os.getcwd()
    with ThreadPoolExecutor(len(modules)) as pool:
        assert list(pool.map(compile_module, modules)) == list(map(binary, modules))
    notes = neuronx_cc.notes("compile")
    assert len({note["directory"] for note in notes}) == len(notes) == len(modules)
    assert os.getcwd() == here and not list(neuronx_cc.temporary.iterdir())
