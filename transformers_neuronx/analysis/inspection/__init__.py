"""What programs contain and what they cost, from their modules alone: as numbers, as text, and as a page."""

from transformers_neuronx.analysis.inspection.costs import Cost as Cost
from transformers_neuronx.analysis.inspection.facts import (
    ModuleFacts as ModuleFacts,
    Output as Output,
    Parameter as Parameter,
    Row as Row,
    facts_of as facts_of,
)
from transformers_neuronx.analysis.inspection.listing import hlo_text as hlo_text
from transformers_neuronx.analysis.inspection.models import (
    ModelFacts as ModelFacts,
    WeightFacts as WeightFacts,
    facts_of_artifact as facts_of_artifact,
    facts_of_model as facts_of_model,
)
from transformers_neuronx.analysis.inspection.page import page as page
