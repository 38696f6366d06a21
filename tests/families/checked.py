"""What the tests check of each family, as a table in `docs/models.md`. As a script, it writes the table there.

A cell follows from the tests that pytest collects for the family, those that are slow included.
"""

import contextlib
import io
from collections import defaultdict
from pathlib import Path

import pytest
from published import PUBLISHED
from published_one_file import ONE_FILE

from transformers_neuronx.huggingface.auto import families, family_of

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- tests/families/checked.py writes what follows -->", "<!-- until here -->"

# Tests of logits have the fixture `parity`, or GPT-2's `reference`, or are these where there is an encoder.
OF_ENCODERS = "test_logits_are_those_of_transformers", "test_at_other_degrees"
LOGITS = {f"test_{name}.py": OF_ENCODERS for name in ("t5", "whisper", "qwen3vl")}
AS_PUBLISHED = ("test_it_is_read_as_transformers_reads_it", "test_published_configurations")
HALF = {
    "test_in_bf16", "test_in_half_precision", "test_half_precision_is_as_near_to_the_truth_as_transformers",
    "test_scores_scaled_by_the_layer_in_bf16",
}  # fmt: skip
# By column, the tests of which a family has one.
CHECKS = {
    "bf16": HALF,
    "real size": {"test_at_a_true_size"},
    "8 bits": {"test_int8_as_in_numpy", "test_fewer_bits_as_in_numpy s8"},
    "4 bits": {"test_groups_of_four_bits_as_in_numpy", "test_fewer_bits_as_in_numpy s4"},
    "engine": {
        "test_tokens_and_vectors_are_those_of_transformers", "test_sources_of_an_encoder", "test_images_in_an_engine",
    },
    "drafts": {"test_draft_tokens_change_nothing", "test_images_in_an_engine"},
    "beams": {"test_beams_of_unequal_prompts", "test_generate_as_transformers_does"},
    "artifact": {
        "test_an_artifact_has_the_programs_and_the_weights", "test_an_artifact_needs_neither_compiler_nor_checkpoint",
    },
    "linter": {"test_nothing_is_found"},
}  # fmt: skip
IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # by this file, before pytest
OF_T5 = {"test_sources_of_an_encoder"}  # elsewhere than in the family's file
NOT_VARIANTS = {"degree", "model", "side", "options"}  # parameters that are about the same configuration


class Collected:
    """A plugin that keeps the tests that pytest finds."""

    def pytest_collection_finish(self, session):
        self.items = list(session.items)


def collected():
    """Return all tests of this folder. None runs."""
    plugin = Collected()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if pytest.main(["--collect-only", "-n", "0", *IMPORTED, str(HERE)], plugins=[plugin]):
            raise RuntimeError(said.getvalue())
    return plugin.items


def family_in(item, params):
    """Return the family that a test is about, or None."""
    own = item.path.stem.removeprefix("test_")
    if own in families():
        return own
    if item.originalname in OF_T5:
        return "t5"
    if item.originalname == "test_it_is_read_as_transformers_reads_it":
        return family_of((PUBLISHED | ONE_FILE)[params["name"]].attributes["model_type"]).family.name
    named = next((params[name] for name in ("family", "model_type", "pair") if isinstance(params.get(name), str)), None)
    return family_of(named).family.name if named else None


def compares(item):
    """Whether a test compares logits in f32 with those of Transformers."""
    if item.originalname in HALF or item.path.stem in ("test_published", "test_second_opinion"):
        return False
    in_fixture = item.path.name == "test_gpt2.py" and "reference" in item.fixturenames
    return "parity" in item.fixturenames or in_fixture or item.originalname in LOGITS.get(item.path.name, ())


def table(items):
    """Return the table of these tests in Markdown: a row for each family, in the order of their names."""
    found = defaultdict(lambda: defaultdict(set))
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if (family := family_in(item, params)) is None:
            continue
        row, name = found[family], item.originalname
        if compares(item):
            degree = params.get("degree", params.get("model", 1))
            row["degrees"].add(degree)
            if "degrees" not in name:
                row["variants"].add(tuple(sorted((k, str(v)) for k, v in params.items() if k not in NOT_VARIANTS)))
        elif name in AS_PUBLISHED:
            row["published"].add(params["name"])
        full = f"{name} {params['kind']}" if "kind" in params else name
        for column, names in CHECKS.items():
            row[column] |= {full} & names
    return written(found)


def written(found):
    from lines import family_lines  # found after pytest has loaded tests/conftest.py

    columns = ["variants", "degrees", "published", *CHECKS]
    lines = [f"| family | lines | {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) + 1)]
    for family, files in sorted(family_lines().items()):
        row = found[family]
        cells = [str(len(row["variants"]) or "–"), ", ".join(map(str, sorted(row["degrees"]))) or "–"]
        cells += [str(len(row["published"]) or "–"), *("yes" if row[column] else "–" for column in CHECKS)]
        lines.append(f"| {family} | {sum(files.values())} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(text):
    """Return the page with this table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table(collected())))
