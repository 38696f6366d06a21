"""Methods of the original's models that this package's own do not need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.config import Buckets
from transformers_neuronx.config.token_trees import Tree, draft_tokens
from transformers_neuronx.engine.artifacts import holds_artifact
from transformers_neuronx.errors import InputError
from transformers_neuronx.models.base import Model
from transformers_neuronx.weights.checkpoint import checkpoint_in_memory, open_checkpoint
from transformers_neuronx.weights.directories import PathOrName
from transformers_neuronx.weights.formats import format_in
from transformers_neuronx.weights.stored_module import StoredModule

ARTIFACT = "compiled"  # folder of an artifact inside a checkpoint's directory


class NeuronModelBase(Model):
    """The base of all compiled models, with the original's methods."""

    prefixed = 0  # positions that all slots hold before those of a call
    _prefix: torch.Tensor | None = None
    context_pre_hook: Callable[[], object] | None = None  # called by `sample` before it feeds the prompt
    context_hook: Callable[[], object] | None = None  # called by `sample` after that
    _speculated: frozenset[tuple[int, int]] = frozenset()  # numbers of tokens, and batch sizes

    def _buckets(self, *sizes: Any) -> Buckets:
        buckets = super()._buckets(*sizes)
        lengths = {k for k, _ in self._speculated} if buckets.context else set()
        return replace(buckets, context=tuple(sorted({*buckets.context, *lengths})))

    @property
    def token_buckets(self) -> list[int]:
        """The numbers of positions that programs are compiled for."""
        return list(self.options.buckets.positions)

    @property
    def context_buckets(self) -> list[int]:
        """The numbers of prompt tokens that programs are compiled for."""
        return list(self.options.buckets.context)

    @property
    def batch_sizes(self) -> list[int]:
        """The batch size, in a list: programs take fewer rows, too."""
        return [self.options.batch_size]

    @property
    def decoder_lm_head_for_speculation(self) -> dict[tuple[int, int], Callable[..., Any]]:
        """By number of tokens and batch size, `speculative_forward` for so many: see `enable_speculative_decoder`."""
        return {
            (k, rows): partial(self.speculative_forward, speculation_length=k) for k, rows in sorted(self._speculated)
        }

    def enable_speculative_decoder(
        self,
        speculation_length: int | Sequence[int],
        batch_sizes: int | Sequence[int] | None = None,
        token_tree: Tree | None = None,
    ) -> None:
        """Let `to_neuron` compile programs of so many tokens, for `speculative_forward`.

        `batch_sizes` are accepted: a program takes any number of rows up to `batch_size`. Without this call, or after
        `to_neuron`, `speculative_forward` uses the program of the next larger `context_length_estimate`. With a
        `token_tree`, this is `enable_token_tree_decoder`.
        """
        if token_tree is not None:
            self.enable_token_tree_decoder(token_tree, batch_sizes)
            return
        rows = self.options.batch_size if batch_sizes is None else batch_sizes
        lengths = [speculation_length] if isinstance(speculation_length, int) else speculation_length
        self._speculated |= {(k, b) for k in lengths for b in ([rows] if isinstance(rows, int) else rows)}
        if not self.is_on_device:
            self._settle()

    def enable_token_tree_decoder(self, token_tree: Tree, batch_sizes: int | Sequence[int] | None = None) -> None:
        """Let `to_neuron` compile the programs that verify the draft tokens of a `TreeSpeculativeGenerator`.

        `batch_sizes` are accepted: a program takes any number of rows up to `batch_size`. Raises ConfigError for a
        `token_tree` that is none.
        """
        count = draft_tokens(token_tree)
        self.compile_also(("verify", count), lambda decoder: decoder.verifying(count))

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

    def set_prefixed(self, input_ids: torch.Tensor) -> None:
        """Feed the first `prefixed_length` tokens of each row, integers [batch_size, n], which later prompts share.

        From now on, `sample` leaves them out of its prompts, which must have them, and of its result; its
        `sequence_length` counts them. Positions in `forward` are those after them.
        """
        self._prefix, self.prefixed = None, 0
        self(input_ids[:, : self.prefixed_length])
        self._prefix, self.prefixed = input_ids[:, : self.prefixed_length], self.prefixed_length

    def after_prefix(self, input_ids: Any, sequence_length: int) -> tuple[Any, int]:
        """Return prompts without the prefix that caches hold, if any, and the columns that are left for the result.

        Prompts that are shorter end its use, until the next `set_prefixed`. Raises InputError for others that do not
        begin with it.
        """
        if self._prefix is None:
            return input_ids, sequence_length
        ids, prefix = torch.as_tensor(input_ids), self._prefix
        count = prefix.shape[1]
        if ids.shape[1] < count:
            self._prefix, self.prefixed = None, 0
            return ids, sequence_length
        if ids.shape[1] == count or len(ids) > len(prefix) or not torch.equal(ids[:, :count], prefix[: len(ids)]):
            raise InputError(f"prompts must begin with the {count} tokens of set_prefixed, and have more")
        return ids[:, count:], sequence_length - count

    def reset(self, context_length_estimate: object = None) -> None:
        """Forget all sequences, and a prefix. Calls do not need it: a prompt starts a new sequence.

        `context_length_estimate` is accepted and ignored.
        """
        self._prefix, self.prefixed = None, 0
        with self.turns.take("reset()"):
            self.decoder.reset()

    def with_context_hooks(self, blocks: Iterator[Any]) -> Iterator[Any]:
        """Call `context_pre_hook` before the first block of tokens is made, and `context_hook` after it."""
        if self.context_pre_hook is not None:
            self.context_pre_hook()
        for number, block in enumerate(blocks):
            if number == 0 and self.context_hook is not None:
                self.context_hook()
            yield block

    def pp_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as `forward`."""
        return self(*args, **kwargs)

    forward_for_context = pp_forward

    @property
    def chkpt_model(self) -> StoredModule:
        """The weights as modules with the checkpoint's names, and the methods that load a checkpoint."""
        return StoredModule(self)

    def register_to_neuron_hook(self, hook: Callable[[int], object]) -> None:
        """Do nothing: layers are not loaded one after the other."""

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
