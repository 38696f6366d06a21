"""Write docs/original-names.md: every module and name of the original, and what it does here.

    python docs/names.py [--check]

The facts are those of transformers_neuronx/original/surface.txt. With --check, nothing is written, and the exit
status is 1 if the page differs.
"""

import sys
from collections import Counter
from pathlib import Path

from transformers_neuronx.original.names import VERDICTS, modules

PAGE = Path(__file__).with_name("original-names.md")
HEAD = """# The original's names

Every module, class, function and method of `transformers-neuronx`, in its last version, 0.13, and in 0.5, which many
published programs were written for. All of them import. This page is made from the table that a test walks; the
[guide](compatibility.md) describes options, files and environment variables.

- **works**: takes the original's arguments, by position and by name, and does the same.
- **no effect**: is accepted and does nothing, as nothing needs it here.
- **differs**: is there, with the difference that is named.
- **refused**: raises a `NotSupportedError` when it is used, with the sentence that stands here.

"""


def page() -> str:
    """Return the text of the page."""
    counted = Counter(name.verdict for module in modules().values() for name in module.names.values())
    told = ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])
    parts = [HEAD, f"{sum(counted.values())} names in {len(modules())} modules: {told}.\n"]
    for module in modules().values():
        parts.append(f"\n## `{module.path}`\n\n")
        listed = [name for name in module.names.values() if name.note != module.note or name.verdict != "refused"]
        refused = [name.name for name in module.names.values() if name not in listed]
        if listed:
            parts.append("| name | here | |\n|---|---|---|\n")
        for name in listed:
            note = name.note.replace("|", "\\\\|")
            parts.append(f"| `{name.name}{name.arguments or ''}` | {name.verdict} | {note} |\n")
        if refused:
            break_ = "\n" if listed else ""
            parts.append(f"{break_}Refused, because {module.note}: {', '.join(f'`{name}`' for name in refused)}.\n")
    return "".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
