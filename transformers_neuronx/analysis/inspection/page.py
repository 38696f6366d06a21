"""Facts as one self-contained HTML page, which needs no network and no other file.

A script in the page draws it from the JSON of `as_dict`, which the page contains. Only the HLO is there as text.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from transformers_neuronx.analysis.inspection.facts import ModuleFacts
from transformers_neuronx.analysis.inspection.listing import hlo_text
from transformers_neuronx.analysis.inspection.models import ModelFacts

HERE = Path(__file__).parent


def page(facts: ModelFacts | ModuleFacts, hlo: bool = True) -> str:
    """Return the page of a model or a program. Without `hlo` it lacks the text of the programs, most of its size."""
    programs = facts.programs if isinstance(facts, ModelFacts) else [facts]
    listed = [
        f'<pre data-program="{number}" hidden>{html.escape(hlo_text(program.module))}</pre>'
        for number, program in enumerate(programs)
        if hlo
    ]
    parts = dict(
        title=html.escape(facts.family if isinstance(facts, ModelFacts) else facts.name),
        css=_read("page.css"),
        js=_read("page.js"),
        json=_embedded(facts.as_dict()),
        texts="\n".join(listed) or "<p>The HLO was left out.</p>",
    )
    return re.sub("@(title|css|js|json|texts)@", lambda found: parts[found[1]], _read("page.html"))


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _embedded(facts: object) -> str:
    """Return JSON without `<`, so that no name in it can end the script or start another element."""
    return json.dumps(facts, ensure_ascii=True).replace("<", "\\u003c")
