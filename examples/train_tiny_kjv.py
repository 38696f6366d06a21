r"""Train tiny-kjv, the small GPT-2 checkpoint in examples/tiny-kjv, or its draft model.

Output: a directory that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.
It has a GPT-2 of 6 layers (--layers), 4 heads, width 128 and 512 positions (1.39 million parameters, stored as
float16), its byte-level BPE tokenizer of 1023 tokens, and heldout.txt, the held-out text.

Input: the King James Bible, which is in the public domain, as Debian packages it
(`apt-get install bible-kjv-text bible-kjv`), or a file in the same form (see --text). A document is a chapter: its
verses one per line without their numbers, after `<|endoftext|>`. Every 42nd chapter is held out.

Time: 45 minutes on two CPU cores that other work shared. `--epochs 2` gives a rough model sooner.

Usage:

    python examples/train_tiny_kjv.py --out examples/tiny-kjv
    python examples/train_tiny_kjv.py --out examples/tiny-kjv-draft --teacher examples/tiny-kjv \
        --layers 2 --epochs 8 --dropout 0

With a teacher the model learns the teacher's probabilities of the next token. It becomes a draft model for speculative
decoding. It uses the teacher's tokenizer. The tokenizer and heldout.txt are then not written.

The directory is rewritten at each evaluation, so an interrupted run leaves a usable model. The same seed gives
the same training on the same machine, with the same library versions and number of threads.
"""

import argparse
import math
import re
import shutil
import subprocess
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    get_cosine_schedule_with_warmup,
)
from transformers.utils.logging import disable_progress_bar

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1023
CONTEXT = 512
HELD_OUT_EVERY = 42
VERSE = re.compile(r"(?P<chapter>.*?[A-Za-z] ?\d+):\d+\s+(?P<text>.*)")
MISSING_TEXT = """The text of the King James Bible was not found. On Debian or Ubuntu, install it with
    apt-get install bible-kjv-text bible-kjv
or pass a file with --text, with one verse per line after its reference, such as
    Ge1:1 In the beginning God created the heaven and the earth."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument(
        "--text", type=Path, help="text to use instead of Debian's, with lines like 'Ge1:1 In the beginning ...'"
    )
    parser.add_argument("--teacher", type=Path, help="checkpoint whose probabilities to learn, not the text's tokens")
    parser.add_argument("--layers", type=int, default=6, help="number of layers (%(default)s)")
    parser.add_argument("--epochs", type=float, default=16, help="passes over the training text (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help=f"sequences of {CONTEXT} tokens per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.05, help="residual and embedding dropout (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=1000, help="steps between evaluations (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    return parser.parse_args()


def read_chapters(text_file):
    """Return the chapters in order, each as a string of its verses, one per line."""
    if text_file:
        lines = text_file.read_text(encoding="utf-8").splitlines()
    elif command := shutil.which("bible"):
        whole_bible = [command, "-f", "gen1:1-rev22:21"]
        lines = subprocess.run(whole_bible, capture_output=True, text=True, check=False).stdout.splitlines()
    else:
        raise SystemExit(MISSING_TEXT)
    chapters = {}
    for line in lines:
        if verse := VERSE.fullmatch(line.strip()):
            text = " ".join(verse["text"].split())
            chapters[verse["chapter"]] = chapters.get(verse["chapter"], "") + text + "\n"
    if not chapters:
        raise SystemExit(MISSING_TEXT)
    return list(chapters.values())


def train_tokenizer(chapters):
    """Train a byte-level BPE tokenizer like GPT-2's, where the end-of-text token also has the last id."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(chapters, trainer)
    bpe.add_special_tokens([END_OF_TEXT])
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    return GPT2Tokenizer(tokenizer_object=bpe, model_max_length=CONTEXT, **special)


def token_stream(tokenizer, text):
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def training_batches(stream, batch_size, steps):
    """Yield batches of CONTEXT + 1 tokens. Each epoch cuts the stream at a new offset and shuffles the pieces."""
    pieces = []
    for _ in range(steps):
        while len(pieces) < batch_size:
            offset = int(torch.randint(CONTEXT, ()))
            cut = stream[offset:].unfold(0, CONTEXT + 1, CONTEXT)
            pieces.extend(cut[torch.randperm(len(cut))])
        yield torch.stack(pieces[:batch_size])
        del pieces[:batch_size]


def logits_of(model, tokens):
    """Return the float32 logits of each token after the first in each row, given the tokens before it."""
    return model(tokens[:, :-1], use_cache=False).logits.float().flatten(0, 1)


def loss_of(model, tokens, teacher=None, reduction="mean"):
    """Return the cross-entropy, in nats, of each row's tokens after the first, or of a teacher's probabilities."""
    wanted = tokens[:, 1:].flatten()
    if teacher:
        with torch.no_grad():
            wanted = logits_of(teacher, tokens).softmax(-1)
    return cross_entropy(logits_of(model, tokens), wanted, reduction=reduction)


@torch.no_grad()
def mean_loss(model, stream):
    """Return the mean float32 loss per token, given the tokens before it in its window of CONTEXT tokens."""
    model.eval()
    total = 0.0
    for start in range(0, len(stream) - 1, CONTEXT):
        total += loss_of(model, stream[None, start : start + CONTEXT + 1], reduction="sum").item()
    return total / (len(stream) - 1)


@torch.no_grad()
def agreement(model, teacher, stream):
    """Return the share of tokens at which both models have the same most likely token."""
    pieces = [stream[None, start : start + CONTEXT + 1] for start in range(0, len(stream) - 1, CONTEXT)]
    same = [logits_of(model, piece).argmax(-1) == logits_of(teacher, piece).argmax(-1) for piece in pieces]
    return torch.cat(same).float().mean().item()


def save(model, tokenizer, out):
    """Write the weights as float16, without the tied output layer; config.json still says float32.

    The tokenizer may be None.
    """
    weights = {name: weight.half() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(out, state_dict=weights)
    if tokenizer:
        tokenizer.save_pretrained(out)


def sample(model, tokenizer, prompt, **how):
    prompt = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=60, pad_token_id=tokenizer.eos_token_id, **how)[0]
    return tokenizer.decode(tokens)


def main():
    args = parse_arguments()
    disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    chapters = read_chapters(args.text)
    held_out = [text for number, text in enumerate(chapters, 1) if number % HELD_OUT_EVERY == 0]
    trained_on = [text for number, text in enumerate(chapters, 1) if number % HELD_OUT_EVERY]
    teacher = AutoModelForCausalLM.from_pretrained(args.teacher).eval() if args.teacher else None
    tokenizer = AutoTokenizer.from_pretrained(args.teacher) if args.teacher else train_tokenizer(trained_on)
    held_out_text = "".join(END_OF_TEXT + text for text in held_out)
    held_out_stream = token_stream(tokenizer, held_out_text)
    stream = token_stream(tokenizer, "".join(END_OF_TEXT + text for text in trained_on))
    args.out.mkdir(parents=True, exist_ok=True)
    if not teacher:
        (args.out / "heldout.txt").write_text(held_out_text, encoding="utf-8")

    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    # Attention dropout is off: with it, attention on the CPU is more than twice as slow.
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=128, n_layer=args.layers, n_head=4, tie_word_embeddings=True,
        activation_function="gelu_new", initializer_range=0.05,
        resid_pdrop=args.dropout, embd_pdrop=args.dropout, attn_pdrop=0.0, **ends,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.generation_config = GenerationConfig(**ends)
    for block in [*model.transformer.h, *(teacher.transformer.h if teacher else [])]:
        block.mlp.act = torch.nn.GELU(approximate="tanh")  # the same function as gelu_new, in one faster kernel

    decayed = {"params": [weight for weight in model.parameters() if weight.dim() > 1], "weight_decay": 0.1}
    others = {"params": [weight for weight in model.parameters() if weight.dim() == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, others], lr=args.lr, betas=(0.9, 0.98), fused=True)
    steps = max(1, round(args.epochs * len(stream) / (args.batch * CONTEXT)))
    scheduler = get_cosine_schedule_with_warmup(optimizer, min(200, steps // 10 + 1), steps)
    print(f"{len(trained_on)} chapters, {len(stream)} tokens to train on; {len(held_out)} chapters, "
          f"{len(held_out_stream)} tokens held out; {model.num_parameters()} parameters; {steps} steps")  # fmt: skip

    started = time.monotonic()
    for step, tokens in enumerate(training_batches(stream, args.batch, steps), 1):
        model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, tokens, teacher)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            speed = step * args.batch * CONTEXT / (time.monotonic() - started)
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {speed:.0f} tokens/s", flush=True)
        if step % args.eval_every == 0 or step == steps:
            print(f"step {step}/{steps}  held-out loss {mean_loss(model, held_out_stream):.4f}", flush=True)
            save(model, None if teacher else tokenizer, args.out)

    model = AutoModelForCausalLM.from_pretrained(args.out)  # the rounded weights, as users get them
    tokenizer = AutoTokenizer.from_pretrained(args.teacher or args.out)
    loss = mean_loss(model, held_out_stream)
    bits_per_byte = loss * (len(held_out_stream) - 1) / math.log(2) / len(held_out_text.encode())
    print(f"trained for {(time.monotonic() - started) / 60:.1f} minutes on {steps * args.batch * CONTEXT} tokens")
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}, {bits_per_byte:.3f} bits per byte")
    if teacher:
        print(f"the most likely token is the teacher's at {agreement(model, teacher, held_out_stream):.1%} of tokens")
    print("greedy:", sample(model, tokenizer, "And the LORD spake unto Moses, saying,", do_sample=False))
    print("sampled:", sample(model, tokenizer, END_OF_TEXT, do_sample=True, temperature=0.8, top_k=0))


if __name__ == "__main__":
    main()
