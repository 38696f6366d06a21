"""Many callers of one model: `Engine`, and what it is made of.

`serving.app(engine)` is a web server of an engine, `transformers_neuronx.server`, which is imported only then.
"""

import importlib
from typing import Any


def app(engines: Any, **settings: Any) -> Any:
    """Return an ASGI application that answers with engines: see `transformers_neuronx.server.app.app`."""
    return importlib.import_module("transformers_neuronx.server.app").app(engines, **settings)
