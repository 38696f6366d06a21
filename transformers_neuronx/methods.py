"""Methods of the original's models that this package's own do not need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.config import Buckets
from transformers_neuronx.models import Model
from transformers_neuronx.module import PathOrName, checkpoint_in_memory, format_in, open_checkpoint
from transformers_neuronx.serialization import holds_artifact

ARTIFACT = "compiled"  # folder of an artifact inside a checkpoint's directory


class NeuronModelBase(Model):
    """The base of all compiled models, with the original's methods."""

    _speculated: frozenset[tuple[int, int]] = frozenset()  # numbers of tokens, and batch sizes

    def _buckets(self, *sizes: Any) -> Buckets:
        buckets = super()._buckets(*sizes)
        lengths = {k for k, _ in self._speculated} if buckets.context else set()
        return replace(buckets, context=tuple(sorted({*buckets.context, *lengths})))

    @property
    def decoder_lm_head_for_speculation(self) -> dict[tuple[int, int], Callable[..., Any]]:
        """By number of tokens and batch size, `speculative_forward` for so many: see `enable_speculative_decoder`."""
        return {
            (k, rows): partial(self.speculative_forward, speculation_length=k) for k, rows in sorted(self._speculated)
        }

    def enable_speculative_decoder(
        self, speculation_length: int | Sequence[int], batch_sizes: int | Sequence[int] | None = None
    ) -> None:
        """Let `to_neuron` compile programs of so many tokens, for `speculative_forward`.

        `batch_sizes` are accepted: a program takes any number of rows up to `batch_size`. Without this call, or after
        `to_neuron`, `speculative_forward` uses the program of the next larger `context_length_estimate`.
        """
        rows = self.options.batch_size if batch_sizes is None else batch_sizes
        lengths = [speculation_length] if isinstance(speculation_length, int) else speculation_length
        self._speculated |= {(k, b) for k in lengths for b in ([rows] if isinstance(rows, int) else rows)}
        if not self.is_on_device:
            self._settle()

    def enable_window_context_decoder(
        self, window_context_length: int | Sequence[int], unroll: int | None = None
    ) -> None:
        """Do nothing: prompts longer than `context_length_estimate` are always fed in windows of that size."""

    def speculative_forward(
        self,
        input_ids: torch.Tensor,
        cache_ids: torch.Tensor | None = None,
        start_ids: torch.Tensor | None = None,
        speculation_length: int | None = None,
    ) -> torch.Tensor:
        """Return the logits after each of the last `speculation_length` tokens, f32[tokens, vocab, batch].

        The arguments are those of `forward`. Default of `speculation_length`: all tokens.
        """
        logits = self(input_ids, cache_ids=cache_ids, start_ids=start_ids, output_all_logits=True)
        logits = logits[0] if isinstance(logits, tuple) else logits
        kept = logits[:, -(speculation_length or logits.shape[1]) :]
        return kept.permute(1, 2, 0)  # type: ignore[no-any-return]

    def setup_reorder_cache(self) -> None:
        """Do nothing: `reorder_cache` is always compiled."""

    def is_compiled(self) -> bool:
        """Whether the programs are compiled."""
        return self._decoder is not None or self._compiled is not None

    def compile(self, parallel_degree: int | None = None) -> None:
        """Do the same as `cpu_compile`. `parallel_degree` programs are compiled at once."""
        if parallel_degree is not None:
            self.neuron_config.compilation_worker_count = parallel_degree
        self.cpu_compile()

    def setup(self) -> None:
        """Do the same as `to_neuron`."""
        self.to_neuron()

    def load_weights(self) -> None:
        """Do nothing: `to_neuron` reads the weights."""

    def load_state_dict_low_memory(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Let `to_neuron` take the weights of a Hugging Face model's `state_dict()`."""
        self.use_weights(checkpoint_in_memory(state_dict, f"the state_dict of {self.tag}"))

    def load_state_dict_dir(self, pretrained_model_path: PathOrName) -> None:
        """Let `to_neuron` read the weights of a checkpoint: a directory, or the name of a model on the hub.

        A relative path is that of the working directory of this call.
        """
        self.use_weights(open_checkpoint(pretrained_model_path))

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], *_: Any, **__: Any) -> Any:
        """Do the same as `load_state_dict_low_memory`. Names are checked by `to_neuron`."""
        self.load_state_dict_low_memory(state_dict)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def _save_compiled_artifacts(self, directory: PathOrName) -> None:
        """Save as `save` does. If `directory` holds a checkpoint, the artifact is saved in a folder inside it."""
        if os.path.isfile(directory):
            raise FileExistsError(f"{directory}: an artifact is a directory, and a file has this name; pass another")
        self.save(_place(directory))

    def _load_compiled_artifacts(self, directory: PathOrName) -> None:
        """Load what `_save_compiled_artifacts` saved there. If there is nothing yet, `to_neuron` compiles."""
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"{directory}: no such directory, so there are no compiled programs to load")
        if holds_artifact(_place(directory)):
            self.load(_place(directory))


def _place(directory: PathOrName) -> Path:
    path = Path(os.path.expanduser(directory))
    return path / ARTIFACT if path.is_dir() and format_in(path) else path
