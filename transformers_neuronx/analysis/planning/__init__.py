"""Whether a model fits, where, and how fast it can be there, before it is downloaded, compiled or run."""

from transformers_neuronx.analysis.planning.places import (
    CPU as CPU,
    NAMES as NAMES,
    Core as Core,
    Place as Place,
    place as place,
)
from transformers_neuronx.analysis.planning.plans import (
    OVERHEAD as OVERHEAD,
    Fit as Fit,
    Needs as Needs,
    Network as Network,
    Plan as Plan,
    Planner as Planner,
    Work as Work,
)
