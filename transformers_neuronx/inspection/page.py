"""Facts as one page of HTML that needs nothing besides itself: no network, no other file.

What it shows is drawn by its script from the JSON of `as_dict`, which is in it. Only the HLO is text already.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from transformers_neuronx.inspection.facts import ModuleFacts
from transformers_neuronx.inspection.listing import hlo_text
from transformers_neuronx.inspection.models import ModelFacts

HERE = Path(__file__).parent


def page(facts: ModelFacts | ModuleFacts, hlo: bool = True) -> str:
    """The page, of a model or of one program. Without `hlo` it has not the programs' text, which is most of it."""
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
        texts="\n".join(listed) or "<p>It was left out.</p>",
    )
    return re.sub("@(title|css|js|json|texts)@", lambda found: parts[found[1]], _read("page.html"))


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _embedded(facts: object) -> str:
    """JSON that no name in it can end, or open anything in: HTML looks for nothing else in a script."""
    return json.dumps(facts, ensure_ascii=True).replace("<", "\\u003c")
