r"""Train examples/tiny-kjv-eagle, a head that guesses what tiny-kjv will say next, from tiny-kjv's own hidden states.

Output: a directory in the form in which EAGLE-3 heads are published (https://arxiv.org/abs/2503.01840): one layer of a
LLaMA, whose attention reads the embedding of a token beside hidden states of the target before it, of three depths.
`EagleDraft.from_pretrained` loads it. The embedding is the target's.

Input: the text that train_tiny_kjv.py reads. The head learns the target's probabilities of the next token, and of
those after it from its own guesses' hidden states, up to --ahead tokens.

Usage:

    python examples/train_tiny_kjv_eagle.py --out examples/tiny-kjv-eagle
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu
from train_tiny_kjv import CONTEXT, END_OF_TEXT, HELD_OUT_EVERY, read_chapters, token_stream, training_batches
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

CONFIG = dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=128, intermediate_size=512,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=32, hidden_act="silu",
    rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=CONTEXT, vocab_size=1023, draft_vocab_size=1023,
    attention_bias=False, mlp_bias=False, tie_word_embeddings=False, dtype="float32",
    eagle_aux_hidden_state_layer_ids=[2, 4, 5],
)  # fmt: skip
HEADS, EACH = CONFIG["num_attention_heads"], CONFIG["head_dim"]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the head to")
    parser.add_argument("--text", type=Path, help="text to use instead of Debian's, as train_tiny_kjv.py takes it")
    parser.add_argument("--target", type=Path, default=Path(__file__).parent / "tiny-kjv", help="model to guess for")
    parser.add_argument("--epochs", type=float, default=4, help="passes over the training text (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help=f"sequences of {CONTEXT} tokens per step (%(default)s)")
    parser.add_argument("--ahead", type=int, default=4, help="tokens to guess one after the other (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=500, help="steps between evaluations (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    return parser.parse_args()


def rotated(x, positions):
    """Turn x [b, heads, n, d] by positions [n], as LLaMA does."""
    rates = CONFIG["rope_theta"] ** -(torch.arange(0, EACH, 2) / EACH)
    angles = positions[:, None] * rates
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Layer(nn.Module):
    """The head's layer, with the names of published checkpoints."""

    def __init__(self, h, inner):
        super().__init__()

        def linear(outputs, inputs):
            return nn.Linear(inputs, outputs, bias=False)

        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (nn.RMSNorm(h) for _ in range(3))
        self.self_attn = nn.ModuleDict({f"{part}_proj": linear(HEADS * EACH, 2 * h) for part in "qkv"})
        self.self_attn["o_proj"] = linear(h, HEADS * EACH)
        self.mlp = nn.ModuleDict(dict(gate_proj=linear(inner, h), up_proj=linear(inner, h), down_proj=linear(h, inner)))

    def forward(self, embedded, features, number, past):
        """Guess a token further on, from the features of the guess before. `past` are keys and values of all guesses.

        A row attends to the first rows of those before it, which are the target's, and to what was guessed since.
        """
        x = torch.cat([norm(self.input_layernorm, embedded), norm(self.hidden_norm, features)], -1)
        b, n, _ = x.shape
        q, k, v = (self.self_attn[f"{part}_proj"](x).view(b, n, HEADS, EACH).transpose(1, 2) for part in "qkv")
        positions = torch.arange(n) + number
        q, k = rotated(q, positions), rotated(k, positions)
        past = [*past, (k, v)]
        if number == 0:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            first, first_values = past[0]
            scores = (q @ first.transpose(2, 3)).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            own = [(q * key).sum(-1, keepdim=True) for key, _ in past[1:]]
            weights = torch.cat([scores, *own], -1).mul(EACH**-0.5).softmax(-1)
            y = weights[..., :n] @ first_values
            y = y + sum(weights[..., n + i, None] * value for i, (_, value) in enumerate(past[1:]))
        x = features + self.self_attn["o_proj"](y.transpose(1, 2).reshape(b, n, -1))
        y = norm(self.post_attention_layernorm, x)
        mlp = self.mlp
        return x + mlp["down_proj"](silu(mlp["gate_proj"](y)) * mlp["up_proj"](y)), past


def norm(of, x):
    return rms_norm(x, x.shape[-1:], of.weight, CONFIG["rms_norm_eps"])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        h, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.fc = nn.Linear(3 * h, h, bias=False)
        self.midlayer = Layer(h, inner)
        self.norm = nn.RMSNorm(h)
        self.lm_head = nn.Linear(h, CONFIG["draft_vocab_size"], bias=False)


def of_target(target, tokens):
    """Return the target's embeddings of tokens, its hidden states before some layers, and its log-probabilities."""
    with torch.no_grad():
        found = target(tokens, use_cache=False, output_hidden_states=True)
        hidden = [found.hidden_states[layer] for layer in CONFIG["eagle_aux_hidden_state_layer_ids"]]
        return target.transformer.wte(tokens), torch.cat(hidden, -1), found.logits.float().log_softmax(-1)


def guesses(head, target, tokens, ahead):
    """Yield for each guess the head's logits, and the target's log-probabilities of the same tokens, [b, ·, vocab]."""
    embedded, hidden, wanted = of_target(target, tokens)
    count, past, features = tokens.shape[1] - ahead, [], None
    for number in range(ahead):
        features = head.fc(hidden[:, :count]) if number == 0 else features
        after = embedded[:, number + 1 : number + 1 + count]
        features, past = head.midlayer(after, features, number, past)
        yield head.lm_head(norm(head.norm, features)), wanted[:, number + 1 : number + 1 + count]


@torch.no_grad()
def right(head, target, stream, ahead):
    """Return how often the head's likeliest token is the target's, of each guess, after the text itself."""
    same, count = torch.zeros(ahead), 0
    for start in range(0, len(stream) - CONTEXT, CONTEXT):
        found = guesses(head, target, stream[None, start : start + CONTEXT], ahead)
        pairs = [(logits.argmax(-1) == wanted.argmax(-1)) for logits, wanted in found]
        for number in range(ahead):
            same[number] += torch.stack(pairs[: number + 1]).all(0).sum()
        count += pairs[0].numel()
    return [round(share, 3) for share in (same / max(count, 1)).tolist()]


def save(head, out):
    weights = {name: weight.detach().half().contiguous() for name, weight in head.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata=dict(format="pt"))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(args.target).eval(),
        AutoTokenizer.from_pretrained(args.target),
    )
    for block in target.transformer.h:
        block.mlp.act = nn.GELU(approximate="tanh")  # the same function as gelu_new, in one faster kernel
    chapters = [END_OF_TEXT + text for text in read_chapters(args.text)]
    held_out = token_stream(tokenizer, "".join(chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]))
    stream = token_stream(tokenizer, "".join(text for n, text in enumerate(chapters, 1) if n % HELD_OUT_EVERY))
    head = Head()
    nn.init.normal_(head.lm_head.weight, std=0.05)
    steps = max(1, round(args.epochs * len(stream) / (args.batch * CONTEXT)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, min(200, steps // 10 + 1), steps)
    count = sum(weight.numel() for weight in head.parameters())
    print(f"{len(stream)} tokens to train on, {len(held_out)} held out; {count} parameters; {steps} steps", flush=True)
    started = time.monotonic()
    for step, tokens in enumerate(training_batches(stream, args.batch, steps), 1):
        losses = [
            cross_entropy(logits.flatten(0, 1), wanted.exp().flatten(0, 1)) * 0.8**number
            for number, (logits, wanted) in enumerate(guesses(head, target, tokens[:, :CONTEXT], args.ahead))
        ]
        sum(losses).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            speed = step * args.batch * CONTEXT / (time.monotonic() - started)
            print(f"step {step}/{steps}  loss {losses[0].item():.3f}  {speed:.0f} tokens/s", flush=True)
        if step % args.eval_every == 0 or step == steps:
            shares = right(head, target, held_out, args.ahead)
            print(f"step {step}/{steps}  right up to each guess: {shares}", flush=True)
            save(head, args.out)
    print(
        f"trained for {(time.monotonic() - started) / 60:.1f} minutes; {math.fsum(shares):.2f} tokens right on average"
    )


if __name__ == "__main__":
    main()
