"""Where the original had its stopping criteria: Transformers' own are called the same way."""

from transformers.generation.stopping_criteria import (
    MaxTimeCriteria as MaxTimeCriteria,
    StoppingCriteria as StoppingCriteria,
    StoppingCriteriaList as StoppingCriteriaList,
)
