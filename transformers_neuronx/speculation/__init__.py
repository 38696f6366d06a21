"""Speculation: draft tokens, and their verification by the target in one step."""

from transformers_neuronx.serving.guesses import PromptLookup as PromptLookup
from transformers_neuronx.speculation.acceptors import (
    DefaultTokenAcceptor as DefaultTokenAcceptor,
    DraftModelForSpeculation as DraftModelForSpeculation,
    DraftProvider as DraftProvider,
    ReferenceTokenAcceptor as ReferenceTokenAcceptor,
    TokenAcceptor as TokenAcceptor,
)
from transformers_neuronx.speculation.drafts import SpeculativeGenerator as SpeculativeGenerator
from transformers_neuronx.speculation.eagle.draft import EagleDraft as EagleDraft
from transformers_neuronx.speculation.trees import TreeSpeculativeGenerator as TreeSpeculativeGenerator
