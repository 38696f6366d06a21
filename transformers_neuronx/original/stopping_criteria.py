"""Stopping criteria at the original's import path; they are Transformers' classes."""

from transformers.generation.stopping_criteria import (
    MaxTimeCriteria as MaxTimeCriteria,
    StoppingCriteria as StoppingCriteria,
    StoppingCriteriaList as StoppingCriteriaList,
)
